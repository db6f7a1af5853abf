//! vLLM: the `shfs` and `nixl` connectors (`engine-protocols` sections 2.2 and 2.7).

use bytes::Bytes;

use crate::knobs::KvConnector;
use crate::request::ParsedBody;

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

/// Hand-off keys that no client may send to any pod.
pub const HANDOFF_KEYS: [&str; 2] = ["kv_transfer_params", "disagg_prefill_resp"];

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

/// The body of the prefill leg.
pub fn prefill_body(body: &ParsedBody, _connector: KvConnector) -> Bytes {
    body.raw.clone()
}

/// The body of the decode leg after a prefill answer. `prefill_host` replaces `remote_host` (no brackets).
pub fn decode_body(
    body: &ParsedBody,
    _connector: KvConnector,
    _prefill_answer: &[u8],
    _prefill_host: &str,
) -> Result<(Bytes, Handoff), HandoffError> {
    Ok((body.raw.clone(), Handoff::Absent))
}

/// The client's body without any hand-off key: for combined pods and decode without hand-off. The same bytes when
/// there is nothing to strip.
pub fn plain_body(body: &ParsedBody) -> Bytes {
    body.raw.clone()
}
