//! Reading traces: good ones, and each way to be bad.

use std::io::{Cursor, Write as _};
use std::time::Duration;

use super::*;
use crate::replay::trace::{ReadOptions, read, read_file};

const EXCERPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mooncake-first-500.jsonl.gz");

fn parse(text: &str, options: ReadOptions) -> Result<Trace, String> {
    read(Cursor::new(text), options).map_err(|error| error.to_string())
}

fn row(timestamp: &str, input: u64, ids: &str) -> String {
    format!("{{\"timestamp\": {timestamp}, \"input_length\": {input}, \"output_length\": 7, \"hash_ids\": [{ids}]}}\n")
}

#[test]
fn mooncake() {
    let text = row("5000", 1024, "1, 2") + &row("5000.5", 1025, "1,2,3") + "\n" + &row("4000", 511, "9");
    let trace = parse(&text, ReadOptions::default()).unwrap();
    assert_eq!(trace.format, Format::Mooncake);
    let at: Vec<_> = trace.requests.iter().map(|request| request.at).collect();
    assert_eq!(at, [0, 1_000_000, 1_000_500].map(Duration::from_micros), "ordered, from the first");
    let blocks: Vec<_> = trace.requests.iter().map(|request| request.hashes.len()).collect();
    assert_eq!(blocks, [0, 2, 2], "full ones");
    assert_eq!(trace.requests[1].hashes, trace.requests[2].hashes);
    assert_eq!(trace.span(), Duration::from_micros(1_000_500));
}

#[test]
fn equal_ids_after_different_ones_are_different_prefixes() {
    let text = row("0", 1024, "1,2") + &row("0", 1024, "3,2") + &row("0", 1024, "1,3");
    let trace = parse(&text, ReadOptions::default()).unwrap();
    let [a, b, c] = [0, 1, 2].map(|index| &trace.requests[index].hashes);
    assert_ne!(a[1], b[1]);
    assert_eq!(a[0], c[0]);
    assert_ne!(a[1], c[1]);
}

#[test]
fn azure() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n\
                2023-11-16 18:15:47.1805900,0,0\r\n2023-11-16 18:15:46.9305900,3,4,more";
    let trace = parse(text, ReadOptions::default()).unwrap();
    let rows: Vec<_> = trace.requests.iter().map(|one| (one.at.as_millis(), one.prompt, one.output)).collect();
    assert_eq!((trace.format, rows), (Format::Azure, vec![(0, 374, 44), (250, 3, 4), (500, 1, 1)]));
    let twice = parse(text, ReadOptions { speed: 2.0, ..ReadOptions::default() }).unwrap();
    assert_eq!(twice.span(), Duration::from_millis(250));
    let one = parse(text, ReadOptions { limit: Some(1), ..ReadOptions::default() }).unwrap();
    assert_eq!(one.requests.len(), 1);
}

#[test]
fn what_makes_no_sense_is_named_by_its_line() {
    let good = row("0", 10, "1");
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    for (text, complaint) in [
        (String::new(), "there is no request in it"),
        ("\n\n".to_owned(), "there is no request in it"),
        (azure.to_owned(), "there is no request in it"),
        ("hello\n".to_owned(), "line 1: neither a JSON object nor"),
        (good.clone() + "{\"timestamp\": 1, \"input_le", "line 2: EOF while parsing a string"),
        (good.clone() + "{}\n", "line 2: missing field `timestamp`"),
        (good.clone() + "\n[1]\n", "line 3: "),
        (row("\"0\"", 10, "1"), "line 1: invalid type: string \"0\", expected f64"),
        (row("-1", 10, "1"), "line 1: timestamp is not"),
        (row("1e300", 10, "1"), "line 1: timestamp is not"),
        (row("0", 10, "1").replace("10", "-10"), "line 1: invalid value: integer `-10`"),
        (row("0", 10, "1").replace("[1]", "1"), "line 1: invalid type: integer `1`, expected a sequence"),
        (row("0", 513, "1"), "line 1: 1 hash_ids for 513 tokens in blocks of 512"),
        (row("0", 512, "1,2"), "line 1: 2 hash_ids for 512 tokens"),
        (azure.to_owned() + "2023-11-16 18:15:46.68,374", "line 2: no generated tokens"),
        (azure.to_owned() + "2023-11-16 18:15:46.68,-1,2", "line 2: \"-1\" is not a number of tokens"),
        (azure.to_owned() + "2023-11-16,1,2", "line 2: \"2023-11-16\" is not a time"),
        (azure.to_owned() + "2023-11-16 18:15:46,16777217,2", "line 2: 16777217 tokens in one request"),
        (azure.to_owned() + &good, "line 2: "),
        ("x".repeat(2 << 20), "line 1: longer than"),
    ] {
        let error = parse(&text, ReadOptions::default()).unwrap_err();
        assert!(error.starts_with(complaint), "{text:.80}: {error}");
    }
    let forced = parse(&good, ReadOptions { format: Some(Format::Azure), ..ReadOptions::default() }).unwrap_err();
    assert!(forced.starts_with("line 1: "), "{forced}");
    let bytes = read(Cursor::new(b"{\xff\n".as_slice()), ReadOptions::default()).unwrap_err().to_string();
    assert!(bytes.starts_with("line 1: cannot read it"), "{bytes}");
}

#[test]
fn gzip_is_seen_by_content_and_a_cut_file_is_an_error() {
    let whole = read_file(EXCERPT.as_ref(), ReadOptions::default()).unwrap();
    assert_eq!((whole.requests.len(), whole.format), (500, Format::Mooncake));
    let tokens: u64 = whole.requests.iter().map(|request| request.prompt).sum();
    assert_eq!(tokens, 7_124_855);
    let bytes = std::fs::read(EXCERPT).unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes[..bytes.len() / 2]).unwrap();
    let error = read_file(file.path(), ReadOptions::default()).unwrap_err();
    assert!(matches!(error, TraceError::Read { line, .. } if line > 1), "{error}");
    let few = read_file(file.path(), ReadOptions { limit: Some(10), ..ReadOptions::default() }).unwrap();
    assert_eq!(few.requests, whole.requests[..10], "what is not needed is not read");
    assert!(matches!(read_file("/does/not/exist".as_ref(), ReadOptions::default()), Err(TraceError::Open(_))));
}
