//! The TensorRT-LLM dialect (1.3 release candidates): strict schema, context and generation workers, draining statistics.

mod call;
mod exposition;
mod failure;
mod generate;
mod handoff;
mod schema;
mod server_info;
mod shape;

use std::sync::Arc;

use http::request::Parts;

use crate::answer::Reply;
use crate::fault::Fault;
use crate::state::Core;
use call::Api;
use failure::Failure;

pub(crate) use exposition::Iterations;

/// The paths that are served, with their method.
const ROUTES: [(&str, &str); 9] = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/server_info", "GET"),
    ("/health", "GET"),
    ("/health_generate", "GET"),
    ("/version", "GET"),
    ("/metrics", "GET"),
    ("/prometheus/metrics", "GET"),
];

/// An error inside a stream of completions.
pub(crate) const ERROR_EVENT: &str =
    "data: {\"error\": {\"message\": \"Internal server error\", \"type\": \"server_error\", \"code\": null}}\n\n";

/// Whether requests to `path` are work.
pub(crate) fn is_inference(path: &str) -> bool {
    generation(path).is_some()
}

fn generation(path: &str) -> Option<Api> {
    match path {
        "/v1/chat/completions" => Some(Api::Chat),
        "/v1/completions" => Some(Api::Completions),
        _ => None,
    }
}

/// The answer to a body beyond the engine's limit.
pub(crate) fn too_large() -> Reply {
    Failure::Flat { status: 413, kind: "BadRequestError", message: "Request body is too large".to_owned() }.reply()
}

/// Answers one request.
pub(crate) async fn answer(core: &Arc<Core>, head: &Parts, body: &[u8], seq: u64, fault: Option<&Fault>) -> Reply {
    let path = head.uri.path();
    let served = |route: &&(&str, &str)| route.0 == path && (core.config.perf_metrics || path != "/prometheus/metrics");
    let Some((_, method)) = ROUTES.iter().find(served) else {
        return Reply::json(404, r#"{"detail":"Not Found"}"#);
    };
    if head.method.as_str() != *method {
        let headers = vec![
            ("allow".to_owned(), (*method).to_owned()),
            ("content-type".to_owned(), "application/json".to_owned()),
        ];
        return Reply::Whole { status: 405, headers, body: r#"{"detail":"Method Not Allowed"}"#.into() };
    }
    if let Some(api) = generation(path) {
        let answered = if core.healthy() {
            generate::answer(core, api, body, seq, fault).await
        } else {
            Err(Failure::internal("The executor has shut down."))
        };
        return answered.unwrap_or_else(|failure| failure.reply());
    }
    match path {
        "/v1/models" => server_info::models(core),
        "/server_info" => server_info::answer(core),
        "/version" => Reply::json(200, r#"{"version":"1.3.0rc8"}"#),
        "/metrics" => Reply::json(200, exposition::drain(core)),
        "/prometheus/metrics" => {
            Reply::with_type(200, "text/plain; version=1.0.0; charset=utf-8", exposition::render(core))
        }
        _ => {
            let status = if core.healthy() { 200 } else { 503 };
            Reply::Whole { status, headers: Vec::new(), body: bytes::Bytes::new() }
        }
    }
}
