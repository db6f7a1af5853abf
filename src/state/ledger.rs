//! One replica's side of the shared ledger: what to publish and when, what replies mean, whom to bury. A state machine
//! without I/O: the caller carries calls to the server, brings back replies or says that there are none, and tells the time.
//!
//! - What is published is absolute, and numbered. A call whose outcome is unknown is followed by another one with the same
//!   pods; the server ignores the older of two calls, whenever it comes.
//! - One sync is under way at a time; changes meanwhile go with the next one (group commit). Between the starts of two
//!   syncs lies the pace, which grows with the number of members so that the plane stays within its share of the server.
//! - The view of the others is that of one version. It moves on by replies and by announcements, never back, and never
//!   shows half of a new beginning.

mod claims;
mod config;
mod duties;
mod pace;
#[cfg(test)]
mod tests;
mod view;

use std::collections::{HashMap, HashSet};

use super::time::PlaneClock;
use super::wire::{
    Epoch, MAX_PUBLISHED, News, Purpose, ReapCall, ReapReply, SyncCall, SyncReply, SyncStatus, as_stored,
};
use crate::clock::Tick;
use crate::load::Share;
use crate::rng::Rng;
pub use config::{LedgerConfig, LedgerCounts};
use duties::Duties;
pub use pace::Pace;
pub use view::RemoteView;

/// Pods that one step of a reap looks at.
const MAX_REAPED: u32 = 256;

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Call [`SharedLedger::start_sync`] now.
    Sync,
    /// Carry out this call, then tell [`SharedLedger::finish_reap`].
    Reap(ReapCall),
    /// Nothing before this time, unless something changes.
    At(Tick),
}

/// What became of a claim, for the request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// The charge is known to all.
    Granted,
    /// Decide again on the view as it is now.
    Again,
    /// The plane cannot tell: go on as if paced.
    Unsure,
}

/// This replica's work on one pod.
#[derive(Clone, Copy, Debug, Default)]
struct Own {
    /// As it is.
    share: Share,
    /// As the server is known to have it.
    stored: Share,
    /// The call that `stored` was told by.
    stored_by: u64,
    /// The last call that carried this pod, when its outcome is not known.
    last_sent: u64,
}

#[derive(Debug)]
struct Sent {
    sequence: u64,
    epoch: Option<Epoch>,
    at: Tick,
    leaves: bool,
    /// The beginning of the view that the call went on from.
    beginning: u64,
    shares: Vec<(u64, Share)>,
}

/// The state of one replica in one model's ledger.
#[derive(Debug)]
pub struct SharedLedger {
    config: LedgerConfig,
    rng: Rng,
    /// Epoch and number, once joined.
    member: Option<(Epoch, u32)>,
    members: u32,
    sequence: u64,
    acknowledged: u64,
    own: HashMap<u64, Own>,
    /// Pods whose share has to be published.
    dirty: HashSet<u64>,
    view: RemoteView,
    clock: PlaneClock,
    sync: Option<Sent>,
    claims: HashMap<u64, Sent>,
    duties: Duties,
    last_start: Option<Tick>,
    failed_in_a_row: u32,
    not_before: Tick,
    /// The view may have missed something: do not wait for the idle poll.
    curious: bool,
    /// The last call was a step of a reap.
    buried_last: bool,
    leaving: bool,
    left: bool,
    counts: LedgerCounts,
}

impl SharedLedger {
    /// A replica that is no member yet. `seed` should be random: it names epochs.
    pub fn new(config: LedgerConfig, seed: u64) -> SharedLedger {
        SharedLedger {
            config,
            rng: Rng::new(seed),
            member: None,
            members: 0,
            sequence: 0,
            acknowledged: 0,
            own: HashMap::new(),
            dirty: HashSet::new(),
            view: RemoteView::default(),
            clock: PlaneClock::default(),
            sync: None,
            claims: HashMap::new(),
            duties: Duties::default(),
            last_start: None,
            failed_in_a_row: 0,
            not_before: Tick(0),
            curious: false,
            buried_last: false,
            leaving: false,
            left: false,
            counts: LedgerCounts::default(),
        }
    }

    /// This replica's share of a pod is now this.
    pub fn set(&mut self, pod: u64, share: Share) {
        let own = self.own.entry(pod).or_default();
        own.share = as_stored(share);
        self.settle(pod);
    }

    /// Decides whether a pod has to be published: not while a call that says the same is under way.
    fn settle(&mut self, pod: u64) {
        let Some(own) = self.own.get(&pod) else { return };
        let told = self
            .sync
            .iter()
            .chain(self.claims.values())
            .filter(|sent| sent.sequence == own.last_sent)
            .flat_map(|sent| sent.shares.iter())
            .find(|(sent, _)| *sent == pod)
            .map(|(_, share)| *share);
        let known = if own.last_sent > own.stored_by { told } else { Some(own.stored) };
        if known == Some(own.share) {
            self.dirty.remove(&pod);
            if own.share.is_zero() && own.last_sent <= own.stored_by {
                self.own.remove(&pod);
            }
        } else {
            self.dirty.insert(pod);
        }
    }

    /// What to do at `now`. To be asked again after every call into this.
    pub fn next(&mut self, now: Tick) -> Next {
        if let Some(sent) = &self.sync {
            return Next::At(sent.at.plus(self.config.deadline));
        }
        if self.left {
            return Next::At(Tick(u64::MAX));
        }
        let due = self.sync_due().max(self.not_before);
        let burial = self.member.and_then(|(epoch, _)| self.duties.first().map(|(member, duty)| (epoch, member, duty)));
        match burial {
            // Steps of a reap and syncs that are due take turns.
            Some((epoch, member, duty)) if duty.due <= now && (due > now || !self.buried_last) => {
                Next::Reap(ReapCall { epoch, member, cursor: duty.cursor, limit: MAX_REAPED })
            }
            _ if due <= now => Next::Sync,
            Some((_, _, duty)) => Next::At(due.min(duty.due)),
            None => Next::At(due),
        }
    }

    fn sync_due(&self) -> Tick {
        let Some(last) = self.last_start else { return Tick(0) };
        if self.member.is_none() || self.view.is_partial() {
            // Joining and reading on take as many round trips as they take.
            return Tick(0);
        }
        let eager = self.leaving || self.curious || !self.dirty.is_empty();
        last.plus(if eager { self.config.pace.interval(self.members) } else { self.config.idle_poll })
    }

    /// The next sync. Exactly one of [`SharedLedger::finish_sync`] and [`SharedLedger::fail_sync`] has to follow.
    pub fn start_sync(&mut self, now: Tick) -> SyncCall {
        self.sequence += 1;
        self.last_start = Some(now);
        self.curious = false;
        self.buried_last = false;
        let mut call = SyncCall {
            nonce: self.rng.next_u64().to_le_bytes(),
            sequence: self.sequence,
            lease_ms: u32::try_from(self.config.lease.as_millis()).unwrap_or(u32::MAX),
            limit: self.config.max_returned,
            ..SyncCall::default()
        };
        match self.member {
            Some((epoch, member)) => {
                (call.epoch, call.member) = (epoch, member);
                call.acknowledged = self.acknowledged;
                call.since = self.view.next_since();
                call.shares = self.take_dirty();
                if self.leaving && self.dirty.is_empty() {
                    call.purpose = Purpose::Leave;
                }
            }
            None => call.purpose = Purpose::Join,
        }
        let epoch = self.member.map(|(epoch, _)| epoch);
        self.sync = Some(Sent {
            sequence: self.sequence,
            epoch,
            at: now,
            leaves: call.purpose == Purpose::Leave,
            beginning: self.view.beginning(),
            shares: call.shares.clone(),
        });
        call
    }

    fn take_dirty(&mut self) -> Vec<(u64, Share)> {
        let most = self.config.max_published.min(MAX_PUBLISHED);
        let pods: Vec<u64> = self.dirty.iter().copied().take(most).collect();
        let mut shares = Vec::with_capacity(pods.len());
        for pod in pods {
            self.dirty.remove(&pod);
            if let Some(own) = self.own.get_mut(&pod) {
                own.last_sent = self.sequence;
                shares.push((pod, own.share));
            }
        }
        shares
    }

    /// The sync was answered. Returns the pods whose remote share has changed, with the new one.
    pub fn finish_sync(&mut self, reply: &SyncReply, now: Tick) -> Vec<(u64, Share)> {
        let Some(sent) = self.sync.take() else { return Vec::new() };
        self.counts.syncs += 1;
        self.failed_in_a_row = 0;
        self.clock.observe(reply.now_ms, sent.at, now);
        match reply.status {
            SyncStatus::Stranger => {
                // Either this replica was taken for dead, or the ledger began anew. In both cases nothing of it is there.
                self.forget_membership();
                return Vec::new();
            }
            SyncStatus::Overtaken => {
                self.unknown_outcome(&sent);
                return Vec::new();
            }
            SyncStatus::Done => {}
        }
        if sent.epoch.is_none() {
            self.become_member(reply);
        }
        self.left = sent.leaves;
        self.confirm(&sent);
        self.acknowledged = self.acknowledged.max(reply.sequence);
        if reply.members > 0 {
            self.members = reply.members;
            let own = self.member.map(|(_, number)| number);
            let dead = reply.expired.iter().copied().filter(|member| Some(*member) != own);
            self.duties.seen(dead, now, &self.config, &mut self.rng);
        }
        if sent.epoch.is_some() && sent.beginning != self.view.beginning() {
            // The view was begun anew meanwhile; this reply goes on from the old one.
            return Vec::new();
        }
        self.counts.received += reply.changes.len() as u64;
        let (changes, resynced) = self.view.apply_reply(reply, sent.at);
        self.counts.resyncs += u64::from(resynced);
        changes
    }

    fn become_member(&mut self, reply: &SyncReply) {
        self.member = Some((reply.epoch, reply.member));
        self.counts.joins += 1;
        self.acknowledged = 0;
        self.claims.clear();
        self.duties.clear();
        self.view.begin_anew();
        // A stranger has nothing in the ledger.
        self.own.retain(|_, own| {
            *own = Own { share: own.share, ..Own::default() };
            !own.share.is_zero()
        });
        self.dirty = self.own.keys().copied().collect();
    }

    fn forget_membership(&mut self) {
        self.member = None;
        self.acknowledged = 0;
    }

    /// The server has these shares.
    fn confirm(&mut self, sent: &Sent) {
        self.counts.published += sent.shares.len() as u64;
        for (pod, share) in &sent.shares {
            if let Some(own) = self.own.get_mut(pod)
                && sent.sequence > own.stored_by
            {
                own.stored = *share;
                own.stored_by = sent.sequence;
            }
            self.settle(*pod);
        }
    }

    /// Nobody knows whether the server has these shares, now or ever: they are sent again.
    fn unknown_outcome(&mut self, sent: &Sent) {
        for (pod, _) in &sent.shares {
            if self.own.get(pod).is_some_and(|own| own.stored_by < sent.sequence) {
                self.dirty.insert(*pod);
            }
        }
    }

    /// The sync failed, or was not answered in time. The next one follows after a pause.
    pub fn fail_sync(&mut self, now: Tick) {
        let Some(sent) = self.sync.take() else { return };
        self.counts.failures += 1;
        self.unknown_outcome(&sent);
        let doublings = self.failed_in_a_row.min(16);
        self.failed_in_a_row = self.failed_in_a_row.saturating_add(1);
        let pause = self.config.first_backoff.saturating_mul(1 << doublings).min(self.config.last_backoff);
        // Somewhere in the upper half: replicas that failed together come back apart.
        self.not_before = now.plus(pause.mul_f64(0.5 + 0.5 * self.rng.unit()));
    }

    /// The connection is a new one: the server may be another one, or the same with a gap in its memory. Everything is told
    /// again and read again, with the next syncs.
    pub fn reconnected(&mut self) {
        self.view.begin_anew();
        self.dirty.extend(self.own.keys().copied());
        self.not_before = Tick(0);
        self.failed_in_a_row = 0;
    }

    /// An announcement came. Returns the pods whose remote share has changed, with the new one.
    pub fn hear(&mut self, news: &News, now: Tick) -> Vec<(u64, Share)> {
        let Some((epoch, own)) = self.member else { return Vec::new() };
        if news.epoch != epoch {
            self.curious = true;
            return Vec::new();
        }
        if let Some(changes) = self.view.apply_news(news, own, now) {
            self.counts.received += changes.len() as u64;
            changes
        } else {
            self.missed_news();
            Vec::new()
        }
    }

    /// A step of a reap was answered; `None` when it failed.
    pub fn finish_reap(&mut self, call: &ReapCall, reply: Option<ReapReply>, now: Tick) {
        if let Some(ReapReply::Gone { shares } | ReapReply::GoOn { shares, .. }) = reply {
            self.counts.reaped += u64::from(shares);
        }
        self.buried_last = true;
        self.duties.finish(call.member, reply, now);
    }

    /// Goes with the next sync that has nothing left to publish: the lease ends at once, and the others take the shares
    /// away. The caller sets its shares to zero first, and stops when it [has left](SharedLedger::has_left).
    pub fn leave(&mut self) {
        self.leaving = true;
    }

    /// The server knows that this replica is gone.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Announcements were missed: the next sync comes as soon as the pace allows.
    pub fn missed_news(&mut self) {
        self.counts.gaps += 1;
        self.curious = true;
    }

    /// Something has to be published that no call on its way carries.
    pub fn has_changes(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Nothing is left to be told: every share was confirmed.
    pub fn is_settled(&self) -> bool {
        self.dirty.is_empty() && self.sync.is_none() && self.claims.is_empty()
    }

    /// What the others have outstanding.
    pub fn view(&self) -> &RemoteView {
        &self.view
    }

    /// The server's clock.
    pub fn clock(&self) -> &PlaneClock {
        &self.clock
    }

    /// Epoch and number of this replica, when it is a member.
    pub fn member(&self) -> Option<(Epoch, u32)> {
        self.member
    }

    /// Members of the ledger when last looked at, this one included.
    pub fn members(&self) -> u32 {
        self.members
    }

    /// What has happened so far.
    pub fn counts(&self) -> LedgerCounts {
        self.counts
    }
}
