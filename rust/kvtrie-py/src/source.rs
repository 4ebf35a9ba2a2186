//! The sources of offered KV: `COMPUTED` and `Imported`. A plan is the third.

use std::sync::Arc;

use kvtrie_core::{Imported, Source};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{arg, call, int, optional_of};
use crate::buffers::Arg;
use crate::fields::{Value, shown, singleton, value_methods};
use crate::plan::PyReusePlan;
use crate::policy::PyReusePolicy;

/// The type of `kvtrie.COMPUTED`, its only value.
///
/// Example:
///     >>> kvtrie.COMPUTED
///     COMPUTED
#[pyclass(frozen, module = "kvtrie", name = "ComputedSource")]
pub(crate) struct PyComputedSource;

singleton!(PyComputedSource, computed, "COMPUTED");

/// The source of KV that was imported: from another worker, a disk or an older process.
///
/// Args:
///     exact_until: A position in tokens. A block is exact if it ends at or before it.
///     hops: Hops of the approximate rest, 0 to 255: how often it was moved already.
///     policy: The policy that the approximate rest was built under. None: it is not known, and only
///         plans whose policy bounds nothing use it.
///
/// Raises:
///     TypeError: An argument has the wrong type.
///     ValueError: An argument is negative, `hops` is too large, or `policy` allows no approximate KV.
///
/// Example:
///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
///     >>> seq = kvtrie.TokenSequence(range(1, 5), space)
///     >>> source = kvtrie.Imported(exact_until=2, hops=1)
///     >>> index.insert(seq, [5, 6], num_computed=4, source=source).num_exact
///     2
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "Imported")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyImported {
    /// A block is exact if it ends at or before this position.
    #[pyo3(get)]
    exact_until: usize,
    /// Hops of the approximate rest.
    #[pyo3(get)]
    hops: u16,
    /// The policy that the approximate rest was built under, or None if it is not known.
    #[pyo3(get)]
    policy: Option<PyReusePolicy>,
}

impl Value for PyImported {
    const FIELDS: &[&str] = &["exact_until", "hops", "policy"];
}

value_methods! {
    ///     >>> kvtrie.Imported(exact_until=2).replace(hops=3)
    ///     Imported(exact_until=2, hops=3, policy=None)
    impl PyImported {
        #[new]
        #[pyo3(signature = (exact_until: "SupportsIndex", hops: "SupportsIndex" = 1, policy: "ReusePolicy | None" = None))]
        fn new(
            #[pyo3(from_py_with = int::<call::Imported, arg::ExactUntil>)] exact_until: i128,
            #[pyo3(from_py_with = int::<call::Imported, arg::Hops>)] hops: i128,
            #[pyo3(from_py_with = optional_of::<call::Imported, arg::Policy, PyReusePolicy>)]
            policy: Option<&Bound<'_, PyReusePolicy>>,
        ) -> PyResult<Self> {
            let exact_until = Arg::new("Imported", "exact_until").count(exact_until)?;
            let hops = Arg::new("Imported", "hops").within(hops, 0, crate::policy::MAX_HOPS)?;
            let policy = policy.map(|policy| policy.get().clone());
            if policy.as_ref().is_some_and(|policy| !policy.core().approximate) {
                return Err(PyValueError::new_err(
                    "Imported: policy has approximate=False; nothing approximate is built under it",
                ));
            }
            Ok(Self {
                exact_until,
                hops,
                policy,
            })
        }

        fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
            shown(slf)
        }

        fn __getnewargs__(&self) -> (usize, u16, Option<PyReusePolicy>) {
            (self.exact_until, self.hops, self.policy.clone())
        }
    }
}

impl PyImported {
    pub(crate) fn from_parts(exact_until: usize, hops: u16, policy: PyReusePolicy) -> Self {
        Self {
            exact_until,
            hops,
            policy: Some(policy),
        }
    }
}

pub(crate) enum SourceArg<'a> {
    Plan(&'a PyReusePlan),
    Computed,
    Imported(Imported),
}

impl<'a> SourceArg<'a> {
    pub(crate) fn open(value: &'a Bound<'_, PyAny>, arg: Arg) -> PyResult<Self> {
        if let Ok(plan) = value.cast::<PyReusePlan>() {
            Ok(Self::Plan(plan.get()))
        } else if value.is_instance_of::<PyComputedSource>() {
            Ok(Self::Computed)
        } else if let Ok(imported) = value.cast::<PyImported>() {
            let imported = imported.get();
            Ok(Self::Imported(Imported {
                exact_until: imported.exact_until,
                hops: imported.hops,
                policy: imported
                    .policy
                    .as_ref()
                    .map(|policy| Arc::new(policy.core().clone())),
            }))
        } else {
            Err(arg.wrong_type(
                value,
                "a ReusePlan, kvtrie.COMPUTED or kvtrie.Imported(...)",
            ))
        }
    }

    pub(crate) fn core(&self) -> Source<'a> {
        match self {
            Self::Plan(plan) => Source::Plan(plan.core()),
            Self::Computed => Source::Computed,
            Self::Imported(imported) => Source::Imported(imported.clone()),
        }
    }
}
