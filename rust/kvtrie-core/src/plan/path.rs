//! The cached path of one sequence, to which a plan may be restricted.

use crate::effort::Effort;
use crate::ids::{Depth, NodeIndex, depth};
use crate::storage::forest::{Forest, Position};
use crate::storage::node::Node;
use crate::tokens::TokenSequence;

/// The edges of a path from the root, as (node, first depth, end).
#[derive(Clone, Debug)]
pub(crate) struct CachedPath {
    edges: Vec<(NodeIndex, Depth, Depth)>,
}

impl CachedPath {
    pub(crate) fn of(forest: &Forest, seq: &TokenSequence) -> Self {
        let limit = depth(seq.len() / forest.block_size());
        let whole = |_: &Node, _, to| to;
        let from = match forest.at_cursor(seq) {
            Some((known, _)) => Some(known),
            None => forest.root(seq.namespace()),
        };
        let end = from.map(|from| {
            let walked = forest.walk(seq.view(), from, limit, Effort::ANY, whole, |_, _, _| ());
            walked.at
        });
        Self {
            edges: end.map_or_else(Vec::new, |end| forest.edges_to(end, 0)),
        }
    }

    /// The edge with the block at a depth, and the path's end in that edge.
    pub(super) fn edge_at(&self, depth: Depth) -> Option<(NodeIndex, Depth)> {
        let at = self.edges.partition_point(|&(_, _, end)| end <= depth);
        self.edges.get(at).map(|&(node, _, end)| (node, end))
    }

    /// The path's end in an edge that begins at depth `first`; `None` if the edge is not on the path.
    pub(super) fn end_in(&self, node: NodeIndex, first: Depth) -> Option<Depth> {
        let (found, end) = self.edge_at(first)?;
        (found == node).then_some(end)
    }

    /// The path's end in the edge of a block; `None` if the block is not on the path.
    pub(super) fn end_after(
        &self,
        forest: &Forest,
        node: NodeIndex,
        depth: Depth,
    ) -> Option<Depth> {
        let end = self.end_in(node, forest.node(node).depth)?;
        (depth < end).then_some(end)
    }

    /// The deepest place on both the path to `at` and this path.
    pub(crate) fn common(&self, forest: &Forest, mut at: Position) -> Position {
        loop {
            let node = forest.node(at.node);
            if node.is_root() {
                return at;
            }
            if let Some(end) = self.end_in(at.node, node.depth) {
                at.depth = at.depth.min(end);
                return at;
            }
            at = Position::at(node.parent, node.depth);
        }
    }
}
