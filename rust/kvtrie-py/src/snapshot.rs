//! Snapshots of an index from and to Python bytes.

use kvtrie_core::{RadixIndex, RestoreLimits, RestoredPool};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffers::Arg;
use crate::detach::{Cost, Enter};
use crate::shared::{INDEX, SharedIndex};

pub(crate) fn snapshot<'py>(
    py: Python<'py>,
    shared: &SharedIndex,
) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = py.enter(Cost::Long, |keys| {
        Ok(keys.lock(&shared.core, INDEX)?.snapshot())
    })?;
    Ok(PyBytes::new(py, &bytes))
}

pub(crate) fn restore(
    py: Python<'_>,
    blob: &Bound<'_, PyAny>,
    pool: RestoredPool<'_>,
    limits: RestoreLimits,
) -> PyResult<RadixIndex> {
    with_bytes(py, blob, "RadixIndex.restore", |bytes| {
        RadixIndex::restore_within(bytes, pool, limits)
    })
}

pub(crate) fn pool_of(py: Python<'_>, blob: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let call = "RadixIndex.pool_of_snapshot";
    with_bytes(py, blob, call, RadixIndex::pool_of_snapshot)
}

/// Reads a buffer with the interpreter released. `bytes` cannot change; anything else is copied
/// first.
fn with_bytes<T: Send>(
    py: Python<'_>,
    blob: &Bound<'_, PyAny>,
    call: &'static str,
    read: impl FnOnce(&[u8]) -> kvtrie_core::Result<T> + Send,
) -> PyResult<T> {
    if let Ok(bytes) = blob.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        return py.enter(Cost::Long, |_| Ok(read(bytes)?));
    }
    let arg = Arg::new(call, "blob");
    let wanted = "bytes or another buffer of bytes";
    let buffer = PyBuffer::<u8>::get(blob);
    let buffer = buffer.map_err(|error| arg.not_buffer(blob, error, wanted))?;
    let bytes = buffer.to_vec(py)?;
    py.enter(Cost::Long, |_| Ok(read(&bytes)?))
}
