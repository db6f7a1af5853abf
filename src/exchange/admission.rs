//! Bounds on what all requests together may hold. A guard for each unit; nothing waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A counted limit: bytes buffered, or streams open.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    used: AtomicUsize,
}

impl Budget {
    /// A budget of `limit` units.
    pub fn new(limit: usize) -> Arc<Budget> {
        Arc::new(Budget { limit, used: AtomicUsize::new(0) })
    }

    /// Units in use.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes one unit, or nothing when the limit is reached.
    pub fn permit(self: &Arc<Self>) -> Option<Permit> {
        let mut reservation = Reservation::empty(self);
        reservation.grow(1).then_some(Permit { _reservation: reservation })
    }

    fn take(&self, amount: usize) -> bool {
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
                used.checked_add(amount).filter(|total| *total <= self.limit)
            })
            .is_ok()
    }
}

/// One unit of a [`Budget`], given back on drop.
#[derive(Debug)]
pub struct Permit {
    _reservation: Reservation,
}

/// A growing share of a [`Budget`], given back on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    held: usize,
}

impl Reservation {
    /// Holds nothing yet.
    pub fn empty(budget: &Arc<Budget>) -> Reservation {
        Reservation { budget: Arc::clone(budget), held: 0 }
    }

    /// Takes `amount` more units; false, and nothing taken, when the budget does not have them.
    #[must_use]
    pub fn grow(&mut self, amount: usize) -> bool {
        let granted = self.budget.take(amount);
        if granted {
            self.held += amount;
        }
        granted
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.held, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_exact_and_drops_give_back() {
        let budget = Budget::new(10);
        let mut first = Reservation::empty(&budget);
        assert!(first.grow(9));
        assert!(!first.grow(2));
        assert!(first.grow(1));
        assert!(budget.permit().is_none());
        drop(first);
        assert_eq!(budget.used(), 0);
        let permit = budget.permit();
        assert!(permit.is_some());
        assert_eq!(budget.used(), 1);
        drop(permit);
        assert_eq!(budget.used(), 0);
        assert!(!Reservation::empty(&budget).grow(usize::MAX));
    }
}
