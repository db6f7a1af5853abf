//! The chosen decode pod refuses connections: another one of its roleset takes over, with the same hand-off, where the
//! engine allows it. The front goes on by itself; Envoy by the list in `x-gateway-destination-endpoint`.

use serde_json::Value;
use tandem_sim::{End, Fault};

use super::{ended, only_work};
use crate::bodies::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::Call;
use crate::harness::{SOON, eventually};

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"tell me more"}],"max_tokens":6}"#;
const FAILOVERS: &str = "tandem_decode_failovers_total";

/// Two prefill and two decode pods in one roleset, behind an Envoy with fail-over.
fn one_roleset() -> SandboxOptions {
    SandboxOptions {
        pairs: 2,
        pod: |pod| pod.label("roleset-name", "rs0"),
        fleet: FleetOptions { failover: true, ..FleetOptions::default() },
        ..SandboxOptions::default()
    }
    // Else the dead pod is soon left alone.
    .env(&[("TANDEM_EJECTION_FAILURES", "0")])
    // Equal pods take turns by chance.
    .env(&[("AIBRIX_PREFILL_SCORE_POLICY", "least_request"), ("AIBRIX_DECODE_SCORE_POLICY", "least_request")])
}

/// Requests of one path until one of them has met the dead pod; none may notice.
async fn until_failed_over(sandbox: &Sandbox, path: &str, before: f64) {
    for _ in 0..40 {
        sandbox.clear();
        let answer = Call::post(path, CHAT, BODY).send().await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("target-pod"), "d1");
        assert_eq!(answer.header("target-pod-ip"), sandbox.decode[1].address().to_string());
        assert_eq!(answer.json().await["usage"]["completion_tokens"], 6);
        // The prompt was computed once, and its hand-off taken once.
        let prefills: Vec<_> = sandbox.prefill.iter().flat_map(tandem_sim::Engine::records).collect();
        assert_eq!(prefills.len(), 1);
        let decode = only_work(&sandbox.decode[1]);
        assert_eq!(prefills[0].header("x-request-id"), decode.header("x-request-id"));
        assert!(decode.json()["kv_transfer_params"]["remote_request_id"].is_string());
        if total(&sandbox.fleet, FAILOVERS, &[]).await > before {
            return;
        }
    }
    panic!("the dead pod was never chosen");
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_failover_of_vllm() {
    let sandbox = Sandbox::start(one_roleset()).await;
    sandbox.decode[0].pause_listening().await;
    for path in sandbox.paths() {
        until_failed_over(&sandbox, &path, total(&sandbox.fleet, FAILOVERS, &[]).await).await;
    }
    assert!(sandbox.decode[1].stats().computed_tokens == 0, "what was relayed was used");
    assert_eq!(total(&sandbox.fleet, "tandem_retries_total", &[]).await, 0.0, "nothing started over");

    // The charge is with the pod that answers.
    for path in sandbox.paths() {
        let before = total(&sandbox.fleet, FAILOVERS, &[]).await;
        for attempt in 0.. {
            assert!(attempt < 40, "the dead pod was never chosen");
            sandbox.clear();
            sandbox.decode[1].script(Fault::on("/v1/").stall_after(2));
            let streamed = BODY.replace("6}", "6,\"stream\":true}");
            let mut events = Call::post(&path, CHAT, streamed).send().await.events();
            assert!(events.next().await.is_some() && events.next().await.is_some());
            wait_total(&sandbox.fleet, "tandem_pod_decode_running", &[("pod_name", "d1")], 1.0).await;
            wait_total(&sandbox.fleet, "tandem_pod_decode_running", &[("pod_name", "d0")], 0.0).await;
            events.abandon();
            assert_eq!(ended(&sandbox.decode[1]).await.ended(), Some(End::ClientGone));
            if total(&sandbox.fleet, FAILOVERS, &[]).await > before {
                break;
            }
        }
    }
    sandbox.decode[0].resume_listening().await.unwrap();
    sandbox.close().await;
}

/// Nobody is left: an error, and never a pod that the hand-off is not for.
#[tokio::test(flavor = "multi_thread")]
async fn decode_failover_ends_with_the_roleset() {
    let sandbox = Sandbox::start(one_roleset()).await;
    for decode in &sandbox.decode {
        decode.pause_listening().await;
    }
    for path in sandbox.paths() {
        sandbox.clear();
        let answer = Call::post(&path, CHAT, BODY).send().await;
        assert_eq!(answer.status, 503);
        let error: Value = answer.json().await["error"].clone();
        assert_eq!(error["type"], "overloaded_error");
        let prefills: Vec<_> = sandbox.prefill.iter().flat_map(tandem_sim::Engine::records).collect();
        assert!(prefills.iter().all(|record| record.json()["kv_transfer_params"]["do_remote_decode"] == true));
    }
    for decode in &sandbox.decode {
        decode.resume_listening().await.unwrap();
    }
    sandbox.close().await;
}

/// SGLang's pods have met under a room, so nobody takes over.
#[tokio::test(flavor = "multi_thread")]
async fn decode_failover_is_not_for_sglang() {
    let options = SandboxOptions { engine: |config| config.sglang(), ..one_roleset() };
    let sandbox = Sandbox::start(options.env(&[("AIBRIX_DECODE_ABORT_RETRY_DELAY", "0.1")])).await;
    for decode in &sandbox.decode {
        decode.pause_listening().await;
    }
    for path in sandbox.paths() {
        sandbox.clear();
        let answer = Call::post(&path, CHAT, BODY).send().await;
        assert_eq!(answer.status, 503);
        // One attempt, and its prefill pod is told. (The answer may be faster than the prefill leg.)
        let at_work = || sandbox.prefill.iter().filter(|engine| !super::work(engine).is_empty()).collect::<Vec<_>>();
        let prefills =
            eventually(SOON, "the prefill leg", async || Some(at_work()).filter(|pods| !pods.is_empty())).await;
        assert_eq!(prefills.len(), 1);
        assert_eq!(
            super::calls(prefills[0], "/abort_request", 1).await[0].json()["rid"],
            only_work(prefills[0]).json()["rid"]
        );
        ended(prefills[0]).await;
    }
    assert_eq!(total(&sandbox.fleet, FAILOVERS, &[]).await, 0.0);
    for decode in &sandbox.decode {
        decode.resume_listening().await.unwrap();
    }
    sandbox.close().await;
}
