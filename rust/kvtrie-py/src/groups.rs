//! The classes of groups of layers: `Group`, `GroupInsertResult` and `GroupStats`.

use kvtrie_core::{BlockId, Group, GroupInserted, GroupKind, GroupStats};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMapping};

use crate::arguments::{arg, call, int, text};
use crate::buffers::Arg;
use crate::hints::Ids;
use crate::output::{ids, listed, quoted};

/// A group of layers that keeps other KV than those that attend to all tokens: a sliding window, or
/// a recurrent state. Its ids are those of a pool of its own.
///
/// `Group.window` and `Group.state` make one; `RadixIndex(groups=)` takes it. docs/groups.md has the
/// use.
///
/// Example:
///     >>> kvtrie.Group.window("swa", window=512, num_blocks=64)
///     Group.window('swa', window=512, num_blocks=64, block_size=16)
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "Group")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PyGroup {
    name: String,
    window: Option<usize>,
    num_blocks: u64,
    block_size: Option<usize>,
}

impl PyGroup {
    pub(crate) fn of(core: &Group) -> Self {
        let window = match core.kind {
            GroupKind::Window { window } => Some(window),
            GroupKind::State => None,
        };
        Self {
            name: core.name.clone(),
            window,
            num_blocks: core.num_blocks,
            block_size: window.map(|_| core.block_size),
        }
    }

    pub(crate) fn core_kind(&self) -> GroupKind {
        self.window
            .map_or(GroupKind::State, |window| GroupKind::Window { window })
    }

    pub(crate) fn own_block_size(&self) -> Option<usize> {
        self.block_size
    }

    pub(crate) fn to_core(&self, block_size: usize) -> Group {
        let (name, own) = (&self.name, self.block_size.unwrap_or(block_size));
        match self.window {
            Some(window) => Group::window(name, window, self.num_blocks, own),
            None => Group::state(name, self.num_blocks, own),
        }
    }
}

#[pymethods]
impl PyGroup {
    /// Layers that attend to the last `window` tokens, the token itself included.
    ///
    /// Args:
    ///     name: The name of the group, 1 to 64 bytes.
    ///     window: Tokens, at least 2.
    ///     num_blocks: Blocks in the group's own pool, 1 to 2**31, and enough for a window.
    ///     block_size: Tokens per block. It must be that of the index.
    ///
    /// Raises:
    ///     TypeError: An argument has the wrong type.
    ///     ValueError: A number is negative. `RadixIndex` checks the limits.
    ///
    /// Example:
    ///     >>> kvtrie.Group.window("swa", window=512, num_blocks=64).num_window_tokens
    ///     512
    #[staticmethod]
    #[pyo3(name = "window", signature = (
        name: "str", *, window: "SupportsIndex", num_blocks: "SupportsIndex", block_size: "SupportsIndex" = 16
    ) -> "Group")]
    fn of_window(
        #[pyo3(from_py_with = text::<call::GroupWindow, arg::Name>)] name: String,
        #[pyo3(from_py_with = int::<call::GroupWindow, arg::Window>)] window: i128,
        #[pyo3(from_py_with = int::<call::GroupWindow, arg::NumBlocks>)] num_blocks: i128,
        #[pyo3(from_py_with = int::<call::GroupWindow, arg::BlockSize>)] block_size: i128,
    ) -> PyResult<Self> {
        let arg = |name| Arg::new("Group.window", name);
        Ok(Self {
            name,
            window: Some(arg("window").count(window)?),
            num_blocks: arg("num_blocks").within(num_blocks, 1, BlockId::MAX_BLOCKS)?,
            block_size: Some(arg("block_size").count(block_size)?),
        })
    }

    /// Layers with one state of all tokens before a position, such as Mamba and gated delta nets.
    ///
    /// Args:
    ///     name: The name of the group, 1 to 64 bytes.
    ///     num_slots: Slots in the group's own pool, 1 to 2**31; each has a state of all its layers.
    ///
    /// Raises:
    ///     TypeError: An argument has the wrong type.
    ///     ValueError: `num_slots` is out of its range.
    ///
    /// Example:
    ///     >>> kvtrie.Group.state("gdn", num_slots=8).kind
    ///     'state'
    #[staticmethod]
    #[pyo3(signature = (name: "str", *, num_slots: "SupportsIndex") -> "Group")]
    fn state(
        #[pyo3(from_py_with = text::<call::GroupState, arg::Name>)] name: String,
        #[pyo3(from_py_with = int::<call::GroupState, arg::NumSlots>)] num_slots: i128,
    ) -> PyResult<Self> {
        let arg = Arg::new("Group.state", "num_slots");
        Ok(Self {
            name,
            window: None,
            num_blocks: arg.within(num_slots, 1, BlockId::MAX_BLOCKS)?,
            block_size: None,
        })
    }

    /// The name of the group.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// `"window"` or `"state"`.
    #[getter]
    fn kind(&self) -> &'static str {
        self.window.map_or("state", |_| "window")
    }

    /// Tokens that a token attends to, itself included; None for a state.
    #[getter]
    fn num_window_tokens(&self) -> Option<usize> {
        self.window
    }

    /// Blocks, or slots of states, in the group's pool.
    #[getter]
    fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Tokens per block; None for a state.
    #[getter]
    fn block_size(&self) -> Option<usize> {
        self.block_size
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let name = quoted(py, &self.name)?;
        Ok(match (self.window, self.block_size) {
            (Some(window), Some(block_size)) => format!(
                "Group.window({name}, window={window}, num_blocks={}, block_size={block_size})",
                self.num_blocks
            ),
            _ => format!("Group.state({name}, num_slots={})", self.num_blocks),
        })
    }
}

/// What happened to the ids that were offered for one group to `RadixIndex.insert`.
///
/// Example:
///     >>> index = kvtrie.RadixIndex(num_blocks=8, block_size=2,
///     ...     groups=[kvtrie.Group.state("gdn", num_slots=4)])
///     >>> seq = kvtrie.TokenSequence([1, 2, 3], kvtrie.Namespace(model="m", salt=kvtrie.SHARED))
///     >>> done = index.insert(seq, [6], num_computed=2, source=kvtrie.COMPUTED,
///     ...     groups={"gdn": [(2, 3)]})
///     >>> done.groups["gdn"]
///     GroupInsertResult(blocks=[3], duplicates=[], surplus=[])
#[pyclass(frozen, module = "kvtrie", name = "GroupInsertResult")]
pub(crate) struct PyGroupInsertResult {
    core: GroupInserted,
}

impl PyGroupInsertResult {
    pub(crate) fn new(core: &GroupInserted) -> Self {
        Self { core: core.clone() }
    }
}

#[pymethods]
impl PyGroupInsertResult {
    /// For each offer, the id that is at its place now; None if the place is empty, or after the
    /// blocks that the insert returns.
    #[getter]
    fn blocks(&self) -> Vec<Option<u32>> {
        let blocks = self.core.blocks.iter();
        blocks.map(|id| id.map(|id| id.0)).collect()
    }

    /// Ids that were not taken because their places have others, in call order (int32). They still
    /// belong to the caller.
    #[getter]
    fn duplicates<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.duplicates)
    }

    /// Ids that were not taken because their places take none, or are after the blocks that the
    /// insert returns, in call order (int32). They still belong to the caller.
    #[getter]
    fn surplus<'py>(&self, py: Python<'py>) -> Ids<'py> {
        ids(py, &self.core.surplus)
    }

    fn __repr__(&self) -> String {
        let blocks = self.core.blocks.iter();
        let blocks: Vec<String> = blocks
            .map(|id| id.map_or("None".to_owned(), |id| id.to_string()))
            .collect();
        format!(
            "GroupInsertResult(blocks={}, duplicates={}, surplus={})",
            listed(&blocks),
            listed(&self.core.duplicates),
            listed(&self.core.surplus)
        )
    }
}

/// Counters of one group of layers, all of them int. `RadixIndex.group_stats` returns them.
///
/// Example:
///     >>> index = kvtrie.RadixIndex(num_blocks=8, groups=[kvtrie.Group.state("gdn", num_slots=4)])
///     >>> index.group_stats("gdn").indexed
///     0
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "GroupStats")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyGroupStats {
    /// Ids at places of group 0's blocks.
    #[pyo3(get)]
    indexed: u64,
    /// Indexed ids that plans pin.
    #[pyo3(get)]
    pinned: u64,
    /// Indexed ids that `evict(n, group=)` can remove now.
    #[pyo3(get)]
    evictable: u64,
    /// Ids that left while plans pinned them, and are still pinned.
    #[pyo3(get)]
    condemned: u64,
    /// Ids that `take_freed(group=)` returns.
    #[pyo3(get)]
    waiting: u64,
}

impl From<GroupStats> for PyGroupStats {
    fn from(core: GroupStats) -> Self {
        Self {
            indexed: core.indexed,
            pinned: core.pinned,
            evictable: core.evictable,
            condemned: core.condemned,
            waiting: core.waiting,
        }
    }
}

#[pymethods]
impl PyGroupStats {
    fn __repr__(&self) -> String {
        format!(
            "GroupStats(indexed={}, pinned={}, evictable={}, condemned={}, waiting={})",
            self.indexed, self.pinned, self.evictable, self.condemned, self.waiting
        )
    }
}

/// The number of the group of a name, from 1.
pub(crate) fn number(
    py: Python<'_>,
    groups: &[Group],
    name: impl AsRef<str>,
    call: &str,
) -> PyResult<usize> {
    let name = name.as_ref();
    let found = groups.iter().position(|group| group.name == name);
    if let Some(found) = found {
        return Ok(found + 1);
    }
    let known: PyResult<Vec<String>> = groups.iter().map(|own| quoted(py, &own.name)).collect();
    let known = known?.join(", ");
    Err(PyValueError::new_err(format!(
        "{call}: there is no group {}; the index has {}",
        quoted(py, name)?,
        if known.is_empty() {
            "group 0 alone"
        } else {
            &known
        }
    )))
}

/// The pairs of a group's number and its offers.
pub(crate) type Offers = Vec<(usize, Vec<(usize, BlockId)>)>;

/// Reads a mapping of names to pairs of a position and an id.
pub(crate) fn offers(
    value: Option<&Bound<'_, PyAny>>,
    groups: &[Group],
    arg: Arg,
) -> PyResult<Offers> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let py = value.py();
    let wanted = "a mapping of group names to pairs (position, id)";
    let mapping = value.cast::<PyMapping>();
    let mapping = mapping.map_err(|_| arg.wrong_type(value, wanted))?;
    let mut found = Offers::new();
    for item in mapping.items()?.iter() {
        let (name, pairs) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
        let Ok(name) = name.extract::<String>() else {
            return Err(arg.wrong_type(&name, "a mapping whose keys are str"));
        };
        let group = number(py, groups, &name, arg.call)?;
        let pairs = crate::ranges::ranges(&pairs, arg)?;
        // The index checks both against the group's pool and the sequence.
        let pair = |(position, id): (usize, usize)| match u32::try_from(id) {
            Ok(raw) => Ok((position, BlockId(raw))),
            Err(_) => Err(PyValueError::new_err(format!(
                "{}: group {} has id {id}; it must be in [0, {}), the largest pool",
                arg.call,
                quoted(py, &name)?,
                BlockId::MAX_BLOCKS
            ))),
        };
        found.push((group, pairs.into_iter().map(pair).collect::<PyResult<_>>()?));
    }
    Ok(found)
}

/// The results of groups by name.
pub(crate) fn results<'py>(
    py: Python<'py>,
    names: &[String],
    results: &[GroupInserted],
) -> PyResult<Bound<'py, PyDict>> {
    let by_name = PyDict::new(py);
    for (name, core) in names.iter().zip(results) {
        by_name.set_item(name, PyGroupInsertResult::new(core))?;
    }
    Ok(by_name)
}
