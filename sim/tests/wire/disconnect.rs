//! Clients that leave, in every phase, and engines that end.

use std::time::Duration;

use crate::client::{Client, get, post, within};
use tandem_sim::{Capacity, End, Engine, EngineConfig, Fault, Timing, start};
use tokio::io::AsyncWriteExt;

const TEXT: &str = "/v1/completions";
const BODY: &str = r#"{"prompt":"some words to compute","max_tokens":4}"#;
const PREFILL: &str =
    r#"{"prompt":"some words to compute","max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}"#;

/// A prefill takes an hour.
fn slow_prefill() -> Timing {
    Timing { prefill_base: Duration::from_hours(1), ..Timing::instant() }
}

async fn ended_as(engine: &Engine, end: End) {
    within(engine.wait_until(|engine| engine.records().iter().all(|record| record.ended() == Some(end)))).await;
    within(engine.wait_until(|engine| {
        let stats = engine.stats();
        stats.running + stats.waiting + stats.held + stats.live_requests == 0 && stats.kv_used_tokens == 0
    }))
    .await;
}

#[tokio::test]
async fn leaving_while_held_is_noticed() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let hold = engine.hold();
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], BODY).await;
    within(hold.wait_for(1)).await;
    drop(client);
    ended_as(&engine, End::ClientGone).await;
    assert_eq!((hold.waiting(), engine.stats().clients_gone, engine.records()[0].status), (0, 1, None));
}

#[tokio::test]
async fn leaving_during_prefill_and_in_its_queue_frees_everything() {
    let engine = start(EngineConfig::prefill("m").timing(slow_prefill())).await.unwrap();
    let (mut computing, mut queued) =
        (Client::connect(engine.address()).await, Client::connect(engine.address()).await);
    computing.post(TEXT, &[], PREFILL).await;
    within(engine.wait_until(|engine| engine.stats().running == 1)).await;
    queued.post(TEXT, &[], PREFILL).await;
    within(engine.wait_until(|engine| engine.stats().waiting == 1)).await;
    assert!(
        get(engine.address(), "/metrics")
            .await
            .body
            .contains("vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 1.0")
    );
    let left = tokio::time::Instant::now();
    drop(computing);
    // The queue moves up when its head leaves.
    within(engine.wait_until(|engine| engine.stats().waiting == 0 && engine.stats().running == 1)).await;
    drop(queued);
    ended_as(&engine, End::ClientGone).await;
    assert_eq!(engine.stats().pinned_requests, 0);
    let (noticed, _) = engine.records()[0].end.unwrap();
    assert!(noticed.saturating_duration_since(left) < Duration::from_secs(1));
}

#[tokio::test]
async fn leaving_while_waiting_for_room_is_noticed() {
    let capacity = Capacity { kv_tokens: 128, max_model_len: 100, ..EngineConfig::default().capacity };
    let timing = Timing { decode_base: Duration::from_hours(1), ..Timing::instant() };
    let engine = start(EngineConfig::combined("m").capacity(capacity).timing(timing)).await.unwrap();
    let body = r#"{"prompt":"x","max_tokens":90}"#;
    let (mut running, mut waiting) = (Client::connect(engine.address()).await, Client::connect(engine.address()).await);
    running.post(TEXT, &[], body).await;
    within(engine.wait_until(|engine| engine.stats().running == 1)).await;
    waiting.post(TEXT, &[], body).await;
    within(engine.wait_until(|engine| engine.stats().waiting == 1)).await;
    drop(waiting);
    within(engine.wait_until(|engine| engine.stats().waiting == 0)).await;
    assert_eq!(engine.stats().running, 1);
    drop(running);
    ended_as(&engine, End::ClientGone).await;
}

#[tokio::test]
async fn leaving_a_stream_is_noticed_although_nothing_is_written() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    engine.script(Fault::on(TEXT).stall_after(2));
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], r#"{"prompt":"x","max_tokens":9,"stream":true}"#).await;
    assert_eq!(client.head().await.0, 200);
    client.chunk().await.unwrap();
    client.chunk().await.unwrap();
    assert_eq!(engine.records()[0].ended(), None);
    drop(client);
    ended_as(&engine, End::ClientGone).await;
    assert_eq!(engine.records()[0].status, Some(200));
}

#[tokio::test]
async fn a_half_close_counts_as_leaving() {
    let engine = start(EngineConfig::combined("m").timing(slow_prefill())).await.unwrap();
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], BODY).await;
    within(engine.wait_until(|engine| engine.stats().running == 1)).await;
    client.socket.shutdown().await.unwrap();
    ended_as(&engine, End::ClientGone).await;
    client.closed().await.unwrap();
}

#[tokio::test]
async fn leaving_inside_the_own_body_is_noticed() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let mut client = Client::connect(engine.address()).await;
    client.socket.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{").await.unwrap();
    within(engine.wait_until(|engine| engine.records().len() == 1)).await;
    drop(client);
    ended_as(&engine, End::ClientGone).await;
    assert_eq!(engine.records()[0].body_length, 0);
}

#[tokio::test]
async fn leaving_a_decode_that_waits_frees_the_prefill_engine() {
    let prefill = start(EngineConfig::prefill("m")).await.unwrap();
    let timing = Timing { transfer_base: Duration::from_hours(1), ..Timing::instant() };
    let decode = start(EngineConfig::decode("m").timing(timing)).await.unwrap();
    let first = post(prefill.address(), TEXT, PREFILL).await.json();
    let mut body: serde_json::Value = serde_json::from_str(BODY).unwrap();
    body["kv_transfer_params"] = first["kv_transfer_params"].clone();
    body["kv_transfer_params"]["remote_host"] = "127.0.0.1".into();
    let mut client = Client::connect(decode.address()).await;
    client.post(TEXT, &[], &body.to_string()).await;
    within(decode.wait_until(|engine| engine.stats().waiting == 1 && engine.stats().kv_used_tokens > 0)).await;
    assert_eq!(prefill.stats().pinned_requests, 1);
    drop(client);
    ended_as(&decode, End::ClientGone).await;
    within(prefill.wait_until(|engine| engine.stats().pinned_requests == 0)).await;
}

#[tokio::test]
async fn a_killed_engine_resets_and_refuses() {
    let engine = start(EngineConfig::combined("m").timing(slow_prefill())).await.unwrap();
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], BODY).await;
    within(engine.wait_until(|engine| engine.stats().running == 1)).await;
    engine.kill();
    within(engine.ended()).await;
    assert_eq!(client.closed().await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert!(tokio::net::TcpStream::connect(engine.address()).await.is_err());
    assert_eq!(engine.records()[0].ended(), Some(End::Killed));
    assert_eq!((engine.stats().running, engine.stats().kv_used_tokens), (0, 0));
    // Its address is free for its successor.
    let again = start(EngineConfig::combined("m").at(engine.address().ip(), engine.address().port())).await.unwrap();
    assert_eq!(post(again.address(), TEXT, BODY).await.status, 200);
}

#[tokio::test]
async fn a_stopped_engine_finishes_what_it_serves() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let hold = engine.hold();
    let mut idle = Client::connect(engine.address()).await;
    idle.send("GET", "/version", &[], "").await;
    idle.answer().await;
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], BODY).await;
    within(hold.wait_for(1)).await;
    let stopping = tokio::spawn({
        let engine = engine.clone();
        async move { engine.stop().await }
    });
    idle.closed().await.unwrap();
    hold.release();
    assert_eq!(client.answer().await.status, 200);
    within(stopping).await.unwrap();
    assert_eq!(engine.records().last().unwrap().ended(), Some(End::Completed));
}

#[tokio::test]
async fn a_terminated_engine_aborts_its_streams() {
    let timing = Timing { decode_base: Duration::from_hours(1), ..Timing::instant() };
    let engine = start(EngineConfig::combined("m").timing(timing)).await.unwrap();
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], r#"{"prompt":"x","max_tokens":9,"stream":true}"#).await;
    client.head().await;
    client.chunk().await.unwrap();
    within(engine.terminate(Duration::from_secs(10))).await;
    let rest = [client.chunk().await.unwrap(), client.chunk().await.unwrap()];
    assert!(rest[0].contains(r#""finish_reason":"abort""#) && rest[1] == "data: [DONE]\n\n", "{rest:?}");
}

#[tokio::test]
async fn a_closed_listener_opens_again() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let mut open = Client::connect(engine.address()).await;
    within(engine.pause_listening()).await;
    assert!(tokio::net::TcpStream::connect(engine.address()).await.is_err());
    engine.resume_listening().await.unwrap();
    assert_eq!(post(engine.address(), TEXT, BODY).await.status, 200);
    // A connection that was accepted before lives on; one that still waited to be accepted went with the listener.
    open.post(TEXT, &[], BODY).await;
}
