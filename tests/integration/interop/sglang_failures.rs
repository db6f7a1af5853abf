//! SGLang, cases 21 to 26: either leg fails, or is silent. Each engine is told, and the client hears of it at once.

use std::time::Duration;

use serde_json::{Value, json};
use tandem_sim::{Cut, End, Engine, Fault, StreamHead, Timing};
use tokio::time::Instant;

use super::{calls, ended, only_work};
use crate::bodies::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::{Answer, Call};
use crate::harness::within;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":12}"#;
const ABORT: &str = "/abort_request";
const FAILED: &str = "gateway_pd_prefill_failure_total";
const ABORTED: &str = "gateway_pd_decode_abort_total";
const NEVER: Duration = Duration::from_mins(10);

fn streamed() -> String {
    BODY.replace("12}", "12,\"stream\":true}")
}

fn options() -> SandboxOptions {
    SandboxOptions::of(tandem_sim::EngineConfig::sglang).env(&[("AIBRIX_DECODE_ABORT_RETRY_DELAY", "0.3")])
}

/// The answer is one error object with this status, marker and beginning of a message.
async fn assert_error(answer: Answer, status: u16, marker: &str, message: &str) {
    assert_eq!(answer.status, status);
    assert_eq!(answer.header(marker), "true");
    assert!(!answer.header("request-id").is_empty());
    let said = answer.json().await["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(said.starts_with(message), "{said}");
}

/// The abort calls at an engine are all for its one request.
fn assert_aborts(engine: &Engine, count: usize) {
    let rid = only_work(engine).json()["rid"].clone();
    let aborts = engine.records_for(ABORT);
    assert_eq!(aborts.len(), count, "{aborts:?}");
    for abort in aborts {
        assert_eq!(abort.json(), json!({ "rid": rid }));
        assert_eq!((abort.method.as_str(), abort.header("content-type")), ("POST", Some("application/json")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_21_r30_prefill_fails_while_decode_waits() {
    let sandbox = Sandbox::start(options()).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let failing =
        |status, body: &'static str| Fault::on("/v1/").answer(status, "application/json", body).close_connection();
    let flat = r#"{"object":"error","message":"out of memory","type":"500","param":null,"code":500}"#;
    let mut done = 0.0;
    for path in sandbox.paths() {
        for body in [BODY.to_owned(), streamed()] {
            for (fault, status, message) in [
                (failing(500, flat), 500, "prefill request failed (http_status): out of memory"),
                (failing(400, r#"{"detail":"too long"}"#), 400, "prefill request failed (http_status): too long"),
                (failing(204, ""), 502, "prefill request failed (http_status): status 204"),
                (Fault::on("/v1/").cut_before_head(Cut::Reset), 503, "prefill request failed (transport): "),
            ] {
                sandbox.clear();
                // The failure comes when decode surely waits for it.
                let hold = prefill.hold();
                prefill.script(fault);
                let call = tokio::spawn(Call::post(&path, CHAT, body.clone()).try_send());
                within("decode waits", decode.wait_until(|decode| decode.stats().transferring == 1)).await;
                within("prefill waits", hold.wait_for(1)).await;
                // Behind Envoy a stream's head may be out; SGLang sends it before it has anything.
                hold.release();
                let failed = Instant::now();
                let answer = within("the answer", call).await.unwrap().unwrap();
                if answer.status == 200 {
                    assert!(body != BODY && sandbox.fleet.paths()[0] == path, "only Envoy passes a head on");
                    let answered = answer.body().await;
                    assert!(!answered.complete && answered.bytes.is_empty());
                } else {
                    assert_error(answer, status, "x-error-pd-prefill", message).await;
                }
                assert!(failed.elapsed() < Duration::from_secs(2), "{:?}", failed.elapsed());
                let aborts = calls(decode, ABORT, 2).await;
                assert!(aborts[1].received_at - aborts[0].received_at > Duration::from_millis(250));
                assert_aborts(decode, 2);
                assert!(prefill.records_for(ABORT).is_empty(), "it knows");
                ended(decode).await;
                only_work(prefill);
                done += 1.0;
            }
        }
    }
    let class = |class| [("class", class), ("stage", "before_response")];
    wait_total(&sandbox.fleet, FAILED, &class("http_status"), done * 0.75).await;
    wait_total(&sandbox.fleet, FAILED, &class("transport"), done * 0.25).await;
    wait_total(&sandbox.fleet, ABORTED, &[("result", "ok"), ("prefill_failure_class", "http_status")], done * 1.5)
        .await;
    wait_total(&sandbox.fleet, ABORTED, &[], done * 2.0).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_21_prefill_cannot_be_reached() {
    let sandbox = Sandbox::start(options()).await;
    sandbox.prefill[0].pause_listening().await;
    for path in sandbox.paths() {
        sandbox.clear();
        let hold = sandbox.decode[0].hold();
        let answer = Call::post(&path, CHAT, BODY).send().await;
        assert_error(answer, 503, "x-error-pd-prefill", "prefill request failed (transport): ").await;
        hold.release();
        assert!(sandbox.prefill[0].records().is_empty());
    }
    wait_total(&sandbox.fleet, FAILED, &[("class", "transport"), ("stage", "before_response")], 2.0).await;
    sandbox.prefill[0].resume_listening().await.unwrap();
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_21_r30_prefill_hangs() {
    let sandbox = Sandbox::start(options().env(&[("AIBRIX_PREFILL_REQUEST_TIMEOUT", "1")])).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    for path in sandbox.paths() {
        sandbox.clear();
        prefill.script(Fault::on("/v1/").hang());
        let answer = Call::post(&path, CHAT, BODY).send().await;
        let message = "prefill request failed (timeout): no answer within 1 s";
        assert_error(answer, 503, "x-error-pd-prefill", message).await;
        // The prefill pod too: it is not done with the request.
        for engine in [decode, prefill] {
            calls(engine, ABORT, 2).await;
            assert_aborts(engine, 2);
        }
        ended(decode).await;
        assert_eq!(ended(prefill).await.ended(), Some(End::ClientGone));
    }
    wait_total(&sandbox.fleet, FAILED, &[("class", "timeout"), ("stage", "before_response")], 2.0).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_22_prefill_fails_after_decode_has_spoken() {
    let sandbox = Sandbox::start(options()).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let mut done = 0.0;
    for path in sandbox.paths() {
        sandbox.clear();
        // The KV has moved; only the answer about it is late, and broken.
        prefill.script(Fault::on("/v1/").first_byte_delay(Duration::from_millis(400)).cut_after(1, Cut::Reset));
        decode.script(Fault::on("/v1/").slow_bytes(200, Duration::from_millis(60)));
        let (events, complete) = Call::post(&path, CHAT, streamed()).send().await.events().collect().await;
        assert!(complete);
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
        done += 1.0;
        wait_total(&sandbox.fleet, FAILED, &[("class", "transport"), ("stage", "after_response")], done).await;
        wait_total(&sandbox.fleet, ABORTED, &[("result", "skipped_streaming")], done).await;
        assert_aborts(decode, 0);
        assert_aborts(prefill, 0);
    }
    assert_eq!(total(&sandbox.fleet, ABORTED, &[]).await, done);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_23_prefill_200_with_invalid_json() {
    let sandbox = Sandbox::start(options()).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let said = r#"{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}]}"#;
    let mut done = 0.0;
    for path in sandbox.paths() {
        sandbox.clear();
        let hold = decode.hold();
        prefill.script(Fault::on("/v1/").bad_json());
        decode.script(Fault::on("/v1/").answer(200, "application/json", said));
        let call = tokio::spawn(Call::post(&path, CHAT, BODY).send());
        within("decode waits", hold.wait_for(1)).await;
        ended(prefill).await;
        done += 1.0;
        wait_total(&sandbox.fleet, FAILED, &[("class", "bad_response"), ("stage", "before_response")], done).await;
        hold.release();
        let answer = within("the answer", call).await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(answer.body().await.bytes, said);
        assert_aborts(decode, 0);
    }
    assert_eq!(total(&sandbox.fleet, ABORTED, &[]).await, 0.0);
    sandbox.close().await;
}

/// Counters of the watchdog: requests, and one abort each.
async fn assert_watchdog(sandbox: &Sandbox, phase: &str, fired: f64) {
    let fleet = &sandbox.fleet;
    let labels = [("status", "pd_decode_watchdog"), ("status_code", "504")];
    wait_total(fleet, "gateway_request_model_fail_total", &labels, fired).await;
    wait_total(fleet, "gateway_pd_decode_watchdog_total", &[("phase", phase)], fired).await;
    let trigger = format!("watchdog_{phase}");
    wait_total(fleet, ABORTED, &[("result", "ok"), ("prefill_failure_class", &trigger)], fired).await;
    assert_eq!(total(fleet, ABORTED, &[]).await, fired);
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_24_r40_decode_sends_a_head_and_nothing_more() {
    let sandbox = Sandbox::start(options().env(&[("AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT", "0.4")])).await;
    let decode = &sandbox.decode[0];
    for (place, path) in sandbox.paths().into_iter().enumerate() {
        sandbox.clear();
        decode.script(Fault::on("/v1/").stall_after(0));
        let answer = Call::post(&path, CHAT, streamed()).send().await;
        if place == 0 {
            // Envoy has passed the head on.
            assert_eq!(answer.status, 200);
            let body = answer.body().await;
            assert!(!body.complete && body.bytes.is_empty());
        } else {
            let text = "decode pod d0 did not start responding within 0.4 s";
            assert_error(answer, 504, "x-error-pd-decode", text).await;
        }
        ended(decode).await;
        calls(decode, ABORT, 1).await;
        assert_watchdog(&sandbox, "first_response", place as f64 + 1.0).await;
        assert_aborts(decode, 1);
        assert_aborts(&sandbox.prefill[0], 0);
    }
    sandbox.close().await;
}

/// Engines of newer versions send no head before the first token.
#[tokio::test(flavor = "multi_thread")]
async fn interop_24_r40_decode_sends_nothing() {
    let engine = |config: tandem_sim::EngineConfig| {
        let config = config.sglang().stream_head(StreamHead::WithFirstToken);
        config.timing(Timing { decode_base: NEVER, ..Timing::instant() })
    };
    let options = SandboxOptions { engine, ..options() };
    let sandbox = Sandbox::start(options.env(&[("AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT", "0.4")])).await;
    let decode = &sandbox.decode[0];
    for (place, path) in sandbox.paths().into_iter().enumerate() {
        sandbox.clear();
        let answer = Call::post(&path, CHAT, streamed()).send().await;
        assert_error(answer, 504, "x-error-pd-decode", "decode pod d0 did not start responding within 0.4 s").await;
        assert_watchdog(&sandbox, "first_response", place as f64 + 1.0).await;
        assert_aborts(decode, 1);
        ended(decode).await;
        assert_eq!(only_work(&sandbox.prefill[0]).status, Some(200));
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_25_r40_decode_stalls_between_tokens() {
    let sandbox = Sandbox::start(options().env(&[("AIBRIX_DECODE_STREAM_IDLE_TIMEOUT", "0.6")])).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let mut fired = 0.0;
    for path in sandbox.paths() {
        sandbox.clear();
        // Slow, but never silent for long: each event comes in two pieces, and all of them take twice the limit.
        let started = Instant::now();
        decode.script(Fault::on("/v1/").slow_bytes(200, Duration::from_millis(60)));
        let (events, complete) = Call::post(&path, CHAT, streamed()).send().await.events().collect().await;
        assert!(complete && events.last().is_some_and(|event| event == "[DONE]"));
        assert!(started.elapsed() > Duration::from_millis(1200), "{:?}", started.elapsed());
        assert_aborts(decode, 0);

        sandbox.clear();
        decode.script(Fault::on("/v1/").stall_after(4));
        let started = Instant::now();
        let (events, complete) = Call::post(&path, CHAT, streamed()).send().await.events().collect().await;
        assert!(!complete && events.len() == 4 && events.iter().all(|event| event != "[DONE]"), "{events:?}");
        assert!(started.elapsed() > Duration::from_millis(600));
        fired += 1.0;
        assert_watchdog(&sandbox, "stream_idle", fired).await;
        assert_aborts(decode, 1);
        ended(decode).await;

        // A sign of life from the transport is none from the model.
        sandbox.clear();
        prefill.script(Fault::on("/v1/").answer(200, "application/json", "{}"));
        let event = r#"data: {"choices":[{"index":0,"delta":{"content":"a"}}]}"#;
        let writes = std::iter::once(format!("{event}\n\n")).chain(std::iter::repeat_n(": ping\n\n".to_owned(), 100));
        decode.script(
            Fault::on("/v1/").stream(writes.map(Into::into).collect()).slow_bytes(1 << 16, Duration::from_millis(100)),
        );
        let (events, complete) = Call::post(&path, CHAT, streamed()).send().await.events().collect().await;
        assert!(!complete && events.len() == 1, "{events:?}");
        fired += 1.0;
        assert_watchdog(&sandbox, "stream_idle", fired).await;
        assert_aborts(decode, 1);
        ended(decode).await;
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_26_r40_a_whole_answer_has_a_timer_when_asked_for() {
    let engine = |config: tandem_sim::EngineConfig| {
        config.sglang().timing(Timing { decode_base: Duration::from_millis(100), ..Timing::instant() })
    };
    let pod = |pod: crate::harness::pods::PodManifest| {
        let profile = |config: Value| json!({"routingStrategy": "pd", "routingConfig": {"pd": config}});
        pod.config(&json!({"profiles": {
            "default": profile(json!({})),
            "patient": profile(json!({"decodeResponseTimeout": 60})),
            "off": profile(json!({"decodeResponseTimeout": 0})),
        }}))
    };
    let options = SandboxOptions { engine, pod, ..options() };
    let sandbox = Sandbox::start(options.clone().env(&[("AIBRIX_DECODE_RESPONSE_TIMEOUT", "0.5")])).await;
    for (place, path) in sandbox.paths().into_iter().enumerate() {
        sandbox.clear();
        let answer = Call::post(&path, CHAT, BODY).send().await;
        assert_error(answer, 504, "x-error-pd-decode", "decode pod d0 did not finish responding within 0.5 s").await;
        assert_watchdog(&sandbox, "response", place as f64 + 1.0).await;
        assert_aborts(&sandbox.decode[0], 1);
        ended(&sandbox.decode[0]).await;
        // It is none of a stream's, and profiles have their own.
        assert_eq!(
            Call::post(&path, CHAT, streamed()).send().await.events().collect().await.0.last().unwrap(),
            "[DONE]"
        );
        for profile in ["patient", "off"] {
            let answer = Call::post(&path, CHAT, BODY).header("config-profile", profile).send().await;
            assert_eq!(answer.status, 200, "{profile}");
            assert_eq!(answer.json().await["usage"]["completion_tokens"], 12);
        }
    }
    sandbox.close().await;
    // What is no time keeps the default: no timer.
    for bad in ["-1", "abc"] {
        let sandbox = Sandbox::start(options.clone().env(&[("AIBRIX_DECODE_RESPONSE_TIMEOUT", bad)])).await;
        for path in sandbox.paths() {
            assert_eq!(Call::post(&path, CHAT, BODY).send().await.status, 200, "{bad}");
        }
        assert_eq!(total(&sandbox.fleet, "gateway_pd_decode_watchdog_total", &[]).await, 0.0);
        sandbox.close().await;
    }
}
