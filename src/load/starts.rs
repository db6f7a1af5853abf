//! How many requests are open on a pod and for how long they have been, in one atomic word.
//!
//! The sum of the ages of `n` open requests is `n · now − Σ start`. Count and sum must be of the same moment: read apart,
//! one request more or less would add or take away all of `now`. So both live in one word: the count in the high 24
//! bits, the sum of the start times in milliseconds, modulo 2^40, in the low 40. The difference is exact as long as the
//! ages sum up to less than 2^39 ms: fifty thousand requests of three hours each.

use super::sync::{AtomicU64, Ordering};

use crate::clock::Tick;

const SUM_BITS: u32 = 40;
/// More requests than this are not open on one pod.
const MAX_COUNT: u64 = (1 << (64 - SUM_BITS)) - 1;
const SUM_MASK: u64 = (1 << SUM_BITS) - 1;
/// Neither is their age more than this, in milliseconds, all together.
const MAX_AGE_SUM: u64 = (1 << (SUM_BITS - 1)) - 1;

/// The start times of the open requests of one pod.
#[derive(Debug, Default)]
pub(super) struct Starts(AtomicU64);

fn millis(tick: Tick) -> u64 {
    tick.0 / 1_000_000
}

impl Starts {
    /// A request begins at `start`.
    pub(super) fn add(&self, start: Tick) {
        self.change(|count, sum| (count + 1, sum.wrapping_add(millis(start))));
    }

    /// The request that began at `start` is over.
    pub(super) fn remove(&self, start: Tick) {
        self.change(|count, sum| (count.saturating_sub(1), sum.wrapping_sub(millis(start))));
    }

    /// Lock-free: a failed exchange means that somebody else's went through.
    fn change(&self, change: impl Fn(u64, u64) -> (u64, u64)) {
        let update = |word: u64| {
            let (count, sum) = change(word >> SUM_BITS, word & SUM_MASK);
            Some(count << SUM_BITS | sum & SUM_MASK)
        };
        // The closure never declines, so there is nothing to do about an `Err`.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, update);
    }

    /// From now on these: `count` open requests whose ages at `now` sum up to `age_sum_ms`.
    pub(super) fn replace(&self, count: u64, age_sum_ms: u64, now: Tick) {
        let count = count.min(MAX_COUNT);
        let sum = count.wrapping_mul(millis(now)).wrapping_sub(age_sum_ms.min(MAX_AGE_SUM));
        self.0.store(count << SUM_BITS | sum & SUM_MASK, Ordering::Release);
    }

    /// (open requests, sum of their ages in milliseconds) at `now`. Starts that lie after `now` count as age 0.
    pub(super) fn ages_ms(&self, now: Tick) -> (u64, u64) {
        let word = self.0.load(Ordering::Acquire);
        let count = word >> SUM_BITS;
        let difference = count.wrapping_mul(millis(now)).wrapping_sub(word & SUM_MASK) & SUM_MASK;
        // The upper half of the range is what lies below zero.
        let sum = if difference >> (SUM_BITS - 1) == 0 { difference } else { 0 };
        (count, sum)
    }
}
