//! Scripted faults, as a client sees them.

use std::time::Duration;

use crate::client::{Client, get, post, within};
use bytes::Bytes;
use tandem_sim::{Cut, End, EngineConfig, Fault, start};

const TEXT: &str = "/v1/completions";
const STREAM: &str = r#"{"prompt":"x","max_tokens":5,"stream":true}"#;
const WHOLE: &str = r#"{"prompt":"x","max_tokens":5}"#;

#[tokio::test]
async fn an_answer_can_be_given_word_for_word() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    engine.script(Fault::on("/v1/").answer(503, "text/html", "<h1>busy</h1>").times(2));
    engine.script(Fault::on("/metrics").answer(200, "text/plain", "vllm:num_requests_running NaN\n"));
    for _ in 0..2 {
        let answer = post(engine.address(), TEXT, "not even JSON").await;
        assert_eq!((answer.status, answer.body.as_str()), (503, "<h1>busy</h1>"));
        assert_eq!((answer.header("content-type"), answer.header("server")), (Some("text/html"), None));
    }
    assert_eq!(post(engine.address(), TEXT, WHOLE).await.status, 200);
    assert!(get(engine.address(), "/metrics").await.body.contains("NaN"));
    engine.script(Fault::on(TEXT).answer_raw(204, &[("x-a", "1"), ("x-a", "2"), ("bad name", "x")], vec![], false));
    let empty = post(engine.address(), TEXT, WHOLE).await;
    assert_eq!((empty.status, empty.head.matches("x-a: ").count()), (204, 2));
    let binary = Bytes::from_static(&[0x1f, 0x8b, 0xff]);
    engine.script(Fault::on(TEXT).answer_raw(200, &[("content-encoding", "gzip")], vec![binary], false));
    let zipped = post(engine.address(), TEXT, WHOLE).await;
    assert_eq!((zipped.header("content-encoding"), zipped.header("content-length")), (Some("gzip"), Some("3")));
    assert!(engine.records().iter().all(|record| record.ended() == Some(End::Completed)));
}

#[tokio::test]
async fn writes_arrive_as_they_were_scripted() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let writes = ["da", "ta: {\"a\":1}\r\n\r\nda", "ta: [DONE]\n\n"];
    engine.script(Fault::on(TEXT).stream(writes.iter().map(|write| Bytes::from(*write)).collect()));
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], STREAM).await;
    client.head().await;
    for write in writes {
        assert_eq!(client.chunk().await.as_deref(), Some(write));
    }
    assert_eq!(client.chunk().await, None);
}

#[tokio::test]
async fn split_bodies_join_to_the_same_answer() {
    let engine = start(EngineConfig { seed: Some(1), ..EngineConfig::combined("m") }).await.unwrap();
    let strip = |body: &str| body.split("\"created\"").last().unwrap().to_owned();
    let whole = post(engine.address(), TEXT, WHOLE).await;
    engine.script(Fault::on(TEXT).split(&[1, 7]).times(2));
    assert_eq!(strip(&post(engine.address(), TEXT, WHOLE).await.body), strip(&whole.body));
    let split = post(engine.address(), TEXT, STREAM).await;
    let plain = post(engine.address(), TEXT, STREAM).await;
    assert_eq!(split.events().len(), plain.events().len());
}

#[tokio::test]
async fn connections_are_cut_where_the_script_says() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    for (cut, reset) in [(Cut::Reset, true), (Cut::Close, false)] {
        engine.script(Fault::on(TEXT).cut_before_head(cut));
        let mut client = Client::connect(engine.address()).await;
        client.post(TEXT, &[], WHOLE).await;
        assert_eq!(client.closed().await.is_err(), reset);

        engine.script(Fault::on(TEXT).cut_after(2, cut));
        let mut client = Client::connect(engine.address()).await;
        client.post(TEXT, &[], STREAM).await;
        client.head().await;
        assert!(client.chunk().await.is_some() && client.chunk().await.is_some());
        assert!(client.chunk().await.is_none());

        engine.script(Fault::on(TEXT).cut_after(1, cut));
        let mut client = Client::connect(engine.address()).await;
        client.post(TEXT, &[], WHOLE).await;
        let half = client.answer().await;
        let length: usize = half.header("content-length").unwrap().parse().unwrap();
        assert!(!half.body.is_empty() && half.body.len() < length);
    }
    assert!(engine.records().iter().all(|record| record.ended() == Some(End::Reset)));
}

#[tokio::test]
async fn streams_end_badly_on_demand() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    engine.script(Fault::on(TEXT).error_event_after(2));
    let failed = post(engine.address(), TEXT, STREAM).await;
    let events = failed.events();
    assert_eq!((events.len(), events[3]), (4, "[DONE]"));
    assert!(events[2].starts_with(r#"{"error": {"message": "Internal server error""#));
    engine.script(Fault::on(TEXT).omit_done());
    let cut = post(engine.address(), TEXT, STREAM).await;
    assert_eq!((cut.events().len(), cut.body.contains("[DONE]")), (5, false));
    engine.script(Fault::on(TEXT).error_event_after(0));
    assert_eq!(post(engine.address(), TEXT, WHOLE).await.status, 200, "a whole answer has no events");
}

#[tokio::test]
async fn delays_hold_head_and_first_byte_back() {
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    let pause = Duration::from_millis(30);
    engine.script(Fault::on(TEXT).head_delay(pause));
    let began = tokio::time::Instant::now();
    post(engine.address(), TEXT, WHOLE).await;
    assert!(began.elapsed() >= pause);
    // The head does not wait for the first byte: a first byte that never comes leaves the head readable.
    engine.script(Fault::on(TEXT).first_byte_delay(Duration::from_hours(1)));
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], STREAM).await;
    assert_eq!(client.head().await.0, 200);
}

#[tokio::test]
async fn r87_connections_close_after_an_answer_or_when_idle() {
    let engine = start(EngineConfig::combined("m").keep_alive(Duration::from_millis(250))).await.unwrap();
    let mut client = Client::connect(engine.address()).await;
    for _ in 0..2 {
        client.post(TEXT, &[], WHOLE).await;
        assert_eq!(client.answer().await.status, 200);
    }
    client.closed().await.unwrap();
    let engine = start(EngineConfig::combined("m")).await.unwrap();
    engine.script(Fault::on(TEXT).close_connection());
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], WHOLE).await;
    assert_eq!(client.answer().await.header("connection"), Some("close"));
    client.closed().await.unwrap();
    engine.script(Fault::on(TEXT).idle_close(Duration::from_millis(20)));
    let mut client = Client::connect(engine.address()).await;
    client.post(TEXT, &[], WHOLE).await;
    client.answer().await;
    client.closed().await.unwrap();
}

/// The three engines, so that every fault is seen with each.
fn engines() -> [EngineConfig; 3] {
    [EngineConfig::combined("m"), EngineConfig::combined("m").sglang(), EngineConfig::combined("m").trtllm()]
}

fn whole() -> String {
    serde_json::json!({"model": "m", "prompt": "x", "max_tokens": 5}).to_string()
}

fn stream() -> String {
    serde_json::json!({"model": "m", "prompt": "x", "max_tokens": 5, "stream": true}).to_string()
}

#[tokio::test]
async fn every_engine_hangs_before_its_head_until_the_client_leaves() {
    for config in engines() {
        let engine = start(config).await.unwrap();
        engine.script(Fault::on(TEXT).hang());
        let mut client = Client::connect(engine.address()).await;
        client.post(TEXT, &[], &whole()).await;
        within(engine.wait_until(|engine| engine.records().first().is_some_and(|record| record.body_length > 0))).await;
        assert_eq!(engine.records()[0].status, None);
        drop(client);
        within(engine.wait_until(|engine| engine.records()[0].ended() == Some(End::ClientGone))).await;
    }
}

#[tokio::test]
async fn every_engine_hangs_after_its_head_and_in_the_middle() {
    for config in engines() {
        let engine = start(config).await.unwrap();
        for chunks in [0, 2] {
            engine.script(Fault::on(TEXT).stall_after(chunks));
            let mut client = Client::connect(engine.address()).await;
            client.post(TEXT, &[], &stream()).await;
            assert_eq!(client.head().await.0, 200);
            for _ in 0..chunks {
                client.chunk().await.unwrap();
            }
            let number = engine.records().len() - 1;
            assert_eq!(engine.records()[number].end, None);
            drop(client);
            within(engine.wait_until(|engine| engine.records()[number].ended() == Some(End::ClientGone))).await;
        }
    }
}

#[tokio::test]
async fn every_engine_resets_before_its_head_and_in_its_body() {
    for config in engines() {
        let engine = start(config).await.unwrap();
        for (fault, body) in [
            (Fault::on(TEXT).cut_before_head(Cut::Reset), whole()),
            (Fault::on(TEXT).cut_after(1, Cut::Reset), whole()),
            (Fault::on(TEXT).cut_after(2, Cut::Reset), stream()),
        ] {
            engine.script(fault);
            let mut client = Client::connect(engine.address()).await;
            client.post(TEXT, &[], &body).await;
            assert!(client.closed().await.is_err(), "a reset");
        }
        assert!(engine.records().iter().all(|record| record.ended() == Some(End::Reset)));
    }
}

#[tokio::test]
async fn every_engine_answers_nonsense_when_told_to() {
    for config in engines() {
        let engine = start(config).await.unwrap();
        engine.script(Fault::on(TEXT).bad_json());
        engine.script(Fault::on(TEXT).wrong_types());
        engine.script(Fault::on(TEXT).omit_done());
        let bad = post(engine.address(), TEXT, &whole()).await;
        assert_eq!((bad.status, serde_json::from_str::<serde_json::Value>(&bad.body).is_err()), (200, true));
        let wrong = post(engine.address(), TEXT, &whole()).await;
        assert_eq!((wrong.status, wrong.json()["choices"].is_array()), (200, false));
        let endless = post(engine.address(), TEXT, &stream()).await;
        assert!(!endless.events().is_empty() && !endless.events().contains(&"[DONE]"));
    }
}

#[tokio::test]
async fn slow_bytes_arrive_one_by_one() {
    for config in engines() {
        let engine = start(config).await.unwrap();
        let plain = post(engine.address(), TEXT, &stream()).await;
        engine.script(Fault::on(TEXT).slow_bytes(100, Duration::from_millis(2)));
        let mut client = Client::connect(engine.address()).await;
        client.post(TEXT, &[], &stream()).await;
        client.head().await;
        let began = tokio::time::Instant::now();
        let mut chunks = 0;
        while let Some(chunk) = client.chunk().await {
            assert!(chunk.len() <= 100);
            chunks += 1;
        }
        assert!(chunks >= 2 * 5 && plain.events().len() >= 6, "each event in several pieces: {chunks}");
        assert!(began.elapsed() >= Duration::from_millis(2) * (chunks - 6));
    }
}

#[tokio::test]
async fn a_crash_takes_everything_down() {
    for config in engines() {
        let engine = start(config).await.unwrap();
        engine.script(Fault::on(TEXT).stall_after(0));
        let mut other = Client::connect(engine.address()).await;
        other.post(TEXT, &[], &stream()).await;
        assert_eq!(other.head().await.0, 200);
        engine.script(Fault::on(TEXT).crash());
        assert_eq!(post(engine.address(), TEXT, &whole()).await.status, 500, "what made it die is told so");
        assert!(other.closed().await.is_err(), "whatever else was in flight is reset");
        within(engine.ended()).await;
        assert_eq!(engine.records()[0].ended(), Some(End::Killed));
        assert!(tokio::net::TcpStream::connect(engine.address()).await.is_err(), "nobody listens");
    }
}
