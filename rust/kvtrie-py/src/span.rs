//! The class `Span`.

use kvtrie_core::Span;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{arg, call, int, text};
use crate::buffers::Arg;
use crate::fields::{Value, value_methods};
use crate::output::quoted;

/// A half-open range of tokens with the name of its kind.
///
/// Every index knows `"system"`, `"user"`, `"reasoning"`, `"answer"`, `"tool_call"`,
/// `"tool_result"` and `"lookahead"`; any other name becomes a kind of the index that first uses
/// it.
///
/// Args:
///     start: First token, a position in the sequence.
///     end: One past the last token; an empty range is allowed and tags nothing.
///     kind: What the tokens are.
///
/// Raises:
///     TypeError: A position is not an int, or the kind is not a str.
///     ValueError: The range is reversed or negative, or the kind is empty.
///
/// Example:
///     >>> kvtrie.Span(120, 1620, "reasoning")
///     Span(120, 1620, 'reasoning')
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "Span")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PySpan {
    /// First token.
    #[pyo3(get)]
    start: usize,
    /// One past the last token.
    #[pyo3(get)]
    end: usize,
    /// What the tokens are.
    #[pyo3(get)]
    kind: String,
}

impl From<Span> for PySpan {
    fn from(Span { start, end, kind }: Span) -> Self {
        Self { start, end, kind }
    }
}

impl PySpan {
    fn to_core(&self) -> Span {
        Span {
            start: self.start,
            end: self.end,
            kind: self.kind.clone(),
        }
    }
}

impl Value for PySpan {
    const FIELDS: &[&str] = &["start", "end", "kind"];
}

value_methods! {
    ///     >>> kvtrie.Span(0, 4, "user").replace(end=6)
    ///     Span(0, 6, 'user')
    impl PySpan {
        #[new]
        #[pyo3(signature = (start: "SupportsIndex", end: "SupportsIndex", kind: "str"))]
        fn new(
            #[pyo3(from_py_with = int::<call::Span, arg::Start>)] start: i128,
            #[pyo3(from_py_with = int::<call::Span, arg::End>)] end: i128,
            #[pyo3(from_py_with = text::<call::Span, arg::Kind>)] kind: String,
        ) -> PyResult<Self> {
            let start = Arg::new("Span", "start").count(start)?;
            let end = Arg::new("Span", "end").count(end)?;
            if start > end {
                return Err(PyValueError::new_err(format!(
                    "Span: start and end are {start} and {end}; end must not be below start"
                )));
            }
            if kind.is_empty() {
                return Err(PyValueError::new_err(
                    "Span: kind is empty; it must name what the tokens are",
                ));
            }
            Ok(Self { start, end, kind })
        }

        fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
            Ok(format!(
                "Span({}, {}, {})",
                self.start,
                self.end,
                quoted(py, &self.kind)?
            ))
        }

        fn __getnewargs__(&self) -> (usize, usize, &str) {
            (self.start, self.end, &self.kind)
        }
    }
}

pub(crate) fn spans(value: &Bound<'_, PyAny>, arg: Arg) -> PyResult<Vec<Span>> {
    let wanted = "an iterable of Span";
    let items = arg.iterate(value, wanted)?;
    items
        .enumerate()
        .map(|(at, item)| {
            let item = item?;
            let span = item
                .cast::<PySpan>()
                .map_err(|_| arg.wrong_item(at, &item, "a Span"))?;
            Ok(span.get().to_core())
        })
        .collect()
}
