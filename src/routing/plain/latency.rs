//! `least-latency`: the pod where this request would be done first, by an estimate in seconds:
//!
//! - queue: requests that are sent there and do not run yet, times the mean prefill time;
//! - prefill: the mean prefill time, as the engine's histogram has it;
//! - decode: [`OUTPUT_TOKENS`] times the time between two tokens of one request, `running / generated tokens per
//!   second`; an engine that runs nothing has no such time yet, so 0.
//!
//! The reference takes three means since the engine's start. Such means hardly move, so it sends everything to one pod
//! until that is long overloaded; queue and batch as they are now do move.

use super::missing::{MissingSignals, Signal};
use super::view::View;

/// Length of the answer that the estimate assumes.
const OUTPUT_TOKENS: f64 = 100.0;

/// Tokens per second below which an engine that runs something has no measured rate: its first requests have only begun.
const MIN_RATE: f64 = 1.0;

/// One estimate per view, and what no candidate knows. A part that no candidate knows is left out for all; a candidate
/// that lacks a part that another knows has no estimate.
pub(super) fn scores(views: &[View<'_>]) -> (Vec<Option<f64>>, MissingSignals) {
    let prefill_known = views.iter().any(|view| view.prefill_seconds.is_some());
    let decode_known = views.iter().any(|view| seconds_per_token(view).is_some());
    let mut missing = MissingSignals::default();
    if !prefill_known {
        missing.add(Signal::PrefillTime);
    }
    if !decode_known {
        missing.add(Signal::Throughput);
    }
    let estimate = |view: &View<'_>| {
        let prefill = if prefill_known { view.prefill_seconds? } else { 0.0 };
        let decode = if decode_known { seconds_per_token(view)? } else { 0.0 };
        Some((1.0 + queued(view)) * prefill + OUTPUT_TOKENS * decode)
    };
    let anything = prefill_known || decode_known;
    (views.iter().map(|view| if anything { estimate(view) } else { None }).collect(), missing)
}

/// Requests ahead of this one: waiting as the engine says, or in flight beyond what it runs, whichever is more.
fn queued(view: &View<'_>) -> f64 {
    let unseen = view.in_flight - view.running.unwrap_or(0.0);
    unseen.max(view.waiting.unwrap_or(0.0)).max(0.0)
}

fn seconds_per_token(view: &View<'_>) -> Option<f64> {
    let (rate, running) = (view.generation_tps?, view.running?);
    if running == 0.0 { Some(0.0) } else { (rate >= MIN_RATE).then(|| running / rate) }
}
