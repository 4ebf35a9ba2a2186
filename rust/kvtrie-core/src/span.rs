//! Spans of tokens with a kind, and the tags that an edge carries.

use crate::error::{Result, invalid};

/// A half-open token range with the name of its kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// First token.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
    /// What the tokens are.
    pub kind: String,
}

/// The kinds that every index knows, by bit.
pub const BUILT_IN_KINDS: [&str; 7] = [
    "system",
    "user",
    "reasoning",
    "answer",
    "tool_call",
    "tool_result",
    "lookahead",
];

/// The most kinds that one index can have.
pub const MAX_KINDS: usize = 64;

#[derive(Clone, Debug)]
pub(crate) struct Kinds(Vec<String>);

impl Default for Kinds {
    fn default() -> Self {
        Self(BUILT_IN_KINDS.map(String::from).to_vec())
    }
}

impl Kinds {
    pub(crate) fn names(&self) -> &[String] {
        &self.0
    }

    /// Returns `None` if an index cannot have these names.
    pub(crate) fn from_names(names: Vec<String>) -> Option<Self> {
        let mut sorted: Vec<&String> = names.iter().collect();
        sorted.sort_unstable();
        let distinct = sorted.windows(2).all(|pair| pair[0] < pair[1]);
        let named = sorted.first().is_none_or(|name| !name.is_empty());
        let known = names.len() <= MAX_KINDS
            && names.len() >= BUILT_IN_KINDS.len()
            && names.iter().zip(BUILT_IN_KINDS).all(|(a, b)| a == b);
        (distinct && named && known).then_some(Self(names))
    }

    /// Checks spans over a sequence of `len` tokens, without adding new kinds.
    pub(crate) fn check(&self, spans: &[Span], len: usize, call: &'static str) -> Result<()> {
        let mut new: Vec<&str> = Vec::new();
        for span in spans {
            let (start, end, kind) = (span.start, span.end, span.kind.as_str());
            if start > end || end > len {
                return Err(invalid!(
                    call,
                    "spans has [{start}, {end}); it must ascend and lie in [0, {len}], the sequence"
                ));
            }
            if kind.is_empty() {
                return Err(invalid!(
                    call,
                    "the kind of the span [{start}, {end}) is empty"
                ));
            }
            if start < end && self.bit(kind).is_none() && !new.contains(&kind) {
                new.push(kind);
            }
            let total = self.0.len() + new.len();
            if total > MAX_KINDS {
                return Err(invalid!(
                    call,
                    "the kind {kind:?} of spans would be number {total}; an index has at most {MAX_KINDS}"
                ));
            }
        }
        Ok(())
    }

    /// Returns the bit of a kind. A new kind takes the next bit; [`Self::check`] must have accepted it.
    pub(crate) fn intern(&mut self, kind: &str) -> u64 {
        let bit = self.bit(kind).unwrap_or_else(|| {
            self.0.push(kind.to_owned());
            self.0.len() - 1
        });
        1 << bit
    }

    pub(crate) fn mask<'a>(&self, kinds: impl IntoIterator<Item = &'a String>) -> u64 {
        let bits = kinds.into_iter().filter_map(|kind| self.bit(kind));
        bits.fold(0, |mask, bit| mask | 1 << bit)
    }

    fn bit(&self, kind: &str) -> Option<usize> {
        self.0.iter().position(|known| known == kind)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TagRun {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) mask: u64,
}

impl TagRun {
    /// Returns the runs that overlap `start..end`, clipped to it. `runs` must ascend.
    pub(crate) fn within(
        runs: &[Self],
        start: usize,
        end: usize,
    ) -> impl DoubleEndedIterator<Item = Self> {
        let first = runs.partition_point(|run| run.end <= start);
        let last = first + runs[first..].partition_point(|run| run.start < end);
        runs[first..last].iter().map(move |run| Self {
            start: run.start.max(start),
            end: run.end.min(end),
            mask: run.mask,
        })
    }
}

/// Ascending, disjoint runs with non-empty masks, in absolute positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tags(Vec<TagRun>);

impl Tags {
    pub(crate) fn runs(&self) -> &[TagRun] {
        &self.0
    }

    /// Returns `None` if the runs are not in that form, or two touching runs have the same mask.
    pub(crate) fn from_runs(runs: Vec<TagRun>) -> Option<Self> {
        let each = runs.iter().all(|run| run.start < run.end && run.mask != 0);
        let all = runs.windows(2).all(|pair| {
            let (a, b) = (pair[0], pair[1]);
            a.end < b.start || a.end == b.start && a.mask != b.mask
        });
        (each && all).then_some(Self(runs))
    }

    pub(crate) fn add(&mut self, start: usize, end: usize, mask: u64) {
        self.rewrite(start, end, |old| old | mask);
    }

    /// Adds runs of the same form. O(runs of both); a few runs cost O(log runs) each.
    pub(crate) fn merge(&mut self, more: &[TagRun]) {
        if more.len() < 8 {
            for run in more {
                self.add(run.start, run.end, run.mask);
            }
            return;
        }
        let (mut out, mut at) = (Vec::<TagRun>::with_capacity(self.0.len() + more.len()), 0);
        let (mut own, mut new) = (&self.0[..], more);
        loop {
            // Finds the next boundary of a run, and the kinds up to there.
            let (mut end, mut mask) = (usize::MAX, 0);
            for runs in [&mut own, &mut new] {
                while let Some((run, rest)) = runs.split_first() {
                    if run.end > at {
                        end = end.min(if run.start > at { run.start } else { run.end });
                        mask |= if run.start > at { 0 } else { run.mask };
                        break;
                    }
                    *runs = rest;
                }
            }
            if end == usize::MAX {
                break;
            }
            let start = std::mem::replace(&mut at, end);
            match out.last_mut() {
                Some(run) if run.end == start && run.mask == mask => run.end = end,
                _ if mask != 0 => out.push(TagRun { start, end, mask }),
                _ => {}
            }
        }
        self.0 = out;
    }

    pub(crate) fn clear(&mut self, start: usize, end: usize) {
        self.rewrite(start, end, |_| 0);
    }

    pub(crate) fn union(&self, start: usize, end: usize) -> u64 {
        TagRun::within(&self.0, start, end).fold(0, |mask, run| mask | run.mask)
    }

    /// Returns the runs with a kind of `mask`, ascending and clipped to `start..end`.
    pub(crate) fn with(
        &self,
        start: usize,
        end: usize,
        mask: u64,
    ) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        TagRun::within(&self.0, start, end)
            .filter(move |run| run.mask & mask != 0)
            .map(|run| (run.start, run.end))
    }

    pub(crate) fn split_front(&mut self, at: usize) -> Self {
        let mut front = self.clone();
        front.clear(at, usize::MAX);
        self.clear(0, at);
        front
    }

    fn rewrite(&mut self, start: usize, end: usize, change: impl Fn(u64) -> u64) {
        if start >= end {
            return;
        }
        let first = self.0.partition_point(|run| run.end <= start);
        let last = first + self.0[first..].partition_point(|run| run.start < end);
        // The neighbours on both sides are included, so that touching equal masks become one run.
        let (from, to) = (first.saturating_sub(1), (last + 1).min(self.0.len()));
        let mut out: Vec<TagRun> = Vec::with_capacity(to - from + 2);
        let mut push = |start: usize, end: usize, mask: u64| {
            if start < end && mask != 0 {
                match out.last_mut() {
                    Some(run) if run.end == start && run.mask == mask => run.end = end,
                    _ => out.push(TagRun { start, end, mask }),
                }
            }
        };
        let mut at = start;
        for run in &self.0[from..to] {
            if run.end <= start {
                push(run.start, run.end, run.mask);
            } else if run.start >= end {
                push(at, end, change(0));
                at = end;
                push(run.start, run.end, run.mask);
            } else {
                push(run.start, start.max(run.start), run.mask);
                push(at, run.start.max(at), change(0));
                push(run.start.max(start), run.end.min(end), change(run.mask));
                at = run.end.min(end);
                push(end.max(run.start), run.end, run.mask);
            }
        }
        if at < end && self.0[from..to].last().is_none_or(|run| run.end <= end) {
            push(at, end, change(0));
        }
        self.0.splice(from..to, out);
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.0.capacity() * size_of::<TagRun>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(tags: &Tags, len: usize) -> Vec<u64> {
        (0..len).map(|at| tags.union(at, at + 1)).collect()
    }

    proptest! {
        #[test]
        fn many_tags_are_added_as_one_after_the_other(
            old in prop::collection::vec((0usize..60, 1usize..9, 1u64..4), 0..12),
            new in prop::collection::vec((1usize..5, 1usize..5, 1u64..4), 0..14),
        ) {
            let mut tags = Tags::default();
            for (start, len, mask) in old {
                tags.add(start, start + len, mask);
            }
            let (mut runs, mut at) = (Vec::new(), 0);
            for (gap, len, mask) in new {
                let start = at + gap - 1;
                at = start + len;
                runs.push(TagRun { start, end: at, mask });
            }
            let mut one_by_one = tags.clone();
            for run in &runs {
                one_by_one.add(run.start, run.end, run.mask);
            }
            tags.merge(&runs);
            prop_assert_eq!(tags, one_by_one);
        }

        #[test]
        fn tags_equal_one_mask_per_token(
            steps in prop::collection::vec((0usize..40, 0usize..40, 0u64..8, 0u8..3), 0..40)
        ) {
            let mut tags = Tags::default();
            let mut masks = vec![0u64; 40];
            for (start, end, mask, kind) in steps {
                match kind {
                    0 | 1 if start < end => {
                        tags.add(start, end, mask);
                        masks[start..end].iter_mut().for_each(|old| *old |= mask);
                    }
                    2 if start < end => {
                        tags.clear(start, end);
                        masks[start..end].fill(0);
                    }
                    _ => {}
                }
                prop_assert_eq!(naive(&tags, 40), masks.clone());
                for pair in tags.0.windows(2) {
                    prop_assert!(pair[0].end < pair[1].start || pair[0].mask != pair[1].mask);
                    prop_assert!(pair[0].end <= pair[1].start);
                }
                prop_assert!(tags.0.iter().all(|run| run.start < run.end && run.mask != 0));
            }
            let mut back = tags.clone();
            let front = back.split_front(20);
            prop_assert_eq!(naive(&front, 20), masks[..20].to_vec());
            prop_assert_eq!(naive(&back, 40)[20..].to_vec(), masks[20..].to_vec());
            prop_assert!(naive(&front, 40)[20..].iter().all(|mask| *mask == 0));
        }
    }
}
