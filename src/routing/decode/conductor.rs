//! Decode policy `conductor`: an estimate of the time between tokens (reference section 4.8), milliseconds.

use super::Facts;

/// Assumed for a pod whose throughput is not known.
const ASSUMED_MS: f64 = 20.0;
/// Above this share of used KV cache a pod is under pressure.
const PRESSURE: f64 = 0.9;
/// What pressure multiplies the estimate with.
const PENALTY: f64 = 1.5;

/// `1000 / throughput · (1 + 1 / max(count, 1))`, half as much again under pressure.
pub(super) fn score(facts: &Facts) -> f64 {
    let between = facts.throughput.filter(|rate| *rate > 0.0).map_or(ASSUMED_MS, |rate| 1000.0 / rate);
    let scaled = between * (1.0 + 1.0 / facts.count.max(1.0));
    if 1.0 - facts.free / 100.0 > PRESSURE { scaled * PENALTY } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formula() {
        for (count, throughput, free, expected) in [
            (0.0, None, 100.0, 40.0),
            (1.0, None, 100.0, 40.0),
            (2.0, None, 100.0, 30.0),
            (4.0, Some(100.0), 100.0, 12.5),
            (4.0, Some(0.0), 100.0, 25.0),
            (4.0, Some(100.0), 11.0, 12.5),
            // 90 % used is not yet above 90 %.
            (4.0, Some(100.0), 10.0, 12.5),
            (4.0, Some(100.0), 9.0, 18.75),
            (4.0, Some(100.0), 0.1, 18.75),
        ] {
            let facts = Facts { count, throughput, free, ..Facts::default() };
            assert!((score(&facts) - expected).abs() < 1e-9, "{facts:?}: {}", score(&facts));
        }
    }
}
