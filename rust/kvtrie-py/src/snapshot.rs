//! Bytes in and out of an index.

use kvtrie_core::{RadixIndex, RestoreLimits};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::Arg;
use crate::detach::{Cost, Enter};
use crate::shared::{INDEX, SharedIndex};

/// The index as bytes.
pub(crate) fn snapshot<'py>(
    py: Python<'py>,
    shared: &SharedIndex,
) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = py.enter(Cost::Long, |keys| {
        Ok(keys.lock(&shared.core, INDEX)?.snapshot())
    })?;
    Ok(PyBytes::new(py, &bytes))
}

/// An index from bytes. `bytes` cannot change; anything else is copied before the interpreter is let go.
pub(crate) fn restore(
    py: Python<'_>,
    blob: &Bound<'_, PyAny>,
    limits: RestoreLimits,
) -> PyResult<RadixIndex> {
    if let Ok(bytes) = blob.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        return py.enter(Cost::Long, |_| {
            Ok(RadixIndex::restore_within(bytes, limits)?)
        });
    }
    let arg = Arg::new("RadixIndex.restore", "blob");
    let wanted = "bytes or another buffer of bytes";
    let buffer = PyBuffer::<u8>::get(blob);
    let buffer = buffer.map_err(|error| arg.not_buffer(blob, error, wanted))?;
    let bytes = buffer.to_vec(py)?;
    py.enter(Cost::Long, |_| {
        Ok(RadixIndex::restore_within(&bytes, limits)?)
    })
}
