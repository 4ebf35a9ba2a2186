//! What one lane holds, by the engine's hashes: the block of each hash, and how many copies are in which tier.

use std::collections::{BTreeMap, BTreeSet};

use crate::events::Tier;
use crate::keys::Contents;
use crate::table::{Cell, Table};
use crate::tree::{NONE, Slot};

/// Marks an entry whose copies are in `unusual`. No slot has this bit.
const UNUSUAL: u32 = 1 << 31;

/// A hash in halves, so that an entry takes 12 bytes. Without the mark there is one copy, in the device.
#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: [u32; 2],
    slot: u32,
}

impl Cell for Entry {
    const EMPTY: Self = Self {
        hash: [0; 2],
        slot: NONE,
    };

    fn is_empty(&self) -> bool {
        self.slot == NONE
    }

    fn key(&self) -> u64 {
        u64::from(self.hash[0]) << 32 | u64::from(self.hash[1])
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the halves are wanted")]
fn halves(hash: u64) -> [u32; 2] {
    [(hash >> 32) as u32, hash as u32]
}

/// Number of copies by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Copies([u32; Tier::COUNT]);

impl Copies {
    const ONE: Self = Self([1, 0, 0, 0]);

    pub(crate) fn of(tier: Tier) -> Self {
        let mut copies = Self::default();
        copies.0[tier as usize] = 1;
        copies
    }

    pub(crate) fn add(&mut self, tier: Tier) {
        let count = &mut self.0[tier as usize];
        *count = count.saturating_add(1);
    }

    pub(crate) fn plus(self, others: Self) -> Self {
        let mut sum = self;
        for (count, more) in sum.0.iter_mut().zip(others.0) {
            *count = count.saturating_add(more);
        }
        sum
    }

    /// Removes one copy; false if there is none in that tier.
    pub(crate) fn take(&mut self, tier: Tier) -> bool {
        let count = &mut self.0[tier as usize];
        let had = *count > 0;
        *count -= u32::from(had);
        had
    }

    /// All four counts in one word.
    pub(crate) fn word(self) -> u128 {
        let counts = self.0.iter();
        counts.fold(0, |word, &count| word << 32 | u128::from(count))
    }

    /// The tier of the fastest copy.
    pub(crate) fn fastest(self) -> Option<Tier> {
        Tier::ALL
            .into_iter()
            .find(|&tier| self.0[tier as usize] > 0)
    }
}

/// A hash of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) slot: Slot,
    pub(crate) copies: Copies,
}

/// A block whose parent is not known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parked {
    pub(crate) parent: u64,
    pub(crate) contents: Contents,
    pub(crate) copies: Copies,
}

#[derive(Debug, Default)]
pub(crate) struct Holdings {
    entries: Table<Entry>,
    /// Copies of each hash that has not one in the device.
    unusual: BTreeMap<u64, Copies>,
    parked: BTreeMap<u64, Parked>,
    /// Parked blocks by parent.
    waiting: BTreeSet<(u64, u64)>,
}

impl Holdings {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn num_parked(&self) -> usize {
        self.parked.len()
    }

    pub(crate) fn get(&self, hash: u64) -> Option<Held> {
        let entry = self.entries.all(hash).next()?;
        if entry.slot & UNUSUAL == 0 {
            return Some(Held {
                slot: entry.slot,
                copies: Copies::ONE,
            });
        }
        Some(Held {
            slot: entry.slot & !UNUSUAL,
            copies: self.unusual.get(&hash).copied()?,
        })
    }

    /// Reads ahead what is under hashes that are asked for next.
    pub(crate) fn touch(&self, hashes: impl Iterator<Item = u64>) {
        self.entries.touch(hashes);
    }

    /// Gives the addresses of what is under hashes.
    pub(crate) fn lines(&self, hashes: impl Iterator<Item = u64>, each: impl FnMut(*const u8)) {
        self.entries.lines(hashes, each);
    }

    /// Stores what is held under a hash; nothing if there are no copies.
    pub(crate) fn set(&mut self, hash: u64, held: Held) {
        if held.copies.fastest().is_none() {
            self.entries.remove(hash, |_| true);
            self.unusual.remove(&hash);
            return;
        }
        let is_usual = held.copies == Copies::ONE;
        let mark = if is_usual { 0 } else { UNUSUAL };
        let entry = Entry {
            hash: halves(hash),
            slot: held.slot | mark,
        };
        if let Some(known) = self.entries.first_mut(hash) {
            if known.slot & UNUSUAL != 0 && is_usual {
                self.unusual.remove(&hash);
            }
            *known = entry;
        } else {
            self.entries.insert(entry);
        }
        if !is_usual {
            self.unusual.insert(hash, held.copies);
        }
    }

    /// Stores what is held under a new hash.
    pub(crate) fn add(&mut self, hash: u64, held: Held) {
        if held.copies == Copies::ONE {
            self.entries.insert(Entry {
                hash: halves(hash),
                slot: held.slot,
            });
        } else {
            self.set(hash, held);
        }
    }

    /// Stores one copy in the device under a hash, unless there is something under it.
    pub(crate) fn add_new(&mut self, hash: u64, slot: Slot) -> bool {
        let hash = halves(hash);
        self.entries.insert_new(Entry { hash, slot })
    }

    pub(crate) fn parked(&self, hash: u64) -> Option<&Parked> {
        self.parked.get(&hash)
    }

    pub(crate) fn parked_mut(&mut self, hash: u64) -> Option<&mut Parked> {
        self.parked.get_mut(&hash)
    }

    pub(crate) fn park(&mut self, hash: u64, parked: Parked) {
        self.waiting.insert((parked.parent, hash));
        self.parked.insert(hash, parked);
    }

    pub(crate) fn unpark(&mut self, hash: u64) -> Option<Parked> {
        if self.parked.is_empty() {
            return None;
        }
        let parked = self.parked.remove(&hash)?;
        self.waiting.remove(&(parked.parent, hash));
        Some(parked)
    }

    /// One block that waits for this parent.
    pub(crate) fn next_waiting(&self, parent: u64) -> Option<u64> {
        let mut from = self.waiting.range((parent, 0)..=(parent, u64::MAX));
        from.next().map(|&(_, hash)| hash)
    }

    /// All hashes, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Held)> {
        self.entries.iter().map(|entry| {
            let hash = entry.key();
            let copies = if entry.slot & UNUSUAL == 0 {
                Copies::ONE
            } else {
                self.unusual.get(&hash).copied().unwrap_or_default()
            };
            let slot = entry.slot & !UNUSUAL;
            (hash, Held { slot, copies })
        })
    }

    /// The blocks whose parent is not known.
    pub(crate) fn all_parked(&self) -> impl Iterator<Item = (u64, &Parked)> {
        self.parked.iter().map(|(&hash, parked)| (hash, parked))
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        // Nodes of a B-tree are half full at least.
        let trees = self.unusual.len() * 2 * size_of::<(u64, Copies)>()
            + self.parked.len() * 2 * size_of::<(u64, Parked)>()
            + self.waiting.len() * 2 * size_of::<(u64, u64)>();
        self.entries.heap_bytes() + trees
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.entries.check()
    }
}
