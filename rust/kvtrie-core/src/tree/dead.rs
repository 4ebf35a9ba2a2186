//! Blocks that are not wanted any more: marked, passed over while pinned, revived by a use (D8, D11).
//!
//! An edge knows the marks of its own blocks. Those that may go stand in the order in which they do, as runs; an edge whose
//! blocks are pinned, or unpinned, or change otherwise, puts its runs there anew. So an eviction looks at no block that is
//! pinned. A use revives the blocks of its path, edge by edge, where the tree has dead blocks at all.

use std::collections::{BTreeMap, BTreeSet};

use crate::dead::DeadRun;
use crate::error::Result;
use crate::ids::{BlockId, Depth, NO_NODE, NodeIndex};
use crate::node::Node;
use crate::tokens::TokenSequence;
use crate::tree::spans::Part;
use crate::tree::{Effort, Position, RadixIndex, Sources, Steps};

impl RadixIndex {
    /// Marks the blocks wholly inside `ranges` as dead, and answers how many of them were not: they are evicted before
    /// anything else, the oldest mark first, in a mark from the back. A block that is used after that is dead no more.
    ///
    /// Ranges are token positions, ascending and disjoint; those that touch are one. Blocks that are extended are passed over:
    /// a present block below them is not on the path of `seq`, so somebody else may want them. Pinned blocks are marked, and
    /// go when their pins have ended. A call that marks nothing is no mark.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a range is reversed, begins before the last one ends, or ends
    /// beyond the sequence; nothing is marked then.
    ///
    /// # Complexity
    /// O(edges of the path, and tokens that the sequence was not known to share) + O(log dead runs) a run of blocks; in an edge
    /// with holes, O(its blocks inside the ranges).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, (0..8).collect(), vec![])?;
    /// let ids: Vec<BlockId> = (0..4).map(BlockId).collect();
    /// index.insert(&mut seq, &ids, InsertOptions::new(8, Source::Computed))?;
    /// assert_eq!(index.mark_dead(&seq, &[(1, 6)])?, 2);
    /// assert_eq!(index.evict(3), [BlockId(2), BlockId(1), BlockId(3)]);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn mark_dead(&mut self, seq: &TokenSequence, ranges: &[(usize, usize)]) -> Result<u64> {
        let marked = self.mark_dead_within(seq, ranges, Effort::ANY)?;
        // No effort is too large.
        Ok(marked.unwrap_or_default())
    }

    /// As [`mark_dead`](Self::mark_dead), unless that takes more than `effort`: then nothing is marked.
    ///
    /// # Errors
    /// As [`mark_dead`](Self::mark_dead).
    ///
    /// # Complexity
    /// O(effort + ranges).
    pub fn mark_dead_within(
        &mut self,
        seq: &TokenSequence,
        ranges: &[(usize, usize)],
        effort: Effort,
    ) -> Result<Option<u64>> {
        let ranges = self.block_ranges(seq, ranges, "RadixIndex.mark_dead")?;
        crate::failpoints::before("RadixIndex.mark_dead")?;
        let Some(parts) = self.parts_to_mark(seq, &ranges, effort) else {
            return Ok(None);
        };
        let mut marked = 0;
        let mark = self.last_mark + 1;
        for (node, parts) in parts {
            let edge = &mut self.nodes[node];
            let parts = parts.iter().filter(|part| !part.is_extended);
            let mut parts = parts.map(|part| (part.from, part.to)).peekable();
            if parts.peek().is_none() {
                continue;
            }
            let dead = edge.extras_mut().dead.get_or_insert_default();
            let new = u64::from(dead.marks.fill(parts, mark));
            if new > 0 {
                let tree = edge.tree;
                self.trees[tree].num_dead += new;
                marked += new;
                crate::failpoints::within("mark_dead: marks that are not counted");
                self.requeue_dead(node);
            }
        }
        if marked > 0 {
            self.num_dead += marked;
            self.last_mark = mark;
        }
        Ok(Some(marked))
    }

    /// The blocks of the path of `seq` that a mark is for; none if finding or marking them takes more than `effort`.
    fn parts_to_mark(
        &self,
        seq: &TokenSequence,
        ranges: &[(Depth, Depth)],
        effort: Effort,
    ) -> Option<Vec<(NodeIndex, Vec<Part>)>> {
        let found = self.parts_inside(seq, ranges, false, effort)?;
        let mut steps = effort.steps();
        for (node, parts) in &found {
            // What is dead of an edge is put into order anew.
            let known = self.nodes[*node].dead_marks().len() + parts.len();
            steps.take(known as u64)?;
        }
        Some(found)
    }

    /// Counts the steps of reviving the blocks down to `at`: one for each edge and each dead run of it. None if these are more than
    /// are left.
    #[cold]
    pub(crate) fn count_revival(&self, at: Position, steps: &mut Steps) -> Option<()> {
        if self.trees[self.nodes[at.node].tree].num_dead == 0 {
            return Some(());
        }
        let mut node = at.node;
        while node != NO_NODE {
            let edge = &self.nodes[node];
            steps.take(1 + edge.dead_marks().len() as u64)?;
            node = edge.parent;
        }
        Some(())
    }

    /// Blocks down to `at` were used: they are dead no more.
    #[cold]
    pub(super) fn revive_path(&mut self, at: Position) {
        let tree = self.nodes[at.node].tree;
        let (mut node, mut end) = (at.node, at.depth);
        while node != NO_NODE && self.trees[tree].num_dead > 0 {
            let start = self.nodes[node].depth;
            self.unmark(node, start, end);
            end = start;
            node = self.nodes[node].parent;
        }
    }

    /// The blocks `from..to` of a node are dead no more.
    pub(super) fn unmark(&mut self, node: NodeIndex, from: Depth, to: Depth) {
        let edge = &self.nodes[node];
        if self.num_dead == 0 || !edge.has_dead() || from >= to {
            return;
        }
        let (protected, tree) = (self.protected_end(node), edge.tree);
        let Some(dead) = &mut self.nodes[node].extras_mut().dead else {
            return;
        };
        let mut loose = 0;
        for range in dead.marks.within(from, to) {
            for run in self.dead.cut(range.value, range.from, range.to) {
                loose += run.to.min(protected).saturating_sub(run.from);
            }
        }
        let gone = u64::from(dead.marks.clear(from, to));
        dead.loose -= loose;
        if dead.marks.is_empty() {
            self.nodes[node].extras_mut().dead = None;
        }
        self.num_loose -= u64::from(loose);
        self.num_dead -= gone;
        self.trees[tree].num_dead -= gone;
        self.nodes[node].prune();
    }

    /// Takes the dead blocks of a node out of the order in which they go.
    pub(super) fn unqueue_dead(&mut self, node: NodeIndex) {
        let Some(dead) = self.nodes[node].dead_mut() else {
            return;
        };
        for range in dead.marks.as_slice() {
            self.dead.cut(range.value, range.from, range.to);
        }
        self.num_loose -= u64::from(dead.loose);
        dead.loose = 0;
    }

    /// Puts the dead blocks of a node where they belong in the order in which they go, after anything that decides whether
    /// they may has changed.
    pub(crate) fn requeue_dead(&mut self, node: NodeIndex) {
        self.unqueue_dead(node);
        let protected = self.protected_end(node);
        let runs = self.free_dead(node);
        let below = |run: &DeadRun| run.to.min(protected).saturating_sub(run.from);
        let loose = runs.iter().map(below).sum();
        for run in runs {
            self.dead.add(run);
        }
        self.num_loose += u64::from(loose);
        if let Some(dead) = self.nodes[node].dead_mut() {
            dead.loose = loose;
        }
    }

    /// The dead blocks of a node that may go: those that nobody pins, and that stand above nothing but sources.
    pub(crate) fn free_dead(&self, node: NodeIndex) -> Vec<DeadRun> {
        let (mut free, edge) = (Vec::new(), &self.nodes[node]);
        let Some(dead) = edge.extras().and_then(|extras| extras.dead.as_ref()) else {
            return free;
        };
        let path_end = self.path_end(node);
        let pinned = self.sources.get(&node).map(Sources::pinned);
        let pinned = pinned.unwrap_or_default();
        for range in dead.marks.as_slice() {
            let (mark, mut from) = (range.value, range.from.max(path_end));
            let first = pinned.partition_point(|&(_, to)| to <= from);
            let inside = pinned[first..]
                .iter()
                .take_while(|&&(start, _)| start < range.to);
            for &(start, end) in inside.chain([&(range.to, range.to)]) {
                let to = start;
                if from < to {
                    free.push(DeadRun {
                        mark,
                        node,
                        from,
                        to,
                    });
                }
                from = from.max(end);
            }
        }
        free
    }

    /// Takes dead blocks from the end of the run that goes first, as far as `out` has fewer than `n`.
    pub(super) fn evict_dead(&mut self, run: DeadRun, n: usize, out: &mut Vec<BlockId>) {
        let count = (run.to - run.from).min(crate::ids::depth(n - out.len()));
        let from = run.to - count;
        self.unmark(run.node, from, run.to);
        let edge = &self.nodes[run.node];
        if edge.has_children() || run.to < edge.end() {
            self.renew_version(run.node);
        }
        let first = out.len();
        self.vacate(run.node, from, run.to, |id, _| out.push(BlockId(id)));
        out[first..].reverse();
        self.settle(run.node);
    }

    /// The tree goes: nothing is dead there any more.
    pub(super) fn forget_dead(&mut self, node: NodeIndex) {
        let (start, end) = (self.nodes[node].depth, self.nodes[node].end());
        self.unmark(node, start, end);
    }

    /// Where each mark stands among those that still mark something.
    pub(crate) fn mark_ranks(&self) -> BTreeMap<u64, usize> {
        let mut marks = BTreeSet::new();
        if self.num_dead > 0 {
            let ranges = self.nodes.iter().flat_map(Node::dead_marks);
            marks = ranges.map(|range| range.value).collect();
        }
        marks.into_iter().zip(0..).collect()
    }
}
