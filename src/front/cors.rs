//! Which web pages may call the front from a browser.

use std::time::Duration;

use http::{HeaderName, HeaderValue, Method};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer, ExposeHeaders};

/// For how long a browser need not ask again.
const MAX_AGE: Duration = Duration::from_mins(10);

/// Headers of answers that a page may read: the request's ids, where it went, and when to come again.
const EXPOSED: [HeaderName; 7] = [
    HeaderName::from_static("request-id"),
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("target-pod"),
    HeaderName::from_static("prefill-target-pod"),
    HeaderName::from_static("routing-strategy"),
    HeaderName::from_static("x-session-id"),
    HeaderName::from_static("retry-after"),
];

/// The layer for these origins; `None`: no page of another origin may call, and nothing is added to answers.
///
/// Credentials of the browser's own (cookies) are never asked for: clients send a token, which pages add themselves.
pub(super) fn layer(origins: &[String]) -> Option<CorsLayer> {
    let allowed = if origins == ["*"] {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(ExposeHeaders::list(EXPOSED))
        .max_age(MAX_AGE);
    (!origins.is_empty()).then_some(layer)
}
