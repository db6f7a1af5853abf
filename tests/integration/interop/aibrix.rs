//! vLLM with AIBrix's own connector over its KVCacheManager: prefill first, a hand-off that names neither blocks nor a port,
//! KV in shared storage.

use serde_json::{Value, json};
use tandem_sim::{EngineConfig, Fault};

use super::only_work;
use crate::bodies::members::{KV_REQUEST, PREFILL_FIELDS, members, raw, without};
use crate::bodies::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::{Call, base};
use crate::harness::within;

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"what is shared"}],"max_tokens":5}"#;

/// With the ledgers on: what stays charged shows in the closing check.
fn options() -> SandboxOptions {
    let by_tokens = [("AIBRIX_PREFILL_SCORE_POLICY", "token_load"), ("AIBRIX_DECODE_SCORE_POLICY", "token_load")];
    SandboxOptions::of(EngineConfig::aibrix).env(&by_tokens)
}

#[tokio::test(flavor = "multi_thread")]
async fn its_hand_off_is_relayed_and_nothing_stays_charged() {
    let sandbox = Sandbox::start(options()).await;
    let honest = Call::post(&base(sandbox.decode[0].address()), PATH, BODY).send().await.json().await;
    let computed = sandbox.decode[0].stats().computed_tokens;
    for path in sandbox.paths() {
        for streamed in [false, true] {
            sandbox.clear();
            let body = if streamed { BODY.replace("5}", r#"5,"stream":true}"#) } else { BODY.to_owned() };
            let answer = Call::post(&path, PATH, body.clone()).send().await;
            assert_eq!(answer.status, 200);
            if streamed {
                assert!(answer.events().collect().await.1);
            } else {
                let answer = answer.json().await;
                assert_eq!(answer["choices"][0]["message"], honest["choices"][0]["message"]);
            }
            let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
            assert_eq!(raw(&prefill.body, "kv_transfer_params").as_deref(), Some(KV_REQUEST));
            assert_eq!(without(&prefill.body, &PREFILL_FIELDS), without(body.as_bytes(), &PREFILL_FIELDS));
            assert_eq!(without(&decode.body, &["kv_transfer_params"]), members(body.as_bytes()));
            let mut relayed = decode.json()["kv_transfer_params"].clone();
            let engine = relayed["remote_engine_id"].take();
            assert!(engine.as_str().is_some_and(|id| !id.is_empty()), "{engine}");
            let expected: Value = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [],
                "remote_engine_id": null, "remote_host": "127.0.0.1", "remote_port": -1, "tp_size": 1});
            assert_eq!(relayed, expected);
        }
    }
    wait_total(&sandbox.fleet, "tandem_handoff_total", &[("outcome", "relayed")], 4.0).await;
    assert_eq!(sandbox.decode[0].stats().computed_tokens, computed, "decode read what prefill stored");
    assert_eq!(sandbox.prefill[0].stats().pinned_requests, 0);
    sandbox.close().await;
}

/// The decode engine refuses, or the hand-off is of no use: the prefill pod keeps nothing, so nothing stays charged for it.
#[tokio::test(flavor = "multi_thread")]
async fn no_lease_is_charged_when_decode_fails_or_the_hand_off_is_refused() {
    let sandbox = Sandbox::start(options()).await;
    let stored = |port: &str, engine: &str| {
        format!(
            r#"{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[],"remote_engine_id":"{engine}","remote_host":"","remote_port":{port},"tp_size":2}}"#
        )
    };
    for path in sandbox.paths() {
        for unusable in [stored("5600", "e"), stored("0", "e"), stored("-1", "")] {
            sandbox.clear();
            sandbox.prefill[0].script(Fault::on("/v1/").kv_transfer_params(&unusable).unwrap());
            assert_eq!(Call::post(&path, PATH, BODY).send().await.status, 200, "{unusable}");
            assert_eq!(only(&sandbox.decode[0]).body, BODY, "{unusable}");
        }
        sandbox.clear();
        sandbox.decode[0].script(Fault::on("/v1/").answer(500, "application/json", "{}"));
        assert_eq!(Call::post(&path, PATH, BODY).send().await.status, 500);
        assert!(raw(&only(&sandbox.decode[0]).body, "kv_transfer_params").is_some());
    }
    assert_eq!(total(&sandbox.fleet, "tandem_token_load_stranded_tokens", &[]).await, 0.0);
    sandbox.close().await;
}

/// The same configuration error in every request is one line in the log for each pod, with what is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_hand_offs_are_lost_is_warned_of_once() {
    let mut options = SandboxOptions::default();
    options.fleet.replicas = 1;
    let sandbox = Sandbox::start(options).await;
    for path in sandbox.paths() {
        for params in [r#"{"do_remote_prefill":true}"#, "null", "{}"] {
            sandbox.prefill[0].script(Fault::on("/v1/").kv_transfer_params(params).unwrap());
            assert_eq!(Call::post(&path, PATH, BODY).send().await.status, 200);
        }
    }
    wait_total(&sandbox.fleet, "tandem_handoff_total", &[("outcome", "unusable")], 4.0).await;
    wait_total(&sandbox.fleet, "tandem_handoff_total", &[("outcome", "absent")], 2.0).await;
    let process = sandbox.fleet.tandems[0].process();
    let logs = process.stdout() + &process.stderr();
    let warnings: Vec<&str> = logs.lines().filter(|line| line.contains("hand-off cannot be used")).collect();
    let [warning] = warnings.as_slice() else { panic!("{warnings:?}") };
    for part in ["WARN", "p0", "remote_engine_id is not a text"] {
        assert!(warning.contains(part), "{part}: {warning}");
    }
    sandbox.close().await;
}

/// The prefill pod holds nothing, so a client that leaves between the legs leaves nothing behind: no decode request follows.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_during_prefill_costs_no_decode_request() {
    let sandbox = Sandbox::start(options()).await;
    for path in sandbox.paths() {
        sandbox.clear();
        let hold = sandbox.prefill[0].hold();
        let call = tokio::spawn(Call::post(&path, PATH, BODY).try_send());
        within("the prefill leg is there", hold.wait_for(1)).await;
        call.abort();
        let prefill = &sandbox.prefill[0];
        within("it ends", prefill.wait_until(|prefill| only_work(prefill).end.is_some())).await;
        hold.release();
        assert!(sandbox.decode[0].records().is_empty());
    }
    sandbox.close().await;
}
