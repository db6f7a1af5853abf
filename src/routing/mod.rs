//! Where a request goes: a pure pipeline over (snapshot, request, knobs, loads, seed).
//!
//! Order of the steps (the document's "Pod Selection Algorithm"): eligibility → buckets → combined → prefill fast
//! path → decode fast path → prefill scores → decode scores → pair. One file per policy.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Tick;
use crate::fleet::{Model, Pod};
use crate::knobs::{DecodePolicy, PdKnobs, PrefillPolicy};
use crate::load::{DecodeCharge, PrefillCharge};
use crate::prefix::PrefixIndex;

/// A routing strategy (`routing-strategy`), by its exact name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// `pd`
    Pd,
    /// `random`
    Random,
    /// `least-request`
    LeastRequest,
}

impl Strategy {
    /// The strategy of that exact name.
    pub fn parse(name: &str) -> Option<Strategy> {
        match name {
            "pd" => Some(Strategy::Pd),
            "random" => Some(Strategy::Random),
            "least-request" => Some(Strategy::LeastRequest),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Pd => "pd",
            Strategy::Random => "random",
            Strategy::LeastRequest => "least-request",
        }
    }
}

/// How long the prompt is, as far as it had to be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptLength {
    /// Exactly this many tokens.
    Exactly(u64),
    /// More than this many tokens, which is the largest finite bound of the model's buckets.
    MoreThan(u64),
    /// Not counted, because nothing depends on it.
    Unknown,
}

/// Whether the request can be split into two legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Splittable {
    /// Yes.
    Yes,
    /// No: `n` > 1 or several prompts. It goes to a combined pod, else to a decode pod without hand-off.
    No,
}

/// What routing looks at in a request.
#[derive(Clone, Debug)]
pub struct RequestFacts<'a> {
    /// Prompt length for buckets.
    pub length: PromptLength,
    /// Block hashes for the prefix index.
    pub hashes: &'a [u64],
    /// One leg or two.
    pub splittable: Splittable,
    /// The profile whose per-pod fields (range, combined) count.
    pub profile: Option<&'a str>,
}

/// What a selection needs beside snapshot and request.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// Now.
    pub now: Tick,
    /// Randomness of this selection (ties, random picks).
    pub seed: u64,
    /// Age beyond which scraped metrics count as unknown.
    pub max_metric_age: Duration,
    /// The prefix index.
    pub prefix: &'a PrefixIndex,
}

/// Why a single pod runs the whole request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SingleReason {
    /// A combined pod, chosen because no bucket or no complete pair fits.
    CombinedFallback,
    /// A combined pod, chosen because PD is loaded and it is idle.
    CombinedIdle,
    /// A combined pod, because the request cannot be split.
    CombinedUnsplittable,
    /// A decode pod without hand-off, because the request cannot be split and there is no combined pod.
    DecodeOnly,
    /// A strategy other than `pd`.
    Strategy,
}

/// The pods of a request.
#[derive(Clone, Debug)]
pub enum Target {
    /// A prefill and a decode pod of one roleset.
    Pair {
        /// Runs the prompt.
        prefill: Arc<Pod>,
        /// Generates.
        decode: Arc<Pod>,
    },
    /// One pod for everything.
    Single {
        /// The pod.
        pod: Arc<Pod>,
        /// Why.
        reason: SingleReason,
    },
}

/// Which fast paths narrowed the candidates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastPaths {
    /// Step 1 fired.
    pub prefill_spread: bool,
    /// Step 2 fired, and which check did.
    pub decode: Option<DecodeFastPath>,
}

/// The three checks of step 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeFastPath {
    /// Request-count spread.
    RequestSpread,
    /// Throughput spread.
    ThroughputSpread,
    /// Drain-rate score ratio.
    DrainScore,
}

/// A selection that explains itself.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Where it goes.
    pub target: Target,
    /// The strategy that decided.
    pub strategy: Strategy,
    /// Policies in force (PD only).
    pub policies: Option<(PrefillPolicy, DecodePolicy)>,
    /// Fast paths that fired.
    pub fast_paths: FastPaths,
    /// Prefix match of the chosen prefill pod, percent, when a policy looked.
    pub prefix_match_pct: Option<u8>,
    /// Pods that were candidates for the (prefill, decode) side.
    pub candidates: (usize, usize),
}

/// The guards of one request's charges.
#[derive(Debug)]
pub struct Charges {
    /// The prefill leg, for a pair.
    pub prefill: Option<PrefillCharge>,
    /// The decode or combined pod.
    pub decode: DecodeCharge,
}

/// No target. Every variant is a 503 whose text says what is missing (reference section 4.1).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoutingError {
    /// No routable pod at all.
    #[error("no ready pods")]
    NoPods,
    /// No roleset has a prefill pod where one is needed.
    #[error("prefill pods are not ready: prefill={prefill}, decode={decode}{detail}")]
    NoPrefill {
        /// Routable prefill pods of the model.
        prefill: usize,
        /// Routable decode pods of the model.
        decode: usize,
        /// Which roleset lacks what.
        detail: String,
    },
    /// The same for decode.
    #[error("decode pods are not ready: prefill={prefill}, decode={decode}{detail}")]
    NoDecode {
        /// Routable prefill pods of the model.
        prefill: usize,
        /// Routable decode pods of the model.
        decode: usize,
        /// Which roleset lacks what.
        detail: String,
    },
    /// Bucketing is on and nothing takes this length.
    #[error("no prompt-length bucket matches prompt length {length} and no combined pods available")]
    NoBucket {
        /// Tokens (a lower bound when the prompt was not counted to its end).
        length: u64,
    },
}

/// Selects without charging: a pure function of its arguments.
pub fn select(
    _model: &Model,
    _request: &RequestFacts<'_>,
    _strategy: Strategy,
    _knobs: &PdKnobs,
    _context: Context<'_>,
) -> Result<Decision, RoutingError> {
    Err(RoutingError::NoPods)
}

/// Selects and charges in one step: concurrent selections see each other's charges (design section 2).
pub fn select_and_charge(
    _model: &Model,
    _request: &RequestFacts<'_>,
    _strategy: Strategy,
    _knobs: &PdKnobs,
    _context: Context<'_>,
) -> Result<(Decision, Charges), RoutingError> {
    Err(RoutingError::NoPods)
}

/// The largest finite prompt-length bound any routable pod of the model declares for this profile: counting further
/// than this decides nothing. `None` when no bound is finite.
pub fn largest_bound(_model: &Model, _profile: Option<&str>) -> Option<u64> {
    None
}
