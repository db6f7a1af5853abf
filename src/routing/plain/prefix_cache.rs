//! `prefix-cache`: the pod that holds most of the prompt, unless it is too busy (reference gateway, section 10).
//!
//! A match counts on pods that are not [`Busy`] by the knob of the prefill policy; with no match there, the fewest requests
//! win. When requests in flight are far apart, the gate has left only the pods with the fewest over.

use super::super::busy::Busy;

/// Score without a match; a full match scores 0.
const NO_MATCH: f64 = 100.0;

/// Scores by requests in flight and match in percent; ties are meant to be broken by the fewest requests.
pub(super) fn scores(counts: &[f64], percent: impl Fn(usize) -> u8, factor: f64) -> Vec<f64> {
    let busy = Busy::above(counts.iter().copied(), factor);
    let score = |(id, count): (usize, &f64)| {
        if busy.is(*count) { NO_MATCH } else { NO_MATCH - f64::from(percent(id).min(100)) }
    };
    counts.iter().enumerate().map(score).collect()
}
