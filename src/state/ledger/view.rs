//! What the other replicas have outstanding, as of one version of the ledger.

use std::collections::HashMap;
use std::time::Duration;

use crate::clock::Tick;
use crate::load::Share;
use crate::state::wire::{ClaimReply, News, SyncReply};

/// The sum of the other replicas' shares, per pod.
#[derive(Debug, Default)]
pub struct RemoteView {
    pods: HashMap<u64, Share>,
    version: u64,
    /// The new view while it is being read, and the version it has reached. The old one stays in use until it is whole.
    next: Option<(HashMap<u64, Share>, u64)>,
    as_of: Option<Tick>,
    /// How often it was begun anew.
    beginning: u64,
}

impl RemoteView {
    /// The sum of the others' shares of a pod.
    pub fn share(&self, pod: u64) -> Share {
        self.pods.get(&pod).copied().unwrap_or_default()
    }

    /// Pods on which others have work.
    pub fn len(&self) -> usize {
        self.pods.len()
    }

    /// No pod has work of others.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    /// The version of the ledger that this is.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// How long ago this is known to have been the whole truth; `None` = never.
    pub fn age(&self, now: Tick) -> Option<Duration> {
        self.as_of.map(|tick| now.since(tick))
    }

    /// When this was last known to be the whole truth; `None` = never.
    pub fn as_of(&self) -> Option<Tick> {
        self.as_of
    }

    /// A new view is being read.
    pub fn is_partial(&self) -> bool {
        self.next.is_some()
    }

    /// The version after which the next sync has to ask.
    pub(super) fn next_since(&self) -> u64 {
        self.next.as_ref().map_or(self.version, |(_, version)| *version)
    }

    /// Reads everything anew. Until that is done, what was known stays in use.
    pub(super) fn begin_anew(&mut self) {
        self.next = Some((HashMap::new(), 0));
        self.beginning += 1;
    }

    /// Which reading this is; grows with each new beginning.
    pub(super) fn beginning(&self) -> u64 {
        self.beginning
    }

    /// Applies a reply to a sync that started at `sent`. Returns what has changed, and whether a new view is whole.
    pub(super) fn apply_reply(&mut self, reply: &SyncReply, sent: Tick) -> (Vec<(u64, Share)>, bool) {
        if reply.reset && self.next_since() != 0 {
            self.begin_anew();
        }
        if self.next.is_none() && self.version == 0 && reply.more {
            // The first page of many.
            self.begin_anew();
        }
        let Some((mut pods, _)) = self.next.take() else {
            let changes = self.advance(&reply.changes, reply.version);
            if !reply.more {
                self.as_of = self.as_of.max(Some(sent));
            }
            return (changes, false);
        };
        for (pod, share) in &reply.changes {
            put(&mut pods, *pod, *share);
        }
        if reply.more {
            self.next = Some((pods, reply.version));
            return (Vec::new(), false);
        }
        let mut changes: Vec<(u64, Share)> = pods
            .iter()
            .filter(|(pod, share)| self.share(**pod) != **share)
            .map(|(pod, share)| (*pod, *share))
            .collect();
        changes.extend(self.pods.keys().filter(|pod| !pods.contains_key(pod)).map(|pod| (*pod, Share::ZERO)));
        self.pods = pods;
        self.version = reply.version;
        self.as_of = self.as_of.max(Some(sent));
        (changes, true)
    }

    /// Applies the reply to a claim that started at `sent`.
    pub(super) fn apply_claim(&mut self, reply: &ClaimReply, sent: Tick) -> Vec<(u64, Share)> {
        if self.next.is_some() {
            return Vec::new();
        }
        let changes = self.advance(&reply.changes, reply.version);
        if !reply.more {
            self.as_of = self.as_of.max(Some(sent));
        }
        changes
    }

    /// Moves on to `version` with the sums that changed since some version not after the present one. A reply that was
    /// overtaken, by another one or by announcements, has nothing new.
    fn advance(&mut self, changes: &[(u64, Share)], version: u64) -> Vec<(u64, Share)> {
        if version < self.version {
            return Vec::new();
        }
        self.version = version;
        let fresh: Vec<(u64, Share)> =
            changes.iter().copied().filter(|(pod, share)| self.share(*pod) != *share).collect();
        for (pod, share) in &fresh {
            put(&mut self.pods, *pod, *share);
        }
        fresh
    }

    /// Applies an announcement of this epoch; `None` when it does not follow on this view.
    pub(super) fn apply_news(&mut self, news: &News, own: u32, now: Tick) -> Option<Vec<(u64, Share)>> {
        if self.next.is_some() || news.version <= self.version {
            return Some(Vec::new());
        }
        if news.version != self.version.saturating_add(1) {
            return None;
        }
        if news.member == own {
            self.version = news.version;
            self.as_of = Some(now);
            return Some(Vec::new());
        }
        if news.differences.is_empty() {
            return None;
        }
        let mut changes = Vec::with_capacity(news.differences.len());
        for (pod, difference) in &news.differences {
            changes.push((*pod, difference.on(self.share(*pod))?));
        }
        for (pod, share) in &changes {
            put(&mut self.pods, *pod, *share);
        }
        self.version = news.version;
        self.as_of = Some(now);
        Some(changes)
    }
}

fn put(pods: &mut HashMap<u64, Share>, pod: u64, share: Share) {
    if share.is_zero() {
        pods.remove(&pod);
    } else {
        pods.insert(pod, share);
    }
}
