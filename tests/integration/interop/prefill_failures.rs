//! vLLM, cases 10, 11 and 16: prefill legs that fail, and one that must not.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tandem_sim::{Capacity, End, EngineConfig};
use tokio::sync::Semaphore;

use crate::bodies::{total, wait_total};
use crate::harness::engines::{Backend, MODEL, Sandbox, SandboxOptions, only, pd_by_default, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Call, base};
use crate::harness::oracle::oracle;
use crate::harness::pods::PodManifest;
use crate::harness::raw::{RawServer, Step, request_end};
use crate::harness::within;

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":5}"#;

#[tokio::test(flavor = "multi_thread")]
async fn interop_10_prefill_400_passes_through() {
    let sandbox = Sandbox::start(SandboxOptions {
        engine: |config| {
            let capacity = config.capacity;
            config.capacity(Capacity { max_model_len: 256, ..capacity })
        },
        ..SandboxOptions::default()
    })
    .await;
    let long = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(2000)}]}).to_string();
    let direct = Call::post(&base(sandbox.prefill[0].address()), PATH, long.clone()).send().await.body().await.bytes;
    for (done, path) in (0_u8..).zip(sandbox.paths()) {
        sandbox.clear();
        let answer = Call::post(&path, PATH, long.clone()).send().await;
        assert_eq!(answer.status, 400);
        assert_eq!(answer.header("x-error-pd-prefill"), "true");
        assert_eq!(answer.header("content-type"), "application/json");
        assert!(!answer.header("request-id").is_empty());
        let body = answer.body().await.bytes;
        assert!(String::from_utf8_lossy(&body).contains("maximum context length is 256 tokens"));
        assert_eq!(body, direct);
        assert_eq!(only(&sandbox.prefill[0]).status, Some(400), "one call, no retry");
        assert!(sandbox.decode[0].records().is_empty());
        let class = [("class", "http_status"), ("stage", "before_response")];
        wait_total(&sandbox.fleet, "gateway_pd_prefill_failure_total", &class, f64::from(done) + 1.0).await;
    }
    sandbox.close().await;
}

/// The timeout of the replica, a shorter one of a profile, and a longer one of another profile.
#[tokio::test(flavor = "multi_thread")]
async fn interop_11_prefill_hangs() {
    let mut options = SandboxOptions {
        pod: |pod| {
            let profile = |config| json!({"routingStrategy": "pd", "routingConfig": config});
            pod.config(&json!({"profiles": {
                "default": profile(json!({})),
                "hasty": profile(json!({"pd": {"prefillRequestTimeout": 1}})),
                "patient": profile(json!({"pd": {"prefillRequestTimeout": 120}})),
            }}))
        },
        ..SandboxOptions::default()
    };
    options.fleet.env.push(("AIBRIX_PREFILL_REQUEST_TIMEOUT".to_owned(), "2".to_owned()));
    let sandbox = Sandbox::start(options).await;
    let prefill = &sandbox.prefill[0];
    for path in sandbox.paths() {
        sandbox.clear();
        let hold = prefill.hold();
        let patient = tokio::spawn(Call::post(&path, PATH, BODY).header("config-profile", "patient").send());
        within("the patient one is there", hold.wait_for(1)).await;
        for (place, (profile, seconds)) in [("hasty", 1), ("default", 2)].into_iter().enumerate() {
            let answer = Call::post(&path, PATH, BODY).header("config-profile", profile).send().await;
            assert_eq!(answer.status, 503, "{profile}");
            assert_eq!(answer.header("x-error-pd-prefill"), "true");
            let error = answer.json().await["error"].clone();
            let message = format!("prefill request failed (timeout): no answer within {seconds} s");
            assert_eq!((&error["message"], &error["type"]), (&json!(message), &json!("overloaded_error")));
            let record = || prefill.records()[place + 1].clone();
            within("the leg is closed", prefill.wait_until(|_| record().end.is_some())).await;
            let record = record();
            let (ended, how) = record.end.expect("an end");
            assert_eq!(how, End::ClientGone, "{profile}");
            // The engine notes the head's arrival a moment after the timer has started.
            let lasted = ended - record.received_at;
            assert!(lasted > Duration::from_millis(seconds * 1000 - 500), "{profile}: {lasted:?}");
        }
        assert!(sandbox.decode[0].records().is_empty());
        assert!(!patient.is_finished(), "its own limit is longer");
        hold.release();
        assert_eq!(within("the patient one", patient).await.unwrap().status, 200);
    }
    assert_eq!(total(&sandbox.fleet, "gateway_pd_prefill_failure_total", &[("class", "timeout")]).await, 4.0);
    assert_eq!(total(&sandbox.fleet, "gateway_pd_prefill_failure_total", &[]).await, 4.0);
    sandbox.close().await;
}

/// A prefill pod that is a script, and a decode engine that also serves the metrics of both. One replica: its pool of
/// connections is what is tested.
async fn scripted_prefill(scripts: Vec<Vec<Step>>) -> (RawServer, tandem_sim::Engine, Fleet) {
    let prefill = RawServer::start(scripts).await;
    let decode = start_engine(EngineConfig::decode(MODEL)).await;
    let pods =
        [("p0", "prefill", prefill.address()), ("d0", "decode", decode.address())].map(|(name, role, address)| {
            let metric_port = decode.address().port().to_string();
            let pod = PodManifest::new(name, MODEL, address).role("rs0", role).config(&pd_by_default());
            pod.label("model.aibrix.ai/metric-port", &metric_port)
        });
    let fleet = Fleet::start(pods, FleetOptions { replicas: 1, ..FleetOptions::default() }).await;
    (prefill, decode, fleet)
}

fn prefill_answer() -> Step {
    let body = r#"{"id":"x","object":"chat.completion","choices":[],"kv_transfer_params":null}"#;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    Step::Send(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).into_bytes())
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_16_keep_alive_race() {
    let gate = Arc::new(Semaphore::new(0));
    // Both sorts of close, each twice for each way in.
    let close = vec![Step::ReadRequest, prefill_answer(), Step::Gate(Arc::clone(&gate))];
    let reset = [close.clone(), vec![Step::Reset]].concat();
    let (prefill, decode, fleet) = scripted_prefill(vec![[close, reset]; 4].concat()).await;
    let mut sent = 0;
    for path in fleet.paths() {
        for _ in 0..4 {
            let answer = Call::post(&path, PATH, BODY).send().await;
            assert_eq!(answer.status, 200, "request {sent} after the pooled connection was closed");
            // The connection idles in the pool; now the pod closes it.
            gate.add_permits(1);
            let connection = prefill.wait_for(sent, |connection| connection.done).await;
            assert!(!connection.closed_by_peer);
            sent += 1;
        }
    }
    for connection in prefill.connections() {
        assert_eq!(request_end(&connection.received), Some(connection.received.len()), "one complete request");
    }
    assert_eq!((prefill.connections().len(), decode.records().len()), (sent, sent));
    oracle(&fleet.tandems, &[&prefill as &dyn Backend, &decode]).await;
}

/// The other half of the race: the pod closes when the request is on its way. It may have been taken up, so it is not
/// sent again.
#[tokio::test(flavor = "multi_thread")]
async fn interop_16_a_request_that_may_have_arrived_is_not_repeated() {
    let script = vec![Step::ReadRequest, prefill_answer(), Step::ReadRequest, Step::Reset];
    let (prefill, decode, fleet) = scripted_prefill(vec![script]).await;
    for (index, path) in fleet.paths().into_iter().enumerate() {
        assert_eq!(Call::post(&path, PATH, BODY).send().await.status, 200);
        let answer = Call::post(&path, PATH, BODY).send().await;
        assert_eq!(answer.status, 503);
        let message = answer.json().await["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("prefill request failed (transport): "), "{message}");
        let connection = prefill.wait_for(index, |connection| connection.done).await;
        let first = request_end(&connection.received).expect("a request");
        let second = request_end(&connection.received[first..]).expect("another one");
        assert_eq!(first + second, connection.received.len());
        assert_eq!((prefill.connections().len(), decode.records().len()), (index + 1, index + 1));
    }
    assert_eq!(total(&fleet, "gateway_pd_prefill_failure_total", &[("class", "transport")]).await, 2.0);
    assert!(decode.violations().is_empty());
    oracle(&fleet.tandems, &[&prefill as &dyn Backend, &decode]).await;
}
