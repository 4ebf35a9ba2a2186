//! The places that a window may stand at.

use super::bucket::Bucket;
use super::links::Links;
use super::tag::Tag;
use super::{Fingerprints, MAX_INLINE, NO_NAME, index};

/// Hashes that are screened together.
const SCREEN: usize = 256;

impl Fingerprints {
    /// The places of a window, most recently added first, among which may be some of other windows.
    #[inline]
    pub(crate) fn candidates(&self, hash: u64) -> Candidates<'_> {
        let (segment, tag) = self.locate(hash);
        let segment = &self.segments[segment];
        let mut found = Candidates {
            links: &self.links,
            names: [NO_NAME; MAX_INLINE],
            left: 0,
            chained: false,
        };
        segment.walk(tag, |_, bucket| {
            if bucket.may_hold(tag) {
                for slot in bucket.slots_of(tag) {
                    found.names[found.left] = bucket.names[slot];
                    found.left += 1;
                    found.chained |= bucket.is_chained(slot);
                }
            }
            None::<()>
        });
        if found.chained {
            let newest = self.links.get(found.names[0]);
            found.left = newest.map_or(0, |link| link.newer as usize);
        }
        found
    }

    /// Appends the positions in `hashes` of those that have candidates, and of hardly any other.
    ///
    /// Much faster than asking for the candidates of each where few have any: three rounds over some hundred hashes,
    /// each of which reads one cache line for what the last one left, and waits for none before it asks for the next.
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
                let (segment, tag) = self.locate(chunk[kept[at] as usize]);
                let home = self.segments[segment].home(tag);
                kept[num_held] = kept[at];
                num_held += usize::from(home.is_some_and(|b| b.may_hold(tag) | b.passes_on(tag)));
            }
            for &at in &kept[..num_held] {
                let (segment, tag) = self.locate(chunk[at as usize]);
                let held = |_, bucket: &Bucket| bucket.may_hold(tag).then_some(());
                if self.segments[segment].walk(tag, held).is_some() {
                    found.push(first + at);
                }
            }
        }
    }
}

/// Places that a window may stand at, most recently added first; knows how many they are.
#[derive(Clone, Debug)]
pub(crate) struct Candidates<'a> {
    links: &'a Links,
    /// Those left, oldest first; of a chain, the next.
    names: [u32; MAX_INLINE],
    left: usize,
    chained: bool,
}

impl Iterator for Candidates<'_> {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        self.left = self.left.checked_sub(1)?;
        if !self.chained {
            return Some(self.names[self.left]);
        }
        let name = self.names[0];
        if self.left > 0 {
            self.names[0] = self.links.get(name)?.older;
        }
        Some(name)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Candidates<'_> {}
