//! What the hand-offs of all engines have in common: the edits that make a prefill leg of a client's body, and the rule
//! that no hand-off which a client wrote reaches a pod. Such a thing is an unauthenticated pointer into another pod's
//! memory.

use bytes::Bytes;

use super::endpoints::one_token;
use super::vllm::maker::Flaw;
use crate::fleet::Engine;
use crate::request::scan::JsonObject;
use crate::request::{Edit, ParsedBody, splice};

/// Hand-off keys that no client may send to any pod, of whatever engine: pods serve strategies other than `pd` too, and
/// each of these names memory or an address that the pod would go to.
pub const HANDOFF_KEYS: [&str; 7] = [
    "kv_transfer_params",
    "disagg_prefill_resp",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "disaggregated_params",
];

/// What beside them a client may not say to an SGLang pod. By `rid`, which is matched as a prefix, requests are aborted: a
/// client's own one could be the beginning of somebody else's.
const SGLANG_KEYS: [&str; 1] = ["rid"];

/// TensorRT-LLM refuses every key that it does not know. So the hand-offs of other engines do no harm there, and taking
/// them away would hide the client's mistake.
const TRTLLM_KEYS: [&str; 1] = ["disaggregated_params"];

/// vLLM's free-form arguments. It merges them with the hand-off into one map, so that `kv_transfer_params` in here takes
/// effect wherever the real one is absent; one that is no object takes the scheduler down.
const EXTRA_ARGS: &str = "vllm_xargs";

/// The bodies of two legs that are sent at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bodies {
    /// For the prefill pod.
    pub prefill: Bytes,
    /// For the decode pod.
    pub decode: Bytes,
}

/// What became of the prefill answer's hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handoff {
    /// It was put into the decode body.
    Relayed,
    /// The prefill answer had none (absent or null): decode computes everything itself.
    Absent,
    /// It lacked what a decode pod needs, so it was left out: decode computes everything itself.
    Unusable(Flaw),
    /// There is none to be made: nothing is known of the engine, or the decode pod finds the KV by itself.
    Needless,
}

impl Handoff {
    /// [`Handoff::label`] of a relayed one.
    pub const RELAYED: &'static str = "relayed";
    /// [`Handoff::label`] of an unusable one.
    pub const UNUSABLE: &'static str = "unusable";

    /// The metric label, also `RequestRecord::handoff`; empty when there was none to do.
    pub fn label(self) -> &'static str {
        match self {
            Handoff::Relayed => Handoff::RELAYED,
            Handoff::Absent => "absent",
            Handoff::Unusable(_) => Handoff::UNUSABLE,
            Handoff::Needless => "",
        }
    }
}

/// The prefill answer cannot be merged at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoffError {
    /// Not a JSON object.
    #[error("the prefill answer is not a JSON object")]
    NotJson,
    /// The hand-off is neither an object nor null.
    #[error("{0} of the prefill answer is not an object")]
    WrongType(&'static str),
    /// The prompt is not finished, and yet nothing says where its KV blocks are.
    #[error("{0} of the prefill answer is not an integer, although the prompt is to be continued")]
    NoId(&'static str),
    /// The pod gave the prompt up, and answered 200.
    #[error("the prefill pod gave up: finish_reason {0:?}")]
    GaveUp(&'static str),
}

/// The edits that take away what only the gateway may say to an engine's pods; `None` for pods of any engine.
fn strip_for(engine: Option<Engine>) -> Vec<Edit<'static>> {
    let (keys, more): (&[&str], &[&str]) = match engine {
        Some(Engine::Sglang) => (&HANDOFF_KEYS, &SGLANG_KEYS),
        Some(Engine::Trtllm) => (&TRTLLM_KEYS, &[]),
        Some(Engine::Vllm | Engine::Other) | None => (&HANDOFF_KEYS, &[]),
    };
    keys.iter().chain(more).map(|key| Edit::Remove(key)).collect()
}

/// The same for pods of a known engine.
pub(super) fn strip(engine: Engine) -> Vec<Edit<'static>> {
    strip_for(Some(engine))
}

/// The edits of every prefill leg (the PD document; `engine-protocols` section 1.2): one token, not streamed, none of
/// the client's hand-offs.
pub(super) fn prefill_edits(body: &ParsedBody, engine: Engine) -> Vec<Edit<'static>> {
    let mut edits = one_token(body.endpoint, engine);
    edits.extend([
        Edit::Set("stream", b"false"),
        // Refused without `stream`.
        Edit::Remove("stream_options"),
        // Refused when larger than the limit.
        Edit::Remove("min_tokens"),
    ]);
    edits.extend(strip(engine));
    edits
}

/// The client's body without any hand-off key, for one pod that does everything: a combined pod, or decode without a
/// hand-off. `engine` is the pod's; `None` when Envoy's own routes lead to it. The same bytes when there is nothing to
/// strip.
pub fn plain_body(body: &ParsedBody, engine: Option<Engine>) -> Bytes {
    splice(&body.raw, &body.fields, &strip_for(engine))
}

/// A hand-off key inside the client's `vllm_xargs`, which no edit of the top level takes away: such a body is refused.
pub fn hidden_handoff(body: &ParsedBody) -> Option<&'static str> {
    let values = body.fields.iter().filter(|field| field.key == EXTRA_ARGS);
    let objects = values.filter_map(|field| JsonObject::parse(body.raw.get(field.value_span.clone())?).ok());
    objects.into_iter().find_map(|object| HANDOFF_KEYS.into_iter().find(|key| object.get(key).is_some()))
}

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> Vec<u8> {
    serde_json::Value::from(text).to_string().into_bytes()
}
