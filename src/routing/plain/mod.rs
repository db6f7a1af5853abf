//! Strategies other than `pd`: one pod for everything (reference gateway, section 10). One file per strategy.
//!
//! Each strategy is a score per candidate, lower is better; where nothing tells candidates apart, the fewest requests
//! in flight decide, and chance only after that. A combination normalises the scores of each member to 0..=1 and sums
//! them up by weight. `random`, `power-of-two` and `session-affinity` alone do as their names say.
//!
//! Promises: scores are finite; a signal that some candidates lack neither floods nor starves those (see [`gaps`]); a
//! signal that all lack leaves the number of requests in flight to decide, and is reported ([`MissingSignals`]).

mod busy_time;
mod cache_usage;
mod gaps;
mod latency;
mod missing;
mod power_of_two;
mod prefix_cache;
mod session_affinity;
mod throughput;
mod utilization;
mod view;
mod weighted;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use missing::MissingSignals;

pub(super) use self::missing::Signal;
use self::view::View;
use super::explain::{DESCRIBED, describe, singles};
use super::least::Least;
use super::prefill::Matches;
use super::{Affinity, Context, Explanation, Scores, Strategy, Ties, Weights};
use crate::fleet::Pod;
use crate::knobs::PdKnobs;
use crate::rng::Rng;

/// Requests in flight on a pod: everything this gateway has there and other replicas publish, plus what its engine
/// runs beyond that while its metrics are fresh.
pub(super) fn in_flight(pod: &Pod, context: Context<'_>) -> f64 {
    pod.state.load.total(context.now).in_flight() as f64 + super::decode::foreign(pod, context)
}

/// What strategies look at beside the pods.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    /// What ties the request to earlier ones.
    pub(super) affinity: Affinity<'a>,
    /// Prefix matches of the candidates; none, when the strategy does not look.
    pub(super) matches: &'a Matches,
    /// `min_match_pct` and `standard_deviation_factor` count here too.
    pub(super) knobs: &'a PdKnobs,
}

/// The pod of a strategy.
#[derive(Clone, Debug)]
pub(super) struct Pick<'a> {
    /// Its place among the candidates.
    pub(super) index: usize,
    /// The pod.
    pub(super) pod: &'a Arc<Pod>,
    /// Its score, if one was needed.
    pub(super) scores: Scores,
    /// Signals that no candidate had.
    pub(super) missing: MissingSignals,
    /// Who was considered; without scores where none was needed.
    pub(super) explanation: Explanation,
}

/// The pod of a strategy other than `pd`; `None` only without candidates. A single pod needs no look at its load.
pub(super) fn pick<'a>(
    pods: &'a [Arc<Pod>],
    strategy: Strategy,
    request: Request<'_>,
    context: Context<'_>,
    rng: &mut Rng,
) -> Option<Pick<'a>> {
    let mut missing = MissingSignals::default();
    let mut explanation = None;
    let (index, scores) = match strategy {
        _ if pods.len() == 1 => (0, Scores::default()),
        Strategy::Random => (rng.below(pods.len()), Scores::default()),
        Strategy::SessionAffinity => {
            let sticky = session_affinity::find(pods, request.affinity);
            (sticky.unwrap_or_else(|| rng.below(pods.len())), Scores::default())
        }
        Strategy::PowerOfTwo => {
            let (index, count) =
                power_of_two::pick(pods.len(), |id| pods.get(id).map(|pod| in_flight(pod, context)), rng)?;
            (index, by_count(count))
        }
        _ => {
            let views: Vec<View<'_>> = pods.iter().map(|pod| View::read(pod, context)).collect();
            let scores = match strategy {
                Strategy::Weighted(weights) => weighted::scores(weights, &views, request, rng, &mut missing),
                single => scores(single, &views, request, rng, &mut missing),
            };
            let leaders = leaders(&scores, &views, rng);
            let (index, count) = leaders.winner()?;
            let any_fresh = views.iter().any(|view| view.metrics_age.is_some());
            explanation = Some(Explanation {
                decodes: describe(
                    pods.len(),
                    |id| scores.get(id).copied(),
                    |id| Some(views.get(id)?.considered(scores.get(id).copied()?, any_fresh)),
                ),
                ties: Ties { total: leaders.ties(), ..Ties::default() },
                ..Explanation::default()
            });
            let cold_start = any_fresh && views.get(index)?.metrics_age.is_none();
            (index, Scores { decode: scores.get(index).copied(), cold_start, ..by_count(count) })
        }
    };
    let explanation = explanation.unwrap_or_else(|| {
        let first: Vec<&Arc<Pod>> = pods.iter().take(DESCRIBED).collect();
        singles(&first, |_| None, context, 1)
    });
    Some(Pick { index, pod: pods.get(index)?, scores, missing, explanation })
}

fn by_count(count: f64) -> Scores {
    Scores { decode: Some(count), decode_count: count, ..Scores::default() }
}

/// The scores of a single strategy, one per view, all finite.
fn scores(
    strategy: Strategy,
    views: &[View<'_>],
    request: Request<'_>,
    rng: &mut Rng,
    missing: &mut MissingSignals,
) -> Vec<f64> {
    let mut filled = |raw: Vec<Option<f64>>, signal| {
        if raw.iter().all(Option::is_none) {
            missing.add(signal);
        }
        gaps::fill(&raw, views)
    };
    match strategy {
        // Neither scores single pods against each other: see `Strategy::Weighted` and `Weights`.
        Strategy::Pd | Strategy::Weighted(_) => vec![0.0; views.len()],
        Strategy::Random => views.iter().map(|_| rng.unit()).collect(),
        Strategy::LeastRequest => views.iter().map(|view| view.in_flight).collect(),
        Strategy::LeastKvCache | Strategy::LeastGpuCache => {
            filled(views.iter().map(cache_usage::score).collect(), Signal::KvUsage)
        }
        Strategy::LeastBusyTime => filled(views.iter().map(busy_time::score).collect(), Signal::Running),
        Strategy::LeastUtilization => {
            let batch = utilization::batch(views);
            filled(views.iter().map(|view| utilization::score(view, batch)).collect(), Signal::KvUsage)
        }
        Strategy::Throughput => filled(views.iter().map(throughput::score).collect(), Signal::Throughput),
        Strategy::LeastLatency => {
            let (raw, lacking) = latency::scores(views);
            missing.extend(lacking);
            gaps::fill(&raw, views)
        }
        Strategy::PowerOfTwo => {
            let chosen = power_of_two::pick(views.len(), |id| views.get(id).map(|view| view.in_flight), rng);
            vote(views.len(), chosen.map(|(index, _)| index))
        }
        Strategy::PrefixCache => {
            let counts: Vec<f64> = views.iter().map(|view| view.in_flight).collect();
            let percent = |id| request.matches.counted(id, request.knobs);
            prefix_cache::scores(&counts, percent, request.knobs.standard_deviation_factor)
        }
        Strategy::SessionAffinity => {
            vote(views.len(), session_affinity::find(views.iter().map(|view| view.pod), request.affinity))
        }
    }
}

/// 0 for the chosen one and 1 for all others; all alike when nobody is chosen.
fn vote(candidates: usize, chosen: Option<usize>) -> Vec<f64> {
    (0..candidates).map(|id| if chosen.is_none_or(|chosen| chosen == id) { 0.0 } else { 1.0 }).collect()
}

/// The least score; of several, the fewest requests in flight; of several, chance.
fn leaders(scores: &[f64], views: &[View<'_>], rng: &mut Rng) -> Least<usize> {
    let min = scores.iter().copied().fold(f64::INFINITY, f64::min);
    let mut leaders = Least::default();
    for (id, (score, view)) in scores.iter().zip(views).enumerate() {
        if *score <= min {
            leaders.offer(view.in_flight, id, rng);
        }
    }
    leaders
}
