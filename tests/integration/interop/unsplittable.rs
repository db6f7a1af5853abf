//! Requests that a pair cannot share (cases 13 and 14, and the like of other engines): a combined pod serves them; without
//! one, vLLM's decode pods compute alone, and SGLang's and TensorRT-LLM's cannot, which the client is told.

use serde_json::json;
use tandem_sim::EngineConfig;

use super::{only_work, work};
use crate::bodies::total;
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn body(api: &str, members: &str) -> String {
    let prompt = match api {
        CHAT => r#""messages":[{"role":"user","content":"a"}]"#,
        _ if members.contains(r#""prompt":"#) => r#""user":"u""#,
        TEXT => r#""prompt":"a""#,
        _ => r#""text":"a""#,
    };
    format!(r#"{{"model":"m",{prompt},{members}}}"#)
}

/// Served by the combined pod as it is, by nobody else.
async fn assert_combined(engine: fn(EngineConfig) -> EngineConfig, cases: &[(&str, &str, &str)]) {
    let sandbox = Sandbox::start(SandboxOptions { combined: 1, ..SandboxOptions::of(engine) }).await;
    for path in sandbox.paths() {
        for (api, members, field) in cases {
            sandbox.clear();
            let sent = body(api, members);
            let answer = Call::post(&path, api, sent.clone()).send().await;
            let status = answer.status;
            assert_eq!(
                (answer.header("target-pod"), answer.header("prefill-target-pod")),
                ("c0", ""),
                "{field}: {sent}"
            );
            assert_eq!(status, 200, "{sent}: {:?}", answer.body().await);
            assert_eq!(only_work(&sandbox.combined[0]).body, sent);
            assert!(work(&sandbox.prefill[0]).is_empty() && work(&sandbox.decode[0]).is_empty());
        }
    }
    sandbox.close().await;
}

/// Refused with a sentence that names the field, before any pod has heard of it.
async fn assert_refused(engine: fn(EngineConfig) -> EngineConfig, name: &str, cases: &[(&str, &str, &str)]) {
    let sandbox = Sandbox::start(SandboxOptions::of(engine)).await;
    for path in sandbox.paths() {
        for (api, members, field) in cases {
            let answer = Call::post(&path, api, body(api, members)).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("x-error-routing")), (400, "true"), "{members}");
            let error = answer.json().await["error"].clone();
            let message = format!(
                "field \"{field}\" does not work with prefill and decode on different {name} pods, and this model has no pod \
                 that serves requests whole"
            );
            assert_eq!((&error["message"], &error["param"]), (&json!(message), &json!(field)));
            assert_eq!(error["type"], "invalid_request_error");
        }
        let answer = Call::post(&path, "/v1/embeddings", r#"{"model":"m","input":"a"}"#).send().await;
        assert_eq!(answer.status, 400);
        assert!(sandbox.engines().all(|engine| work(engine).is_empty()));
        // The like of it that can be split is served by the pair.
        let sent = body(TEXT, r#""n":1,"max_tokens":2"#);
        assert_eq!(Call::post(&path, TEXT, sent).send().await.status, 200);
        only_work(&sandbox.prefill[0]);
        sandbox.clear();
    }
    let no_pair = [("status", "pd-filter-prefill-decode-pods-fail")];
    assert_eq!(total(&sandbox.fleet, "gateway_prefill_request_fail_total", &no_pair).await, 0.0, "a client's matter");
    sandbox.close().await;
}

const VLLM: [(&str, &str, &str); 5] = [
    (TEXT, r#""max_tokens":2,"n":1,"best_of":2"#, "best_of"),
    (CHAT, r#""max_tokens":2,"prompt_logprobs":1"#, "prompt_logprobs"),
    (TEXT, r#""max_tokens":2,"prompt_logprobs":0"#, "prompt_logprobs"),
    (TEXT, r#""max_tokens":2,"echo":true,"logprobs":1"#, "echo"),
    (TEXT, r#""max_tokens":2,"use_beam_search":true"#, "use_beam_search"),
];

#[tokio::test(flavor = "multi_thread")]
async fn interop_13_more_than_a_decode_pod_learns() {
    assert_combined(|config| config, &VLLM).await;
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for (api, members, _) in VLLM {
            sandbox.clear();
            let sent = body(api, members);
            let answer = Call::post(&path, api, sent.clone()).send().await;
            assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "d0"), "{members}");
            let record = only_work(&sandbox.decode[0]);
            assert_eq!(record.body, sent, "no hand-off");
            assert!(work(&sandbox.prefill[0]).is_empty());
        }
    }
    sandbox.close().await;
}

const SGLANG: [(&str, &str, &str); 7] = [
    (CHAT, r#""max_tokens":2,"n":2"#, "n"),
    (TEXT, r#""max_tokens":2,"prompt":["a","b"]"#, "prompt"),
    (TEXT, r#""max_tokens":2,"echo":true,"logprobs":1"#, "echo"),
    (CHAT, r#""max_tokens":2,"return_hidden_states":true"#, "return_hidden_states"),
    ("/generate", r#""session_params":{"id":"s"}"#, "session_params"),
    ("/generate", r#""return_logprob":true,"logprob_start_len":0"#, "logprob_start_len"),
    ("/generate", r#""sampling_params":{"n":2,"max_new_tokens":2}"#, "sampling_params"),
];

#[tokio::test(flavor = "multi_thread")]
async fn interop_sglang_requests_that_a_pair_cannot_share() {
    assert_combined(tandem_sim::EngineConfig::sglang, &SGLANG).await;
    assert_refused(tandem_sim::EngineConfig::sglang, "sglang", &SGLANG).await;
}

const TRTLLM: [(&str, &str, &str); 4] = [
    (CHAT, r#""max_tokens":2,"n":2"#, "n"),
    (TEXT, r#""max_tokens":2,"prompt":["a","b"]"#, "prompt"),
    (TEXT, r#""max_tokens":2,"best_of":2"#, "best_of"),
    (TEXT, r#""max_tokens":2,"use_beam_search":true"#, "use_beam_search"),
];

#[tokio::test(flavor = "multi_thread")]
async fn interop_trtllm_requests_that_a_pair_cannot_share() {
    assert_combined(tandem_sim::EngineConfig::trtllm, &TRTLLM).await;
    assert_refused(tandem_sim::EngineConfig::trtllm, "trtllm", &TRTLLM).await;
}
