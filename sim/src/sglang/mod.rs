//! The SGLang dialect (0.5.23, with the stream heads of 0.5.9 by default): both legs at once, matched by room.

mod aborts;
mod call;
mod exposition;
mod failure;
mod generate;
mod handoff;
mod limits;
mod listing;
mod shape;

use std::sync::Arc;

use http::Method;
use http::request::Parts;

use crate::answer::Reply;
use crate::fault::Fault;
use crate::state::Core;
use call::Api;
use failure::Failure;

pub(crate) use aborts::Rids;
pub(crate) use handoff::Rooms;

/// The paths that are served, with their method.
const ROUTES: [(&str, &str); 15] = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/generate", "POST"),
    ("/abort_request", "POST"),
    ("/v1/models", "GET"),
    ("/server_info", "GET"),
    ("/get_server_info", "GET"),
    ("/model_info", "GET"),
    ("/get_model_info", "GET"),
    ("/v1/loads", "GET"),
    ("/health", "GET"),
    ("/health_generate", "GET"),
    ("/ready", "GET"),
    ("/ping", "GET"),
    ("/metrics", "GET"),
];

/// An error inside a stream.
pub(crate) const ERROR_EVENT: &str = "data: {\"error\": {\"object\": \"error\", \"message\": \"Internal server error\", \
                                      \"type\": \"INTERNAL_SERVER_ERROR\", \"param\": null, \"code\": 500}}\n\n";

/// Whether requests to `path` are work.
pub(crate) fn is_inference(path: &str) -> bool {
    generation(path).is_some()
}

fn generation(path: &str) -> Option<Api> {
    match path {
        "/v1/chat/completions" => Some(Api::Chat),
        "/v1/completions" => Some(Api::Completions),
        "/generate" => Some(Api::Generate),
        _ => None,
    }
}

/// The answer to a body beyond the engine's limit.
pub(crate) fn too_large() -> Reply {
    Failure { status: 413, kind: "Bad Request", message: "Request body is too large".to_owned() }.reply(Api::Chat)
}

/// Answers one request.
pub(crate) async fn answer(core: &Arc<Core>, head: &Parts, body: &[u8], seq: u64, fault: Option<&Fault>) -> Reply {
    let path = head.uri.path();
    if let Some(name) = path.strip_prefix("/v1/models/") {
        return listing::model(core, name);
    }
    let Some((_, method)) = ROUTES.iter().find(|(route, _)| *route == path) else {
        return Reply::json(404, r#"{"detail":"Not Found"}"#);
    };
    let also_post = matches!(path, "/ping" | "/abort_request") && head.method == Method::POST;
    if head.method.as_str() != *method && !also_post {
        let headers = vec![
            ("allow".to_owned(), (*method).to_owned()),
            ("content-type".to_owned(), "application/json".to_owned()),
        ];
        return Reply::Whole { status: 405, headers, body: r#"{"detail":"Method Not Allowed"}"#.into() };
    }
    if let Some(api) = generation(path) {
        let answered = if core.healthy() {
            generate::answer(core, api, head, body, seq, fault).await
        } else {
            Err(Failure::internal("The engine is dead."))
        };
        return answered.unwrap_or_else(|failure| failure.reply(api));
    }
    match path {
        "/abort_request" => aborts::answer(core, body, seq),
        "/v1/models" => listing::models(core),
        "/server_info" | "/get_server_info" => listing::server_info(core),
        "/model_info" | "/get_model_info" => listing::model_info(core),
        "/v1/loads" => listing::loads(core),
        "/metrics" => {
            core.expire_leases();
            Reply::with_type(200, "text/plain; version=1.0.0; charset=utf-8", exposition::render(core))
        }
        _ => {
            let status = if core.healthy() { 200 } else { 503 };
            Reply::Whole { status, headers: Vec::new(), body: bytes::Bytes::new() }
        }
    }
}
