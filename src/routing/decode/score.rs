//! Step 4: scores of the decode candidates.

use super::load_balancing::Norms;
use super::token_load::Rates;
use super::{Beside, Facts, conductor, least_request, load_balancing, token_load};
use crate::knobs::{DecodePolicy, PdKnobs};

/// Least value that scores are normalised with.
const MIN_MAX: f64 = 0.01;

/// Scores of the candidates, all finite.
#[derive(Clone, Debug)]
pub(in super::super) struct Scored {
    /// One per id, in the order of the ids.
    pub(in super::super) scores: Vec<f64>,
    /// The largest, at least 0.01: what scores are normalised with.
    pub(in super::super) max: f64,
    /// The candidates without fresh metrics scored by the cold-start rule.
    pub(in super::super) cold_start: bool,
    /// Generation rates, when output growth counts.
    rates: Option<Rates>,
}

impl Scored {
    /// What an explanation shows of a candidate beside its facts.
    pub(in super::super) fn beside(&self, facts: &Facts) -> Beside {
        Beside {
            generated: self.rates.map_or(0.0, |rates| token_load::generated(facts, rates)),
            cold_start: self.cold_start && !facts.fresh,
        }
    }
}

/// Scores the candidates `ids`, indices into `facts`.
///
/// - Cold start: when some candidate is fresh, one that is not scores `1.0 +` its own outstanding requests. When none
///   is, all are scored by the policy, from our own counts. `token_load` needs no metrics, so it has no cold start.
/// - Not a number (weights can do that): `load_balancing` instead, then the count alone. No candidate is lost.
/// - Infinite: twice the largest finite score before anything is normalised, so that it is the worst and the others
///   still differ.
pub(in super::super) fn score(facts: &[Facts], ids: &[usize], knobs: &PdKnobs) -> Scored {
    let remaining = || ids.iter().filter_map(|id| facts.get(*id));
    let norms = Norms::of(remaining());
    let any_fresh = remaining().any(|facts| facts.fresh);
    let counts_tokens = knobs.decode_policy == DecodePolicy::TokenLoad;
    let rates = if counts_tokens { Rates::of(facts) } else { Rates::default() };
    let mut scores: Vec<f64> = remaining()
        .map(|facts| {
            if any_fresh && !facts.fresh && !counts_tokens {
                return 1.0 + facts.own;
            }
            let score = match knobs.decode_policy {
                DecodePolicy::LoadBalancing => load_balancing::score(facts, norms, knobs),
                DecodePolicy::LeastRequest => least_request::score(facts),
                DecodePolicy::Conductor => conductor::score(facts),
                DecodePolicy::TokenLoad => token_load::score(facts, rates, knobs.decode_output_growth),
            };
            if score.is_nan() { load_balancing::score(facts, norms, knobs) } else { score }
        })
        .zip(remaining())
        .map(|(score, facts)| if score.is_nan() { least_request::score(facts) } else { score })
        .collect();
    let finite = scores.iter().copied().filter(|score| score.is_finite()).fold(MIN_MAX, f64::max);
    // Half of the range is plenty, and doubling it stays finite.
    let worst = finite.min(f64::MAX / 4.0) * 2.0;
    for score in &mut scores {
        *score = score.clamp(-worst, worst);
    }
    let max = scores.iter().copied().fold(MIN_MAX, f64::max);
    let rates = (counts_tokens && knobs.decode_output_growth).then_some(rates);
    Scored { scores, max, cold_start: any_fresh && !counts_tokens, rates }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(count: f64, fresh: bool) -> Facts {
        Facts { own: count, count, fresh, free: 100.0, ..Facts::default() }
    }

    fn run(facts: &[Facts], knobs: &PdKnobs) -> Scored {
        let ids: Vec<usize> = (0..facts.len()).collect();
        score(facts, &ids, knobs)
    }

    #[test]
    fn cold_start_needs_a_fresh_sibling() {
        let knobs = PdKnobs { decode_policy: DecodePolicy::LeastRequest, ..PdKnobs::default() };
        let scored = run(&[facts(10.0, true), facts(0.0, false), facts(3.0, false)], &knobs);
        assert_eq!((scored.scores, scored.max, scored.cold_start), (vec![10.0, 1.0, 4.0], 10.0, true));
        let scored = run(&[facts(0.0, false), facts(3.0, false)], &knobs);
        assert_eq!((scored.scores, scored.max, scored.cold_start), (vec![0.0, 3.0], 3.0, false));
    }

    #[test]
    fn maximum_has_a_floor() {
        let knobs = PdKnobs { decode_policy: DecodePolicy::LeastRequest, ..PdKnobs::default() };
        assert_eq!(run(&[facts(0.0, true)], &knobs).max, 0.01);
        assert_eq!(run(&[], &knobs).max, 0.01);
    }

    #[test]
    fn what_is_not_a_number_falls_back_to_the_count() {
        let knobs = PdKnobs { decode_weight_running: f64::NAN, ..PdKnobs::default() };
        assert_eq!(run(&[facts(2.0, true), facts(5.0, true)], &knobs).scores, [2.0, 5.0]);
    }

    #[test]
    fn infinity_is_the_worst_and_leaves_the_others_apart() {
        // 0 · ∞ is not a number, so the idle pod falls back; the busy one is infinite.
        let knobs = PdKnobs { decode_weight_running: f64::INFINITY, ..PdKnobs::default() };
        let scored = run(&[facts(0.0, true), facts(2.0, true), facts(3.0, false)], &knobs);
        assert_eq!(scored.scores, [0.0, 8.0, 4.0]);
        assert_eq!(scored.max, 8.0);
    }
}
