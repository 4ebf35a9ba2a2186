//! The index and its calls, one algorithm per file. The calls combine components, each of which owns its fields.

mod dead;
mod edges;
mod groups;
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

use crate::config::Config;
use crate::effort::Work;
use crate::error::{Result, invalid};
use crate::eviction::Eviction;
use crate::groups::{Group, Groups};
use crate::ids::BlockId;
use crate::moved::{Moved, Windows};
use crate::namespace::{Namespace, Salt};
use crate::pins::Pins;
use crate::storage::forest::Forest;
use crate::storage::gone::Gone;
use crate::tagging::Tagging;

pub use groups::{GroupInserted, GroupOffers, GroupOptions, GroupStats};
pub use insert::{Imported, InsertOptions, Inserted, Source};
pub use lookup::{LookupOptions, Match, Pin};
pub use spans::Removed;

/// A forest of radix trees, one per namespace, that maps tokens to block ids.
///
/// The [crate's documentation](crate) has the model and the cost of every call.
pub struct RadixIndex {
    config: Config,
    forest: Forest,
    pins: Pins,
    eviction: Eviction,
    moved: Moved,
    tagging: Tagging,
    gone: Gone,
    groups: Groups,
    clock: u64,
    work: Work,
    unknown_discards: u64,
}

pub(crate) struct PartsMut<'a> {
    #[cfg(test)]
    pub(crate) config: &'a mut Config,
    pub(crate) forest: &'a mut Forest,
    pub(crate) pins: &'a mut Pins,
    pub(crate) eviction: &'a mut Eviction,
    pub(crate) moved: &'a mut Moved,
    pub(crate) tagging: &'a mut Tagging,
    pub(crate) gone: &'a mut Gone,
    pub(crate) groups: &'a mut Groups,
    pub(crate) clock: &'a mut u64,
    pub(crate) work: &'a mut Work,
    pub(crate) unknown_discards: &'a mut u64,
}

/// Hides the prompts and the seed.
impl fmt::Debug for RadixIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RadixIndex")
            .field("config", &self.config)
            .field("num_indexed", &self.forest.num_indexed())
            .finish_non_exhaustive()
    }
}

impl RadixIndex {
    /// Makes an empty index.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a field of `config` is outside its limits.
    pub fn new(config: Config) -> Result<Self> {
        config.check()?;
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
            groups: Groups::new(&config.groups, config.seed),
            clock: 0,
            work: Work::default(),
            unknown_discards: 0,
            config,
        })
    }

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
            groups: &mut self.groups,
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

    /// The groups of the configuration, for a restore, which replaces the index's own as well.
    pub(crate) fn groups_config_mut(&mut self) -> &mut Vec<Group> {
        &mut self.config.groups
    }

    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
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

    /// The configuration of the index.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Number of blocks that [`evict`](Self::evict) can remove: blocks that are neither pinned nor above a pinned
    /// block, and dead blocks that are above pinned copy sources only. O(1).
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
        fn key(namespace: &Namespace) -> ([&str; 3], Option<&str>, &Salt) {
            let named = [namespace.model(), namespace.kv_dtype(), namespace.rope()];
            (named, namespace.adapter(), namespace.salt())
        }
        let all = self.forest.trees().iter();
        let mut all: Vec<_> = all.map(|(_, tree)| Arc::clone(&tree.namespace)).collect();
        all.sort_by(|a, b| key(a).cmp(&key(b)));
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

    fn check_ids(&self, ids: &[BlockId], call: &'static str) -> Result<()> {
        match ids
            .iter()
            .find(|id| u64::from(id.0) >= self.config.num_blocks)
        {
            Some(id) => Err(invalid!(
                call,
                "ids holds {id}; it must be in [0, {}) (num_blocks)",
                self.config.num_blocks
            )),
            None => Ok(()),
        }
    }

    fn check_start(&self, start: usize, len: usize, call: &'static str) -> Result<()> {
        if start > len || !start.is_multiple_of(self.block_size()) {
            return Err(invalid!(
                call,
                "start is {start}; it must be a multiple of the block size {} and at most the {len} tokens of \
                 the sequence",
                self.block_size()
            ));
        }
        Ok(())
    }
}
