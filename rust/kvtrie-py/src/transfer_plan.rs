//! `plan_transfer` and `TransferPlan`.

use kvtrie_core::BlockId;
use kvtrie_transfer::{LocalGroup, TransferOptions, TransferPlan};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{arg, call, int, of, optional_of};
use crate::buffers::{Arg, no_bytes, nothing, ranges};
use crate::detach::Enter;
use crate::hints::{Counts, Records, SourceValue};
use crate::output;
use crate::policy::{EXACT_ONLY, PyReusePolicy};
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::source::{PyImported, computed};
use crate::transfer::{PyTransferManifest, block_sizes, groups_of, hashing, tables, transfer_key};

/// What to load of a manifest, and what to compute. `plan_transfer` makes it; it holds no
/// blocks and needs no release.
///
/// Example:
///     >>> import kvtrie
///     >>> space, key = kvtrie.Namespace(model="m", salt=kvtrie.SHARED), b"k" * 32
///     >>> theirs = kvtrie.TokenSequence([1, 2, 3, 4, 5], space)
///     >>> manifest = kvtrie.TransferManifest.from_blocks(
///     ...     theirs, [8, 3, 5], key=key, num_computed=5, block_size=2)
///     >>> mine = kvtrie.TokenSequence([1, 2, 3, 4, 9], space)
///     >>> move = kvtrie.plan_transfer(manifest, mine, [6, 7, 1], key=key)
///     >>> move.pairs[["remote", "local", "start", "end"]].tolist()
///     [(8, 6, 0, 2), (3, 7, 2, 4)]
///     >>> move.compute
///     array([[4, 5]])
#[pyclass(frozen, eq, module = "kvtrie", name = "TransferPlan")]
#[derive(PartialEq, Eq)]
pub(crate) struct PyTransferPlan {
    core: TransferPlan,
}

#[pymethods]
impl PyTransferPlan {
    /// What to load, a structured array by group and position: `group`, `remote` and `local` (block
    /// ids, int32; `local` is -1 if the plan was made without `local_blocks`), `start` and `end`
    /// (positions in the local sequence, int64), `delta` (position here minus position there, int64:
    /// by how many positions K is rotated), `class` (0 exact, 1 approximate, uint8), `hops` (as the
    /// KV will have them, uint16). Each pair is inside one remote and one local block, number
    /// `start // block_size` of the local table; the first of its tokens is at
    /// `(start - delta) % remote_block_size` in the remote one.
    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> PyResult<Records<'py>> {
        output::pairs(py, self.core.pairs())
    }

    /// Ranges to compute, int64[n, 2], ascending: neither cached nor loaded, and what `keep_last`
    /// keeps.
    #[getter]
    fn compute<'py>(&self, py: Python<'py>) -> PyResult<Counts<'py>> {
        output::ranges(py, self.core.compute())
    }

    /// The same as `compute`, by the name that `SequenceLedger.begin` has for it.
    #[getter]
    fn missing<'py>(&self, py: Python<'py>) -> PyResult<Counts<'py>> {
        self.compute(py)
    }

    /// Position of the first token that is loaded and approximate, or the length of the sequence if
    /// none is.
    #[getter]
    fn exact_until(&self) -> usize {
        self.core.first_approximate().unwrap_or(self.core.len())
    }

    /// The most hops of what is loaded, 0 if all of it is exact.
    #[getter]
    fn hops(&self) -> u16 {
        self.core.hops()
    }

    /// Tokens that are loaded and exact in every group.
    #[getter]
    fn num_exact(&self) -> usize {
        self.core.num_exact()
    }

    /// Tokens that are loaded and approximate in some group.
    #[getter]
    fn num_approximate(&self) -> usize {
        self.core.num_approximate()
    }

    /// What to say to `insert` and `begin` of the sequence once this was loaded:
    /// `Imported(exact_until, hops)`, or `COMPUTED` if all that is loaded is exact, so that what is
    /// decoded after it counts as exact too. Both take what was cached for exact.
    #[getter]
    fn source<'py>(&self, py: Python<'py>) -> PyResult<SourceValue<'py>> {
        match self.core.first_approximate() {
            Some(exact_until) => {
                Ok(Bound::new(py, PyImported::from_parts(exact_until, self.core.hops()))?.into())
            }
            None => Ok(computed(py)?.into()),
        }
    }

    fn __repr__(&self) -> String {
        let loaded = self.core.num_exact() + self.core.num_approximate();
        let computed: usize = self
            .core
            .compute()
            .iter()
            .map(|(start, end)| end - start)
            .sum();
        format!(
            "<TransferPlan of {} tokens: {} exact and {} approximate to load, {} cached, {computed} to compute>",
            self.core.len(),
            self.core.num_exact(),
            self.core.num_approximate(),
            self.core.len() - loaded - computed
        )
    }
}

/// Plan which blocks of a sender to load for a sequence, and what to compute.
///
/// Loaded is a token if a digest says that it is the one that the local sequence has there; no
/// length and no order of the sender's is believed. A token is exact if its run is, and all
/// tokens before it are those of the local sequence; such KV stays where it is, `delta` is 0.
/// Under an approximate policy, KV that the sender calls approximate is used in place, and
/// whole blocks (and the last one) whose tokens stand elsewhere in the local sequence are
/// moved: runs of at least `policy.min_run` (16) tokens with one delta, at one hop more than
/// they have. What is covered by neither is computed.
///
/// Tokens after a divergence inside a block are not loaded: digests are of blocks. With
/// several groups each is planned on its own, and loaded are the tokens that all of them have;
/// a pair has the label of its own group, `exact_until` and `hops` are those of the worst.
/// Which heads of a block go to which rank is the engine's business, and so is moving the
/// bytes.
///
/// The plan is made of the tokens that `local_seq` has at the call; nobody waits for it who
/// uses the sequence meanwhile. A search for moved blocks hashes one block for each token that
/// nothing else covers: its time grows with the sender's block size.
///
/// Args:
///     manifest: What the sender offers.
///     local_seq: The prompt here.
///     local_blocks: Its block table from position 0: ids (group 0), or a dict from a group's
///         number to its ids. It must have blocks for the whole sequence; more are fine and not
///         looked at. None: no block is allocated yet, and the pairs name none.
///     cached: Half-open range of positions whose KV is present here already, and exact. It is
///         not loaded.
///     key: The deployment's key, 16 to 64 bytes.
///     policy: What may be loaded; None is `kvtrie.EXACT_ONLY`. `forbid_kinds`: a manifest says
///         nothing of kinds, so if any is forbidden nothing approximate is loaded.
///         `max_approximate_share` is one of the local sequence; beyond it nothing approximate
///         is loaded. `partial_blocks` means nothing here.
///     block_size: Tokens of a local block, or a dict by group; None takes the sender's.
///     keep_last: Tokens at the end that are computed in any case, cached or not.
///     context: What the sender said that the manifest is about; see `TransferManifest.from_blocks`.
///
/// Returns:
///     The plan. Nothing was changed anywhere, and nothing is pinned.
///
/// Raises:
///     TransferRefused: With the reason `"digest"` (a run was written with another key, or
///         changed, or for another context), `"namespace"` (the message names the field), or `"groups"` (the sender has
///         other groups).
///     TypeError: An argument has the wrong type.
///     ValueError: There are too few local blocks (both numbers are named), one comes twice,
///         `cached` is not a range inside the sequence, or the key has another length.
///
/// Example:
///     >>> import kvtrie
///     >>> space, key = kvtrie.Namespace(model="m", salt=kvtrie.SHARED), b"k" * 32
///     >>> theirs = kvtrie.TokenSequence(list(range(64)), space)
///     >>> manifest = kvtrie.TransferManifest.from_blocks(
///     ...     theirs, [8, 3, 5, 9], key=key, num_computed=64, block_size=16)
///     >>> mine = kvtrie.TokenSequence([*range(16), *range(32, 64)], space)
///     >>> move = kvtrie.plan_transfer(manifest, mine, [1, 2, 4], key=key)
///     >>> move.pairs["remote"].tolist(), move.compute.tolist(), move.source
///     ([8], [[16, 48]], COMPUTED)
///     >>> policy = kvtrie.ReusePolicy(approximate=True)
///     >>> move = kvtrie.plan_transfer(manifest, mine, [1, 2, 4], key=key, policy=policy)
///     >>> move.pairs[["remote", "local", "start", "delta", "class"]].tolist()
///     [(8, 1, 0, 0, 0), (5, 2, 16, -16, 1), (9, 4, 32, -16, 1)]
///     >>> move.source
///     Imported(exact_until=16, hops=1)
#[pyfunction]
#[pyo3(signature = (
    manifest: "TransferManifest", local_seq: "TokenSequence", local_blocks: "_Integers | Mapping[int, _Integers] | None" = None,
    cached: "tuple[SupportsIndex, SupportsIndex]" = nothing(), *, key: "bytes", policy: "ReusePolicy | None" = None,
    block_size: "SupportsIndex | Mapping[int, SupportsIndex] | None" = None, keep_last: "SupportsIndex" = 0,
    context: "bytes" = no_bytes()
), text_signature = "(manifest, local_seq, local_blocks=None, cached=(0, 0), *, key, policy=None, block_size=None, keep_last=0, context=b'')")]
#[expect(clippy::too_many_arguments, reason = "most are keywords")]
pub(crate) fn plan_transfer(
    py: Python<'_>,
    #[pyo3(from_py_with = of::<call::PlanTransfer, arg::Manifest, PyTransferManifest>)]
    manifest: &Bound<'_, PyTransferManifest>,
    #[pyo3(from_py_with = of::<call::PlanTransfer, arg::LocalSeq, PyTokenSequence>)]
    local_seq: &Bound<'_, PyTokenSequence>,
    local_blocks: Option<&Bound<'_, PyAny>>,
    cached: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = of::<call::PlanTransfer, arg::Key, PyBytes>)] key: &Bound<'_, PyBytes>,
    #[pyo3(from_py_with = optional_of::<call::PlanTransfer, arg::Policy, PyReusePolicy>)]
    policy: Option<&Bound<'_, PyReusePolicy>>,
    block_size: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = int::<call::PlanTransfer, arg::KeepLast>)] keep_last: i128,
    #[pyo3(from_py_with = optional_of::<call::PlanTransfer, arg::Context, PyBytes>)]
    context: Option<&Bound<'_, PyBytes>>,
) -> PyResult<PyTransferPlan> {
    const CALL: &str = "plan_transfer";
    /// Tokens that are hashed in the time of one compression.
    const LEAST_WINDOW: usize = 16;
    let key = transfer_key(key, context, CALL)?;
    let keep_last = Arg::new(CALL, "keep_last").count(keep_last)?;
    let (start, end) = match cached {
        None => (0, 0),
        Some(cached) => range(cached, Arg::new(CALL, "cached"))?,
    };
    let blocks = Arg::new(CALL, "local_blocks");
    let local_blocks = local_blocks.filter(|value| !value.is_none());
    let (groups, ids): (Vec<u32>, Vec<Option<Vec<BlockId>>>) = match local_blocks {
        Some(local_blocks) => tables(local_blocks, blocks)?
            .into_iter()
            .map(|(group, ids)| (group, Some(ids)))
            .unzip(),
        None => groups_of(block_size, CALL)?
            .unwrap_or_else(|| {
                manifest
                    .get()
                    .core()
                    .groups()
                    .map(|group| group.0)
                    .collect()
            })
            .into_iter()
            .map(|group| (group, None))
            .unzip(),
    };
    let sizes = block_sizes(block_size, &groups, blocks)?;
    let policy = policy.map_or(&EXACT_ONLY, |policy| policy.get()).core();
    let (manifest, seq) = (manifest.get().core(), local_seq.get());
    let mut tokens = seq.len(py)?.saturating_mul(groups.len());
    if policy.approximate {
        // A window of one block is hashed for each token.
        let largest = manifest.groups().map(|(_, block_size)| block_size).max();
        tokens = tokens.saturating_mul(largest.unwrap_or(1).max(LEAST_WINDOW));
    }
    // All of the manifest is hashed, however short the prompt is.
    tokens = tokens.saturating_add(manifest.to_bytes().len() / size_of::<u32>());
    let core = py.enter(hashing(tokens), move |keys| {
        let local: Vec<LocalGroup<'_>> = groups
            .iter()
            .zip(&ids)
            .zip(sizes)
            .map(|((&group, blocks), block_size)| LocalGroup {
                group,
                block_size,
                blocks: blocks.as_deref(),
            })
            .collect();
        let options = TransferOptions {
            cached: start..end,
            keep_last,
            policy,
        };
        // The lock is free meanwhile: a step of the ledger that has the sequence does not wait for the plan.
        let seq = keys.lock(&seq.core, SEQUENCE)?.clone();
        Ok(TransferPlan::new(manifest, &seq, &local, &key, &options)?)
    })?;
    Ok(PyTransferPlan { core })
}

/// A half-open range of positions.
fn range(value: &Bound<'_, PyAny>, arg: Arg) -> PyResult<(usize, usize)> {
    let all = pyo3::types::PyList::new(value.py(), [value])?;
    match ranges(&all, arg)?.first() {
        Some(&range) => Ok(range),
        None => Err(PyValueError::new_err(format!(
            "{}: {} is no range",
            arg.call, arg.name
        ))),
    }
}
