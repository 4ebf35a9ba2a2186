//! The class `BlockAllocator`.

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

/// A free list of block ids, for engines that have no block manager of their own.
///
/// Args:
///     num_blocks: Blocks in the pool, at most 2**31. Ids are in 0..num_blocks; all are free at
///         first.
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

    /// Allocate `n` blocks or none: free ones first, then blocks evicted from an index.
    ///
    /// Args:
    ///     n: Number of blocks.
    ///     evict_from: The index whose least recently used blocks are evicted if too few are free. Its
    ///         `num_blocks` must be the allocator's.
    ///
    /// Returns:
    ///     The ids, as int32.
    ///
    /// Raises:
    ///     OutOfBlocksError: Fewer blocks are free or evictable; nothing is evicted then.
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

    /// Free blocks.
    ///
    /// Args:
    ///     ids: Ids that were allocated here, each once.
    ///
    /// Raises:
    ///     ValueError: An id is outside the pool, is free, or occurs twice.
    ///
    /// Example:
    ///     >>> pool = kvtrie.BlockAllocator(4)
    ///     >>> pool.free(pool.allocate(4))
    #[pyo3(signature = (ids: "_Integers"))]
    fn free(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = block_ids(ids, self.num_blocks, Arg::new("BlockAllocator.free", "ids"))?;
        // Freeing takes a few instructions per id.
        py.enter(Cost::copy(ids.len()), |keys| {
            Ok(keys.lock(&self.core, ALLOCATOR)?.free(&ids)?)
        })
    }

    /// Number of free blocks.
    #[getter]
    fn num_free(&self, py: Python<'_>) -> PyResult<u64> {
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.core, ALLOCATOR)?.num_free())
        })
    }

    /// Number of blocks in the pool.
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
