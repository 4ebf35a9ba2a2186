//! The compiled module `kvtrie._core`: the Python classes of `kvtrie-core`, `kvtrie-transfer` and `kvtrie-cluster`.
//!
//! Every class is frozen; state that changes is under a lock. Locks are taken in one order: ledger, sequence, block
//! allocator, index, the names that the index has warned of; an index of workers after the sequence; a slot table alone.
//! While a lock is held, no Python object is made: a garbage collection may drop a plan, and dropping a plan takes the
//! index's lock.
#![expect(
    clippy::doc_markdown,
    clippy::doc_link_with_quotes,
    reason = "the docs of what Python sees are its docstrings, which follow Python's conventions"
)]

mod allocator;
mod arguments;
mod buffers;
mod detach;
mod errors;
mod explain;
#[cfg(feature = "failpoints")]
mod failpoints;
mod fetch;
mod fields;
mod groups;
mod hints;
mod index;
mod indexer;
mod item;
mod ledger;
mod moved_run;
mod namespace;
mod output;
mod pin;
mod plan;
mod policy;
mod ranges;
mod results;
mod sequence;
mod shared;
mod slot_table;
mod slots;
mod snapshot;
mod source;
mod span;
mod stats;
mod tables;
mod transfer;
mod transfer_plan;

#[pyo3::pymodule]
mod _core {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::allocator::PyBlockAllocator;
    #[pymodule_export]
    use crate::errors::{
        BlockInUseError, EventError, KvTrieError, LayoutError, OutOfBlocksError, SnapshotError,
        StaleHandleError, TransferRefused, UnsupportedRopeError,
    };
    #[pymodule_export]
    use crate::explain::{PyExplanation, PyExplanationContext, PyNamespaceDifference, PyWouldSave};
    #[cfg(feature = "failpoints")]
    #[pymodule_export]
    use crate::failpoints::{_arm_failpoint, _disarm_failpoint};
    #[pymodule_export]
    use crate::groups::{PyGroup, PyGroupInsertResult, PyGroupStats};
    #[pymodule_export]
    use crate::index::PyRadixIndex;
    #[pymodule_export]
    use crate::indexer::{PyKvIndexer, PyOverlapScores, PyPromptDigests};
    #[pymodule_export]
    use crate::item::PyItem;
    #[pymodule_export]
    use crate::ledger::{PyRolledBack, PySequenceLedger};
    #[pymodule_export]
    use crate::moved_run::PyMovedRun;
    #[pymodule_export]
    use crate::namespace::{PyNamespace, PySharedSalt};
    #[pymodule_export]
    use crate::pin::PyPin;
    #[pymodule_export]
    use crate::plan::PyReusePlan;
    #[pymodule_export]
    use crate::policy::PyReusePolicy;
    #[pymodule_export]
    use crate::results::{PyInsertResult, PyMatch, PyRemoved};
    #[pymodule_export]
    use crate::sequence::PyTokenSequence;
    #[pymodule_export]
    use crate::slot_table::PySlotTable;
    #[pymodule_export]
    use crate::source::{PyComputedSource, PyImported};
    #[pymodule_export]
    use crate::span::PySpan;
    #[pymodule_export]
    use crate::stats::PyIndexStats;
    #[pymodule_export]
    use crate::transfer::{PyBlockRun, PyTransferLimits, PyTransferManifest};
    #[pymodule_export]
    use crate::transfer_plan::{PyTransferPlan, plan_transfer};

    /// The salt of namespaces whose KV is shared with everybody who uses it.
    #[pymodule_export]
    const SHARED: PySharedSalt = PySharedSalt;

    /// The source of KV that the engine computed.
    #[pymodule_export]
    const COMPUTED: PyComputedSource = PyComputedSource;

    /// The policy that reuses exact KV only. It is the default everywhere.
    #[pymodule_export]
    const EXACT_ONLY: PyReusePolicy = PyReusePolicy::EXACT_ONLY;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        crate::detach::count_forks(py)?;
        py.get_type::<EventError>().setattr("reason", "")?;
        py.get_type::<TransferRefused>().setattr("reason", "")
    }

    /// The version of the extension and of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
