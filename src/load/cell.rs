//! Load cells and the guards that charge them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::claim::{TokenLoad, TokenView};
use super::remote::Remote;
use super::share::Share;
use crate::clock::Tick;
use crate::fleet::PodState;

/// The in-flight work on one pod incarnation: what this replica has put there, and what the others say they have.
#[derive(Debug, Default)]
pub struct LoadCell {
    /// Prefill legs charged and not released.
    prefills: AtomicU64,
    /// Decode work: pending (charged, not yet handed over) in the high half, running in the low half, in one word so
    /// that a request never counts nowhere or twice on its way from one to the other.
    decodes: AtomicU64,
    /// Requests completed on this pod through this gateway; only grows.
    completed: AtomicU64,
    /// What the policies that count tokens have charged.
    pub tokens: TokenLoad,
    /// What the other replicas last published.
    pub remote: Remote,
}

/// The values of a [`LoadCell`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadView {
    /// Outstanding prefill legs.
    pub prefills: u64,
    /// Decode requests charged whose prefill leg still runs.
    pub pending: u64,
    /// Decode requests handed over.
    pub running: u64,
    /// Requests completed since the incarnation appeared.
    pub completed: u64,
}

impl LoadView {
    /// Decode requests outstanding here: pending plus running.
    pub fn decodes(&self) -> u64 {
        self.pending.saturating_add(self.running)
    }

    /// Everything outstanding here, prefill legs included.
    pub fn in_flight(&self) -> u64 {
        self.prefills.saturating_add(self.decodes())
    }
}

/// `running` is the low half of the word; 2^32 requests in flight on one pod do not exist.
const RUNNING_MASK: u64 = u32::MAX as u64;
const ONE_PENDING: u64 = 1 << 32;

impl LoadCell {
    /// Reads all values of this replica's own work.
    pub fn view(&self) -> LoadView {
        let decodes = self.decodes.load(Ordering::Acquire);
        LoadView {
            prefills: self.prefills.load(Ordering::Acquire),
            pending: decodes >> 32,
            running: decodes & RUNNING_MASK,
            completed: self.completed.load(Ordering::Relaxed),
        }
    }

    /// This replica's own work and the others', as far as that has not [faded](Remote). What was completed is counted in
    /// any case: rates are made of it, and it does not go back.
    pub fn total(&self, now: Tick) -> LoadView {
        let own = self.view();
        let own = LoadView { completed: own.completed.saturating_add(self.remote.completed()), ..own };
        let Some(fade) = self.remote.fade(now) else { return own };
        let (prefills, pending, running) = self.remote.counts(fade);
        LoadView {
            prefills: own.prefills.saturating_add(prefills),
            pending: own.pending.saturating_add(pending),
            running: own.running.saturating_add(running),
            completed: own.completed,
        }
    }

    /// The token counters likewise. What is stranded is this replica's own; the others' is in their `kv`.
    pub fn total_tokens(&self, now: Tick) -> TokenView {
        let own = self.tokens.view();
        let Some(fade) = self.remote.fade(now) else { return own };
        let (active, kv) = self.remote.prefill_tokens(fade);
        TokenView {
            active: own.active.saturating_add(active),
            kv: own.kv.saturating_add(kv),
            stranded: own.stranded,
            decode: own.decode.saturating_add(self.remote.decode_tokens(fade)),
        }
    }

    /// [`TokenLoad::decode_ages`] likewise.
    pub fn total_decode_ages(&self, now: Tick) -> (u64, f64) {
        let (mut count, mut ages) = self.tokens.decode_ages_ms(now);
        if let Some(fade) = self.remote.fade(now) {
            let (others, their_ages) = self.remote.decode_ages_ms(fade, now);
            (count, ages) = (count.saturating_add(others), ages.saturating_add(their_ages));
        }
        (count, ages as f64 / 1000.0)
    }

    /// This replica's own work as it publishes it, when the clock of the shares shows `fleet_now_ms` at `now`.
    pub fn share(&self, now: Tick, fleet_now_ms: u64) -> Share {
        let (counts, tokens) = (self.view(), self.tokens.view());
        let (decode_open, ages) = self.tokens.decode_ages_ms(now);
        let narrow = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        Share {
            running: narrow(counts.running),
            pending: narrow(counts.pending),
            prefills: narrow(counts.prefills),
            decode_tokens: tokens.decode,
            decode_open,
            decode_start_sum_ms: decode_open.saturating_mul(fleet_now_ms).saturating_sub(ages),
            prefill_tokens: tokens.active,
            kv_tokens: tokens.kv,
        }
    }
}

/// One outstanding prefill leg; released on drop.
#[derive(Debug)]
pub struct PrefillCharge(Arc<PodState>);

impl PrefillCharge {
    /// Charges one prefill leg.
    pub fn open(pod: &Arc<PodState>) -> PrefillCharge {
        pod.load.prefills.fetch_add(1, Ordering::AcqRel);
        pod.port.mark(pod);
        PrefillCharge(Arc::clone(pod))
    }

    /// The incarnation that was charged.
    pub fn pod(&self) -> &Arc<PodState> {
        &self.0
    }
}

impl Drop for PrefillCharge {
    fn drop(&mut self) {
        self.0.load.prefills.fetch_sub(1, Ordering::AcqRel);
        self.0.port.mark(&self.0);
    }
}

/// One decode request on its pod, pending at first; released on drop.
#[derive(Debug)]
pub struct DecodeCharge {
    pod: Arc<PodState>,
    handed_over: bool,
}

impl DecodeCharge {
    /// Charges one decode request as pending.
    pub fn open(pod: &Arc<PodState>) -> DecodeCharge {
        pod.load.decodes.fetch_add(ONE_PENDING, Ordering::AcqRel);
        pod.port.mark(pod);
        DecodeCharge { pod: Arc::clone(pod), handed_over: false }
    }

    /// The incarnation that was charged.
    pub fn pod(&self) -> &Arc<PodState> {
        &self.pod
    }

    /// The request goes to the decode pod now: pending becomes running. Doing it again changes nothing.
    pub fn hand_over(&mut self) {
        if !self.handed_over {
            self.handed_over = true;
            // One atomic step: minus one pending, plus one running. No reader sees the request nowhere or twice.
            self.pod.load.decodes.fetch_sub(ONE_PENDING - 1, Ordering::AcqRel);
            self.pod.port.mark(&self.pod);
        }
    }

    /// Releases after a complete answer, which the drain rate counts.
    pub fn complete(self) {
        self.note_completed();
    }

    /// The answer is complete, which the drain rate counts.
    pub fn note_completed(&self) {
        self.pod.load.completed.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for DecodeCharge {
    fn drop(&mut self) {
        let amount = if self.handed_over { 1 } else { ONE_PENDING };
        self.pod.load.decodes.fetch_sub(amount, Ordering::AcqRel);
        self.pod.port.mark(&self.pod);
    }
}
