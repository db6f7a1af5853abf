//! Aborts and clients that leave.

use std::time::Duration;

use super::{ABORT, CHAT, ROOM, capped, chat, idle, joined, pair, pair_of, sent};
use crate::client::{post, within};
use serde_json::json;
use tandem_sim::{End, EngineConfig, Timing, ViolationKind as Kind, start};

#[tokio::test]
async fn aborts_match_prefixes_and_always_answer_200() {
    let (prefill, decode) = pair().await;
    let mut waiting = Vec::new();
    for (number, rid) in ["req-1", "req-10", "req-2"].iter().enumerate() {
        let body = joined(&chat("hi"), &prefill, 1 + number as u64, rid);
        waiting.push(sent(&decode, CHAT, &body.to_string()).await);
    }
    within(decode.wait_until(|engine| engine.stats().transferring == 3)).await;
    for body in [r#"{"rid":"nobody"}"#, r#"{"rid":"req-1","abort_all":false}"#, r#"{"rid":""}"#] {
        let answer = post(decode.address(), ABORT, body).await;
        assert_eq!((answer.status, answer.body.as_str()), (200, ""), "{body}");
    }
    for client in &mut waiting[..2] {
        let answer = client.answer().await;
        assert_eq!(answer.status, 500);
        assert!(answer.body.contains("Aborted by AbortReq."));
    }
    assert_eq!(decode.stats().aborted, 2);
    let details: Vec<_> = decode.violations().into_iter().map(|violation| (violation.kind, violation.detail)).collect();
    let wide = |detail: &str| (Kind::AbortTooWide, detail.to_owned());
    assert_eq!(details, [wide("an abort of req-1 ended req-10"), wide("no rid")]);
    assert_eq!(post(decode.address(), ABORT, r#"{"abort_all":true}"#).await.status, 200);
    assert_eq!(waiting[2].answer().await.status, 500);
    within(decode.wait_until(idle)).await;
    // Aborts are recorded like requests, but are no work.
    assert_eq!((decode.records_for(ABORT).len(), decode.stats().live_requests), (4, 0));
}

#[tokio::test]
async fn an_abort_frees_a_prefill_engine_that_waits() {
    let (prefill, _) = pair().await;
    let mut first = sent(&prefill, CHAT, &capped(&joined(&chat("hi"), &prefill, ROOM, "r-1"))).await;
    within(prefill.wait_until(|engine| engine.stats().bootstrapping == 1)).await;
    assert_eq!(post(prefill.address(), ABORT, r#"{"rid":"r-1"}"#).await.status, 200);
    let answer = first.answer().await;
    assert!(answer.body.contains("Prefill bootstrap failed for request rank=0 req.rid='r-1'"), "{}", answer.body);
    within(prefill.wait_until(idle)).await;
    assert!(prefill.violations().is_empty());
}

#[tokio::test]
async fn an_abort_ends_a_running_stream_with_abort() {
    let timing = Timing { decode_base: Duration::from_millis(1), ..Timing::instant() };
    let plain = start(EngineConfig::combined("m").sglang().timing(timing)).await.unwrap();
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100_000,
        "stream": true, "rid": "r"});
    let mut client = sent(&plain, CHAT, &body.to_string()).await;
    client.head().await;
    client.chunk().await.unwrap();
    post(plain.address(), ABORT, r#"{"rid":"r"}"#).await;
    let mut last = Vec::new();
    while let Some(chunk) = client.chunk().await {
        last.push(chunk);
    }
    assert!(last[last.len() - 2].contains(r#""finish_reason":"abort""#), "{last:?}");
    assert_eq!(last.last().map(String::as_str), Some("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_decode_client_that_leaves_is_not_told_to_the_prefill_engine() {
    let (prefill, decode) = pair().await;
    let body = joined(&chat("hi"), &prefill, ROOM, "r");
    let second = sent(&decode, CHAT, &body.to_string()).await;
    within(decode.wait_until(|engine| engine.stats().transferring == 1)).await;
    drop(second);
    within(decode.wait_until(idle)).await;
    let first = sent(&prefill, CHAT, &capped(&body)).await;
    within(prefill.wait_until(|engine| engine.stats().bootstrapping == 1)).await;
    assert_eq!(prefill.records()[0].end, None, "it waits for somebody who will not come");
    drop(first);
    within(prefill.wait_until(|engine| engine.records()[0].ended() == Some(End::ClientGone))).await;
    within(prefill.wait_until(idle)).await;
}

#[tokio::test]
async fn with_a_lag_a_generation_survives_its_client() {
    let lag = Duration::from_millis(600);
    let (prefill, decode) = pair_of(|config| config.disconnect_lag(lag)).await;
    let body = joined(&chat("hi"), &prefill, ROOM, "r");
    let second = sent(&decode, CHAT, &body.to_string()).await;
    within(decode.wait_until(|engine| engine.stats().transferring == 1)).await;
    let left = tokio::time::Instant::now();
    drop(second);
    within(decode.wait_until(|engine| engine.records()[0].ended() == Some(End::ClientGone))).await;
    assert_eq!(decode.stats().transferring, 1, "the connection is gone, the request is not");
    within(decode.wait_until(idle)).await;
    assert!(left.elapsed() >= lag);
    // An abort by id does not wait.
    let body = joined(&chat("hi"), &prefill, ROOM + 1, "s");
    let second = sent(&decode, CHAT, &body.to_string()).await;
    within(decode.wait_until(|engine| engine.stats().transferring == 1)).await;
    drop(second);
    post(decode.address(), ABORT, r#"{"rid":"s"}"#).await;
    within(decode.wait_until(|engine| engine.stats().aborted == 1)).await;
}
