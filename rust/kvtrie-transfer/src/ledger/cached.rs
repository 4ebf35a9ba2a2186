//! The cached segments of a request that follow gaps.

use kvtrie_core::Result;

use crate::error::invalid;

/// Ranges of tokens that have KV although an earlier token must still be computed. They ascend, with a gap between any
/// two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CachedRanges(Vec<(usize, usize)>);

impl CachedRanges {
    /// The ranges of `0..len` that are not missing. Everything from `len` on is missing as well. Returns the end of the
    /// first range, which starts at position 0 and may be empty, and the other ranges.
    pub(super) fn around(
        missing: impl IntoIterator<Item = (usize, usize)>,
        len: usize,
    ) -> (usize, Self) {
        let (mut first, mut cached) = (None, Vec::new());
        let mut at = 0;
        for (start, end) in missing {
            if start == end {
                continue;
            }
            match first {
                None => first = Some(start),
                Some(_) if at < start => cached.push((at, start)),
                Some(_) => {}
            }
            at = end;
        }
        match first {
            Some(first) => {
                if at < len {
                    cached.push((at, len));
                }
                (first, Self(cached))
            }
            None => (len, Self::default()),
        }
    }

    pub(super) fn end(&self) -> usize {
        self.0.last().map_or(0, |range| range.1)
    }

    pub(super) fn leave(&self, at: usize) -> usize {
        if self.0.is_empty() {
            return at;
        }
        match self.0.get(self.0.partition_point(|range| range.1 <= at)) {
            Some(&(start, end)) if start <= at => end,
            _ => at,
        }
    }

    /// The position after `tokens` tokens from `from` on. Cached tokens are skipped, not counted.
    pub(super) fn advance(&self, from: usize, tokens: usize) -> usize {
        let mut at = self.leave(from);
        let mut left = tokens;
        if !self.0.is_empty() {
            let next = self.0.partition_point(|range| range.0 < at);
            for &(start, end) in &self.0[next..] {
                let room = start - at;
                if left < room {
                    break;
                }
                left -= room;
                at = end;
            }
        }
        at.saturating_add(left)
    }

    pub(super) fn gaps(&self, from: usize, to: usize) -> Vec<(usize, usize)> {
        let (mut found, mut at) = (Vec::new(), from);
        for &(start, end) in &self.0 {
            if at < start.min(to) {
                found.push((at, start.min(to)));
            }
            at = at.max(end);
        }
        if at < to {
            found.push((at, to));
        }
        found
    }

    pub(super) fn from(&self, from: usize) -> impl Iterator<Item = (usize, usize)> {
        let first = self.0.partition_point(|range| range.1 <= from);
        self.0[first..]
            .iter()
            .map(move |&(start, end)| (start.max(from), end))
    }

    pub(super) fn cut(&mut self, to: usize) {
        let keep = self.0.partition_point(|range| range.0 < to);
        self.0.truncate(keep);
        if let Some(last) = self.0.last_mut() {
            last.1 = last.1.min(to);
        }
    }

    pub(super) fn forget_below(&mut self, at: usize) {
        if self.0.first().is_some_and(|range| range.1 <= at) {
            let past = self.0.partition_point(|range| range.1 <= at);
            self.0.drain(..past);
        }
    }
}

pub(super) fn check_ranges(
    ranges: &[(usize, usize)],
    len: usize,
    call: &'static str,
) -> Result<()> {
    let mut last = 0;
    for &(start, end) in ranges {
        if start > end || end > len {
            return Err(invalid!(
                call,
                "missing has [{start}, {end}); it must ascend and lie in [0, {len}], the sequence"
            ));
        }
        if start < last {
            return Err(invalid!(
                call,
                "missing has [{start}, {end}) after a range that ends at {last}; ranges \
                 must ascend and be disjoint"
            ));
        }
        last = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_ranges_are_between_missing_ones() {
        let (first, cached) = CachedRanges::around([(3, 5), (8, 10)], 12);
        assert_eq!((first, &cached.0[..]), (3, &[(5, 8), (10, 12)][..]));
        let (first, cached) = CachedRanges::around([(0, 2), (2, 4), (4, 4)], 4);
        assert_eq!((first, &cached.0[..]), (0, &[][..]));
        assert_eq!(CachedRanges::around([], 7), (7, CachedRanges::default()));
    }

    #[test]
    fn advance_counts_only_what_is_missing() {
        let (_, cached) = CachedRanges::around([(3, 5), (8, 10)], 12);
        let ends: Vec<usize> = (0..7).map(|tokens| cached.advance(3, tokens)).collect();
        assert_eq!(ends, [3, 4, 8, 9, 12, 13, 14]);
        assert_eq!(cached.advance(6, 1), 9);
    }

    #[test]
    fn gaps_skip_cached_ranges() {
        let (_, cached) = CachedRanges::around([(3, 5), (8, 10)], 12);
        assert_eq!(cached.gaps(3, 14), [(3, 5), (8, 10), (12, 14)]);
        assert_eq!(cached.gaps(6, 9), [(8, 9)]);
        assert_eq!(cached.from(6).collect::<Vec<_>>(), [(6, 8), (10, 12)]);
    }
}
