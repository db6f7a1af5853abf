//! Strategies other than `pd`: one pod for everything (reference gateway, section 10). One file per strategy.
//!
//! Each strategy is a score per candidate, lower is better; where nothing tells candidates apart, the fewest requests
//! in flight decide, and chance only after that. A combination normalises the scores of each member to 0..=1 and sums
//! them up by weight. `random`, `power-of-two` and `session-affinity` alone do as their names say. Ahead of all of them,
//! the [`gate`] leaves only the least busy over when loads are too far apart.
//!
//! Promises: scores are finite; a signal that some candidates lack neither floods nor starves those (see [`gaps`]); a
//! signal that all lack leaves the number of requests in flight to decide, and is reported ([`MissingSignals`]).

mod busy_time;
mod cache_usage;
mod gaps;
mod latency;
mod load_balance;
mod lora;
mod missing;
mod power_of_two;
mod preble;
mod prefix_cache;
mod session_affinity;
mod throughput;
mod utilization;
mod view;
mod vtc;
mod weighted;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use missing::MissingSignals;
pub use preble::cost as preble_cost;
pub use vtc::weighted_tokens;

pub(super) use self::missing::Signal;
use self::view::View;
use super::explain::{DESCRIBED, describe, singles};
use super::least::Least;
use super::prefill::Matches;
use super::{Affinity, Context, Explanation, Scores, Strategy, Ties, Weights, gate};
use crate::fleet::Pod;
use crate::knobs::PdKnobs;
use crate::load::UserTokens;
use crate::rng::Rng;

/// Requests in flight on a pod: everything this gateway has there and other replicas publish, plus what its engine
/// runs beyond that while its metrics are fresh.
pub(super) fn in_flight(pod: &Pod, context: Context<'_>) -> f64 {
    pod.state.load.total(context.now).in_flight() as f64 + super::decode::foreign(pod, context)
}

/// What strategies look at beside the pods.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    /// The model's name as it was asked for: that of an adapter, perhaps.
    pub(super) model: &'a str,
    /// What ties the request to earlier ones.
    pub(super) affinity: Affinity<'a>,
    /// What its user was given lately.
    pub(super) user: Option<UserTokens>,
    /// Prefix matches of the candidates; none, when the strategy does not look.
    pub(super) matches: &'a Matches,
    /// The knobs of strategies, `min_match_pct` and `standard_deviation_factor` count here too.
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
    /// The gate left only the least busy over.
    pub(super) gated: bool,
}

/// The pod of a strategy other than `pd`; `None` only without candidates. A single pod needs no look at its load.
pub(super) fn pick<'a>(
    pods: &'a [Arc<Pod>],
    strategy: Strategy,
    request: Request<'_>,
    context: Context<'_>,
    rng: &mut Rng,
) -> Option<Pick<'a>> {
    let no_user = strategy == Strategy::VtcBasic && request.user.is_none();
    match strategy {
        _ if pods.len() == 1 => unscored(pods, (0, Scores::default()), false, context),
        Strategy::Random | Strategy::SessionAffinity | Strategy::PowerOfTwo => {
            by_chance(pods, strategy, request, context, rng)
        }
        _ if no_user => by_chance(pods, Strategy::Random, request, context, rng),
        _ => by_score(pods, strategy, request, context, rng),
    }
}

/// A pod that was not chosen by scores.
fn unscored<'a>(
    pods: &'a [Arc<Pod>],
    (index, scores): (usize, Scores),
    gated: bool,
    context: Context<'_>,
) -> Option<Pick<'a>> {
    let first: Vec<&Arc<Pod>> = pods.iter().take(DESCRIBED).collect();
    let explanation = singles(&first, |_| None, context, 1);
    Some(Pick { index, pod: pods.get(index)?, scores, missing: MissingSignals::default(), explanation, gated })
}

fn by_chance<'a>(
    pods: &'a [Arc<Pod>],
    strategy: Strategy,
    request: Request<'_>,
    context: Context<'_>,
    rng: &mut Rng,
) -> Option<Pick<'a>> {
    let count = |pod: &Arc<Pod>| in_flight(pod, context);
    let kept = gate::keep(pods.iter().map(count), request.knobs.strategies.gate);
    let left = kept.as_ref().map_or(pods.len(), Vec::len);
    let place = |id: usize| kept.as_ref().map_or(Some(id), |kept| kept.get(id).copied());
    let pod = |id: usize| place(id).and_then(|id| pods.get(id));
    let (id, scores) = match strategy {
        Strategy::PowerOfTwo => {
            let (id, count) = power_of_two::pick(left, |id| pod(id).map(count), rng)?;
            (id, by_count(count))
        }
        Strategy::SessionAffinity => {
            let sticky = session_affinity::find((0..left).filter_map(pod), request.affinity);
            (sticky.unwrap_or_else(|| rng.below(left)), Scores::default())
        }
        _ => (rng.below(left), Scores::default()),
    };
    unscored(pods, (place(id)?, scores), kept.is_some(), context)
}

fn by_score<'a>(
    pods: &'a [Arc<Pod>],
    strategy: Strategy,
    request: Request<'_>,
    context: Context<'_>,
    rng: &mut Rng,
) -> Option<Pick<'a>> {
    let mut views: Vec<View<'_>> = pods.iter().map(|pod| View::read(pod, context)).collect();
    let kept = gate::keep(views.iter().map(|view| view.in_flight), request.knobs.strategies.gate);
    let matches;
    let request = match &kept {
        None => request,
        Some(kept) => {
            views = kept.iter().filter_map(|id| views.get(*id).cloned()).collect();
            matches = request.matches.only(kept);
            Request { matches: &matches, ..request }
        }
    };
    let mut missing = MissingSignals::default();
    let scores = scores(strategy, &views, request, context, rng, &mut missing);
    let tie: fn(&View<'_>) -> f64 = match strategy {
        Strategy::LoadBalance => load_balance::tie,
        _ => |view| view.in_flight,
    };
    let leaders = leaders(&scores, &views, tie, rng);
    let (id, _) = leaders.winner()?;
    let view = views.get(id)?;
    let any_fresh = views.iter().any(|view| view.metrics_age.is_some());
    let explanation = Explanation {
        decodes: describe(
            views.len(),
            |id| scores.get(id).copied(),
            |id| Some(views.get(id)?.considered(scores.get(id).copied()?, any_fresh)),
        ),
        ties: Ties { total: leaders.ties(), ..Ties::default() },
        ..Explanation::default()
    };
    let cold_start = any_fresh && view.metrics_age.is_none();
    let index = kept.as_ref().map_or(Some(id), |kept| kept.get(id).copied())?;
    let scores = Scores { decode: scores.get(id).copied(), cold_start, ..by_count(view.in_flight) };
    Some(Pick { index, pod: pods.get(index)?, scores, missing, explanation, gated: kept.is_some() })
}

fn by_count(count: f64) -> Scores {
    Scores { decode: Some(count), decode_count: count, ..Scores::default() }
}

/// The scores of a strategy, one per view, all finite.
fn scores(
    strategy: Strategy,
    views: &[View<'_>],
    request: Request<'_>,
    context: Context<'_>,
    rng: &mut Rng,
    missing: &mut MissingSignals,
) -> Vec<f64> {
    let mut filled = |raw: Vec<Option<f64>>, signal| {
        if raw.iter().all(Option::is_none) {
            missing.add(signal);
        }
        gaps::fill(&raw, views)
    };
    let knobs = &request.knobs.strategies;
    match strategy {
        // It does not score single pods against each other.
        Strategy::Pd => vec![0.0; views.len()],
        Strategy::Weighted(weights) => weighted::scores(weights, views, request, context, rng, missing),
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
        Strategy::LoadBalance => load_balance::scores(views),
        Strategy::VtcBasic => vtc::scores(views, request.user, &knobs.vtc, rng),
        Strategy::Preble => {
            preble::scores(views, |id| request.matches.raw(id).unwrap_or(0), context.now, &knobs.preble)
        }
        Strategy::LoraAffinity => lora::scores(views, request.model, knobs.lora_threshold.0, rng),
    }
}

/// 0 for the chosen one and 1 for all others; all alike when nobody is chosen.
fn vote(candidates: usize, chosen: Option<usize>) -> Vec<f64> {
    (0..candidates).map(|id| if chosen.is_none_or(|chosen| chosen == id) { 0.0 } else { 1.0 }).collect()
}

/// The least score; of several, the least of `tie` (the fewest requests in flight, mostly); of several, chance.
fn leaders(scores: &[f64], views: &[View<'_>], tie: fn(&View<'_>) -> f64, rng: &mut Rng) -> Least<usize> {
    let min = scores.iter().copied().fold(f64::INFINITY, f64::min);
    let mut leaders = Least::default();
    for (id, (score, view)) in scores.iter().zip(views).enumerate() {
        if *score <= min {
            leaders.offer(tie(view), id, rng);
        }
    }
    leaders
}
