//! SGLang over real sockets.

mod aborts;
mod legs;
mod rooms;
mod surface;

use crate::client::{Answer, Client, post};
use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, ViolationKind as Kind, start};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const GENERATE: &str = "/generate";
const ABORT: &str = "/abort_request";
const ROOM: u64 = 4_611_686_018_427_387_911;

async fn pair() -> (Engine, Engine) {
    pair_of(|config| config).await
}

async fn pair_of(change: impl Fn(EngineConfig) -> EngineConfig) -> (Engine, Engine) {
    let prefill = start(change(EngineConfig::prefill("m").sglang())).await.unwrap();
    (prefill, start(change(EngineConfig::decode("m").sglang())).await.unwrap())
}

fn chat(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8})
}

/// The same fields on both legs.
fn joined(body: &Value, prefill: &Engine, room: u64, rid: &str) -> Value {
    let mut body = body.clone();
    body["bootstrap_host"] = "127.0.0.1".into();
    body["bootstrap_port"] = prefill.bootstrap_port().into();
    body["bootstrap_room"] = room.into();
    body["rid"] = rid.into();
    body
}

/// The prefill leg of `body`.
fn capped(body: &Value) -> String {
    let mut body = body.clone();
    body["max_tokens"] = 1.into();
    body["max_completion_tokens"] = 1.into();
    body["stream"] = false.into();
    if let Some(members) = body.as_object_mut() {
        members.remove("stream_options");
        members.remove("min_tokens");
    }
    body.to_string()
}

async fn legs(prefill: &Engine, first: &str, decode: &Engine, second: &str, path: &str) -> (Answer, Answer) {
    tokio::join!(post(prefill.address(), path, first), post(decode.address(), path, second))
}

/// Sends both legs at once.
async fn both((prefill, decode): (&Engine, &Engine), path: &str, body: &Value) -> (Answer, Answer) {
    legs(prefill, &capped(body), decode, &body.to_string(), path).await
}

async fn sent(engine: &Engine, path: &str, body: &str) -> Client {
    let mut client = Client::connect(engine.address()).await;
    client.post(path, &[], body).await;
    client
}

fn content(answer: &Answer) -> String {
    answer.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
}

fn kinds(engine: &Engine) -> Vec<Kind> {
    engine.violations().into_iter().map(|violation| violation.kind).collect()
}

fn idle(engine: &Engine) -> bool {
    let stats = engine.stats();
    stats.running + stats.waiting + stats.live_requests + stats.transferring + stats.bootstrapping == 0
        && stats.kv_used_tokens == 0
}
