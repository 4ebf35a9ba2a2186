//! A map from depths to numbers, stored as ranges. It holds uses as a source and dead marks.

use crate::ids::Depth;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) from: Depth,
    pub(crate) to: Depth,
    pub(crate) value: u64,
}

/// Ascending, disjoint, non-empty ranges. Touching ranges have different numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<Range>);

impl Ranges {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn from_vec(ranges: Vec<Range>) -> Option<Self> {
        let each = ranges.iter().all(|range| range.from < range.to);
        let all = ranges.windows(2).all(|pair| {
            let (a, b) = (pair[0], pair[1]);
            a.to < b.from || a.to == b.from && a.value != b.value
        });
        (each && all).then_some(Self(ranges))
    }

    pub(crate) fn as_slice(&self) -> &[Range] {
        &self.0
    }

    pub(crate) fn num_depths(&self) -> u32 {
        self.0.iter().map(|range| range.to - range.from).sum()
    }

    pub(crate) fn get(&self, depth: Depth) -> Option<u64> {
        let at = self.0.partition_point(|range| range.to <= depth);
        let range = self.0.get(at)?;
        (range.from <= depth).then_some(range.value)
    }

    pub(crate) fn set(&mut self, from: Depth, to: Depth, value: u64) {
        match self.0.last() {
            Some(last) if last.to >= from => {
                self.replace(from, to, Some(value));
            }
            _ => self.0.push(Range { from, to, value }),
        }
    }

    /// Sets the number of those depths that have none and returns how many there were. `ranges` must ascend and be
    /// disjoint. Many new ranges are merged in one pass.
    pub(crate) fn fill(
        &mut self,
        ranges: impl IntoIterator<Item = (Depth, Depth)>,
        value: u64,
    ) -> u32 {
        let gaps = ranges
            .into_iter()
            .flat_map(|(from, to)| self.gaps(from, to));
        let mut new: Vec<Range> = gaps.map(|(from, to)| Range { from, to, value }).collect();
        let count = new.iter().map(|range| range.to - range.from).sum();
        if new.len() < 8 {
            for range in new {
                self.set(range.from, range.to, value);
            }
            return count;
        }
        new.extend_from_slice(&self.0);
        new.sort_unstable_by_key(|range| range.from);
        new.dedup_by(|next, last| {
            let joins = last.to == next.from && last.value == next.value;
            if joins {
                last.to = next.to;
            }
            joins
        });
        self.0 = new;
        count
    }

    /// Removes the numbers of a range of depths and returns how many there were.
    pub(crate) fn clear(&mut self, from: Depth, to: Depth) -> u32 {
        if self.0.is_empty() || from >= to {
            return 0;
        }
        self.replace(from, to, None)
    }

    pub(crate) fn gaps(&self, from: Depth, to: Depth) -> Vec<(Depth, Depth)> {
        let first = self.0.partition_point(|range| range.to <= from);
        let (mut found, mut at) = (Vec::new(), from);
        for range in self.0[first..].iter().take_while(|range| range.from < to) {
            if at < range.from {
                found.push((at, range.from));
            }
            at = range.to;
        }
        if at < to {
            found.push((at, to));
        }
        found
    }

    pub(crate) fn within(&self, from: Depth, to: Depth) -> impl Iterator<Item = Range> {
        let first = self.0.partition_point(|range| range.to <= from);
        let inside = self.0[first..]
            .iter()
            .take_while(move |range| range.from < to);
        inside.map(move |range| Range {
            from: range.from.max(from),
            to: range.to.min(to),
            ..*range
        })
    }

    pub(crate) fn split_front(&mut self, at: Depth) -> Self {
        let first = self.0.partition_point(|range| range.to <= at);
        let after = self.0.split_off(first);
        let mut front = Self(std::mem::replace(&mut self.0, after));
        if let Some(cut) = self.0.first_mut()
            && cut.from < at
        {
            front.0.push(Range { to: at, ..*cut });
            cut.from = at;
        }
        front
    }

    fn replace(&mut self, from: Depth, to: Depth, value: Option<u64>) -> u32 {
        let first = self.0.partition_point(|range| range.to < from);
        let last = first + self.0[first..].partition_point(|range| range.from <= to);
        let (mut had, mut middle) = (0, Range { from, to, value: 0 });
        let (mut before, mut after) = (None, None);
        // Touching ranges are included, and become one range if their numbers are equal.
        for &range in &self.0[first..last] {
            had += range.to.min(to).saturating_sub(range.from.max(from));
            let joins = Some(range.value) == value;
            if range.from < from {
                if joins {
                    middle.from = range.from;
                } else {
                    let to = range.to.min(from);
                    before = Some(Range { to, ..range });
                }
            }
            if range.to > to {
                if joins {
                    middle.to = range.to;
                } else {
                    let from = range.from.max(to);
                    after = Some(Range { from, ..range });
                }
            }
        }
        let middle = value.map(|value| Range { value, ..middle });
        let new = before.into_iter().chain(middle).chain(after);
        self.0.splice(first..last, new);
        had
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.0.capacity() * size_of::<Range>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(ranges: &Ranges) -> Vec<Option<u64>> {
        (0..30).map(|depth| ranges.get(depth)).collect()
    }

    proptest! {
        #[test]
        fn ranges_equal_one_number_per_depth(
            steps in prop::collection::vec((0u32..30, 0u32..30, 0u64..4), 0..40), cut in 0u32..30
        ) {
            let mut ranges = Ranges::default();
            let mut numbers = vec![None; 30];
            for (from, to, value) in steps {
                if from >= to {
                    continue;
                }
                let own = &mut numbers[from as usize..to as usize];
                if value == 0 {
                    let had = own.iter().filter(|number| number.is_some()).count();
                    prop_assert_eq!(ranges.clear(from, to) as usize, had);
                    own.fill(None);
                } else {
                    ranges.set(from, to, value);
                    own.fill(Some(value));
                }
                prop_assert_eq!(&naive(&ranges), &numbers);
                for pair in ranges.0.windows(2) {
                    prop_assert!(pair[0].to < pair[1].from
                        || pair[0].to == pair[1].from && pair[0].value != pair[1].value);
                }
                prop_assert!(ranges.0.iter().all(|range| range.from < range.to));
                let known = numbers.iter().filter(|number| number.is_some()).count();
                prop_assert_eq!(ranges.num_depths() as usize, known);
                let inside = ranges.within(from, to.max(from));
                let inside: Vec<_> = inside.flat_map(|range| (range.from..range.to).map(move |at| (at, range.value))).collect();
                let own = (from..to).filter_map(|at| Some((at, numbers[at as usize]?)));
                prop_assert_eq!(inside, own.collect::<Vec<_>>());
                let gaps: Vec<u32> = ranges.gaps(from, 30).iter().flat_map(|&(a, b)| a..b).collect();
                let absent = |&depth: &u32| numbers[depth as usize].is_none();
                prop_assert_eq!(gaps, (from..30).filter(absent).collect::<Vec<_>>());
                // Every other depth gets a number, so there are as many ranges as numbers.
                let odd = (0..30).filter(|at| at % 2 == 1);
                let mut filled = ranges.clone();
                let count = filled.fill(odd.clone().map(|at| (at, at + 1)), 3);
                prop_assert_eq!(count as usize, odd.clone().filter(|&at| numbers[at as usize].is_none()).count());
                let expected: Vec<_> = (0..30u32).map(|at| numbers[at as usize].or((at % 2 == 1).then_some(3))).collect();
                prop_assert_eq!(naive(&filled), expected);
                prop_assert!(Ranges::from_vec(filled.0.clone()).is_some());
            }
            let front = ranges.split_front(cut);
            let cut = cut as usize;
            prop_assert_eq!(&naive(&front)[..cut], &numbers[..cut]);
            prop_assert_eq!(&naive(&ranges)[cut..], &numbers[cut..]);
            prop_assert!(naive(&front)[cut..].iter().chain(&naive(&ranges)[..cut]).all(Option::is_none));
        }
    }
}
