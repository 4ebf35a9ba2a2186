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
