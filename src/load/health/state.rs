//! The state of a subject in one word, and its transitions as pure functions.

use std::time::Duration;

use super::EjectionPolicy;
use crate::clock::Tick;

/// Milliseconds of a point in time: 2^40 of them are 34 years of running.
const TIME_BITS: u32 = 40;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;
const FAILURE_BITS: u32 = 16;
/// A length that was doubled this often is longer than any `max`.
const STREAK_MAX: u8 = 63;
const EJECTED: u64 = 1 << 63;
const NANOS_PER_MILLI: u64 = 1_000_000;

/// What is known about a subject. All zero: nothing has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    /// It is ejected, until a success.
    pub(super) ejected: bool,
    /// Ejections that good service has not undone.
    pub(super) streak: u8,
    /// Consecutive failures.
    pub(super) failures: u16,
    /// Milliseconds on the process's time line. Ejected: when a probe may try. Else: when the streak may next lose one.
    at: u64,
}

impl State {
    pub(super) fn pack(self) -> u64 {
        let ejected = if self.ejected { EJECTED } else { 0 };
        ejected
            | (u64::from(self.streak.min(STREAK_MAX)) << (TIME_BITS + FAILURE_BITS))
            | (u64::from(self.failures) << TIME_BITS)
            | (self.at & TIME_MASK)
    }

    pub(super) fn unpack(word: u64) -> State {
        State {
            ejected: word & EJECTED != 0,
            streak: (word >> (TIME_BITS + FAILURE_BITS)) as u8 & STREAK_MAX,
            failures: (word >> TIME_BITS) as u16,
            at: word & TIME_MASK,
        }
    }

    /// The time of the ejection is over.
    pub(super) fn over(self, now: Tick) -> bool {
        (now.0 / NANOS_PER_MILLI).min(TIME_MASK) >= self.at
    }

    /// What is left of it.
    pub(super) fn left(self, now: Tick) -> Duration {
        Tick(self.at.saturating_mul(NANOS_PER_MILLI)).since(now)
    }

    /// Length of an ejection from this state: `base · 2^streak`, at most `max`, times 1 to 1.2.
    pub(super) fn length(self, policy: &EjectionPolicy, jitter: u64) -> Duration {
        let doubled = u128::from(nanos(policy.base)) << self.streak.min(STREAK_MAX);
        let length = doubled.min(u128::from(nanos(policy.max)));
        // A fraction of 2^32, below 1, of a fifth.
        let extra = length * u128::from(jitter >> 32) / (5 << 32);
        Duration::from_nanos(u64::try_from(length + extra).unwrap_or(u64::MAX))
    }

    /// After a failure; `None`: it changes nothing.
    pub(super) fn failed(self, policy: &EjectionPolicy, now: Tick, jitter: u64) -> Option<State> {
        if self.ejected && !self.over(now) {
            return None;
        }
        let failures = self.failures.saturating_add(1);
        let limit = policy.failures.min(u32::from(u16::MAX));
        if !self.ejected && u32::from(failures) < limit {
            return Some(State { failures, ..self });
        }
        let until = now.plus(self.length(policy, jitter)).0.div_ceil(NANOS_PER_MILLI).min(TIME_MASK);
        Some(State { ejected: true, streak: self.streak.saturating_add(1).min(STREAK_MAX), failures, at: until })
    }

    /// After a success; `None`: it changes nothing.
    pub(super) fn succeeded(self, now: Tick, base: Duration) -> Option<State> {
        let again = now.plus(base).0.div_ceil(NANOS_PER_MILLI).min(TIME_MASK);
        let next = if self.ejected {
            State { ejected: false, failures: 0, at: again, ..self }
        } else if self.streak > 0 && self.over(now) {
            State { streak: self.streak - 1, failures: 0, at: again, ..self }
        } else {
            State { failures: 0, ..self }
        };
        let next = if next.streak == 0 { State::default() } else { next };
        (next != self).then_some(next)
    }
}

/// Whole nanoseconds, saturating.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
