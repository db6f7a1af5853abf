//! vLLM's Mooncake connector: both legs at once, matched by `transfer_id`.

use std::net::SocketAddr;
use std::time::Duration;

use crate::client::{Answer, Client, get, post, within};
use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Fault, ViolationKind as Kind, start};

const CHAT: &str = "/v1/chat/completions";

async fn pair() -> (Engine, Engine) {
    let prefill = start(EngineConfig::prefill("m").mooncake()).await.unwrap();
    (prefill, start(EngineConfig::decode("m").mooncake()).await.unwrap())
}

fn bootstrap(prefill: &Engine) -> SocketAddr {
    SocketAddr::new(prefill.address().ip(), prefill.bootstrap_port())
}

async fn engine_id(prefill: &Engine) -> String {
    get(bootstrap(prefill), "/query").await.json()["0"]["engine_id"].as_str().unwrap().to_owned()
}

fn body(params: &Value, limit: u32) -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": "tell me more"}], "max_tokens": limit,
        "max_completion_tokens": limit, "kv_transfer_params": params})
    .to_string()
}

fn give(id: &str) -> String {
    body(&json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id}), 1)
}

async fn take(prefill: &Engine, id: &str) -> Value {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": id,
        "remote_engine_id": engine_id(prefill).await, "remote_bootstrap_addr": format!("http://{}", bootstrap(prefill))})
}

fn content(answer: &Answer) -> String {
    answer.json()["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned()
}

fn kinds(engine: &Engine) -> Vec<Kind> {
    engine.violations().into_iter().map(|violation| violation.kind).collect()
}

#[tokio::test]
async fn either_leg_may_come_first() {
    let (prefill, decode) = pair().await;
    let plain = start(EngineConfig::combined("m")).await.unwrap();
    let expected = content(&post(plain.address(), CHAT, &body(&Value::Null, 6)).await);
    let mut waiting = Client::connect(decode.address()).await;
    waiting.post(CHAT, &[], &body(&take(&prefill, "a").await, 6)).await;
    within(decode.wait_until(|engine| engine.stats().transferring == 1)).await;
    let first = post(prefill.address(), CHAT, &give("a")).await;
    assert_eq!((first.status, first.json()["kv_transfer_params"].is_null()), (200, true), "the answer carries nothing");
    assert_eq!(content(&waiting.answer().await), expected);
    assert_eq!(prefill.stats().pinned_requests, 0);
    // The prefill answer waits for nobody, and its blocks stay.
    assert_eq!(post(prefill.address(), CHAT, &give("b")).await.status, 200);
    assert_eq!(prefill.stats().pinned_requests, 1);
    let second = post(decode.address(), CHAT, &body(&take(&prefill, "b").await, 6)).await;
    assert_eq!(content(&second), expected);
    assert_eq!((prefill.stats().kv_used_tokens, decode.stats().computed_tokens), (0, 0));
    assert!(prefill.violations().is_empty() && decode.violations().is_empty());
    assert_eq!(prefill.records_for("/query").len(), 2, "look-ups are recorded");
}

#[tokio::test]
async fn a_decode_client_that_leaves_is_not_told_to_the_prefill_engine() {
    let (prefill, decode) = pair().await;
    let mut waiting = Client::connect(decode.address()).await;
    waiting.post(CHAT, &[], &body(&take(&prefill, "a").await, 6)).await;
    within(decode.wait_until(|engine| engine.stats().transferring == 1)).await;
    drop(waiting);
    within(decode.wait_until(|engine| engine.stats().live_requests == 0)).await;
    assert_eq!(post(prefill.address(), CHAT, &give("a")).await.status, 200);
    assert_eq!(prefill.stats().pinned_requests, 1, "until its time is over");
}

#[tokio::test]
async fn hand_offs_are_validated() {
    let (prefill, decode) = pair().await;
    let good = take(&prefill, "a").await;
    let mut seen = 0;
    for (name, value) in [
        ("transfer_id", Value::Null),
        ("remote_engine_id", "".into()),
        ("remote_bootstrap_addr", Value::Null),
        ("remote_bootstrap_addr", "127.0.0.1:1".into()),
        ("remote_bootstrap_addr", "http://127.0.0.1".into()),
        ("remote_bootstrap_addr", "http://127.0.0.1:0".into()),
    ] {
        let mut bad = good.clone();
        bad[name] = value;
        seen += 1;
        assert_eq!(post(decode.address(), CHAT, &body(&bad, 2)).await.status, 500, "{name}");
        assert_eq!(kinds(&decode), vec![Kind::HandoffIncomplete; seen]);
    }
    let unnamed = body(&json!({"do_remote_decode": true}), 1);
    assert_eq!(post(prefill.address(), CHAT, &unnamed).await.status, 500);
    assert_eq!(kinds(&prefill), [Kind::HandoffIncomplete]);
    // The engine of an old answer is not there any more: a failed transfer, nobody's breach.
    let mut stale = good.clone();
    stale["remote_engine_id"] = "another".into();
    assert_eq!(post(decode.address(), CHAT, &body(&stale, 2)).await.status, 500);
    assert_eq!((kinds(&decode).len(), decode.stats().failed_transfers), (seen, 1));
    // A second use is marked.
    post(prefill.address(), CHAT, &give("a")).await;
    assert!(!content(&post(decode.address(), CHAT, &body(&good, 2)).await).contains("[corrupt kv]"));
    assert!(content(&post(decode.address(), CHAT, &body(&good, 2)).await).starts_with("[corrupt kv]"));
    assert_eq!(kinds(&decode).last(), Some(&Kind::HandoffReused));
}

#[tokio::test]
async fn a_prompt_that_ends_by_itself_is_not_kept() {
    let (prefill, _) = pair().await;
    prefill.script(Fault::on(CHAT).ends_at_once());
    let answer = post(prefill.address(), CHAT, &give("a")).await;
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "stop");
    assert_eq!(prefill.stats().pinned_requests, 0);
}

#[tokio::test]
async fn a_look_up_can_be_made_to_fail() {
    let (prefill, _) = pair().await;
    prefill.script(Fault::on("/query").answer(503, "application/json", "{}").head_delay(Duration::from_millis(1)));
    assert_eq!(get(bootstrap(&prefill), "/query").await.status, 503);
    assert_eq!(get(bootstrap(&prefill), "/query").await.status, 200);
    assert_eq!(get(bootstrap(&prefill), "/route").await.status, 404, "that is SGLang's");
}
