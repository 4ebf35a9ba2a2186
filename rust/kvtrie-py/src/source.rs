//! The sources of offered KV: `COMPUTED` and `Imported`. A plan is the third.

use kvtrie_core::{Imported, Source};
use pyo3::prelude::*;

use crate::arguments::{arg, call, int};
use crate::buffers::Arg;
use crate::fields::{Value, shown, singleton, value_methods};
use crate::plan::PyReusePlan;

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
///     hops: Hops of the approximate rest, 0 to 32767: how often it was moved already.
///
/// Raises:
///     TypeError: An argument is not an int.
///     ValueError: An argument is negative, or `hops` is too large.
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
}

impl Value for PyImported {
    const FIELDS: &[&str] = &["exact_until", "hops"];
}

value_methods! {
    ///     >>> kvtrie.Imported(exact_until=2).replace(hops=3)
    ///     Imported(exact_until=2, hops=3)
    impl PyImported {
        #[new]
        #[pyo3(signature = (exact_until: "SupportsIndex", hops: "SupportsIndex" = 1))]
        fn new(
            #[pyo3(from_py_with = int::<call::Imported, arg::ExactUntil>)] exact_until: i128,
            #[pyo3(from_py_with = int::<call::Imported, arg::Hops>)] hops: i128,
        ) -> PyResult<Self> {
            let exact_until = Arg::new("Imported", "exact_until").count(exact_until)?;
            let hops = Arg::new("Imported", "hops").within(hops, 0, crate::policy::MAX_HOPS)?;
            Ok(Self { exact_until, hops })
        }

        fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
            shown(slf)
        }

        fn __getnewargs__(&self) -> (usize, u16) {
            (self.exact_until, self.hops)
        }
    }
}

impl PyImported {
    pub(crate) fn from_parts(exact_until: usize, hops: u16) -> Self {
        Self { exact_until, hops }
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
            let PyImported { exact_until, hops } = *imported.get();
            Ok(Self::Imported(Imported { exact_until, hops }))
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
            Self::Imported(imported) => Source::Imported(*imported),
        }
    }
}
