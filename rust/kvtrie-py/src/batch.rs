//! The `*_many` calls and what they answer.
//!
//! All sequences of a batch are locked first, each once and in the order of their addresses, then
//! the index. So two batches cannot wait for each other, and no call of another thread comes
//! between the items of one.

use std::sync::{Arc, MutexGuard};

use kvtrie_core::{BlockId, Effort, Error, InsertOptions, Inserted, LookupOptions, PlanOptions};
use kvtrie_core::{RadixIndex, ReusePolicy, TokenSequence};
use pyo3::exceptions::PyValueError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::buffers::{Arg, Integers};
use crate::detach::{Enter, Failure};
use crate::hints::{Counts, ErrorsByItem, Ids, Plans};
use crate::output::{counts, ids};
use crate::plan::PyReusePlan;
use crate::policy::{EXACT_ONLY, PyReusePolicy};
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::shared::{INDEX, SharedIndex};
use crate::source::SourceArg;

/// Ids of many items, one after the other.
#[derive(Default)]
struct Flat {
    ids: Vec<BlockId>,
    offsets: Vec<usize>,
}

impl Flat {
    fn new() -> Self {
        Self {
            ids: Vec::new(),
            offsets: vec![0],
        }
    }

    fn push(&mut self, ids: &[BlockId]) {
        self.ids.extend_from_slice(ids);
        self.offsets.push(self.ids.len());
    }
}

/// What `RadixIndex.lookup_many` found. Item i has `blocks[offsets[i]:offsets[i + 1]]`.
///
/// An item with an error has 0 tokens and no blocks. Array attributes are fresh arrays at every access.
///
/// Example:
///     >>> import kvtrie
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=8)
///     >>> batch = index.lookup_many([kvtrie.TokenSequence([1], space), "no sequence"])
///     >>> batch.num_tokens, list(batch.errors)
///     (array([0, 0]), [1])
#[pyclass(frozen, module = "kvtrie", name = "MatchBatch")]
pub(crate) struct PyMatchBatch {
    num_tokens: Vec<usize>,
    blocks: Flat,
    errors: Py<PyDict>,
}

#[pymethods]
impl PyMatchBatch {
    /// Tokens matched from position 0, one number an item (int64).
    #[getter]
    fn num_tokens<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.num_tokens)
    }

    /// Ids of all items, one after the other (int32).
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.blocks.ids)
    }

    /// Where each item's ids begin (int64), with the end after the last.
    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.blocks.offsets)
    }

    /// The exceptions by item number.
    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> ErrorsByItem<'py> {
        self.errors.bind(py).clone().into()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let (items, errors) = (self.num_tokens.len(), self.errors.bind(py).len());
        format!("<MatchBatch of {items} items, {errors} with errors>")
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.errors)
    }
}

/// What `RadixIndex.plan_many` planned. Item i uses `blocks[offsets[i]:offsets[i + 1]]` in place.
///
/// An item with an error has no plan, no blocks and 0 new blocks. Array attributes are fresh arrays at
/// every access.
///
/// Example:
///     >>> import kvtrie
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=8)
///     >>> batch = index.plan_many([kvtrie.TokenSequence([1], space), "no sequence"])
///     >>> batch.plans[1], list(batch.errors)
///     (None, [1])
///     >>> index.release_many(batch.plans[:1])
///     {}
#[pyclass(frozen, module = "kvtrie", name = "PlanBatch")]
pub(crate) struct PyPlanBatch {
    plans: Py<PyList>,
    blocks: Flat,
    num_new_blocks: Vec<usize>,
    errors: Py<PyDict>,
}

#[pymethods]
impl PyPlanBatch {
    /// The plans, None where there was an error. The same list at every access.
    #[getter]
    fn plans<'py>(&self, py: Python<'py>) -> Plans<'py> {
        self.plans.bind(py).clone().into()
    }

    /// Ids used in place by all items, one after the other (int32).
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.blocks.ids)
    }

    /// Where each item's ids begin (int64), with the end after the last.
    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.blocks.offsets)
    }

    /// How many blocks the caller brings, one number an item (int64).
    #[getter]
    fn num_new_blocks<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.num_new_blocks)
    }

    /// The exceptions by item number.
    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> ErrorsByItem<'py> {
        self.errors.bind(py).clone().into()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let (items, errors) = (self.num_new_blocks.len(), self.errors.bind(py).len());
        format!("<PlanBatch of {items} items, {errors} with errors>")
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.plans)?;
        visit.call(&self.errors)
    }
}

/// What `RadixIndex.insert_many` did: the fields of `InsertResult`, flat, each with its offsets.
///
/// An item with an error has empty ranges. Array attributes are fresh arrays at every access.
///
/// Example:
///     >>> import kvtrie
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> seqs = [kvtrie.TokenSequence([1, 2, 3], space)] * 2
///     >>> sources = [kvtrie.COMPUTED] * 2
///     >>> done = index.insert_many(seqs, [4, 5, 6, 7], [0, 2, 4], [3, 3], sources=sources)
///     >>> done.blocks, done.duplicates, done.duplicate_offsets
///     (array([4, 4], dtype=int32), array([6], dtype=int32), array([0, 0, 1]))
#[pyclass(frozen, module = "kvtrie", name = "InsertBatch")]
pub(crate) struct PyInsertBatch {
    blocks: Flat,
    num_exact: Vec<usize>,
    duplicates: Flat,
    surplus: Flat,
    freed: Flat,
    errors: Py<PyDict>,
}

#[pymethods]
impl PyInsertBatch {
    /// Ids that back the sequences of all items from their starts on (int32).
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.blocks.ids)
    }

    /// Where each item's `blocks` begin (int64), with the end after the last.
    #[getter]
    fn offsets<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.blocks.offsets)
    }

    /// Positions up to which what backs each sequence is exact, one an item (int64).
    #[getter]
    fn num_exact<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.num_exact)
    }

    /// Held ids whose place another id holds (int32).
    #[getter]
    fn duplicates<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.duplicates.ids)
    }

    /// Where each item's `duplicates` begin (int64), with the end after the last.
    #[getter]
    fn duplicate_offsets<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.duplicates.offsets)
    }

    /// Held ids after what was taken (int32).
    #[getter]
    fn surplus<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.surplus.ids)
    }

    /// Where each item's `surplus` begins (int64), with the end after the last.
    #[getter]
    fn surplus_offsets<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.surplus.offsets)
    }

    /// Approximate blocks that were replaced and that nobody pins (int32).
    #[getter]
    fn freed<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.freed.ids)
    }

    /// Where each item's `freed` begin (int64), with the end after the last.
    #[getter]
    fn freed_offsets<'py>(&self, py: Python<'py>) -> Counts<'py> {
        counts(py, &self.freed.offsets)
    }

    /// The exceptions by item number.
    #[getter]
    fn errors<'py>(&self, py: Python<'py>) -> ErrorsByItem<'py> {
        self.errors.bind(py).clone().into()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let (items, errors) = (self.num_exact.len(), self.errors.bind(py).len());
        format!("<InsertBatch of {items} items, {errors} with errors>")
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.errors)
    }
}

/// An argument's items, still Python's.
type Objects<'py> = Vec<Bound<'py, PyAny>>;

pub(crate) fn lookup_many(
    py: Python<'_>,
    index: &SharedIndex,
    seqs: &Bound<'_, PyAny>,
    keep_last: i128,
    touch: bool,
    starts: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyMatchBatch> {
    const CALL: &str = "RadixIndex.lookup_many";
    let keep_last = Arg::new(CALL, "keep_last").count(keep_last)?;
    let seqs = objects(seqs, Arg::new(CALL, "seqs"))?;
    let starts = optional(starts, seqs.len(), Arg::new(CALL, "starts"))?;
    let mut errors = Errors::new(py);
    let mut items = Vec::with_capacity(seqs.len());
    for (item, seq) in seqs.iter().enumerate() {
        let read = || {
            let seq = sequence(seq, item, CALL)?;
            let start = count_at(starts.as_ref(), item, Arg::new(CALL, "starts"))?;
            Ok((
                seq,
                LookupOptions {
                    keep_last,
                    touch,
                    start,
                },
            ))
        };
        items.push(errors.keep(item, read())?);
    }
    let steps =
        |index: &RadixIndex, seq: &TokenSequence, _: &LookupOptions| index.unknown_steps(seq);
    let found = run(py, index, &items, steps, |index, seq, &options| {
        let mut blocks = Vec::new();
        index
            .lookup(seq, options, &mut blocks)
            .map(|found| (found.num_tokens, blocks))
    })?;
    let mut batch = PyMatchBatch {
        num_tokens: Vec::with_capacity(seqs.len()),
        blocks: Flat::new(),
        errors: errors.dict(),
    };
    for (item, found) in found.into_iter().enumerate() {
        let (num_tokens, blocks) = errors.settle(item, found)?.unwrap_or_default();
        batch.num_tokens.push(num_tokens);
        batch.blocks.push(&blocks);
    }
    Ok(batch)
}

pub(crate) fn plan_many(
    py: Python<'_>,
    index: &Arc<SharedIndex>,
    seqs: &Bound<'_, PyAny>,
    policies: Option<&Bound<'_, PyAny>>,
    keep_last: i128,
    pin: bool,
) -> PyResult<PyPlanBatch> {
    const CALL: &str = "RadixIndex.plan_many";
    let keep_last = Arg::new(CALL, "keep_last").count(keep_last)?;
    let seqs = objects(seqs, Arg::new(CALL, "seqs"))?;
    let policies = optional(policies, seqs.len(), Arg::new(CALL, "policies"))?;
    let mut errors = Errors::new(py);
    let mut items = Vec::with_capacity(seqs.len());
    for (item, seq) in seqs.iter().enumerate() {
        let read = || {
            let seq = sequence(seq, item, CALL)?;
            Ok((
                seq,
                policy(
                    policies.as_ref().map(|policies| &policies[item]),
                    item,
                    CALL,
                )?,
            ))
        };
        items.push(errors.keep(item, read())?);
    }
    for (_, policy) in items.iter().flatten() {
        index.warn_of_unknown_kinds(py, policy, CALL)?;
    }
    let steps = |index: &RadixIndex, seq: &TokenSequence, policy: &&ReusePolicy| {
        if policy.approximate || index.has_broken_paths() {
            return u64::MAX;
        }
        // The path that is known is gone over once more, to pin it.
        index.unknown_steps(seq) + index.known_edges(seq)
    };
    let planned = run(py, index, &items, steps, |index, seq, policy| {
        index.plan(seq, policy, PlanOptions { keep_last, pin })
    })?;
    // From here on each plan releases itself, whatever happens.
    let planned: Vec<_> = planned
        .into_iter()
        .map(|plan| plan.map(|plan| plan.map(|core| PyReusePlan::new(core, Arc::clone(index)))))
        .collect();
    let plans = PyList::empty(py);
    let (mut blocks, mut num_new_blocks) = (Flat::new(), Vec::with_capacity(seqs.len()));
    for (item, plan) in planned.into_iter().enumerate() {
        let plan = errors.settle(item, plan)?;
        let core = plan.as_ref().map(PyReusePlan::core);
        blocks.push(core.map_or(&[], |core| core.blocks()));
        num_new_blocks.push(core.map_or(0, kvtrie_core::ReusePlan::num_new_blocks));
        plans.append(plan)?;
    }
    Ok(PyPlanBatch {
        plans: plans.unbind(),
        blocks,
        num_new_blocks,
        errors: errors.dict(),
    })
}

#[expect(
    clippy::too_many_arguments,
    reason = "the arguments of the Python call"
)]
pub(crate) fn insert_many(
    py: Python<'_>,
    index: &SharedIndex,
    seqs: &Bound<'_, PyAny>,
    blocks: &Bound<'_, PyAny>,
    offsets: &Bound<'_, PyAny>,
    num_computed: &Bound<'_, PyAny>,
    sources: &Bound<'_, PyAny>,
    starts: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyInsertBatch> {
    const CALL: &str = "RadixIndex.insert_many";
    let seqs = objects(seqs, Arg::new(CALL, "seqs"))?;
    let blocks = Integers::open(blocks, Arg::new(CALL, "blocks"))?;
    let offsets = read_offsets(offsets, seqs.len(), blocks.len(), Arg::new(CALL, "offsets"))?;
    let num_computed = exactly(num_computed, seqs.len(), Arg::new(CALL, "num_computed"))?;
    let sources = exactly(sources, seqs.len(), Arg::new(CALL, "sources"))?;
    let starts = optional(starts, seqs.len(), Arg::new(CALL, "starts"))?;
    let mut errors = Errors::new(py);
    let mut items = Vec::with_capacity(seqs.len());
    for (item, seq) in seqs.iter().enumerate() {
        let read = || {
            let seq = sequence(seq, item, CALL)?;
            let range = offsets[item]..offsets[item + 1];
            let given = blocks.read(range, index.num_blocks, Arg::new(CALL, "blocks"))?;
            let given: Vec<BlockId> = given.into_iter().map(BlockId).collect();
            let num_computed = count_at(Some(&num_computed), item, Arg::new(CALL, "num_computed"))?;
            let start = count_at(starts.as_ref(), item, Arg::new(CALL, "starts"))?;
            let source = SourceArg::open(&sources[item], Arg::new(CALL, "sources"))?;
            Ok((seq, (given, num_computed, start, source)))
        };
        items.push(errors.keep(item, read())?);
    }
    let inserted = run(
        py,
        index,
        &items,
        |index, seq, (given, ..)| index.insert_steps(seq, given.len()),
        |index, seq, (given, num_computed, start, source)| {
            let source = source.core();
            index.insert(
                seq,
                given,
                InsertOptions {
                    num_computed: *num_computed,
                    start: *start,
                    source,
                    spans: &[],
                },
            )
        },
    )?;
    let mut batch = PyInsertBatch {
        blocks: Flat::new(),
        num_exact: Vec::with_capacity(seqs.len()),
        duplicates: Flat::new(),
        surplus: Flat::new(),
        freed: Flat::new(),
        errors: errors.dict(),
    };
    for (item, done) in inserted.into_iter().enumerate() {
        let done: Inserted = errors.settle(item, done)?.unwrap_or_default();
        batch.blocks.push(&done.blocks);
        batch.num_exact.push(done.num_exact);
        batch.duplicates.push(&done.duplicates);
        batch.surplus.push(&done.surplus);
        batch.freed.push(&done.freed);
    }
    Ok(batch)
}

pub(crate) fn release_many<'py>(
    py: Python<'py>,
    index: &SharedIndex,
    plans: &Bound<'py, PyAny>,
) -> PyResult<ErrorsByItem<'py>> {
    const CALL: &str = "RadixIndex.release_many";
    let plans = objects(plans, Arg::new(CALL, "plans"))?;
    let mut errors = Errors::new(py);
    let mut items = Vec::with_capacity(plans.len());
    for (item, plan) in plans.iter().enumerate() {
        if plan.is_none() {
            items.push(None);
            continue;
        }
        let plan = plan
            .cast::<PyReusePlan>()
            .map(Bound::get)
            .map_err(|_| Arg::new(CALL, "plans").wrong_item(item, plan, "a ReusePlan"));
        items.push(errors.keep(item, plan)?);
    }
    let done = py.enter_briefly(|keys, effort| {
        let mut index = keys.lock(&index.core, INDEX)?;
        let plans = items.iter().flatten();
        if !is_brief(
            plans.map(|plan| 1 + index.release_steps(plan.core())),
            effort,
        ) {
            return Ok(None);
        }
        let mut release = |plan: &PyReusePlan| plan.release_in(&mut index);
        let done = items.iter().map(|plan| plan.map(&mut release));
        Ok(Some(done.collect::<Vec<_>>()))
    })?;
    for (item, done) in done.into_iter().enumerate() {
        errors.settle(item, done.map(|done| done.map_err(Failure::from)))?;
    }
    Ok(errors.dict().into_bound(py).into())
}

/// Whether so many steps are little work.
fn is_brief(steps: impl Iterator<Item = u64>, effort: Effort) -> bool {
    steps.fold(0, u64::saturating_add) <= effort.nodes
}

/// Runs `work` on every item that is one, in order, with all locks held. `steps` says how long each takes at most.
fn run<T: Send + Sync, R: Send>(
    py: Python<'_>,
    index: &SharedIndex,
    items: &[Option<(&PyTokenSequence, T)>],
    steps: impl Fn(&RadixIndex, &TokenSequence, &T) -> u64 + Send + Sync,
    work: impl Fn(&mut RadixIndex, &mut TokenSequence, &T) -> Result<R, Error> + Send + Sync,
) -> PyResult<Vec<Option<Result<R, Failure>>>> {
    let address = |seq: &PyTokenSequence| std::ptr::from_ref(seq).addr();
    let mut seqs: Vec<&PyTokenSequence> = items.iter().flatten().map(|(seq, _)| *seq).collect();
    seqs.sort_unstable_by_key(|seq| address(seq));
    seqs.dedup_by_key(|seq| address(seq));
    let place_of = |seq: &PyTokenSequence| {
        seqs.binary_search_by_key(&address(seq), |seq| address(seq))
            .ok()
    };
    py.enter_briefly(|keys, effort| {
        let mut locked: Vec<Option<MutexGuard<'_, TokenSequence>>> = Vec::with_capacity(seqs.len());
        for seq in &seqs {
            locked.push(match keys.lock(&seq.core, SEQUENCE) {
                Ok(seq) => Some(seq),
                // It spoils its own item alone.
                Err(Failure::Poisoned(_)) => None,
                Err(failure) => return Err(failure),
            });
        }
        let mut index = keys.lock(&index.core, INDEX)?;
        if effort != Effort::ANY {
            let all = items.iter().flatten().map(|(seq, item)| {
                let seq = place_of(seq).and_then(|place| locked[place].as_deref());
                1 + seq.map_or(0, |seq| steps(&index, seq, item))
            });
            if !is_brief(all, effort) {
                return Ok(None);
            }
        }
        let mut one = |(seq, item): &(&PyTokenSequence, T)| match place_of(seq)
            .and_then(|place| locked[place].as_mut())
        {
            Some(seq) => work(&mut index, seq, item).map_err(Failure::from),
            None => Err(Failure::Poisoned(SEQUENCE)),
        };
        let done = items.iter().map(|item| item.as_ref().map(&mut one));
        Ok(Some(done.collect()))
    })
}

/// Collects what went wrong, by item.
struct Errors<'py> {
    py: Python<'py>,
    dict: Bound<'py, PyDict>,
}

impl<'py> Errors<'py> {
    fn new(py: Python<'py>) -> Self {
        Self {
            py,
            dict: PyDict::new(py),
        }
    }

    /// The value, or none and a note of the exception. What is no `Exception` spoils the call.
    fn keep<T>(&mut self, item: usize, result: PyResult<T>) -> PyResult<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_instance_of::<pyo3::exceptions::PyException>(self.py) => {
                self.dict.set_item(item, error.into_value(self.py))?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// As [`Self::keep`], for an item that may have failed before.
    fn settle<T>(
        &mut self,
        item: usize,
        result: Option<Result<T, Failure>>,
    ) -> PyResult<Option<T>> {
        match result {
            Some(result) => self.keep(item, result.map_err(PyErr::from)),
            None => Ok(None),
        }
    }

    fn dict(&self) -> Py<PyDict> {
        self.dict.clone().unbind()
    }
}

fn objects<'py>(value: &Bound<'py, PyAny>, arg: Arg) -> PyResult<Objects<'py>> {
    arg.iterate(value, "a list")?.collect()
}

fn exactly<'py>(value: &Bound<'py, PyAny>, count: usize, arg: Arg) -> PyResult<Objects<'py>> {
    let found = objects(value, arg)?;
    if found.len() == count {
        return Ok(found);
    }
    Err(PyValueError::new_err(format!(
        "{}: {} has {} items; it must have {count}, one for each of seqs",
        arg.call,
        arg.name,
        found.len()
    )))
}

fn optional<'py>(
    value: Option<&Bound<'py, PyAny>>,
    count: usize,
    arg: Arg,
) -> PyResult<Option<Objects<'py>>> {
    value.map(|value| exactly(value, count, arg)).transpose()
}

fn count_at(values: Option<&Objects<'_>>, item: usize, arg: Arg) -> PyResult<usize> {
    match values {
        Some(values) => arg.count(arg.int_at(item, &values[item])?),
        None => Ok(0),
    }
}

fn sequence<'a>(
    value: &'a Bound<'_, PyAny>,
    item: usize,
    call: &'static str,
) -> PyResult<&'a PyTokenSequence> {
    let seq = value.cast::<PyTokenSequence>();
    seq.map(Bound::get)
        .map_err(|_| Arg::new(call, "seqs").wrong_item(item, value, "a TokenSequence"))
}

fn policy<'a>(
    value: Option<&'a Bound<'_, PyAny>>,
    item: usize,
    call: &'static str,
) -> PyResult<&'a ReusePolicy> {
    let Some(value) = value else {
        return Ok(EXACT_ONLY.core());
    };
    let policy = value.cast::<PyReusePolicy>();
    policy
        .map(|policy| policy.get().core())
        .map_err(|_| Arg::new(call, "policies").wrong_item(item, value, "a ReusePolicy"))
}

fn read_offsets(
    value: &Bound<'_, PyAny>,
    count: usize,
    num_ids: usize,
    arg: Arg,
) -> PyResult<Vec<usize>> {
    let opened = Integers::open(value, arg)?;
    let limit = u64::try_from(num_ids).unwrap_or(u64::MAX).saturating_add(1);
    let offsets: Vec<usize> = opened
        .read(0..opened.len(), limit, arg)?
        .into_iter()
        .map(|offset| offset as usize)
        .collect();
    let ascending = offsets.is_sorted()
        && offsets.len() == count + 1
        && offsets.first() == Some(&0)
        && offsets.last() == Some(&num_ids);
    if ascending {
        return Ok(offsets);
    }
    let end = |offset: Option<&usize>| offset.map_or("none".to_owned(), usize::to_string);
    Err(PyValueError::new_err(format!(
        "{}: {} has {} values from {} to {}; it must have {}, which ascend from 0 to {num_ids}, the number of ids",
        arg.call,
        arg.name,
        offsets.len(),
        end(offsets.first()),
        end(offsets.last()),
        count + 1,
    )))
}
