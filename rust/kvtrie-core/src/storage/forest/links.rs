//! Links nodes to their parents and splits and removes them.

use crate::ids::{ABSENT, Depth, NodeIndex};
use crate::storage::forest::Forest;
use crate::storage::node::Node;
use crate::storage::siblings;

impl Forest {
    /// Links a node to its parent. Children are hashed if there are at least two.
    pub(crate) fn link(&mut self, node: NodeIndex) {
        let parent = self.nodes[node].parent;
        if self.nodes[parent].has_children() {
            if let Some(only) = siblings::only(&self.nodes, parent) {
                self.add_edge(only);
            }
            self.add_edge(node);
        }
        siblings::insert(&mut self.nodes, self.block_size, node);
    }

    fn unlink(&mut self, node: NodeIndex) {
        let parent = self.nodes[node].parent;
        if siblings::only(&self.nodes, parent).is_none() {
            self.remove_edge(node);
        }
        siblings::remove(&mut self.nodes, node);
        if let Some(only) = siblings::only(&self.nodes, parent) {
            self.remove_edge(only);
        }
    }

    fn edge_hash(&self, node: NodeIndex) -> u64 {
        let edge = &self.nodes[node];
        let first = edge.first_block(self.block_size);
        self.hasher.edge(edge.parent, first)
    }

    fn add_edge(&mut self, node: NodeIndex) {
        let hash = self.edge_hash(node);
        let (nodes, hasher, block_size) = (&self.nodes, &self.hasher, self.block_size);
        self.edges.add(hash, node, |node| {
            hasher.edge(nodes[node].parent, nodes[node].first_block(block_size))
        });
    }

    fn remove_edge(&mut self, node: NodeIndex) {
        self.edges.remove(self.edge_hash(node), node);
    }

    /// Cuts an edge in two and returns the upper node. The lower part keeps the record and the children, so cursors and
    /// leases that name it stay valid. The caller queues the dead blocks of the lower part again.
    pub(crate) fn split(&mut self, tail: NodeIndex, at: Depth) -> NodeIndex {
        let block_size = self.block_size;
        let parent = self.nodes[tail].parent;
        let is_only = siblings::only(&self.nodes, parent).is_some();
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
        for &id in self.nodes[front].blocks.ids(block_size) {
            if id != ABSENT {
                self.blocks.set_node(id, front);
            }
        }
        front
    }

    pub(crate) fn remove_leaf(&mut self, node: NodeIndex) -> Node {
        self.unlink(node);
        crate::failpoints::within("an edge that was unlinked");
        self.remove_node(node)
    }

    pub(crate) fn remove_root(&mut self, root: NodeIndex) {
        let tree = self.nodes.remove(root).tree;
        self.trees.remove(tree);
    }

    /// Adds an edge without blocks; [`Self::link`] must follow.
    pub(crate) fn new_edge(&mut self, parent: NodeIndex, from: Depth) -> NodeIndex {
        let tree = self.nodes[parent].tree;
        self.nodes.insert(Node::new(tree, parent, from))
    }

    pub(crate) fn unhash_children(&mut self, node: NodeIndex) -> Vec<NodeIndex> {
        let children = self.children(node);
        if children.len() > 1 {
            for &child in &children {
                self.remove_edge(child);
            }
        }
        children
    }

    /// Number of nodes compared until the hash table returns this one.
    #[cfg(test)]
    pub(crate) fn comparisons_of(&self, node: NodeIndex) -> Option<usize> {
        let mut compared = 0;
        let found = self.edges.find(self.edge_hash(node), |known| {
            compared += 1;
            known == node
        });
        found.map(|_| compared)
    }

    pub(crate) fn is_hashed(&self, node: NodeIndex) -> bool {
        let found = self.edges.find(self.edge_hash(node), |known| known == node);
        found.is_some()
    }
}
