//! The section of groups besides group 0, which only an index with such groups has.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::bytes::{Reader, Writer};
use super::sections::Section;
use crate::error::Result;
use crate::groups::{Column, Group, GroupKind, Groups, IdState, NEEDED};
use crate::index::RadixIndex;
use crate::storage::blocks::BlockState;

pub(super) const GROUPS: Section = Section {
    name: "GRPS",
    write,
    read,
};

const WINDOW: u8 = 0;
const STATE: u8 = 1;

/// Writes each group, its ids with the block of group 0 at their place, and those that wait. Condemned ones will.
fn write(index: &RadixIndex, out: &mut Writer) {
    let groups = &index.config().groups;
    out.len(groups.len());
    for (group, column) in groups.iter().zip(index.groups().columns()) {
        out.text(&group.name);
        let (kind, window) = match group.kind {
            GroupKind::Window { window } => (WINDOW, window),
            GroupKind::State => (STATE, 0),
        };
        out.u8(kind);
        out.len(window);
        out.u64(group.num_blocks);
        let (mut entries, mut waiting) = (Vec::new(), Vec::new());
        for (id, state) in column.ids() {
            match state {
                IdState::Indexed(node, place) => {
                    let edge = index.forest().node(node);
                    let block = edge.id(place, index.block_size());
                    let last_use = column.entry(node, place).map_or(0, |entry| entry.last_use);
                    entries.push((id, block, last_use));
                }
                IdState::Condemned(_) | IdState::Waiting => waiting.push(id),
            }
        }
        entries.sort_unstable();
        waiting.sort_unstable();
        out.len(entries.len());
        for (id, block, last_use) in entries {
            out.u32(id);
            out.u32(block);
            out.u64(last_use);
        }
        out.len(waiting.len());
        out.u32s(&waiting);
    }
}

fn read(index: &mut RadixIndex, from: &mut Reader<'_>) -> Result<()> {
    let count = from.count(1)?;
    from.must((1..=Group::MAX).contains(&count), || {
        format!("{count} groups; there must be 1 to {}", Group::MAX)
    })?;
    // Whoever wrote the bytes knows the seed.
    let secret = RandomState::new().build_hasher().finish();
    let mut columns = Vec::new();
    for _ in 0..count {
        let group = read_group(index, from)?;
        let mut column = Column::new(&group, secret);
        read_ids(index, from, &group, &mut column)?;
        index.groups_config_mut().push(group);
        columns.push(column);
    }
    let config = index.config();
    Group::check_all(
        &config.groups,
        config.block_size,
        "RadixIndex::restore_within",
    )
    .map_err(|error| from.wrong(error.message()))?;
    *index.parts_mut().groups = Groups::of_columns(columns, secret);
    Ok(())
}

fn read_group(index: &RadixIndex, from: &mut Reader<'_>) -> Result<Group> {
    let name = from.text()?;
    let kind = from.u8()?;
    let window = from.size()?;
    let kind = match kind {
        WINDOW if window >= 2 => GroupKind::Window { window },
        STATE if window == 0 => GroupKind::State,
        _ => return Err(from.wrong(format_args!("a group of kind {kind} and window {window}"))),
    };
    Ok(Group {
        name,
        kind,
        num_blocks: from.u64()?,
        block_size: index.block_size(),
    })
}

fn read_ids(
    index: &RadixIndex,
    from: &mut Reader<'_>,
    group: &Group,
    column: &mut Column,
) -> Result<()> {
    let new_id = |from: &Reader<'_>, column: &Column, id: u32| {
        from.must(u64::from(id) < group.num_blocks, || {
            format!("id {id} of a group of {} blocks", group.num_blocks)
        })?;
        from.must(column.state(id).is_none(), || {
            format!("id {id} of a group comes twice")
        })
    };
    for _ in 0..from.count(16)? {
        let (id, block, last_use) = (from.u32()?, from.u32()?, from.u64()?);
        new_id(from, column, id)?;
        let time = last_use & !NEEDED;
        from.must(0 < time && time <= index.clock(), || {
            format!("a use at time {time}; the clock is at {}", index.clock())
        })?;
        let BlockState::Indexed { node, depth } = index.forest().blocks().state(block) else {
            return Err(from.wrong(format_args!("id {id} is where there is no block {block}")));
        };
        from.must(column.entry(node, depth).is_none(), || {
            format!("two ids of a group at block {block}")
        })?;
        column.add((node, depth), id, last_use);
    }
    let count = from.count(4)?;
    for id in from.u32s(count)? {
        new_id(from, column, id)?;
        column.restore_waiting(id);
    }
    Ok(())
}
