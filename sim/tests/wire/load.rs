//! Queueing, batching and caching: load must matter.

use std::time::Duration;

use crate::client::{Client, post, within};
use tandem_sim::{Capacity, EngineConfig, Role, Timing, start};
use tokio::time::Instant;

const TEXT: &str = "/v1/completions";

#[tokio::test]
async fn prompts_are_computed_one_after_the_other() {
    let timing = Timing { prefill_base: Duration::from_millis(40), ..Timing::instant() };
    let engine = start(EngineConfig::combined("m").timing(timing)).await.unwrap();
    let began = Instant::now();
    let ask = |number: u32| {
        let address = engine.address();
        async move { post(address, TEXT, &format!(r#"{{"prompt":"{number}","max_tokens":1}}"#)).await.status }
    };
    let (a, b, c) = tokio::join!(ask(1), ask(2), ask(3));
    assert_eq!((a, b, c), (200, 200, 200));
    assert!(began.elapsed() >= Duration::from_millis(120), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_shared_prefix_is_not_computed_twice() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let prompt = |end: &str| format!(r#"{{"prompt":"{}{end}","max_tokens":1}}"#, "p".repeat(640));
    let first = post(engine.address(), TEXT, &prompt("aaaa")).await.json();
    let second = post(engine.address(), TEXT, &prompt("bbbb")).await.json();
    let cached = |answer: &serde_json::Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!((cached(&first), cached(&second)), (Some(0), Some(160)));
    let stats = engine.stats();
    assert_eq!((stats.computed_tokens, stats.cache_hit_tokens, stats.kv_used_tokens), (162, 160, 0));
}

#[tokio::test]
async fn unread_hand_offs_fill_the_cache_until_their_leases_end() {
    let capacity = Capacity { kv_tokens: 256, max_model_len: 128, ..EngineConfig::default().capacity };
    let lease = Duration::from_millis(400);
    let config = EngineConfig { role: Role::Prefill, ..EngineConfig::prefill("m").capacity(capacity).lease(lease) };
    let engine = start(config).await.unwrap();
    let body = |letter: &str| {
        format!(
            r#"{{"prompt":"{}","max_tokens":1,"kv_transfer_params":{{"do_remote_decode":true}}}}"#,
            letter.repeat(440)
        )
    };
    for letter in ["a", "b"] {
        assert_eq!(post(engine.address(), TEXT, &body(letter)).await.status, 200);
    }
    assert_eq!(engine.stats().pinned_requests, 2);
    let mut third = Client::connect(engine.address()).await;
    third.post(TEXT, &[], &body("c")).await;
    within(engine.wait_until(|engine| engine.stats().waiting == 1)).await;
    assert_eq!((engine.stats().pinned_requests, engine.stats().running), (2, 0));
    assert_eq!(within(third.answer()).await.status, 200);
    assert!(engine.stats().expired_leases >= 1);
}

#[tokio::test]
async fn a_barrier_of_held_requests_is_counted_as_waiting() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let hold = engine.hold();
    let mut clients = Vec::new();
    for _ in 0..8 {
        let mut client = Client::connect(engine.address()).await;
        client.post(TEXT, &[], r#"{"prompt":"x"}"#).await;
        clients.push(client);
    }
    within(hold.wait_for(8)).await;
    assert_eq!((engine.stats().held, engine.stats().live_requests, engine.stats().finished), (8, 8, 0));
    hold.release_first(3);
    within(engine.wait_until(|engine| engine.stats().finished == 3)).await;
    assert_eq!(hold.waiting(), 5);
    hold.release();
    within(engine.wait_until(|engine| engine.stats().finished == 8)).await;
}

#[tokio::test]
async fn decode_steps_slow_down_with_the_batch() {
    let timing = Timing {
        decode_base: Duration::from_millis(4),
        decode_per_sequence: Duration::from_millis(20),
        ..Timing::instant()
    };
    let engine = start(EngineConfig::combined("m").timing(timing)).await.unwrap();
    let ask = || post(engine.address(), TEXT, r#"{"prompt":"x","max_tokens":5}"#);
    let began = Instant::now();
    ask().await;
    let alone = began.elapsed();
    let hold = engine.hold();
    let together = async {
        within(hold.wait_for(3)).await;
        let began = Instant::now();
        hold.release();
        within(engine.wait_until(|engine| engine.stats().finished == 4)).await;
        began.elapsed()
    };
    let (.., together) = tokio::join!(ask(), ask(), ask(), together);
    assert!(alone >= Duration::from_millis(16));
    assert!(together >= Duration::from_millis(100), "{alone:?} alone, {together:?} together");
}
