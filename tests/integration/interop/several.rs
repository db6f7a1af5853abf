//! vLLM, cases 13 and 14: several choices, several prompts. One hand-off is good for one sequence.

use serde_json::json;

use crate::bodies::members::{assert_decode_leg, assert_prefill_leg, members};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;

/// Requests that cannot be split, and how many choices each brings.
const UNSPLITTABLE: [(&str, &str, usize); 6] = [
    ("/v1/chat/completions", r#"{"model":"m","n":2,"messages":[{"role":"user","content":"a"}],"max_tokens":3}"#, 2),
    ("/v1/chat/completions", r#"{"model":"m","n":2.0,"messages":[{"role":"user","content":"a"}],"max_tokens":3}"#, 2),
    ("/v1/completions", r#"{"model":"m","prompt":"a","n":2,"max_tokens":3}"#, 2),
    ("/v1/completions", r#"{"model":"m","prompt":["a","b"],"max_tokens":3}"#, 2),
    ("/v1/completions", r#"{"model":"m","prompt":[[1,2],[3]],"max_tokens":3}"#, 2),
    ("/v1/completions", r#"{"model":"m","prompt":["a","b"],"n":2,"max_tokens":3}"#, 4),
];

#[tokio::test(flavor = "multi_thread")]
async fn interop_13_14_several_sequences_go_to_a_combined_pod_untouched() {
    let sandbox = Sandbox::start(SandboxOptions { combined: 1, ..SandboxOptions::default() }).await;
    for path in sandbox.paths() {
        for (api, body, choices) in UNSPLITTABLE {
            sandbox.clear();
            let answer = Call::post(&path, api, body).send().await;
            assert_eq!(answer.status, 200, "{body}");
            assert_eq!((answer.header("target-pod"), answer.header("prefill-target-pod")), ("c0", ""), "{body}");
            assert_eq!(answer.json().await["choices"].as_array().unwrap().len(), choices, "{body}");
            assert_eq!(only(&sandbox.combined[0]).body, body);
            assert!(sandbox.prefill[0].records().is_empty() && sandbox.decode[0].records().is_empty(), "{body}");
        }
        // A client's own hand-off reaches no combined pod either.
        sandbox.clear();
        let forged = r#"{"model":"m","prompt":["a","b"],"kv_transfer_params":{"do_remote_prefill":true}}"#;
        assert_eq!(Call::post(&path, "/v1/completions", forged).send().await.status, 200);
        assert_eq!(members(&only(&sandbox.combined[0]).body), members(br#"{"model":"m","prompt":["a","b"]}"#));
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_13_14_without_a_combined_pod_decode_computes_alone() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for (api, body, choices) in UNSPLITTABLE {
            sandbox.clear();
            let answer = Call::post(&path, api, body).send().await;
            assert_eq!(answer.status, 200, "{body}");
            assert_eq!((answer.header("target-pod"), answer.header("prefill-target-pod")), ("d0", ""), "{body}");
            assert_eq!(answer.json().await["choices"].as_array().unwrap().len(), choices, "{body}");
            assert_eq!(only(&sandbox.decode[0]).body, body);
            assert!(sandbox.prefill[0].records().is_empty(), "{body}");
        }
        sandbox.clear();
        let forged = r#"{"model":"m","prompt":["a","b"],"kv_transfer_params":{"do_remote_prefill":true}}"#;
        assert_eq!(Call::post(&path, "/v1/completions", forged).send().await.status, 200);
        assert_eq!(members(&only(&sandbox.decode[0]).body), members(br#"{"model":"m","prompt":["a","b"]}"#));
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interop_14_a_list_of_one_is_one_prompt() {
    let sandbox = Sandbox::start(SandboxOptions { combined: 1, ..SandboxOptions::default() }).await;
    for path in sandbox.paths() {
        for prompt in [json!(["a prompt"]), json!([[5, 6, 7]]), json!([5, 6, 7])] {
            for n in ["", r#","n":1"#, r#","n":null"#] {
                sandbox.clear();
                let body = format!(r#"{{"model":"m","prompt":{prompt}{n},"max_tokens":3}}"#);
                let answer = Call::post(&path, "/v1/completions", body.clone()).send().await;
                assert_eq!(answer.status, 200, "{body}");
                assert_eq!(answer.header("target-pod"), "d0");
                assert_prefill_leg(body.as_bytes(), &only(&sandbox.prefill[0]).body);
                assert_decode_leg(body.as_bytes(), &only(&sandbox.decode[0]).body);
                assert!(sandbox.combined[0].records().is_empty());
            }
        }
    }
    sandbox.close().await;
}
