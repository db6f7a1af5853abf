//! The load-imbalance gate ahead of all strategies but `pd`: when requests in flight are too far apart, only the pods with
//! the fewest compete.
//!
//! The reference gateway applies it to all strategies but `pd` and `slo*`, its releases before September 2026 to
//! `prefix-cache` and `prefix-cache-preble` only.

use crate::knobs::GateKnobs;

/// The candidates that may compete, by their requests in flight; `None` = all of them.
pub(super) fn keep(counts: impl Iterator<Item = f64> + Clone, knobs: GateKnobs) -> Option<Vec<usize>> {
    let (mut min, mut max, mut sum, mut pods) = (f64::INFINITY, 0.0_f64, 0.0, 0usize);
    for count in counts.clone() {
        (min, max, sum, pods) = (min.min(count), max.max(count), sum + count, pods + 1);
    }
    let apart = pods > 1 && max - min > knobs.spread as f64;
    if !apart || !knobs.factor.is_none_or(|factor| pods < 3 || max > factor * ((sum - max) / (pods - 1) as f64 + 1.0)) {
        return None;
    }
    Some(counts.enumerate().filter(|(_, count)| *count <= min).map(|(id, _)| id).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_by_hand() {
        let by = |spread, factor| GateKnobs { spread, factor };
        let plain = GateKnobs::default();
        for (counts, knobs, expected) in [
            (vec![], plain, None),
            (vec![99.0], plain, None),
            // A difference of 8 is none, one above is.
            (vec![0.0, 8.0], plain, None),
            (vec![0.0, 9.0], plain, Some(vec![0])),
            (vec![0.0, 8.5], plain, Some(vec![0])),
            (vec![3.0, 12.0, 3.0, 4.0], plain, Some(vec![0, 2])),
            (vec![0.0, 17.0], by(16, None), Some(vec![0])),
            (vec![0.0, 16.0], by(16, None), None),
            // Two pods are not asked for the factor; of three, 12 > 2·(5 + 1) does not hold, 13 does.
            (vec![5.0, 14.0], by(8, Some(2.0)), Some(vec![0])),
            (vec![3.0, 7.0, 12.0], by(8, Some(2.0)), None),
            (vec![3.0, 7.0, 13.0], by(8, Some(2.0)), Some(vec![0])),
            (vec![3.0, 7.0, 12.0], by(8, None), Some(vec![0])),
        ] {
            assert_eq!(keep(counts.iter().copied(), knobs), expected, "{counts:?} {knobs:?}");
        }
    }
}
