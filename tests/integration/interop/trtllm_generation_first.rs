//! TensorRT-LLM, cases 32 to 34: both workers at once.

use std::time::Duration;

use serde_json::{Value, json};
use tandem_sim::{End, Fault};

use super::{ended, only_work};
use crate::bodies::members::raw;
use crate::bodies::wait_total;
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::Call;
use crate::harness::within;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello"}],"max_completion_tokens":8}"#;
const INFO: &str = "/server_info";
const FAILED: &str = "gateway_pd_prefill_failure_total";

fn streamed() -> String {
    BODY.replace("8}", "8,\"stream\":true}")
}

/// One replica: what it has looked up is its own.
fn options() -> SandboxOptions {
    let fleet = FleetOptions { replicas: 1, ..FleetOptions::default() };
    let options = SandboxOptions { fleet, ..SandboxOptions::of(tandem_sim::EngineConfig::trtllm) };
    options.env(&[("AIBRIX_TRT_SCHEDULE_STYLE", "generation_first")])
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_32_generation_first() {
    let sandbox = Sandbox::start(options()).await;
    let (context, generation) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let endpoint = format!("tcp://127.0.0.1:{}", context.bootstrap_port());
    let info = json!({"disaggregated_params": {"ctx_info_endpoint": endpoint, "ctx_dp_rank": 0, "extra": 1}});
    context.script(Fault::on(INFO).answer(200, "application/json", info.to_string()));
    let mut ids = Vec::new();
    for path in sandbox.paths() {
        for body in [BODY.to_owned(), streamed()] {
            // Generation has its request although the context worker cannot have answered.
            let hold = context.hold();
            let call = tokio::spawn(Call::post(&path, CHAT, body.clone()).send());
            within("both are there", async {
                hold.wait_for(1).await;
                generation.wait_until(|generation| generation.stats().transferring == 1).await;
            })
            .await;
            hold.release();
            let answer = within("the answer", call).await.unwrap();
            assert_eq!(answer.status, 200);
            assert_eq!((answer.header("target-pod"), answer.header("prefill-target-pod")), ("d0", "p0"));
            let answer = answer.body().await;
            assert!(answer.complete);
            assert_eq!(answer.bytes.ends_with(b"data: [DONE]\n\n"), body != BODY);

            let (c, g) = (only_work(context), only_work(generation));
            let id = raw(raw(&c.body, "disaggregated_params").unwrap().as_bytes(), "disagg_request_id").unwrap();
            assert!((1 << 42..=i64::MAX as u64).contains(&id.parse().unwrap()), "{id}");
            let params = |record: &tandem_sim::Record| raw(&record.body, "disaggregated_params").unwrap();
            let expected = |text: String| serde_json::from_str::<Value>(&text).unwrap();
            assert_eq!(
                expected(params(&c)),
                expected(format!(r#"{{"request_type":"context_only","disagg_request_id":{id},"schedule_style":1}}"#))
            );
            assert_eq!(
                expected(params(&g)),
                expected(format!(
                    r#"{{"request_type":"generation_only","disagg_request_id":{id},"ctx_request_id":{id},"schedule_style":1,"ctx_info_endpoint":"{endpoint}","ctx_dp_rank":0}}"#
                ))
            );
            assert_eq!((c.json()["max_tokens"].clone(), c.json().get("max_completion_tokens")), (json!(1), None));
            assert_eq!((&g.json()["max_completion_tokens"], g.json().get("prompt_token_ids")), (&json!(8), None));
            assert_eq!(c.header("x-request-id"), g.header("x-request-id"));
            assert!(!ids.contains(&id), "{id} is used twice");
            ids.push(id);
            let asked = context.records_for(INFO).len();
            assert_eq!(asked, usize::from(ids.len() == 1), "the answer is good for a while");
            sandbox.clear();
        }
    }
    assert_eq!(generation.stats().computed_tokens, 0);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_33_bad_server_info() {
    let sandbox = Sandbox::start(options()).await;
    let context = &sandbox.prefill[0];
    let params = |params: &str| {
        Fault::on(INFO).answer(200, "application/json", format!("{{\"disaggregated_params\":{params}}}"))
    };
    let huge = format!(r#"{{"ctx_info_endpoint":"tcp://x:1","ctx_dp_rank":0,"pad":"{}"}}"#, "x".repeat(2 << 20));
    let good = format!(r#"{{"ctx_info_endpoint":"tcp://127.0.0.1:{}","ctx_dp_rank":0}}"#, context.bootstrap_port());
    let elsewhere = format!("http://{}/server_info", context.address());
    let mut failed = 0.0;
    for path in sandbox.paths() {
        for (name, fault, class) in [
            ("empty", params("{}"), "bad_response"),
            ("no object", params("[]"), "bad_response"),
            ("no rank", params(r#"{"ctx_info_endpoint":"tcp://x:1","ctx_dp_rank":null}"#), "bad_response"),
            ("half a rank", params(r#"{"ctx_info_endpoint":"tcp://x:1","ctx_dp_rank":1.5}"#), "bad_response"),
            ("below zero", params(r#"{"ctx_info_endpoint":"tcp://x:1","ctx_dp_rank":-1}"#), "bad_response"),
            ("no endpoint", params(r#"{"ctx_info_endpoint":"","ctx_dp_rank":0}"#), "bad_response"),
            (
                "two endpoints",
                params(r#"{"ctx_info_endpoint":["tcp://x:1","tcp://x:2"],"ctx_dp_rank":0}"#),
                "bad_response",
            ),
            ("no JSON", Fault::on(INFO).answer(200, "text/html", "<html>"), "bad_response"),
            ("2 MiB", params(&huge), "bad_response"),
            ("500", Fault::on(INFO).answer(500, "application/json", "{}"), "http_status"),
            (
                "redirect",
                Fault::on(INFO).answer_raw(302, &[("location", &elsewhere)], vec![good.clone().into()], false),
                "http_status",
            ),
            ("4 s", Fault::on(INFO).head_delay(Duration::from_secs(4)), "timeout"),
        ] {
            sandbox.clear();
            context.script(fault);
            let answer = Call::post(&path, CHAT, BODY).send().await;
            assert_eq!(answer.status, 503, "{name}");
            assert_eq!(answer.header("x-error-pd-prefill"), "true", "{name}");
            let message = answer.json().await["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(&format!("prefill request failed ({class}): ")), "{name}: {message}");
            assert_eq!(context.records().len(), 1, "asked once, and no leg: {name}");
            assert!(sandbox.decode[0].records().is_empty(), "{name}");
            failed += 1.0;
        }
        let class = |class| [("class", class), ("stage", "before_response")];
        wait_total(&sandbox.fleet, FAILED, &class("timeout"), failed / 12.0).await;
        wait_total(&sandbox.fleet, FAILED, &[], failed).await;
    }
    // A failure is not kept: the next one asks again, and is served.
    sandbox.clear();
    assert_eq!(Call::post(&sandbox.paths()[0], CHAT, BODY).send().await.status, 200);
    assert_eq!(context.records_for(INFO).len(), 1);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_34_the_context_worker_fails() {
    let sandbox = Sandbox::start(options()).await;
    let (context, generation) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let said = r#"{"object":"error","message":"no room","type":"InternalServerError","param":null,"code":500}"#;
    let failing = || Fault::on("/v1/").answer(500, "application/json", said);
    for (place, path) in sandbox.paths().into_iter().enumerate() {
        // Before generation has sent a head.
        sandbox.clear();
        let hold = context.hold();
        context.script(failing());
        let call = tokio::spawn(Call::post(&path, CHAT, BODY).send());
        within("generation waits", generation.wait_until(|generation| generation.stats().transferring == 1)).await;
        within("the context leg is there", hold.wait_for(1)).await;
        hold.release();
        let answer = within("the answer", call).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("x-error-pd-prefill")), (500, "true"));
        let message = answer.json().await["error"]["message"].clone();
        assert_eq!(message, "prefill request failed (http_status): no room");
        assert_eq!(ended(generation).await.ended(), Some(End::ClientGone));

        // After its head, which proves nothing. The front has held it back.
        sandbox.clear();
        let hold = context.hold();
        context.script(failing());
        let call = tokio::spawn(Call::post(&path, CHAT, streamed()).send());
        within("generation waits", generation.wait_until(|generation| only_or_none(generation) == Some(200))).await;
        within("the context leg is there", hold.wait_for(1)).await;
        if place == 0 {
            let answer = within("the head", call).await.unwrap();
            assert_eq!(answer.status, 200);
            hold.release();
            let body = answer.body().await;
            assert!(!body.complete && body.bytes.is_empty());
        } else {
            hold.release();
            let answer = within("the answer", call).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.header("x-error-pd-prefill")), (500, "true"));
        }
        assert_eq!(ended(generation).await.ended(), Some(End::ClientGone));

        // After a token, which proves no more here.
        sandbox.clear();
        let hold = context.hold();
        context.script(failing());
        let event = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
        generation.script(Fault::on("/v1/").stream(vec![event.into()]).stall_after(1));
        let mut events = Call::post(&path, CHAT, streamed()).send().await.events();
        assert!(events.next().await.is_some());
        within("the context leg is there", hold.wait_for(1)).await;
        hold.release();
        let (rest, complete) = events.collect().await;
        assert!(rest.is_empty() && !complete);
        assert_eq!(ended(generation).await.ended(), Some(End::ClientGone));
    }
    // A token is an answer; a head is none.
    wait_total(&sandbox.fleet, FAILED, &[("class", "http_status"), ("stage", "before_response")], 4.0).await;
    wait_total(&sandbox.fleet, FAILED, &[("class", "http_status"), ("stage", "after_response")], 2.0).await;
    wait_total(&sandbox.fleet, "gateway_pd_decode_abort_total", &[], 0.0).await;
    sandbox.close().await;
}

fn only_or_none(engine: &tandem_sim::Engine) -> Option<u16> {
    engine.records().first().and_then(|record| record.status)
}
