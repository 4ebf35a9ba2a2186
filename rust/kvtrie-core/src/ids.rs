//! Block ids, node handles and depths.

use std::fmt;

/// The id of one block of the engine's KV pool, below [`Config::num_blocks`](crate::Config::num_blocks).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The most blocks that one pool can have.
    pub const MAX_BLOCKS: u64 = 1 << 31;
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Consecutive block ids, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// The first id.
    pub first: BlockId,
    /// Number of ids, at least 1.
    pub len: u32,
}

impl IdRange {
    /// The id after the last.
    fn end(self) -> u32 {
        self.first.0 + self.len
    }

    /// The ids.
    pub fn ids(self) -> impl ExactSizeIterator<Item = BlockId> {
        (self.first.0..self.end()).map(BlockId)
    }

    /// Appends ids, each below 2³¹, to ranges. Neither of two neighbours can take in the other.
    pub(crate) fn append(ids: &[u32], ranges: &mut Vec<Self>) {
        for chunk in ids.chunks(CHUNK) {
            if is_run(chunk) {
                Self::append_run(chunk[0], depth(chunk.len()), ranges);
            } else {
                for &id in chunk {
                    Self::append_run(id, 1, ranges);
                }
            }
        }
    }

    /// Appends consecutive ids.
    pub(crate) fn append_run(first: u32, len: u32, ranges: &mut Vec<Self>) {
        match ranges.last_mut() {
            Some(last) if last.end() == first => last.len += len,
            _ => ranges.push(Self {
                first: BlockId(first),
                len,
            }),
        }
    }
}

/// Ids that are looked at together.
const CHUNK: usize = 16;

/// Whether ids ascend without a gap. Ends soon if the first ones do not. Holes are no ids.
pub(crate) fn are_consecutive(ids: &[u32]) -> bool {
    let Some(&first) = ids.first() else {
        return true;
    };
    let mut next = first;
    first != ABSENT
        && ids.chunks(CHUNK).all(|chunk| {
            let follows = chunk[0] == next && is_run(chunk);
            next = next.wrapping_add(depth(chunk.len()));
            follows
        })
}

/// Without branches, which becomes vector code.
fn is_run(chunk: &[u32]) -> bool {
    let from = chunk[0];
    let apart = (from..)
        .zip(chunk)
        .fold(0, |apart, (at, id)| apart | (at ^ id));
    apart == 0
}

pub(crate) type NodeIndex = u32;

/// Names a node as long as the node is not removed or cut at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeHandle {
    pub(crate) index: NodeIndex,
    pub(crate) generation: u32,
}

/// Means that there is no node.
pub(crate) const NO_NODE: NodeIndex = u32::MAX;

/// Marks a hole, in place of a block id.
pub(crate) const ABSENT: u32 = u32::MAX;

/// Number of blocks before a block or a place.
pub(crate) type Depth = u32;

/// Converts a count of blocks. A path has at most 2³¹ blocks, so a larger count matches nothing and is capped.
pub(crate) fn depth(blocks: usize) -> Depth {
    Depth::try_from(blocks).unwrap_or(Depth::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_have_the_ids_in_order_and_are_as_few_as_can_be(
            runs in prop::collection::vec((0u32..400, 1u32..70), 0..12),
            cuts in prop::collection::vec(0usize..800, 0..4),
        ) {
            let ids: Vec<u32> = runs.iter().flat_map(|&(from, len)| from..from + len).collect();
            let mut ranges = Vec::new();
            // Edges end anywhere.
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (ids.len() + 1)).collect();
            cuts.extend([0, ids.len()]);
            cuts.sort_unstable();
            for pair in cuts.windows(2) {
                IdRange::append(&ids[pair[0]..pair[1]], &mut ranges);
            }
            let all: Vec<u32> = ranges.iter().flat_map(|range| range.ids()).map(|id| id.0).collect();
            let breaks = ids.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
            prop_assert_eq!(ranges.len(), if ids.is_empty() { 0 } else { breaks + 1 });
            prop_assert_eq!(all, ids);
        }
    }
}
