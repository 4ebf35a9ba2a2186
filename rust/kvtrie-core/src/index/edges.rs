//! Creates, grows, splits and removes edges.

use crate::ids::{Depth, NO_NODE, NodeHandle, NodeIndex};
use crate::index::RadixIndex;
use crate::storage::forest::NewBlocks;
use crate::storage::gone::Note;
use crate::tokens::View;

impl RadixIndex {
    pub(super) fn attach(
        &mut self,
        parent: NodeIndex,
        tokens: View<'_>,
        from: Depth,
        new: NewBlocks<'_>,
    ) -> NodeIndex {
        self.eviction.unqueue(&mut self.forest, parent);
        let child = self.forest.new_edge(parent, from);
        crate::failpoints::within("an edge without blocks");
        self.append(child, tokens, new);
        crate::failpoints::within("an edge without a place");
        self.forest.link(child);
        child
    }

    pub(super) fn append(&mut self, node: NodeIndex, tokens: View<'_>, new: NewBlocks<'_>) {
        let edge = self.forest.node(node);
        let (tree, from) = (edge.tree, edge.end());
        self.forest.place(node, tokens, new);
        let tokens = tokens.tokens;
        self.moved
            .add_run(&mut self.forest, tree, tokens, from, new.ids);
    }

    pub(super) fn split(&mut self, tail: NodeIndex, at: Depth) -> NodeIndex {
        self.eviction.dead_mut().unqueue(&mut self.forest, tail);
        let front = self.forest.split(tail, at);
        if !self.groups.is_empty() {
            self.groups.split(front, tail, at);
        }
        if self.eviction.any_dead() {
            self.eviction.dead_mut().requeue(&mut self.forest, front);
            self.eviction.dead_mut().requeue(&mut self.forest, tail);
        }
        front
    }

    /// Cuts an edge at `end`, after the blocks from there on have left.
    pub(super) fn cut_end(&mut self, node: NodeIndex, end: Depth) {
        let block_size = self.block_size();
        let edge = self.forest.node(node);
        let digest = self.gone.of_edge(0, edge, end, block_size);
        self.forest.truncate(node, end);
        let before = Some(self.forest.handle(node));
        self.gone.add(Note::new(before, end, digest));
    }

    /// Removes a leaf whose blocks have left. Its parent inherits its latest use.
    pub(super) fn detach(&mut self, node: NodeIndex) {
        self.eviction.unqueue(&mut self.forest, node);
        let gone = self.forest.remove_leaf(node);
        let prefix = self.forest.prefix_digest(gone.tree, gone.depth);
        let block_size = self.block_size();
        let digest = self.gone.of_edge(prefix, &gone, gone.depth, block_size);
        let parent = self.forest.node(gone.parent);
        let before = (gone.depth > 0).then_some(NodeHandle {
            index: gone.parent,
            generation: parent.generation,
        });
        self.gone.add(Note::new(before, gone.depth, digest));
        let latest = gone.latest_use();
        if parent.parent != NO_NODE {
            self.forest.add_use(gone.parent, latest);
        }
    }
}
