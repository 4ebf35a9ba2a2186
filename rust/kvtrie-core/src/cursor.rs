//! What a sequence remembers of the index that last used it, so that the next call walks only new tokens.

use std::sync::Arc;

use crate::ids::{BlockId, Depth, NodeHandle, depth};

/// The last known path of a sequence: its first `present` blocks are cached, the first `exact` of them exactly. The
/// path goes through `node` or ends above it.
#[derive(Clone, Debug)]
pub(crate) struct Cursor {
    pub(crate) index: u64,
    pub(crate) node: NodeHandle,
    pub(crate) version: u64,
    pub(crate) present: Depth,
    pub(crate) exact: Depth,
    pub(crate) block_size: usize,
    /// Edges walked to reach the path's end. A truncation of the sequence does not reduce it.
    pub(crate) edges: u64,
    /// Block ids at the start of the path, as the last plan read them.
    pub(crate) ids: Option<Arc<Vec<BlockId>>>,
}

impl Cursor {
    pub(crate) fn truncate(&mut self, len: usize) {
        self.present = self.present.min(depth(len / self.block_size));
        self.exact = self.exact.min(self.present);
        // Ids after the cut are dropped: the sequence may continue on another path.
        if let Some(ids) = &self.ids
            && ids.len() > self.present as usize
        {
            self.ids = Some(Arc::new(ids[..self.present as usize].to_vec()));
        }
    }
}
