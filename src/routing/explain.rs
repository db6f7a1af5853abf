//! What a decision says about itself: who was considered, by which numbers, and what made the difference.

use std::fmt::Write as _;
use std::time::Duration;

use super::{Context, Decision, DecodeFastPath, PromptLength, RoutingError, SingleReason, Target, decode};
use crate::clock::Tick;
use crate::fleet::Pod;
use std::sync::Arc;

/// How many candidates of one side a decision describes; of more, those with the best scores.
pub const DESCRIBED: usize = 16;

/// What became of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was scored.
    Scored,
    /// It was scored on its load alone: an outlier that its roleset cannot do without.
    LoadOnly,
    /// It has far more requests than the others, and was skipped.
    Outlier,
    /// A fast path or a band left it out before the scoring.
    LeftOut,
    /// It has failed lately, alone or together with the chosen prefill pod, and gets no request for a while.
    Ejected,
}

impl Fate {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Fate::Scored => "scored",
            Fate::LoadOnly => "scored_on_load_only",
            Fate::Outlier => "outlier",
            Fate::LeftOut => "left_out",
            Fate::Ejected => "ejected",
        }
    }
}

/// The numbers that a score is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Terms {
    /// Of a prefill pod.
    Prefill {
        /// Prefix match, percent, as scoring saw it.
        match_pct: u8,
        /// Tokens being computed, by the token ledger.
        active_tokens: u64,
        /// Tokens resident, by the token ledger.
        kv_tokens: u64,
        /// The engine's mean prefill time, seconds.
        mean_prefill_seconds: Option<f64>,
    },
    /// Of a decode pod, or of a single pod for everything.
    Decode {
        /// Generated tokens per second.
        throughput: Option<f64>,
        /// Requests completed per second.
        drain: Option<f64>,
        /// Free KV cache, percent.
        free_pct: f64,
        /// Charged prompt tokens, by the token ledger.
        tokens: f64,
        /// Estimated output of the outstanding requests so far, tokens; 0 unless the policy counts it.
        generated: f64,
        /// The cold-start rule made the score.
        cold_start: bool,
    },
}

/// One candidate as the decision saw it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Considered {
    /// The incarnation: [`crate::fleet::PodState::slot`].
    pub slot: u32,
    /// What became of it.
    pub fate: Fate,
    /// Time since its token ledger last changed; `None` = never.
    pub ledger_age: Option<Duration>,
    /// Its score; lower is better.
    pub score: Option<f64>,
    /// Its requests: outstanding prefills of a prefill pod, decode requests of any other.
    pub count: f64,
    /// Age of its engine metrics; `None` = none, or too old to count.
    pub metrics_age: Option<Duration>,
    /// What the score is made of.
    pub terms: Terms,
}

/// How many candidates shared the winning score; 1 = no tie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ties {
    /// Prefill pods of the winning roleset.
    pub prefill: usize,
    /// Decode pods of the winning roleset.
    pub decode: usize,
    /// Rolesets; or single pods.
    pub total: usize,
}

/// Why it was these pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explanation {
    /// Prefill candidates, best first; at most [`DESCRIBED`].
    pub prefills: Vec<Considered>,
    /// Decode or single candidates, likewise.
    pub decodes: Vec<Considered>,
    /// Ties that chance decided.
    pub ties: Ties,
    /// What prefill and decode scores were divided by.
    pub maxima: (f64, f64),
    /// Requests of other replicas, not yet seen, that were assumed to go first.
    pub ahead: usize,
}

/// Describes up to [`DESCRIBED`] of `count` candidates, the best first; those without a score come last. Only those are
/// looked at closely, so a large fleet costs little more than a small one.
pub(super) fn describe(
    count: usize,
    score: impl Fn(usize) -> Option<f64>,
    describe: impl Fn(usize) -> Option<Considered>,
) -> Vec<Considered> {
    let rank = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
    let mut order: Vec<(f64, usize)> = (0..count).map(|id| (score(id).unwrap_or(f64::INFINITY), id)).collect();
    if order.len() > DESCRIBED {
        order.select_nth_unstable_by(DESCRIBED, rank);
        order.truncate(DESCRIBED);
    }
    order.sort_unstable_by(rank);
    let mut described = Vec::with_capacity(order.len());
    described.extend(order.into_iter().filter_map(|(_, id)| describe(id)));
    described
}

/// Describes single pods: with their scores, or none where none was needed (chance, a session, the only one). `ties` of
/// them shared the best.
pub(super) fn singles(
    pods: &[&Arc<Pod>],
    score: impl Fn(usize) -> Option<f64>,
    context: Context<'_>,
    ties: usize,
) -> Explanation {
    let decodes = describe(pods.len(), &score, |id| {
        let pod = pods.get(id)?;
        Some(decode::Facts::read(pod, context).considered(pod, score(id), decode::Beside::default(), context.now))
    });
    Explanation { decodes, ties: Ties { total: ties, ..Ties::default() }, ..Explanation::default() }
}

/// What was found for the candidate `id`, when `found` goes with the ascending list `ids` of those that were looked at.
pub(super) fn found<T: Copy>(ids: &[usize], found: &[T], id: usize) -> Option<T> {
    // Mostly everybody was looked at, and then each is in its own place.
    let place = if ids.get(id) == Some(&id) { id } else { ids.binary_search(&id).ok()? };
    found.get(place).copied()
}

impl DecodeFastPath {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            DecodeFastPath::RequestSpread => "request_spread",
            DecodeFastPath::ThroughputSpread => "throughput_spread",
            DecodeFastPath::DrainScore => "drain_score",
        }
    }
}

impl SingleReason {
    /// Its name in logs, traces and pages.
    pub fn name(self) -> &'static str {
        match self {
            SingleReason::CombinedFallback => "combined_fallback",
            SingleReason::CombinedIdle => "combined_idle",
            SingleReason::CombinedUnsplittable => "combined_unsplittable",
            SingleReason::DecodeOnly => "decode_only",
            SingleReason::Strategy => "strategy",
        }
    }
}

/// One selection, as the journal keeps it.
#[derive(Clone, Debug)]
pub struct DecisionRecord {
    /// When.
    pub at: Tick,
    /// The request's id as its client sees it.
    pub request_id: String,
    /// The model.
    pub model: Arc<str>,
    /// Version of the fleet snapshot that was decided on.
    pub snapshot_version: u64,
    /// The profile that the request named, or that `auto` resolved to.
    pub profile: Option<Box<str>>,
    /// Prompt length for buckets.
    pub length: PromptLength,
    /// Size of the request as the token ledgers count it.
    pub prompt_tokens: u64,
    /// How often it was decided again because somebody else was charged first.
    pub conflicts: u32,
    /// Charged without the check, after too many conflicts.
    pub blind: bool,
    /// What came out.
    pub outcome: Result<Decision, RoutingError>,
}

impl DecisionRecord {
    /// One line for a response header: ASCII, `key=value` pairs separated by `; `, below 1 KiB.
    pub fn summary(&self) -> String {
        const LONGEST: usize = 1000;
        let mut text = format!("snapshot={}; conflicts={}", self.snapshot_version, self.conflicts);
        if let Ok(decision) = &self.outcome {
            decision.summarise(&mut text);
        }
        let mut text: String = text.chars().map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' }).collect();
        text.truncate(LONGEST);
        text
    }
}

impl Decision {
    fn summarise(&self, text: &mut String) {
        // Writing to a string cannot fail.
        let _ = write!(text, "; strategy={}", self.strategy.name());
        if let Some((prefill, decode)) = self.policies {
            let _ = write!(text, "; policies={}/{}", prefill.name(), decode.name());
        }
        match &self.target {
            Target::Pair { prefill, decode } => {
                let _ = write!(text, "; prefill={}; decode={}", prefill.spec.key, decode.spec.key);
            }
            Target::Single { pod, reason } => {
                let _ = write!(text, "; pod={}; reason={}", pod.spec.key, reason.name());
            }
        }
        let scores = [("prefill_score", self.scores.prefill), ("decode_score", self.scores.decode)];
        for (name, score) in scores.into_iter().chain([("total", self.scores.total)]) {
            if let Some(score) = score {
                let _ = write!(text, "; {name}={score:.4}");
            }
        }
        let _ = write!(text, "; requests={}/{}", self.scores.prefill_count, self.scores.decode_count);
        if let Some(percent) = self.prefix_match_pct {
            let _ = write!(text, "; match={percent}%");
        }
        let _ = write!(text, "; candidates={}/{}; steps={}", self.candidates.0, self.candidates.1, self.steps());
        if self.explanation.ties.total > 1 {
            let _ = write!(text, "; tied={}", self.explanation.ties.total);
        }
        if self.explanation.ahead > 0 {
            let _ = write!(text, "; after={}", self.explanation.ahead);
        }
    }

    /// The steps that narrowed the candidates, joined by `+`; `none` if nothing did.
    pub fn steps(&self) -> String {
        let mut steps = Vec::new();
        if self.fast_paths.gate {
            steps.push("imbalance_gate");
        }
        if self.fast_paths.prefill_spread {
            steps.push("prefill_spread");
        }
        if let Some(check) = self.fast_paths.decode {
            steps.push(check.name());
        }
        if self.band.as_ref().is_some_and(|band| band.applied) {
            steps.push("band");
        }
        if self.scores.cold_start {
            steps.push("cold_start");
        }
        if self.ejections_ignored {
            steps.push("ejections_ignored");
        }
        if steps.is_empty() { "none".to_owned() } else { steps.join("+") }
    }
}
