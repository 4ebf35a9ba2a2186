//! Dead blocks: marks, skipped while pinned, removed by a use (D8, D11).
//!
//! An edge stores the marks of its own blocks. Those that may be evicted are also in
//! [`DeadOrder`](crate::eviction::dead_order::DeadOrder); an edge updates its runs there after its pins or blocks change, so an
//! eviction visits no pinned block. A use removes the marks of its path, edge by edge.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Result;
use crate::eviction::dead_order::DeadRun;
use crate::ids::{BlockId, Depth, NO_NODE, NodeIndex};
use crate::index::spans::Part;
use crate::index::{Effort, Position, RadixIndex, Sources, Steps};
use crate::storage::node::Node;
use crate::tokens::TokenSequence;

impl RadixIndex {
    /// Marks the blocks wholly inside `ranges` as dead and returns the number of newly marked blocks. Dead blocks are
    /// evicted before all other indexed blocks: the oldest mark first, then the deepest block. A use of a block removes
    /// its mark.
    ///
    /// Ranges are those of [`remove_spans`](Self::remove_spans), and a block that stays there without `force` is
    /// skipped. Pinned blocks are marked, but leave only after their pins have ended. A call that marks nothing does
    /// not count as a mark.
    ///
    /// # Errors
    /// As [`remove_spans`](Self::remove_spans); nothing is marked then.
    ///
    /// # Complexity
    /// O(edges of the path + tokens not known to be shared), and O(log dead runs) per run of blocks; in an edge with
    /// holes, O(its blocks inside the ranges).
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
        Ok(marked.unwrap_or_default())
    }

    /// As [`mark_dead`](Self::mark_dead); `None`, and nothing is marked, if that takes more than `effort`.
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

    /// The blocks of the path of `seq` to mark; `None` if finding or marking them takes more than `effort`.
    fn parts_to_mark(
        &self,
        seq: &TokenSequence,
        ranges: &[(Depth, Depth)],
        effort: Effort,
    ) -> Option<Vec<(NodeIndex, Vec<Part>)>> {
        let found = self.parts_inside(seq, ranges, false, effort)?;
        let mut steps = effort.steps();
        for (node, parts) in &found {
            // All dead runs of the edge are put into the order again.
            let known = self.nodes[*node].dead_marks().len() + parts.len();
            steps.take(known as u64)?;
        }
        Some(found)
    }

    /// Counts the steps to revive the blocks down to `at`: one per edge and per dead run. `None` if fewer are left.
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

    /// Removes the dead blocks of a node from their order of eviction.
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

    /// Updates the dead blocks of a node in their order of eviction, after a change of what may be evicted.
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

    /// The dead blocks of a node that may be evicted: unpinned, and above nothing pinned except sources.
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

    /// Evicts dead blocks from the end of the first run, until `out` has `n` or the run is empty.
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

    /// Removes the marks of a node whose tree is being removed.
    pub(super) fn forget_dead(&mut self, node: NodeIndex) {
        let (start, end) = (self.nodes[node].depth, self.nodes[node].end());
        self.unmark(node, start, end);
    }

    /// The rank of each mark among those that still mark a block.
    pub(crate) fn mark_ranks(&self) -> BTreeMap<u64, usize> {
        let mut marks = BTreeSet::new();
        if self.num_dead > 0 {
            let ranges = self.nodes.iter().flat_map(Node::dead_marks);
            marks = ranges.map(|range| range.value).collect();
        }
        marks.into_iter().zip(0..).collect()
    }
}
