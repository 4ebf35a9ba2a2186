//! The class `ReusePlan`, which must be released.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use kvtrie_core::{Class, GroupKind, GroupPart, RadixIndex, ReusePlan};
use numpy::PyArray1;
use pyo3::PyTypeInfo;
use pyo3::exceptions::{PyResourceWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::{arg, call, int, optional_int, optional_text, text};
use crate::buffers::{Arg, block_ids};
use crate::detach::{Cost, Enter, inherited};
use crate::errors::released;
use crate::groups;
use crate::hints::{Counts, Flags, Ids, Items, MovedRuns, Records, WindowPart};
use crate::item::PyItem;
use crate::moved_run::PyMovedRun;
use crate::output::{self, ids, listed, truth};
use crate::shared::{INDEX, OFFERS_PER_VISIT, SharedIndex};

/// How to build the KV of one prompt. The blocks that it uses are pinned until it is released.
///
/// Release every plan, or use it in a `with` statement. A plan that is collected unreleased
/// releases itself and emits a `ResourceWarning`. A released plan names no block, because its
/// blocks may belong to others by then: `blocks`, `source_blocks`, `moves` and every call that
/// needs its pins raise `StaleHandleError`. Counts, `gaps`, `segments` and `validate` still work.
///
/// Array attributes are new arrays at every access: read them once and keep them.
///
/// Example:
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> with kvtrie.RadixIndex(num_blocks=8).plan(seq) as plan:
///     ...     plan
///     <ReusePlan of 3 tokens: blocks=[], num_exact=0, num_compute=3, pinned=True, released=False>
#[pyclass(frozen, weakref, module = "kvtrie", name = "ReusePlan")]
pub(crate) struct PyReusePlan {
    made: Made,
    /// What `recompute` made of it.
    repaired: OnceLock<Made>,
    index: Arc<SharedIndex>,
    num_tokens: usize,
    released: AtomicBool,
    /// Whether a caller has the plan, and is warned if it is collected unreleased.
    is_callers: bool,
}

struct Made {
    core: Arc<ReusePlan>,
    /// Number of tokens of each class: exact, approximate, compute.
    counts: [usize; 3],
}

impl Made {
    fn new(core: Arc<ReusePlan>) -> Self {
        let mut counts = [0; 3];
        for segment in core.segments() {
            counts[usize::from(output::number(segment.class))] += segment.end - segment.start;
        }
        Self { core, counts }
    }
}

impl PyReusePlan {
    pub(crate) fn new(core: ReusePlan, index: Arc<SharedIndex>) -> Self {
        Self::around(Arc::new(core), index, true)
    }

    /// A plan that only a ledger has, without a warning.
    pub(crate) fn internal(core: Arc<ReusePlan>, index: Arc<SharedIndex>) -> Self {
        Self::around(core, index, false)
    }

    fn around(core: Arc<ReusePlan>, index: Arc<SharedIndex>, is_callers: bool) -> Self {
        let made = Made::new(core);
        Self {
            num_tokens: made.counts.iter().sum(),
            made,
            repaired: OnceLock::new(),
            index,
            released: AtomicBool::new(false),
            is_callers,
        }
    }

    pub(crate) fn is_of(&self, core: &Arc<ReusePlan>) -> bool {
        Arc::ptr_eq(&self.now().core, core)
    }

    fn now(&self) -> &Made {
        self.repaired.get().unwrap_or(&self.made)
    }

    pub(crate) fn look(&self, index: &RadixIndex) {
        if index.is_released(self.core()) {
            self.was_released();
        }
    }

    pub(crate) fn core(&self) -> &ReusePlan {
        &self.now().core
    }

    pub(crate) fn share(&self) -> Arc<ReusePlan> {
        Arc::clone(&self.now().core)
    }

    pub(crate) fn release_in(&self, index: &mut RadixIndex) -> kvtrie_core::Result<()> {
        index.release(self.core())?;
        self.was_released();
        Ok(())
    }

    pub(crate) fn was_released(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_released(&self) -> bool {
        self.released.load(Ordering::Relaxed)
    }

    /// The plan; an error if it was released or if this is a forked child.
    fn live(&self, call: &str) -> PyResult<&ReusePlan> {
        if self.index.core.is_inherited() {
            return Err(inherited("the plan"));
        }
        if self.is_released() {
            return Err(released(call, "plan"));
        }
        Ok(self.core())
    }

    /// What the plan continues with in a group of a name and a kind.
    fn part(
        &self,
        py: Python<'_>,
        name: String,
        is_state: bool,
        call: &str,
    ) -> PyResult<(usize, &GroupPart)> {
        let plan = self.live(call)?;
        let quoted = output::quoted(py, &name)?;
        let number = groups::number(py, &self.index.groups, name, call)?;
        let group = &self.index.groups[number - 1];
        if (group.kind == GroupKind::State) != is_state {
            let (has, other) = if is_state {
                ("a window", "ReusePlan.group")
            } else {
                ("states", "ReusePlan.state")
            };
            return Err(PyValueError::new_err(format!(
                "{call}: group {quoted} is one with {has}; call {other}"
            )));
        }
        let part = plan.group(number).ok_or_else(|| {
            PyValueError::new_err(format!("{call}: the plan has no group {quoted}"))
        })?;
        Ok((number, part))
    }

    fn cost(&self) -> Cost {
        Cost::blocks(self.core().num_entries() / OFFERS_PER_VISIT)
    }
}

#[pymethods]
impl PyReusePlan {
    /// Ids used in place for the first whole blocks of the prompt (int32). They must not be written
    /// to.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> PyResult<Ids<'py>> {
        Ok(ids(py, self.live("ReusePlan.blocks")?.blocks()))
    }

    /// Number of blocks that the caller must provide for the rest of the prompt.
    #[getter]
    fn num_new_blocks(&self) -> usize {
        self.core().num_new_blocks()
    }

    /// Number of tokens that are reused exactly, in place or by a copy.
    #[getter]
    fn num_exact(&self) -> usize {
        self.now().counts[0]
    }

    /// Number of tokens that are reused approximately.
    #[getter]
    fn num_approximate(&self) -> usize {
        self.now().counts[1]
    }

    /// Number of tokens that must be computed.
    #[getter]
    fn num_compute(&self) -> usize {
        self.now().counts[2]
    }

    /// Ranges (start, end) to compute: int64 of shape (n, 2), ascending.
    #[getter]
    fn gaps<'py>(&self, py: Python<'py>) -> PyResult<Counts<'py>> {
        let gaps: Vec<(usize, usize)> = self
            .core()
            .segments()
            .iter()
            .filter(|segment| segment.class == Class::Compute)
            .map(|segment| (segment.start, segment.end))
            .collect();
        output::ranges(py, &gaps)
    }

    /// Where each token of the prompt comes from: a structured array of ranges that covers the
    /// prompt once, ascending.
    ///
    /// Fields, aligned as C aligns them: `start`, `end`, `old_start` (where the source's first token
    /// is in its own prompt) and `delta` (`start - old_start`), int64 in tokens; `class`, uint8: 0
    /// exact, 1 approximate, 2 compute; `hops`, uint16, of the KV in the prompt; `kinds`, uint64,
    /// the source's tags: bit i is `RadixIndex.kinds[i]`; `position_delta`, int64: new position
    /// minus old position, which is `delta` unless items say how many positions they take.
    #[getter]
    fn segments<'py>(&self, py: Python<'py>) -> PyResult<Records<'py>> {
        output::segments(py, self.core().segments())
    }

    /// The items of the prompt, in order of position.
    #[getter]
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Items<'py>> {
        let items = self.core().items().iter().cloned();
        Ok(PyTuple::new(py, items.map(|core| PyItem { core }))?.into())
    }

    /// The moved runs, ascending: one per piece of the cover that is moved, without the tokens that
    /// the policy recomputes at its ends.
    #[getter]
    fn moved_runs<'py>(&self, py: Python<'py>) -> PyResult<MovedRuns<'py>> {
        let core = self.core();
        let runs = core.moved_runs().iter();
        let runs: Vec<PyMovedRun> = runs.copied().map(PyMovedRun::from).collect();
        Ok(PyTuple::new(py, runs)?.into())
    }

    /// Ids that are copied from (int32), ascending and each once. A block in place may be among
    /// them.
    #[getter]
    fn source_blocks<'py>(&self, py: Python<'py>) -> PyResult<Ids<'py>> {
        Ok(ids(
            py,
            &self.live("ReusePlan.source_blocks")?.source_blocks(),
        ))
    }

    /// Number of places that the search for moved runs did not try, because a window has more than
    /// the index's `max_candidates` or because the search's budget was used up. While it is 0, the
    /// plan does not depend on the index's seed.
    #[getter]
    fn candidates_dropped(&self) -> u64 {
        self.core().candidates_dropped()
    }

    /// The `moved_end` that the plan was made with: moved runs supply no token at or after it. None
    /// means that none was given, and they may supply any token.
    #[getter]
    fn moved_end(&self) -> Option<usize> {
        self.core().moved_end()
    }

    /// Return what the plan continues with in a group with a window.
    ///
    /// Args:
    ///     name: The name of the group.
    ///
    /// Returns:
    ///     The position of the first block's first token, and the ids (int32) of the blocks from there
    ///     to the end of what is in place. They must not be written to.
    ///
    /// Raises:
    ///     StaleHandleError: The plan was released.
    ///     ValueError: The index has no group of that name, or it is one with a state.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2,
    ///     ...     groups=[kvtrie.Group.window("swa", window=3, num_blocks=4, block_size=2)])
    ///     >>> seq = kvtrie.TokenSequence(range(5), kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED,
    ///     ...     groups={"swa": [(2, 3)]})
    ///     >>> with index.plan(seq) as plan:
    ///     ...     plan.blocks, plan.group("swa")
    ///     (array([6, 0], dtype=int32), (2, array([3], dtype=int32)))
    #[pyo3(signature = (name: "str"))]
    fn group<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = text::<call::ReusePlanGroup, arg::Name>)] name: String,
    ) -> PyResult<WindowPart<'py>> {
        let (_, part) = self.part(py, name, false, "ReusePlan.group")?;
        let blocks = ids(py, &part.blocks);
        Ok((part.start, blocks).into_pyobject(py)?.into())
    }

    /// Return the slot of the state from which the plan continues in a group with states.
    ///
    /// An engine copies the state before it uses it, because the index may give the slot to others.
    ///
    /// Args:
    ///     name: The name of the group.
    ///
    /// Returns:
    ///     The slot; None if nothing is in place.
    ///
    /// Raises:
    ///     StaleHandleError: The plan was released.
    ///     ValueError: The index has no group of that name, or it is one with a window.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2,
    ///     ...     groups=[kvtrie.Group.state("gdn", num_slots=4)])
    ///     >>> seq = kvtrie.TokenSequence(range(5), kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED,
    ///     ...     groups={"gdn": [(2, 3)]})
    ///     >>> with index.plan(seq) as plan:
    ///     ...     plan.num_exact, plan.state("gdn")
    ///     (2, 3)
    #[pyo3(signature = (name: "str"))]
    fn state(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text::<call::ReusePlanState, arg::Name>)] name: String,
    ) -> PyResult<Option<u32>> {
        let (_, part) = self.part(py, name, true, "ReusePlan.state")?;
        Ok(part.blocks.first().map(|id| id.0))
    }

    /// Return the tokens of which a group with a window needs KV that the plan neither has nor copies,
    /// next to moved runs (rule G9): what is left after the copies of `moves(table, group=name)`.
    ///
    /// An engine computes them again for the layers of this group, from the KV that group 0 has. The
    /// result is approximate, and so is what is computed after it.
    ///
    /// Args:
    ///     name: The name of the group.
    ///
    /// Returns:
    ///     Ranges (start, end): int64 of shape (n, 2), ascending. Empty for an exact plan,
    ///     except one that `recompute` made exact.
    ///
    /// Raises:
    ///     StaleHandleError: The plan was released.
    ///     ValueError: The index has no group of that name, or it is one with a state.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=4, min_run=8,
    ///     ...     groups=[kvtrie.Group.window("swa", window=5, num_blocks=4, block_size=4)])
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> seq = kvtrie.TokenSequence(range(16), space)
    ///     >>> done = index.insert(seq, range(4), num_computed=16, source=kvtrie.COMPUTED)
    ///     >>> prompt = kvtrie.TokenSequence([*range(4), *range(8, 16), 99], space)
    ///     >>> with index.plan(prompt, kvtrie.ReusePolicy(scope="namespace")) as plan:
    ///     ...     plan.segments[["start", "end", "class"]].tolist(), plan.rebuild("swa").tolist()
    ///     ([(0, 4, 0), (4, 12, 1), (12, 13, 2)], [[8, 12]])
    #[pyo3(signature = (name: "str"))]
    fn rebuild<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = text::<call::ReusePlanRebuild, arg::Name>)] name: String,
    ) -> PyResult<Counts<'py>> {
        const CALL: &str = "ReusePlan.rebuild";
        let (group, _) = self.part(py, name, false, CALL)?;
        let core = self.live(CALL)?;
        let ranges = py.enter(self.cost(), |_| Ok(core.rebuild(group)))?;
        output::ranges(py, &ranges)
    }

    /// Unpin the ids of groups that a request no longer reads: blocks before its windows, and states
    /// that it has passed. The blocks of group 0 stay pinned.
    ///
    /// Args:
    ///     position: All tokens before it are computed.
    ///
    /// Raises:
    ///     StaleHandleError: The plan was released.
    ///     ValueError: `position` is negative.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2,
    ///     ...     groups=[kvtrie.Group.state("gdn", num_slots=4)])
    ///     >>> seq = kvtrie.TokenSequence(range(5), kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED,
    ///     ...     groups={"gdn": [(2, 3)]})
    ///     >>> with index.plan(seq) as plan:
    ///     ...     plan.advance(3)
    ///     ...     index.group_stats("gdn").pinned
    ///     0
    #[pyo3(signature = (position: "SupportsIndex"))]
    fn advance(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::ReusePlanAdvance, arg::Position>)] position: i128,
    ) -> PyResult<()> {
        let position = Arg::new("ReusePlan.advance", "position").count(position)?;
        let cost = if self.index.groups.is_empty() {
            Cost::Short
        } else {
            Cost::Long
        };
        py.enter(cost, |keys| {
            let mut index = keys.lock(&self.index.core, INDEX)?;
            Ok(index.advance(self.core(), position)?)
        })
    }

    /// Whether the plan was released.
    #[getter]
    fn released(&self) -> bool {
        self.is_released()
    }

    /// Whether the plan was made with `pin=True`.
    #[getter]
    fn pinned(&self) -> bool {
        self.core().is_pinned()
    }

    /// Return the copies that fill a block table, as plain data for the owner of the memory.
    ///
    /// A slot is block id * block size + offset. Each copy is inside one source and one destination
    /// block. The whole table is checked, at about 10 ns per block.
    ///
    /// Args:
    ///     table: Block ids of the prompt from position 0: `blocks`, then new ones, each id once. Of a
    ///         group, blocks of its pool; entries are read and checked where tokens are copied to, and
    ///         elsewhere may be any ids of it.
    ///     start: Only copies to positions from here on, in tokens.
    ///     end: Only copies to positions before this one; None means the end of the prompt.
    ///     group: The name of a group with a window. Its copies are what moved runs bring along of the
    ///         windows before each gap and before the prompt's end, as far as the group has it at the
    ///         sources; `rebuild` lists the rest. None means group 0.
    ///
    /// Returns:
    ///     A structured array with the int64 fields `source_slot`, `dest_slot`, `num_tokens` and
    ///     `delta` (the number of positions by which K is rotated).
    ///
    /// Raises:
    ///     StaleHandleError: The plan was released.
    ///     ValueError: The range is reversed or beyond the prompt, or the table is too short, does not
    ///         start with `blocks`, holds an id outside the pool or an id twice, or has a source block
    ///         where the range is filled; or there is no group of that name, or it is one with states.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=4)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [5], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> with index.plan(kvtrie.TokenSequence([1, 2, 9], space)) as plan:
    ///     ...     plan.moves([3]).tolist()
    ///     [(20, 12, 2, 0)]
    #[pyo3(signature = (
        table: "_Integers", start: "SupportsIndex" = 0,
        end: "SupportsIndex | None" = None, *, group: "str | None" = None
    ) -> "npt.NDArray[np.void]")]
    fn moves<'py>(
        &self,
        py: Python<'py>,
        table: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = int::<call::ReusePlanMoves, arg::Start>)] start: i128,
        #[pyo3(from_py_with = optional_int::<call::ReusePlanMoves, arg::End>)] end: Option<i128>,
        #[pyo3(from_py_with = optional_text::<call::ReusePlanMoves, arg::Group>)] group: Option<
            String,
        >,
    ) -> PyResult<Records<'py>> {
        const CALL: &str = "ReusePlan.moves";
        let start = Arg::new(CALL, "start").count(start)?;
        let end = match end {
            Some(end) => Arg::new(CALL, "end").count(end)?,
            None => self.num_tokens,
        };
        if let Some(name) = group {
            let (group, _) = self.part(py, name, false, CALL)?;
            let num_blocks = self.index.groups[group - 1].num_blocks;
            let table = block_ids(table, num_blocks, Arg::new(CALL, "table"))?;
            let plan = self.live(CALL)?;
            let cost = Cost::blocks((plan.num_entries() + table.len()) / OFFERS_PER_VISIT);
            let moves = py.enter(cost, |_| {
                Ok(plan.moves_of_group(group, num_blocks, &table, (start, end))?)
            })?;
            return output::moves(py, &moves);
        }
        let table = block_ids(table, self.index.num_blocks, Arg::new(CALL, "table"))?;
        let plan = self.live(CALL)?;
        let entries = plan.num_entries() + table.len();
        let cost = Cost::blocks(entries / OFFERS_PER_VISIT);
        let moves = py.enter(cost, |_| Ok(plan.moves(&table, start, end)?))?;
        output::moves(py, &moves)
    }

    /// Compute tokens that would be copied approximately (rule P20).
    ///
    /// `segments`, `gaps`, `moves` and the counts change. Sources stay pinned. Call it at most once,
    /// before anything is inserted with the plan and before a ledger has it. Copies made before do no
    /// harm, because the computed KV is written over them. If the policy leaves the choice to the
    /// engine (`repair` other than "fronts", and a `recompute_share`), it must be called before an
    /// insert with the plan, maybe without ranges.
    ///
    /// Args:
    ///     ranges: Positions of the prompt as pairs (start, end) or an integer array of shape (n, 2),
    ///         ascending and disjoint, all in moved runs. `kvtrie.repair` chooses some.
    ///
    /// Raises:
    ///     StaleHandleError: The plan was released.
    ///     TypeError: `ranges` are not integers.
    ///     ValueError: A range is reversed, overlaps another, ends beyond the prompt or has a token that
    ///         is in place, exact or to compute; or it is too late. Nothing changes then.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=16)
    ///     >>> seq = kvtrie.TokenSequence(range(100, 132), space)
    ///     >>> done = index.insert(seq, [5, 6], num_computed=32, source=kvtrie.COMPUTED,
    ///     ...     session="chat")
    ///     >>> prompt = kvtrie.TokenSequence([7, *range(100, 132), 8], space)
    ///     >>> with index.plan(prompt, kvtrie.ReusePolicy(), session="chat") as plan:
    ///     ...     plan.recompute([(1, 5), (20, 21)])
    ///     ...     plan.gaps.tolist()
    ///     [[0, 5], [20, 21], [33, 34]]
    #[pyo3(signature = (ranges: "_Ranges"))]
    fn recompute(&self, py: Python<'_>, ranges: &Bound<'_, PyAny>) -> PyResult<()> {
        const CALL: &str = "ReusePlan.recompute";
        let ranges = crate::ranges::ranges(ranges, Arg::new(CALL, "ranges"))?;
        self.live(CALL)?;
        let done = py.enter(self.cost(), |keys| {
            let mut index = keys.lock(&self.index.core, INDEX)?;
            if Arc::strong_count(&self.now().core) > 1 {
                return Ok(false);
            }
            let made = Made::new(Arc::new(index.recompute(self.core(), &ranges)?));
            // The core refuses a second call.
            Ok(self.repaired.set(made).is_ok())
        })?;
        if done {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "{CALL}: a ledger has the plan; its tokens to compute must be chosen before"
        )))
    }

    /// Return one bool per segment: whether its blocks still hold what the plan says.
    ///
    /// It is True for computed and pinned segments. Without pins, it is True until one of the
    /// blocks leaves the index. `release_sources` unpins the copied segments, `release` all.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [5], num_computed=2, source=kvtrie.COMPUTED)
    ///     >>> with index.plan(seq, pin=False) as plan:
    ///     ...     freed = index.evict(1)
    ///     ...     plan.validate()
    ///     array([False,  True])
    fn validate<'py>(&self, py: Python<'py>) -> PyResult<Flags<'py>> {
        let answers = py.enter(self.cost(), |keys| {
            Ok(keys.lock(&self.index.core, INDEX)?.validate(self.core())?)
        })?;
        Ok(PyArray1::from_vec(py, answers).into())
    }

    /// Unpin the blocks of group 0 that are copied from. A second call does nothing.
    ///
    /// Call it once every later write to the pool is ordered after the copies: on one CUDA stream,
    /// right after their launch.
    ///
    /// Raises:
    ///     StaleHandleError: The plan was released.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=4)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [5], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> with index.plan(kvtrie.TokenSequence([1, 2, 9], space)) as plan:
    ///     ...     plan.release_sources()
    ///     ...     index.num_evictable
    ///     1
    fn release_sources(&self, py: Python<'_>) -> PyResult<()> {
        py.enter_briefly(|keys, effort| {
            let mut index = keys.lock(&self.index.core, INDEX)?;
            if index.release_steps(self.core()) > effort.nodes {
                return Ok(None);
            }
            Ok(Some(index.release_sources(self.core())?))
        })
    }

    /// Release the plan: it pins nothing afterwards.
    ///
    /// Blocks that left the index while only this plan pinned them wait for
    /// `RadixIndex.take_freed`.
    ///
    /// Raises:
    ///     StaleHandleError: The plan was released already.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8)
    ///     >>> plan = index.plan(kvtrie.TokenSequence([1, 2], space))
    ///     >>> plan.release()
    ///     >>> plan.release()
    ///     Traceback (most recent call last):
    ///     kvtrie.StaleHandleError: ReusePlan.release: the plan was released already
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        py.enter_briefly(|keys, effort| {
            let mut index = keys.lock(&self.index.core, INDEX)?;
            if index.release_steps(self.core()) > effort.nodes {
                return Ok(None);
            }
            Ok(Some(self.release_in(&mut index)?))
        })
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.live("ReusePlan.__enter__")?;
        Ok(slf)
    }

    #[pyo3(signature = (
        exception_type: "type[BaseException] | None", exception: "BaseException | None",
        traceback: "TracebackType | None", /
    ) -> "None")]
    fn __exit__(
        &self,
        py: Python<'_>,
        exception_type: &Bound<'_, PyAny>,
        exception: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (exception_type, exception, traceback);
        self.release_once(py).map(|_| ())
    }

    fn __repr__(&self) -> String {
        let blocks = match self.live("") {
            Ok(plan) => format!("blocks={}, ", listed(plan.blocks())),
            Err(_) => String::new(),
        };
        format!(
            "<ReusePlan of {} tokens: {blocks}num_exact={}, num_compute={}, pinned={}, released={}>",
            self.num_tokens,
            self.num_exact(),
            self.num_compute(),
            truth(self.pinned()),
            truth(self.is_released())
        )
    }
}

impl PyReusePlan {
    /// Releases the plan if it is live; returns whether it was.
    pub(crate) fn release_once(&self, py: Python<'_>) -> PyResult<bool> {
        if self.is_released() {
            return Ok(false);
        }
        py.enter_briefly(|keys, effort| {
            let mut index = keys.lock(&self.index.core, INDEX)?;
            if index.release_steps(self.core()) > effort.nodes {
                return Ok(None);
            }
            // Another thread may have released it meanwhile.
            let live = !self.is_released();
            if live {
                self.release_in(&mut index)?;
            }
            Ok(Some(live))
        })
    }

    fn release_late(&self, py: Python<'_>) {
        // If the index is unusable, nothing is reported here: every other call on it raises.
        let Ok(true) = self.release_once(py) else {
            return;
        };
        if !self.is_callers {
            return;
        }
        warn_of_leak::<Self>(
            py,
            c"a ReusePlan was collected unreleased: release it, or use it in a with statement",
        );
    }
}

impl Drop for PyReusePlan {
    fn drop(&mut self) {
        // A plan that a forked child inherited is released by its parent.
        if self.is_released() || self.index.core.is_inherited() {
            return;
        }
        at_drop(|py| self.release_late(py));
    }
}

/// Releases a handle that was collected; does nothing at the interpreter's end.
pub(crate) fn at_drop(release: impl FnOnce(Python<'_>)) {
    Python::try_attach(|py| {
        // It may be collected while an exception propagates. That is put aside meanwhile.
        let pending = PyErr::take(py);
        if !is_finalizing(py) {
            release(py);
        }
        if let Some(pending) = pending {
            pending.restore(py);
        }
    });
}

/// Warns that a handle of a class was collected unreleased.
pub(crate) fn warn_of_leak<T: PyTypeInfo>(py: Python<'_>, message: &CStr) {
    let warning = py.get_type::<PyResourceWarning>();
    if let Err(error) = PyErr::warn(py, &warning, message, 1) {
        error.write_unraisable(py, Some(&py.get_type::<T>()));
    }
}

fn is_finalizing(py: Python<'_>) -> bool {
    let asked = || {
        py.import("sys")?
            .call_method0("is_finalizing")?
            .extract::<bool>()
    };
    // A module that is partly torn down does not work any more.
    asked().unwrap_or(true)
}
