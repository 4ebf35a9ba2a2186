//! The classes `SequenceLedger` and `RolledBack`.

use std::sync::{Arc, Mutex};

use kvtrie_core::{BlockId, Group, RadixIndex, ReusePlan, SessionId, TokenSequence};
use kvtrie_transfer::{
    Begin, LedgerSource, RequestId, RolledBack, SequenceLedger, Step, StepError,
};
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::arguments::{arg, call, flag, int, of, optional_of, session, text};
use crate::buffers::{Arg, block_ids, count_list, nothing, signed_integers};
use crate::detach::{Cost, Enter, Failure, Lock};
use crate::errors::{StaleHandleError, exception, released};
use crate::groups::{self, PyGroup};
use crate::hints::{Counts, Forgotten, GroupIds, Groups, Ids, Records};
use crate::index::{PyRadixIndex, given_groups};
use crate::output::{self, ids};
use crate::plan::PyReusePlan;
use crate::results::PyInsertResult;
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::shared::{INDEX, SharedIndex};
use crate::source::{PyComputedSource, SourceArg};
use crate::span::PySpan;

pub(crate) const LEDGER: &str = "the ledger";
const IDS: std::ops::RangeInclusive<i64> = kvtrie_transfer::PLACEHOLDER..=0xFFFF_FFFF;

/// A live request, as an entry of the ledger's dictionary.
#[pyclass(frozen, module = "kvtrie", name = "_LiveRequest")]
pub(crate) struct PyLiveRequest {
    pub(crate) id: RequestId,
    pub(crate) seq: Py<PyTokenSequence>,
    plan: Option<Py<PyReusePlan>>,
    /// The source as it was given; `None` means `COMPUTED`.
    source: Option<Py<PyAny>>,
    /// Plans that commits made for a request without one. Only attached threads lock this, so no
    /// fork happens meanwhile.
    pins: Mutex<Vec<Py<PyReusePlan>>>,
}

impl PyLiveRequest {
    fn keep_pins(
        &self,
        py: Python<'_>,
        pins: Vec<Arc<ReusePlan>>,
        index: &Arc<SharedIndex>,
    ) -> PyResult<()> {
        let mut before = self.pins(py);
        let mut kept = Vec::with_capacity(pins.len());
        for pin in pins {
            kept.push(
                match before.iter().position(|known| known.get().is_of(&pin)) {
                    Some(at) => before.swap_remove(at),
                    None => Py::new(py, PyReusePlan::internal(pin, Arc::clone(index)))?,
                },
            );
        }
        if let Ok(mut pins) = self.pins.lock() {
            std::mem::swap(&mut *pins, &mut kept);
        }
        // The remaining plans are dropped here, where no lock is held.
        drop((before, kept));
        Ok(())
    }

    fn pins(&self, py: Python<'_>) -> Vec<Py<PyReusePlan>> {
        self.pins.lock().map_or_else(
            |_| Vec::new(),
            |pins| pins.iter().map(|pin| pin.clone_ref(py)).collect(),
        )
    }

    /// All plans that hold blocks for the request.
    fn plans(&self, py: Python<'_>) -> Vec<Py<PyReusePlan>> {
        let own = self.plan.as_ref().map(|plan| plan.clone_ref(py));
        own.into_iter().chain(self.pins(py)).collect()
    }

    /// Refuses a request whose plan was released meanwhile: its blocks may belong to others by now.
    pub(crate) fn check_held(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        call: &str,
    ) -> PyResult<()> {
        if self.plans(py).iter().any(|plan| plan.get().is_released()) {
            return Err(of_request(request)(released(call, "plan")));
        }
        Ok(())
    }
}

/// Records which KV is *computed* for every live request of an engine, and owns their lengths.
///
/// The counters of an engine run ahead of each other. A ledger takes ids and counters as the engine
/// has them, and returns which tokens are final *and* computed. `commit` inserts exactly these into
/// an index.
///
/// For each request it keeps the sequence, the block table from position 0, the source of its KV,
/// and these positions, in tokens:
///
/// - the final ids: `len(seq)`. Only the ledger changes the sequence: `seq.extend` and
///   `seq.truncate` raise.
/// - computed, as the engine claims it. It may run ahead of the ids.
/// - issued: what the engine has scheduled, never after the end of the table.
/// - final *and* computed: at most either of these, and before unverified drafts. Only `rollback`
///   lowers it.
/// - committed: inserted into an index, in whole blocks.
///
/// Arguments of another type raise `TypeError`. Any hashable can name a request; if the request is
/// not live, calls raise `StaleHandleError`. A call that contradicts the known positions raises
/// `ValueError` with both numbers. Any thread may call a ledger; one lock guards it.
///
/// Committed blocks stay in the index until the request ends: its plan, or one that a commit makes,
/// pins them. A ledger that is dropped releases these plans.
///
/// Args:
///     block_size: Tokens per block, 1 to 4096.
///     groups: The groups of the index besides group 0, if it has any (rule L10).
///
/// Raises:
///     ValueError: `block_size` is not in 1..=4096, or no index could have these groups.
///
/// Example:
///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> ledger.begin("a", seq, [6, 0], num_computed=3)
///     >>> ledger.append("a", [4])
///     >>> len(seq), ledger.final_range("a")
///     (4, (0, 3))
#[pyclass(frozen, weakref, module = "kvtrie", name = "SequenceLedger")]
pub(crate) struct PySequenceLedger {
    pub(crate) core: Lock<SequenceLedger>,
    block_size: usize,
    groups: Vec<Group>,
    /// No lock is held while the dictionary is used, because hashing a key runs Python.
    requests: Py<PyDict>,
}

#[pymethods]
impl PySequenceLedger {
    #[new]
    #[pyo3(
        signature = (block_size: "SupportsIndex" = 16, *, groups: "Iterable[Group]" = nothing()),
        text_signature = "(block_size=16, *, groups=())"
    )]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::SequenceLedger, arg::BlockSize>)] block_size: i128,
        groups: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let block_size = Arg::new("SequenceLedger", "block_size").count(block_size)?;
        let groups = given_groups(groups, block_size, "SequenceLedger")?;
        let core = SequenceLedger::with_groups(block_size, groups.clone());
        let core = core.map_err(|error| exception(&error))?;
        Ok(Self {
            core: Lock::new(core),
            block_size,
            groups,
            requests: PyDict::new(py).unbind(),
        })
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    /// The groups of layers besides group 0.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Groups<'py>> {
        let groups = self.groups.iter().map(PyGroup::of);
        Ok(PyTuple::new(py, groups.collect::<Vec<_>>())?.into())
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        py.enter(Cost::Short, |keys| Ok(keys.lock(&self.core, LEDGER)?.len()))
    }

    fn __contains__(&self, py: Python<'_>, request: Name<'_>) -> PyResult<bool> {
        let Name(request) = request;
        let Some(live) = self.find(py, &request)? else {
            return Ok(false);
        };
        let id = live.get().id;
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.core, LEDGER)?.is_live(id))
        })
    }

    /// Begin a request. It is live until `finish` or `forget`.
    ///
    /// If the source is a plan, the plan's gaps and all tokens after it are missing, and the rest
    /// counts as computed: apply its copies first. Its blocks in place count as committed.
    ///
    /// Args:
    ///     request: The name of the request, any hashable.
    ///     seq: The sequence with the final ids so far.
    ///     blocks: Block ids from position 0, for at least the computed tokens.
    ///     source: Where the KV comes from, as for `RadixIndex.insert`; None means
    ///         `kvtrie.COMPUTED`.
    ///     num_computed: Tokens whose KV is in the blocks. Not allowed with a plan as source, nor
    ///         with `missing`.
    ///     missing: Ranges of the sequence whose KV is not in the blocks, in tokens, ascending and
    ///         disjoint, as a list of pairs or an integer array of shape (n, 2). Not allowed with a
    ///         plan as source. None means all tokens from `num_computed` on.
    ///     plan: A plan of this sequence whose blocks in place are the first of `blocks`, if
    ///         `source` is not a plan. These blocks count as committed; `source` describes the KV
    ///         after them. The plan is released when the request ends.
    ///     session: The id of the conversation that the sequence belongs to, as for
    ///         `RadixIndex.insert`. Every commit gives it.
    ///
    /// Raises:
    ///     BlockInUseError: A block id occurs twice.
    ///     StaleHandleError: The plan was released.
    ///     ValueError: The request is live, or another one owns the sequence; `num_computed` or
    ///         `missing` imply more KV than the sequence has tokens or the blocks can hold; a range
    ///         is wrong; the plan pins nothing, or has another block size, other tokens, or other
    ///         blocks in place.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 7), space)
    ///     >>> ledger.begin("a", seq, [6, 0, 3], missing=[(2, 3), (5, 6)])
    ///     >>> ledger.schedule("a", 1)
    ///     >>> ledger.confirm("a", 3)
    ///     >>> ledger.final_range("a")
    ///     (0, 5)
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python call"
    )]
    #[pyo3(signature = (
        request: "Hashable", seq: "TokenSequence", blocks: "_Integers", *,
        source: "ReusePlan | ComputedSource | Imported | None" = None,
        num_computed: "SupportsIndex" = 0, missing: "_Ranges | None" = None,
        plan: "ReusePlan | None" = None, session: "str | None" = None
    ))]
    fn begin(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::<call::SequenceLedgerBegin, arg::Seq, PyTokenSequence>)]
        seq: &Bound<'_, PyTokenSequence>,
        blocks: &Bound<'_, PyAny>,
        source: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = int::<call::SequenceLedgerBegin, arg::NumComputed>)]
        num_computed: i128,
        missing: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = optional_of::<call::SequenceLedgerBegin, arg::Plan, PyReusePlan>)]
        plan: Option<&Bound<'_, PyReusePlan>>,
        #[pyo3(from_py_with = session::<call::SequenceLedgerBegin, arg::Session>)] session: Option<
            SessionId,
        >,
    ) -> PyResult<()> {
        const CALL: &str = "SequenceLedger.begin";
        let blocks = block_ids(blocks, BlockId::MAX_BLOCKS, Arg::new(CALL, "blocks"))?;
        let num_computed = Arg::new(CALL, "num_computed").count(num_computed)?;
        let missing = missing
            .map(|missing| crate::ranges::ranges(missing, Arg::new(CALL, "missing")))
            .transpose()?;
        let (source_plan, core_source) = read_source(source, Arg::new(CALL, "source"))?;
        if plan.is_some_and(|plan| plan.get().is_released()) {
            return Err(released(CALL, "plan"));
        }
        if self.find(py, request)?.is_some() {
            return Err(live_already(request));
        }
        let begin = Begin {
            source: core_source,
            num_computed,
            missing: missing.as_deref(),
            in_place: plan.map(|plan| plan.get().share()),
            session,
        };
        let cost = Cost::copy(4 * blocks.len());
        let own = seq.get();
        let id = py.enter(cost, move |keys| {
            let mut ledger = keys.lock(&self.core, LEDGER)?;
            let mut seq = keys.lock(&own.core, SEQUENCE)?;
            Ok(ledger.begin(&mut seq, &blocks, begin)?)
        });
        let id = id.map_err(of_request(request))?;
        let live = PyLiveRequest {
            id,
            seq: seq.clone().unbind(),
            plan: source_plan.or_else(|| plan.map(|plan| plan.clone().unbind())),
            source: source.map(|source| source.clone().unbind()),
            pins: Mutex::new(Vec::new()),
        };
        self.enlist(py, request, live).inspect_err(|_| {
            // Another thread was faster, or the name's own methods failed: the request is removed again.
            let undone = py.enter(Cost::Short, |keys| {
                Ok(keys.lock(&self.core, LEDGER)?.forget(id)?)
            });
            drop(undone);
        })
    }

    /// Record that the engine issues the next positions: a piece of the prompt, a token,
    /// look-ahead.
    ///
    /// Cached tokens after a gap are skipped.
    ///
    /// Args:
    ///     request: A live request.
    ///     num_tokens: Number of positions.
    ///     num_drafts: How many of these, counted from the end, are unverified drafts. A claim
    ///         counts for drafts only if ids after the first of them have arrived before it.
    ///
    /// Raises:
    ///     ValueError: There are too few blocks, or more drafts than tokens.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=4)
    ///     >>> ledger.begin("a", kvtrie.TokenSequence([1, 2, 3], space), [6])
    ///     >>> ledger.schedule("a", 5)  # doctest: +IGNORE_EXCEPTION_DETAIL
    ///     Traceback (most recent call last):
    ///     ValueError: too few blocks
    #[pyo3(signature = (
        request: "Hashable", num_tokens: "SupportsIndex", *, num_drafts: "SupportsIndex" = 0
    ))]
    fn schedule(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = int::<call::SequenceLedgerSchedule, arg::NumTokens>)]
        num_tokens: i128,
        #[pyo3(from_py_with = int::<call::SequenceLedgerSchedule, arg::NumDrafts>)]
        num_drafts: i128,
    ) -> PyResult<()> {
        const CALL: &str = "SequenceLedger.schedule";
        let num_tokens = Arg::new(CALL, "num_tokens").count(num_tokens)?;
        let num_drafts = Arg::new(CALL, "num_drafts").count(num_drafts)?;
        self.on(py, request, CALL, |ledger, id| {
            ledger.schedule(id, num_tokens, num_drafts)
        })
    }

    /// Append final ids: sampled ones, or accepted drafts.
    ///
    /// Args:
    ///     request: A live request.
    ///     ids: Token ids. -1 at the end stands for ids that are not known yet; append them with a
    ///         later call.
    ///
    /// Raises:
    ///     ValueError: An id is outside 0..2**32, or follows a -1.
    ///
    /// Example:
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=4)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger.begin("a", seq, [6])
    ///     >>> ledger.append("a", [4, -1])
    ///     >>> seq[:]
    ///     array([1, 2, 3, 4], dtype=uint32)
    #[pyo3(signature = (request: "Hashable", ids: "_Integers"))]
    fn append(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        const CALL: &str = "SequenceLedger.append";
        let ids = signed_integers(ids, &IDS, Arg::new(CALL, "ids"))?;
        let live = self.live(py, request, CALL)?;
        let (live, own) = (live.get(), live.get().seq.get());
        // A plan may share the old ids, which are then copied.
        let cost = Cost::copy(own.len(py)? + ids.len());
        let done = py.enter(cost, |keys| {
            let mut ledger = keys.lock(&self.core, LEDGER)?;
            let mut seq = keys.lock(&own.core, SEQUENCE)?;
            Ok(ledger.append(live.id, &mut seq, &ids)?)
        });
        done.map_err(of_request(request))
    }

    /// Record the engine's claim that the KV of all positions below is written, or ordered before
    /// every reader.
    ///
    /// A claim may be lower than the last one, where drafts were rejected, but not below the final
    /// and computed tokens. After a claim that is lower, or that follows the ids of drafts, no
    /// later position counts as issued. A lower claim is refused before the ids of the drafts have
    /// arrived; `step` takes both at once.
    ///
    /// A reader on another stream, such as a transfer, must wait until the last claimed step has
    /// run.
    ///
    /// Args:
    ///     request: A live request.
    ///     num_computed: A position in tokens.
    ///
    /// Raises:
    ///     ValueError: It is below the final and computed tokens, which takes a `rollback`, or
    ///         after the issued positions.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=4)
    ///     >>> ledger.begin("a", kvtrie.TokenSequence([1, 2, 3], space), [6])
    ///     >>> ledger.schedule("a", 2)
    ///     >>> ledger.confirm("a", 2)
    ///     >>> ledger.final_range("a")
    ///     (0, 2)
    #[pyo3(signature = (request: "Hashable", num_computed: "SupportsIndex"))]
    fn confirm(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = int::<call::SequenceLedgerConfirm, arg::NumComputed>)]
        num_computed: i128,
    ) -> PyResult<()> {
        const CALL: &str = "SequenceLedger.confirm";
        let num_computed = Arg::new(CALL, "num_computed").count(num_computed)?;
        self.on(py, request, CALL, |ledger, id| {
            ledger.confirm(id, num_computed)
        })
    }

    /// Record one scheduler step of many requests. It takes effect for all of them or for none.
    ///
    /// For each request, in this order: `append` of its new ids, `confirm` of the engine's counter,
    /// and `schedule` from that counter on. Numpy arrays are read without an object per item.
    ///
    /// Args:
    ///     requests: Live requests, each once.
    ///     num_scheduled: Number of positions that this step issues, per request.
    ///     num_computed: The engine's counter before this step, in tokens, per request. It may
    ///         include steps under way, run ahead of the ids, and fall where drafts were rejected.
    ///     ids: Ids that became final since the last step, request after request, each as for
    ///         `append`.
    ///     offsets: Where each request's ids begin, and the end of the last.
    ///     num_drafts: How many of `num_scheduled`, counted from the end, are unverified drafts,
    ///         per request; None means 0 for all.
    ///
    /// Raises:
    ///     StaleHandleError: A request is not live; the message names it.
    ///     ValueError: A request occurs twice, lists have different lengths, offsets do not ascend
    ///         from 0 to the number of ids, or a request's positions are contradicted; the message
    ///         names it.
    ///
    /// Example:
    ///     >>> import numpy as np
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=4)
    ///     >>> for name in "ab":
    ///     ...     ledger.begin(name, kvtrie.TokenSequence([1, 2, 3], space), [ord(name)])
    ///     >>> ledger.step(["a", "b"], np.array([3, 2]), np.array([0, 0]), [], [0, 0, 0])
    ///     >>> ledger.step(["a", "b"], np.array([1, 1]), np.array([3, 2]), [7], [0, 1, 1])
    ///     >>> ledger.final_range("a"), ledger.final_range("b")
    ///     ((0, 3), (0, 2))
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python call"
    )]
    #[pyo3(signature = (
        requests: "Iterable[Hashable]", num_scheduled: "_Integers", num_computed: "_Integers",
        ids: "_Integers", offsets: "_Integers", *, num_drafts: "_Integers | None" = None
    ))]
    fn step(
        &self,
        py: Python<'_>,
        requests: &Bound<'_, PyAny>,
        num_scheduled: &Bound<'_, PyAny>,
        num_computed: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        num_drafts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        const CALL: &str = "SequenceLedger.step";
        let num_scheduled = count_list(num_scheduled, Arg::new(CALL, "num_scheduled"))?;
        let num_computed = count_list(num_computed, Arg::new(CALL, "num_computed"))?;
        let ids = signed_integers(ids, &IDS, Arg::new(CALL, "ids"))?;
        let offsets = count_list(offsets, Arg::new(CALL, "offsets"))?;
        let num_drafts = num_drafts
            .map(|drafts| count_list(drafts, Arg::new(CALL, "num_drafts")))
            .transpose()?;
        let listed = list_of(requests, Arg::new(CALL, "requests"))?;
        let known = self.requests.bind(py);
        let mut live = Vec::with_capacity(listed.len());
        for request in listed.iter() {
            live.push(find_in(known, &request)?.ok_or_else(|| not_live(&request, CALL))?);
        }
        let names: Vec<RequestId> = live.iter().map(|live| live.get().id).collect();
        let seqs: Vec<&PyTokenSequence> = live.iter().map(|live| live.get().seq.get()).collect();
        let done = py.enter(Cost::blocks(names.len() + ids.len() / 16), |keys| {
            let mut ledger = keys.lock(&self.core, LEDGER)?;
            let step = Step {
                requests: &names,
                num_scheduled: &num_scheduled,
                num_computed: &num_computed,
                ids: &ids,
                offsets: &offsets,
                num_drafts: num_drafts.as_deref(),
            };
            Ok(ledger.step(&step, |at, ids| {
                let mut seq = keys.lock(&seqs[at].core, SEQUENCE)?;
                Ok::<_, Failure>(ids.to(&mut seq)?)
            }))
        })?;
        done.map_err(|StepError { at, error }| {
            let error = PyErr::from(error);
            match at.map(|at| listed.get_item(at)) {
                Some(Ok(request)) => of_request(&request)(error),
                _ => error,
            }
        })
    }

    /// Append blocks to the table of a request.
    ///
    /// Args:
    ///     request: A live request.
    ///     blocks: Block ids for the positions after the end of the table.
    ///
    /// Raises:
    ///     BlockInUseError: An id is in the table already, or occurs twice.
    ///     ValueError: An id is outside 0..2**31.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=4)
    ///     >>> ledger.begin("a", kvtrie.TokenSequence([1, 2, 3], space), [6])
    ///     >>> ledger.add_blocks("a", [2])
    ///     >>> ledger.blocks("a")
    ///     array([6, 2], dtype=int32)
    #[pyo3(signature = (request: "Hashable", blocks: "_Integers"))]
    fn add_blocks(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        const CALL: &str = "SequenceLedger.add_blocks";
        let blocks = block_ids(blocks, BlockId::MAX_BLOCKS, Arg::new(CALL, "blocks"))?;
        self.on(py, request, CALL, |ledger, id| {
            ledger.add_blocks(id, &blocks)
        })
    }

    /// Add the engine's own ids of a group to a request.
    ///
    /// `finish` offers them to the index.
    ///
    /// Args:
    ///     request: A live request.
    ///     group: The name of the group.
    ///     ids: Pairs (position, id), ascending, or an integer array of shape (n, 2), as for
    ///         `RadixIndex.insert`. A window's block may be given before it is computed, a state is
    ///         there from the start.
    ///
    /// Raises:
    ///     BlockInUseError: The request has an id in the group already, or it occurs twice.
    ///     ValueError: There is no such group; an id is outside its pool; a position is inside a block,
    ///         not after the one before, or taken; a block is after the end of group 0's table, a state
    ///         at 0 or after the tokens that are final and computed.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(2, groups=[kvtrie.Group.state("gdn", num_slots=4)])
    ///     >>> ledger.begin("a", kvtrie.TokenSequence([1, 2, 3], space), [6, 0], num_computed=2)
    ///     >>> ledger.hold("a", "gdn", [(2, 3)])
    ///     >>> ledger.held("a", "gdn").tolist()
    ///     [[2, 3]]
    #[pyo3(signature = (request: "Hashable", group: "str", ids: "_Ranges"))]
    fn hold(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = text::<call::SequenceLedgerHold, arg::Group>)] group: String,
        ids: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        const CALL: &str = "SequenceLedger.hold";
        let number = groups::number(py, &self.groups, group, CALL)?;
        let arg = Arg::new(CALL, "ids");
        let mut offers = Vec::new();
        for (position, id) in crate::ranges::ranges(ids, arg)? {
            let id = arg.within(id as i128, 0, u32::MAX)?;
            offers.push((position, BlockId(id)));
        }
        self.on(py, request, CALL, |ledger, id| {
            ledger.hold(id, number, &offers)
        })
    }

    /// Return what a request has of a group: pairs (position, id), int64 of shape (n, 2), ascending.
    ///
    /// Args:
    ///     request: A live request.
    ///     group: The name of the group.
    ///
    /// Raises:
    ///     ValueError: There is no such group.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> swa = kvtrie.Group.window("swa", window=3, num_blocks=4, block_size=2)
    ///     >>> ledger = kvtrie.SequenceLedger(2, groups=[swa])
    ///     >>> ledger.begin("a", kvtrie.TokenSequence([1, 2, 3], space), [6, 0])
    ///     >>> ledger.hold("a", "swa", [(0, 3), (2, 1)])
    ///     >>> ledger.held("a", "swa").tolist()
    ///     [[0, 3], [2, 1]]
    #[pyo3(signature = (request: "Hashable", group: "str"))]
    fn held<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = text::<call::SequenceLedgerHeld, arg::Group>)] group: String,
    ) -> PyResult<Counts<'py>> {
        const CALL: &str = "SequenceLedger.held";
        let number = groups::number(py, &self.groups, group, CALL)?;
        let held = self.on(py, request, CALL, |ledger, id| ledger.held(id, number))?;
        let held: Vec<(usize, usize)> = held
            .into_iter()
            .map(|(position, id)| (position, id.0 as usize))
            .collect();
        output::ranges(py, &held)
    }

    /// Take from the tables of groups what no later token reads: blocks before a window that ends at
    /// the final and computed tokens, and the plan's states before them. The plan no longer pins these.
    ///
    /// The request's own states stay, for the index.
    ///
    /// Args:
    ///     request: A live request.
    ///     index: An index with the ledger's groups; with a plan, the plan's index.
    ///
    /// Returns:
    ///     The request's own ids that left, for each group's name (int32). They belong to the caller.
    ///
    /// Raises:
    ///     StaleHandleError: The request is not live, or its plan was released.
    ///     ValueError: The index has other groups or another block size, or is not the plan's.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> swa = kvtrie.Group.window("swa", window=2, num_blocks=4, block_size=2)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2, groups=[swa])
    ///     >>> ledger = kvtrie.SequenceLedger(2, groups=[swa])
    ///     >>> ledger.begin("a", kvtrie.TokenSequence(range(4), space), [6, 0], num_computed=3)
    ///     >>> ledger.hold("a", "swa", [(0, 3), (2, 1)])
    ///     >>> ledger.advance("a", index)
    ///     {'swa': array([3], dtype=int32)}
    #[pyo3(signature = (request: "Hashable", index: "RadixIndex"))]
    fn advance<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = of::<call::SequenceLedgerAdvance, arg::Index, PyRadixIndex>)]
        index: &Bound<'py, PyRadixIndex>,
    ) -> PyResult<GroupIds<'py>> {
        let live = self.live(py, request, "SequenceLedger.advance")?;
        let (id, shared) = (live.get().id, &*index.get().shared);
        let left = py.enter(Cost::Long, |keys| {
            let mut ledger = keys.lock(&self.core, LEDGER)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            Ok(ledger.advance(id, &mut index)?)
        });
        self.by_name(py, &left.map_err(of_request(request))?)
    }

    /// Undo what was issued or computed at or after a position, for a preemption or rejected
    /// drafts.
    ///
    /// The ids stay: final tokens must be computed again.
    ///
    /// Args:
    ///     request: A live request.
    ///     to: A position in tokens; nothing below it changes.
    ///     drop_blocks: Also remove the blocks wholly after `to` from the table.
    ///
    /// Raises:
    ///     ValueError: `to` is below the committed tokens, or after the issued positions; or a group has
    ///         nothing to continue with there: no state, or not all of its window.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", kvtrie.TokenSequence(range(1, 5), space), [6, 7], num_computed=4)
    ///     >>> ledger.rollback("a", to=1, drop_blocks=True)
    ///     RolledBack(ranges=[[1, 4]], blocks=[7])
    ///     >>> ledger.final_range("a")
    ///     (0, 1)
    #[pyo3(signature = (request: "Hashable", to: "SupportsIndex", *, drop_blocks: "bool" = false))]
    fn rollback(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = int::<call::SequenceLedgerRollback, arg::To>)] to: i128,
        #[pyo3(from_py_with = flag::<call::SequenceLedgerRollback, arg::DropBlocks>)]
        drop_blocks: bool,
    ) -> PyResult<PyRolledBack> {
        const CALL: &str = "SequenceLedger.rollback";
        let to = Arg::new(CALL, "to").count(to)?;
        let core = self.on(py, request, CALL, |ledger, id| {
            ledger.rollback(id, to, drop_blocks)
        })?;
        let names = self.groups.iter().map(|group| group.name.clone()).collect();
        Ok(PyRolledBack { core, names })
    }

    /// Store spans of a request. Commits give them to the index with the blocks of their tokens.
    ///
    /// Args:
    ///     request: A live request.
    ///     spans: Ranges of final tokens with their kinds; they may overlap.
    ///
    /// Raises:
    ///     ValueError: A span ends after the final ids.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=4)
    ///     >>> ledger.begin("a", kvtrie.TokenSequence([1, 2, 3], space), [6])
    ///     >>> ledger.tag("a", [kvtrie.Span(1, 3, "reasoning")])
    ///     >>> ledger.spans("a")
    ///     [Span(1, 3, 'reasoning')]
    #[pyo3(signature = (request: "Hashable", spans: "Iterable[Span]"))]
    fn tag(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        spans: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        const CALL: &str = "SequenceLedger.tag";
        let spans = crate::span::spans(spans, Arg::new(CALL, "spans"))?;
        self.on(py, request, CALL, |ledger, id| ledger.tag(id, &spans))
    }

    /// Remove the spans that were not yet given to an index.
    ///
    /// An index has at most 64 kinds. If it refuses one, every commit of the request fails until
    /// the spans are removed.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
    ///     >>> ledger.tag("a", [kvtrie.Span(1, 3, "reasoning")])
    ///     >>> ledger.untag("a")
    ///     >>> ledger.spans("a")
    ///     []
    #[pyo3(signature = (request: "Hashable"))]
    fn untag(&self, py: Python<'_>, request: &Bound<'_, PyAny>) -> PyResult<()> {
        self.on(py, request, "SequenceLedger.untag", SequenceLedger::untag)
    }

    /// Return the spans of a request, in call order.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
    ///     >>> ledger.tag("a", [kvtrie.Span(2, 3, "answer")])
    ///     >>> ledger.tag("a", [kvtrie.Span(0, 2, "user")])
    ///     >>> ledger.spans("a")
    ///     [Span(2, 3, 'answer'), Span(0, 2, 'user')]
    #[pyo3(signature = (request: "Hashable"))]
    fn spans(&self, py: Python<'_>, request: &Bound<'_, PyAny>) -> PyResult<Vec<PySpan>> {
        let found = self.on(py, request, "SequenceLedger.spans", |ledger, id| {
            ledger.spans(id)
        })?;
        Ok(found.into_iter().map(PySpan::from).collect())
    }

    /// Return the range of tokens that are final *and* computed: safe to save, share or send.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Returns:
    ///     (0, end), in tokens.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
    ///     >>> ledger.final_range("a")
    ///     (0, 2)
    #[pyo3(signature = (request: "Hashable"))]
    fn final_range(&self, py: Python<'_>, request: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
        let end = self.on(py, request, "SequenceLedger.final_range", |ledger, id| {
            ledger.final_end(id)
        })?;
        Ok((0, end))
    }

    /// Return the range of tokens that are final and computed, but not committed.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Returns:
    ///     (start, end), in tokens; start is a multiple of the block size.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
    ///     >>> ledger.new_range("a")
    ///     (0, 2)
    #[pyo3(signature = (request: "Hashable"))]
    fn new_range(&self, py: Python<'_>, request: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
        self.on(py, request, "SequenceLedger.new_range", |ledger, id| {
            ledger.new_range(id)
        })
    }

    /// Return the positions issued after the final and computed tokens: look-ahead, drafts, a step
    /// under way.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Returns:
    ///     (start, end), in tokens.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger()
    ///     >>> ledger.begin("a", kvtrie.TokenSequence([1, 2, 3], space), [6], num_computed=2)
    ///     >>> ledger.schedule("a", 3, num_drafts=2)
    ///     >>> ledger.lookahead("a")
    ///     (2, 5)
    #[pyo3(signature = (request: "Hashable"))]
    fn lookahead(&self, py: Python<'_>, request: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
        self.on(py, request, "SequenceLedger.lookahead", |ledger, id| {
            ledger.lookahead(id)
        })
    }

    /// Return the ranges of final tokens whose KV is not known to be computed.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Returns:
    ///     Ranges (start, end), int64 of shape (n, 2), ascending.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger()
    ///     >>> ledger.begin("a", kvtrie.TokenSequence([1, 2, 3], space), [6], num_computed=2)
    ///     >>> ledger.missing("a")
    ///     array([[2, 3]])
    #[pyo3(signature = (request: "Hashable"))]
    fn missing<'py>(&self, py: Python<'py>, request: &Bound<'py, PyAny>) -> PyResult<Counts<'py>> {
        let found = self.on(py, request, "SequenceLedger.missing", |ledger, id| {
            ledger.missing(id)
        })?;
        output::ranges(py, &found)
    }

    /// Return the block table of a request, from position 0.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Returns:
    ///     Block ids (int32). The last ones may not hold final KV: see `blocks_for`.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
    ///     >>> ledger.blocks("a")
    ///     array([6, 0], dtype=int32)
    #[pyo3(signature = (request: "Hashable"))]
    fn blocks<'py>(&self, py: Python<'py>, request: &Bound<'py, PyAny>) -> PyResult<Ids<'py>> {
        let found = self.on(py, request, "SequenceLedger.blocks", |ledger, id| {
            Ok(ledger.blocks(id)?.to_vec())
        })?;
        Ok(ids(py, &found))
    }

    /// Return the blocks that hold these tokens, which must be final and computed.
    ///
    /// Args:
    ///     request: A live request.
    ///     start: First position, in tokens.
    ///     end: One past the last position.
    ///
    /// Returns:
    ///     Block ids (int32). The first holds `start`, the last `end - 1`.
    ///
    /// Raises:
    ///     ValueError: The range is reversed, or ends after the final and computed tokens.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", seq, [6, 0, 3], num_computed=3)
    ///     >>> ledger.blocks_for("a", 1, 3)
    ///     array([6, 0], dtype=int32)
    #[pyo3(signature = (request: "Hashable", start: "SupportsIndex", end: "SupportsIndex"))]
    fn blocks_for<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = int::<call::SequenceLedgerBlocksFor, arg::Start>)] start: i128,
        #[pyo3(from_py_with = int::<call::SequenceLedgerBlocksFor, arg::End>)] end: i128,
    ) -> PyResult<Ids<'py>> {
        const CALL: &str = "SequenceLedger.blocks_for";
        let start = Arg::new(CALL, "start").count(start)?;
        let end = Arg::new(CALL, "end").count(end)?;
        let found = self.on(py, request, CALL, |ledger, id| {
            Ok(ledger.blocks_for(id, start, end)?.to_vec())
        })?;
        Ok(ids(py, &found))
    }

    /// Return how exact the final and computed KV is, as an index would label its blocks.
    ///
    /// A whole block is approximate if it ends after the plan's first approximate token or after
    /// `Imported.exact_until`, or if a commit reported approximate KV there.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Returns:
    ///     A structured array that covers `final_range` once, ascending: `start` and `end`, int64 in
    ///     tokens; `class`, uint8: 0 exact, 1 approximate; `hops`, uint16. Fields are aligned as C
    ///     aligns them.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> seq, source = kvtrie.TokenSequence(range(1, 6), space), kvtrie.Imported(3, hops=1)
    ///     >>> ledger.begin("a", seq, [6, 0, 3], source=source, num_computed=5)
    ///     >>> ledger.labels("a").tolist()
    ///     [(0, 2, 0, 0), (2, 5, 1, 1)]
    #[pyo3(signature = (request: "Hashable"))]
    fn labels<'py>(&self, py: Python<'py>, request: &Bound<'py, PyAny>) -> PyResult<Records<'py>> {
        let runs = self.on(py, request, "SequenceLedger.labels", |ledger, id| {
            ledger.labels(id, 0, ledger.final_end(id)?)
        })?;
        output::labels(py, &runs)
    }

    /// Return the sequence object with which a request began.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
    ///     >>> ledger.sequence("a") is seq
    ///     True
    #[pyo3(signature = (request: "Hashable"))]
    fn sequence(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyTokenSequence>> {
        let live = self.live(py, request, "SequenceLedger.sequence")?;
        Ok(live.get().seq.clone_ref(py))
    }

    /// Return the source with which a request began.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
    ///     >>> ledger.source("a")
    ///     COMPUTED
    #[pyo3(signature = (request: "Hashable") -> "ReusePlan | ComputedSource | Imported")]
    fn source<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let live = self.live(py, request, "SequenceLedger.source")?;
        match &live.get().source {
            Some(source) => Ok(source.bind(py).clone()),
            None => Ok(Bound::new(py, PyComputedSource)?.into_any()),
        }
    }

    /// Insert into the index exactly the whole blocks that are final, computed and not yet
    /// committed.
    ///
    /// The table has `blocks` of the result from then on. Its `duplicates` and `freed` belong to
    /// the caller; `surplus` is empty, because blocks that were not taken stay in the table.
    ///
    /// Args:
    ///     request: A live request.
    ///     index: An index of the ledger's block size; with a plan as source, the plan's index.
    ///
    /// Raises:
    ///     BlockInUseError: As for `RadixIndex.insert`.
    ///     StaleHandleError: The request is not live, or its plan was released.
    ///     ValueError: The index has another block size, or refuses the insert.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=3)
    ///     >>> ledger.commit("a", index)
    ///     InsertResult(blocks=[6], num_exact=2, duplicates=[], surplus=[], freed=[])
    #[pyo3(signature = (request: "Hashable", index: "RadixIndex"))]
    fn commit(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::<call::SequenceLedgerCommit, arg::Index, PyRadixIndex>)]
        index: &Bound<'_, PyRadixIndex>,
    ) -> PyResult<PyInsertResult> {
        let live = self.live(py, request, "SequenceLedger.commit")?;
        let (live, shared) = (live.get(), &*index.get().shared);
        let before = live.plans(py);
        let done = py.enter_briefly(|keys, effort| {
            let mut ledger = keys.lock(&self.core, LEDGER)?;
            let mut seq = keys.lock(&live.seq.get().core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            if commit_steps(&ledger, live, &seq, &index, &before) > effort.nodes {
                return Ok(None);
            }
            let done = ledger.commit(live.id, &mut seq, &mut index)?;
            for plan in &before {
                plan.get().look(&index);
            }
            Ok(Some((done, ledger.pins(live.id)?.to_vec())))
        });
        let (core, pins) = done.map_err(of_request(request))?;
        if !pins.is_empty() {
            live.keep_pins(py, pins, &index.get().shared)?;
        }
        Ok(PyInsertResult::new(core, (Vec::new(), Vec::new())))
    }

    /// `commit` a last time and end the request: its plan is released, and its sequence may be
    /// changed again.
    ///
    /// It raises as `commit` does; then the request stays live.
    ///
    /// Args:
    ///     request: A live request.
    ///     index: As for `commit`.
    ///     stops: Positions at which later prompts may continue, as for `RadixIndex.insert`: what
    ///         groups need there is evicted last.
    ///
    /// Returns:
    ///     The result. Its `duplicates`, `surplus` (the rest of the table) and `freed` belong to
    ///     the caller; so do those in its `groups`, which say what became of the request's own ids
    ///     of each group.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=3)
    ///     >>> ledger.finish("a", index)
    ///     InsertResult(blocks=[6], num_exact=2, duplicates=[], surplus=[0], freed=[])
    #[pyo3(
        signature = (request: "Hashable", index: "RadixIndex", *, stops: "Sequence[SupportsIndex]" = nothing()),
        text_signature = "($self, request, index, *, stops=())"
    )]
    fn finish(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::<call::SequenceLedgerFinish, arg::Index, PyRadixIndex>)]
        index: &Bound<'_, PyRadixIndex>,
        stops: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyInsertResult> {
        const CALL: &str = "SequenceLedger.finish";
        let stops = match stops {
            Some(given) => count_list(given, Arg::new(CALL, "stops"))?,
            None => Vec::new(),
        };
        let entry = self.take(py, request, CALL)?;
        let (live, shared) = (entry.get(), &*index.get().shared);
        let plans = live.plans(py);
        let done = py.enter_briefly(|keys, effort| {
            let mut ledger = keys.lock(&self.core, LEDGER)?;
            let mut seq = keys.lock(&live.seq.get().core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            let of_groups = ledger.group_steps(live.id, &seq, &index, &stops);
            let steps = commit_steps(&ledger, live, &seq, &index, &plans);
            if steps.saturating_add(of_groups) > effort.nodes {
                return Ok(None);
            }
            let done = ledger.finish_groups(live.id, &mut seq, &mut index, &stops)?;
            for plan in &plans {
                plan.get().was_released();
            }
            Ok(Some(done))
        });
        let (core, results) = done
            .inspect_err(|_| self.put_back(py, request, &entry))
            .map_err(of_request(request))?;
        let names = self.groups.iter().map(|group| group.name.clone()).collect();
        Ok(PyInsertResult::new(core, (names, results)))
    }

    /// End a request without an index: its plan is released, and its sequence may be changed again.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Returns:
    ///     The blocks of its table that were not committed (int32). They belong to the caller.
    ///
    /// Raises:
    ///     ValueError: The ledger has groups; `forget_groups` returns their ids.
    ///
    /// Example:
    ///     >>> ledger = kvtrie.SequenceLedger()
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger.begin("a", seq, [6])
    ///     >>> ledger.forget("a")
    ///     array([6], dtype=int32)
    ///     >>> seq.extend([4])
    #[pyo3(signature = (request: "Hashable"))]
    fn forget<'py>(&self, py: Python<'py>, request: &Bound<'py, PyAny>) -> PyResult<Ids<'py>> {
        const CALL: &str = "SequenceLedger.forget";
        if let Some(group) = self.groups.first() {
            return Err(PyValueError::new_err(format!(
                "{CALL}: the ledger has group {} besides group 0; forget_groups returns its ids",
                output::quoted(py, &group.name)?
            )));
        }
        let left = self.end(py, request, CALL)?;
        Ok(ids(py, &left.blocks))
    }

    /// As `forget`, for a ledger with or without groups.
    ///
    /// Args:
    ///     request: A live request.
    ///
    /// Returns:
    ///     The blocks of its table that were not committed (int32), and its own ids of each group, by
    ///     name (int32). They belong to the caller.
    ///
    /// Example:
    ///     >>> ledger = kvtrie.SequenceLedger(2, groups=[kvtrie.Group.state("gdn", num_slots=4)])
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
    ///     >>> ledger.hold("a", "gdn", [(2, 3)])
    ///     >>> ledger.forget_groups("a")
    ///     (array([6, 0], dtype=int32), {'gdn': array([3], dtype=int32)})
    #[pyo3(signature = (request: "Hashable"))]
    fn forget_groups<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
    ) -> PyResult<Forgotten<'py>> {
        let left = self.end(py, request, "SequenceLedger.forget_groups")?;
        let both = (ids(py, &left.blocks), self.by_name(py, &left.groups)?);
        Ok(both.into_pyobject(py)?.into())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "<SequenceLedger of {} requests, block_size={}>",
            self.__len__(py)?,
            self.block_size
        ))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.requests)
    }
}

impl PySequenceLedger {
    /// Ids of each group by its name.
    fn by_name<'py>(&self, py: Python<'py>, left: &[Vec<BlockId>]) -> PyResult<GroupIds<'py>> {
        ids_by_name(py, self.groups.iter().map(|group| &group.name), left)
    }

    /// Ends a request without an index, and releases its plans.
    fn end(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        call: &'static str,
    ) -> PyResult<kvtrie_transfer::Forgotten> {
        let entry = self.take(py, request, call)?;
        let live = entry.get();
        let left = py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.core, LEDGER)?.forget(live.id)?)
        });
        let left = left
            .inspect_err(|_| self.put_back(py, request, &entry))
            .map_err(of_request(request))?;
        for plan in live.plans(py) {
            plan.get().release_once(py)?;
        }
        Ok(left)
    }

    pub(crate) fn live<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
        call: &str,
    ) -> PyResult<Bound<'py, PyLiveRequest>> {
        self.find(py, request)?
            .ok_or_else(|| not_live(request, call))
    }

    fn find<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyLiveRequest>>> {
        find_in(self.requests.bind(py), request)
    }

    /// Removes a request from the dictionary. If two threads end it, only one finds it.
    fn take<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyAny>,
        call: &str,
    ) -> PyResult<Bound<'py, PyLiveRequest>> {
        let found = self
            .requests
            .bind(py)
            .call_method1("pop", (request, py.None()))?;
        found
            .cast_into::<PyLiveRequest>()
            .map_err(|_| not_live(request, call))
    }

    fn put_back(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        entry: &Bound<'_, PyLiveRequest>,
    ) {
        if let Err(error) = self.requests.bind(py).set_item(request, entry) {
            // The name's own methods fail, so no call can name the request any more.
            error.write_unraisable(py, Some(request));
        }
    }

    fn enlist(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        live: PyLiveRequest,
    ) -> PyResult<()> {
        let live = Bound::new(py, live)?;
        let there = self
            .requests
            .bind(py)
            .call_method1("setdefault", (request, &live))?;
        if there.is(&live) {
            Ok(())
        } else {
            Err(live_already(request))
        }
    }

    /// Runs work on one request that needs neither its sequence nor an index.
    fn on<R: Send>(
        &self,
        py: Python<'_>,
        request: &Bound<'_, PyAny>,
        call: &str,
        work: impl FnOnce(&mut SequenceLedger, RequestId) -> kvtrie_core::Result<R> + Send,
    ) -> PyResult<R> {
        let id = self.live(py, request, call)?.get().id;
        let done = py.enter(Cost::Short, |keys| {
            Ok(work(&mut *keys.lock(&self.core, LEDGER)?, id)?)
        });
        done.map_err(of_request(request))
    }
}

/// An upper bound of the steps of a commit and of releasing the plans.
fn commit_steps(
    ledger: &SequenceLedger,
    live: &PyLiveRequest,
    seq: &TokenSequence,
    index: &RadixIndex,
    plans: &[Py<PyReusePlan>],
) -> u64 {
    let new = ledger
        .new_range(live.id)
        .map_or(0, |(start, end)| end - start);
    let insert = index.insert_steps(seq, new / ledger.block_size());
    // The committed blocks are pinned again.
    let pins = index.known_edges(seq) / 4;
    let ends = plans
        .iter()
        .map(|plan| index.release_steps(plan.get().core()));
    ends.fold(insert.saturating_add(pins), u64::saturating_add)
}

fn ids_by_name<'py>(
    py: Python<'py>,
    names: impl IntoIterator<Item = impl AsRef<str>>,
    left: &[Vec<BlockId>],
) -> PyResult<GroupIds<'py>> {
    let by_name = PyDict::new(py);
    for (name, own) in names.into_iter().zip(left) {
        by_name.set_item(name.as_ref(), ids(py, own))?;
    }
    Ok(by_name.into())
}

struct Name<'py>(Bound<'py, PyAny>);

impl<'py> FromPyObject<'_, 'py> for Name<'py> {
    type Error = std::convert::Infallible;

    #[cfg(feature = "experimental-inspect")]
    const INPUT_TYPE: pyo3::inspect::PyStaticExpr = pyo3::inspect::PyStaticExpr::Constant {
        value: pyo3::inspect::PyStaticConstant::Str("object"),
    };

    fn extract(name: Borrowed<'_, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(Self(name.to_owned()))
    }
}

fn find_in<'py>(
    requests: &Bound<'py, PyDict>,
    request: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyLiveRequest>>> {
    match requests.get_item(request)? {
        // The dictionary has no values of other classes.
        Some(live) => Ok(live.cast_into::<PyLiveRequest>().ok()),
        None => Ok(None),
    }
}

/// Appends the name of a request to an error about it.
fn of_request(request: &Bound<'_, PyAny>) -> impl FnOnce(PyErr) -> PyErr {
    move |error| {
        let py = request.py();
        let named = request
            .repr()
            .map(|name| format!("{} (request {name})", error.value(py)));
        match named {
            Ok(message) => PyErr::from_type(error.get_type(py), (message,)),
            // The name's `repr` fails, so the error stays as it is.
            Err(_) => error,
        }
    }
}

#[cold]
fn not_live(request: &Bound<'_, PyAny>, call: &str) -> PyErr {
    of_request(request)(StaleHandleError::new_err(format!(
        "{call}: the ledger has no such request: it was finished or forgotten, or never begun"
    )))
}

#[cold]
fn live_already(request: &Bound<'_, PyAny>) -> PyErr {
    of_request(request)(PyValueError::new_err(
        "SequenceLedger.begin: the request is live already; finish or forget it first",
    ))
}

fn list_of<'py>(value: &Bound<'py, PyAny>, arg: Arg) -> PyResult<Bound<'py, PyList>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Ok(list.clone());
    }
    let items: PyResult<Vec<Bound<'py, PyAny>>> = arg.iterate(value, "a list")?.collect();
    PyList::new(value.py(), items?)
}

fn read_source(
    value: Option<&Bound<'_, PyAny>>,
    arg: Arg,
) -> PyResult<(Option<Py<PyReusePlan>>, LedgerSource)> {
    let Some(value) = value else {
        return Ok((None, LedgerSource::Computed));
    };
    match SourceArg::open(value, arg)? {
        SourceArg::Computed => Ok((None, LedgerSource::Computed)),
        SourceArg::Imported(imported) => Ok((None, LedgerSource::Imported(imported))),
        SourceArg::Plan(plan) if plan.is_released() => Err(released(arg.call, "plan")),
        SourceArg::Plan(plan) => {
            let kept = value.cast::<PyReusePlan>()?.clone().unbind();
            Ok((Some(kept), LedgerSource::Plan(plan.share())))
        }
    }
}

/// The result of `SequenceLedger.rollback`.
///
/// Example:
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
///     >>> ledger.begin("a", seq, [6, 0], num_computed=2)
///     >>> ledger.rollback("a", to=1, drop_blocks=True)
///     RolledBack(ranges=[[1, 2]], blocks=[0])
#[pyclass(frozen, module = "kvtrie", name = "RolledBack")]
pub(crate) struct PyRolledBack {
    core: RolledBack,
    /// The names of the ledger's groups.
    names: Vec<String>,
}

#[pymethods]
impl PyRolledBack {
    /// Tokens that no longer count as computed: ranges (start, end), int64 of shape (n, 2), ascending.
    #[getter]
    fn ranges<'py>(&self, py: Python<'py>) -> PyResult<Counts<'py>> {
        output::ranges(py, &self.core.ranges)
    }

    /// Blocks that were cut off the table, in order of position (int32). They belong to the caller.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.blocks)
    }

    /// The request's own ids of each group that left its table, by the group's name (int32): states
    /// after `to`, and blocks from it on. They belong to the caller.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<GroupIds<'py>> {
        ids_by_name(py, &self.names, &self.core.groups)
    }

    fn __repr__(&self) -> String {
        let ranges = self.core.ranges.iter();
        let ranges: Vec<String> = ranges
            .map(|(start, end)| format!("[{start}, {end}]"))
            .collect();
        format!(
            "RolledBack(ranges={}, blocks={})",
            output::listed(&ranges),
            output::listed(&self.core.blocks)
        )
    }
}
