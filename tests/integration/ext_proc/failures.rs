//! What the client gets when a stage fails (R84), before and after the answer's head is out (R85).

use std::time::Duration;

use serde_json::Value;
use tandem_sim::{Cut, Fault};

use super::{CHAT, chat, fleet_shows, pods};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::envoy::{Envoy, EnvoyOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Answer, Call, RawConnection};
use crate::harness::processor::closed_port;
use crate::harness::raw::RawServer;
use crate::harness::{SOON, eventually, within};

async fn sandbox() -> Sandbox {
    let env = vec![("AIBRIX_PREFILL_REQUEST_TIMEOUT".to_owned(), "1".to_owned())];
    let fleet = FleetOptions { replicas: 1, env, ..FleetOptions::default() };
    Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await
}

/// An error answer: one JSON error object with a message.
async fn error(answer: Answer, status: u16, marker: &str) -> Value {
    assert_eq!(answer.status, status);
    assert_eq!(answer.header("content-type"), "application/json");
    if !marker.is_empty() {
        assert_eq!(answer.header(marker), "true", "{:?}", answer.headers);
        assert!(!answer.header("request-id").is_empty());
    }
    let body = answer.json().await;
    assert!(body["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{body}");
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn r84_a_failing_prefill_is_an_answer() {
    let sandbox = sandbox().await;
    let prefill = &sandbox.prefill[0];
    let on = || Fault::on("/v1/");
    let refusal = r#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#;
    let cases = [
        ("not JSON", on().answer(200, "application/json", "hello"), 502),
        ("a list", on().answer(200, "application/json", "[]"), 502),
        ("nothing", on().answer(200, "application/json", ""), 502),
        ("reset before the head", on().cut_before_head(Cut::Reset), 503),
        ("closed before the head", on().cut_before_head(Cut::Close), 503),
        ("reset in the body", on().cut_after(1, Cut::Reset), 503),
        ("closed in the body", on().cut_after(1, Cut::Close), 503),
        ("hangs before the head", on().head_delay(Duration::from_mins(10)), 503),
        ("hangs in the body", on().stall_after(1), 503),
        ("500", on().answer(500, "text/plain", "boom"), 503),
        ("503 of a proxy", on().answer(503, "text/html", "<html>"), 503),
        ("redirect", on().answer_raw(302, &[("location", "http://10.9.9.9/")], Vec::new(), false), 503),
        ("400", on().answer(400, "application/json", refusal), 400),
        ("404 as text", on().answer(404, "text/plain", "no such model"), 404),
    ];
    for path in sandbox.paths() {
        for (name, fault, status) in &cases {
            prefill.script(fault.clone());
            let answer = Call::post(&path, CHAT, chat(true)).send().await;
            assert_eq!(answer.status, *status, "{name}");
            let body = error(answer, *status, "x-error-pd-prefill").await;
            let told = body["error"]["message"].as_str().unwrap();
            assert!(!told.contains("127.0.0.1"), "{name}: an internal address in {told}");
            assert!(sandbox.decode[0].records().is_empty(), "{name}: the decode pod never hears of it");
        }
        prefill.pause_listening().await;
        // Connections from before are used up first; new ones are refused.
        prefill.script(on().close_connection().always());
        eventually(SOON, "the pod refuses connections", async || {
            let answer = Call::post(&path, CHAT, chat(true)).send().await;
            if answer.status == 200 {
                assert!(answer.events().collect().await.1);
                return None;
            }
            error(answer, 503, "x-error-pd-prefill").await;
            Some(())
        })
        .await;
        prefill.clear_faults();
        prefill.resume_listening().await.expect("the same port");
        let answer = Call::post(&path, CHAT, chat(true)).send().await;
        assert_eq!(answer.status, 200, "the next request is served");
        assert!(answer.events().collect().await.1);
        sandbox.clear();
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r84_r85_a_failing_decode_is_an_answer_or_a_cut() {
    let mut sandbox = sandbox().await;
    let on = || Fault::on("/v1/");
    let paths = sandbox.paths();
    for (index, path) in paths.iter().enumerate() {
        let marker = if index == 0 { "" } else { "x-error-pd-decode" };
        // Before the head: a status. Through Envoy it is Envoy's own.
        for how in [Cut::Reset, Cut::Close] {
            sandbox.decode[0].script(on().cut_before_head(how));
            error(Call::post(path, CHAT, chat(true)).send().await, 503, marker).await;
        }
        // What the engine says is the engine's business.
        sandbox.decode[0].script(on().answer(200, "text/plain", "what?"));
        let answer = Call::post(path, CHAT, chat(true)).send().await;
        assert_eq!((answer.status.as_u16(), answer.header("content-type")), (200, "text/plain"));
        assert_eq!(answer.body().await.bytes, "what?");
        // After the head: a cut, which cannot be taken for an end.
        for how in [Cut::Reset, Cut::Close] {
            sandbox.decode[0].script(on().cut_after(2, how));
            let answer = Call::post(path, CHAT, chat(true)).send().await;
            assert_eq!(answer.status, 200);
            let (events, complete) = answer.events().collect().await;
            assert!(!complete, "{how:?}: {events:?}");
            assert!(!events.iter().any(|event| event == "[DONE]"), "{events:?}");
            sandbox.decode[0].script(on().cut_after(1, how));
            let answer = Call::post(path, CHAT, chat(false)).send().await;
            assert!(answer.status == 503 || !answer.body().await.complete, "{how:?}: half a JSON body is no answer");
        }
    }
    let metrics = sandbox.fleet.tandems[0].metrics().await;
    // The front sees the engine break off. Behind Envoy that looks as if the client had left.
    assert_eq!(metrics.sum("gateway_request_model_fail_total", &[("status", "gateway_rsp_body_fail")]), 4.0);
    assert_eq!(metrics.sum("gateway_request_model_fail_total", &[("status", "pd_decode_failure")]), 2.0);
    // The address answers, but not in HTTP.
    let nonsense = RawServer::answering("SSH-2.0-OpenSSH_9.9\r\n\r\n").await;
    sandbox.fleet.pods.change("d0", |pod| pod.label("model.aibrix.ai/port", &nonsense.address().port().to_string()));
    let address = nonsense.address().to_string();
    let changed = |page: &Value| pods(page).iter().any(|pod| pod["address"] == address.as_str());
    fleet_shows(&sandbox.fleet.tandems[0], "the changed pod", changed).await;
    for (index, path) in paths.iter().enumerate() {
        let answer = Call::post(path, CHAT, chat(true)).send().await;
        let status = answer.status.as_u16();
        assert!([502, 503].contains(&status), "{status}");
        error(answer, status, if index == 0 { "" } else { "x-error-pd-decode" }).await;
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r84_pods_that_vanish_in_between_are_an_answer() {
    let mut sandbox = sandbox().await;
    let paths = sandbox.paths();
    // Bodies that are still under way when the fleet goes.
    let body = chat(false);
    let mut halves = Vec::new();
    for path in &paths {
        let mut connection = RawConnection::open(path).await;
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        connection.send(head.as_bytes()).await;
        connection.send(&body[..20]).await;
        halves.push(connection);
    }
    // And requests whose prefill leg runs: they keep the snapshot that they began with.
    let hold = sandbox.prefill[0].hold();
    let running: Vec<_> = paths.iter().map(|path| tokio::spawn(Call::post(path, CHAT, chat(false)).send())).collect();
    within("both legs", hold.wait_for(2)).await;
    for pod in ["p0", "d0"] {
        sandbox.fleet.pods.remove(pod);
    }
    let tandem = &sandbox.fleet.tandems[0];
    fleet_shows(tandem, "the fleet is empty", |page| pods(page).is_empty()).await;
    hold.release();
    for request in running {
        let answer = request.await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(answer.json().await["usage"]["completion_tokens"], 8);
    }
    for mut connection in halves {
        connection.send(&body[20..]).await;
        let answer = String::from_utf8_lossy(&connection.read_to_end().await).into_owned();
        // The model is known: it was served a moment ago.
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert!(answer.contains("x-error-no-model-backends: true\r\n"), "{answer}");
        assert!(answer.contains("retry-after: 10\r\n"), "{answer}");
    }
    // Pods that are there but not ready: the model is known, and nobody serves it.
    let unready =
        |name: &str| crate::harness::pods::PodManifest::new(name, "m", sandbox.decode[0].address()).ready(false);
    sandbox.fleet.pods.put([unready("p0"), unready("d0")]);
    let tandem = &sandbox.fleet.tandems[0];
    fleet_shows(tandem, "the pods are back", |page| pods(page).len() == 2).await;
    for path in &paths {
        let body = error(Call::post(path, CHAT, chat(false)).send().await, 503, "x-error-no-model-backends").await;
        assert_eq!(
            (&body["error"]["code"], &body["error"]["type"]),
            (&"service_unavailable".into(), &"overloaded_error".into())
        );
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r85_a_shutdown_cuts_an_answer_whose_head_is_out() {
    let env = [("TANDEM_DRAIN_PROPAGATION_SECONDS", "0"), ("TANDEM_DRAIN_TIMEOUT_SECONDS", "1")];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let fleet = FleetOptions { replicas: 1, env, ..FleetOptions::default() };
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    sandbox.decode[0].script(Fault::on("/v1/").stall_after(2).always());
    let mut streams = Vec::new();
    for path in sandbox.paths() {
        let mut events = Call::post(&path, CHAT, chat(true)).send().await.events();
        assert!(events.next().await.is_some());
        streams.push(events);
    }
    sandbox.fleet.tandems[0].sigterm();
    for events in streams {
        let (rest, complete) = events.collect().await;
        assert!(!complete && !rest.iter().any(|event| event == "[DONE]"), "{rest:?}");
    }
    assert!(sandbox.fleet.tandems[0].exited(SOON).await.success());
    // The engine hears of it as well.
    let left = |engine: &tandem_sim::Engine| engine.stats().live_requests == 0;
    within("the engine's requests end", sandbox.decode[0].wait_until(left)).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overloaded_envoy_answers_like_everything_else() {
    let full = |config: &mut Value| {
        let monitor = &mut config["overload_manager"]["resource_monitors"][0]["typed_config"];
        assert!(monitor["max_heap_size_bytes"].is_number());
        monitor["max_heap_size_bytes"] = 1.into();
    };
    let nobody = closed_port();
    let options = EnvoyOptions {
        failover: None,
        tandem_grpc: vec![nobody],
        tandem_http: nobody,
        healthy: Some(0),
        otel: None,
        edit: Some(full),
    };
    let envoy = Envoy::start_with(options).await;
    let body = eventually(SOON, "it notices that its memory is full", async || {
        let answer = Call::post(&envoy.base(), CHAT, chat(true)).send().await;
        let body = error(answer, 503, "").await;
        (body["error"]["message"] == "the proxy is overloaded").then_some(body)
    })
    .await;
    assert_eq!(body["error"]["type"], "overloaded_error");
}
