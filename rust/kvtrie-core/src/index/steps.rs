//! Upper bounds on what a call will cost, so that a caller can decide whether to hold a lock for it.

use crate::index::RadixIndex;
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
