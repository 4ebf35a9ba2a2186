//! Span kinds over the tokens of present blocks (D17).

use std::collections::BTreeMap;

use crate::error::Result;
use crate::ids::{Depth, depth};
use crate::node::Node;
use crate::span::{Span, TagRun};
use crate::tokens::TokenSequence;
use crate::tree::{Effort, Position, RadixIndex};

impl RadixIndex {
    /// Tags the tokens of spans where the path of `seq` has blocks. Sequences that share the prefix share the tags.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a span is reversed, ends beyond the sequence, has an empty kind, or
    /// brings a 65th kind; nothing is tagged then.
    ///
    /// # Complexity
    /// O(blocks of the path, and tokens that the sequence was not known to share) plus, per edge, its tags.
    pub fn tag(&mut self, seq: &TokenSequence, spans: &[Span]) -> Result<()> {
        self.kinds.check(spans, seq.len(), "RadixIndex.tag")?;
        crate::failpoints::before("RadixIndex.tag")?;
        self.add_tags(seq, spans);
        Ok(())
    }

    /// The tags of every present block on the path of `seq`: for each kind maximal runs, sorted by (start, end, kind).
    ///
    /// # Complexity
    /// O(blocks of the path, and tokens that the sequence was not known to share, + tags · kinds).
    #[must_use]
    pub fn tags(&self, seq: &TokenSequence) -> Vec<Span> {
        let mut found: Vec<Span> = Vec::new();
        let mut open: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
        let mut close = |bit: u32, (start, end): (usize, usize)| {
            found.push(Span {
                start,
                end,
                kind: self.kinds.names()[bit as usize].clone(),
            });
        };
        for run in self.path_tags(seq) {
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
        found
    }

    /// As [`Self::tag`], for spans that were checked.
    pub(crate) fn add_tags(&mut self, seq: &TokenSequence, spans: &[Span]) {
        let masks: Vec<(usize, usize, u64)> = spans
            .iter()
            .filter(|span| span.start < span.end)
            .map(|span| (span.start, span.end, self.kinds.intern(&span.kind)))
            .collect();
        crate::failpoints::within("kinds without tags");
        let Some(end) = self.whole_path(seq).filter(|_| !masks.is_empty()) else {
            return;
        };
        self.is_tagged = true;
        let block_size = self.block_size();
        for (node, from, to) in self.edges_to(end, 0) {
            let edge = &mut self.nodes[node];
            let mut at = from;
            while at < to {
                if !edge.payload(at, block_size).is_present() {
                    at += 1;
                    continue;
                }
                let until = edge.present_until(at, to, block_size);
                for &(start, end, mask) in &masks {
                    let (start, end) = (
                        start.max(at as usize * block_size),
                        end.min(until as usize * block_size),
                    );
                    if start < end {
                        edge.extras_mut().tags.add(start, end, mask);
                    }
                }
                at = until;
            }
        }
    }

    /// All kinds of the tokens `start..end` on the path down to `at`.
    pub(crate) fn kinds_on_path(&self, at: Position, start: usize, end: usize) -> u64 {
        let mut mask = 0;
        if !self.is_tagged {
            return mask;
        }
        let mut node = at.node;
        loop {
            let edge = &self.nodes[node];
            if let Some(extras) = edge.extras() {
                mask |= extras.tags.union(start, end);
            }
            if edge.is_root() || edge.depth as usize * self.block_size() <= start {
                return mask;
            }
            node = edge.parent;
        }
    }

    /// The tags of one block.
    pub(crate) fn tags_of_block(&self, node: u32, place: Depth) -> Vec<TagRun> {
        let (start, end) = self.tokens_of(place);
        let tags = self.nodes[node].extras().map(|extras| extras.tags.runs());
        let tags = tags.unwrap_or_default();
        let first = tags.partition_point(|run| run.end <= start);
        let last = first + tags[first..].partition_point(|run| run.start < end);
        tags[first..last]
            .iter()
            .map(|run| TagRun {
                start: run.start.max(start),
                end: run.end.min(end),
                mask: run.mask,
            })
            .collect()
    }

    pub(crate) fn restore_tags(&mut self, node: u32, tags: Vec<TagRun>) {
        for run in tags {
            self.nodes[node]
                .extras_mut()
                .tags
                .add(run.start, run.end, run.mask);
        }
    }

    /// The token range of the block at a depth.
    pub(crate) fn tokens_of(&self, place: Depth) -> (usize, usize) {
        let start = place as usize * self.block_size();
        (start, start + self.block_size())
    }

    fn path_tags(&self, seq: &TokenSequence) -> Vec<TagRun> {
        let Some(end) = self.whole_path(seq) else {
            return Vec::new();
        };
        let until = end.depth as usize * self.block_size();
        let mut found = Vec::new();
        for (node, _, _) in self.edges_to(end, 0) {
            if let Some(extras) = self.nodes[node].extras() {
                let inside = extras.tags.runs().iter().filter(|run| run.start < until);
                found.extend(inside.map(|run| TagRun {
                    end: run.end.min(until),
                    ..*run
                }));
            }
        }
        found
    }

    /// The deepest place that the whole blocks of `seq` reach, through holes and approximate blocks.
    pub(super) fn whole_path(&self, seq: &TokenSequence) -> Option<Position> {
        let limit = depth(seq.len() / self.block_size());
        let from = match self.at_cursor(seq) {
            Some((at, _)) => at,
            None => self.root(seq.namespace())?,
        };
        let whole = |_: &Node, _, to| to;
        let walked = self.walk(seq.view(), from, limit, Effort::ANY, whole, |_, _, _| ());
        Some(walked.at)
    }
}
