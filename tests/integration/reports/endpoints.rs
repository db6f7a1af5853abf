//! Reports: an API whose requests an engine's pods cannot hand over to one another was split all the same, and failed at the
//! decode pod. Which they are is in `docs/endpoints.md`.

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Fault, Record};

use crate::bodies::members::{members, raw};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

fn sent(api: &str) -> &'static str {
    match api {
        RESPONSES => r#"{"model":"m","input":"tell me","max_output_tokens":5}"#,
        _ => r#"{"model":"m","messages":[{"role":"user","content":"tell me"}],"max_tokens":5}"#,
    }
}

fn work(engine: &Engine) -> Vec<Record> {
    engine.records().into_iter().filter(|record| record.path.starts_with("/v1/")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_handed_over_goes_to_a_combined_pod_as_it_is() {
    for engine in [EngineConfig::sglang as fn(EngineConfig) -> EngineConfig, EngineConfig::trtllm] {
        let sandbox = Sandbox::start(SandboxOptions { combined: 1, ..SandboxOptions::of(engine) }).await;
        for path in sandbox.paths() {
            for api in [RESPONSES, MESSAGES] {
                sandbox.clear();
                let answer = r#"{"id":"1","usage":{"input_tokens":1,"output_tokens":1}}"#;
                sandbox.combined[0].script(Fault::on(api).answer(200, "application/json", answer));
                let got = Call::post(&path, api, sent(api)).send().await;
                assert_eq!((got.status.as_u16(), got.header("target-pod")), (200, "c0"), "{api}");
                assert_eq!(got.body().await.bytes, answer);
                let [record] = work(&sandbox.combined[0]).try_into().expect("one request");
                assert_eq!((record.path.as_str(), &record.body[..]), (api, sent(api).as_bytes()));
                assert!(work(&sandbox.prefill[0]).is_empty() && work(&sandbox.decode[0]).is_empty());
            }
        }
        sandbox.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_combined_pod_the_answer_names_the_endpoint() {
    for (engine, name) in
        [(EngineConfig::sglang as fn(EngineConfig) -> EngineConfig, "sglang"), (EngineConfig::trtllm, "trtllm")]
    {
        let sandbox = Sandbox::start(SandboxOptions::of(engine)).await;
        for path in sandbox.paths() {
            for api in [RESPONSES, MESSAGES] {
                let got = Call::post(&path, api, sent(api)).send().await;
                assert_eq!((got.status.as_u16(), got.header("x-error-routing")), (400, "true"), "{api}");
                let error = got.json().await["error"].clone();
                assert_eq!(error["type"], "invalid_request_error");
                let message = error["message"].as_str().unwrap_or_default();
                assert!(message.contains(api) && message.contains(name), "{message}");
            }
        }
        assert!(sandbox.engines().all(|engine| work(engine).is_empty()), "no pod has heard of it");
        sandbox.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vllm_shares_both_and_a_responses_leg_is_limited_by_its_own_field() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for (api, limit, absent) in [
            (RESPONSES, "max_output_tokens", &["max_tokens", "max_completion_tokens"][..]),
            (MESSAGES, "max_tokens", &["max_output_tokens"]),
        ] {
            sandbox.clear();
            let got = Call::post(&path, api, sent(api)).send().await;
            assert_eq!(got.status, 200, "{api}");
            let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
            assert_eq!(raw(&prefill.body, limit).as_deref(), Some("1"), "{api}");
            for name in absent {
                assert_eq!(raw(&prefill.body, name), None, "{api}: {name}");
            }
            assert_eq!(prefill.json()["stream"], json!(false));
            let mut kept: Vec<(String, String)> = members(&decode.body);
            kept.retain(|(key, _)| key != "\"kv_transfer_params\"");
            assert_eq!(kept, members(sent(api).as_bytes()), "{api}");
            assert_ne!(decode.json()["kv_transfer_params"], Value::Null, "{api}");
        }
        // As the other limits: twice is a mistake, and no leg is sent.
        sandbox.clear();
        let twice = r#"{"model":"m","input":"x","max_output_tokens":5,"max_output_tokens":6}"#;
        let got = Call::post(&path, RESPONSES, twice).send().await;
        assert_eq!(got.status, 400);
        assert!(got.json().await["error"]["message"].as_str().is_some_and(|text| text.contains("max_output_tokens")));
        assert!(sandbox.engines().all(|engine| engine.records().is_empty()));
    }
    assert_eq!(sandbox.decode[0].stats().computed_tokens, 0, "decode read what prefill wrote");
    sandbox.close().await;
}
