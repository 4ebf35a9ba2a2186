//! Which leaf block is evicted next: an addressable heap over the leaves that may go.
//!
//! Every leaf node whose last block is unpinned is in the heap under the key of that block: (last use, deepest first,
//! lowest id). Each operation costs O(log n) in the number of such leaves and allocates nothing once the heap has
//! been that large.

use std::cmp::Reverse;

use crate::ids::{Depth, NodeIndex};

/// Order of eviction: smaller goes first.
pub(crate) type Key = (u64, Reverse<Depth>, u32);

/// Children of a heap entry: four of them share a cache line or two.
const ARITY: usize = 4;

/// "Not in the heap", as a position.
pub(crate) const NOT_QUEUED: u32 = u32::MAX;

/// The heap. Positions are told to the caller's `moved` so that an entry can be found again.
#[derive(Debug, Default)]
pub(crate) struct EvictionOrder {
    heap: Vec<(Key, NodeIndex)>,
}

impl EvictionOrder {
    pub(crate) fn first(&self) -> Option<&(Key, NodeIndex)> {
        self.heap.first()
    }

    pub(crate) fn entries(&self) -> &[(Key, NodeIndex)] {
        &self.heap
    }

    /// Adds a node; `moved(node, position)` is called for every entry that comes to lie elsewhere.
    pub(crate) fn push(&mut self, key: Key, node: NodeIndex, moved: impl FnMut(NodeIndex, u32)) {
        self.heap.push((key, node));
        self.rise(self.heap.len() - 1, moved);
    }

    /// Takes out the entry at `position`.
    pub(crate) fn remove(&mut self, position: u32, mut moved: impl FnMut(NodeIndex, u32)) {
        let at = position as usize;
        let (_, node) = self.heap.swap_remove(at);
        moved(node, NOT_QUEUED);
        if at < self.heap.len() {
            let at = self.rise(at, &mut moved);
            self.sink(at, moved);
        }
    }

    fn rise(&mut self, mut at: usize, mut moved: impl FnMut(NodeIndex, u32)) -> usize {
        while at > 0 {
            let parent = (at - 1) / ARITY;
            if self.heap[parent].0 <= self.heap[at].0 {
                break;
            }
            self.heap.swap(parent, at);
            moved(self.heap[at].1, crate::ids::depth(at));
            at = parent;
        }
        moved(self.heap[at].1, crate::ids::depth(at));
        at
    }

    fn sink(&mut self, mut at: usize, mut moved: impl FnMut(NodeIndex, u32)) {
        loop {
            let children = at * ARITY + 1..(at * ARITY + 1 + ARITY).min(self.heap.len());
            let Some(least) = children.min_by_key(|&child| self.heap[child].0) else {
                break;
            };
            if self.heap[at].0 <= self.heap[least].0 {
                break;
            }
            self.heap.swap(at, least);
            moved(self.heap[at].1, crate::ids::depth(at));
            at = least;
        }
        moved(self.heap[at].1, crate::ids::depth(at));
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.heap.capacity() * size_of::<(Key, NodeIndex)>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pops_in_key_order_and_knows_every_position(
            steps in prop::collection::vec((any::<bool>(), 0u64..50, 0u32..20), 0..300)
        ) {
            let mut order = EvictionOrder::default();
            let mut positions: BTreeMap<u32, u32> = BTreeMap::new();
            let mut model: BTreeMap<u32, Key> = BTreeMap::new();
            for (push, stamp, node) in steps {
                if push && !model.contains_key(&node) {
                    let key = (stamp, Reverse(node % 3), node);
                    order.push(key, node, |node, at| { positions.insert(node, at); });
                    model.insert(node, key);
                } else if !push && model.remove(&node).is_some() {
                    order.remove(positions[&node], |node, at| { positions.insert(node, at); });
                }
                prop_assert_eq!(order.entries().len(), model.len());
                prop_assert_eq!(order.first().map(|entry| entry.0), model.values().min().copied());
                for (at, (key, node)) in order.entries().iter().enumerate() {
                    prop_assert_eq!(positions[node] as usize, at);
                    prop_assert_eq!(&model[node], key);
                }
            }
        }
    }
}
