//! Reads the slots of blocks off an engine's table.

use kvtrie_core::IdRange;
use numpy::{
    PyArray1, PyArrayMethods, PyReadonlyArrayDyn, PyReadwriteArray1, PyUntypedArrayMethods,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffers::Arg;
use crate::hints::Counts;

const TABLE: &str = "a contiguous numpy array of int64 with one or two dimensions";
const OUT: &str =
    "a contiguous, writable numpy array of int64 with one dimension that nobody else borrows";

pub(crate) fn num_ids(ranges: &[IdRange]) -> usize {
    ranges.iter().map(|range| range.len as usize).sum()
}

/// The slots of blocks in order, in a new array or in the one that is given.
pub(crate) fn of<'py>(
    py: Python<'py>,
    ranges: &[IdRange],
    (table, table_arg): (&Bound<'py, PyAny>, Arg),
    (out, out_arg): (Option<&Bound<'py, PyAny>>, Arg),
) -> PyResult<Counts<'py>> {
    let wrong = |_| table_arg.wrong_type(table, TABLE);
    let array: PyReadonlyArrayDyn<'py, i64> = table.extract().map_err(wrong)?;
    let width = match *array.shape() {
        [_] => 1,
        [_, width] => width,
        _ => return Err(table_arg.wrong_type(table, TABLE)),
    };
    // Rows that are next to each other in another order are a slice too.
    if !array.is_c_contiguous() {
        return Err(table_arg.wrong_type(table, TABLE));
    }
    let rows = array.as_slice()?;
    let num_rows = array.shape()[0];
    let ends = ranges.iter().map(|range| range.first.0 + range.len);
    if let Some(end) = ends.max().filter(|&end| end as usize > num_rows) {
        return Err(PyValueError::new_err(format!(
            "{}: {} has {num_rows} rows, and block {} is among the blocks",
            table_arg.call,
            table_arg.name,
            end - 1
        )));
    }
    let count = num_ids(ranges) * width;
    let slots = |range: &IdRange| {
        let first = range.first.0 as usize * width;
        &rows[first..][..range.len as usize * width]
    };
    let Some(out) = out else {
        let mut all = Vec::with_capacity(count);
        for range in ranges {
            all.extend_from_slice(slots(range));
        }
        return Ok(PyArray1::from_vec(py, all).into());
    };
    let mut written: PyReadwriteArray1<'py, i64> = out
        .cast::<PyArray1<i64>>()
        .ok()
        .and_then(|array| array.try_readwrite().ok())
        .ok_or_else(|| out_arg.wrong_type(out, OUT))?;
    let to = written
        .as_slice_mut()
        .map_err(|_| out_arg.wrong_type(out, OUT))?;
    if to.len() != count {
        return Err(PyValueError::new_err(format!(
            "{}: {} has {} elements; the match has {} tokens here",
            out_arg.call,
            out_arg.name,
            to.len(),
            count
        )));
    }
    let mut at = 0;
    for range in ranges {
        let slots = slots(range);
        to[at..][..slots.len()].copy_from_slice(slots);
        at += slots.len();
    }
    Ok(out.clone().into())
}
