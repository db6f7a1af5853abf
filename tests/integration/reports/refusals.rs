//! Reports: a prefill pod that refuses for the moment says when to try again, and the client never heard of it, while it did
//! hear of the decode pod's.

use bytes::Bytes;
use tandem_sim::{EngineConfig, Fault};

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"not now"}],"max_tokens":2}"#;
const ERROR: &str = r#"{"error":{"message":"slow down","type":"rate_limit_error","param":null,"code":429}}"#;

/// What an engine, or a sidecar before it, says beside the status.
const SAID: [(&str, &str); 5] = [
    ("retry-after", "17"),
    ("x-ratelimit-limit-requests", "60"),
    ("x-ratelimit-remaining-tokens", "0"),
    ("ratelimit-reset", "17"),
    ("ratelimit-policy", "60;w=60"),
];

fn refusal(status: u16) -> Fault {
    let headers = [&[("content-type", "application/json")][..], &SAID].concat();
    Fault::on("/v1/").answer_raw(status, &headers, vec![Bytes::from_static(ERROR.as_bytes())], false)
}

async fn refused(path: &str, status: u16) {
    let answer = Call::post(path, CHAT, BODY).send().await;
    assert_eq!(answer.status, status);
    for (name, value) in SAID {
        assert_eq!(answer.header(name), value, "{name} of {status} through {path}");
    }
    assert_eq!(answer.json().await["error"]["message"].as_str().map(|text| text.contains("slow down")), Some(true));
}

#[tokio::test(flavor = "multi_thread")]
async fn both_pods_of_a_pair_may_say_when_to_try_again() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for status in [429, 503] {
            sandbox.prefill[0].script(refusal(status));
            refused(&path, status).await;
            sandbox.decode[0].script(refusal(status));
            refused(&path, status).await;
        }
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_may_a_pod_whose_leg_was_sent_along() {
    let sandbox = Sandbox::start(SandboxOptions::of(EngineConfig::sglang)).await;
    for path in sandbox.paths() {
        let hold = sandbox.decode[0].hold();
        sandbox.prefill[0].script(refusal(429));
        refused(&path, 429).await;
        hold.release();
    }
    sandbox.close().await;
}
