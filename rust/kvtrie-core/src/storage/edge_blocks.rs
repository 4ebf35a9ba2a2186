//! The tokens and block ids of one edge, in one allocation.
//!
//! Tokens are adjacent, so that they compare as memory; the ids follow them. Blocks can be cut off the front of an edge
//! without moving the rest. Blocks have no hash, because it would have to be computed for every block of every prompt.

#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct EdgeBlocks {
    /// Room for the tokens of all blocks, then room for their ids.
    data: Box<[u32]>,
    len: u32,
    /// Number of blocks that were cut off before the first, and the bit [`Self::RUN`].
    skipped: u32,
}

impl EdgeBlocks {
    /// A full edge of this length gets a child instead of more room, which bounds what growth copies at a time.
    pub(crate) const LONG: usize = 256;
    /// Set if the ids are known to be consecutive. There are fewer than 2³¹ blocks.
    const RUN: u32 = 1 << 31;

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    pub(crate) fn num_blocks(&self) -> u32 {
        self.len
    }

    fn capacity(&self, block_size: usize) -> usize {
        self.data.len() / (block_size + 1)
    }

    fn skipped(&self) -> usize {
        (self.skipped & !Self::RUN) as usize
    }

    /// Whether the ids are consecutive. They are looked at once, until one changes or others follow.
    pub(crate) fn are_consecutive(&mut self, block_size: usize) -> bool {
        if self.skipped & Self::RUN == 0 && crate::ids::are_consecutive(self.ids(block_size)) {
            self.skipped |= Self::RUN;
        }
        self.skipped & Self::RUN != 0
    }

    pub(crate) fn can_grow(&self, more: usize, block_size: usize) -> bool {
        self.len() < Self::LONG || self.skipped() + self.len() + more <= self.capacity(block_size)
    }

    pub(crate) fn tokens(&self, block_size: usize) -> &[u32] {
        let from = self.skipped() * block_size;
        &self.data[from..from + self.len() * block_size]
    }

    fn ids_from(&self, block_size: usize) -> usize {
        self.capacity(block_size) * block_size + self.skipped()
    }

    pub(crate) fn ids(&self, block_size: usize) -> &[u32] {
        let from = self.ids_from(block_size);
        &self.data[from..from + self.len()]
    }

    pub(crate) fn id(&self, at: usize, block_size: usize) -> u32 {
        self.data[self.ids_from(block_size) + at]
    }

    pub(crate) fn set_id(&mut self, at: usize, id: u32, block_size: usize) {
        let from = self.ids_from(block_size);
        self.data[from + at] = id;
        self.skipped &= !Self::RUN;
    }

    /// Appends blocks. A new edge gets exactly the room for them, a growing edge some more.
    pub(crate) fn extend(
        &mut self,
        tokens: &[u32],
        ids: impl ExactSizeIterator<Item = u32>,
        block_size: usize,
    ) {
        let (len, more) = (self.len(), ids.len());
        let room = self.capacity(block_size) - self.skipped();
        if len + more > room {
            let slack = if len == 0 { 0 } else { (len / 4).max(4) };
            self.data = self.copied(len + more.max(slack), tokens, ids, block_size);
            self.skipped = 0;
        } else {
            self.skipped &= !Self::RUN;
            let from = (self.skipped() + len) * block_size;
            self.data[from..from + tokens.len()].copy_from_slice(tokens);
            let from = self.ids_from(block_size) + len;
            for (to, id) in self.data[from..from + more].iter_mut().zip(ids) {
                *to = id;
            }
        }
        self.len += crate::ids::depth(more);
    }

    pub(crate) fn truncate(&mut self, len: usize, block_size: usize) {
        self.len = crate::ids::depth(len);
        if self.capacity(block_size) > 4 * len.max(16) {
            self.resize(2 * len, block_size);
        }
    }

    fn resize(&mut self, capacity: usize, block_size: usize) {
        self.data = self.copied(capacity, &[], std::iter::empty(), block_size);
        self.skipped = 0;
    }

    fn copied(
        &self,
        capacity: usize,
        tokens: &[u32],
        ids: impl Iterator<Item = u32>,
        block_size: usize,
    ) -> Box<[u32]> {
        let mut data = Vec::with_capacity(capacity * (block_size + 1));
        data.extend_from_slice(self.tokens(block_size));
        data.extend_from_slice(tokens);
        data.resize(capacity * block_size, 0);
        data.extend_from_slice(self.ids(block_size));
        data.extend(ids);
        data.resize(capacity * (block_size + 1), 0);
        data.into_boxed_slice()
    }

    /// Gives back unused room, in place if the allocator can.
    fn shrink(&mut self, block_size: usize) {
        let len = self.len();
        if self.skipped() > 0 {
            return self.resize(len, block_size);
        }
        let ids = self.ids_from(block_size);
        let mut data = std::mem::take(&mut self.data).into_vec();
        data.copy_within(ids..ids + len, len * block_size);
        data.truncate(len * (block_size + 1));
        self.data = data.into_boxed_slice();
    }

    /// Cuts off the first blocks. Copies the shorter part (amortized).
    pub(crate) fn split_front(&mut self, blocks: usize, block_size: usize) -> Self {
        let rest = self.len() - blocks;
        let piece = |from: usize, to: usize| {
            let ids = &self.ids(block_size)[from..to];
            let mut data = Vec::with_capacity((to - from) * (block_size + 1));
            data.extend_from_slice(&self.tokens(block_size)[from * block_size..to * block_size]);
            data.extend_from_slice(ids);
            Self {
                data: data.into_boxed_slice(),
                len: crate::ids::depth(to - from),
                skipped: 0,
            }
        };
        if rest < blocks {
            let tail = piece(blocks, self.len());
            let mut front = std::mem::replace(self, tail);
            front.len = crate::ids::depth(blocks);
            front.shrink(block_size);
            return front;
        }
        let front = piece(0, blocks);
        self.skipped += crate::ids::depth(blocks);
        self.len = crate::ids::depth(rest);
        if self.skipped() >= self.len() / 4 {
            self.resize(rest, block_size);
        }
        front
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.data.len() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks(from: u32, to: u32) -> (Vec<u32>, Vec<u32>) {
        let tokens = (from..to)
            .flat_map(|id| [id, id + 1000, id + 2000])
            .collect();
        (tokens, (from..to).collect())
    }

    proptest! {
        #[test]
        fn a_run_equals_two_vectors(steps in prop::collection::vec((0u8..6, 0usize..40), 1..60)) {
            let mut run = EdgeBlocks::default();
            let (mut tokens, mut ids): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
            let mut next = 0;
            for (kind, n) in steps {
                let is_run = ids.windows(2).all(|pair| pair[0] + 1 == pair[1]);
                prop_assert_eq!(run.are_consecutive(3), is_run);
                match kind {
                    0 | 1 => {
                        let (more_tokens, more_ids) = blocks(next, next + u32::try_from(n).unwrap());
                        next += u32::try_from(n).unwrap();
                        run.extend(&more_tokens, more_ids.iter().copied(), 3);
                        tokens.extend(more_tokens);
                        ids.extend(more_ids);
                    }
                    // Another block, as after a hole was filled; and one that was there before.
                    4 if n < ids.len() => {
                        run.set_id(n, 5000, 3);
                        ids[n] = 5000;
                    }
                    5 if n < ids.len() => {
                        let id = tokens[3 * n];
                        run.set_id(n, id, 3);
                        ids[n] = id;
                    }
                    2 => {
                        let len = ids.len() - n.min(ids.len());
                        run.truncate(len, 3);
                        ids.truncate(len);
                        tokens.truncate(3 * len);
                    }
                    3 if n > 0 && n < ids.len() => {
                        let front = run.split_front(n, 3);
                        prop_assert_eq!(front.ids(3), &ids[..n]);
                        prop_assert_eq!(front.tokens(3), &tokens[..3 * n]);
                        prop_assert_eq!(front.heap_bytes(), 4 * 4 * n);
                        ids.drain(..n);
                        tokens.drain(..3 * n);
                    }
                    _ => {}
                }
                prop_assert_eq!(run.tokens(3), &tokens);
                prop_assert_eq!(run.ids(3), &ids);
                prop_assert!(ids.iter().enumerate().all(|(at, &id)| run.id(at, 3) == id));
            }
        }
    }

    #[test]
    fn a_long_full_run_does_not_grow() {
        let (tokens, ids) = blocks(0, 300);
        let mut run = EdgeBlocks::default();
        run.extend(&tokens, ids.into_iter(), 3);
        assert!(!run.can_grow(1, 3));
        run.truncate(299, 3);
        assert!(run.can_grow(1, 3) && !run.can_grow(2, 3));
        run.truncate(255, 3);
        assert!(run.can_grow(1000, 3));
    }
}
