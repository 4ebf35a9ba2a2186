//! Finds blocks by the fingerprints of their tokens, whatever is before them.
//!
//! 32 bits of each fingerprint are kept: a run of several blocks that are all mistaken is rare enough for a hint. A
//! search asks for every window of a prompt, and most are no block's: a screen of 8 to 16 bits a block, which stays in a
//! nearer cache than the table, says so of most. It lets 2 to 5 in a hundred of the others pass when it is new, and up to 16
//! when almost as many blocks have left as are there: their bits stay until it is renewed.
//!
//! Where a run must have two blocks or more to count, not every block is *listed*: those at even depths are, and the first
//! of each edge. So of two consecutive blocks one is listed; the tree has the fingerprint of the other, and a search
//! compares that. A list of which fingerprint is whose is not kept either: the tree knows it when a block leaves.

use std::hint::black_box;

use crate::keys::{Keys, plus};
use crate::lanes::Lane;
use crate::table::{Cell, Table};
use crate::tree::{Edge, NONE, Slot, Tree};

/// The most blocks of equal tokens that one lane may add: a text that repeats itself, or a flood.
const MOST_ALIKE: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Print {
    tag: u32,
    slot: Slot,
}

impl Cell for Print {
    const EMPTY: Self = Self { tag: 0, slot: NONE };

    fn is_empty(&self) -> bool {
        self.slot == NONE
    }

    fn key(&self) -> u64 {
        u64::from(self.tag) << 32
    }
}

/// Two bits for every tag that was added. Those of removed tags stay until as many are removed as there are.
#[derive(Debug, Default)]
struct Screen {
    /// A power of two of words, or none.
    bits: Vec<u64>,
    stale: usize,
}

impl Screen {
    const BITS_PER_TAG: usize = 8;
    /// Fewer removed tags are not worth a pass.
    const FEWEST_STALE: usize = 64;

    /// The word of a tag, and its two bits there.
    fn place(&self, tag: u32) -> (usize, u64) {
        let bits = 1 << (tag % 64) | 1 << (tag / 64 % 64);
        (tag.rotate_right(12) as usize & (self.bits.len() - 1), bits)
    }

    fn may_have(&self, tag: u32) -> bool {
        if self.bits.is_empty() {
            return false;
        }
        let (word, bits) = self.place(tag);
        self.bits[word] & bits == bits
    }

    fn add(&mut self, tag: u32, table: &Table<Print>) {
        if table.len() * Self::BITS_PER_TAG > self.bits.len() * 64 {
            self.renew(table);
            return;
        }
        let (word, bits) = self.place(tag);
        self.bits[word] |= bits;
    }

    fn remove(&mut self, table: &Table<Print>) {
        self.stale += 1;
        if self.stale > table.len() + Self::FEWEST_STALE {
            self.renew(table);
        }
    }

    fn renew(&mut self, table: &Table<Print>) {
        let words = (table.len() * Self::BITS_PER_TAG).div_ceil(64);
        self.bits = vec![0; words.next_power_of_two()];
        self.stale = 0;
        for print in table.iter() {
            let (word, bits) = self.place(print.tag);
            self.bits[word] |= bits;
        }
    }
}

#[derive(Debug)]
pub(crate) struct Fingerprints {
    screen: Screen,
    table: Table<Print>,
    /// Every block is listed, as a run may have one.
    lists_all: bool,
}

/// The 32 bits that are kept.
fn tag(fingerprint: u64) -> u32 {
    (fingerprint >> 32) as u32
}

impl Fingerprints {
    /// Of an index whose shortest moved run has so many blocks.
    pub(crate) fn new(run_blocks: usize) -> Self {
        Self {
            screen: Screen::default(),
            table: Table::default(),
            lists_all: run_blocks < 2,
        }
    }

    /// Whether a block is listed that has so many before it, unless others with its tokens are enough.
    pub(crate) fn lists(&self, depth: u32) -> bool {
        self.lists_all || depth.is_multiple_of(2)
    }

    /// The same of a block of an edge.
    pub(crate) fn lists_at(&self, edge: &Edge, at: u32) -> bool {
        at == 0 || self.lists(edge.depth() + at)
    }

    /// Lists a block that is `owner`'s.
    pub(crate) fn add(&mut self, slot: Slot, fingerprint: u64, owner: Lane, tree: &Tree) {
        let is_owners = |other: &Slot| tree.edge(tree.edge_of(*other)).owner() == owner;
        if self.find(fingerprint).filter(is_owners).count() >= MOST_ALIKE {
            return;
        }
        let tag = tag(fingerprint);
        self.table.insert(Print { tag, slot });
        self.screen.add(tag, &self.table);
    }

    /// Reads ahead what is there of fingerprints that are added next.
    pub(crate) fn touch(&self, fingerprints: impl Iterator<Item = u64>) {
        let keys = fingerprints.map(|fingerprint| {
            let tag = tag(fingerprint);
            if !self.screen.bits.is_empty() {
                black_box(self.screen.bits[self.screen.place(tag).0]);
            }
            u64::from(tag) << 32
        });
        self.table.touch(keys);
    }

    /// Removes a block from the list, if it is there.
    pub(crate) fn remove(&mut self, slot: Slot, fingerprint: u64) {
        let tag = tag(fingerprint);
        let print = Print { tag, slot };
        if self.table.remove(print.key(), |other| other.slot == slot) {
            self.screen.remove(&self.table);
        }
    }

    /// The positions of windows that may be those of blocks: all that are, and up to 16 in a hundred of the others.
    pub(crate) fn possible(&self, windows: &[u64], apart: u64) -> Vec<usize> {
        let mut found = Vec::new();
        for (at, &window) in windows.iter().enumerate() {
            if self.screen.may_have(tag(plus(window, apart))) {
                found.push(at);
            }
        }
        found
    }

    /// The blocks with this fingerprint.
    pub(crate) fn find(&self, fingerprint: u64) -> impl Iterator<Item = Slot> {
        let tag = tag(fingerprint);
        let found = self
            .screen
            .may_have(tag)
            .then(|| self.table.all(u64::from(tag) << 32));
        found.into_iter().flatten().map(|print| print.slot)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.table.heap_bytes() + self.screen.bits.capacity() * size_of::<u64>()
    }

    pub(crate) fn check(&self, tree: &Tree, keys: &Keys) -> Result<(), String> {
        self.table.check()?;
        for print in self.table.iter() {
            let (edge, at) = tree.at(print.slot);
            let is_there = tree.edge(edge).len() > at && tree.edge(edge).slot(at) == print.slot;
            let edge = tree.edge(edge);
            let is_its = is_there && tag(tree.fingerprint(keys, edge, at)) == print.tag;
            if !is_its || !self.lists_at(edge, at) {
                return Err(format!("the fingerprint of {} outlived it", print.slot));
            }
            if !self.screen.may_have(print.tag) {
                return Err(format!(
                    "the screen hides the fingerprint of {}",
                    print.slot
                ));
            }
        }
        Ok(())
    }
}
