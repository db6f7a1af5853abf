//! Rates from counters, out of this replica's own samples. Pure: time comes in as a [`Tick`].

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Tick;

/// Throughput is taken over this window. An engine adds to its counters once per step, 10 to 100 ms apart, so that two
/// scrapes 50 ms apart would see none or two of them; over three seconds that error is a few percent, and a change of
/// load still shows within seconds.
const THROUGHPUT_WINDOW: Duration = Duration::from_secs(3);
/// Samples are kept at least this far apart, and a rate needs this much time between its ends.
const THROUGHPUT_SPACING: Duration = Duration::from_millis(250);

/// The drain rate looks back this far (reference section 6.4).
const DRAIN_SPAN: Duration = Duration::from_mins(1);
const DRAIN_SPACING: Duration = Duration::from_secs(5);
const DRAIN_MAX_AGE: Duration = Duration::from_mins(3);
const DRAIN_MAX_SAMPLES: usize = 36;
const DRAIN_MIN_ELAPSED: Duration = Duration::from_secs(10);

/// Units per second of one engine counter, over the last few seconds.
#[derive(Clone, Debug, Default)]
pub struct Throughput {
    /// When, and the counter as it was read; never falling.
    samples: VecDeque<(Tick, f64)>,
}

impl Throughput {
    /// Takes a reading and returns the rate. `None` while there are not two samples 250 ms apart. A counter that fell,
    /// however little, begins anew: what it grew by in between cannot be known. (A restarted engine counts from zero, a
    /// sum over ranks loses one of them, and a rounding error is none of both.)
    pub fn push(&mut self, now: Tick, counter: f64) -> Option<f64> {
        if self.samples.back().is_some_and(|(_, last)| counter < *last) {
            self.samples.clear();
        }
        // Between two samples that are kept, the newest one is always the present reading.
        let crowded = match (self.samples.len().checked_sub(2).and_then(|i| self.samples.get(i)), self.samples.back()) {
            (Some((before, _)), Some((newest, _))) => newest.since(*before) < THROUGHPUT_SPACING,
            _ => false,
        };
        if crowded {
            self.samples.pop_back();
        }
        self.samples.push_back((now, counter));
        // Two samples stay however old the older one is, for scrape intervals beyond the window.
        while self.samples.len() > 2 && self.samples.front().is_some_and(|(at, _)| now.since(*at) > THROUGHPUT_WINDOW) {
            self.samples.pop_front();
        }
        let (start, base) = *self.samples.front()?;
        let elapsed = now.since(start);
        (elapsed >= THROUGHPUT_SPACING).then(|| (counter - base) / elapsed.as_secs_f64())
    }
}

/// Requests per second that a pod completed through this gateway, and through those that share their counts with it, over
/// about the last minute (reference section 6.4).
#[derive(Clone, Debug, Default)]
pub struct DrainRate {
    samples: VecDeque<(Tick, u64)>,
}

impl DrainRate {
    /// Takes the pod's completion count, as a sample at most every 5 s, and returns the rate between the newest sample
    /// and the one nearest to a minute ago. `None` with fewer than two samples or less than 10 s between them. A count that
    /// fell begins anew.
    pub fn push(&mut self, now: Tick, completed: u64) -> Option<f64> {
        if self.samples.back().is_some_and(|(_, last)| completed < *last) {
            self.samples.clear();
        }
        if self.samples.back().is_none_or(|(at, _)| now.since(*at) >= DRAIN_SPACING) {
            self.samples.push_back((now, completed));
        }
        while self.samples.len() > DRAIN_MAX_SAMPLES
            || self.samples.front().is_some_and(|(at, _)| now.since(*at) > DRAIN_MAX_AGE)
        {
            self.samples.pop_front();
        }
        let (newest_at, newest) = *self.samples.back()?;
        let distance = |at: Tick| now.since(at).abs_diff(DRAIN_SPAN);
        let older = self.samples.len().saturating_sub(1);
        let (base_at, base) = *self.samples.iter().take(older).min_by_key(|(at, _)| distance(*at))?;
        let elapsed = newest_at.since(base_at);
        if elapsed < DRAIN_MIN_ELAPSED {
            return None;
        }
        Some(newest.saturating_sub(base) as f64 / elapsed.as_secs_f64())
    }
}
