//! The index as the rest of the house sees it.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use crossbeam::queue::ArrayQueue;
use xxhash_rust::xxh64::xxh64;

use super::matching::Matching;
use super::writer::{Map, Sizing, Writer};
use crate::clock::Tick;
use crate::fleet::PodState;
use crate::knobs::PrefixKnobs;

/// Updates that may wait (reference gateway, section 7).
const QUEUE: usize = 1024;
/// Departures that may wait. One that does not fit is not missed: its entries go by age.
const FORGET_QUEUE: usize = 4096;
/// Blocks that one drain stores before it returns: some ten milliseconds of work.
const BLOCKS_PER_DRAIN: usize = 32_768;

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

/// The state of the index, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Blocks known.
    pub entries: u64,
    /// Memory, an upper bound, in bytes: table, entries, holder lists, eviction order, waiting updates.
    pub bytes: u64,
    /// Blocks dropped to stay within the budget, since the start.
    pub evictions: u64,
    /// Blocks dropped because nobody put them for too long, since the start.
    pub expirations: u64,
    /// Blocks dropped because the only pod that held them departed, since the start.
    pub forgotten: u64,
    /// Updates dropped because the queue was full, since the start.
    pub dropped_updates: u64,
    /// Updates waiting.
    pub queued_updates: u64,
}

/// What one [`PrefixIndex::drain`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Updates applied.
    pub updates: usize,
    /// Blocks stored.
    pub blocks: usize,
    /// Updates are still waiting: give others a turn and call again.
    pub more: bool,
}

/// Block hash → pods, bounded by a byte budget. Lookups take no lock.
pub struct PrefixIndex {
    map: Map,
    updates: ArrayQueue<PrefixUpdate>,
    queued_bytes: AtomicUsize,
    forgets: ArrayQueue<u32>,
    sizing: Sizing,
    /// Only [`PrefixIndex::drain`] takes this, and never waits for it.
    writer: Mutex<Writer>,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    entries: AtomicU64,
    bytes: AtomicU64,
    evictions: AtomicU64,
    expirations: AtomicU64,
    forgotten: AtomicU64,
    dropped_updates: AtomicU64,
}

impl fmt::Debug for PrefixIndex {
    /// The map would print all its entries.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixIndex").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// The same prompt for two models makes two keys.
fn model_mask(model: &str) -> u64 {
    xxh64(model.as_bytes(), 0)
}

impl PrefixIndex {
    /// An empty index. A budget below some kilobytes turns it off.
    pub fn new(knobs: &PrefixKnobs) -> PrefixIndex {
        let sizing = Sizing::new(knobs);
        PrefixIndex {
            map: Map::default(),
            updates: ArrayQueue::new(QUEUE),
            queued_bytes: AtomicUsize::new(0),
            forgets: ArrayQueue::new(FORGET_QUEUE),
            sizing,
            writer: Mutex::new(Writer::new(sizing)),
            counters: Counters::default(),
        }
    }

    /// The share of the prompt's blocks, in percent (0..=100, integer division), that each candidate holds without a
    /// gap from the start. `candidates` are pod slots; the answer has the same order.
    ///
    /// Costs one map lookup per block that some candidate still matches, and work in proportion to that block's
    /// holders.
    pub fn match_percents(&self, model: &str, hashes: &[u64], candidates: &[u32]) -> Vec<u8> {
        let mut percents = vec![0; candidates.len()];
        let Some((first, rest)) = hashes.split_first() else { return percents };
        let percent = |blocks: usize| (blocks * 100 / hashes.len()) as u8;
        let mask = model_mask(model);
        let map = self.map.pin();
        let Some(entry) = map.get(&(first ^ mask)) else { return percents };
        let mut matching = Matching::start(candidates, entry.holders.slots());
        let mut matched = 1;
        let mut note = |position: u32, blocks: usize| {
            if let Some(slot) = percents.get_mut(position as usize) {
                *slot = percent(blocks);
            }
        };
        for hash in rest {
            if matching.is_empty() {
                break;
            }
            let Some(entry) = map.get(&(hash ^ mask)) else { break };
            matching.keep(entry.holders.slots(), |position| note(position, matched));
            matched += 1;
        }
        for position in matching.positions() {
            note(*position, matched);
        }
        percents
    }

    /// Queues an update; dropped (and counted) when the queue is full, by number or by bytes. Never waits.
    pub fn offer(&self, update: PrefixUpdate) {
        let bytes = size_of_val::<[u64]>(&update.hashes);
        if bytes == 0 || self.sizing.max_entries == 0 {
            return;
        }
        let before = self.queued_bytes.fetch_add(bytes, Ordering::AcqRel);
        if before.saturating_add(bytes) > self.sizing.queue_bytes || self.updates.push(update).is_err() {
            self.queued_bytes.fetch_sub(bytes, Ordering::AcqRel);
            self.counters.dropped_updates.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The incarnation `slot` is gone. Its blocks are removed by the next drains, bit by bit; no lookup asks for it
    /// any more anyway, because slots are never used twice. Never waits.
    pub fn forget(&self, slot: u32) {
        // A full queue loses nothing but time: see `FORGET_QUEUE`.
        let _ = self.forgets.push(slot);
    }

    /// Applies what waits, drops what is too old, and looks for what departed pods left. A background task calls this
    /// whenever updates may wait and at least once per sweep interval; a second caller at the same time returns at
    /// once. The work of one call is bounded.
    pub fn drain(&self, now: Tick) -> Drained {
        let Some(mut writer) = self.lock_writer() else { return Drained::default() };
        writer.set_now(u32::try_from(now.0 / 1_000_000_000).unwrap_or(u32::MAX));
        for _ in 0..FORGET_QUEUE {
            let Some(slot) = self.forgets.pop() else { break };
            writer.forget(slot);
        }
        let mut drained = Drained::default();
        while drained.blocks < BLOCKS_PER_DRAIN {
            let Some(update) = self.updates.pop() else { break };
            self.queued_bytes.fetch_sub(size_of_val::<[u64]>(&update.hashes), Ordering::AcqRel);
            let mask = model_mask(&update.model);
            let stored = update.hashes.len().min(self.sizing.max_prompt_blocks);
            let keys = update.hashes.iter().take(stored).map(|hash| hash ^ mask);
            drained.blocks += writer.put(&self.map, keys, update.pod.slot);
            drained.updates += 1;
        }
        writer.expire(&self.map);
        writer.sweep(&self.map);
        self.publish(&writer);
        drained.more = !self.updates.is_empty();
        drained
    }

    fn lock_writer(&self) -> Option<MutexGuard<'_, Writer>> {
        match self.writer.try_lock() {
            Ok(writer) => Some(writer),
            // A panic in an earlier drain: the map is still consistent entry by entry.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn publish(&self, writer: &Writer) {
        let counters = &self.counters;
        counters.entries.store(writer.entries() as u64, Ordering::Relaxed);
        counters.bytes.store(writer.bytes() as u64, Ordering::Relaxed);
        counters.evictions.store(writer.tally.evicted, Ordering::Relaxed);
        counters.expirations.store(writer.tally.expired, Ordering::Relaxed);
        counters.forgotten.store(writer.tally.forgotten, Ordering::Relaxed);
    }

    /// The state as of the last drain. Reads atomics only.
    pub fn stats(&self) -> PrefixStats {
        let counters = &self.counters;
        PrefixStats {
            entries: counters.entries.load(Ordering::Relaxed),
            bytes: counters.bytes.load(Ordering::Relaxed) + self.queued_bytes.load(Ordering::Relaxed) as u64,
            evictions: counters.evictions.load(Ordering::Relaxed),
            expirations: counters.expirations.load(Ordering::Relaxed),
            forgotten: counters.forgotten.load(Ordering::Relaxed),
            dropped_updates: counters.dropped_updates.load(Ordering::Relaxed),
            queued_updates: self.updates.len() as u64,
        }
    }
}
