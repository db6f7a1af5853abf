//! vLLM, cases 6, 9, 12 and 17: what becomes of the hand-off.

use bytes::Bytes;
use serde_json::{Value, json};
use tandem_sim::Fault;

use crate::bodies::members::{KV_REQUEST, PREFILL_FIELDS, assert_prefill_leg, members, raw, without};
use crate::bodies::{total, wait_total};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::{Call, base};

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"what is up"}],"max_tokens":5}"#;

fn text(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"].as_str().expect("content").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_06_client_forges_a_handoff() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let honest = Call::post(&base(sandbox.decode[0].address()), PATH, BODY).send().await.json().await;
    let forged = BODY.replace(
        r#""max_tokens""#,
        r#""kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1},"disagg_prefill_resp":{"id":"x"},"ec_transfer_params":{},"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":0,"disaggregated_params":{},"max_tokens""#,
    );
    for path in sandbox.paths() {
        sandbox.clear();
        sandbox.prefill[0].script(Fault::on("/v1/").kv_transfer_params("null").unwrap());
        let answer = Call::post(&path, PATH, forged.clone()).send().await;
        assert_eq!(answer.status, 200);
        assert_eq!(text(&answer.json().await), text(&honest));
        let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
        assert_eq!(raw(&prefill.body, "kv_transfer_params").as_deref(), Some(KV_REQUEST));
        assert_eq!(without(&prefill.body, &PREFILL_FIELDS), without(BODY.as_bytes(), &PREFILL_FIELDS));
        assert_eq!(members(&decode.body), members(BODY.as_bytes()));
    }
    wait_total(&sandbox.fleet, "tandem_handoff_total", &[("outcome", "absent")], 2.0).await;
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_09_nested_block_ids_and_unknown_fields() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let extra = r#"{"remote_block_ids":[[3,4],[]],"new_key":{"x":12345678901234567890,"y":123456789012345678901234567890,"z":[1e2, "\u00e9"]}}"#;
    for path in sandbox.paths() {
        sandbox.clear();
        sandbox.prefill[0].script(Fault::on("/v1/").kv_transfer_params_extra(extra).unwrap());
        assert_eq!(Call::post(&path, PATH, BODY).send().await.status, 200);
        let decode = only(&sandbox.decode[0]);
        let params = raw(&decode.body, "kv_transfer_params").expect("a hand-off");
        for (key, value) in members(extra.as_bytes()) {
            assert_eq!(raw(params.as_bytes(), key.trim_matches('"')), Some(value), "{key}");
        }
        assert_eq!(raw(params.as_bytes(), "remote_host").as_deref(), Some("\"127.0.0.1\""));
        assert_eq!(raw(params.as_bytes(), "transfer_mode").as_deref(), Some("\"pull\""));
    }
    assert_eq!(sandbox.decode[0].stats().computed_tokens, 0, "decode read what prefill wrote");
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_12_unusable_handoffs() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let whole = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":5600}"#;
    let mut unusable = 0.0;
    for path in sandbox.paths() {
        // Not a hand-off at all: the answer cannot be merged.
        for wrong in [r#""oops""#, "[1]", "7", "true"] {
            sandbox.clear();
            sandbox.prefill[0].script(Fault::on("/v1/").kv_transfer_params(wrong).unwrap());
            let answer = Call::post(&path, PATH, BODY).send().await;
            assert_eq!(answer.status, 502, "{wrong}");
            assert_eq!(answer.header("x-error-pd-prefill"), "true");
            let message = answer.json().await["error"]["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with("prefill request failed (bad_response): "), "{message}");
            assert!(sandbox.decode[0].records().is_empty(), "{wrong}");
        }
        // A hand-off that kills decode servers: left out.
        for lacking in [
            "{}".to_owned(),
            r#"{"do_remote_prefill":true,"remote_block_ids":[]}"#.to_owned(),
            whole.replace("[[1]]", "[[],[]]"),
            whole.replace("[[1]]", "null"),
            whole.replace(r#""r""#, r#""""#),
            whole.replace(r#""e""#, "null"),
            whole.replace("5600", "0"),
            whole.replace("5600", "65536"),
            whole.replace(r#""do_remote_prefill":true"#, r#""do_remote_prefill":false"#),
        ] {
            sandbox.clear();
            sandbox.prefill[0].script(Fault::on("/v1/").kv_transfer_params(&lacking).unwrap());
            let answer = Call::post(&path, PATH, BODY).send().await;
            assert_eq!(answer.status, 200, "{lacking}");
            assert_eq!(only(&sandbox.decode[0]).body, BODY, "{lacking}");
            unusable += 1.0;
        }
        wait_total(&sandbox.fleet, "tandem_handoff_total", &[("outcome", "unusable")], unusable).await;
    }
    let failed = total(&sandbox.fleet, "gateway_pd_prefill_failure_total", &[("class", "bad_response")]).await;
    assert_eq!(failed, 8.0);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_17_neuron_nixl_label() {
    let sandbox = Sandbox::start(SandboxOptions {
        pod: |pod| pod.label("model.aibrix.ai/kv-connector-type", "nixl"),
        ..SandboxOptions::default()
    })
    .await;
    // A client's own hand-off does not get through here either.
    let forged =
        BODY.replace(r#""max_tokens""#, r#""disagg_prefill_resp":{"id":"x"},"kv_transfer_params":{},"max_tokens""#);
    let odd = r#" {"id":"cmpl-1", "object":"chat.completion","model":"m","created":12345678901,"choices":[{"b":1,"a":1e2}],"usage":{"prompt_tokens":9007199254740993}}
"#;
    for path in sandbox.paths() {
        for sent in [BODY, &forged] {
            sandbox.clear();
            let answer = Call::post(&path, PATH, sent.to_owned()).send().await;
            assert_eq!(answer.status, 200);
            assert_eq!(answer.json().await["usage"]["completion_tokens"], 5);
            let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
            assert_eq!(without(&prefill.body, &PREFILL_FIELDS), without(BODY.as_bytes(), &PREFILL_FIELDS));
            assert_eq!(raw(&prefill.body, "kv_transfer_params"), None);
            assert_eq!(raw(&prefill.body, "max_tokens").as_deref(), Some("1"));
            assert_eq!(without(&decode.body, &["disagg_prefill_resp"]), members(BODY.as_bytes()));
            let relayed = decode.json()["disagg_prefill_resp"].clone();
            assert_eq!((&relayed["object"], &relayed["model"]), (&json!("chat.completion"), &json!("m")));
            assert_eq!(relayed["usage"]["completion_tokens"], 1);
        }
        // Whatever the prefill pod wrote, and as it wrote it.
        sandbox.clear();
        sandbox.prefill[0].script(Fault::on("/v1/").answer(200, "application/json", Bytes::from(odd)));
        assert_eq!(Call::post(&path, PATH, BODY).send().await.status, 200);
        assert_eq!(raw(&only(&sandbox.decode[0]).body, "disagg_prefill_resp").as_deref(), Some(odd.trim()));
    }
    sandbox.close().await;
}

/// The same pods without the label, for comparison: the gateway-wide default is `shfs`.
#[tokio::test(flavor = "multi_thread")]
async fn interop_17_a_pods_label_beats_the_gateways_variable() {
    let mut options = SandboxOptions {
        pod: |pod| pod.label("model.aibrix.ai/kv-connector-type", "shfs"),
        ..SandboxOptions::default()
    };
    options.fleet.env.push(("AIBRIX_KV_CONNECTOR_TYPE".to_owned(), "nixl".to_owned()));
    let sandbox = Sandbox::start(options).await;
    for path in sandbox.paths() {
        sandbox.clear();
        assert_eq!(Call::post(&path, PATH, BODY).send().await.status, 200);
        assert_prefill_leg(BODY.as_bytes(), &only(&sandbox.prefill[0]).body);
        let decode = only(&sandbox.decode[0]);
        assert_eq!(raw(&decode.body, "disagg_prefill_resp"), None);
        assert!(raw(&decode.body, "kv_transfer_params").is_some());
    }
    sandbox.close().await;
}
