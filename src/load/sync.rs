//! The atomics of this module, in one place: `tests/loom.rs` compiles the files that use them over loom's.

pub(super) use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// How often a reader of an odd version looks again in a tight loop: charging takes some tens of nanoseconds.
pub(super) const SPINS: u32 = 64;
/// How often it then gives its time slice away: somebody was descheduled between the swap and the end of the charges.
pub(super) const YIELDS: u32 = 8192;

/// A moment in a tight loop.
pub(super) fn spin() {
    std::hint::spin_loop();
}

/// Lets others run.
pub(super) fn give_way() {
    std::thread::yield_now();
}
