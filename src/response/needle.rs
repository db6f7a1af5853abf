//! Finding out, at the price of a substring scan, whether JSON text may hold something worth parsing.
//!
//! The needles are whole JSON strings with their quotes. Inside generated text every quote is escaped, so a model that
//! writes about `"usage"` does not match.

use memchr::memmem::Finder;

/// The prepared needles of one watcher.
#[derive(Clone, Debug)]
pub(super) struct Needles {
    usage: Finder<'static>,
    meta_info: Finder<'static>,
    finish_reason: Finder<'static>,
    error: Finder<'static>,
    abort: Finder<'static>,
    message_stop: Finder<'static>,
}

/// Longest event in which Anthropic's end marker is looked for; the real one has some 20 bytes.
const SHORT_EVENT: usize = 256;

impl Needles {
    pub(super) fn new() -> Needles {
        Needles {
            usage: Finder::new("\"usage\""),
            meta_info: Finder::new("\"meta_info\""),
            finish_reason: Finder::new("\"finish_reason\""),
            error: Finder::new("\"error\""),
            abort: Finder::new("\"abort\""),
            message_stop: Finder::new("\"message_stop\""),
        }
    }

    /// Whether an event may carry usage, an error, an abort or an end marker.
    pub(super) fn hit(&self, text: &[u8]) -> bool {
        has_value(&self.usage, text)
            || has_value(&self.error, text)
            || self.abort.find(text).is_some()
            // SGLang's native endpoint repeats its counts with every event, and the text so far: the last one will do.
            || (self.meta_info.find(text).is_some() && has_value(&self.finish_reason, text))
            || (text.len() <= SHORT_EVENT && self.message_stop.find(text).is_some())
    }

    /// Where the values of keys `usage` begin, and of SGLang's `meta_info`.
    pub(super) fn usage_values<'a>(&'a self, text: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        values(&self.usage, text).chain(values(&self.meta_info, text))
    }

    /// Whether `"abort"` is the value of a `finish_reason`, for text that cannot be parsed as a whole.
    pub(super) fn aborted(&self, text: &[u8]) -> bool {
        self.abort.find_iter(text).any(|at| {
            let before = text.get(..at).unwrap_or_default().trim_ascii_end();
            let key = before.strip_suffix(b":").unwrap_or_default().trim_ascii_end();
            key.ends_with(b"\"finish_reason\"")
        })
    }
}

/// Whether the needle occurs other than as a key whose value is `null`: as a value itself, or as a key of something.
fn has_value(needle: &Finder<'_>, text: &[u8]) -> bool {
    needle.find_iter(text).any(|at| match value_after(text, at + needle.needle().len()) {
        Some(value) => !value.starts_with(b"null"),
        None => true,
    })
}

fn values<'a>(needle: &'a Finder<'_>, text: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    needle.find_iter(text).filter_map(|at| value_after(text, at + needle.needle().len()))
}

/// What stands behind the colon that follows a key ending at `end`.
fn value_after(text: &[u8], end: usize) -> Option<&[u8]> {
    Some(text.get(end..)?.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_candidates_are_parsed() {
        let needles = Needles::new();
        for (text, expected) in [
            (r#"{"choices":[{"delta":{"content":"x"}}]}"#, false),
            (r#"{"usage":null}"#, false),
            (r#"{"usage" : null,"error":null}"#, false),
            (r#"{"choices":[{"usage":null}],"usage":{}}"#, true),
            (r#"{"usage":{"total_tokens":1}}"#, true),
            (r#"{"content":"\"usage\":{\"total_tokens\":1}"}"#, false),
            (r#"{"error":{"message":"m"}}"#, true),
            (r#"{"type":"error"}"#, true),
            (r#"{"finish_reason":"abort"}"#, true),
            (r#"{"finish_reason":"aborted"}"#, false),
            (r#"{"type":"message_stop"}"#, true),
            (r#"{"text":"x","meta_info":{"finish_reason":null,"completion_tokens":1}}"#, false),
            (r#"{"text":"x","meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":1}}"#, true),
            (r#"{"choices":[{"finish_reason":"stop"}]}"#, false),
        ] {
            assert_eq!(needles.hit(text.as_bytes()), expected, "{text}");
        }
        let long = format!("{{\"type\":\"message_stop\",\"pad\":\"{}\"}}", "x".repeat(SHORT_EVENT));
        assert!(!needles.hit(long.as_bytes()));
    }

    #[test]
    fn an_abort_counts_only_as_finish_reason() {
        let needles = Needles::new();
        for (text, expected) in [
            (r#""finish_reason":"abort""#, true),
            (r#""finish_reason" : "abort""#, true),
            (r#""content":"abort""#, false),
            (r#""abort""#, false),
            (r#"["finish_reason","abort"]"#, false),
        ] {
            assert_eq!(needles.aborted(text.as_bytes()), expected, "{text}");
        }
    }
}
