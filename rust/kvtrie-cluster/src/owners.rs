//! The edge of each slot, by runs of slots.
//!
//! Consecutive slots mostly belong to one edge, so runs take far less than a word a slot. They are kept in chunks of 64
//! slots: an edge is found in one chunk, and a cut rewrites a chunk at a time.

use smallvec::SmallVec;

use crate::tree::{EdgeIndex, NONE, Slot, make_room};

/// Number of slots of a chunk.
const CHUNK: u32 = 64;

/// Slots of a chunk from `start` on, up to the next run or the end of the chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: u32,
    edge: EdgeIndex,
}

/// Ascending runs, the first of which starts at 0. Neighbours are of different edges.
#[derive(Clone, Debug)]
struct Chunk(SmallVec<[Run; 2]>);

impl Chunk {
    fn of(edge: EdgeIndex) -> Self {
        Self(SmallVec::from_elem(Run { start: 0, edge }, 1))
    }

    fn get(&self, at: u32) -> EdgeIndex {
        let run = self.0.iter().rev().find(|run| run.start <= at);
        run.map_or(NONE, |run| run.edge)
    }

    fn set(&mut self, start: u32, end: u32, edge: EdgeIndex) {
        let after = self.get(end);
        let first = self.0.partition_point(|run| run.start < start);
        let last = self.0.partition_point(|run| run.start <= end);
        self.0.drain(first..last);
        let mut at = first;
        let mut put = |start: u32, edge: EdgeIndex| {
            if start < CHUNK && (at == 0 || self.0[at - 1].edge != edge) {
                self.0.insert(at, Run { start, edge });
                at += 1;
            }
        };
        put(start, edge);
        put(end, after);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Owners {
    chunks: Vec<Chunk>,
}

impl Owners {
    /// The edge of a slot. Those that were never given have none; those that are free have any.
    pub(crate) fn get(&self, slot: Slot) -> EdgeIndex {
        let chunk = self.chunks.get((slot / CHUNK) as usize);
        chunk.map_or(NONE, |chunk| chunk.get(slot % CHUNK))
    }

    /// Gives so many slots to an edge.
    ///
    /// # Complexity
    /// O(count/64), and O(runs) of the first and the last chunk, at most 64 each.
    pub(crate) fn set(&mut self, slot: Slot, count: u32, edge: EdgeIndex) {
        let end = slot + count;
        let mut from = slot;
        while from < end {
            let (chunk, start) = (from / CHUNK, from % CHUNK);
            let stop = (end - chunk * CHUNK).min(CHUNK);
            while self.chunks.len() <= chunk as usize {
                make_room(&mut self.chunks, 1);
                self.chunks.push(Chunk::of(NONE));
            }
            self.chunks[chunk as usize].set(start, stop, edge);
            from = chunk * CHUNK + stop;
        }
    }

    /// # Complexity
    /// O(slots/64).
    pub(crate) fn heap_bytes(&self) -> usize {
        let spilled = self.chunks.iter().filter(|chunk| chunk.0.spilled());
        let inside: usize = spilled.map(|chunk| chunk.0.capacity()).sum();
        self.chunks.capacity() * size_of::<Chunk>() + inside * size_of::<Run>()
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        for (number, Chunk(runs)) in self.chunks.iter().enumerate() {
            let starts = runs.first().is_some_and(|run| run.start == 0);
            let ascends = runs
                .windows(2)
                .all(|two| two[0].start < two[1].start && two[0].edge != two[1].edge);
            if !starts || !ascends || runs.last().is_some_and(|run| run.start >= CHUNK) {
                return Err(format!("chunk {number} of slots has runs {runs:?}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn owners_are_an_edge_for_each_slot(
            steps in proptest::collection::vec((0_u32..300, 0_u32..200, 0_u32..4), 1..80),
        ) {
            let (mut owners, mut each) = (Owners::default(), vec![NONE; 500]);
            for (slot, count, edge) in steps {
                owners.set(slot, count, edge);
                each[slot as usize..(slot + count) as usize].fill(edge);
                owners.check().unwrap();
                for (slot, &edge) in (0..).zip(&each) {
                    prop_assert_eq!(owners.get(slot), edge);
                }
            }
        }
    }

    #[test]
    fn a_long_edge_takes_less_than_half_a_byte_a_slot() {
        let mut owners = Owners::default();
        for slot in 0..100_000 {
            owners.set(slot, 1, slot / 1_000);
        }
        assert!(owners.heap_bytes() < 50_000, "{}", owners.heap_bytes());
    }
}
