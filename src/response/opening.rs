//! The events with which a stream opens before anything is generated.
//!
//! An engine that waits for a KV cache says who speaks, and no more. Whatever else it says was generated: the text of an
//! answer, reasoning under any name, a call of a tool, a refusal, audio, log probabilities, ids of tokens.

use crate::request::scan::{JsonObject, decode_string, each_element, each_member};

/// Types of the events that open an answer of the Messages and Responses APIs. (Chat has only deltas.)
pub(super) const NAMES: [&str; 4] = ["message_start", "response.created", "response.in_progress", "response.queued"];

/// A longer event without a telling name is not looked at, bytes: it says something. (Those with a name repeat the request.)
const MAX_OPENING: usize = 16 * 1024;

/// Whether the data of an event says nothing but that an answer begins: its type is one of [`NAMES`], or it has choices and
/// each is a delta whose values are all empty, null or the role.
pub(super) fn opens(data: &[u8]) -> bool {
    if data.len() > MAX_OPENING {
        return false;
    }
    let Ok(object) = JsonObject::parse(data) else { return false };
    if let Some(name) = object.get("type").and_then(decode_string) {
        return NAMES.contains(&name.as_ref());
    }
    // What cannot be read is not known to be empty.
    object.get("choices").is_some_and(|choices| each_element(choices, is_untouched).is_ok())
}

/// A choice in which nothing has happened yet. One without a delta (completions) is there because of a token.
fn is_untouched(choice: &str) -> bool {
    let mut delta = false;
    let read = each_member(choice, |key, value| match key {
        r#""index""# => true,
        r#""delta""# => {
            delta = true;
            is_empty(value) || each_member(value, |key, value| key == r#""role""# || is_empty(value)).is_ok()
        }
        _ => is_empty(value),
    });
    delta && read.is_ok()
}

/// `null`, and strings, arrays and objects with nothing in them.
fn is_empty(value: &str) -> bool {
    let inside = |open, close| value.strip_prefix(open).and_then(|rest| rest.strip_suffix(close)).map(str::trim);
    value == "null" || value == r#""""# || inside('[', ']') == Some("") || inside('{', '}') == Some("")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(members: &str) -> String {
        format!(
            r#"{{"id":"c","choices":[{{"index":0,"delta":{{{members}}},"logprobs":null,"finish_reason":null}}],"usage":null}}"#
        )
    }

    #[test]
    fn what_opens_an_answer() {
        for members in [
            "",
            r#""role":"assistant""#,
            r#""role":"assistant","content":"""#,
            r#""role":"assistant","content":null,"reasoning_content":null,"tool_calls":[ ],"audio":{}"#,
            r#""content":"","reasoning":"""#,
        ] {
            assert!(opens(delta(members).as_bytes()), "{members}");
        }
        for data in [
            r#"{"choices":[]}"#,
            r#"{"choices":[{"index":0,"delta":null,"finish_reason":null,"stop_reason":null,"token_ids":[]}]}"#,
            r#"{"choices":[{"index":0,"delta":{"role":"assistant"}},{"index":1,"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"type":"message_start","message":{"role":"assistant","content":[]}}"#,
            r#"{"type":"response.created","response":{"instructions":"be kind"}}"#,
            r#"{"sequence_number":1,"type":"response.in_progress","response":{}}"#,
            r#"{"type":"response.queued","response":{}}"#,
        ] {
            assert!(opens(data.as_bytes()), "{data}");
        }
    }

    #[test]
    fn everything_else_is_content() {
        for members in [
            r#""content":"a""#,
            r#""role":"assistant","content":"","reasoning_content":"a""#,
            r#""role":"assistant","reasoning":"a""#,
            r#""role":"assistant","content":null,"tool_calls":[{"index":0,"id":"x"}]"#,
            r#""role":"assistant","function_call":{"name":"f"}"#,
            r#""role":"assistant","content":"","refusal":"no""#,
            r#""role":"assistant","audio":{"id":"a"}"#,
            r#""role":"assistant","annotations":[{}]"#,
            r#""role":"assistant","content":" ""#,
            r#""role":"assistant","some_new_thing":0"#,
        ] {
            assert!(!opens(delta(members).as_bytes()), "{members}");
        }
        for data in [
            r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":{"content":[{"token":"a"}]}}]}"#,
            r#"{"choices":[{"index":0,"delta":{"role":"assistant"},"token_ids":[1]}]}"#,
            r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
            r#"{"choices":[{"index":0,"delta":{}},{"index":1,"delta":{"content":"a"}}]}"#,
            r#"{"choices":[{"index":0,"text":""}]}"#,
            r#"{"choices":[1]}"#,
            r#"{"choices":{}}"#,
            r#"{"type":"content_block_start","content_block":{"type":"thinking","thinking":""}}"#,
            r#"{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}"#,
            r#"{"type":"response.output_item.added","item":{"type":"reasoning","summary":[]}}"#,
            r#"{"text":"","meta_info":{}}"#,
            "{}",
            "[]",
            "text",
        ] {
            assert!(!opens(data.as_bytes()), "{data}");
        }
        let long = delta(&format!(r#""role":"assistant"{}"#, " ".repeat(MAX_OPENING)));
        assert!(!opens(long.as_bytes()));
    }
}
