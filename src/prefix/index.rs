//! The index itself.

use std::sync::Arc;

use crate::fleet::PodState;
use crate::knobs::PrefixKnobs;

/// "This pod is about to compute these blocks."
#[derive(Clone, Debug)]
pub struct PrefixUpdate {
    /// Model name.
    pub model: Arc<str>,
    /// The prompt's block hashes.
    pub hashes: Arc<[u64]>,
    /// The prefill pod.
    pub pod: Arc<PodState>,
}

/// Block hash → pods, bounded by a byte budget. Lookups take no lock.
#[derive(Debug)]
pub struct PrefixIndex {}

impl PrefixIndex {
    /// An empty index.
    pub fn new(_knobs: &PrefixKnobs) -> PrefixIndex {
        PrefixIndex {}
    }

    /// The share of the prompt's blocks, in percent (0..=100, integer division), that each candidate holds without a
    /// gap from the start. `candidates` are pod slots; the answer has the same order.
    pub fn match_percents(&self, _model: &str, _hashes: &[u64], candidates: &[u32]) -> Vec<u8> {
        vec![0; candidates.len()]
    }

    /// Queues an update; dropped (and counted) when the queue is full. Never waits.
    pub fn offer(&self, _update: PrefixUpdate) {}
}
