//! Schema, refusals, models, statistics, metrics, and clients that leave.

use std::time::Duration;

use super::{CHAT, TEXT, ask, chat, content, idle};
use crate::client::{Client, get, post, within};
use serde_json::{Value, json};
use tandem_sim::{Capacity, End, EngineConfig, Fault, MetricNames, Timing, start};

#[tokio::test]
async fn interop_35_unknown_fields_are_refused() {
    let engine = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    for (path, name) in [
        (CHAT, "kv_transfer_params"),
        (CHAT, "bootstrap_room"),
        (CHAT, "rid"),
        (CHAT, "prompt"),
        (CHAT, "detokenize"),
        (TEXT, "max_completion_tokens"),
        (TEXT, "messages"),
        (TEXT, "prompt_token_ids"),
    ] {
        let mut body = if path == CHAT { chat("hi") } else { json!({"model": "m", "prompt": "hi"}) };
        body[name] = json!(1);
        let answer = ask(&engine, path, &body).await;
        let error = answer.json()["error"].as_str().unwrap().to_owned();
        assert_eq!(answer.status, 400);
        let expected =
            format!("[{{'type': 'extra_forbidden', 'loc': ('body', '{name}'), 'msg': 'Extra inputs are not permitted'");
        assert!(error.starts_with(&expected), "{error}");
    }
    assert!(engine.violations().is_empty(), "it is the client's mistake");
    let lenient = EngineConfig { strict: false, ..EngineConfig::combined("m").trtllm() };
    let lenient = start(lenient).await.unwrap();
    let mut body = chat("hi");
    body["rid"] = "x".into();
    assert_eq!(ask(&lenient, CHAT, &body).await.status, 200);
}

#[tokio::test]
async fn limits_have_two_names_of_which_one_may_be_used() {
    let engine = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    for name in ["max_tokens", "max_completion_tokens"] {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        body[name] = 3.into();
        assert_eq!(ask(&engine, CHAT, &body).await.json()["usage"]["completion_tokens"], 3, "{name}");
    }
    let mut both = chat("hi");
    both["max_tokens"] = 3.into();
    assert!(ask(&engine, CHAT, &both).await.body.contains("extra_forbidden"));
}

#[tokio::test]
async fn refusals_are_flat_or_one_text() {
    let capacity = Capacity { max_model_len: 40, ..EngineConfig::default().capacity };
    let engine = start(EngineConfig::combined("m").trtllm().capacity(capacity)).await.unwrap();
    for (body, flat) in [
        (json!({"model": "m", "prompt": "x".repeat(200)}), true),
        (json!({"model": "m", "prompt": ""}), true),
        (json!({"model": "m", "prompt": "x", "max_tokens": 0}), true),
        (json!({"model": "m", "prompt": "x", "n": 0}), true),
        (json!({"prompt": "x"}), false),
        (json!({"model": "m"}), false),
        (json!({"model": "m", "prompt": "x", "max_tokens": "y"}), false),
        (json!({"model": "m", "prompt": "x", "stream_options": {"include_usage": true}}), false),
        (json!({"model": "m", "prompt": "x", "suffix": "y"}), false),
    ] {
        let answer = ask(&engine, TEXT, &body).await;
        let value = answer.json();
        assert_eq!(answer.status, 400, "{body}");
        assert_eq!((value["object"] == "error", value["error"].is_string()), (flat, !flat), "{value}");
    }
    for broken in ["", "{", "[]"] {
        let answer = post(engine.address(), TEXT, broken).await;
        assert_eq!((answer.status, answer.json()["error"].is_string()), (400, true), "{broken}");
    }
    assert_eq!(get(engine.address(), "/abort_request").await.body, r#"{"detail":"Not Found"}"#);
    assert_eq!(get(engine.address(), TEXT).await.status, 405);
    // The name of the model is not looked at.
    assert_eq!(ask(&engine, TEXT, &json!({"model": "nope", "prompt": "x", "max_tokens": 1})).await.status, 200);
}

#[tokio::test]
async fn the_same_prompt_as_text_and_as_ids_is_the_same() {
    let engine = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    let words = |answer: &crate::client::Answer| answer.json()["choices"][0]["text"].as_str().unwrap().to_owned();
    let context = start(EngineConfig::prefill("m").trtllm()).await.unwrap();
    let body = json!({"model": "m", "prompt": "some words", "max_tokens": 6});
    let by_text = ask(&engine, TEXT, &body).await;
    let mut leg = body.clone();
    leg["max_tokens"] = 1.into();
    leg["disaggregated_params"] = json!({"request_type": "context_only", "disagg_request_id": 1_u64 << 50});
    let ids = ask(&context, TEXT, &leg).await.json()["prompt_token_ids"].clone();
    let by_ids = ask(&engine, TEXT, &json!({"model": "m", "prompt": ids, "max_tokens": 6})).await;
    assert_eq!(words(&by_text), words(&by_ids));
}

#[tokio::test]
async fn streams_send_usage_when_asked() {
    let engine = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    let mut body = chat("hi");
    body["stream"] = true.into();
    assert_eq!(ask(&engine, CHAT, &body).await.events().len(), 10, "role, 8 tokens, end");
    body["stream_options"] = json!({"include_usage": true});
    let stream = ask(&engine, CHAT, &body).await;
    let usage: Value = serde_json::from_str(stream.events()[9]).unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(8)));
    let text: String = stream.events()[1..9]
        .iter()
        .map(|event| {
            let event: Value = serde_json::from_str(event).unwrap();
            event["choices"][0]["delta"]["content"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(text, content(&ask(&engine, CHAT, &chat("hi")).await));
}

#[tokio::test]
async fn reading_the_statistics_empties_them() {
    let engine = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    let read = || async { get(engine.address(), "/metrics").await.json().as_array().unwrap().clone() };
    assert!(read().await.is_empty(), "an idle engine has nothing to say");
    ask(&engine, CHAT, &chat("hi")).await;
    let first = read().await;
    assert_eq!(first.len(), 1);
    for name in ["numActiveRequests", "numQueuedRequests", "iterLatencyMS", "kvCacheStats"] {
        assert!(first[0].get(name).is_some(), "{name}");
    }
    assert_eq!(first[0]["kvCacheStats"]["tokensPerBlock"], 16);
    assert!(read().await.is_empty(), "another scraper would have stolen it");
    let hold = engine.hold();
    let mut client = Client::connect(engine.address()).await;
    client.post(CHAT, &[], &chat("hi").to_string()).await;
    within(hold.wait_for(1)).await;
    assert_eq!(read().await[0]["numQueuedRequests"], 1, "a busy engine always has something to say");
}

#[tokio::test]
async fn prometheus_is_elsewhere_and_may_be_off() {
    let engine = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    ask(&engine, CHAT, &chat("hi")).await;
    let page = get(engine.address(), "/prometheus/metrics").await.body;
    assert!(page.contains(
        "trtllm_request_success_total{engine_type=\"undefined\",model_name=\"m\",finished_reason=\"length\"} 1.0"
    ));
    for name in
        ["trtllm_kv_cache_utilization{", "trtllm_num_requests_running{", "trtllm_e2e_request_latency_seconds_bucket{"]
    {
        assert!(page.contains(name), "{name}");
    }
    let early = EngineConfig { metric_names: MetricNames::Legacy, ..EngineConfig::combined("m").trtllm() };
    let early = start(early).await.unwrap();
    assert!(!get(early.address(), "/prometheus/metrics").await.body.contains("num_requests_running"));
    let off = start(EngineConfig { perf_metrics: false, ..EngineConfig::combined("m").trtllm() }).await.unwrap();
    assert_eq!(get(off.address(), "/prometheus/metrics").await.status, 404);
}

#[tokio::test]
async fn closing_the_connection_cancels() {
    let slow = Timing { prefill_base: Duration::from_hours(1), ..Timing::instant() };
    for lag in [Duration::ZERO, Duration::from_millis(30)] {
        let engine = start(EngineConfig::combined("m").trtllm().timing(slow).disconnect_lag(lag)).await.unwrap();
        for stream in [false, true] {
            let mut body = chat("hi");
            body["stream"] = stream.into();
            let mut client = Client::connect(engine.address()).await;
            client.post(CHAT, &[], &body.to_string()).await;
            within(engine.wait_until(|engine| engine.stats().running == 1)).await;
            drop(client);
            within(engine.wait_until(idle)).await;
        }
        assert!(engine.records().iter().all(|record| record.ended() == Some(End::ClientGone)));
    }
}

#[tokio::test]
async fn errors_inside_a_stream_cut_chats_and_end_completions_twice() {
    let engine = start(EngineConfig::combined("m").trtllm()).await.unwrap();
    engine.script(Fault::on("/v1/").error_event_after(2).times(2));
    let mut body = chat("hi");
    body["stream"] = true.into();
    let cut = ask(&engine, CHAT, &body).await;
    assert_eq!(cut.events().len(), 2, "{}", cut.body);
    let body = json!({"model": "m", "prompt": "x", "max_tokens": 5, "stream": true});
    let ended = ask(&engine, TEXT, &body).await;
    assert!(ended.events()[2].contains("server_error"));
    assert_eq!(ended.events()[3..], ["[DONE]", "[DONE]"]);
}
