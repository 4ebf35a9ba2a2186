//! The KV of windows that is copied with moved runs (G9).

use std::ops::Range;

use crate::error::{Result, invalid};
use crate::ids::BlockId;
use crate::plan::{Move, ReusePlan};

/// Tokens of a copied run, inside one source block, whose KV a group with a window has at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Carried {
    /// First token of the prompt.
    pub(crate) start: usize,
    pub(crate) num_tokens: usize,
    /// The group's block, and where in it the first token is.
    pub(crate) id: BlockId,
    pub(crate) offset: usize,
    pub(crate) delta: i64,
}

impl Carried {
    pub(crate) fn end(&self) -> usize {
        self.start + self.num_tokens
    }
}

impl ReusePlan {
    /// No group copies anything: [`rebuild`](Self::rebuild) lists all that is lacking.
    pub(crate) fn carry_nothing(&mut self) {
        for part in self.groups_mut() {
            part.carried.clear();
        }
    }

    /// What the plan copies of a range of the prompt: for each source block of group 0, the tokens of the prompt, the
    /// block, where in it the first one is, and the delta of positions. Ascending.
    pub(crate) fn copied_in(
        &self,
        range: &Range<usize>,
    ) -> Vec<(Range<usize>, BlockId, usize, i64)> {
        let size = self.block_size;
        let mut found = Vec::new();
        let first = self.copies.partition_point(|copy| copy.end <= range.start);
        for copy in self.copies[first..]
            .iter()
            .take_while(|copy| copy.start < range.end)
        {
            let (mut at, until) = (copy.start.max(range.start), copy.end.min(range.end));
            while at < until {
                let source = copy.old_start + (at - copy.start);
                let block = source / size - copy.old_start / size;
                let end = until.min(at + size - source % size);
                let id = self.source_ids[copy.ids.start + block];
                found.push((at..end, id, source % size, copy.position_delta));
                at = end;
            }
        }
        found
    }

    /// The copies that fill `table`, the blocks of a group with a window, between the positions `start` and `end`: KV
    /// of windows that moved runs bring along, where [`rebuild`](Self::rebuild) would list it otherwise. Empty for
    /// another group. Entries of the table are read where tokens are copied to.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the range is reversed or ends after the prompt, or if
    /// the table is too short for it, or has, where it is filled, an id outside the pool of the group, of
    /// `num_blocks`, an id twice, or one that the plan reads or has in place in the group.
    ///
    /// # Complexity
    /// O(table), and O(log copies) for each copy of the group, also for those outside of the range.
    pub fn moves_of_group(
        &self,
        group: usize,
        num_blocks: u64,
        table: &[BlockId],
        (start, end): (usize, usize),
    ) -> Result<Vec<Move>> {
        const CALL: &str = "ReusePlan::moves_of_group";
        let size = self.block_size;
        self.check_range(start, end, CALL)?;
        let Some(part) = self.group(group) else {
            return Ok(Vec::new());
        };
        let needed = end.div_ceil(size);
        if table.len() < needed {
            return Err(invalid!(
                CALL,
                "table has {} blocks; the {end} tokens before end need {needed}",
                table.len()
            ));
        }
        let slot = |id: BlockId, offset: usize| u64::from(id.0) * size as u64 + offset as u64;
        let mut moves = Vec::new();
        let mut filled: Vec<usize> = Vec::new();
        for carried in &part.carried {
            let (mut at, until) = (carried.start.max(start), carried.end().min(end));
            while at < until {
                let count = (size - at % size).min(until - at);
                let dest = table[at / size];
                if filled.last() != Some(&(at / size)) {
                    filled.push(at / size);
                }
                moves.push(Move {
                    source_slot: slot(carried.id, carried.offset + (at - carried.start)),
                    dest_slot: slot(dest, at % size),
                    num_tokens: count as u64,
                    delta: carried.delta,
                });
                at += count;
            }
        }
        let mut read: Vec<BlockId> = part.carried.iter().map(|carried| carried.id).collect();
        read.extend(&part.blocks);
        read.sort_unstable();
        let mut written: Vec<(BlockId, usize)> = filled.iter().map(|&at| (table[at], at)).collect();
        written.sort_unstable();
        for (number, &(id, at)) in written.iter().enumerate() {
            if u64::from(id.0) >= num_blocks {
                return Err(invalid!(
                    CALL,
                    "table[{at}] is {id}; it must be in [0, {num_blocks}), the pool of the group"
                ));
            }
            if number > 0 && written[number - 1].0 == id {
                return Err(invalid!(
                    CALL,
                    "table has block {id} twice where tokens are copied to, at {} and {at}",
                    written[number - 1].1
                ));
            }
            if read.binary_search(&id).is_ok() {
                return Err(invalid!(
                    CALL,
                    "table[{at}] is {id}; the plan reads this block, so it must not be written"
                ));
            }
        }
        Ok(moves)
    }

    pub(super) fn check_range(&self, start: usize, end: usize, call: &'static str) -> Result<()> {
        let len = self.snapshot.tokens.len();
        if start > end || end > len {
            return Err(invalid!(
                call,
                "start and end are {start} and {end}; the range must ascend and lie in [0, {len}], the prompt"
            ));
        }
        Ok(())
    }
}
