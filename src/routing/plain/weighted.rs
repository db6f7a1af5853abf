//! Combinations `a:2,b`: the scores of each member, normalised to 0..=1 over the candidates, times its weight, summed up.
//! Lower is better. A member whose scores are all alike has no say.

use super::missing::MissingSignals;
use super::view::View;
use super::{Context, Request, Weights, scores as scores_of};
use crate::rng::Rng;

/// One score per view, at most the sum of the weights.
pub(super) fn scores(
    weights: Weights,
    views: &[View<'_>],
    request: Request<'_>,
    context: Context<'_>,
    rng: &mut Rng,
    missing: &mut MissingSignals,
) -> Vec<f64> {
    let mut sums = vec![0.0; views.len()];
    for (member, weight) in weights.members() {
        let scores = scores_of(member, views, request, context, rng, missing);
        for (sum, share) in sums.iter_mut().zip(normalised(&scores)) {
            *sum += f64::from(weight) * share;
        }
    }
    sums
}

/// `(score − min) / (max − min)`; 0 for all when they are equal.
fn normalised(scores: &[f64]) -> impl Iterator<Item = f64> {
    let bounds = |(min, max): (f64, f64), score: &f64| (min.min(*score), max.max(*score));
    let (min, max) = scores.iter().fold((f64::INFINITY, f64::NEG_INFINITY), bounds);
    let range = max - min;
    scores.iter().map(move |score| if range > 0.0 { (score - min) / range } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_spread_over_their_range() {
        for (scores, expected) in [
            (vec![], vec![]),
            (vec![7.0], vec![0.0]),
            (vec![7.0, 7.0], vec![0.0, 0.0]),
            (vec![10.0, 20.0, 12.5], vec![0.0, 1.0, 0.25]),
            (vec![0.0, 1e30], vec![0.0, 1.0]),
        ] {
            assert_eq!(normalised(&scores).collect::<Vec<_>>(), expected, "{scores:?}");
        }
    }
}
