//! Where blocks are: the place of a block id, and the parts of a path.

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::effort::{Effort, Steps};
use crate::ids::{BlockId, Depth, NO_NODE, NodeIndex};
use crate::storage::blocks::BlockState;
use crate::storage::forest::{Forest, Position, SourceRun};
use crate::storage::siblings;
use crate::tokens::TokenSequence;

#[derive(Clone, Copy, Debug)]
pub(crate) struct PathPart {
    pub(crate) from: Depth,
    pub(crate) to: Depth,
    pub(crate) is_extended: bool,
}

impl Forest {
    pub(crate) fn place_of(&self, id: u32) -> Option<(NodeIndex, Depth)> {
        match self.blocks.state(id) {
            BlockState::Indexed { node, depth } => Some((node, depth)),
            _ => None,
        }
    }

    pub(crate) fn is_above(
        &self,
        (node, place): (NodeIndex, Depth),
        (mut under, below): (NodeIndex, Depth),
    ) -> bool {
        if place > below {
            return false;
        }
        while self.nodes[under].depth > place {
            under = self.nodes[under].parent;
        }
        under == node
    }

    /// The blocks from depth `start` to the indexed block `last`, by node, the last node first.
    pub(crate) fn parts(&self, last: u32, start: Depth) -> impl Iterator<Item = SourceRun> {
        let mut next = self.place_of(last).map(|(node, depth)| (node, depth + 1));
        std::iter::from_fn(move || {
            let (node, to) = next?;
            let edge = &self.nodes[node];
            let from = start.max(edge.depth);
            next = (from > start).then_some((edge.parent, from));
            Some(SourceRun { node, from, to })
        })
    }

    pub(crate) fn path_through(&self, id: u32, from: Depth) -> Vec<BlockId> {
        let mut ids = Vec::new();
        if let Some((node, depth)) = self.place_of(id) {
            let end = Position::at(node, depth + 1);
            self.path_ids(end, from, &mut ids);
        }
        ids
    }

    pub(crate) fn tree_of_block(&self, id: u32) -> Option<u32> {
        match self.blocks.state(id) {
            BlockState::Indexed { node, .. } => Some(self.nodes[node].tree),
            _ => None,
        }
    }

    /// Whether the path to the end of an edge has a hole. `known` caches results.
    pub(crate) fn is_cut_off(
        &self,
        from: NodeIndex,
        known: &mut HashMap<NodeIndex, bool, FixedState>,
    ) -> bool {
        let mut passed = Vec::new();
        let mut at = from;
        let is_cut_off = loop {
            let node = &self.nodes[at];
            if let Some(&cached) = known.get(&at) {
                break cached;
            }
            passed.push(at);
            if node.num_holes() > 0 || node.is_root() {
                break node.num_holes() > 0;
            }
            at = node.parent;
        };
        known.extend(passed.into_iter().map(|node| (node, is_cut_off)));
        is_cut_off
    }

    /// The present blocks of the path of `seq` inside ranges, by edge, ascending. Extended blocks (see
    /// [`Self::extended_end`]) are included only if `with_extended` is set.
    pub(crate) fn parts_inside(
        &self,
        seq: &TokenSequence,
        ranges: &[(Depth, Depth)],
        with_extended: bool,
        effort: Effort,
    ) -> Option<Vec<(NodeIndex, Vec<PathPart>)>> {
        let mut found = Vec::new();
        let Some(&(first, _)) = ranges.first() else {
            return Some(found);
        };
        let Some(end) = self.whole_path(seq, effort)? else {
            return Some(found);
        };
        let mut steps = effort.steps();
        let extended = self.extended_end(end, &mut steps)?;
        let from = if with_extended {
            first
        } else {
            first.max(extended)
        };
        let block_size = self.block_size;
        let mut ranges = ranges.iter().copied().peekable();
        for (node, start, end) in self.edges_within(end, from, &mut steps)? {
            let edge = &self.nodes[node];
            if edge.num_holes() > 0 {
                steps.take(u64::from(end - start))?;
            }
            let mut parts = Vec::new();
            while let Some(&(from, to)) = ranges.peek() {
                // The blocks before `extended` are extended, and those after it are not.
                let (low, high) = (from.max(start), to.min(end));
                for (from, to) in [(low, high.min(extended)), (low.max(extended), high)] {
                    let mut at = from;
                    while at < to {
                        let until = edge.present_until(at, to, block_size);
                        if at < until {
                            parts.push(PathPart {
                                from: at,
                                to: until,
                                is_extended: until <= extended,
                            });
                        }
                        at = edge.absent_until(until, to, block_size);
                    }
                }
                if to > end {
                    break;
                }
                ranges.next();
            }
            if !parts.is_empty() {
                found.push((node, parts));
            }
        }
        Some(found)
    }

    /// The depth before which the blocks of a path are extended: a present block below them is not on the path. Such a
    /// block is below all blocks above it as well.
    fn extended_end(&self, end: Position, steps: &mut Steps) -> Option<Depth> {
        let edge = &self.nodes[end.node];
        // An edge ends with a present block or has children with some, so a present block follows the path's end.
        if end.depth < edge.end() || edge.has_children() {
            return Some(end.depth);
        }
        let mut at = edge.parent;
        while at != NO_NODE {
            steps.take(1)?;
            if siblings::only(&self.nodes, at).is_none() {
                return Some(self.nodes[at].end());
            }
            at = self.nodes[at].parent;
        }
        Some(0)
    }
}
