//! What an index is made with.

use kvtrie_core::{Error, ErrorKind, Result};

/// The size of blocks and the bounds of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexerConfig {
    /// Tokens per block, equal for all workers: 1 to [`MAX_BLOCK_SIZE`](Self::MAX_BLOCK_SIZE).
    pub block_size: usize,
    /// Whether moved runs are found. Each block takes 5 to 6 bytes more then, and 10 to 12 where
    /// a run may have one block.
    pub moved_runs: bool,
    /// Tokens of the shortest moved run that counts. It is rounded up to whole blocks; 1 to 2³⁰.
    pub min_run: usize,
    /// The most live workers: 1 to [`MAX_WORKERS`](Self::MAX_WORKERS).
    pub max_workers: usize,
    /// The most blocks that one worker may add to the index, and the most that it may hold: 1 to
    /// [`MAX_BLOCKS`](Self::MAX_BLOCKS).
    pub max_blocks: usize,
    /// The most blocks of one worker whose parent is not known: up to 2²⁰.
    pub max_parked: usize,
    /// The largest batch of events, in bytes: 1 to 2³⁰.
    pub max_batch_bytes: usize,
}

impl IndexerConfig {
    /// The largest block size.
    pub const MAX_BLOCK_SIZE: usize = 4_096;
    /// The largest `max_workers`.
    pub const MAX_WORKERS: usize = 16_384;
    /// The largest `max_blocks`.
    pub const MAX_BLOCKS: usize = 1 << 30;

    /// The defaults: moved runs of two blocks, 1,024 workers of 2²⁴ blocks.
    #[must_use]
    pub fn new(block_size: usize) -> Self {
        Self {
            block_size,
            moved_runs: true,
            min_run: block_size.saturating_mul(2),
            max_workers: 1_024,
            max_blocks: 1 << 24,
            max_parked: 8_192,
            max_batch_bytes: 64 << 20,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let limits = [
            ("block_size", self.block_size, 1, Self::MAX_BLOCK_SIZE),
            ("min_run", self.min_run, 1, 1 << 30),
            ("max_workers", self.max_workers, 1, Self::MAX_WORKERS),
            ("max_blocks", self.max_blocks, 1, Self::MAX_BLOCKS),
            ("max_parked", self.max_parked, 0, 1 << 20),
            ("max_batch_bytes", self.max_batch_bytes, 1, 1 << 30),
        ];
        for (name, value, least, most) in limits {
            if !(least..=most).contains(&value) {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    "KvIndexer::new",
                    format!("{name} is {value}; it must be in [{least}, {most}]"),
                ));
            }
        }
        Ok(())
    }

    /// Number of consecutive blocks of the shortest moved run.
    pub(crate) fn run_blocks(&self) -> usize {
        self.min_run.div_ceil(self.block_size)
    }
}
