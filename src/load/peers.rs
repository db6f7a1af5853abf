//! Where this replica stands among those that share their loads, and how often they decide at the same time as it does.
//!
//! Replicas with the same view pick the same pod. How bad that is depends on how many requests the others have placed
//! that this replica cannot see yet when it selects: their number is estimated here, from what turns up right after its
//! own selections. Routing gets a [`Peers`] as an argument and stays pure.

use super::sync::{AtomicU64, Ordering};

/// A replica among its peers, at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peers {
    /// A number that no other of them has. Numbers that follow on one another are best: see `routing::together`.
    pub rank: u32,
    /// How many share their loads; 1 = this one is alone.
    pub count: u32,
    /// Requests of others that a selection cannot see yet, on average.
    pub unseen: f64,
}

impl Peers {
    /// Nobody else is there, or whoever is there is asked before anything is committed.
    pub const ALONE: Peers = Peers { rank: 0, count: 1, unseen: 0.0 };
}

impl Default for Peers {
    fn default() -> Peers {
        Peers::ALONE
    }
}

/// More are not believed: so many requests within a few milliseconds fill a fleet anyway.
const MAX_UNSEEN: f64 = 64.0;
/// Weight of the latest observation.
const WEIGHT: f64 = 0.1;

/// The present [`Peers`] of one model. Written by the task that talks to the others.
#[derive(Debug, Default)]
pub struct PeerCell {
    /// Count in the high half, rank in the low half.
    place: AtomicU64,
    /// Bits of the average.
    unseen: AtomicU64,
    /// Selections of this replica so far.
    selections: AtomicU64,
    /// How many of them the average has taken in.
    taken_in: AtomicU64,
    /// Requests of others that turned up since.
    arrived: AtomicU64,
}

impl PeerCell {
    /// This replica is number `rank` among `count`.
    pub fn join(&self, rank: u32, count: u32) {
        self.place.store(u64::from(count) << 32 | u64::from(rank), Ordering::Release);
    }

    /// This replica has selected.
    pub fn selected(&self) {
        self.selections.fetch_add(1, Ordering::AcqRel);
    }

    /// Selections so far: to be read before a publication is sent, and given to [`PeerCell::heard`] with its answer.
    pub fn selections(&self) -> u64 {
        self.selections.load(Ordering::Acquire)
    }

    /// News: `newcomers` requests of others have been charged. `selections` is what [`PeerCell::selections`] said when the
    /// publication was sent that this answers, and 0 for news that answer nothing. What has come between a selection and
    /// the answer to its publication is what the selection could not see. For one task only.
    pub fn heard(&self, selections: u64, newcomers: u64) {
        let arrived = self.arrived.load(Ordering::Relaxed).saturating_add(newcomers);
        let taken_in = self.taken_in.load(Ordering::Relaxed);
        if selections > taken_in {
            self.taken_in.store(selections, Ordering::Relaxed);
            self.saw(arrived);
        }
        // A selection after this publication was sent waits for the next answer; what came before it counts already.
        let waiting = selections <= taken_in && self.selections() > taken_in;
        self.arrived.store(if waiting { arrived } else { 0 }, Ordering::Relaxed);
    }

    fn saw(&self, requests: u64) {
        let fold = |bits: u64| {
            let old = f64::from_bits(bits);
            Some((old + WEIGHT * ((requests as f64).min(MAX_UNSEEN) - old)).to_bits())
        };
        // The closure never declines, so there is nothing to do about an `Err`.
        let _ = self.unseen.fetch_update(Ordering::AcqRel, Ordering::Acquire, fold);
    }

    /// The present values; [`Peers::ALONE`] until it has joined.
    pub fn view(&self) -> Peers {
        let place = self.place.load(Ordering::Acquire);
        let count = (place >> 32) as u32;
        if count <= 1 {
            return Peers::ALONE;
        }
        Peers { rank: place as u32, count, unseen: f64::from_bits(self.unseen.load(Ordering::Acquire)) }
    }
}
