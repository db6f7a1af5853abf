//! Answers on their way back: compressed ones, and the same bytes with and without a gateway.

use bytes::Bytes;
use serde_json::{Value, json};
use tandem_sim::Fault;

use super::wait_total;
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::{Call, base};

const CHAT: &str = "/v1/chat/completions";

/// A gzip stream of `{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}`, stored without compression.
fn gzip() -> Bytes {
    let text = br#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}"#;
    let length = u16::try_from(text.len()).expect("short").to_le_bytes();
    let inverse = (!u16::from_le_bytes(length)).to_le_bytes();
    let crc = !text.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & 0_u32.wrapping_sub(crc & 1)))
    });
    let size = u32::from(u16::from_le_bytes(length)).to_le_bytes();
    let parts: [&[u8]; 8] =
        [b"\x1f\x8b\x08\0\0\0\0\0\0\xff", b"\x01", &length, &inverse, text, &crc.to_le_bytes(), &size, b""];
    parts.concat().into()
}

#[tokio::test(flavor = "multi_thread")]
async fn r16_compressed_answers_pass_untouched() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    // A real gzip body, and bytes that only claim to be something: nobody looks inside.
    let every_byte: Vec<u8> = (0..=255).chain(*b"data: [DONE]\n\n").collect();
    let bodies =
        [("gzip", gzip()), ("br", every_byte.clone().into()), ("zstd", every_byte.into()), ("GZIP, br", gzip())];
    let mut answered = 0_u32;
    for path in sandbox.paths() {
        for (encoding, body) in &bodies {
            for (stream, content_type) in [(false, "application/json"), (true, "text/event-stream; charset=utf-8")] {
                for status in [200, 503] {
                    sandbox.clear();
                    // An engine that flushes its compressor after each event writes many small pieces.
                    let writes: Vec<Bytes> =
                        if stream { body.chunks(7).map(Bytes::copy_from_slice).collect() } else { vec![body.clone()] };
                    let headers =
                        [("content-type", content_type), ("content-encoding", encoding), ("vary", "Accept-Encoding")];
                    sandbox.decode[0].script(Fault::on("/v1/").answer_raw(status, &headers, writes, stream));
                    let sent = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream});
                    let call = Call::post(&path, CHAT, sent.to_string());
                    let answer = call.header("accept-encoding", "gzip, br, zstd").send().await;
                    assert_eq!(answer.status, status);
                    assert_eq!(answer.header("content-encoding"), *encoding);
                    assert_eq!(answer.header("content-type"), content_type);
                    // Envoy turns answers that it shows to a processor into chunked ones.
                    if let Some(length) = answer.headers.get("content-length") {
                        assert_eq!(length.to_str().unwrap(), body.len().to_string());
                    }
                    let answer = answer.body().await;
                    assert!(answer.complete && answer.bytes == *body, "{encoding} {stream} {status}");
                    for engine in sandbox.engines() {
                        assert_eq!(only(engine).header("accept-encoding"), None);
                    }
                    answered += u32::from(status == 200);
                }
            }
        }
        // The prefill answer has to be read. One that cannot be is a clear failure, not a corrupt decode body.
        sandbox.clear();
        let headers = [("content-type", "application/json"), ("content-encoding", "gzip")];
        sandbox.prefill[0].script(Fault::on("/v1/").answer_raw(200, &headers, vec![gzip()], false));
        let sent = r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#;
        assert_eq!(Call::post(&path, CHAT, sent).send().await.status, 502);
        assert!(sandbox.decode[0].records().is_empty());
    }
    // Only the accounting goes without.
    let answered = f64::from(answered);
    wait_total(&sandbox.fleet, "gateway_requests_with_usage_total", &[("has_usage", "false")], answered).await;
    wait_total(&sandbox.fleet, "gateway_request_model_success_total", &[], answered).await;
    sandbox.close().await;
}

/// An answer without what differs from one request to the next: the id (whole, or with the number of a choice) and
/// the second in which it was made.
fn normalised(body: &[u8]) -> String {
    let text = String::from_utf8(body.to_vec()).expect("UTF-8");
    let json = text.strip_prefix("data: ").map_or(text.as_str(), |rest| rest.split('\n').next().unwrap_or_default());
    let first: Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {text}"));
    let (id, created) = (first["id"].as_str().expect("an id"), first["created"].as_u64().expect("a time"));
    text.replace(id, "ID").replace(&format!("\"created\":{created}"), "\"created\":T")
}

fn sorted(events: &str) -> String {
    let mut events: Vec<&str> = events.split_inclusive("\n\n").collect();
    events.sort_unstable();
    events.concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn r18_the_client_sees_what_the_engine_says() {
    let sandbox = Sandbox::start(SandboxOptions {
        combined: 1,
        engine: |mut config| {
            // A second call finds the prompt in the cache, and these details say so.
            config.prompt_tokens_details = false;
            config
        },
        ..SandboxOptions::default()
    })
    .await;
    let decode = base(sandbox.decode[0].address());
    let combined = base(sandbox.combined[0].address());
    let options = [
        "",
        r#","stream_options":{"include_usage":true}"#,
        r#","stream_options":{"include_usage":false}"#,
        r#","stream_options":{"include_usage":true,"continuous_usage_stats":true}"#,
        r#","stream_options":null"#,
    ];
    let users = ["", r#","user":"u1""#];
    for path in sandbox.paths() {
        for (stream, options) in [("false", ""), ("null", "")].into_iter().chain(options.map(|o| ("true", o))) {
            for user in users {
                let members = format!(r#""model":"m","max_tokens":6,"stream":{stream}{options}{user}"#);
                let chat = format!(r#"{{{members},"messages":[{{"role":"user","content":"tell me"}}]}}"#);
                let text = format!(r#"{{{members},"prompt":"tell me"}}"#);
                let several = format!(r#"{{{members},"prompt":["tell me","more"]}}"#);
                for (api, body, engine) in [
                    (CHAT, &chat, &decode),
                    ("/v1/completions", &text, &decode),
                    ("/v1/completions", &several, &combined),
                ] {
                    let direct = Call::post(engine, api, body.clone()).send().await;
                    let answer = Call::post(&path, api, body.clone()).header("x-user", "u1").send().await;
                    assert_eq!(answer.status, 200, "{body}");
                    assert_eq!(answer.header("content-type"), direct.header("content-type"));
                    let (answer, direct) = (answer.body().await, direct.body().await);
                    assert!(answer.complete && direct.complete);
                    let (mut answer, mut direct) = (normalised(&answer.bytes), normalised(&direct.bytes));
                    if *body == several {
                        // The engine writes the events of its choices as they come.
                        (answer, direct) = (sorted(&answer), sorted(&direct));
                    }
                    assert_eq!(answer, direct, "{body}");
                }
            }
        }
    }
    sandbox.close().await;
}
