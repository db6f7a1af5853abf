//! The message inside an engine's error body, for a client to read.
//!
//! Engines, their frameworks and what stands between answer in different shapes (`engine-protocols` section 7):
//! `{"error":{"message"}}`, `{"error":"text"}`, `{"object":"error","message"}`, `{"detail":"text"}`,
//! `{"detail":[{"loc","msg"}]}`, plain text, HTML.

use std::borrow::Cow;

use crate::request::scan::{JsonObject, decode_string, each_element};

/// Longest message, in bytes; it is cut before the character that would not fit, and [`CUT`] says so.
pub const MAX_MESSAGE_BYTES: usize = 256;
/// Follows a text that was cut.
pub const CUT: &str = "...";

/// A text of at most [`MAX_MESSAGE_BYTES`], or its beginning and [`CUT`].
pub fn cut_message(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_MESSAGE_BYTES {
        return Cow::Borrowed(text);
    }
    let kept = text.get(..text.floor_char_boundary(MAX_MESSAGE_BYTES)).unwrap_or_default();
    Cow::Owned(format!("{kept}{CUT}"))
}

/// The message of an error body: `error.message`, else `error`, `message` or `detail`, else the beginning of the body
/// as text. `None` when there is nothing to say.
pub fn error_message(body: &[u8]) -> Option<String> {
    let message = JsonObject::parse(body).ok().and_then(|object| of_object(&object));
    message.or_else(|| {
        // A character has at most four bytes: enough to cut at a border afterwards.
        let head = body.trim_ascii_start();
        let head = head.trim_ascii_end();
        let head = head.get(..head.len().min(MAX_MESSAGE_BYTES + 4)).unwrap_or_default();
        bounded(&String::from_utf8_lossy(head))
    })
}

fn of_object(object: &JsonObject<'_>) -> Option<String> {
    let text = |value: &str| decode_string(value).and_then(|text| bounded(&text));
    let error = object.get("error");
    error
        .and_then(|error| JsonObject::parse(error.as_bytes()).ok())
        .and_then(|error| error.get("message").and_then(text))
        .or_else(|| error.and_then(text))
        .or_else(|| object.get("message").and_then(text))
        .or_else(|| object.get("detail").and_then(|detail| text(detail).or_else(|| of_list(detail))))
}

/// `detail` of a validation error: what is wrong at which place, one after the other.
fn of_list(detail: &str) -> Option<String> {
    let mut message = String::new();
    let _ = each_element(detail, |item| {
        let item_object = JsonObject::parse(item.as_bytes()).ok();
        let field = |key| item_object.as_ref().and_then(|object| object.get(key));
        if let Some(text) = field("msg").and_then(decode_string).or_else(|| decode_string(item)) {
            if !message.is_empty() {
                message.push_str("; ");
            }
            let mut place = String::new();
            let _ = each_element(field("loc").unwrap_or("[]"), |part| {
                if !place.is_empty() {
                    place.push('.');
                }
                place.push_str(&decode_string(part).unwrap_or(part.into()));
                place.len() < MAX_MESSAGE_BYTES
            });
            if !place.is_empty() {
                message.push_str(&place);
                message.push_str(": ");
            }
            message.push_str(&text);
        }
        message.len() < MAX_MESSAGE_BYTES
    });
    bounded(&message)
}

/// Trims and cuts; `None` when nothing is left.
fn bounded(text: &str) -> Option<String> {
    let text = text.trim();
    (!text.is_empty()).then(|| cut_message(text).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LONGEST: usize = MAX_MESSAGE_BYTES + CUT.len();

    #[test]
    fn r20_every_shape_gives_its_message() {
        for (body, expected) in [
            (r#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#, Some("too long")),
            (
                r#"{"object":"error","message":"The input is longer","type":"BadRequestError","code":400}"#,
                Some("The input is longer"),
            ),
            (r#"{"error":"no such field"}"#, Some("no such field")),
            (r#"{"error":{"message":"inner"},"message":"outer"}"#, Some("inner")),
            (r#"{"error":{"code":5},"message":"outer"}"#, Some("outer")),
            (r#"{"error":{"message":""},"detail":"d"}"#, Some("d")),
            (r#"{"detail":"Not Found"}"#, Some("Not Found")),
            (
                r#"{"detail":[{"loc":["body","messages",0],"msg":"Field required"},{"msg":"b"},"c",4]}"#,
                Some("body.messages.0: Field required; b; c"),
            ),
            (r#"{"detail":[]}"#, Some(r#"{"detail":[]}"#)),
            (r#"{"message":"caf\u00e9\n"}"#, Some("café")),
            (r#"{"ok":false}"#, Some(r#"{"ok":false}"#)),
            ("  <html>502 Bad Gateway</html>\n", Some("<html>502 Bad Gateway</html>")),
            (r#"["list"]"#, Some(r#"["list"]"#)),
            (r#"{"error":{"message":"cut"#, Some(r#"{"error":{"message":"cut"#)),
            ("", None),
            (" \n", None),
        ] {
            assert_eq!(error_message(body.as_bytes()).as_deref(), expected, "{body}");
        }
        assert_eq!(error_message(b"\xff\xfe").as_deref(), Some("\u{fffd}\u{fffd}"));
    }

    #[test]
    fn r11_messages_are_cut_at_a_character() {
        for (length, kept) in [(255, 255), (256, 256), (257, 256), (100_000, 256)] {
            let text = "x".repeat(length);
            let marked = text.get(..256).filter(|_| length > 256).map_or(text.clone(), |kept| format!("{kept}..."));
            assert_eq!(marked.trim_end_matches('.').len(), kept);
            for body in [text.clone(), format!("{{\"message\":\"{text}\"}}"), format!("{{\"detail\":[\"{text}\"]}}")] {
                assert_eq!(error_message(body.as_bytes()).unwrap(), marked, "{length}");
            }
        }
        // 255 bytes and a character of two: it does not fit.
        let text = "x".repeat(255) + "é";
        assert_eq!(error_message(text.as_bytes()).unwrap(), "x".repeat(255) + "...");
        let many = format!("{{\"detail\":[{}0]}}", "{\"msg\":\"é\",\"loc\":[\"a\"]},".repeat(1000));
        let many = error_message(many.as_bytes()).unwrap();
        assert!(many.len() <= LONGEST && many.ends_with("..."));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), text in ".{0,300}") {
            let plain = error_message(&bytes);
            prop_assert!(plain.is_none_or(|message| message.len() <= LONGEST));
            for shape in [serde_json::json!({"error": text}), serde_json::json!({"detail": [{"msg": text}]})] {
                let message = error_message(shape.to_string().as_bytes());
                prop_assert!(message.is_none_or(|message| message.len() <= LONGEST));
            }
        }
    }
}
