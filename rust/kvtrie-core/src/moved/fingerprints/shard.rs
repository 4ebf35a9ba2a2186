//! The buckets for one range of hashes, resized independently of other shards.

use super::MAX_INLINE;
use super::bucket::{Bucket, CHAINED, SLOTS};
use super::tag::Tag;

/// Average entries per bucket: a shard grows at `MOST`, is rebuilt with `FILL`, and shrinks below `LEAST`.
pub(super) const MOST: usize = 16;
pub(super) const FILL: usize = 14;
const LEAST: usize = 9;

#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) bucket: usize,
    pub(super) slot: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Copies {
    /// Places with a slot each, oldest first.
    pub(super) places: [Place; MAX_INLINE],
    pub(super) len: usize,
    pub(super) chained: Option<Place>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Shard {
    pub(super) buckets: Box<[Bucket]>,
    pub(super) slots: u32,
    /// Entries removed since the filter words were last wiped.
    pub(super) gone: u32,
}

impl Shard {
    #[inline]
    pub(super) fn slots(&self) -> usize {
        self.slots as usize
    }

    #[inline]
    pub(super) fn home(&self, tag: Tag) -> Option<&Bucket> {
        self.buckets.get(tag.home(self.buckets.len()))
    }

    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() {
            0
        } else {
            bucket + 1
        }
    }

    /// Visits the buckets that may hold the tag, until `visit` returns a value.
    #[inline]
    pub(super) fn walk<T>(
        &self,
        tag: Tag,
        mut visit: impl FnMut(usize, &Bucket) -> Option<T>,
    ) -> Option<T> {
        let mut at = tag.home(self.buckets.len());
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            if let Some(found) = visit(at, bucket) {
                return Some(found);
            }
            if !bucket.passes_on(tag) {
                break;
            }
            at = self.next(at);
        }
        None
    }

    #[inline]
    pub(super) fn copies(&self, tag: Tag) -> Copies {
        let mut copies = Copies {
            places: [Place { bucket: 0, slot: 0 }; MAX_INLINE],
            len: 0,
            chained: None,
        };
        self.walk(tag, |bucket, here| {
            if here.may_hold(tag) {
                for slot in here.slots_of(tag) {
                    let place = Place { bucket, slot };
                    if here.is_chained(slot) {
                        copies.chained = Some(place);
                    } else {
                        copies.places[copies.len] = place;
                        copies.len += 1;
                    }
                }
            }
            None::<()>
        });
        copies
    }

    pub(super) fn push(&mut self, tag: Tag, flag: u8, name: u32) {
        let mut at = tag.home(self.buckets.len());
        while self.buckets[at].len() == SLOTS {
            self.buckets[at].passed |= tag.mark();
            at = self.next(at);
        }
        self.buckets[at].push(tag, flag, name);
        self.slots += 1;
    }

    pub(super) fn empty_slot(&mut self, place: Place) {
        let home = self.buckets[place.bucket]
            .tag(place.slot)
            .home(self.buckets.len());
        self.buckets[place.bucket].empty_slot(place.slot);
        self.slots -= 1;
        self.gone += 1;
        let mut at = place.bucket;
        while at != home {
            at = at.checked_sub(1).unwrap_or(self.buckets.len() - 1);
            self.buckets[at].passed = self.marks(at);
        }
    }

    /// The marks that a bucket needs, if the marks of the following buckets are right.
    pub(super) fn marks(&self, bucket: usize) -> u8 {
        let buckets = self.buckets.len();
        let mut marks = 0;
        let mut at = bucket;
        for distance in 1..buckets {
            at = self.next(at);
            let here = &self.buckets[at];
            for tag in (0..here.len()).map(|slot| here.tag(slot)) {
                let home = tag.home(buckets);
                let come = if at < home { at + buckets } else { at } - home;
                if come >= distance {
                    marks |= tag.mark();
                }
            }
            if here.passed == 0 {
                break;
            }
        }
        marks
    }

    pub(super) fn is_sparse(&self) -> bool {
        let buckets = self.buckets.len();
        self.slots() < buckets * LEAST && self.slots().div_ceil(FILL) < buckets
    }

    #[cold]
    pub(super) fn resize(&mut self, slots: usize) {
        let mut resized = Self {
            buckets: vec![Bucket::EMPTY; slots.div_ceil(FILL)].into(),
            slots: 0,
            gone: self.gone,
        };
        // Entries are added by home bucket, because those that overflowed from the last bucket are in the first ones.
        for home in 0..self.buckets.len() {
            let mut at = home;
            for _ in 0..self.buckets.len() {
                let bucket = &self.buckets[at];
                for slot in 0..bucket.len() {
                    let tag = bucket.tag(slot);
                    if tag.home(self.buckets.len()) == home {
                        let flag = bucket.high[slot] & CHAINED;
                        resized.push(tag, flag, bucket.names[slot]);
                    }
                }
                if bucket.passed == 0 {
                    break;
                }
                at = self.next(at);
            }
        }
        *self = resized;
    }

    #[cold]
    pub(super) fn wipe(&mut self, words: &mut [u64]) {
        self.gone = 0;
        words.fill(0);
        for bucket in &self.buckets {
            for tag in (0..bucket.len()).map(|slot| bucket.tag(slot)) {
                words[tag.word()] |= tag.bits();
            }
        }
    }
}
