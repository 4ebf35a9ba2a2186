//! Finds the path of a sequence block by block, starting at its cursor.

use std::sync::Arc;

use crate::cursor::Cursor;
use crate::effort::{Effort, Steps, Work};
use crate::ids::{BlockId, Depth, IdRange, NodeIndex, depth};
use crate::storage::forest::{Forest, Position};
use crate::storage::node::Node;
use crate::storage::siblings;
use crate::tokens::{TokenSequence, View};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Walked {
    pub(crate) at: Position,
    pub(crate) work: Work,
    pub(crate) gave_up: bool,
}

impl Forest {
    /// The end of the known path of a sequence, and up to where it is exact. `None` if the cursor is not valid here.
    pub(crate) fn at_cursor(&self, seq: &TokenSequence) -> Option<(Position, Depth)> {
        let cursor = seq
            .cursor
            .as_ref()
            .filter(|cursor| cursor.index == self.uid)?;
        if !self.nodes.knows(cursor.node) {
            return None;
        }
        let tree = self.nodes[cursor.node.index].tree;
        if self.trees[tree].version != cursor.version {
            return None;
        }
        Some((
            self.normal(Position::at(cursor.node.index, cursor.present)),
            cursor.exact,
        ))
    }

    /// Remembers that the path to `at` is present and its first `exact` blocks are exact. `walked` counts the edges
    /// after the old cursor.
    pub(crate) fn set_cursor(
        &self,
        seq: &mut TokenSequence,
        at: Position,
        exact: Depth,
        walked: u64,
    ) {
        let node = &self.nodes[at.node];
        // Ids of a valid old cursor stay right if they end at or before the new one.
        let known = self.at_cursor(seq).is_some();
        let old = seq.cursor.take().filter(|_| known);
        let edges = old.as_ref().map_or(0, |old| old.edges) + walked;
        let ids = old.and_then(|old| old.ids);
        let ids = ids.filter(|ids| ids.len() <= at.depth as usize);
        seq.cursor = (at.depth > 0).then(|| Cursor {
            index: self.uid,
            node: self.nodes.handle(at.node),
            version: self.trees[node.tree].version,
            present: at.depth,
            exact,
            block_size: self.block_size,
            edges,
            ids,
        });
    }

    /// The ids of the path to `at`, possibly followed by more. Those that the cursor has are not read again.
    pub(crate) fn remembered_ids(
        &self,
        seq: &mut TokenSequence,
        at: Position,
    ) -> Arc<Vec<BlockId>> {
        let is_known = self.at_cursor(seq).is_some();
        let cursor = seq.cursor.as_mut().filter(|_| is_known);
        let known = cursor.as_ref().and_then(|cursor| cursor.ids.clone());
        if let Some(ids) = &known
            && ids.len() >= at.depth as usize
        {
            return Arc::clone(ids);
        }
        let mut ids = Vec::new();
        let from = known.as_ref().map_or(0, |known| known.len());
        self.path_ids(at, depth(from), &mut ids);
        if let Some(known) = known {
            ids.splice(..0, known.iter().copied());
        }
        let ids = Arc::new(ids);
        if let Some(cursor) = cursor {
            cursor.ids = Some(Arc::clone(&ids));
        }
        ids
    }

    /// The same place, given by the edge of the block before it.
    pub(crate) fn normal(&self, mut at: Position) -> Position {
        while at.depth <= self.nodes[at.node].depth && !self.nodes[at.node].is_root() {
            at.node = self.nodes[at.node].parent;
        }
        at
    }

    /// Follows `tokens` from `at` to at most `limit`, or until `effort` is used up. In an edge, only the blocks before
    /// `within(node, from, to)` are compared. `pass(node, from, to)` is called for the blocks that are equal.
    pub(crate) fn walk(
        &self,
        tokens: View<'_>,
        mut at: Position,
        limit: Depth,
        effort: Effort,
        within: impl Fn(&Node, Depth, Depth) -> Depth,
        mut pass: impl FnMut(&Node, Depth, Depth),
    ) -> Walked {
        let block_size = self.block_size;
        let mut work = Work::default();
        let gave_up = loop {
            let node = &self.nodes[at.node];
            work.nodes_visited += 1;
            let end = node.end();
            if at.depth < end {
                let wanted = within(node, at.depth, end.min(limit));
                let left = effort.bytes.saturating_sub(work.bytes_compared);
                let affordable = usize::try_from(left).unwrap_or(usize::MAX) / (4 * block_size);
                let to = wanted.min(at.depth.saturating_add(depth(affordable.max(1))));
                let (from, until) = (at.depth as usize * block_size, to as usize * block_size);
                let same = tokens
                    .slice(from, until)
                    .common(node.view(block_size).slice(from, until));
                // The first different token was compared as well.
                let compared = (same + 1).min(until - from);
                work.bytes_compared += (compared * size_of::<u32>()) as u64;
                let reached = at.depth + depth(same / block_size);
                pass(node, at.depth, reached);
                at.depth = reached;
                if reached < end {
                    break reached == to && to < wanted;
                }
            }
            if at.depth >= limit {
                break false;
            }
            let from = at.depth as usize * block_size;
            let Some(child) = self.child(at.node, tokens.slice(from, from + block_size)) else {
                break false;
            };
            if work.nodes_visited >= effort.nodes.max(2) {
                break true;
            }
            at.node = child;
        };
        Walked {
            at: self.normal(at),
            work,
            gave_up,
        }
    }

    /// The end of the path of `seq` through holes and approximate blocks. The inner `None` means that there is no tree,
    /// the outer one that this takes more than `effort`.
    #[expect(
        clippy::option_option,
        reason = "there may be no path, and finding it may take too much"
    )]
    pub(crate) fn whole_path(
        &self,
        seq: &TokenSequence,
        effort: Effort,
    ) -> Option<Option<Position>> {
        let limit = depth(seq.len() / self.block_size);
        let from = match self.at_cursor(seq) {
            Some((at, _)) => at,
            None => match self.root(seq.namespace()) {
                Some(root) => root,
                None => return Some(None),
            },
        };
        let whole = |_: &Node, _, to| to;
        let walked = self.walk(seq.view(), from, limit, effort, whole, |_, _, _| ());
        (!walked.gave_up).then_some(Some(walked.at))
    }

    /// Finds a child by its first block. An only child is returned without a comparison: the caller compares it.
    pub(crate) fn child(&self, parent: NodeIndex, first: View<'_>) -> Option<NodeIndex> {
        if !self.nodes[parent].has_children() {
            return None;
        }
        if let Some(only) = siblings::only(&self.nodes, parent) {
            return Some(only);
        }
        let block_size = self.block_size;
        if let Some(found) = siblings::at_top(&self.nodes, block_size, parent, first) {
            return Some(found);
        }
        let hash = self.hasher.edge(parent, first);
        self.edges.find(hash, |child| {
            let node = &self.nodes[child];
            first.tokens.first() == Some(&node.first)
                && node.parent == parent
                && node.first_block(block_size).common(first) == block_size
        })
    }

    /// The edges between depth `from` and `at`: (node, first depth, end).
    pub(crate) fn edges_to(&self, at: Position, from: Depth) -> Vec<(NodeIndex, Depth, Depth)> {
        let edges = self.edges_within(at, from, &mut Effort::ANY.steps());
        edges.unwrap_or_default()
    }

    /// As [`Self::edges_to`], at one step per edge; `None` if fewer are left.
    pub(crate) fn edges_within(
        &self,
        at: Position,
        from: Depth,
        steps: &mut Steps,
    ) -> Option<Vec<(NodeIndex, Depth, Depth)>> {
        let mut found = Vec::new();
        let (mut node, mut end) = (at.node, at.depth);
        while end > from {
            steps.take(1)?;
            let start = self.nodes[node].depth;
            found.push((node, start.max(from), end));
            end = start;
            node = self.nodes[node].parent;
        }
        found.reverse();
        Some(found)
    }

    /// Writes the ids from depth `from` to `at`, with [`ABSENT`](crate::ids::ABSENT) for holes.
    pub(crate) fn path_ids(&self, at: Position, from: Depth, out: &mut Vec<BlockId>) {
        let block_size = self.block_size;
        out.clear();
        let (mut node, mut end) = (at.node, at.depth);
        let edge = &self.nodes[node];
        if edge.depth <= from && from < end {
            // Usually there is one edge, and no slot is written twice.
            out.extend(edge.ids(from, end, block_size));
            return;
        }
        out.resize(end.saturating_sub(from) as usize, BlockId(0));
        while end > from {
            let edge = &self.nodes[node];
            let start = edge.depth.max(from);
            let to = &mut out[(start - from) as usize..(end - from) as usize];
            for (to, id) in to.iter_mut().zip(edge.ids(start, end, block_size)) {
                *to = id;
            }
            end = edge.depth;
            node = edge.parent;
        }
    }

    /// Writes the ids from depth `from` to `at`, none of them a hole, as ranges of consecutive ones. Ids of an edge that
    /// are one range are read once, and not again until they change.
    pub(crate) fn path_ranges(&mut self, at: Position, from: Depth, out: &mut Vec<IdRange>) {
        out.clear();
        let block_size = self.block_size;
        let mut add = |edge: &mut Node, start: Depth, end: Depth| {
            let is_run = edge.blocks.are_consecutive(block_size);
            let (start, end) = ((start - edge.depth) as usize, (end - edge.depth) as usize);
            let ids = edge.blocks.ids(block_size);
            if is_run {
                IdRange::append_run(ids[start], depth(end - start), out);
            } else {
                IdRange::append(&ids[start..end], out);
            }
        };
        let edge = &mut self.nodes[at.node];
        if edge.depth <= from && from < at.depth {
            add(edge, from, at.depth); // usually there is one edge
            return;
        }
        for (node, start, end) in self.edges_to(at, from) {
            add(&mut self.nodes[node], start, end);
        }
    }

    /// The last `N` tokens up to position `end`, inclusive, on the path through `node`, which contains that position.
    pub(crate) fn last_tokens<const N: usize>(&self, node: NodeIndex, end: usize) -> [u32; N] {
        let block_size = self.block_size;
        let (mut edge, mut until) = (&self.nodes[node], end + 1);
        let base = |edge: &Node| edge.depth as usize * block_size;
        let first = until - N;
        let mut window = [0; N];
        while until > first {
            let from = base(edge).max(first);
            let tokens = &edge.blocks.tokens(block_size)[from - base(edge)..until - base(edge)];
            window[from - first..until - first].copy_from_slice(tokens);
            if from > first {
                edge = &self.nodes[edge.parent];
            }
            until = from;
        }
        window
    }
}
