//! Step 5: the pair.

use super::least::Least;
use crate::rng::Rng;

/// The chosen pair, as candidate indices, with its scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Winner {
    pub(super) prefill: usize,
    pub(super) prefill_score: f64,
    pub(super) decode: usize,
    pub(super) decode_score: f64,
    pub(super) total: f64,
    /// Rolesets with that total.
    pub(super) ties: usize,
}

/// The two of one roleset, as candidate indices with their scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Found {
    pub(super) prefill: (usize, f64),
    pub(super) decode: (usize, f64),
}

impl Found {
    fn total(self, (max_prefill, max_decode): (f64, f64)) -> f64 {
        self.prefill.1 / max_prefill + self.decode.1 / max_decode
    }
}

/// `prefill / max_prefill + decode / max_decode` for every roleset that has both; the least wins, ties at random. `mend`
/// may replace the best two of a roleset, given as its index.
pub(super) fn best(
    prefills: &[Least<usize>],
    decodes: &[Least<usize>],
    maxima: (f64, f64),
    mend: impl Fn(usize, Found, &mut Rng) -> Option<Found>,
    rng: &mut Rng,
) -> Option<Winner> {
    let mut least: Least<Winner> = Least::default();
    for (roleset, (prefill, decode)) in prefills.iter().zip(decodes).enumerate() {
        let (Some(prefill), Some(decode)) = (prefill.winner(), decode.winner()) else { continue };
        let Some(found) = mend(roleset, Found { prefill, decode }, rng) else { continue };
        let total = found.total(maxima);
        let ((prefill, prefill_score), (decode, decode_score)) = (found.prefill, found.decode);
        least.offer(total, Winner { prefill, prefill_score, decode, decode_score, total, ties: 1 }, rng);
    }
    let ties = least.ties();
    least.winner().map(|(winner, _)| Winner { ties, ..winner })
}

/// The best two of a roleset that may form a pair, when the best of either side may not with each other.
pub(super) fn best_of_partners<D: Iterator<Item = (usize, f64)>>(
    prefills: impl Iterator<Item = (usize, f64)>,
    decodes: impl Fn() -> D,
    maxima: (f64, f64),
    may: impl Fn(usize, usize) -> bool,
    rng: &mut Rng,
) -> Option<Found> {
    let mut least: Least<Found> = Least::default();
    for prefill in prefills {
        for decode in decodes().filter(|decode| may(prefill.0, decode.0)) {
            let found = Found { prefill, decode };
            least.offer(found.total(maxima), found, rng);
        }
    }
    least.winner().map(|(found, _)| found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(score: f64, id: usize) -> Least<usize> {
        let mut least = Least::default();
        least.offer(score, id, &mut Rng::new(0));
        least
    }

    #[test]
    fn the_least_sum_of_normalised_scores_wins() {
        let prefills = [one(10.0, 0), one(5.0, 1), one(0.0, 2)];
        let decodes = [one(0.0, 10), one(1.0, 11), Least::default()];
        let keep = |_, found: Found, _: &mut Rng| Some(found);
        let winner = best(&prefills, &decodes, (10.0, 4.0), keep, &mut Rng::new(1)).unwrap();
        assert_eq!((winner.prefill, winner.decode, winner.total), (1, 11, 0.75), "roleset 2 has no decode pod");
        assert_eq!(best(&[], &[], (1.0, 1.0), keep, &mut Rng::new(1)), None);
    }

    #[test]
    fn partners_are_looked_for_where_the_best_two_may_not_meet() {
        let (prefills, decodes) = ([(0, 1.0), (1, 2.0), (2, 9.0)], [(0, 1.0), (1, 4.0)]);
        let find = |forbidden: &[(usize, usize)]| {
            let may = |prefill, decode| !forbidden.contains(&(prefill, decode));
            best_of_partners(prefills.into_iter(), || decodes.into_iter(), (10.0, 10.0), may, &mut Rng::new(1))
                .map(|found| (found.prefill.0, found.decode.0))
        };
        assert_eq!(find(&[]), Some((0, 0)));
        assert_eq!(find(&[(0, 0)]), Some((1, 0)));
        assert_eq!(find(&[(0, 0), (1, 0)]), Some((0, 1)));
        assert_eq!(find(&[(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)]), Some((2, 0)));
        assert_eq!(find(&[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]), None);
    }
}
