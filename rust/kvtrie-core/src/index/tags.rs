//! Tags: span kinds of the tokens of present blocks (D17).

use std::collections::BTreeMap;

use crate::effort::Effort;
use crate::error::Result;
use crate::index::RadixIndex;
use crate::span::Span;
use crate::tokens::TokenSequence;

impl RadixIndex {
    /// Tags the tokens of spans in the present blocks of the path of `seq`. Sequences with the same prefix share tags.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a span is reversed, ends beyond the sequence, has an
    /// empty kind, or would be a 65th kind; nothing is tagged then.
    pub fn tag(&mut self, seq: &TokenSequence, spans: &[Span]) -> Result<()> {
        self.tag_within(seq, spans, Effort::ANY)
            .map(|_| ())
            .map_err(|error| error.in_call("RadixIndex::tag"))
    }

    /// As [`tag`](Self::tag); `None`, and nothing is tagged, if that takes more than `effort`.
    /// O(effort + spans).
    ///
    /// # Errors
    /// As [`tag`](Self::tag).
    pub fn tag_within(
        &mut self,
        seq: &TokenSequence,
        spans: &[Span],
        effort: Effort,
    ) -> Result<Option<()>> {
        self.tagging
            .kinds()
            .check(spans, seq.len(), "RadixIndex::tag_within")?;
        crate::failpoints::before("RadixIndex::tag_within")?;
        Ok(self.tagging.add(&mut self.forest, seq, spans, effort))
    }

    /// The tags of the present blocks on the path of `seq`: maximal runs of each kind, sorted by (start, end, kind).
    ///
    /// # Complexity
    /// O(edges of the path + tokens not known to be shared + tags · kinds).
    #[must_use]
    pub fn tags(&self, seq: &TokenSequence) -> Vec<Span> {
        let found = self.tags_within(seq, Effort::ANY);
        found.unwrap_or_default()
    }

    /// As [`tags`](Self::tags); `None` if that takes more than `effort`.
    ///
    /// # Complexity
    /// O(effort).
    #[must_use]
    pub fn tags_within(&self, seq: &TokenSequence, effort: Effort) -> Option<Vec<Span>> {
        let mut found: Vec<Span> = Vec::new();
        let mut open: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        let mut close = |bit: u32, (start, end): (usize, usize)| {
            found.push(Span {
                start,
                end,
                kind: self.kinds()[bit as usize].clone(),
            });
        };
        for run in self.tagging.runs(&self.forest, seq, effort)? {
            for bit in 0..u64::BITS {
                if run.mask >> bit & 1 == 0 {
                    continue;
                }
                match open.get_mut(&bit) {
                    Some(span) if span.1 == run.start => span.1 = run.end,
                    _ => {
                        if let Some(span) = open.insert(bit, (run.start, run.end)) {
                            close(bit, span);
                        }
                    }
                }
            }
        }
        for (bit, span) in open {
            close(bit, span);
        }
        found.sort_unstable();
        Some(found)
    }
}
