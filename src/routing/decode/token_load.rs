//! Decode policy `token_load` (the PD document, "Decode side").

use super::Facts;

/// Mean generation rate per running request over the pods that have one, tokens per second, and over how many.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    sum: f64,
    pods: f64,
}

impl Rates {
    /// Over all decode candidates, also those that a fast path has left out.
    pub(super) fn of<'a>(facts: impl IntoIterator<Item = &'a Facts>) -> Rates {
        facts
            .into_iter()
            .filter_map(rate)
            .fold(Rates::default(), |rates, rate| Rates { sum: rates.sum + rate, pods: rates.pods + 1.0 })
    }

    /// The pod's own rate, else the mean of the others, else 0.
    fn for_pod(self, facts: &Facts) -> f64 {
        rate(facts).unwrap_or(if self.pods > 0.0 { self.sum / self.pods } else { 0.0 })
    }
}

/// Tokens per second and running request: the engine's throughput over its running requests.
fn rate(facts: &Facts) -> Option<f64> {
    match (facts.throughput, facts.running) {
        (Some(throughput), Some(running)) if throughput > 0.0 && running > 0.0 => Some(throughput / running),
        _ => None,
    }
}

/// Estimated output of the outstanding requests so far, tokens: `rate · Σ age`.
pub(super) fn generated(facts: &Facts, rates: Rates) -> f64 {
    if facts.open_seconds > 0.0 { rates.for_pod(facts) * facts.open_seconds } else { 0.0 }
}

/// Charged prompt tokens plus, with `growth`, the estimated output of the outstanding requests so far.
pub(super) fn score(facts: &Facts, rates: Rates, growth: bool) -> f64 {
    facts.tokens + if growth { generated(facts, rates) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formula() {
        let facts = |tokens, open_seconds, throughput, running| Facts {
            throughput,
            running,
            tokens,
            open_seconds,
            ..Facts::default()
        };
        let all = [
            facts(100.0, 10.0, Some(200.0), Some(4.0)), // 50 per request
            facts(300.0, 1.0, Some(100.0), Some(1.0)),  // 100 per request
            facts(0.0, 4.0, None, Some(3.0)),           // the mean of the others: 75
            facts(0.0, 4.0, Some(90.0), Some(0.0)),     // nothing running: the mean
            facts(7.0, 0.0, Some(90.0), Some(3.0)),     // nothing outstanding: no output
        ];
        let rates = Rates::of(&all[..3]);
        for (facts, expected) in all.iter().zip([600.0, 400.0, 300.0, 300.0, 7.0]) {
            assert!((score(facts, rates, true) - expected).abs() < 1e-9, "{facts:?}");
            assert!((score(facts, rates, false) - facts.tokens).abs() < 1e-9, "{facts:?}");
        }
        assert!((score(&all[2], Rates::default(), true)).abs() < 1e-9, "no rate is known");
    }
}
