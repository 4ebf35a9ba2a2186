//! Upper bounds on what a call will cost, so that a caller can decide whether to hold a lock for it.

use crate::groups::GroupKind;
use crate::ids::depth;
use crate::index::{GroupOptions, RadixIndex};
use crate::tokens::TokenSequence;

/// Tokens that are compared in the time of one step.
const TOKENS_PER_STEP: usize = 256;

impl RadixIndex {
    /// The most steps to walk the sequence, each about as long as a visit of an edge. O(1).
    #[must_use]
    pub fn unknown_steps(&self, seq: &TokenSequence) -> u64 {
        let known = self
            .forest
            .at_cursor(seq)
            .map_or(0, |(at, _)| at.depth as usize);
        let tokens = seq.len() - (known * self.block_size()).min(seq.len());
        (tokens / self.block_size().min(TOKENS_PER_STEP)) as u64
    }

    /// The most steps to insert `num_ids` blocks, including the search for pins of replaced blocks and the dead blocks
    /// of the namespace. O(1).
    #[must_use]
    pub fn insert_steps(&self, seq: &TokenSequence, num_ids: usize) -> u64 {
        let ids = num_ids as u64;
        let replaced = if self.forest.num_approximate() > 0 {
            ids
        } else {
            0
        };
        let trees = self.forest.trees();
        let tree = trees
            .of(seq.namespace())
            .filter(|_| self.eviction.any_dead());
        let dead = tree.map_or(0, |tree| trees[tree].num_dead);
        // An offered block takes about a quarter of a step.
        self.unknown_steps(seq) + ids / 4 + replaced * self.pins.leases().len() as u64 + dead
    }

    /// About the most steps that an insert takes for ids of groups besides group 0 and for what they need at its end, at
    /// states and at stops, in addition to [`insert_steps`](Self::insert_steps). Entries that move to another edge where
    /// the path is cut are not counted. O(groups).
    #[must_use]
    pub fn group_steps(&self, seq: &TokenSequence, groups: GroupOptions<'_>) -> u64 {
        if self.groups().is_empty() {
            // Only checked, and refused.
            return (groups.offers.len() + groups.stops.len()) as u64;
        }
        // A step up to the next edge takes about a quarter of a visit.
        let edges = (self.known_edges(seq) + self.unknown_steps(seq)) / 4;
        let stops = groups.stops.len() as u64;
        let mut steps = stops + if stops == 0 { 0 } else { edges };
        let mut ends = 1 + stops;
        for offers in groups.offers {
            let count = offers.offers.len() as u64;
            let group = self.config.groups.get(offers.group.wrapping_sub(1));
            if group.is_some_and(|group| group.kind == GroupKind::State) {
                ends += count;
            }
            // Once where places are checked, and once where ids are taken.
            steps += count + 2 * edges;
        }
        let blocks = depth(seq.len() / self.block_size());
        let columns = self.groups().columns().iter();
        let used = columns.map(|column| {
            let needed = ends.saturating_mul(column.num_needed(blocks).into());
            needed.min(blocks.into())
        });
        // The use of an entry takes a quarter of a step.
        steps + used.sum::<u64>() / 4
    }

    /// Whether a path has holes or approximate blocks, which a plan checks one by one. O(1).
    #[must_use]
    pub fn has_broken_paths(&self) -> bool {
        self.forest.has_broken_paths()
    }

    /// Edges from the root to the sequence's cursor. A plan visits them again.
    #[must_use]
    pub fn known_edges(&self, seq: &TokenSequence) -> u64 {
        let is_known = self.forest.at_cursor(seq).is_some();
        let cursor = seq.cursor.as_ref().filter(|_| is_known);
        cursor.map_or(0, |cursor| cursor.edges)
    }
}
