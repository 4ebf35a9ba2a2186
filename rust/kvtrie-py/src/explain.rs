//! The class `Explanation` and its parts.

use kvtrie_core::{Context, ExplainOptions, Explanation, NamespaceDifference, WouldSave};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::detach::{Cost, Enter};
use crate::hints::{Document, Names, TokenIds};
use crate::output::listed;
use crate::policy::PyReusePolicy;
use crate::sequence::{PyTokenSequence, SEQUENCE};
use crate::shared::{INDEX, SharedIndex};

pub(crate) fn explain(
    py: Python<'_>,
    shared: &SharedIndex,
    seq: &PyTokenSequence,
    policy: Option<&PyReusePolicy>,
    mut options: ExplainOptions,
) -> PyResult<PyExplanation> {
    if let Some(policy) = policy {
        shared.warn_of_unknown_kinds(py, policy.core(), "RadixIndex.explain")?;
        options.policy = policy.core().clone();
    }
    let core = py.enter(Cost::Long, |keys| {
        let mut seq = keys.lock(&seq.core, SEQUENCE)?;
        let mut index = keys.lock(&shared.core, INDEX)?;
        Ok(index.explain(&mut seq, &options)?)
    })?;
    Ok(PyExplanation { core })
}

/// Why the exact match of a prompt ended where it did: the result of `RadixIndex.explain`. `str()`
/// gives it in English.
///
/// Example:
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> kvtrie.RadixIndex(num_blocks=8, block_size=2).explain(seq)
///     <Explanation: not_cached at 0, 0 of 3 tokens exact>
#[pyclass(frozen, module = "kvtrie", name = "Explanation")]
pub(crate) struct PyExplanation {
    core: Explanation,
}

#[pymethods]
impl PyExplanation {
    /// `"complete"`: every whole block is cached exactly. `"diverged"`: other tokens are cached
    /// there. `"evicted"`: the prompt's tokens were cached after this prefix, and left by eviction,
    /// discard or removal. `"approximate_only"`: the same tokens are cached, but their KV is
    /// approximate. `"laxer_policy"`: so they are, and it was built under a policy that is not as
    /// strict as the one asked about. `"other_namespace"`: more of the prompt is cached under
    /// another namespace of the same salt. `"not_cached"`: nothing is known.
    #[getter]
    fn reason(&self) -> &'static str {
        self.core.reason.name()
    }

    /// The first token of the prompt that does not match. If no other tokens are cached there, the
    /// first token of its block.
    #[getter]
    fn position(&self) -> usize {
        self.core.position
    }

    /// Tokens that match exactly: a whole number of blocks.
    #[getter]
    fn num_exact(&self) -> usize {
        self.core.num_exact
    }

    /// Tokens of the prompt.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.core.num_tokens
    }

    /// Tokens per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.core.block_size
    }

    /// Token ids around the position, of the prompt and of the cache.
    #[getter]
    fn context(&self) -> PyExplanationContext {
        PyExplanationContext {
            core: self.core.context.clone(),
        }
    }

    /// Kinds of the cached token at the position.
    #[getter]
    fn kinds<'py>(&self, py: Python<'py>) -> PyResult<Names<'py>> {
        Ok(PyTuple::new(py, &self.core.kinds)?.into())
    }

    /// Kinds of the cached token before the position.
    #[getter]
    fn kinds_before<'py>(&self, py: Python<'py>) -> PyResult<Names<'py>> {
        Ok(PyTuple::new(py, &self.core.kinds_before)?.into())
    }

    /// A namespace of the same salt in which more of the prompt is cached, or None.
    #[getter]
    fn other_namespace(&self) -> Option<PyNamespaceDifference> {
        let core = self.core.other_namespace.clone()?;
        Some(PyNamespaceDifference { core })
    }

    /// Fields in which the policy that the cached KV was built under is laxer than the one asked
    /// about. Empty unless the reason is `"laxer_policy"`.
    #[getter]
    fn laxer_in<'py>(&self, py: Python<'py>) -> PyResult<Names<'py>> {
        Ok(PyTuple::new(py, &self.core.laxer_in)?.into())
    }

    /// The group that keeps the prompt from using all of the match, with the tokens after which every
    /// group can continue; None if none does, or if the plan has moved runs, next to which windows are
    /// copied or rebuilt.
    #[getter]
    fn cut_by(&self) -> Option<(String, usize)> {
        let cut = self.core.cut_by.as_ref()?;
        Some((cut.group.clone(), cut.num_tokens))
    }

    /// What a plan would reuse and compute; in place alone if the index has a group with states.
    #[getter]
    fn would_save(&self) -> PyWouldSave {
        PyWouldSave {
            core: self.core.would_save,
        }
    }

    /// A new dictionary with one entry per attribute, for `json.dumps`.
    ///
    /// Example:
    ///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
    ///     >>> kvtrie.RadixIndex(num_blocks=8).explain(seq).to_dict()["would_save"]
    ///     {'exact': 0, 'approximate': 0, 'compute': 3, 'out_of_scope': 0}
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Document<'py>> {
        let core = &self.core;
        let context = PyDict::new(py);
        context.set_item("start", core.context.start)?;
        context.set_item("ours", &core.context.ours)?;
        context.set_item("theirs", &core.context.theirs)?;
        let other = match &core.other_namespace {
            Some(other) => {
                let difference = PyDict::new(py);
                difference.set_item("fields", &other.fields)?;
                difference.set_item("num_tokens", other.num_tokens)?;
                Some(difference)
            }
            None => None,
        };
        let saved = PyDict::new(py);
        saved.set_item("exact", core.would_save.exact)?;
        saved.set_item("approximate", core.would_save.approximate)?;
        saved.set_item("compute", core.would_save.compute)?;
        saved.set_item("out_of_scope", core.would_save.out_of_scope)?;
        let all = PyDict::new(py);
        all.set_item("reason", core.reason.name())?;
        all.set_item("position", core.position)?;
        all.set_item("num_exact", core.num_exact)?;
        all.set_item("num_tokens", core.num_tokens)?;
        all.set_item("block_size", core.block_size)?;
        all.set_item("context", context)?;
        all.set_item("kinds", &core.kinds)?;
        all.set_item("kinds_before", &core.kinds_before)?;
        all.set_item("other_namespace", other)?;
        all.set_item("laxer_in", &core.laxer_in)?;
        all.set_item("would_save", saved)?;
        all.set_item("cut_by", self.cut_by())?;
        Ok(all.into())
    }

    fn __str__(&self) -> String {
        self.core.to_string()
    }

    fn __repr__(&self) -> String {
        format!(
            "<Explanation: {} at {}, {} of {} tokens exact>",
            self.reason(),
            self.core.position,
            self.core.num_exact,
            self.core.num_tokens
        )
    }
}

/// Token ids around the position at which a match ended.
///
/// Example:
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> seq = kvtrie.TokenSequence([1, 2, 3, 4], space)
///     >>> done = index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
///     >>> index.explain(kvtrie.TokenSequence([1, 2, 3, 9], space), context=1).context
///     ExplanationContext(start=2, ours=[3, 9], theirs=[3, 4])
#[pyclass(frozen, module = "kvtrie", name = "ExplanationContext")]
pub(crate) struct PyExplanationContext {
    core: Context,
}

#[pymethods]
impl PyExplanationContext {
    /// Position of the first id of both arrays.
    #[getter]
    fn start(&self) -> usize {
        self.core.start
    }

    /// Token ids of the prompt (uint32).
    #[getter]
    fn ours<'py>(&self, py: Python<'py>) -> TokenIds<'py> {
        PyArray1::from_slice(py, &self.core.ours).into()
    }

    /// Cached token ids (uint32), up to the end of the cache or the point where it branches.
    #[getter]
    fn theirs<'py>(&self, py: Python<'py>) -> TokenIds<'py> {
        PyArray1::from_slice(py, &self.core.theirs).into()
    }

    fn __repr__(&self) -> String {
        format!(
            "ExplanationContext(start={}, ours={}, theirs={})",
            self.core.start,
            listed(&self.core.ours),
            listed(&self.core.theirs)
        )
    }
}

/// Another namespace of the same salt in which more of a prompt is cached.
///
/// Example:
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> spaces = [kvtrie.Namespace(model=model, salt=kvtrie.SHARED) for model in ("m", "n")]
///     >>> seqs = [kvtrie.TokenSequence([1, 2], space) for space in spaces]
///     >>> done = index.insert(seqs[0], [6], num_computed=2, source=kvtrie.COMPUTED)
///     >>> index.explain(seqs[1]).other_namespace
///     NamespaceDifference(fields=('model',), num_tokens=2)
#[pyclass(frozen, module = "kvtrie", name = "NamespaceDifference")]
pub(crate) struct PyNamespaceDifference {
    core: NamespaceDifference,
}

#[pymethods]
impl PyNamespaceDifference {
    /// Names of the fields that differ, among `"model"`, `"kv_dtype"`, `"rope"` and `"adapter"`.
    #[getter]
    fn fields<'py>(&self, py: Python<'py>) -> PyResult<Names<'py>> {
        Ok(PyTuple::new(py, &self.core.fields)?.into())
    }

    /// Tokens of the prompt that match there exactly.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.core.num_tokens
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let fields = PyTuple::new(py, &self.core.fields)?;
        Ok(format!(
            "NamespaceDifference(fields={}, num_tokens={})",
            fields.repr()?,
            self.core.num_tokens
        ))
    }
}

/// What a plan would reuse and compute of a prompt, in tokens.
///
/// Example:
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> done = index.insert(seq, [6], num_computed=2, source=kvtrie.COMPUTED)
///     >>> index.explain(seq).would_save
///     WouldSave(exact=2, approximate=0, compute=1, out_of_scope=0)
#[pyclass(frozen, module = "kvtrie", name = "WouldSave")]
pub(crate) struct PyWouldSave {
    core: WouldSave,
}

#[pymethods]
impl PyWouldSave {
    /// Tokens that can be reused exactly.
    #[getter]
    fn exact(&self) -> usize {
        self.core.exact
    }

    /// Tokens that can be reused from another context or position.
    #[getter]
    fn approximate(&self) -> usize {
        self.core.approximate
    }

    /// Tokens to compute.
    #[getter]
    fn compute(&self) -> usize {
        self.core.compute
    }

    /// Tokens to compute that are cached out of scope: a policy with `scope="namespace"` would
    /// reuse them.
    #[getter]
    fn out_of_scope(&self) -> usize {
        self.core.out_of_scope
    }

    fn __repr__(&self) -> String {
        format!(
            "WouldSave(exact={}, approximate={}, compute={}, out_of_scope={})",
            self.core.exact, self.core.approximate, self.core.compute, self.core.out_of_scope
        )
    }
}
