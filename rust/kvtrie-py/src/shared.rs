//! The index behind its lock, as its classes share it.

use std::sync::Mutex;

use kvtrie_core::RadixIndex;

/// Blocks that are offered in the time of one that is looked for.
pub(crate) const OFFERS_A_VISIT: usize = 4;
/// What an index's lock guards, for messages.
pub(crate) const INDEX: &str = "the index";

/// An index and what never changes about it.
pub(crate) struct SharedIndex {
    pub(crate) core: Mutex<RadixIndex>,
    pub(crate) num_blocks: u64,
    pub(crate) block_size: usize,
    pub(crate) seed: u64,
    pub(crate) hash_bits: u32,
}
