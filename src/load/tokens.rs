//! Token ledgers of one pod incarnation, and the one-shot charges on them (reference section 4.12).
//!
//! The prefill side has two counters: tokens being computed (`active`) and tokens whose KV blocks the pod still holds
//! (`kv`). The decode side has the prompt tokens of the requests outstanding there and, so that all their output can be
//! estimated in one step, their [`Starts`].
//!
//! Every part of a charge is taken back exactly once, by whoever comes first: the request or the janitor. Who comes
//! later finds nothing left to do, so no counter can go below zero.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use super::starts::Starts;
use crate::clock::Tick;
use crate::fleet::PodState;

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
        self.starts.ages(now)
    }

    /// The last charge or release; `None` = never.
    pub fn touched(&self) -> Option<Tick> {
        Some(self.touched.load(Ordering::Relaxed)).filter(|nanos| *nanos > 0).map(Tick)
    }

    fn touch(&self, now: Tick) {
        self.touched.fetch_max(now.0, Ordering::Relaxed);
    }
}

/// The parts of a charge, as bits.
const ACTIVE: u8 = 1;
const KV: u8 = 2;
const DECODE: u8 = 4;
/// Set beside [`KV`]: the request is over, its blocks stay for a lease.
const STRANDED: u8 = 8;

/// What one request has charged on one pod. Its guard and the janitor share it.
#[derive(Debug)]
pub(super) struct Open {
    pod: Arc<PodState>,
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

/// Why the janitor took a charge back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepReason {
    /// Its request gave no sign of life for longer than the TTL.
    Expired,
    /// The lease of its blocks is over.
    LeaseEnded,
}

impl Open {
    /// Takes these parts back, as far as they are still charged; true when one was.
    fn release(&self, parts: u8, now: Option<Tick>) -> bool {
        let parts = if parts & KV == 0 { parts } else { parts | STRANDED };
        let taken = self.held.fetch_and(!parts, Ordering::AcqRel) & parts;
        let load = &self.pod.load.tokens;
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

    /// Marks what is left of it as stranded until `until`; false when nothing is left.
    fn strand(&self, until: Tick) -> bool {
        self.lease_ends.store(until.0, Ordering::Release);
        let stranded = &self.pod.load.tokens.stranded;
        // Counted before it is marked: whoever releases the mark must find the tokens there.
        stranded.fetch_add(self.tokens, Ordering::AcqRel);
        let mark = |held: u8| (held & KV != 0).then_some(held | STRANDED);
        let marked = self.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, mark).is_ok();
        if !marked {
            stranded.fetch_sub(self.tokens, Ordering::AcqRel);
        }
        marked
    }

    /// Takes everything back if its time is over.
    pub(super) fn sweep(&self, now: Tick) -> Option<SweepReason> {
        let reason = if self.held.load(Ordering::Acquire) & STRANDED != 0 {
            (self.lease_ends.load(Ordering::Acquire) <= now.0).then_some(SweepReason::LeaseEnded)
        } else {
            let idle = now.since(Tick(self.alive_at.load(Ordering::Relaxed)));
            (!self.ttl.is_zero() && idle > self.ttl).then_some(SweepReason::Expired)
        };
        reason.filter(|_| self.release(ACTIVE | KV | DECODE, Some(now)))
    }

    /// Nothing of it is charged any more.
    pub(super) fn is_done(&self) -> bool {
        self.held.load(Ordering::Acquire) == 0
    }

    pub(super) fn pod(&self) -> &PodState {
        &self.pod
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

/// A request's token charge on one pod; what is left of it is released on drop.
#[derive(Debug)]
pub struct TokenCharge(pub(super) Arc<Open>);

impl TokenCharge {
    /// Charges a prefill pod: the tokens count as active and as resident KV. A `ttl` of zero: the janitor never takes
    /// the charge back.
    pub fn prefill(pod: &Arc<PodState>, tokens: u64, now: Tick, ttl: Duration) -> TokenCharge {
        let load = &pod.load.tokens;
        load.active.fetch_add(tokens, Ordering::AcqRel);
        load.kv.fetch_add(tokens, Ordering::AcqRel);
        TokenCharge::open(pod, tokens, ACTIVE | KV, now, ttl)
    }

    /// Charges a decode pod.
    pub fn decode(pod: &Arc<PodState>, tokens: u64, now: Tick, ttl: Duration) -> TokenCharge {
        let load = &pod.load.tokens;
        load.decode.fetch_add(tokens, Ordering::AcqRel);
        load.starts.add(now);
        TokenCharge::open(pod, tokens, DECODE, now, ttl)
    }

    fn open(pod: &Arc<PodState>, tokens: u64, parts: u8, now: Tick, ttl: Duration) -> TokenCharge {
        pod.load.tokens.touch(now);
        TokenCharge(Arc::new(Open {
            pod: Arc::clone(pod),
            tokens,
            decode: parts == DECODE,
            charged_at: now,
            ttl,
            held: AtomicU8::new(parts),
            alive_at: AtomicU64::new(now.0),
            lease_ends: AtomicU64::new(0),
        }))
    }

    /// The tokens of the charge.
    pub fn tokens(&self) -> u64 {
        self.0.tokens
    }

    /// The prefill call has returned: the tokens are not active any more. Doing it again changes nothing.
    pub fn prefill_done(&self, now: Tick) {
        self.0.release(ACTIVE, Some(now));
    }

    /// The request shows that it is alive: its time to live starts anew.
    pub fn touch(&self, now: Tick) {
        self.0.alive_at.fetch_max(now.0, Ordering::Relaxed);
    }

    /// The request is over, but the pod keeps its blocks until `until`, since no decode pod has taken them: the KV part
    /// stays charged until then, and the janitor ends it. Only of use for a charge that a janitor watches.
    pub fn strand(self, until: Tick) {
        self.0.release(ACTIVE, None);
        self.0.strand(until);
    }
}

impl Drop for TokenCharge {
    fn drop(&mut self) {
        // Only the guard itself strands, so this is no race.
        if self.0.held.load(Ordering::Acquire) & STRANDED == 0 {
            self.0.release(ACTIVE | KV | DECODE, None);
        }
    }
}
