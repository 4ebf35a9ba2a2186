use kvtrie_core::BlockAllocator;
use pyo3::prelude::*;

use crate::arguments::{arg, call, int, optional_of};
use crate::buffers::{Arg, block_ids};
use crate::detach::{Cost, Enter, Lock};
use crate::errors::exception;
use crate::hints::Ids;
use crate::index::PyRadixIndex;
use crate::output::ids;
use crate::shared::INDEX;

const ALLOCATOR: &str = "the allocator";

/// A free list of block ids for engines that have none.
///
/// Args:
///     num_blocks: Ids are in 0..num_blocks, at most 2**31; all are free at first.
///
/// Raises:
///     TypeError: `num_blocks` is not an int.
///     ValueError: `num_blocks` is not in 1..=2**31.
///
/// Example:
///     >>> pool = kvtrie.BlockAllocator(4)
///     >>> ids = pool.allocate(3)
///     >>> pool.free(ids[1:])
///     >>> pool.num_free
///     3
///     >>> pool.free(ids[1:])  # doctest: +ELLIPSIS
///     Traceback (most recent call last):
///     ValueError: BlockAllocator.free: ids holds 1, which is not handed out: ...
#[pyclass(frozen, weakref, module = "kvtrie", name = "BlockAllocator")]
pub(crate) struct PyBlockAllocator {
    core: Lock<BlockAllocator>,
    num_blocks: u64,
}

#[pymethods]
impl PyBlockAllocator {
    #[new]
    #[pyo3(signature = (num_blocks: "SupportsIndex"))]
    fn new(
        #[pyo3(from_py_with = int::<call::BlockAllocator, arg::NumBlocks>)] num_blocks: i128,
    ) -> PyResult<Self> {
        let num_blocks = Arg::new("BlockAllocator", "num_blocks").within(
            num_blocks,
            1,
            kvtrie_core::BlockId::MAX_BLOCKS,
        )?;
        let core = BlockAllocator::new(num_blocks).map_err(|error| exception(&error))?;
        Ok(Self {
            core: Lock::new(core),
            num_blocks,
        })
    }

    /// Hand out `n` ids, all or none: free ones first, then evicted ones.
    ///
    /// Args:
    ///     n: How many.
    ///     evict_from: The index whose least recently used blocks are evicted if too few are free. Its
    ///         `num_blocks` must be the allocator's.
    ///
    /// Returns:
    ///     The ids, as int32.
    ///
    /// Raises:
    ///     OutOfBlocksError: Fewer can be had; nothing is evicted then.
    ///     ValueError: `n` is negative, or the index has another `num_blocks`.
    ///
    /// Example:
    ///     >>> pool = kvtrie.BlockAllocator(4)
    ///     >>> len(pool.allocate(3))
    ///     3
    #[pyo3(signature = (n: "SupportsIndex", evict_from: "RadixIndex | None" = None))]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = int::<call::BlockAllocatorAllocate, arg::N>)] n: i128,
        #[pyo3(from_py_with = optional_of::<call::BlockAllocatorAllocate, arg::EvictFrom, PyRadixIndex>)]
        evict_from: Option<&Bound<'py, PyRadixIndex>>,
    ) -> PyResult<Ids<'py>> {
        let n = Arg::new("BlockAllocator.allocate", "n").count(n)?;
        let index = evict_from.map(|index| &*index.get().shared);
        let got = py.enter(Cost::blocks(n), |keys| {
            let mut pool = keys.lock(&self.core, ALLOCATOR)?;
            let Some(index) = index else {
                return Ok(pool.allocate(n, None)?);
            };
            let mut index = keys.lock(&index.core, INDEX)?;
            Ok(pool.allocate(n, Some(&mut index))?)
        })?;
        Ok(ids(py, &got))
    }

    /// Take ids back.
    ///
    /// Args:
    ///     ids: Ids that were handed out here, each once.
    ///
    /// Raises:
    ///     ValueError: An id is outside the pool, is free, or comes twice.
    ///
    /// Example:
    ///     >>> pool = kvtrie.BlockAllocator(4)
    ///     >>> pool.free(pool.allocate(4))
    #[pyo3(signature = (ids: "_Integers"))]
    fn free(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = block_ids(ids, self.num_blocks, Arg::new("BlockAllocator.free", "ids"))?;
        // A few instructions an id.
        py.enter(Cost::copy(ids.len()), |keys| {
            Ok(keys.lock(&self.core, ALLOCATOR)?.free(&ids)?)
        })
    }

    /// Free ids.
    #[getter]
    fn num_free(&self, py: Python<'_>) -> PyResult<u64> {
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.core, ALLOCATOR)?.num_free())
        })
    }

    /// Ids in the pool.
    #[getter]
    fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "BlockAllocator(num_blocks={}, num_free={})",
            self.num_blocks,
            self.num_free(py)?
        ))
    }
}
