//! Blocks that are permanently out of use because their KV is not finite (R7).

use crate::error::Result;
use crate::ids::BlockId;
use crate::index::RadixIndex;
use crate::storage::blocks::BlockState;

impl RadixIndex {
    /// Removes ids from use permanently, wherever they are, and returns how many were not quarantined before. They
    /// leave the index or stop waiting; pinned and condemned ones follow when their last pin ends. No call returns
    /// them, and no insert takes them. An id that was unknown now belongs to the index: its holder must not free it.
    ///
    /// Ids that are not indexed are counted as by [`discard`](Self::discard).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if an id is outside the pool; nothing is changed then.
    pub fn quarantine(&mut self, ids: &[BlockId]) -> Result<u64> {
        self.check_ids(ids, "RadixIndex::quarantine")?;
        crate::failpoints::before("RadixIndex::quarantine")?;
        self.cut_out_all(&self.pinned_of(ids));
        let (mut count, mut any_waited) = (0, false);
        for &BlockId(id) in ids {
            let place = self.forest.blocks().state(id);
            // A repeated id counts once.
            if self.forest.blocks_mut().see(id) {
                continue;
            }
            match place {
                BlockState::Indexed { node, depth } => {
                    self.remove_block(node, depth);
                }
                BlockState::Quarantined | BlockState::CondemnedForGood => {
                    self.unknown_discards += 1;
                    continue;
                }
                _ => self.unknown_discards += 1,
            }
            self.forest.blocks_mut().quarantine(id);
            any_waited |= place == BlockState::Waiting;
            count += 1;
        }
        self.forest
            .blocks_mut()
            .clear_seen(ids.iter().map(|id| id.0));
        if any_waited {
            let blocks = self.forest.blocks();
            self.pins
                .retain_waiting(|id| blocks.state(id) == BlockState::Waiting);
        }
        self.bound_holes();
        Ok(count)
    }

    /// The ids in quarantine, and those that follow when their last pin ends, ascending.
    ///
    /// # Complexity
    /// O(ids that the index knows).
    pub fn quarantined(&self) -> impl Iterator<Item = BlockId> {
        self.forest.blocks().known().filter_map(|(id, place)| {
            matches!(
                place,
                BlockState::Quarantined | BlockState::CondemnedForGood
            )
            .then_some(BlockId(id))
        })
    }
}
