//! The clock that all replicas agree on: that of the Redis server.
//!
//! A replica's own wall clock may be wrong by seconds. What it tells others about times is therefore told on the server's
//! clock, which it estimates from the times in replies: the server read its clock between the call and the reply.

use std::time::Duration;

use crate::clock::Tick;
use crate::load::SHARE_TIME_ZERO_MS;

/// A good sample is believed for this long before a worse one replaces it: clocks drift.
const FRESH: Duration = Duration::from_secs(30);

/// An estimate of the server's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlaneClock {
    best: Option<Sample>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Server time minus own time, in ms.
    offset_ms: f64,
    /// How wrong that may be, in ms: half the round trip, and what a whole millisecond hides.
    error_ms: f64,
    at: Tick,
}

impl PlaneClock {
    /// A reply says that it was `server_ms` (since the Unix epoch) between `sent` and `received`.
    pub fn observe(&mut self, server_ms: u64, sent: Tick, received: Tick) {
        let half = received.since(sent).as_secs_f64() * 500.0;
        let sample =
            Sample { offset_ms: server_ms as f64 + 0.5 - (millis(sent) + half), error_ms: half + 0.5, at: received };
        let better = self.best.is_none_or(|best| {
            sample.error_ms <= best.error_ms
                || received.since(best.at) > FRESH
                // The two cannot both be right: the server's clock was set, or it is another server.
                || (sample.offset_ms - best.offset_ms).abs() > sample.error_ms + best.error_ms
        });
        if better {
            self.best = Some(sample);
        }
    }

    /// The server's time at `tick` in ms since [`SHARE_TIME_ZERO_MS`]; `None` before the first reply. A server whose clock
    /// stands before that time is taken to stand there.
    pub fn ms_at(&self, tick: Tick) -> Option<u64> {
        let best = self.best?;
        Some((millis(tick) + best.offset_ms - SHARE_TIME_ZERO_MS as f64).max(0.0) as u64)
    }
}

fn millis(tick: Tick) -> f64 {
    tick.0 as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = SHARE_TIME_ZERO_MS + 1_000_000;

    #[test]
    fn follows_the_server_whatever_the_own_clock_says() {
        let mut clock = PlaneClock::default();
        assert_eq!(clock.ms_at(Tick::from_millis(5)), None);
        clock.observe(BASE, Tick::from_millis(7_000), Tick::from_millis(7_002));
        assert_eq!(clock.ms_at(Tick::from_millis(7_001)), Some(1_000_000));
        assert_eq!(clock.ms_at(Tick::from_millis(8_001)), Some(1_001_000));
        assert_eq!(clock.ms_at(Tick::from_millis(0)), Some(992_999));
    }

    #[test]
    fn a_slow_reply_does_not_spoil_a_good_estimate() {
        let mut clock = PlaneClock::default();
        clock.observe(BASE, Tick::from_millis(1_000), Tick::from_millis(1_000));
        // 400 ms in the queue on the way back.
        clock.observe(BASE + 100, Tick::from_millis(1_100), Tick::from_millis(1_500));
        assert_eq!(clock.ms_at(Tick::from_millis(1_000)), Some(1_000_000));
        // After half a minute anything is better than drift.
        clock.observe(BASE + 40_100, Tick::from_millis(41_100), Tick::from_millis(41_500));
        assert_eq!(clock.ms_at(Tick::from_millis(41_300)), Some(1_040_100));
    }

    #[test]
    fn a_clock_that_was_set_is_followed_at_once() {
        let mut clock = PlaneClock::default();
        clock.observe(BASE, Tick::from_millis(1_000), Tick::from_millis(1_001));
        clock.observe(BASE - 5_000, Tick::from_millis(1_100), Tick::from_millis(1_110));
        assert_eq!(clock.ms_at(Tick::from_millis(1_105)), Some(995_000));
        clock.observe(0, Tick::from_millis(2_000), Tick::from_millis(2_001));
        assert_eq!(clock.ms_at(Tick::from_millis(2_001)), Some(0));
    }
}
