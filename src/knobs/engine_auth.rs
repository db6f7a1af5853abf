//! What engines are shown of credentials.

use http::HeaderValue;

use super::env::Origin;
use super::parse;
use super::read::Reader;

/// Which `authorization` goes to engines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineAuth {
    /// `TANDEM_ENGINE_API_KEY` (unset): that of every request to an engine, whatever the client sent. Marked as sensitive, so
    /// that `Debug` does not show it.
    pub authorization: Option<HeaderValue>,
    /// `TANDEM_FORWARD_AUTH_TOKEN` (false): engines get the gateway's own token, as clients send it.
    pub forward_token: bool,
}

pub(super) fn read(reader: &mut Reader<'_>) -> EngineAuth {
    EngineAuth {
        authorization: bearer(reader, "TANDEM_ENGINE_API_KEY"),
        forward_token: reader.value("TANDEM_FORWARD_AUTH_TOKEN", false, parse::boolean, bool::to_string),
    }
}

/// A secret as the value of an `authorization` header. A bad one is named, not shown.
fn bearer(reader: &mut Reader<'_>, name: &'static str) -> Option<HeaderValue> {
    let header = |text: String| HeaderValue::from_str(&format!("Bearer {}", text.trim()));
    let (value, origin) = match reader.raw(name).map(header) {
        None => (None, Origin::Default),
        Some(Ok(mut value)) => {
            value.set_sensitive(true);
            (Some(value), Origin::Environment)
        }
        Some(Err(_)) => {
            reader.complain(name, "[secret]", "a text without control characters", "none");
            (None, Origin::DefaultAfterBadValue)
        }
    };
    reader.record(name, value.as_ref().map_or("unset", |_| "[secret]").to_owned(), origin);
    value
}
