//! vLLM: the `shfs` and `nixl` connectors (`engine-protocols` sections 2.2 and 2.7).
//!
//! Bodies are made from the client's bytes by edits of the top level, so that both pods render the same prompt. No
//! hand-off that a client wrote reaches a pod: it is an unauthenticated pointer into another pod's memory, and a bad
//! one kills a decode server. For the same reason a hand-off from a prefill pod is checked before it is relayed.

use bytes::Bytes;

use crate::knobs::KvConnector;
use crate::request::scan::{JsonObject, decode_string, each_element};
use crate::request::{Edit, Endpoint, ParsedBody, splice};

/// Top-level keys that must not occur twice, in the order in which a duplicate is reported.
pub const CONTROLLED_KEYS: [&str; 7] = [
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "min_tokens",
    "kv_transfer_params",
    "disagg_prefill_resp",
];

/// Hand-off keys that no client may send to any pod, of whatever engine: pods serve strategies other than `pd` too, and
/// each of these names memory or an address that the pod would go to.
pub const HANDOFF_KEYS: [&str; 7] = [
    KV_PARAMS,
    PREFILL_RESPONSE,
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disaggregated_params",
];

/// vLLM's free-form arguments. It merges them with the hand-off into one map, so that `kv_transfer_params` in here takes
/// effect wherever the real one is absent; one that is no object takes the scheduler down.
const EXTRA_ARGS: &str = "vllm_xargs";

/// The hand-off of the `shfs` connector.
const KV_PARAMS: &str = "kv_transfer_params";

/// The hand-off of the `nixl` connector.
const PREFILL_RESPONSE: &str = "disagg_prefill_resp";

/// What asks a prefill pod to keep its KV blocks and to say where they are (section 2.2).
const KV_REQUEST: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// What became of the prefill answer's hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handoff {
    /// It was put into the decode body.
    Relayed,
    /// The prefill answer had none (absent or null): decode computes everything itself.
    Absent,
    /// It lacked what a decode pod needs, so it was left out: decode computes everything itself.
    Unusable,
}

impl Handoff {
    /// The metric label, also `RequestRecord::handoff`.
    pub fn label(self) -> &'static str {
        match self {
            Handoff::Relayed => "relayed",
            Handoff::Absent => "absent",
            Handoff::Unusable => "unusable",
        }
    }
}

/// The prefill answer cannot be merged at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// Not a JSON object.
    #[error("the prefill answer is not a JSON object")]
    NotJson,
    /// `kv_transfer_params` is neither an object nor null.
    #[error("kv_transfer_params of the prefill answer is not an object")]
    WrongType,
}

/// The body of the prefill leg: one token, not streamed, and for `shfs` the request for a hand-off.
pub fn prefill_body(body: &ParsedBody, connector: KvConnector) -> Bytes {
    let mut edits = vec![
        Edit::Set("max_tokens", b"1"),
        Edit::Set("max_completion_tokens", b"1"),
        Edit::Set("stream", b"false"),
        // Refused without `stream`.
        Edit::Remove("stream_options"),
        // Refused when larger than `max_tokens`.
        Edit::Remove("min_tokens"),
    ];
    edits.extend(HANDOFF_KEYS.map(Edit::Remove));
    if body.endpoint == Endpoint::Responses {
        // This API knows neither of the two other names: without it the prefill pod would write the whole answer.
        edits.push(Edit::Set("max_output_tokens", b"1"));
    }
    if connector == KvConnector::Shfs {
        edits.push(Edit::Set(KV_PARAMS, KV_REQUEST));
    }
    splice(&body.raw, &body.fields, &edits)
}

/// The body of the decode leg after a prefill answer. `prefill_host` replaces `remote_host` (no brackets), since
/// engines report `localhost` unless they are configured; all else of the hand-off stays as the engine wrote it,
/// unknown keys and large integers included. One hand-off is good for one decode attempt.
pub fn decode_body(
    body: &ParsedBody,
    connector: KvConnector,
    prefill_answer: &[u8],
    prefill_host: &str,
) -> Result<(Bytes, Handoff), HandoffError> {
    let answer = JsonObject::parse(prefill_answer).map_err(|_| HandoffError::NotJson)?;
    if connector == KvConnector::Nixl {
        return Ok((with_handoff(body, PREFILL_RESPONSE, prefill_answer.trim_ascii()), Handoff::Relayed));
    }
    let Some(params) = answer.get_non_null(KV_PARAMS) else {
        return Ok((plain_body(body), Handoff::Absent));
    };
    if !params.starts_with('{') {
        return Err(HandoffError::WrongType);
    }
    let relayed = JsonObject::parse(params.as_bytes()).ok().filter(is_usable).map(|object| {
        let host = serde_json::Value::from(prefill_host).to_string();
        let params = Bytes::copy_from_slice(params.as_bytes());
        splice(&params, object.fields(), &[Edit::Set("remote_host", host.as_bytes())])
    });
    let Some(params) = relayed else {
        return Ok((plain_body(body), Handoff::Unusable));
    };
    Ok((with_handoff(body, KV_PARAMS, &params), Handoff::Relayed))
}

/// The client's body with this hand-off and no other. (Of two edits of one key the later one counts.)
fn with_handoff(body: &ParsedBody, key: &str, value: &[u8]) -> Bytes {
    let mut edits = HANDOFF_KEYS.map(Edit::Remove).to_vec();
    edits.push(Edit::Set(key, value));
    splice(&body.raw, &body.fields, &edits)
}

/// A hand-off key inside the client's `vllm_xargs`, which no edit of the top level takes away: such a body is refused.
pub fn hidden_handoff(body: &ParsedBody) -> Option<&'static str> {
    let values = body.fields.iter().filter(|field| field.key == EXTRA_ARGS);
    let objects = values.filter_map(|field| JsonObject::parse(body.raw.get(field.value_span.clone())?).ok());
    objects.into_iter().find_map(|object| HANDOFF_KEYS.into_iter().find(|key| object.get(key).is_some()))
}

/// The client's body without any hand-off key: for combined pods and decode without hand-off. The same bytes when
/// there is nothing to strip.
pub fn plain_body(body: &ParsedBody) -> Bytes {
    splice(&body.raw, &body.fields, &HANDOFF_KEYS.map(Edit::Remove))
}

/// Whether a decode pod can work with these parameters (section 2.7). What lacks here crashes decode servers, or
/// parks the request for ever.
fn is_usable(params: &JsonObject<'_>) -> bool {
    let is_text = |value: &str| decode_string(value).is_some_and(|text| !text.is_empty());
    let has_text = |key| params.get(key).is_some_and(is_text);
    params.get("do_remote_prefill") == Some("true")
        && has_text("remote_engine_id")
        && has_text("remote_host")
        // Older engines have no such key; where there is one, an empty one kills the decode server.
        && params.get("remote_request_id").is_none_or(is_text)
        && params.get("remote_port").and_then(|port| port.parse::<u16>().ok()).is_some_and(|port| port > 0)
        && params.get("remote_block_ids").is_some_and(has_blocks)
}

/// Whether a list of block ids, or of lists of them (one per KV-cache group), names at least one block and nothing
/// that is no block.
fn has_blocks(value: &str) -> bool {
    let is_id = |id: &str| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit());
    let (mut flat, mut nested, mut ids) = (false, false, 0_usize);
    let read = each_element(value, |element| {
        if element.starts_with('[') {
            nested = true;
            each_element(element, |id| {
                ids += 1;
                is_id(id)
            })
            .is_ok()
        } else {
            flat = true;
            ids += 1;
            is_id(element)
        }
    });
    read.is_ok() && ids > 0 && flat != nested
}

#[cfg(test)]
mod tests;
