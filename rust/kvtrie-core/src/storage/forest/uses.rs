//! Records uses and dead marks in edges.

use crate::ids::{Depth, NodeIndex};
use crate::storage::extras::Dead;
use crate::storage::forest::{Forest, Position, SourceRun};

impl Forest {
    pub(crate) fn touch(&mut self, at: Position, time: u64) {
        self.nodes[at.node].touch(at.depth, time);
    }

    pub(crate) fn touch_source(&mut self, run: &SourceRun, time: u64) {
        let extras = self.nodes[run.node].extras_mut();
        extras.source_uses.set(run.from, run.to, time);
    }

    pub(crate) fn add_use(&mut self, node: NodeIndex, time: u64) {
        self.nodes[node].add_use(time);
    }

    #[inline]
    pub(crate) fn set_queued(&mut self, node: NodeIndex, position: Option<u32>) {
        self.nodes[node].set_queued(position);
    }

    pub(crate) fn mark(
        &mut self,
        node: NodeIndex,
        parts: impl Iterator<Item = (Depth, Depth)>,
        mark: u64,
    ) -> u64 {
        let dead = self.nodes[node].extras_mut().dead.get_or_insert_default();
        u64::from(dead.marks.fill(parts, mark))
    }

    /// The record of dead blocks. After removing marks from it, call [`Self::drop_marks`].
    pub(crate) fn dead_mut(&mut self, node: NodeIndex) -> Option<&mut Dead> {
        self.nodes[node].dead_mut()
    }

    pub(crate) fn drop_marks(&mut self, node: NodeIndex) {
        let node = &mut self.nodes[node];
        if node.dead_marks().is_empty() {
            node.extras_mut().dead = None;
        }
        node.prune();
    }
}
