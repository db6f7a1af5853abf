//! Divides weights among those who may take them, as evenly as the permissions allow.
//!
//! Segments have weights; a class takes any of a run of neighbouring segments, and has a capacity (its replicas). The
//! division found is the lexicographic optimum: the largest load (weight per capacity) is as small as can be, then
//! the next, and so on. It is unique in the loads, and every positive share of a segment goes to a class whose load is
//! the least of all that may take it.
//!
//! Method: decomposition (Groenevelt 1991, Fujishige 1980). Suppose all classes of a part could be loaded alike. The
//! most that can be placed under that limit is found by giving each segment, from left to right, to the class whose
//! run ends first; for runs that is a maximum flow (Glover 1967). If everything is placed, the part is done. If not,
//! the segments that are left over, and all that could make room for them, are one side of a minimum cut: they must be
//! loaded above the average and share no weight with the rest. Both sides are then parts of their own.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Somebody who takes weight from a run of segments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Class {
    /// The first segment it may take from.
    pub(super) first: usize,
    /// The last one.
    pub(super) last: usize,
    /// Its replicas, above 0.
    pub(super) capacity: f64,
}

impl Class {
    fn takes(&self, segment: usize) -> bool {
        (self.first..=self.last).contains(&segment)
    }
}

/// A part of a segment's weight for one class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Share {
    pub(super) segment: usize,
    pub(super) class: usize,
    pub(super) amount: f64,
}

/// Below this part of the whole, an amount is rounding.
const DUST: f64 = 1e-12;
/// Below this part of the whole, what could not be placed is rounding.
const PLACED: f64 = 1e-9;

/// The fair division. Segments without weight, and those that nobody takes, have no share.
pub(super) fn divide(weights: &[f64], classes: &[Class]) -> Vec<Share> {
    let mut shares = Vec::new();
    let segments = (0..weights.len()).filter(|segment| weight(weights, *segment) > 0.0).collect();
    let (whole, _nobodys) = Part::new(segments, (0..classes.len()).collect(), classes);
    let mut parts = vec![whole];
    while let Some(part) = parts.pop() {
        let placed = part.place(weights, classes);
        match part.overloaded(&placed, classes) {
            None => shares.extend(placed.complete()),
            Some((segments, takers)) => {
                let (mut over, rest) = split(&part.segments, &segments);
                let (over_takers, rest_takers) = split(&part.classes, &takers);
                // What only the overloaded ones take is theirs, also when it was too little to tell from rounding.
                let (rest, only_theirs) = Part::new(rest, rest_takers, classes);
                over.extend(only_theirs);
                over.sort_unstable();
                parts.push(Part { segments: over, classes: over_takers });
                parts.push(rest);
            }
        }
    }
    shares
}

/// The marked ones, and the others.
fn split(all: &[usize], marks: &[bool]) -> (Vec<usize>, Vec<usize>) {
    let (marked, others): (Vec<_>, Vec<_>) = all.iter().copied().zip(marks).partition(|(_, mark)| **mark);
    let ids = |pairs: Vec<(usize, &bool)>| pairs.into_iter().map(|(id, _)| id).collect();
    (ids(marked), ids(others))
}

fn weight(weights: &[f64], segment: usize) -> f64 {
    weights.get(segment).copied().unwrap_or(0.0)
}

/// A part of the problem that shares no weight with the others.
struct Part {
    /// In ascending order.
    segments: Vec<usize>,
    classes: Vec<usize>,
}

/// What could be placed of a part.
struct Placed {
    shares: Vec<Share>,
    /// Per segment of the part: (segment, what is left over, a class that takes it).
    left: Vec<(usize, f64, usize)>,
    total: f64,
}

impl Part {
    /// The segments that one of these classes takes, in ascending order, and those that none takes.
    fn new(segments: Vec<usize>, takers: Vec<usize>, classes: &[Class]) -> (Part, Vec<usize>) {
        let mut runs: Vec<(usize, usize)> =
            takers.iter().filter_map(|id| classes.get(*id)).map(|class| (class.first, class.last)).collect();
        runs.sort_unstable();
        let (mut runs, mut reach) = (runs.into_iter().peekable(), None);
        let (mut kept, mut strays) = (Vec::with_capacity(segments.len()), Vec::new());
        for segment in segments {
            while let Some((_, last)) = runs.next_if(|(first, _)| *first <= segment) {
                reach = reach.max(Some(last));
            }
            if reach.is_some_and(|reach| reach >= segment) { kept.push(segment) } else { strays.push(segment) }
        }
        (Part { segments: kept, classes: takers }, strays)
    }

    /// Places as much as can be when no class is loaded above the part's average.
    fn place(&self, weights: &[f64], classes: &[Class]) -> Placed {
        let total: f64 = self.segments.iter().map(|segment| weight(weights, *segment)).sum();
        let capacity: f64 = self.classes.iter().filter_map(|id| classes.get(*id)).map(|class| class.capacity).sum();
        let level = if capacity > 0.0 { total / capacity } else { 0.0 };
        let mut waiting: Vec<(usize, usize, f64, usize)> = self
            .classes
            .iter()
            .filter_map(|id| classes.get(*id).map(|class| (class.first, class.last, class.capacity * level, *id)))
            .collect();
        waiting.sort_by_key(|(first, last, _, id)| (*first, *last, *id));
        let mut waiting = waiting.into_iter().peekable();
        // By end of the run; the room a class has left is looked up by its number.
        let mut open: BinaryHeap<Reverse<(usize, usize)>> = BinaryHeap::new();
        let mut room = vec![0.0; classes.len()];
        let mut widest: Option<(usize, usize)> = None;
        let mut placed = Placed { shares: Vec::new(), left: Vec::with_capacity(self.segments.len()), total };
        for &segment in &self.segments {
            while let Some((_, last, free, id)) = waiting.next_if(|(first, ..)| *first <= segment) {
                open.push(Reverse((last, id)));
                if let Some(room) = room.get_mut(id) {
                    *room = free;
                }
                widest = widest.max(Some((last, id)));
            }
            let mut left = weight(weights, segment);
            while left > 0.0 {
                let Some(&Reverse((last, id))) = open.peek() else { break };
                let Some(room) = room.get_mut(id) else { break };
                if last < segment || *room <= 0.0 {
                    open.pop();
                    continue;
                }
                let amount = left.min(*room);
                *room -= amount;
                left -= amount;
                placed.shares.push(Share { segment, class: id, amount });
            }
            // The part's segments all have a taker, and the run that reaches furthest right is one.
            if let Some((_, id)) = widest {
                placed.left.push((segment, left, id));
            }
        }
        placed
    }

    /// The overloaded side of the cut, as marks on the part's segments and classes; `None` when everything is placed.
    fn overloaded(&self, placed: &Placed, classes: &[Class]) -> Option<(Vec<bool>, Vec<bool>)> {
        let unplaced: f64 = placed.left.iter().map(|(_, left, _)| left).sum();
        if unplaced <= placed.total * PLACED {
            return None;
        }
        let (mut segments, mut takers) = (vec![false; self.segments.len()], vec![false; self.classes.len()]);
        // All that is left over counts but rounding: the cut is right only if it has every segment that is overloaded.
        let mut queue: Vec<usize> = Vec::new();
        for (position, (_, left, _)) in placed.left.iter().enumerate() {
            if *left > placed.total * DUST {
                mark(&mut segments, position, &mut queue);
            }
        }
        // Per class, the positions of the segments that it takes something from.
        let mut fed = vec![Vec::new(); classes.len()];
        for share in placed.shares.iter().filter(|share| share.amount > placed.total * DUST) {
            if let (Some(fed), Ok(position)) = (fed.get_mut(share.class), self.segments.binary_search(&share.segment)) {
                fed.push(position);
            }
        }
        while let Some(position) = queue.pop() {
            let Some(&segment) = self.segments.get(position) else { continue };
            for (taker, id) in takers.iter_mut().zip(&self.classes) {
                if !*taker && classes.get(*id).is_some_and(|class| class.takes(segment)) {
                    *taker = true;
                    for &position in fed.get(*id).into_iter().flatten() {
                        mark(&mut segments, position, &mut queue);
                    }
                }
            }
        }
        // Both sides have classes unless rounding got in the way; then what is there is as even as numbers allow.
        let proper = takers.contains(&true) && takers.contains(&false);
        proper.then_some((segments, takers))
    }
}

fn mark(marks: &mut [bool], position: usize, queue: &mut Vec<usize>) {
    if let Some(mark) = marks.get_mut(position)
        && !*mark
    {
        *mark = true;
        queue.push(position);
    }
}

impl Placed {
    /// The shares with the rounding that was left over.
    fn complete(self) -> Vec<Share> {
        let rest = self.left.into_iter().filter(|(_, left, _)| *left > 0.0);
        let rest = rest.map(|(segment, amount, class)| Share { segment, class, amount });
        self.shares.into_iter().chain(rest).collect()
    }
}
