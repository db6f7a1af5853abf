//! Answers have the fields of vLLM 0.32's, in its order.

use crate::client::{Client, get, keys, post};
use tandem_sim::{EngineConfig, MetricNames, Role, start};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn plain() -> EngineConfig {
    EngineConfig { prompt_tokens_details: false, ..EngineConfig::combined("tiny") }
}

#[tokio::test]
async fn a_chat_answer_has_the_captured_fields() {
    let engine = start(plain()).await.unwrap();
    let mut client = Client::connect(engine.address()).await;
    client
        .post(
            CHAT,
            &[("x-request-id", "abc")],
            r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":8}"#,
        )
        .await;
    let answer = client.answer().await;
    assert_eq!(
        (answer.status, answer.header("content-type"), answer.header("server")),
        (200, Some("application/json"), Some("uvicorn"))
    );
    let captured = r#"{"id":"","object":"","created":1,"model":"","choices":[{"index":0,"message":{"role":"","content":"","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"","stop_reason":null,"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"","usage":{"prompt_tokens":13,"total_tokens":21,"completion_tokens":8,"prompt_tokens_details":null,"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#;
    assert_eq!(keys(&answer.body), keys(captured));
    let json = answer.json();
    assert_eq!(json["id"], "chatcmpl-abc");
    assert_eq!(json["choices"][0]["finish_reason"], "length");
    assert_eq!(json["usage"]["completion_tokens"], 8);
    assert_eq!(json["usage"]["total_tokens"].as_u64(), json["usage"]["prompt_tokens"].as_u64().map(|p| p + 8));
}

#[tokio::test]
async fn a_completion_answer_has_the_captured_fields() {
    let engine = start(plain()).await.unwrap();
    let answer =
        post(engine.address(), TEXT, r#"{"model":"tiny","prompt":[5,6,7,8,9],"max_tokens":2,"return_token_ids":true}"#)
            .await;
    let captured = r#"{"id":"","object":"","created":1,"model":"","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"","stop_reason":null,"token_ids":[197,359],"prompt_logprobs":null,"prompt_token_ids":[5,6,7,8,9],"routed_experts":null}],"service_tier":null,"system_fingerprint":"","usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2,"prompt_tokens_details":null,"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}"#;
    assert_eq!(keys(&answer.body), keys(captured));
    let json = answer.json();
    assert!(json["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(json["usage"]["prompt_tokens"], 5);
    assert_eq!(json["choices"][0]["prompt_token_ids"], serde_json::json!([5, 6, 7, 8, 9]));
    assert_eq!(json["choices"][0]["token_ids"].as_array().map(Vec::len), Some(2));
    assert_eq!(
        post(engine.address(), TEXT, r#"{"prompt":"x"}"#).await.json()["usage"]["completion_tokens"],
        16,
        "the default"
    );
}

#[tokio::test]
async fn a_chat_stream_has_the_captured_events() {
    let engine = start(plain()).await.unwrap();
    let body = r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":3,"stream":true}"#;
    let answer = post(engine.address(), CHAT, body).await;
    assert_eq!(answer.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let events = answer.events();
    assert_eq!(events.len(), 5);
    let first = r#"{"id":"","object":"","created":1,"model":"","choices":[{"index":0,"delta":{"role":"","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}"#;
    let middle = r#"{"id":"","object":"","created":1,"model":"","choices":[{"index":0,"delta":{"content":"&"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#;
    let last = r#"{"id":"","object":"","created":1,"model":"","choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"system_fingerprint":""}"#;
    for (event, captured) in events.iter().zip([first, middle, middle, last]) {
        assert_eq!(keys(event), keys(captured), "{event}");
    }
    assert_eq!(events[4], "[DONE]");
    let whole = post(engine.address(), CHAT, &body.replace("true", "false")).await.json();
    let streamed: String = events[1..4]
        .iter()
        .map(|e| {
            serde_json::from_str::<serde_json::Value>(e).unwrap()["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    assert_eq!(whole["choices"][0]["message"]["content"], streamed.as_str());
}

#[tokio::test]
async fn usage_comes_in_its_own_chunk_or_in_every_one() {
    let engine = start(plain()).await.unwrap();
    let body = |options: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":"hi"}}],"max_tokens":2,"stream":true,"stream_options":{options}}}"#
        )
    };
    let answer = post(engine.address(), CHAT, &body(r#"{"include_usage":true}"#)).await;
    let events = answer.events();
    let captured = r#"{"id":"","object":"","created":1,"model":"","choices":[],"usage":{"prompt_tokens":13,"total_tokens":16,"completion_tokens":3},"system_fingerprint":""}"#;
    assert_eq!((keys(events[3]), events[4]), (keys(captured), "[DONE]"));
    assert!(!events[2].contains("system_fingerprint") && !events[2].contains("usage"));
    let answer = post(engine.address(), CHAT, &body(r#"{"include_usage":true,"continuous_usage_stats":true}"#)).await;
    let counts: Vec<_> = answer.events()[..4]
        .iter()
        .map(|e| serde_json::from_str::<serde_json::Value>(e).unwrap()["usage"]["completion_tokens"].as_u64().unwrap())
        .collect();
    assert_eq!(counts, [0, 1, 2, 2]);
}

#[tokio::test]
async fn a_completion_stream_has_the_captured_events() {
    let engine = start(plain()).await.unwrap();
    let answer = post(
        engine.address(),
        TEXT,
        r#"{"prompt":"hello","max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}"#,
    )
    .await;
    let events = answer.events();
    let token = r#"{"id":"","object":"","created":1,"model":"","choices":[{"index":0,"text":"wo","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}"#;
    assert_eq!((keys(events[0]), keys(events[1]), events.len()), (keys(token), keys(token), 4));
    assert!(events[1].contains(r#""finish_reason":"length""#));
}

#[tokio::test]
async fn samples_and_prompts_become_choices() {
    let engine = start(plain()).await.unwrap();
    let two = post(engine.address(), TEXT, r#"{"prompt":["aaaa","bbbb"],"n":2,"max_tokens":3}"#).await.json();
    let texts: Vec<_> = two["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 4);
    assert!(texts.iter().enumerate().all(|(i, text)| !texts[..i].contains(text)), "{texts:?}");
    assert_eq!((&two["usage"]["prompt_tokens"], &two["usage"]["completion_tokens"]), (&2.into(), &12.into()));
    let single = post(engine.address(), TEXT, r#"{"prompt":"bbbb","max_tokens":3}"#).await.json();
    assert_eq!(single["choices"][0]["text"], texts[2]);
    let stream = post(
        engine.address(),
        CHAT,
        r#"{"messages":[{"role":"user","content":"x"}],"n":3,"max_tokens":2,"stream":true}"#,
    )
    .await;
    assert_eq!(stream.events().iter().filter(|e| e.contains(r#""role":"assistant""#)).count(), 3);
    assert_eq!(stream.events().iter().filter(|e| e.contains(r#""finish_reason":"length""#)).count(), 3);
}

#[tokio::test]
async fn limits_stops_and_defaults_shape_the_output() {
    let engine = start(EngineConfig { chat_tokens: 5, ..plain() }).await.unwrap();
    let chat = |extra: &str| format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{extra}}}"#);
    for (extra, tokens, finish) in [
        ("", 5, "stop"),
        (r#","max_tokens":9"#, 9, "length"),
        (r#","max_tokens":9,"max_completion_tokens":4"#, 4, "length"),
        (r#","min_tokens":7"#, 7, "stop"),
    ] {
        let json = post(engine.address(), CHAT, &chat(extra)).await.json();
        assert_eq!(
            (&json["usage"]["completion_tokens"], &json["choices"][0]["finish_reason"]),
            (&tokens.into(), &finish.into()),
            "{extra}"
        );
    }
    let full = post(engine.address(), CHAT, &chat(r#","max_tokens":9"#)).await.json();
    let text = full["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let word = text.split(' ').nth(3).unwrap();
    let cut = post(engine.address(), CHAT, &chat(&format!(r#","max_tokens":9,"stop":[" {word}"]"#))).await.json();
    assert_eq!(cut["choices"][0]["stop_reason"], format!(" {word}"));
    assert!(text.starts_with(cut["choices"][0]["message"]["content"].as_str().unwrap()));
    let echo = post(engine.address(), TEXT, r#"{"prompt":"say ","echo":true,"max_tokens":1}"#).await.json();
    assert!(echo["choices"][0]["text"].as_str().unwrap().starts_with("say "));
}

#[tokio::test]
async fn the_other_apis_answer_in_their_own_frame() {
    let engine = start(plain()).await.unwrap();
    let response = post(engine.address(), "/v1/responses", r#"{"input":"hi","max_output_tokens":3}"#).await.json();
    assert_eq!(
        (&response["object"], &response["status"], &response["usage"]["output_tokens"]),
        (&"response".into(), &"completed".into(), &3.into())
    );
    let message =
        post(engine.address(), "/v1/messages", r#"{"max_tokens":3,"messages":[{"role":"user","content":"hi"}]}"#)
            .await
            .json();
    assert_eq!((&message["type"], &message["stop_reason"]), (&"message".into(), &"max_tokens".into()));
    assert_eq!(response["output"][0]["content"][0]["text"], message["content"][0]["text"]);
    let stream = post(
        engine.address(),
        "/v1/messages",
        r#"{"max_tokens":2,"stream":true,"messages":[{"role":"user","content":"hi"}]}"#,
    )
    .await
    .body;
    let names: Vec<_> = stream.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let delta = "content_block_delta";
    assert_eq!(
        names,
        ["message_start", "content_block_start", delta, delta, "content_block_stop", "message_delta", "message_stop"]
    );
    let stream =
        post(engine.address(), "/v1/responses", r#"{"input":"hi","max_output_tokens":1,"stream":true}"#).await.body;
    let names: Vec<_> = stream.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    assert_eq!(names, ["response.created", "response.output_text.delta", "response.completed"]);
    let embedding = post(engine.address(), "/v1/embeddings", r#"{"input":["a","b"]}"#).await.json();
    assert_eq!(embedding["data"].as_array().map(Vec::len), Some(2));
}

#[tokio::test]
async fn the_small_paths_answer_as_captured() {
    let engine = start(plain()).await.unwrap();
    let at = engine.address();
    let health = get(at, "/health").await;
    assert_eq!((health.status, health.body.as_str(), health.header("content-length")), (200, "", Some("0")));
    assert_eq!(get(at, "/ping").await.status, 200);
    assert_eq!(get(at, "/load").await.body, r#"{"server_load":0}"#);
    assert_eq!(get(at, "/version").await.body, r#"{"version":"0.32.0"}"#);
    let models = r#"{"object":"list","data":[{"id":"tiny","object":"model","created":1,"owned_by":"vllm","root":"tiny-llama","parent":null,"max_model_len":4096,"permission":[{"id":"","object":"","created":1,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}]}"#;
    assert_eq!(keys(&get(at, "/v1/models").await.body), keys(models));
    let tokens = post(at, "/tokenize", r#"{"prompt":"12345678"}"#).await;
    assert_eq!(keys(&tokens.body), ["count", "max_model_len", "tokens", "token_strs"]);
    assert_eq!(tokens.json()["count"], 2);
}

#[tokio::test]
async fn r54_metrics_carry_the_names_of_their_generation() {
    for (names, present, absent) in [
        (
            MetricNames::Newest,
            vec![
                "kv_cache_usage_perc",
                "inter_token_latency_seconds_bucket",
                "prefix_cache_hits_total",
                "nixl_num_kv_expired_reqs_total",
            ],
            vec!["gpu_cache_usage_perc", "\nvllm:time_per_output_token_seconds_bucket"],
        ),
        (
            MetricNames::Legacy,
            vec!["gpu_cache_usage_perc", "time_per_output_token_seconds_bucket", "gpu_prefix_cache_hits_total"],
            vec!["kv_cache_usage_perc", "inter_token_latency"],
        ),
        (
            MetricNames::Both,
            vec!["gpu_cache_usage_perc", "kv_cache_usage_perc", "inter_token_latency_seconds_sum"],
            vec![],
        ),
    ] {
        let engine = start(EngineConfig { metric_names: names, role: Role::Prefill, ..EngineConfig::combined("a\"b") })
            .await
            .unwrap();
        post(engine.address(), TEXT, r#"{"prompt":"x","max_tokens":4}"#).await;
        let page = get(engine.address(), "/metrics").await.body;
        for name in present {
            let name = name.trim_start_matches("\nvllm:");
            assert!(page.contains(&format!("\nvllm:{name}{{engine=\"0\",model_name=\"a\\\"b\"")), "{name}: {page}");
        }
        for name in absent {
            assert!(!page.contains(name), "{name}");
        }
        assert!(page.contains("vllm:generation_tokens_total{engine=\"0\",model_name=\"a\\\"b\"} 4.0"));
        assert!(
            page.contains(
                "vllm:time_to_first_token_seconds_bucket{engine=\"0\",model_name=\"a\\\"b\",le=\"+Inf\"} 1.0"
            )
        );
        assert!(page.contains("finished_reason=\"length\"} 1.0"));
    }
    let bare = start(EngineConfig { engine_label: false, ..plain() }).await.unwrap();
    assert!(get(bare.address(), "/metrics").await.body.contains("vllm:num_requests_running{model_name=\"tiny\"} 0.0"));
}
