//! Limits on the manifests that are read.

/// The largest manifest that is read. Counts are totals over all groups of blocks.
///
/// # Examples
/// ```
/// use kvtrie_transfer::TransferLimits;
/// assert_eq!(TransferLimits::default().max_bytes, 64 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferLimits {
    /// Bytes of the manifest.
    pub max_bytes: usize,
    /// Groups of blocks.
    pub max_groups: usize,
    /// Runs of blocks.
    pub max_runs: usize,
    /// Block ids.
    pub max_blocks: usize,
    /// End position of a run.
    pub max_tokens: usize,
    /// Tokens per block.
    pub max_block_size: usize,
}

impl TransferLimits {
    /// No limits except those of the format.
    pub const NONE: Self = Self {
        max_bytes: usize::MAX,
        max_groups: usize::MAX,
        max_runs: usize::MAX,
        max_blocks: usize::MAX,
        max_tokens: usize::MAX,
        max_block_size: usize::MAX,
    };
}

impl Default for TransferLimits {
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            max_groups: 64,
            max_runs: 1 << 16,
            max_blocks: 1 << 22,
            max_tokens: 1 << 26,
            max_block_size: 1 << 12,
        }
    }
}
