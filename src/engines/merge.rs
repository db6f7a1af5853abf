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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::vllm::maker::Flaw;
    use crate::request::Endpoint;

    const NIXL: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"localhost","remote_port":5600,"tp_size":1,"transfer_mode":"pull"}"#;
    const AIBRIX: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[],"remote_engine_id":"e","remote_host":"","remote_port":-1,"tp_size":1}"#;

    /// The hand-off that each connector and engine of the reference gateway is known to make, as its prefill answer has it.
    #[test]
    fn every_known_hand_off_is_taken_or_refused_for_a_reason() {
        use Protocol::{Plain, TrtContextFirst, VllmMooncake, VllmNixl, VllmShfs};
        let lease = |seconds| Some(Duration::from_secs(seconds));
        let params = |value: &str| format!(r#"{{"id":"x","choices":[],"kv_transfer_params":{value}}}"#);
        let context = r#"{"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":7}}],"prompt_token_ids":[1]}"#;
        let answer = r#"{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"a"}],"usage":{"prompt_tokens":3}}"#;
        for (maker, protocol, answer, handoff, lease, key) in [
            ("vLLM's NixlConnector", VllmShfs, params(NIXL), Handoff::Relayed, lease(30), "kv_transfer_params"),
            ("AIBrix's connector", VllmShfs, params(AIBRIX), Handoff::Relayed, None, "kv_transfer_params"),
            (
                "LMCache's multi-process connector",
                VllmShfs,
                params(r#"{"num_lmcache_extra_cached_tokens":4}"#),
                Handoff::Needless,
                None,
                "",
            ),
            ("no connector, or an answer that ended", VllmShfs, params("null"), Handoff::Absent, None, ""),
            ("no connector of an old version", VllmShfs, answer.to_owned(), Handoff::Absent, None, ""),
            (
                "Mooncake without its label",
                VllmShfs,
                params(r#"{"do_remote_prefill":true,"transfer_id":"t","remote_bootstrap_addr":"http://h:8998"}"#),
                Handoff::Unusable(Flaw::Mooncake),
                None,
                "",
            ),
            ("nothing that is known", VllmShfs, params(r#"{"x":1}"#), Handoff::Unusable(Flaw::Unknown), None, ""),
            ("the Neuron agent", VllmNixl, answer.to_owned(), Handoff::Relayed, None, "disagg_prefill_resp"),
            ("the Neuron agent's own NIXL", VllmNixl, params(NIXL), Handoff::Relayed, None, "disagg_prefill_resp"),
            // Its legs are sent at once; the answer has nothing to say.
            ("vLLM's MooncakeConnector", VllmMooncake, params("null"), Handoff::Absent, None, ""),
            ("TensorRT-LLM", TrtContextFirst, context.to_owned(), Handoff::Relayed, lease(60), "disaggregated_params"),
            ("TensorRT-LLM without a transceiver", TrtContextFirst, answer.to_owned(), Handoff::Absent, None, ""),
            // xllm, xdit and whatever else has a name that is not known.
            ("any other engine", Plain, answer.to_owned(), Handoff::Needless, None, ""),
        ] {
            let client = br#"{"model":"m","prompt":"hello","max_tokens":9}"#;
            let body = ParsedBody::parse(Endpoint::Completions, None, Bytes::from_static(client)).unwrap();
            let Ok(Merged::Decode { body: sent, handoff: made, lease: kept }) =
                merge(protocol, &body, answer.as_bytes(), "10.0.0.5")
            else {
                panic!("{maker}")
            };
            assert_eq!((made, kept), (handoff, lease), "{maker}");
            let sent = JsonObject::parse(&sent).unwrap();
            for known in ["kv_transfer_params", "disagg_prefill_resp", "disaggregated_params"] {
                assert_eq!(sent.get(known).is_some(), known == key, "{maker}: {known}");
            }
            assert_eq!(sent.get("max_tokens"), Some("9"), "{maker}");
        }
    }
}
