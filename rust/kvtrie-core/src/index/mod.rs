//! The radix forest: what an index consists of.

mod content;
mod dead;
mod edges;
mod insert;
mod lookup;
mod pins;
mod quarantine;
mod recency;
mod remove;
mod spans;
mod tags;
mod walk;

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::error::{Error, Result};
use crate::eviction::dead_order::DeadOrder;
use crate::eviction::lru::EvictionOrder;
use crate::hash::EdgeHasher;
use crate::ids::{BlockId, NO_NODE, NodeIndex};
use crate::inspection::gone::Gone;
use crate::moved::windows::Windows;
use crate::namespace::{Namespace, Salt};
use crate::pins::lease::Lease;
use crate::span::Kinds;
use crate::storage::arena::Arena;
use crate::storage::blocks::BlockTable;
use crate::storage::edge_table::EdgeTable;
use crate::storage::node::Node;
use crate::storage::salts::Salts;
use crate::storage::slab::Slab;

use pins::Anchors;

pub use insert::{Imported, InsertOptions, Inserted, Source};
pub(crate) use lookup::Steps;
pub use lookup::{Effort, LookupOptions, Match};
pub(crate) use pins::{SourceRun, Sources};
pub use spans::Removed;
pub(crate) use walk::{Position, Walked, Work};

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

/// One namespace's tree.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) root: NodeIndex,
    /// Renewed whenever a block in the middle of a path leaves or is replaced: cursors of an older version are not
    /// used. Unique within an index.
    pub(crate) version: u64,
    pub(crate) num_dead: u64,
}

/// A forest of radix trees, one per namespace, that maps tokens to block ids.
///
/// See the [crate's documentation](crate) for what it promises and what its calls cost.
pub struct RadixIndex {
    /// Identifies the index in plans and cursors.
    pub(crate) uid: u64,
    pub(crate) config: Config,
    pub(crate) nodes: Arena,
    /// Every node with a sibling, by (parent, first block). An only child is followed without hashing.
    pub(crate) edges: EdgeTable,
    pub(crate) hasher: EdgeHasher,
    pub(crate) trees: Slab<Tree>,
    pub(crate) tree_of: HashMap<Arc<Namespace>, u32, FixedState>,
    /// The same namespaces, for [`explain`](Self::explain).
    pub(crate) salts: Salts,
    pub(crate) blocks: BlockTable,
    pub(crate) order: EvictionOrder,
    /// Dead blocks that may be evicted, in their order of eviction.
    pub(crate) dead: DeadOrder,
    /// `None` if moved runs are off.
    pub(crate) windows: Option<Windows>,
    pub(crate) leases: Slab<Lease>,
    /// Nodes in which pinned paths end.
    pub(crate) anchors: HashMap<NodeIndex, Anchors, FixedState>,
    /// Pins of copy sources, by node.
    pub(crate) sources: HashMap<NodeIndex, Sources, FixedState>,
    /// Condemned blocks, with their number of pins.
    pub(crate) pins: HashMap<u32, u32, FixedState>,
    /// Condemned blocks whose last pin ended, oldest release first.
    pub(crate) waiting: VecDeque<u32>,
    /// Recent departures, for [`explain`](Self::explain).
    pub(crate) gone: Gone,
    pub(crate) kinds: Kinds,
    /// Whether any token was ever tagged.
    pub(crate) is_tagged: bool,
    pub(crate) clock: u64,
    pub(crate) last_version: u64,
    pub(crate) num_indexed: u64,
    pub(crate) num_condemned: u64,
    pub(crate) num_quarantined: u64,
    /// Indexed blocks that are pinned or above a pinned block.
    pub(crate) num_protected: u64,
    pub(crate) num_approximate: u64,
    pub(crate) num_holes: u64,
    pub(crate) num_dead: u64,
    /// Protected dead blocks that may be evicted: above sources only.
    pub(crate) num_loose: u64,
    pub(crate) last_mark: u64,
    pub(crate) unknown_discards: u64,
    pub(crate) work: Work,
}

/// Without the prompts and the seed.
impl fmt::Debug for RadixIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RadixIndex")
            .field("config", &self.config)
            .field("num_indexed", &self.num_indexed)
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
        static NEXT: AtomicU64 = AtomicU64::new(1);
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
            uid: NEXT.fetch_add(1, Ordering::Relaxed),
            hasher: EdgeHasher::new(config.seed, config.hash_bits),
            tree_of: HashMap::with_hasher(FixedState::with_seed(config.seed)),
            nodes: Arena::new(config.seed),
            edges: EdgeTable::default(),
            trees: Slab::default(),
            salts: Salts::default(),
            blocks: BlockTable::default(),
            order: EvictionOrder::default(),
            dead: DeadOrder::default(),
            windows,
            leases: Slab::default(),
            anchors: HashMap::with_hasher(FixedState::with_seed(config.seed)),
            sources: HashMap::with_hasher(FixedState::with_seed(config.seed)),
            pins: HashMap::with_hasher(FixedState::with_seed(config.seed)),
            waiting: VecDeque::new(),
            gone: Gone::new(config.seed),
            kinds: Kinds::default(),
            is_tagged: false,
            clock: 0,
            last_version: 0,
            num_indexed: 0,
            num_condemned: 0,
            num_quarantined: 0,
            num_protected: 0,
            num_approximate: 0,
            num_holes: 0,
            num_dead: 0,
            num_loose: 0,
            last_mark: 0,
            unknown_discards: 0,
            work: Work::default(),
            config,
        })
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
        self.num_indexed - self.num_protected + self.num_loose
    }

    /// The namespaces with cached blocks, sorted by their fields.
    ///
    /// # Complexity
    /// O(namespaces · log namespaces).
    #[must_use]
    pub fn namespaces(&self) -> Vec<Arc<Namespace>> {
        let all = self.trees.iter().map(|(_, tree)| &tree.namespace);
        let mut all: Vec<Arc<Namespace>> = all.map(Arc::clone).collect();
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
        self.kinds.names()
    }

    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(crate) fn block_size(&self) -> usize {
        self.config.block_size
    }

    pub(crate) fn next_version(&mut self) -> u64 {
        self.last_version += 1;
        self.last_version
    }

    /// Invalidates the cursors of the namespace of `node`.
    pub(crate) fn renew_version(&mut self, node: NodeIndex) {
        let version = self.next_version();
        let tree = self.nodes[node].tree;
        self.trees[tree].version = version;
    }

    pub(crate) fn check_ids(&self, ids: &[BlockId], call: &str, argument: &str) -> Result<()> {
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

    pub(crate) fn check_start(&self, start: usize, len: usize, call: &str) -> Result<()> {
        if start > len || !start.is_multiple_of(self.block_size()) {
            return Err(Error::invalid(format!(
                "{call}: start is {start}; it must be a multiple of the block size {} and at most the {len} tokens of \
                 the sequence",
                self.block_size()
            )));
        }
        Ok(())
    }

    pub(crate) fn root(&self, namespace: &Arc<Namespace>) -> Option<Position> {
        let tree = *self.tree_of.get(namespace)?;
        Some(Position {
            node: self.trees[tree].root,
            depth: 0,
        })
    }

    /// The root of a namespace's tree, created if necessary.
    pub(crate) fn root_or_new(&mut self, namespace: &Arc<Namespace>) -> Position {
        if let Some(root) = self.root(namespace) {
            return root;
        }
        let version = self.next_version();
        let tree = self.trees.insert(Tree {
            namespace: Arc::clone(namespace),
            root: NO_NODE,
            version,
            num_dead: 0,
        });
        crate::failpoints::within("a tree without a root");
        let root = self.nodes.insert(Node::new(tree, NO_NODE, 0));
        self.trees[tree].root = root;
        self.tree_of.insert(Arc::clone(namespace), tree);
        self.salts.add(namespace);
        Position {
            node: root,
            depth: 0,
        }
    }
}
