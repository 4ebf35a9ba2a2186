//! The function `plan_transfer` and its result, `TransferPlan`.

use std::collections::BTreeMap;

use kvtrie_transfer::{LocalGroup, TransferOptions, TransferPlan};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::{arg, call, int, of, optional_of};
use crate::buffers::{Arg, no_bytes, nothing};
use crate::detach::Enter;
use crate::hints::{Counts, Records, SourceValue};
use crate::output;
use crate::policy::{EXACT_ONLY, PyReusePolicy};
use crate::ranges::ranges;
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::source::{PyImported, computed};
use crate::tables::{Ids, block_sizes, further_groups, groups_of, tables};
use crate::transfer::{PyTransferManifest, hashing, transfer_key};

/// What to load from a manifest, and what to compute: the result of `plan_transfer`. It pins
/// nothing and needs no release.
///
/// Example:
///     >>> space, key = kvtrie.Namespace(model="m", salt=kvtrie.SHARED), b"k" * 32
///     >>> theirs = kvtrie.TokenSequence(range(1, 6), space)
///     >>> manifest = kvtrie.TransferManifest.from_blocks(
///     ...     theirs, [8, 3, 5], key=key, num_computed=5, block_size=2)
///     >>> mine = kvtrie.TokenSequence([1, 2, 9], space)
///     >>> kvtrie.plan_transfer(manifest, mine, [6, 7], key=key)
///     <TransferPlan of 3 tokens: 2 exact and 0 approximate to load, 0 cached, 1 to compute>
#[pyclass(frozen, eq, module = "kvtrie", name = "TransferPlan")]
#[derive(PartialEq)]
pub(crate) struct PyTransferPlan {
    core: TransferPlan,
}

// Equality is total because no share is NaN.
impl Eq for PyTransferPlan {}

#[pymethods]
impl PyTransferPlan {
    /// The pairs of blocks to load, by group and position. A structured array with the fields
    /// `group`, `remote` and `local` (block ids, int32; `local` is -1 if the plan was made without
    /// `local_blocks`, or where a group has no id), `start` and `end` (positions in the local
    /// sequence, int64; both are the tokens before a state), `delta`
    /// (position here minus position there, by which K is rotated, int64), `class` (0 exact, 1
    /// approximate, uint8) and `hops` (of the loaded KV, uint16). Each pair is inside one remote
    /// and one local block, number `start // block_size` of the local table. Its first token is at
    /// `(start - delta) % remote_block_size` in the remote block.
    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> PyResult<Records<'py>> {
        output::pairs(py, self.core.pairs())
    }

    /// Ranges to compute, int64 of shape (n, 2), ascending: tokens neither cached nor loaded, and
    /// the last `keep_last` tokens.
    #[getter]
    fn compute<'py>(&self, py: Python<'py>) -> PyResult<Counts<'py>> {
        output::ranges(py, self.core.compute())
    }

    /// Same as `compute`, under the name that `SequenceLedger.begin` uses.
    #[getter]
    fn missing<'py>(&self, py: Python<'py>) -> PyResult<Counts<'py>> {
        self.compute(py)
    }

    /// Position of the first approximate token that is loaded, or the length of the sequence.
    #[getter]
    fn exact_until(&self) -> usize {
        self.core.first_approximate().unwrap_or(self.core.len())
    }

    /// The most hops of loaded KV; 0 if all of it is exact.
    #[getter]
    fn hops(&self) -> u16 {
        self.core.hops()
    }

    /// Number of tokens that are loaded and exact in every group. Next to windows and states, those
    /// that the other groups load.
    #[getter]
    fn num_exact(&self) -> usize {
        self.core.num_exact()
    }

    /// Number of tokens that are loaded and approximate in some group.
    #[getter]
    fn num_approximate(&self) -> usize {
        self.core.num_approximate()
    }

    /// The source for `insert` and `begin` after loading: `Imported(exact_until, hops, policy)`, or
    /// `COMPUTED` if all loaded KV is exact, so that tokens decoded after it are exact too. Both
    /// assume that the `cached` tokens are exact. The policy is that of the plan, with one
    /// exception: if a moved run is loaded, and a share of moved runs was to be chosen by another
    /// `repair`, it has `repair="fronts"`, as was done, and `recompute_share=0` if KV that is
    /// approximate at the sender is loaded too.
    #[getter]
    fn source<'py>(&self, py: Python<'py>) -> PyResult<SourceValue<'py>> {
        match self.core.first_approximate() {
            Some(exact_until) => {
                let policy = PyReusePolicy::of(self.core.policy().clone());
                let source = PyImported::from_parts(exact_until, self.core.hops(), policy);
                Ok(Bound::new(py, source)?.into())
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

/// Plan which blocks of a sender to load for a sequence, and what to compute. Nothing is pinned.
///
/// A token is loaded only if a digest proves that the local sequence has it there. It is exact if
/// its run is exact and all tokens before it equal those of the local sequence. Such KV keeps its
/// position: `delta` is 0. A policy that allows approximate KV also allows KV at its position that
/// the sender labels approximate, and moved runs: whole blocks (and the last one) whose tokens are
/// elsewhere in the local sequence, at least `policy.min_run` (16) tokens with one delta, at one
/// hop more.
///
/// Digests are per block: if a block differs, none of its tokens is loaded. Each group is planned
/// separately, and a token is loaded only if all groups have it. A pair has the label of its own
/// group; `exact_until` and `hops` are the worst of all groups.
///
/// Next to groups with windows or states, exact KV alone is loaded, whatever the policy: the tokens
/// before the deepest position at which all groups can continue, the blocks that reach into each
/// window there, and each state there. Nothing is moved.
///
/// The plan uses a copy of `local_seq`, so other threads may use the sequence meanwhile. A search
/// for moved runs hashes one block per token that no other KV covers, so its time grows with the
/// sender's block size.
///
/// Args:
///     manifest: The manifest of the sender.
///     local_seq: The prompt of the receiver.
///     local_blocks: The prompt's block table from position 0: ids (group 0), or a mapping from
///         group number to ids. It must cover the sequence; further ids are ignored. None: no block
///         is allocated yet, and the pairs name no local block.
///     cached: Half-open range of positions whose KV is present here and exact. It is not loaded.
///         With `groups` it starts at 0, and all groups must be able to continue at its end, as
///         after an exact plan of the index.
///     key: The deployment's key, 16 to 64 bytes.
///     policy: What may be loaded; None means `kvtrie.EXACT_ONLY`. A manifest has no kinds: with
///         any `forbid_kinds`, or beyond `max_approximate_share` of the local sequence, nothing
///         approximate is loaded. With `max_cuts`, `max_lost_context` or `max_new_context` and
///         several groups, nothing is moved. A `recompute_share` is one of fronts, whatever
///         `repair` says. The manifest counts as in scope. `partial_blocks` has no effect.
///     block_size: Tokens per local block, or a mapping by group; None means the sender's.
///     keep_last: Tokens at the end that are computed in any case, cached or not.
///     context: As the sender gave it to `TransferManifest.from_blocks`.
///     groups: The groups with windows and states, as for `TransferManifest.from_blocks`. A window
///         has the block size of its `Group`.
///
/// Raises:
///     TransferRefused: With the reason `"digest"` (a run was changed, or written with another key
///         or context), `"namespace"` (the message names the field), or `"groups"` (the sender has
///         other groups, or other windows).
///     ValueError: There are too few local blocks (the message has both numbers), one occurs twice,
///         `cached` is not a range inside the sequence, or, with `groups`, one that starts after 0
///         or ends where a group can have no state, a position is inside a block or not after the
///         one before, or the key is too short or too long.
///
/// Example:
///     >>> space, key = kvtrie.Namespace(model="m", salt=kvtrie.SHARED), b"k" * 32
///     >>> theirs = kvtrie.TokenSequence(list(range(64)), space)
///     >>> manifest = kvtrie.TransferManifest.from_blocks(
///     ...     theirs, [8, 3, 5, 9], key=key, num_computed=64, block_size=16)
///     >>> mine = kvtrie.TokenSequence([*range(16), *range(32, 64)], space)
///     >>> policy = kvtrie.ReusePolicy(approximate=True)
///     >>> move = kvtrie.plan_transfer(manifest, mine, [1, 2, 4], key=key, policy=policy)
///     >>> move.pairs[["remote", "local", "start", "delta", "class"]].tolist()
///     [(8, 1, 0, 0, 0), (5, 2, 16, -16, 1), (9, 4, 32, -16, 1)]
///     >>> move.source == kvtrie.Imported(exact_until=16, hops=1, policy=policy)
///     True
#[pyfunction]
#[pyo3(signature = (
    manifest: "TransferManifest", local_seq: "TokenSequence", local_blocks: "_Integers | Mapping[int, _Integers | _Ranges] | None" = None,
    cached: "tuple[SupportsIndex, SupportsIndex]" = nothing(), *, key: "bytes", policy: "ReusePolicy | None" = None,
    block_size: "SupportsIndex | Mapping[int, SupportsIndex] | None" = None, keep_last: "SupportsIndex" = 0,
    context: "bytes" = no_bytes(), groups: "Mapping[int, Group] | Iterable[Group]" = nothing()
), text_signature = "(manifest, local_seq, local_blocks=None, cached=(0, 0), *, key, policy=None, block_size=None, keep_last=0, context=b'', groups=())")]
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
    groups: Option<&Bound<'_, PyAny>>,
) -> PyResult<PyTransferPlan> {
    const CALL: &str = "plan_transfer";
    /// Number of tokens that are hashed in the time of one compression.
    const LEAST_WINDOW: usize = 16;
    let key = transfer_key(key, context, CALL)?;
    let keep_last = Arg::new(CALL, "keep_last").count(keep_last)?;
    let (start, end) = match cached {
        None => (0, 0),
        Some(cached) => range(cached, Arg::new(CALL, "cached"))?,
    };
    let blocks = Arg::new(CALL, "local_blocks");
    let local_blocks = local_blocks.filter(|value| !value.is_none());
    let further = further_groups(groups, CALL)?;
    let given = tables(local_blocks, &further, blocks)?;
    let mut ids: BTreeMap<u32, Option<Ids>> = given
        .into_iter()
        .map(|(group, ids)| (group, Some(ids)))
        .collect();
    if local_blocks.is_none() {
        let theirs = manifest.get().core();
        let full = || {
            let all = theirs.groups().zip(theirs.kinds());
            all.filter(|(_, kind)| kind.is_none())
                .map(|((group, _), _)| group)
                .collect()
        };
        for group in groups_of(block_size, CALL)?.unwrap_or_else(full) {
            ids.entry(group).or_default();
        }
    }
    let numbers: Vec<u32> = ids.keys().copied().collect();
    let sizes = block_sizes(block_size, &numbers, &further, blocks)?;
    let policy = policy.map_or(&EXACT_ONLY, |policy| policy.get()).core();
    let (manifest, seq) = (manifest.get().core(), local_seq.get());
    let mut tokens = seq.len(py)?.saturating_mul(ids.len());
    if policy.approximate {
        // The search hashes a window of one block for each token.
        let largest = manifest.groups().map(|(_, block_size)| block_size).max();
        tokens = tokens.saturating_mul(largest.unwrap_or(1).max(LEAST_WINDOW));
    }
    // The whole manifest is hashed, however short the prompt is.
    tokens = tokens.saturating_add(manifest.to_bytes().len() / size_of::<u32>());
    let core = py.enter(hashing(tokens), move |keys| {
        let local: Vec<LocalGroup<'_>> = ids
            .iter()
            .zip(sizes)
            .map(|((&group, ids), block_size)| LocalGroup {
                group,
                block_size,
                table: ids.as_ref().map(Ids::as_table),
            })
            .collect();
        let options = TransferOptions {
            cached: start..end,
            keep_last,
            policy,
        };
        // The lock is released before planning, so that a step of the ledger that owns the sequence does not wait for
        // it.
        let seq = keys.lock(&seq.core, SEQUENCE)?.clone();
        Ok(TransferPlan::new(manifest, &seq, &local, &key, &options)?)
    })?;
    Ok(PyTransferPlan { core })
}

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
