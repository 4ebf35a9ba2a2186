//! Reads what `TransferManifest.from_blocks` and `plan_transfer` take of groups: tables and block sizes by number.

use std::collections::BTreeMap;

use kvtrie_core::{BlockId, Group, GroupKind};
use kvtrie_transfer::Table;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyMapping;

use crate::buffers::{self, Arg, block_ids};
use crate::errors::exception_in;
use crate::groups::PyGroup;
use crate::ranges::ranges;

/// Groups with windows and states, by number. Their block sizes are those of `Group`, or 1 where it has none.
pub(crate) type Further = BTreeMap<u32, PyGroup>;

/// The ids of one group.
pub(crate) enum Ids {
    /// A block table from position 0.
    Full(Vec<BlockId>),
    /// Pairs of a position and an id.
    At(GroupKind, Vec<(usize, BlockId)>),
}

impl Ids {
    pub(crate) fn as_table(&self) -> Table<'_> {
        match self {
            Self::Full(blocks) => Table::Full(blocks),
            Self::At(kind, ids) => Table::At(*kind, ids),
        }
    }
}

/// Reads groups with windows and states: a mapping from number, or an iterable, numbered from 1.
pub(crate) fn further_groups(
    value: Option<&Bound<'_, PyAny>>,
    call: &'static str,
) -> PyResult<Further> {
    const WANTED: &str = "a mapping from group number to Group, or an iterable of Group";
    let arg = Arg::new(call, "groups");
    let mut found = Further::new();
    let Some(value) = value else {
        return Ok(found);
    };
    let group = |at: usize, item: &Bound<'_, PyAny>| match item.cast::<PyGroup>() {
        Ok(group) => Ok(group.get().clone()),
        Err(_) => Err(arg.wrong_item(at, item, "a Group")),
    };
    if let Some(by_group) = by_number(value, call)? {
        for (at, (number, item)) in by_group.iter().enumerate() {
            found.insert(*number, group(at, item)?);
        }
    } else {
        for ((at, item), number) in arg.iterate(value, WANTED)?.enumerate().zip(1..) {
            found.insert(number, group(at, &item?)?);
        }
    }
    Ok(found)
}

/// Reads tables by group, ascending. Ids alone are group 0. A group with a window or states that is given none has none.
pub(crate) fn tables(
    value: Option<&Bound<'_, PyAny>>,
    further: &Further,
    arg: Arg,
) -> PyResult<Vec<(u32, Ids)>> {
    let mut tables = BTreeMap::new();
    for (&group, own) in further {
        tables.insert(group, Ids::At(own.core_kind(), Vec::new()));
    }
    let mut add = |group: u32, ids: &Bound<'_, PyAny>| -> PyResult<()> {
        let ids = match further.get(&group) {
            Some(own) => Ids::At(own.core_kind(), pairs(ids, arg)?),
            None => Ids::Full(block_ids(ids, BlockId::MAX_BLOCKS, arg)?),
        };
        tables.insert(group, ids);
        Ok(())
    };
    if let Some(value) = value {
        match by_number(value, arg.call)? {
            Some(by_group) => {
                for (group, ids) in by_group {
                    add(group, &ids)?;
                }
            }
            None => add(0, value)?,
        }
    }
    Ok(tables.into_iter().collect())
}

fn pairs(value: &Bound<'_, PyAny>, arg: Arg) -> PyResult<Vec<(usize, BlockId)>> {
    let pairs = ranges(value, arg)?.into_iter();
    let pair = |(position, id): (usize, usize)| {
        let id = arg.within(id as i128, 0, i32::MAX.cast_unsigned())?;
        Ok((position, BlockId(id)))
    };
    pairs.map(pair).collect()
}

/// Reads the block size of each group. Without a value it is that of a window's `Group`, and `None` for the others.
pub(crate) fn block_sizes(
    value: Option<&Bound<'_, PyAny>>,
    groups: &[u32],
    further: &Further,
    blocks: Arg,
) -> PyResult<Vec<Option<usize>>> {
    let Arg { call, name } = blocks;
    let arg = Arg::new(call, "block_size");
    let size = |value: &Bound<'_, PyAny>| -> PyResult<usize> {
        let read = buffers::int(value).map_err(|error| arg.not_read(value, error, "an int"))?;
        Ok(arg.within(read, 1, u32::MAX)? as usize)
    };
    let value = value.filter(|value| !value.is_none());
    let by_group = value.map(|value| by_number(value, call)).transpose()?;
    let sizes: Vec<Option<usize>> = match (value, by_group.flatten()) {
        (None, _) => vec![None; groups.len()],
        (Some(one), None) => vec![Some(size(one)?); groups.len()],
        (Some(_), Some(by_group)) => {
            let mut sizes = Vec::with_capacity(by_group.len());
            for (group, value) in by_group {
                sizes.push((group, size(&value)?));
            }
            sizes.sort_unstable();
            let sized: Vec<u32> = sizes.iter().map(|size| size.0).collect();
            if sized != groups {
                return Err(PyValueError::new_err(format!(
                    "{call}: block_size is of the groups {sized:?}, {name} of {groups:?}"
                )));
            }
            sizes.into_iter().map(|size| Some(size.1)).collect()
        }
    };
    let own = |(number, size): (&u32, Option<usize>)| -> PyResult<Option<usize>> {
        let Some(group) = further.get(number) else {
            return Ok(size);
        };
        let size = size.or(group.own_block_size());
        let core = group.to_core(size.unwrap_or(1));
        let checked = Group::check_all(&[core], size.unwrap_or(1), call);
        checked.map_err(|error| exception_in(call, &error))?;
        Ok(size)
    };
    groups.iter().zip(sizes).map(own).collect()
}

/// The groups in a mapping of block sizes; `None` if one value is for all groups.
pub(crate) fn groups_of(
    value: Option<&Bound<'_, PyAny>>,
    call: &'static str,
) -> PyResult<Option<Vec<u32>>> {
    let by_group = value.map(|value| by_number(value, call)).transpose()?;
    let numbers = |by_group: ByNumber<'_>| by_group.into_iter().map(|(group, _)| group).collect();
    Ok(by_group.flatten().map(numbers))
}

/// Values with their group numbers.
type ByNumber<'py> = Vec<(u32, Bound<'py, PyAny>)>;

/// Reads a mapping from group number; `None` if the value is no mapping.
fn by_number<'py>(
    value: &Bound<'py, PyAny>,
    call: &'static str,
) -> PyResult<Option<ByNumber<'py>>> {
    let Ok(mapping) = value.cast::<PyMapping>() else {
        return Ok(None);
    };
    let items = mapping.items()?;
    let item = |item: Bound<'py, PyAny>| {
        let (number, value) = item.extract::<(Bound<'py, PyAny>, Bound<'py, PyAny>)>()?;
        Ok((group_number(&number, call)?, value))
    };
    items.iter().map(item).collect::<PyResult<_>>().map(Some)
}

fn group_number(value: &Bound<'_, PyAny>, call: &'static str) -> PyResult<u32> {
    let arg = Arg::new(call, "a group");
    let number = buffers::int(value).map_err(|error| arg.not_read(value, error, "an int"))?;
    arg.within(number, 0, i32::MAX.cast_unsigned())
}
