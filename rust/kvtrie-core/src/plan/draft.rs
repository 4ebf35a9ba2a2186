//! What a plan will say, before anything is pinned or touched.

use std::sync::Arc;

use crate::ids::{BlockId, Depth, NO_NODE};
use crate::index::{Effort, Position, RadixIndex, SourceRun};
use crate::plan::cover::{Cover, OwnPath, Run};
use crate::plan::reach::{Follower, Stretch};
use crate::plan::search::Search;
use crate::plan::usable::{Kinship, Usable};
use crate::plan::{Class, Copied, PlanOptions, Segment};
use crate::policy::ReusePolicy;
use crate::storage::node::Node;
use crate::storage::payload::Label;
use crate::storage::siblings;
use crate::tokens::TokenSequence;

/// How the KV of a prompt can be built.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    /// End of the path of blocks used in place.
    pub(crate) in_place: Option<Position>,
    /// Its ids, possibly followed by more.
    pub(crate) ids: Arc<Vec<BlockId>>,
    pub(crate) segments: Vec<Segment>,
    /// What is copied, in the order of the segments.
    pub(crate) copies: Vec<Copied>,
    /// Source blocks of the copies, concatenated.
    pub(crate) source_ids: Vec<BlockId>,
    pub(crate) sources: Vec<SourceRun>,
    pub(crate) candidates_dropped: u64,
    /// Looks of the search for moved runs.
    looks: u64,
}

pub(crate) fn num_tokens(segments: &[Segment], class: Class) -> usize {
    let of_class = segments.iter().filter(|segment| segment.class == class);
    of_class.map(|segment| segment.end - segment.start).sum()
}

impl RadixIndex {
    /// Works out how to build the KV of a prompt. Returns `None` if finding the exact prefix, or searching for moved
    /// runs, takes more than `effort`.
    pub(crate) fn draft(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
        effort: Effort,
    ) -> Option<Draft> {
        let end = self.exact_prefix(seq, options.keep_last, effort)?;
        if end.node == NO_NODE {
            let mut draft = Draft::default();
            compute_until(&mut draft.segments, seq.len());
            return Some(draft);
        }
        if self
            .windows
            .as_ref()
            .is_some_and(|windows| policy.approximate && windows.is_waiting())
        {
            self.apply_windows();
        }
        let ids = self.remembered_ids(seq, end);
        let len = seq.len().saturating_sub(options.keep_last);
        let usable = Usable::new(self, policy);
        let draft = Drafting::new(self, seq, policy, usable, len).draft(end, &ids, effort)?;
        let looks = draft.looks;
        let approximate = num_tokens(&draft.segments, Class::Approximate);
        #[expect(
            clippy::cast_precision_loss,
            reason = "a share needs no more precision"
        )]
        let is_too_much = approximate as f64 / seq.len() as f64 > policy.max_approximate_share;
        let draft = if is_too_much {
            let usable = usable.exact_only();
            let exact = Drafting::new(self, seq, policy, usable, len).draft(end, &ids, effort)?;
            // If all places had been tried, the share might be another.
            Draft {
                candidates_dropped: draft.candidates_dropped.max(exact.candidates_dropped),
                ..exact
            }
        } else {
            draft
        };
        self.work.search_looks += looks;
        Some(draft)
    }

    /// The cached exact block at the end of a path that shares most tokens with the rest of the prompt, and how many.
    fn nearest_block(&self, seq: &TokenSequence, end: Position, len: usize) -> Option<Stretch> {
        let block_size = self.block_size();
        let at = end.depth as usize * block_size;
        let until = len.min(at + block_size);
        if until <= at {
            return None;
        }
        let wanted = seq.view().slice(at, until);
        let node = &self.nodes[end.node];
        let (node, shared) = if end.depth < node.end() {
            let shared = wanted.common(node.view(block_size).slice(at, at + block_size));
            (node.payload(end.depth, block_size).is_exact() && shared > 0)
                .then_some((end.node, shared))?
        } else {
            siblings::nearest(&self.nodes, block_size, end.node, wanted)?
        };
        Some(Stretch {
            node,
            start: at,
            end: at + shared,
        })
    }
}

/// One prompt, and the draft so far.
struct Drafting<'a> {
    index: &'a RadixIndex,
    seq: &'a TokenSequence,
    policy: &'a ReusePolicy,
    usable: Usable,
    /// Tokens that may be matched.
    len: usize,
    draft: Draft,
}

impl<'a> Drafting<'a> {
    fn new(
        index: &'a RadixIndex,
        seq: &'a TokenSequence,
        policy: &'a ReusePolicy,
        usable: Usable,
        len: usize,
    ) -> Self {
        Self {
            index,
            seq,
            policy,
            usable,
            len,
            draft: Draft::default(),
        }
    }

    fn draft(
        mut self,
        exact: Position,
        exact_ids: &Arc<Vec<BlockId>>,
        effort: Effort,
    ) -> Option<Draft> {
        let block_size = self.index.block_size();
        let own_end = self.own_end(exact);
        let in_place = self.in_place(exact, own_end);
        self.use_in_place(exact, in_place, exact_ids);
        let mut at = in_place.depth as usize * block_size;
        if self.policy.partial_blocks
            && let Some(partial) = self.index.nearest_block(self.seq, in_place, self.len)
        {
            self.copy(&Run::own(at, [partial].into_iter().collect()));
            at = partial.end;
        }
        let copies_more = if self.usable.approximate {
            at < self.len
        } else {
            self.policy.partial_blocks && own_end.depth > in_place.depth
        };
        if copies_more {
            self.cover(in_place, own_end, at, effort)?;
        }
        compute_until(&mut self.draft.segments, self.seq.len());
        // In this order, each run is appended to those of its node.
        let order = |run: &SourceRun| (run.node, run.to, run.from);
        self.draft.sources.sort_unstable_by_key(order);
        self.draft.in_place = (in_place.depth > 0).then_some(in_place);
        Some(self.draft)
    }

    /// Where the whole blocks of the prompt leave its path, which is known up to `exact`; holes are passed.
    fn own_end(&self, exact: Position) -> Position {
        if self.index.num_holes == 0 && self.index.num_approximate == 0 {
            return exact;
        }
        let limit = crate::ids::depth(self.len / self.index.block_size());
        let whole = |_: &Node, _, to| to;
        let tokens = self.seq.view();
        let walked = self
            .index
            .walk(tokens, exact, limit, Effort::ANY, whole, |_, _, _| ());
        walked.at
    }

    /// Where in-place use of the path ends: after the exact prefix, if the policy allows approximate blocks.
    fn in_place(&self, exact: Position, own_end: Position) -> Position {
        if !self.usable.approximate || own_end.depth == exact.depth {
            return exact;
        }
        for (node, from, to) in self.index.edges_to(own_end, exact.depth) {
            let edge = &self.index.nodes[node];
            if let Some(depth) = (from..to).find(|&depth| !self.usable.in_place(edge, depth)) {
                return self.index.normal(Position { node, depth });
            }
        }
        own_end
    }

    fn use_in_place(&mut self, exact: Position, end: Position, exact_ids: &Arc<Vec<BlockId>>) {
        let (index, block_size) = (self.index, self.index.block_size());
        let token = |depth: Depth| depth as usize * block_size;
        self.draft.ids = Arc::clone(exact_ids);
        if end.depth > exact.depth {
            let mut more = Vec::new();
            index.path_ids(end, exact.depth, &mut more);
            let mut ids = exact_ids[..exact.depth as usize].to_vec();
            ids.append(&mut more);
            self.draft.ids = Arc::new(ids);
        }
        self.push(Segment {
            start: 0,
            end: token(exact.depth),
            old_start: 0,
            class: Class::Exact,
            hops: 0,
            kinds: index.kinds_on_path(exact, 0, token(exact.depth)),
        });
        let first = self.draft.segments.len();
        for (node, from, to) in index.edges_to(end, exact.depth) {
            for depth in from..to {
                let edge = &index.nodes[node];
                let label = edge.payload(depth, block_size).label;
                let (class, hops) = Usable::becomes(Kinship::Own, label);
                let (start, end) = (token(depth), token(depth + 1));
                let kinds = edge
                    .extras()
                    .map_or(0, |extras| extras.tags.union(start, end));
                let own = &mut self.draft.segments[first..];
                match own.last_mut() {
                    Some(last) if (last.class, last.hops) == (class, hops) => {
                        last.end = end;
                        last.kinds |= kinds;
                    }
                    _ => self.push(Segment {
                        start,
                        end,
                        old_start: start,
                        class,
                        hops,
                        kinds,
                    }),
                }
            }
        }
    }

    /// Covers the prompt after `at` with runs; `None` if the search for them takes more than `effort`.
    fn cover(
        &mut self,
        in_place: Position,
        own_end: Position,
        at: usize,
        effort: Effort,
    ) -> Option<()> {
        let index = self.index;
        let prompt = self.seq.view().slice(0, self.len);
        let windows = index.windows.as_ref().filter(|_| self.usable.moves());
        let tree = index.nodes[in_place.node].tree;
        let max_candidates = index.config.max_candidates;
        let search =
            windows.map(|windows| Search::new(index, windows, tree, prompt.tokens, max_candidates));
        let follower = Follower {
            index,
            prompt,
            usable: self.usable,
            max_children: max_candidates,
        };
        let own = OwnPath {
            in_place,
            end: own_end,
        };
        let min_run = self.policy.min_run.unwrap_or(index.config.min_run);
        let mut cover = Cover::new(follower, own, search, min_run);
        for run in cover.runs(at, effort)? {
            self.copy(&run);
        }
        self.draft.candidates_dropped = cover.dropped();
        self.draft.looks = cover.budget.looks();
        Some(())
    }

    /// Adds the segments and copies of a run: one segment per stretch of equal class and hops.
    fn copy(&mut self, run: &Run) {
        let index = self.index;
        let is_plain = |stretch: &Stretch| index.nodes[stretch.node].num_approximate() == 0;
        let left_out = (self.policy.recompute_first, self.policy.recompute_last);
        if left_out == (0, 0) && run.path.iter().all(is_plain) {
            let (class, hops) = Usable::becomes(run.kinship, Label::EXACT);
            return self.copy_part(run.start, run.end, class, hops, &run.path);
        }
        let mut parts: Vec<Part> = Vec::new();
        let mut start = run.start;
        for stretch in &run.path {
            let node = &index.nodes[stretch.node];
            for (from, to, class, hops) in
                equal_labels(node, stretch, run.kinship, index.block_size())
            {
                let piece = Stretch {
                    node: stretch.node,
                    start: from,
                    end: to,
                };
                match parts.last_mut() {
                    Some(last) if (last.class, last.hops) == (class, hops) => {
                        last.end += to - from;
                        last.path.push(piece);
                    }
                    _ => parts.push(Part {
                        start,
                        end: start + to - from,
                        class,
                        hops,
                        path: vec![piece],
                    }),
                }
                start += to - from;
            }
        }
        let approximate = |part: &&mut Part| part.class == Class::Approximate;
        let mut first = self.policy.recompute_first;
        for part in parts.iter_mut().filter(approximate) {
            first -= part.cut_front(first);
        }
        let mut last = self.policy.recompute_last;
        for part in parts.iter_mut().rev().filter(approximate) {
            last -= part.cut_end(last);
        }
        for part in parts.iter().filter(|part| part.start < part.end) {
            self.copy_part(part.start, part.end, part.class, part.hops, &part.path);
        }
    }

    fn copy_part(&mut self, start: usize, end: usize, class: Class, hops: u16, path: &[Stretch]) {
        let (index, block_size) = (self.index, self.index.block_size());
        let first = self.draft.source_ids.len();
        let mut kinds = 0;
        for stretch in path {
            let node = &index.nodes[stretch.node];
            let run = SourceRun {
                node: stretch.node,
                from: crate::ids::depth(stretch.start / block_size),
                to: crate::ids::depth(stretch.end.div_ceil(block_size)),
            };
            self.draft
                .source_ids
                .extend(node.ids(run.from, run.to, block_size));
            self.draft.sources.push(run);
            if let Some(extras) = node.extras() {
                kinds |= extras.tags.union(stretch.start, stretch.end);
            }
        }
        let old_start = path.first().map_or(0, |stretch| stretch.start);
        self.draft.copies.push(Copied {
            start,
            end,
            old_start,
            ids: first..self.draft.source_ids.len(),
        });
        compute_until(&mut self.draft.segments, start);
        self.push(Segment {
            start,
            end,
            old_start,
            class,
            hops,
            kinds,
        });
    }

    fn push(&mut self, segment: Segment) {
        if segment.start < segment.end {
            self.draft.segments.push(segment);
        }
    }
}

/// Marks the tokens up to `end` that are in no segment yet as computed.
fn compute_until(segments: &mut Vec<Segment>, end: usize) {
    let start = segments.last().map_or(0, |segment| segment.end);
    if start < end {
        segments.push(Segment {
            start,
            end,
            old_start: start,
            class: Class::Compute,
            hops: 0,
            kinds: 0,
        });
    }
}

/// A part of a run, of one class and one number of hops.
struct Part {
    start: usize,
    end: usize,
    class: Class,
    hops: u16,
    path: Vec<Stretch>,
}

impl Part {
    /// Cuts up to `count` tokens from the start; returns how many.
    fn cut_front(&mut self, count: usize) -> usize {
        let count = count.min(self.end - self.start);
        self.start += count;
        let mut left = count;
        self.path.retain_mut(|stretch| {
            let cut = left.min(stretch.end - stretch.start);
            stretch.start += cut;
            left -= cut;
            stretch.start < stretch.end
        });
        count
    }

    /// Cuts up to `count` tokens from the end; returns how many.
    fn cut_end(&mut self, count: usize) -> usize {
        let count = count.min(self.end - self.start);
        self.end -= count;
        let mut left = count;
        while let Some(last) = self.path.last_mut()
            && left > 0
        {
            let cut = left.min(last.end - last.start);
            last.end -= cut;
            left -= cut;
            if last.start == last.end {
                self.path.pop();
            }
        }
        count
    }
}

/// The parts of a stretch with equal labels: (start, end, class, hops).
fn equal_labels(
    node: &Node,
    stretch: &Stretch,
    kinship: Kinship,
    block_size: usize,
) -> Vec<(usize, usize, Class, u16)> {
    let mut parts: Vec<(usize, usize, Class, u16)> = Vec::new();
    let mut at = stretch.start;
    while at < stretch.end {
        let depth = crate::ids::depth(at / block_size);
        let (class, hops) = Usable::becomes(kinship, node.payload(depth, block_size).label);
        let end = if node.num_approximate() == 0 {
            stretch.end
        } else {
            stretch.end.min((at / block_size + 1) * block_size)
        };
        match parts.last_mut() {
            Some(last) if (last.2, last.3) == (class, hops) => last.1 = end,
            _ => parts.push((at, end, class, hops)),
        }
        at = end;
    }
    parts
}
