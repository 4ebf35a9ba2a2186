//! Reads the slots of blocks off an engine's table.

use kvtrie_core::BlockId;
use numpy::{
    PyArray1, PyArrayMethods, PyReadonlyArrayDyn, PyReadwriteArray1, PyUntypedArrayMethods,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffers::Arg;
use crate::hints::Counts;

/// Blocks that are looked at together.
const CHUNK: usize = 256;
const TABLE: &str = "a contiguous numpy array of int64 with one or two dimensions";
const OUT: &str =
    "a contiguous, writable numpy array of int64 with one dimension that nobody else borrows";

/// Whether the ids of some blocks are consecutive; without branches, which becomes vector code.
fn is_run(blocks: &[BlockId]) -> bool {
    let from = blocks.first().map_or(0, |id| id.0);
    let wrong = |wrong, (at, id): (u32, &BlockId)| wrong | (at ^ id.0);
    (from..).zip(blocks).fold(0, wrong) == 0
}

/// The slots of blocks in order, in a new array or in the one that is given.
pub(crate) fn of<'py>(
    py: Python<'py>,
    blocks: &[BlockId],
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
    let highest = blocks.iter().map(|id| id.0).max();
    if let Some(id) = highest.filter(|&id| id as usize >= num_rows) {
        return Err(PyValueError::new_err(format!(
            "{}: {} has {num_rows} rows, and block {id} is among the blocks",
            table_arg.call, table_arg.name
        )));
    }
    let Some(out) = out else {
        let mut slots = Vec::with_capacity(blocks.len() * width);
        for chunk in blocks.chunks(CHUNK) {
            if is_run(chunk) {
                let first = chunk[0].0 as usize * width;
                slots.extend_from_slice(&rows[first..][..chunk.len() * width]);
            } else if width == 1 {
                slots.extend(chunk.iter().map(|id| rows[id.0 as usize]));
            } else {
                for id in chunk {
                    slots.extend_from_slice(&rows[id.0 as usize * width..][..width]);
                }
            }
        }
        return Ok(PyArray1::from_vec(py, slots).into());
    };
    let mut written: PyReadwriteArray1<'py, i64> = out
        .cast::<PyArray1<i64>>()
        .ok()
        .and_then(|array| array.try_readwrite().ok())
        .ok_or_else(|| out_arg.wrong_type(out, OUT))?;
    let to = written
        .as_slice_mut()
        .map_err(|_| out_arg.wrong_type(out, OUT))?;
    if to.len() != blocks.len() * width {
        return Err(PyValueError::new_err(format!(
            "{}: {} has {} elements; the match has {} tokens here",
            out_arg.call,
            out_arg.name,
            to.len(),
            blocks.len() * width
        )));
    }
    if width == 1 {
        for (to, id) in to.iter_mut().zip(blocks) {
            *to = rows[id.0 as usize];
        }
    } else if width > 0 {
        for (to, id) in to.chunks_exact_mut(width).zip(blocks) {
            to.copy_from_slice(&rows[id.0 as usize * width..][..width]);
        }
    }
    Ok(out.clone().into())
}
