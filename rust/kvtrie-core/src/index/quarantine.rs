//! Puts blocks out of use permanently because their KV is not finite (R7).

use crate::error::Result;
use crate::ids::BlockId;
use crate::index::RadixIndex;
use crate::storage::blocks::BlockState;

impl RadixIndex {
    /// Puts ids out of use permanently and returns how many were not quarantined before. Indexed ids leave the index
    /// and waiting ones stop waiting; pinned and condemned ids follow when their last pin ends. No call returns them,
    /// and no insert takes them. An unknown id belongs to the index from then on: its holder must not free it.
    ///
    /// Ids that are not indexed are counted as by [`discard`](Self::discard).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if an id is outside the pool; nothing is changed then.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// # let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// assert_eq!(index.quarantine(&[BlockId(0)])?, 1);
    /// assert_eq!(index.evict(9), [BlockId(6)]);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn quarantine(&mut self, ids: &[BlockId]) -> Result<u64> {
        self.check_ids(ids, "RadixIndex::quarantine")?;
        crate::failpoints::before("RadixIndex::quarantine")?;
        self.cut_out_all(&self.pinned_of(ids));
        let (mut count, mut any_waited) = (0, false);
        for &BlockId(id) in ids {
            let place = self.forest.blocks().state(id);
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

    /// The quarantined ids, ascending, including those whose last pin has not ended.
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
