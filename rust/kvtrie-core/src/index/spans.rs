//! Removes parts of a sequence (D10, D11).

use crate::effort::Effort;
use crate::error::{Result, invalid};
use crate::ids::{BlockId, Depth, NodeIndex, depth};
use crate::index::RadixIndex;
use crate::pins::{Cuts, Leaving};
use crate::tokens::TokenSequence;

/// The blocks inside the ranges, each list in path order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Ids that left the index unpinned; they now belong to the caller.
    pub freed: Vec<BlockId>,
    /// Ids that stay because a present block below them belongs to another path.
    pub kept: Vec<BlockId>,
    /// Ids that left the index pinned. [`RadixIndex::take_freed`] returns them later.
    pub condemned: Vec<BlockId>,
}

#[derive(Default)]
struct Removal {
    /// Parts to remove, by node. Nodes and the parts of each ascend.
    gone: Vec<(NodeIndex, Vec<(Depth, Depth)>)>,
    cuts: Cuts,
    removed: Removed,
}

impl RadixIndex {
    /// Removes the blocks wholly inside `ranges`. Blocks across an edge of a range stay: this frees memory, it does not
    /// redact. Blocks after a removed one are not matched exactly until the hole is filled.
    ///
    /// Ranges are token positions, ascending and disjoint; touching ranges are merged. Unless `force` is set, a block
    /// stays if a present block below it is not on the path of `seq`: others may need it. Pinned blocks are condemned.
    /// The token ids of at most `num_blocks` holes are kept while blocks are below. Above that, the least recently used
    /// blocks after holes leave and wait for [`take_freed`](Self::take_freed).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a range is reversed, overlaps the one before, or ends
    /// beyond the sequence; nothing is removed then.
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
    /// let removed = index.remove_spans(&seq, &[(1, 6)], false)?;
    /// assert_eq!(removed.freed, [BlockId(1), BlockId(2)]);
    /// let found = index.lookup(&mut seq, LookupOptions::default(), &mut Vec::new())?;
    /// assert_eq!(found.num_tokens, 2);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn remove_spans(
        &mut self,
        seq: &TokenSequence,
        ranges: &[(usize, usize)],
        force: bool,
    ) -> Result<Removed> {
        let removed = self
            .remove_spans_within(seq, ranges, force, Effort::ANY)
            .map_err(|error| error.in_call("RadixIndex::remove_spans"))?;
        Ok(removed.unwrap_or_default())
    }

    /// As [`remove_spans`](Self::remove_spans); `None`, and nothing is removed, if that takes more than `effort`.
    /// O(effort + ranges).
    ///
    /// # Errors
    /// As [`remove_spans`](Self::remove_spans).
    pub fn remove_spans_within(
        &mut self,
        seq: &TokenSequence,
        ranges: &[(usize, usize)],
        force: bool,
        effort: Effort,
    ) -> Result<Option<Removed>> {
        let ranges = block_ranges(
            seq,
            ranges,
            self.block_size(),
            "RadixIndex::remove_spans_within",
        )?;
        crate::failpoints::before("RadixIndex::remove_spans_within")?;
        let Some(Removal {
            gone,
            cuts,
            mut removed,
        }) = self.removal(seq, &ranges, force, effort)
        else {
            return Ok(None);
        };
        if let Some(last) = gone.last() {
            let edge = self.forest.node(last.0);
            let at_end = !edge.has_children() && last.1[last.1.len() - 1].1 == edge.end();
            if !at_end || gone.len() > 1 {
                self.forest.renew_version(last.0);
            }
            self.cut_out(cuts);
            self.remove_parts(&gone, &mut removed);
            crate::failpoints::within("remove_spans: blocks left");
            self.bound_holes();
        }
        Ok(Some(removed))
    }

    fn removal(
        &self,
        seq: &TokenSequence,
        ranges: &[(Depth, Depth)],
        force: bool,
        effort: Effort,
    ) -> Option<Removal> {
        let block_size = self.block_size();
        let (mut removal, mut leaving) = (Removal::default(), Leaving::default());
        let mut blocks = 0;
        for (node, parts) in self.forest.parts_inside(seq, ranges, true, effort)? {
            let protected = self.forest.protected_end(node);
            let mut own = Vec::new();
            for part in parts {
                if force || !part.is_extended {
                    blocks += u64::from(part.to - part.from);
                    own.push((part.from, part.to));
                    if part.from < protected {
                        leaving.add(self.forest.node(node).tree, node, part.from, part.to);
                    }
                } else {
                    let ids = self.forest.node(node).ids(part.from, part.to, block_size);
                    removal.removed.kept.extend(ids);
                }
            }
            if !own.is_empty() {
                removal.gone.push((node, own));
            }
        }
        let mut steps = effort.steps();
        self.count_removal(blocks, &mut steps)?;
        if !leaving.is_empty() {
            removal.cuts = self.pins.find_cuts(&self.forest, &leaving, &mut steps)?;
        }
        Some(removal)
    }

    /// Removes blocks of one path that were cut out of their pins.
    fn remove_parts(&mut self, gone: &[(NodeIndex, Vec<(Depth, Depth)>)], removed: &mut Removed) {
        let block_size = self.block_size();
        for (node, parts) in gone {
            for &(from, to) in parts {
                for id in self.forest.node(*node).ids(from, to, block_size) {
                    if self.pins.keeps(id.0) {
                        removed.condemned.push(id);
                    } else {
                        removed.freed.push(id);
                    }
                }
            }
        }
        // The deepest edge is first, because an empty edge is removed together with the holes above it.
        for (node, parts) in gone.iter().rev() {
            for &(from, to) in parts.iter().rev() {
                self.unmark(*node, from, to);
                self.vacate(*node, from, to, |_, _| ());
            }
            self.settle(*node);
        }
    }
}

/// The blocks wholly inside token ranges. Touching ranges are merged before.
pub(super) fn block_ranges(
    seq: &TokenSequence,
    ranges: &[(usize, usize)],
    block_size: usize,
    call: &'static str,
) -> Result<Vec<(Depth, Depth)>> {
    let mut merged: Vec<(usize, usize)> = Vec::new();
    let mut last_end = 0;
    for &(start, end) in ranges {
        if start > end || end > seq.len() {
            return Err(invalid!(
                call,
                "ranges has [{start}, {end}); it must ascend and lie in [0, {}], the sequence",
                seq.len()
            ));
        }
        if start < last_end {
            return Err(invalid!(
                call,
                "ranges has [{start}, {end}) after a range that ends at {last_end}; ranges must ascend and be disjoint"
            ));
        }
        last_end = end;
        match merged.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => merged.push((start, end)),
        }
    }
    let whole = merged
        .iter()
        .map(|&(start, end)| (depth(start.div_ceil(block_size)), depth(end / block_size)));
    Ok(whole.filter(|(from, to)| from < to).collect())
}
