//! Marks and removes blocks in the model (D8, D10, D11), with the steps that compare these calls.

use std::cmp::Reverse;

use kvtrie_core::TokenSequence;
use proptest::prelude::*;

use super::naive::{Naive, Prefix};
use super::{Pair, raw};

/// What `remove_spans` returns.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Removed {
    pub(crate) freed: Vec<u32>,
    pub(crate) kept: Vec<u32>,
    pub(crate) condemned: Vec<u32>,
}

impl Naive {
    /// The prefixes of the cached blocks wholly inside the ranges, and whether each is extended. `None` if the ranges
    /// are bad.
    fn inside(
        &self,
        namespace: usize,
        tokens: &[u32],
        ranges: &[(usize, usize)],
    ) -> Option<Vec<(Prefix, bool)>> {
        let mut wanted = vec![false; tokens.len()];
        let mut last_end = 0;
        for &(start, end) in ranges {
            if start < last_end || end < start || end > tokens.len() {
                return None;
            }
            wanted[start..end].fill(true);
            last_end = end;
        }
        let whole = (0..tokens.len() / self.block_size).filter(|block| {
            let first = block * self.block_size;
            wanted[first..first + self.block_size]
                .iter()
                .all(|own| *own)
        });
        let prefixes = whole.map(|block| self.prefix(namespace, tokens, block));
        let is_extended = |prefix: &Prefix| {
            let mut below = self
                .entries
                .keys()
                .filter(|other| Self::is_below(prefix, other));
            below.any(|other| !tokens.starts_with(&other.1))
        };
        let there = prefixes.filter(|prefix| self.entries.contains_key(prefix));
        Some(
            there
                .map(|prefix| (prefix.clone(), is_extended(&prefix)))
                .collect(),
        )
    }

    /// Marks blocks as dead; `None` if the index must refuse the call.
    pub(crate) fn mark_dead(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        ranges: &[(usize, usize)],
    ) -> Option<u64> {
        let mark = self.marks + 1;
        let mut marked = 0;
        for (prefix, is_extended) in self.inside(namespace, tokens, ranges)? {
            let entry = self.entries.get_mut(&prefix).unwrap();
            if !is_extended && entry.mark.is_none() {
                entry.mark = Some(mark);
                marked += 1;
            }
        }
        self.marks += u64::from(marked > 0);
        Some(marked)
    }

    /// Removes blocks; `None` if the index must refuse the call.
    pub(crate) fn remove_spans(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        ranges: &[(usize, usize)],
        force: bool,
    ) -> Option<Removed> {
        let mut removed = Removed::default();
        for (prefix, is_extended) in self.inside(namespace, tokens, ranges)? {
            if is_extended && !force {
                removed.kept.push(self.entries[&prefix].id);
                continue;
            }
            let id = self.remove(&prefix);
            if self.pins(id) > 0 {
                self.condemned.insert(id);
                removed.condemned.push(id);
            } else {
                removed.freed.push(id);
            }
        }
        self.bound_holes();
        Some(removed)
    }

    /// Whether a dead block may be evicted: it is not pinned and not above a block that backs a sequence.
    pub(crate) fn may_go(&self, prefix: &Prefix) -> bool {
        let backs = |id: u32| self.leases.values().any(|lease| lease.held.contains(&id));
        let mut all = self.entries.iter();
        self.pins(self.entries[prefix].id) == 0
            && !all.any(|(other, entry)| Self::is_below(prefix, other) && backs(entry.id))
    }

    pub(crate) fn next_dead(&self) -> Option<Prefix> {
        let dead = self
            .entries
            .iter()
            .filter_map(|(prefix, entry)| Some((entry.mark?, prefix)));
        dead.filter(|(_, prefix)| self.may_go(prefix))
            .min_by_key(|(mark, prefix)| (*mark, Reverse(prefix.1.len())))
            .map(|(_, prefix)| prefix.clone())
    }
}

/// Ranges as pairs of positions, most of them in order.
pub(crate) fn ranges() -> impl Strategy<Value = Vec<(usize, usize)>> {
    (
        prop::collection::vec(0usize..18, 0..7),
        prop::bool::weighted(0.9),
    )
        .prop_map(|(mut ends, sorted)| {
            if sorted {
                ends.sort_unstable();
            }
            ends.chunks_exact(2)
                .map(|pair| (pair[0], pair[1]))
                .collect()
        })
}

impl Pair {
    /// The ranges, usually cut to the length of the sequence.
    fn cut(seq: &TokenSequence, ranges: &[(usize, usize)]) -> Vec<(usize, usize)> {
        let keeps = ranges.len() == 3 && ranges[0].0 == 0;
        let limit = if keeps { usize::MAX } else { seq.len() };
        let inside = |&(start, end): &(usize, usize)| (start.min(limit), end.min(limit));
        ranges.iter().map(inside).collect()
    }

    pub(crate) fn mark_dead(
        &mut self,
        seq: usize,
        ranges: &[(usize, usize)],
    ) -> Result<(), TestCaseError> {
        let (namespace, tokens) = self.tokens(seq);
        let ranges = Self::cut(&self.live[seq].1, ranges);
        let before = (self.index.digest(), self.index.stats());
        let marked = self.at_once(
            |index, seq, effort| index.mark_dead_within(seq, &ranges, effort),
            seq,
        );
        let expected = self.model.mark_dead(namespace, &tokens, &ranges);
        prop_assert_eq!(marked.as_ref().ok().copied(), expected, "{:?}", marked);
        if expected.is_none_or(|marked| marked == 0) {
            prop_assert_eq!(before, (self.index.digest(), self.index.stats()));
        }
        Ok(())
    }

    pub(crate) fn remove_spans(
        &mut self,
        seq: usize,
        ranges: &[(usize, usize)],
        force: bool,
    ) -> Result<(), TestCaseError> {
        let (namespace, tokens) = self.tokens(seq);
        let ranges = Self::cut(&self.live[seq].1, ranges);
        let before = (self.index.digest(), self.index.stats());
        let found = self.at_once(
            |index, seq, effort| index.remove_spans_within(seq, &ranges, force, effort),
            seq,
        );
        let expected = self.model.remove_spans(namespace, &tokens, &ranges, force);
        if expected.is_none() {
            prop_assert_eq!(before, (self.index.digest(), self.index.stats()));
        }
        let found = found.ok().map(|removed| Removed {
            freed: raw(&removed.freed),
            kept: raw(&removed.kept),
            condemned: raw(&removed.condemned),
        });
        prop_assert_eq!(found, expected);
        Ok(())
    }

    pub(crate) fn evict(&mut self, n: usize) -> Result<(), TestCaseError> {
        let able = self.index.num_waiting() + self.index.num_evictable();
        let evicted = self.at_once(|index, _, effort| Ok(index.evict_within(n, effort)), 0);
        let evicted = raw(&evicted.unwrap());
        prop_assert_eq!(evicted.len(), n.min(usize::try_from(able).unwrap()));
        prop_assert_eq!(evicted, self.model.evict(n));
        Ok(())
    }
}
