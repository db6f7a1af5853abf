//! vLLM with AIBrix's connector: the answer says that KV lies in shared storage, and nothing else.

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Fault, ViolationKind as Kind, start};

use crate::client::post;

const CHAT: &str = "/v1/chat/completions";
const REQUEST: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

fn body(params: &Value, limit: u32) -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": "tell me more"}], "max_tokens": limit,
        "max_completion_tokens": limit, "kv_transfer_params": params})
    .to_string()
}

fn kinds(engine: &Engine) -> Vec<Kind> {
    engine.violations().into_iter().map(|violation| violation.kind).collect()
}

#[tokio::test]
async fn prefill_names_no_blocks_and_keeps_none() {
    let prefill = start(EngineConfig::prefill("m").aibrix()).await.unwrap();
    let request: Value = serde_json::from_str(REQUEST).unwrap();
    let mut offered = post(prefill.address(), CHAT, &body(&request, 1)).await.json()["kv_transfer_params"].clone();
    assert!(offered["remote_engine_id"].take().as_str().is_some_and(|id| !id.is_empty()));
    let expected = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [],
        "remote_engine_id": null, "remote_host": "", "remote_port": -1, "tp_size": 1});
    assert_eq!(offered, expected);
    assert_eq!(prefill.stats().pinned_requests, 0);
    // An answer that ended by itself is whole.
    prefill.script(Fault::on("/v1/").ends_at_once());
    assert!(post(prefill.address(), CHAT, &body(&request, 1)).await.json()["kv_transfer_params"].is_null());
    assert_eq!(kinds(&prefill), []);
}

#[tokio::test]
async fn decode_reads_what_is_stored_and_notes_what_was_changed() {
    let decode = start(EngineConfig::decode("m").aibrix()).await.unwrap();
    let good = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [],
        "remote_engine_id": "e", "remote_host": "10.0.0.5", "remote_port": -1, "tp_size": 2});
    let with = |key: &str, value: Value| {
        let mut params = good.clone();
        params[key] = value;
        params
    };
    for (params, noted) in [
        (good.clone(), vec![]),
        (with("remote_engine_id", json!("")), vec![Kind::HandoffIncomplete]),
        (with("remote_port", json!(5600)), vec![Kind::HandoffAltered]),
        (with("remote_block_ids", json!([1])), vec![Kind::HandoffAltered]),
        (with("tp_size", Value::Null), vec![Kind::HandoffAltered]),
        (with("remote_host", json!("")), vec![Kind::HostNotReplaced]),
    ] {
        let before = kinds(&decode).len();
        assert_eq!(post(decode.address(), CHAT, &body(&params, 3)).await.status, 200, "{params}");
        assert_eq!(kinds(&decode)[before..], noted, "{params}");
    }
    assert_eq!(decode.stats().computed_tokens, 0);
    assert_eq!(post(decode.address(), CHAT, &body(&Value::Null, 3)).await.status, 200);
    assert!(decode.stats().computed_tokens > 0, "without a hand-off it computes");
}
