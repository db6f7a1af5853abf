//! Claims: charges that are committed before their request goes on.

use super::{Claimed, Sent, SharedLedger, as_stored};
use crate::clock::Tick;
use crate::load::Share;
use crate::state::wire::{ClaimCall, ClaimReply, ClaimStatus};

impl SharedLedger {
    /// A claim of this replica's new `shares` of the pods that a request was charged to, decided on the view of version
    /// `since` and resting on the given pods (none = all). `None` when this replica is no member or reads its view anew.
    pub fn start_claim(
        &mut self,
        shares: &[(u64, Share)],
        rested_on: Vec<u64>,
        since: u64,
        now: Tick,
    ) -> Option<ClaimCall> {
        let (epoch, member) = self.member.filter(|_| !self.view.is_partial())?;
        self.sequence += 1;
        let sequence = self.sequence;
        let shares: Vec<(u64, Share)> = shares.iter().map(|(pod, share)| (*pod, as_stored(*share))).collect();
        for (pod, share) in &shares {
            let own = self.own.entry(*pod).or_default();
            own.share = *share;
            own.last_sent = sequence;
            self.dirty.remove(pod);
        }
        self.claims.insert(
            sequence,
            Sent {
                sequence,
                epoch: Some(epoch),
                at: now,
                leaves: false,
                beginning: self.view.beginning(),
                shares: shares.clone(),
            },
        );
        Some(ClaimCall { epoch, member, sequence, since, limit: self.config.max_returned, shares, rested_on })
    }

    /// The claim was answered. Returns what became of it, and the pods whose remote share has changed. After
    /// [`Claimed::Again`] the caller takes the charge back, sets the pods' shares, and decides anew.
    pub fn finish_claim(&mut self, sequence: u64, reply: &ClaimReply, now: Tick) -> (Claimed, Vec<(u64, Share)>) {
        let Some(sent) = self.claims.remove(&sequence) else { return (Claimed::Unsure, Vec::new()) };
        if self.member.map(|(epoch, _)| epoch) != sent.epoch {
            self.unknown_outcome(&sent);
            return (Claimed::Unsure, Vec::new());
        }
        self.clock.observe(reply.now_ms, sent.at, now);
        let claimed = match reply.status {
            ClaimStatus::Granted => {
                self.confirm(&sent);
                self.acknowledged = self.acknowledged.max(sequence);
                Claimed::Granted
            }
            ClaimStatus::Changed => {
                self.unknown_outcome(&sent);
                Claimed::Again
            }
            ClaimStatus::Overtaken | ClaimStatus::Unsure => {
                self.unknown_outcome(&sent);
                self.curious = true;
                return (Claimed::Unsure, Vec::new());
            }
        };
        self.counts.received += reply.changes.len() as u64;
        self.curious |= reply.more;
        (claimed, self.view.apply_claim(reply, sent.at))
    }

    /// The claim failed, or was not answered in time: its charge goes with the next sync.
    pub fn fail_claim(&mut self, sequence: u64) {
        if let Some(sent) = self.claims.remove(&sequence) {
            self.unknown_outcome(&sent);
        }
    }
}
