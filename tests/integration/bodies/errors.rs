//! What an engine says when it refuses or fails, on either leg.

use serde_json::Value;
use tandem_sim::Fault;

use super::assert_no_panic;
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::{Answer, Call};

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}"#;

const STATUSES: [u16; 6] = [400, 404, 422, 429, 500, 503];

/// Content type, body, and the message that a client shall read when the gateway has to put it into words.
const BODIES: [(&str, &str, Option<&str>); 8] = [
    ("text/plain; charset=utf-8", "no can do\n", Some("no can do")),
    ("text/html", "<html><h1>502 Bad Gateway</h1></html>", Some("<html><h1>502 Bad Gateway</h1></html>")),
    ("application/json", r#"["list", {"b":1,"a":2}]"#, Some(r#"["list", {"b":1,"a":2}]"#)),
    ("application/json", "", None),
    ("application/json", r#"{"detail":[{"loc":["body","n"],"msg":"bad"}]}"#, Some("body.n: bad")),
    ("application/json", r#"{"object":"error","message":"flat","code":4}"#, Some("flat")),
    ("application/problem+json", r#"{"error" : {"message":"own \u00e9", "z":1,"a":1e2}}"#, Some("own é")),
    ("application/octet-stream", "{\"error\":{\"message\":\"cut", Some("{\"error\":{\"message\":\"cut")),
];

fn is_error_object(body: &str) -> bool {
    serde_json::from_str::<Value>(body).is_ok_and(|body| body["error"]["message"].is_string())
}

fn fault(status: u16, content_type: &str, body: &'static str) -> Fault {
    let own = [("x-engine-detail", "d; e"), ("retry-after", "7"), ("set-cookie", "a=1"), ("set-cookie", "b=2")];
    let headers = [&[("content-type", content_type), ("keep-alive", "timeout=5")], &own[..]].concat();
    Fault::on("/v1/").answer_raw(status, &headers, vec![body.into()], false)
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_decode_errors_pass_unchanged() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for status in STATUSES {
            for (content_type, body, _) in BODIES {
                for chunked in [false, true] {
                    let mut fault = fault(status, content_type, body);
                    if let Some(answer) = &mut fault.answer {
                        answer.chunked = chunked && !body.is_empty();
                    }
                    sandbox.decode[0].script(fault);
                    let answer = Call::post(&path, PATH, BODY).send().await;
                    assert_eq!(answer.status, status, "{body}");
                    assert_eq!(answer.header("content-type"), content_type);
                    assert_eq!((answer.header("x-engine-detail"), answer.header("retry-after")), ("d; e", "7"));
                    assert_eq!(answer.headers.get_all("set-cookie").iter().count(), 2);
                    assert_eq!(answer.headers.get("keep-alive"), None, "it speaks of the engine's connection");
                    assert_eq!(answer.header("target-pod"), "d0");
                    assert_eq!(answer.header("x-error-pd-prefill"), "");
                    assert_eq!(answer.header("x-error-pd-decode"), "");
                    let answer = answer.body().await;
                    assert_eq!((answer.bytes, answer.complete), (body.into(), true), "{status}");
                }
            }
        }
        // No content type, no body: none is made up.
        sandbox.decode[0].script(Fault::on("/v1/").answer_raw(404, &[], vec![], false));
        let answer = Call::post(&path, PATH, BODY).send().await;
        assert_eq!((answer.status.as_u16(), answer.headers.get("content-type")), (404, None));
        assert_eq!(answer.body().await.bytes, "");
    }
    assert_no_panic(&sandbox).await;
    sandbox.close().await;
}

/// The gateway has taken the prefill answer in, so what the client sees is its own answer: one JSON error object.
async fn assert_refused(answer: Answer, status: u16, message: &str) {
    assert_eq!(answer.status, status, "{message}");
    assert_eq!(answer.header("content-type"), "application/json");
    assert_eq!(answer.header("x-error-pd-prefill"), "true");
    assert!(!answer.header("request-id").is_empty());
    let error = answer.json().await["error"].clone();
    assert_eq!(error["message"], message, "{status}");
    assert!(error["type"].is_string() && error.get("code").is_some() && error.get("param").is_some(), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_prefill_errors_become_one_json_object() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        for status in STATUSES {
            for (content_type, body, message) in BODIES {
                sandbox.clear();
                sandbox.prefill[0].script(fault(status, content_type, body));
                let answer = Call::post(&path, PATH, BODY).send().await;
                assert_eq!(answer.header("x-engine-detail"), "", "the prefill pod's headers are not the client's");
                if status >= 500 {
                    let said = message.map_or_else(|| format!("status {status}"), str::to_owned);
                    assert_refused(answer, 503, &format!("prefill request failed (http_status): {said}")).await;
                } else if is_error_object(body) {
                    // Already what clients read: passed on as the engine wrote it.
                    assert_eq!(answer.status, status);
                    assert_eq!(answer.header("content-type"), "application/json");
                    assert_eq!(answer.header("x-error-pd-prefill"), "true");
                    assert_eq!(answer.body().await.bytes, body);
                } else {
                    let said = message.map_or_else(|| format!("the prefill pod answered {status}"), str::to_owned);
                    assert_refused(answer, status, &said).await;
                }
                assert_eq!(only(&sandbox.prefill[0]).status, Some(status));
                assert!(sandbox.decode[0].records().is_empty());
            }
        }
    }
    assert_no_panic(&sandbox).await;
    sandbox.close().await;
}
