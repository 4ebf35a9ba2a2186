//! The class `IndexStats`.

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
    /// Counters of an index at one moment, all of them int. `RadixIndex.stats` returns them.
    ///
    /// A block id that an index knows is indexed, condemned or quarantined; all others belong to
    /// the caller, free or held.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8)
    ///     >>> index.stats().indexed
    ///     0
    ;
    /// Blocks that back tokens.
    indexed,
    /// Blocks that left the index while a plan pinned them, until `take_freed()` returns them.
    condemned,
    /// Condemned blocks without a pin, which wait for `take_freed()`.
    waiting,
    /// Quarantined blocks. Those still pinned are counted as condemned.
    quarantined,
    /// Pinned blocks, indexed or condemned.
    pinned,
    /// Indexed blocks that `evict` can remove now.
    evictable,
    /// Indexed blocks that `mark_dead` marked and that no call has used since.
    dead,
    /// Indexed blocks whose KV is approximate.
    approximate,
    /// Evicted blocks with cached blocks below.
    holes,
    /// Nodes of the radix trees, one per edge.
    nodes,
    /// Windows of eight tokens, through which moved runs are found.
    windows,
    /// Namespaces that hold a block.
    namespaces,
    /// Plans and pins that are not released.
    live_plans,
    /// Time of the logical clock.
    clock,
    /// Ids given to `discard` or `quarantine` that were not indexed.
    unknown_discards,
    /// Nodes that lookups, plans and inserts have visited since the index was made.
    nodes_visited,
    /// Bytes of token ids that those calls have compared.
    bytes_compared,
    /// Looks of the searches for moved runs since the index was made or restored: places tried,
    /// children compared, and cache lines of tokens compared.
    search_looks,
    /// Plans since the index was made or restored for which no moved run was looked for, because
    /// they had no session and no cached path begins as their prompt does.
    plans_without_scope,
    /// Bytes of memory that the index holds.
    bytes,
}

impl PyIndexStats {
    pub(crate) fn indexed(&self) -> u64 {
        self.indexed
    }
}
