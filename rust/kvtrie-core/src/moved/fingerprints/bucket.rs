//! A bucket of the table: entries in two cache lines.

use super::NO_NAME;
use super::tag::Tag;

pub(super) const SLOTS: usize = 18;

/// Flags a slot that stands for chains. It has no name.
pub(super) const CHAINED: u8 = 0x80;

/// Two cache lines of entries. The first line suffices to see whether a tag may be here. Entries of one tag are oldest
/// first.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
pub(super) struct Bucket {
    low: [u16; SLOTS],
    pub(super) high: [u8; SLOTS],
    len: u8,
    /// Marks of the entries that were passed to a later bucket because this one was full.
    pub(super) passed: u8,
    pub(super) names: [u32; SLOTS],
}

impl Bucket {
    pub(super) const EMPTY: Self = Self {
        low: [0; SLOTS],
        high: [0; SLOTS],
        len: 0,
        passed: 0,
        names: [NO_NAME; SLOTS],
    };

    #[inline]
    pub(super) fn len(&self) -> usize {
        // The minimum changes no value; it lets the compiler remove the bounds checks of every slot.
        usize::from(self.len).min(SLOTS)
    }

    #[inline]
    pub(super) fn tag(&self, slot: usize) -> Tag {
        Tag(u32::from(self.high[slot] & !CHAINED) << 16 | u32::from(self.low[slot]))
    }

    #[inline]
    pub(super) fn is_chained(&self, slot: usize) -> bool {
        self.high[slot] & CHAINED != 0
    }

    #[inline]
    pub(super) fn passes_on(&self, tag: Tag) -> bool {
        self.passed & tag.mark() != 0
    }

    /// Whether a slot may hold the tag; a wrong `true` is rare. Compares all slots at once.
    #[inline]
    pub(super) fn may_hold(&self, tag: Tag) -> bool {
        let wanted = tag.low();
        self.low
            .iter()
            .fold(0, |any, &low| any | u16::from(low == wanted))
            != 0
    }

    pub(super) fn slots_of(&self, tag: Tag) -> impl Iterator<Item = usize> {
        (0..self.len()).filter(move |&slot| self.tag(slot) == tag)
    }

    #[inline]
    pub(super) fn slot_of(&self, tag: Tag, name: u32) -> Option<usize> {
        let mut slot = SLOTS;
        for (at, &here) in self.names.iter().enumerate() {
            slot = if here == name { at } else { slot };
        }
        (slot < self.len() && self.tag(slot) == tag).then_some(slot)
    }

    pub(super) fn push(&mut self, tag: Tag, flag: u8, name: u32) {
        let slot = self.len();
        self.low[slot] = tag.low();
        self.high[slot] = tag.high() | flag;
        self.names[slot] = name;
        self.len += 1;
    }

    pub(super) fn empty_slot(&mut self, slot: usize) {
        let last = self.len() - 1;
        let moved = self.low[last];
        if self.low.iter().filter(|&&low| low == moved).count() == 1 {
            self.low[slot] = moved;
            self.high[slot] = self.high[last];
            self.names[slot] = self.names[last];
        } else {
            // The last entry may not move before another entry of its tag, so all following ones move down.
            self.low.copy_within(slot + 1..=last, slot);
            self.high.copy_within(slot + 1..=last, slot);
            self.names.copy_within(slot + 1..=last, slot);
        }
        self.low[last] = 0;
        self.names[last] = NO_NAME;
        self.len -= 1;
    }
}
