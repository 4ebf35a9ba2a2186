//! What a sequence remembers of the index it was last used with.

use std::sync::Arc;

use crate::ids::{BlockId, Depth, NodeHandle, depth};

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
    /// Edges that were walked to get there, those of a truncated end too.
    pub(crate) edges: u64,
    /// Ids of the first blocks, as the last plan found them; no more than `present`.
    pub(crate) ids: Option<Arc<Vec<BlockId>>>,
}

impl Cursor {
    /// The sequence ends at `len` tokens from here on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.present = self.present.min(depth(len / self.block_size));
        self.exact = self.exact.min(self.present);
        // What comes to stand behind the cut is another path.
        if let Some(ids) = &self.ids
            && ids.len() > self.present as usize
        {
            self.ids = Some(Arc::new(ids[..self.present as usize].to_vec()));
        }
    }
}
