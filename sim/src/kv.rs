//! The KV cache: a budget of blocks with prefix reuse.
//!
//! A sequence takes all its blocks at admission (prompt and planned output) and gives them back when its [`KvLease`]
//! drops, whoever dies. Full prompt blocks stay behind as cache and are evicted, least recently used first, when room
//! is needed. Real engines grow a sequence block by block and preempt; this one never preempts.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use crate::prompt::{BLOCK_TOKENS, Prompt};

/// A cached prompt block.
#[derive(Debug)]
struct Entry {
    users: u32,
    /// When it was last released; the key into the eviction order while `users` is 0.
    stamp: u64,
    /// Whether its content was computed; a block whose prefill was cancelled is worthless.
    computed: bool,
}

#[derive(Debug, Default)]
struct Blocks {
    entries: HashMap<u64, Entry>,
    idle: BTreeMap<u64, u64>,
    /// Blocks that no cache entry stands for: partial prompt blocks and output.
    private: u64,
    shared_in_use: u64,
    clock: u64,
}

impl Blocks {
    fn active(&self) -> u64 {
        self.private + self.shared_in_use
    }

    fn take(&mut self, chain: &[u64], private: u64, capacity: u64, most_hits: usize) -> Option<usize> {
        let hits =
            chain.iter().take(most_hits).take_while(|hash| self.entries.get(*hash).is_some_and(|e| e.computed)).count();
        // Blocks of the chain that are not in use by anybody yet: each costs one block, cached or not.
        let newly_used =
            chain.iter().filter(|hash| self.entries.get(*hash).is_none_or(|e| e.users == 0)).count() as u64;
        if self.active() + newly_used + private > capacity {
            return None;
        }
        for hash in chain {
            let entry = self.entries.entry(*hash).or_insert(Entry { users: 0, stamp: 0, computed: false });
            if entry.users == 0 {
                self.idle.remove(&entry.stamp);
                self.shared_in_use += 1;
            }
            entry.users += 1;
        }
        self.private += private;
        while self.active() + self.idle.len() as u64 > capacity {
            let Some((_, evicted)) = self.idle.pop_first() else { break };
            self.entries.remove(&evicted);
        }
        Some(hits)
    }

    fn give_back(&mut self, chain: &[u64], private: u64, keep: bool) {
        self.private = self.private.saturating_sub(private);
        // The tail is released first, so that it is evicted before the prefix it needs.
        for hash in chain.iter().rev() {
            let Some(entry) = self.entries.get_mut(hash) else { continue };
            entry.users = entry.users.saturating_sub(1);
            if entry.users > 0 {
                continue;
            }
            self.shared_in_use = self.shared_in_use.saturating_sub(1);
            if keep && entry.computed {
                self.clock += 1;
                entry.stamp = self.clock;
                self.idle.insert(self.clock, *hash);
            } else {
                self.entries.remove(hash);
            }
        }
    }
}

/// The cache. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct KvCache {
    blocks: Arc<Mutex<Blocks>>,
    freed: Arc<Notify>,
    capacity: u64,
    reuse: bool,
}

impl KvCache {
    /// A cache of `tokens` tokens; `reuse` keeps prompt blocks after use.
    pub fn new(tokens: u64, reuse: bool) -> KvCache {
        KvCache {
            blocks: Arc::default(),
            freed: Arc::default(),
            capacity: (tokens / u64::from(BLOCK_TOKENS)).max(1),
            reuse,
        }
    }

    /// Capacity in blocks.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Blocks in use by sequences and pinned hand-offs; idle cached blocks do not count.
    pub fn active(&self) -> u64 {
        self.lock().active()
    }

    /// Takes the blocks of `prompt` and `output_tokens` more tokens, or `None` when they do not fit now.
    pub fn try_take(&self, prompt: &Prompt, output_tokens: u32) -> Option<KvLease> {
        let chain = if self.reuse { prompt.chain.clone() } else { Vec::new() };
        let total = u64::from(prompt.tokens.saturating_add(output_tokens).div_ceil(BLOCK_TOKENS));
        let private = total.saturating_sub(chain.len() as u64);
        // The last prompt token is always computed, so a whole-prompt hit is one block short.
        let most_hits = (prompt.tokens.saturating_sub(1) / BLOCK_TOKENS) as usize;
        let hits = self.lock().take(&chain, private, self.capacity, most_hits)?;
        Some(KvLease { cache: self.clone(), chain, private, hits: hits as u32 })
    }

    /// As [`KvCache::try_take`], but waits for room. Callers queue up outside, so that waiting is first come, first served.
    pub async fn take(&self, prompt: &Prompt, output_tokens: u32) -> KvLease {
        loop {
            let freed = self.freed.notified();
            if let Some(lease) = self.try_take(prompt, output_tokens) {
                return lease;
            }
            freed.await;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Blocks held by one sequence or hand-off; given back on drop.
#[derive(Debug)]
pub(crate) struct KvLease {
    cache: KvCache,
    chain: Vec<u64>,
    private: u64,
    hits: u32,
}

impl KvLease {
    /// Prompt tokens found in the cache at admission.
    pub fn cached_tokens(&self) -> u32 {
        self.hits * BLOCK_TOKENS
    }

    /// Says that the prompt's blocks now hold what they stand for.
    pub fn mark_computed(&self) {
        let mut blocks = self.cache.lock();
        for hash in &self.chain {
            if let Some(entry) = blocks.entries.get_mut(hash) {
                entry.computed = true;
            }
        }
    }
}

impl Drop for KvLease {
    fn drop(&mut self) {
        self.cache.lock().give_back(&self.chain, self.private, self.cache.reuse);
        self.cache.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prompt of `blocks` full blocks of `letter`.
    fn prompt(letter: &str, blocks: usize) -> Prompt {
        Prompt::of_text(&letter.repeat(64 * blocks), 0)
    }

    #[test]
    fn takes_and_gives_back_every_block() {
        let cache = KvCache::new(160, true);
        assert_eq!(cache.capacity(), 10);
        let a = cache.try_take(&prompt("a", 4), 17).expect("fits");
        assert_eq!((cache.active(), a.cached_tokens()), (6, 0));
        assert!(cache.try_take(&prompt("b", 4), 1).is_none(), "5 blocks do not fit into 4");
        let b = cache.try_take(&prompt("b", 3), 16).expect("exactly 4 blocks are left");
        drop(a);
        drop(b);
        assert_eq!(cache.active(), 0);
    }

    #[test]
    fn a_computed_prefix_is_hit_and_shared() {
        let cache = KvCache::new(160, true);
        let a = cache.try_take(&prompt("a", 4), 0).expect("fits");
        assert_eq!(cache.try_take(&prompt("a", 4), 0).expect("shares").cached_tokens(), 0, "not computed yet");
        a.mark_computed();
        let longer = Prompt::of_text(&format!("{}{}", "a".repeat(256), "z".repeat(64)), 0);
        let b = cache.try_take(&longer, 0).expect("fits");
        assert_eq!(b.cached_tokens(), 64);
        assert_eq!(cache.active(), 5, "four shared blocks count once");
        drop(a);
        drop(b);
        let again = cache.try_take(&prompt("a", 4), 0).expect("fits");
        assert_eq!(again.cached_tokens(), 48, "the last block is computed again for its last token");
    }

    #[test]
    fn a_cancelled_prefill_leaves_no_cache_behind() {
        let cache = KvCache::new(160, true);
        drop(cache.try_take(&prompt("a", 4), 0).expect("fits"));
        assert_eq!(cache.try_take(&prompt("a", 4), 0).expect("fits").cached_tokens(), 0);
    }

    #[test]
    fn the_least_recently_used_block_goes_first() {
        let cache = KvCache::new(96, true);
        for letter in ["a", "b", "c"] {
            let lease = cache.try_take(&prompt(letter, 2), 0).expect("fits");
            lease.mark_computed();
        }
        cache.try_take(&prompt("a", 2), 0).expect("fits").mark_computed();
        cache.try_take(&prompt("d", 2), 0).expect("evicts b").mark_computed();
        assert_eq!(cache.try_take(&prompt("a", 2), 0).expect("fits").cached_tokens(), 16);
        assert_eq!(cache.try_take(&prompt("b", 2), 0).expect("fits").cached_tokens(), 0);
    }

    #[test]
    fn without_reuse_nothing_is_kept() {
        let cache = KvCache::new(160, false);
        cache.try_take(&prompt("a", 4), 0).expect("fits").mark_computed();
        assert_eq!(cache.try_take(&prompt("a", 4), 0).expect("fits").cached_tokens(), 0);
    }

    #[tokio::test]
    async fn waits_until_room_is_given_back() {
        let cache = KvCache::new(64, true);
        let held = cache.try_take(&prompt("a", 4), 0).expect("fits");
        let waiting = tokio::spawn({
            let cache = cache.clone();
            async move { cache.take(&prompt("b", 4), 0).await.cached_tokens() }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(held);
        assert_eq!(waiting.await.expect("ends"), 0);
        assert_eq!(cache.active(), 0);
    }
}
