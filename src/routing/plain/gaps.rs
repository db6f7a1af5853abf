//! A candidate whose engine does not say what a strategy wants to know, while others' do.
//!
//! To take its score for 0 would send it everything, to leave it out would send it nothing (R47). It is taken for an
//! average engine instead, whose score goes with its load: `mean score · (1 + its requests in flight) / (1 + mean
//! requests in flight)`, both means over the candidates that are known. So a fresh pod beside busy ones is wanted until
//! it has its share: each request that it gets counts at once. For scores the constant of `pd`'s cold-start rule would
//! be of no use, as their units differ.

use super::view::View;

/// The scores with the gaps filled; all 0 when nobody has one. All finite, given finite scores.
pub(super) fn fill(raw: &[Option<f64>], views: &[View<'_>]) -> Vec<f64> {
    let known = || raw.iter().zip(views).filter_map(|(score, view)| Some(((*score)?, view.in_flight)));
    let number = known().count().max(1) as f64;
    let (scores, in_flight) = known().fold((0.0, 0.0), |sum, (score, count)| (sum.0 + score, sum.1 + count));
    let (mean, load) = (scores / number, in_flight / number);
    raw.iter()
        .zip(views)
        .map(|(score, view)| score.unwrap_or_else(|| mean * ((1.0 + view.in_flight) / (1.0 + load))))
        .collect()
}
