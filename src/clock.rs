//! The only place that asks the machine what time it is.
//!
//! Decisions take a [`Tick`] as an argument, so that tests and replays run on virtual time. The clock is built on
//! tokio's, which a test can pause.

use std::time::{Duration, SystemTime};

/// A point on the process's monotonic time line, in nanoseconds since an arbitrary origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

impl Tick {
    /// The time from `earlier` to `self`; zero when `earlier` is later.
    pub fn since(self, earlier: Tick) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The point `after` later, saturating at the end of time.
    #[must_use]
    pub fn plus(self, after: Duration) -> Tick {
        Tick(self.0.saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// The tick that lies `millis` milliseconds after the origin: handy in tests.
    pub const fn from_millis(millis: u64) -> Tick {
        Tick(millis * 1_000_000)
    }
}

/// Reads monotonic and wall-clock time. Cheap to copy; every task gets its own.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: tokio::time::Instant,
    wall_origin: SystemTime,
}

impl Clock {
    /// A clock whose origin is now.
    #[allow(clippy::disallowed_methods, reason = "this is the one place that may")]
    pub fn system() -> Clock {
        Clock { origin: tokio::time::Instant::now(), wall_origin: SystemTime::now() }
    }

    /// The current monotonic time.
    #[allow(clippy::disallowed_methods, reason = "this is the one place that may")]
    pub fn now(&self) -> Tick {
        let elapsed = tokio::time::Instant::now().saturating_duration_since(self.origin);
        // One second of head room keeps "a while ago" representable right after the start.
        Tick(1_000_000_000).plus(elapsed)
    }

    /// The tokio instant at `tick`, for timers.
    pub fn instant_at(&self, tick: Tick) -> tokio::time::Instant {
        self.origin + tick.since(Tick(1_000_000_000))
    }

    /// The wall-clock time of tick zero, milliseconds since the Unix epoch.
    pub fn epoch_ms(&self) -> u64 {
        let since = self.wall_at(Tick(0)).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX).saturating_sub(1000)
    }

    /// The wall-clock time at `tick`, for logs and traces.
    pub fn wall_at(&self, tick: Tick) -> SystemTime {
        self.wall_origin + tick.since(Tick(1_000_000_000))
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "compares with the clock underneath")]
mod tests {
    use super::*;

    #[test]
    fn differences_never_go_negative() {
        assert_eq!(Tick(5).since(Tick(9)), Duration::ZERO);
        assert_eq!(Tick(9).since(Tick(5)), Duration::from_nanos(4));
        assert_eq!(Tick(u64::MAX).plus(Duration::MAX), Tick(u64::MAX));
    }

    #[tokio::test(start_paused = true)]
    async fn follows_paused_time() {
        let clock = Clock::system();
        let before = clock.now();
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(clock.now().since(before), Duration::from_secs(3));
        assert_eq!(clock.instant_at(clock.now()), tokio::time::Instant::now());
    }
}
