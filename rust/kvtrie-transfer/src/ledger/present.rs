//! Cached segments of a request after a gap.

use crate::error::invalid;
use kvtrie_core::Result;

/// Ranges of tokens with KV although a token before them must still be computed. Ascending, with a gap between any two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Islands(Vec<(usize, usize)>);

impl Islands {
    /// The complement of the missing ranges in `0..end`. Everything after `end` is missing too. Returns the end of the
    /// first range, which starts at position 0 and may be empty, and the other ranges.
    pub(super) fn around(
        missing: impl IntoIterator<Item = (usize, usize)>,
        end: usize,
    ) -> (usize, Self) {
        let (mut first, mut islands) = (None, Vec::new());
        let mut at = 0;
        for (start, behind) in missing {
            if start == behind {
                continue;
            }
            match first {
                None => first = Some(start),
                Some(_) if at < start => islands.push((at, start)),
                Some(_) => {}
            }
            at = behind;
        }
        match first {
            Some(first) => {
                if at < end {
                    islands.push((at, end));
                }
                (first, Self(islands))
            }
            None => (end, Self::default()),
        }
    }

    /// One past the last token.
    pub(super) fn end(&self) -> usize {
        self.0.last().map_or(0, |island| island.1)
    }

    /// The end of the island that contains the position, or the position.
    pub(super) fn leave(&self, at: usize) -> usize {
        if self.0.is_empty() {
            return at;
        }
        match self.0.get(self.0.partition_point(|island| island.1 <= at)) {
            Some(&(start, end)) if start <= at => end,
            _ => at,
        }
    }

    /// The position after `tokens` tokens from `from` on, not counting islands.
    pub(super) fn advance(&self, from: usize, tokens: usize) -> usize {
        let mut at = self.leave(from);
        let mut left = tokens;
        if !self.0.is_empty() {
            let next = self.0.partition_point(|island| island.0 < at);
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

    /// The ranges between two positions that are not islands.
    pub(super) fn between(&self, from: usize, to: usize) -> Vec<(usize, usize)> {
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

    /// The parts at or after a position.
    pub(super) fn behind(&self, from: usize) -> impl Iterator<Item = (usize, usize)> {
        let first = self.0.partition_point(|island| island.1 <= from);
        self.0[first..]
            .iter()
            .map(move |&(start, end)| (start.max(from), end))
    }

    /// Removes the parts at or after a position.
    pub(super) fn cut(&mut self, to: usize) {
        let keep = self.0.partition_point(|island| island.0 < to);
        self.0.truncate(keep);
        if let Some(last) = self.0.last_mut() {
            last.1 = last.1.min(to);
        }
    }

    /// Removes islands that are wholly below a position, to which no call returns.
    pub(super) fn forget_below(&mut self, at: usize) {
        if self.0.first().is_some_and(|island| island.1 <= at) {
            let past = self.0.partition_point(|island| island.1 <= at);
            self.0.drain(..past);
        }
    }
}

/// Refuses ranges that are reversed, do not ascend, overlap, or end after `len` tokens.
pub(super) fn check_ranges(ranges: &[(usize, usize)], len: usize, call: &str) -> Result<()> {
    let mut behind = 0;
    for &(start, end) in ranges {
        if start > end || end > len {
            return Err(invalid(format!(
                "{call}: missing has [{start}, {end}); it must ascend and lie in [0, {len}], the sequence"
            )));
        }
        if start < behind {
            return Err(invalid(format!(
                "{call}: missing has [{start}, {end}) after a range that ends at {behind}; ranges \
                 must ascend and be disjoint"
            )));
        }
        behind = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn islands_lie_between_what_is_missing() {
        let (first, islands) = Islands::around([(3, 5), (8, 10)], 12);
        assert_eq!((first, &islands.0[..]), (3, &[(5, 8), (10, 12)][..]));
        let (first, islands) = Islands::around([(0, 2), (2, 4), (4, 4)], 4);
        assert_eq!((first, &islands.0[..]), (0, &[][..]));
        assert_eq!(Islands::around([], 7), (7, Islands::default()));
    }

    #[test]
    fn advance_counts_only_what_is_missing() {
        let (_, islands) = Islands::around([(3, 5), (8, 10)], 12);
        let ends: Vec<usize> = (0..7).map(|tokens| islands.advance(3, tokens)).collect();
        assert_eq!(ends, [3, 4, 8, 9, 12, 13, 14]);
        assert_eq!(islands.advance(6, 1), 9);
    }

    #[test]
    fn between_leaves_islands_out() {
        let (_, islands) = Islands::around([(3, 5), (8, 10)], 12);
        assert_eq!(islands.between(3, 14), [(3, 5), (8, 10), (12, 14)]);
        assert_eq!(islands.between(6, 9), [(8, 9)]);
        assert_eq!(islands.behind(6).collect::<Vec<_>>(), [(6, 8), (10, 12)]);
    }
}
