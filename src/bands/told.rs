//! Observations on their way to and from other replicas. Background tasks only: requests never come here.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::sketch::Increments;

/// Batches of others that may wait for the keeper; the oldest go first.
const MAX_HEARD: usize = 1_024;

/// What another replica observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// What.
    pub increments: Increments,
    /// How long ago.
    pub age: Duration,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Told {
    sharing: AtomicBool,
    own: Mutex<Increments>,
    heard: Mutex<std::collections::VecDeque<Observed>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Whoever panicked here left sums that are whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Told {
    /// Somebody takes what is kept.
    pub(super) fn begin(&self) {
        self.sharing.store(true, Ordering::Release);
    }

    /// Keeps what this replica observed, if somebody takes it.
    pub(super) fn keep(&self, increments: &Increments) {
        if self.sharing.load(Ordering::Acquire) {
            lock(&self.own).merge(increments);
        }
    }

    /// Takes what this replica observed.
    pub(super) fn take(&self) -> Option<Increments> {
        Some(std::mem::take(&mut *lock(&self.own))).filter(|own| !own.is_empty())
    }

    /// Another replica observed this.
    pub(super) fn hear(&self, observed: Observed) {
        let mut heard = lock(&self.heard);
        if heard.len() >= MAX_HEARD {
            heard.pop_front();
        }
        heard.push_back(observed);
    }

    /// Takes what others observed.
    pub(super) fn heard(&self) -> Vec<Observed> {
        lock(&self.heard).drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn seen(requests: u64) -> Increments {
        Increments::of(BTreeMap::from([((0, 9), (requests, requests * 5))]))
    }

    #[test]
    fn nothing_is_kept_for_nobody_and_nothing_is_lost_for_somebody() {
        let told = Told::default();
        told.keep(&seen(1));
        assert_eq!(told.take(), None);
        told.begin();
        told.keep(&seen(2));
        told.keep(&seen(3));
        assert_eq!(told.take(), Some(seen(5)));
        assert_eq!(told.take(), None);
    }

    #[test]
    fn what_is_heard_is_bounded() {
        let told = Told::default();
        for requests in 0..=MAX_HEARD as u64 {
            told.hear(Observed { increments: seen(requests), age: Duration::ZERO });
        }
        let heard = told.heard();
        assert_eq!((heard.len(), &heard[0].increments), (MAX_HEARD, &seen(1)));
        assert!(told.heard().is_empty());
    }
}
