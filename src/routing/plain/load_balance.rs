//! `load-balance`: the shortest time until what a pod has is done, requests in flight by requests completed per second
//! over the last minute. Of equal ones, the least KV cache in use.
//!
//! A pod without a drain rate counts as an average one (later releases of the reference; the first took 1 per second
//! for it, which beside pods of 0.05 per second is a flood). Without any rate, the fewest requests win.

use super::view::View;

/// One score per view, seconds; requests in flight where no pod has a rate.
pub(super) fn scores(views: &[View<'_>]) -> Vec<f64> {
    let rate = |view: &View<'_>| view.drain_rate.filter(|rate| *rate > 0.0);
    let (sum, known) = views.iter().filter_map(rate).fold((0.0, 0u32), |(sum, known), rate| (sum + rate, known + 1));
    let average = if known > 0 { sum / f64::from(known) } else { 1.0 };
    // A rate so small that nothing ends within centuries is one that a sum can still be made of.
    let seconds = |view: &View<'_>| (view.in_flight / rate(view).unwrap_or(average)).min(f64::from(f32::MAX));
    views.iter().map(seconds).collect()
}

/// What decides between equal scores. An engine that does not say counts as empty, as in the reference.
pub(super) fn tie(view: &View<'_>) -> f64 {
    view.kv_usage.unwrap_or(0.0)
}
