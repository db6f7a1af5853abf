//! Optimistic select-and-charge.
//!
//! A selection reads the version, reads the loads, decides, and commits with a compare-and-swap on the version. Had
//! anybody else committed in between, the loads it read are old, and it decides again. No mutex; a selection that
//! lost too often charges without the check rather than wait (bounded work, counted).

use std::sync::atomic::{AtomicU64, Ordering};

/// The version word of one model. Even: nobody is charging. Odd: the holder of the swap is writing its charges,
/// which is a handful of atomic additions.
#[derive(Debug, Default)]
pub struct Commit(AtomicU64);

/// An even version read before the loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitToken(u64);

impl Commit {
    /// The version to decide on; `None` while somebody is writing charges.
    pub fn begin(&self) -> Option<CommitToken> {
        let version = self.0.load(Ordering::Acquire);
        version.is_multiple_of(2).then_some(CommitToken(version))
    }

    /// Runs `charge` if nothing was committed since `token`; `None` = decide again.
    pub fn try_commit<R>(&self, token: CommitToken, charge: impl FnOnce() -> R) -> Option<R> {
        self.0.compare_exchange(token.0, token.0 + 1, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let charged = charge();
        self.0.store(token.0 + 2, Ordering::Release);
        Some(charged)
    }
}
