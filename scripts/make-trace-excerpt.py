#!/usr/bin/env python3
"""Cuts the first requests out of the public Mooncake conversation trace, for tests.

usage: make-trace-excerpt.py TRACE [OUTPUT] [COUNT]

TRACE is conversation_trace.jsonl, plain or gzipped, from https://github.com/kvcache-ai/Mooncake
(FAST25-release/traces). Lines are copied unchanged. The output is the same for the same input: no time stamp and no
file name go into the gzip header.
"""

import gzip
import json
import sys
from pathlib import Path

FIELDS = {"timestamp", "input_length", "output_length", "hash_ids"}


def main() -> None:
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    source = Path(sys.argv[1])
    default = Path(__file__).resolve().parent.parent / "tests/data/mooncake-first-500.jsonl.gz"
    output = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 500

    opened = gzip.open(source, "rb") if source.suffix == ".gz" else source.open("rb")
    with opened as trace:
        lines = [line for line, _ in zip(trace, range(count))]
    if len(lines) < count:
        sys.exit(f"{source} has only {len(lines)} requests")
    for number, line in enumerate(lines, 1):
        if set(json.loads(line)) != FIELDS:
            sys.exit(f"{source}:{number}: not a row of the Mooncake trace")
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.writelines(lines)
    print(f"{output}: {count} requests, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
