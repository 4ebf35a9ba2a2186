//! The mutable side of a plan: what it pins.

use std::collections::BTreeSet;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::namespace::Namespace;

/// The mutable side of a plan, owned by the index until the plan is released.
///
/// What backs a sequence is pinned as a whole path, named by its deepest block: however long the path, a pin is one entry.
/// Only where that is not what is pinned (a pinned block has left its path, a block is copied from) are ids kept one by one.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) namespace: Arc<Namespace>,
    /// Whether blocks are pinned under it at all.
    pub(crate) pinned: bool,
    /// Its namespace was dropped or the index reset: inserts take nothing.
    pub(crate) over: bool,
    /// Indexed blocks: each is pinned with every block above it. One, but for forks.
    pub(crate) anchors: SmallVec<[u32; 2]>,
    /// Pinned blocks that do not stand on such a path any more.
    pub(crate) kept: BTreeSet<u32>,
    /// Pinned source blocks of copies.
    pub(crate) sources: SmallVec<[u32; 2]>,
    /// First token of the plan that is approximate.
    pub(crate) first_approximate: Option<usize>,
}

impl Lease {
    pub(crate) fn heap_bytes(&self) -> usize {
        let spilled = |ids: &SmallVec<[u32; 2]>| if ids.spilled() { ids.capacity() } else { 0 };
        (spilled(&self.anchors) + spilled(&self.sources) + 2 * self.kept.len()) * size_of::<u32>()
    }
}
