//! When claims are not worth waiting for.
//!
//! After some misses in a row claims stop. They go on once syncs, which are made all the time, have been quick enough
//! for a while: so no request is ever the one to try.

use std::time::Duration;

/// Misses in a row after which claims stop.
const MISSES: u32 = 5;
/// Quick syncs in a row after which they go on.
const QUICK: u32 = 3;

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Breaker {
    misses: u32,
    quick: u32,
    open: bool,
}

impl Breaker {
    /// Claims are not made.
    pub(super) fn is_open(self) -> bool {
        self.open
    }

    /// A claim was answered in time.
    pub(super) fn answered(&mut self) {
        self.misses = 0;
    }

    /// A claim was not. True when that opens the breaker.
    pub(super) fn missed(&mut self) -> bool {
        self.misses = self.misses.saturating_add(1);
        let opens = !self.open && self.misses >= MISSES;
        if opens {
            (self.open, self.quick) = (true, 0);
        }
        opens
    }

    /// A sync took so long; `None` = it failed. True when that closes the breaker.
    pub(super) fn synced(&mut self, took: Option<Duration>, deadline: Duration) -> bool {
        if !self.open {
            return false;
        }
        self.quick = if took.is_some_and(|took| took <= deadline) { self.quick + 1 } else { 0 };
        let closes = self.quick >= QUICK;
        if closes {
            *self = Breaker::default();
        }
        closes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_misses_in_a_row_and_closes_when_syncs_are_quick() {
        let (deadline, mut breaker) = (Duration::from_millis(5), Breaker::default());
        for _ in 0..3 {
            for _ in 1..MISSES {
                assert!(!breaker.missed());
            }
            breaker.answered();
        }
        for miss in 1..=MISSES {
            assert_eq!(breaker.missed(), miss == MISSES);
        }
        assert!(breaker.is_open() && !breaker.missed(), "opens once");
        breaker.answered();
        let (quick, slow) = (Some(deadline), Some(deadline + Duration::from_nanos(1)));
        for (took, closes) in [
            (quick, false),
            (quick, false),
            (slow, false),
            (quick, false),
            (quick, false),
            (None, false),
            (quick, false),
            (quick, false),
            (quick, true),
        ] {
            assert_eq!(breaker.synced(took, deadline), closes);
        }
        assert!(!breaker.is_open() && !breaker.synced(quick, deadline));
        for miss in 1..=MISSES {
            assert_eq!(breaker.missed(), miss == MISSES, "it has forgotten the earlier misses");
        }
    }
}
