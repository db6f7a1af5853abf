//! Counters and histograms, without names: each dialect renders them under its engine's metric names.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Upper bounds of time-to-first-token buckets, seconds.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Upper bounds of inter-token buckets, seconds.
const TOKEN_GAP: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Upper bounds of request-time buckets, seconds.
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Upper bounds of token-count buckets.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 50_000.0,
    100_000.0,
];

/// A cumulative histogram.
#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    pub bounds: &'static [f64],
    /// Observations at or below each bound, and not below the one before.
    pub counts: Vec<u64>,
    pub count: u64,
    pub sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, counts: vec![0; bounds.len()], count: 0, sum: 0.0 }
    }

    fn add(&mut self, value: f64) {
        if let Some(slot) = self.bounds.iter().position(|bound| value <= *bound)
            && let Some(count) = self.counts.get_mut(slot)
        {
            *count += 1;
        }
        self.count += 1;
        self.sum += value;
    }

    /// Adds a duration in seconds.
    pub fn time(&mut self, value: Duration) {
        self.add(value.as_secs_f64());
    }

    /// Adds a count.
    pub fn tokens(&mut self, value: u32) {
        self.add(f64::from(value));
    }
}

/// Everything that only goes up.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    pub prompt_tokens: u64,
    pub computed_tokens: u64,
    pub cache_hit_tokens: u64,
    pub transferred_tokens: u64,
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub external_queries: u64,
    pub external_hits: u64,
    pub generated_tokens: u64,
    pub finished_stop: u64,
    pub finished_length: u64,
    pub finished_abort: u64,
    pub finished_error: u64,
    pub aborted_on_demand: u64,
    pub clients_gone: u64,
    pub duplicate_ids: u64,
    pub failed_transfers: u64,
    pub expired_leases: u64,
    pub pulls_after_expiry: u64,
    pub failed_meetings: u64,
    pub requests: u64,
    pub first_token: Histogram,
    pub token_gap: Histogram,
    pub mean_token_time: Histogram,
    pub whole: Histogram,
    pub queue: Histogram,
    pub inference: Histogram,
    pub prefill: Histogram,
    pub decode: Histogram,
    pub transfer: Histogram,
    pub prompt_length: Histogram,
    pub output_length: Histogram,
    /// Tokens per step; here each sequence steps by itself.
    pub step_tokens: Histogram,
}

impl Default for Counts {
    fn default() -> Counts {
        Counts {
            prompt_tokens: 0,
            computed_tokens: 0,
            cache_hit_tokens: 0,
            transferred_tokens: 0,
            prefix_queries: 0,
            prefix_hits: 0,
            external_queries: 0,
            external_hits: 0,
            generated_tokens: 0,
            finished_stop: 0,
            finished_length: 0,
            finished_abort: 0,
            finished_error: 0,
            aborted_on_demand: 0,
            clients_gone: 0,
            duplicate_ids: 0,
            failed_transfers: 0,
            expired_leases: 0,
            pulls_after_expiry: 0,
            failed_meetings: 0,
            requests: 0,
            first_token: Histogram::new(FIRST_TOKEN),
            token_gap: Histogram::new(TOKEN_GAP),
            mean_token_time: Histogram::new(TOKEN_GAP),
            whole: Histogram::new(REQUEST),
            queue: Histogram::new(REQUEST),
            inference: Histogram::new(REQUEST),
            prefill: Histogram::new(REQUEST),
            decode: Histogram::new(REQUEST),
            transfer: Histogram::new(FIRST_TOKEN),
            prompt_length: Histogram::new(TOKENS),
            output_length: Histogram::new(TOKENS),
            step_tokens: Histogram::new(TOKENS),
        }
    }
}

/// The counters of one engine.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    counts: Mutex<Counts>,
}

impl Meters {
    /// Changes counters, all at once.
    pub fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// A consistent copy.
    pub fn read(&self) -> Counts {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lands_in_the_first_bucket_that_holds_it() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.0, 1.0, 1.5, 2.0, 9.0] {
            histogram.add(value);
        }
        assert_eq!((histogram.counts, histogram.count, histogram.sum), (vec![2, 2], 5, 13.5));
    }
}
