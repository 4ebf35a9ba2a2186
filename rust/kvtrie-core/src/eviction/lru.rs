//! The eviction order by last use: an addressable heap of the evictable leaves.
//!
//! The key of a leaf is the last use of its last block, which is unpinned. Of equal last uses, which are rare, the
//! deepest block goes first, then the lowest id. An entry has 12 bytes, without the tie-break, so that many fit into a
//! cache line. Each operation costs O(log leaves). In a linked list a touch would be cheaper, but a new or released
//! leaf can have a last use of any age.

use std::cmp::{Ordering, Reverse};

use crate::ids::{Depth, NodeIndex};
use crate::storage::paged::Paged;

/// Number of children of a heap entry: four fit into one or two cache lines.
pub(crate) const ARITY: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The time in two halves, so that an entry needs no padding.
    time: [u32; 2],
    node: NodeIndex,
}

impl Entry {
    fn new(time: u64, node: NodeIndex) -> Self {
        let half = |shift: u32| u32::try_from(time >> shift & 0xffff_ffff).unwrap_or(u32::MAX);
        Self {
            time: [half(32), half(0)],
            node,
        }
    }

    fn time(self) -> u64 {
        u64::from(self.time[0]) << 32 | u64::from(self.time[1])
    }
}

pub(crate) trait Leaves {
    /// Orders leaves of equal last use: the smallest comes first.
    fn tie(&self, node: NodeIndex) -> (Reverse<Depth>, u32);
    /// Reports that the leaf's entry is now at `position`, or removed.
    fn moved(&mut self, node: NodeIndex, position: Option<u32>);
}

#[derive(Debug, Default)]
pub(crate) struct EvictionOrder {
    heap: Paged<Entry>,
}

impl EvictionOrder {
    pub(crate) fn first(&self) -> Option<NodeIndex> {
        (self.heap.len() > 0).then(|| self.heap[0].node)
    }

    pub(crate) fn second_time(&self) -> Option<u64> {
        let children = 1..self.heap.len().min(1 + ARITY);
        children.map(|at| self.heap[at].time()).min()
    }

    pub(crate) fn entries(&self) -> impl ExactSizeIterator<Item = (u64, NodeIndex)> {
        self.heap.iter().map(|entry| (entry.time(), entry.node))
    }

    pub(crate) fn push(&mut self, time: u64, node: NodeIndex, leaves: &mut impl Leaves) {
        self.heap.push(Entry::new(time, node));
        self.rise(self.heap.len() - 1, leaves);
    }

    pub(crate) fn update(&mut self, position: u32, time: u64, leaves: &mut impl Leaves) {
        let at = position as usize;
        self.heap[at] = Entry::new(time, self.heap[at].node);
        let at = self.rise(at, leaves);
        self.sink(at, leaves);
    }

    pub(crate) fn remove(&mut self, position: u32, leaves: &mut impl Leaves) {
        let at = position as usize;
        let gone = self.heap.swap_remove(at);
        leaves.moved(gone.node, None);
        if at < self.heap.len() {
            let at = self.rise(at, leaves);
            self.sink(at, leaves);
        }
    }

    fn order(&self, a: usize, b: usize, leaves: &impl Leaves) -> Ordering {
        let (a, b) = (self.heap[a], self.heap[b]);
        a.time()
            .cmp(&b.time())
            .then_with(|| leaves.tie(a.node).cmp(&leaves.tie(b.node)))
    }

    fn rise(&mut self, mut at: usize, leaves: &mut impl Leaves) -> usize {
        while at > 0 {
            let parent = (at - 1) / ARITY;
            if self.order(parent, at, leaves).is_le() {
                break;
            }
            self.heap.swap(parent, at);
            leaves.moved(self.heap[at].node, Some(crate::ids::depth(at)));
            at = parent;
        }
        leaves.moved(self.heap[at].node, Some(crate::ids::depth(at)));
        at
    }

    fn sink(&mut self, mut at: usize, leaves: &mut impl Leaves) {
        let from = at;
        loop {
            let children = at * ARITY + 1..(at * ARITY + 1 + ARITY).min(self.heap.len());
            let Some(least) = children.min_by(|&a, &b| self.order(a, b, leaves)) else {
                break;
            };
            if self.order(at, least, leaves).is_le() {
                break;
            }
            self.heap.swap(at, least);
            leaves.moved(self.heap[at].node, Some(crate::ids::depth(at)));
            at = least;
        }
        if at != from {
            leaves.moved(self.heap[at].node, Some(crate::ids::depth(at)));
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.heap.heap_bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Model {
        positions: BTreeMap<NodeIndex, u32>,
    }

    impl Leaves for Model {
        fn tie(&self, node: NodeIndex) -> (Reverse<Depth>, u32) {
            (Reverse(node % 3), node)
        }

        fn moved(&mut self, node: NodeIndex, position: Option<u32>) {
            match position {
                Some(at) => self.positions.insert(node, at),
                None => self.positions.remove(&node),
            };
        }
    }

    proptest! {
        #[test]
        fn pops_in_key_order_and_knows_every_position(
            steps in prop::collection::vec((0u8..3, 0u64..50, 0u32..20), 0..300)
        ) {
            let mut order = EvictionOrder::default();
            let mut leaves = Model::default();
            let mut times: BTreeMap<u32, u64> = BTreeMap::new();
            for (step, time, node) in steps {
                let time = time << 30;
                match leaves.positions.get(&node).copied() {
                    None if step > 0 => {
                        order.push(time, node, &mut leaves);
                        times.insert(node, time);
                    }
                    Some(at) if step == 1 => {
                        order.update(at, time, &mut leaves);
                        times.insert(node, time);
                    }
                    Some(at) if step == 0 => {
                        order.remove(at, &mut leaves);
                        times.remove(&node);
                    }
                    _ => {}
                }
                let mut sorted: Vec<_> =
                    times.iter().map(|(&node, &time)| (time, leaves.tie(node))).collect();
                sorted.sort_unstable();
                prop_assert_eq!(order.first(), sorted.first().map(|&(_, (_, id))| id));
                prop_assert_eq!(order.second_time(), sorted.get(1).map(|&(time, _)| time));
                prop_assert!((1..order.heap.len())
                    .all(|at| order.order((at - 1) / ARITY, at, &leaves).is_le()));
                for (at, (time, node)) in order.entries().enumerate() {
                    prop_assert_eq!(leaves.positions[&node] as usize, at);
                    prop_assert_eq!(times[&node], time);
                }
                prop_assert_eq!(order.entries().len(), times.len());
            }
        }
    }
}
