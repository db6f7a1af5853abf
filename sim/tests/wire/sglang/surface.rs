//! Refusals, models, metrics.

use super::{CHAT, TEXT, chat, content};
use crate::client::{Client, get, post};
use serde_json::{Value, json};
use tandem_sim::{EngineConfig, Fault, start};

#[tokio::test]
async fn refusals_have_the_captured_words() {
    let capacity = tandem_sim::Capacity { max_model_len: 40, ..EngineConfig::default().capacity };
    let engine = start(EngineConfig::combined("m").sglang().capacity(capacity)).await.unwrap();
    let flat = |message: &str, kind: &str| json!({"object": "error", "message": message, "type": kind, "param": null, "code": 400});
    for (path, body, words) in [
        (CHAT, json!({"messages": []}), "Messages cannot be empty."),
        (TEXT, json!({"prompt": ""}), "Prompt cannot be empty"),
        (
            TEXT,
            json!({"prompt": "x".repeat(200)}),
            "The input (50 tokens) is longer than the model's context length (40 tokens).",
        ),
        (
            TEXT,
            json!({"prompt": "x", "max_tokens": 100_000}),
            "max_completion_tokens is too large: 100000.This model supports at most 40 completion tokens.",
        ),
    ] {
        let answer = post(engine.address(), path, &body.to_string()).await;
        assert_eq!((answer.status, answer.json()), (400, flat(words, "BadRequestError")));
    }
    let broken = post(engine.address(), CHAT, "{\"a\":").await;
    let message = broken.json()["message"].as_str().unwrap().to_owned();
    assert_eq!((broken.status, broken.json()["type"].as_str()), (400, Some("Bad Request")));
    assert!(message.starts_with("1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', "), "{message}");
    assert!(message.contains("sglang/srt/entrypoints/http_server.py"), "it leaks a path");
    let missing = post(engine.address(), CHAT, "{}").await.json()["message"].as_str().unwrap().to_owned();
    assert!(missing.contains("{'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required'"), "{missing}");
    let mut client = Client::connect(engine.address()).await;
    client.send("POST", CHAT, &[("content-type", "text/plain")], "{}").await;
    assert!(client.answer().await.body.contains("Unsupported Media Type"));
    assert_eq!(get(engine.address(), "/nope").await.body, r#"{"detail":"Not Found"}"#);
    assert_eq!(get(engine.address(), CHAT).await.status, 405);
}

#[tokio::test]
async fn unknown_models_and_empty_limits_are_served() {
    let engine = start(EngineConfig::combined("m").sglang()).await.unwrap();
    let mut body = chat("hi");
    body["model"] = "nope".into();
    let answer = post(engine.address(), CHAT, &body.to_string()).await;
    assert_eq!((answer.status, answer.json()["model"].as_str()), (200, Some("nope")));
    body["max_tokens"] = 0.into();
    let empty = post(engine.address(), CHAT, &body.to_string()).await;
    assert_eq!((empty.status, content(&empty).as_str()), (200, ""));
    assert_eq!(empty.json()["usage"]["completion_tokens"], 0);
    body["stream"] = true.into();
    assert_eq!(post(engine.address(), CHAT, &body.to_string()).await.events().last(), Some(&"[DONE]"));
    assert_eq!(get(engine.address(), "/v1/models/nope").await.status, 404);
    assert_eq!(get(engine.address(), "/v1/models/m").await.status, 200);
}

#[tokio::test]
async fn errors_inside_a_stream_have_sglangs_shape() {
    let engine = start(EngineConfig::combined("m").sglang()).await.unwrap();
    engine.script(Fault::on(CHAT).error_event_after(2));
    let mut body = chat("hi");
    body["stream"] = true.into();
    let stream = post(engine.address(), CHAT, &body.to_string()).await;
    let events = stream.events();
    let error: Value = serde_json::from_str(events[2]).unwrap();
    assert_eq!((error["error"]["object"].as_str(), events[3]), (Some("error"), "[DONE]"));
}

#[tokio::test]
async fn metrics_have_the_captured_names() {
    for config in [EngineConfig::prefill("m"), EngineConfig::decode("m"), EngineConfig::combined("m")] {
        let engine = start(config.sglang()).await.unwrap();
        let page = get(engine.address(), "/metrics").await.body;
        for name in [
            "num_running_reqs{",
            "num_queue_reqs{",
            "token_usage{",
            "gen_throughput{",
            "cache_hit_rate{",
            "num_prefill_bootstrap_queue_reqs{",
            "num_prefill_inflight_queue_reqs{",
            "num_decode_prealloc_queue_reqs{",
            "num_decode_transfer_queue_reqs{",
            "num_bootstrap_failed_reqs_total{",
            "num_transfer_failed_reqs_total{",
            "num_aborted_requests_total{",
            "prompt_tokens_total{",
            "generation_tokens_total{",
            "num_requests_total{",
            "time_to_first_token_seconds_bucket{",
            "inter_token_latency_seconds_bucket{",
            "e2e_request_latency_seconds_bucket{",
            "queue_time_seconds_bucket{",
        ] {
            assert!(page.lines().any(|line| line.starts_with(&format!("sglang:{name}"))), "{name}");
        }
    }
}
