//! What a sequence remembers of the index it was last used with.

use crate::arena::NodeHandle;
use crate::ids::{Depth, depth};

/// Where a sequence was last found: its first `present` blocks are a path that ends in `node` or above.
#[derive(Clone, Debug)]
pub(crate) struct Cursor {
    pub(crate) index: u64,
    pub(crate) node: NodeHandle,
    pub(crate) version: u64,
    pub(crate) present: Depth,
    /// Blocks from the root that are exact; at most `present`.
    pub(crate) exact: Depth,
    pub(crate) block_size: usize,
}

impl Cursor {
    /// The sequence ends at `len` tokens from here on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.present = self.present.min(depth(len / self.block_size));
        self.exact = self.exact.min(self.present);
    }
}
