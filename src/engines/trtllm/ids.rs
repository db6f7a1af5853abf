//! Request ids that no two gateway processes give twice (`engine-protocols` section 4.7).

use std::sync::atomic::{AtomicU64, Ordering};

/// 2023-01-01T00:00:00Z, milliseconds since the Unix epoch.
const EPOCH_MS: u64 = 1_672_531_200_000;

/// Bits of the time.
const TIME_BITS: u32 = 41;

/// Bits of the count within a millisecond.
const COUNT_BITS: u32 = 12;

/// Bits of machine and count.
const TIME_SHIFT: u32 = 22;

/// Workers keep the numbers below for themselves.
const FLOOR: u64 = 1 << 42;

/// Hands out ids: 41 bits of milliseconds since 2023, 10 bits of machine, 12 bits of count, moved above 2^42.
///
/// Lock-free. It never gives an id twice, whatever the clock does: when the clock steps back, or more than 4096 ids are
/// asked for in one millisecond, it takes the next ones of the time ahead. (41 bits end in 2092. A clock that says so
/// already makes the time begin again at 0.)
#[derive(Debug)]
pub struct Snowflake {
    machine: AtomicU64,
    /// Time and count of the next id, as one number.
    next: AtomicU64,
}

impl Snowflake {
    /// A generator. Each gateway process that shares workers with another needs its own machine number; only its lowest
    /// 10 bits count.
    pub fn new(machine: u16) -> Snowflake {
        Snowflake { machine: AtomicU64::new(u64::from(machine) & 0x3ff), next: AtomicU64::new(0) }
    }

    /// From now on the ids carry this machine number.
    pub fn set_machine(&self, machine: u16) {
        self.machine.store(u64::from(machine) & 0x3ff, Ordering::Relaxed);
    }

    /// The machine number now.
    pub fn machine(&self) -> u16 {
        self.machine.load(Ordering::Relaxed) as u16
    }

    /// The next id, in 2^42..2^63. `now` is in milliseconds since the Unix epoch.
    pub fn next(&self, now: u64) -> u64 {
        let latest = (1 << TIME_BITS) - 1;
        let start = now.saturating_sub(EPOCH_MS).min(latest) << COUNT_BITS;
        // Nothing but this number is shared, so its own order is enough.
        let taken = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| Some(next.max(start) + 1))
            .unwrap_or_default();
        self.id(taken.max(start))
    }

    fn id(&self, sequence: u64) -> u64 {
        let time = (sequence >> COUNT_BITS) & ((1 << TIME_BITS) - 1);
        let count = sequence & ((1 << COUNT_BITS) - 1);
        let id = time << TIME_SHIFT | self.machine.load(Ordering::Relaxed) << COUNT_BITS | count;
        id % (i64::MAX as u64 - FLOOR) + FLOOR
    }
}
