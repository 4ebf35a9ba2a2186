//! The class `RadixIndex`.

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Config, ExplainOptions, Group, GroupOffers, GroupOptions, InsertOptions,
    LookupOptions, PlanOptions, RadixIndex, RestoreLimits, RestoredPool, SessionId,
};
use numpy::PyArray1;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::arguments::{
    arg, call, flag, int, of, optional_int, optional_of, optional_text, session, text,
};
use crate::buffers::{Arg, block_ids, nothing};
use crate::detach::{Cost, Enter, Keys, Lock};
use crate::errors::exception;
use crate::explain::{self, PyExplanation};
use crate::groups::{self, PyGroup, PyGroupStats};
use crate::hints::{Groups, Ids, Names, TokenIds};
use crate::namespace::PyNamespace;
use crate::output::{ids, truth};
use crate::pin::PyPin;
use crate::plan::PyReusePlan;
use crate::policy::{EXACT_ONLY, MIN_RUN, PyReusePolicy};
use crate::results::{PyInsertResult, PyMatch, PyRemoved};
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::shared::{INDEX, SharedIndex};
use crate::snapshot;
use crate::source::SourceArg;
use crate::span::PySpan;
use crate::stats::PyIndexStats;

/// A forest of radix trees, one per namespace, that maps tokens to block ids.
///
/// The index knows block ids in 0..num_blocks, each in at most one place, and never touches KV. Ids
/// that it does not know belong to the caller. `insert` gives ids to the index; every other call
/// that returns ids gives them back to the caller.
///
/// Arguments of another type raise `TypeError`. Any thread may call an index; one lock guards it. A
/// call that takes longer than about 100 µs releases the interpreter. After `os.fork` every call in
/// the child raises `StaleHandleError`, as do inherited plans, sequences, ledgers and allocators.
///
/// Args:
///     num_blocks: Blocks in the engine's KV pool, 1 to 2**31.
///     block_size: Tokens per block, 1 to 4096; any number, not only powers of two.
///     min_run: Shortest moved run in tokens, at least 8. The index keeps one window of eight
///         tokens per `min_run - 7` positions.
///     max_candidates: Most places, at least 1, at which a plan tries a window of a prompt: the
///         most recent ones. `ReusePlan.candidates_dropped` counts the others.
///     moved_runs: Whether the index can find moved runs. That costs about 1.1 bytes and 10 ns per
///         cached token at the default `min_run`. Set it to False where only exact KV is reused.
///     seed: Seeds every internal hash, 0 to 2**64-1. None draws one from the operating system.
///         Replicas that must agree need the same one; draw it at random if prompts are untrusted.
///         Results depend on it only in plans with `candidates_dropped`.
///     pool_id: Names the KV pool, 1 to 64 bytes; None draws 16 at random. `restore` compares it.
///     hash_bits: Bits kept of every internal hash, 0 to 64. For tests: with few bits, hashes
///         collide. Results depend on it only where they depend on the seed.
///     groups: Groups of layers besides group 0, whose layers attend to all tokens: sliding windows
///         and recurrent states, at most 15. `num_blocks` and `block_size` are those of group 0.
///     item_positions: Whether every item must say how many positions it takes: what a model with
///         M-RoPE needs, `RopeSpec.item_positions`. `insert` and `plan` refuse a sequence with
///         another, whose moved runs would be rotated by another number.
///
/// Raises:
///     TypeError: An argument has the wrong type.
///     ValueError: An argument is out of its range.
///
/// Example:
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=4)
///     >>> first = kvtrie.TokenSequence(range(1, 9), space)
///     >>> done = index.insert(first, [0, 1], num_computed=8, source=kvtrie.COMPUTED)
///     >>> second = kvtrie.TokenSequence([1, 2, 3, 4, 5, 6, 70, 80], space)
///     >>> with index.plan(second) as plan:
///     ...     print(plan.blocks, plan.num_exact, plan.gaps.tolist())
///     [0] 6 [[6, 8]]
#[pyclass(frozen, weakref, module = "kvtrie", name = "RadixIndex")]
pub(crate) struct PyRadixIndex {
    pub(crate) shared: Arc<SharedIndex>,
    min_run: usize,
    max_candidates: usize,
    moved_runs: bool,
    item_positions: bool,
    pool_id: Vec<u8>,
}

#[pymethods]
impl PyRadixIndex {
    #[new]
    #[pyo3(signature = (
        num_blocks: "SupportsIndex", block_size: "SupportsIndex" = 16, *, min_run: "SupportsIndex" = 16,
        max_candidates: "SupportsIndex" = 64, moved_runs: "bool" = true, seed: "SupportsIndex | None" = None,
        pool_id: "bytes | None" = None, hash_bits: "SupportsIndex" = 64, groups: "Iterable[Group]" = nothing(),
        item_positions: "bool" = false
    ), text_signature = "(num_blocks, block_size=16, *, min_run=16, max_candidates=64, moved_runs=True, seed=None, pool_id=None, hash_bits=64, groups=(), item_positions=False)")]
    #[expect(
        clippy::too_many_arguments,
        reason = "the keywords of Python's constructor"
    )]
    fn new(
        #[pyo3(from_py_with = int::<call::RadixIndex, arg::NumBlocks>)] num_blocks: i128,
        #[pyo3(from_py_with = int::<call::RadixIndex, arg::BlockSize>)] block_size: i128,
        #[pyo3(from_py_with = int::<call::RadixIndex, arg::MinRun>)] min_run: i128,
        #[pyo3(from_py_with = int::<call::RadixIndex, arg::MaxCandidates>)] max_candidates: i128,
        #[pyo3(from_py_with = flag::<call::RadixIndex, arg::MovedRuns>)] moved_runs: bool,
        #[pyo3(from_py_with = optional_int::<call::RadixIndex, arg::Seed>)] seed: Option<i128>,
        pool_id: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = int::<call::RadixIndex, arg::HashBits>)] hash_bits: i128,
        groups: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = flag::<call::RadixIndex, arg::ItemPositions>)] item_positions: bool,
    ) -> PyResult<Self> {
        let arg = |name| Arg::new("RadixIndex", name);
        let max_block_size = i64::try_from(Config::MAX_BLOCK_SIZE).unwrap_or(i64::MAX);
        let max_blocks = BlockId::MAX_BLOCKS;
        let num_blocks = arg("num_blocks").within(num_blocks, 1, max_blocks)?;
        let block_size = arg("block_size").within(block_size, 1, max_block_size)?;
        let block_size = arg("block_size").count(block_size.into())?;
        let min_run = arg("min_run").within(min_run, MIN_RUN, i64::MAX)?;
        let min_run = arg("min_run").count(min_run.into())?;
        let max_candidates = arg("max_candidates").within(max_candidates, 1, i64::MAX)?;
        let max_candidates = arg("max_candidates").count(max_candidates.into())?;
        let seed = match seed {
            Some(seed) => arg("seed").within(seed, 0, u64::MAX)?,
            None => u64::from_ne_bytes(random()?),
        };
        let pool_id = pool_id_or_random(pool_id, "RadixIndex")?;
        let hash_bits = arg("hash_bits").within(hash_bits, 0, 64)?;
        let core = RadixIndex::new(Config {
            num_blocks,
            block_size,
            seed,
            hash_bits,
            moved_runs,
            item_positions,
            min_run,
            max_candidates,
            pool_id,
            groups: given_groups(groups, block_size, "RadixIndex")?,
        });
        Ok(Self::around(core.map_err(|error| exception(&error))?))
    }

    /// Make an index from a snapshot. It returns the same results to all later calls.
    ///
    /// A snapshot has no plans: nothing is pinned, and condemned blocks wait for `take_freed`. All
    /// bytes are checked, but whoever can write them decides what blocks are said to hold.
    ///
    /// Args:
    ///     blob: The bytes, in any buffer of bytes.
    ///     pool_id: The name of the pool that holds the blocks, `index.pool_id`, kept with the
    ///         pool. None if the KV is lost: the new index is empty, with the arguments and the
    ///         seed of the old one and a new `pool_id`.
    ///     max_blocks: The largest pool to accept, in blocks.
    ///
    /// Raises:
    ///     SnapshotError: The bytes are not a snapshot, are damaged, or are of another version, a
    ///         larger pool or another `pool_id`.
    ///     ValueError: `max_blocks` is out of its range, or `pool_id` does not have 1 to 64 bytes.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8)
    ///     >>> again = kvtrie.RadixIndex.restore(index.snapshot(), pool_id=index.pool_id)
    ///     >>> again.digest() == index.digest()
    ///     True
    #[staticmethod]
    #[pyo3(signature = (
        blob: "Buffer", *, pool_id: "bytes | None", max_blocks: "SupportsIndex" = 16_777_216
    ) -> "RadixIndex")]
    fn restore(
        py: Python<'_>,
        blob: &Bound<'_, PyAny>,
        pool_id: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = int::<call::RadixIndexRestore, arg::MaxBlocks>)] max_blocks: i128,
    ) -> PyResult<Self> {
        let id = pool_id_or_random(pool_id, "RadixIndex.restore")?;
        let pool = match pool_id {
            Some(_) => RestoredPool::Kept(&id),
            None => RestoredPool::Lost(&id),
        };
        let arg = Arg::new("RadixIndex.restore", "max_blocks");
        let num_blocks = arg.within(max_blocks, 1, BlockId::MAX_BLOCKS)?;
        let core = snapshot::restore(py, blob, pool, RestoreLimits { num_blocks })?;
        Ok(Self::around(core))
    }

    /// Return the `pool_id` of the index of which a snapshot was made.
    ///
    /// Args:
    ///     blob: The bytes, in any buffer of bytes.
    ///
    /// Raises:
    ///     SnapshotError: The bytes are not a snapshot, are damaged, or are of another version.
    ///     TypeError: `blob` is not a buffer of bytes.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, pool_id=b"gpu0")
    ///     >>> kvtrie.RadixIndex.pool_of_snapshot(index.snapshot())
    ///     b'gpu0'
    #[staticmethod]
    #[pyo3(signature = (blob: "Buffer"))]
    fn pool_of_snapshot<'py>(
        py: Python<'py>,
        blob: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let id = snapshot::pool_of(py, blob)?;
        Ok(PyBytes::new(py, &id))
    }

    /// Return everything except plans as bytes, for `restore`. Equal indexes give equal bytes.
    ///
    /// The bytes contain the prompts and salts of all tenants, and the seed: keep them secret. They
    /// take little more than 4 * (block_size + 1) bytes per cached block.
    ///
    /// Example:
    ///     >>> len(kvtrie.RadixIndex(num_blocks=8).snapshot()) < 400
    ///     True
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        snapshot::snapshot(py, &self.shared)
    }

    /// Explain why the exact match of a prompt ends where it does, and what a plan would reuse.
    ///
    /// Nothing is touched. The index remembers holes, and the latest 4,096 departures while the
    /// prefix before them stays. Tokens whose departure is forgotten, or that were dropped with
    /// their namespace, are `"not_cached"`, or `"diverged"` if other tokens are cached there. Up to
    /// 64 namespaces of the same salt are searched as well, those with the nearest fields.
    ///
    /// Args:
    ///     seq: The prompt.
    ///     policy: What the plan may reuse; None means `ReusePolicy()`, which allows approximate
    ///         reuse.
    ///     context: Token ids to show before and after the position.
    ///     keep_last: Tokens at the end that the plan computes in any case.
    ///     session: The id of the conversation that the prompt belongs to, as for `plan`.
    ///     moved_end: Position from which on moved runs supply no token, as for `plan`.
    ///
    /// Raises:
    ///     ValueError: `context` or `keep_last` is negative, `moved_end` is not in the prompt, a
    ///         session has no or more than 256 bytes, or the policy's `min_run` is below the index's.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> gone = index.evict(1)
    ///     >>> index.explain(seq)
    ///     <Explanation: evicted at 2, 2 of 4 tokens exact>
    #[pyo3(signature = (
        seq: "TokenSequence", policy: "ReusePolicy | None" = None, *, context: "SupportsIndex" = 8, keep_last: "SupportsIndex" = 1,
        session: "str | None" = None, moved_end: "SupportsIndex | None" = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "all but two are keywords")]
    fn explain(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexExplain, arg::Seq, PyTokenSequence>)]
        seq: &Bound<'_, PyTokenSequence>,
        #[pyo3(from_py_with = optional_of::<call::RadixIndexExplain, arg::Policy, PyReusePolicy>)]
        policy: Option<&Bound<'_, PyReusePolicy>>,
        #[pyo3(from_py_with = int::<call::RadixIndexExplain, arg::Context>)] context: i128,
        #[pyo3(from_py_with = int::<call::RadixIndexExplain, arg::KeepLast>)] keep_last: i128,
        #[pyo3(from_py_with = session::<call::RadixIndexExplain, arg::Session>)] session: Option<
            SessionId,
        >,
        #[pyo3(from_py_with = optional_int::<call::RadixIndexExplain, arg::MovedEnd>)]
        moved_end: Option<i128>,
    ) -> PyResult<PyExplanation> {
        let arg = |name| Arg::new("RadixIndex.explain", name);
        let context = arg("context").count(context)?;
        let keep_last = arg("keep_last").count(keep_last)?;
        let moved_end = moved_end.map(|end| arg("moved_end").count(end));
        let options = ExplainOptions {
            context,
            keep_last,
            session,
            moved_end: moved_end.transpose()?,
            ..ExplainOptions::default()
        };
        let policy = policy.map(Bound::get);
        explain::explain(py, &self.shared, seq.get(), policy, options)
    }

    /// Blocks in the engine's pool.
    #[getter]
    fn num_blocks(&self) -> u64 {
        self.shared.num_blocks
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.shared.block_size
    }

    /// Shortest moved run in tokens.
    #[getter]
    fn min_run(&self) -> usize {
        self.min_run
    }

    /// Most places at which a plan tries a window of a prompt.
    #[getter]
    fn max_candidates(&self) -> usize {
        self.max_candidates
    }

    /// Whether the index can find moved runs.
    #[getter]
    fn moved_runs(&self) -> bool {
        self.moved_runs
    }

    /// Whether every item must say how many positions it takes.
    #[getter]
    fn item_positions(&self) -> bool {
        self.item_positions
    }

    /// The seed of every internal hash: a secret if prompts are untrusted.
    #[getter]
    fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// The groups of layers besides group 0.
    #[getter]
    fn groups<'py>(&self, py: Python<'py>) -> PyResult<Groups<'py>> {
        let groups = self.shared.groups.iter().map(PyGroup::of);
        Ok(PyTuple::new(py, groups.collect::<Vec<_>>())?.into())
    }

    /// Return the counters of a group besides group 0.
    ///
    /// Args:
    ///     group: The name of the group.
    ///
    /// Raises:
    ///     ValueError: The index has no group of that name.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8,
    ///     ...     groups=[kvtrie.Group.window("swa", window=32, num_blocks=4)])
    ///     >>> index.group_stats("swa")
    ///     GroupStats(indexed=0, pinned=0, evictable=0, condemned=0, waiting=0)
    #[pyo3(signature = (group: "str"))]
    fn group_stats(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = text::<call::RadixIndexGroupStats, arg::Group>)] group: String,
    ) -> PyResult<PyGroupStats> {
        let group = self.group(py, group, "RadixIndex.group_stats")?;
        let shared = &*self.shared;
        py.enter(Cost::Short, |keys| {
            let stats = keys.lock(&shared.core, INDEX)?.group_stats(group)?;
            Ok(PyGroupStats::from(stats))
        })
    }

    /// The name of the KV pool.
    #[getter]
    fn pool_id<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.pool_id)
    }

    /// Bits kept of every internal hash.
    #[getter]
    fn hash_bits(&self) -> u32 {
        self.shared.hash_bits
    }

    /// Find the longest run of present exact blocks from position 0. If the index has groups, it ends
    /// where every group can continue.
    ///
    /// The cost depends only on the prompt, and for a sequence that has grown since its last use
    /// here, only on the new tokens.
    ///
    /// Args:
    ///     seq: The sequence to look up.
    ///     keep_last: Tokens at the end that are not matched: 1 leaves an engine one token to compute.
    ///     touch: Whether the blocks found count as used, which delays their eviction.
    ///     start: Position in tokens of the first block to return, a multiple of the block size.
    ///
    /// Raises:
    ///     ValueError: `keep_last` or `start` is negative, or `start` is inside a block or beyond the
    ///         sequence.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.lookup(seq, keep_last=1)
    ///     Match(num_tokens=2, blocks=[6])
    #[pyo3(signature = (seq: "TokenSequence", *, keep_last: "SupportsIndex" = 0, touch: "bool" = true, start: "SupportsIndex" = 0))]
    fn lookup(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexLookup, arg::Seq, PyTokenSequence>)] seq: &Bound<
            '_,
            PyTokenSequence,
        >,
        #[pyo3(from_py_with = int::<call::RadixIndexLookup, arg::KeepLast>)] keep_last: i128,
        #[pyo3(from_py_with = flag::<call::RadixIndexLookup, arg::Touch>)] touch: bool,
        #[pyo3(from_py_with = int::<call::RadixIndexLookup, arg::Start>)] start: i128,
    ) -> PyResult<PyMatch> {
        const CALL: &str = "RadixIndex.lookup";
        let options = LookupOptions {
            keep_last: Arg::new(CALL, "keep_last").count(keep_last)?,
            touch,
            start: Arg::new(CALL, "start").count(start)?,
        };
        self.found(py, seq.clone(), options)
    }

    /// Look up the first ids of a prompt that has no sequence yet: `lookup(TokenSequence(...))` in one
    /// call. The sequence is `Match.sequence`.
    ///
    /// Args:
    ///     ids: Token ids, as for `TokenSequence`. They are copied.
    ///     namespace: Everything besides tokens that the KV depends on.
    ///     limit: How many of the ids are taken, as for `TokenSequence`.
    ///
    /// Raises:
    ///     TypeError, ValueError: As for `TokenSequence`.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.match([1, 2, 3, 4, 5], space, 3)
    ///     Match(num_tokens=2, blocks=[6])
    #[pyo3(
        name = "match",
        signature = (ids: "_Integers", namespace: "Namespace", limit: "SupportsIndex | None" = None),
        text_signature = "($self, ids, namespace, limit=None)"
    )]
    fn match_ids(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::<call::RadixIndexMatch, arg::Namespace, PyNamespace>)]
        namespace: &Bound<'_, PyNamespace>,
        #[pyo3(from_py_with = optional_int::<call::RadixIndexMatch, arg::Limit>)] limit: Option<
            i128,
        >,
    ) -> PyResult<PyMatch> {
        const CALL: &str = "RadixIndex.match";
        let limit = (limit, Arg::new(CALL, "limit"));
        let seq = PyTokenSequence::plain(ids, namespace, limit, Arg::new(CALL, "ids"))?;
        self.found(py, Bound::new(py, seq)?, LookupOptions::default())
    }

    /// Look the tokens of a match up again, and pin what is found until the pin is released.
    ///
    /// `Pin.found` has the blocks as they are then: if none has left since, those of the match. Less is
    /// found if some have left, and never more.
    ///
    /// Args:
    ///     found: The match. Its sequence must not have changed before the end of the match.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [6], num_computed=2, source=kvtrie.COMPUTED)
    ///     >>> with index.pin(index.lookup(seq)):
    ///     ...     index.evict(1)
    ///     array([], dtype=int32)
    #[pyo3(signature = (found: "Match"))]
    fn pin(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexPin, arg::Found, PyMatch>)] found: &Bound<
            '_,
            PyMatch,
        >,
    ) -> PyResult<PyPin> {
        PyPin::of(py, &self.shared, found.get())
    }

    /// Plan how to build the KV of a prompt, and pin what the plan uses.
    ///
    /// Whole exact blocks are used in place. After them, the exact tokens of the block that shares
    /// most of the following tokens are copied, unless the policy has `partial_blocks=False`. If
    /// the policy allows it, moved runs cover more. The rest is computed.
    ///
    /// If the index has groups, the blocks in place of an exact plan end where every group can continue,
    /// and nothing is copied. Moved runs are refused next to states, and `path` is refused.
    ///
    /// Args:
    ///     seq: The prompt.
    ///     policy: What may be reused; None means `kvtrie.EXACT_ONLY`.
    ///     keep_last: Tokens at the end that are computed in any case: an engine needs the last one's
    ///         logits.
    ///     pin: Whether the blocks that the plan uses are pinned until it is released.
    ///     path: A sequence of the same namespace. The plan uses only KV on the path of this
    ///         sequence, whatever the policy's scope is. Of two runs at the same distance, it uses
    ///         the one at the lower position. If a window of the prompt is on more paths than a plan
    ///         examines, `candidates_dropped` is not 0.
    ///     session: The id of the conversation that the prompt belongs to, 1 to 256 bytes, as given to
    ///         `insert`. One that no block belongs to is no error.
    ///     moved_end: Position from which on moved runs supply no token: where the last message
    ///         begins. None sets no limit.
    ///
    /// Raises:
    ///     ValueError: `keep_last` is negative, `moved_end` is not in the prompt, a session has no or
    ///         more than 256 bytes, the policy's `min_run` is below the index's, `path` is of
    ///         another namespace, `path` is given for an index with groups, or the policy has
    ///         `approximate` and the index a group with states.
    ///
    /// Example:
    ///     >>> space, text = kvtrie.Namespace(model="m", salt=kvtrie.SHARED), list(range(40))
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=4, min_run=8)
    ///     >>> seq = kvtrie.TokenSequence(text, space)
    ///     >>> done = index.insert(seq, range(8), num_computed=32, source=kvtrie.COMPUTED,
    ///     ...     session="chat")
    ///     >>> prompt = kvtrie.TokenSequence(text[:5] + text[20:], space)
    ///     >>> with index.plan(prompt, kvtrie.ReusePolicy(), session="chat") as plan:
    ///     ...     plan.segments[["start", "end", "delta", "class"]].tolist()
    ///     [(0, 4, 0, 0), (4, 5, 0, 0), (5, 17, -15, 1), (17, 25, 0, 2)]
    ///     >>> with index.plan(prompt, path=kvtrie.TokenSequence(text[:4] + [99], space)) as plan:
    ///     ...     plan.num_exact
    ///     4
    #[pyo3(signature = (seq: "TokenSequence", policy: "ReusePolicy | None" = None, *, keep_last: "SupportsIndex" = 1, pin: "bool" = true, path: "TokenSequence | None" = None, session: "str | None" = None, moved_end: "SupportsIndex | None" = None))]
    #[expect(clippy::too_many_arguments, reason = "all but two are keywords")]
    fn plan(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexPlan, arg::Seq, PyTokenSequence>)] seq: &Bound<
            '_,
            PyTokenSequence,
        >,
        #[pyo3(from_py_with = optional_of::<call::RadixIndexPlan, arg::Policy, PyReusePolicy>)]
        policy: Option<&Bound<'_, PyReusePolicy>>,
        #[pyo3(from_py_with = int::<call::RadixIndexPlan, arg::KeepLast>)] keep_last: i128,
        #[pyo3(from_py_with = flag::<call::RadixIndexPlan, arg::Pin>)] pin: bool,
        #[pyo3(from_py_with = optional_of::<call::RadixIndexPlan, arg::Path, PyTokenSequence>)]
        path: Option<&Bound<'_, PyTokenSequence>>,
        #[pyo3(from_py_with = session::<call::RadixIndexPlan, arg::Session>)] session: Option<
            SessionId,
        >,
        #[pyo3(from_py_with = optional_int::<call::RadixIndexPlan, arg::MovedEnd>)]
        moved_end: Option<i128>,
    ) -> PyResult<PyReusePlan> {
        let keep_last = Arg::new("RadixIndex.plan", "keep_last").count(keep_last)?;
        let policy = policy.map_or(&EXACT_ONLY, |policy| policy.get());
        let (shared, seq) = (&*self.shared, seq.get());
        shared.warn_of_unknown_kinds(py, policy.core(), "RadixIndex.plan")?;
        let moved_end = moved_end.map(|end| Arg::new("RadixIndex.plan", "moved_end").count(end));
        let options = PlanOptions {
            keep_last,
            pin,
            session,
            moved_end: moved_end.transpose()?,
        };
        if let Some(path) = path.map(Bound::get) {
            let core = py.enter(Cost::Long, |keys| {
                // The sequence is copied, because no thread may lock two sequences.
                let path = keys.lock(&path.core, SEQUENCE)?.clone();
                let mut seq = keys.lock(&seq.core, SEQUENCE)?;
                let mut index = keys.lock(&shared.core, INDEX)?;
                Ok(index.plan_from(&mut seq, &path, policy.core(), options)?)
            })?;
            return Ok(PyReusePlan::new(core, Arc::clone(&self.shared)));
        }
        let core = py.enter_briefly(|keys: &Keys<'_>, effort| {
            let mut seq = keys.lock(&seq.core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            // The known path is walked once more, to pin it.
            if index.known_edges(&seq) > effort.nodes {
                return Ok(None);
            }
            Ok(index.plan_within(&mut seq, policy.core(), options, effort)?)
        })?;
        Ok(PyReusePlan::new(core, Arc::clone(&self.shared)))
    }

    /// Offer blocks for the front of a sequence.
    ///
    /// The index takes blocks wholly below `num_computed`, labels them by their source, and pins
    /// them with the plan if the source is one. Where a block is cached already, that one stays and
    /// the offered block is a duplicate.
    ///
    /// Args:
    ///     seq: The sequence that the blocks belong to.
    ///     blocks: Block ids, the first for the tokens at `start`.
    ///     num_computed: Tokens from position 0 whose KV is computed.
    ///     start: Position in tokens of the first id, a multiple of the block size.
    ///     source: Where the KV came from: the plan with which it was built, `kvtrie.COMPUTED`, or
    ///         `kvtrie.Imported(...)`.
    ///     spans: Tags to set afterwards, as `tag` does.
    ///     session: The id of the conversation that the sequence belongs to, 1 to 256 bytes. The
    ///         blocks of the sequence belong to it from then on. A block belongs to at most eight
    ///         conversations; one more replaces the one that came first.
    ///     groups: For each group's name, pairs (position, id) or an integer array of shape (n, 2),
    ///         ascending. The position of a block is that of its first token, the position of a state
    ///         the number of tokens before it; both are multiples of the block size. Only exact KV
    ///         is taken, at places of group 0's blocks that have no id of the group yet.
    ///     stops: Positions at which later prompts may continue, ascending multiples of the block size;
    ///         `kvtrie.tags.stops` finds them. What groups need there is evicted last, as is what they
    ///         need at the sequence's end and at states.
    ///
    /// Raises:
    ///     BlockInUseError: An id backs another place, or occurs twice.
    ///     StaleHandleError: The plan was released.
    ///     ValueError: An id is outside the pool, there are too few ids, a position is out of range, a
    ///         span is bad, the plan is of another index or prompt, a session has no or more than
    ///         256 bytes, or there is no group of a name.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> index.insert(seq, [4, 5], num_computed=3, source=kvtrie.COMPUTED)
    ///     InsertResult(blocks=[4], num_exact=2, duplicates=[], surplus=[5], freed=[])
    #[pyo3(signature = (
        seq: "TokenSequence", blocks: "_Integers", *,
        num_computed: "SupportsIndex", start: "SupportsIndex" = 0,
        source: "ReusePlan | ComputedSource | Imported", spans: "Iterable[Span]" = nothing(),
        session: "str | None" = None, groups: "Mapping[str, _Ranges] | None" = None,
        stops: "Sequence[SupportsIndex]" = nothing()
    ), text_signature = "($self, seq, blocks, *, num_computed, start=0, source, spans=(), session=None, groups=None, stops=())")]
    #[expect(clippy::too_many_arguments, reason = "all but two are keywords")]
    fn insert(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexInsert, arg::Seq, PyTokenSequence>)] seq: &Bound<
            '_,
            PyTokenSequence,
        >,
        blocks: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = int::<call::RadixIndexInsert, arg::NumComputed>)] num_computed: i128,
        #[pyo3(from_py_with = int::<call::RadixIndexInsert, arg::Start>)] start: i128,
        source: &Bound<'_, PyAny>,
        spans: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = session::<call::RadixIndexInsert, arg::Session>)] session: Option<
            SessionId,
        >,
        groups: Option<&Bound<'_, PyAny>>,
        stops: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyInsertResult> {
        const CALL: &str = "RadixIndex.insert";
        let blocks = block_ids(blocks, self.shared.num_blocks, Arg::new(CALL, "blocks"))?;
        let num_computed = Arg::new(CALL, "num_computed").count(num_computed)?;
        let start = Arg::new(CALL, "start").count(start)?;
        let source = SourceArg::open(source, Arg::new(CALL, "source"))?;
        let spans = match spans {
            Some(given) => crate::span::spans(given, Arg::new(CALL, "spans"))?,
            None => Vec::new(),
        };
        let (shared, seq) = (&*self.shared, seq.get());
        let given = groups::offers(groups, &shared.groups, Arg::new(CALL, "groups"))?;
        let offered = given.iter().map(|(group, offers)| GroupOffers {
            group: *group,
            offers,
        });
        let offered: Vec<GroupOffers<'_>> = offered.collect();
        let stops = match stops {
            Some(given) => crate::buffers::count_list(given, Arg::new(CALL, "stops"))?,
            None => Vec::new(),
        };
        let (core, results) = py.enter_briefly(|keys, effort| {
            let mut seq = keys.lock(&seq.core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            let groups = GroupOptions {
                offers: &offered,
                stops: &stops,
            };
            let more = spans.len() as u64 + index.group_steps(&seq, groups);
            if index.insert_steps(&seq, blocks.len()) + more > effort.nodes {
                return Ok(None);
            }
            let source = source.core();
            let options = InsertOptions {
                num_computed,
                start,
                source,
                spans: &spans,
                session,
            };
            Ok(Some(
                index.insert_groups(&mut seq, &blocks, options, groups)?,
            ))
        })?;
        let name = |own: &GroupOffers<'_>| shared.groups[own.group - 1].name.clone();
        let names = offered.iter().map(name).collect();
        Ok(PyInsertResult::new(core, (names, results)))
    }

    /// Return the blocks whose last pin ended after they had left the index.
    ///
    /// Args:
    ///     group: The name of a group: the ids of it that left with blocks of group 0, pinned or not,
    ///         and are not pinned now. None means group 0.
    ///
    /// Returns:
    ///     Their ids (int32), oldest release first, those of a group ascending. They belong to the
    ///     caller from then on.
    ///
    /// Raises:
    ///     ValueError: The index has no group of that name.
    ///
    /// Example:
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> done = index.insert(seq, [6], num_computed=2, source=kvtrie.COMPUTED)
    ///     >>> with index.plan(seq):
    ///     ...     index.discard([6])
    ///     array([], dtype=int32)
    ///     >>> index.take_freed()
    ///     array([6], dtype=int32)
    #[pyo3(signature = (*, group: "str | None" = None))]
    fn take_freed<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = optional_text::<call::RadixIndexTakeFreed, arg::Group>)]
        group: Option<String>,
    ) -> PyResult<Ids<'py>> {
        let shared = &*self.shared;
        if let Some(group) = group {
            let group = self.group(py, group, "RadixIndex.take_freed")?;
            let freed = py.enter(Cost::Long, |keys| {
                Ok(keys.lock(&shared.core, INDEX)?.take_freed_group(group)?)
            })?;
            return Ok(ids(py, &freed));
        }
        let freed = py.enter_briefly(|keys, effort| {
            let mut index = keys.lock(&shared.core, INDEX)?;
            let is_brief = index.num_waiting() <= effort.nodes;
            Ok(is_brief.then(|| index.take_freed()))
        })?;
        Ok(ids(py, &freed))
    }

    /// Remove at most `n` blocks: first those that wait for `take_freed`, then dead blocks (see
    /// `mark_dead`), then the least recently used blocks, the deepest of a path first.
    ///
    /// Pinned blocks and blocks above them stay. A dead block is removed even above pinned blocks,
    /// if they are only sources of copies.
    ///
    /// From a group, it removes first ids that wait, then those of a window that no call has needed to
    /// continue, then the least recently used ones. Blocks of group 0 stay.
    ///
    /// Args:
    ///     n: Number of blocks.
    ///     group: The name of a group; None means group 0.
    ///
    /// Returns:
    ///     Their ids (int32) in order of eviction; fewer than `n` if no more can be removed. They
    ///     belong to the caller from then on.
    ///
    /// Raises:
    ///     ValueError: `n` is negative, or the index has no group of that name.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.evict(1)
    ///     array([0], dtype=int32)
    #[pyo3(signature = (n: "SupportsIndex", *, group: "str | None" = None))]
    fn evict<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = int::<call::RadixIndexEvict, arg::N>)] n: i128,
        #[pyo3(from_py_with = optional_text::<call::RadixIndexEvict, arg::Group>)] group: Option<
            String,
        >,
    ) -> PyResult<Ids<'py>> {
        let n = Arg::new("RadixIndex.evict", "n").count(n)?;
        let shared = &*self.shared;
        if let Some(group) = group {
            let group = self.group(py, group, "RadixIndex.evict")?;
            let evicted = py.enter(Cost::Long, |keys| {
                Ok(keys.lock(&shared.core, INDEX)?.evict_group(group, n)?)
            })?;
            return Ok(ids(py, &evicted));
        }
        let evicted = py.enter_briefly(|keys, effort| {
            Ok(keys.lock(&shared.core, INDEX)?.evict_within(n, effort))
        })?;
        Ok(ids(py, &evicted))
    }

    /// Remove blocks, wherever they are indexed, for instance because their KV is lost.
    ///
    /// Blocks below them stay, and match again once the hole is filled. `stats().unknown_discards`
    /// counts ids that are not in the index.
    ///
    /// Args:
    ///     block_ids: Ids in 0..num_blocks.
    ///     group: The name of a group, of which the ids then are. None means group 0.
    ///
    /// Returns:
    ///     The ids that are free now (int32), in call order. `take_freed` returns pinned ones
    ///     later.
    ///
    /// Raises:
    ///     ValueError: An id is outside the pool, or the index has no group of that name.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.discard([6, 7])
    ///     array([6], dtype=int32)
    #[pyo3(signature = (
        block_ids: "_Integers", *, group: "str | None" = None
    ) -> "npt.NDArray[np.int32]")]
    fn discard<'py>(
        &self,
        py: Python<'py>,
        block_ids: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = optional_text::<call::RadixIndexDiscard, arg::Group>)] group: Option<
            String,
        >,
    ) -> PyResult<Ids<'py>> {
        let arg = Arg::new("RadixIndex.discard", "block_ids");
        if let Some(group) = group {
            let group = self.group(py, group, "RadixIndex.discard")?;
            let limit = self.shared.groups[group - 1].num_blocks;
            let given = crate::buffers::block_ids(block_ids, limit, arg)?;
            let shared = &*self.shared;
            let freed = py.enter(Cost::Long, |keys| {
                Ok(keys
                    .lock(&shared.core, INDEX)?
                    .discard_group(group, &given)?)
            })?;
            return Ok(ids(py, &freed));
        }
        let given = crate::buffers::block_ids(block_ids, self.shared.num_blocks, arg)?;
        let shared = &*self.shared;
        let freed = py.enter_briefly(|keys, effort| {
            Ok(keys
                .lock(&shared.core, INDEX)?
                .discard_within(&given, effort)?)
        })?;
        Ok(ids(py, &freed))
    }

    /// Take blocks out of use permanently, because their KV is not finite.
    ///
    /// They leave the index; no call returns them and `insert` refuses them. Pinned ones are
    /// condemned until their last release. Ids that the index did not know are quarantined too:
    /// their holder must not free them. Quarantine survives `reset`, `drop` and snapshots, and
    /// `digest` covers it.
    ///
    /// Args:
    ///     block_ids: Ids in 0..num_blocks. Repeated ids count once. `stats().unknown_discards` counts
    ///         those that are not indexed.
    ///
    /// Returns:
    ///     How many ids were not quarantined before.
    ///
    /// Raises:
    ///     ValueError: An id is outside the pool.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.quarantine([0])
    ///     1
    ///     >>> index.evict(9), index.quarantined
    ///     (array([6], dtype=int32), array([0], dtype=int32))
    #[pyo3(signature = (block_ids: "_Integers"))]
    fn quarantine(&self, py: Python<'_>, block_ids: &Bound<'_, PyAny>) -> PyResult<u64> {
        let arg = Arg::new("RadixIndex.quarantine", "block_ids");
        let given = crate::buffers::block_ids(block_ids, self.shared.num_blocks, arg)?;
        let shared = &*self.shared;
        // The call is rare, and walks all that plans pin of these blocks.
        py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.quarantine(&given)?)
        })
    }

    /// The quarantined ids, with those whose last pin has not ended, ascending (int32).
    #[getter]
    fn quarantined<'py>(&self, py: Python<'py>) -> PyResult<Ids<'py>> {
        let shared = &*self.shared;
        let all: Vec<BlockId> = py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.quarantined().collect())
        })?;
        Ok(ids(py, &all))
    }

    /// The tokens of the whole path down to a block, its own last (uint32); None if it is not indexed.
    ///
    /// They are the context in which the block's KV was computed, as far as the index knows it.
    /// Items count with the ids that stand for them inside the index.
    ///
    /// Args:
    ///     block: An id in 0..num_blocks.
    ///
    /// Raises:
    ///     ValueError: The id is outside the pool.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 7), space)
    ///     >>> done = index.insert(seq, [6, 0, 3], num_computed=6, source=kvtrie.COMPUTED)
    ///     >>> index.path_tokens(0)
    ///     array([1, 2, 3, 4], dtype=uint32)
    #[pyo3(signature = (block: "SupportsIndex"))]
    fn path_tokens<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = int::<call::RadixIndexPathTokens, arg::Block>)] block: i128,
    ) -> PyResult<Option<TokenIds<'py>>> {
        let shared = &*self.shared;
        let most = u32::try_from(shared.num_blocks - 1).unwrap_or(u32::MAX);
        let id: u32 = Arg::new("RadixIndex.path_tokens", "block").within(block, 0, most)?;
        let tokens = py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.path_tokens(BlockId(id)))
        })?;
        Ok(tokens.map(|tokens| PyArray1::from_vec(py, tokens).into()))
    }

    /// Mark blocks as dead: they are evicted before all others.
    ///
    /// The call marks the blocks wholly inside the ranges, except those above a present block that
    /// is not on the path of the sequence. The oldest mark is evicted first; within one mark, the
    /// last block. `lookup`, `plan` and `insert` remove the marks of blocks that they use. A pinned
    /// block leaves after its pins have ended. Tokens after a hole match again once it is filled.
    ///
    /// Args:
    ///     seq: The sequence to whose positions the ranges refer.
    ///     ranges: Pairs of positions (start, end), ascending and disjoint, as a list, a tuple or an
    ///         integer array of shape (n, 2). Ranges that touch are one.
    ///
    /// Returns:
    ///     How many blocks this call marked.
    ///
    /// Raises:
    ///     ValueError: A range is reversed, overlaps the one before it, or ends beyond the sequence.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 7), space)
    ///     >>> done = index.insert(seq, [6, 0, 3], num_computed=6, source=kvtrie.COMPUTED)
    ///     >>> index.mark_dead(seq, [(1, 4)])
    ///     1
    ///     >>> index.evict(2)
    ///     array([0, 3], dtype=int32)
    #[pyo3(signature = (seq: "TokenSequence", ranges: "_Ranges"))]
    fn mark_dead(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexMarkDead, arg::Seq, PyTokenSequence>)]
        seq: &Bound<'_, PyTokenSequence>,
        ranges: &Bound<'_, PyAny>,
    ) -> PyResult<u64> {
        let ranges = crate::ranges::ranges(ranges, Arg::new("RadixIndex.mark_dead", "ranges"))?;
        let (shared, seq) = (&*self.shared, seq.get());
        py.enter_briefly(|keys, effort| {
            let seq = keys.lock(&seq.core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            Ok(index.mark_dead_within(&seq, &ranges, effort)?)
        })
    }

    /// Remove blocks inside ranges. Holes remain where cached blocks are below.
    ///
    /// The call removes the blocks that `mark_dead` would mark. Blocks that a range cuts stay: this
    /// frees memory, it does not redact. Tokens after a hole match again once it is filled with
    /// exact KV. The index keeps the token ids of up to one hole per block of the pool. Beyond
    /// that, the least recently used blocks after holes leave too, and wait for `take_freed`.
    ///
    /// Args:
    ///     seq: The sequence to whose positions the ranges refer.
    ///     ranges: As for `mark_dead`.
    ///     force: Also remove blocks above blocks that are on other paths.
    ///
    /// Raises:
    ///     ValueError: As for `mark_dead`.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 7), space)
    ///     >>> done = index.insert(seq, [6, 0, 3], num_computed=6, source=kvtrie.COMPUTED)
    ///     >>> index.remove_spans(seq, [(1, 4)]).freed
    ///     array([0], dtype=int32)
    ///     >>> index.lookup(seq).num_tokens, index.stats().holes
    ///     (2, 1)
    #[pyo3(signature = (seq: "TokenSequence", ranges: "_Ranges", force: "bool" = false))]
    fn remove_spans(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexRemoveSpans, arg::Seq, PyTokenSequence>)]
        seq: &Bound<'_, PyTokenSequence>,
        ranges: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = flag::<call::RadixIndexRemoveSpans, arg::Force>)] force: bool,
    ) -> PyResult<PyRemoved> {
        let ranges = crate::ranges::ranges(ranges, Arg::new("RadixIndex.remove_spans", "ranges"))?;
        let (shared, seq) = (&*self.shared, seq.get());
        let core = py.enter_briefly(|keys, effort| {
            let seq = keys.lock(&seq.core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            Ok(index.remove_spans_within(&seq, &ranges, force, effort)?)
        })?;
        Ok(PyRemoved { core })
    }

    /// Remove a namespace. Plans made in it before insert no blocks.
    ///
    /// Args:
    ///     namespace: The namespace; it may be unknown.
    ///
    /// Returns:
    ///     The ids that are free now (int32), ascending. `take_freed` returns pinned ones later.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.drop(space)
    ///     array([0, 6], dtype=int32)
    #[pyo3(signature = (namespace: "Namespace"))]
    fn drop<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = of::<call::RadixIndexDrop, arg::Namespace, PyNamespace>)]
        namespace: &Bound<'py, PyNamespace>,
    ) -> PyResult<Ids<'py>> {
        let (shared, namespace) = (&*self.shared, &namespace.get().core);
        let freed = py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.drop_namespace(namespace))
        })?;
        Ok(ids(py, &freed))
    }

    /// Remove all namespaces, as `drop` does one.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.reset()
    ///     array([0, 6], dtype=int32)
    fn reset<'py>(&self, py: Python<'py>) -> PyResult<Ids<'py>> {
        let shared = &*self.shared;
        let freed = py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.reset())
        })?;
        Ok(ids(py, &freed))
    }

    /// Number of blocks that `evict` can remove now.
    #[getter]
    fn num_evictable(&self, py: Python<'_>) -> PyResult<u64> {
        let shared = &*self.shared;
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.num_evictable())
        })
    }

    /// Number of blocks whose KV is approximate, in O(1); `stats().approximate` takes longer.
    #[getter]
    fn num_approximate(&self, py: Python<'_>) -> PyResult<u64> {
        let shared = &*self.shared;
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.num_approximate())
        })
    }

    /// Return the namespaces that hold a block, sorted by field. They contain the salts of all
    /// tenants.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.namespaces() == [space]
    ///     True
    fn namespaces(&self, py: Python<'_>) -> PyResult<Vec<PyNamespace>> {
        let shared = &*self.shared;
        let all = py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.namespaces())
        })?;
        Ok(all.into_iter().map(|core| PyNamespace { core }).collect())
    }

    /// Names of the span kinds, by their bit in `ReusePlan.segments`.
    #[getter]
    fn kinds<'py>(&self, py: Python<'py>) -> PyResult<Names<'py>> {
        let shared = &*self.shared;
        let kinds = py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.kinds().to_vec())
        })?;
        Ok(PyTuple::new(py, kinds)?.into())
    }

    /// Tag the tokens of spans where the sequence has blocks. Sequences with the same prefix share
    /// the tags.
    ///
    /// Args:
    ///     seq: The sequence to whose positions the spans refer.
    ///     spans: Ranges with their kinds; they may overlap. A new kind takes the next of 64 bits.
    ///
    /// Raises:
    ///     ValueError: A span ends beyond the sequence, or has a 65th kind.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.tag(seq, [kvtrie.Span(1, 3, "reasoning")])
    ///     >>> index.tags(seq)
    ///     [Span(1, 3, 'reasoning')]
    #[pyo3(signature = (seq: "TokenSequence", spans: "Iterable[Span]"))]
    fn tag(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexTag, arg::Seq, PyTokenSequence>)] seq: &Bound<
            '_,
            PyTokenSequence,
        >,
        spans: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let spans = crate::span::spans(spans, Arg::new("RadixIndex.tag", "spans"))?;
        let (shared, seq) = (&*self.shared, seq.get());
        py.enter_briefly(|keys, effort| {
            let seq = keys.lock(&seq.core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            Ok(index.tag_within(&seq, &spans, effort)?)
        })
    }

    /// Return the tags of those tokens of a sequence that have a block.
    ///
    /// Args:
    ///     seq: The sequence.
    ///
    /// Returns:
    ///     The longest ranges of each kind, sorted by (start, end, kind).
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> index.tag(seq, [kvtrie.Span(0, 2, "user"), kvtrie.Span(1, 3, "user")])
    ///     >>> index.tags(seq)
    ///     [Span(0, 3, 'user')]
    #[pyo3(signature = (seq: "TokenSequence"))]
    fn tags(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::RadixIndexTags, arg::Seq, PyTokenSequence>)] seq: &Bound<
            '_,
            PyTokenSequence,
        >,
    ) -> PyResult<Vec<PySpan>> {
        let (shared, seq) = (&*self.shared, seq.get());
        let found = py.enter_briefly(|keys, effort| {
            let seq = keys.lock(&seq.core, SEQUENCE)?;
            let index = keys.lock(&shared.core, INDEX)?;
            Ok(index.tags_within(&seq, effort))
        })?;
        Ok(found.into_iter().map(PySpan::from).collect())
    }

    /// Return counters of the index at this moment.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
    ///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    ///     >>> with index.plan(seq, keep_last=2):
    ///     ...     index.stats().indexed, index.stats().pinned
    ///     (2, 1)
    fn stats(&self, py: Python<'_>) -> PyResult<PyIndexStats> {
        let shared = &*self.shared;
        let stats = py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.stats())
        })?;
        Ok(stats.into())
    }

    /// Return an int in 0..2**64 that is equal for two indexes made alike after the same calls.
    ///
    /// Example:
    ///     >>> a, b = kvtrie.RadixIndex(num_blocks=8), kvtrie.RadixIndex(num_blocks=8)
    ///     >>> a.digest() == b.digest()
    ///     True
    fn digest(&self, py: Python<'_>) -> PyResult<u64> {
        let shared = &*self.shared;
        py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.digest())
        })
    }

    /// Check every invariant of the whole index, for tests.
    ///
    /// Raises:
    ///     KvTrieError: An invariant is broken, which is a bug in kvtrie.
    ///
    /// Example:
    ///     >>> kvtrie.RadixIndex(num_blocks=8).check()
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let shared = &*self.shared;
        py.enter(Cost::Long, |keys| {
            Ok(keys.lock(&shared.core, INDEX)?.check()?)
        })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "<RadixIndex of {} blocks of {} tokens: indexed={}, moved_runs={}>",
            self.shared.num_blocks,
            self.shared.block_size,
            self.stats(py)?.indexed(),
            truth(self.moved_runs)
        ))
    }
}

impl PyRadixIndex {
    /// The number of the group of a name.
    fn group(&self, py: Python<'_>, name: String, call: &str) -> PyResult<usize> {
        groups::number(py, &self.shared.groups, name, call)
    }

    fn found(
        &self,
        py: Python<'_>,
        seq: Bound<'_, PyTokenSequence>,
        options: LookupOptions,
    ) -> PyResult<PyMatch> {
        let (shared, own) = (&*self.shared, seq.get());
        let (num_tokens, ranges) = py.enter_briefly(|keys: &Keys<'_>, effort| {
            let mut seq = keys.lock(&own.core, SEQUENCE)?;
            let mut index = keys.lock(&shared.core, INDEX)?;
            let mut ranges = Vec::with_capacity(1); // mostly they are one
            let found = index.lookup_ranges_within(&mut seq, options, effort, &mut ranges)?;
            Ok(found.map(|found| (found.num_tokens, ranges)))
        })?;
        Ok(PyMatch {
            num_tokens,
            ranges,
            start: options.start,
            seq: seq.unbind(),
        })
    }

    fn around(core: RadixIndex) -> Self {
        let Config {
            num_blocks,
            block_size,
            seed,
            hash_bits,
            moved_runs,
            item_positions,
            min_run,
            max_candidates,
            ref pool_id,
            ref groups,
        } = *core.config();
        let (pool_id, groups) = (pool_id.clone(), groups.clone());
        let shared = SharedIndex {
            core: Lock::new(core),
            warned_of: Lock::new(Vec::new()),
            num_blocks,
            block_size,
            seed,
            hash_bits,
            groups,
        };
        Self {
            shared: Arc::new(shared),
            min_run,
            max_candidates,
            moved_runs,
            item_positions,
            pool_id,
        }
    }
}

pub(crate) fn given_groups(
    given: Option<&Bound<'_, PyAny>>,
    block_size: usize,
    call: &'static str,
) -> PyResult<Vec<Group>> {
    let Some(given) = given else {
        return Ok(Vec::new());
    };
    let arg = Arg::new(call, "groups");
    let mut found = Vec::new();
    for (at, item) in arg.iterate(given, "an iterable of Group")?.enumerate() {
        let item = item?;
        let Ok(group) = item.cast::<PyGroup>() else {
            return Err(arg.wrong_item(at, &item, "a Group"));
        };
        found.push(group.get().to_core(block_size));
        // The core refuses one too many by name.
        if found.len() > Group::MAX {
            break;
        }
    }
    Ok(found)
}

fn random<const N: usize>() -> PyResult<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        PyOSError::new_err(format!(
            "RadixIndex: the operating system gives no random bytes: {error}"
        ))
    })?;
    Ok(bytes)
}

fn pool_id_or_random(given: Option<&Bound<'_, PyAny>>, call: &'static str) -> PyResult<Vec<u8>> {
    let Some(given) = given else {
        return Ok(random::<16>()?.to_vec());
    };
    let Ok(bytes) = given.cast::<PyBytes>() else {
        return Err(Arg::new(call, "pool_id").wrong_type(given, "bytes, or None"));
    };
    Ok(bytes.as_bytes().to_vec())
}
