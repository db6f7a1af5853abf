//! Usage is found in every framing that an event stream may have, and the client's bytes stay what they were.

use bytes::Bytes;
use tandem_sim::Fault;

use super::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}"#;

/// The counts in every stream below.
const PROMPT: f64 = 11.0;
const COMPLETION: f64 = 13.0;

const EVENTS: [&str; 4] = [
    r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
    r#"{"choices":[{"delta":{"content":"\"usage\":{\"prompt_tokens\":99} é"},"finish_reason":"stop"}]}"#,
    r#"{"choices":[],"usage":{"prompt_tokens":11,"total_tokens":24,"completion_tokens":13}}"#,
    "[DONE]",
];

/// The events, each put into words by `frame`.
fn framed(frame: impl Fn(&str) -> String) -> String {
    EVENTS.map(frame).concat()
}

/// Streams that mean the same.
fn framings() -> Vec<(&'static str, String)> {
    let plain = framed(|data| format!("data: {data}\n\n"));
    vec![
        ("plain", plain.clone()),
        ("no space", framed(|data| format!("data:{data}\n\n"))),
        ("crlf", framed(|data| format!("data: {data}\r\n\r\n"))),
        ("cr", framed(|data| format!("data: {data}\r\r"))),
        ("mixed line ends", framed(|data| format!("data: {data}\r\n\n"))),
        ("more blank lines", framed(|data| format!("\n\ndata: {data}\n\n\n\n"))),
        ("comments", framed(|data| format!(": ping\n\n:\ndata: {data}\n: pong\n\n"))),
        ("event and id lines", framed(|data| format!("event: message\nid: 7\nretry: 10\ndata: {data}\n\n"))),
        ("fields after the data", framed(|data| format!("data: {data}\nevent: chunk\nunknown: x\nlonely\n\n"))),
        ("byte order mark", format!("\u{feff}{plain}")),
        ("data in two lines", framed(|data| format!("data: {}\n\n", data.replacen(",\"", "\ndata: ,\"", 1)))),
        ("an empty event", framed(|data| format!("data\n\ndata:\n\ndata: {data}\n\n"))),
        ("no done", plain.replace("data: [DONE]\n\n", "")),
        ("no end", plain.trim_end().to_owned()),
        ("nothing after the usage", plain.replace("\n\ndata: [DONE]\n\n", "\n\n").trim_end().to_owned() + "\n\n"),
        ("usage with the last token", plain.replace(r#"{"choices":[],"#, r#"{"choices":[{"delta":{"content":"."}}],"#)),
        ("spaced json", plain.replace(r#""usage":{"#, r#""usage" : { "#).replace(r#""prompt_tokens":"#, r#""prompt_tokens" : "#)),
        (
            "continuous usage",
            plain.replace(
                r#""content":""}}]"#,
                r#""content":""}}],"usage":{"prompt_tokens":11,"total_tokens":12,"completion_tokens":1}"#,
            ),
        ),
        (
            "field by field",
            plain
                .replace(r#""content":""}}]"#, r#""content":""}}],"usage":{"prompt_tokens":11}"#)
                .replace(r#"{"prompt_tokens":11,"total_tokens":24,"completion_tokens":13}"#, r#"{"completion_tokens":13}"#),
        ),
        (
            "field by field, the answer's first",
            plain
                .replace(r#""content":""}}]"#, r#""content":""}}],"usage":{"completion_tokens":13}"#)
                .replace(r#"{"prompt_tokens":11,"total_tokens":24,"completion_tokens":13}"#, r#"{"prompt_tokens":11}"#),
        ),
        (
            "the names of the messages api",
            "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":11,\"output_tokens\":1}}}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":13}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n".to_owned(),
        ),
    ]
}

/// Ways to write a stream: at once, event by event, and in pieces that fall differently into every line.
fn writes(stream: &str) -> Vec<Vec<Bytes>> {
    let bytes = stream.as_bytes();
    let pieces = |size: usize| bytes.chunks(size).map(Bytes::copy_from_slice).collect::<Vec<_>>();
    // The usage event and the end marker in different writes, and the line end between them in a third.
    let cut = |at: usize| vec![Bytes::copy_from_slice(&bytes[..at]), Bytes::copy_from_slice(&bytes[at..])];
    let end = bytes.len();
    vec![pieces(end), pieces(61), pieces(17), cut(end - 1), cut(end - 15), cut(end - 40)]
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r14_usage_in_every_framing() {
    let sandbox = Sandbox::start(SandboxOptions { pairs: 0, combined: 1, ..SandboxOptions::default() }).await;
    let mut requests = 0.0;
    for path in sandbox.paths() {
        for (name, stream) in framings() {
            for writes in writes(&stream) {
                sandbox.combined[0].script(Fault::on("/v1/").stream(writes));
                let answer = Call::post(&path, PATH, BODY).send().await.body().await;
                assert!(answer.complete && answer.bytes == stream, "{name}: {answer:?}");
                requests += 1.0;
            }
            // After each framing, so that a failure says which.
            println!("{name}");
            wait_total(&sandbox.fleet, "gateway_output_tokens_total", &[("model", "m")], COMPLETION * requests).await;
            wait_total(&sandbox.fleet, "gateway_input_tokens_total", &[("model", "m")], PROMPT * requests).await;
        }
    }
    let counted = [("has_usage", "true"), ("model", "m")];
    assert_eq!(total(&sandbox.fleet, "gateway_requests_with_usage_total", &counted).await, requests);
    sandbox.close().await;
}

/// The real thing: a pair's stream, whose usage comes in an event of its own, and whose whole answer has it inside.
#[tokio::test(flavor = "multi_thread")]
async fn r13_usage_of_a_pair_is_that_of_the_decode_leg() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let mut expected = 0.0;
    for path in sandbox.paths() {
        for members in [
            r#""stream":false"#,
            r#""stream":true,"stream_options":{"include_usage":true}"#,
            r#""stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}"#,
        ] {
            for split in [vec![], vec![70]] {
                sandbox.decode[0].script(Fault::on("/v1/").split(&split));
                let body = format!(r#"{{"model":"m","prompt":"abcdefgh","max_tokens":21,{members}}}"#);
                let answer = Call::post(&path, "/v1/completions", body).send().await;
                assert!(answer.body().await.complete);
                expected += 1.0;
            }
        }
    }
    // Nothing of the prefill leg's single token is counted.
    wait_total(&sandbox.fleet, "gateway_output_tokens_total", &[("model", "m")], 21.0 * expected).await;
    wait_total(&sandbox.fleet, "gateway_input_tokens_total", &[("model", "m")], 2.0 * expected).await;
    sandbox.close().await;
}
