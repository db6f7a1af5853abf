//! What the ledger's scripts should do, told a second time and without packing, versions per pod, or lists of changes: a
//! sum is added up from the shares of the members each time.

use std::collections::{BTreeMap, BTreeSet};

use tandem::load::Share;
use tandem::state::wire::{
    ClaimCall, ClaimReply, ClaimStatus, Epoch, Purpose, ReapCall, ReapReply, SyncCall, SyncReply, SyncStatus,
};

#[derive(Clone, Debug, Default)]
struct Member {
    written: u64,
    grants: Vec<u64>,
}

/// The ledger.
#[derive(Clone, Debug, Default)]
pub struct Model {
    epoch: Option<Epoch>,
    pub version: u64,
    joined: u32,
    members: BTreeMap<u32, Member>,
    /// Members and those that are being reaped; true = the lease is over.
    leases: BTreeMap<u32, bool>,
    pods: BTreeMap<u64, BTreeMap<u32, Share>>,
    /// Per pod: who changed it at which version.
    history: BTreeMap<u64, BTreeMap<u32, u64>>,
}

impl Model {
    /// The shares of a pod by member.
    pub fn entries(&self, pod: u64) -> BTreeMap<u32, Share> {
        self.pods.get(&pod).cloned().unwrap_or_default()
    }

    /// The sum of everybody's shares of a pod, but for one member.
    pub fn others(&self, pod: u64, member: u32) -> Share {
        let entries = self.entries(pod);
        entries.iter().filter(|(who, _)| **who != member).fold(Share::ZERO, |sum, (_, share)| sum.plus(*share))
    }

    /// Pods that somebody ever worked on.
    pub fn pods(&self) -> impl Iterator<Item = u64> + '_ {
        self.pods.keys().copied()
    }

    /// Everybody that the server takes for a member.
    pub fn members(&self) -> impl Iterator<Item = u32> + '_ {
        self.members.keys().copied()
    }

    pub fn member(&self, member: u32) -> bool {
        self.members.contains_key(&member)
    }

    pub fn expired(&self) -> BTreeSet<u32> {
        self.leases.iter().filter(|(_, over)| **over).map(|(member, _)| *member).collect()
    }

    /// The lease of a member is over.
    pub fn expire(&mut self, member: u32) {
        if let Some(over) = self.leases.get_mut(&member) {
            *over = true;
        }
    }

    fn begin(&mut self, epoch: Epoch) {
        *self = Model { epoch: Some(epoch), ..Model::default() };
    }

    fn write(&mut self, author: u32, member: u32, shares: &[(u64, Share)]) -> u32 {
        let mut changed = 0;
        for (pod, share) in shares {
            let entries = self.pods.entry(*pod).or_default();
            if entries.get(&member).copied().unwrap_or_default() == *share {
                continue;
            }
            changed += 1;
            if share.is_zero() {
                entries.remove(&member)
            } else {
                entries.insert(member, *share)
            };
            self.history.entry(*pod).or_default().insert(author, self.version + 1);
        }
        self.version += u64::from(changed > 0);
        changed
    }

    /// Whether somebody else than `member` has changed the pod after `since`.
    fn changed_by_others(&self, pod: u64, member: u32, since: u64) -> bool {
        self.history
            .get(&pod)
            .is_some_and(|history| history.iter().any(|(who, version)| *who != member && *version > since))
    }

    /// Carries out a sync and compares the reply.
    pub fn sync(&mut self, call: &SyncCall, reply: &SyncReply) {
        let joins = call.purpose == Purpose::Join;
        if self.epoch.is_none() {
            self.begin(call.nonce);
        } else if self.epoch == Some(call.epoch)
            && !joins
            && let Some(member) = self.members.get(&call.member)
            && (call.acknowledged > member.written || call.since > self.version)
        {
            self.begin(call.nonce);
        }
        let mut number = call.member;
        if joins {
            self.joined += 1;
            number = self.joined.wrapping_mul(2_654_435_761);
            self.members.insert(number, Member::default());
        } else if self.epoch != Some(call.epoch) || !self.members.contains_key(&number) {
            assert_eq!(reply.status, SyncStatus::Stranger, "{call:?}");
            return;
        } else if !call.shares.is_empty() && call.sequence <= self.members[&number].written {
            assert_eq!(reply.status, SyncStatus::Overtaken, "{call:?}");
            return;
        }
        assert_eq!(reply.status, SyncStatus::Done, "{call:?} {reply:?}");
        assert_eq!(Some(reply.epoch), self.epoch);
        assert_eq!(reply.member, number);
        self.leases.insert(number, call.purpose == Purpose::Leave);

        // Everything that others changed is told, and what is told is right.
        let told: BTreeMap<u64, Share> = reply.changes.iter().copied().collect();
        assert_eq!(told.len(), reply.changes.len(), "no pod is told twice");
        for (pod, share) in &told {
            assert_eq!(*share, self.others(*pod, number), "pod {pod}, told to {number}");
        }
        if !reply.more {
            let since = if reply.reset { 0 } else { call.since };
            for pod in self.pods().filter(|pod| !told.contains_key(pod)) {
                let silent = if since == 0 {
                    self.others(pod, number).is_zero()
                } else {
                    !self.changed_by_others(pod, number, since)
                };
                assert!(silent, "pod {pod} was kept from {number}: {call:?} {reply:?}");
            }
        }
        if !joins && !call.shares.is_empty() {
            self.write(number, number, &call.shares);
            self.members.get_mut(&number).expect("a member").written = call.sequence;
        }
        assert_eq!(reply.sequence, self.members[&number].written);
        assert!(reply.more || reply.version == self.version, "{reply:?}, not {}", self.version);
        if reply.members > 0 {
            assert_eq!(reply.members as usize, self.leases.len());
            let expired = self.expired();
            assert!(reply.expired.iter().all(|member| expired.contains(member)));
            assert_eq!(reply.expired.len(), expired.len().min(8));
        }
    }

    /// Carries out a step of a reap and compares the reply.
    pub fn reap(&mut self, call: &ReapCall, reply: ReapReply) {
        if self.epoch != Some(call.epoch) || self.leases.get(&call.member) != Some(&true) {
            assert_eq!(reply, ReapReply::NotDead);
            return;
        }
        if self.members.remove(&call.member).is_some_and(|member| member.written == 0) {
            assert_eq!(reply, ReapReply::Gone { shares: 0 });
            self.leases.remove(&call.member);
            return;
        }
        // With the limit that is used here, one step is enough.
        let pods: Vec<(u64, Share)> = self.pods().map(|pod| (pod, Share::ZERO)).collect();
        let shares = self.write(0, call.member, &pods);
        assert_eq!(reply, ReapReply::Gone { shares });
        self.leases.remove(&call.member);
    }

    /// Carries out a claim and compares the reply.
    pub fn claim(&mut self, call: &ClaimCall, reply: &ClaimReply) {
        let known = self.epoch == Some(call.epoch) && self.members.contains_key(&call.member);
        if !known || call.since > self.version {
            assert_eq!(reply.status, ClaimStatus::Unsure, "{call:?}");
            return;
        }
        let member = &self.members[&call.member];
        let repeated = member.grants.contains(&call.sequence);
        if call.sequence <= member.written && !repeated {
            assert_eq!(reply.status, ClaimStatus::Overtaken, "{call:?}");
            return;
        }
        for (pod, share) in &reply.changes {
            assert_eq!(*share, self.others(*pod, call.member));
        }
        let changed: Vec<u64> =
            self.pods().filter(|pod| self.changed_by_others(*pod, call.member, call.since)).collect();
        assert!(!reply.more, "the limit is not reached here");
        assert_eq!(reply.changes.len(), changed.len());
        let conflict = changed.iter().any(|pod| call.rested_on.is_empty() || call.rested_on.contains(pod));
        if repeated {
            assert_eq!(reply.status, ClaimStatus::Granted);
        } else if conflict {
            assert_eq!(reply.status, ClaimStatus::Changed, "{call:?}");
        } else {
            assert_eq!(reply.status, ClaimStatus::Granted, "{call:?}");
            self.write(call.member, call.member, &call.shares);
            let member = self.members.get_mut(&call.member).expect("a member");
            member.written = call.sequence;
            member.grants.insert(0, call.sequence);
            member.grants.truncate(8);
        }
        assert_eq!(reply.version, self.version);
    }
}
