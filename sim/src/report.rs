//! What an engine reports about itself: gauges, counters, and breaches of protocol.

use serde::Serialize;

/// How a request broke the hand-off protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ViolationKind {
    /// `do_remote_prefill` without everything it needs.
    HandoffIncomplete,
    /// A hand-off for an engine that cannot use it: a combined one, or one of the other role.
    HandoffMisplaced,
    /// `remote_host` is not an IP address: the engine's default was passed on.
    HostNotReplaced,
    /// The decode prompt is not the one that was prefilled.
    PromptMismatch,
    /// As before, and it needs more blocks than there are: real decode engines die of it.
    PromptLongerThanKv,
    /// A hand-off was used twice.
    HandoffReused,
    /// A hand-off was used after its lease ended or it was given up.
    HandoffStale,
    /// A hand-off that the prefill engine never made.
    HandoffUnknown,
    /// A prefill request that is streamed or asks for more than one token.
    PrefillNotCapped,
    /// A prefill request for several sequences: only one can be handed over, the others' blocks are stranded.
    BlocksStranded,
    /// More than one `X-Request-Id`.
    RequestIdRepeated,
    /// `disagg_prefill_resp` is not a whole prefill answer.
    PrefillAnswerIncomplete,
    /// SGLang: a disaggregated request without `bootstrap_room`.
    RoomMissing,
    /// SGLang: `bootstrap_room` is 0, or not below 2^63.
    RoomInvalid,
    /// SGLang: `bootstrap_room` was used before on this engine.
    RoomReused,
    /// SGLang: several samples of one prompt share a room.
    RoomShared,
    /// SGLang: `bootstrap_host` is the marker for a transfer that does not happen.
    TransferFaked,
    /// SGLang: another live request has the same `rid`.
    RidReused,
    /// SGLang: an abort without `rid`, or one that ended a request of another `rid`.
    AbortTooWide,
    /// SGLang: an `x-override-*` header.
    OverrideHeader,
    /// The prefill leg's sampling parameters are not the decode leg's, although its token counts.
    SamplingMismatch,
    /// TensorRT-LLM: `disagg_request_id` is missing or below 2^42, where workers keep their local ids.
    RequestIdTooSmall,
    /// TensorRT-LLM, AIBrix's connector: the prefill engine's parameters came back changed.
    HandoffAltered,
}

/// A breach of the hand-off protocol: something a correct gateway never does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// The request's number, as in [`crate::Record::seq`].
    pub seq: Option<u64>,
    /// What.
    pub kind: ViolationKind,
    /// More about it.
    pub detail: String,
}

/// Gauges and counters of an engine at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Sequences being computed.
    pub running: usize,
    /// Sequences waiting for a slot, for KV, or for a transfer.
    pub waiting: usize,
    /// Prefill requests, among the waiting ones, that wait for their decode engine.
    pub bootstrapping: usize,
    /// Sequences whose KV is on its way, in or out.
    pub transferring: usize,
    /// Requests stopped by a [`crate::Hold`].
    pub held: usize,
    /// Inference requests that arrived and have not ended.
    pub live_requests: usize,
    /// Tokens of KV in use, by whole blocks; idle cached blocks do not count.
    pub kv_used_tokens: u64,
    /// KV capacity, tokens.
    pub kv_capacity_tokens: u64,
    /// Hand-offs that nobody pulled yet.
    pub pinned_requests: usize,
    /// Their KV blocks.
    pub pinned_blocks: u64,
    /// Prompt tokens computed here.
    pub computed_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cache_hit_tokens: u64,
    /// Prompt tokens pulled from a prefill engine.
    pub transferred_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Sequences finished by their limit or by a stop.
    pub finished: u64,
    /// Sequences ended by `/abort_request`.
    pub aborted: u64,
    /// Sequences that ended with an error.
    pub errors: u64,
    /// Recorded requests whose client left before the end.
    pub clients_gone: u64,
    /// Failed KV transfers.
    pub failed_transfers: u64,
    /// Hand-offs whose lease ended.
    pub expired_leases: u64,
    /// Requests that shared their `X-Request-Id` with a live one.
    pub duplicate_ids: u64,
    /// Violations seen.
    pub violations: u64,
}
