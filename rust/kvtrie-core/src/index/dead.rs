//! Marks blocks as dead: they are evicted before all others (D8, D11).

use crate::effort::Effort;
use crate::error::Result;
use crate::eviction::DeadRun;
use crate::ids::{BlockId, Depth, NodeIndex};
use crate::index::RadixIndex;
use crate::index::spans::block_ranges;
use crate::storage::forest::PathPart;
use crate::tokens::TokenSequence;

impl RadixIndex {
    /// Marks the blocks wholly inside `ranges` as dead and returns how many are newly marked. Dead blocks are evicted
    /// before all others: the oldest mark first, then the deepest block. A use of a block removes its mark.
    ///
    /// The ranges are as in [`remove_spans`](Self::remove_spans), and a block that it keeps without `force` is not
    /// marked. Pinned blocks are marked, but leave only after their pins have ended. A call that marks no block does
    /// not count as a mark.
    ///
    /// # Errors
    /// As [`remove_spans`](Self::remove_spans); nothing is marked then.
    ///
    /// # Complexity
    /// As [listed](crate#calls-and-costs); in an edge with holes, also O(its blocks inside the ranges).
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
        let marked = self
            .mark_dead_within(seq, ranges, Effort::ANY)
            .map_err(|error| error.in_call("RadixIndex::mark_dead"))?;
        Ok(marked.unwrap_or_default())
    }

    /// As [`mark_dead`](Self::mark_dead); `None`, and nothing is marked, if that takes more than `effort`.
    /// O(effort + ranges).
    ///
    /// # Errors
    /// As [`mark_dead`](Self::mark_dead).
    pub fn mark_dead_within(
        &mut self,
        seq: &TokenSequence,
        ranges: &[(usize, usize)],
        effort: Effort,
    ) -> Result<Option<u64>> {
        let ranges = block_ranges(
            seq,
            ranges,
            self.block_size(),
            "RadixIndex::mark_dead_within",
        )?;
        crate::failpoints::before("RadixIndex::mark_dead_within")?;
        let Some(parts) = self.parts_to_mark(seq, &ranges, effort) else {
            return Ok(None);
        };
        let marked = self.eviction.dead_mut().mark(&mut self.forest, &parts);
        Ok(Some(marked))
    }

    fn parts_to_mark(
        &self,
        seq: &TokenSequence,
        ranges: &[(Depth, Depth)],
        effort: Effort,
    ) -> Option<Vec<(NodeIndex, Vec<PathPart>)>> {
        let found = self.forest.parts_inside(seq, ranges, false, effort)?;
        let mut steps = effort.steps();
        for (node, parts) in &found {
            // Every dead run of the edge is removed from the eviction order and queued again.
            let known = self.forest.node(*node).dead_marks().len() + parts.len();
            steps.take(known as u64)?;
        }
        Some(found)
    }

    pub(super) fn evict_dead(&mut self, run: DeadRun, n: usize, out: &mut Vec<BlockId>) {
        let count = (run.to - run.from).min(crate::ids::depth(n - out.len()));
        let from = run.to - count;
        self.unmark(run.node, from, run.to);
        let edge = self.forest.node(run.node);
        if edge.has_children() || run.to < edge.end() {
            self.forest.renew_version(run.node);
        }
        let first = out.len();
        self.vacate(run.node, from, run.to, |id, _| out.push(BlockId(id)));
        out[first..].reverse();
        self.settle(run.node);
    }
}
