//! What is tried again, on whom, and under which ids; and that a pod which fails is left alone for a while.

use serde_json::json;
use tandem_sim::{Cut, EngineConfig, Fault};

use super::{only_work, work};
use crate::bodies::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions, pd_by_default, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::Call;
use crate::harness::pods::PodManifest;
use crate::harness::{SOON, eventually};

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":5}"#;
const RETRIES: &str = "tandem_retries_total";

fn two_pairs() -> SandboxOptions {
    by_turns().env(&[("TANDEM_EJECTION_FAILURES", "0")])
}

/// Two pairs, equal ones of which take turns by chance.
fn by_turns() -> SandboxOptions {
    let policies = [("AIBRIX_PREFILL_SCORE_POLICY", "least_request"), ("AIBRIX_DECODE_SCORE_POLICY", "least_request")];
    SandboxOptions { pairs: 2, ..SandboxOptions::default() }.env(&policies)
}

/// A prefill pod that cannot be connected to has seen nothing: another pair gets the request, with ids of its own.
#[tokio::test(flavor = "multi_thread")]
async fn r33_an_unreachable_prefill_pod_is_replaced_once() {
    let sandbox = Sandbox::start(two_pairs()).await;
    sandbox.prefill[0].pause_listening().await;
    // Open connections would live on.
    sandbox.prefill[1].script(Fault::on("/v1/").close_connection().always());
    for path in sandbox.paths() {
        let before = total(&sandbox.fleet, RETRIES, &[]).await;
        let mut met = false;
        for _ in 0..40 {
            sandbox.clear();
            let answer = Call::post(&path, CHAT, BODY).send().await;
            assert_eq!(answer.status, 200);
            assert_eq!((answer.header("prefill-target-pod"), answer.header("target-pod")), ("p1", "d1"));
            let request_id = answer.header("request-id").to_owned();
            assert!(answer.body().await.complete);
            let (prefill, decode) = (only_work(&sandbox.prefill[1]), only_work(&sandbox.decode[1]));
            assert!(sandbox.decode[0].records().is_empty(), "the other half of the dead pair");
            assert_eq!(prefill.header("x-request-id"), decode.header("x-request-id"));
            met = total(&sandbox.fleet, RETRIES, &[("reason", "prefill_unreachable")]).await > before;
            let fresh = prefill.header("x-request-id") != Some(request_id.as_str());
            assert_eq!(fresh, met, "another attempt has another id");
            if met {
                break;
            }
        }
        assert!(met, "the dead pod was never chosen");
    }
    // Once: with nobody left, the failure is the answer.
    sandbox.prefill[1].pause_listening().await;
    for path in sandbox.paths() {
        let answer = Call::post(&path, CHAT, BODY).send().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-error-pd-prefill")), (503, "true"));
        let message = answer.json().await["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with("prefill request failed (transport): "), "{message}");
    }
    for prefill in &sandbox.prefill {
        prefill.resume_listening().await.unwrap();
    }
    sandbox.close().await;
}

/// An engine that cannot get at the KV cache says so inside a stream. The front tries another pair as long as the client
/// has seen nothing; Envoy has passed the head on.
#[tokio::test(flavor = "multi_thread")]
async fn r33_an_error_before_content_is_tried_again_with_fresh_ids() {
    let sandbox = Sandbox::start(two_pairs()).await;
    let streamed = BODY.replace("5}", "5,\"stream\":true}");
    for (place, path) in sandbox.paths().into_iter().enumerate() {
        for failing in [1, 2] {
            sandbox.clear();
            for decode in &sandbox.decode[..failing] {
                decode.script(Fault::on("/v1/").error_event_after(0).always());
            }
            // Until the failing pair was the first choice.
            for _ in 0..40 {
                sandbox.clear();
                let answer = Call::post(&path, CHAT, streamed.clone()).send().await;
                let status = answer.status.as_u16();
                let (events, complete) = answer.events().collect().await;
                let attempts: Vec<_> = sandbox.prefill.iter().flat_map(work).collect();
                if place == 0 {
                    assert_eq!((status, attempts.len()), (200, 1), "what is out is out");
                    if failing == 1 && work(&sandbox.decode[0]).is_empty() {
                        continue;
                    }
                    let failed = events.last().is_some_and(|event| event.contains("error"));
                    let ended = events.iter().any(|event| event == "[DONE]");
                    assert!(!ended && (failed || !complete), "{events:?}");
                    break;
                }
                if failing == 2 {
                    assert_eq!((status, attempts.len()), (502, 2), "at most once");
                } else {
                    assert!(status == 200 && complete && events.last().unwrap() == "[DONE]", "{events:?}");
                }
                if attempts.len() == 2 {
                    assert_ne!(attempts[0].header("x-request-id"), attempts[1].header("x-request-id"));
                    let decodes: Vec<_> = sandbox.decode.iter().flat_map(work).collect();
                    assert_eq!(decodes.len(), 2);
                    let of =
                        |record: &tandem_sim::Record| record.json()["kv_transfer_params"]["remote_request_id"].clone();
                    assert_ne!(of(&decodes[0]), of(&decodes[1]), "no hand-off is used twice");
                    break;
                }
            }
            sandbox.decode.iter().for_each(tandem_sim::Engine::clear_faults);
        }
    }
    assert!(total(&sandbox.fleet, RETRIES, &[("reason", "error_before_content")]).await >= 1.0);
    sandbox.close().await;
}

/// SGLang: the pods have the room as soon as the request is out, so nothing is tried again, and no room is seen twice.
#[tokio::test(flavor = "multi_thread")]
async fn r33_sglang_is_not_tried_again() {
    let options = SandboxOptions { engine: |config| config.sglang(), ..two_pairs() };
    let sandbox = Sandbox::start(options.env(&[("AIBRIX_DECODE_ABORT_RETRY_DELAY", "0.1")])).await;
    let streamed = BODY.replace("5}", "5,\"stream\":true}");
    let mut rooms = Vec::new();
    for path in sandbox.paths() {
        for fault in [
            Fault::on("/v1/").answer(500, "application/json", "{}"),
            Fault::on("/v1/").cut_before_head(Cut::Reset),
            Fault::on("/v1/").answer(400, "application/json", "{}"),
        ] {
            sandbox.clear();
            for prefill in &sandbox.prefill {
                prefill.clear_faults();
                prefill.script(fault.clone());
            }
            let answer = Call::post(&path, CHAT, BODY).send().await;
            assert!(answer.status.as_u16() >= 400);
            let attempts: Vec<_> = sandbox.prefill.iter().flat_map(work).collect();
            assert_eq!(attempts.len(), 1);
            rooms.push(attempts[0].json()["bootstrap_room"].as_u64().unwrap());
            for decode in sandbox.decode.iter().filter(|decode| !work(decode).is_empty()) {
                super::ended(decode).await;
            }
        }
        sandbox.clear();
        for engine in sandbox.engines() {
            engine.clear_faults();
        }
        for decode in &sandbox.decode {
            decode.script(Fault::on("/v1/").error_event_after(0));
        }
        let _ = Call::post(&path, CHAT, streamed.clone()).send().await.body().await;
        // The answer may be faster than the prefill leg.
        let attempts = || sandbox.prefill.iter().flat_map(work).collect::<Vec<_>>();
        let attempts =
            eventually(SOON, "the prefill leg", async || Some(attempts()).filter(|all| !all.is_empty())).await;
        assert_eq!(attempts.len(), 1);
        rooms.push(attempts[0].json()["bootstrap_room"].as_u64().unwrap());
        for decode in &sandbox.decode {
            decode.clear_faults();
        }
    }
    let tries = rooms.len();
    rooms.sort_unstable();
    rooms.dedup();
    assert_eq!(rooms.len(), tries);
    assert_eq!(total(&sandbox.fleet, RETRIES, &[]).await, 0.0);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r35_a_prefill_that_answered_is_asked_once() {
    let sandbox = Sandbox::start(two_pairs()).await;
    let said = r#"{"error":{"message":"as it is","type":"BadRequestError","param":null,"code":400}}"#;
    let answering = |status| Fault::on("/v1/").answer(status, "application/json", said);
    for path in sandbox.paths() {
        for (fault, status, body) in [
            (answering(400), 400, Some(said)),
            (answering(404), 404, Some(said)),
            (answering(413), 413, Some(said)),
            (answering(422), 422, Some(said)),
            (answering(429), 429, Some(said)),
            (answering(500), 503, None),
            (answering(502), 503, None),
            (answering(503), 503, None),
            (Fault::on("/v1/").cut_before_head(Cut::Reset), 503, None),
        ] {
            sandbox.clear();
            for prefill in &sandbox.prefill {
                prefill.clear_faults();
                prefill.script(fault.clone());
            }
            let answer = Call::post(&path, CHAT, BODY).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("x-error-pd-prefill")), (status, "true"));
            let bytes = answer.body().await.bytes;
            if let Some(body) = body {
                assert_eq!(bytes, body);
            } else {
                let error: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
                let message = error["error"]["message"].as_str().unwrap();
                assert!(message.starts_with("prefill request failed ("), "{message}");
            }
            assert_eq!(sandbox.prefill.iter().flat_map(work).count(), 1, "{status}");
            assert!(sandbox.decode.iter().all(|decode| decode.records().is_empty()));
        }
    }
    assert_eq!(total(&sandbox.fleet, RETRIES, &[]).await, 0.0);
    sandbox.close().await;
}

/// A dead prefill pod is left alone after some failures, its decode pod gets nothing meanwhile, and both are back soon
/// after it is.
#[tokio::test(flavor = "multi_thread")]
async fn r36_a_dead_prefill_pod_is_left_alone_and_comes_back() {
    let mut options = by_turns();
    options.fleet.replicas = 1;
    let sandbox =
        Sandbox::start(options.env(&[("TANDEM_EJECTION_FAILURES", "2"), ("TANDEM_EJECTION_SECONDS", "1")])).await;
    sandbox.prefill[0].pause_listening().await;
    for path in sandbox.paths() {
        for _ in 0..12 {
            let answer = Call::post(&path, CHAT, BODY).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("prefill-target-pod")), (200, "p1"));
        }
    }
    assert!(sandbox.decode[0].records().is_empty());
    let retries = total(&sandbox.fleet, RETRIES, &[]).await;
    assert!((1.0..24.0).contains(&retries), "{retries}");
    sandbox.prefill[0].resume_listening().await.unwrap();
    for path in sandbox.paths() {
        sandbox.clear();
        eventually(SOON, "traffic is back", async || {
            assert_eq!(Call::post(&path, CHAT, BODY).send().await.status, 200);
            (!work(&sandbox.prefill[0]).is_empty() && !work(&sandbox.decode[0]).is_empty()).then_some(())
        })
        .await;
    }
    sandbox.close().await;
}

/// The same for a decode pod behind Envoy, which answers for it: the gateway must tell Envoy's words from an engine's.
#[tokio::test(flavor = "multi_thread")]
async fn r52_a_dead_decode_pod_is_left_alone() {
    let mut options = by_turns();
    options.fleet.replicas = 1;
    let sandbox =
        Sandbox::start(options.env(&[("TANDEM_EJECTION_FAILURES", "2"), ("TANDEM_EJECTION_SECONDS", "60")])).await;
    sandbox.decode[0].pause_listening().await;
    let path = &sandbox.paths()[0];
    let mut failed = 0;
    for _ in 0..30 {
        let answer = Call::post(path, CHAT, BODY).send().await;
        match answer.status.as_u16() {
            200 => {}
            503 => failed += 1,
            other => panic!("{other}"),
        }
        assert!(answer.body().await.complete);
    }
    assert!((1..=2).contains(&failed), "{failed} requests met the dead pod");
    // An engine that says 503 is busy, not broken.
    sandbox.decode[1].script(Fault::on("/v1/").answer(503, "application/json", "{}").times(5));
    for _ in 0..5 {
        assert_eq!(Call::post(path, CHAT, BODY).send().await.status, 503);
    }
    assert_eq!(Call::post(path, CHAT, BODY).send().await.status, 200);
    assert_eq!(total(&sandbox.fleet, "tandem_ejections_total", &[]).await, 1.0);
    sandbox.decode[0].resume_listening().await.unwrap();
    sandbox.close().await;
}

/// Pods of one model that run different engines: told at once, and no body made for one engine reaches another.
#[tokio::test(flavor = "multi_thread")]
async fn r39_mixed_engines_are_refused_before_any_leg() {
    let vllm = [start_engine(EngineConfig::prefill("m")).await, start_engine(EngineConfig::decode("m")).await];
    let sglang = [
        start_engine(EngineConfig::prefill("m").sglang()).await,
        start_engine(EngineConfig::decode("m").sglang()).await,
    ];
    let pods = [("vllm", &vllm), ("sglang", &sglang)].into_iter().flat_map(|(engine, pair)| {
        ["prefill", "decode"].into_iter().zip(pair).map(move |(role, server)| {
            let name = format!("{engine}-{role}");
            let pod = PodManifest::new(&name, "m", server.address()).role(engine, role).engine(engine);
            pod.config(&pd_by_default())
        })
    });
    let fleet = Fleet::start(pods, FleetOptions { replicas: 1, ..FleetOptions::default() }).await;
    for path in fleet.paths() {
        let answer = Call::post(&path, CHAT, BODY).send().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-error-routing")), (503, "true"));
        let error = answer.json().await["error"]["message"].clone();
        assert_eq!(error, json!("pods of model m run different engines; pd needs one"));
        assert!(vllm.iter().chain(&sglang).all(|engine| work(engine).is_empty()));
        // A client that says which ones is served.
        let call = Call::post(&path, CHAT, BODY).header("external-filter", "model.aibrix.ai/engine=vllm");
        assert_eq!(call.send().await.status, 200);
        assert!(sglang.iter().all(|engine| work(engine).is_empty()));
        vllm.iter().for_each(tandem_sim::Engine::clear_records);
    }
    wait_total(&fleet, "gateway_in_flight_requests", &[], 0.0).await;
    assert!(vllm.iter().chain(&sglang).all(|engine| engine.violations().is_empty()));
}
