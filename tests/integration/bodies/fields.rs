//! The fields that the prefill leg changes, in every combination that a client may send them in.

use serde_json::{Map, Value, json};

use super::members::{assert_decode_leg, assert_prefill_leg};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::{Call, base};

/// The five fields with a value that the engine takes.
fn fields() -> [(&'static str, Value); 5] {
    [
        ("max_tokens", json!(9)),
        ("max_completion_tokens", json!(8)),
        ("stream", json!(true)),
        ("stream_options", json!({"include_usage": true})),
        ("min_tokens", json!(3)),
    ]
}

/// Sends one combination and checks both legs. The client sees what the engine alone would have said: also the 400
/// to `stream_options` without `stream`, which is the client's own mistake.
async fn check(sandbox: &Sandbox, path: &str, api: &str, chosen: Map<String, Value>) {
    let mut body = json!({"model": "m"});
    let prompt = if api.contains("chat") { json!([{"role": "user", "content": "hi"}]) } else { json!("hi") };
    body[if api.contains("chat") { "messages" } else { "prompt" }] = prompt;
    body.as_object_mut().expect("an object").extend(chosen);
    let (text, streams) = (body.to_string(), body["stream"] == true);

    let decode = &sandbox.decode[0];
    let alone = Call::post(&base(decode.address()), api, text.clone()).send().await;
    let (status, alone) = (alone.status, alone.body().await);
    sandbox.clear();
    let answer = Call::post(path, api, text.clone()).send().await;
    assert_eq!(answer.status, status, "{text}");
    let answer = answer.body().await;
    assert!(answer.complete && alone.complete);
    assert_eq!(answer.bytes.starts_with(b"data: "), streams, "{text}");
    let usage = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains("\"completion_tokens\":");
    assert_eq!(usage(&answer.bytes), usage(&alone.bytes), "{text}");

    let prefill = only(&sandbox.prefill[0]);
    assert_eq!(prefill.status, Some(200), "{text}");
    assert_prefill_leg(text.as_bytes(), &prefill.body);
    let decode = only(decode);
    assert_eq!(decode.status, Some(status.as_u16()));
    assert_decode_leg(text.as_bytes(), &decode.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn r10_every_combination_of_the_five_fields() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for api in ["/v1/chat/completions", "/v1/completions"] {
            for set in 0_u32..32 {
                let chosen = fields().into_iter().enumerate().filter(|(place, _)| set & (1 << place) != 0);
                let chosen = chosen.map(|(_, (name, value))| (name.to_owned(), value));
                check(&sandbox, &path, api, chosen.collect()).await;
            }
        }
    }
    sandbox.close().await;
}

/// As above with `null`, which SDKs send for what was not set.
#[tokio::test(flavor = "multi_thread")]
async fn r10_every_combination_with_nulls() {
    let mut options = SandboxOptions::default();
    options.fleet.replicas = 1;
    options.fleet.envoy = false;
    let sandbox = Sandbox::start(options).await;
    let path = sandbox.paths().remove(0);
    for combination in 0..3_u32.pow(5) {
        let mut chosen = Map::new();
        for (place, (name, value)) in (0..).zip(fields()) {
            match combination / 3_u32.pow(place) % 3 {
                1 => chosen.insert(name.to_owned(), value),
                2 => chosen.insert(name.to_owned(), Value::Null),
                _ => None,
            };
        }
        if chosen.values().any(Value::is_null) {
            check(&sandbox, &path, "/v1/chat/completions", chosen).await;
        }
    }
    sandbox.close().await;
}
