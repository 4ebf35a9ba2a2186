//! A table from the hash of a window to the places where the same eight tokens are cached.
//!
//! Moved runs are found through windows of [`WINDOW`] tokens: one per few stored positions is added, and every window
//! of a prompt is looked up. The table keeps a few bits of each hash, so it only nominates places. Places are *named*
//! by a `u32` of the caller's choice, below `u32::MAX`. A name has at most one entry at a time, which is removed with
//! the hash that it was added with.
//!
//! # Promises
//!
//! - Every place of a window in a *tree* is among its candidates there, most recently added first. Nothing is dropped.
//! - At most four candidates are of other trees. Other trees' entries cost nothing else, however many collide.
//! - The same calls on a table of the same seed return the same candidates in the same order. Only candidates that are
//!   places of other windows depend on the seed.
//! - A window with 10⁶ places costs what 10⁶ windows cost, within a small factor, and other windows nothing.
//! - Nothing is rehashed as a whole: the longest pause is that of one shard, about 2,000 entries.
//!
//! # Costs
//!
//! `add`, `remove` and each candidate are expected O(1). A single `add` or `remove` waits for three cache lines; a
//! batch requests those of [`BATCH`] entries before it uses the first. A bucket of 18 entries takes 128 bytes, and a
//! growing shard is 78 to 89 % full: 8 to 9 bytes per entry. Filter and shards take 1 to 2 bytes per entry of the
//! capacity, from the start. A place of a window with more than four takes a link of 12 bytes in a hash table instead,
//! and its tree a head of 16.
//!
//! # Structure
//!
//! The high bits of a hash choose a *shard* of *buckets*. Shards are rebuilt one at a time, a few buckets larger or
//! smaller. The next 23 bits are the *tag*, the only bits kept. The home bucket is proportional to the tag, so a shard
//! of any size can be rebuilt from tags alone. An entry whose home is full goes to the next bucket with room, and marks
//! the buckets that it passed.
//!
//! Entries of one tag are in the order in which they were added. From the fifth on they share one flagged slot, and are
//! in linked lists by name, one per tree, so that any can be removed at once and a search meets no entry of another
//! tree. While such lists exist, no entry of the tag takes a slot of its own, so entries in slots are older.
//!
//! A *filter* of two bits per entry, in words chosen by the high bits of the hash, is read first. It fits the
//! second-level cache where the buckets do not. A removed entry leaves its bits until its shard is wiped, after as many
//! removals as a quarter of its entries.
//!
//! Rejected: no filter, which waits for memory at each window; buckets of nine in one cache line, which are no faster
//! to write and find twice as many homes full; an exact filter; a filter half as large; NH, a sum of products, as the
//! hash, which needs wider vectors to pay.

mod batch;
mod bucket;
mod candidates;
mod check;
mod hasher;
mod links;
mod order;
mod shard;
mod tag;
#[cfg(test)]
mod tests;

use bucket::{Bucket, CHAINED};
use hasher::random;
use links::Links;
use shard::{MOST, Place, Shard};
use tag::{TAG_BITS, Tag};

pub(crate) use hasher::WindowHasher;

pub(crate) const WINDOW: usize = 8;

const NO_NAME: u32 = u32::MAX;

/// Places of one window that get a slot each. Further ones share a slot.
const MAX_INLINE: usize = 4;

/// Entries of a shard when the table is full: between half of this and all of it.
const SHARD_ENTRIES: usize = 2048;

/// The most shards, as a power of two.
const MAX_SHARD_BITS: u32 = 16;

/// Filter words per shard, as a power of two.
const WORD_BITS: u32 = 8;

/// Number of entries whose cache lines are requested before the first is used.
const BATCH: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) hash: u64,
    pub(crate) tree: u32,
    pub(crate) name: u32,
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "callers keep it small")]
fn index(bits: u64) -> usize {
    bits as usize
}

#[derive(Clone, Debug)]
pub(crate) struct Fingerprints {
    filter: Vec<u64>,
    shards: Vec<Shard>,
    shard_bits: u32,
    links: Links,
    len: usize,
    buckets: usize,
}

impl Fingerprints {
    /// A table for `capacity` entries. It takes more, but then its longest pause and its false candidates grow.
    pub(crate) fn new(seed: u64, capacity: usize) -> Self {
        let shard_bits = (capacity / SHARD_ENTRIES + 1)
            .next_power_of_two()
            .ilog2()
            .min(MAX_SHARD_BITS);
        let mut state = !seed;
        Self {
            filter: vec![0; 1 << (shard_bits + WORD_BITS)],
            shards: vec![Shard::default(); 1 << shard_bits],
            shard_bits,
            links: Links::new(shard_bits, random(&mut state)),
            len: 0,
            buckets: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.filter.capacity() * size_of::<u64>()
            + self.shards.capacity() * size_of::<Shard>()
            + self.buckets * size_of::<Bucket>()
            + self.links.heap_bytes()
    }

    #[inline]
    fn locate(&self, hash: u64) -> (usize, Tag) {
        let shard = (hash >> 1) >> (63 - self.shard_bits);
        let tag = (hash << self.shard_bits) >> (64 - TAG_BITS);
        (index(shard), Tag((tag & 0xffff_ffff) as u32))
    }

    #[inline]
    fn word(&self, hash: u64) -> usize {
        index(hash >> (64 - WORD_BITS - self.shard_bits))
    }

    fn location(number: usize, tag: Tag) -> u64 {
        (number as u64) << TAG_BITS | u64::from(tag.0)
    }

    /// Adds an entry. Its name must not be in the table.
    pub(crate) fn add(&mut self, entry: Entry) {
        let Entry { hash, tree, name } = entry;
        debug_assert_ne!(name, NO_NAME, "no place has this name");
        let (number, tag) = self.locate(hash);
        let word = self.word(hash);
        self.filter[word] |= tag.bits();
        self.len += 1;
        let shard = &mut self.shards[number];
        if shard.slots() >= shard.buckets.len() * MOST {
            self.buckets -= shard.buckets.len();
            shard.resize(shard.slots() + 1);
            self.buckets += shard.buckets.len();
        }
        let copies = shard.copies(tag);
        if copies.chained.is_none() && copies.len < MAX_INLINE {
            let names = copies
                .places
                .map(|place| shard.buckets[place.bucket].names[place.slot]);
            shard.push(tag, 0, name);
            if copies.len > 0 {
                // Room was found in another bucket, so the names of the tag are put back into the order of their age.
                let now = shard.copies(tag);
                let names = names[..copies.len].iter().chain([&name]);
                for (place, name) in now.places.iter().zip(names) {
                    shard.buckets[place.bucket].names[place.slot] = *name;
                }
            }
            return;
        }
        if copies.chained.is_none() {
            shard.push(tag, CHAINED, NO_NAME);
        }
        self.links.add(Self::location(number, tag), tree, name);
    }

    fn settle(&mut self, number: usize) {
        let shard = &mut self.shards[number];
        if shard.gone > shard.slots / 4 + 8 {
            shard.wipe(&mut self.filter[number << WORD_BITS..][..1 << WORD_BITS]);
        }
        if shard.is_sparse() {
            self.buckets -= shard.buckets.len();
            shard.resize(shard.slots());
            self.buckets += shard.buckets.len();
        }
    }

    /// Removes an entry and returns whether it was there. No other hash or tree may have its name.
    pub(crate) fn remove(&mut self, entry: Entry) -> bool {
        let Entry { hash, tree, name } = entry;
        let (number, tag) = self.locate(hash);
        let shard = &mut self.shards[number];
        let found = shard.walk(tag, |bucket, here| {
            let slot = here.slot_of(tag, name)?;
            Some(Place { bucket, slot })
        });
        if let Some(place) = found {
            shard.empty_slot(place);
            self.settle(number);
        } else {
            let location = Self::location(number, tag);
            let Some(left) = self.links.remove(location, tree, name) else {
                return false;
            };
            if left == 0
                && let Some(place) = shard.copies(tag).chained
            {
                shard.empty_slot(place);
                self.settle(number);
            }
        }
        self.len -= 1;
        true
    }
}
