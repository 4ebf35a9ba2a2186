//! The copies of a plan as plain data.

use crate::error::{Result, invalid};
use crate::ids::BlockId;
use crate::plan::ReusePlan;

/// One copy: consecutive slots, inside one source and one destination block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// First slot read: block · `block_size` + offset.
    pub source_slot: u64,
    /// First slot written.
    pub dest_slot: u64,
    /// Tokens copied.
    pub num_tokens: u64,
    /// Number of positions by which K is rotated.
    pub delta: i64,
}

impl ReusePlan {
    /// The copies that fill `table` between the positions `start` and `end`, for a worker without an index.
    ///
    /// The table begins with [`blocks`](Self::blocks), as far as it goes. The other blocks that hold the range are new:
    /// the engine fills them with the copies and with what it computes.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the range is reversed or ends after the prompt, or if
    /// the table is too short for it, holds an id outside the pool or an id twice, does not begin with the plan's
    /// blocks in place, or has a block that the plan reads where the range is filled.
    ///
    /// # Complexity
    /// O(blocks · log(blocks)) comparisons of ids for the table, fewer if its ids ascend in runs; then one step per
    /// copy.
    pub fn moves(&self, table: &[BlockId], start: usize, end: usize) -> Result<Vec<Move>> {
        const CALL: &str = "ReusePlan::moves";
        self.check_range(start, end, CALL)?;
        self.check_table(table, start, end, CALL)?;
        let mut moves = Vec::new();
        let first = self.copies.partition_point(|copy| copy.end <= start);
        for copy in &self.copies[first..] {
            let (mut at, until) = (copy.start.max(start), copy.end.min(end));
            while at < until {
                let source = copy.old_start + (at - copy.start);
                let block = source / self.block_size - copy.old_start / self.block_size;
                let source_id = self.source_ids[copy.ids.start + block];
                let left = |position: usize| self.block_size - position % self.block_size;
                let count = left(source).min(left(at)).min(until - at);
                moves.push(Move {
                    source_slot: self.slot(source_id, source),
                    dest_slot: self.slot(table[at / self.block_size], at),
                    num_tokens: count as u64,
                    delta: copy.position_delta,
                });
                at += count;
            }
        }
        Ok(moves)
    }

    fn slot(&self, id: BlockId, position: usize) -> u64 {
        u64::from(id.0) * self.block_size as u64 + (position % self.block_size) as u64
    }

    /// Refuses a table that would make the engine overwrite blocks of others.
    fn check_table(
        &self,
        table: &[BlockId],
        start: usize,
        end: usize,
        call: &'static str,
    ) -> Result<()> {
        let needed = end.div_ceil(self.block_size);
        if table.len() < needed {
            return Err(invalid!(
                call,
                "table has {} blocks; the {end} tokens before end need {needed}",
                table.len()
            ));
        }
        let outside = |id: &BlockId| u64::from(id.0) >= self.num_blocks;
        if let Some(at) = table.iter().position(outside) {
            return Err(invalid!(
                call,
                "table[{at}] is {}; it must be in [0, {})",
                table[at],
                self.num_blocks
            ));
        }
        let in_place = self.blocks();
        let mut fronts = table.iter().zip(in_place);
        if let Some(at) = fronts.position(|(given, own)| given != own) {
            return Err(invalid!(
                call,
                "table[{at}] is {}; it must be {}, the block that the plan has in place there",
                table[at],
                in_place[at]
            ));
        }
        let mut sorted = table.to_vec();
        // This sort takes one pass over ascending runs, and most tables are such runs.
        sorted.sort();
        let mut neighbours = sorted.iter().zip(&sorted[1.min(sorted.len())..]);
        if let Some((twice, _)) = neighbours.find(|(one, next)| one == next) {
            return Err(invalid!(
                call,
                "table has block {twice} twice; each block may be in it once"
            ));
        }
        let filled = (start / self.block_size).max(in_place.len())..needed;
        let sources = self.source_blocks();
        for at in filled {
            if sources.binary_search(&table[at]).is_ok() {
                return Err(invalid!(
                    call,
                    "table[{at}] is {}; the plan reads this block, so it must not be written",
                    table[at]
                ));
            }
        }
        Ok(())
    }
}
