//! `least-utilization`: the pod that is furthest from its limits.
//!
//! The reference wants an `engine_utilization`, which no engine reports. An engine is full when its KV cache or its
//! batch is: the score is the larger of the two shares, `max(KV usage, (running + waiting) / batch)`. The size of the
//! batch is not reported either: it is taken as vLLM's default, or as the largest number of running requests that a
//! candidate shows, if that is more.

use super::view::View;

/// Sequences that an engine runs at once: vLLM's default `max_num_seqs`.
const BATCH: f64 = 256.0;

/// Batch size of the candidates' engines, as far as one can tell.
pub(super) fn batch(views: &[View<'_>]) -> f64 {
    views.iter().filter_map(|view| view.running).fold(BATCH, f64::max)
}

/// Share of the engine in use; above 1 when requests wait. What is not known of the two is left out.
pub(super) fn score(view: &View<'_>, batch: f64) -> Option<f64> {
    match (view.kv_usage, view.work().map(|work| work / batch)) {
        (Some(cache), Some(slots)) => Some(cache.max(slots)),
        (cache, slots) => cache.or(slots),
    }
}
