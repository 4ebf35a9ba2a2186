//! The forest: one radix tree per namespace, and the block ids that its entries name. Only `entries` writes entries and
//! their counters; only [`protection`] writes what pins protect.

mod entries;
mod links;
mod places;
mod protection;
mod sessions;
mod tags;
mod uses;
mod walk;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::hash::EdgeHasher;
use crate::ids::{Depth, NO_NODE, NodeHandle, NodeIndex};
use crate::namespace::Namespace;
use crate::storage::arena::Arena;
use crate::storage::blocks::BlockTable;
use crate::storage::edge_table::EdgeTable;
use crate::storage::node::Node;
use crate::storage::siblings;
use crate::storage::trees::Trees;
use crate::tokens::View;

use entries::Counts;
use protection::Protection;

pub(crate) use entries::NewBlocks;
pub(crate) use places::PathPart;
pub(crate) use protection::{Change, Sources};
pub(crate) use walk::Walked;

/// The place after `depth` blocks of a path. `node` is the edge with the last of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) node: NodeIndex,
    pub(crate) depth: Depth,
}

impl Position {
    pub(crate) const fn at(node: NodeIndex, depth: Depth) -> Self {
        Self { node, depth }
    }
}

/// Present blocks of one edge that a plan copies from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SourceRun {
    pub(crate) node: NodeIndex,
    pub(crate) from: Depth,
    pub(crate) to: Depth,
}

#[derive(Debug)]
pub(crate) struct Forest {
    uid: u64,
    block_size: usize,
    nodes: Arena,
    /// Every node with a sibling, by (parent, first block). An only child is found without hashing.
    edges: EdgeTable,
    hasher: EdgeHasher,
    trees: Trees,
    blocks: BlockTable,
    counts: Counts,
    protection: Protection,
}

impl Forest {
    pub(crate) fn new(block_size: usize, seed: u64, hash_bits: u32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            uid: NEXT.fetch_add(1, Ordering::Relaxed),
            block_size,
            nodes: Arena::new(seed),
            edges: EdgeTable::default(),
            hasher: EdgeHasher::new(seed, hash_bits),
            trees: Trees::new(seed),
            blocks: BlockTable::default(),
            counts: Counts::default(),
            protection: Protection::new(seed),
        }
    }

    pub(crate) fn uid(&self) -> u64 {
        self.uid
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    #[inline]
    pub(crate) fn node(&self, at: NodeIndex) -> &Node {
        &self.nodes[at]
    }

    /// All nodes, in no useful order.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter()
    }

    pub(crate) fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn num_edges(&self) -> u64 {
        (self.nodes.len() - self.trees.len()) as u64
    }

    pub(crate) fn num_hashed(&self) -> usize {
        self.edges.len()
    }

    pub(crate) fn handle(&self, node: NodeIndex) -> NodeHandle {
        self.nodes.handle(node)
    }

    pub(crate) fn knows(&self, handle: NodeHandle) -> bool {
        self.nodes.knows(handle)
    }

    pub(crate) fn trees(&self) -> &Trees {
        &self.trees
    }

    pub(crate) fn trees_mut(&mut self) -> &mut Trees {
        &mut self.trees
    }

    pub(crate) fn blocks(&self) -> &BlockTable {
        &self.blocks
    }

    pub(crate) fn blocks_mut(&mut self) -> &mut BlockTable {
        &mut self.blocks
    }

    pub(crate) fn root(&self, namespace: &Arc<Namespace>) -> Option<Position> {
        let tree = self.trees.of(namespace)?;
        Some(Position::at(self.trees[tree].root, 0))
    }

    pub(crate) fn root_or_new(&mut self, namespace: &Arc<Namespace>) -> Position {
        if let Some(root) = self.root(namespace) {
            return root;
        }
        let tree = self.trees.add(namespace);
        crate::failpoints::within("a tree without a root");
        let root = self.nodes.insert(Node::new(tree, NO_NODE, 0));
        self.trees.name(tree, root);
        Position::at(root, 0)
    }

    /// Adds a tree at a given place. Returns its root, and whether the namespace is new.
    pub(crate) fn restore_tree(
        &mut self,
        tree: u32,
        namespace: &Arc<Namespace>,
    ) -> (NodeIndex, bool) {
        let root = self.nodes.insert(Node::new(tree, NO_NODE, 0));
        (root, self.trees.fill(tree, namespace, root))
    }

    pub(crate) fn remove_tree(&mut self, tree: u32) {
        self.trees.remove(tree);
    }

    pub(crate) fn renew_version(&mut self, node: NodeIndex) {
        self.trees.renew(self.nodes[node].tree);
    }

    /// What a departure note digests before its block: the namespace for a first block, nothing for others.
    pub(crate) fn prefix_digest(&self, tree: u32, depth: Depth) -> u64 {
        if depth > 0 {
            0
        } else {
            self.trees[tree].namespace.digest()
        }
    }

    pub(crate) fn only_child(&self, parent: NodeIndex) -> Option<NodeIndex> {
        siblings::only(&self.nodes, parent)
    }

    /// The children of a node, in no useful order.
    pub(crate) fn children(&self, parent: NodeIndex) -> Vec<NodeIndex> {
        siblings::all(&self.nodes, parent)
    }

    pub(crate) fn nearest_child(
        &self,
        parent: NodeIndex,
        wanted: View<'_>,
    ) -> Option<(NodeIndex, usize)> {
        siblings::nearest(&self.nodes, self.block_size, parent, wanted)
    }

    pub(crate) fn most_similar_children<'a>(
        &'a self,
        parent: NodeIndex,
        exact: bool,
        wanted: View<'a>,
    ) -> impl Iterator<Item = (NodeIndex, usize)> + 'a {
        siblings::most_similar(&self.nodes, self.block_size, parent, exact, wanted)
    }

    pub(crate) fn are_children_sorted(&self, parent: NodeIndex) -> bool {
        siblings::check(&self.nodes, self.block_size, parent)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.nodes.heap_bytes()
            + self.nodes.iter().map(Node::heap_bytes).sum::<usize>()
            + self.edges.heap_bytes()
            + self.blocks.heap_bytes()
            + self.trees.heap_bytes()
            + self.protection.heap_bytes()
    }

    #[cfg(test)]
    pub(crate) fn node_mut(&mut self, at: NodeIndex) -> &mut Node {
        &mut self.nodes[at]
    }

    #[cfg(test)]
    pub(crate) fn hash_of_child(&self, parent: NodeIndex, first: View<'_>) -> u64 {
        self.hasher.edge(parent, first)
    }

    #[cfg(test)]
    pub(crate) fn priority(&self, at: NodeIndex) -> u64 {
        self.nodes.priority(at)
    }
}
