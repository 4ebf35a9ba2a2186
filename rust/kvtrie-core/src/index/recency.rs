//! Last uses, and the order of eviction that follows from them (D6, D8).

use std::cmp::Reverse;

use crate::eviction::lru::Leaves;
use crate::ids::{Depth, NodeIndex};
use crate::index::{Position, RadixIndex, SourceRun};
use crate::storage::arena::Arena;

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

/// Of two leaves with the same last use, the deeper is evicted first, then the lower id.
fn tie(nodes: &Arena, block_size: usize, node: NodeIndex) -> (Reverse<Depth>, u32) {
    let leaf = &nodes[node];
    let last = leaf.end() - 1;
    (Reverse(last), leaf.id(last, block_size))
}

impl RadixIndex {
    /// Touches every block above `at`: none of them is dead then. `stamp` is the newest.
    pub(crate) fn stamp(&mut self, at: Position, stamp: u64) {
        if at.depth == 0 {
            return;
        }
        if self.num_dead > 0 {
            self.revive_path(at);
        }
        self.nodes[at.node].touch(at.depth, stamp);
        if at.depth == self.nodes[at.node].end() {
            self.requeue(at.node);
        }
    }

    /// Touches only the blocks of copy sources: none of them is dead then. `stamp` is the newest. O(log uses as a
    /// source in the node) per run, and nothing per block.
    pub(crate) fn stamp_sources(&mut self, runs: &[SourceRun], stamp: u64) {
        for run in runs.iter().filter(|run| run.from < run.to) {
            self.unmark(run.node, run.from, run.to);
            let edge = &mut self.nodes[run.node];
            edge.extras_mut().source_uses.set(run.from, run.to, stamp);
            if run.to == edge.end() {
                self.requeue(run.node);
            }
        }
    }

    /// Updates a node in the order of eviction, after any change that its place there depends on.
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

    /// The key of an evictable leaf in the order of eviction.
    pub(crate) fn eviction_key(&self, node: NodeIndex) -> Option<(u64, (Reverse<Depth>, u32))> {
        let stamp = self.last_use_of_leaf(node)?;
        Some((stamp, tie(&self.nodes, self.block_size(), node)))
    }
}
