//! Leases: the part of a plan that the index owns and changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::ids::Depth;
use crate::namespace::Namespace;

/// Consecutive present blocks of one path. The last block names them, so that a split of an edge changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) last: u32,
    pub(crate) from: Depth,
}

#[derive(Debug, Default)]
struct Kept {
    paths: BTreeSet<u32>,
    sources: BTreeSet<u32>,
}

/// The pins of a plan, owned by the index until the plan is released. One entry pins any number of consecutive blocks.
/// A block that leaves is cut out of its entry and kept by its id.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) pinned: bool,
    /// Set when the namespace is dropped or the index reset: inserts with this plan take nothing.
    pub(crate) over: bool,
    /// Whether an insert has used the plan.
    pub(crate) is_used: bool,
    /// Usually one whole path. There are several after a fork, or after blocks have left.
    pub(crate) paths: SmallVec<[Stretch; 2]>,
    pub(crate) sources: SmallVec<[Stretch; 2]>,
    /// Pinned blocks that have left the index. Few leases have any.
    kept: Option<Box<Kept>>,
    pub(crate) first_approximate: Option<usize>,
}

impl Lease {
    pub(crate) fn new(namespace: Arc<Namespace>, pinned: bool) -> Self {
        Self {
            namespace,
            pinned,
            over: false,
            is_used: false,
            paths: SmallVec::new(),
            sources: SmallVec::new(),
            kept: None,
            first_approximate: None,
        }
    }

    pub(crate) fn pins_sources(&self) -> bool {
        let kept = self.kept.as_ref();
        !self.sources.is_empty() || kept.is_some_and(|kept| !kept.sources.is_empty())
    }

    /// Keeps a block by id. Returns false if the lease already kept it in that set.
    pub(crate) fn keep(&mut self, id: u32, is_source: bool) -> bool {
        let kept = self.kept.get_or_insert_default();
        let own = if is_source {
            &mut kept.sources
        } else {
            &mut kept.paths
        };
        own.insert(id)
    }

    /// The blocks kept by id. A block that is in both sets occurs twice.
    pub(crate) fn kept(&self) -> impl Iterator<Item = u32> {
        let kept = self.kept.iter();
        kept.flat_map(|kept| kept.paths.iter().chain(&kept.sources).copied())
    }

    /// Number of entries that a release visits.
    pub(crate) fn num_entries(&self) -> usize {
        let kept = self.kept.as_ref();
        let kept = kept.map_or(0, |kept| kept.paths.len() + kept.sources.len());
        self.paths.len() + self.sources.len() + kept
    }

    pub(crate) fn take_kept_sources(&mut self) -> BTreeSet<u32> {
        let kept = self.kept.as_mut();
        kept.map_or_else(BTreeSet::new, |kept| std::mem::take(&mut kept.sources))
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let spilled = |stretches: &SmallVec<[Stretch; 2]>| {
            if stretches.spilled() {
                stretches.capacity() * size_of::<Stretch>()
            } else {
                0
            }
        };
        let kept = self.kept.as_ref().map_or(0, |kept| {
            let ids = kept.paths.len() + kept.sources.len();
            size_of::<Kept>() + 2 * ids * size_of::<u32>()
        });
        spilled(&self.paths) + spilled(&self.sources) + kept
    }
}
