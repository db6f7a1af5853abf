//! The prefix cache of one modelled prefill engine: whole blocks, least recently used first out.

use std::collections::{BTreeMap, HashMap};

/// Chained block hashes with the order in which they were last used. A hash stands for its whole prefix.
#[derive(Debug)]
pub(super) struct PrefixCache {
    capacity: usize,
    stamps: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    clock: u64,
}

impl PrefixCache {
    /// A cache of so many blocks; 0 keeps nothing.
    pub(super) fn new(capacity: usize) -> PrefixCache {
        PrefixCache { capacity, stamps: HashMap::new(), order: BTreeMap::new(), clock: 0 }
    }

    /// The leading blocks of `hashes` that are there.
    pub(super) fn leading(&self, hashes: &[u64]) -> usize {
        hashes.iter().take_while(|hash| self.stamps.contains_key(hash)).count()
    }

    /// The blocks of a computed prompt are there now, as far as they fit, its start before its end.
    pub(super) fn put(&mut self, hashes: &[u64]) {
        // The end is used first, so that it leaves first: without the blocks before it, it is worth nothing.
        for hash in hashes.iter().take(self.capacity).rev() {
            self.clock += 1;
            self.order.insert(self.clock, *hash);
            if let Some(before) = self.stamps.insert(*hash, self.clock) {
                self.order.remove(&before);
            }
        }
        while self.order.len() > self.capacity {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            self.stamps.remove(&oldest);
        }
    }
}
