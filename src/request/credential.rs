//! Credentials in an `authorization` header (RFC 9110, section 11.4).

use http::HeaderMap;
use http::header::AUTHORIZATION;

/// What follows `scheme`, whose case does not matter, without the blanks around it; `None` when another scheme is used,
/// or none.
pub fn credential<'a>(headers: &'a HeaderMap, scheme: &str) -> Option<&'a [u8]> {
    let (given, rest) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(scheme.len())?;
    let credential = rest.strip_prefix(b" ")?;
    given.eq_ignore_ascii_case(scheme.as_bytes()).then(|| credential.trim_ascii())
}
