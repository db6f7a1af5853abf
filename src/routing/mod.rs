//! Where a request goes: a pure pipeline over (snapshot, request, knobs, loads, seed).
//!
//! Order of the steps (the PD document's "Pod Selection Algorithm"): eligibility → buckets → combined → prefill fast
//! path → decode fast path → band → prefill scores → decode scores → pair. One file per step or policy.
//!
//! Promises: the same arguments give the same decision; no signal of an engine, however broken, can make a score that
//! is not a number or leave a request without a target while there is one; a pair always shares a roleset.

mod band;
mod bucket;
mod busy;
mod capacity;
mod cascade;
mod charges;
mod combined;
mod decode;
mod ejections;
mod eligibility;
mod explain;
mod gate;
mod journal;
mod least;
mod length;
mod pair;
mod pinned;
mod plain;
mod prefill;
mod strategy;
mod together;
mod unsplittable;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub use bucket::largest_bound;
pub use charges::Charges;
use charges::{charge, token_charges};
pub use explain::{Considered, DESCRIBED, DecisionRecord, Explanation, Fate, Terms, Ties};
pub use journal::Journal;
pub use length::PromptLength;
pub use pinned::charge_pinned;
pub use plain::{MissingSignals, preble_cost, weighted_tokens};
pub use strategy::{Strategy, Weights};

use crate::clock::Tick;
use crate::fleet::{Model, Pod, Selector};
use crate::knobs::{DecodePolicy, PdKnobs, PrefillPolicy};
use crate::load::{Peers, UserTokens};
use crate::prefix::PrefixIndex;

/// Whether the request can be split into two legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Splittable {
    /// Yes.
    Yes,
    /// No: several sequences, or more than a decode pod learns. It goes to a combined pod, else to a decode pod without
    /// hand-off.
    No,
    /// The same where decode pods cannot do without a hand-off: it goes to a combined pod or nowhere.
    CombinedOnly,
}

/// What routing looks at in a request.
#[derive(Clone, Copy, Debug)]
pub struct RequestFacts<'a> {
    /// Prompt length for buckets.
    pub length: PromptLength,
    /// Block hashes for the prefix index.
    pub hashes: &'a [u64],
    /// One leg or two.
    pub splittable: Splittable,
    /// The profile whose per-pod fields (range, combined) count.
    pub profile: Option<&'a str>,
    /// Which pods the client lets the request go to (`external-filter`); all, if it does not say.
    pub filter: Option<&'a Selector>,
    /// What ties the request to earlier ones.
    pub affinity: Affinity<'a>,
    /// What the request's user was given lately, for strategies that count users.
    pub user: Option<UserTokens>,
    /// Size of the request as the token ledgers count it: one token per four bytes of its body.
    pub prompt_tokens: u64,
    /// Tokens of the prefix key that `hashes` stands for; 0 when it was not hashed.
    pub prefix_tokens: u64,
    /// By how many tokens the prompt of the request's session has grown, where that is known.
    pub session_growth: Option<u64>,
    /// A pod ([`PodState::slot`]) that has failed the request already: another try does without it.
    pub avoid: Option<u32>,
}

impl Default for RequestFacts<'_> {
    /// A request about which nothing special is known.
    fn default() -> Self {
        RequestFacts {
            length: PromptLength::Unknown,
            hashes: &[],
            splittable: Splittable::Yes,
            profile: None,
            prompt_tokens: 0,
            prefix_tokens: 0,
            session_growth: None,
            avoid: None,
            filter: None,
            affinity: Affinity::default(),
            user: None,
        }
    }
}

/// What `session-affinity` looks at. Nothing of it is ever dialled: it only picks among the pods of the fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Affinity<'a> {
    /// The address (`host:port`) that the client's `x-session-id` holds.
    pub address: Option<&'a str>,
    /// The client's `x-aibrix-session-key`.
    pub key: Option<&'a [u8]>,
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
    /// Where this replica stands among those that share their loads.
    pub peers: Peers,
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
    /// Ahead of a strategy other than `pd`: loads were too far apart, so only the least busy pods competed.
    pub gate: bool,
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

/// What adaptive bucket serving (step 2b) had to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BandUse {
    /// The roleset whose band the prompt's length lies in.
    pub roleset: Arc<str>,
    /// True when the candidates were narrowed to it; false when it had none left on one side.
    pub applied: bool,
}

/// How the winner was scored; lower is better.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Scores {
    /// The prefill pod's score by the prefill policy (step 3); `None` without a prefill pod.
    pub prefill: Option<f64>,
    /// The decode pod's score by the decode policy (step 4), or its drain or in-flight score when it is a single pod;
    /// the score by the strategy, when that is not `pd`.
    pub decode: Option<f64>,
    /// The pair's final score (step 5).
    pub total: Option<f64>,
    /// Outstanding prefill legs of the prefill pod before this request.
    pub prefill_count: u64,
    /// Decode requests of the chosen pod before this request: ours, plus other gateways' when its metrics are fresh.
    pub decode_count: f64,
    /// True when the decode pod had no fresh metrics while a sibling had, so that its score is the cold-start score.
    pub cold_start: bool,
}

/// What the token ledgers are charged; `None` where the policy does not count tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCost {
    /// On the prefill pod.
    pub prefill: Option<u64>,
    /// On the decode pod.
    pub decode: Option<u64>,
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
    /// The band that was consulted; `None` without a plan for this length, and for a single pod.
    pub band: Option<BandUse>,
    /// Prefix match of the chosen prefill pod, percent, when a policy looked.
    pub prefix_match_pct: Option<u8>,
    /// That of the candidate that holds most of the prompt.
    pub best_match_pct: Option<u8>,
    /// Pods that were candidates for the (prefill, decode) side after bucketing, before any fast path. A single pod
    /// counts on the decode side.
    pub candidates: (usize, usize),
    /// How the winner was scored.
    pub scores: Scores,
    /// Signals that the strategy wanted and that no candidate had (R43).
    pub missing: MissingSignals,
    /// What its pods are charged in tokens.
    pub tokens: TokenCost,
    /// Everybody who could have served it was ejected, so that ejections did not count.
    pub ejections_ignored: bool,
    /// Who was considered and by which numbers.
    pub explanation: Explanation,
}

/// No target. Every variant but one is a 503 whose text says what is missing (reference section 4.1).
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
    /// There are pods, but the client's selector lets none of them pass.
    #[error("external-filter matches none of {routable} ready pods")]
    Filtered {
        /// Routable pods of the model.
        routable: usize,
    },
    /// The request cannot be split, and no pod serves such requests whole. (Not a 503: the client has to ask for less.)
    #[error("the request cannot be split and there are no combined pods")]
    NoCombined,
    /// The same, but there are such pods: none of them is ready.
    #[error("the request cannot be split and none of {known} combined pods is ready")]
    CombinedNotReady {
        /// Combined pods of the model, ready or not.
        known: usize,
    },
    /// The pod that failed the request already is the only one that could serve it.
    #[error("no other pod for another try: the one that failed is the only one of {routable} ready pods that fits")]
    NoOther {
        /// Routable pods of the model.
        routable: usize,
    },
    /// Each pod that could serve it has as many requests as its profile lets it have (a 429).
    #[error("each pod that fits has reached the inflight limit of {limit}")]
    Saturated {
        /// `requestsInflight`.
        limit: u64,
    },
    /// Bucketing is on and nothing takes this length.
    #[error("no prompt-length bucket matches prompt length {length} and no combined pods available")]
    NoBucket {
        /// Tokens (a lower bound when the prompt was not counted to its end).
        length: u64,
    },
}

impl RoutingError {
    /// More pods would serve the request as it is.
    pub fn lacks_pods(&self) -> bool {
        matches!(
            self,
            RoutingError::NoPods
                | RoutingError::NoPrefill { .. }
                | RoutingError::NoDecode { .. }
                | RoutingError::CombinedNotReady { .. }
        )
    }
}

/// Conflicts after which a selection charges without the check. Each conflict means that somebody else got through.
const MAX_CONFLICTS: u32 = 64;

/// Selects without charging: a pure function of its arguments, loads and health included.
pub fn select(
    model: &Model,
    request: &RequestFacts<'_>,
    strategy: Strategy,
    knobs: &PdKnobs,
    context: Context<'_>,
) -> Result<Decision, RoutingError> {
    let band = band::look_up(model, request, strategy, knobs, context.seed);
    let question = cascade::Question { model, request, strategy, knobs, context, band: band.as_ref() };
    Prepared::look(question)?.decide(question)
}

/// Selects and charges in one step: concurrent selections see each other's charges and probes. What does not
/// depend on loads (eligible pods, prefix matches) is computed once, also when the decision has to be made again, unless
/// the health of somebody has changed meanwhile.
pub fn select_and_charge(
    model: &Model,
    request: &RequestFacts<'_>,
    strategy: Strategy,
    knobs: &PdKnobs,
    context: Context<'_>,
) -> Result<(Decision, Charges), RoutingError> {
    let band = band::look_up(model, request, strategy, knobs, context.seed);
    let question = cascade::Question { model, request, strategy, knobs, context, band: band.as_ref() };
    if context.peers.count > 1 {
        model.peers.selected(context.now);
    }
    let mut prepared = Prepared::look(question)?;
    let mut conflicts = 0;
    while conflicts < MAX_CONFLICTS {
        let Some(token) = model.commit.begin() else { break };
        prepared.look_again(question)?;
        let decision = prepared.decide(question)?;
        let tokens = token_charges(&decision, knobs, context.now);
        let tries = ejections::Tries::of(&decision, model);
        match model.commit.try_commit(token, || charge(&decision, tokens, &tries, context.now)) {
            Some(charges) => return Ok((decision, Charges { conflicts, ..charges })),
            None => conflicts += 1,
        }
    }
    prepared.look_again(question)?;
    let decision = prepared.decide(question)?;
    let tokens = token_charges(&decision, knobs, context.now);
    let tries = ejections::Tries::of(&decision, model);
    let charges = model.commit.charge_blind(|| charge(&decision, tokens, &tries, context.now));
    Ok((decision, Charges { conflicts, blind: true, ..charges }))
}

/// What a decision rests on beside loads: who is eligible, and what prefixes they hold.
struct Prepared<'a> {
    exclusions: ejections::Exclusions,
    eligible: eligibility::Eligible<'a>,
    matches: prefill::Matches,
}

impl<'a> Prepared<'a> {
    fn look(question: cascade::Question<'a>) -> Result<Prepared<'a>, RoutingError> {
        let exclusions = ejections::Exclusions::look(question.model, question.context.now);
        Prepared::without(exclusions, question)
    }

    fn without(
        exclusions: ejections::Exclusions,
        question: cascade::Question<'a>,
    ) -> Result<Prepared<'a>, RoutingError> {
        let cascade::Question { model, request, strategy, knobs, context, .. } = question;
        let eligible = eligibility::gather(model, request, strategy, knobs, &exclusions)?;
        let matches = prefill::Matches::look_up(model, &eligible.pool, request, strategy, knobs, context.prefix);
        Ok(Prepared { exclusions, eligible, matches })
    }

    /// Others may have taken the try of an ejected pod, or have ejected or re-admitted one.
    fn look_again(&mut self, question: cascade::Question<'a>) -> Result<(), RoutingError> {
        let exclusions = ejections::Exclusions::look(question.model, question.context.now);
        if exclusions != self.exclusions {
            *self = Prepared::without(exclusions, question)?;
        }
        Ok(())
    }

    fn decide(&self, question: cascade::Question<'_>) -> Result<Decision, RoutingError> {
        cascade::decide(question, &self.eligible, &self.matches)
    }
}
