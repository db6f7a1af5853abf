//! Tests of the watcher as a whole.

use proptest::prelude::*;

use super::lines::MAX_EVENT_BYTES;
use super::whole::MAX_DOCUMENT_BYTES;
use super::{AnswerKind, AnswerWatch, Api, Usage};

/// What a watcher found: usage, end marker, error, progress.
type Found = (Option<Usage>, bool, bool, u64);

fn watch<'a>(kind: AnswerKind, chunks: impl IntoIterator<Item = &'a [u8]>) -> Found {
    let mut watch = AnswerWatch::new(kind, Api::OpenAi);
    chunks.into_iter().for_each(|chunk| watch.feed(chunk));
    watch.finish();
    (watch.usage(), watch.done(), watch.error_event(), watch.progress())
}

fn stream(text: &str) -> Found {
    watch(AnswerKind::Stream, [text.as_bytes()])
}

#[expect(clippy::unnecessary_wraps, reason = "compared with what a watcher returns")]
fn usage(prompt_tokens: u64, completion_tokens: u64) -> Option<Usage> {
    Some(Usage { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens })
}

/// A chat stream with usage: role, a two-byte and a four-byte character, a trap in the text, end, usage.
const EVENTS: [&str; 5] = [
    r#"{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"usage":null}"#,
    r#"{"id":"c","choices":[{"index":0,"delta":{"content":"é😀"}}],"usage":null}"#,
    r#"{"id":"c","choices":[{"index":0,"delta":{"content":"data: [DONE] \"usage\":{\"prompt_tokens\":9}"}}],"usage":null}"#,
    r#"{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":null}"#,
    r#"{"id":"c","choices":[],"usage":{"prompt_tokens":13,"total_tokens":19,"completion_tokens":6}}"#,
];

/// The same stream in different clothes: (before the data, after it, around the stream).
fn framings() -> Vec<String> {
    let shapes = [
        ("data: ", "\n\n"),
        ("data:", "\n\n"),
        ("data: ", "\r\n\r\n"),
        ("data:", "\r\n\r\n"),
        ("data: ", "\r\r"),
        ("data:", "\r\r"),
        ("data: ", "\n\r\n"),
        ("data: ", "\r\n\n"),
        ("data: ", "\n"),
        ("data: ", "\r\n"),
        ("data: ", "\n\n\n\n"),
        (": keep-alive\n\ndata: ", "\n\n"),
        (": data: [DONE]\n:\ndata: ", "\n\n"),
        ("event: chunk\ndata: ", "\n\n"),
        ("event:chunk\r\ndata:", "\r\n\r\n"),
        ("id: 1\nretry: 5\ndata: ", "\n\n"),
        ("data\ndata: ", "\n\n"),
        ("data: ", "\nid: 7\n\n"),
        ("data: ", "\n: comment\n\n"),
        ("dataset: x\nusage\ndata: ", "\n\n"),
    ];
    let framed = |before: &str, after: &str| {
        EVENTS.iter().chain(&["[DONE]"]).flat_map(|data| [before, data, after]).collect::<String>()
    };
    let mut streams: Vec<String> = shapes.iter().map(|(before, after)| framed(before, after)).collect();
    streams.push(format!("\u{feff}{}", streams[0]));
    // JSON over several data lines.
    streams.push(streams[0].replace(",\"usage\"", "\ndata: ,\ndata:   \"usage\""));
    // The end of the body cuts the last line ends off.
    streams.push(streams[0].trim_end().to_owned());
    streams
}

#[test]
fn r14_twenty_framings_give_the_same_findings() {
    let framings = framings();
    assert!(framings.len() >= 20);
    for framing in framings {
        assert_eq!(stream(&framing), (usage(13, 6), true, false, 5), "{framing}");
    }
}

#[test]
fn r11_r13_usage_split_at_every_offset() {
    for framing in framings() {
        let bytes = framing.as_bytes();
        for at in 0..=bytes.len() {
            let (left, right) = bytes.split_at(at);
            let found = watch(AnswerKind::Stream, [left, right]);
            assert_eq!(found, (usage(13, 6), true, false, 5), "{at} in {framing}");
        }
        assert_eq!(watch(AnswerKind::Stream, bytes.chunks(1)), (usage(13, 6), true, false, 5));
    }
}

#[test]
fn usage_and_end_show_as_soon_as_their_event_is_whole() {
    let mut watch = AnswerWatch::new(AnswerKind::Stream, Api::OpenAi);
    watch.feed(b": hello\n\n");
    assert_eq!((watch.progress(), watch.bytes()), (0, 9));
    watch.feed(b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n");
    assert_eq!((watch.usage(), watch.progress()), (None, 0));
    watch.feed(b"\n");
    assert_eq!((watch.usage(), watch.progress(), watch.done()), (usage(1, 2), 1, false));
    watch.feed(b"data: [DONE]");
    assert!(!watch.done());
    watch.feed(b"\n");
    assert!(watch.done());
    assert_eq!(watch.progress(), 1);
}

#[test]
fn reference_13_17_the_last_of_continuous_usage_counts() {
    let event = |n: u64| {
        let usage = format!("{{\"prompt_tokens\":7,\"total_tokens\":{},\"completion_tokens\":{n}}}", 7 + n);
        ["data: {\"choices\":[{}],\"usage\":".to_owned(), usage, "}\n\n".to_owned()]
    };
    let text: String = (0..50).flat_map(event).collect();
    assert_eq!(stream(&text), (usage(7, 49), false, false, 50));
}

#[test]
fn other_apis_report_usage_and_end() {
    let anthropic = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"role\":\"assistant\",\"usage\":{\"input_tokens\":25,\"output_tokens\":1}}}\n\n\
        event: ping\ndata: {\"type\":\"ping\"}\n\n\
        event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"message_stop\"}}\n\n\
        event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":15}}\n\n";
    assert_eq!(stream(anthropic), (usage(25, 15), false, false, 3));
    let stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    assert_eq!(stream(&(anthropic.to_owned() + stop)), (usage(25, 15), true, false, 4));
    assert_eq!(stream("data: {\"type\":\"message_stop\"}\n\n"), (None, true, false, 1));
    assert_eq!(stream("data: {\"type\":\"ping\"}\n\n"), (None, false, false, 0));

    let responses = |kind: &str, rest: &str| {
        stream(&format!(
            "data: {{\"response\":{{\"usage\":{{\"input_tokens\":3,\"output_tokens\":4,\"total_tokens\":7}},{rest}}},\"type\":\"{kind}\"}}\n\n"
        ))
    };
    assert_eq!(responses("response.completed", "\"error\":null"), (usage(3, 4), true, false, 1));
    assert_eq!(responses("response.incomplete", "\"error\":null"), (usage(3, 4), true, false, 1));
    assert_eq!(responses("response.failed", "\"error\":{\"code\":\"x\"}"), (usage(3, 4), true, true, 1));
    assert_eq!(
        stream("event: response.created\ndata: {\"response\":{\"usage\":null,\"error\":null}}\n\n"),
        (None, false, false, 1)
    );
}

/// SGLang's `/generate` has no `usage`: the counts are in `meta_info`, and grow with each event.
#[test]
fn the_native_api_of_sglang_reports_its_counts() {
    let event = |tokens: u64, finish: &str| {
        format!(
            r#"{{"text":"\"usage\"","meta_info":{{"finish_reason":{finish},"prompt_tokens":5,"completion_tokens":{tokens}}}}}"#
        )
    };
    let [first, last] = [event(1, "null"), event(2, r#"{"type":"length","length":2}"#)];
    assert_eq!(stream(&format!("data: {first}\n\ndata: {last}\n\ndata: [DONE]\n\n")), (usage(5, 2), true, false, 2));
    // Its client left before the end.
    assert_eq!(stream(&format!("data: {first}\n\n")), (None, false, false, 1));
    let whole = |text: &str| watch(AnswerKind::Whole, [text.as_bytes()]).0;
    assert_eq!(whole(&last), usage(5, 2));
    let long = format!(r#"{{"text":"{}",{}"#, "x".repeat(3 << 20), last.split_once(',').unwrap().1);
    assert_eq!(whole(&long), usage(5, 2));
}

#[test]
fn errors_in_a_stream_are_seen() {
    for (data, expected) in [
        (
            r#"{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}"#,
            true,
        ),
        (r#"{"error":{"object":"error","message":"m","type":"t","param":null,"code":500}}"#, true),
        (r#"{"error":"text"}"#, true),
        (r#"{"object":"error","message":"m"}"#, true),
        (r#"{"type":"error","message":"m"}"#, true),
        (r#"{"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}"#, true),
        (r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"m"}}}"#, true),
        (r#"{"error":null,"choices":[{"finish_reason":"stop"}]}"#, false),
        (r#"{"choices":[{"delta":{"content":"error"},"finish_reason":null}]}"#, false),
        (r#"{"choices":[{"delta":{"content":"abort"},"finish_reason":"stop"}]}"#, false),
        (r#"{"choices":[{"delta":{"content":"\"error\":{}"}}]}"#, false),
        (r#"{"error":{"cut"#, false),
        ("plain text with \"error\"", false),
    ] {
        let found = stream(&format!("data: {data}\n\ndata: [DONE]\n\n"));
        assert_eq!((found.1, found.2), (true, expected), "{data}");
    }
    assert_eq!(stream("event: error\ndata: overloaded\n\n"), (None, false, true, 1));
}

#[test]
fn an_end_marker_is_a_whole_data_line() {
    for (text, expected) in [
        ("data: [DONE]\n\n", true),
        ("data:[DONE]\n", true),
        ("data: [DONE] \r", true),
        ("data: [DONE]", true),
        ("data: x [DONE]\n\n", false),
        ("data: \"[DONE]\"\n\n", false),
        ("[DONE]\n\n", false),
        (": [DONE]\n\n", false),
        ("event: [DONE]\n\n", false),
        (" data: [DONE]\n\n", false),
    ] {
        assert_eq!(stream(text).1, expected, "{text}");
    }
}

#[test]
fn lines_and_events_are_bounded() {
    let around = |length: usize| {
        let pad = "x".repeat(length - "data: {\"pad\":\"\",\"usage\":{\"total_tokens\":1}}".len());
        format!("data: {{\"pad\":\"{pad}\",\"usage\":{{\"total_tokens\":1}}}}\n\n")
    };
    let last = "data: {\"usage\":{\"total_tokens\":2}}\n\n";
    let total = |total_tokens| Some(Usage { total_tokens, ..Usage::default() });
    assert_eq!(stream(&around(MAX_EVENT_BYTES)), (total(1), false, false, 1));
    for text in [around(MAX_EVENT_BYTES + 1), around(MAX_EVENT_BYTES + 1000)] {
        assert_eq!(stream(&text), (None, false, false, 1));
        let both = text + last;
        assert_eq!(stream(&both), (total(2), false, false, 2));
        assert_eq!(watch(AnswerKind::Stream, both.as_bytes().chunks(70_001)), (total(2), false, false, 2));
    }
    // Many short data lines of one event.
    let many = "data: 12345678\n".repeat(MAX_EVENT_BYTES / 9 + 1) + "\n" + last;
    assert_eq!(stream(&many), (total(2), false, false, 2));
    let comment = ":".repeat(3 * MAX_EVENT_BYTES) + "\n" + last;
    assert_eq!(watch(AnswerKind::Stream, comment.as_bytes().chunks(1 << 16)), (total(2), false, false, 1));
}

#[test]
fn whole_documents_give_usage_at_the_end() {
    let body = br#"{"id":"c","choices":[{"message":{"content":"\"usage\":{}"}}],"usage":{"prompt_tokens":13,"total_tokens":19,"completion_tokens":6},"kv_transfer_params":null}"#;
    for at in 0..=body.len() {
        let (left, right) = body.split_at(at);
        let found = watch(AnswerKind::Whole, [left, right]);
        assert_eq!((found.0, found.1, found.2), (usage(13, 6), false, false), "{at}");
    }
    let mut early = AnswerWatch::new(AnswerKind::Whole, Api::OpenAi);
    early.feed(body);
    assert_eq!((early.usage(), early.progress(), early.bytes()), (None, 1, body.len() as u64));
    for (text, expected) in [
        (r#"{"error":{"message":"m"}}"#, (None, false, true, 1)),
        (r#"{"choices":[{"finish_reason":"abort"}],"usage":null}"#, (None, false, true, 1)),
        (r#"{"response":{"usage":{"input_tokens":1,"output_tokens":2}}}"#, (usage(1, 2), false, false, 1)),
        ("[]", (None, false, false, 1)),
        ("<html>", (None, false, false, 1)),
        (r#"{"usage":{"prompt_tokens":1,"#, (None, false, false, 1)),
        ("", (None, false, false, 0)),
    ] {
        assert_eq!(watch(AnswerKind::Whole, [text.as_bytes()]), expected, "{text}");
    }
}

#[test]
fn usage_of_large_documents_is_found_wherever_it_stands() {
    let usage_text =
        r#""usage": {"prompt_tokens":13,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":1}},"#;
    for (before, after) in
        [(0, MAX_DOCUMENT_BYTES), (MAX_DOCUMENT_BYTES, 0), (65_500, 300_000), (65_536, 300_000), (129_000, 999_999)]
    {
        let body = format!("{{\"a\":\"{}\",{usage_text}\"b\":\"{}\"}}", "x".repeat(before), "y".repeat(after));
        assert!(body.len() > MAX_DOCUMENT_BYTES);
        for size in [1 << 30, 65_536, 4093] {
            let found = watch(AnswerKind::Whole, body.as_bytes().chunks(size));
            assert_eq!((found.0, found.2), (usage(13, 6), false), "{before} {after} {size}");
        }
    }
    let abort =
        format!("{{\"a\":\"{}\",\"choices\":[{{\"finish_reason\": \"abort\"}}]}}", "x".repeat(MAX_DOCUMENT_BYTES));
    assert_eq!(watch(AnswerKind::Whole, [abort.as_bytes()]), (None, false, true, 1));
}

#[test]
fn r16_the_headers_decide_what_can_be_read() {
    use AnswerKind::{Opaque, Stream, Whole};
    for (content_type, encoding, requested, expected) in [
        (Some("text/event-stream; charset=utf-8"), None, true, Stream),
        (Some("Text/Event-Stream"), None, false, Stream),
        (Some("application/json"), None, true, Whole),
        (Some("application/json;charset=utf-8"), Some("identity"), false, Whole),
        (Some("application/problem+json"), None, false, Whole),
        (None, None, true, Stream),
        (None, None, false, Whole),
        (Some(""), Some(""), true, Stream),
        (Some("text/event-stream"), Some("gzip"), true, Opaque),
        (Some("application/json"), Some("br"), false, Opaque),
        (Some("application/json"), Some("identity, zstd"), false, Opaque),
        (Some("audio/mpeg"), None, true, Opaque),
        (Some("text/html"), None, false, Opaque),
    ] {
        assert_eq!(AnswerKind::of(content_type, encoding, requested), expected, "{content_type:?} {encoding:?}");
    }
    let found = watch(AnswerKind::Opaque, [&b"data: {\"usage\":{\"total_tokens\":1}}\n\n"[..], b"", b"x"]);
    assert_eq!(found, (None, false, false, 2));
}

/// Bytes that look enough like a stream to reach every branch.
fn stream_like() -> impl Strategy<Value = Vec<u8>> {
    let pieces: Vec<&[u8]> = vec![
        &b"data: "[..],
        b"data:",
        b"data",
        b"event: error",
        b"event: ping",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b": x",
        b"[DONE]",
        b"{\"usage\":{\"prompt_tokens\":3}}",
        b"{\"usage\":",
        b"{\"completion_tokens\":4}}",
        b"{\"error\":{}}",
        b"{\"choices\":[{\"finish_reason\":\"abort\"}]}",
        b"\xef\xbb\xbf",
        b"\xff\xf0\x9f",
        b"{}",
        b" ",
    ];
    let piece = proptest::sample::select(pieces);
    proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

fn cut<'a>(mut bytes: &'a [u8], sizes: &[usize]) -> Vec<&'a [u8]> {
    let mut chunks = Vec::new();
    for size in sizes {
        let (chunk, rest) = bytes.split_at((*size).min(bytes.len()));
        chunks.push(chunk);
        bytes = rest;
    }
    chunks.push(bytes);
    chunks
}

proptest! {
    #[test]
    fn splits_never_matter(
        bytes in prop_oneof![stream_like(), proptest::collection::vec(any::<u8>(), 0..200)],
        sizes in proptest::collection::vec(0_usize..20, 0..40),
    ) {
        let chunks = cut(&bytes, &sizes);
        prop_assert_eq!(watch(AnswerKind::Stream, chunks.clone()), watch(AnswerKind::Stream, [&bytes[..]]));
        let (whole, split) = (watch(AnswerKind::Whole, [&bytes[..]]), watch(AnswerKind::Whole, chunks));
        prop_assert_eq!((whole.0, whole.2), (split.0, split.2));
    }

    #[test]
    fn r14_random_splits_of_every_framing(
        which in 0_usize..23,
        sizes in proptest::collection::vec(0_usize..60, 0..60),
    ) {
        let framings = framings();
        let framing = &framings[which % framings.len()];
        let found = watch(AnswerKind::Stream, cut(framing.as_bytes(), &sizes));
        prop_assert_eq!(found, (usage(13, 6), true, false, 5));
    }
}

#[test]
fn r22_only_events_that_can_tell_something_are_parsed() {
    let token = "data: {\"id\":\"c\",\"choices\":[{\"delta\":{\"content\":\"tok\"},\"finish_reason\":null}],\"usage\":null}\n\n";
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n\n";
    let mut watch = AnswerWatch::new(AnswerKind::Stream, Api::OpenAi);
    for _ in 0..10_000 {
        watch.feed(token.as_bytes());
    }
    assert_eq!((watch.parsed(), watch.progress()), (0, 10_000));
    watch.feed(usage.as_bytes());
    watch.feed(b"data: [DONE]\n\n");
    watch.finish();
    assert_eq!((watch.parsed(), watch.done()), (1, true));
    assert_eq!(watch.usage().map(|usage| usage.total_tokens), Some(3));
}
