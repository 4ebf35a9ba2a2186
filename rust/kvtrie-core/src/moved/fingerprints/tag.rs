//! The tag: the part of a hash that the table keeps.

use super::{WORD_BITS, index};

pub(super) const TAG_BITS: u32 = 23;

/// The bits of a hash below those that choose the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tag(pub(super) u32);

impl Tag {
    #[inline]
    pub(super) fn low(self) -> u16 {
        let [low, high, _, _] = self.0.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    #[inline]
    pub(super) fn high(self) -> u8 {
        self.0.to_le_bytes()[2]
    }

    #[inline]
    pub(super) fn home(self, buckets: usize) -> usize {
        index((u64::from(self.0) * buckets as u64) >> TAG_BITS)
    }

    #[inline]
    pub(super) fn word(self) -> usize {
        (self.0 >> (TAG_BITS - WORD_BITS)) as usize
    }

    #[inline]
    pub(super) fn bits(self) -> u64 {
        1 << (self.0 & 63) | 1 << (self.0 >> 6 & 63)
    }

    /// The bit of [`Bucket::passed`](super::bucket::Bucket::passed) that entries of this tag set.
    #[inline]
    pub(super) fn mark(self) -> u8 {
        1 << (self.0 & 7)
    }
}
