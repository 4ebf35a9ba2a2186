//! Chooses what is evicted: dead blocks first, then leaves by last use (D6, D8).

mod dead;
mod dead_order;
mod lru;

use std::cmp::Reverse;

use crate::ids::{Depth, NodeIndex};
use crate::storage::forest::{Forest, Position, SourceRun};

use dead::DeadBlocks;
use lru::{EvictionOrder, Leaves};

pub(crate) use dead::count_revival;
pub(crate) use dead_order::DeadRun;
pub(crate) use lru::ARITY;

pub(crate) type Key = (u64, (Reverse<Depth>, u32));

impl Leaves for Forest {
    fn tie(&self, node: NodeIndex) -> (Reverse<Depth>, u32) {
        let leaf = self.node(node);
        let last = leaf.end() - 1;
        (Reverse(last), leaf.id(last, self.block_size()))
    }

    fn moved(&mut self, node: NodeIndex, position: Option<u32>) {
        self.set_queued(node, position);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Eviction {
    leaves: EvictionOrder,
    dead: DeadBlocks,
}

impl Eviction {
    pub(crate) fn leaves(&self) -> &EvictionOrder {
        &self.leaves
    }

    pub(crate) fn dead(&self) -> &DeadBlocks {
        &self.dead
    }

    pub(crate) fn dead_mut(&mut self) -> &mut DeadBlocks {
        &mut self.dead
    }

    pub(crate) fn any_dead(&self) -> bool {
        self.dead.num_blocks() > 0
    }

    pub(crate) fn num_evictable(&self, forest: &Forest) -> u64 {
        forest.num_indexed() - forest.num_protected() + self.dead.num_loose()
    }

    /// Touches the path to `at` and removes its dead marks. `time` is later than all others.
    #[inline]
    pub(crate) fn touch(&mut self, forest: &mut Forest, at: Position, time: u64) {
        if at.depth == 0 {
            return;
        }
        if self.any_dead() {
            self.dead.revive_path(forest, at);
        }
        forest.touch(at, time);
        if at.depth == forest.node(at.node).end() {
            self.requeue(forest, at.node);
        }
    }

    /// Touches source blocks, without those above, and removes their dead marks. O(log uses as a source in the node)
    /// per run.
    pub(crate) fn touch_sources(&mut self, forest: &mut Forest, runs: &[SourceRun], time: u64) {
        for run in runs.iter().filter(|run| run.from < run.to) {
            self.dead.unmark(forest, run.node, run.from, run.to);
            forest.touch_source(run, time);
            if run.to == forest.node(run.node).end() {
                self.requeue(forest, run.node);
            }
        }
    }

    pub(crate) fn requeue(&mut self, forest: &mut Forest, node: NodeIndex) {
        let due = last_use_of_leaf(forest, node);
        match (forest.node(node).queued(), due) {
            (None, None) => {}
            (Some(at), None) => self.leaves.remove(at, forest),
            (None, Some(time)) => self.leaves.push(time, node, forest),
            (Some(at), Some(time)) => self.leaves.update(at, time, forest),
        }
    }

    pub(crate) fn unqueue(&mut self, forest: &mut Forest, node: NodeIndex) {
        if let Some(at) = forest.node(node).queued() {
            self.leaves.remove(at, forest);
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.leaves.heap_bytes() + self.dead.order().heap_bytes()
    }
}

/// The last use of an evictable leaf's last block. That block is protected only if it is pinned; then this is `None`.
pub(crate) fn last_use_of_leaf(forest: &Forest, node: NodeIndex) -> Option<u64> {
    let leaf = forest.node(node);
    let end = leaf.end();
    if leaf.has_children() || leaf.blocks.len() == 0 || forest.protected_end(node) == end {
        return None;
    }
    Some(leaf.last_use(end - 1))
}

pub(crate) fn eviction_key(forest: &Forest, node: NodeIndex) -> Option<Key> {
    let time = last_use_of_leaf(forest, node)?;
    Some((time, forest.tie(node)))
}
