//! `input` of `/v1/embeddings` is not routed by. What no engine accepts, and what is beyond the limits of the reference
//! gateway (its section 1.4), is refused.

use super::body::{BodyError, ParsedBody};
use super::prompt::{invalid, is_array, is_empty_array, required};
use super::scan::{JsonObject, decode_string, each_element};

/// Inputs of one request, at most; also token ids of one input.
pub const MAX_INPUTS: usize = 2048;
/// Tokens of one text, at most.
pub const MAX_INPUT_TOKENS: usize = 8192;
/// Tokens of all inputs of a request together, at most.
pub const MAX_TOTAL_TOKENS: usize = 300_000;

/// Checks all but the lengths of texts, which have to be counted: see [`texts_to_count`].
pub(super) fn check(body: &JsonObject<'_>) -> Result<(), BodyError> {
    if body.get("stream") == Some("true") {
        return Err(invalid("embeddings cannot be streamed"));
    }
    if body.get_non_null("messages").is_some() && body.get_non_null("input").is_none() {
        return Ok(());
    }
    let input = required(body, "input")?;
    if input == "\"\"" || is_empty_array(input) {
        return Err(invalid("field \"input\" must not be empty"));
    }
    if !is_array(input) {
        return Ok(());
    }
    let (mut index, mut ids, mut total) = (0_usize, 0_usize, 0_usize);
    let mut wrong = None;
    let read = each_element(input, |element| {
        if element == "\"\"" || is_empty_array(element) {
            wrong = Some(format!("field \"input\" must not be empty at index {index}"));
        } else if is_array(element) {
            let mut own = 0_usize;
            let _ = each_element(element, |_| {
                own += 1;
                own <= MAX_INPUTS
            });
            total += own;
            if own > MAX_INPUTS {
                wrong = Some(format!("field \"input\" has more than {MAX_INPUTS} token ids at index {index}"));
            }
        } else {
            ids += usize::from(element.starts_with(|first: char| first.is_ascii_digit() || first == '-'));
        }
        index += 1;
        if wrong.is_none() && index > MAX_INPUTS {
            let what = if ids == index { "token ids" } else { "inputs" };
            wrong = Some(format!("field \"input\" has more than {MAX_INPUTS} {what}"));
        }
        if wrong.is_none() && total > MAX_TOTAL_TOKENS {
            wrong = Some(too_many_in_total());
        }
        wrong.is_none()
    });
    match (wrong, read) {
        (Some(text), _) => Err(invalid(text)),
        (None, Err(_)) => Err(invalid("field \"input\" cannot be read")),
        (None, Ok(())) => Ok(()),
    }
}

/// The texts of an embeddings request that may be over a limit, each with its index; whether a text is can only be told by
/// counting its tokens. A token has at least one byte: most requests have none.
pub fn texts_to_count(body: &ParsedBody) -> Vec<(usize, String)> {
    let object = JsonObject::parse(&body.raw).ok();
    let Some(input) = object.as_ref().and_then(|object| object.get_non_null("input")) else { return Vec::new() };
    let mut texts = Vec::new();
    let mut index = 0;
    let mut take = |element: &str| {
        let part = JsonObject::parse(element.as_bytes()).ok();
        // Parts of other kinds are not measured in tokens.
        let text = part.as_ref().map_or(Some(element), |part| part.get_non_null("text"));
        if let Some(text) = text.and_then(decode_string) {
            texts.push((index, text.into_owned()));
        }
        index += 1;
        true
    };
    if is_array(input) {
        // Read well before, or the request was refused.
        let _ = each_element(input, &mut take);
    } else {
        take(input);
    }
    let total: usize = texts.iter().map(|(_, text)| text.len()).sum();
    if total <= MAX_TOTAL_TOKENS {
        texts.retain(|(_, text)| text.len() > MAX_INPUT_TOKENS);
    }
    texts
}

/// Which limit these texts are over, in words for the client. `count` counts the tokens of a text up to a limit.
pub fn over_limit(texts: &[(usize, String)], count: impl Fn(&str, usize) -> Option<usize>) -> Option<String> {
    let mut total = 0_usize;
    for (index, text) in texts {
        let Some(tokens) = count(text, MAX_INPUT_TOKENS) else {
            return Some(format!("field \"input\" has more than {MAX_INPUT_TOKENS} tokens at index {index}"));
        };
        total = total.saturating_add(tokens);
        if total > MAX_TOTAL_TOKENS {
            return Some(too_many_in_total());
        }
    }
    None
}

fn too_many_in_total() -> String {
    format!("field \"input\" has more than {MAX_TOTAL_TOKENS} tokens in total")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Endpoint;

    fn parse(input: &serde_json::Value) -> Result<ParsedBody, BodyError> {
        let body = serde_json::json!({"model": "m", "input": input}).to_string();
        ParsedBody::parse(Endpoint::Embeddings, None, body.into())
    }

    #[test]
    fn inputs_and_token_ids_have_limits() {
        for (input, expected) in [
            (serde_json::json!(vec!["a"; 2048]), None),
            (serde_json::json!(vec!["a"; 2049]), Some("more than 2048 inputs")),
            (serde_json::json!(vec![7; 2048]), None),
            (serde_json::json!(vec![7; 2049]), Some("more than 2048 token ids")),
            (serde_json::json!([vec![7; 2048], vec![7; 2048]]), None),
            (serde_json::json!([vec![7; 1], vec![7; 2049]]), Some("token ids at index 1")),
            (serde_json::json!(vec![vec![7; 2000]; 150]), None),
            (serde_json::json!(vec![vec![7; 2000]; 151]), Some("more than 300000 tokens in total")),
        ] {
            match (parse(&input), expected) {
                (Ok(_), None) => {}
                (Err(error), Some(text)) => assert!(error.to_string().contains(text), "{error}"),
                (outcome, _) => panic!("{outcome:?}, expected {expected:?}"),
            }
        }
    }

    #[test]
    fn only_texts_that_may_be_too_long_are_counted() {
        let words = |count: usize| "word ".repeat(count);
        let one_per_word =
            |text: &str, limit: usize| Some(text.split_whitespace().count()).filter(|words| *words <= limit);
        for (input, counted, expected) in [
            (serde_json::json!("x".repeat(8192)), 0, None),
            (serde_json::json!(words(8192)), 1, None),
            (serde_json::json!(words(8193)), 1, Some("8192 tokens at index 0")),
            (serde_json::json!(["short", words(8193)]), 1, Some("8192 tokens at index 1")),
            (serde_json::json!([{"type": "text", "text": words(8193)}]), 1, Some("8192 tokens at index 0")),
            (serde_json::json!([{"type": "image_url", "image_url": {"url": words(9000)}}]), 0, None),
            (serde_json::json!(vec![words(1000); 300]), 300, None),
            (serde_json::json!(vec![words(1000); 301]), 301, Some("300000 tokens in total")),
        ] {
            let texts = texts_to_count(&parse(&input).unwrap());
            assert_eq!(texts.len(), counted);
            let over = over_limit(&texts, one_per_word);
            assert!(
                over.as_deref()
                    .zip(expected)
                    .map_or(over.is_none() && expected.is_none(), |(over, text)| over.contains(text)),
                "{over:?}"
            );
        }
    }
}
