//! What the real engine refuses, with its words.

use crate::client::{Client, post};
use tandem_sim::{Capacity, EngineConfig, start};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn small() -> EngineConfig {
    let capacity = Capacity { max_model_len: 4_096, ..EngineConfig::default().capacity };
    EngineConfig::combined("tiny").capacity(capacity)
}

#[tokio::test]
async fn refusals_have_the_captured_words() {
    let engine = start(small()).await.unwrap();
    let chat = |extra: &str| format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{extra}}}"#);
    let cases = [
        (
            CHAT,
            chat(r#","model":"nope""#),
            404,
            r#"{"error":{"message":"The model `nope` does not exist. Valid aliases: tiny.","type":"NotFoundError","param":"model","code":404}}"#,
        ),
        (
            CHAT,
            chat(r#","model":"nope","stream":true"#),
            404,
            r#"{"error":{"message":"The model `nope` does not exist. Valid aliases: tiny.","type":"NotFoundError","param":"model","code":404}}"#,
        ),
        (
            CHAT,
            chat(r#","temperature":-1"#),
            400,
            r#"{"error":{"message":"temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)","type":"BadRequestError","param":"temperature","code":400}}"#,
        ),
        (
            CHAT,
            String::new(),
            400,
            r#"{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}","type":"Bad Request","param":"body","code":400}}"#,
        ),
        (
            CHAT,
            r#"{"messages":[]}"#.to_owned(),
            400,
            r#"{"error":{"message":"Cannot apply chat template to an empty conversation. Provide at least one message.","type":"BadRequestError","param":null,"code":400}}"#,
        ),
        (
            TEXT,
            r#"{"prompt":""}"#.to_owned(),
            400,
            r#"{"error":{"message":"Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)","type":"BadRequestError","param":"prompt","code":400}}"#,
        ),
        (
            CHAT,
            r#"{"model":"tiny"}"#.to_owned(),
            400,
            r#"{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': '<dict of 1 items>'}","type":"Bad Request","param":"body.messages","code":400}}"#,
        ),
        (
            CHAT,
            chat(r#","max_tokens":100000"#),
            400,
            r#"{"error":{"message":"max_tokens=100000 cannot be greater than max_model_len=4096. Please request fewer output tokens. (parameter=max_tokens, value=100000)","type":"BadRequestError","param":"max_tokens","code":400}}"#,
        ),
        (
            CHAT,
            chat(r#","max_tokens":0"#),
            400,
            r#"{"error":{"message":"max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)","type":"BadRequestError","param":"max_tokens","code":400}}"#,
        ),
        (
            TEXT,
            format!(r#"{{"prompt":"{}"}}"#, "x".repeat(4_096 * 4)),
            400,
            r#"{"error":{"message":"This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=4097)","type":"BadRequestError","param":"input_tokens","code":400}}"#,
        ),
        (
            CHAT,
            chat(r#","stream_options":{"include_usage":true}"#),
            400,
            r#"{"error":{"message":"Stream options can only be defined when `stream=True`. (parameter=stream_options)","type":"BadRequestError","param":"stream_options","code":400}}"#,
        ),
        (
            CHAT,
            chat(r#","kv_transfer_params":"x""#),
            400,
            r#"{"error":{"message":"1 validation error:\n  {'type': 'dict_type', 'loc': 'body.kv_transfer_params', 'msg': 'Input should be a valid dictionary', 'input': 'x'}","type":"Bad Request","param":"body.kv_transfer_params","code":400}}"#,
        ),
        ("/v2/nothing", "{}".to_owned(), 404, r#"{"detail":"Not Found"}"#),
    ];
    for (path, body, status, expected) in cases {
        let answer = post(engine.address(), path, &body).await;
        assert_eq!((answer.status, answer.body.as_str()), (status, expected), "{path} {body}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
    }
}

#[tokio::test]
async fn borders_are_where_they_should_be() {
    let engine = start(small()).await.unwrap();
    let prompt = |tokens: usize, extra: &str| format!(r#"{{"prompt":"{}"{extra}}}"#, "x".repeat(tokens * 4));
    for (body, status) in [
        (prompt(4_095, r#","max_tokens":1"#), 200),
        (prompt(4_095, r#","max_tokens":2"#), 400),
        (prompt(4_096, r#","max_tokens":1"#), 400),
        (prompt(1, r#","max_tokens":4095"#), 200),
        (prompt(1, r#","max_tokens":4096"#), 400),
        (prompt(1, r#","max_tokens":1"#), 200),
        (prompt(1, r#","max_tokens":-1"#), 400),
        (prompt(1, r#","max_tokens":null"#), 200),
        (prompt(1, r#","max_tokens":"5""#), 200),
        (prompt(1, r#","max_tokens":1.5"#), 400),
        (prompt(1, r#","max_tokens":[]"#), 400),
        (prompt(1, r#","max_tokens":5,"min_tokens":5"#), 200),
        (prompt(1, r#","max_tokens":5,"min_tokens":6"#), 400),
        (prompt(1, r#","max_tokens":5,"min_tokens":-1"#), 400),
        (prompt(1, r#","temperature":0"#), 200),
        (prompt(1, r#","temperature":99"#), 200),
        (prompt(1, r#","top_p":1"#), 200),
        (prompt(1, r#","top_p":0"#), 400),
        (prompt(1, r#","top_p":1.1"#), 400),
        (prompt(1, r#","n":128"#), 200),
        (prompt(1, r#","n":129"#), 400),
        (prompt(1, r#","n":0"#), 400),
        (prompt(1, r#","stream":"maybe""#), 400),
        (prompt(1, r#","stream":null"#), 200),
        (prompt(1, r#","stream_options":null"#), 200),
        (prompt(1, r#","stream_options":5"#), 400),
        (prompt(1, r#","model":7"#), 400),
        (prompt(1, r#","unknown_field":{"a":1}"#), 200),
        (prompt(1, r#","kv_transfer_params":{}"#), 200),
        (prompt(1, r#","kv_transfer_params":null"#), 200),
        ("[]".to_owned(), 400),
        ("null".to_owned(), 400),
        ("{\"prompt\":".to_owned(), 400),
    ] {
        let answer = post(engine.address(), TEXT, &body).await;
        let shown: String = body.chars().rev().take(60).collect::<Vec<_>>().into_iter().rev().collect();
        assert_eq!(answer.status, status, "{shown}: {}", answer.body);
    }
    assert!(engine.violations().is_empty());
}

#[tokio::test]
async fn content_type_and_method_are_checked() {
    let engine = start(small()).await.unwrap();
    for (content_type, status) in [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("text/plain", 400),
        ("application/jsonx", 400),
    ] {
        let mut client = Client::connect(engine.address()).await;
        client.send("POST", TEXT, &[("content-type", content_type)], r#"{"prompt":"x"}"#).await;
        assert_eq!(client.answer().await.status, status, "{content_type}");
    }
    let mut client = Client::connect(engine.address()).await;
    client.send("POST", TEXT, &[], r#"{"prompt":"x"}"#).await;
    assert!(client.answer().await.body.contains("Unsupported Media Type: Only 'application/json' is allowed"));
    for (method, path, allow) in [("GET", TEXT, "POST"), ("POST", "/v1/models", "GET"), ("DELETE", "/health", "GET")] {
        client.send(method, path, &[], "").await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.header("allow")), (405, Some(allow)));
        assert_eq!(answer.body, r#"{"detail":"Method Not Allowed"}"#);
    }
}

#[tokio::test]
async fn a_lenient_engine_takes_what_it_can_answer() {
    let engine = start(EngineConfig { strict: false, ..small() }).await.unwrap();
    for body in [
        r#"{"prompt":"x","model":"nope"}"#,
        r#"{"prompt":"x","temperature":-1}"#,
        r#"{"prompt":"x","min_tokens":50}"#,
        r#"{"prompt":"x","stream_options":{}}"#,
    ] {
        assert_eq!(post(engine.address(), TEXT, body).await.status, 200, "{body}");
    }
    assert_eq!(post(engine.address(), TEXT, "{").await.status, 400);
}

#[tokio::test]
async fn bodies_beyond_the_limit_are_refused() {
    let mut config = small();
    config.limits.body_bytes = 100;
    let engine = start(config).await.unwrap();
    let body = |length: usize| format!(r#"{{"prompt":"{}"}}"#, "x".repeat(length - 13));
    assert_eq!(post(engine.address(), TEXT, &body(100)).await.status, 200);
    assert_eq!(post(engine.address(), TEXT, &body(101)).await.status, 413);
}

#[tokio::test]
async fn r87_only_http_1_is_spoken() {
    use tokio::io::AsyncWriteExt;
    let engine = start(small()).await.unwrap();
    let mut client = Client::connect(engine.address()).await;
    client.socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    // hyper answers nothing or a 400; either way the connection ends.
    let _ = client.closed().await;
    assert!(engine.records().is_empty());
}
