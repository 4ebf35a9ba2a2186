//! Counters of an index.

use crate::index::RadixIndex;
use crate::moved::Windows;

/// Counters of one index at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks that back an entry.
    pub indexed: u64,
    /// Blocks that left the index while pinned, whether they are still pinned or wait to be taken.
    pub condemned: u64,
    /// Condemned blocks that wait to be taken.
    pub waiting: u64,
    /// Blocks permanently out of use, without those still pinned, which count as condemned.
    pub quarantined: u64,
    /// Pinned blocks, indexed or condemned.
    pub pinned: u64,
    /// Blocks that [`evict`](RadixIndex::evict) can remove, as [`num_evictable`](RadixIndex::num_evictable).
    pub evictable: u64,
    /// Indexed blocks that are marked dead.
    pub dead: u64,
    /// Indexed blocks whose entry is approximate.
    pub approximate: u64,
    /// Places without a block above a cached block.
    pub holes: u64,
    /// Edges of all trees.
    pub nodes: u64,
    /// Windows of eight tokens, through which moved runs are found.
    pub windows: u64,
    /// Namespaces that hold a block.
    pub namespaces: u64,
    /// Plans and pins that are not released.
    pub live_plans: u64,
    /// Time of the logical clock.
    pub clock: u64,
    /// Ids given to `discard` or `quarantine` that were not in the index.
    pub unknown_discards: u64,
    /// Edges that lookups, plans and inserts visited since the index was made.
    pub nodes_visited: u64,
    /// Bytes of token ids that those calls compared.
    pub bytes_compared: u64,
    /// Looks of the searches for moved runs since the index was made or restored. Rule P16 bounds them per plan.
    pub search_looks: u64,
    /// Plans since the index was made or restored for which no moved run was looked for, because they had no session,
    /// and no cached path begins as their prompt does (rule P18).
    pub plans_without_scope: u64,
    /// Heap bytes, by capacity, without the allocator's overhead.
    pub bytes: u64,
}

impl RadixIndex {
    /// Counters of the index.
    ///
    /// # Complexity
    /// O(edges) for `bytes`, and O(edges with a pin) for `pinned`; everything else is a counter.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (forest, blocks) = (self.forest(), self.forest().blocks());
        let (dead, work) = (self.eviction().dead(), self.work());
        Stats {
            indexed: forest.num_indexed(),
            condemned: blocks.num_condemned() + self.num_waiting(),
            waiting: self.num_waiting(),
            quarantined: blocks.num_quarantined(),
            pinned: self.pins().num_pinned(forest),
            evictable: self.num_evictable(),
            dead: dead.num_blocks(),
            approximate: forest.num_approximate(),
            holes: forest.num_holes(),
            nodes: forest.num_edges(),
            windows: self
                .moved()
                .windows()
                .map_or(0, |windows| windows.len() as u64),
            namespaces: forest.trees().len() as u64,
            live_plans: self.pins().leases().len() as u64,
            clock: self.clock(),
            unknown_discards: self.unknown_discards(),
            nodes_visited: work.nodes_visited,
            bytes_compared: work.bytes_compared,
            search_looks: work.search_looks,
            plans_without_scope: work.plans_without_scope,
            bytes: self.heap_bytes() as u64,
        }
    }

    /// Blocks that wait for [`take_freed`](Self::take_freed) or [`evict`](Self::evict). O(1).
    #[must_use]
    pub fn num_waiting(&self) -> u64 {
        self.pins().waiting().len() as u64
    }

    /// Blocks whose entry is approximate. O(1).
    #[must_use]
    pub fn num_approximate(&self) -> u64 {
        self.forest().num_approximate()
    }

    fn heap_bytes(&self) -> usize {
        self.forest().heap_bytes()
            + self.pins().heap_bytes()
            + self.eviction().heap_bytes()
            + self.moved().windows().map_or(0, Windows::heap_bytes)
            + self.gone().heap_bytes()
            + self.groups().heap_bytes()
    }
}
