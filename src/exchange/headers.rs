//! Which headers go where.

use std::sync::Arc;

use http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST};
use http::{HeaderMap, HeaderName, HeaderValue};

/// Headers by which a client could steer a leg or an engine past the gateway: taken away in both directions of trust.
const CLIENT_FORBIDDEN: [&str; 10] = [
    "target-pod",
    "target-pod-scheme",
    "target-pod-ip",
    "prefill-target-pod",
    "prefill-target-pod-ip",
    "x-gateway-destination-endpoint",
    "x-data-parallel-rank",
    "x-went-into-req-headers",
    // Envoy's per-model routes match on it; only the gateway may name the model there.
    "model",
    // So that usage can be read from the answer: the answer is then not compressed.
    "accept-encoding",
];

/// Prefixes of the same: engines read overrides and credentials for hand-offs from these.
const CLIENT_FORBIDDEN_PREFIXES: [&str; 2] = ["x-override-", "x-trtllm-"];

/// Headers that speak to the gateway and mean nothing to an engine.
const GATEWAY_ONLY: [&str; 5] =
    ["routing-strategy", "external-filter", "config-profile", "x-tandem-explain", CALLER_REQUEST_ID];

/// Where an Envoy that puts an id of its own in `x-request-id` has kept the caller's, behind `=`; alone, there was none.
const CALLER_REQUEST_ID: &str = "x-tandem-caller-request-id";

/// Longest id of a caller that is repeated, bytes.
const MAX_CALLER_REQUEST_ID: usize = 128;

/// Headers about one connection (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

fn forbidden(name: &str) -> bool {
    CLIENT_FORBIDDEN.contains(&name) || CLIENT_FORBIDDEN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The names among `headers` that Envoy must take away before the request goes on.
pub fn names_to_strip(headers: &HeaderMap) -> Vec<String> {
    headers
        .keys()
        .map(HeaderName::as_str)
        .filter(|name| forbidden(name) || GATEWAY_ONLY.contains(name))
        .map(str::to_owned)
        .collect()
}

/// The same of a request that goes on by Envoy's own routes without the gateway. Its answer may be compressed.
pub fn names_to_strip_in_passing(headers: &HeaderMap) -> Vec<String> {
    let names = headers.keys().map(HeaderName::as_str);
    names.filter(|name| forbidden(name) && *name != ACCEPT_ENCODING).map(str::to_owned).collect()
}

/// The client's headers as a leg may carry them: without hop-by-hop headers and those that a `connection` header
/// names, without what would mislead an engine, with a content type (JSON, unless the client says otherwise), this
/// attempt's `x-request-id`, and the engines' own `authorization` where they have one.
pub fn leg_headers(client: &HeaderMap, request_id: &str, authorization: Option<&HeaderValue>) -> HeaderMap {
    let named = named_by_connection(client);
    let mut headers = HeaderMap::with_capacity(client.len() + 2);
    for (name, value) in client {
        let text = name.as_str();
        let skip = HOP_BY_HOP.contains(&text)
            || [CONTENT_LENGTH, HOST, EXPECT, ACCEPT_ENCODING].contains(name)
            || forbidden(text)
            || GATEWAY_ONLY.contains(&text)
            || text.starts_with("x-envoy-")
            || named.iter().any(|named| named == text);
        if !skip {
            headers.append(name.clone(), value.clone());
        }
    }
    if !headers.contains_key(CONTENT_TYPE) {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    if let Ok(value) = HeaderValue::from_str(request_id) {
        headers.insert(HeaderName::from_static("x-request-id"), value);
    }
    if let Some(value) = authorization {
        headers.insert(AUTHORIZATION, value.clone());
    }
    headers
}

/// Takes the gateway's own token out of a request that has shown it: it opens the gateway, and engines, their logs and
/// whoever stands before them have no use for it. Returns the header's name if it was there.
pub fn withhold_token(headers: &mut HeaderMap) -> Option<String> {
    headers.remove(AUTHORIZATION).map(|_| AUTHORIZATION.as_str().to_owned())
}

/// Takes away what concerns one connection only, so that an answer can go on over another one. Its trailers are not
/// passed on, so the announcement of them goes too.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    for name in named_by_connection(headers) {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The names that `connection` declares to be about this connection, in lower case.
fn named_by_connection(headers: &HeaderMap) -> Vec<String> {
    headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect()
}

/// The id by which the caller knows the request: said again in the answer and in the log, and good for nothing else. One
/// that is long, or not printable, is not repeated.
pub fn caller_request_id(headers: &HeaderMap) -> Option<Arc<str>> {
    let id = match text(headers, CALLER_REQUEST_ID) {
        Some(kept) => kept.strip_prefix('=')?,
        None => text(headers, "x-request-id")?,
    };
    (!id.is_empty() && id.len() <= MAX_CALLER_REQUEST_ID && id.bytes().all(|byte| byte.is_ascii_graphic()))
        .then(|| id.into())
}

/// A header value as text: trimmed, and only when it is text.
pub fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &[u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn legs_carry_the_clients_headers_less_the_dangerous_ones() {
        let client = map(&[
            ("authorization", b"Bearer k"),
            ("x-vllm-priority", b"3"),
            ("x-odd", b"\xff\xfe"),
            ("content-length", b"12"),
            ("transfer-encoding", b"chunked"),
            ("connection", b"close, X-Hop"),
            ("x-hop", b"1"),
            ("host", b"gateway"),
            ("target-pod", b"10.9.9.9:1"),
            ("x-override-rid", b"r"),
            ("x-trtllm-disagg-auth", b"sha256=0"),
            ("x-data-parallel-rank", b"1"),
            ("accept-encoding", b"gzip"),
            ("routing-strategy", b"pd"),
            ("x-request-id", b"client"),
        ]);
        let leg = leg_headers(&client, "R", None);
        let mut names: Vec<_> = leg.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "content-type", "x-odd", "x-request-id", "x-vllm-priority"]);
        assert_eq!(leg["x-request-id"], "R");
        assert_eq!(leg.get_all("x-request-id").iter().count(), 1);
        assert_eq!(leg["content-type"], "application/json");
        let own = HeaderValue::from_static("Bearer engines");
        let leg = leg_headers(&client, "R", Some(&own));
        assert_eq!(leg.get_all("authorization").iter().collect::<Vec<_>>(), [&own]);
    }

    #[test]
    fn ids_of_callers_are_bounded_and_printable() {
        let longest = "x".repeat(MAX_CALLER_REQUEST_ID);
        let too_long = "x".repeat(MAX_CALLER_REQUEST_ID + 1);
        for (pairs, expected) in [
            (vec![("x-request-id", &b"req-1"[..])], Some("req-1")),
            (vec![("x-request-id", b"envoy's"), ("x-tandem-caller-request-id", b"=req-1")], Some("req-1")),
            (vec![("x-request-id", b"envoy's"), ("x-tandem-caller-request-id", b"=")], None),
            (vec![("x-request-id", longest.as_bytes())], Some(longest.as_str())),
            (vec![("x-request-id", too_long.as_bytes())], None),
            (vec![("x-request-id", b"a b")], None),
            (vec![("x-request-id", b"a\xff")], None),
            (vec![("x-request-id", b"")], None),
            (vec![], None),
        ] {
            assert_eq!(caller_request_id(&map(&pairs)).as_deref(), expected, "{pairs:?}");
        }
    }

    #[test]
    fn answers_lose_what_concerns_one_connection() {
        let mut answer = map(&[
            ("content-type", b"text/event-stream"),
            ("connection", b"Keep-Alive, x-hop"),
            ("connection", b"X-Other"),
            ("keep-alive", b"timeout=5"),
            ("x-hop", b"1"),
            ("x-hop", b"2"),
            ("x-other", b"1"),
            ("transfer-encoding", b"chunked"),
            ("trailer", b"x-sum"),
            ("upgrade", b"websocket"),
            ("proxy-authenticate", b"Basic"),
            ("content-length", b"5"),
        ]);
        strip_hop_by_hop(&mut answer);
        let mut names: Vec<_> = answer.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["content-length", "content-type"]);
    }

    #[test]
    fn envoy_is_told_to_strip_what_is_there() {
        let client = map(&[("target-pod", b"x"), ("x-override-rid", b"r"), ("x-session-id", b"s"), ("model", b"m")]);
        let mut names = names_to_strip(&client);
        names.sort_unstable();
        assert_eq!(names, ["model", "target-pod", "x-override-rid"]);
    }
}
