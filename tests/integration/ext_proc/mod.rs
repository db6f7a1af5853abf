//! ext_proc streams as a scripted Envoy plays them, and what needs the real one: orders of messages, refusals, hostile
//! clients, failures of every stage.

mod addresses;
mod bad_requests;
mod failures;
mod hostile;
mod orders;
mod replies;

use serde_json::{Value, json};

use crate::harness::engines::{MODEL, Sandbox, SandboxOptions};
use crate::harness::ext_proc::{ExtProcClient, ExtProcStream, Head, Mutation, Reply};
use crate::harness::fleet::FleetOptions;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

const CHAT: &str = "/v1/chat/completions";

/// One replica, and nothing but a scripted Envoy before it.
fn bare(env: &[(&str, &str)]) -> SandboxOptions {
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let fleet = FleetOptions { replicas: 1, envoy: false, front: false, env, ..FleetOptions::default() };
    SandboxOptions { fleet, ..SandboxOptions::default() }
}

/// Starts the sandbox and connects to its replica.
async fn start(options: SandboxOptions) -> (Sandbox, ExtProcClient) {
    let sandbox = Sandbox::start(options).await;
    let client = ExtProcClient::connect(sandbox.fleet.tandems[0].grpc()).await;
    (sandbox, client)
}

/// A chat request.
fn chat(stream: bool) -> Vec<u8> {
    let messages = json!([{"role": "user", "content": "tell me about rivers"}]);
    json!({"model": MODEL, "messages": messages, "max_tokens": 8, "stream": stream}).to_string().into_bytes()
}

/// The head of a chat request.
fn chat_head() -> Head {
    Head::post(CHAT).raw("content-type", b"application/json")
}

/// Plays a request up to the reply to its body.
async fn routed(client: &ExtProcClient, head: Head, body: &[u8]) -> (ExtProcStream, Mutation) {
    let mut stream = client.open(&[]);
    stream.request_headers(head, false).await;
    let reply = stream.next().await;
    assert!(matches!(reply, Reply::RequestHeaders(_)), "{reply:?}");
    stream.request_body(body, true).await;
    let mutation = after_more_time(&mut stream).await;
    let Reply::RequestBody(mutation) = mutation else { panic!("expected a reply to the body, got {mutation:?}") };
    (stream, mutation)
}

/// The next reply that is not a request for more time.
async fn after_more_time(stream: &mut ExtProcStream) -> Reply {
    match stream.next().await {
        Reply::MoreTime(_) => stream.next().await,
        reply => reply,
    }
}

/// The head of a streamed answer.
fn sse_head() -> Head {
    Head::status(200).raw("content-type", b"text/event-stream; charset=utf-8")
}

/// Waits until `/debug/fleet` satisfies `condition`.
async fn fleet_shows(tandem: &Tandem, what: &str, condition: impl Fn(&Value) -> bool) {
    eventually(SOON, what, async || condition(&tandem.admin_json("/debug/fleet").await).then_some(())).await;
}

/// The pods of the sandbox's model on that page.
fn pods(page: &Value) -> &[Value] {
    page["models"][MODEL]["pods"].as_array().map_or(&[], Vec::as_slice)
}
