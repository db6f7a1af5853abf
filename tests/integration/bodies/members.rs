//! The top level of a JSON object as raw text, read by other means than the gateway's own.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Key and value as they were written, in order, duplicates included.
pub type Members = Vec<(String, String)>;

/// The members of an object.
pub fn members(body: &[u8]) -> Members {
    struct InOrder;
    impl<'de> Visitor<'de> for InOrder {
        type Value = Members;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
            let mut members = Members::new();
            while let Some((key, value)) = map.next_entry::<&RawValue, &RawValue>()? {
                members.push((key.get().to_owned(), value.get().to_owned()));
            }
            Ok(members)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let read = deserializer.deserialize_map(InOrder);
    read.unwrap_or_else(|error| panic!("{error} in {:?}", String::from_utf8_lossy(body)))
}

/// The members without those called `names`.
pub fn without(body: &[u8], names: &[&str]) -> Members {
    let named = |key: &String| names.iter().any(|name| *key == format!("\"{name}\""));
    members(body).into_iter().filter(|(key, _)| !named(key)).collect()
}

/// The raw value of the one member called `name`; `None` when there is none.
pub fn raw(body: &[u8], name: &str) -> Option<String> {
    let quoted = format!("\"{name}\"");
    let mut values = members(body).into_iter().filter(|(key, _)| *key == quoted).map(|(_, value)| value);
    let value = values.next();
    assert_eq!(values.next(), None, "{name} is there twice");
    value
}

/// The request for a hand-off that a prefill body carries.
pub const KV_REQUEST: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// What the gateway may set or take away on the prefill leg.
pub const PREFILL_FIELDS: [&str; 6] =
    ["max_tokens", "max_completion_tokens", "stream", "stream_options", "min_tokens", "kv_transfer_params"];

/// Checks the prefill leg of the client's `sent` body: one token, not streamed, a request for a hand-off, and every
/// other member as it was, in its order.
pub fn assert_prefill_leg(sent: &[u8], received: &[u8]) {
    assert_eq!(without(received, &PREFILL_FIELDS), without(sent, &PREFILL_FIELDS));
    for (name, expected) in [
        ("max_tokens", Some("1")),
        ("max_completion_tokens", Some("1")),
        ("stream", Some("false")),
        ("stream_options", None),
        ("min_tokens", None),
        ("kv_transfer_params", Some(KV_REQUEST)),
    ] {
        assert_eq!(raw(received, name).as_deref(), expected, "{name}");
    }
}

/// Checks the decode leg: the client's bytes up to the closing brace, then the hand-off.
pub fn assert_decode_leg(sent: &[u8], received: &[u8]) {
    let kept = sent.trim_ascii_end().strip_suffix(b"}").expect("an object").trim_ascii_end();
    assert!(received.starts_with(kept), "{}", String::from_utf8_lossy(&received[..received.len().min(4096)]));
    assert_eq!(without(received, &["kv_transfer_params"]), members(sent));
    let params = raw(received, "kv_transfer_params").expect("a hand-off");
    assert_eq!(raw(params.as_bytes(), "remote_host").as_deref(), Some("\"127.0.0.1\""));
}

#[test]
fn reads_raw_text_in_order() {
    let body = br#" {"b" : 1e2, "\u0061":[1, 2],"b":null}"#;
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(members(body), [pair("\"b\"", "1e2"), pair("\"\\u0061\"", "[1, 2]"), pair("\"b\"", "null")]);
    assert_eq!(without(body, &["b"]), [pair("\"\\u0061\"", "[1, 2]")]);
    assert_eq!(raw(br#"{"x":1}"#, "x").as_deref(), Some("1"));
    assert_eq!(raw(br#"{"x":1}"#, "y"), None);
}
