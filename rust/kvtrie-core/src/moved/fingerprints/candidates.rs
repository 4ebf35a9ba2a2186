//! Finds the places where a window may be cached.

use super::bucket::Bucket;
use super::links::Links;
use super::tag::Tag;
use super::{Fingerprints, MAX_INLINE, NO_NAME, index};

const SCREEN: usize = 256;

impl Fingerprints {
    /// The places of a hash in a tree, most recently added first. Some may be of other windows, and up to four of other
    /// trees.
    #[inline]
    pub(crate) fn candidates(&self, hash: u64, tree: u32) -> Candidates<'_> {
        let (number, tag) = self.locate(hash);
        let mut found = Candidates {
            links: &self.links,
            next: NO_NAME,
            chained: 0,
            names: [NO_NAME; MAX_INLINE],
            inline: 0,
        };
        let shard = &self.shards[number];
        let copies = shard.copies(tag);
        for place in &copies.places[..copies.len] {
            found.names[found.inline] = shard.buckets[place.bucket].names[place.slot];
            found.inline += 1;
        }
        if copies.chained.is_some() {
            let location = Self::location(number, tag);
            if let Some((newest, count)) = self.links.newest(location, tree) {
                (found.next, found.chained) = (newest, count);
            }
        }
        found
    }

    /// Appends the positions in `hashes` of those that have candidates, and of very few others. If few have any, this
    /// is much faster than `candidates` for each: it reads one cache line per remaining hash in each of three rounds,
    /// and requests the next before the last has arrived.
    pub(crate) fn screen(&self, hashes: &[u64], found: &mut Vec<u32>) {
        let mut kept = [0_u32; SCREEN];
        for (chunk, first) in hashes.chunks(SCREEN).zip((0_u32..).step_by(SCREEN)) {
            let mut num_kept = 0;
            for (at, &hash) in (0_u32..).zip(chunk) {
                let word = self.filter[self.word(hash)];
                let Tag(tag) = self.locate(hash).1;
                kept[num_kept % SCREEN] = at;
                num_kept += index(word >> (tag & 63) & word >> (tag >> 6 & 63) & 1);
            }
            let mut num_held = 0;
            for at in 0..num_kept {
                let (shard, tag) = self.locate(chunk[kept[at] as usize]);
                let home = self.shards[shard].home(tag);
                kept[num_held] = kept[at];
                num_held += usize::from(home.is_some_and(|b| b.may_hold(tag) | b.passes_on(tag)));
            }
            for &at in &kept[..num_held] {
                let (shard, tag) = self.locate(chunk[at as usize]);
                let held = |_, bucket: &Bucket| bucket.may_hold(tag).then_some(());
                if self.shards[shard].walk(tag, held).is_some() {
                    found.push(first + at);
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Candidates<'a> {
    links: &'a Links,
    /// The next place of the chain. `chained` places of it are left.
    next: u32,
    chained: usize,
    /// Places with a slot each, oldest first. The first `inline` of them are left.
    names: [u32; MAX_INLINE],
    inline: usize,
}

impl Candidates<'_> {
    /// The remaining places that may be of another tree.
    pub(crate) fn of_any_tree(&self) -> &[u32] {
        &self.names[..self.inline]
    }
}

impl Iterator for Candidates<'_> {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        if self.chained == 0 {
            self.inline = self.inline.checked_sub(1)?;
            return Some(self.names[self.inline]);
        }
        let name = self.next;
        self.chained -= 1;
        if self.chained > 0 {
            self.next = self.links.get(name)?.older;
        }
        Some(name)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.chained + self.inline;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Candidates<'_> {}
