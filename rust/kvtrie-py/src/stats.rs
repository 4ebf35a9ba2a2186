//! `IndexStats`.

use kvtrie_core::Stats;
use pyo3::prelude::*;

macro_rules! counters {
    ($(#[doc = $class:literal])*; $($(#[doc = $doc:literal])* $name:ident,)*) => {
        $(#[doc = $class])*
        #[pyclass(frozen, eq, hash, module = "kvtrie", name = "IndexStats")]
        #[derive(PartialEq, Eq, Hash)]
        pub(crate) struct PyIndexStats {
            $($(#[doc = $doc])* #[pyo3(get)] $name: u64,)*
        }

        impl From<Stats> for PyIndexStats {
            fn from(stats: Stats) -> Self {
                Self { $($name: stats.$name,)* }
            }
        }

        #[pymethods]
        impl PyIndexStats {
            fn __repr__(&self) -> String {
                let counters = [$(format!(concat!(stringify!($name), "={}"), self.$name)),*];
                format!("IndexStats({})", counters.join(", "))
            }
        }
    };
}

counters! {
    /// Counters of an index at one moment, all of them int. `RadixIndex.stats` makes them.
    ///
    /// A block id that an index knows is indexed or condemned; all others are the caller's, free or held.
    ///
    /// Example:
    ///     >>> import kvtrie
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8)
    ///     >>> index.stats().indexed
    ///     0
    ;
    /// Blocks that back tokens.
    indexed,
    /// Blocks that are neither indexed nor the caller's: they left the index while a plan pinned them, and
    /// are pinned still or wait for `take_freed()`.
    condemned,
    /// Condemned blocks that no plan pins any more: they wait for `take_freed()`.
    waiting,
    /// Blocks that `quarantine` took out of use; those that are still pinned are counted as condemned.
    quarantined,
    /// Blocks with at least one pin, indexed or condemned.
    pinned,
    /// Indexed blocks that could be evicted: neither pinned nor above a pinned one, and dead ones that
    /// are above sources of copies alone.
    evictable,
    /// Indexed blocks that `mark_dead` marked and nobody has used since.
    dead,
    /// Indexed blocks that are not exact.
    approximate,
    /// Places on paths whose block has left while something below is present.
    holes,
    /// Nodes of the radix trees.
    nodes,
    /// Windows of eight tokens that are kept to find moved runs by.
    windows,
    /// Namespaces that hold something.
    namespaces,
    /// Plans that were not released.
    live_plans,
    /// Ticks of the logical clock.
    clock,
    /// Ids given to `discard` or `quarantine` that the index did not hold.
    unknown_discards,
    /// Nodes that lookups, plans and inserts have looked at since the index was made.
    nodes_visited,
    /// Bytes of token ids that they have compared.
    bytes_compared,
    /// Steps of plans' searches for moved runs, since the index was made or restored: places tried,
    /// children and cache lines of tokens compared.
    search_looks,
    /// Memory that the index holds, in bytes.
    bytes,
}

impl PyIndexStats {
    pub(crate) fn indexed(&self) -> u64 {
        self.indexed
    }
}
