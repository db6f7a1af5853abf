//! How long simulated work takes.

use std::time::Duration;

/// How long work takes. A model with a handful of parameters, not a claim about hardware.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Fixed cost of a prefill.
    pub prefill_base: Duration,
    /// Linear part of a prefill, tokens per second; infinite means free.
    pub prefill_tokens_per_second: f64,
    /// Quadratic part of a prefill: seconds per (1,000 tokens) squared.
    pub prefill_quadratic: f64,
    /// One decode step with one running sequence.
    pub decode_base: Duration,
    /// What each further running sequence adds to a decode step.
    pub decode_per_sequence: Duration,
    /// Fixed cost of a KV transfer.
    pub transfer_base: Duration,
    /// KV transfer time per 1,000 tokens.
    pub transfer_per_1k_tokens: Duration,
    /// Divides every duration above; 10 makes the engine ten times as fast.
    pub speed: f64,
}

impl Timing {
    /// Everything takes no time: for tests of the protocol.
    pub const fn instant() -> Timing {
        Timing {
            prefill_base: Duration::ZERO,
            prefill_tokens_per_second: f64::INFINITY,
            prefill_quadratic: 0.0,
            decode_base: Duration::ZERO,
            decode_per_sequence: Duration::ZERO,
            transfer_base: Duration::ZERO,
            transfer_per_1k_tokens: Duration::ZERO,
            speed: 1.0,
        }
    }

    /// Figures of the order of a 7B model on one accelerator.
    pub const fn typical() -> Timing {
        Timing {
            prefill_base: Duration::from_millis(12),
            prefill_tokens_per_second: 8_000.0,
            prefill_quadratic: 0.0005,
            decode_base: Duration::from_millis(12),
            decode_per_sequence: Duration::from_micros(150),
            transfer_base: Duration::from_millis(3),
            transfer_per_1k_tokens: Duration::from_millis(6),
            speed: 1.0,
        }
    }

    /// The same model, `speed` times as fast.
    #[must_use]
    pub fn faster(mut self, speed: f64) -> Timing {
        self.speed *= speed;
        self
    }

    /// Time to compute `tokens` prompt tokens.
    pub fn prefill(&self, tokens: u32) -> Duration {
        let tokens = f64::from(tokens);
        let thousands = tokens / 1_000.0;
        self.scaled(
            self.prefill_base.as_secs_f64()
                + tokens / self.prefill_tokens_per_second
                + self.prefill_quadratic * thousands * thousands,
        )
    }

    /// Time of one decode step while `running` sequences share the batch.
    pub fn decode_step(&self, running: usize) -> Duration {
        let others = running.saturating_sub(1) as f64;
        self.scaled(self.decode_base.as_secs_f64() + self.decode_per_sequence.as_secs_f64() * others)
    }

    /// Time to pull the KV of `tokens` tokens.
    pub fn transfer(&self, tokens: u32) -> Duration {
        self.scaled(
            self.transfer_base.as_secs_f64() + self.transfer_per_1k_tokens.as_secs_f64() * f64::from(tokens) / 1_000.0,
        )
    }

    fn scaled(&self, seconds: f64) -> Duration {
        Duration::try_from_secs_f64(seconds / self.speed).unwrap_or(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_follow_the_formulas() {
        let timing = Timing {
            prefill_base: Duration::from_millis(10),
            prefill_tokens_per_second: 1_000.0,
            prefill_quadratic: 0.5,
            decode_base: Duration::from_millis(20),
            decode_per_sequence: Duration::from_millis(1),
            transfer_base: Duration::from_millis(2),
            transfer_per_1k_tokens: Duration::from_millis(8),
            speed: 2.0,
        };
        assert_eq!(timing.prefill(0), Duration::from_millis(5));
        assert_eq!(timing.prefill(2_000), Duration::from_millis(2_005));
        assert_eq!(timing.decode_step(0), Duration::from_millis(10));
        assert_eq!(timing.decode_step(1), Duration::from_millis(10));
        assert_eq!(timing.decode_step(11), Duration::from_millis(15));
        assert_eq!(timing.transfer(500), Duration::from_millis(3));
        assert_eq!(Timing::instant().prefill(u32::MAX), Duration::ZERO);
        assert_eq!(timing.faster(10.0).transfer(500), Duration::from_micros(300));
    }
}
