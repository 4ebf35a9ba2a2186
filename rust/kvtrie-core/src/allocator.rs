//! A free list of block ids, for engines that have no block manager of their own.

use crate::error::{Error, Result, invalid};
use crate::ids::BlockId;
use crate::index::RadixIndex;

/// Allocates block ids and takes them back. Freeing a block twice is an error.
///
/// Ids above all ids allocated so far cost no memory.
///
/// # Examples
/// ```
/// use kvtrie_core::{BlockAllocator, BlockId};
/// let mut pool = BlockAllocator::new(4)?;
/// let ids = pool.allocate(3, None)?;
/// pool.free(&ids[1..])?;
/// assert_eq!(pool.num_free(), 3);
/// assert!(pool.free(&[ids[1]]).is_err());
/// # Ok::<(), kvtrie_core::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockAllocator {
    num_blocks: u64,
    freed: Vec<u32>,
    /// One bit per id below `fresh`, set while the id is held. Ids from `fresh` on were never allocated.
    held: Vec<u64>,
    fresh: u32,
}

impl BlockAllocator {
    /// A pool in which every block is free.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `num_blocks` is not in 1..=2³¹.
    pub fn new(num_blocks: u64) -> Result<Self> {
        if num_blocks == 0 || num_blocks > BlockId::MAX_BLOCKS {
            return Err(invalid!(
                "BlockAllocator::new",
                "num_blocks is {num_blocks}; it must be in [1, {}]",
                BlockId::MAX_BLOCKS
            ));
        }
        Ok(Self {
            num_blocks,
            freed: Vec::new(),
            held: Vec::new(),
            fresh: 0,
        })
    }

    /// Blocks in the pool.
    #[must_use]
    pub fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Blocks that are free.
    #[must_use]
    pub fn num_free(&self) -> u64 {
        self.num_blocks - u64::from(self.fresh) + self.freed.len() as u64
    }

    /// Allocates `n` blocks, or none. Free blocks are used first, then blocks evicted from the index.
    ///
    /// # Errors
    /// - [`OutOfBlocks`](crate::ErrorKind::OutOfBlocks) if too few blocks are free, waiting or evictable; nothing is
    ///   evicted then.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the index has a pool of another size, or evicts a
    ///   block that was not allocated here.
    pub fn allocate(
        &mut self,
        n: usize,
        evict_from: Option<&mut RadixIndex>,
    ) -> Result<Vec<BlockId>> {
        const CALL: &str = "BlockAllocator::allocate";
        let mut available = self.num_free();
        if let Some(index) = &evict_from {
            if index.config().num_blocks != self.num_blocks {
                return Err(invalid!(
                    CALL,
                    "the index is made for {} blocks, the pool has {}",
                    index.config().num_blocks,
                    self.num_blocks
                ));
            }
            available += index.num_waiting() + index.num_evictable();
        }
        if n as u64 > available {
            return Err(Error::out_of_blocks(
                CALL,
                format!(
                    "{n} blocks asked for, {available} can be had (free or evictable) of {}",
                    self.num_blocks
                ),
            ));
        }
        crate::failpoints::before("BlockAllocator::allocate")?;
        // Evicted ids are checked before a fresh id is taken, which could otherwise be one of them.
        let missing = n.saturating_sub(usize::try_from(self.num_free()).unwrap_or(usize::MAX));
        let evicted = match evict_from {
            Some(index) if missing > 0 => index.evict(missing),
            _ => Vec::new(),
        };
        if let Some(stranger) = evicted.iter().find(|id| !self.is_held(id.0)) {
            let error = invalid!(
                CALL,
                "the index gave up block {stranger}, which was not handed out here"
            );
            let held: Vec<BlockId> = evicted
                .iter()
                .copied()
                .filter(|id| self.is_held(id.0))
                .collect();
            self.release(&held);
            return Err(error);
        }
        crate::failpoints::within("allocate: evicted and not handed out");
        let mut out: Vec<BlockId> = (0..n - evicted.len())
            .filter_map(|_| self.take().map(BlockId))
            .collect();
        out.extend(evicted);
        Ok(out)
    }

    /// Takes blocks back.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if an id is outside the pool, already free, or repeated;
    /// nothing is freed then.
    pub fn free(&mut self, ids: &[BlockId]) -> Result<()> {
        const CALL: &str = "BlockAllocator::free";
        crate::failpoints::before("BlockAllocator::free")?;
        let mut result = Ok(());
        let mut cleared = 0;
        for id in ids {
            if u64::from(id.0) >= self.num_blocks {
                result = Err(invalid!(
                    CALL,
                    "ids holds {id}; it must be in [0, {}) (num_blocks)",
                    self.num_blocks
                ));
                break;
            }
            if !self.is_held(id.0) {
                result = Err(invalid!(
                    CALL,
                    "ids holds {id}, which is not handed out: it was freed before, or never allocated"
                ));
                break;
            }
            self.held[id.0 as usize / 64] &= !(1 << (id.0 % 64));
            cleared += 1;
        }
        match result {
            Ok(()) => self.freed.extend(ids.iter().map(|id| id.0)),
            Err(_) => ids[..cleared]
                .iter()
                .for_each(|id| self.held[id.0 as usize / 64] |= 1 << (id.0 % 64)),
        }
        result
    }

    fn release(&mut self, ids: &[BlockId]) {
        for id in ids {
            self.held[id.0 as usize / 64] &= !(1 << (id.0 % 64));
            self.freed.push(id.0);
        }
    }

    fn take(&mut self) -> Option<u32> {
        let id = match self.freed.pop() {
            Some(id) => id,
            None if u64::from(self.fresh) < self.num_blocks => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return None,
        };
        let word = id as usize / 64;
        if word >= self.held.len() {
            self.held.resize(word + 1, 0);
        }
        self.held[word] |= 1 << (id % 64);
        Some(id)
    }

    fn is_held(&self, id: u32) -> bool {
        self.held
            .get(id as usize / 64)
            .is_some_and(|word| word >> (id % 64) & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Config, ErrorKind, InsertOptions, Namespace, Salt, Source, TokenSequence};

    #[test]
    fn allocate_is_all_or_nothing() {
        let mut pool = BlockAllocator::new(3).unwrap();
        assert_eq!(
            pool.allocate(4, None).unwrap_err().kind(),
            ErrorKind::OutOfBlocks
        );
        assert_eq!(pool.num_free(), 3);
        let mut ids = pool.allocate(3, None).unwrap();
        ids.sort_unstable();
        assert_eq!(ids, [BlockId(0), BlockId(1), BlockId(2)]);
    }

    #[test]
    fn a_block_that_the_index_was_given_without_asking_here_is_not_handed_out_twice() {
        let mut pool = BlockAllocator::new(4).unwrap();
        let config = Config {
            num_blocks: 4,
            block_size: 1,
            ..Config::seeded(0)
        };
        let mut index = RadixIndex::new(config).unwrap();
        let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
        let mut seq = TokenSequence::new(Arc::new(namespace), vec![1, 2, 3], Vec::new()).unwrap();
        pool.allocate(3, None).unwrap();
        let ids = [BlockId(0), BlockId(1), BlockId(3)];
        index
            .insert(&mut seq, &ids, InsertOptions::new(3, Source::Computed))
            .unwrap();
        let error = pool.allocate(4, Some(&mut index)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(
            (pool.num_free() + index.stats().indexed, index.stats().holes),
            (3, 0)
        );
        let all = pool.allocate(3, Some(&mut index)).unwrap();
        assert_eq!(
            all.iter().collect::<std::collections::BTreeSet<_>>().len(),
            3
        );
    }

    #[test]
    fn free_refuses_a_double_free_and_changes_nothing() {
        let mut pool = BlockAllocator::new(1 << 31).unwrap();
        let ids = pool.allocate(2, None).unwrap();
        for bad in [
            vec![ids[0], ids[0]],
            vec![ids[0], BlockId(7)],
            vec![ids[0], BlockId(1 << 31)],
        ] {
            assert_eq!(
                pool.free(&bad).unwrap_err().kind(),
                ErrorKind::InvalidArgument
            );
            assert_eq!(pool.num_free(), (1 << 31) - 2);
        }
        pool.free(&ids).unwrap();
        assert_eq!(pool.num_free(), 1 << 31);
    }
}
