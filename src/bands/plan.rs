//! From rolesets and a picture to bands.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::fair::{self, Class};
use super::layout::Layout;
use super::sketch::Picture;
use crate::knobs::BucketServeMode;
use crate::rng::Rng;

/// A roleset as the planner sees it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    /// The shortest prompt it takes, tokens.
    pub min: u64,
    /// The longest one; `u64::MAX` = no limit.
    pub max: u64,
    /// [`crate::fleet::Roleset::name`].
    pub name: Arc<str>,
    /// Prefill replicas; 0 counts as 1.
    pub replicas: usize,
}

impl Group {
    fn capacity(&self) -> f64 {
        self.replicas.max(1) as f64
    }
}

/// The lengths at which a segment begins.
pub fn borders(groups: &[Group]) -> impl Iterator<Item = u64> + '_ {
    groups.iter().flat_map(|group| [Some(group.min), group.max.checked_add(1)]).flatten()
}

/// A point between two requests: a bin, and a part of its requests.
type Point = (usize, f64);

/// One interval of lengths for one group. The points are compared as pairs; the end is not part of it.
#[derive(Clone, Copy, Debug)]
struct Band {
    start: Point,
    end: Point,
    group: usize,
}

/// What the plan says about one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Banded<'a> {
    /// The roleset.
    pub roleset: &'a Arc<str>,
    /// The longest prompt in this band, tokens; `u64::MAX` = no end.
    pub max: u64,
}

/// A band for display.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BandView<'a> {
    /// The roleset.
    pub roleset: &'a Arc<str>,
    /// The shortest prompt in it, tokens. A bin that is shared with the neighbouring band counts for both.
    pub min: u64,
    /// The longest one; `u64::MAX` = no end.
    pub max: u64,
}

/// Which lengths go to which roleset. Immutable; a lookup is two binary searches.
#[derive(Clone, Debug)]
pub struct Plan {
    layout: Arc<Layout>,
    mode: BucketServeMode,
    /// In the order (min, max, name).
    groups: Vec<Group>,
    /// In ascending order, none overlapping another.
    bands: Vec<Band>,
}

/// Keeps the seed's draw for bands apart from the other draws of the same request.
const SALT: u64 = 0x62_61_6e_64_73;
/// Cuts this close to the border of a bin, as a part of the segment's or the bin's weight, are at the border.
const SNAP: f64 = 1e-9;
/// A plan stays while it loads no group above its share by more than this part of the largest load.
const TOLERANCE: f64 = 0.02;

impl Plan {
    /// Plans for this picture; `None` when nothing that a group takes weighs anything. The picture's layout must have
    /// the [`borders`] of the groups: a range that begins or ends inside a bin cannot be planned for, and its group is
    /// left out.
    pub fn new(groups: &[Group], mode: BucketServeMode, picture: &Picture) -> Option<Plan> {
        let layout = picture.layout();
        let mut groups = groups.to_vec();
        groups.sort();
        let runs: Vec<Option<(usize, usize)>> = groups.iter().map(|group| run(group, layout)).collect();
        // Where a run begins, and one behind where it ends: between two such bins the takers are the same.
        let mut starts: Vec<usize> = runs.iter().flatten().flat_map(|(first, last)| [*first, last + 1]).collect();
        starts.sort_unstable();
        starts.dedup();
        let weights = picture.weights(mode);
        let segments: Vec<(usize, usize)> = starts.iter().copied().zip(starts.iter().copied().skip(1)).collect();
        let segment_weights: Vec<f64> =
            segments.iter().map(|(from, to)| weights.get(*from..*to).unwrap_or_default().iter().sum()).collect();
        // Groups of equal range are one class, however many there are.
        let mut members: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
        for (group, run) in runs.iter().enumerate() {
            if let Some((first, last)) = run {
                let segment = |bin: usize| starts.partition_point(|start| *start <= bin).saturating_sub(1);
                members.entry((segment(*first), segment(*last))).or_default().push(group);
            }
        }
        let members: Vec<((usize, usize), Vec<usize>)> = members.into_iter().collect();
        let capacity = |group: &usize| groups.get(*group).map_or(0.0, Group::capacity);
        let classes: Vec<Class> = members
            .iter()
            .map(|((first, last), members)| Class {
                first: *first,
                last: *last,
                capacity: members.iter().map(capacity).sum(),
            })
            .collect();
        let mut wanted: Vec<BTreeMap<usize, f64>> = vec![BTreeMap::new(); segments.len()];
        for share in fair::divide(&segment_weights, &classes) {
            let (Some(wanted), Some(class)) = (wanted.get_mut(share.segment), classes.get(share.class)) else {
                continue;
            };
            for member in members.get(share.class).into_iter().flat_map(|(_, members)| members) {
                *wanted.entry(*member).or_default() += share.amount * capacity(member) / class.capacity;
            }
        }
        let mut bands = Vec::new();
        for ((from, to), wanted) in segments.iter().zip(&wanted) {
            cut(*from, *to, weights, wanted, &mut bands);
        }
        (!bands.is_empty()).then(|| Plan { layout: Arc::clone(layout), mode, groups, bands })
    }

    /// The roleset of a prompt of so many tokens. Where a border between two bands falls into a bin, the seed decides,
    /// with the probability that gives each its share; so even traffic of a single length is divided. `None` where the
    /// plan holds no band: nobody takes that length, or none like it was observed.
    pub fn band(&self, tokens: u64, seed: u64) -> Option<Banded<'_>> {
        self.at(tokens, Rng::new(seed ^ SALT).unit())
    }

    /// The same with the draw from `0.0..1.0` itself.
    pub(super) fn at(&self, tokens: u64, draw: f64) -> Option<Banded<'_>> {
        let point = (self.layout.bin(tokens), draw);
        let band = self.bands.get(self.bands.partition_point(|band| band.start <= point).checked_sub(1)?)?;
        let roleset = self.groups.get(band.group).filter(|_| point < band.end).map(|group| &group.name)?;
        Some(Banded { roleset, max: self.last(band) })
    }

    /// Every band, in ascending order.
    pub fn bands(&self) -> impl Iterator<Item = BandView<'_>> {
        self.bands.iter().filter_map(|band| {
            let roleset = &self.groups.get(band.group)?.name;
            Some(BandView { roleset, min: self.layout.first(band.start.0), max: self.last(band) })
        })
    }

    /// What its weights count.
    pub fn mode(&self) -> BucketServeMode {
        self.mode
    }

    /// Weight per replica that each roleset gets of this picture, in the order (min, max, name) of the groups. Zeros
    /// for a picture in another layout.
    pub fn loads(&self, picture: &Picture) -> Vec<f64> {
        let mut loads = vec![0.0; self.groups.len()];
        if **picture.layout() != *self.layout {
            return loads;
        }
        let weights = picture.weights(self.mode);
        for band in &self.bands {
            let Some(load) = loads.get_mut(band.group) else { continue };
            for (bin, weight) in weights.iter().enumerate().take(band.end.0 + 1).skip(band.start.0) {
                let from = if bin == band.start.0 { band.start.1 } else { 0.0 };
                let to = if bin == band.end.0 { band.end.1 } else { 1.0 };
                *load += weight * (to - from);
            }
        }
        for (load, group) in loads.iter_mut().zip(&self.groups) {
            *load /= group.capacity();
        }
        loads
    }

    /// True when this plan still divides `picture` nearly as well as `fresh`, which was just made for it: it has a
    /// band wherever that has one, and loads no roleset above its share by more than 2 % of the largest load.
    pub fn still_good(&self, fresh: &Plan, picture: &Picture) -> bool {
        if self.groups != fresh.groups || self.mode != fresh.mode || self.layout != fresh.layout {
            return false;
        }
        let (mine, best) = (self.loads(picture), fresh.loads(picture));
        let largest = best.iter().copied().fold(0.0, f64::max);
        let covered = |loads: &[f64]| -> f64 {
            loads.iter().zip(&self.groups).map(|(load, group)| load * group.capacity()).sum()
        };
        let (all, kept) = (covered(&best), covered(&mine));
        kept >= all * (1.0 - SNAP) && mine.iter().zip(&best).all(|(mine, best)| mine - best <= TOLERANCE * largest)
    }

    fn last(&self, band: &Band) -> u64 {
        let (bin, part) = band.end;
        if part > 0.0 { self.layout.last(bin) } else { self.layout.last(bin.saturating_sub(1)) }
    }
}

/// The bins of a group's range.
fn run(group: &Group, layout: &Layout) -> Option<(usize, usize)> {
    let first = layout.begins(group.min)?;
    let behind = group.max.checked_add(1).map_or(Some(layout.len()), |behind| layout.begins(behind))?;
    (first < behind).then(|| (first, behind - 1))
}

/// Cuts the bins `from..to` into one band per group, of the wanted weights and in the groups' order.
fn cut(from: usize, to: usize, weights: &[f64], wanted: &BTreeMap<usize, f64>, bands: &mut Vec<Band>) {
    let total: f64 = wanted.values().sum();
    let weight = |bin: usize| weights.get(bin).copied().unwrap_or(0.0);
    let mut takers: Vec<(usize, f64)> =
        wanted.iter().map(|(group, amount)| (*group, *amount)).filter(|(_, amount)| *amount > total * SNAP).collect();
    let Some((last_group, _)) = takers.pop() else { return };
    let (mut start, mut bin, mut before, mut target) = ((from, 0.0), from, 0.0, 0.0);
    for (group, amount) in takers {
        target += amount;
        while bin < to && before + weight(bin) <= target + total * SNAP {
            before += weight(bin);
            bin += 1;
        }
        let part = if bin < to && weight(bin) > 0.0 { ((target - before) / weight(bin)).clamp(0.0, 1.0) } else { 0.0 };
        let end = (bin, if part < SNAP { 0.0 } else { part });
        if start < end {
            bands.push(Band { start, end, group });
            start = end;
        }
    }
    if start < (to, 0.0) {
        bands.push(Band { start, end: (to, 0.0), group: last_group });
    }
}
