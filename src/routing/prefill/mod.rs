//! The prefill side: fast path (step 1), outlier rule and scores (step 3).
//!
//! The count of a pod is its outstanding prefill legs, as charged by this gateway and as published by others.

mod conductor;
mod fast_path;
mod least_request;
mod outliers;
mod prefix_cache;
mod token_load;

pub(super) use fast_path::fast_path;
pub(super) use token_load::charge;

use super::eligibility::{Candidate, Pool};
use super::least::Least;
use super::{Considered, Context, Fate, RequestFacts, Strategy, Terms};
use crate::fleet::{Model, Pod};
use crate::knobs::{PdKnobs, PrefillPolicy};
use crate::prefix::PrefixIndex;
use crate::rng::Rng;

/// No prefill score is larger, so that they can be normalised.
const CEILING: f64 = 1e30;

/// Prefix matches of the prefill candidates (`pd`) or of all candidates (other strategies), percent, in their order;
/// empty when nobody looks.
#[derive(Clone, Debug, Default)]
pub(super) struct Matches(Vec<u8>);

impl Matches {
    /// Asks the index, when the policy wants to know and there is something to ask.
    pub(super) fn look_up(
        model: &Model,
        pool: &Pool<'_>,
        request: &RequestFacts<'_>,
        strategy: Strategy,
        knobs: &PdKnobs,
        index: &PrefixIndex,
    ) -> Matches {
        match pool {
            Pool::Pairs { prefills, .. } if knobs.prefill_policy.looks_prefixes_up() && !request.hashes.is_empty() => {
                let slots: Vec<u32> = prefills.iter().map(|candidate| candidate.pod.state.slot).collect();
                Matches(index.match_percents(&model.name, request.hashes, &slots))
            }
            Pool::Any(pods) if strategy.looks_prefixes_up() && !request.hashes.is_empty() && pods.len() > 1 => {
                let slots: Vec<u32> = pods.iter().map(|pod| pod.state.slot).collect();
                Matches(index.match_percents(&model.name, request.hashes, &slots))
            }
            _ => Matches::default(),
        }
    }

    /// Those of some of the candidates, in the order of `ids`.
    pub(super) fn only(&self, ids: &[usize]) -> Matches {
        Matches(ids.iter().filter_map(|id| self.0.get(*id).copied()).collect())
    }

    /// Matches made up by a test.
    #[cfg(test)]
    pub(super) fn known(percents: Vec<u8>) -> Matches {
        Matches(percents)
    }

    /// The match as the index gave it.
    pub(super) fn raw(&self, candidate: usize) -> Option<u8> {
        self.0.get(candidate).copied()
    }

    /// The best match of all.
    pub(super) fn best(&self) -> Option<u8> {
        self.0.iter().copied().max()
    }

    /// The match as scoring sees it: one below `min_match_pct` is none.
    pub(super) fn counted(&self, candidate: usize, knobs: &PdKnobs) -> u8 {
        self.raw(candidate).filter(|percent| *percent >= knobs.min_match_pct).unwrap_or(0)
    }
}

/// The best prefill pod of each roleset.
#[derive(Clone, Debug)]
pub(super) struct Scored {
    /// By roleset: candidate index and score.
    pub(super) best: Vec<Least<usize>>,
    /// The largest score, at least 1: what scores are normalised with.
    pub(super) max: f64,
    /// `conductor`: some engine reports its mean prefill time.
    pub(super) any_mean: bool,
    /// One per id, in the order of the ids.
    pub(super) fates: Vec<(Fate, Option<f64>)>,
}

/// A candidate as an explanation shows it.
pub(super) fn considered(
    pod: &Pod,
    (fate, score): (Fate, Option<f64>),
    count: u64,
    match_pct: u8,
    context: Context<'_>,
) -> Considered {
    let state = &pod.state;
    let (tokens, signals) = (state.load.total_tokens(context.now), state.signals.load());
    let fresh = signals.fresh(context.now, context.max_metric_age);
    Considered {
        slot: state.slot,
        fate,
        ledger_age: state.load.tokens.touched().map(|at| context.now.since(at)),
        score,
        count: count as f64,
        metrics_age: signals.at.filter(|_| fresh).map(|at| context.now.since(at)),
        terms: Terms::Prefill {
            match_pct: if fate == Fate::LoadOnly { 0 } else { match_pct },
            active_tokens: tokens.active,
            kv_tokens: tokens.kv,
            mean_prefill_seconds: signals.prefill_seconds_mean.filter(|_| fresh),
        },
    }
}

/// What step 3 looks at beside the candidates that are left.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scoring<'a> {
    pub(super) request: &'a RequestFacts<'a>,
    pub(super) counts: &'a [u64],
    pub(super) matches: &'a Matches,
    pub(super) knobs: &'a PdKnobs,
    pub(super) context: Context<'a>,
    /// How many rolesets the model has.
    pub(super) rolesets: usize,
}

/// What one more request like the others adds to the score of one of the candidates `ids`.
pub(super) fn step(candidates: &[Candidate<'_>], ids: &[usize], scoring: Scoring<'_>) -> f64 {
    let Scoring { request, counts, knobs, context, .. } = scoring;
    let legs = || ids.iter().filter_map(|id| counts.get(*id));
    match knobs.prefill_policy {
        PrefillPolicy::PrefixCache => 1.0 / legs().copied().max().unwrap_or(1).max(1) as f64,
        PrefillPolicy::LeastRequest => 1.0,
        PrefillPolicy::Conductor => conductor::score(1.0, None, 0, 0),
        PrefillPolicy::TokenLoad | PrefillPolicy::HybridCacheLoad => {
            let tokens = |id: &usize| Some(candidates.get(*id)?.pod.state.load.total_tokens(context.now).active as f64);
            let (active, legs) = (ids.iter().filter_map(tokens).sum::<f64>(), legs().sum::<u64>());
            let own = || charge(request, 0, knobs).unwrap_or(0) as f64;
            let each = if legs > 0 { active / legs as f64 } else { own() };
            let step = each * (1.0 + knobs.token_load_kv_weight);
            if step.is_finite() { step.clamp(0.0, CEILING) } else { 0.0 }
        }
    }
}

/// Scores the candidates `ids` (indices into `candidates`, grouped by roleset) and keeps the best per roleset.
pub(super) fn score(candidates: &[Candidate<'_>], ids: &[usize], scoring: Scoring<'_>, rng: &mut Rng) -> Scored {
    let Scoring { request, counts, matches, knobs, context, rolesets } = scoring;
    let count = |id: usize| counts.get(id).copied().unwrap_or(0) as f64;
    let max_count = ids.iter().map(|id| count(*id)).fold(1.0, f64::max);
    let verdicts = outliers::judge(candidates, counts, ids, knobs.standard_deviation_factor);
    let mut scored = Scored {
        best: vec![Least::default(); rolesets],
        max: 1.0,
        any_mean: false,
        fates: Vec::with_capacity(ids.len()),
    };
    for (id, verdict) in ids.iter().copied().zip(verdicts) {
        let (fate, percent) = match verdict {
            outliers::Verdict::Skip => {
                scored.fates.push((Fate::Outlier, None));
                continue;
            }
            outliers::Verdict::LoadOnly => (Fate::LoadOnly, 0),
            outliers::Verdict::Keep => (Fate::Scored, matches.counted(id, knobs)),
        };
        let Some(candidate) = candidates.get(id) else { continue };
        let state = &candidate.pod.state;
        let score = match knobs.prefill_policy {
            PrefillPolicy::PrefixCache => prefix_cache::score(percent, count(id), max_count),
            PrefillPolicy::LeastRequest => least_request::score(count(id)),
            PrefillPolicy::Conductor => {
                let signals = state.signals.load();
                let fresh = signals.fresh(context.now, context.max_metric_age);
                let mean = signals.prefill_seconds_mean.filter(|_| fresh);
                scored.any_mean |= mean.is_some();
                // Its estimate needs no threshold: a match of 1 % saves 1 % (the PD document names `AIBRIX_MIN_MATCH_PCT`
                // for the other two policies only).
                let cached = if fate == Fate::LoadOnly { 0 } else { matches.raw(id).unwrap_or(0) };
                conductor::score(count(id), mean, request.prefix_tokens, cached)
            }
            PrefillPolicy::TokenLoad => token_load::load(state.load.total_tokens(context.now), knobs),
            PrefillPolicy::HybridCacheLoad => {
                let load = token_load::load(state.load.total_tokens(context.now), knobs);
                token_load::hybrid(load, percent, knobs.hybrid_cache_load_factor)
            }
        };
        // Only knobs out of their range can make these; no roleset may lose its candidate over them.
        let score = if score.is_nan() { count(id) } else { score.clamp(-CEILING, CEILING) };
        scored.max = scored.max.max(score);
        scored.fates.push((fate, Some(score)));
        if let Some(best) = scored.best.get_mut(candidate.roleset) {
            best.offer(score, id, rng);
        }
    }
    scored
}
