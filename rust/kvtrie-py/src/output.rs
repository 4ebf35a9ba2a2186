//! Makes results for Python: new numpy arrays that belong to the caller.

use kvtrie_core::{BlockId, Class, Move, Segment};
use kvtrie_transfer::{BlockPair, LabelRun};
use numpy::{PyArray1, PyArrayDescr, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;

use crate::hints::{Counts, Ids, Records};

pub(crate) fn ids<'py>(py: Python<'py>, ids: &[BlockId]) -> Ids<'py> {
    /// Below this number of ids, a copy costs less than the object that owns a list.
    const FEW: usize = 128;
    let mut few = [0; FEW];
    if let Some(few) = few.get_mut(..ids.len()) {
        for (to, &id) in few.iter_mut().zip(ids) {
            *to = raw(id);
        }
        return PyArray1::from_slice(py, few).into();
    }
    PyArray1::from_vec(py, ids.iter().map(|&id| raw(id)).collect()).into()
}

/// A block id as an element of an array. It is below 2³¹.
pub(crate) fn raw(id: BlockId) -> i32 {
    id.0.cast_signed()
}

pub(crate) fn signed(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

pub(crate) fn ranges<'py>(py: Python<'py>, ranges: &[(usize, usize)]) -> PyResult<Counts<'py>> {
    let flat = ranges
        .iter()
        .flat_map(|&(start, end)| [signed(start), signed(end)])
        .collect();
    Ok(PyArray1::from_vec(py, flat)
        .reshape([ranges.len(), 2])?
        .into())
}

pub(crate) fn segments<'py>(py: Python<'py>, segments: &[Segment]) -> PyResult<Records<'py>> {
    static DTYPE: PyOnceLock<Py<PyArrayDescr>> = PyOnceLock::new();
    let mut bytes = Vec::with_capacity(segments.len() * 56);
    for segment in segments {
        for position in [
            signed(segment.start),
            signed(segment.end),
            signed(segment.old_start),
            segment.delta(),
        ] {
            bytes.extend(position.to_ne_bytes());
        }
        bytes.extend([number(segment.class), 0]);
        bytes.extend(segment.hops.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(segment.kinds.to_ne_bytes());
        bytes.extend(segment.position_delta.to_ne_bytes());
    }
    let fields = [
        ("start", "i8"),
        ("end", "i8"),
        ("old_start", "i8"),
        ("delta", "i8"),
        ("class", "u1"),
        ("hops", "u2"),
        ("kinds", "u8"),
        ("position_delta", "i8"),
    ];
    structured(py, bytes, &DTYPE, &fields)
}

pub(crate) fn labels<'py>(py: Python<'py>, runs: &[LabelRun]) -> PyResult<Records<'py>> {
    static DTYPE: PyOnceLock<Py<PyArrayDescr>> = PyOnceLock::new();
    let mut bytes = Vec::with_capacity(runs.len() * 24);
    for run in runs {
        bytes.extend(signed(run.start).to_ne_bytes());
        bytes.extend(signed(run.end).to_ne_bytes());
        bytes.extend([number(run.class), 0]);
        bytes.extend(run.hops.to_ne_bytes());
        bytes.extend([0; 4]);
    }
    let fields = [
        ("start", "i8"),
        ("end", "i8"),
        ("class", "u1"),
        ("hops", "u2"),
    ];
    structured(py, bytes, &DTYPE, &fields)
}

pub(crate) fn number(class: Class) -> u8 {
    match class {
        Class::Exact => 0,
        Class::Approximate => 1,
        Class::Compute => 2,
    }
}

pub(crate) fn moves<'py>(py: Python<'py>, moves: &[Move]) -> PyResult<Records<'py>> {
    static DTYPE: PyOnceLock<Py<PyArrayDescr>> = PyOnceLock::new();
    let mut bytes = Vec::with_capacity(moves.len() * 32);
    for copy in moves {
        bytes.extend(copy.source_slot.to_ne_bytes());
        bytes.extend(copy.dest_slot.to_ne_bytes());
        bytes.extend(copy.num_tokens.to_ne_bytes());
        bytes.extend(copy.delta.to_ne_bytes());
    }
    let fields = [
        ("source_slot", "i8"),
        ("dest_slot", "i8"),
        ("num_tokens", "i8"),
        ("delta", "i8"),
    ];
    structured(py, bytes, &DTYPE, &fields)
}

pub(crate) fn pairs<'py>(py: Python<'py>, pairs: &[BlockPair]) -> PyResult<Records<'py>> {
    static DTYPE: PyOnceLock<Py<PyArrayDescr>> = PyOnceLock::new();
    let mut bytes = Vec::with_capacity(pairs.len() * 48);
    for pair in pairs {
        for number in [
            pair.group.cast_signed(),
            raw(pair.remote),
            pair.local.map_or(-1, raw),
            0,
        ] {
            bytes.extend(number.to_ne_bytes());
        }
        for position in [signed(pair.start), signed(pair.end), pair.delta] {
            bytes.extend(position.to_ne_bytes());
        }
        bytes.extend([pair.class as u8, 0]);
        bytes.extend(pair.hops.to_ne_bytes());
        bytes.extend([0; 4]);
    }
    let fields = [
        ("group", "i4"),
        ("remote", "i4"),
        ("local", "i4"),
        ("start", "i8"),
        ("end", "i8"),
        ("delta", "i8"),
        ("class", "u1"),
        ("hops", "u2"),
    ];
    structured(py, bytes, &DTYPE, &fields)
}

fn structured<'py>(
    py: Python<'py>,
    bytes: Vec<u8>,
    dtype: &PyOnceLock<Py<PyArrayDescr>>,
    fields: &[(&str, &str)],
) -> PyResult<Records<'py>> {
    let dtype = dtype.get_or_try_init(py, || {
        let dtype = py
            .import("numpy")?
            .getattr("dtype")?
            .call1((fields.to_vec(), true))?;
        PyResult::Ok(dtype.cast_into::<PyArrayDescr>()?.unbind())
    })?;
    Ok(PyArray1::from_vec(py, bytes)
        .call_method1("view", (dtype,))?
        .into())
}

pub(crate) fn quoted(py: Python<'_>, text: &str) -> PyResult<String> {
    Ok(PyString::new(py, text).repr()?.to_string())
}

/// A string of untrusted origin for a `repr`, cut after 80 characters.
pub(crate) fn quoted_in_short(py: Python<'_>, text: &str) -> PyResult<String> {
    const SHOWN: usize = 80;
    match text.char_indices().nth(SHOWN) {
        None => quoted(py, text),
        Some((end, _)) => {
            let (shown, count) = (quoted(py, &text[..end])?, text.chars().count());
            Ok(format!("{shown}... ({count} characters)"))
        }
    }
}

/// A list for a `repr`, cut after 8 ids.
pub(crate) fn listed(ids: &[impl ToString]) -> String {
    const SHOWN: usize = 8;
    let mut shown: Vec<String> = ids.iter().take(SHOWN).map(ToString::to_string).collect();
    if ids.len() > SHOWN {
        shown.push(format!("... {} in all", ids.len()));
    }
    format!("[{}]", shown.join(", "))
}

pub(crate) fn truth(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}
