//! Tags: span kinds of the tokens of present blocks (D17).

use std::collections::BTreeMap;

use crate::error::Result;
use crate::ids::{Depth, depth};
use crate::index::{Effort, Position, RadixIndex};
use crate::span::{Span, TagRun};
use crate::storage::node::Node;
use crate::tokens::TokenSequence;

impl RadixIndex {
    /// Tags the tokens of spans in the present blocks of the path of `seq`. Sequences with the same prefix share tags.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a span is reversed, ends beyond the sequence, has an
    /// empty kind, or would be a 65th kind; nothing is tagged then.
    ///
    /// # Complexity
    /// O(edges of the path + tokens not known to be shared + spans · log spans), plus, per edge, its tags and, with
    /// holes, its blocks.
    pub fn tag(&mut self, seq: &TokenSequence, spans: &[Span]) -> Result<()> {
        self.tag_within(seq, spans, Effort::ANY).map(|_| ())
    }

    /// As [`tag`](Self::tag); `None`, and nothing is tagged, if that takes more than `effort`.
    ///
    /// # Errors
    /// As [`tag`](Self::tag).
    ///
    /// # Complexity
    /// O(effort + spans).
    pub fn tag_within(
        &mut self,
        seq: &TokenSequence,
        spans: &[Span],
        effort: Effort,
    ) -> Result<Option<()>> {
        self.kinds.check(spans, seq.len(), "RadixIndex.tag")?;
        crate::failpoints::before("RadixIndex.tag")?;
        Ok(self.add_tags(seq, spans, effort))
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
                kind: self.kinds.names()[bit as usize].clone(),
            });
        };
        for run in self.path_tags(seq, effort)? {
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

    /// As [`Self::tag_within`], for checked spans.
    pub(crate) fn add_tags(
        &mut self,
        seq: &TokenSequence,
        spans: &[Span],
        effort: Effort,
    ) -> Option<()> {
        let mut steps = effort.steps();
        steps.take(spans.len() as u64)?;
        if spans.iter().all(|span| span.start >= span.end) {
            return Some(());
        }
        let Some(end) = self.whole_path(seq, effort)? else {
            // Registers the kinds.
            self.flattened(spans);
            return Some(());
        };
        let edges = self.edges_within(end, 0, &mut steps)?;
        for &(node, from, to) in &edges {
            steps.take(self.nodes[node].tags().len() as u64)?;
            if self.nodes[node].num_holes() > 0 {
                // Its blocks are checked one by one.
                steps.take(u64::from(to - from))?;
            }
        }
        let tags = self.flattened(spans);
        crate::failpoints::within("kinds without tags");
        self.is_tagged = true;
        let block_size = self.block_size();
        for (node, from, to) in edges {
            let edge = &mut self.nodes[node];
            let (mut own, mut at) = (Vec::new(), from);
            while at < to {
                let until = edge.present_until(at, to, block_size);
                let (start, end) = (at as usize * block_size, until as usize * block_size);
                let first = tags.partition_point(|run| run.end <= start);
                let inside = tags[first..].iter().take_while(|run| run.start < end);
                own.extend(inside.map(|run| TagRun {
                    start: run.start.max(start),
                    end: run.end.min(end),
                    mask: run.mask,
                }));
                at = edge.absent_until(until, to, block_size);
            }
            if !own.is_empty() {
                edge.extras_mut().tags.merge(&own);
            }
        }
        Some(())
    }

    /// The spans as ascending, disjoint runs with all their kinds. Registers the kinds.
    fn flattened(&mut self, spans: &[Span]) -> Vec<TagRun> {
        let mut turns: Vec<(usize, bool, u32)> = Vec::with_capacity(2 * spans.len());
        for span in spans.iter().filter(|span| span.start < span.end) {
            let bit = self.kinds.intern(&span.kind).trailing_zeros();
            turns.extend([(span.start, true, bit), (span.end, false, bit)]);
        }
        turns.sort_unstable();
        let (mut found, mut open, mut mask, mut start) = (Vec::new(), [0u32; 64], 0u64, 0);
        for (at, begins, bit) in turns {
            if start < at && mask != 0 {
                let end = at;
                found.push(TagRun { start, end, mask });
            }
            start = at;
            let count = &mut open[bit as usize];
            *count = if begins { *count + 1 } else { *count - 1 };
            mask = mask & !(1 << bit) | u64::from(*count > 0) << bit;
        }
        found
    }

    /// All kinds of the tokens `start..end` on the path to `at`.
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

    pub(crate) fn tags_of_block(&self, node: u32, place: Depth) -> Vec<TagRun> {
        let (start, end) = self.tokens_of(place);
        let tags = self.nodes[node].tags();
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

    pub(crate) fn tokens_of(&self, place: Depth) -> (usize, usize) {
        let start = place as usize * self.block_size();
        (start, start + self.block_size())
    }

    fn path_tags(&self, seq: &TokenSequence, effort: Effort) -> Option<Vec<TagRun>> {
        let mut found = Vec::new();
        let Some(end) = self.whole_path(seq, effort)?.filter(|_| self.is_tagged) else {
            return Some(found);
        };
        let (until, mut steps) = (end.depth as usize * self.block_size(), effort.steps());
        for (node, _, _) in self.edges_within(end, 0, &mut steps)? {
            let tags = self.nodes[node].tags();
            let inside = &tags[..tags.partition_point(|run| run.start < until)];
            steps.take(inside.len() as u64)?;
            found.extend(inside.iter().map(|run| TagRun {
                end: run.end.min(until),
                ..*run
            }));
        }
        Some(found)
    }

    /// The end of the path of `seq`, with holes and approximate blocks; the inner `None` without a tree, the outer if
    /// this takes more than `effort`.
    #[expect(
        clippy::option_option,
        reason = "there may be no path, and finding it may take too much"
    )]
    pub(super) fn whole_path(
        &self,
        seq: &TokenSequence,
        effort: Effort,
    ) -> Option<Option<Position>> {
        let limit = depth(seq.len() / self.block_size());
        let from = match self.at_cursor(seq) {
            Some((at, _)) => at,
            None => match self.root(seq.namespace()) {
                Some(root) => root,
                None => return Some(None),
            },
        };
        let whole = |_: &Node, _, to| to;
        let walked = self.walk(seq.view(), from, limit, effort, whole, |_, _, _| ());
        (!walked.gave_up).then_some(Some(walked.at))
    }
}
