//! Where were these eight tokens stored before? A table from the hash of a window to the names of its places.
//!
//! Moved runs are found through windows of [`WINDOW`] tokens: every few stored positions one is added, and every
//! window of a prompt is looked up. The table nominates and never decides: it keeps a few bits of each hash, so a
//! caller compares tokens before it believes a place. A *name* is a `u32` of the caller's choice, below `u32::MAX`; it
//! has at most one entry at a time, and is removed with the hash that it was added with.
//!
//! # Promises
//!
//! - Every place of a window in a *tree* is among its candidates there, most recently added first. Nothing is dropped: a
//!   caller that wants the newest few takes so many, and knows the number of all.
//! - Of other trees there are at most four candidates among them, and what these hold costs nothing, however many collide.
//! - The same calls on a table of the same seed give the same answers in the same order. Without the candidates that
//!   are places of other windows, answers do not depend on the seed.
//! - A window with 10⁶ places costs what 10⁶ windows cost, within a small factor, and its neighbours nothing.
//! - Nothing is rehashed as a whole: the longest pause is that of one segment, about 2,000 entries.
//!
//! # Costs
//!
//! `add` and `remove` are expected O(1), as is a candidate. A single one waits for three cache lines; a batch asks for
//! those of [`BATCH`] entries before it uses the first. `make bench` measures what keeping the table up costs an insert and
//! an eviction, and what it takes a token.
//!
//! A bucket of 18 entries takes 128 bytes, and a growing segment is 78 to 89 % full: 8 to 9 bytes an entry. Filter and
//! segments take 1 to 2 bytes for each entry that the table was made for, from the start. A place of a window that has
//! more than four takes a link of 12 bytes in a hash table instead, and its tree a head of 16.
//!
//! # Structure
//!
//! The head of a hash chooses a *segment*, a small table of *buckets* of 18 entries in two cache lines, which is
//! rebuilt a few buckets larger or smaller by itself. The next 23 bits are the *tag*, the only bits kept: the home
//! bucket is the tag's share of the segment, so a segment of any size can be rebuilt from tags alone, and a growing
//! one stays 78 to 89 % full. An entry that
//! finds its home full goes to the next bucket with room, and leaves a mark where it passed.
//!
//! Entries of one tag stand in the order in which they came. From the fifth on they share one slot, which says so; they
//! are in linked lists, one for each tree, in a hash table by name, so that any of them leaves at once. Lists of the trees
//! have heads in another table: who looks for the places of one tree meets no other's. While there are such lists, no
//! entry takes a slot of its own, so that those in slots are older.
//!
//! In front lies a *filter* of two bits an entry, in words that the head of the hash names: small enough for the
//! second-level cache where the buckets are not. A removed entry leaves its bits until its segment is wiped, after as
//! many removals as a quarter of its entries.
//!
//! Tried and dropped: looking misses up in the buckets alone, which waits for memory at each window; buckets of nine in
//! one cache line, which are no faster to write, and find twice as many homes full; a filter kept exact at each removal;
//! a filter half as large; NH, a sum of products, as the hash, which needs wider vectors to pay.

mod batch;
mod bucket;
mod candidates;
mod check;
mod hasher;
mod links;
mod order;
mod segment;
mod tag;
#[cfg(test)]
mod tests;

use bucket::{Bucket, CHAINED};
use hasher::random;
use links::Links;
use segment::{MOST, Place, Segment};
use tag::{TAG_BITS, Tag};

pub(crate) use hasher::WindowHasher;

/// Tokens of a window.
pub(crate) const WINDOW: usize = 8;

/// "No place": ends a chain, and is the name of none.
const NO_NAME: u32 = u32::MAX;

/// Places of one window that have a slot each; more of them share one slot, and a chain for each tree.
const MAX_INLINE: usize = 4;

/// Entries of a segment when the table holds as many as it was made for: between half of it and all.
const SEGMENT_ENTRIES: usize = 2048;

/// Most segments, whatever the table is made for.
const MAX_SEGMENT_BITS: u32 = 16;

/// Words of the filter for a segment.
const WORD_BITS: u32 = 8;

/// Steps of a batch: so many cache lines are asked for before the first is used.
const BATCH: usize = 64;

/// A place of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) hash: u64,
    /// The tree that the place is in.
    pub(crate) tree: u32,
    pub(crate) name: u32,
}

/// A number below 2³² as an index.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "callers keep it small")]
fn index(bits: u64) -> usize {
    bits as usize
}

/// The table.
#[derive(Clone, Debug)]
pub(crate) struct Fingerprints {
    /// Two bits an entry, and those of some that are gone.
    filter: Vec<u64>,
    segments: Vec<Segment>,
    segment_bits: u32,
    links: Links,
    len: usize,
    buckets: usize,
}

impl Fingerprints {
    /// A table for `capacity` entries. It takes more, but its longest pause and its false candidates grow with them;
    /// one that stays emptier has the filter and the segments of a full one.
    pub(crate) fn new(seed: u64, capacity: usize) -> Self {
        let segment_bits = (capacity / SEGMENT_ENTRIES + 1)
            .next_power_of_two()
            .ilog2()
            .min(MAX_SEGMENT_BITS);
        let mut state = !seed;
        Self {
            filter: vec![0; 1 << (segment_bits + WORD_BITS)],
            segments: vec![Segment::default(); 1 << segment_bits],
            segment_bits,
            links: Links::new(segment_bits, random(&mut state)),
            len: 0,
            buckets: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.filter.capacity() * size_of::<u64>()
            + self.segments.capacity() * size_of::<Segment>()
            + self.buckets * size_of::<Bucket>()
            + self.links.heap_bytes()
    }

    /// The segment and the tag of a hash.
    #[inline]
    fn locate(&self, hash: u64) -> (usize, Tag) {
        let segment = (hash >> 1) >> (63 - self.segment_bits);
        let tag = (hash << self.segment_bits) >> (64 - TAG_BITS);
        (index(segment), Tag((tag & 0xffff_ffff) as u32))
    }

    /// The word of the filter for a hash.
    #[inline]
    fn word(&self, hash: u64) -> usize {
        index(hash >> (64 - WORD_BITS - self.segment_bits))
    }

    /// The segment and the tag of a hash as one number.
    fn location(number: usize, tag: Tag) -> u64 {
        (number as u64) << TAG_BITS | u64::from(tag.0)
    }

    /// Adds a place of a window. The name has no entry yet.
    pub(crate) fn add(&mut self, entry: Entry) {
        let Entry { hash, tree, name } = entry;
        debug_assert_ne!(name, NO_NAME, "no place has this name");
        let (number, tag) = self.locate(hash);
        let word = self.word(hash);
        self.filter[word] |= tag.bits();
        self.len += 1;
        let segment = &mut self.segments[number];
        if segment.slots() >= segment.buckets.len() * MOST {
            self.buckets -= segment.buckets.len();
            segment.resize(segment.slots() + 1);
            self.buckets += segment.buckets.len();
        }
        let copies = segment.copies(tag);
        if copies.chained.is_none() && copies.len < MAX_INLINE {
            let names = copies
                .places
                .map(|place| segment.buckets[place.bucket].names[place.slot]);
            segment.push(tag, 0, name);
            if copies.len > 0 {
                // Room was found behind the others or between them, but the order is that of age.
                let now = segment.copies(tag);
                let names = names[..copies.len].iter().chain([&name]);
                for (place, name) in now.places.iter().zip(names) {
                    segment.buckets[place.bucket].names[place.slot] = *name;
                }
            }
            return;
        }
        if copies.chained.is_none() {
            segment.push(tag, CHAINED, NO_NAME);
        }
        self.links.add(Self::location(number, tag), tree, name);
    }

    /// Wipes or shrinks a segment that lost entries, where it is time to.
    fn settle(&mut self, number: usize) {
        let segment = &mut self.segments[number];
        if segment.gone > segment.slots / 4 + 8 {
            segment.wipe(&mut self.filter[number << WORD_BITS..][..1 << WORD_BITS]);
        }
        if segment.is_sparse() {
            self.buckets -= segment.buckets.len();
            segment.resize(segment.slots());
            self.buckets += segment.buckets.len();
        }
    }

    /// Removes a place that was added; returns whether it was there. No other hash or tree has an entry of this name.
    pub(crate) fn remove(&mut self, entry: Entry) -> bool {
        let Entry { hash, tree, name } = entry;
        let (number, tag) = self.locate(hash);
        let segment = &mut self.segments[number];
        let found = segment.walk(tag, |bucket, here| {
            let slot = here.slot_of(tag, name)?;
            Some(Place { bucket, slot })
        });
        if let Some(place) = found {
            segment.take_out(place);
            self.settle(number);
        } else {
            let location = Self::location(number, tag);
            let Some(left) = self.links.remove(location, tree, name) else {
                return false;
            };
            if left == 0
                && let Some(place) = segment.copies(tag).chained
            {
                segment.take_out(place);
                self.settle(number);
            }
        }
        self.len -= 1;
        true
    }
}
