//! The mutable side of a plan: what it pins, and what it knows of the sequence.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::namespace::Namespace;

/// The mutable side of a plan, owned by the index until the plan is released.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) namespace: Arc<Namespace>,
    /// Whether blocks are pinned under it at all.
    pub(crate) pinned: bool,
    /// Its namespace was dropped or the index reset: inserts take nothing.
    pub(crate) over: bool,
    /// Pinned blocks of one path, from position 0 on.
    pub(crate) path: Vec<u32>,
    /// Pinned blocks that are not on that path: of forks, and what came to stand in place of another block.
    pub(crate) aside: BTreeSet<u32>,
    /// Pinned source blocks of copies.
    pub(crate) sources: Vec<u32>,
    /// The deepest block of `path` that is still indexed: it protects what lies above it.
    pub(crate) anchor: Option<u32>,
    /// The sequence's lineage and the namespace's version for which `path` is known to be the sequence's path.
    pub(crate) synced: Option<(u64, u64)>,
    /// First token of the plan that is approximate.
    pub(crate) first_approximate: Option<usize>,
}

impl Lease {
    pub(crate) fn heap_bytes(&self) -> usize {
        (self.path.capacity() + self.sources.capacity() + 2 * self.aside.len()) * size_of::<u32>()
    }
}
