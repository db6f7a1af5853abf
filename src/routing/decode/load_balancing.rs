//! Decode policy `load_balancing`.

use super::Facts;
use crate::knobs::PdKnobs;

/// Maxima over all remaining candidates, at least 1 each: what a pod's values are normalised with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Norms {
    pub(super) count: f64,
    pub(super) throughput: f64,
    pub(super) free: f64,
}

impl Norms {
    pub(super) fn of<'a>(facts: impl IntoIterator<Item = &'a Facts>) -> Norms {
        facts.into_iter().fold(Norms { count: 1.0, throughput: 1.0, free: 1.0 }, |norms, facts| Norms {
            count: norms.count.max(facts.count),
            throughput: norms.throughput.max(facts.throughput.unwrap_or(0.0)),
            free: norms.free.max(facts.free),
        })
    }
}

/// `(w_run · count/max + w_thru · (1 − throughput/max)) / (free/max)` (the PD document, step 4). A throughput that is
/// not known counts as 0.
pub(super) fn score(facts: &Facts, norms: Norms, knobs: &PdKnobs) -> f64 {
    let requests = facts.count / norms.count;
    let throughput = facts.throughput.unwrap_or(0.0) / norms.throughput;
    let free = facts.free / norms.free;
    (knobs.decode_weight_running * requests + knobs.decode_weight_throughput * (1.0 - throughput)) / free
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formula() {
        let facts =
            |count, throughput, free| Facts { own: count, count, fresh: true, throughput, free, ..Facts::default() };
        let knobs = PdKnobs { decode_weight_running: 2.0, decode_weight_throughput: 3.0, ..PdKnobs::default() };
        let norms = Norms { count: 10.0, throughput: 1000.0, free: 80.0 };
        for (facts, expected) in [
            (facts(0.0, Some(1000.0), 80.0), 0.0),
            (facts(0.0, None, 80.0), 3.0),
            (facts(10.0, Some(1000.0), 80.0), 2.0),
            (facts(5.0, Some(500.0), 40.0), 5.0),
            (facts(10.0, Some(0.0), 0.1), 4000.0),
        ] {
            let score = score(&facts, norms, &knobs);
            assert!((score - expected).abs() < 1e-9, "{facts:?}: {score}");
        }
    }

    #[test]
    fn norms_are_at_least_one() {
        assert_eq!(Norms::of(&[]), Norms { count: 1.0, throughput: 1.0, free: 1.0 });
        let idle = Facts { fresh: true, throughput: Some(0.0), free: 0.1, ..Facts::default() };
        assert_eq!(Norms::of(&[idle]), Norms { count: 1.0, throughput: 1.0, free: 1.0 });
        let busy = Facts { own: 1.0, count: 7.0, fresh: true, throughput: Some(99.0), free: 60.0, ..Facts::default() };
        assert_eq!(Norms::of(&[idle, busy]), Norms { count: 7.0, throughput: 99.0, free: 60.0 });
    }
}
