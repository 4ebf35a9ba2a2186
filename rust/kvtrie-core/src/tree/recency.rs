//! Who was used when, and so who is evicted next (D6, D8).

use std::cmp::Reverse;

use crate::arena::Arena;
use crate::blocks::Place;
use crate::ids::{Depth, NodeIndex};
use crate::lru::Leaves;
use crate::tree::{Position, RadixIndex};

/// The leaves of the forest, as the order of eviction sees them.
pub(crate) struct ForestLeaves<'a> {
    pub(crate) nodes: &'a mut Arena,
    pub(crate) block_size: usize,
}

impl Leaves for ForestLeaves<'_> {
    fn tie(&self, node: NodeIndex) -> (Reverse<Depth>, u32) {
        tie(self.nodes, self.block_size, node)
    }

    fn moved(&mut self, node: NodeIndex, position: Option<u32>) {
        self.nodes[node].set_queued(position);
    }
}

/// Of two leaves whose last blocks were used last at one time, the deeper goes first, then the lower id.
fn tie(nodes: &Arena, block_size: usize, node: NodeIndex) -> (Reverse<Depth>, u32) {
    let leaf = &nodes[node];
    let last = leaf.end() - 1;
    (Reverse(last), leaf.id(last, block_size))
}

impl RadixIndex {
    /// Stamps every block above `at`.
    pub(crate) fn stamp(&mut self, at: Position, stamp: u64) {
        if at.depth == 0 {
            return;
        }
        self.nodes[at.node].touch(at.depth, stamp);
        if at.depth == self.nodes[at.node].end() {
            self.requeue(at.node);
        }
    }

    /// Stamps one block as the source of a copy.
    pub(crate) fn stamp_source(&mut self, id: u32, stamp: u64) {
        if let Place::Indexed { node, depth } = self.blocks.place(id) {
            let edge = &mut self.nodes[node];
            edge.extras_mut().source_uses.insert(depth, stamp);
            if depth + 1 == edge.end() {
                self.requeue(node);
            }
        }
    }

    /// Puts a node where it belongs in the order of eviction, after anything that its place there depends on has changed.
    pub(crate) fn requeue(&mut self, node: NodeIndex) {
        let due = self.last_use_of_leaf(node);
        let queued = self.nodes[node].queued();
        let mut leaves = ForestLeaves {
            nodes: &mut self.nodes,
            block_size: self.config.block_size,
        };
        match (queued, due) {
            (None, None) => {}
            (Some(at), None) => self.order.remove(at, &mut leaves),
            (None, Some(stamp)) => self.order.push(stamp, node, &mut leaves),
            (Some(at), Some(stamp)) => self.order.update(at, stamp, &mut leaves),
        }
    }

    pub(crate) fn unqueue(&mut self, node: NodeIndex) {
        if let Some(at) = self.nodes[node].queued() {
            let mut leaves = ForestLeaves {
                nodes: &mut self.nodes,
                block_size: self.config.block_size,
            };
            self.order.remove(at, &mut leaves);
        }
    }

    /// Last use of a leaf's last block, if that may be evicted. A leaf's last block is protected iff it is pinned.
    pub(crate) fn last_use_of_leaf(&self, node: NodeIndex) -> Option<u64> {
        let leaf = &self.nodes[node];
        let end = leaf.end();
        if leaf.has_children() || leaf.run.len() == 0 || self.protected_end(node) == end {
            return None;
        }
        Some(leaf.last_use(end - 1))
    }

    /// Where an evictable leaf stands in the order of eviction.
    pub(crate) fn eviction_key(&self, node: NodeIndex) -> Option<(u64, (Reverse<Depth>, u32))> {
        let stamp = self.last_use_of_leaf(node)?;
        Some((stamp, tie(&self.nodes, self.block_size(), node)))
    }
}
