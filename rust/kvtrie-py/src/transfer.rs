//! The classes of manifests: `TransferManifest`, `BlockRun` and `TransferLimits`.

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Class, Error, ErrorKind, GroupKind, Imported, ReusePolicy, TokenSequence,
};
use kvtrie_transfer::{LabelRun, Offer, SentGroup, TransferKey, TransferLimits, TransferManifest};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{arg, call, int, of, optional_of};
use crate::buffers::{Arg, no_bytes, nothing};
use crate::detach::{Cost, Enter};
use crate::errors::exception_in;
use crate::fields::{Value, new_arguments, shown, value_methods};
use crate::hints::{Ids, NewArguments, ReducedManifest};
use crate::ledger::{LEDGER, PySequenceLedger};
use crate::output::{self, listed, quoted_in_short, truth};
use crate::policy::PyReusePolicy;
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::source::SourceArg;
use crate::tables::{block_sizes, further_groups, tables};

/// Number of tokens that are hashed in about 50 µs.
const TOKENS: usize = 1 << 12;

pub(crate) fn hashing(tokens: usize) -> Cost {
    if tokens >= TOKENS {
        Cost::Long
    } else {
        Cost::Short
    }
}

/// The largest manifest that `TransferManifest.from_bytes` reads. Counts are totals over all groups
/// of blocks.
///
/// Args:
///     max_bytes: Bytes of the manifest, 64 MiB.
///     max_groups: Groups of blocks.
///     max_runs: Runs of blocks.
///     max_blocks: Block ids.
///     max_tokens: Position after the last token that a run may reach.
///     max_block_size: Tokens per block.
///
/// Raises:
///     TypeError: A limit is not an int.
///     ValueError: A limit is negative.
///
/// Example:
///     >>> kvtrie.TransferLimits(max_bytes=1 << 20).max_groups
///     64
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "TransferLimits")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyTransferLimits {
    core: TransferLimits,
}

value_methods! {
    ///     >>> kvtrie.TransferLimits(max_runs=5).replace(max_groups=1).max_runs
    ///     5
    impl PyTransferLimits {
        #[new]
        #[pyo3(signature = (
            *, max_bytes: "SupportsIndex" = 67_108_864, max_groups: "SupportsIndex" = 64, max_runs: "SupportsIndex" = 65_536, max_blocks: "SupportsIndex" = 4_194_304, max_tokens: "SupportsIndex" = 67_108_864, max_block_size: "SupportsIndex" = 4096
        ))]
        fn new(
            #[pyo3(from_py_with = int::<call::TransferLimits, arg::MaxBytes>)] max_bytes: i128,
            #[pyo3(from_py_with = int::<call::TransferLimits, arg::MaxGroups>)] max_groups: i128,
            #[pyo3(from_py_with = int::<call::TransferLimits, arg::MaxRuns>)] max_runs: i128,
            #[pyo3(from_py_with = int::<call::TransferLimits, arg::MaxBlocks>)] max_blocks: i128,
            #[pyo3(from_py_with = int::<call::TransferLimits, arg::MaxTokens>)] max_tokens: i128,
            #[pyo3(from_py_with = int::<call::TransferLimits, arg::MaxBlockSize>)] max_block_size: i128,
        ) -> PyResult<Self> {
            let count = |name, value| Arg::new("TransferLimits", name).count(value);
            let core = TransferLimits {
                max_bytes: count("max_bytes", max_bytes)?,
                max_groups: count("max_groups", max_groups)?,
                max_runs: count("max_runs", max_runs)?,
                max_blocks: count("max_blocks", max_blocks)?,
                max_tokens: count("max_tokens", max_tokens)?,
                max_block_size: count("max_block_size", max_block_size)?,
            };
            Ok(Self { core })
        }

        /// Bytes of the manifest.
        #[getter]
        fn max_bytes(&self) -> usize {
            self.core.max_bytes
        }

        /// Groups of blocks.
        #[getter]
        fn max_groups(&self) -> usize {
            self.core.max_groups
        }

        /// Runs of blocks.
        #[getter]
        fn max_runs(&self) -> usize {
            self.core.max_runs
        }

        /// Block ids.
        #[getter]
        fn max_blocks(&self) -> usize {
            self.core.max_blocks
        }

        /// Position after the last token that a run may reach.
        #[getter]
        fn max_tokens(&self) -> usize {
            self.core.max_tokens
        }

        /// Tokens per block.
        #[getter]
        fn max_block_size(&self) -> usize {
            self.core.max_block_size
        }

        fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
            shown(slf)
        }

        fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
            new_arguments(slf)
        }
    }
}

impl Value for PyTransferLimits {
    const FIELDS: &[&str] = &[
        "max_bytes",
        "max_groups",
        "max_runs",
        "max_blocks",
        "max_tokens",
        "max_block_size",
    ];
}

/// Consecutive blocks of one label in a manifest: an entry of `TransferManifest.runs`.
///
/// Example:
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> manifest = kvtrie.TransferManifest.from_blocks(
///     ...     seq, [8, 3, 6], key=b"k" * 32, num_computed=3, block_size=2, num_lookahead=2)
///     >>> for run in manifest.runs:
///     ...     print(run.start, run.num_tokens, run.blocks, run.is_lookahead)
///     0 3 [8 3] False
///     4 2 [6] True
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "BlockRun")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyBlockRun {
    /// The group that the blocks belong to.
    #[pyo3(get)]
    group: u32,
    /// Tokens per block.
    #[pyo3(get)]
    block_size: usize,
    /// Position of the first token, a multiple of `block_size`; of a state, the tokens before it.
    #[pyo3(get)]
    start: usize,
    /// Number of tokens. The last block may hold fewer than `block_size`. 0 for a state.
    #[pyo3(get)]
    num_tokens: usize,
    /// 0 exact, 1 approximate, 2 look-ahead, which is not loaded.
    #[pyo3(get)]
    class_: u8,
    /// Hops of the KV.
    #[pyo3(get)]
    hops: u16,
    /// Whether the blocks hold only positions issued ahead of the final tokens.
    #[pyo3(get)]
    is_lookahead: bool,
    blocks: Vec<BlockId>,
}

#[pymethods]
impl PyBlockRun {
    /// The ids in the order of their tokens (int32).
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Ids<'py> {
        output::ids(py, &self.blocks)
    }

    fn __repr__(&self) -> String {
        format!(
            "BlockRun(group={}, start={}, num_tokens={}, blocks={}, class_={}, hops={}, is_lookahead={})",
            self.group,
            self.start,
            self.num_tokens,
            listed(&self.blocks),
            self.class_,
            self.hops,
            truth(self.is_lookahead)
        )
    }
}

/// What a sender offers of one request: runs of blocks with their positions, token digests and
/// labels.
///
/// It travels with the KV. The engines must agree on which bytes of a block belong to which layer,
/// head and rank. `plan_transfer` checks the manifest with the key.
///
/// Example:
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt="tenant-a"))
///     >>> kvtrie.TransferManifest.from_blocks(
///     ...     seq, [8, 3], key=b"k" * 32, num_computed=2, block_size=2)
///     <TransferManifest of 2 tokens of 'm' in 1 run>
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "TransferManifest")]
#[derive(PartialEq, Eq)]
pub(crate) struct PyTransferManifest {
    core: TransferManifest,
}

impl std::hash::Hash for PyTransferManifest {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.core.to_bytes().hash(state);
    }
}

impl PyTransferManifest {
    pub(crate) fn core(&self) -> &TransferManifest {
        &self.core
    }
}

#[pymethods]
impl PyTransferManifest {
    /// Make the manifest of a request whose blocks the caller knows.
    ///
    /// Args:
    ///     seq: The tokens of the request.
    ///     blocks: Its block table from position 0: ids, or a mapping from group number to ids if
    ///         groups of layers have tables of their own. Ids after the last position named below
    ///         are ignored. Groups with windows or states have pairs (position, id), ascending, as
    ///         for `RadixIndex.insert`; such a table may begin anywhere.
    ///     key: The deployment's key, 16 to 64 bytes.
    ///     num_computed: Tokens of `seq`, from position 0, that have KV. The token sampled last and
    ///         drafts have none.
    ///     block_size: Tokens per block, or a mapping from group number to tokens per block.
    ///     source: Where the KV came from: `kvtrie.COMPUTED`, which None means, or a
    ///         `kvtrie.Imported`. Its `policy` is the manifest's; without one, only receivers whose
    ///         policy bounds nothing load the approximate KV.
    ///     num_lookahead: Positions issued after `num_computed`. Blocks that hold only such
    ///         positions are look-ahead.
    ///     context: What the manifest is about, up to 1,024 bytes, such as the engine, the request
    ///         and a count of its transfers. A reader with another context is refused. Without a
    ///         context, runs of another engine or of a request that has ended verify too.
    ///     groups: The groups with windows and states: a mapping from group number to `Group`, or
    ///         an iterable of those with the numbers 1, 2 and so on. Of them, exact KV alone is
    ///         sent: blocks whose tokens are exact, and states of exact tokens.
    ///
    /// Raises:
    ///     ValueError: `num_computed` is beyond the sequence, there are too few blocks (the message
    ///         has both numbers), a block occurs twice, groups of blocks and of block sizes differ,
    ///         a position is inside a block or not after the one before, a window has another block
    ///         size than `block_size`, or the key is too short or too long.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> source = kvtrie.Imported(exact_until=2, hops=1)
    ///     >>> manifest = kvtrie.TransferManifest.from_blocks(
    ///     ...     seq, [8, 3], key=b"k" * 32, num_computed=3, block_size=2, source=source)
    ///     >>> [(run.start, run.num_tokens, run.class_, run.hops) for run in manifest.runs]
    ///     [(0, 2, 0, 0), (2, 1, 1, 1)]
    #[staticmethod]
    #[pyo3(signature = (
        seq: "TokenSequence", blocks: "_Integers | Mapping[int, _Integers | _Ranges]", *, key: "bytes", num_computed: "SupportsIndex",
        block_size: "SupportsIndex | Mapping[int, SupportsIndex]", source: "ComputedSource | Imported | None" = None,
        num_lookahead: "SupportsIndex" = 0, context: "bytes" = no_bytes(), groups: "Mapping[int, Group] | Iterable[Group]" = nothing()
    ), text_signature = "(seq, blocks, *, key, num_computed, block_size, source=None, num_lookahead=0, context=b'', groups=())")]
    #[expect(clippy::too_many_arguments, reason = "all but two are keywords")]
    fn from_blocks(
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::TransferManifestFromBlocks, arg::Seq, PyTokenSequence>)]
        seq: &Bound<'_, PyTokenSequence>,
        blocks: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::<call::TransferManifestFromBlocks, arg::Key, PyBytes>)]
        key: &Bound<'_, PyBytes>,
        #[pyo3(from_py_with = int::<call::TransferManifestFromBlocks, arg::NumComputed>)]
        num_computed: i128,
        block_size: &Bound<'_, PyAny>,
        source: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = int::<call::TransferManifestFromBlocks, arg::NumLookahead>)]
        num_lookahead: i128,
        #[pyo3(from_py_with = optional_of::<call::TransferManifestFromBlocks, arg::Context, PyBytes>)]
        context: Option<&Bound<'_, PyBytes>>,
        groups: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        const CALL: &str = "TransferManifest.from_blocks";
        let arg = |name| Arg::new(CALL, name);
        let key = transfer_key(key, context, CALL)?;
        let num_computed = arg("num_computed").count(num_computed)?;
        let num_lookahead = arg("num_lookahead").count(num_lookahead)?;
        let (labels, policy) = labels(source, num_computed, arg("source"))?;
        let further = further_groups(groups, CALL)?;
        let tables = tables(Some(blocks), &further, arg("blocks"))?;
        let numbers: Vec<u32> = tables.iter().map(|table| table.0).collect();
        let sizes = block_sizes(Some(block_size), &numbers, &further, arg("blocks"))?;
        let tokens = num_computed.saturating_mul(tables.len());
        let seq = seq.get();
        let core = py.enter(hashing(tokens), move |keys| {
            let groups: Vec<SentGroup<'_>> = tables
                .iter()
                .zip(sizes)
                .map(|((group, ids), block_size)| SentGroup {
                    group: *group,
                    block_size: block_size.unwrap_or_default(),
                    table: ids.as_table(),
                })
                .collect();
            // The lock is released before the copy is hashed.
            let seq = keys.lock(&seq.core, SEQUENCE)?.clone();
            let end = check_counts(&seq, num_computed, num_lookahead)?;
            let policy = policy.as_deref();
            Ok(TransferManifest::built_under(
                policy, &seq, &groups, &labels, end, &key,
            )?)
        })?;
        Ok(Self { core })
    }

    /// Make the manifest of a live request: its final and computed tokens with their labels, and
    /// its look-ahead blocks. Of the ledger's groups, the exact blocks and states that the request
    /// has.
    ///
    /// Blocks after a missing range are offered too. If a range ends inside a block, the tokens of
    /// that block are offered only if no computed token follows. See `SequenceLedger.confirm` for
    /// claims that include steps under way.
    ///
    /// Args:
    ///     ledger: The ledger of the engine.
    ///     request: A live request of the ledger.
    ///     key: The deployment's key, 16 to 64 bytes.
    ///     group: The group number of the ledger's blocks. Its further groups have the numbers
    ///         after it, in the order of `ledger.groups`.
    ///     context: As for `from_blocks`.
    ///
    /// Raises:
    ///     StaleHandleError: The request is not live, or its plan was released.
    ///     ValueError: `group` is negative, or the key is too short or too long.
    ///
    /// Example:
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> ledger = kvtrie.SequenceLedger(block_size=2)
    ///     >>> seq = kvtrie.TokenSequence(range(1, 6), space)
    ///     >>> ledger.begin("a", seq, [8, 3, 5, 6], num_computed=3)
    ///     >>> ledger.schedule("a", 4)
    ///     >>> manifest = kvtrie.TransferManifest.from_ledger(ledger, "a", key=b"k" * 32)
    ///     >>> [(run.start, run.num_tokens, run.is_lookahead) for run in manifest.runs]
    ///     [(0, 3, False), (4, 4, True)]
    #[staticmethod]
    #[pyo3(signature = (
        ledger: "SequenceLedger", request: "Hashable", *, key: "bytes", group: "SupportsIndex" = 0, context: "bytes" = no_bytes()
    ), text_signature = "(ledger, request, *, key, group=0, context=b'')")]
    fn from_ledger(
        py: Python<'_>,
        #[pyo3(from_py_with = of::<call::TransferManifestFromLedger, arg::Ledger, PySequenceLedger>)]
        ledger: &Bound<'_, PySequenceLedger>,
        request: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::<call::TransferManifestFromLedger, arg::Key, PyBytes>)]
        key: &Bound<'_, PyBytes>,
        #[pyo3(from_py_with = int::<call::TransferManifestFromLedger, arg::Group>)] group: i128,
        #[pyo3(from_py_with = optional_of::<call::TransferManifestFromLedger, arg::Context, PyBytes>)]
        context: Option<&Bound<'_, PyBytes>>,
    ) -> PyResult<Self> {
        const CALL: &str = "TransferManifest.from_ledger";
        let key = transfer_key(key, context, CALL)?;
        let group = Arg::new(CALL, "group").within(group, 0, i32::MAX.cast_unsigned())?;
        let ledger = ledger.get();
        let live = ledger.live(py, request, CALL)?;
        live.get().check_held(py, request, CALL)?;
        let (id, seq) = (live.get().id, live.get().seq.get());
        let core = py.enter(hashing(seq.len(py)?), |keys| {
            let known = keys.lock(&ledger.core, LEDGER)?;
            let seq = keys.lock(&seq.core, SEQUENCE)?;
            let offer = Offer::of(&known, id, &seq)?;
            // These are the tokens at this moment. Both locks are released before they are hashed.
            let tokens = seq.clone();
            drop((seq, known));
            Ok(offer.manifest(&tokens, group, &key)?)
        })?;
        Ok(Self { core })
    }

    /// Read a manifest. This checks its form; `plan_transfer` checks its digests.
    ///
    /// Args:
    ///     raw: Bytes from an untrusted source.
    ///     limits: The largest manifest to read; None means the defaults of `TransferLimits`.
    ///
    /// Returns:
    ///     The manifest whose `to_bytes()` is `raw`. Reading takes at most four times the memory of
    ///     `raw`.
    ///
    /// Raises:
    ///     TransferRefused: With the reason `"malformed"`, `"version"` or `"limits"`.
    ///     TypeError: `raw` is not a buffer of bytes.
    ///
    /// Example:
    ///     >>> try:
    ///     ...     kvtrie.TransferManifest.from_bytes(b"\x93nonsense")
    ///     ... except kvtrie.TransferRefused as refused:
    ///     ...     print(refused.reason)
    ///     malformed
    #[staticmethod]
    #[pyo3(signature = (raw: "Buffer", limits: "TransferLimits | None" = None))]
    fn from_bytes(
        py: Python<'_>,
        raw: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = optional_of::<call::TransferManifestFromBytes, arg::Limits, PyTransferLimits>)]
        limits: Option<&Bound<'_, PyTransferLimits>>,
    ) -> PyResult<Self> {
        /// Number of bytes that are read in about 50 µs.
        const BYTES: usize = 1 << 16;
        let limits = limits.map_or_else(TransferLimits::default, |limits| limits.get().core);
        let cost = |len| {
            if len >= BYTES {
                Cost::Long
            } else {
                Cost::Short
            }
        };
        let core = if let Ok(bytes) = raw.cast::<PyBytes>() {
            let bytes = bytes.as_bytes();
            py.enter(cost(bytes.len()), |_| {
                Ok(TransferManifest::from_bytes(bytes, &limits)?)
            })?
        } else {
            let arg = Arg::new("TransferManifest.from_bytes", "raw");
            let wanted = "bytes or another buffer of bytes";
            let buffer = PyBuffer::<u8>::get(raw);
            let buffer = buffer.map_err(|error| arg.not_buffer(raw, error, wanted))?;
            let bytes = buffer.to_vec(py)?;
            py.enter(cost(bytes.len()), |_| {
                Ok(TransferManifest::from_bytes(&bytes, &limits)?)
            })?
        };
        Ok(Self { core })
    }

    /// Return the manifest as bytes for `from_bytes`: MessagePack, version 3. Equal manifests have
    /// equal bytes.
    ///
    /// The bytes contain block ids, positions and digests, no token ids and no salt.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> manifest = kvtrie.TransferManifest.from_blocks(
    ///     ...     seq, [8, 3], key=b"k" * 32, num_computed=3, block_size=2)
    ///     >>> kvtrie.TransferManifest.from_bytes(manifest.to_bytes()) == manifest
    ///     True
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.core.to_bytes())
    }

    /// The runs of all groups, by group and position.
    #[getter]
    fn runs(&self) -> Vec<PyBlockRun> {
        let runs = self.core.runs().map(|run| PyBlockRun {
            group: run.group(),
            block_size: run.block_size(),
            start: run.start(),
            num_tokens: run.num_tokens(),
            class_: run.class() as u8,
            hops: run.hops(),
            is_lookahead: run.is_lookahead(),
            blocks: run.blocks().collect(),
        });
        runs.collect()
    }

    /// The block size of each group, by group number, ascending.
    #[getter]
    fn block_sizes(&self) -> std::collections::BTreeMap<u32, usize> {
        self.core.groups().collect()
    }

    /// What each group's layers keep, by group number, ascending: `"full"`, `"window"` or `"state"`.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> manifest = kvtrie.TransferManifest.from_blocks(
    ///     ...     seq, {0: [8, 3], 1: [(2, 5)]}, key=b"k" * 32, num_computed=3, block_size=2,
    ///     ...     groups=[kvtrie.Group.state("gdn", num_slots=8)])
    ///     >>> manifest.kinds, [(run.start, run.num_tokens) for run in manifest.runs]
    ///     ({0: 'full', 1: 'state'}, [(0, 3), (2, 0)])
    #[getter]
    fn kinds(&self) -> std::collections::BTreeMap<u32, &'static str> {
        let named = |kind| match kind {
            None => "full",
            Some(GroupKind::Window { .. }) => "window",
            Some(GroupKind::State) => "state",
        };
        let numbers = self.core.groups().map(|(group, _)| group);
        numbers.zip(self.core.kinds().map(named)).collect()
    }

    /// The window of each group that has one, in tokens, by group number.
    #[getter]
    fn windows(&self) -> std::collections::BTreeMap<u32, usize> {
        let numbers = self.core.groups().map(|(group, _)| group);
        let windows = numbers.zip(self.core.kinds());
        windows
            .filter_map(|(group, kind)| match kind {
                Some(GroupKind::Window { window }) => Some((group, window)),
                _ => None,
            })
            .collect()
    }

    /// The policy that the approximate KV was built under, without the kinds that it forbids: a
    /// manifest has no tags. None if it is not known, or if nothing is approximate.
    ///
    /// A receiver loads approximate KV only if this policy is at least as strict as its own.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> first2 = kvtrie.ReusePolicy(recompute_first=2)
    ///     >>> manifest = kvtrie.TransferManifest.from_blocks(
    ///     ...     seq, [8, 3], key=b"k" * 32, num_computed=3, block_size=2,
    ///     ...     source=kvtrie.Imported(2, policy=first2))
    ///     >>> manifest.policy == first2
    ///     True
    #[getter]
    fn policy(&self) -> Option<PyReusePolicy> {
        self.core.policy().cloned().map(PyReusePolicy::of)
    }

    /// The highest end of a run with KV, in tokens.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.core.num_tokens()
    }

    /// Model and revision.
    #[getter]
    fn model(&self) -> &str {
        self.core.model()
    }

    /// Element type and scales of the KV.
    #[getter]
    fn kv_dtype(&self) -> &str {
        self.core.kv_dtype()
    }

    /// How K is rotated by position.
    #[getter]
    fn rope(&self) -> &str {
        self.core.rope()
    }

    /// Content id of the adapter, or None.
    #[getter]
    fn adapter(&self) -> Option<&str> {
        self.core.adapter()
    }

    /// Whether the KV is shared with everybody. A manifest contains no tenant's salt, only its
    /// digest.
    #[getter]
    fn is_shared(&self) -> bool {
        self.core.is_shared()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let runs = self.core.runs().count();
        Ok(format!(
            "<TransferManifest of {} tokens of {} in {runs} {}>",
            self.core.num_tokens(),
            quoted_in_short(py, self.core.model())?,
            if runs == 1 { "run" } else { "runs" }
        ))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<ReducedManifest<'py>> {
        /// The largest length of Python's own containers.
        const MOST: usize = isize::MAX.unsigned_abs();
        let reader = py.get_type::<Self>().getattr("from_bytes")?;
        // A manifest that could be made can be unpickled, whatever the limits of readers are.
        let limits = PyTransferLimits {
            core: TransferLimits {
                max_bytes: MOST,
                max_groups: MOST,
                max_runs: MOST,
                max_blocks: MOST,
                max_tokens: MOST,
                max_block_size: MOST,
            },
        };
        let arguments = (self.to_bytes(py), limits);
        Ok((reader, arguments).into_pyobject(py)?.into())
    }
}

fn labels(
    source: Option<&Bound<'_, PyAny>>,
    num_computed: usize,
    arg: Arg,
) -> PyResult<(Vec<LabelRun>, Option<Arc<ReusePolicy>>)> {
    let imported = match source {
        None => None,
        Some(source) => match SourceArg::open(source, arg) {
            Ok(SourceArg::Computed) => None,
            Ok(SourceArg::Imported(imported)) => Some(imported),
            _ => return Err(arg.wrong_type(source, "kvtrie.COMPUTED or kvtrie.Imported(...)")),
        },
    };
    let Imported {
        exact_until,
        hops,
        policy,
    } = imported.unwrap_or(Imported::new(usize::MAX, 0));
    let edge = exact_until.min(num_computed);
    let label = |start, end, class, hops| LabelRun {
        start,
        end,
        class,
        hops,
    };
    let both = [
        label(0, edge, Class::Exact, 0),
        label(edge, num_computed, Class::Approximate, hops),
    ];
    let labels = both.into_iter().filter(|label| label.start < label.end);
    Ok((labels.collect(), policy))
}

fn check_counts(
    seq: &TokenSequence,
    num_computed: usize,
    num_lookahead: usize,
) -> kvtrie_core::Result<usize> {
    const MOST: usize = u32::MAX as usize;
    let end = num_computed.saturating_add(num_lookahead);
    let message = if num_computed > seq.len() {
        format!(
            "num_computed is {num_computed}; it must be in [0, {}], the tokens of the sequence",
            seq.len()
        )
    } else if end > MOST {
        format!(
            "num_lookahead is {num_lookahead}; after {num_computed} computed tokens it must be in [0, {}]",
            MOST.saturating_sub(num_computed)
        )
    } else {
        return Ok(end);
    };
    let call = "TransferManifest::new";
    Err(Error::new(ErrorKind::InvalidArgument, call, message))
}

/// The key of a call, bound to the context of the manifest.
pub(crate) fn transfer_key(
    key: &Bound<'_, PyBytes>,
    context: Option<&Bound<'_, PyBytes>>,
    call: &str,
) -> PyResult<TransferKey> {
    let context = context.map_or(&[][..], |context| context.as_bytes());
    TransferKey::new(key.as_bytes())
        .and_then(|key| key.bound_to(context))
        .map_err(|error| exception_in(call, &error))
}
