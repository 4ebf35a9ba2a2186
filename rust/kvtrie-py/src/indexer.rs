//! The classes of an index of many workers: `KvIndexer`, `PromptDigests` and `OverlapScores`.

use std::sync::Arc;
use std::time::Duration;

use kvtrie_cluster::{
    Applied, BlocksAhead, EventReader, FindOptions, IndexerConfig, KvIndexer, OverlapScores,
    Prompt, Refused, Stream, WorkerId,
};
use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::arguments::{arg, call, flag, int, of, optional_int, optional_of, optional_text, text};
use crate::buffers::Arg;
use crate::detach::{Cost, Enter, Keys, Lock};
use crate::errors::exception;
use crate::fetch::fetch;
use crate::hints::{Bytes8, Document, Flags, Names, TokenIds};
use crate::namespace::PyNamespace;
use crate::policy::PyReusePolicy;
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::transfer::hashing;

const INDEXER: &str = "the index of workers";

/// Bytes of events that are read and applied in about 50 µs.
const EVENT_BYTES: usize = 1 << 13;

/// Bytes of a line of memory, and how many lines of events are fetched before they are read. Most events are shorter, and
/// what follows in a longer one the processor fetches by itself by then.
const LINE_BYTES: usize = 64;
const LINES_AHEAD: usize = 32;

/// The index and the names of its workers, in the order of the columns.
struct Named {
    core: KvIndexer,
    names: Arc<Vec<String>>,
}

/// Which of many workers holds how much of a prompt, from the KV events that their engines publish.
///
/// `kvtrie.cluster.subscribe` feeds it over ZMQ; `apply` takes the bytes of one batch. It keeps
/// digests under a key, and no prompt. All calls may be made from any thread.
///
/// Args:
///     block_size: Tokens per block, equal for all workers.
///     key: 16 to 64 secret bytes. Replicas with equal keys have equal digests.
///     moved_runs: Whether runs elsewhere in the cache are found, for some memory per block.
///     min_run: Tokens of the shortest run elsewhere that counts, rounded up to whole blocks; None
///         means two blocks.
///     max_workers: Most workers at a time.
///     max_blocks: Most blocks that one worker may add, and hold.
///     max_parked: Most blocks of a worker whose parent is not known yet.
///     max_batch_bytes: Largest batch of events.
///
/// Raises:
///     TypeError: `key` is not bytes, or a number not an int.
///     ValueError: A number is outside its limits, or the key does not have 16 to 64 bytes.
///
/// Example:
///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> worker = index.add_worker("decode-0", space)
///     >>> prompt = kvtrie.TokenSequence(range(100), space)
///     >>> index.find_matches(prompt).exact
///     array([0], dtype=uint32)
#[pyclass(frozen, weakref, module = "kvtrie", name = "KvIndexer")]
pub(crate) struct PyKvIndexer {
    named: Lock<Named>,
    reader: EventReader,
    config: IndexerConfig,
}

/// The digests of a prompt under the key of one index. `KvIndexer.digests` makes it.
///
/// Example:
///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index.digests(kvtrie.TokenSequence(range(100), space)).num_tokens
///     100
#[pyclass(frozen, module = "kvtrie", name = "PromptDigests")]
pub(crate) struct PyPromptDigests {
    core: Prompt,
    has_moved: bool,
}

#[pymethods]
impl PyPromptDigests {
    /// Tokens of the prompt.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.core.num_tokens()
    }

    fn __repr__(&self) -> String {
        format!("<PromptDigests of {} tokens>", self.core.num_tokens())
    }
}

/// How much of a prompt each worker holds. All arrays are in the order of `workers`, and fresh at
/// every access.
///
/// Example:
///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> worker = index.add_worker("decode-0", space)
///     >>> scores = index.find_matches(kvtrie.TokenSequence(range(100), space))
///     >>> scores.workers, scores.moved, scores.tier, scores.uncertain
///     (('decode-0',), array([0], dtype=uint32), array([0], dtype=uint8), array([False]))
#[pyclass(frozen, module = "kvtrie", name = "OverlapScores")]
pub(crate) struct PyOverlapScores {
    core: OverlapScores,
    names: Arc<Vec<String>>,
}

#[pymethods]
impl PyOverlapScores {
    /// The names of the workers.
    #[getter]
    fn workers<'py>(&self, py: Python<'py>) -> PyResult<Names<'py>> {
        Ok(PyTuple::new(py, self.names.iter())?.into())
    }

    /// Tokens from position 0 whose exact KV the worker holds, in any tier.
    #[getter]
    fn exact<'py>(&self, py: Python<'py>) -> TokenIds<'py> {
        PyArray1::from_slice(py, &self.core.exact).into()
    }

    /// Tokens after these in runs elsewhere that the worker's own plan reuses, by the policy of
    /// `KvIndexer.set_policy` and the sessions of its events. Its plan of the prompt with the same
    /// `session` and `moved_end` reuses at least `exact + moved` tokens where `tier` is 0, `moved`
    /// elsewhere, but for what no event says (rule C13). 0 where that is not known, and unless the
    /// policy of the search allows approximate reuse.
    #[getter]
    fn moved<'py>(&self, py: Python<'py>) -> TokenIds<'py> {
        self.runs(py, &self.core.moved)
    }

    /// All tokens after the exact ones in runs that the worker holds elsewhere, those of `moved` among
    /// them: fingerprints are compared and not tokens, and the worker decides what it may reuse. 0
    /// unless the policy of the search allows approximate reuse.
    #[getter]
    fn possible<'py>(&self, py: Python<'py>) -> TokenIds<'py> {
        self.runs(py, &self.core.possible)
    }

    /// The slowest tier from which one of the exact tokens must be loaded: 0 the device, 1 the host,
    /// 2 a disk, 3 anything else.
    #[getter]
    fn tier<'py>(&self, py: Python<'py>) -> Bytes8<'py> {
        let tiers: Vec<u8> = self.core.tier.iter().map(|&tier| tier as u8).collect();
        PyArray1::from_vec(py, tiers).into()
    }

    /// Whether events of the worker may be missing, so that its other figures are not promised.
    #[getter]
    fn uncertain<'py>(&self, py: Python<'py>) -> Flags<'py> {
        PyArray1::from_slice(py, &self.core.uncertain).into()
    }

    fn __repr__(&self) -> String {
        let most = self.core.exact.iter().max().copied().unwrap_or_default();
        let count = self.core.exact.len();
        format!("<OverlapScores of {count} workers, at most {most} exact tokens>")
    }
}

impl PyOverlapScores {
    /// One number per worker, 0 if no moved runs were looked for.
    fn runs<'py>(&self, py: Python<'py>, found: &[u32]) -> TokenIds<'py> {
        if found.is_empty() {
            return PyArray1::<u32>::zeros(py, self.core.exact.len(), false).into();
        }
        PyArray1::from_slice(py, found).into()
    }
}

fn stream_of(approximate: bool) -> Stream {
    if approximate {
        Stream::Approximate
    } else {
        Stream::Engine
    }
}

/// What a batch did, as a copy of what nearly all do, which is quicker than a dict from nothing.
fn counts_of(py: Python<'_>, applied: Applied) -> PyResult<Document<'_>> {
    static USUAL: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let usual = USUAL.get_or_try_init(py, || {
        let counts = PyDict::new(py);
        counts.set_item(intern!(py, "events"), 1)?;
        counts.set_item(intern!(py, "refused"), 0)?;
        counts.set_item(intern!(py, "cleared"), false)?;
        PyResult::Ok(counts.unbind())
    })?;
    let counts = usual.bind(py).copy()?;
    if applied.events != 1 {
        counts.set_item(intern!(py, "events"), applied.events)?;
    }
    if applied.refused != 0 {
        counts.set_item(intern!(py, "refused"), applied.refused)?;
    }
    if applied.cleared {
        counts.set_item(intern!(py, "cleared"), true)?;
    }
    Ok(counts.into())
}

impl PyKvIndexer {
    fn worker(call: &'static str, worker: i128) -> PyResult<WorkerId> {
        Arg::new(call, "worker")
            .within(worker, 0, u64::MAX)
            .map(WorkerId)
    }

    fn prompt(&self, py: Python<'_>, seq: &PyTokenSequence, moved: bool) -> PyResult<Prompt> {
        let cost = hashing(seq.len(py)?);
        py.enter(cost, |keys| {
            let seq = keys.lock(&seq.core, SEQUENCE)?;
            Ok(self.reader.prompt(&seq, moved))
        })
    }
}

#[pymethods]
impl PyKvIndexer {
    #[new]
    #[pyo3(signature = (
        block_size: "SupportsIndex", key: "bytes", *, moved_runs: "bool" = true, min_run: "SupportsIndex | None" = None, max_workers: "SupportsIndex" = 1024, max_blocks: "SupportsIndex" = 16_777_216, max_parked: "SupportsIndex" = 8192, max_batch_bytes: "SupportsIndex" = 67_108_864
    ))]
    #[expect(clippy::too_many_arguments, reason = "all but two are keywords")]
    fn new(
        #[pyo3(from_py_with = int::<call::KvIndexer, arg::BlockSize>)] block_size: i128,
        #[pyo3(from_py_with = of::<call::KvIndexer, arg::Key, PyBytes>)] key: &Bound<'_, PyBytes>,
        #[pyo3(from_py_with = flag::<call::KvIndexer, arg::MovedRuns>)] moved_runs: bool,
        #[pyo3(from_py_with = optional_int::<call::KvIndexer, arg::MinRun>)] min_run: Option<i128>,
        #[pyo3(from_py_with = int::<call::KvIndexer, arg::MaxWorkers>)] max_workers: i128,
        #[pyo3(from_py_with = int::<call::KvIndexer, arg::MaxBlocks>)] max_blocks: i128,
        #[pyo3(from_py_with = int::<call::KvIndexer, arg::MaxParked>)] max_parked: i128,
        #[pyo3(from_py_with = int::<call::KvIndexer, arg::MaxBatchBytes>)] max_batch_bytes: i128,
    ) -> PyResult<Self> {
        let count = |name, value| Arg::new("KvIndexer", name).count(value);
        let mut config = IndexerConfig::new(count("block_size", block_size)?);
        config.moved_runs = moved_runs;
        if let Some(min_run) = min_run {
            config.min_run = count("min_run", min_run)?;
        }
        config.max_workers = count("max_workers", max_workers)?;
        config.max_blocks = count("max_blocks", max_blocks)?;
        config.max_parked = count("max_parked", max_parked)?;
        config.max_batch_bytes = count("max_batch_bytes", max_batch_bytes)?;
        let core = KvIndexer::new(config.clone(), key.as_bytes());
        let core = core.map_err(|error| exception(&error))?;
        Ok(Self {
            reader: core.reader().clone(),
            config,
            named: Lock::new(Named {
                core,
                names: Arc::default(),
            }),
        })
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.config.block_size
    }

    /// Whether runs elsewhere in the cache can be found.
    #[getter]
    fn moved_runs(&self) -> bool {
        self.config.moved_runs
    }

    /// Tokens of the shortest run elsewhere that counts.
    #[getter]
    fn min_run(&self) -> usize {
        self.config.min_run
    }

    /// The names of the live workers, in the order in which they were added.
    #[getter]
    fn workers<'py>(&self, py: Python<'py>) -> PyResult<Names<'py>> {
        let names = py.enter(Cost::Short, |keys| {
            Ok(Arc::clone(&keys.lock(&self.named, INDEXER)?.names))
        })?;
        Ok(PyTuple::new(py, names.iter())?.into())
    }

    /// Add a worker: one engine, or one data-parallel rank of it.
    ///
    /// Args:
    ///     name: Its name, which no live worker has.
    ///     namespace: The namespace of its requests without an adapter and a salt. Events that name
    ///         an adapter or a salt replace those of the namespace.
    ///
    /// Returns:
    ///     Its number, for the other calls. No number is given twice.
    ///
    /// Raises:
    ///     ValueError: The name is empty or taken, or there are `max_workers` already.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index.add_worker("decode-0", space), index.add_worker("decode-1", space)
    ///     (0, 1)
    #[pyo3(signature = (name: "str", namespace: "Namespace"))]
    fn add_worker(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text::<call::KvIndexerAddWorker, arg::Name>)] name: String,
        #[pyo3(from_py_with = of::<call::KvIndexerAddWorker, arg::Namespace, PyNamespace>)]
        namespace: &Bound<'_, PyNamespace>,
    ) -> PyResult<u64> {
        const CALL: &str = "KvIndexer.add_worker";
        if name.is_empty() {
            return Err(PyValueError::new_err(format!("{CALL}: name is empty")));
        }
        let namespace = Arc::clone(&namespace.get().core);
        let added = py.enter(Cost::Short, |keys| {
            let mut named = keys.lock(&self.named, INDEXER)?;
            if named.names.contains(&name) {
                return Ok(Err(name));
            }
            let id = named.core.add_worker(namespace)?;
            Arc::make_mut(&mut named.names).push(name);
            Ok(Ok(id.0))
        })?;
        added.map_err(|name| {
            PyValueError::new_err(format!(
                "{CALL}: name is {name:?}, and a live worker has it"
            ))
        })
    }

    /// Remove a worker. The next search does not know it, whatever it held.
    ///
    /// Args:
    ///     worker: Its number.
    ///
    /// Raises:
    ///     StaleHandleError: There is no such worker.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> worker = index.add_worker("a", kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> index.remove_worker(worker)
    ///     >>> index.workers
    ///     ()
    #[pyo3(signature = (worker: "SupportsIndex"))]
    fn remove_worker(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::KvIndexerRemoveWorker, arg::Worker>)] worker: i128,
    ) -> PyResult<()> {
        let worker = Self::worker("KvIndexer.remove_worker", worker)?;
        py.enter(Cost::Short, |keys| {
            let mut named = keys.lock(&self.named, INDEXER)?;
            let column = named.core.workers().position(|known| known == worker);
            named.core.remove_worker(worker)?;
            if let Some(column) = column {
                Arc::make_mut(&mut named.names).remove(column);
            }
            Ok(())
        })
    }

    /// Forget what a worker holds, for example because it has restarted.
    ///
    /// Args:
    ///     worker: Its number.
    ///     approximate: True: only its approximate blocks; False: all others; None: both.
    ///
    /// Raises:
    ///     StaleHandleError: There is no such worker.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> worker = index.add_worker("a", kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> index.clear_worker(worker)
    #[pyo3(signature = (worker: "SupportsIndex", *, approximate: "bool | None" = None))]
    fn clear_worker(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::KvIndexerClearWorker, arg::Worker>)] worker: i128,
        approximate: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let worker = Self::worker("KvIndexer.clear_worker", worker)?;
        let approximate = approximate.map(flag::<call::KvIndexerClearWorker, arg::Approximate>);
        let stream = approximate.transpose()?.map(stream_of);
        py.enter(Cost::Short, |keys| {
            let mut named = keys.lock(&self.named, INDEXER)?;
            Ok(named.core.clear_worker(worker, stream)?)
        })
    }

    /// Say whether events of a worker may be missing.
    ///
    /// Args:
    ///     worker: Its number.
    ///     uncertain: Whether its scores are marked so.
    ///
    /// Raises:
    ///     StaleHandleError: There is no such worker.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index.set_uncertain(index.add_worker("a", space), True)
    ///     >>> index.find_matches(kvtrie.TokenSequence(range(100), space)).uncertain
    ///     array([ True])
    #[pyo3(signature = (worker: "SupportsIndex", uncertain: "bool"))]
    fn set_uncertain(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::KvIndexerSetUncertain, arg::Worker>)] worker: i128,
        #[pyo3(from_py_with = flag::<call::KvIndexerSetUncertain, arg::Uncertain>)] uncertain: bool,
    ) -> PyResult<()> {
        let worker = Self::worker("KvIndexer.set_uncertain", worker)?;
        py.enter(Cost::Short, |keys| {
            let mut named = keys.lock(&self.named, INDEXER)?;
            Ok(named.core.set_uncertain(worker, uncertain)?)
        })
    }

    /// Say that no event of a worker waits to be applied.
    ///
    /// So whoever feeds an index and then sleeps, or is late, leaves no old scores that count as
    /// certain. `kvtrie.cluster.subscribe` says it while it keeps up.
    ///
    /// Args:
    ///     worker: Its number.
    ///     milliseconds: How long from now on its scores stay certain, if it is not said again; 1 to
    ///         2**31 - 1. None: as long as nothing else makes them uncertain.
    ///
    /// Raises:
    ///     StaleHandleError: There is no such worker.
    ///     ValueError: The time is out of range.
    ///
    /// Example:
    ///     >>> import time
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index.set_certain_for(index.add_worker("a", space), 1)
    ///     >>> time.sleep(0.002)
    ///     >>> index.find_matches(kvtrie.TokenSequence(range(100), space)).uncertain
    ///     array([ True])
    #[pyo3(signature = (worker: "SupportsIndex", milliseconds: "SupportsIndex | None"))]
    fn set_certain_for(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::KvIndexerSetCertainFor, arg::Worker>)] worker: i128,
        #[pyo3(from_py_with = optional_int::<call::KvIndexerSetCertainFor, arg::Milliseconds>)]
        milliseconds: Option<i128>,
    ) -> PyResult<()> {
        let name = "KvIndexer.set_certain_for";
        let worker = Self::worker(name, worker)?;
        let time = milliseconds
            .map(|time| Arg::new(name, "milliseconds").within(time, 1, i32::MAX))
            .transpose()?
            .map(|time| Duration::from_millis(time.unsigned_abs().into()));
        py.enter(Cost::Short, |keys| {
            let mut named = keys.lock(&self.named, INDEXER)?;
            Ok(named.core.set_certain_for(worker, time)?)
        })
    }

    /// Say by which policy a worker plans.
    ///
    /// Its `moved` scores are what such a plan must reuse. Without a policy, as for a new worker, and
    /// under one that has another limit than `min_run` and its scope, they are 0, and all of its moved
    /// runs are `possible`. ``docs/cluster.md`` has the conditions.
    ///
    /// Args:
    ///     worker: Its number.
    ///     policy: The policy of all of its plans, with a `min_run`; None: it is not known, or the
    ///         worker moves no runs.
    ///
    /// Raises:
    ///     StaleHandleError: There is no such worker.
    ///     ValueError: The policy has no `min_run`, which then is the one of the worker's own index.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> worker = index.add_worker("a", kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> index.set_policy(worker, kvtrie.ReusePolicy(min_run=32))
    #[pyo3(signature = (worker: "SupportsIndex", policy: "ReusePolicy | None"))]
    fn set_policy(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::KvIndexerSetPolicy, arg::Worker>)] worker: i128,
        #[pyo3(from_py_with = optional_of::<call::KvIndexerSetPolicy, arg::Policy, PyReusePolicy>)]
        policy: Option<&Bound<'_, PyReusePolicy>>,
    ) -> PyResult<()> {
        let worker = Self::worker("KvIndexer.set_policy", worker)?;
        let policy = policy.map(|policy| policy.get().core().clone());
        py.enter(Cost::Short, |keys| {
            let mut named = keys.lock(&self.named, INDEXER)?;
            Ok(named.core.set_policy(worker, policy.as_ref())?)
        })
    }

    /// Apply one batch of KV events, as vLLM and SGLang publish them.
    ///
    /// The batch is read outside of the index's lock, and as a whole before any of it is applied.
    ///
    /// Args:
    ///     worker: The number of the worker that published it.
    ///     payload: The last frame of the message.
    ///     approximate: Whether it is from kvtrie's own topic, on which blocks are approximate.
    ///
    /// Returns:
    ///     Counts of the batch: `events`, `refused` (events that were left out), and whether one of
    ///     them `cleared` the worker.
    ///
    /// Raises:
    ///     EventError: It cannot be read, or is of another block size or data-parallel rank. Nothing
    ///         is applied.
    ///     StaleHandleError: There is no such worker.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> worker = index.add_worker("a", kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> index.apply(worker, bytes([0x92, 0x00, 0x90]))  # [0, []]: a time, and no event
    ///     {'events': 0, 'refused': 0, 'cleared': False}
    #[pyo3(signature = (worker: "SupportsIndex", payload: "bytes", *, approximate: "bool" = false))]
    fn apply<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = int::<call::KvIndexerApply, arg::Worker>)] worker: i128,
        #[pyo3(from_py_with = of::<call::KvIndexerApply, arg::Payload, PyBytes>)] payload: &Bound<
            '_,
            PyBytes,
        >,
        #[pyo3(from_py_with = flag::<call::KvIndexerApply, arg::Approximate>)] approximate: bool,
    ) -> PyResult<Document<'py>> {
        let worker = Self::worker("KvIndexer.apply", worker)?;
        let raw = payload.as_bytes();
        let lines = raw.chunks(LINE_BYTES).take(LINES_AHEAD);
        lines.for_each(|line| fetch(line.as_ptr()));
        let stream = stream_of(approximate);
        let cost = if raw.len() >= EVENT_BYTES {
            Cost::Long
        } else {
            Cost::Short
        };
        let applied = py.enter(cost, |keys| {
            // Memory that blocks will be stored in comes while their tokens are read.
            let mut ahead = |blocks: BlocksAhead<'_>| {
                if let Some(named) = Keys::lock_if_free(&self.named) {
                    named.core.lines(worker, blocks, fetch);
                }
            };
            let read = self.reader.read_ahead(raw, &mut ahead);
            let core = &mut keys.lock(&self.named, INDEXER)?.core;
            let applied = match &read {
                Ok(batch) => core.apply(worker, stream, batch),
                Err(error) => Err(error.clone()),
            };
            if applied.is_err() {
                // An unknown worker counts nothing, and is the error that is reported.
                core.count_refused_batch(worker)?;
            }
            Ok(applied?)
        })?;
        counts_of(py, applied)
    }

    /// Compute the digests of a prompt, for several searches.
    ///
    /// Args:
    ///     seq: The prompt. What follows its first item is not looked for.
    ///     moved: Whether its runs are looked for elsewhere, too.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index.digests(kvtrie.TokenSequence(range(100), space))
    ///     <PromptDigests of 100 tokens>
    #[pyo3(signature = (seq: "TokenSequence", *, moved: "bool" = false))]
    fn digests(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::KvIndexerDigests, arg::Seq, PyTokenSequence>)] seq: &Bound<
            '_,
            PyTokenSequence,
        >,
        #[pyo3(from_py_with = flag::<call::KvIndexerDigests, arg::Moved>)] moved: bool,
    ) -> PyResult<PyPromptDigests> {
        Ok(PyPromptDigests {
            core: self.prompt(py, seq.get(), moved)?,
            has_moved: moved,
        })
    }

    /// Find how much of a prompt each worker holds.
    ///
    /// Args:
    ///     seq: The prompt, or its `PromptDigests`.
    ///     policy: With approximate reuse, runs elsewhere count as `possible` and `moved`. The shortest
    ///         run is the index's, and no other limit of this policy is applied: workers have policies
    ///         of their own (`set_policy`). None means `kvtrie.EXACT_ONLY`.
    ///     keep_last: Tokens at the end that do not count: an engine computes the last one in any case.
    ///     session: The id of the prompt's conversation, 1 to 256 bytes, as its worker gets it.
    ///     moved_end: Where the last message begins, of which moved runs supply nothing, as its worker
    ///         will find it; None: nowhere.
    ///
    /// Raises:
    ///     ValueError: `keep_last` is negative, `moved_end` is not in the prompt, a session has no or
    ///         more than 256 bytes, the digests are of an index with another key or block
    ///         size, or were made without `moved` and the policy allows approximate reuse.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> worker = index.add_worker("a", space)
    ///     >>> index.find_matches(kvtrie.TokenSequence(range(100), space))
    ///     <OverlapScores of 1 workers, at most 0 exact tokens>
    #[pyo3(signature = (
        seq: "TokenSequence | PromptDigests", policy: "ReusePolicy | None" = None, *, keep_last: "SupportsIndex" = 0, session: "str | None" = None, moved_end: "SupportsIndex | None" = None
    ))]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "an argument is read into a value of its own"
    )]
    fn find_matches(
        &self,
        py: Python<'_>,
        seq: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = optional_of::<call::KvIndexerFindMatches, arg::Policy, PyReusePolicy>)]
        policy: Option<&Bound<'_, PyReusePolicy>>,
        #[pyo3(from_py_with = int::<call::KvIndexerFindMatches, arg::KeepLast>)] keep_last: i128,
        #[pyo3(from_py_with = optional_text::<call::KvIndexerFindMatches, arg::Session>)]
        session: Option<String>,
        #[pyo3(from_py_with = optional_int::<call::KvIndexerFindMatches, arg::MovedEnd>)] moved_end: Option<
            i128,
        >,
    ) -> PyResult<PyOverlapScores> {
        const CALL: &str = "KvIndexer.find_matches";
        let moved = policy.is_some_and(|policy| policy.get().core().approximate);
        let options = FindOptions {
            keep_last: Arg::new(CALL, "keep_last").count(keep_last)?,
            moved,
            session: session.as_deref(),
            moved_end: moved_end
                .map(|end| Arg::new(CALL, "moved_end").count(end))
                .transpose()?,
        };
        let made;
        let prompt = if let Ok(digests) = seq.cast::<PyPromptDigests>() {
            let digests = digests.get();
            if self.reader.looks_for_moved(moved) && !digests.has_moved {
                return Err(PyValueError::new_err(format!(
                    "{CALL}: the policy allows approximate reuse, and the digests were made without moved=True"
                )));
            }
            &digests.core
        } else if let Ok(seq) = seq.cast::<PyTokenSequence>() {
            made = self.prompt(py, seq.get(), moved)?;
            &made
        } else {
            let arg = Arg::new(CALL, "seq");
            return Err(arg.wrong_type(seq, "a TokenSequence or PromptDigests"));
        };
        let cost = if moved { Cost::Long } else { Cost::Short };
        py.enter(cost, |keys| {
            let named = keys.lock(&self.named, INDEXER)?;
            Ok(PyOverlapScores {
                core: named.core.find(prompt, options)?,
                names: Arc::clone(&named.names),
            })
        })
    }

    /// Return what is counted of one worker since it was added: blocks `stored`, copies `removed`,
    /// events left out by name, and more (``docs/cluster.md``).
    ///
    /// Args:
    ///     worker: Its number.
    ///
    /// Raises:
    ///     StaleHandleError: There is no such worker.
    ///
    /// Example:
    ///     >>> index = kvtrie.KvIndexer(16, b"a secret of yours")
    ///     >>> worker = index.add_worker("a", kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> index.worker_stats(worker)["stored"]
    ///     0
    #[pyo3(signature = (worker: "SupportsIndex"))]
    fn worker_stats<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = int::<call::KvIndexerWorkerStats, arg::Worker>)] worker: i128,
    ) -> PyResult<Document<'py>> {
        let worker = Self::worker("KvIndexer.worker_stats", worker)?;
        let (stats, has_slower) = py.enter(Cost::Short, |keys| {
            let named = keys.lock(&self.named, INDEXER)?;
            let stats = named.core.worker_stats(worker)?;
            Ok((stats, named.core.has_slower_tiers(worker)?))
        })?;
        let counts = PyDict::new(py);
        for (name, count) in [
            ("batches", stats.batches),
            ("refused_batches", stats.refused_batches),
            ("stored", stats.stored),
            ("removed", stats.removed),
            ("unknown_removals", stats.unknown_removals),
            ("conflicts", stats.conflicts),
            ("aliases", stats.aliases),
            ("over_limit", stats.over_limit),
            ("dropped_parked", stats.dropped_parked),
            ("entries", stats.entries),
            ("parked", stats.parked),
            ("blocks", stats.blocks),
        ] {
            counts.set_item(name, count)?;
        }
        let refused = PyDict::new(py);
        for reason in Refused::ALL {
            refused.set_item(reason.as_str(), stats.refused[reason as usize])?;
        }
        counts.set_item("refused", refused)?;
        counts.set_item("slower_tiers", has_slower)?;
        Ok(counts.into())
    }

    /// Return what a worker holds, in one number: its namespace, and each block with its copies.
    ///
    /// It is equal in indexes with equal keys and block sizes for workers that hold the same, in
    /// whatever order it came. Counts, and whether the worker is uncertain, are not part of it. It
    /// takes time in proportion to what the worker holds.
    ///
    /// Args:
    ///     worker: Its number.
    ///
    /// Raises:
    ///     StaleHandleError: There is no such worker.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> a, b = (kvtrie.KvIndexer(16, b"a secret of yours") for _ in range(2))
    ///     >>> a.digest(a.add_worker("w", space)) == b.digest(b.add_worker("w", space))
    ///     True
    #[pyo3(signature = (worker: "SupportsIndex"))]
    fn digest(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = int::<call::KvIndexerDigest, arg::Worker>)] worker: i128,
    ) -> PyResult<u128> {
        let worker = Self::worker("KvIndexer.digest", worker)?;
        py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&self.named, INDEXER)?.core.digest(worker)?)
        })
    }

    /// A number of 64 bits that is equal for indexes with equal keys and block sizes. Who has it can
    /// test guesses of the key.
    ///
    /// Example:
    ///     >>> one, same = (kvtrie.KvIndexer(16, b"a secret of yours") for _ in range(2))
    ///     >>> one.key_check == same.key_check
    ///     True
    #[getter]
    fn key_check(&self, py: Python<'_>) -> PyResult<u64> {
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.named, INDEXER)?.core.key_check())
        })
    }

    /// Return what is counted of the index: `workers`, unique `blocks` (holes among them), `edges`,
    /// `entries` (one per worker and block), `dead` lives whose memory is not given back yet, and
    /// `bytes`.
    ///
    /// Example:
    ///     >>> kvtrie.KvIndexer(16, b"a secret of yours").stats()["blocks"]
    ///     0
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Document<'py>> {
        let stats = py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&self.named, INDEXER)?.core.stats())
        })?;
        let counts = PyDict::new(py);
        for (name, count) in [
            ("workers", stats.workers),
            ("blocks", stats.blocks),
            ("edges", stats.edges),
            ("entries", stats.entries),
            ("dead", stats.dead),
            ("bytes", stats.bytes),
        ] {
            counts.set_item(name, count)?;
        }
        Ok(counts.into())
    }

    /// Check every invariant of the index, for tests.
    ///
    /// Raises:
    ///     KvTrieError: One is broken.
    ///
    /// Example:
    ///     >>> kvtrie.KvIndexer(16, b"a secret of yours").check()
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&self.named, INDEXER)?.core.check()?)
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let count = py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.named, INDEXER)?.names.len())
        })?;
        Ok(format!(
            "<KvIndexer of {count} workers, blocks of {} tokens>",
            self.config.block_size
        ))
    }
}
