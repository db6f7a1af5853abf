//! The outlier rule of step 3.
//!
//! The PD document skips a pod whose count is more than f standard deviations above the mean. Taken literally on a few
//! pods with a few requests that goes wrong: of {0, 0, 1} it skips the busy one. The rule here:
//!
//! - A pod is an outlier when `count > mean + f·σ` (σ is the sample standard deviation over the remaining candidates,
//!   0 for one) **and** `count − min ≥ 4`: a handful of requests is noise. Of two pods neither can be an outlier by a
//!   factor of 1; a real imbalance of two is the fast path's business.
//! - An outlier is skipped, unless its roleset has outliers only. Then the least loaded of them stay, so that no
//!   roleset loses its last prefill pod however good its decode side is, but they compete on load alone: their prefix
//!   match does not count. The match is what made them hot.

use super::super::busy::Busy;
use super::super::eligibility::Candidate;

/// What becomes of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Scored.
    Keep,
    /// Scored without its prefix match.
    LoadOnly,
    /// Not scored.
    Skip,
}

/// One verdict for each of `ids`, in their order. `ids` are grouped by roleset.
pub(super) fn judge(candidates: &[Candidate<'_>], counts: &[u64], ids: &[usize], factor: f64) -> Vec<Verdict> {
    let items: Vec<(usize, u64)> =
        ids.iter().filter_map(|id| Some((candidates.get(*id)?.roleset, counts.get(*id).copied()?))).collect();
    judge_counts(&items, factor)
}

/// The same on (roleset, count).
fn judge_counts(items: &[(usize, u64)], factor: f64) -> Vec<Verdict> {
    let mut verdicts = vec![Verdict::Keep; items.len()];
    let busy = Busy::above(items.iter().map(|(_, count)| *count as f64), factor);
    let outlier = |count: u64| busy.is(count as f64);
    for (group, group_verdicts) in items.chunk_by(|a, b| a.0 == b.0).scan(0, |start, group| {
        let range = *start..*start + group.len();
        *start = range.end;
        Some((group, range))
    }) {
        let least = group.iter().map(|(_, count)| *count).min().unwrap_or(0);
        for ((_, count), verdict) in group.iter().zip(verdicts.get_mut(group_verdicts).into_iter().flatten()) {
            *verdict = match (outlier(*count), outlier(least)) {
                (false, _) => Verdict::Keep,
                (true, true) if *count == least => Verdict::LoadOnly,
                (true, _) => Verdict::Skip,
            };
        }
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Verdict::{Keep, LoadOnly, Skip};
    use super::*;

    #[test]
    fn table() {
        let one = |counts: &[u64]| counts.iter().map(|c| (0, *c)).collect::<Vec<_>>();
        let own = |counts: &[u64]| counts.iter().copied().enumerate().collect::<Vec<_>>();
        for (items, factor, expected) in [
            (vec![], 1.0, vec![]),
            (one(&[9]), 1.0, vec![Keep]),
            (one(&[0, 100]), 1.0, vec![Keep, Keep]),
            (one(&[0, 100]), 0.5, vec![Keep, Skip]),
            (one(&[0, 0, 1]), 1.0, vec![Keep, Keep, Keep]),
            (one(&[0, 0, 3]), 1.0, vec![Keep, Keep, Keep]),
            (one(&[0, 0, 4]), 1.0, vec![Keep, Keep, Skip]),
            (one(&[10, 10, 13]), 1.0, vec![Keep, Keep, Keep]),
            (one(&[10, 10, 14]), 1.0, vec![Keep, Keep, Skip]),
            (one(&[0, 0, 4]), 2.0, vec![Keep, Keep, Keep]),
            (one(&[5, 5, 5]), 0.0, vec![Keep, Keep, Keep]),
            (own(&[0, 0, 0, 9]), 1.0, vec![Keep, Keep, Keep, LoadOnly]),
            (vec![(0, 0), (0, 0), (0, 0), (1, 9), (1, 9)], 1.0, vec![Keep, Keep, Keep, LoadOnly, LoadOnly]),
            (
                vec![(0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (1, 9), (1, 12)],
                1.0,
                vec![Keep, Keep, Keep, Keep, Keep, LoadOnly, Skip],
            ),
            (one(&[0, 0, 9]), f64::NAN, vec![Keep, Keep, Keep]),
            (one(&[0, 0, 9]), f64::INFINITY, vec![Keep, Keep, Keep]),
        ] {
            assert_eq!(judge_counts(&items, factor), expected, "{items:?} by {factor}");
        }
    }

    proptest! {
        #[test]
        fn never_empties_a_roleset(
            groups in proptest::collection::vec(proptest::collection::vec(0u64..200, 1..5), 1..8),
            factor in 0.0f64..3.0,
        ) {
            let items: Vec<(usize, u64)> = groups.iter().enumerate()
                .flat_map(|(roleset, counts)| counts.iter().map(move |count| (roleset, *count)))
                .collect();
            let verdicts = judge_counts(&items, factor);
            prop_assert_eq!(verdicts.len(), items.len());
            for roleset in 0..groups.len() {
                prop_assert!(items.iter().zip(&verdicts).any(|(item, v)| item.0 == roleset && *v != Skip));
            }
            let min = items.iter().map(|i| i.1).min().unwrap();
            for (item, verdict) in items.iter().zip(&verdicts) {
                prop_assert!(*verdict == Keep || item.1 >= min + 4);
            }
        }
    }
}
