//! Sets of lanes, one bit each.
//!
//! A *lane* is one column of the index: the exact blocks of one life of a worker, or its approximate ones. A worker
//! that dies or is cleared gets another lane, so no edge has to be visited then.

use smallvec::SmallVec;

/// The number of a lane.
pub(crate) type Lane = u32;

const BITS: u32 = u64::BITS;

/// A set of lanes: one word for 64 of them. Words that are not stored are zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lanes(SmallVec<[u64; 1]>);

fn split(lane: Lane) -> (usize, u64) {
    ((lane / BITS) as usize, 1 << (lane % BITS))
}

impl Lanes {
    pub(crate) fn words(&self) -> &[u64] {
        &self.0
    }

    pub(crate) fn word(&self, at: usize) -> u64 {
        self.0.get(at).copied().unwrap_or_default()
    }

    pub(crate) fn has(&self, lane: Lane) -> bool {
        let (word, bit) = split(lane);
        self.word(word) & bit != 0
    }

    pub(crate) fn add(&mut self, lane: Lane) {
        let (word, bit) = split(lane);
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= bit;
    }

    pub(crate) fn remove(&mut self, lane: Lane) -> bool {
        let (word, bit) = split(lane);
        let had = self.word(word) & bit != 0;
        if had {
            self.0[word] &= !bit;
        }
        had
    }

    /// Keeps the lanes that are in `others` too.
    pub(crate) fn keep(&mut self, others: &Self) {
        for (at, word) in self.0.iter_mut().enumerate() {
            *word &= others.word(at);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// Whether `lane` is the only one.
    pub(crate) fn is_only(&self, lane: Lane) -> bool {
        let (word, bit) = split(lane);
        self.word(word) == bit
            && self
                .0
                .iter()
                .enumerate()
                .all(|(at, &w)| at == word || w == 0)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Lane> {
        (0..).zip(&self.0).flat_map(|(at, &word)| bits(at, word))
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        if self.0.spilled() {
            self.0.capacity() * size_of::<u64>()
        } else {
            0
        }
    }
}

/// The lanes of one word, ascending.
pub(crate) fn bits(at: u32, mut word: u64) -> impl Iterator<Item = Lane> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(at * BITS + bit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_its_lanes() {
        let mut set = Lanes::default();
        assert!(set.is_empty());
        for lane in [3, 64, 200] {
            set.add(lane);
        }
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 64, 200]);
        assert!(set.has(64) && !set.has(65) && !set.has(1_000));
        assert!(set.remove(64) && !set.remove(64) && !set.remove(1_000));
        let mut kept = set.clone();
        let mut others = Lanes::default();
        others.add(200);
        kept.keep(&others);
        assert!(kept.is_only(200) && !set.is_only(200));
        kept.keep(&Lanes::default());
        assert!(kept.is_empty());
    }
}
