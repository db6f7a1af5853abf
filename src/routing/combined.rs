//! Combined pods: the fallback, and "PD is loaded while a combined pod is idle" (reference gateway, section 4.3).

use std::sync::Arc;

use super::eligibility::Candidate;
use super::least::least;
use super::{Context, Explanation, explain};
use crate::fleet::Pod;
use crate::rng::Rng;

/// Below this score a combined pod is idle.
const IDLE: f64 = 0.25;
/// Above this score a prefill or decode pod is loaded.
const LOADED: f64 = 1.0;
/// Least drain rate, requests per second: the floor of the reference gateway's query.
const MIN_DRAIN: f64 = 0.01;

/// How long the queue in front of a pod is.
///
/// With a drain rate: queued requests / drain rate, that is, seconds, as in the reference gateway. Engines that report
/// no drain rate would make that a division by nothing, which turns one waiting request into "infinitely loaded" and an
/// empty queue into "not a number"; for them the queue is measured against the batch it waits for: queued / running.
/// An empty queue is 0 in both. `None`: the pod has no fresh queue metrics, so it is neither idle nor loaded.
///
/// `unseen` counts requests that the gateways have sent and the engine has not reported yet.
fn pressure(pod: &Pod, context: Context<'_>, unseen: bool) -> Option<f64> {
    let signals = pod.state.signals.load();
    if !signals.fresh(context.now, context.max_metric_age) {
        return None;
    }
    let number = |value: Option<f64>| value.filter(|v| v.is_finite() && *v >= 0.0);
    let queues = [signals.waiting, signals.prefill_prealloc_queue, signals.decode_prealloc_queue];
    if queues.iter().all(|queue| number(*queue).is_none()) {
        return None;
    }
    let mut queued: f64 = queues.iter().filter_map(|queue| number(*queue)).sum();
    let running = number(signals.running).unwrap_or(0.0);
    if unseen {
        // Between two scrapes a burst would otherwise see the same idle pod again and again.
        let sent =
            pod.state.load.total(context.now).in_flight() as f64 + number(Some(signals.foreign_running)).unwrap_or(0.0);
        queued += (sent - running - queued).max(0.0);
    }
    if queued == 0.0 {
        return Some(0.0);
    }
    let score = match number(signals.drain_rate) {
        Some(rate) => queued / rate.max(MIN_DRAIN),
        None => queued / running.max(1.0),
    };
    Some(score)
}

/// The combined pod to use instead of a pair: the one with the shortest queue, when one is idle and some prefill or
/// decode pod is loaded. Equal queues: the one with fewer requests in flight, then at random.
pub(super) fn idle_instead_of_loaded<'a>(
    combined: &[&'a Arc<Pod>],
    prefills: &[Candidate<'_>],
    decodes: &[Candidate<'_>],
    context: Context<'_>,
    rng: &mut Rng,
) -> Option<(&'a Arc<Pod>, f64, Explanation)> {
    let scored: Vec<(f64, &Arc<Pod>)> =
        combined.iter().filter_map(|pod| Some((pressure(pod, context, true)?, *pod))).collect();
    let best = scored.iter().map(|(score, _)| *score).reduce(f64::min).filter(|score| *score < IDLE)?;
    let loaded =
        |candidate: &Candidate<'_>| pressure(candidate.pod, context, false).is_some_and(|score| score > LOADED);
    if !prefills.iter().any(loaded) && !decodes.iter().any(loaded) {
        return None;
    }
    let ties = scored.iter().filter(|(score, _)| *score == best);
    let count = ties.clone().count();
    let (pod, _) = least(ties.map(|(_, pod)| (pod.state.load.total(context.now).in_flight() as f64, *pod)), rng)?;
    let pods: Vec<&Arc<Pod>> = scored.iter().map(|(_, pod)| *pod).collect();
    let explanation = explain::singles(&pods, |id| scored.get(id).map(|(score, _)| *score), context, count);
    Some((pod, best, explanation))
}

/// A combined pod because nothing else fits: uniformly at random (reference gateway, section 4.2).
pub(super) fn any<'a>(combined: &[&'a Arc<Pod>], rng: &mut Rng) -> Option<&'a Arc<Pod>> {
    combined.get(rng.below(combined.len())).copied()
}
