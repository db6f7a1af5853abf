//! `/debug/fleet` for people: one page that holds its own style and script and asks this replica for everything else.
//!
//! Whoever prefers HTML (a browser) gets the page; all others get JSON. What the script shows are texts from labels,
//! annotations and requests: it only ever sets them as text, and the policy of the page forbids any script but its own.

use axum::Json;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::http::header::{ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::{AdminState, debug};

const MARKUP: &str = include_str!("page/fleet.html");
const STYLE: &str = include_str!("page/fleet.css");
const SCRIPT: &str = include_str!("page/fleet.js");

/// Which of the two, where `accept` cannot say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    Html,
    Json,
}

#[derive(Debug, Deserialize)]
pub(super) struct Wanted {
    format: Option<Format>,
}

pub(super) async fn fleet(
    State(state): State<AdminState>,
    Query(wanted): Query<Wanted>,
    headers: HeaderMap,
) -> Response {
    let format = wanted.format.unwrap_or_else(|| preferred(&headers));
    match format {
        Format::Json => Json(debug::fleet(&state)).into_response(),
        Format::Html => page(&uuid::Uuid::new_v4().simple().to_string()),
    }
}

/// HTML for those who name it before anything that JSON satisfies. Weights are not looked at: browsers list what they
/// like best first.
fn preferred(headers: &HeaderMap) -> Format {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let first = accept.split(',').find_map(|one| match one.split(';').next().unwrap_or_default().trim() {
        "text/html" | "application/xhtml+xml" => Some(Format::Html),
        "application/json" | "application/*" | "*/*" => Some(Format::Json),
        _ => None,
    });
    first.unwrap_or(Format::Json)
}

/// The page; `nonce` is what its style and script are known by.
fn page(nonce: &str) -> Response {
    let body = MARKUP.replace("%NONCE%", nonce).replace("%STYLE%", STYLE).replace("%SCRIPT%", SCRIPT);
    let policy = format!(
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let head = [
        (CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (CONTENT_SECURITY_POLICY, policy),
        (CACHE_CONTROL, "no-store".to_owned()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    (head, body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_get_the_page_and_programs_get_json() {
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8";
        for (accept, format) in [
            (browser, Format::Html),
            ("text/html", Format::Html),
            ("image/png, text/html;q=0.5", Format::Html),
            ("*/*", Format::Json),
            ("application/json, text/html", Format::Json),
            ("text/plain", Format::Json),
            ("", Format::Json),
        ] {
            let headers = HeaderMap::from_iter([(ACCEPT, accept.parse().unwrap())]);
            assert_eq!(preferred(&headers), format, "{accept}");
        }
        assert_eq!(preferred(&HeaderMap::new()), Format::Json);
    }

    #[test]
    fn the_page_holds_all_it_needs_and_inserts_no_markup() {
        assert!(!SCRIPT.contains("innerHTML") && !SCRIPT.contains("insertAdjacentHTML") && !SCRIPT.contains("eval("));
        for text in [MARKUP, STYLE, SCRIPT] {
            for outside in ["http:", "https:", "src=", "@import", "url("] {
                assert!(!text.contains(outside), "{outside}");
            }
        }
        assert!(!SCRIPT.contains("</script") && !STYLE.contains("</style"));
        assert!(!SCRIPT.contains("style=\""), "the policy forbids it");
    }
}
