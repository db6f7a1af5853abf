//! The pods that hold one block.
//!
//! Readers see an immutable, sorted list of slots. The writer replaces the list to add or remove a pod; the time of a
//! pod's last put is the only thing that changes in place, and only the writer looks at it.

use std::sync::atomic::{AtomicU32, Ordering};

/// What the map holds for one block.
#[derive(Debug)]
pub(super) struct Entry {
    /// The entry's place in the eviction order.
    pub(super) node: u32,
    /// Who holds the block.
    pub(super) holders: Holders,
}

/// A non-empty set of pod slots, each with the second of its last put.
#[derive(Debug)]
pub(super) enum Holders {
    /// The usual case, without an allocation.
    One(u32, AtomicU32),
    /// Several.
    Many(Box<Shared>),
}

/// Parallel lists, sorted by slot, without duplicates.
#[derive(Debug)]
pub(super) struct Shared {
    slots: Box<[u32]>,
    puts: Box<[AtomicU32]>,
}

impl Holders {
    /// One pod.
    pub(super) fn one(slot: u32, now: u32) -> Holders {
        Holders::One(slot, AtomicU32::new(now))
    }

    fn from_sorted(pairs: &[(u32, u32)]) -> Option<Holders> {
        match pairs {
            [] => None,
            [(slot, put)] => Some(Holders::one(*slot, *put)),
            _ => Some(Holders::Many(Box::new(Shared {
                slots: pairs.iter().map(|(slot, _)| *slot).collect(),
                puts: pairs.iter().map(|(_, put)| AtomicU32::new(*put)).collect(),
            }))),
        }
    }

    /// The slots, sorted.
    pub(super) fn slots(&self) -> &[u32] {
        match self {
            Holders::One(slot, _) => std::slice::from_ref(slot),
            Holders::Many(shared) => &shared.slots,
        }
    }

    fn puts(&self) -> &[AtomicU32] {
        match self {
            Holders::One(_, put) => std::slice::from_ref(put),
            Holders::Many(shared) => &shared.puts,
        }
    }

    /// Notes a put by a pod that is in the set; false when it is not.
    pub(super) fn touch(&self, slot: u32, now: u32) -> bool {
        let Ok(at) = self.slots().binary_search(&slot) else { return false };
        if let Some(put) = self.puts().get(at) {
            put.store(now, Ordering::Relaxed);
        }
        true
    }

    /// True when `stays` says no to one of the pods.
    pub(super) fn any_goes(&self, stays: impl Fn(u32, u32) -> bool) -> bool {
        self.slots().iter().zip(self.puts()).any(|(slot, put)| !stays(*slot, put.load(Ordering::Relaxed)))
    }

    /// A new set: the pods of this one for which `stays` says yes, and `added`. `None` when nobody is left.
    pub(super) fn rebuilt(&self, added: Option<(u32, u32)>, stays: impl Fn(u32, u32) -> bool) -> Option<Holders> {
        let mut pairs: Vec<(u32, u32)> = self
            .slots()
            .iter()
            .zip(self.puts())
            .map(|(slot, put)| (*slot, put.load(Ordering::Relaxed)))
            .filter(|(slot, put)| stays(*slot, *put) && added.is_none_or(|(new, _)| new != *slot))
            .collect();
        if let Some(added) = added {
            let at = pairs.partition_point(|(slot, _)| *slot < added.0);
            pairs.insert(at, added);
        }
        Holders::from_sorted(&pairs)
    }

    /// Heap bytes beside the entry itself, as allocators round them.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Holders::One(..) => 0,
            Holders::Many(shared) => allocation(size_of::<Shared>()) + 2 * allocation(shared.slots.len() * 4),
        }
    }
}

/// What an allocation of `bytes` costs in an allocator with an eight-byte header and 16-byte steps, which is glibc;
/// mimalloc needs no more for these sizes.
pub(super) const fn allocation(bytes: usize) -> usize {
    let rounded = (bytes + 8).next_multiple_of(16);
    if rounded < 32 { 32 } else { rounded }
}
