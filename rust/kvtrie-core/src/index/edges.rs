//! Creation, growth, splits and removal of edges.

use crate::ids::{ABSENT, BlockId, Depth, NO_NODE, NodeHandle, NodeIndex};
use crate::index::RadixIndex;
use crate::inspection::gone::Note;
use crate::storage::node::Node;
use crate::storage::payload::Label;
use crate::storage::siblings;
use crate::tokens::{Item, View};

/// Blocks that an insert appends to the path.
#[derive(Clone, Copy)]
pub(super) struct NewBlocks<'a> {
    pub(super) ids: &'a [BlockId],
    /// One per block, or empty if all are exact.
    pub(super) labels: &'a [Label],
}

impl RadixIndex {
    /// Adds a new edge below `parent`, with the tokens of `tokens` from block `from` on.
    pub(super) fn attach(
        &mut self,
        parent: NodeIndex,
        tokens: View<'_>,
        from: Depth,
        new: NewBlocks<'_>,
    ) -> NodeIndex {
        self.unqueue(parent);
        let tree = self.nodes[parent].tree;
        let child = self.nodes.insert(Node::new(tree, parent, from));
        crate::failpoints::within("an edge without blocks");
        self.append(child, tokens, new);
        crate::failpoints::within("an edge without a place");
        self.link(child);
        child
    }

    /// Appends blocks to an edge without children.
    pub(super) fn append(&mut self, node: NodeIndex, tokens: View<'_>, new: NewBlocks<'_>) {
        let block_size = self.config.block_size;
        let edge = &mut self.nodes[node];
        let from = edge.end();
        let (start, end) = (
            from as usize * block_size,
            (from as usize + new.ids.len()) * block_size,
        );
        let before = edge.num_approximate();
        let own = tokens.slice(start, end).tokens;
        edge.extend(own, new.ids, new.labels, block_size);
        self.num_approximate += u64::from(edge.num_approximate() - before);
        for item in Item::within(tokens.items, start, end) {
            let items = &mut edge.extras_mut().items;
            // An item across the old end had been cut there.
            if items
                .last()
                .is_some_and(|last| last.start() == item.start())
            {
                items.pop();
            }
            items.push(item);
        }
        crate::failpoints::within("blocks that are not indexed");
        self.blocks.set_run_indexed(new.ids, node, from);
        self.num_indexed += new.ids.len() as u64;
        let tree = self.nodes[node].tree;
        self.add_windows(tree, tokens.tokens, from, new.ids);
    }

    /// Makes a node a child of its parent. Children are hashed from the second one on.
    pub(crate) fn link(&mut self, node: NodeIndex) {
        let parent = self.nodes[node].parent;
        if self.nodes[parent].has_children() {
            if let Some(only) = siblings::only(&self.nodes, parent) {
                self.add_edge(only);
            }
            self.add_edge(node);
        }
        siblings::insert(&mut self.nodes, self.config.block_size, node);
    }

    pub(super) fn unlink(&mut self, node: NodeIndex) {
        let parent = self.nodes[node].parent;
        if siblings::only(&self.nodes, parent).is_none() {
            self.remove_edge(node);
        }
        siblings::remove(&mut self.nodes, node);
        if let Some(only) = siblings::only(&self.nodes, parent) {
            self.remove_edge(only);
        }
    }

    pub(crate) fn edge_hash(&self, node: NodeIndex) -> u64 {
        let edge = &self.nodes[node];
        let first = edge.first_block(self.config.block_size);
        self.hasher.edge(edge.parent, first)
    }

    fn add_edge(&mut self, node: NodeIndex) {
        let hash = self.edge_hash(node);
        let (nodes, hasher, block_size) = (&self.nodes, &self.hasher, self.config.block_size);
        self.edges.add(hash, node, |node| {
            hasher.edge(nodes[node].parent, nodes[node].first_block(block_size))
        });
    }

    pub(super) fn remove_edge(&mut self, node: NodeIndex) {
        self.edges.remove(self.edge_hash(node), node);
    }

    /// Splits an edge at depth `at`, inside it. The lower part keeps the record and the children, so cursors and leases
    /// that name it stay valid.
    pub(super) fn split(&mut self, tail: NodeIndex, at: Depth) -> NodeIndex {
        let block_size = self.config.block_size;
        let parent = self.nodes[tail].parent;
        let is_only = siblings::only(&self.nodes, parent).is_some();
        self.unqueue_dead(tail);
        siblings::remove(&mut self.nodes, tail);
        let front = self.nodes[tail].split_front(at, block_size);
        let front = self.nodes.insert(front);
        crate::failpoints::within("an edge cut in two");
        if !is_only {
            self.edges.replace(self.edge_hash(front), tail, front);
        }
        siblings::insert(&mut self.nodes, block_size, front);
        self.nodes[tail].parent = front;
        siblings::insert(&mut self.nodes, block_size, tail);
        self.split_anchors(front, tail);
        if self.num_dead > 0 {
            self.requeue_dead(front);
            self.requeue_dead(tail);
        }
        for &id in self.nodes[front].run.ids(block_size) {
            if id != ABSENT {
                self.blocks.set_node(id, front);
            }
        }
        front
    }

    /// Drops the blocks of an edge from `end` on, which is inside it, and returns the number of holes dropped.
    pub(super) fn cut_end(&mut self, node: NodeIndex, end: Depth) -> u32 {
        let block_size = self.config.block_size;
        let digest = self.gone.of_edge(0, &self.nodes[node], end, block_size);
        let holes = self.nodes[node].truncate(end, block_size);
        self.nodes.renew(node);
        let behind = Some(self.nodes.handle(node));
        self.gone.add(Note::new(behind, end, digest));
        holes
    }

    /// The part of a note's digest before its block. A first block has no place before it, so its note includes the
    /// namespace.
    pub(crate) fn prefix_digest(&self, tree: u32, depth: Depth) -> u64 {
        if depth > 0 {
            0
        } else {
            self.trees[tree].namespace.digest()
        }
    }

    /// Removes an edge without children, after its blocks have left. Its parent takes over its latest use.
    pub(super) fn detach(&mut self, node: NodeIndex) {
        self.unqueue(node);
        self.unlink(node);
        crate::failpoints::within("an edge that was unlinked");
        let gone = self.nodes.remove(node);
        let prefix = self.prefix_digest(gone.tree, gone.depth);
        let block_size = self.config.block_size;
        let digest = self.gone.of_edge(prefix, &gone, gone.depth, block_size);
        let parent = &mut self.nodes[gone.parent];
        let behind = (gone.depth > 0).then_some(NodeHandle {
            index: gone.parent,
            generation: parent.generation,
        });
        self.gone.add(Note::new(behind, gone.depth, digest));
        let latest = gone.latest_use();
        if latest > 0 && parent.parent != NO_NODE {
            parent.add_use(latest);
        }
    }
}
