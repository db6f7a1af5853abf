mod following;
mod model;

mod optimum;
mod planning;
mod sketching;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::layout::Layout;
use super::plan::{Group, Plan, borders};
use super::sketch::{Bins, Increments, Picture};
use crate::clock::Tick;
use crate::knobs::BucketServeMode;

/// Requests per exact length.
type Lengths = BTreeMap<u64, u64>;

const OPEN: u64 = u64::MAX;

fn group(name: &str, min: u64, max: u64, replicas: usize) -> Group {
    Group { name: name.into(), min, max, replicas }
}

/// The picture of these requests, taken the way production does: observed one by one, drained, absorbed.
fn picture(groups: &[Group], lengths: &Lengths) -> Picture {
    let layout = Arc::new(Layout::new(borders(groups)));
    let sketch = super::Sketch::default();
    sketch.replace(Some(Arc::new(Bins::new(Arc::clone(&layout)))));
    for (length, requests) in lengths {
        (0..*requests).for_each(|_| sketch.observe(*length));
    }
    let mut increments = Increments::default();
    sketch.drain_into(&mut increments);
    let mut picture = Picture::empty(layout, Tick(0));
    picture.absorb(&increments);
    picture
}

/// What a request of this length weighs.
fn weight(mode: BucketServeMode, length: u64) -> f64 {
    match mode {
        BucketServeMode::Throughput => length as f64,
        BucketServeMode::Rps => 1.0,
    }
}

/// The rolesets of a length with the part of its requests that each gets, found by asking: where the answer changes
/// between two draws, bisection finds the point. In one bin a roleset's draws are one interval.
fn parts(plan: &Plan, length: u64) -> Vec<(Option<Arc<str>>, f64)> {
    let ask = |draw: f64| plan.at(length, draw).map(|band| Arc::clone(band.roleset));
    let (mut parts, mut start, end) = (Vec::new(), 0.0, 1.0 - f64::EPSILON);
    loop {
        let name = ask(start);
        if ask(end) == name {
            parts.push((name, 1.0 - start));
            return parts;
        }
        let (mut low, mut high) = (start, end);
        loop {
            let middle = f64::midpoint(low, high);
            if middle <= low || middle >= high {
                break;
            }
            if ask(middle) == name {
                low = middle;
            } else {
                high = middle;
            }
        }
        parts.push((name, high - start));
        start = high;
    }
}

/// Weight per replica that each group really gets when these requests ask the plan. Requests without a band count for
/// nobody.
fn measured(plan: &Plan, groups: &[Group], lengths: &Lengths) -> BTreeMap<String, f64> {
    let mut loads: BTreeMap<String, f64> = groups.iter().map(|group| (group.name.to_string(), 0.0)).collect();
    for (length, requests) in lengths {
        for (name, part) in parts(plan, *length) {
            let Some(name) = name else { continue };
            let group = groups.iter().find(|group| group.name == name).unwrap();
            assert!((group.min..=group.max).contains(length), "{group:?} got {length}");
            let part = weight(plan.mode(), *length) * *requests as f64 * part;
            *loads.get_mut(&*group.name).unwrap() += part / group.replicas.max(1) as f64;
        }
    }
    loads
}

/// The least possible largest load per replica: the maximum, over the sets of groups, of what only they can take per
/// replica of theirs (LP duality). Exhaustive, and made from the requests themselves.
fn optimum(groups: &[Group], mode: BucketServeMode, lengths: &Lengths) -> f64 {
    let takers = |length: u64| -> u32 {
        let takes = |(_, group): &(usize, &Group)| (group.min..=group.max).contains(&length);
        groups.iter().enumerate().filter(takes).map(|(id, _)| 1 << id).sum()
    };
    let mut by_takers: BTreeMap<u32, f64> = BTreeMap::new();
    for (length, requests) in lengths {
        *by_takers.entry(takers(*length)).or_default() += weight(mode, *length) * *requests as f64;
    }
    by_takers.remove(&0);
    (1u32..1 << groups.len())
        .map(|set| {
            let only: f64 = by_takers.iter().filter(|(takers, _)| **takers & !set == 0).map(|(_, weight)| weight).sum();
            let of_set = groups.iter().enumerate().filter(|(id, _)| set & (1 << id) != 0);
            only / of_set.map(|(_, group)| group.replicas.max(1) as f64).sum::<f64>()
        })
        .fold(0.0, f64::max)
}
