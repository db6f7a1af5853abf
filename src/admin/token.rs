//! The token of operators (`TANDEM_ADMIN_TOKEN`).
//!
//! It guards what tells about the fleet and its traffic: metrics and `/debug/…`. Probes (`/healthz`, `/readyz`) and the
//! list of models, to which clients are routed, stay open. It comes as a bearer token, or as the password of a browser's
//! own dialogue (any user name).

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Json, response::AppendHeaders};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::AdminState;
use crate::knobs::Secret;
use crate::request::credential;

/// Longer `authorization` headers are not decoded.
const LONGEST: usize = 4096;

/// Lets a request pass that knows the token, if there is one.
pub(super) async fn guard(State(state): State<AdminState>, request: Request, next: Next) -> Response {
    match &state.token {
        Some(token) if !knows(request.headers(), token) => refused(),
        _ => next.run(request).await,
    }
}

fn refused() -> Response {
    let challenges = [(WWW_AUTHENTICATE, "Bearer"), (WWW_AUTHENTICATE, "Basic realm=\"tandem\", charset=\"UTF-8\"")];
    (StatusCode::UNAUTHORIZED, AppendHeaders(challenges), Json(json!({"error": "a token is needed"}))).into_response()
}

fn knows(headers: &HeaderMap, token: &Secret) -> bool {
    if headers.get(AUTHORIZATION).is_none_or(|value| value.len() > LONGEST) {
        return false;
    }
    if let Some(given) = credential(headers, "bearer") {
        return token.is(given);
    }
    let Some(pair) = credential(headers, "basic").and_then(|given| STANDARD.decode(given).ok()) else { return false };
    let password = pair.iter().position(|byte| *byte == b':').and_then(|colon| pair.get(colon + 1..));
    password.is_some_and(|password| token.is(password))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_as_bearer_or_as_password() {
        let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
        for (header, known) in [
            ("Bearer hunter2".to_owned(), true),
            ("bearer  hunter2 ".to_owned(), true),
            ("Bearer hunter".to_owned(), false),
            ("Bearer hunter22".to_owned(), false),
            ("Bearer ".to_owned(), false),
            ("hunter2".to_owned(), false),
            ("Token hunter2".to_owned(), false),
            (basic("anyone:hunter2"), true),
            (basic(":hunter2"), true),
            (basic("hunter2"), false),
            (basic("hunter2:"), false),
            (basic("a:b:hunter2"), false),
            ("Basic !!!".to_owned(), false),
            (format!("Bearer {}", "x".repeat(LONGEST)), false),
        ] {
            let headers = HeaderMap::from_iter([(AUTHORIZATION, header.parse().unwrap())]);
            assert_eq!(knows(&headers, &Secret::new("hunter2")), known, "{header}");
        }
        assert!(!knows(&HeaderMap::new(), &Secret::new("hunter2")));
        let twisted =
            HeaderMap::from_iter([(AUTHORIZATION, axum::http::HeaderValue::from_bytes(b"Bearer \xff").unwrap())]);
        assert!(!knows(&twisted, &Secret::new("hunter2")));
    }
}
