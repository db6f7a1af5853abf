//! vLLM: the `shfs` and `nixl` connectors (`engine-protocols` sections 2.2 and 2.7), and Mooncake's.
//!
//! Bodies are made from the client's bytes by edits of the top level, so that both pods render the same prompt. No
//! hand-off that a client wrote reaches a pod: it is an unauthenticated pointer into another pod's memory, and a bad
//! one kills a decode server. For the same reason a hand-off from a prefill pod is checked before it is relayed.

pub mod maker;
pub mod mooncake;

use std::time::Duration;

use bytes::Bytes;

pub use super::handoff::{HANDOFF_KEYS, Handoff, HandoffError, hidden_handoff};
use super::handoff::{prefill_edits, quoted, strip};
use crate::fleet::Engine;
use crate::knobs::KvConnector;
use crate::request::scan::JsonObject;
use crate::request::{Edit, ParsedBody, splice};
use maker::Maker;

/// The hand-off of the `shfs` connector.
const KV_PARAMS: &str = "kv_transfer_params";

/// The hand-off of the `nixl` connector.
const PREFILL_RESPONSE: &str = "disagg_prefill_resp";

/// What asks a prefill pod to keep its KV blocks and to say where they are (section 2.2).
const KV_REQUEST: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// A prefill answer, turned into the decode request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relay {
    /// The body of the decode leg.
    pub body: Bytes,
    /// What became of the hand-off.
    pub handoff: Handoff,
    /// How long the prefill pod keeps the blocks that the hand-off names; `None` when it keeps none.
    pub lease: Option<Duration>,
}

impl Relay {
    fn without(body: &ParsedBody, handoff: Handoff) -> Relay {
        Relay { body: plain_body(body), handoff, lease: None }
    }
}

/// The body of the prefill leg: one token, not streamed, and for `shfs` the request for a hand-off.
pub fn prefill_body(body: &ParsedBody, connector: KvConnector) -> Bytes {
    let mut edits = prefill_edits(body, Engine::Vllm);
    if connector == KvConnector::Shfs {
        edits.push(Edit::Set(KV_PARAMS, KV_REQUEST));
    }
    splice(&body.raw, &body.fields, &edits)
}

/// The body of the decode leg after a prefill answer. `prefill_host` replaces `remote_host` (no brackets), since
/// engines report `localhost` unless they are configured; all else of the hand-off stays as the engine wrote it,
/// unknown keys and large integers included. What a hand-off must have depends on the connector that made it
/// ([`Maker`]). One hand-off is good for one decode attempt.
pub fn decode_body(
    body: &ParsedBody,
    connector: KvConnector,
    prefill_answer: &[u8],
    prefill_host: &str,
) -> Result<Relay, HandoffError> {
    let answer = JsonObject::parse(prefill_answer).map_err(|_| HandoffError::NotJson)?;
    match connector {
        KvConnector::Shfs => {}
        KvConnector::Nixl => {
            let body = with_handoff(body, PREFILL_RESPONSE, prefill_answer.trim_ascii());
            return Ok(Relay { body, handoff: Handoff::Relayed, lease: None });
        }
        // Its answer says nothing; the decode leg was made along with the prefill leg.
        KvConnector::Mooncake => return Ok(Relay::without(body, Handoff::Absent)),
    }
    let Some(params) = answer.get_non_null(KV_PARAMS) else {
        return Ok(Relay::without(body, Handoff::Absent));
    };
    if !params.starts_with('{') {
        return Err(HandoffError::WrongType(KV_PARAMS));
    }
    let object = JsonObject::parse(params.as_bytes()).map_err(|_| HandoffError::WrongType(KV_PARAMS))?;
    let maker = Maker::of(&object);
    let lease = maker.lease(&object);
    if let Some(flaw) = maker.flaw(&object) {
        return Ok(Relay { lease, ..Relay::without(body, Handoff::Unusable(flaw)) });
    }
    if maker == Maker::Lmcache {
        return Ok(Relay::without(body, Handoff::Needless));
    }
    let params = Bytes::copy_from_slice(params.as_bytes());
    let params = splice(&params, object.fields(), &[Edit::Set("remote_host", &quoted(prefill_host))]);
    Ok(Relay { body: with_handoff(body, KV_PARAMS, &params), handoff: Handoff::Relayed, lease })
}

/// The client's body with this hand-off and no other. (Of two edits of one key the later one counts.)
fn with_handoff(body: &ParsedBody, key: &str, value: &[u8]) -> Bytes {
    let mut edits = strip(Engine::Vllm);
    edits.push(Edit::Set(key, value));
    splice(&body.raw, &body.fields, &edits)
}

/// The client's body without any hand-off key: for combined pods and decode without hand-off. The same bytes when
/// there is nothing to strip.
pub fn plain_body(body: &ParsedBody) -> Bytes {
    super::plain_body(body, Some(Engine::Vllm))
}

#[cfg(test)]
mod tests;
