//! What makes a KV cache another one without changing the text separates requests here, and in what replicas tell.

use serde_json::{Value, json};

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::{Call, base};
use crate::harness::redis::Redis;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

fn chat(members: &Value) -> String {
    let mut body = json!({
        "model": "m", "max_tokens": 1,
        "messages": [{"role": "user", "content": "the same words for everybody ".repeat(100)}],
    });
    for (name, value) in members.as_object().expect("members") {
        body[name] = value.clone();
    }
    body.to_string()
}

async fn ask(tandem: &Tandem, members: &Value) {
    let front = base(tandem.front().expect("a front"));
    let answer = Call::post(&front, "/v1/chat/completions", chat(members)).send().await;
    assert_eq!(answer.status, 200);
    assert!(answer.body().await.complete);
}

/// The best prefix match that the last decision found, percent.
async fn last_match(tandem: &Tandem) -> Option<u64> {
    let page = tandem.admin_json("/debug/decisions").await;
    let pods = page["decisions"].as_array()?.first()?["prefill_pods"].as_array()?.clone();
    pods.iter().filter_map(|pod| pod["prefix_match_pct"].as_u64()).max()
}

async fn blocks(tandem: &Tandem) -> f64 {
    tandem.metrics().await.sum("tandem_prefix_index_entries", &[])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_salt_adapter_or_template_is_another_prefix_on_every_replica() {
    let redis = Redis::start().await;
    let options = SandboxOptions { pairs: 2, ..SandboxOptions::default() }.env(&[
        ("REDIS_URL", &redis.url()),
        ("AIBRIX_STATESYNC_SYNC_PERIOD", "100ms"),
        ("AIBRIX_PREFIX_CACHE_HASH_SEED", "7"),
    ]);
    let sandbox = Sandbox::start(options).await;
    let [one, two] = &sandbox.fleet.tandems[..] else { panic!("two replicas") };
    for (mine, theirs) in [
        (json!({"cache_salt": "mine"}), json!({"cache_salt": "theirs"})),
        (
            json!({"chat_template_kwargs": {"enable_thinking": true}}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
        ),
        (json!({"reasoning_effort": "low"}), json!({"reasoning_effort": "high"})),
        (json!({"documents": [{"text": "mine"}]}), json!({"documents": [{"text": "theirs"}]})),
    ] {
        let before = blocks(two).await;
        ask(one, &mine).await;
        // What the first tells, the second comes to know, and of this prefix only.
        eventually(SOON, "the second replica to know the prefix", async || (blocks(two).await > before).then_some(()))
            .await;
        ask(two, &mine).await;
        assert_eq!(last_match(two).await, Some(100), "{mine}");
        ask(two, &theirs).await;
        assert_eq!(last_match(two).await, Some(0), "{theirs}");
    }
    sandbox.close().await;
}
