//! The context worker's answer as the client's, when the first token was the last one.

use bytes::Bytes;

use super::PARAMS;
use crate::request::scan::{JsonObject, each_element, span_in};
use crate::request::{Edit, Endpoint, ParsedBody, splice};

/// What only the generation worker may see.
const HANDOFF: [Edit<'static>; 2] = [Edit::Remove(PARAMS), Edit::Remove("prompt_token_ids")];

/// An answer that is complete without a generation leg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// The body.
    pub body: Bytes,
    /// Its content type.
    pub content_type: &'static str,
}

/// The answer in the form that the client asked for.
pub(super) fn answer(body: &ParsedBody, raw: &[u8], answer: &JsonObject<'_>) -> Finished {
    if body.stream {
        let body = events(body, answer);
        return Finished { body, content_type: "text/event-stream; charset=utf-8" };
    }
    let choices = answer.get("choices").map(stripped);
    let mut edits = HANDOFF.to_vec();
    edits.extend(choices.as_ref().map(|choices| Edit::Set("choices", choices)));
    let body = splice(&Bytes::copy_from_slice(raw), answer.fields(), &edits);
    Finished { body, content_type: "application/json" }
}

/// A list of choices without their hand-offs; all other bytes as they are.
fn stripped(choices: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(choices.len());
    let mut copied = 0;
    let _ = each_element(choices, |choice| {
        let span = span_in(choices, choice);
        out.extend_from_slice(choices.get(copied..span.start).unwrap_or_default().as_bytes());
        copied = span.end;
        let raw = Bytes::copy_from_slice(choice.as_bytes());
        match JsonObject::parse(choice.as_bytes()) {
            Ok(object) => out.extend_from_slice(&splice(&raw, object.fields(), &HANDOFF)),
            Err(_) => out.extend_from_slice(&raw),
        }
        true
    });
    out.extend_from_slice(choices.get(copied..).unwrap_or_default().as_bytes());
    out
}

/// The answer as a worker would have streamed it: for each choice its content and its end, the usage for those who asked,
/// and the mark of a complete stream.
fn events(body: &ParsedBody, answer: &JsonObject<'_>) -> Bytes {
    let chat = body.endpoint == Endpoint::ChatCompletions;
    let mut frame = String::from("{");
    for key in ["id", "object", "created", "model", "system_fingerprint"] {
        let value = match (key, chat) {
            ("object", true) => Some(r#""chat.completion.chunk""#),
            ("object", false) => Some(r#""text_completion""#),
            _ => answer.get_non_null(key),
        };
        if let Some(value) = value {
            for part in ["\"", key, "\":", value, ","] {
                frame.push_str(part);
            }
        }
    }
    let mut events = String::new();
    let mut send = |rest: &str| {
        for part in ["data: ", &frame, rest, "}\n\n"] {
            events.push_str(part);
        }
    };
    let mut at = 0_usize;
    let _ = each_element(answer.get("choices").unwrap_or("[]"), |choice| {
        let Ok(choice) = JsonObject::parse(choice.as_bytes()) else { return true };
        let index = choice.get_non_null("index").map_or_else(|| at.to_string(), str::to_owned);
        at += 1;
        let (content, nothing) = if chat {
            let delta = choice.get("message").map_or_else(|| "{}".to_owned(), delta);
            (format!("\"delta\":{delta}"), r#""delta":{}"#)
        } else {
            (format!("\"text\":{}", choice.get_non_null("text").unwrap_or("\"\"")), r#""text":"""#)
        };
        let logprobs = choice.get("logprobs").unwrap_or("null");
        send(&format!(r#""choices":[{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":null}}]"#));
        let reason = choice.get("finish_reason").unwrap_or("null");
        let stop = choice.get("stop_reason").map_or_else(String::new, |stop| format!(",\"stop_reason\":{stop}"));
        let end = format!(r#"{nothing},"logprobs":null,"finish_reason":{reason}{stop}"#);
        send(&format!(r#""choices":[{{"index":{index},{end}}}]"#));
        true
    });
    if let Some(usage) = answer.get_non_null("usage").filter(|_| body.include_usage) {
        send(&format!(r#""choices":[],"usage":{usage}"#));
    }
    events.push_str("data: [DONE]\n\n");
    Bytes::from(events)
}

/// A message as the first delta of a stream: what it has, without what it has not. Tool calls are numbered there.
fn delta(message: &str) -> String {
    let Ok(object) = JsonObject::parse(message.as_bytes()) else { return "{}".to_owned() };
    let mut members = Vec::new();
    for field in object.fields() {
        let Some(value) = object.get_non_null(&field.key) else { continue };
        let value = if field.key == "tool_calls" { numbered(value) } else { value.to_owned() };
        if value != "[]" {
            members.push(format!("{}:{value}", serde_json::Value::from(&*field.key)));
        }
    }
    format!("{{{}}}", members.join(","))
}

fn numbered(calls: &str) -> String {
    let mut out = Vec::new();
    let _ = each_element(calls, |call| {
        let raw = Bytes::copy_from_slice(call.as_bytes());
        let index = out.len().to_string();
        let numbered = match JsonObject::parse(call.as_bytes()) {
            Ok(object) => splice(&raw, object.fields(), &[Edit::Set("index", index.as_bytes())]),
            Err(_) => raw,
        };
        out.push(String::from_utf8_lossy(&numbered).into_owned());
        true
    });
    format!("[{}]", out.join(","))
}
