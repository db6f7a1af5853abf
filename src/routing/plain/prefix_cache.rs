//! `prefix-cache`: the pod that holds most of the prompt, unless it is too busy (reference gateway, section 10).
//!
//! - When requests in flight differ by more than [`MAX_SPREAD`], only the pods with the fewest compete.
//! - Otherwise a match counts on pods that are not [`Busy`] by the knob of the prefill policy; with no match there, the
//!   fewest requests win.

use super::super::busy::Busy;

/// Largest difference of requests in flight that lets a match count.
const MAX_SPREAD: f64 = 8.0;
/// Score without a match; a full match scores 0.
const NO_MATCH: f64 = 100.0;
/// Score of a pod that cannot win.
const OUT: f64 = 200.0;

/// Scores by requests in flight and match in percent; ties are meant to be broken by the fewest requests.
pub(super) fn scores(counts: &[f64], percent: impl Fn(usize) -> u8, factor: f64) -> Vec<f64> {
    let (min, max) = counts.iter().fold((f64::INFINITY, 0.0_f64), |(min, max), n| (min.min(*n), max.max(*n)));
    let busy = Busy::above(counts.iter().copied(), factor);
    let uneven = max - min > MAX_SPREAD;
    let score = |(id, count): (usize, &f64)| match uneven {
        true if *count > min => OUT,
        false if busy.is(*count) => NO_MATCH,
        _ => NO_MATCH - f64::from(percent(id).min(100)),
    };
    counts.iter().enumerate().map(score).collect()
}
