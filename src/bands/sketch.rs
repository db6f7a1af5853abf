//! What prompt lengths a model gets: counted without a lock, decayed in the background.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;

use super::layout::Layout;
use crate::clock::Tick;
use crate::knobs::BucketServeMode;

/// After this time an observation counts half (reference section 4.13).
pub const HALF_LIFE: Duration = Duration::from_secs(30);
/// Requests below which a bin counts as empty: twenty half-lives after its last request.
const FORGOTTEN: f64 = 1e-6;
/// Tokens that one observation adds at most, so that nothing a client sends can overflow a sum.
const MOST_TOKENS: u64 = 1 << 32;

/// Requests and their tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many.
    pub requests: u64,
    /// The sum of their prompt tokens.
    pub tokens: u64,
}

/// What was observed since the last drain, by (first, last) length of the bin. Whole numbers, so that merging is exact
/// and its order does not matter, whatever layouts the replicas have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Increments {
    bins: BTreeMap<(u64, u64), Tally>,
}

impl Increments {
    /// Adds what somebody else observed.
    pub fn merge(&mut self, other: &Increments) {
        for (bin, tally) in &other.bins {
            self.add(*bin, *tally);
        }
    }

    /// Of bins (first, last) with their requests and tokens.
    pub fn of(bins: BTreeMap<(u64, u64), (u64, u64)>) -> Increments {
        let mut increments = Increments::default();
        for (bin, (requests, tokens)) in bins {
            increments.add(bin, Tally { requests, tokens });
        }
        increments
    }

    /// Bins (first, last) in which something was observed.
    pub fn bins(&self) -> impl Iterator<Item = ((u64, u64), Tally)> {
        self.bins.iter().map(|(bin, tally)| (*bin, *tally))
    }

    /// Nothing was observed.
    pub fn is_empty(&self) -> bool {
        self.bins.is_empty()
    }

    /// All of it.
    pub fn total(&self) -> Tally {
        let mut total = Tally::default();
        for tally in self.bins.values() {
            total.requests = total.requests.saturating_add(tally.requests);
            total.tokens = total.tokens.saturating_add(tally.tokens);
        }
        total
    }

    fn add(&mut self, bin: (u64, u64), tally: Tally) {
        let sum = self.bins.entry(bin).or_default();
        sum.requests = sum.requests.saturating_add(tally.requests);
        sum.tokens = sum.tokens.saturating_add(tally.tokens);
    }
}

#[derive(Debug, Default)]
struct Cell {
    requests: AtomicU64,
    tokens: AtomicU64,
}

/// Counters of one layout.
#[derive(Debug)]
pub(super) struct Bins {
    layout: Arc<Layout>,
    cells: Box<[Cell]>,
}

impl Bins {
    pub(super) fn new(layout: Arc<Layout>) -> Bins {
        let cells = (0..layout.len()).map(|_| Cell::default()).collect();
        Bins { layout, cells }
    }

    fn observe(&self, tokens: u64) {
        if let Some(cell) = self.cells.get(self.layout.bin(tokens)) {
            cell.requests.fetch_add(1, Ordering::Relaxed);
            cell.tokens.fetch_add(tokens.min(MOST_TOKENS), Ordering::Relaxed);
        }
    }

    /// Takes everything out. An observation that runs beside it may be split: its tokens come with the next drain.
    pub(super) fn drain_into(&self, increments: &mut Increments) {
        for (bin, cell) in self.cells.iter().enumerate() {
            let tally = Tally {
                requests: cell.requests.swap(0, Ordering::Relaxed),
                tokens: cell.tokens.swap(0, Ordering::Relaxed),
            };
            if tally != Tally::default() {
                increments.add((self.layout.first(bin), self.layout.last(bin)), tally);
            }
        }
    }
}

/// Where requests leave their lengths. Off until the first layout is there.
#[derive(Debug, Default)]
pub struct Sketch {
    bins: ArcSwapOption<Bins>,
}

impl Sketch {
    /// Notes one routed request of so many prompt tokens: two relaxed additions. Nothing while the sketch is off.
    pub fn observe(&self, tokens: u64) {
        if let Some(bins) = &*self.bins.load() {
            bins.observe(tokens);
        }
    }

    /// True when observations are kept.
    pub fn is_on(&self) -> bool {
        self.bins.load().is_some()
    }

    /// Puts other counters in place and returns those before: observations may reach them for a moment longer.
    pub(super) fn replace(&self, bins: Option<Arc<Bins>>) -> Option<Arc<Bins>> {
        self.bins.swap(bins)
    }

    /// Takes out what was observed since the last time.
    pub(super) fn drain_into(&self, increments: &mut Increments) {
        if let Some(bins) = &*self.bins.load() {
            bins.drain_into(increments);
        }
    }
}

/// The decayed picture that plans are made from.
#[derive(Clone, Debug)]
pub struct Picture {
    layout: Arc<Layout>,
    requests: Vec<f64>,
    tokens: Vec<f64>,
    at: Tick,
}

impl Picture {
    /// Nothing was observed.
    pub fn empty(layout: Arc<Layout>, now: Tick) -> Picture {
        let nothing = vec![0.0; layout.len()];
        Picture { layout, requests: nothing.clone(), tokens: nothing, at: now }
    }

    /// Its bins.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// What weighs in this mode, per bin.
    pub fn weights(&self, mode: BucketServeMode) -> &[f64] {
        match mode {
            BucketServeMode::Throughput => &self.tokens,
            BucketServeMode::Rps => &self.requests,
        }
    }

    /// Ages everything to `now`: the weight halves every [`HALF_LIFE`].
    pub fn decay(&mut self, now: Tick) {
        let factor = (-now.since(self.at).as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2();
        self.at = self.at.max(now);
        for (requests, tokens) in self.requests.iter_mut().zip(&mut self.tokens) {
            *requests *= factor;
            *tokens *= factor;
            if *requests < FORGOTTEN {
                (*requests, *tokens) = (0.0, 0.0);
            }
        }
    }

    /// Takes increments in, as if all of them had been observed now.
    pub fn absorb(&mut self, increments: &Increments) {
        self.absorb_old(increments, Duration::ZERO);
    }

    /// Takes increments in that were observed so long ago.
    pub fn absorb_old(&mut self, increments: &Increments, age: Duration) {
        let weight = (-age.as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2();
        for (bin, tally) in &increments.bins {
            self.spread(*bin, tally.requests as f64 * weight, tally.tokens as f64 * weight);
        }
    }

    /// The same picture in other bins.
    #[must_use]
    pub fn in_layout(&self, layout: Arc<Layout>) -> Picture {
        let mut next = Picture::empty(layout, self.at);
        for (bin, (requests, tokens)) in self.requests.iter().zip(&self.tokens).enumerate() {
            if *requests > 0.0 {
                next.spread((self.layout.first(bin), self.layout.last(bin)), *requests, *tokens);
            }
        }
        next
    }

    /// Adds what lies in a bin of another layout. When it falls into several of ours, each gets its part of the
    /// width; what has no end goes where its mean lies.
    fn spread(&mut self, (first, last): (u64, u64), requests: f64, tokens: f64) {
        let (mut from, mut to) = (self.layout.bin(first), self.layout.bin(last));
        if last == u64::MAX && from != to {
            let mean = if requests > 0.0 { (tokens / requests) as u64 } else { first };
            from = self.layout.bin(mean.max(first));
            to = from;
        }
        let width = (last.saturating_sub(first)) as f64 + 1.0;
        for bin in from..=to {
            let (low, high) = (self.layout.first(bin).max(first), self.layout.last(bin).min(last));
            let part = if from == to { 1.0 } else { (high.saturating_sub(low) as f64 + 1.0) / width };
            if let (Some(sum), Some(mass)) = (self.requests.get_mut(bin), self.tokens.get_mut(bin)) {
                *sum += requests * part;
                *mass += tokens * part;
            }
        }
    }
}
