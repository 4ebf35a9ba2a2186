//! Which tokens must be computed again for the windows of further groups, next to moved runs (G9).

use std::ops::Range;

use crate::groups::GroupKind;
use crate::plan::{Class, GroupPart, ReusePlan};

impl ReusePlan {
    /// Ranges of the prompt of which a group with a window needs KV that the plan does not have: the last `window − 1`
    /// tokens before each range to compute and before the prompt's end, without those that are computed, those in
    /// [`group`](Self::group), and those that [`moves_of_group`](Self::moves_of_group) copies. Empty for a state, a group
    /// that the index does not have, and an exact plan, except one that [`recompute`](crate::RadixIndex::recompute) made
    /// exact.
    ///
    /// The engine computes the tokens again for the layers of this group, from the KV that group 0 has. The result is
    /// approximate, and so is all that is computed after it.
    ///
    /// # Complexity
    /// O(segments · log segments).
    #[must_use]
    pub fn rebuild(&self, group: usize) -> Vec<(usize, usize)> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (_, missing) in self
            .group(group)
            .into_iter()
            .flat_map(|part| self.missing(part))
        {
            match ranges.last_mut() {
                Some(last) if missing.start <= last.end => last.end = last.end.max(missing.end),
                _ => ranges.push(missing),
            }
        }
        ranges
            .into_iter()
            .map(|range| (range.start, range.end))
            .collect()
    }

    /// The first token of a window that has to be rebuilt.
    pub(crate) fn first_rebuilt(&self) -> Option<usize> {
        let missing = self.groups.iter().flat_map(|part| self.missing(part));
        missing.map(|(_, range)| range.start).min()
    }

    /// The first token that is computed after a window that has to be rebuilt, or the prompt's end.
    pub(super) fn first_after_rebuilt(&self) -> Option<usize> {
        let missing = self.groups.iter().flat_map(|part| self.missing(part));
        missing.map(|(next, _)| next).min()
    }

    /// For each range to compute and for the prompt's end: its first token, with the parts of the window before it that
    /// are neither computed, nor in place, nor copied. Ascending by their ends.
    fn missing(&self, part: &GroupPart) -> Vec<(usize, Range<usize>)> {
        let mut found = Vec::new();
        let mut next = 0;
        for (before, lacking) in self.lacking(part) {
            let mut at = lacking.start;
            while let Some(carried) = part.carried.get(next).filter(|own| own.start < lacking.end) {
                if at < carried.start {
                    found.push((before, at..carried.start));
                }
                at = at.max(carried.end());
                next += 1;
            }
            if at < lacking.end {
                found.push((before, at..lacking.end));
            }
        }
        found
    }

    /// For each range to compute and for the prompt's end: its first token, with the parts of the window before it that
    /// are neither computed nor in place. Ascending by their ends.
    pub(crate) fn lacking(&self, part: &GroupPart) -> Vec<(usize, Range<usize>)> {
        let GroupKind::Window { window } = part.kind else {
            return Vec::new();
        };
        let len = self.snapshot.tokens.len();
        let in_place = self.num_blocks_in_place * self.block_size;
        let mut found = Vec::new();
        let computed = self.segments.iter();
        let computed = computed.filter(|segment| segment.class == Class::Compute);
        let starts = computed.map(|segment| segment.start).chain([len]);
        let mut before = 0;
        for next in starts.filter(|&next| next > 0) {
            // What is missing before the range before was found there, because its window began no later.
            let first = next.saturating_sub(window - 1).max(before);
            before = next;
            let from = self
                .segments
                .partition_point(|segment| segment.end <= first);
            for segment in &self.segments[from..] {
                if segment.start >= next {
                    break;
                }
                if segment.class == Class::Compute {
                    continue;
                }
                let mut end = segment.end.min(next);
                if segment.end <= in_place {
                    end = end.min(part.start);
                }
                let start = segment.start.max(first);
                if start < end {
                    found.push((next, start..end));
                }
            }
        }
        found
    }
}
