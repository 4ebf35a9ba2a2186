//! Block ids, node handles and depths.

use std::fmt;

/// The id of one block of the engine's KV pool.
///
/// Ids are in `0..num_blocks` of the index that holds them, and `num_blocks` is at most 2³¹.
///
/// # Examples
/// ```
/// use kvtrie_core::BlockId;
/// assert_eq!(BlockId(7).to_string(), "7");
/// ```
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

/// Index of a node in the arena, valid only inside the index.
pub(crate) type NodeIndex = u32;

/// Names a node while its end stays where it is. The arena detects a stale handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeHandle {
    pub(crate) index: NodeIndex,
    pub(crate) generation: u32,
}

/// "No node": the end of a link.
pub(crate) const NO_NODE: NodeIndex = u32::MAX;

/// "No block here": a hole.
pub(crate) const ABSENT: u32 = u32::MAX;

/// Number of blocks from the root; the depth of a block is the number of blocks before it.
pub(crate) type Depth = u32;

/// Converts a count of blocks to a depth.
///
/// A path has at most 2³¹ blocks with KV. A count beyond `u32` cannot match anything, so it is capped.
pub(crate) fn depth(blocks: usize) -> Depth {
    Depth::try_from(blocks).unwrap_or(Depth::MAX)
}
