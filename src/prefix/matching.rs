//! Which candidates still hold every block so far.
//!
//! After the first block the set is a subset of that block's holders, so a block costs no more than its holders, and
//! usually one comparison of two short lists.

/// Candidates that have matched so far, sorted by slot.
#[derive(Debug, Default)]
pub(super) struct Matching {
    slots: Vec<u32>,
    positions: Vec<u32>,
}

/// With so few holders, a scan over unsorted candidates beats sorting them.
const FEW: usize = 4;
/// A list that is so many times longer than the other is searched instead of walked.
const MUCH_LONGER: usize = 8;

impl Matching {
    /// Starts with the candidates that hold the first block. `holders` is sorted.
    pub(super) fn start(candidates: &[u32], holders: &[u32]) -> Matching {
        let mut pairs: Vec<(u32, u32)> = (0u32..)
            .zip(candidates)
            .filter(
                |(_, slot)| {
                    if holders.len() <= FEW { holders.contains(slot) } else { holders.binary_search(slot).is_ok() }
                },
            )
            .map(|(position, slot)| (*slot, position))
            .collect();
        pairs.sort_unstable();
        let (slots, positions) = pairs.into_iter().unzip();
        Matching { slots, positions }
    }

    /// Nobody is left.
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Positions, in the caller's candidate list, of those that are left.
    pub(super) fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Drops whoever is not among `holders` (sorted) and reports its position.
    pub(super) fn keep(&mut self, holders: &[u32], mut dropped: impl FnMut(u32)) {
        if self.slots == holders {
            return;
        }
        let search = holders.len() > self.slots.len().saturating_mul(MUCH_LONGER);
        let mut rest = holders;
        let mut kept = 0;
        for at in 0..self.slots.len() {
            let (slot, position) = (self.slots[at], self.positions[at]);
            let skip = if search {
                rest.partition_point(|holder| *holder < slot)
            } else {
                rest.iter().take_while(|holder| **holder < slot).count()
            };
            rest = rest.get(skip..).unwrap_or_default();
            if rest.first() == Some(&slot) {
                self.slots[kept] = slot;
                self.positions[kept] = position;
                kept += 1;
            } else {
                dropped(position);
            }
        }
        self.slots.truncate(kept);
        self.positions.truncate(kept);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_set_intersection(
            candidates in proptest::collection::vec(0u32..60, 0..40),
            blocks in proptest::collection::vec(proptest::collection::btree_set(0u32..60, 0..40), 1..5),
        ) {
            let lists: Vec<Vec<u32>> = blocks.iter().map(|b| b.iter().copied().collect()).collect();
            let mut matching = Matching::start(&candidates, &lists[0]);
            let mut gone = BTreeSet::new();
            for list in &lists[1..] {
                matching.keep(list, |position| assert!(gone.insert(position)));
            }
            let expected: BTreeSet<u32> = (0u32..).zip(&candidates)
                .filter(|(_, slot)| blocks.iter().all(|b| b.contains(slot)))
                .map(|(position, _)| position)
                .collect();
            let left: BTreeSet<u32> = matching.positions().iter().copied().collect();
            prop_assert_eq!(&left, &expected);
            prop_assert!(left.is_disjoint(&gone));
            prop_assert_eq!(matching.is_empty(), expected.is_empty());
        }
    }
}
