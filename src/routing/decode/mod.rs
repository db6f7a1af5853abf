//! The decode side: what is known about each pod, fast path (step 2), scores (step 4).
//!
//! A pod "has realtime metrics" when its scraped signals are fresh. Its count is our own pending and running requests,
//! those that other replicas publish, and, while the signals are fresh, what the engine runs beyond both. A pod without
//! fresh signals is *cold*: it scores by the cold-start rule as soon as one sibling is fresh. In the spread of counts it
//! takes part once it has had a request through a gateway, so that one that has just started draws no herd.

mod conductor;
mod fast_path;
mod least_request;
mod load_balancing;
mod score;
mod token_load;

use fast_path::fast_path;
pub(super) use score::{Scored, score};

use super::eligibility::Candidate;
use std::time::Duration;

use super::{Considered, Context, DecodeFastPath, Fate, RequestFacts, Terms, explain, together};
use crate::clock::Tick;
use crate::fleet::Pod;
use crate::knobs::{DecodePolicy, PdKnobs};
use crate::rng::Rng;

/// No engine reports more of anything; larger values are cut here, so that sums and ratios stay finite.
const CEILING: f64 = 1e12;
/// Free share of a pod whose KV cache is full, percent: never zero, because it divides.
const FULL: f64 = 0.1;

/// A number that an engine reported, if it is one.
pub(super) fn known(value: Option<f64>) -> Option<f64> {
    value.filter(|value| value.is_finite() && *value >= 0.0).map(|value| value.min(CEILING))
}

/// What decisions look at in a decode pod.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Facts {
    /// Pending and running requests of all replicas that share their loads.
    pub(super) own: f64,
    /// `own`, plus running requests of gateways that share nothing with this one, when fresh.
    pub(super) count: f64,
    /// Signals are fresh.
    pub(super) fresh: bool,
    /// The pod has had a request of ours or of another replica since its engine started.
    pub(super) served: bool,
    /// Generated tokens per second.
    pub(super) throughput: Option<f64>,
    /// Requests completed per second.
    pub(super) drain: Option<f64>,
    /// Free KV cache, whole percent, [`FULL`] at least; 100 when unknown.
    pub(super) free: f64,
    /// Requests that the engine runs, by its own count.
    pub(super) running: Option<f64>,
    /// Prompt tokens charged here by `token_load`.
    pub(super) tokens: f64,
    /// Ages of the requests they belong to, summed up, seconds.
    pub(super) open_seconds: f64,
    /// Age of the signals, when fresh.
    pub(super) metrics_age: Option<Duration>,
}

/// Running requests on a pod of gateways that share nothing with this one; 0 when not known.
pub(super) fn foreign(pod: &Pod, context: Context<'_>) -> f64 {
    let signals = pod.state.signals.load();
    if signals.fresh(context.now, context.max_metric_age) {
        known(Some(signals.foreign_running)).unwrap_or(0.0)
    } else {
        0.0
    }
}

impl Facts {
    /// Reads one pod.
    pub(super) fn read(pod: &Pod, context: Context<'_>) -> Facts {
        let load = &pod.state.load;
        let total = load.total(context.now);
        let own = total.decodes() as f64;
        let ours = Facts {
            own,
            served: total.decodes() > 0 || total.completed > 0,
            count: own,
            free: 100.0,
            tokens: load.total_tokens(context.now).decode as f64,
            open_seconds: load.total_decode_ages(context.now).1,
            ..Facts::default()
        };
        let signals = pod.state.signals.load();
        if !signals.fresh(context.now, context.max_metric_age) {
            return ours;
        }
        Facts {
            count: own + known(Some(signals.foreign_running)).unwrap_or(0.0),
            fresh: true,
            throughput: known(signals.generation_tps),
            drain: known(signals.drain_rate),
            free: known(signals.kv_usage).map_or(100.0, free_percent),
            running: known(signals.running),
            metrics_age: signals.at.map(|at| context.now.since(at)),
            ..ours
        }
    }

    /// Reads all candidates, in their order.
    pub(super) fn read_all(candidates: &[Candidate<'_>], context: Context<'_>) -> Vec<Facts> {
        candidates.iter().map(|candidate| Facts::read(candidate.pod, context)).collect()
    }
}

/// `round(100 − 100·usage)`, half away from zero; nothing left → [`FULL`].
pub(super) fn free_percent(usage: f64) -> f64 {
    let free = (100.0 - 100.0 * usage).round();
    if free > 0.0 { free } else { FULL }
}

/// Tokens that the chosen decode pod is charged: the whole prompt, since it receives all of its KV cache.
pub(super) fn charge(request: &RequestFacts<'_>, knobs: &PdKnobs) -> Option<u64> {
    knobs.decode_policy.charges_tokens().then_some(request.prompt_tokens)
}

/// Step 2 after `ahead` others have gone the same way.
pub(super) fn fast_path_after(
    ahead: usize,
    facts: &[Facts],
    ids: &[usize],
    knobs: &PdKnobs,
    rng: &mut Rng,
) -> Option<(usize, DecodeFastPath)> {
    if ahead == 0 {
        return fast_path(facts, ids, knobs, rng);
    }
    let charge = |facts: &mut Vec<Facts>, (id, _): (usize, _)| {
        if let Some(facts) = facts.get_mut(id) {
            facts.count += 1.0;
        }
    };
    together::after(ahead, &facts.to_vec(), |facts| fast_path(facts, ids, knobs, rng), charge)
}

/// What one more request like the others adds to the score of one of the candidates `ids`.
pub(super) fn step(facts: &[Facts], ids: &[usize], request: &RequestFacts<'_>, knobs: &PdKnobs) -> f64 {
    let remaining = || ids.iter().filter_map(|id| facts.get(*id));
    match knobs.decode_policy {
        DecodePolicy::LoadBalancing => {
            let most = remaining().map(|facts| facts.count).fold(1.0, f64::max);
            known(Some(knobs.decode_weight_running)).unwrap_or(0.0) / most
        }
        DecodePolicy::LeastRequest => 1.0,
        // Its estimate falls with the number of requests, so it is nothing to go by.
        DecodePolicy::Conductor => 0.0,
        DecodePolicy::TokenLoad => {
            let (tokens, open) =
                remaining().fold((0.0, 0.0), |(tokens, open), facts| (tokens + facts.tokens, open + facts.own));
            if open > 0.0 { tokens / open } else { request.prompt_tokens as f64 }
        }
    }
}

/// What an explanation shows of a pod beside its facts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Beside {
    /// Estimated output so far, tokens, where it counts.
    pub(super) generated: f64,
    /// The cold-start rule made the score.
    pub(super) cold_start: bool,
}

impl Facts {
    /// The pod as an explanation shows it; `score` only if it was scored.
    pub(super) fn considered(&self, pod: &Pod, score: Option<f64>, beside: Beside, now: Tick) -> Considered {
        Considered {
            slot: pod.state.slot,
            fate: if score.is_some() { Fate::Scored } else { Fate::LeftOut },
            ledger_age: pod.state.load.tokens.touched().map(|at| now.since(at)),
            score,
            count: self.count,
            metrics_age: self.metrics_age,
            terms: Terms::Decode {
                throughput: self.throughput,
                drain: self.drain,
                free_pct: self.free,
                tokens: self.tokens,
                generated: beside.generated,
                cold_start: beside.cold_start,
            },
        }
    }
}

/// The candidates as an explanation shows them; `scored` goes with `ids`.
pub(super) fn explain(
    candidates: &[Candidate<'_>],
    facts: &[Facts],
    ids: &[usize],
    scored: &Scored,
    now: Tick,
) -> Vec<Considered> {
    let score = |id| explain::found(ids, &scored.scores, id);
    explain::describe(candidates.len(), score, |id| {
        let facts = facts.get(id)?;
        Some(facts.considered(candidates.get(id)?.pod, score(id), scored.beside(facts), now))
    })
}

/// Decode requests per decode pod of each roleset.
pub(super) fn load_per_roleset(candidates: &[Candidate<'_>], facts: &[Facts], rolesets: usize) -> Vec<f64> {
    let mut sums = vec![(0.0, 0u32); rolesets];
    for (candidate, facts) in candidates.iter().zip(facts) {
        if let Some((count, pods)) = sums.get_mut(candidate.roleset) {
            *count += facts.count;
            *pods += 1;
        }
    }
    sums.into_iter().map(|(count, pods)| count / f64::from(pods.max(1))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_cache_is_whole_percent_and_never_zero() {
        for (usage, expected) in [
            (0.0, 100.0),
            (0.004, 100.0),
            (0.005, 100.0),
            (0.006, 99.0),
            (0.5, 50.0),
            (0.994, 1.0),
            (0.996, 0.1),
            (1.0, 0.1),
            (7.0, 0.1),
        ] {
            assert_eq!(free_percent(usage), expected, "{usage}");
        }
    }

    #[test]
    fn only_numbers_are_known() {
        for (value, expected) in [
            (None, None),
            (Some(f64::NAN), None),
            (Some(f64::INFINITY), None),
            (Some(-1.0), None),
            (Some(0.0), Some(0.0)),
            (Some(3.5), Some(3.5)),
            (Some(1e300), Some(CEILING)),
        ] {
            assert_eq!(known(value), expected, "{value:?}");
        }
    }
}
