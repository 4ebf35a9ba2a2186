//! The state of each block id: where it is indexed, and when it last left a place.
//!
//! The time of a departure is a number of plans, so an unpinned plan is validated without a list of its blocks. Pages
//! of 1,024 ids are allocated at first use, so a pool of 2³¹ blocks costs only what is used.

use crate::ids::{BlockId, Depth, NO_NODE, NodeIndex};

const PAGE: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// Free, or held by the caller.
    Unknown,
    /// The block at `depth` of the path through `node`.
    Indexed { node: NodeIndex, depth: Depth },
    /// Left the index while pinned.
    Condemned,
    /// Was condemned, and its last pin has ended.
    Waiting,
    /// Permanently out of use.
    Quarantined,
    /// Condemned, and quarantined once its last pin ends.
    CondemnedForGood,
}

const UNKNOWN: NodeIndex = NO_NODE;
const WAITING: NodeIndex = NO_NODE - 1;
const CONDEMNED: NodeIndex = NO_NODE - 2;
/// The current call offers the id, which was unknown before.
const OFFERED: NodeIndex = NO_NODE - 3;
const QUARANTINED: NodeIndex = NO_NODE - 4;
const CONDEMNED_FOR_GOOD: NodeIndex = NO_NODE - 5;

/// 11 bytes and two bits per block.
struct Page {
    places: [(NodeIndex, Depth); PAGE],
    /// Number of plans when the block last left its place, minus `BlockTable::since`.
    left: [[u8; 3]; PAGE],
    seen: [u64; PAGE / 64],
    /// Set for blocks with windows that wait to be added.
    pending: [u64; PAGE / 64],
}

impl Page {
    fn new() -> Box<Self> {
        Box::new(Self {
            places: [(UNKNOWN, 0); PAGE],
            left: [[0; 3]; PAGE],
            seen: [0; PAGE / 64],
            pending: [0; PAGE / 64],
        })
    }
}

#[derive(Default)]
pub(crate) struct BlockTable {
    pages: Vec<Option<Box<Page>>>,
    num_pages: usize,
    num_indexed: u64,
    num_condemned: u64,
    num_quarantined: u64,
    plans: u64,
    /// Departures before this number of plans are no longer recorded.
    since: u64,
}

impl std::fmt::Debug for BlockTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockTable")
            .field("pages", &self.num_pages)
            .finish_non_exhaustive()
    }
}

impl BlockTable {
    /// The most plans whose departures can be distinguished: three bytes.
    const MAX_PLANS: u64 = (1 << 24) - 1;

    fn place_of(&self, id: u32) -> (NodeIndex, Depth) {
        match self.pages.get(id as usize / PAGE) {
            Some(Some(page)) => page.places[id as usize % PAGE],
            _ => (UNKNOWN, 0),
        }
    }

    #[inline]
    fn page_mut(&mut self, id: u32) -> &mut Page {
        let index = id as usize / PAGE;
        if !matches!(self.pages.get(index), Some(Some(_))) {
            self.add_page(index);
        }
        self.pages[index].as_mut().expect("the page was made")
    }

    #[cold]
    #[inline(never)]
    fn add_page(&mut self, index: usize) {
        if index >= self.pages.len() {
            self.pages.resize_with(index + 1, || None);
        }
        self.pages[index] = Some(Page::new());
        self.num_pages += 1;
    }

    pub(crate) fn state(&self, id: u32) -> BlockState {
        match self.place_of(id) {
            (UNKNOWN | OFFERED, _) => BlockState::Unknown,
            (WAITING, _) => BlockState::Waiting,
            (CONDEMNED, _) => BlockState::Condemned,
            (QUARANTINED, _) => BlockState::Quarantined,
            (CONDEMNED_FOR_GOOD, _) => BlockState::CondemnedForGood,
            (node, depth) => BlockState::Indexed { node, depth },
        }
    }

    pub(crate) fn num_indexed(&self) -> u64 {
        self.num_indexed
    }

    /// Number of condemned blocks that are still pinned.
    pub(crate) fn num_condemned(&self) -> u64 {
        self.num_condemned
    }

    /// Number of quarantined blocks, without those still pinned.
    pub(crate) fn num_quarantined(&self) -> u64 {
        self.num_quarantined
    }

    pub(super) fn enter(&mut self, id: u32, node: NodeIndex, depth: Depth) {
        self.page_mut(id).places[id as usize % PAGE] = (node, depth);
        self.num_indexed += 1;
    }

    pub(super) fn enter_run(&mut self, ids: &[BlockId], node: NodeIndex, from: Depth) {
        let mut depth = from;
        self.each(ids, |place| {
            *place = (node, depth);
            depth += 1;
            true
        });
        self.num_indexed += ids.len() as u64;
    }

    /// Calls `change` with the place of each id until it returns false, and returns the number of ids before that. A
    /// page is looked up once for consecutive ids in it.
    fn each(
        &mut self,
        ids: &[BlockId],
        mut change: impl FnMut(&mut (NodeIndex, Depth)) -> bool,
    ) -> usize {
        let mut at = 0;
        while let Some(&BlockId(first)) = ids.get(at) {
            let number = first as usize / PAGE;
            let page = self.page_mut(first);
            while let Some(&BlockId(id)) = ids.get(at)
                && id as usize / PAGE == number
            {
                if !change(&mut page.places[id as usize % PAGE]) {
                    return at;
                }
                at += 1;
            }
        }
        at
    }

    pub(super) fn set_node(&mut self, id: u32, node: NodeIndex) {
        self.set(id, node);
    }

    fn set(&mut self, id: u32, state: NodeIndex) {
        self.page_mut(id).places[id as usize % PAGE].0 = state;
    }

    pub(super) fn depart(&mut self, id: u32, condemned: bool) {
        let plans = self.plans - self.since;
        let [low, middle, high, ..] = plans.to_le_bytes();
        let page = self.page_mut(id);
        page.left[id as usize % PAGE] = [low, middle, high];
        page.places[id as usize % PAGE].0 = if condemned { CONDEMNED } else { UNKNOWN };
        self.num_indexed -= 1;
        self.num_condemned += u64::from(condemned);
    }

    /// Ends the last pin of a condemned block. Returns whether it waits now; otherwise it is quarantined.
    pub(crate) fn release(&mut self, id: u32) -> bool {
        self.num_condemned -= 1;
        let waits = self.state(id) == BlockState::Condemned;
        if waits {
            self.wait(id);
        } else {
            self.set_quarantined(id);
        }
        waits
    }

    pub(crate) fn wait(&mut self, id: u32) {
        self.set(id, WAITING);
    }

    pub(crate) fn take(&mut self, id: u32) {
        self.set(id, UNKNOWN);
    }

    pub(crate) fn quarantine(&mut self, id: u32) {
        if self.state(id) == BlockState::Condemned {
            self.set(id, CONDEMNED_FOR_GOOD);
        } else {
            self.set_quarantined(id);
        }
    }

    fn set_quarantined(&mut self, id: u32) {
        self.set(id, QUARANTINED);
        self.num_quarantined += 1;
    }

    pub(crate) fn count_plan(&mut self) -> u64 {
        self.plans += 1;
        if self.plans - self.since > Self::MAX_PLANS {
            self.since = self.plans - 1;
            for page in self.pages.iter_mut().flatten() {
                page.left = [[0; 3]; PAGE];
            }
        }
        self.plans
    }

    /// Whether a block has not left its place since this plan. Returns `false` for a plan older than the record, which
    /// starts again after 16 million plans.
    pub(crate) fn stayed(&self, id: u32, plan: u64) -> bool {
        if plan <= self.since {
            return false;
        }
        let Some(Some(page)) = self.pages.get(id as usize / PAGE) else {
            return true;
        };
        let [low, middle, high] = page.left[id as usize % PAGE];
        let left = u64::from(u32::from_le_bytes([low, middle, high, 0]));
        self.since + left < plan
    }

    /// Marks an id until [`Self::clear_seen`]; returns whether it was marked.
    pub(crate) fn see(&mut self, id: u32) -> bool {
        let word = &mut self.page_mut(id).seen[id as usize % PAGE / 64];
        let bit = 1 << (id % 64);
        let seen = *word & bit != 0;
        *word |= bit;
        seen
    }

    pub(crate) fn clear_seen(&mut self, ids: impl Iterator<Item = u32>) {
        for id in ids {
            self.page_mut(id).seen[id as usize % PAGE / 64] = 0;
        }
    }

    /// Marks ids as offered, up to the first that is not unknown or occurs again, and returns their number.
    /// [`Self::clear_offers`] removes the marks, as does setting a place.
    pub(crate) fn offer(&mut self, ids: &[BlockId]) -> usize {
        self.each(ids, |(node, _)| {
            let is_new = *node == UNKNOWN;
            if is_new {
                *node = OFFERED;
            }
            is_new
        })
    }

    /// The state of the id at which [`Self::offer`] stopped, and whether this is its first occurrence.
    pub(crate) fn offer_known(&mut self, id: u32) -> (BlockState, bool) {
        let is_first = self.place_of(id).0 != OFFERED && !self.see(id);
        (self.state(id), is_first)
    }

    pub(crate) fn clear_offers(&mut self, ids: &[BlockId]) {
        self.each(ids, |(node, _)| {
            if *node == OFFERED {
                *node = UNKNOWN;
            }
            true
        });
    }

    pub(crate) fn set_pending(&mut self, id: u32) {
        self.page_mut(id).pending[id as usize % PAGE / 64] |= 1 << (id % 64);
    }

    pub(crate) fn is_pending(&self, id: u32) -> bool {
        let page = self.pages.get(id as usize / PAGE).and_then(Option::as_ref);
        page.is_some_and(|page| page.pending[id as usize % PAGE / 64] >> (id % 64) & 1 == 1)
    }

    /// Clears whole words, because all blocks with waiting windows are cleared together.
    pub(crate) fn clear_pending(&mut self, ids: Vec<u32>) {
        for id in ids {
            self.page_mut(id).pending[id as usize % PAGE / 64] = 0;
        }
    }

    pub(crate) fn known(&self) -> impl Iterator<Item = (u32, BlockState)> {
        self.pages
            .iter()
            .enumerate()
            .filter(|(_, page)| page.is_some())
            .flat_map(|(index, _)| index * PAGE..(index + 1) * PAGE)
            .map(|id| {
                let id = crate::ids::depth(id);
                (id, self.state(id))
            })
            .filter(|&(_, place)| place != BlockState::Unknown)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Option<Box<Page>>>() + self.num_pages * size_of::<Page>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn departures_are_distinguished_by_plan() {
        let mut table = BlockTable::default();
        let before = table.count_plan();
        assert!(table.stayed(7, before));
        table.enter(7, 1, 0);
        table.depart(7, false);
        let after = table.count_plan();
        assert!(!table.stayed(7, before) && table.stayed(7, after));
        table.enter(7, 2, 3);
        assert!(!table.stayed(7, before) && table.stayed(7, after));
    }

    #[test]
    fn a_plan_older_than_the_record_has_no_block_that_stayed() {
        let mut table = BlockTable::default();
        table.enter(0, 1, 0);
        let old = table.count_plan();
        table.plans = BlockTable::MAX_PLANS;
        let last = table.plans;
        assert!(table.stayed(0, old) && table.stayed(0, last));
        table.depart(0, false);
        assert!(!table.stayed(0, last));
        let new = table.count_plan();
        assert!(!table.stayed(0, old) && !table.stayed(0, last) && table.stayed(0, new));
        table.enter(0, 1, 0);
        table.depart(0, false);
        assert!(!table.stayed(0, new) && table.stayed(0, table.plans + 1));
    }

    #[test]
    fn a_block_takes_11_bytes_and_two_bits() {
        assert_eq!(size_of::<Page>(), PAGE * 11 + 2 * PAGE / 8);
    }
}
