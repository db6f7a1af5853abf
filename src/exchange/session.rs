//! Session headers (reference gateway, section 10): what a client says about its session, and what it is given to say
//! next time.
//!
//! `x-session-id` holds the address of the pod that served the last request, in base64. It comes back from the client,
//! so it is not believed: routing compares it with the pods of the fleet, and nobody dials it.

use http::HeaderMap;

use super::headers::text;
use crate::routing::Affinity;

/// Issued by the gateway: base64 of `host:port`.
pub const SESSION_ID: &str = "x-session-id";
/// Chosen by the client: any bytes.
const SESSION_KEY: &str = "x-aibrix-session-key";

/// Longest `x-session-id` that is looked at: enough for the longest host name there is.
const MAX_ID_BYTES: usize = 360;

/// The session headers of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Session {
    address: Option<String>,
    key: Option<Vec<u8>>,
}

impl Session {
    /// Reads the headers. One that is not usable counts as absent, as in the reference.
    pub fn read(headers: &HeaderMap) -> Session {
        let id = text(headers, SESSION_ID).filter(|id| id.len() <= MAX_ID_BYTES);
        let key = headers.get(SESSION_KEY).map(|value| value.as_bytes().trim_ascii());
        Session {
            address: id.and_then(decode).and_then(|bytes| String::from_utf8(bytes).ok()),
            key: key.map(<[u8]>::to_vec),
        }
    }

    /// What routing looks at.
    pub fn affinity(&self) -> Affinity<'_> {
        Affinity { address: self.address.as_deref(), key: self.key.as_deref() }
    }
}

/// The session id of the pod at this address.
pub fn session_id(address: &str) -> String {
    encode(address.as_bytes())
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Base64 with padding (RFC 4648, section 4).
fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = (0..3).fold(0u32, |word, i| (word << 8) | u32::from(chunk.get(i).copied().unwrap_or(0)));
        for i in 0..4 {
            let index = (word >> (18 - 6 * i)) & 63;
            let filled = i <= chunk.len();
            text.push(if filled { ALPHABET.get(index as usize).map_or('=', |c| char::from(*c)) } else { '=' });
        }
    }
    text
}

/// The bytes of a base64 text, with or without padding; `None` for anything else.
fn decode(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if text.len() - digits.len() > 2 || digits.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for chunk in digits.as_bytes().chunks(4) {
        let mut word = 0u32;
        for i in 0..4 {
            let value = match chunk.get(i) {
                Some(digit) => ALPHABET.iter().position(|c| c == digit)? as u32,
                None => 0,
            };
            word = (word << 6) | value;
        }
        let [_, whole @ ..] = word.to_be_bytes();
        bytes.extend(whole.iter().take(chunk.len() - 1));
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    /// RFC 4648, section 10.
    #[test]
    fn base64_is_the_standard_one() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
            ("10.0.0.5:8000", "MTAuMC4wLjU6ODAwMA=="),
        ] {
            assert_eq!(encode(plain.as_bytes()), coded);
            assert_eq!(decode(coded).as_deref(), Some(plain.as_bytes()));
            assert_eq!(decode(coded.trim_end_matches('=')).as_deref(), Some(plain.as_bytes()));
        }
        for bad in ["Z", "Zm9vY", "Zg===", "=", "Z=g=", "Zm 9v", "Zm9-", "Zm9_", "é"] {
            let decoded = decode(bad);
            assert!(decoded.is_none() || bad == "=", "{bad}: {decoded:?}");
        }
    }

    #[test]
    fn headers() {
        let read = |id: &'static [u8], key: &'static [u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(SESSION_ID, HeaderValue::from_bytes(id).unwrap());
            headers.insert(SESSION_KEY, HeaderValue::from_bytes(key).unwrap());
            let session = Session::read(&headers);
            (session.address, session.key)
        };
        let address = Some("10.0.0.5:8000".to_owned());
        assert_eq!(read(b" MTAuMC4wLjU6ODAwMA== ", b" k\xc3\xa4y "), (address, Some("kä\u{79}".into())));
        assert_eq!(read(b"10.0.0.5:8000", b""), (None, Some(Vec::new())));
        assert_eq!(read(b"\xff", b"k"), (None, Some(b"k".to_vec())));
        assert_eq!(read(&[b'Q'; MAX_ID_BYTES], b"k").0.map(|address| address.len()), Some(MAX_ID_BYTES / 4 * 3));
        assert_eq!(read(&[b'Q'; MAX_ID_BYTES + 1], b"k").0, None);
        assert_eq!(Session::read(&HeaderMap::new()), Session::default());
    }

    proptest! {
        #[test]
        fn base64_both_ways(bytes in proptest::collection::vec(any::<u8>(), 0..40), text in "[A-Za-z0-9+/=é ]{0,12}") {
            prop_assert_eq!(decode(&encode(&bytes)), Some(bytes));
            let _ = decode(&text);
        }
    }
}
