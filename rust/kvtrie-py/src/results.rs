//! The results of calls on an index: `Match`, `InsertResult` and `Removed`.

use kvtrie_core::{BlockId, GroupInserted, IdRange, Inserted, Removed};
use pyo3::prelude::*;

use crate::buffers::Arg;
use crate::groups;
use crate::hints::{Counts, GroupResults, Ids};
use crate::output::{ids, listed};
use crate::sequence::PyTokenSequence;
use crate::slots;

/// The result of `RadixIndex.lookup`.
///
/// Example:
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> done = index.insert(seq, [6], num_computed=2, source=kvtrie.COMPUTED)
///     >>> index.lookup(seq)
///     Match(num_tokens=2, blocks=[6])
#[pyclass(frozen, module = "kvtrie", name = "Match")]
pub(crate) struct PyMatch {
    pub(crate) num_tokens: usize,
    pub(crate) ranges: Vec<IdRange>,
    pub(crate) start: usize,
    pub(crate) seq: Py<PyTokenSequence>,
}

impl PyMatch {
    fn ids(&self) -> Vec<BlockId> {
        let mut ids = Vec::with_capacity(slots::num_ids(&self.ranges));
        for range in &self.ranges {
            ids.extend(range.ids());
        }
        ids
    }
}

#[pymethods]
impl PyMatch {
    /// Tokens from position 0 that match exactly: a whole number of blocks.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Ids that back the tokens from `start` on (int32). Empty if the match ends before `start`.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.ids())
    }

    /// The first id, if those in `blocks` ascend without a gap: their slots are then next to each other
    /// in an engine's table. None if they do not, or if there are none.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3, 4], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [5, 6], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.lookup(seq).consecutive_from
    ///     5
    #[getter]
    fn consecutive_from(&self) -> Option<u32> {
        match self.ranges[..] {
            [only] => Some(only.first.0),
            _ => None,
        }
    }

    /// The engine's slots of the tokens in `blocks`, one a token (int64).
    ///
    /// Args:
    ///     table: The slots of each block id: a contiguous numpy array of int64, of shape
    ///         (num_blocks, block_size), or (num_blocks,) for blocks of one token.
    ///     out: Where they are written, a contiguous numpy array of int64 with as many elements; None
    ///         makes one.
    ///
    /// Returns:
    ///     `out`, or the new array.
    ///
    /// Raises:
    ///     TypeError: `table` or `out` is no such array.
    ///     ValueError: A block is not in the table, or `out` has another length. Nothing is written.
    ///
    /// Example:
    ///     >>> import numpy as np
    ///     >>> index = kvtrie.RadixIndex(num_blocks=3, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [1], num_computed=2, source=kvtrie.COMPUTED)
    ///     >>> index.lookup(seq).slots(np.array([[10, 11], [40, 41], [90, 91]]))
    ///     array([40, 41])
    #[pyo3(signature = (
        table: "npt.NDArray[np.int64]", out: "npt.NDArray[np.int64] | None" = None
    ) -> "npt.NDArray[np.int64]", text_signature = "($self, table, out=None)")]
    fn slots<'py>(
        &self,
        py: Python<'py>,
        table: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Counts<'py>> {
        const CALL: &str = "Match.slots";
        slots::of(
            py,
            &self.ranges,
            (table, Arg::new(CALL, "table")),
            (out, Arg::new(CALL, "out")),
        )
    }

    /// The sequence that was looked up. It is kept as long as the match.
    #[getter]
    fn sequence(&self, py: Python<'_>) -> Py<PyTokenSequence> {
        self.seq.clone_ref(py)
    }

    fn __repr__(&self) -> String {
        format!(
            "Match(num_tokens={}, blocks={})",
            self.num_tokens,
            listed(&self.ids())
        )
    }
}

/// What happened to the ids that were offered to `RadixIndex.insert`.
///
/// An offered id is in `blocks` and backs the sequence; or it is in `duplicates` or `surplus` and
/// still belongs to the caller; or it is in none of them, because the index held it already and
/// keeps it.
///
/// Example:
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> seq = kvtrie.TokenSequence(range(1, 6), space)
///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
///     >>> index.insert(seq, [3, 4, 5], num_computed=5, source=kvtrie.COMPUTED)
///     InsertResult(blocks=[6, 0], num_exact=4, duplicates=[3, 4], surplus=[5], freed=[])
#[pyclass(frozen, module = "kvtrie", name = "InsertResult")]
pub(crate) struct PyInsertResult {
    core: Inserted,
    /// The names of the groups that had offers, and what became of these.
    groups: (Vec<String>, Vec<GroupInserted>),
}

impl PyInsertResult {
    pub(crate) fn new(core: Inserted, groups: (Vec<String>, Vec<GroupInserted>)) -> Self {
        Self { core, groups }
    }
}

#[pymethods]
impl PyInsertResult {
    /// Ids that back the sequence from `start` on, in order of position (int32).
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.blocks)
    }

    /// Position in tokens up to which these blocks are exact.
    #[getter]
    fn num_exact(&self) -> usize {
        self.core.num_exact
    }

    /// Ids that were not taken because another block has their place, in call order (int32).
    #[getter]
    fn duplicates<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.duplicates)
    }

    /// Ids after the last whole block, in call order (int32). They were not taken.
    #[getter]
    fn surplus<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.surplus)
    }

    /// How many ids are in `duplicates` and `surplus`, without an array.
    #[getter]
    fn num_refused(&self) -> usize {
        self.core.duplicates.len() + self.core.surplus.len()
    }

    /// Approximate blocks that were replaced and are not pinned, in order of position (int32). They
    /// belong to the caller from then on.
    #[getter]
    fn freed<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.freed)
    }

    /// What happened to the ids of each group in `groups`, by its name.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<GroupResults<'py>> {
        let (names, results) = &self.groups;
        Ok(groups::results(py, names, results)?.into())
    }

    fn __repr__(&self) -> String {
        format!(
            "InsertResult(blocks={}, num_exact={}, duplicates={}, surplus={}, freed={})",
            listed(&self.core.blocks),
            self.core.num_exact,
            listed(&self.core.duplicates),
            listed(&self.core.surplus),
            listed(&self.core.freed)
        )
    }
}

/// What happened to the blocks inside the ranges given to `RadixIndex.remove_spans`, in order of
/// position.
///
/// Example:
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> seq = kvtrie.TokenSequence(range(1, 7), space)
///     >>> done = index.insert(seq, [6, 0, 3], num_computed=6, source=kvtrie.COMPUTED)
///     >>> with index.plan(kvtrie.TokenSequence([1, 2, 9], space)):
///     ...     index.remove_spans(seq, [(0, 4)])
///     Removed(freed=[0], kept=[], condemned=[6])
#[pyclass(frozen, module = "kvtrie", name = "Removed")]
pub(crate) struct PyRemoved {
    pub(crate) core: Removed,
}

#[pymethods]
impl PyRemoved {
    /// Ids that left the index and are free now (int32). They belong to the caller from then on.
    #[getter]
    fn freed<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.freed)
    }

    /// Ids that stay because a present block below them is not on the path of the sequence (int32).
    #[getter]
    fn kept<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.kept)
    }

    /// Ids that left the index while a plan pins them (int32). `take_freed` returns them later.
    #[getter]
    fn condemned<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.condemned)
    }

    fn __repr__(&self) -> String {
        format!(
            "Removed(freed={}, kept={}, condemned={})",
            listed(&self.core.freed),
            listed(&self.core.kept),
            listed(&self.core.condemned)
        )
    }
}
