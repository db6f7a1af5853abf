//! Requests per second of one model, as this replica sees them.
//!
//! Fixed windows of one second, like the counters of the reference gateway (its sections 1.5 and 8.4): the same traffic
//! gets the same answers, what was admitted in vain can be given back exactly, and such windows are what replicas share
//! where they have Redis (`state::limits`). The price is the known one: around the border of two windows up to twice the
//! limit can pass within a second.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::Tick;

const COUNT_MASK: u64 = u32::MAX as u64;

/// The requests admitted in the present second: its number in the high half of the word, the count in the low half, so
/// that looking and counting are one step.
#[derive(Debug, Default)]
pub struct RateWindow(AtomicU64);

/// The place of one request in its second; given back on drop unless it was [kept](RateCharge::keep).
#[derive(Debug)]
#[must_use = "dropping it gives the place back"]
pub struct RateCharge {
    window: Arc<RateWindow>,
    second: u64,
}

impl RateWindow {
    /// Takes a place if fewer than `limit` are taken in the second of `now`; `None` = the limit is reached, and nothing
    /// was counted. Lock-free: a caller tries again only because another one got its place.
    pub fn admit(self: &Arc<Self>, limit: u32, now: Tick) -> Option<RateCharge> {
        // 2^32 seconds are 136 years of uptime.
        let now = (now.0 / 1_000_000_000).min(COUNT_MASK);
        // One word, on which nothing else depends: no ordering is needed beyond its own.
        let previous = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            let (second, count) = (word >> 32, word & COUNT_MASK);
            // Clocks of two threads are read before the word is: one may be late, and then the newer second holds.
            let (second, count) = if second < now { (now, 0) } else { (second, count) };
            (count < u64::from(limit)).then_some(second << 32 | (count + 1))
        });
        let second = (previous.ok()? >> 32).max(now);
        Some(RateCharge { window: Arc::clone(self), second })
    }

    /// Places taken in the second of `now`.
    pub fn taken(&self, now: Tick) -> u64 {
        let word = self.0.load(Ordering::Relaxed);
        if word >> 32 < now.0 / 1_000_000_000 { 0 } else { word & COUNT_MASK }
    }
}

impl RateCharge {
    /// The request was served: its place stays taken.
    pub fn keep(mut self) {
        // No window has this number.
        self.second = u64::MAX;
    }
}

impl Drop for RateCharge {
    fn drop(&mut self) {
        // A window that is over counts nothing any more. An error of the update means just that.
        let _ = self.window.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            (word >> 32 == self.second && word & COUNT_MASK > 0).then(|| word - 1)
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_limit_holds_within_each_second() {
        let window = Arc::new(RateWindow::default());
        let at = |millis, limit| window.admit(limit, Tick::from_millis(millis)).map(RateCharge::keep).is_some();
        for (millis, limit, admitted) in [
            (0, 0, false),
            (0, 2, true),
            (999, 2, true),
            (999, 2, false),
            (999, 3, true),
            (1000, 2, true),
            (1999, 2, true),
            (1999, 2, false),
            // Late by a second: what counts is the newer window.
            (900, 2, false),
            (900, 3, true),
            (u64::MAX / 1_000_000, 1, true),
            (u64::MAX / 1_000_000, 1, false),
        ] {
            assert_eq!(at(millis, limit), admitted, "{millis} ms, limit {limit}");
        }
    }

    #[test]
    fn what_was_not_served_is_given_back_to_its_own_second() {
        let window = Arc::new(RateWindow::default());
        let (early, late) = (Tick::from_millis(500), Tick::from_millis(1500));
        let first = window.admit(1, early).unwrap();
        assert!(window.admit(1, early).is_none(), "a refusal counts nothing");
        drop(first);
        assert_eq!(window.taken(early), 0);
        let of_the_past = window.admit(1, early).unwrap();
        window.admit(1, late).unwrap().keep();
        drop(of_the_past);
        assert_eq!(window.taken(late), 1);
        assert!(window.admit(1, late).is_none(), "the past gives nothing back to the present");
    }

    #[test]
    fn exactly_the_limit_passes_whoever_asks_at_once() {
        let window = Arc::new(RateWindow::default());
        let admitted = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (window, admitted) = (Arc::clone(&window), &admitted);
                scope.spawn(move || {
                    for turn in 0..2000 {
                        match window.admit(500, Tick::from_millis(7)) {
                            // Some are given back, so that others get their place.
                            Some(charge) if (turn + thread) % 3 == 0 => drop(charge),
                            Some(charge) => {
                                charge.keep();
                                admitted.fetch_add(1, Ordering::Relaxed);
                            }
                            None => {}
                        }
                    }
                });
            }
        });
        assert_eq!((admitted.into_inner(), window.taken(Tick::from_millis(7))), (500, 500));
    }

    proptest! {
        #[test]
        fn the_count_is_what_is_held_or_kept_in_the_newest_second(
            steps in proptest::collection::vec((0u64..4, 0u32..6, 0u8..3), 0..60)
        ) {
            let window = Arc::new(RateWindow::default());
            let mut held: Vec<RateCharge> = Vec::new();
            let (mut newest, mut kept) = (0, 0);
            for (second, limit, action) in steps {
                let now = Tick::from_millis(second * 1000);
                let before = window.taken(Tick::from_millis(newest.max(second) * 1000));
                match (action, window.admit(limit, now)) {
                    (_, None) => prop_assert!(before >= u64::from(limit)),
                    (action, Some(charge)) => {
                        prop_assert!(before < u64::from(limit));
                        if second > newest {
                            (newest, kept) = (second, 0);
                        }
                        match action {
                            0 => held.push(charge),
                            1 => { charge.keep(); kept += 1; }
                            _ => drop(charge),
                        }
                    }
                }
                if action == 2 && !held.is_empty() {
                    drop(held.remove(0));
                }
                let open = held.iter().filter(|charge| charge.second == newest).count() as u64;
                prop_assert_eq!(window.taken(Tick::from_millis(newest * 1000)), open + kept);
            }
        }
    }
}
