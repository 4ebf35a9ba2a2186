//! What the index knows of each block id: where it stands, who pins it, how often it has left.
//!
//! Pages of 1,024 ids are made when an id of theirs is first met, so a pool of 2³¹ blocks costs what is used of it.

use crate::ids::{Depth, NO_NODE, NodeIndex};

const PAGE: usize = 1024;

/// Where a block id stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Not the index's business: free, or held by the caller.
    Unknown,
    /// Backs the block at `depth` of the path through `node`.
    Indexed { node: NodeIndex, depth: Depth },
    /// Left the index while pinned.
    Condemned,
    /// Condemned once, released since; waits for `take_freed` or `evict`.
    Waiting,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    node: NodeIndex,
    depth: Depth,
    pins: u32,
    departures: u32,
}

/// Marks in `Entry::node` of a block that no node holds.
const UNKNOWN: NodeIndex = NO_NODE;
const WAITING: NodeIndex = NO_NODE - 1;
const CONDEMNED: NodeIndex = NO_NODE - 2;

const EMPTY: Entry = Entry {
    node: UNKNOWN,
    depth: 0,
    pins: 0,
    departures: 0,
};

struct Page {
    entries: [Entry; PAGE],
    offered: [u64; PAGE / 64],
}

/// The table of block ids.
#[derive(Default)]
pub(crate) struct BlockTable {
    pages: Vec<Option<Box<Page>>>,
    num_pages: usize,
}

impl std::fmt::Debug for BlockTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockTable")
            .field("pages", &self.num_pages)
            .finish()
    }
}

impl BlockTable {
    fn entry(&self, id: u32) -> Entry {
        match self.pages.get(id as usize / PAGE) {
            Some(Some(page)) => page.entries[id as usize % PAGE],
            _ => EMPTY,
        }
    }

    fn page_mut(&mut self, id: u32) -> &mut Page {
        let index = id as usize / PAGE;
        if index >= self.pages.len() {
            self.pages.resize_with(index + 1, || None);
        }
        let num_pages = &mut self.num_pages;
        self.pages[index].get_or_insert_with(|| {
            *num_pages += 1;
            Box::new(Page {
                entries: [EMPTY; PAGE],
                offered: [0; PAGE / 64],
            })
        })
    }

    fn entry_mut(&mut self, id: u32) -> &mut Entry {
        &mut self.page_mut(id).entries[id as usize % PAGE]
    }

    pub(crate) fn place(&self, id: u32) -> Place {
        let entry = self.entry(id);
        match entry.node {
            UNKNOWN => Place::Unknown,
            WAITING => Place::Waiting,
            CONDEMNED => Place::Condemned,
            node => Place::Indexed {
                node,
                depth: entry.depth,
            },
        }
    }

    pub(crate) fn set_indexed(&mut self, id: u32, node: NodeIndex, depth: Depth) {
        let entry = self.entry_mut(id);
        entry.node = node;
        entry.depth = depth;
    }

    /// The block moved to another node at the same depth.
    pub(crate) fn set_node(&mut self, id: u32, node: NodeIndex) {
        self.entry_mut(id).node = node;
    }

    /// The block left its place: condemned if pinned, unknown if not. Returns whether it is condemned.
    pub(crate) fn depart(&mut self, id: u32) -> bool {
        let entry = self.entry_mut(id);
        entry.departures = entry.departures.wrapping_add(1);
        entry.node = if entry.pins > 0 { CONDEMNED } else { UNKNOWN };
        entry.pins > 0
    }

    pub(crate) fn set_waiting(&mut self, id: u32) {
        self.entry_mut(id).node = WAITING;
    }

    pub(crate) fn set_unknown(&mut self, id: u32) {
        self.entry_mut(id).node = UNKNOWN;
    }

    pub(crate) fn pins(&self, id: u32) -> u32 {
        self.entry(id).pins
    }

    /// Adds a pin; returns how many there are.
    pub(crate) fn pin(&mut self, id: u32) -> u32 {
        let entry = self.entry_mut(id);
        entry.pins += 1;
        entry.pins
    }

    /// Takes a pin away; returns how many are left.
    pub(crate) fn unpin(&mut self, id: u32) -> u32 {
        let entry = self.entry_mut(id);
        entry.pins -= 1;
        entry.pins
    }

    /// How often the block has left a place: two equal answers mean that it has not left in between.
    pub(crate) fn departures(&self, id: u32) -> u32 {
        self.entry(id).departures
    }

    /// Marks an id as seen in the call at hand; returns whether it had been. Undone by [`Self::clear_offered`].
    pub(crate) fn offer(&mut self, id: u32) -> bool {
        let word = &mut self.page_mut(id).offered[id as usize % PAGE / 64];
        let bit = 1 << (id % 64);
        let seen = *word & bit != 0;
        *word |= bit;
        seen
    }

    pub(crate) fn clear_offered(&mut self, ids: impl Iterator<Item = u32>) {
        for id in ids {
            self.page_mut(id).offered[id as usize % PAGE / 64] = 0;
        }
    }

    /// Every id that is condemned, waiting or pinned, ascending, with its pins.
    pub(crate) fn noteworthy(&self) -> impl Iterator<Item = (u32, Place, u32)> {
        self.pages
            .iter()
            .enumerate()
            .filter_map(|(index, page)| Some((index, page.as_ref()?)))
            .flat_map(|(index, page)| {
                (0..PAGE).map(move |at| (index * PAGE + at, page.entries[at]))
            })
            .filter_map(|(id, entry)| {
                let id = crate::ids::depth(id);
                let place = self.place(id);
                (entry.pins > 0 || matches!(place, Place::Condemned | Place::Waiting))
                    .then_some((id, place, entry.pins))
            })
    }

    /// Every indexed id, ascending.
    pub(crate) fn indexed(&self) -> impl Iterator<Item = u32> {
        self.pages
            .iter()
            .enumerate()
            .filter(|(_, page)| page.is_some())
            .flat_map(|(index, _)| index * PAGE..(index + 1) * PAGE)
            .map(crate::ids::depth)
            .filter(|&id| matches!(self.place(id), Place::Indexed { .. }))
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Option<Box<Page>>>() + self.num_pages * size_of::<Page>()
    }
}
