//! The kinds of tokens that an index knows, and calls that tag tokens of cached blocks with them.

use crate::effort::Effort;
use crate::span::{Kinds, Span, TagRun};
use crate::storage::forest::{Forest, Position};
use crate::tokens::TokenSequence;

/// The kinds of an index. The tags themselves are stored with the edges.
#[derive(Debug, Default)]
pub(crate) struct Tagging {
    kinds: Kinds,
    /// Whether any token was ever tagged.
    is_tagged: bool,
}

impl Tagging {
    pub(crate) fn kinds(&self) -> &Kinds {
        &self.kinds
    }

    pub(crate) fn restore_kinds(&mut self, kinds: Kinds) {
        self.kinds = kinds;
    }

    pub(crate) fn restore_tags(&mut self) {
        self.is_tagged = true;
    }

    #[cfg(test)]
    pub(crate) fn is_tagged(&self) -> bool {
        self.is_tagged
    }

    pub(crate) fn on_path(&self, forest: &Forest, at: Position, start: usize, end: usize) -> u64 {
        if self.is_tagged {
            forest.kinds_on_path(at, start, end)
        } else {
            0
        }
    }

    /// Tags the spans; returns `None`, and tags nothing, if that takes more than `effort`.
    pub(crate) fn add(
        &mut self,
        forest: &mut Forest,
        seq: &TokenSequence,
        spans: &[Span],
        effort: Effort,
    ) -> Option<()> {
        let mut steps = effort.steps();
        steps.take(spans.len() as u64)?;
        if spans.iter().all(|span| span.start >= span.end) {
            return Some(());
        }
        let Some(end) = forest.whole_path(seq, effort)? else {
            self.flattened(spans);
            return Some(());
        };
        let edges = forest.edges_within(end, 0, &mut steps)?;
        for &(node, from, to) in &edges {
            steps.take(forest.node(node).tags().len() as u64)?;
            if forest.node(node).num_holes() > 0 {
                // An edge with holes is checked block by block.
                steps.take(u64::from(to - from))?;
            }
        }
        let tags = self.flattened(spans);
        crate::failpoints::within("kinds without tags");
        self.is_tagged = true;
        let block_size = forest.block_size();
        for (node, from, to) in edges {
            let edge = forest.node(node);
            let (mut own, mut at) = (Vec::new(), from);
            while at < to {
                let until = edge.present_until(at, to, block_size);
                let (start, end) = (at as usize * block_size, until as usize * block_size);
                own.extend(TagRun::within(&tags, start, end));
                at = edge.absent_until(until, to, block_size);
            }
            if !own.is_empty() {
                forest.merge_tags(node, &own);
            }
        }
        Some(())
    }

    /// Merges spans, which may overlap, into ascending, disjoint runs, and registers their kinds.
    fn flattened(&mut self, spans: &[Span]) -> Vec<TagRun> {
        let mut ends: Vec<(usize, bool, u32)> = Vec::with_capacity(2 * spans.len());
        for span in spans.iter().filter(|span| span.start < span.end) {
            let bit = self.kinds.intern(&span.kind).trailing_zeros();
            ends.extend([(span.start, true, bit), (span.end, false, bit)]);
        }
        ends.sort_unstable();
        let (mut found, mut open, mut mask, mut start) = (Vec::new(), [0u32; 64], 0u64, 0);
        for (at, begins, bit) in ends {
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

    /// Returns the tags of the path, ascending, or `None` if this takes more than `effort`.
    pub(crate) fn runs(
        &self,
        forest: &Forest,
        seq: &TokenSequence,
        effort: Effort,
    ) -> Option<Vec<TagRun>> {
        let mut found = Vec::new();
        let Some(end) = forest.whole_path(seq, effort)?.filter(|_| self.is_tagged) else {
            return Some(found);
        };
        let (until, mut steps) = (end.depth as usize * forest.block_size(), effort.steps());
        for (node, _, _) in forest.edges_within(end, 0, &mut steps)? {
            let tags = forest.node(node).tags();
            let inside = &tags[..tags.partition_point(|run| run.start < until)];
            steps.take(inside.len() as u64)?;
            found.extend(inside.iter().map(|run| TagRun {
                end: run.end.min(until),
                ..*run
            }));
        }
        Some(found)
    }
}
