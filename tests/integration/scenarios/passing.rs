//! Requests without a body through the ext_proc filter: Envoy's own routes answer them, with the shipped file and with one
//! whose routes are laid out as in an AIBrix installation without Kubernetes.

use http::Method;
use serde_json::{Value, json};

use crate::bodies::total;
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;
use crate::harness::raw::RawServer;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":2}"#;

fn prefix(prefix: &str, (kind, action): &(&str, Value)) -> Value {
    json!({"match": {"prefix": prefix}, *kind: action})
}

fn says(text: &str) -> (&'static str, Value) {
    ("direct_response", json!({"status": 203, "body": {"inline_string": text}}))
}

/// One route for each path, the filter before all of them, and nothing that removes a client's headers early. Where that
/// installation has a metadata service and an engine, Envoy itself answers.
fn laid_out_as_aibrix(config: &mut Value) {
    let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    manager.as_object_mut().expect("a manager").remove("early_header_mutation_extensions");
    let filter = manager["http_filters"][0]["typed_config"].as_object_mut().expect("ext_proc");
    for setting in ["response_attributes", "allow_mode_override", "mutation_rules", "max_message_timeout"] {
        filter.remove(setting);
    }
    let routes = &mut manager["route_config"]["virtual_hosts"][0]["routes"];
    let routed = routes[0].clone();
    let scraped = json!({"cluster": "tandem_http", "timeout": "10s"});
    *routes = json!([
        routed,
        prefix(CHAT, &says("an engine")),
        prefix("/v1/models", &says("metadata: models")),
        prefix("/v1/files", &says("metadata: files")),
        prefix("/v1/batches", &says("metadata: batches")),
        prefix("/healthz", &says("healthy")),
        prefix("/metrics", &("route", scraped)),
        prefix("/v1/", &says("an engine")),
        prefix("/", &("direct_response", json!({"status": 404, "body": {"inline_string": "nothing here"}}))),
    ]);
}

async fn text(answer: crate::harness::http::Answer) -> String {
    String::from_utf8_lossy(&answer.body().await.bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn aibrixs_routes_answer_what_has_no_body() {
    let mut options = SandboxOptions::default();
    options.fleet.edit_envoy = Some(laid_out_as_aibrix);
    options.fleet.front = false;
    let sandbox = Sandbox::start(options).await;
    let [path] = sandbox.paths().try_into().expect("through Envoy only");
    let secret = RawServer::answering("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    for (method, at, status, said) in [
        (Method::GET, "/v1/models", 203, "metadata: models"),
        (Method::GET, "/v1/models/m", 203, "metadata: models"),
        (Method::GET, "/v1/files?purpose=batch", 203, "metadata: files"),
        (Method::DELETE, "/v1/files/file-1", 203, "metadata: files"),
        (Method::GET, "/v1/files/file-1/content", 203, "metadata: files"),
        (Method::GET, "/v1/batches", 203, "metadata: batches"),
        (Method::POST, "/v1/batches/batch-1/cancel", 203, "metadata: batches"),
        (Method::GET, "/healthz", 203, "healthy"),
        (Method::GET, "/v1/tokenizer_info", 203, "an engine"),
        (Method::GET, CHAT, 203, "an engine"),
        (Method::GET, "/elsewhere", 404, "nothing here"),
    ] {
        // A forged target is dialled neither before the filter nor after it.
        for forged in [None, Some(secret.address().to_string())] {
            let call = Call::get(&path, at).method(method.clone());
            let call = forged.iter().fold(call, |call, target| call.header("target-pod", target));
            let answer = call.send().await;
            assert_eq!((answer.status.as_u16(), text(answer).await.as_str()), (status, said), "{method} {at}");
        }
    }
    let head = Call::get(&path, "/v1/models").method(Method::HEAD).send().await;
    assert_eq!(head.status, 203);
    let scraped = Call::get(&path, "/metrics").send().await;
    assert_eq!(scraped.status, 200);
    assert!(text(scraped).await.contains("tandem_build_info"));
    assert!(secret.connections().is_empty());
    // None of it was a request to a model, and those go on as ever; what has a body and no known path is refused, as there.
    assert_eq!(total(&sandbox.fleet, "gateway_request_total", &[]).await, 0.0);
    assert_eq!(Call::post(&path, CHAT, BODY).send().await.status, 200);
    assert_eq!(Call::post(&path, CHAT, "").send().await.status, 400);
    let upload = Call::post(&path, "/v1/files", "{}").send().await;
    assert_eq!((upload.status.as_u16(), upload.header("x-error-request-body-processing")), (501, "true"));
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shipped_file_says_that_it_has_no_route() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let path = &sandbox.paths()[0];
    for at in ["/healthz", "/metrics", "/v1/files", "/v1/batches", CHAT] {
        let answer = Call::get(path, at).send().await;
        assert_eq!(answer.status, 404, "{at}");
        assert_eq!(answer.json().await["error"]["message"], "no route for this request", "{at}");
    }
    let models = Call::get(path, "/v1/models").send().await;
    assert_eq!(models.status, 200);
    assert_eq!(total(&sandbox.fleet, "gateway_request_total", &[]).await, 0.0);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_passes_shows_the_token_where_one_is_set() {
    let mut options = SandboxOptions::default().env(&[("AIBRIX_AUTH_BEARER_TOKEN", "open sesame")]);
    options.fleet.edit_envoy = Some(laid_out_as_aibrix);
    let sandbox = Sandbox::start(options).await;
    let path = &sandbox.paths()[0];
    let refused = Call::get(path, "/v1/files").send().await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.json().await["error"]["code"], "invalid_api_key");
    let passed = Call::get(path, "/v1/files").header("authorization", "Bearer open sesame").send().await;
    assert_eq!((passed.status.as_u16(), text(passed).await.as_str()), (203, "metadata: files"));
    sandbox.close().await;
}
