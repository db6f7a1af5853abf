//! A gateway's end of the state plane: when it publishes and asks, and what it makes of the answers.
//!
//! Self-clocked and paced: a change after a quiet moment is published at once; while a publication is on its way, or
//! within the pace, changes wait for the next. What others publish is announced to it.

use std::time::Duration;

use super::plane::{Answer, Shares};
use crate::clock::Tick;
use crate::load::{Heard, PeerCell, Scope, Share};

/// See the module.
#[derive(Debug)]
pub(super) struct Link {
    pace: Duration,
    scope: Scope,
    /// Own shares as last sent, by slot.
    published: Vec<Share>,
    /// The others' shares as last heard, by slot.
    heard: Vec<Share>,
    /// Version of the plane that was last heard.
    seen: u64,
    on_its_way: bool,
    /// When the next one is due.
    due: Option<Tick>,
    /// When the last one was sent.
    sent: Option<Tick>,
}

impl Link {
    pub(super) fn new(pods: usize, pace: Duration, scope: Scope) -> Link {
        Link {
            pace,
            scope,
            published: vec![Share::ZERO; pods],
            heard: vec![Share::ZERO; pods],
            seen: 0,
            on_its_way: false,
            due: None,
            sent: None,
        }
    }

    /// The version that decisions rest on.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// When to publish because of a change of its own at `now`; `None` = it is planned already.
    pub(super) fn changed(&mut self, now: Tick) -> Option<Tick> {
        self.plan(self.sent.map_or(now, |sent| now.max(sent.plus(self.pace))))
    }

    /// When to send, if that is `at`; `None` = it is planned already.
    pub(super) fn plan(&mut self, at: Tick) -> Option<Tick> {
        if self.on_its_way || self.due.is_some_and(|due| due <= at) {
            return None;
        }
        self.due = Some(at);
        Some(at)
    }

    /// What to send at `now`, if that is what was planned: the shares that have changed since they were last sent, and
    /// the version that was last heard.
    pub(super) fn send(&mut self, now: Tick, own: impl Fn(usize) -> Share) -> Option<(u64, Shares)> {
        if self.due != Some(now) || self.on_its_way {
            return None;
        }
        (self.due, self.sent, self.on_its_way) = (None, Some(now), true);
        let mut changed = Shares::new();
        for (slot, published) in self.published.iter_mut().enumerate() {
            let share = own(slot);
            if *published != share {
                *published = share;
                changed.push((slot, share));
            }
        }
        Some((self.seen, changed))
    }

    /// News have come: gives what others have on pods where that is new, and tells the peers who turned up. `selections`
    /// as [`Heard`] wants it.
    pub(super) fn take_in(&mut self, answer: Answer, peers: &PeerCell, selections: u64, now: Tick) -> Shares {
        self.seen = self.seen.max(answer.version);
        let mut newcomers = 0;
        let mut news = Shares::new();
        for (slot, share) in answer.others {
            let share = self.scope.of(share);
            let Some(heard) = self.heard.get_mut(slot) else { continue };
            if *heard != share {
                let decodes = |share: &Share| u64::from(share.running) + u64::from(share.pending);
                newcomers += decodes(&share).saturating_sub(decodes(heard));
                *heard = share;
                news.push((slot, share));
            }
        }
        peers.heard(Heard { answers: selections, newcomers, version: self.seen }, now);
        news
    }

    /// The answer to what was [sent](Link::send) has come; the next one may go.
    pub(super) fn answered(&mut self) {
        self.on_its_way = false;
    }

    /// True when something of its own has not been sent yet.
    pub(super) fn dirty(&self, own: impl Fn(usize) -> Share) -> bool {
        self.published.iter().enumerate().any(|(slot, published)| *published != own(slot))
    }
}
