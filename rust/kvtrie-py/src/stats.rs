//! `IndexStats`.

use kvtrie_core::Stats;
use pyo3::prelude::*;

/// Counters of an index at one moment, all of them int. `RadixIndex.stats` makes them.
///
/// A block id that an index knows is indexed or condemned; all others are the caller's, free or held.
///
/// Example:
///     >>> import kvtrie
///     >>> index = kvtrie.RadixIndex(num_blocks=8)
///     >>> index.stats().indexed
///     0
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "IndexStats")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyIndexStats {
    /// Blocks that back tokens.
    #[pyo3(get)]
    indexed: u64,
    /// Blocks that are neither indexed nor the caller's: they left the index while a plan pinned them, and
    /// are pinned still or wait for `take_freed()`.
    #[pyo3(get)]
    condemned: u64,
    /// Condemned blocks that no plan pins any more: they wait for `take_freed()`.
    #[pyo3(get)]
    waiting: u64,
    /// Blocks that `quarantine` took out of use; those that are still pinned are counted as condemned.
    #[pyo3(get)]
    quarantined: u64,
    /// Blocks with at least one pin, indexed or condemned.
    #[pyo3(get)]
    pinned: u64,
    /// Indexed blocks that could be evicted: neither pinned nor above a pinned one, and dead ones that
    /// are above sources of copies alone.
    #[pyo3(get)]
    evictable: u64,
    /// Indexed blocks that `mark_dead` marked and nobody has used since.
    #[pyo3(get)]
    dead: u64,
    /// Indexed blocks that are not exact.
    #[pyo3(get)]
    approximate: u64,
    /// Places on paths whose block has left while something below is present.
    #[pyo3(get)]
    holes: u64,
    /// Nodes of the radix trees.
    #[pyo3(get)]
    nodes: u64,
    /// Windows of eight tokens that are kept to find moved runs by.
    #[pyo3(get)]
    windows: u64,
    /// Namespaces that hold something.
    #[pyo3(get)]
    namespaces: u64,
    /// Plans that were not released.
    #[pyo3(get)]
    live_plans: u64,
    /// Ticks of the logical clock.
    #[pyo3(get)]
    clock: u64,
    /// Ids given to `discard` or `quarantine` that the index did not hold.
    #[pyo3(get)]
    unknown_discards: u64,
    /// Nodes that lookups, plans and inserts have looked at since the index was made.
    #[pyo3(get)]
    nodes_visited: u64,
    /// Bytes of token ids that they have compared.
    #[pyo3(get)]
    bytes_compared: u64,
    /// Steps of plans' searches for moved runs, since the index was made or restored: places tried,
    /// children and cache lines of tokens compared.
    #[pyo3(get)]
    search_looks: u64,
    /// Memory that the index holds, in bytes.
    #[pyo3(get)]
    bytes: u64,
}

impl PyIndexStats {
    pub(crate) fn indexed(&self) -> u64 {
        self.indexed
    }
}

impl From<Stats> for PyIndexStats {
    fn from(stats: Stats) -> Self {
        Self {
            indexed: stats.indexed,
            condemned: stats.condemned,
            waiting: stats.waiting,
            quarantined: stats.quarantined,
            pinned: stats.pinned,
            evictable: stats.evictable,
            dead: stats.dead,
            approximate: stats.approximate,
            holes: stats.holes,
            nodes: stats.nodes,
            windows: stats.windows,
            namespaces: stats.namespaces,
            live_plans: stats.live_plans,
            clock: stats.clock,
            unknown_discards: stats.unknown_discards,
            nodes_visited: stats.nodes_visited,
            bytes_compared: stats.bytes_compared,
            search_looks: stats.search_looks,
            bytes: stats.bytes,
        }
    }
}

#[pymethods]
impl PyIndexStats {
    fn __repr__(&self) -> String {
        format!(
            "IndexStats(indexed={}, condemned={}, waiting={}, quarantined={}, pinned={}, evictable={}, dead={}, approximate={}, \
             holes={}, nodes={}, windows={}, namespaces={}, live_plans={}, clock={}, unknown_discards={}, \
             nodes_visited={}, bytes_compared={}, search_looks={}, \
             bytes={})",
            self.indexed,
            self.condemned,
            self.waiting,
            self.quarantined,
            self.pinned,
            self.evictable,
            self.dead,
            self.approximate,
            self.holes,
            self.nodes,
            self.windows,
            self.namespaces,
            self.live_plans,
            self.clock,
            self.unknown_discards,
            self.nodes_visited,
            self.bytes_compared,
            self.search_looks,
            self.bytes
        )
    }
}
