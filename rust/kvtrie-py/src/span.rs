//! `Span`.

use kvtrie_core::Span;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{arg, call, int, text};
use crate::buffers::Arg;
use crate::fields::replaced;
use crate::output::quoted;

/// A half-open range of tokens with the name of its kind.
///
/// `"system"`, `"user"`, `"reasoning"`, `"answer"`, `"tool_call"`, `"tool_result"` and `"lookahead"`
/// are known to every index; any other name becomes a kind of the index that it is first used with.
///
/// Args:
///     start: First token, a position in the sequence.
///     end: One past the last token; an empty range is allowed and tags nothing.
///     kind: What the tokens are.
///
/// Raises:
///     TypeError: A position is not an int, or the kind not a str.
///     ValueError: The range is reversed or negative, or the kind is empty.
///
/// Example:
///     >>> import kvtrie
///     >>> span = kvtrie.Span(120, 1620, "reasoning")
///     >>> span
///     Span(120, 1620, 'reasoning')
///     >>> span.end - span.start
///     1500
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

const FIELDS: [&str; 3] = ["start", "end", "kind"];

#[pymethods]
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

    /// This span with some fields changed.
    ///
    /// Args:
    ///     changes: New values by the names of the fields.
    ///
    /// Raises:
    ///     TypeError: There is no such field, or a value has the wrong type.
    ///     ValueError: A value is out of its range.
    ///
    /// Example:
    ///     >>> import kvtrie
    ///     >>> kvtrie.Span(0, 4, "user").replace(end=6)
    ///     Span(0, 6, 'user')
    #[pyo3(signature = (**changes: "object"))]
    fn replace<'py>(
        slf: &Bound<'py, Self>,
        changes: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, Self>> {
        replaced(slf, &FIELDS, changes)
    }

    /// The same, for `copy.replace`.
    #[pyo3(signature = (**changes: "object"))]
    fn __replace__<'py>(
        slf: &Bound<'py, Self>,
        changes: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, Self>> {
        replaced(slf, &FIELDS, changes)
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

/// Reads an iterable of spans.
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
