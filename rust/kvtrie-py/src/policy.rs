//! The class `ReusePolicy`.

use std::hash::{Hash, Hasher};

use kvtrie_core::{Repair, ReusePolicy, Scope};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::arguments::{arg, call, flag, int, of, optional_int, share, text};
use crate::buffers::{Arg, nothing};
use crate::fields::{Value, new_arguments, value_methods};
use crate::hints::{Names, NewArguments};
use crate::output::{quoted, truth};

pub(crate) const MAX_HOPS: u16 = ReusePolicy::MAX_HOPS;
const MAX_CUTS: u16 = ReusePolicy::MAX_CUTS;
pub(crate) static EXACT_ONLY: PyReusePolicy = PyReusePolicy::EXACT_ONLY;
pub(crate) const MIN_RUN: i64 = 8;

/// What a plan may reuse.
///
/// Exact KV is always allowed. The other fields limit approximate reuse, of KV from another context
/// or position. KV that they forbid is treated as not cached. `kvtrie.EXACT_ONLY` is
/// `ReusePolicy(approximate=False)` and the default everywhere.
///
/// Args:
///     approximate: Whether KV of another context or position may be used at all.
///     min_run: Shortest moved run in tokens, at least the index's `min_run`, which None means.
///     max_hops: Most hops of approximate KV in the prompt, 0 to 255. A moved run has one more
///         than its source.
///     max_approximate_share: Largest approximate share of the prompt's tokens, 0 to 1. If a plan
///         would exceed it, the plan uses exact KV only.
///     recompute_first: Tokens at the start of every moved run that are computed anyway.
///     recompute_last: Tokens at the end of every moved run that are computed anyway.
///     forbid_kinds: Kinds of spans that are not reused approximately. A kind that no tag of the
///         index has raises a `UserWarning`, once, with the nearest kind.
///     max_cuts: Most cuts before a moved run (`MovedRun.cuts`), 0 to 65535; None means any number. A
///         run beyond this limit, or one of the next two, is computed.
///     max_lost_context: Largest share of the tokens before a moved run in its source that may be
///         lost (`MovedRun.lost_context`), 0 to 1.
///     max_new_context: Largest share of the tokens before a moved run in the prompt that may be new
///         to it (`MovedRun.new_context`), 0 to 1.
///     scope: Where moved runs may come from. `"conversation"`: blocks of the plan's `session`, and
///         blocks of paths that begin with the prompt's first `shared_prefix` blocks.
///         `"namespace"`: all blocks of the namespace.
///     shared_prefix: Whole blocks that make two paths one conversation, at least 1.
///     recompute_share: Least share of the tokens of moved runs that is computed anyway, 0 to 1.
///     repair: Who chooses them. "fronts": the index, the first tokens of every run, equally many in
///         all. "ngrams", "probe", "question" and "adaptive": the engine, with `kvtrie.repair`, which
///         has to call `ReusePlan.recompute` before an insert with the plan. With "adaptive" the
///         share is that of a plan whose KV changed as after a typical edit: up to twice as much of
///         others, or less.
///     partial_blocks: Whether the exact tokens of the block in which the match ends are copied. An
///         engine that copies nothing needs False, and `approximate=False`.
///
/// Raises:
///     TypeError: A field has the wrong type.
///     ValueError: A field is out of its range.
///
/// Example:
///     >>> kvtrie.ReusePolicy(approximate=False) == kvtrie.EXACT_ONLY
///     True
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "ReusePolicy")]
#[derive(Clone, PartialEq)]
pub(crate) struct PyReusePolicy {
    core: ReusePolicy,
}

// Equality is total because no share is NaN.
impl Eq for PyReusePolicy {}

impl Hash for PyReusePolicy {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let policy = &self.core;
        (policy.approximate, policy.min_run, policy.max_hops).hash(state);
        policy.max_approximate_share.to_bits().hash(state);
        (policy.recompute_first, policy.recompute_last).hash(state);
        (&policy.forbid_kinds, policy.max_cuts).hash(state);
        policy.max_lost_context.to_bits().hash(state);
        policy.max_new_context.to_bits().hash(state);
        (scope_name(policy.scope), policy.shared_prefix).hash(state);
        policy.recompute_share.to_bits().hash(state);
        policy.repair.hash(state);
        policy.partial_blocks.hash(state);
    }
}

impl PyReusePolicy {
    pub(crate) const EXACT_ONLY: Self = Self {
        core: ReusePolicy::EXACT_ONLY,
    };

    pub(crate) fn of(core: ReusePolicy) -> Self {
        Self { core }
    }

    pub(crate) fn core(&self) -> &ReusePolicy {
        &self.core
    }
}

impl Value for PyReusePolicy {
    const FIELDS: &[&str] = &[
        "approximate",
        "min_run",
        "max_hops",
        "max_approximate_share",
        "recompute_first",
        "recompute_last",
        "forbid_kinds",
        "max_cuts",
        "max_lost_context",
        "max_new_context",
        "scope",
        "shared_prefix",
        "recompute_share",
        "repair",
        "partial_blocks",
    ];
}

value_methods! {
    ///     >>> policy = kvtrie.ReusePolicy(max_hops=2)
    ///     >>> policy.replace(min_run=32) == kvtrie.ReusePolicy(max_hops=2, min_run=32)
    ///     True
    impl PyReusePolicy {
        #[new]
        #[pyo3(signature = (
            *, approximate: "bool" = true, min_run: "SupportsIndex | None" = None, max_hops: "SupportsIndex" = 1,
            max_approximate_share: "SupportsFloat" = 1.0, recompute_first: "SupportsIndex" = 0,
            recompute_last: "SupportsIndex" = 0, forbid_kinds: "Iterable[str]" = nothing(),
            max_cuts: "SupportsIndex | None" = None, max_lost_context: "SupportsFloat" = 1.0,
            max_new_context: "SupportsFloat" = 1.0,
            scope: "Literal['conversation', 'namespace']" = Scope::Conversation, shared_prefix: "SupportsIndex" = 16,
            recompute_share: "SupportsFloat" = 0.0, repair: "str" = Repair::Fronts,
            partial_blocks: "bool" = true
        ), text_signature = "(*, approximate=True, min_run=None, max_hops=1, max_approximate_share=1.0, recompute_first=0, recompute_last=0, forbid_kinds=(), max_cuts=None, max_lost_context=1.0, max_new_context=1.0, scope='conversation', shared_prefix=16, recompute_share=0.0, repair='fronts', partial_blocks=True)")]
        #[expect(clippy::too_many_arguments, reason = "all are keywords")]
        fn new(
            #[pyo3(from_py_with = flag::<call::ReusePolicy, arg::Approximate>)] approximate: bool,
            #[pyo3(from_py_with = optional_int::<call::ReusePolicy, arg::MinRun>)] min_run: Option<
                i128,
            >,
            #[pyo3(from_py_with = int::<call::ReusePolicy, arg::MaxHops>)] max_hops: i128,
            #[pyo3(from_py_with = share::<call::ReusePolicy, arg::MaxApproximateShare>)]
            max_approximate_share: f64,
            #[pyo3(from_py_with = int::<call::ReusePolicy, arg::RecomputeFirst>)] recompute_first: i128,
            #[pyo3(from_py_with = int::<call::ReusePolicy, arg::RecomputeLast>)] recompute_last: i128,
            forbid_kinds: Option<&Bound<'_, PyAny>>,
            #[pyo3(from_py_with = optional_int::<call::ReusePolicy, arg::MaxCuts>)]
            max_cuts: Option<i128>,
            #[pyo3(from_py_with = share::<call::ReusePolicy, arg::MaxLostContext>)]
            max_lost_context: f64,
            #[pyo3(from_py_with = share::<call::ReusePolicy, arg::MaxNewContext>)]
            max_new_context: f64,
            #[pyo3(from_py_with = scope_of)] scope: Scope,
            #[pyo3(from_py_with = int::<call::ReusePolicy, arg::SharedPrefix>)] shared_prefix: i128,
            #[pyo3(from_py_with = share::<call::ReusePolicy, arg::RecomputeShare>)]
            recompute_share: f64,
            #[pyo3(from_py_with = repair_of)] repair: Repair,
            #[pyo3(from_py_with = flag::<call::ReusePolicy, arg::PartialBlocks>)] partial_blocks: bool,
        ) -> PyResult<Self> {
            const CALL: &str = "ReusePolicy";
            let min_run = match min_run {
                Some(min_run) => {
                    let min_run = Arg::new(CALL, "min_run").within(min_run, MIN_RUN, i64::MAX)?;
                    Some(Arg::new(CALL, "min_run").count(min_run.into())?)
                }
                None => None,
            };
            let max_cuts = max_cuts.map(|most| Arg::new(CALL, "max_cuts").within(most, 0, MAX_CUTS));
            // The sign of a negative zero is removed, so that equal policies have equal hashes.
            let share = |name: &str, share: f64| match share {
                0.0..=1.0 => Ok(share.abs()),
                _ => Err(PyValueError::new_err(format!(
                    "{CALL}: {name} is {share}; it must be in [0, 1]"
                ))),
            };
            let shared_prefix = Arg::new(CALL, "shared_prefix").within(shared_prefix, 1, i64::MAX)?;
            Ok(Self {
                core: ReusePolicy {
                    approximate,
                    min_run,
                    max_hops: Arg::new(CALL, "max_hops").within(max_hops, 0, MAX_HOPS)?,
                    max_approximate_share: share("max_approximate_share", max_approximate_share)?,
                    recompute_first: Arg::new(CALL, "recompute_first").count(recompute_first)?,
                    recompute_last: Arg::new(CALL, "recompute_last").count(recompute_last)?,
                    forbid_kinds: kinds(forbid_kinds)?,
                    max_cuts: max_cuts.transpose()?,
                    max_lost_context: share("max_lost_context", max_lost_context)?,
                    max_new_context: share("max_new_context", max_new_context)?,
                    scope,
                    shared_prefix: Arg::new(CALL, "shared_prefix").count(shared_prefix.into())?,
                    recompute_share: share("recompute_share", recompute_share)?,
                    repair,
                    partial_blocks,
                },
            })
        }

        /// Whether approximate reuse is allowed.
        #[getter]
        fn approximate(&self) -> bool {
            self.core.approximate
        }

        /// Shortest moved run in tokens, or None for the index's.
        #[getter]
        fn min_run(&self) -> Option<usize> {
            self.core.min_run
        }

        /// Most hops of approximate KV.
        #[getter]
        fn max_hops(&self) -> u16 {
            self.core.max_hops
        }

        /// Largest approximate share of the prompt's tokens.
        #[getter]
        fn max_approximate_share(&self) -> f64 {
            self.core.max_approximate_share
        }

        /// Tokens computed at the start of every moved run.
        #[getter]
        fn recompute_first(&self) -> usize {
            self.core.recompute_first
        }

        /// Tokens computed at the end of every moved run.
        #[getter]
        fn recompute_last(&self) -> usize {
            self.core.recompute_last
        }

        /// Kinds that are not reused approximately.
        #[getter]
        fn forbid_kinds<'py>(&self, py: Python<'py>) -> PyResult<Names<'py>> {
            Ok(PyTuple::new(py, &self.core.forbid_kinds)?.into())
        }

        /// Most cuts before a moved run, or None.
        #[getter]
        fn max_cuts(&self) -> Option<u16> {
            self.core.max_cuts
        }

        /// Largest share of a moved run's own context that may be lost.
        #[getter]
        fn max_lost_context(&self) -> f64 {
            self.core.max_lost_context
        }

        /// Largest share of the prompt before a moved run that may be new to it.
        #[getter]
        fn max_new_context(&self) -> f64 {
            self.core.max_new_context
        }

        /// Where moved runs may come from: `"conversation"` or `"namespace"`.
        #[getter]
        fn scope(&self) -> &'static str {
            scope_name(self.core.scope)
        }

        /// Whole blocks that make two paths one conversation.
        #[getter]
        fn shared_prefix(&self) -> usize {
            self.core.shared_prefix
        }

        /// Least share of the tokens of moved runs that is computed.
        #[getter]
        fn recompute_share(&self) -> f64 {
            self.core.recompute_share
        }

        /// Who chooses them: "fronts", "ngrams", "probe", "question" or "adaptive".
        #[getter]
        fn repair(&self) -> &'static str {
            self.core.repair.name()
        }

        /// Whether the exact tokens of the block in which the match ends are copied.
        #[getter]
        fn partial_blocks(&self) -> bool {
            self.core.partial_blocks
        }

        /// Whether this policy is at least as strict as another about approximate KV.
        ///
        /// If it is, plans under `other` may use what was built under this policy. Two policies may each
        /// be stricter in one field; then neither is. `partial_blocks` is not compared.
        ///
        /// Args:
        ///     other: A policy.
        ///
        /// Raises:
        ///     TypeError: `other` is not a policy.
        ///
        /// Example:
        ///     >>> rotated, first32 = kvtrie.ReusePolicy(), kvtrie.ReusePolicy(recompute_first=32)
        ///     >>> first32.is_at_least_as_strict_as(rotated), rotated.is_at_least_as_strict_as(first32)
        ///     (True, False)
        #[pyo3(signature = (other: "ReusePolicy"))]
        fn is_at_least_as_strict_as(
            &self,
            #[pyo3(from_py_with = of::<call::ReusePolicyIsAtLeastAsStrictAs, arg::Other, PyReusePolicy>)]
            other: &Bound<'_, Self>,
        ) -> bool {
            self.core.is_at_least_as_strict_as(&other.get().core)
        }

        fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
            let policy = &self.core;
            let mut kinds = String::new();
            for kind in &policy.forbid_kinds {
                kinds += &quoted(py, kind)?;
                kinds += ", ";
            }
            let kinds = match policy.forbid_kinds.len() {
                0 | 1 => kinds.trim_end(),
                _ => kinds.trim_end_matches(", "),
            };
            Ok(format!(
                "ReusePolicy(approximate={}, min_run={}, max_hops={}, max_approximate_share={:?}, recompute_first={}, \
                 recompute_last={}, forbid_kinds=({kinds}), max_cuts={}, max_lost_context={:?}, max_new_context={:?}, \
                 scope='{}', shared_prefix={}, recompute_share={:?}, repair='{}', partial_blocks={})",
                truth(policy.approximate),
                policy
                    .min_run
                    .map_or_else(|| "None".to_owned(), |run| run.to_string()),
                policy.max_hops,
                policy.max_approximate_share,
                policy.recompute_first,
                policy.recompute_last,
                policy
                    .max_cuts
                    .map_or_else(|| "None".to_owned(), |most| most.to_string()),
                policy.max_lost_context,
                policy.max_new_context,
                scope_name(policy.scope),
                policy.shared_prefix,
                policy.recompute_share,
                policy.repair.name(),
                truth(policy.partial_blocks)
            ))
        }

        fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
            new_arguments(slf)
        }
    }
}

fn scope_name(scope: Scope) -> &'static str {
    match scope {
        Scope::Conversation => "conversation",
        Scope::Namespace => "namespace",
    }
}

fn scope_of(value: &Bound<'_, PyAny>) -> PyResult<Scope> {
    let name = text::<call::ReusePolicy, arg::Scope>(value)?;
    let all = [Scope::Conversation, Scope::Namespace];
    let found = all.into_iter().find(|&scope| scope_name(scope) == name);
    found.ok_or_else(|| {
        PyValueError::new_err(format!(
            "ReusePolicy: scope is {name:?}; it must be \"conversation\" or \"namespace\""
        ))
    })
}

fn repair_of(value: &Bound<'_, PyAny>) -> PyResult<Repair> {
    let name = text::<call::ReusePolicy, arg::Repair>(value)?;
    Repair::named(&name).ok_or_else(|| {
        let names = Repair::ALL.map(|(name, _)| name).join(", ");
        PyValueError::new_err(format!(
            "ReusePolicy: repair is {name:?}; it must be one of {names}"
        ))
    })
}

fn kinds(value: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<String>> {
    let arg = Arg::new("ReusePolicy", "forbid_kinds");
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    if value.is_instance_of::<PyString>() {
        return Err(arg.wrong_type(value, "a tuple of names of kinds"));
    }
    let mut kinds = Vec::new();
    let wanted = "a tuple of names of kinds";
    for (at, kind) in arg.iterate(value, wanted)?.enumerate() {
        let kind = kind?;
        let name = kind
            .cast::<PyString>()
            .map_err(|_| arg.wrong_item(at, &kind, "a str, the name of a kind"))?;
        let name: String = name.extract()?;
        if name.is_empty() {
            return Err(PyValueError::new_err(format!(
                "{}: {}[{at}] is empty; it must name a kind",
                arg.call, arg.name
            )));
        }
        kinds.push(name);
    }
    Ok(kinds)
}
