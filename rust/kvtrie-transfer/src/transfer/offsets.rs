//! Constants of the manifest format, and the offsets of a manifest's parts.

use kvtrie_core::{BlockId, GroupKind, ReusePolicy};

use crate::transfer::wire::ByteRange;

pub(super) const MAGIC: &str = "kvtrie.manifest";
pub(super) const VERSION: usize = 3;
pub(super) const MAX_GROUP: u32 = i32::MAX.cast_unsigned();

pub(super) const EXACT: u8 = 0;
pub(super) const APPROXIMATE: u8 = 1;
pub(super) const LOOKAHEAD: u8 = 2;

/// Stands for a window where a group has states.
pub(super) const STATE: u32 = 0;
/// Stands for a window where layers attend to all tokens, which is encoded as nil.
pub(super) const FULL: u32 = 1;
/// The smallest window.
pub(super) const LEAST_WINDOW: usize = 2;

#[derive(Clone, Debug)]
pub(super) struct Offsets {
    /// Namespace and policy: what the digest of each run covers besides the run.
    pub(super) signed: ByteRange,
    pub(super) namespace: NamespaceOffsets,
    pub(super) policy: Option<ReusePolicy>,
    pub(super) groups: Vec<GroupOffsets>,
    pub(super) runs: Vec<RunOffsets>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct NamespaceOffsets {
    pub(super) model: ByteRange,
    pub(super) kv_dtype: ByteRange,
    pub(super) rope: ByteRange,
    pub(super) adapter: Option<ByteRange>,
    pub(super) salt: Option<ByteRange>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct GroupOffsets {
    pub(super) group: u32,
    pub(super) block_size: u32,
    /// The window of its layers, or [`FULL`] or [`STATE`].
    pub(super) window: u32,
    pub(super) end: u32,
}

impl GroupOffsets {
    pub(super) fn kind(self) -> Option<GroupKind> {
        match self.window {
            FULL => None,
            STATE => Some(GroupKind::State),
            window => Some(GroupKind::Window {
                window: window as usize,
            }),
        }
    }
}

/// The window that is written for a group: none for layers that attend to all tokens, 0 for states.
pub(super) fn window_of(kind: Option<GroupKind>) -> Option<usize> {
    match kind {
        None => None,
        Some(GroupKind::State) => Some(STATE as usize),
        Some(GroupKind::Window { window }) => Some(window),
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RunOffsets {
    pub(super) start: u32,
    pub(super) num_tokens: u32,
    pub(super) ids: u32,
    pub(super) prefix: u32,
    pub(super) digests: u32,
    pub(super) digest: u32,
    /// Start of the fields that the run's digest covers.
    pub(super) fields: u32,
    pub(super) hops: u16,
    pub(super) flags: u8,
    /// Number of bytes between these fields and the digest.
    pub(super) tail: u8,
}

impl RunOffsets {
    pub(super) fn num_blocks(&self, block_size: u32) -> usize {
        // A state has no tokens of its own, and one slot.
        self.num_tokens.div_ceil(block_size).max(1) as usize
    }

    pub(super) fn ids<'a>(
        &self,
        raw: &'a [u8],
        block_size: u32,
    ) -> impl ExactSizeIterator<Item = BlockId> + Clone + use<'a> {
        let at = self.ids as usize;
        block_ids(&raw[at..at + 4 * self.num_blocks(block_size)])
    }
}

pub(super) fn block_ids(raw: &[u8]) -> impl ExactSizeIterator<Item = BlockId> + Clone + use<'_> {
    let (ids, _) = raw.as_chunks();
    ids.iter().map(|id| BlockId(u32::from_le_bytes(*id)))
}

pub(super) fn first_twice(ids: impl Iterator<Item = BlockId> + Clone) -> Option<BlockId> {
    // Most tables ascend and need no copy.
    if ids.clone().is_sorted_by(|a, b| a < b) {
        return None;
    }
    let mut all: Vec<BlockId> = Vec::with_capacity(ids.clone().count());
    all.extend(ids);
    all.sort_unstable();
    let pair = all.windows(2).find(|pair| pair[0] == pair[1])?;
    pair.first().copied()
}
