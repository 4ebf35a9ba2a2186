//! What a sequence remembers of the index that last used it.

use std::sync::Arc;

use crate::ids::{BlockId, Depth, NodeHandle, depth};

/// The last known path of a sequence: `present` blocks, of which the first `exact` are exact, to `node` or above.
#[derive(Clone, Debug)]
pub(crate) struct Cursor {
    pub(crate) index: u64,
    pub(crate) node: NodeHandle,
    pub(crate) version: u64,
    pub(crate) present: Depth,
    pub(crate) exact: Depth,
    pub(crate) block_size: usize,
    /// Edges walked, including those of a truncated end.
    pub(crate) edges: u64,
    /// Ids of the first blocks, as the last plan read them.
    pub(crate) ids: Option<Arc<Vec<BlockId>>>,
}

impl Cursor {
    pub(crate) fn truncate(&mut self, len: usize) {
        self.present = self.present.min(depth(len / self.block_size));
        self.exact = self.exact.min(self.present);
        // The sequence may continue on another path.
        if let Some(ids) = &self.ids
            && ids.len() > self.present as usize
        {
            self.ids = Some(Arc::new(ids[..self.present as usize].to_vec()));
        }
    }
}
