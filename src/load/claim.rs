//! The token counters of one pod incarnation, and a request's claim on them (reference section 4.12).
//!
//! The prefill side has two counters: tokens being computed (`active`) and tokens whose KV blocks the pod still holds
//! (`kv`). The decode side has the prompt tokens of the requests outstanding there and, so that all their output can be
//! estimated in one step, their [`Starts`].
//!
//! Every part of a claim is taken back exactly once, by whoever comes first: the request or the janitor. Who comes later
//! finds nothing left to do, so no counter can go below zero. `tests/loom.rs` explores the interleavings.

use std::time::Duration;

use super::starts::Starts;
use super::sync::{AtomicU8, AtomicU64, Ordering};
use crate::clock::Tick;

/// The token counters of one pod incarnation.
#[derive(Debug, Default)]
pub struct TokenLoad {
    active: AtomicU64,
    kv: AtomicU64,
    stranded: AtomicU64,
    decode: AtomicU64,
    starts: Starts,
    /// Nanoseconds of the last charge or release; 0 = never.
    touched: AtomicU64,
}

/// The values of a [`TokenLoad`] at one moment. Each counter is exact; two of them may be a charge apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenView {
    /// Prompt tokens of prefill requests that the pod is computing, request cost included.
    pub active: u64,
    /// The same of requests whose KV blocks it holds; includes `active`.
    pub kv: u64,
    /// The part of `kv` whose request is over, but whose decode pod never took the blocks.
    pub stranded: u64,
    /// Prompt tokens of the requests outstanding on this decode pod.
    pub decode: u64,
}

impl TokenView {
    /// Nothing is charged.
    pub fn is_zero(&self) -> bool {
        *self == TokenView::default()
    }
}

impl TokenLoad {
    /// Reads the counters.
    pub fn view(&self) -> TokenView {
        TokenView {
            active: self.active.load(Ordering::Acquire),
            kv: self.kv.load(Ordering::Acquire),
            stranded: self.stranded.load(Ordering::Acquire),
            decode: self.decode.load(Ordering::Acquire),
        }
    }

    /// How many requests are charged on the decode side, and the sum of their ages at `now` in seconds.
    pub fn decode_ages(&self, now: Tick) -> (u64, f64) {
        let (count, ages) = self.decode_ages_ms(now);
        (count, ages as f64 / 1000.0)
    }

    /// The same with the sum in milliseconds, which it is counted in.
    pub fn decode_ages_ms(&self, now: Tick) -> (u64, u64) {
        self.starts.ages_ms(now)
    }

    /// The last charge or release; `None` = never.
    pub fn touched(&self) -> Option<Tick> {
        Some(self.touched.load(Ordering::Relaxed)).filter(|nanos| *nanos > 0).map(Tick)
    }

    fn touch(&self, now: Tick) {
        self.touched.fetch_max(now.0, Ordering::Relaxed);
    }
}

/// The parts of a claim, as bits.
pub(super) const ACTIVE: u8 = 1;
pub(super) const KV: u8 = 2;
pub(super) const DECODE: u8 = 4;
/// Set beside [`KV`]: the request is over, its blocks stay for a lease.
const STRANDED: u8 = 8;

/// Why the janitor took a charge back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepReason {
    /// Its request gave no sign of life for longer than the TTL.
    Expired,
    /// The lease of its blocks is over.
    LeaseEnded,
}

/// What one request has charged on one pod. Its guard and the janitor share it; each call names the pod's counters.
#[derive(Debug)]
pub(super) struct Claim {
    tokens: u64,
    decode: bool,
    charged_at: Tick,
    /// Zero = never swept.
    ttl: Duration,
    /// Parts that are still charged.
    held: AtomicU8,
    /// Nanoseconds of the last sign of life of the request.
    alive_at: AtomicU64,
    /// Nanoseconds of the end of the lease, once stranded.
    lease_ends: AtomicU64,
}

impl Claim {
    /// A claim of `tokens` on the decode or the prefill side, of which nothing is charged yet.
    pub(super) fn new(decode: bool, tokens: u64, now: Tick, ttl: Duration) -> Claim {
        Claim {
            tokens,
            decode,
            charged_at: now,
            ttl,
            held: AtomicU8::new(0),
            alive_at: AtomicU64::new(now.0),
            lease_ends: AtomicU64::new(0),
        }
    }

    /// Charges it: on the prefill side as active and resident, on the decode side as outstanding. To be called once,
    /// before the claim is shared.
    pub(super) fn charge(&self, load: &TokenLoad) {
        if self.decode {
            load.decode.fetch_add(self.tokens, Ordering::AcqRel);
            load.starts.add(self.charged_at);
        } else {
            load.active.fetch_add(self.tokens, Ordering::AcqRel);
            load.kv.fetch_add(self.tokens, Ordering::AcqRel);
        }
        load.touch(self.charged_at);
        self.held.store(if self.decode { DECODE } else { ACTIVE | KV }, Ordering::Release);
    }

    /// Takes these parts back, as far as they are still charged; true when one was.
    pub(super) fn release(&self, load: &TokenLoad, parts: u8, now: Option<Tick>) -> bool {
        let parts = if parts & KV == 0 { parts } else { parts | STRANDED };
        let taken = self.held.fetch_and(!parts, Ordering::AcqRel) & parts;
        for (part, counter) in
            [(ACTIVE, &load.active), (KV, &load.kv), (STRANDED, &load.stranded), (DECODE, &load.decode)]
        {
            if taken & part != 0 {
                counter.fetch_sub(self.tokens, Ordering::AcqRel);
            }
        }
        if taken & DECODE != 0 {
            load.starts.remove(self.charged_at);
        }
        if let Some(now) = now.filter(|_| taken != 0) {
            load.touch(now);
        }
        taken != 0
    }

    /// Takes back whatever is left, unless that is stranded.
    pub(super) fn release_unless_stranded(&self, load: &TokenLoad) {
        // Only the request itself strands, and only before this: no race.
        if self.held.load(Ordering::Acquire) & STRANDED == 0 {
            self.release(load, ACTIVE | KV | DECODE, None);
        }
    }

    /// Marks the resident part as stranded until `until`; false when it is not charged any more.
    pub(super) fn strand(&self, load: &TokenLoad, until: Tick) -> bool {
        self.lease_ends.store(until.0, Ordering::Release);
        // Counted before it is marked: whoever releases the mark must find the tokens there.
        load.stranded.fetch_add(self.tokens, Ordering::AcqRel);
        let mark = |held: u8| (held & KV != 0).then_some(held | STRANDED);
        let marked = self.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, mark).is_ok();
        if !marked {
            load.stranded.fetch_sub(self.tokens, Ordering::AcqRel);
        }
        marked
    }

    /// The request shows that it is alive.
    pub(super) fn touch(&self, now: Tick) {
        self.alive_at.fetch_max(now.0, Ordering::Relaxed);
    }

    /// Takes everything back if its time is over.
    pub(super) fn sweep(&self, load: &TokenLoad, now: Tick) -> Option<SweepReason> {
        let reason = if self.held.load(Ordering::Acquire) & STRANDED != 0 {
            (self.lease_ends.load(Ordering::Acquire) <= now.0).then_some(SweepReason::LeaseEnded)
        } else {
            let idle = now.since(Tick(self.alive_at.load(Ordering::Relaxed)));
            (!self.ttl.is_zero() && idle > self.ttl).then_some(SweepReason::Expired)
        };
        reason.filter(|_| self.release(load, ACTIVE | KV | DECODE, Some(now)))
    }

    /// Nothing of it is charged any more.
    pub(super) fn is_done(&self) -> bool {
        self.held.load(Ordering::Acquire) == 0
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(super) fn is_decode(&self) -> bool {
        self.decode
    }

    pub(super) fn charged_at(&self) -> Tick {
        self.charged_at
    }
}
