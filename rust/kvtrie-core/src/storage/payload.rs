//! What an entry stores: a block id and its label.

use crate::ids::ABSENT;

/// The class, the grade and the hops of an entry, in one bit, seven and eight. The grade is a number in the table of
/// the entry's tree (rule P19).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Label(u16);

impl Label {
    pub(crate) const EXACT: Self = Self(0);
    pub(crate) const MAX_HOPS: u16 = (1 << 8) - 1;
    pub(crate) const MAX_GRADE: u8 = (1 << 7) - 1;

    pub(crate) fn approximate(hops: u16, grade: u8) -> Self {
        let grade = u16::from(grade.min(Self::MAX_GRADE));
        Self(1 << 15 | grade << 8 | hops.min(Self::MAX_HOPS))
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

    /// The number of the grade; 0 if the entry is exact.
    pub(crate) fn grade(self) -> u8 {
        self.0.to_le_bytes()[1] & Self::MAX_GRADE
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
    fn a_label_keeps_class_grade_and_hops() {
        assert!(Label::EXACT.is_exact());
        for (hops, grade) in [(0, 0), (7, 3), (255, 0), (0, 127), (255, 127)] {
            let label = Label::approximate(hops, grade);
            assert_eq!(
                (label.is_exact(), label.hops(), label.grade()),
                (false, hops, grade)
            );
            assert_eq!(Label::from_bits(label.bits()), Some(label));
        }
    }
}
