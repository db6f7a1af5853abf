#!/usr/bin/env bash
# Runs the tests again and again, to find those that fail by chance: `scripts/repeat.sh RUNS [SIDE_BY_SIDE] [ARGUMENTS]`.
#
# Builds once. Each run is a run of `scripts/test.sh` with the arguments; SIDE_BY_SIDE of them (1) go on at a time, which is
# what a busy machine is like. Ends with 1 when a run failed, and says where its output is.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:?usage: scripts/repeat.sh RUNS [SIDE_BY_SIDE] [ARGUMENTS]}
side_by_side=${2:-1}
shift $(($# > 1 ? 2 : 1))
logs=target/repeat
rm -rf "$logs"
mkdir -p "$logs"

cargo test --workspace --no-run

one() {
    local run=$1
    shift
    if scripts/test.sh "$@" >"$logs/$run.log" 2>&1; then
        echo "run $run: passed"
    else
        echo "run $run: FAILED, see $logs/$run.log: $(grep -oE '^test .* \.\.\. FAILED' "$logs/$run.log" | cut -d' ' -f2 | tr '\n' ' ')"
        touch "$logs/failed"
    fi
}
export -f one
export logs

seq "$runs" | xargs -P "$side_by_side" -I{} bash -c 'one "$@"' one {} "$@"
[ ! -e "$logs/failed" ]
