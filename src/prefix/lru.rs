//! The eviction order: a doubly linked list in a slab, all operations O(1).
//!
//! The slab grows by chunks, so that growing never copies and never holds two generations at once.

/// "No node".
const NONE: u32 = u32::MAX;
/// Value of [`Node::newer`] in a node that is not in use.
const FREE: u32 = u32::MAX - 1;
/// Nodes per chunk.
pub(super) const CHUNK: usize = 512;

/// One map entry in the order.
#[derive(Clone, Copy, Debug)]
struct Node {
    key: u64,
    newer: u32,
    older: u32,
    last: u32,
}

/// Keys from most to least recently touched.
#[derive(Debug)]
pub(super) struct Lru {
    chunks: Vec<Vec<Node>>,
    newest: u32,
    oldest: u32,
    free: u32,
    len: usize,
}

/// Bytes per node.
pub(super) const NODE_BYTES: usize = size_of::<Node>();

impl Lru {
    pub(super) fn new() -> Lru {
        Lru { chunks: Vec::new(), newest: NONE, oldest: NONE, free: NONE, len: 0 }
    }

    /// Nodes in use.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes allocated; the slab does not shrink.
    pub(super) fn allocated(&self) -> usize {
        self.chunks.len() * CHUNK * NODE_BYTES
    }

    /// Number of nodes ever made: indices are below it.
    pub(super) fn high_water(&self) -> u32 {
        let full = self.chunks.len().saturating_sub(1) * CHUNK;
        (full + self.chunks.last().map_or(0, Vec::len)) as u32
    }

    fn node(&self, index: u32) -> Option<&Node> {
        let index = index as usize;
        self.chunks.get(index / CHUNK)?.get(index % CHUNK)
    }

    fn node_mut(&mut self, index: u32) -> Option<&mut Node> {
        let index = index as usize;
        self.chunks.get_mut(index / CHUNK)?.get_mut(index % CHUNK)
    }

    /// The key of a node in use.
    pub(super) fn key(&self, index: u32) -> Option<u64> {
        self.node(index).filter(|node| node.newer != FREE).map(|node| node.key)
    }

    /// Makes a node right behind `leader`, that is, to be evicted just before it; without a leader, at the newest end.
    pub(super) fn insert(&mut self, key: u64, now: u32, leader: Option<u32>) -> u32 {
        let index = if let Some(node) = self.node(self.free) {
            let index = self.free;
            self.free = node.older;
            index
        } else {
            let index = self.high_water();
            if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
                self.chunks.push(Vec::with_capacity(CHUNK));
            }
            if let Some(chunk) = self.chunks.last_mut() {
                chunk.push(Node { key, newer: FREE, older: NONE, last: now });
            }
            index
        };
        if let Some(node) = self.node_mut(index) {
            node.key = key;
        }
        self.link(index, now, leader);
        self.len += 1;
        index
    }

    /// Moves a node to the place where [`Lru::insert`] would have made it.
    pub(super) fn touch(&mut self, index: u32, now: u32, leader: Option<u32>) {
        if self.key(index).is_some() && leader != Some(index) {
            self.unlink(index);
            self.link(index, now, leader);
        }
    }

    /// Frees a node.
    pub(super) fn remove(&mut self, index: u32) {
        if self.key(index).is_none() {
            return;
        }
        self.unlink(index);
        let free = self.free;
        if let Some(node) = self.node_mut(index) {
            node.newer = FREE;
            node.older = free;
        }
        self.free = index;
        self.len -= 1;
    }

    /// The least recently touched node: index, key, second of its last touch.
    pub(super) fn oldest(&self) -> Option<(u32, u64, u32)> {
        self.node(self.oldest).map(|node| (self.oldest, node.key, node.last))
    }

    fn link(&mut self, index: u32, now: u32, leader: Option<u32>) {
        let leader = leader.filter(|leader| self.key(*leader).is_some()).unwrap_or(NONE);
        let older = self.node(leader).map_or(self.newest, |node| node.older);
        if let Some(node) = self.node_mut(index) {
            node.newer = leader;
            node.older = older;
            node.last = now;
        }
        match self.node_mut(leader) {
            Some(node) => node.older = index,
            None => self.newest = index,
        }
        match self.node_mut(older) {
            Some(node) => node.newer = index,
            None => self.oldest = index,
        }
    }

    fn unlink(&mut self, index: u32) {
        let Some(&Node { newer, older, .. }) = self.node(index) else { return };
        match self.node_mut(newer) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.node_mut(older) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain list, oldest first.
        #[test]
        fn behaves_like_a_list(steps in proptest::collection::vec((0u8..4, 0usize..12), 0..200)) {
            let mut lru = Lru::new();
            let mut model: Vec<(u32, u64, u32)> = Vec::new();
            for (now, (kind, at)) in steps.into_iter().enumerate() {
                let now = now as u32;
                match kind {
                    0 | 1 => {
                        let key = u64::from(now) << 8;
                        let leader = model.get(at).map(|(node, _, _)| *node);
                        let place = if leader.is_some() { at } else { model.len() };
                        model.insert(place, (lru.insert(key, now, leader), key, now));
                    }
                    2 if at < model.len() => {
                        let (node, key, _) = model.remove(at);
                        // The next newer one leads, so it stays where it was, with a new time.
                        let leader = model.get(at).map(|(node, _, _)| *node);
                        lru.touch(node, now, leader);
                        model.insert(at, (node, key, now));
                        if key % 3 == 0 {
                            model.remove(at);
                            lru.touch(node, now, None);
                            model.push((node, key, now));
                        }
                    }
                    3 if at < model.len() => {
                        let (node, _, _) = model.remove(at);
                        lru.remove(node);
                        lru.remove(node);
                        prop_assert_eq!(lru.key(node), None);
                    }
                    _ => {}
                }
                prop_assert_eq!(lru.oldest(), model.first().copied());
                prop_assert_eq!(lru.len(), model.len());
                for (node, key, _) in &model {
                    prop_assert_eq!(lru.key(*node), Some(*key));
                }
            }
            while let Some((node, _, _)) = lru.oldest() {
                prop_assert_eq!(node, model.remove(0).0);
                lru.remove(node);
            }
            prop_assert!(model.is_empty());
        }
    }

    #[test]
    fn freed_nodes_are_used_again() {
        let mut lru = Lru::new();
        for round in 0..10u32 {
            let nodes: Vec<u32> = (0..5000).map(|key| lru.insert(key, round, None)).collect();
            for node in nodes {
                lru.remove(node);
            }
        }
        assert_eq!((lru.len(), lru.high_water(), lru.oldest()), (0, 5000, None));
        assert_eq!(lru.allocated(), 5000usize.div_ceil(CHUNK) * CHUNK * NODE_BYTES);
    }
}
