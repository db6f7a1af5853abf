//! Pages of other origins call the API from a browser (CORS): through the commented filter of the Envoy file, and on the
//! front.

use serde_json::{Value, json};

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::envoy::{SHIPPED_FILE, shipped_text};
use crate::harness::http::{Answer, Call};

const CHAT: &str = "/v1/chat/completions";
const NAMED: &str = "https://chat.example.com";

/// The configuration with what the file has behind `#cors# `.
fn switch_on(config: &mut Value) {
    let text = shipped_text(SHIPPED_FILE, false).replace("#cors# ", "");
    let switched: Value = serde_saphyr::from_str(&text).expect("the file with its CORS sections is YAML");
    let manager = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";
    for part in
        ["http_filters", "route_config/virtual_hosts/0/typed_per_filter_config", "route_config/virtual_hosts/0/routes"]
    {
        let (parent, name) = part.rsplit_once('/').unwrap_or(("", part));
        let at = if parent.is_empty() { manager.to_owned() } else { format!("{manager}/{parent}") };
        let from = switched.pointer(&format!("{manager}/{part}")).expect("the section").clone();
        config.pointer_mut(&at).expect("the same place")[name] = from;
    }
}

async fn preflight(path: &str, origin: &str) -> Answer {
    Call::preflight(path, CHAT, origin, "authorization,content-type").send().await
}

async fn ask(path: &str, origin: &str) -> Answer {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).to_string();
    Call::post(path, CHAT, body).header("routing-strategy", "pd").header("origin", origin).send().await
}

fn allowed(answer: &Answer) -> &str {
    answer.header("access-control-allow-origin")
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_named_origins_may_call() {
    let mut options = SandboxOptions::default().env(&[("TANDEM_FRONT_CORS_ORIGINS", NAMED)]);
    options.fleet.edit_envoy = Some(switch_on);
    let sandbox = Sandbox::start(options).await;
    for path in sandbox.paths() {
        let asked = preflight(&path, NAMED).await;
        assert_eq!(asked.status, 200, "{path} {:?}", asked.headers);
        assert_eq!(allowed(&asked), NAMED, "{path}");
        assert!(asked.header("access-control-allow-methods").contains("POST"), "{path}");
        let headers = asked.header("access-control-allow-headers");
        assert!(headers.contains("authorization") && headers.contains("content-type"), "{path}: {headers}");
        let answer = ask(&path, NAMED).await;
        assert_eq!((answer.status.as_u16(), allowed(&answer)), (200, NAMED), "{path}");
        assert!(answer.header("access-control-expose-headers").contains("request-id"), "{path}");
        assert_eq!(answer.header("access-control-allow-credentials"), "", "{path}");
        assert!(answer.body().await.complete);

        // A request that goes nowhere is no way to anything else behind Envoy.
        let lost = Call::get(&path, "/metrics").header("origin", NAMED).send().await;
        assert!(lost.status.is_client_error() || lost.status.as_u16() == 501, "{path}: {}", lost.status);

        // Others are served (a browser, not a gateway, keeps the answer from the page), and are not told that they may.
        assert_eq!(allowed(&preflight(&path, "https://evil.example.com").await), "", "{path}");
        let answer = ask(&path, "https://evil.example.com").await;
        assert_eq!((answer.status.as_u16(), allowed(&answer)), (200, ""), "{path}");
        assert!(answer.body().await.complete);
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn as_shipped_no_other_origin_may() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        assert_eq!(allowed(&preflight(&path, NAMED).await), "", "{path}");
        let answer = ask(&path, NAMED).await;
        assert_eq!((answer.status.as_u16(), allowed(&answer)), (200, ""), "{path}");
        assert!(answer.body().await.complete);
    }
    sandbox.close().await;
}
