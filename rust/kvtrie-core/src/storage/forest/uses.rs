//! What a use or a mark changes in an edge: last uses, dead marks, the place in the order of eviction.

use crate::ids::{Depth, NodeIndex};
use crate::storage::extras::Dead;
use crate::storage::forest::{Forest, Position, SourceRun};

impl Forest {
    /// Adds the newest use of the path to `at`.
    pub(crate) fn touch(&mut self, at: Position, time: u64) {
        self.nodes[at.node].touch(at.depth, time);
    }

    /// Adds the newest use of blocks as a source.
    pub(crate) fn touch_source(&mut self, run: &SourceRun, time: u64) {
        let extras = self.nodes[run.node].extras_mut();
        extras.source_uses.set(run.from, run.to, time);
    }

    /// Adds a use, of any age, of a path through a whole edge.
    pub(crate) fn add_use(&mut self, node: NodeIndex, time: u64) {
        self.nodes[node].add_use(time);
    }

    /// Sets the position of a leaf in the order of eviction.
    #[inline]
    pub(crate) fn set_queued(&mut self, node: NodeIndex, position: Option<u32>) {
        self.nodes[node].set_queued(position);
    }

    /// Marks present blocks as dead; returns how many are new.
    pub(crate) fn mark(
        &mut self,
        node: NodeIndex,
        parts: impl Iterator<Item = (Depth, Depth)>,
        mark: u64,
    ) -> u64 {
        let dead = self.nodes[node].extras_mut().dead.get_or_insert_default();
        u64::from(dead.marks.fill(parts, mark))
    }

    /// The dead blocks of an edge; [`Self::drop_marks`] follows a removal.
    pub(crate) fn dead_mut(&mut self, node: NodeIndex) -> Option<&mut Dead> {
        self.nodes[node].dead_mut()
    }

    /// Drops what an edge has for dead blocks, if it has none left.
    pub(crate) fn drop_marks(&mut self, node: NodeIndex) {
        let node = &mut self.nodes[node];
        if node.dead_marks().is_empty() {
            node.extras_mut().dead = None;
        }
        node.prune();
    }
}
