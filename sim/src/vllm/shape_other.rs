//! The bodies of `/v1/responses` and `/v1/messages`. Their frame follows the public APIs; only what a gateway looks at
//! (ids, text, finish, usage, event names) is filled.

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::call::Call;
use super::shape::{Shape, Usage, json as bytes};
use crate::prompt::Finish;
use crate::sequence::{Emitted, Finished};

fn named(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

fn text_of(results: &[Finished]) -> String {
    results.iter().map(|result| result.output.text(usize::MAX)).collect()
}

fn with_handoff(mut body: Value, kv: Option<&RawValue>) -> Vec<u8> {
    if let Some(members) = body.as_object_mut() {
        let kv = kv.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();
        members.insert("kv_transfer_params".to_owned(), kv);
    }
    bytes(&body)
}

fn response_body(shape: &Shape, status: &str, output: &[Value], usage: Option<&Usage>) -> Value {
    let usage = usage.map(|usage| {
        json!({"input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached},
               "output_tokens": usage.completion, "total_tokens": usage.prompt + usage.completion})
    });
    json!({"id": shape.id, "object": "response", "created_at": shape.created, "status": status, "model": shape.model,
           "output": output, "usage": usage})
}

fn response_item(shape: &Shape, text: &str) -> Value {
    json!({"id": format!("msg_{}", shape.id), "type": "message", "role": "assistant", "status": "completed",
           "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": null}]})
}

/// A whole `/v1/responses` answer.
pub(crate) fn response(shape: &Shape, results: &[Finished], usage: &Usage, kv: Option<&RawValue>) -> Vec<u8> {
    let item = response_item(shape, &text_of(results));
    with_handoff(response_body(shape, "completed", &[item], Some(usage)), kv)
}

/// The events before the first token of a `/v1/responses` stream.
pub(crate) fn response_opening(shape: &Shape) -> Vec<String> {
    let body = response_body(shape, "in_progress", &[], None);
    vec![named("response.created", &json!({"type": "response.created", "response": body}))]
}

/// The events of one token.
pub(crate) fn response_token(shape: &Shape, token: &Emitted) -> Vec<String> {
    let item = format!("msg_{}", shape.id);
    let name = "response.output_text.delta";
    let data = json!({"type": name, "item_id": item, "output_index": 0, "content_index": 0, "delta": token.piece});
    vec![named(name, &data)]
}

/// The events after the last token.
pub(crate) fn response_closing(shape: &Shape, usage: &Usage) -> Vec<String> {
    let body = response_body(shape, "completed", &[], Some(usage));
    vec![named("response.completed", &json!({"type": "response.completed", "response": body}))]
}

fn stop_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "max_tokens",
        Finish::Stop => "end_turn",
        Finish::Abort => "abort",
    }
}

/// A whole `/v1/messages` answer.
pub(crate) fn message(shape: &Shape, results: &[Finished], usage: &Usage, kv: Option<&RawValue>) -> Vec<u8> {
    let finish = results.first().map(|result| stop_reason(result.output.finish));
    let body = json!({"id": shape.id, "type": "message", "role": "assistant", "model": shape.model,
        "content": [{"type": "text", "text": text_of(results)}], "stop_reason": finish, "stop_sequence": null,
        "usage": {"input_tokens": usage.prompt, "output_tokens": usage.completion}});
    with_handoff(body, kv)
}

/// The events before the first token of a `/v1/messages` stream.
pub(crate) fn message_opening(shape: &Shape, call: &Call) -> Vec<String> {
    let prompt: u64 = call.prompts.iter().map(|prompt| u64::from(prompt.tokens)).sum();
    let message = json!({"id": shape.id, "type": "message", "role": "assistant", "model": shape.model, "content": [],
        "stop_reason": null, "stop_sequence": null, "usage": {"input_tokens": prompt, "output_tokens": 0}});
    vec![
        named("message_start", &json!({"type": "message_start", "message": message})),
        named(
            "content_block_start",
            &json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        ),
    ]
}

/// The events of one token.
pub(crate) fn message_token(token: &Emitted) -> Vec<String> {
    let delta = json!({"type": "text_delta", "text": token.piece});
    let mut events =
        vec![named("content_block_delta", &json!({"type": "content_block_delta", "index": 0, "delta": delta}))];
    if let Some((finish, _)) = &token.finish {
        events.push(named("content_block_stop", &json!({"type": "content_block_stop", "index": 0})));
        let delta = json!({"stop_reason": stop_reason(*finish), "stop_sequence": null});
        let usage = json!({"output_tokens": token.position});
        events.push(named("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage})));
    }
    events
}

/// The events after the last token.
pub(crate) fn message_closing(_usage: &Usage) -> Vec<String> {
    vec![named("message_stop", &json!({"type": "message_stop"}))]
}
