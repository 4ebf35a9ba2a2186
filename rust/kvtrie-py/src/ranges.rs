//! Reads half-open ranges of positions: pairs in a list, or an integer array of shape `[n, 2]`.

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::buffers::{Arg, asarray};
use crate::span::PySpan;

pub(crate) fn ranges(value: &Bound<'_, PyAny>, arg: Arg) -> PyResult<Vec<(usize, usize)>> {
    const WANTED: &str =
        "a list or a tuple of pairs of positions, or an integer array of shape (n, 2)";
    const SPAN: &str = "a list of pairs: pass [(span.start, span.end)]";
    const PAIR_OF_SPAN: &str = "a pair of positions: pass (span.start, span.end)";
    let items: Vec<Bound<'_, PyAny>> = if let Some(items) = listed(value) {
        items
    } else if value.get_type().hasattr("__array__")? {
        let array = asarray(value)?;
        let array = array.cast::<PyUntypedArray>()?;
        let shape = array.shape();
        if !matches!(array.dtype().kind(), b'i' | b'u') {
            return Err(PyTypeError::new_err(format!(
                "{}: {} has dtype {}; it must be an integer dtype",
                arg.call,
                arg.name,
                array.dtype()
            )));
        }
        if shape.len() != 2 || shape[1] != 2 {
            return Err(PyValueError::new_err(format!(
                "{}: {} has shape {shape:?}; it must be [n, 2]",
                arg.call, arg.name
            )));
        }
        listed(&array.call_method0("tolist")?).unwrap_or_default()
    } else {
        let span = value.is_instance_of::<PySpan>();
        return Err(arg.type_error(value, if span { SPAN } else { WANTED }));
    };
    let pair = |(at, item): (usize, Bound<'_, PyAny>)| {
        let ends = listed(&item).ok_or_else(|| {
            let span = item.is_instance_of::<PySpan>();
            let wanted = if span {
                PAIR_OF_SPAN
            } else {
                "a pair of positions"
            };
            arg.wrong_item(at, &item, wanted)
        })?;
        let [start, end] = &ends[..] else {
            return Err(PyValueError::new_err(format!(
                "{}: {}[{at}] has {} positions; it must have 2",
                arg.call,
                arg.name,
                ends.len()
            )));
        };
        Ok((position(start, at, arg)?, position(end, at, arg)?))
    };
    items.into_iter().enumerate().map(pair).collect()
}

fn listed<'py>(value: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Some(list.iter().collect());
    }
    let tuple = value.cast::<PyTuple>().ok()?;
    Some(tuple.iter().collect())
}

fn position(value: &Bound<'_, PyAny>, at: usize, arg: Arg) -> PyResult<usize> {
    let number = arg.int_at(at, value)?;
    i64::try_from(number)
        .ok()
        .and_then(|number| usize::try_from(number).ok())
        .ok_or_else(|| {
            PyValueError::new_err(format!(
                "{}: {}[{at}] has the position {number}; it must be in [0, {}]",
                arg.call,
                arg.name,
                i64::MAX
            ))
        })
}
