//! The vLLM dialect: its routes, its validation, its answers and its metric names.
//!
//! Another engine is another module with [`answer`], [`is_inference`] and [`too_large`]; queueing, KV, hand-off, faults and
//! records are shared.

mod call;
mod exposition;
mod failure;
mod generate;
mod handoff;
mod listing;
mod shape;
mod shape_other;

use std::sync::Arc;

use http::Method;
use http::request::Parts;

use crate::answer::Reply;
use crate::fault::Fault;
use crate::state::Core;
use call::Api;
use failure::Failure;

/// The paths that are served, with their method.
const ROUTES: [(&str, &str); 12] = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/embeddings", "POST"),
    ("/tokenize", "POST"),
    ("/v1/models", "GET"),
    ("/health", "GET"),
    ("/ping", "GET"),
    ("/version", "GET"),
    ("/load", "GET"),
    ("/metrics", "GET"),
];

/// An error inside a stream.
pub(crate) const ERROR_EVENT: &str = "data: {\"error\": {\"message\": \"Internal server error\", \"type\": \
                                      \"InternalServerError\", \"param\": null, \"code\": 500}}\n\n";

/// Whether requests to `path` are work, which a hold stops and `/load` counts.
pub(crate) fn is_inference(path: &str) -> bool {
    generation(path).is_some() || path == "/v1/embeddings"
}

fn generation(path: &str) -> Option<Api> {
    match path {
        "/v1/chat/completions" => Some(Api::Chat),
        "/v1/completions" => Some(Api::Completions),
        "/v1/responses" => Some(Api::Responses),
        "/v1/messages" => Some(Api::Messages),
        _ => None,
    }
}

/// The answer to a body beyond the engine's limit.
pub(crate) fn too_large() -> Reply {
    let failure =
        Failure { status: 413, kind: "Bad Request", message: "Request body is too large".to_owned(), param: None };
    failure.reply()
}

/// Answers one request.
pub(crate) async fn answer(core: &Arc<Core>, head: &Parts, body: &[u8], seq: u64, fault: Option<&Fault>) -> Reply {
    let path = head.uri.path();
    let Some((_, method)) = ROUTES.iter().find(|(route, _)| *route == path) else {
        return Reply::json(404, r#"{"detail":"Not Found"}"#);
    };
    let also_post = path == "/ping" && head.method == Method::POST;
    if head.method.as_str() != *method && !also_post {
        let headers = vec![
            ("allow".to_owned(), (*method).to_owned()),
            ("content-type".to_owned(), "application/json".to_owned()),
        ];
        return Reply::Whole { status: 405, headers, body: r#"{"detail":"Method Not Allowed"}"#.into() };
    }
    let answered = match (generation(path), path) {
        (Some(api), _) if core.healthy() => generate::answer(core, api, head, body, seq, fault).await,
        (Some(_), _) => Err(Failure::engine_dead()),
        (None, "/v1/embeddings") => listing::embeddings(core, head, body),
        (None, "/tokenize") => listing::tokenize(core, head, body),
        (None, "/v1/models") => Ok(listing::models(core)),
        (None, "/version") => Ok(Reply::json(200, r#"{"version":"0.32.0"}"#)),
        (None, "/load") => Ok(Reply::json(200, format!(r#"{{"server_load":{}}}"#, core.load.live_requests()))),
        (None, "/metrics") => {
            core.expire_leases();
            let text = exposition::render(core);
            Ok(Reply::with_type(200, "text/plain; version=1.0.0; charset=utf-8", text))
        }
        _ => Ok(health(core)),
    };
    answered.unwrap_or_else(|failure| failure.reply())
}

fn health(core: &Core) -> Reply {
    let status = if core.healthy() { 200 } else { 503 };
    Reply::Whole { status, headers: Vec::new(), body: bytes::Bytes::new() }
}
