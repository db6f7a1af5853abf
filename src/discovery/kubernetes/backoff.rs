//! How long to wait before the API server is asked again. Pure.

use std::time::Duration;

use crate::rng::Rng;

/// Doubles the wait with each failure, up to a bound; half of it is chance, so that replicas do not come in step.
#[derive(Clone, Debug)]
pub(super) struct Backoff {
    base: Duration,
    failures: u32,
}

impl Backoff {
    pub(super) fn new(base: Duration) -> Backoff {
        Backoff { base, failures: 0 }
    }

    /// The next wait: at least half of what is due, at most `max`, and never less than the API server asked for (of which
    /// at most `max` is granted, too).
    pub(super) fn next(&mut self, max: Duration, asked: Duration, rng: &mut Rng) -> Duration {
        let due = self.base.saturating_mul(1u32.checked_shl(self.failures).unwrap_or(u32::MAX)).min(max);
        self.failures = self.failures.saturating_add(1).min(31);
        due.mul_f64(0.5 + rng.unit() / 2.0).max(asked.min(max))
    }

    /// Failures since the last reset.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// All is well again.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }
}
