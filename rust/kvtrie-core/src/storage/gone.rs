//! The latest departures, by which `explain` distinguishes evicted blocks from blocks that were never cached.
//!
//! Blocks leave an edge from its end, so only the first of those that leave together is noted: a later match ends
//! there. A note names a place (an existing node and a depth) and a digest of the tokens after it, and so one whole
//! prefix. It is wrong only if 64-bit digests collide. It is lost if the prefix itself leaves, even if it comes back.

use crate::ids::{Depth, NO_NODE, NodeHandle, NodeIndex};
use crate::storage::node::Node;
use crate::tokens::View;

/// Number of departures kept, at 20 bytes each.
pub(crate) const MOST: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    /// The node with the block before the departed one, if there is one.
    pub(crate) node: NodeIndex,
    pub(crate) generation: u32,
    pub(crate) depth: Depth,
    /// The digest in two halves, so that a note needs no padding.
    digest: [u32; 2],
}

impl Note {
    /// Stands for no departure, because no path is as deep.
    const NONE: Self = Self {
        node: NO_NODE,
        generation: 0,
        depth: Depth::MAX,
        digest: [0; 2],
    };

    pub(crate) fn new(before: Option<NodeHandle>, depth: Depth, digest: u64) -> Self {
        let half = |shift: u32| u32::try_from(digest >> shift & 0xffff_ffff).unwrap_or(u32::MAX);
        Self {
            node: before.map_or(NO_NODE, |handle| handle.index),
            generation: before.map_or(0, |handle| handle.generation),
            depth,
            digest: [half(32), half(0)],
        }
    }

    pub(crate) fn digest(self) -> u64 {
        u64::from(self.digest[0]) << 32 | u64::from(self.digest[1])
    }
}

#[derive(Debug)]
pub(crate) struct Gone {
    /// Allocated at the first departure and filled with [`Note::NONE`].
    notes: Option<Box<[Note; MOST]>>,
    /// Index at which the next note is written. The oldest note is there.
    next: usize,
    keys: [u64; 2],
}

impl Gone {
    pub(crate) fn new(seed: u64) -> Self {
        let key = |n: u64| fold(seed ^ n, 0xbf58_476d_1ce4_e5b9);
        Self {
            notes: None,
            next: 0,
            keys: [key(0x9e37_79b9_7f4a_7c15), key(0x94d0_49bb_1331_11eb)],
        }
    }

    /// The digest of the block at `place`. `prefix` identifies what is before the first block of a path; else it is 0.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "called for every leaf that is evicted; a fifth of its instructions would be the call"
    )]
    pub(crate) fn of_edge(&self, prefix: u64, edge: &Node, place: Depth, block_size: usize) -> u64 {
        let from = (place - edge.depth) as usize * block_size;
        let (digest, rest) = self.fours(
            prefix,
            &edge.blocks.tokens(block_size)[from..from + block_size],
        );
        if rest == 0 && edge.is_plain() {
            return digest;
        }
        let from = place as usize * block_size;
        self.rest(digest, edge.view(block_size).slice(from, from + block_size))
    }

    pub(crate) fn of_prompt(&self, prefix: u64, block: View<'_>) -> u64 {
        self.rest(self.fours(prefix, block.tokens).0, block)
    }

    /// Digests whole groups of four tokens; also returns how many tokens are left.
    #[inline]
    fn fours(&self, prefix: u64, tokens: &[u32]) -> (u64, usize) {
        let [first, second] = self.keys;
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let (fours, rest) = tokens.as_chunks::<4>();
        let start = prefix ^ first;
        let digest = fours.iter().fold(start, |digest, &[a, b, c, d]| {
            fold(digest ^ pair(a, b), second ^ pair(c, d))
        });
        (digest, rest.len())
    }

    /// Digests the tokens left over, and the items.
    #[cold]
    fn rest(&self, mut digest: u64, block: View<'_>) -> u64 {
        let [first, second] = self.keys;
        for &token in block.tokens.as_chunks::<4>().1 {
            digest = fold(digest ^ u64::from(token), second);
        }
        for (place, extent, item) in block.items_inside() {
            digest = fold(digest ^ place, first);
            if extent != 0 {
                digest = fold(digest ^ extent, first);
            }
            for &byte in item {
                digest = fold(digest ^ u64::from(byte), second);
            }
        }
        digest
    }

    #[inline]
    pub(crate) fn add(&mut self, note: Note) {
        let notes = self.notes.get_or_insert_with(none);
        notes[self.next % MOST] = note;
        self.next = (self.next + 1) % MOST;
    }

    pub(crate) fn contains(&self, note: Note) -> bool {
        self.iter().any(|known| known == note)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Note> {
        let notes = self.notes.as_deref().map_or(&[][..], |notes| notes);
        let (newer, older) = notes.split_at(self.next.min(notes.len()));
        let all = older.iter().chain(newer).copied();
        all.filter(|&note| note != Note::NONE)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.notes.as_ref().map_or(0, |_| MOST * size_of::<Note>())
    }
}

#[cold]
fn none() -> Box<[Note; MOST]> {
    let notes = vec![Note::NONE; MOST].into_boxed_slice();
    notes.try_into().expect("there are as many notes")
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn view(tokens: &[u32]) -> View<'_> {
        View {
            tokens,
            base: 0,
            items: &[],
        }
    }

    #[test]
    fn the_latest_departures_are_kept_oldest_first() {
        let mut gone = Gone::new(7);
        for digest in 0..MOST as u64 + 3 {
            gone.add(Note::new(None, 0, digest << 20));
        }
        let kept: Vec<u64> = gone.iter().map(Note::digest).collect();
        let expected: Vec<u64> = (3..MOST as u64 + 3).map(|n| n << 20).collect();
        assert_eq!(kept, expected);
        assert!(!gone.contains(Note::new(None, 0, 2 << 20)));
        assert!(gone.contains(Note::new(None, 0, 3 << 20)));
    }

    #[test]
    fn digests_distinguish_tokens_orders_prefixes_and_seeds() {
        let gone = Gone::new(1);
        let block = [5, 6, 7, 8, 9, 10, 11];
        let mut seen = BTreeSet::from([gone.of_prompt(0, view(&block))]);
        assert!(seen.insert(gone.of_prompt(0x9e37_79b9_7f4a_7c15, view(&block))));
        assert!(seen.insert(Gone::new(2).of_prompt(0, view(&block))));
        for at in 0..block.len() {
            for bit in 0..32 {
                let mut other = block;
                other[at] ^= 1 << bit;
                assert!(seen.insert(gone.of_prompt(0, view(&other))));
            }
            for with in at + 1..block.len() {
                let mut other = block;
                other.swap(at, with);
                assert!(seen.insert(gone.of_prompt(0, view(&other))));
            }
        }
    }

    #[test]
    fn a_note_takes_20_bytes() {
        assert_eq!(size_of::<Note>(), 20);
    }
}
