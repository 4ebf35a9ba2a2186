//! The digest of each slot.
//!
//! They are kept in segments, none of which but the first ever moves. One list of a million would be copied whenever it
//! grows, as most allocators do but for the largest ones, and a list that doubles would be half empty at worst.

use crate::keys::Digest;
use crate::tree::{Slot, make_room};

/// Number of digests of a segment. Tests fill several.
const SEGMENT: usize = if cfg!(test) { 8 } else { 4_096 };

#[derive(Debug, Default)]
pub(crate) struct Digests {
    /// All are full but the last.
    segments: Vec<Vec<Digest>>,
    len: usize,
}

impl Digests {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, slot: Slot) -> Digest {
        let slot = slot as usize;
        self.segments[slot / SEGMENT][slot % SEGMENT]
    }

    /// Replaces the digests from a slot on, all of which there are.
    pub(crate) fn replace(&mut self, slot: Slot, digests: &[Digest]) {
        for (slot, &digest) in (slot as usize..).zip(digests) {
            self.segments[slot / SEGMENT][slot % SEGMENT] = digest;
        }
    }

    /// Adds digests after the last.
    pub(crate) fn extend(&mut self, mut digests: &[Digest]) {
        self.len += digests.len();
        while !digests.is_empty() {
            if self
                .segments
                .last()
                .is_none_or(|last| last.len() == SEGMENT)
            {
                // The first grows in steps, so that a small index is small.
                let is_first = self.segments.is_empty();
                let room = if is_first { 0 } else { SEGMENT };
                self.segments.push(Vec::with_capacity(room));
            }
            let Some(segment) = self.segments.last_mut() else {
                return;
            };
            let (now, later) = digests.split_at(digests.len().min(SEGMENT - segment.len()));
            make_room(segment, now.len());
            segment.extend_from_slice(now);
            digests = later;
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let digests = self.segments.iter().map(Vec::capacity).sum::<usize>();
        digests * size_of::<Digest>() + self.segments.capacity() * size_of::<Vec<Digest>>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn digests_are_a_list(
            steps in proptest::collection::vec((any::<bool>(), any::<u32>(), 0_usize..40), 1..40),
        ) {
            let (mut digests, mut list) = (Digests::default(), Vec::new());
            for (number, (extends, slot, count)) in (0_u64..).zip(steps) {
                let new: Vec<Digest> = (0..count as u64).map(|at| [number, at]).collect();
                if extends {
                    digests.extend(&new);
                    list.extend(new);
                } else if list.len() > count {
                    let first = slot as usize % (list.len() - count);
                    digests.replace(u32::try_from(first).unwrap(), &new);
                    list[first..first + count].copy_from_slice(&new);
                }
                prop_assert_eq!(digests.len(), list.len());
                for (slot, &digest) in (0..).zip(&list) {
                    prop_assert_eq!(digests.get(slot), digest);
                }
            }
        }
    }
}
