//! The class `MovedRun`.

use kvtrie_core::MovedRun;
use pyo3::prelude::*;

use crate::output::truth;

/// A moved run of a plan, and how the tokens before it differ from those that it was computed
/// after.
///
/// A token of the prompt before the run is *kept* if its KV comes from the run's own source, from
/// before the run: in place, or by a copy of the same plan. Kept tokens are counted in the prompt.
///
/// Example:
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=64, block_size=4)
///     >>> seq = kvtrie.TokenSequence(range(40), space)
///     >>> done = index.insert(seq, range(10), num_computed=40, source=kvtrie.COMPUTED,
///     ...     session="chat")
///     >>> prompt = kvtrie.TokenSequence([*range(8), *range(16, 40), 99], space)
///     >>> with index.plan(prompt, kvtrie.ReusePolicy(), session="chat") as plan:
///     ...     plan.moved_runs[0]  # doctest: +NORMALIZE_WHITESPACE
///     MovedRun(8, 32, old_start=16, cuts=1, lost_context=0.5, new_context=0.0,
///         same_conversation=True)
#[pyclass(frozen, eq, module = "kvtrie", name = "MovedRun")]
#[derive(PartialEq)]
pub(crate) struct PyMovedRun {
    core: MovedRun,
}

impl From<MovedRun> for PyMovedRun {
    fn from(core: MovedRun) -> Self {
        Self { core }
    }
}

#[pymethods]
impl PyMovedRun {
    /// First token of the prompt.
    #[getter]
    fn start(&self) -> usize {
        self.core.start
    }

    /// One past the last token.
    #[getter]
    fn end(&self) -> usize {
        self.core.end
    }

    /// Position of the source's first token.
    #[getter]
    fn old_start(&self) -> usize {
        self.core.old_start
    }

    /// New position minus old position.
    #[getter]
    fn delta(&self) -> i64 {
        self.core.delta()
    }

    /// Number of positions by which the run moves.
    #[getter]
    fn distance(&self) -> usize {
        self.core.distance()
    }

    /// Number of places before the run at which kept tokens stop being consecutive, in the prompt
    /// or in the source; a change of order is one too. 65535 if this was not worked out.
    #[getter]
    fn cuts(&self) -> u16 {
        self.core.cuts
    }

    /// Share of the source's tokens before the run that are not kept, 0 to 1. 1 if this was not
    /// worked out.
    #[getter]
    fn lost_context(&self) -> f64 {
        self.core.lost_context
    }

    /// Share of the prompt's tokens before the run that are not kept, 0 to 1. 1 if this was not
    /// worked out.
    #[getter]
    fn new_context(&self) -> f64 {
        self.core.new_context
    }

    /// Whether all its blocks are what `scope="conversation"` would have allowed, whatever the
    /// policy's scope is. False if this was not worked out.
    #[getter]
    fn same_conversation(&self) -> bool {
        self.core.same_conversation
    }

    fn __repr__(&self) -> String {
        let run = &self.core;
        format!(
            "MovedRun({}, {}, old_start={}, cuts={}, lost_context={:?}, new_context={:?}, same_conversation={})",
            run.start,
            run.end,
            run.old_start,
            run.cuts,
            run.lost_context,
            run.new_context,
            truth(run.same_conversation)
        )
    }
}
