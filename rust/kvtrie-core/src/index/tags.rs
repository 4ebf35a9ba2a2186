//! Tags tokens of present blocks with span kinds, and reads the tags (D17).

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
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// # let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// let span = Span { start: 1, end: 3, kind: "reasoning".into() };
    /// index.tag(&seq, &[span.clone()])?;
    /// assert_eq!(index.tags(&seq), [span]);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
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
