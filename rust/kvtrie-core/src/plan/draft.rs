//! Drafts a plan: everything it will say, before anything is pinned or touched.

use std::ops::Range;
use std::sync::Arc;

use crate::effort::Effort;
use crate::grade::Grade;
use crate::ids::{BlockId, Depth};
use crate::plan::cached::Cached;
use crate::plan::context::{Contexts, MOST_EDGES, MovedRun};
use crate::plan::cover::{Cover, OwnPath, Run};
use crate::plan::reach::{Follower, Piece};
use crate::plan::scope::InScope;
use crate::plan::search::Search;
use crate::plan::usable::{Kinship, Usable};
use crate::plan::{Class, Copied, Segment};
use crate::policy::{Repair, ReusePolicy};
use crate::storage::forest::{Forest, Position, SourceRun};
use crate::storage::node::Node;
use crate::storage::payload::Label;
use crate::tokens::{Item, TokenSequence};

#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) in_place: Option<Position>,
    /// The ids in place, possibly followed by more.
    pub(crate) ids: Arc<Vec<BlockId>>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) copies: Vec<Copied>,
    pub(crate) source_ids: Vec<BlockId>,
    pub(crate) sources: Vec<SourceRun>,
    pub(crate) moved_runs: Vec<MovedRun>,
    pub(crate) candidates_dropped: u64,
    pub(crate) looks: u64,
    /// Moved runs were wanted, but no block was in scope.
    pub(crate) is_without_scope: bool,
}

pub(crate) fn num_tokens(segments: &[Segment], class: Class) -> usize {
    let of_class = segments.iter().filter(|segment| segment.class == class);
    of_class.map(|segment| segment.end - segment.start).sum()
}

impl Draft {
    pub(crate) fn computed(len: usize) -> Self {
        let mut draft = Self::default();
        compute_until(&mut draft.segments, len);
        draft
    }

    /// Drafts the plan of a prompt of which at most `len` tokens may be matched, given the end and the ids of its exact
    /// prefix. Approximate blocks must be at least as strict as `asked`. Returns `None` if searching for moved runs
    /// takes more than `effort`.
    #[inline]
    pub(crate) fn new(
        cached: &Cached<'_>,
        seq: &TokenSequence,
        (policy, asked): (&ReusePolicy, &Grade),
        len: usize,
        (end, ids): (Position, &Arc<Vec<BlockId>>),
        effort: Effort,
    ) -> Option<Self> {
        let usable = Usable::new(cached, policy, asked, cached.forest.node(end.node).tree);
        let drafting = |usable| Drafting {
            cached,
            forest: cached.forest,
            seq,
            policy,
            usable,
            moves_after: None,
            contexts: None,
            conversation: None,
            len,
            front: policy.recompute_first,
            draft: Self::default(),
        };
        let draft = drafting(usable).draft(end, ids, effort);
        let approximate = draft
            .as_ref()
            .map_or(0, |draft| num_tokens(&draft.segments, Class::Approximate));
        #[expect(
            clippy::cast_precision_loss,
            reason = "a share needs no more precision"
        )]
        let is_too_much = approximate as f64 / seq.len() as f64 > policy.max_approximate_share;
        if !is_too_much {
            return draft;
        }
        let draft = draft?;
        let exact = drafting(usable.exact_only()).draft(end, ids, effort)?;
        Some(exact.instead_of(&draft))
    }

    /// The draft that takes the place of one whose approximate tokens are not used.
    pub(crate) fn instead_of(self, other: &Self) -> Self {
        Self {
            // The other one might be used if all places had been tried, so the dropped ones still count.
            candidates_dropped: other.candidates_dropped.max(self.candidates_dropped),
            looks: other.looks,
            is_without_scope: other.is_without_scope,
            ..self
        }
    }
}

struct Drafting<'a> {
    cached: &'a Cached<'a>,
    forest: &'a Forest,
    seq: &'a TokenSequence,
    policy: &'a ReusePolicy,
    usable: Usable,
    /// The end of what is in place; `None` if no run may be moved.
    moves_after: Option<Position>,
    /// Made with the first copy, if runs may be moved.
    contexts: Option<Contexts<'a>>,
    /// Made with the first moved run, if runs may come from other conversations.
    conversation: Option<Box<InScope<'a>>>,
    len: usize,
    /// Approximate tokens at the start of each run that are computed (P7).
    front: usize,
    draft: Draft,
}

impl<'a> Drafting<'a> {
    fn draft(
        mut self,
        exact: Position,
        exact_ids: &Arc<Vec<BlockId>>,
        effort: Effort,
    ) -> Option<Draft> {
        let block_size = self.forest.block_size();
        let own_end = self.own_end(exact);
        let in_place = self.in_place(exact, own_end);
        self.use_in_place(exact, in_place, exact_ids);
        self.moves_after = self.usable.moves().then_some(in_place);
        let mut at = in_place.depth as usize * block_size;
        if self.policy.partial_blocks
            && let Some(partial) = self.nearest_block(in_place)
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
        // Sorted like this, each run is appended to the runs of its node.
        let order = |run: &SourceRun| (run.node, run.to, run.from);
        self.draft.sources.sort_unstable_by_key(order);
        self.draft.moved_runs = self.contexts.map_or_else(Vec::new, Contexts::into_runs);
        self.draft.in_place = (in_place.depth > 0).then_some(in_place);
        Some(self.draft)
    }

    /// The exact block after `end` that shares most tokens with the rest of the prompt, as a piece of those tokens.
    fn nearest_block(&self, end: Position) -> Option<Piece> {
        let block_size = self.forest.block_size();
        let at = end.depth as usize * block_size;
        let until = self.len.min(at + block_size);
        if until <= at {
            return None;
        }
        let wanted = self.seq.view().slice(at, until);
        let only = match self.cached.path {
            Some(path) => Some(path.edge_at(end.depth)?.0),
            None => (end.depth < self.forest.node(end.node).end()).then_some(end.node),
        };
        let (node, shared) = if let Some(only) = only {
            let node = self.forest.node(only);
            let shared = wanted.common(node.view(block_size).slice(at, at + block_size));
            (node.payload(end.depth, block_size).is_exact() && shared > 0)
                .then_some((only, shared))?
        } else {
            self.forest.nearest_child(end.node, wanted)?
        };
        Some(Piece {
            node,
            start: at,
            end: at + shared,
        })
    }

    /// The end of the prompt's whole blocks on its own path.
    fn own_end(&self, exact: Position) -> Position {
        if !self.forest.has_broken_paths() {
            return exact;
        }
        let limit = crate::ids::depth(self.len / self.forest.block_size());
        let whole = |_: &Node, _, to| to;
        let tokens = self.seq.view();
        let walked = self
            .forest
            .walk(tokens, exact, limit, Effort::ANY, whole, |_, _, _| ());
        let path = self.cached.path;
        path.map_or(walked.at, |path| path.common(self.forest, walked.at))
    }

    /// The end of the blocks in place: the exact prefix, and if the policy allows it, approximate blocks after it.
    fn in_place(&self, exact: Position, own_end: Position) -> Position {
        if !self.usable.approximate || own_end.depth == exact.depth {
            return exact;
        }
        for (node, from, to) in self.forest.edges_to(own_end, exact.depth) {
            let edge = self.forest.node(node);
            if let Some(depth) = (from..to).find(|&depth| !self.usable.in_place(edge, depth)) {
                return self.forest.normal(Position::at(node, depth));
            }
        }
        own_end
    }

    fn use_in_place(&mut self, exact: Position, end: Position, exact_ids: &Arc<Vec<BlockId>>) {
        let (forest, block_size) = (self.forest, self.forest.block_size());
        let token = |depth: Depth| depth as usize * block_size;
        self.draft.ids = Arc::clone(exact_ids);
        if end.depth > exact.depth {
            let mut more = Vec::new();
            forest.path_ids(end, exact.depth, &mut more);
            let mut ids = exact_ids[..exact.depth as usize].to_vec();
            ids.append(&mut more);
            self.draft.ids = Arc::new(ids);
        }
        self.push(Segment {
            start: 0,
            end: token(exact.depth),
            old_start: 0,
            position_delta: 0,
            class: Class::Exact,
            hops: 0,
            kinds: self
                .cached
                .tagging
                .on_path(forest, exact, 0, token(exact.depth)),
        });
        let first = self.draft.segments.len();
        for (node, from, to) in forest.edges_to(end, exact.depth) {
            for depth in from..to {
                let edge = forest.node(node);
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
                        position_delta: 0,
                        class,
                        hops,
                        kinds,
                    }),
                }
            }
        }
    }

    /// Covers the rest of the prompt from `at` on; returns `None` if the search takes more than `effort`.
    fn cover(
        &mut self,
        in_place: Position,
        own_end: Position,
        at: usize,
        effort: Effort,
    ) -> Option<()> {
        let (forest, cached) = (self.forest, self.cached);
        let prompt = self.seq.view().slice(0, self.len);
        let moves = self.usable.moves() && at < cached.moved_end;
        let in_scope = !cached.scope.is_some_and(InScope::is_empty);
        let windows = cached.windows.filter(|_| moves);
        self.draft.is_without_scope = windows.is_some() && !in_scope;
        let windows = windows.filter(|_| in_scope);
        let tree = forest.node(in_place.node).tree;
        let max_candidates = cached.config.max_candidates;
        let moved_len = self.len.min(cached.moved_end);
        let movable = &prompt.tokens[..moved_len];
        let search = windows.map(|windows| Search::new(cached, windows, tree, movable));
        let follower = Follower {
            forest,
            prompt,
            moved_len,
            scope: cached.scope,
            path: cached.path,
            usable: self.usable,
            max_children: max_candidates,
        };
        let own = OwnPath {
            in_place,
            end: own_end,
        };
        let min_run = self.policy.min_run.unwrap_or(cached.config.min_run);
        let mut cover = Cover::new(follower, own, search, min_run, cached.config.seed);
        let mut runs = cover.runs(at, effort)?;
        if self.policy.repair == Repair::Fronts && self.policy.recompute_share > 0.0 {
            self.copy_with_fronts(&mut runs);
        } else {
            for run in &runs {
                self.copy_if_allowed(run);
            }
        }
        self.draft.candidates_dropped = cover.dropped();
        let conversation = self.conversation.as_deref();
        self.draft.looks = cover.budget.looks() + conversation.map_or(0, InScope::take_looks);
        Some(())
    }

    fn contexts(&mut self) -> Option<&mut Contexts<'a>> {
        let (forest, in_place) = (self.forest, self.moves_after?);
        let contexts = &mut self.contexts;
        Some(contexts.get_or_insert_with(|| Contexts::new(forest, in_place)))
    }

    /// Whether the policy allows the context of a moved run, which then is one of the plan's, and has tokens that are
    /// not computed anyway.
    fn may_move(&mut self, run: &Run) -> bool {
        let policy = self.policy;
        let start = run.start.saturating_add(policy.recompute_first);
        let end = run.end.saturating_sub(policy.recompute_last);
        if start >= end {
            return false;
        }
        let source = run.source(start);
        let piece = run.path.iter().find(|piece| piece.end > source);
        let Some((contexts, piece)) = self.contexts().zip(piece) else {
            return false;
        };
        let mut moved = contexts.of(start, end, piece.node, source);
        if !moved.is_within(policy) {
            return false;
        }
        moved.same_conversation = self.is_of_conversation(&run.path, source..source + end - start);
        if let Some(contexts) = &mut self.contexts {
            contexts.add(moved);
        }
        true
    }

    /// Whether the blocks of a moved run, at these positions of its path, belong to the plan's conversation. A plan of
    /// that scope uses no others.
    fn is_of_conversation(&mut self, path: &[Piece], source: Range<usize>) -> bool {
        let cached = self.cached;
        if cached.scope.is_some() {
            return true;
        }
        let (seq, policy) = (self.seq, self.policy);
        let conversation = self.conversation.get_or_insert_with(|| {
            let (session, seed) = (cached.session, cached.config.seed);
            let most_looks = MOST_EDGES as u64;
            let whose =
                InScope::of_conversation(cached.forest, seq, session, policy, seed, most_looks);
            Box::new(whose)
        });
        path.iter().all(|piece| {
            let (start, end) = (piece.start.max(source.start), piece.end.min(source.end));
            conversation.end(piece.node, start, end) == end
        })
    }

    /// Copies runs without the tokens at their fronts that the policy's share asks for. Contexts are those before these
    /// are computed, so the runs are judged first, and then copied again.
    fn copy_with_fronts(&mut self, runs: &mut Vec<Run>) {
        let draft = &self.draft;
        let lens = (
            draft.segments.len(),
            draft.copies.len(),
            draft.sources.len(),
            draft.source_ids.len(),
        );
        runs.retain(|run| self.copy_if_allowed(run));
        let front = self
            .policy
            .front(runs.iter().map(|run| self.num_approximate(run)));
        if front == self.front {
            return;
        }
        let draft = &mut self.draft;
        draft.segments.truncate(lens.0);
        draft.copies.truncate(lens.1);
        draft.sources.truncate(lens.2);
        draft.source_ids.truncate(lens.3);
        self.front = front;
        let moves_after = self.moves_after.take();
        for run in runs.iter() {
            self.copy(run);
        }
        self.moves_after = moves_after;
    }

    fn num_approximate(&self, run: &Run) -> usize {
        if run.kinship == Kinship::Moved {
            return run.end - run.start;
        }
        let parts = run.path.iter().flat_map(|piece| {
            let node = self.forest.node(piece.node);
            equal_labels(node, piece, run.kinship, self.forest.block_size())
        });
        let approximate = parts.filter(|part| part.2 == Class::Approximate);
        approximate.map(|(from, to, ..)| to - from).sum()
    }

    /// Copies a run, unless the policy's limits on its context exclude it. Returns whether they allow it.
    fn copy_if_allowed(&mut self, run: &Run) -> bool {
        let is_allowed = run.kinship == Kinship::Own || self.may_move(run);
        if is_allowed {
            self.copy(run);
        }
        is_allowed
    }

    /// Adds the segments and copies of a run: one segment for each part of equal class and hops.
    fn copy(&mut self, run: &Run) {
        let forest = self.forest;
        let is_plain = |piece: &Piece| forest.node(piece.node).num_approximate() == 0;
        let recomputed = (self.front, self.policy.recompute_last);
        if recomputed == (0, 0) && run.path.iter().all(is_plain) {
            let (class, hops) = Usable::becomes(run.kinship, Label::EXACT);
            return self.copy_part(run.start, run.end, class, hops, &run.path);
        }
        let mut parts: Vec<RunPart> = Vec::new();
        let mut start = run.start;
        for piece in &run.path {
            let node = forest.node(piece.node);
            for (from, to, class, hops) in
                equal_labels(node, piece, run.kinship, forest.block_size())
            {
                let own = Piece {
                    node: piece.node,
                    start: from,
                    end: to,
                };
                match parts.last_mut() {
                    Some(last) if (last.class, last.hops) == (class, hops) => {
                        last.end += to - from;
                        last.path.push(own);
                    }
                    _ => parts.push(RunPart {
                        start,
                        end: start + to - from,
                        class,
                        hops,
                        path: vec![own],
                    }),
                }
                start += to - from;
            }
        }
        let approximate = |part: &&mut RunPart| part.class == Class::Approximate;
        let mut first = self.front;
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

    fn copy_part(&mut self, start: usize, end: usize, class: Class, hops: u16, path: &[Piece]) {
        let (forest, block_size) = (self.forest, self.forest.block_size());
        if let Some(contexts) = self.contexts() {
            contexts.keep(start, path);
        }
        let first = self.draft.source_ids.len();
        let mut kinds = 0;
        for piece in path {
            let node = forest.node(piece.node);
            let run = SourceRun {
                node: piece.node,
                from: crate::ids::depth(piece.start / block_size),
                to: crate::ids::depth(piece.end.div_ceil(block_size)),
            };
            self.draft
                .source_ids
                .extend(node.ids(run.from, run.to, block_size));
            self.draft.sources.push(run);
            if let Some(extras) = node.extras() {
                kinds |= extras.tags.union(piece.start, piece.end);
            }
        }
        let source = path.first();
        let old_start = source.map_or(0, |piece| piece.start);
        let position_delta = source.map_or(0, |piece| self.position_delta(start, piece));
        self.draft.copies.push(Copied {
            start,
            end,
            old_start,
            position_delta,
            ids: first..self.draft.source_ids.len(),
        });
        compute_until(&mut self.draft.segments, start);
        self.push(Segment {
            start,
            end,
            old_start,
            position_delta,
            class,
            hops,
            kinds,
        });
    }

    /// New position minus old position of tokens that are copied to `start` from a piece. It is the same for all that
    /// follow in the run, because an item that says how many positions it takes equals only items that say the same.
    fn position_delta(&self, start: usize, source: &Piece) -> i64 {
        let shift = Item::shift_at(self.seq.items(), start, 0);
        let old_shift = self.forest.node(source.node).shift_at(source.start);
        Segment::distance(start, source.start) + shift - old_shift
    }

    fn push(&mut self, segment: Segment) {
        if segment.start < segment.end {
            self.draft.segments.push(segment);
        }
    }
}

fn compute_until(segments: &mut Vec<Segment>, end: usize) {
    let start = segments.last().map_or(0, |segment| segment.end);
    if start < end {
        segments.push(Segment {
            start,
            end,
            old_start: start,
            position_delta: 0,
            class: Class::Compute,
            hops: 0,
            kinds: 0,
        });
    }
}

struct RunPart {
    start: usize,
    end: usize,
    class: Class,
    hops: u16,
    path: Vec<Piece>,
}

impl RunPart {
    fn cut_front(&mut self, count: usize) -> usize {
        let count = count.min(self.end - self.start);
        self.start += count;
        let mut left = count;
        self.path.retain_mut(|piece| {
            let cut = left.min(piece.end - piece.start);
            piece.start += cut;
            left -= cut;
            piece.start < piece.end
        });
        count
    }

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

/// The parts of a piece with equal labels: (start, end, class, hops).
fn equal_labels(
    node: &Node,
    piece: &Piece,
    kinship: Kinship,
    block_size: usize,
) -> Vec<(usize, usize, Class, u16)> {
    let mut parts: Vec<(usize, usize, Class, u16)> = Vec::new();
    let mut at = piece.start;
    while at < piece.end {
        let depth = crate::ids::depth(at / block_size);
        let (class, hops) = Usable::becomes(kinship, node.payload(depth, block_size).label);
        let end = if node.num_approximate() == 0 {
            piece.end
        } else {
            piece.end.min((at / block_size + 1) * block_size)
        };
        match parts.last_mut() {
            Some(last) if (last.2, last.3) == (class, hops) => last.1 = end,
            _ => parts.push((at, end, class, hops)),
        }
        at = end;
    }
    parts
}
