//! An image in base64 is an image, not a prompt of 600,000 tokens: through real Envoy, and the front.

use serde_json::json;
use tandem_sim::{Capacity, EngineConfig};

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;

/// 1.9 MB of an image in base64.
fn chat_with_image() -> String {
    let image = format!("data:image/png;base64,{}", "iVBORw0KGgoAAAANSUhEUg".repeat(1_900_000 / 22));
    json!({
        "model": "m", "max_tokens": 2,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": image}},
        ]}],
    })
    .to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_of_two_megabytes_fits_a_roleset_for_short_prompts() {
    let sandbox = Sandbox::start(SandboxOptions {
        engine: |config: EngineConfig| {
            let capacity = Capacity { max_model_len: 4 << 20, kv_tokens: 8 << 20, ..config.capacity };
            config.capacity(capacity)
        },
        pod: |pod| {
            let routing = json!({"promptLengthBucketing": true, "promptLenBucketMaxLength": 8192});
            pod.config(&json!({"profiles": {"default": {"routingStrategy": "pd", "routingConfig": routing}}}))
        },
        ..SandboxOptions::default()
    })
    .await;
    let body = chat_with_image();
    for base in sandbox.paths() {
        let answer = Call::post(&base, "/v1/chat/completions", body.clone()).send().await;
        assert_eq!(answer.status, 200, "{:?}", answer.headers);
        assert!(answer.body().await.complete);
    }
    // Text of that size still is what it is.
    let text = json!({"model": "m", "messages": [{"role": "user", "content": "word ".repeat(9000)}]}).to_string();
    for base in sandbox.paths() {
        assert_eq!(Call::post(&base, "/v1/chat/completions", text.clone()).send().await.status, 503);
    }
    let decisions = sandbox.fleet.tandems[0].admin_json("/debug/decisions").await.to_string();
    assert!(!decisions.contains("47502"), "{decisions}");
    sandbox.close().await;
}
