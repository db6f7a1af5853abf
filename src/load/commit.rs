//! Optimistic select-and-charge.
//!
//! A selection reads the version, reads the loads, decides, and commits with a compare-and-swap on the version. Had
//! anybody else committed in between, the loads it read are old, and it decides again. No mutex; a selection that
//! lost too often charges without the check rather than wait (bounded work, counted by the caller).
//!
//! Why the loads are current when the swap succeeds: a version is published with release ordering after the charges
//! it stands for, and read with acquire ordering before the loads; the swap itself keeps the loads from moving past
//! it. Releases of charges do not change the version: they only make a pod less loaded than it was thought to be.

use super::sync::{AtomicU64, Ordering, SPINS, YIELDS, give_way, spin};

/// The version word of one model. Even: nobody is charging. Odd: the holder of the swap is writing its charges,
/// which is a handful of atomic additions. The word only grows.
#[derive(Debug, Default)]
pub struct Commit(AtomicU64);

/// An even version read before the loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitToken(u64);

/// Makes the version even again, also when charging panics: one broken selection must not stop all later ones.
struct Close<'a>(&'a AtomicU64);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        // An addition, not a store: a blind charge may have moved the word meanwhile.
        self.0.fetch_add(1, Ordering::Release);
    }
}

impl Commit {
    /// The version to decide on. While somebody is writing charges this spins briefly, then yields; `None` when the
    /// writer did not finish within a bounded number of tries, after which the caller charges blindly.
    pub fn begin(&self) -> Option<CommitToken> {
        for attempt in 0..SPINS + YIELDS {
            let version = self.0.load(Ordering::Acquire);
            if version.is_multiple_of(2) {
                return Some(CommitToken(version));
            }
            if attempt < SPINS {
                spin();
            } else {
                give_way();
            }
        }
        None
    }

    /// Runs `charge` if nothing was committed since `token`; `None` = decide again.
    pub fn try_commit<R>(&self, token: CommitToken, charge: impl FnOnce() -> R) -> Option<R> {
        self.0.compare_exchange(token.0, token.0.wrapping_add(1), Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let _close = Close(&self.0);
        Some(charge())
    }

    /// Charges without having checked anything, and makes everybody who is deciding now decide again.
    pub fn charge_blind<R>(&self, charge: impl FnOnce() -> R) -> R {
        let charged = charge();
        // Two: an even version stays even, an odd one odd, so whoever holds the swap is not disturbed.
        self.0.fetch_add(2, Ordering::Release);
        charged
    }
}
