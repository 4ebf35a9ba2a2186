//! What an entry stores: a block id and its label.

use crate::ids::ABSENT;

/// The class and the hops of an entry, in one bit and fifteen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Label(u16);

impl Label {
    pub(crate) const EXACT: Self = Self(0);
    pub(crate) const MAX_HOPS: u16 = (1 << 15) - 1;

    pub(crate) fn approximate(hops: u16) -> Self {
        Self(1 << 15 | hops.min(Self::MAX_HOPS))
    }

    pub(crate) fn from_bits(bits: u16) -> Option<Self> {
        (bits == 0 || bits >> 15 == 1).then_some(Self(bits))
    }

    pub(crate) fn bits(self) -> u16 {
        self.0
    }

    pub(crate) fn is_exact(self) -> bool {
        self.0 >> 15 == 0
    }

    pub(crate) fn hops(self) -> u16 {
        self.0 & Self::MAX_HOPS
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Payload {
    pub(crate) id: u32,
    pub(crate) label: Label,
}

impl Payload {
    #[cfg(test)]
    pub(crate) const HOLE: Self = Self {
        id: ABSENT,
        label: Label::EXACT,
    };

    pub(crate) fn is_present(self) -> bool {
        self.id != ABSENT
    }

    pub(crate) fn is_exact(self) -> bool {
        self.is_present() && self.label.is_exact()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_keeps_class_and_hops() {
        assert!(Label::EXACT.is_exact());
        let label = Label::approximate(7);
        assert_eq!((label.is_exact(), label.hops()), (false, 7));
    }
}
