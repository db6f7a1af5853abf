//! vLLM with Mooncake's connector: a question to the bootstrap server, then both legs at once, matched by a transfer id.

use std::time::Duration;

use serde_json::json;
use tandem_sim::{End, EngineConfig, Fault, Timing};
use tokio::time::Instant;

use super::{ended, only_work};
use crate::bodies::members::{PREFILL_FIELDS, members, raw, without};
use crate::bodies::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions, start_engine};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};
use crate::harness::within;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"tell me more"}],"max_tokens":6}"#;
const QUERY: &str = "/query";
const FAILED: &str = "gateway_pd_prefill_failure_total";

/// One replica: what it has looked up is its own.
fn options() -> SandboxOptions {
    let fleet = FleetOptions { replicas: 1, ..FleetOptions::default() };
    SandboxOptions { fleet, ..SandboxOptions::of(tandem_sim::EngineConfig::mooncake) }
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_mooncake_both_legs_at_once() {
    let sandbox = Sandbox::start(options()).await;
    let plain = start_engine(EngineConfig::combined("m")).await;
    let expected = Call::post(&base(plain.address()), CHAT, BODY).send().await.json().await["choices"][0].clone();
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    // A client's own hand-off is replaced here too.
    let forged = BODY.replace("6}", r#"6,"kv_transfer_params":{"transfer_id":"mine","do_remote_prefill":true}}"#);
    let mut transfers = Vec::new();
    for path in sandbox.paths() {
        for body in [BODY, &forged] {
            sandbox.clear();
            let hold = prefill.hold();
            let call = tokio::spawn(Call::post(&path, CHAT, body.to_owned()).send());
            within("both are there", async {
                hold.wait_for(1).await;
                decode.wait_until(|decode| decode.stats().transferring == 1).await;
            })
            .await;
            hold.release();
            let answer = within("the answer", call).await.unwrap();
            assert_eq!(answer.status, 200);
            assert_eq!((answer.header("target-pod"), answer.header("prefill-target-pod")), ("d0", "p0"));
            assert_eq!(answer.json().await["choices"][0]["message"], expected["message"]);

            let (p, d) = (only_work(prefill), only_work(decode));
            assert_eq!(without(&p.body, &PREFILL_FIELDS), without(BODY.as_bytes(), &PREFILL_FIELDS));
            assert_eq!((&p.json()["max_tokens"], &p.json()["stream"]), (&json!(1), &json!(false)));
            assert_eq!(without(&d.body, &["kv_transfer_params"]), members(BODY.as_bytes()));
            let (give, take) = (p.json()["kv_transfer_params"].clone(), d.json()["kv_transfer_params"].clone());
            let transfer = give["transfer_id"].as_str().unwrap().to_owned();
            assert_eq!(give, json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer}));
            let bootstrap = format!("http://127.0.0.1:{}", prefill.bootstrap_port());
            assert_eq!(
                take,
                json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": transfer,
                    "remote_engine_id": take["remote_engine_id"], "remote_bootstrap_addr": bootstrap})
            );
            assert!(take["remote_engine_id"].as_str().is_some_and(|id| !id.is_empty()));
            assert_eq!(p.header("x-request-id"), d.header("x-request-id"));
            assert_eq!((p.header("x-data-parallel-rank"), d.header("x-data-parallel-rank")), (Some("0"), None));
            assert!(!transfers.contains(&transfer), "{transfer} is used twice");
            transfers.push(transfer);
            assert_eq!(prefill.records_for(QUERY).len(), usize::from(transfers.len() == 1), "the answer is kept");
        }
    }
    assert_eq!((decode.stats().computed_tokens, prefill.stats().pinned_requests), (0, 0));
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_mooncake_the_bootstrap_server_says_nothing_of_use() {
    let sandbox = Sandbox::start(options()).await;
    let prefill = &sandbox.prefill[0];
    let mut failed = 0.0;
    for path in sandbox.paths() {
        for (status, said, class) in [
            (200, "{}", "bad_response"),
            (200, "<html>", "bad_response"),
            (503, "{}", "http_status"),
            (404, "", "http_status"),
        ] {
            sandbox.clear();
            prefill.script(Fault::on(QUERY).answer(status, "application/json", said));
            let answer = Call::post(&path, CHAT, BODY).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("x-error-pd-prefill")), (503, "true"));
            let message = answer.json().await["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(&format!("prefill request failed ({class}): ")), "{message}");
            assert_eq!(prefill.records().len(), 1, "asked once, and no leg");
            assert!(sandbox.decode[0].records().is_empty());
            failed += 1.0;
        }
    }
    wait_total(&sandbox.fleet, FAILED, &[("stage", "before_response")], failed).await;
    assert_eq!(Call::post(&sandbox.paths()[0], CHAT, BODY).send().await.status, 200, "failures are not kept");
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_mooncake_either_leg_fails() {
    let sandbox = Sandbox::start(options()).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let said = r#"{"error":{"message":"no blocks left","type":"InternalServerError","param":null,"code":500}}"#;
    for path in sandbox.paths() {
        // Prefill: decode waits for KV that never comes, and hears of it by its connection.
        sandbox.clear();
        let hold = prefill.hold();
        prefill.script(Fault::on("/v1/").answer(500, "application/json", said));
        let call = tokio::spawn(Call::post(&path, CHAT, BODY).send());
        within("decode waits", decode.wait_until(|decode| decode.stats().transferring == 1)).await;
        within("prefill is there", hold.wait_for(1)).await;
        hold.release();
        let failed = Instant::now();
        let answer = within("the answer", call).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("x-error-pd-prefill")), (500, "true"));
        assert_eq!(answer.json().await["error"]["message"], "prefill request failed (http_status): no blocks left");
        assert!(failed.elapsed() < Duration::from_secs(1));
        assert_eq!(ended(decode).await.ended(), Some(End::ClientGone));

        // Decode: the prefill leg is given up.
        sandbox.clear();
        let (hold, decode_hold) = (prefill.hold(), decode.hold());
        decode.script(Fault::on("/v1/").answer(500, "application/json", said));
        let call = tokio::spawn(Call::post(&path, CHAT, BODY).send());
        within("both are there", async {
            hold.wait_for(1).await;
            decode_hold.wait_for(1).await;
        })
        .await;
        decode_hold.release();
        let answer = within("the answer", call).await.unwrap();
        assert_eq!(answer.status, 500);
        assert_eq!(answer.body().await.bytes, said);
        assert_eq!(ended(prefill).await.ended(), Some(End::ClientGone));
        hold.release();
    }
    assert_eq!(total(&sandbox.fleet, "gateway_pd_decode_abort_total", &[]).await, 0.0);
    assert_eq!(prefill.stats().pinned_requests, 0);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_mooncake_client_leaves() {
    let engine = |config: EngineConfig| {
        config.mooncake().timing(Timing { prefill_base: Duration::from_mins(10), ..Timing::instant() })
    };
    let sandbox = Sandbox::start(SandboxOptions { engine, ..options() }).await;
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    for path in sandbox.paths() {
        sandbox.clear();
        let call = tokio::spawn(Call::post(&path, CHAT, BODY).try_send());
        within("both legs run", async {
            prefill.wait_until(|prefill| prefill.stats().running == 1).await;
            decode.wait_until(|decode| decode.stats().transferring == 1).await;
        })
        .await;
        call.abort();
        let left = Instant::now();
        for engine in [prefill, decode] {
            let (at, how) = ended(engine).await.end.expect("an end");
            assert_eq!(how, End::ClientGone);
            assert!(at.saturating_duration_since(left) < Duration::from_secs(2));
        }
        assert_eq!(prefill.stats().pinned_requests, 0);
        assert_eq!(raw(&only_work(prefill).body, "stream").as_deref(), Some("false"));
    }
    sandbox.close().await;
}
