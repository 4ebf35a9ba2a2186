//! The class `SlotTable`.

use kvtrie_core::BlockId;
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1, PyReadwriteArray1, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{arg, call, int};
use crate::buffers::{Arg, block_ids};
use crate::detach::{Cost, Enter, Lock};
use crate::errors::OutOfBlocksError;
use crate::hints::{Counts, Ids};
use crate::output::{ids, signed};

const TABLE: &str = "the slot table";
const MEMORY: &str =
    "a contiguous, writable numpy array of int64 with one dimension that nobody else borrows";
const SLOTS: &str = "a contiguous numpy array of int64 or int32 with one dimension";

/// Ids of blocks for pages of an engine that has slots of its own choice, and the slots of each.
///
/// An engine's pages are not numbered as an index needs it if the engine gives out slots. Then a
/// block is an id that is taken here and a row of slots. Ids that were given back last are taken
/// first, in the reverse order, so the pages of a prompt mostly have consecutive ids.
///
/// Args:
///     num_blocks: Pages of the pool, 1 to 2**31. All ids in 0..num_blocks are free at first.
///     block_size: Slots of a page, 1 to 4096, next to each other in the pool.
///     memory: Where the slots are kept: a contiguous numpy array of int64 with num_blocks *
///         block_size elements, which the table keeps. None: the table has only ids.
///
/// Raises:
///     TypeError: An argument has the wrong type.
///     ValueError: An argument is out of its range, or `memory` has another length.
///
/// Example:
///     >>> import numpy as np
///     >>> table = kvtrie.SlotTable(4, 2, np.zeros(8, np.int64))
///     >>> table.take(2, np.array([20, 21, 60, 61]))
///     array([0, 1], dtype=int32)
///     >>> table.give_back(np.array([1, 0]))
///     array([10, 30])
#[pyclass(frozen, weakref, module = "kvtrie", name = "SlotTable")]
pub(crate) struct PySlotTable {
    num_blocks: u64,
    block_size: usize,
    memory: Option<Py<PyArray1<i64>>>,
    free: Lock<Free>,
}

/// A stack of free ids, and a bit for each that is set while it is free.
struct Free {
    stack: Vec<BlockId>,
    is_free: Vec<u64>,
}

impl Free {
    fn new(num_blocks: u64) -> Self {
        let num_blocks = u32::try_from(num_blocks).unwrap_or(u32::MAX);
        let mut free = Self {
            stack: Vec::with_capacity(num_blocks as usize),
            is_free: vec![0; num_blocks as usize / 64 + 1],
        };
        for id in (0..num_blocks).rev().map(BlockId) {
            free.flip(id);
            free.stack.push(id);
        }
        free
    }

    /// Whether it was free.
    fn flip(&mut self, id: BlockId) -> bool {
        let (word, bit) = (&mut self.is_free[id.0 as usize / 64], 1 << (id.0 % 64));
        *word ^= bit;
        *word & bit == 0
    }

    /// Takes ids off the stack; `None` if there are too few.
    fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let from = self.stack.len().checked_sub(count)?;
        let taken: Vec<BlockId> = self.stack.drain(from..).rev().collect();
        for &id in &taken {
            self.flip(id);
        }
        Some(taken)
    }

    /// Puts ids on the stack; fails with the place of one that is free, or occurs before.
    fn give_back(&mut self, ids: &[BlockId]) -> Result<(), usize> {
        for (at, &id) in ids.iter().enumerate() {
            if self.flip(id) {
                for &id in &ids[..=at] {
                    self.flip(id);
                }
                return Err(at);
            }
        }
        self.stack.extend_from_slice(ids);
        Ok(())
    }
}

/// Slots that are given.
enum Slots<'py> {
    Wide(PyReadonlyArray1<'py, i64>),
    Narrow(PyReadonlyArray1<'py, i32>),
}

#[pymethods]
impl PySlotTable {
    #[new]
    #[pyo3(signature = (
        num_blocks: "SupportsIndex", block_size: "SupportsIndex", memory: "npt.NDArray[np.int64] | None" = None
    ), text_signature = "(num_blocks, block_size, memory=None)")]
    fn new(
        #[pyo3(from_py_with = int::<call::SlotTable, arg::NumBlocks>)] num_blocks: i128,
        #[pyo3(from_py_with = int::<call::SlotTable, arg::BlockSize>)] block_size: i128,
        memory: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let arg = |name| Arg::new("SlotTable", name);
        let num_blocks = arg("num_blocks").within(num_blocks, 1, BlockId::MAX_BLOCKS)?;
        let most = i64::try_from(kvtrie_core::Config::MAX_BLOCK_SIZE).unwrap_or(i64::MAX);
        let block_size = arg("block_size").within(block_size, 1, most)?;
        let block_size = arg("block_size").count(block_size.into())?;
        let memory = memory.map(|given| {
            let wrong = || arg("memory").wrong_type(given, MEMORY);
            let array = given.cast::<PyArray1<i64>>().map_err(|_| wrong())?;
            let mut written = array.try_readwrite().map_err(|_| wrong())?;
            let len = written.as_slice_mut().map_err(|_| wrong())?.len();
            if len as u64 != num_blocks * block_size as u64 {
                return Err(PyValueError::new_err(format!(
                    "SlotTable: memory has {len} elements; it must have {num_blocks} * {block_size}"
                )));
            }
            Ok(array.clone().unbind())
        });
        Ok(Self {
            num_blocks,
            block_size,
            memory: memory.transpose()?,
            free: Lock::new(Free::new(num_blocks)),
        })
    }

    /// Take free ids, and write their slots.
    ///
    /// Args:
    ///     count: How many.
    ///     slots: Slots of tokens, block_size for each id, the first at `start`; those after are not
    ///         read. None writes none.
    ///     start: Where in `slots` the first id's slots begin.
    ///
    /// Returns:
    ///     The ids (int32), those that were given back last first.
    ///
    /// Raises:
    ///     TypeError: `slots` is not a contiguous array of int64 or int32, or the table has no memory.
    ///     OutOfBlocksError: Fewer are free.
    ///     ValueError: `count` or `start` is negative, or `slots` is too short. Nothing is taken.
    ///
    /// Example:
    ///     >>> kvtrie.SlotTable(4, 2).take(2)
    ///     array([0, 1], dtype=int32)
    #[pyo3(signature = (
        count: "SupportsIndex", slots: "npt.NDArray[np.int64] | npt.NDArray[np.int32] | None" = None,
        start: "SupportsIndex" = 0
    ))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = int::<call::SlotTableTake, arg::Count>)] count: i128,
        slots: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = int::<call::SlotTableTake, arg::Start>)] start: i128,
    ) -> PyResult<Ids<'py>> {
        const CALL: &str = "SlotTable.take";
        let count = Arg::new(CALL, "count").count(count)?;
        let start = Arg::new(CALL, "start").count(start)?;
        let Some(given) = slots else {
            return Ok(ids(py, &self.taken(py, count, |_| ())?));
        };
        let arg = Arg::new(CALL, "slots");
        let mut memory = self.written(py, given, arg)?;
        let to = memory.as_slice_mut()?;
        let size = self.block_size;
        let too_short = |len: usize| {
            PyValueError::new_err(format!(
                "{CALL}: slots has {len} elements; {count} blocks of {size} slots do not begin at {start}"
            ))
        };
        let end = count
            .checked_mul(size)
            .and_then(|len| len.checked_add(start));
        let range = |len: usize| match end.filter(|&end| end <= len) {
            Some(end) => Ok(start..end),
            None => Err(too_short(len)),
        };
        let taken = match slots_of(given).ok_or_else(|| arg.wrong_type(given, SLOTS))? {
            Slots::Wide(slots) => {
                let slots = slots.as_slice()?;
                let slots = &slots[range(slots.len())?];
                self.taken(py, count, |ids| {
                    for (id, from) in ids.iter().zip(slots.chunks_exact(size)) {
                        to[id.0 as usize * size..][..size].copy_from_slice(from);
                    }
                })?
            }
            Slots::Narrow(slots) => {
                let slots = slots.as_slice()?;
                let slots = &slots[range(slots.len())?];
                self.taken(py, count, |ids| {
                    for (id, from) in ids.iter().zip(slots.chunks_exact(size)) {
                        let to = &mut to[id.0 as usize * size..][..size];
                        for (to, &slot) in to.iter_mut().zip(from) {
                            *to = slot.into();
                        }
                    }
                })?
            }
        };
        Ok(ids(py, &taken))
    }

    /// Give ids back.
    ///
    /// Args:
    ///     ids: Ids that are taken, each once.
    ///
    /// Returns:
    ///     The page of each, which is its first slot divided by block_size (int64), in the reverse
    ///     order: that in which `take` gives them. All 0 without memory.
    ///
    /// Raises:
    ///     ValueError: An id is outside the pool, is free, or occurs twice. Nothing is given back.
    ///
    /// Example:
    ///     >>> table = kvtrie.SlotTable(4, 2)
    ///     >>> table.give_back(table.take(2))
    ///     array([0, 0])
    #[pyo3(signature = (ids: "_Integers"))]
    fn give_back<'py>(&self, py: Python<'py>, ids: &Bound<'py, PyAny>) -> PyResult<Counts<'py>> {
        const CALL: &str = "SlotTable.give_back";
        let ids = block_ids(ids, self.num_blocks, Arg::new(CALL, "ids"))?;
        let back = py.enter(Cost::copy(ids.len()), |keys| {
            Ok(keys.lock(&self.free, TABLE)?.give_back(&ids))
        })?;
        if let Err(at) = back {
            return Err(PyValueError::new_err(format!(
                "{CALL}: ids[{at}] is {}, which is free already",
                ids[at]
            )));
        }
        let Some(memory) = &self.memory else {
            return Ok(PyArray1::from_vec(py, vec![0_i64; ids.len()]).into());
        };
        let memory = memory.bind(py).try_readonly().map_err(|error| {
            PyValueError::new_err(format!("{CALL}: the memory is borrowed: {error}"))
        })?;
        let slots = memory.as_slice()?;
        let size = self.block_size;
        let divisor = signed(size);
        let first = |id: &BlockId| slots[id.0 as usize * size];
        let pages = if size == 1 {
            ids.iter().rev().map(first).collect()
        } else {
            ids.iter().rev().map(|id| first(id) / divisor).collect()
        };
        Ok(PyArray1::from_vec(py, pages).into())
    }

    /// Ids that are free, in the order in which they were given back (int32).
    #[getter]
    fn free_ids<'py>(&self, py: Python<'py>) -> PyResult<Ids<'py>> {
        let free = py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.free, TABLE)?.stack.clone())
        })?;
        Ok(ids(py, &free))
    }

    /// How many ids are free.
    #[getter]
    fn num_free(&self, py: Python<'_>) -> PyResult<usize> {
        py.enter(Cost::Short, |keys| {
            Ok(keys.lock(&self.free, TABLE)?.stack.len())
        })
    }

    /// Pages of the pool.
    #[getter]
    fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Slots of a page.
    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "SlotTable(num_blocks={}, block_size={}, num_free={})",
            self.num_blocks,
            self.block_size,
            self.num_free(py)?
        ))
    }
}

impl PySlotTable {
    fn written<'py>(
        &self,
        py: Python<'py>,
        given: &Bound<'py, PyAny>,
        arg: Arg,
    ) -> PyResult<PyReadwriteArray1<'py, i64>> {
        let Some(memory) = &self.memory else {
            return Err(arg.type_error(given, "None, because the table has no memory"));
        };
        memory.bind(py).try_readwrite().map_err(|error| {
            PyValueError::new_err(format!("{}: the memory is borrowed: {error}", arg.call))
        })
    }

    /// Takes ids, and does something with them before anybody else can take any.
    fn taken(
        &self,
        py: Python<'_>,
        count: usize,
        write: impl FnOnce(&[BlockId]) + Send,
    ) -> PyResult<Vec<BlockId>> {
        let taken = py.enter(Cost::copy(count), |keys| {
            let mut free = keys.lock(&self.free, TABLE)?;
            let num_free = free.stack.len();
            let taken = free.take(count);
            if let Some(ids) = &taken {
                write(ids);
            }
            Ok(taken.ok_or(num_free))
        })?;
        taken.map_err(|num_free| {
            OutOfBlocksError::new_err(format!(
                "SlotTable.take: count is {count}; {num_free} ids are free"
            ))
        })
    }
}

fn slots_of<'py>(given: &Bound<'py, PyAny>) -> Option<Slots<'py>> {
    if let Ok(array) = given.cast::<PyArray1<i64>>() {
        let slots = array.try_readonly().ok()?;
        return slots.is_contiguous().then_some(Slots::Wide(slots));
    }
    let slots = given.cast::<PyArray1<i32>>().ok()?.try_readonly().ok()?;
    slots.is_contiguous().then_some(Slots::Narrow(slots))
}
