//! Counters of an index.

use crate::index::{RadixIndex, Sources};
use crate::moved::windows::Windows;
use crate::pins::lease::Lease;
use crate::storage::node::Node;

/// Counters of one index at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks that back an entry.
    pub indexed: u64,
    /// Blocks that left the index while pinned, and are still pinned or wait to be taken.
    pub condemned: u64,
    /// Condemned blocks that are no longer pinned and wait to be taken.
    pub waiting: u64,
    /// Blocks that are out of use permanently. Those still pinned are counted as condemned.
    pub quarantined: u64,
    /// Pinned blocks, indexed or condemned.
    pub pinned: u64,
    /// Indexed blocks that could be evicted: neither pinned nor above a pinned one. A dead block may be above pinned
    /// source blocks.
    pub evictable: u64,
    /// Indexed blocks that are marked dead.
    pub dead: u64,
    /// Indexed blocks whose entry is approximate.
    pub approximate: u64,
    /// Holes: places without a block above a cached one.
    pub holes: u64,
    /// Edges of all trees.
    pub nodes: u64,
    /// Windows of eight tokens that are kept to find moved runs.
    pub windows: u64,
    /// Namespaces that hold a block.
    pub namespaces: u64,
    /// Plans that were not released.
    pub live_plans: u64,
    /// Time of the logical clock.
    pub clock: u64,
    /// Ids given to `discard` or `quarantine` that were not in the index.
    pub unknown_discards: u64,
    /// Edges that lookups, plans and inserts looked at since the index was made.
    pub nodes_visited: u64,
    /// Bytes of token ids that they compared.
    pub bytes_compared: u64,
    /// Steps of the search for moved runs since the index was made or restored: places tried, children compared and
    /// cache lines of tokens compared. Rule P16 bounds them per plan.
    pub search_looks: u64,
    /// Heap bytes, by capacity, without the allocator's overhead.
    pub bytes: u64,
}

impl RadixIndex {
    /// Returns the counters.
    ///
    /// # Complexity
    /// O(edges) for `bytes`, and O(edges with a pin) for `pinned`; everything else is a counter.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            indexed: self.num_indexed,
            condemned: self.num_condemned + self.num_waiting(),
            waiting: self.num_waiting(),
            quarantined: self.num_quarantined,
            pinned: self.num_pinned(),
            evictable: self.num_evictable(),
            dead: self.num_dead,
            approximate: self.num_approximate,
            holes: self.num_holes,
            nodes: self.num_edges(),
            windows: self
                .windows
                .as_ref()
                .map_or(0, |windows| windows.len() as u64),
            namespaces: self.trees.len() as u64,
            live_plans: self.leases.len() as u64,
            clock: self.clock,
            unknown_discards: self.unknown_discards,
            nodes_visited: self.work.nodes_visited,
            bytes_compared: self.work.bytes_compared,
            search_looks: self.work.search_looks,
            bytes: self.heap_bytes() as u64,
        }
    }

    /// Blocks that wait for [`take_freed`](Self::take_freed) or [`evict`](Self::evict). O(1).
    #[must_use]
    pub fn num_waiting(&self) -> u64 {
        self.waiting.len() as u64
    }

    /// Nodes except the roots.
    pub(crate) fn num_edges(&self) -> u64 {
        (self.nodes.len() - self.trees.len()) as u64
    }

    fn heap_bytes(&self) -> usize {
        self.nodes.heap_bytes()
            + self.nodes.iter().map(Node::heap_bytes).sum::<usize>()
            + self.edges.heap_bytes()
            + self.blocks.heap_bytes()
            + self.order.heap_bytes()
            + self.dead.heap_bytes()
            + self.windows.as_ref().map_or(0, Windows::heap_bytes)
            + self.anchors.allocation_size()
            + self.pins.allocation_size()
            + self.sources.allocation_size()
            + self
                .sources
                .values()
                .map(Sources::heap_bytes)
                .sum::<usize>()
            + self.leases.heap_bytes()
            + self
                .leases
                .iter()
                .map(|(_, lease)| Lease::heap_bytes(lease))
                .sum::<usize>()
            + self.gone.heap_bytes()
            + self.waiting.capacity() * size_of::<u32>()
            + self.trees.heap_bytes()
            + self.tree_of.allocation_size()
            + self.salts.heap_bytes()
    }
}
