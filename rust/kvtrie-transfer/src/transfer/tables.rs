//! The tables of groups: block tables from position 0, or ids at positions.

use kvtrie_core::{BlockId, GroupKind, Result};

use crate::error::invalid;
use crate::transfer::offsets::{LEAST_WINDOW, first_twice, window_of};
use crate::transfer::wire::ByteWriter;

/// The ids of a request in one group.
#[derive(Clone, Copy, Debug)]
pub enum Table<'a> {
    /// Of layers that attend to all tokens: the block table, from position 0.
    Full(&'a [BlockId]),
    /// Of layers that keep something else: pairs of a position and an id, ascending, as for
    /// [`GroupOffers`](kvtrie_core::GroupOffers). The position of a block is that of its first token, the position of a
    /// state the number of tokens before it.
    At(GroupKind, &'a [(usize, BlockId)]),
}

impl Table<'_> {
    /// What the layers keep. `None`: KV of all tokens.
    #[must_use]
    pub fn kind(&self) -> Option<GroupKind> {
        match self {
            Self::Full(_) => None,
            Self::At(kind, _) => Some(*kind),
        }
    }

    /// Checks the table of a request of `num_tokens` tokens, as far as they need it.
    pub(super) fn check(
        &self,
        call: &'static str,
        group: u32,
        block_size: usize,
        num_tokens: usize,
    ) -> Result<()> {
        check_block_size(call, group, block_size)?;
        match self {
            Table::Full(blocks) => check_blocks(call, group, block_size, blocks, num_tokens),
            Table::At(kind, ids) => check_at(call, group, block_size, *kind, ids),
        }
    }
}

pub(super) fn check_block_size(call: &'static str, group: u32, block_size: usize) -> Result<()> {
    if block_size == 0 || block_size > u32::MAX as usize {
        return Err(invalid!(
            call,
            "the block size of group {group} is {block_size}; it must be in [1, {}]",
            u32::MAX
        ));
    }
    Ok(())
}

/// Checks that a block table has blocks for `num_tokens` tokens, each id once.
fn check_blocks(
    call: &'static str,
    group: u32,
    block_size: usize,
    blocks: &[BlockId],
    num_tokens: usize,
) -> Result<()> {
    let needed = num_tokens.div_ceil(block_size);
    let Some(used) = blocks.get(..needed) else {
        return Err(invalid!(
            call,
            "group {group} has {} blocks, {num_tokens} tokens need {needed} of {block_size} tokens",
            blocks.len()
        ));
    };
    check_ids(call, group, used.iter().copied())
}

fn check_at(
    call: &'static str,
    group: u32,
    block_size: usize,
    kind: GroupKind,
    ids: &[(usize, BlockId)],
) -> Result<()> {
    let first = match kind {
        GroupKind::State => block_size,
        GroupKind::Window { window } if (LEAST_WINDOW..=u32::MAX as usize).contains(&window) => 0,
        GroupKind::Window { window } => {
            return Err(invalid!(
                call,
                "the window of group {group} is {window}; it must be in [{LEAST_WINDOW}, {}]",
                u32::MAX
            ));
        }
    };
    let mut before = None;
    for &(position, _) in ids {
        if !position.is_multiple_of(block_size) || position < first || position > u32::MAX as usize
        {
            return Err(invalid!(
                call,
                "group {group} has an id at position {position}; it must be a multiple of {block_size} in [{first}, {}]",
                u32::MAX
            ));
        }
        if before.is_some_and(|before| before >= position) {
            return Err(invalid!(
                call,
                "group {group} has position {position} after {}; positions must ascend",
                before.unwrap_or_default()
            ));
        }
        before = Some(position);
    }
    check_ids(call, group, ids.iter().map(|&(_, id)| id))
}

fn check_ids(
    call: &'static str,
    group: u32,
    mut ids: impl Iterator<Item = BlockId> + Clone,
) -> Result<()> {
    let all = ids.clone();
    if let Some(id) = ids.find(|id| u64::from(id.0) >= BlockId::MAX_BLOCKS) {
        return Err(invalid!(
            call,
            "blocks has {id}; it must be in [0, {})",
            BlockId::MAX_BLOCKS
        ));
    }
    match first_twice(all) {
        Some(id) => Err(invalid!(
            call,
            "block {id} comes twice in the table of group {group}"
        )),
        None => Ok(()),
    }
}

/// The heads of all groups, which the digest of each run covers: number, block size and window of each.
pub(super) fn heads(
    groups: impl ExactSizeIterator<Item = (u32, usize, Option<GroupKind>)>,
) -> ByteWriter {
    let mut out = ByteWriter::default();
    out.array(groups.len());
    for head in groups {
        out.array(3);
        write_head(&mut out, head);
    }
    out
}

pub(super) fn write_head(
    out: &mut ByteWriter,
    (group, block_size, kind): (u32, usize, Option<GroupKind>),
) {
    out.uint(group as usize);
    out.uint(block_size);
    out.optional(window_of(kind));
}
