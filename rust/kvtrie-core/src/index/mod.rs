//! The radix forest: what an index consists of.

mod dead;
mod edges;
mod insert;
mod lookup;
mod plan;
mod quarantine;
mod remove;
mod spans;
mod steps;
mod tags;

use std::fmt;
use std::sync::Arc;

use crate::effort::Work;
use crate::error::{Error, Result};
use crate::eviction::Eviction;
use crate::ids::BlockId;
use crate::inspection::gone::Gone;
use crate::moved::{Moved, Windows};
use crate::namespace::{Namespace, Salt};
use crate::pins::Pins;
use crate::storage::forest::Forest;
use crate::tagging::Tagging;

pub use insert::{Imported, InsertOptions, Inserted, Source};
pub use lookup::{LookupOptions, Match};
pub use spans::Removed;

/// What an index is made for. [`Config::seeded`] has the defaults.
#[derive(Clone, PartialEq, Eq)]
pub struct Config {
    /// Blocks in the engine's pool, 1 to 2³¹; ids are in `0..num_blocks`.
    pub num_blocks: u64,
    /// Token slots in a block, 1 to 4,096.
    pub block_size: usize,
    /// Seeds every internal hash. Must be secret where prompts come from untrusted people, and the same on all replicas
    /// that must agree.
    pub seed: u64,
    /// Bits kept of every internal hash, 0 to 64. For tests: results do not depend on it.
    pub hash_bits: u32,
    /// Whether the windows of all cached tokens are kept; moved runs are found by them.
    pub moved_runs: bool,
    /// Tokens in the shortest moved run, at least 8.
    pub min_run: usize,
    /// Places at which a window of a prompt is tried, at least 1: the most recent ones.
    pub max_candidates: usize,
    /// Name of the engine's pool, 1 to 64 bytes: a snapshot is restored only with the pool of the same name.
    pub pool_id: Vec<u8>,
}

/// Without the seed, which is a secret.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("num_blocks", &self.num_blocks)
            .field("block_size", &self.block_size)
            .field("hash_bits", &self.hash_bits)
            .field("moved_runs", &self.moved_runs)
            .field("min_run", &self.min_run)
            .field("max_candidates", &self.max_candidates)
            .field("pool_id", &self.pool_id)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// 65,536 blocks of 16 tokens without moved runs, for a pool named by 16 zeros. There is no default seed: the core
    /// draws no random numbers, and a publicly known seed protects nobody.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        Self {
            num_blocks: 1 << 16,
            block_size: 16,
            seed,
            hash_bits: 64,
            moved_runs: false,
            min_run: 16,
            max_candidates: 64,
            pool_id: vec![0; 16],
        }
    }

    /// The longest name of a pool, in bytes.
    pub const MAX_POOL_ID: usize = 64;
    /// The largest block, in token slots.
    pub const MAX_BLOCK_SIZE: usize = 4096;
    /// The lower limit of `min_run`, in tokens.
    pub const MIN_RUN: usize = Windows::MIN_RUN;
}

/// A forest of radix trees, one per namespace, that maps tokens to block ids.
///
/// See the [crate's documentation](crate) for what it promises and what its calls cost.
pub struct RadixIndex {
    config: Config,
    /// What is cached, and where.
    forest: Forest,
    /// What live plans pin, and the blocks that left while pinned.
    pins: Pins,
    /// What is evicted, and in which order.
    eviction: Eviction,
    /// Where moved runs are found.
    moved: Moved,
    /// The kinds of tokens.
    tagging: Tagging,
    /// Recent departures, for [`explain`](Self::explain).
    gone: Gone,
    clock: u64,
    work: Work,
    unknown_discards: u64,
}

/// The parts of an index that a snapshot fills.
pub(crate) struct PartsMut<'a> {
    #[cfg(test)]
    pub(crate) config: &'a mut Config,
    pub(crate) forest: &'a mut Forest,
    pub(crate) pins: &'a mut Pins,
    pub(crate) eviction: &'a mut Eviction,
    pub(crate) moved: &'a mut Moved,
    pub(crate) tagging: &'a mut Tagging,
    pub(crate) gone: &'a mut Gone,
    pub(crate) clock: &'a mut u64,
    pub(crate) work: &'a mut Work,
    pub(crate) unknown_discards: &'a mut u64,
}

/// Without the prompts and the seed.
impl fmt::Debug for RadixIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RadixIndex")
            .field("config", &self.config)
            .field("num_indexed", &self.forest.num_indexed())
            .finish_non_exhaustive()
    }
}

pub(crate) fn check_pool_id(id: &[u8], call: &str) -> Result<()> {
    if id.is_empty() || id.len() > Config::MAX_POOL_ID {
        return Err(Error::invalid(format!(
            "{call}: pool_id has {} bytes; it must have 1 to {}",
            id.len(),
            Config::MAX_POOL_ID
        )));
    }
    Ok(())
}

impl RadixIndex {
    /// An empty index.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a field of `config` is outside its limits.
    pub fn new(config: Config) -> Result<Self> {
        if config.num_blocks == 0 || config.num_blocks > BlockId::MAX_BLOCKS {
            return Err(Error::invalid(format!(
                "RadixIndex: num_blocks is {}; it must be in [1, {}]",
                config.num_blocks,
                BlockId::MAX_BLOCKS
            )));
        }
        if config.block_size == 0 || config.block_size > Config::MAX_BLOCK_SIZE {
            return Err(Error::invalid(format!(
                "RadixIndex: block_size is {}; it must be in [1, {}]",
                config.block_size,
                Config::MAX_BLOCK_SIZE
            )));
        }
        if config.hash_bits > 64 {
            return Err(Error::invalid(format!(
                "RadixIndex: hash_bits is {}; it must be in [0, 64]",
                config.hash_bits
            )));
        }
        if config.min_run < Config::MIN_RUN {
            return Err(Error::invalid(format!(
                "RadixIndex: min_run is {}; it must be at least {}",
                config.min_run,
                Config::MIN_RUN
            )));
        }
        if config.max_candidates == 0 {
            return Err(Error::invalid(
                "RadixIndex: max_candidates is 0; it must be at least 1",
            ));
        }
        check_pool_id(&config.pool_id, "RadixIndex")?;
        let windows = config.moved_runs.then(|| {
            let (blocks, size) = (config.num_blocks, config.block_size);
            Windows::new(blocks, size, config.min_run, config.seed, config.hash_bits)
        });
        Ok(Self {
            forest: Forest::new(config.block_size, config.seed, config.hash_bits),
            pins: Pins::new(config.seed),
            eviction: Eviction::default(),
            moved: Moved::new(windows),
            tagging: Tagging::default(),
            gone: Gone::new(config.seed),
            clock: 0,
            work: Work::default(),
            unknown_discards: 0,
            config,
        })
    }

    /// The parts of an empty index, to be filled with those of a snapshot.
    pub(crate) fn parts_mut(&mut self) -> PartsMut<'_> {
        PartsMut {
            #[cfg(test)]
            config: &mut self.config,
            forest: &mut self.forest,
            pins: &mut self.pins,
            eviction: &mut self.eviction,
            moved: &mut self.moved,
            tagging: &mut self.tagging,
            gone: &mut self.gone,
            clock: &mut self.clock,
            work: &mut self.work,
            unknown_discards: &mut self.unknown_discards,
        }
    }

    #[cfg(test)]
    pub(crate) fn node_mut(
        &mut self,
        at: crate::ids::NodeIndex,
    ) -> &mut crate::storage::node::Node {
        self.forest.node_mut(at)
    }

    pub(crate) fn forest(&self) -> &Forest {
        &self.forest
    }

    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }

    pub(crate) fn eviction(&self) -> &Eviction {
        &self.eviction
    }

    pub(crate) fn moved(&self) -> &Moved {
        &self.moved
    }

    pub(crate) fn tagging(&self) -> &Tagging {
        &self.tagging
    }

    pub(crate) fn gone(&self) -> &Gone {
        &self.gone
    }

    pub(crate) fn clock(&self) -> u64 {
        self.clock
    }

    pub(crate) fn work(&self) -> Work {
        self.work
    }

    pub(crate) fn unknown_discards(&self) -> u64 {
        self.unknown_discards
    }

    /// The configuration that the index was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Blocks that [`evict`](Self::evict) could take: those that are neither pinned nor above a pinned block, and dead
    /// blocks above no pinned block except copy sources. O(1).
    #[must_use]
    pub fn num_evictable(&self) -> u64 {
        self.eviction.num_evictable(&self.forest)
    }

    /// The namespaces with cached blocks, sorted by their fields.
    ///
    /// # Complexity
    /// O(namespaces · log namespaces).
    #[must_use]
    pub fn namespaces(&self) -> Vec<Arc<Namespace>> {
        let all = self.forest.trees().iter();
        let mut all: Vec<Arc<Namespace>> =
            all.map(|(_, tree)| Arc::clone(tree.namespace())).collect();
        let key = |namespace: &Namespace| {
            let salt = match namespace.salt() {
                Salt::Shared => None,
                Salt::Tenant(salt) => Some(salt.clone()),
            };
            let named = [namespace.model(), namespace.kv_dtype(), namespace.rope()];
            let named = named.map(String::from);
            (named, namespace.adapter().map(String::from), salt)
        };
        all.sort_by_cached_key(|namespace| key(namespace));
        all
    }

    /// Names of the span kinds, by bit.
    #[must_use]
    pub fn kinds(&self) -> &[String] {
        self.tagging.kinds().names()
    }

    fn next_time(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(crate) fn block_size(&self) -> usize {
        self.config.block_size
    }

    fn check_ids(&self, ids: &[BlockId], call: &str, argument: &str) -> Result<()> {
        match ids
            .iter()
            .find(|id| u64::from(id.0) >= self.config.num_blocks)
        {
            Some(id) => Err(Error::invalid(format!(
                "{call}: {argument} holds {id}; it must be in [0, {}) (num_blocks)",
                self.config.num_blocks
            ))),
            None => Ok(()),
        }
    }

    fn check_start(&self, start: usize, len: usize, call: &str) -> Result<()> {
        if start > len || !start.is_multiple_of(self.block_size()) {
            return Err(Error::invalid(format!(
                "{call}: start is {start}; it must be a multiple of the block size {} and at most the {len} tokens of \
                 the sequence",
                self.block_size()
            )));
        }
        Ok(())
    }
}
