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

/// `prefill / max_prefill + decode / max_decode` for every roleset that has both; the least wins, ties at random.
pub(super) fn best(
    prefills: &[Least<usize>],
    max_prefill: f64,
    decodes: &[Least<usize>],
    max_decode: f64,
    rng: &mut Rng,
) -> Option<Winner> {
    let mut least: Least<Winner> = Least::default();
    for (prefill, decode) in prefills.iter().zip(decodes) {
        let (Some((prefill, prefill_score)), Some((decode, decode_score))) = (prefill.winner(), decode.winner()) else {
            continue;
        };
        let total = prefill_score / max_prefill + decode_score / max_decode;
        least.offer(total, Winner { prefill, prefill_score, decode, decode_score, total, ties: 1 }, rng);
    }
    let ties = least.ties();
    least.winner().map(|(winner, _)| Winner { ties, ..winner })
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
        let winner = best(&prefills, 10.0, &decodes, 4.0, &mut Rng::new(1)).unwrap();
        assert_eq!((winner.prefill, winner.decode, winner.total), (1, 11, 0.75), "roleset 2 has no decode pod");
        assert_eq!(best(&[], 1.0, &[], 1.0, &mut Rng::new(1)), None);
    }
}
