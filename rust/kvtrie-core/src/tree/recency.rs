//! Who was used when, and so who is evicted next (D6, D8).

use crate::blocks::Place;
use crate::ids::NodeIndex;
use crate::lru::{Key, NOT_QUEUED};
use crate::tree::{Position, RadixIndex};

impl RadixIndex {
    /// Stamps every block above `at`.
    pub(crate) fn stamp(&mut self, at: Position, stamp: u64) {
        if at.depth == 0 {
            return;
        }
        self.nodes[at.node].uses.touch(at.depth, stamp);
        if at.depth == self.nodes[at.node].end() {
            self.requeue(at.node);
        }
    }

    /// Stamps one block as the source of a copy.
    pub(crate) fn stamp_source(&mut self, id: u32, stamp: u64) {
        if let Place::Indexed { node, depth } = self.blocks.place(id) {
            self.nodes[node]
                .extras_mut()
                .source_uses
                .insert(depth, stamp);
            self.requeue_block(id);
        }
    }

    /// Puts a node where it belongs in the order of eviction, after anything that its key depends on has changed.
    pub(crate) fn requeue(&mut self, node: NodeIndex) {
        let key = self.eviction_key(node);
        let queued = self.nodes[node].queued;
        if queued != NOT_QUEUED {
            if key == Some(self.order.entries()[queued as usize].0) {
                return;
            }
            self.unqueue(node);
        }
        if let Some(key) = key {
            let nodes = &mut self.nodes;
            self.order
                .push(key, node, |node, at| nodes[node].queued = at);
        }
    }

    /// As [`Self::requeue`], if the block is the last of its edge.
    pub(crate) fn requeue_block(&mut self, id: u32) {
        if let Place::Indexed { node, depth } = self.blocks.place(id)
            && depth + 1 == self.nodes[node].end()
        {
            self.requeue(node);
        }
    }

    pub(crate) fn unqueue(&mut self, node: NodeIndex) {
        let queued = self.nodes[node].queued;
        if queued != NOT_QUEUED {
            let nodes = &mut self.nodes;
            self.order
                .remove(queued, |node, at| nodes[node].queued = at);
        }
    }

    /// The key of a leaf's last block, if that may be evicted.
    pub(crate) fn eviction_key(&self, node: NodeIndex) -> Option<Key> {
        let leaf = &self.nodes[node];
        let last = leaf.end().checked_sub(1)?;
        if leaf.num_children > 0 || last < leaf.depth {
            return None;
        }
        let id = leaf.payload(last).id;
        (self.blocks.pins(id) == 0).then(|| (leaf.last_use(last), std::cmp::Reverse(last), id))
    }
}
