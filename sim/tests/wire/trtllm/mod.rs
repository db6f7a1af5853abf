//! TensorRT-LLM over real sockets.

mod context_first;
mod generation_first;
mod surface;

use crate::client::{Answer, post};
use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, ViolationKind as Kind, start};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
/// Not exact as a float.
const ID: u64 = (1 << 62) + 1;

async fn pair() -> (Engine, Engine) {
    pair_of(|config| config).await
}

async fn pair_of(change: impl Fn(EngineConfig) -> EngineConfig) -> (Engine, Engine) {
    let context = start(change(EngineConfig::prefill("m").trtllm())).await.unwrap();
    (context, start(change(EngineConfig::decode("m").trtllm())).await.unwrap())
}

fn chat(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_completion_tokens": 8})
}

/// The context leg of `body`.
fn context_leg(body: &Value, params: Value) -> String {
    let mut body = body.clone();
    if let Some(members) = body.as_object_mut() {
        members.remove("max_completion_tokens");
        members.remove("stream");
        members.remove("stream_options");
    }
    body["max_tokens"] = 1.into();
    body["disaggregated_params"] = params;
    body.to_string()
}

fn context_only(id: u64) -> Value {
    json!({"request_type": "context_only", "disagg_request_id": id})
}

/// The generation leg of a chat `body` after the context worker's answer.
fn generation_leg(body: &Value, context: &Answer) -> Value {
    let context = context.json();
    let mut body = body.clone();
    body["disaggregated_params"] = context["choices"][0]["disaggregated_params"].clone();
    body["disaggregated_params"]["request_type"] = "generation_only".into();
    body["prompt_token_ids"] = context["prompt_token_ids"].clone();
    body
}

fn content(answer: &Answer) -> String {
    answer.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
}

fn kinds(engine: &Engine) -> Vec<Kind> {
    engine.violations().into_iter().map(|violation| violation.kind).collect()
}

fn idle(engine: &Engine) -> bool {
    let stats = engine.stats();
    stats.running + stats.waiting + stats.live_requests + stats.transferring == 0 && stats.kv_used_tokens == 0
}

async fn ask(engine: &Engine, path: &str, body: &Value) -> Answer {
    post(engine.address(), path, &body.to_string()).await
}
