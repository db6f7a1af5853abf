//! From a prefill answer to what comes next, for the dialects in which the decode leg waits for it.

use std::time::Duration;

use bytes::Bytes;

use super::trtllm::{self, Finished};
use super::{Handoff, HandoffError, Protocol, plain_body, vllm};
use crate::fleet::Engine;
use crate::knobs::KvConnector;
use crate::request::ParsedBody;
use crate::request::scan::JsonObject;

/// What follows from a prefill answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Merged {
    /// The decode pod gets this.
    Decode {
        /// The body.
        body: Bytes,
        /// What became of the hand-off.
        handoff: Handoff,
        /// How long the prefill pod keeps blocks for a decode pod that does not come; `None` when it keeps none.
        lease: Option<Duration>,
    },
    /// The first token was the last one: the client gets this.
    Finished(Finished),
}

/// Merges the answer of a prefill leg into the client's body. `prefill_host` is the prefill pod's, without brackets.
pub fn merge(protocol: Protocol, body: &ParsedBody, answer: &[u8], prefill_host: &str) -> Result<Merged, HandoffError> {
    let relay = match protocol {
        Protocol::TrtContextFirst | Protocol::TrtGenerationFirst => {
            return Ok(match trtllm::merge(body, answer)? {
                trtllm::Merged::Decode(body, handoff) => {
                    let lease = Some(protocol.default_lease()).filter(|_| handoff == Handoff::Relayed);
                    Merged::Decode { body, handoff, lease }
                }
                trtllm::Merged::Finished(finished) => Merged::Finished(finished),
            });
        }
        Protocol::VllmShfs => vllm::decode_body(body, KvConnector::Shfs, answer, prefill_host)?,
        Protocol::VllmNixl => vllm::decode_body(body, KvConnector::Nixl, answer, prefill_host)?,
        Protocol::VllmMooncake => vllm::decode_body(body, KvConnector::Mooncake, answer, prefill_host)?,
        Protocol::Plain | Protocol::Sglang => {
            JsonObject::parse(answer).map_err(|_| HandoffError::NotJson)?;
            let body = plain_body(body, Some(Engine::Other));
            return Ok(Merged::Decode { body, handoff: Handoff::Needless, lease: None });
        }
    };
    Ok(Merged::Decode { body: relay.body, handoff: relay.handoff, lease: relay.lease })
}
