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
