//! Size of the pool, seed and limits of an index.

use std::fmt;

use crate::error::{Result, invalid};
use crate::groups::Group;
use crate::ids::BlockId;
use crate::moved::Windows;

/// The configuration of an index. [`Config::seeded`] has the defaults.
#[derive(Clone, PartialEq, Eq)]
pub struct Config {
    /// Blocks in the engine's pool, 1 to 2³¹; ids are in `0..num_blocks`.
    pub num_blocks: u64,
    /// Token slots in a block, 1 to 4,096.
    pub block_size: usize,
    /// Seeds every internal hash. It must be secret where prompts come from untrusted people, and equal on replicas
    /// that must agree.
    pub seed: u64,
    /// Bits kept of every internal hash, 0 to 64. For tests: results do not depend on it.
    pub hash_bits: u32,
    /// Whether windows of the cached tokens are kept, by which moved runs are found.
    pub moved_runs: bool,
    /// Whether every item must say how many positions it takes, as under M-RoPE: a sequence with another is refused.
    pub item_positions: bool,
    /// Tokens in the shortest moved run, at least 8.
    pub min_run: usize,
    /// Most recent places at which a window of a prompt is tried, at least 1.
    pub max_candidates: usize,
    /// Name of the engine's pool, 1 to 64 bytes: a snapshot is restored only with the pool of the same name.
    pub pool_id: Vec<u8>,
    /// Groups of layers besides group 0, whose layers attend to all tokens: group 1 and those after it.
    pub groups: Vec<Group>,
}

/// Prints every field except the seed.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("num_blocks", &self.num_blocks)
            .field("block_size", &self.block_size)
            .field("hash_bits", &self.hash_bits)
            .field("moved_runs", &self.moved_runs)
            .field("item_positions", &self.item_positions)
            .field("min_run", &self.min_run)
            .field("max_candidates", &self.max_candidates)
            .field("pool_id", &self.pool_id)
            .field("groups", &self.groups)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// 65,536 blocks of 16 tokens without moved runs, for a pool named by 16 zeros. The seed has no default, because a
    /// public seed protects nobody.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self {
            num_blocks: 1 << 16,
            block_size: 16,
            seed,
            hash_bits: 64,
            moved_runs: false,
            item_positions: false,
            min_run: 16,
            max_candidates: 64,
            pool_id: vec![0; 16],
            groups: Vec::new(),
        }
    }

    /// The longest name of a pool, in bytes.
    pub const MAX_POOL_ID: usize = 64;
    /// The largest block, in token slots.
    pub const MAX_BLOCK_SIZE: usize = 4096;
    /// The lower limit of `min_run`, in tokens.
    pub const MIN_RUN: usize = Windows::MIN_RUN;

    pub(crate) fn check(&self) -> Result<()> {
        if self.num_blocks == 0 || self.num_blocks > BlockId::MAX_BLOCKS {
            return Err(invalid!(
                "RadixIndex::new",
                "num_blocks is {}; it must be in [1, {}]",
                self.num_blocks,
                BlockId::MAX_BLOCKS
            ));
        }
        if self.block_size == 0 || self.block_size > Config::MAX_BLOCK_SIZE {
            return Err(invalid!(
                "RadixIndex::new",
                "block_size is {}; it must be in [1, {}]",
                self.block_size,
                Config::MAX_BLOCK_SIZE
            ));
        }
        if self.hash_bits > 64 {
            return Err(invalid!(
                "RadixIndex::new",
                "hash_bits is {}; it must be in [0, 64]",
                self.hash_bits
            ));
        }
        if self.min_run < Config::MIN_RUN {
            return Err(invalid!(
                "RadixIndex::new",
                "min_run is {}; it must be at least {}",
                self.min_run,
                Config::MIN_RUN
            ));
        }
        if self.max_candidates == 0 {
            return Err(invalid!(
                "RadixIndex::new",
                "max_candidates is 0; it must be at least 1"
            ));
        }
        Group::check_all(&self.groups, self.block_size, "RadixIndex::new")?;
        check_pool_id(&self.pool_id, "RadixIndex::new")
    }
}

pub(crate) fn check_pool_id(id: &[u8], call: &'static str) -> Result<()> {
    if id.is_empty() || id.len() > Config::MAX_POOL_ID {
        return Err(invalid!(
            call,
            "pool_id has {} bytes; it must have 1 to {}",
            id.len(),
            Config::MAX_POOL_ID
        ));
    }
    Ok(())
}
