//! The single writer: applies updates, keeps the budget, owns the eviction order.

use std::collections::HashMap;

use super::holders::{Entry, Holders, allocation};
use super::lru::{CHUNK, Lru, NODE_BYTES};
use crate::knobs::PrefixKnobs;

/// The map that readers look into: model-mixed block hash → holders.
pub(super) type Map = papaya::HashMap<u64, Entry, foldhash::fast::RandomState>;

/// Heap bytes of one map entry: the map allocates key and value together.
pub(super) const ENTRY_BYTES: usize = allocation(size_of::<(u64, Entry)>());
/// Bytes per table slot: one of metadata, one pointer.
const SLOT_BYTES: usize = 9;
/// While a table is rebuilt, the old and the new one exist together.
const TABLES: usize = 2;
/// Entries that one drain may drop for age.
const EXPIRIES_PER_DRAIN: usize = 65_536;
/// Entries that one drain looks at while there are departed pods, and otherwise.
const SWEEP_DEPARTED: u32 = 16_384;
const SWEEP_QUIET: u32 = 256;
/// Most blocks of one prompt that are stored, however large the index is.
pub const MAX_PROMPT_BLOCKS: usize = 1 << 18;
/// How long a departed slot is remembered at least, in seconds: requests that routed on an older snapshot may still
/// offer updates for it.
const DEPARTED_LINGER: u32 = 60;

/// How the byte budget is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizing {
    /// For everything but the queue.
    pub(super) bytes: usize,
    /// Entries that fit when every block has one holder; 0 turns the index off.
    pub(super) max_entries: usize,
    /// Hash bytes that may wait in the queue.
    pub(super) queue_bytes: usize,
    /// Blocks of one prompt that are stored: a quarter of the index, so that one client's one request cannot flush it.
    pub(super) max_prompt_blocks: usize,
    /// Entries not put again for longer go, in seconds.
    pub(super) max_idle: u32,
}

impl Sizing {
    pub(super) fn new(knobs: &PrefixKnobs) -> Sizing {
        let queue_bytes = (knobs.budget_bytes / 16).min(16 << 20);
        let bytes = knobs.budget_bytes - queue_bytes;
        let fits = |slots: usize| {
            let rest = bytes.saturating_sub(TABLES * SLOT_BYTES * slots + CHUNK * NODE_BYTES);
            (slots / 2 - 1).min(rest / (ENTRY_BYTES + NODE_BYTES))
        };
        let best = (4..40).map(|power| fits(1usize << power)).max().unwrap_or(0);
        let max_entries = best.min(knobs.max_blocks.unwrap_or(usize::MAX)).min(1 << 31);
        let idle = knobs.max_idle.as_secs() + u64::from(knobs.max_idle.subsec_nanos() > 0);
        Sizing {
            bytes,
            max_entries,
            queue_bytes,
            max_prompt_blocks: (max_entries / 4).clamp(1, MAX_PROMPT_BLOCKS),
            max_idle: u32::try_from(idle).unwrap_or(u32::MAX),
        }
    }
}

/// An upper bound for the table of a map that never held more than `entries`: the map doubles its table only when at
/// least half of the slots are in use.
fn table_bytes(entries: usize) -> usize {
    TABLES * SLOT_BYTES * (2 * entries + 1).next_power_of_two().max(16)
}

/// What happened, for the metrics.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) evicted: u64,
    pub(super) expired: u64,
    pub(super) forgotten: u64,
}

/// When a pod was forgotten.
#[derive(Clone, Copy, Debug)]
struct Departure {
    round: u64,
    at: u32,
}

#[derive(Debug)]
pub(super) struct Writer {
    sizing: Sizing,
    lru: Lru,
    /// Heap bytes of the holder lists.
    list_bytes: usize,
    /// Most entries ever: the table may still have the size for them.
    peak: usize,
    departed: HashMap<u32, Departure>,
    cursor: u32,
    round: u64,
    /// Second of the current drain.
    now: u32,
    pub(super) tally: Tally,
}

impl Writer {
    pub(super) fn new(sizing: Sizing) -> Writer {
        Writer {
            sizing,
            lru: Lru::new(),
            list_bytes: 0,
            peak: 0,
            departed: HashMap::new(),
            cursor: 0,
            round: 0,
            now: 0,
            tally: Tally::default(),
        }
    }

    /// Sets the time of what follows.
    pub(super) fn set_now(&mut self, seconds: u32) {
        self.now = self.now.max(seconds);
    }

    pub(super) fn entries(&self) -> usize {
        self.lru.len()
    }

    /// An upper bound of the bytes held, the queue apart.
    pub(super) fn bytes(&self) -> usize {
        table_bytes(self.peak) + self.lru.allocated() + self.lru.len() * ENTRY_BYTES + self.list_bytes
    }

    /// `slot` is gone: its blocks are removed bit by bit, and it gets no new ones.
    pub(super) fn forget(&mut self, slot: u32) {
        self.departed.insert(slot, Departure { round: self.round, at: self.now });
    }

    fn stays(&self, slot: u32, put: u32) -> bool {
        self.now.saturating_sub(put) <= self.sizing.max_idle
            && (self.departed.is_empty() || !self.departed.contains_key(&slot))
    }

    /// Stores that `slot` holds `keys`, which are the blocks of one prompt in order. Returns how many were stored.
    pub(super) fn put(&mut self, map: &Map, keys: impl Iterator<Item = u64>, slot: u32) -> usize {
        if self.departed.contains_key(&slot) {
            return 0;
        }
        // Each block goes behind its predecessor: eviction then takes the end of a prompt before its start, without
        // which the rest is worth nothing.
        let mut leader = None;
        let mut blocks = 0;
        for key in keys {
            let node = self.put_block(map, key, slot, leader);
            blocks += 1;
            if self.lru.key(node) != Some(key) {
                // Evicted at once: the budget is full of this prompt's own start.
                break;
            }
            leader = Some(node);
        }
        blocks
    }

    fn put_block(&mut self, map: &Map, key: u64, slot: u32, leader: Option<u32>) -> u32 {
        let now = self.now;
        // Pinned per block: a long pin would hold back the memory of every replaced entry.
        let map = map.pin();
        let node = if let Some(entry) = map.get(&key) {
            let node = entry.node;
            self.lru.touch(node, now, leader);
            let known = entry.holders.touch(slot, now);
            if known && !entry.holders.any_goes(|slot, put| self.stays(slot, put)) {
                return node;
            }
            if let Some(holders) = entry.holders.rebuilt(Some((slot, now)), |slot, put| self.stays(slot, put)) {
                self.list_bytes = self.list_bytes + holders.heap_bytes() - entry.holders.heap_bytes();
                map.insert(key, Entry { node, holders });
            }
            node
        } else {
            while self.lru.len() >= self.sizing.max_entries && self.evict_oldest(&map) {}
            let node = self.lru.insert(key, now, leader);
            map.insert(key, Entry { node, holders: Holders::one(slot, now) });
            self.peak = self.peak.max(self.lru.len());
            node
        };
        while self.bytes() > self.sizing.bytes && self.evict_oldest(&map) {}
        node
    }

    fn evict_oldest(&mut self, map: &Pinned<'_>) -> bool {
        let Some((node, key, _)) = self.lru.oldest() else { return false };
        self.drop_entry(map, node, key);
        self.tally.evicted += 1;
        true
    }

    fn drop_entry(&mut self, map: &Pinned<'_>, node: u32, key: u64) {
        if let Some(entry) = map.remove(&key) {
            self.list_bytes -= entry.holders.heap_bytes();
        }
        self.lru.remove(node);
    }

    /// Drops entries that nobody has put for too long, oldest first, a bounded number.
    pub(super) fn expire(&mut self, map: &Map) {
        for _ in 0..EXPIRIES_PER_DRAIN {
            let Some((node, key, last)) = self.lru.oldest() else { return };
            if self.now.saturating_sub(last) <= self.sizing.max_idle {
                return;
            }
            self.drop_entry(&map.pin(), node, key);
            self.tally.expired += 1;
        }
    }

    /// Looks at the next few entries, round and round, for pods that are gone or have not put the block for too long.
    pub(super) fn sweep(&mut self, map: &Map) {
        let budget = if self.departed.is_empty() { SWEEP_QUIET } else { SWEEP_DEPARTED };
        for _ in 0..budget.min(self.lru.high_water().max(1)) {
            if self.cursor >= self.lru.high_water() {
                self.cursor = 0;
                self.round += 1;
                let (round, now) = (self.round, self.now);
                // Two turns: the round during which it was forgotten does not count as a whole one.
                self.departed.retain(|_, d| round < d.round + 2 || now.saturating_sub(d.at) < DEPARTED_LINGER);
                return;
            }
            let node = self.cursor;
            self.cursor += 1;
            if let Some(key) = self.lru.key(node) {
                self.sweep_entry(&map.pin(), node, key);
            }
        }
    }

    fn sweep_entry(&mut self, map: &Pinned<'_>, node: u32, key: u64) {
        let Some(entry) = map.get(&key) else { return };
        if !entry.holders.any_goes(|slot, put| self.stays(slot, put)) {
            return;
        }
        if let Some(holders) = entry.holders.rebuilt(None, |slot, put| self.stays(slot, put)) {
            self.list_bytes = self.list_bytes + holders.heap_bytes() - entry.holders.heap_bytes();
            map.insert(key, Entry { node, holders });
        } else {
            self.drop_entry(map, node, key);
            self.tally.forgotten += 1;
        }
    }
}

type Pinned<'a> = papaya::HashMapRef<'a, u64, Entry, foldhash::fast::RandomState, papaya::LocalGuard<'a>>;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::knobs::Tokenizer;

    #[test]
    fn an_entry_is_as_small_as_the_accounting_says() {
        assert_eq!(size_of::<(u64, Entry)>(), 32);
        assert_eq!(ENTRY_BYTES, 48);
        assert_eq!(NODE_BYTES, 24);
    }

    #[test]
    fn the_full_index_fits_its_budget() {
        for budget in [0, 1, 4 << 10, 64 << 10, 1 << 20, 100_000_000, 256 << 20, 8 << 30] {
            let knobs = PrefixKnobs {
                tokenizer: Tokenizer::Character,
                block_size: 128,
                hash_seed: None,
                budget_bytes: budget,
                max_blocks: None,
                max_idle: Duration::from_millis(1500),
            };
            let sizing = Sizing::new(&knobs);
            assert_eq!(sizing.max_idle, 2);
            let full = table_bytes(sizing.max_entries)
                + (sizing.max_entries.div_ceil(CHUNK) * CHUNK * NODE_BYTES)
                + sizing.max_entries * ENTRY_BYTES;
            assert!(sizing.max_entries == 0 || full + sizing.queue_bytes <= budget, "{budget}: {sizing:?} {full}");
            if budget >= 1 << 20 {
                // No more than 160 bytes per block, all included.
                assert!(sizing.max_entries * 160 >= budget, "{budget}: {sizing:?}");
            }
            let capped = Sizing::new(&PrefixKnobs { max_blocks: Some(5), ..knobs });
            assert_eq!(capped.max_entries, sizing.max_entries.min(5));
        }
    }
}
