//! What the other replicas have on one pod incarnation, as they last published it.
//!
//! Promises: reading takes no lock and never waits; every word is of one moment, so that a count and the times that
//! belong to it cannot come apart (two words may be one publication apart, as with the replica's own counters); applying
//! the same share again changes nothing; what nobody has confirmed for [`FADES_AFTER`] fades out over [`FADES_OVER`]
//! instead of pretending to be known.

use std::time::Duration;

use super::share::Share;
use super::starts::Starts;
use super::sync::{AtomicU64, Ordering};
use crate::clock::Tick;

/// A remote share that was not confirmed for longer begins to fade.
pub const FADES_AFTER: Duration = Duration::from_secs(3);
/// So long after that it is gone.
pub const FADES_OVER: Duration = Duration::from_secs(10);

/// Which parts of the others' shares count here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    /// Prefill legs and the prefill token ledger. The PD document keeps both local to a replica; sharing them is what
    /// brings the time to first token of a fleet down to that of one replica.
    pub prefill: bool,
    /// The decode token ledger (`AIBRIX_TOKEN_LOAD_SHARED_LEDGER`).
    pub decode_ledger: bool,
}

impl Default for Scope {
    fn default() -> Scope {
        Scope { prefill: true, decode_ledger: true }
    }
}

impl Scope {
    /// The parts of `share` that count.
    #[must_use]
    pub fn of(self, share: Share) -> Share {
        let mut counts = share;
        if !self.prefill {
            counts = Share { prefills: 0, prefill_tokens: 0, kv_tokens: 0, ..counts };
        }
        if !self.decode_ledger {
            counts = Share { decode_tokens: 0, decode_open: 0, decode_start_sum_ms: 0, ..counts };
        }
        counts
    }
}

/// The others' summed share of one pod, as last published. Written by one task, read by every selection.
#[derive(Debug, Default)]
pub struct Remote {
    /// Pending in the high half, running in the low half.
    decodes: AtomicU64,
    prefills: AtomicU64,
    active: AtomicU64,
    kv: AtomicU64,
    decode: AtomicU64,
    starts: Starts,
    /// Requests of the others that were running and no longer are.
    completed: AtomicU64,
    /// Nanoseconds of the last application or confirmation; 0 = never.
    at: AtomicU64,
}

/// What of a [`Remote`] counts at one moment: the whole, or what has not faded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Fade(f64);

impl Fade {
    /// How much a share counts that was last confirmed `age` ago: all of it for [`FADES_AFTER`], then less and less
    /// until nothing is left after another [`FADES_OVER`].
    pub(super) fn at_age(age: Duration) -> Fade {
        let over = age.saturating_sub(FADES_AFTER);
        Fade(1.0 - (over.as_secs_f64() / FADES_OVER.as_secs_f64()).min(1.0))
    }

    /// What is left of a number, rounded down.
    pub(super) fn of(self, whole: u64) -> u64 {
        if self.0 >= 1.0 { whole } else { (whole as f64 * self.0) as u64 }
    }
}

impl Remote {
    /// From now on the others have `share` here. `fleet_now_ms` is what the clock of the shares
    /// ([`super::SHARE_TIME_ZERO_MS`]) shows at `at`: the share's times are kept on this replica's own clock, so that
    /// later corrections of the offset between the two do not change them.
    pub fn apply(&self, share: &Share, at: Tick, fleet_now_ms: u64) {
        let before = self.decodes.swap(u64::from(share.pending) << 32 | u64::from(share.running), Ordering::AcqRel);
        let ended = (before & u64::from(u32::MAX)).saturating_sub(u64::from(share.running));
        self.completed.fetch_add(ended, Ordering::AcqRel);
        self.prefills.store(u64::from(share.prefills), Ordering::Release);
        self.active.store(share.prefill_tokens, Ordering::Release);
        self.kv.store(share.kv_tokens, Ordering::Release);
        self.decode.store(share.decode_tokens, Ordering::Release);
        self.starts.replace(share.decode_open, share.decode_age_sum_ms(fleet_now_ms), at);
        self.confirm(at);
    }

    /// What was last applied is still so at `at`. To be called often enough that a share that does not change does not
    /// fade, but for no more pods at once than is cheap.
    pub fn confirm(&self, at: Tick) {
        // Zero means never; the first nanosecond is as good.
        self.at.fetch_max(at.0.max(1), Ordering::AcqRel);
    }

    /// How long ago it was last confirmed; `None` = the others never said anything about this pod.
    pub fn age(&self, now: Tick) -> Option<Duration> {
        let at = self.at.load(Ordering::Acquire);
        (at > 0).then(|| now.since(Tick(at)))
    }

    /// How much of it counts; `None` = there is nothing to read.
    pub(super) fn fade(&self, now: Tick) -> Option<Fade> {
        self.age(now).map(Fade::at_age).filter(|fade| fade.0 > 0.0)
    }

    /// (prefill legs, pending, running)
    pub(super) fn counts(&self, fade: Fade) -> (u64, u64, u64) {
        let decodes = self.decodes.load(Ordering::Acquire);
        let prefills = self.prefills.load(Ordering::Acquire);
        (fade.of(prefills), fade.of(decodes >> 32), fade.of(decodes & u64::from(u32::MAX)))
    }

    /// Requests that the others had running here and have no longer, since the beginning. Those that failed are among
    /// them, and one that ended between two publications while another began is not; to estimate a rate it is good enough,
    /// and it needs nobody to publish a count that never goes back to zero.
    pub(super) fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// (active, kv)
    pub(super) fn prefill_tokens(&self, fade: Fade) -> (u64, u64) {
        (fade.of(self.active.load(Ordering::Acquire)), fade.of(self.kv.load(Ordering::Acquire)))
    }

    /// Tokens charged on the decode side.
    pub(super) fn decode_tokens(&self, fade: Fade) -> u64 {
        fade.of(self.decode.load(Ordering::Acquire))
    }

    /// (requests charged on the decode side, sum of their ages in milliseconds)
    pub(super) fn decode_ages_ms(&self, fade: Fade, now: Tick) -> (u64, u64) {
        let (count, ages) = self.starts.ages_ms(now);
        (fade.of(count), fade.of(ages))
    }
}
