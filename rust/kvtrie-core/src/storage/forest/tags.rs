//! The tags of stored blocks.

use crate::ids::{Depth, NodeIndex};
use crate::span::TagRun;
use crate::storage::forest::{Forest, Position};

impl Forest {
    pub(crate) fn kinds_on_path(&self, at: Position, start: usize, end: usize) -> u64 {
        let (mut mask, mut node) = (0, at.node);
        loop {
            let edge = &self.nodes[node];
            if let Some(extras) = edge.extras() {
                mask |= extras.tags.union(start, end);
            }
            if edge.is_root() || edge.depth as usize * self.block_size <= start {
                return mask;
            }
            node = edge.parent;
        }
    }

    pub(crate) fn tags_of_block(&self, node: NodeIndex, place: Depth) -> Vec<TagRun> {
        let (start, end) = self.tokens_of(place);
        TagRun::within(self.nodes[node].tags(), start, end).collect()
    }

    pub(crate) fn restore_tags(&mut self, node: NodeIndex, tags: Vec<TagRun>) {
        for run in tags {
            self.nodes[node]
                .extras_mut()
                .tags
                .add(run.start, run.end, run.mask);
        }
    }

    /// Adds tags to an edge: ascending, disjoint runs inside its present blocks.
    pub(crate) fn merge_tags(&mut self, node: NodeIndex, tags: &[TagRun]) {
        self.nodes[node].extras_mut().tags.merge(tags);
    }

    pub(crate) fn tokens_of(&self, place: Depth) -> (usize, usize) {
        let start = place as usize * self.block_size;
        (start, start + self.block_size)
    }
}
