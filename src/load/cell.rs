//! Load cells and the guards that charge them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::claim::TokenLoad;
use crate::fleet::PodState;

/// The in-flight work that this replica has put on one pod incarnation.
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
    /// Decode requests this replica has outstanding here: pending plus running.
    pub fn decodes(&self) -> u64 {
        self.pending.saturating_add(self.running)
    }

    /// Everything this replica has outstanding here, prefill legs included.
    pub fn in_flight(&self) -> u64 {
        self.prefills.saturating_add(self.decodes())
    }
}

/// `running` is the low half of the word; 2^32 requests in flight on one pod do not exist.
const RUNNING_MASK: u64 = u32::MAX as u64;
const ONE_PENDING: u64 = 1 << 32;

impl LoadCell {
    /// Reads all values.
    pub fn view(&self) -> LoadView {
        let decodes = self.decodes.load(Ordering::Acquire);
        LoadView {
            prefills: self.prefills.load(Ordering::Acquire),
            pending: decodes >> 32,
            running: decodes & RUNNING_MASK,
            completed: self.completed.load(Ordering::Relaxed),
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
    }
}
