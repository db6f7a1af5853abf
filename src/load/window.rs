//! Sums over a sliding window, for what counts only for a while.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Tick;

/// A window is divided into so many parts; what was added leaves with its part.
const PARTS: u64 = 10;
/// Parts that are kept; more than [`PARTS`], so that one that is over is not read as a new one.
const KEPT: usize = 16;

// The word: 24 bits of the part's number, 40 bits of the sum.
const SUM_BITS: u32 = 40;
const SUM_MASK: u64 = (1 << SUM_BITS) - 1;
const NUMBER_MASK: u64 = (1 << 24) - 1;

/// The sum of what was added within the last window, to a tenth of it. Lock-free; the length of the window is an argument
/// and has to be the same in every call.
#[derive(Debug, Default)]
pub struct Window([AtomicU64; KEPT]);

fn part(now: Tick, window: Duration) -> u64 {
    let length = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX) / PARTS;
    now.0 / length.max(1)
}

impl Window {
    /// Adds to the present part; a part holds 2^40 at most.
    pub fn add(&self, amount: u64, now: Tick, window: Duration) {
        let number = part(now, window);
        let Some(word) = self.0.get((number % KEPT as u64) as usize) else { return };
        let head = (number & NUMBER_MASK) << SUM_BITS;
        // Nothing else depends on the word.
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
            let sum = if old & !SUM_MASK == head { old & SUM_MASK } else { 0 };
            Some(head | sum.saturating_add(amount).min(SUM_MASK))
        });
    }

    /// What was added within the last window.
    pub fn sum(&self, now: Tick, window: Duration) -> u64 {
        let number = part(now, window);
        let words = self.0.iter().map(|word| word.load(Ordering::Relaxed));
        words
            .filter(|word| number.wrapping_sub(word >> SUM_BITS) & NUMBER_MASK < PARTS)
            .map(|word| word & SUM_MASK)
            .sum()
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// What a pod was given lately by strategies that weigh it.
#[derive(Debug, Default)]
pub struct RecentWork {
    requests: Window,
    cost: Window,
}

/// Costs are kept in microseconds.
const COST_UNIT: f64 = 1e6;

impl RecentWork {
    /// A request that is expected to take the pod so many seconds.
    pub fn add(&self, seconds: f64, now: Tick, window: Duration) {
        self.requests.add(1, now, window);
        // Of a number that is none, 0 is left.
        self.cost.add((seconds * COST_UNIT) as u64, now, window);
    }

    /// Requests within the window.
    pub fn requests(&self, now: Tick, window: Duration) -> u64 {
        self.requests.sum(now, window)
    }

    /// What they are expected to take, seconds.
    pub fn cost(&self, now: Tick, window: Duration) -> f64 {
        self.cost.sum(now, window) as f64 / COST_UNIT
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_is_added_leaves_after_a_window() {
        let window = Window::default();
        let sum = |millis| window.sum(Tick::from_millis(millis), SECOND);
        window.add(5, Tick::from_millis(0), SECOND);
        window.add(7, Tick::from_millis(950), SECOND);
        assert_eq!((sum(950), sum(999)), (12, 12));
        assert_eq!((sum(1000), sum(1899)), (7, 7), "the first has left with its tenth");
        assert_eq!((sum(1900), sum(60_000)), (0, 0));
        window.add(3, Tick::from_millis(1600), SECOND);
        window.add(4, Tick::from_millis(1650), SECOND);
        assert_eq!(sum(1700), 14);
        window.clear();
        assert_eq!(sum(1700), 0);
    }

    #[test]
    fn sums_are_bounded() {
        let window = Window::default();
        for _ in 0..3 {
            window.add(u64::MAX, Tick(5), SECOND);
        }
        assert_eq!(window.sum(Tick(5), SECOND), SUM_MASK);
        window.add(1, Tick(5), Duration::ZERO);
        let work = RecentWork::default();
        for seconds in [f64::NAN, f64::INFINITY, -1.0, 0.25] {
            work.add(seconds, Tick(5), SECOND);
        }
        assert_eq!(work.requests(Tick(5), SECOND), 4);
        assert!(work.cost(Tick(5), SECOND).is_finite());
    }

    proptest! {
        /// Never more than what was added within the window, never less than what was within nine tenths of it.
        #[test]
        fn the_sum_is_right_to_a_tenth(
            steps in proptest::collection::vec((0u64..400, 0u64..1000), 1..80), length in 10u64..2000
        ) {
            let (window, size) = (Window::default(), Duration::from_millis(length));
            let (mut now, mut added) = (0u64, Vec::new());
            for (wait, amount) in steps {
                now += wait;
                window.add(amount, Tick::from_millis(now), size);
                added.push((now, amount));
                let within = |parts: u64| -> u64 {
                    added.iter().filter(|(at, _)| (now - at) * 10 < length * parts).map(|(_, amount)| amount).sum()
                };
                let sum = window.sum(Tick::from_millis(now), size);
                prop_assert!(within(9) <= sum && sum <= within(10), "{} <= {} <= {}", within(9), sum, within(10));
            }
        }
    }
}
