//! Prefilled prompts that wait to be pulled: the prefill engine's side of the hand-off.
//!
//! Blocks stay pinned until they are pulled, freed, or their lease ends. What became of a hand-off is remembered for a
//! while, so that a second use can be told from an unknown one. Pure but for the blocks it holds: time comes in.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::kv::KvLease;

/// A prompt's pinned KV.
#[derive(Debug)]
pub(crate) struct Pinned {
    /// Identity of the prompt.
    pub prompt_hash: u64,
    /// Its length.
    pub tokens: u32,
    /// Its KV blocks.
    pub blocks: u32,
    /// What the first token was sampled with; 0 where it does not matter.
    pub sampling: u64,
    /// The first token.
    pub first_token: u32,
    /// The blocks themselves.
    #[expect(dead_code, reason = "held for what its drop does")]
    pub lease: KvLease,
}

/// What a pull brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pulled {
    /// Identity of the prompt whose KV this is.
    pub prompt_hash: u64,
    /// Its length.
    pub tokens: u32,
    /// Its KV blocks.
    pub blocks: u32,
    /// What the first token was sampled with; 0 where it does not matter.
    pub sampling: u64,
    /// The first token.
    pub first_token: u32,
}

/// Why a pull brings nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NoPull {
    /// Pulled before.
    AlreadyPulled,
    /// The lease ended before.
    Expired,
    /// Given up by the decode engine before.
    Freed,
    /// Never heard of.
    Unknown,
    /// Meant for another engine.
    WrongEngine,
}

#[derive(Debug, Default)]
struct Table {
    live: HashMap<String, (Instant, Pinned)>,
    by_end: BTreeSet<(Instant, String)>,
    gone: HashMap<String, NoPull>,
    gone_order: VecDeque<String>,
}

/// Counts of a [`Handoffs`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PinnedCounts {
    pub requests: usize,
    pub blocks: u64,
}

/// The table of one prefill engine.
#[derive(Debug)]
pub(crate) struct Handoffs {
    table: Mutex<Table>,
    lease: Duration,
    remembered: usize,
    /// Told when the earliest end may have changed.
    pub changed: Notify,
}

impl Handoffs {
    pub fn new(lease: Duration, remembered: usize) -> Handoffs {
        Handoffs { table: Mutex::default(), lease, remembered, changed: Notify::new() }
    }

    /// Pins a prompt's blocks under `id` for one lease.
    pub fn pin(&self, id: String, pinned: Pinned, now: Instant) {
        let end = now + self.lease;
        let mut table = self.lock();
        table.by_end.insert((end, id.clone()));
        if let Some((old_end, _)) = table.live.insert(id.clone(), (end, pinned)) {
            table.by_end.remove(&(old_end, id));
        }
        drop(table);
        self.changed.notify_one();
    }

    /// Hands the blocks of `id` over and frees them.
    pub fn pull(&self, id: &str) -> Result<Pulled, NoPull> {
        let pinned = self.lock().remove(id, NoPull::AlreadyPulled, self.remembered)?;
        let Pinned { prompt_hash, tokens, blocks, sampling, first_token, .. } = pinned;
        Ok(Pulled { prompt_hash, tokens, blocks, sampling, first_token })
    }

    /// Frees the blocks of `id` without a pull; false when nothing is pinned under it.
    pub fn free(&self, id: &str) -> bool {
        self.lock().remove(id, NoPull::Freed, self.remembered).is_ok()
    }

    /// A heartbeat of the decode engine: the lease ends no earlier than two thirds of a lease from now.
    pub fn extend(&self, id: &str, now: Instant) -> bool {
        let mut table = self.lock();
        let Table { live, by_end, .. } = &mut *table;
        let Some((end, _)) = live.get_mut(id) else { return false };
        let new_end = (*end).max(now + self.lease * 2 / 3);
        by_end.remove(&(*end, id.to_owned()));
        by_end.insert((new_end, id.to_owned()));
        *end = new_end;
        true
    }

    /// Whether the blocks of `id` are pinned.
    pub fn is_live(&self, id: &str) -> bool {
        self.lock().live.contains_key(id)
    }

    /// Frees what ended by `now`; returns the ids of those hand-offs.
    pub fn expire(&self, now: Instant) -> Vec<String> {
        let mut table = self.lock();
        let mut expired = Vec::new();
        while let Some((end, id)) = table.by_end.first().cloned() {
            if end > now {
                break;
            }
            if table.remove(&id, NoPull::Expired, self.remembered).is_ok() {
                expired.push(id);
            }
        }
        expired
    }

    /// When the next lease ends.
    pub fn next_end(&self) -> Option<Instant> {
        self.lock().by_end.first().map(|(end, _)| *end)
    }

    pub fn counts(&self) -> PinnedCounts {
        let table = self.lock();
        let blocks = table.live.values().map(|(_, pinned)| u64::from(pinned.blocks)).sum();
        PinnedCounts { requests: table.live.len(), blocks }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn remove(&mut self, id: &str, why: NoPull, remembered: usize) -> Result<Pinned, NoPull> {
        let Some((end, pinned)) = self.live.remove(id) else {
            return Err(self.gone.get(id).copied().unwrap_or(NoPull::Unknown));
        };
        self.by_end.remove(&(end, id.to_owned()));
        if self.gone.insert(id.to_owned(), why).is_none() {
            self.gone_order.push_back(id.to_owned());
        }
        while self.gone_order.len() > remembered {
            let Some(oldest) = self.gone_order.pop_front() else { break };
            self.gone.remove(&oldest);
        }
        Ok(pinned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ambient;
    use crate::kv::KvCache;
    use crate::prompt::Prompt;

    const LEASE: Duration = Duration::from_secs(30);

    fn pin(handoffs: &Handoffs, cache: &KvCache, id: &str, now: Instant) {
        let prompt = Prompt::of_text(&id.repeat(64), 0);
        let lease = cache.try_take(&prompt, 1).expect("fits");
        let pinned = Pinned {
            prompt_hash: prompt.hash,
            tokens: prompt.tokens,
            blocks: prompt.blocks(),
            sampling: 0,
            first_token: 0,
            lease,
        };
        handoffs.pin(id.to_owned(), pinned, now);
    }

    #[test]
    fn a_hand_off_is_pulled_once() {
        let (handoffs, cache, now) = (Handoffs::new(LEASE, 2), KvCache::new(1 << 16, true), ambient::now());
        pin(&handoffs, &cache, "a", now);
        assert_eq!(handoffs.counts(), PinnedCounts { requests: 1, blocks: 1 });
        assert!(cache.active() > 0);
        assert_eq!(handoffs.pull("a").map(|pulled| pulled.tokens), Ok(16));
        assert_eq!(handoffs.pull("a"), Err(NoPull::AlreadyPulled));
        assert_eq!(handoffs.pull("b"), Err(NoPull::Unknown));
        assert_eq!((cache.active(), handoffs.next_end()), (0, None));
        pin(&handoffs, &cache, "c", now);
        assert!(handoffs.free("c") && !handoffs.free("c"));
        assert_eq!(handoffs.pull("c"), Err(NoPull::Freed));
        pin(&handoffs, &cache, "d", now);
        assert!(handoffs.free("d"));
        assert_eq!(handoffs.pull("a"), Err(NoPull::Unknown), "only two are remembered");
    }

    #[test]
    fn leases_end_exactly_when_they_should() {
        let (handoffs, cache, now) = (Handoffs::new(LEASE, 9), KvCache::new(1 << 16, true), ambient::now());
        pin(&handoffs, &cache, "a", now);
        pin(&handoffs, &cache, "b", now);
        assert_eq!(handoffs.expire(now + LEASE - Duration::from_nanos(1)).len(), 0);
        assert!(handoffs.extend("b", now + Duration::from_secs(29)));
        assert!(!handoffs.extend("x", now));
        assert_eq!(handoffs.expire(now + LEASE), ["a"]);
        assert_eq!(handoffs.pull("a"), Err(NoPull::Expired));
        assert_eq!(handoffs.next_end(), Some(now + Duration::from_secs(49)));
        assert!(handoffs.extend("b", now), "an early heartbeat takes nothing away");
        assert_eq!(handoffs.next_end(), Some(now + Duration::from_secs(49)));
        assert_eq!(handoffs.expire(now + Duration::from_secs(49)), ["b"]);
        assert_eq!((cache.active(), handoffs.counts()), (0, PinnedCounts::default()));
    }
}
