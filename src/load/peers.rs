//! Where this replica stands among those that share their loads, and how often they decide at the same time as it does.
//!
//! Replicas with the same view pick the same pod. How bad that is depends on how many requests the others place at the
//! same time: so late that this replica cannot see them when it selects, or so early that they do not see its own. Their
//! number is estimated here, from what turns up right after its own selections. Routing gets a [`Peers`] as an argument
//! and stays pure.

use std::time::Duration;

use super::sync::{AtomicU64, Ordering};
use crate::clock::Tick;

/// A replica among its peers, at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peers {
    /// A number that no other of them has. Those from 0 on are best: see `routing::together`.
    pub rank: u32,
    /// How many share their loads; 1 = this one is alone.
    pub count: u32,
    /// Requests of others that a selection cannot see yet, averaged over the replicas that decide together. As many do
    /// not see it.
    pub unseen: f64,
    /// Names what is known of the others: replicas that know the same have the same number.
    pub view: u64,
}

/// News of other replicas' work, as [`PeerCell::heard`] wants to know of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// What [`PeerCell::selections`] said when the publication was sent that this answers; 0 for news that answer nothing.
    pub answers: u64,
    /// Requests of others that have been charged since the last news.
    pub newcomers: u64,
    /// The version of the shared state that is known now: a number that replicas agree on.
    pub version: u64,
}

impl Peers {
    /// Nobody else is there, or whoever is there is asked before anything is committed.
    pub const ALONE: Peers = Peers { rank: 0, count: 1, unseen: 0.0, view: 0 };
}

impl Default for Peers {
    fn default() -> Peers {
        Peers::ALONE
    }
}

/// More are not believed: so many requests within a few milliseconds fill a fleet anyway.
const MAX_UNSEEN: f64 = 64.0;
/// Least weight of the latest observation. The first ones are averaged evenly, so that a replica need not decide a hundred
/// times before it knows its company.
const WEIGHT: f64 = 0.1;
/// An answer that takes longer is not waited for: it would tell how long the shared state was out of reach.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The present [`Peers`] of one model. Written by the task that talks to the others.
///
/// What is counted, for one selection at a time: with `d` the time from the selection to the answer to the publication
/// that tells of it, all requests of others that turn up within `2d`. Another's request is seen here about as late as
/// this replica's is seen there, so these are the requests that were selected from `d` before to `d` after it. Counting
/// only up to the answer would be half of them on average, but nothing for a replica that is always the first of
/// those who decide at once, and all for the last.
#[derive(Debug, Default)]
pub struct PeerCell {
    /// Count in the high half, rank in the low half.
    place: AtomicU64,
    /// Bits of the average.
    unseen: AtomicU64,
    /// Selections of this replica so far.
    selections: AtomicU64,
    /// Nanoseconds of the selection that is looked at; 0 = the next one will be.
    since: AtomicU64,
    /// Nanoseconds up to which newcomers count; 0 = its answer has not come.
    until: AtomicU64,
    /// Nanoseconds of the first selection after that; 0 = none yet.
    next: AtomicU64,
    /// How many selections there were before the one that is looked at.
    before: AtomicU64,
    /// How many observations the average is made of.
    observations: AtomicU64,
    /// Requests of others that turned up since.
    arrived: AtomicU64,
    /// The version last heard.
    version: AtomicU64,
}

impl PeerCell {
    /// This replica is number `rank` among `count`.
    pub fn join(&self, rank: u32, count: u32) {
        self.place.store(u64::from(count) << 32 | u64::from(rank), Ordering::Release);
    }

    /// This replica has selected.
    pub fn selected(&self, now: Tick) {
        self.selections.fetch_add(1, Ordering::AcqRel);
        let until = self.until.load(Ordering::Acquire);
        let place = if until > 0 && now.0 > until { &self.next } else { &self.since };
        // Zero means none; the first nanosecond is as good. One that is looked at already stays so.
        let _ = place.compare_exchange(0, now.0.max(1), Ordering::AcqRel, Ordering::Acquire);
    }

    /// Selections so far: to be read before a publication is sent, and given to [`PeerCell::heard`] with its answer.
    pub fn selections(&self) -> u64 {
        self.selections.load(Ordering::Acquire)
    }

    /// News have come at `now`. For one task only.
    pub fn heard(&self, news: Heard, now: Tick) {
        self.version.store(news.version, Ordering::Release);
        let until = self.until.load(Ordering::Relaxed);
        if until > 0 && now.0 > until {
            self.saw(self.arrived.load(Ordering::Relaxed));
            self.look_at_the_next(until);
        }
        let until = self.until.load(Ordering::Relaxed);
        let since = self.since.load(Ordering::Acquire);
        if since == 0 {
            return;
        }
        let waited = now.since(Tick(since));
        if until == 0 && waited > LONGEST_WAIT {
            return self.look_at_the_next(now.0);
        }
        let arrived = self.arrived.load(Ordering::Relaxed).saturating_add(news.newcomers);
        self.arrived.store(arrived, Ordering::Relaxed);
        if until == 0 && news.answers > self.before.load(Ordering::Relaxed) {
            self.until.store(now.plus(waited).0, Ordering::Release);
        }
    }

    /// The one that was looked at is done with, at `after`. A selection that comes in between is passed over, or waits for
    /// the answer to one after it: neither matters to an average.
    fn look_at_the_next(&self, after: u64) {
        self.arrived.store(0, Ordering::Relaxed);
        let next = Some(self.next.swap(0, Ordering::AcqRel)).filter(|next| *next > after);
        let selections = self.selections();
        self.before.store(if next.is_some() { selections.saturating_sub(1) } else { selections }, Ordering::Relaxed);
        self.since.store(next.unwrap_or(0), Ordering::Release);
        self.until.store(0, Ordering::Release);
    }

    fn saw(&self, requests: u64) {
        let observations = self.observations.load(Ordering::Relaxed).saturating_add(1);
        self.observations.store(observations, Ordering::Relaxed);
        let weight = WEIGHT.max(1.0 / observations as f64);
        let old = f64::from_bits(self.unseen.load(Ordering::Relaxed));
        // Half of them came before the selection.
        let seen = (requests as f64 / 2.0).min(MAX_UNSEEN);
        self.unseen.store((old + weight * (seen - old)).to_bits(), Ordering::Release);
    }

    /// The present values; [`Peers::ALONE`] until it has joined.
    pub fn view(&self) -> Peers {
        let place = self.place.load(Ordering::Acquire);
        let count = (place >> 32) as u32;
        if count <= 1 {
            return Peers::ALONE;
        }
        Peers {
            rank: place as u32,
            count,
            unseen: f64::from_bits(self.unseen.load(Ordering::Acquire)),
            view: self.version.load(Ordering::Acquire),
        }
    }
}
