//! Chooses the cached runs that cover the rest of a prompt, from left to right (rule P5 in `docs/design.md`): first a
//! run that continues in order, then the one that reaches furthest.

mod own;

use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::ops::Range;

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::effort::Effort;
use crate::ids::{Depth, NodeIndex};
use crate::moved::WINDOW;
use crate::plan::budget::Budget;
use crate::plan::reach::{Follower, Piece, Pieces};
use crate::plan::scope::InScope;
use crate::plan::search::{Candidate, Hit, Search};
use crate::plan::usable::{Kinship, Usable};
use crate::storage::forest::Position;
use crate::storage::payload::Label;

#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) kinship: Kinship,
    pub(super) path: Pieces,
    hops: u16,
    /// Whether it continues in order where it may be chosen: at its start, or at the first uncovered token if that is
    /// later.
    in_order: bool,
}

impl Run {
    pub(super) fn source(&self, at: usize) -> usize {
        let first = self.path.first().map_or(0, |piece| piece.start);
        first + at - self.start
    }

    fn distance(&self) -> usize {
        self.start.abs_diff(self.source(self.start))
    }

    /// Whether the run copies the token `at` of the prompt from this place.
    fn meets(&self, at: usize, place: &Candidate<'_>) -> bool {
        let inside = |piece: &Piece| {
            piece.node == place.node && (piece.start..piece.end).contains(&place.last)
        };
        (self.start..self.end).contains(&at)
            && self.source(at) == place.last
            && self.path.iter().any(inside)
    }

    pub(super) fn own(start: usize, path: Pieces) -> Self {
        let len: usize = path.iter().map(|piece| piece.end - piece.start).sum();
        Self {
            start,
            end: start + len,
            kinship: Kinship::Own,
            path,
            hops: 0,
            in_order: true,
        }
    }

    /// Whether this run is better than another for every token that may have to be covered.
    fn outdoes(&self, other: &Self) -> bool {
        let is_nearer =
            self.hops <= 1 && other.kinship == Kinship::Moved && self.distance() < other.distance();
        (self.in_order || !other.in_order)
            && self.start <= other.start
            && (self.end > other.end || self.end == other.end && is_nearer)
    }

    /// The edge of the last token, and one past its position.
    fn last_slot(&self) -> Option<(NodeIndex, usize)> {
        self.path.last().map(|piece| (piece.node, piece.end))
    }

    fn tail(mut self, from: usize) -> Self {
        let source = self.source(from);
        self.path.retain(|piece| piece.end > source);
        if let Some(first) = self.path.first_mut() {
            first.start = source;
        }
        self.start = from;
        self
    }
}

/// The path of the prompt's own prefix, including holes and blocks that may not be used.
#[derive(Clone, Debug)]
pub(super) struct OwnPath {
    pub(super) in_place: Position,
    /// The end of the prompt's whole blocks on the path.
    pub(super) end: Position,
}

pub(super) struct Cover<'a> {
    pub(super) follower: Follower<'a>,
    pub(super) own: OwnPath,
    /// Edges of the own path, as (node, first depth, end). Computed on first use.
    own_edges: OnceCell<Vec<(NodeIndex, Depth, Depth)>>,
    /// The slot that the previous piece, or what is in place, ended at: its edge, and one past its position. A run
    /// continues in order if its path has this slot and its own slot is after it.
    previous: (NodeIndex, usize),
    /// Edges that were found to be on a path after `previous`, or not.
    goes_on: HashMap<NodeIndex, bool, FixedState>,
    /// Whether `previous` changed since the later runs were compared with it.
    moved_on: bool,
    pub(super) search: Option<Search<'a>>,
    pub(super) min_run: usize,
    /// The best known run that contains the first uncovered token.
    best: Option<Run>,
    later: Vec<Run>,
    /// Later runs of the prompt's own prefix, ascending. Only those that begin inside blocks overlap others.
    own_later: VecDeque<Run>,
    /// Tokens of runs that are shorter than the policy's `min_run`, by edge and by the position there of the prompt's
    /// first token.
    short: HashMap<(NodeIndex, usize), Range<usize>, FixedState>,
    hits: Vec<Hit>,
    trying: Vec<(usize, Range<usize>)>,
    /// Windows that begin before this position need not be tried again.
    tried: usize,
    /// Tokens before this position are covered, or precede the search.
    floor: usize,
    pub(super) budget: Budget,
    skipped: u64,
}

impl<'a> Cover<'a> {
    pub(super) fn new(
        follower: Follower<'a>,
        own: OwnPath,
        search: Option<Search<'a>>,
        min_run: usize,
        seed: u64,
    ) -> Self {
        let in_place = own.in_place;
        let block_size = follower.forest.block_size();
        Self {
            previous: (in_place.node, in_place.depth as usize * block_size),
            goes_on: HashMap::with_hasher(FixedState::with_seed(seed)),
            moved_on: false,
            follower,
            own,
            own_edges: OnceCell::new(),
            search,
            min_run,
            best: None,
            later: Vec::new(),
            own_later: VecDeque::new(),
            short: HashMap::with_hasher(FixedState::with_seed(seed)),
            hits: Vec::new(),
            trying: Vec::new(),
            tried: 0,
            floor: 0,
            budget: Budget::new(0, 0, follower.max_children),
            skipped: 0,
        }
    }

    pub(super) fn dropped(&self) -> u64 {
        self.skipped + self.search.as_ref().map_or(0, Search::dropped)
    }

    /// The chosen runs in order. Between them are gaps where nothing was found. Returns `None` if the search takes more
    /// than `effort`.
    pub(super) fn runs(&mut self, from: usize, effort: Effort) -> Option<Vec<Run>> {
        let len = self.follower.prompt.tokens.len();
        let mut runs = Vec::new();
        let mut at = from;
        self.floor = from;
        self.budget = Budget::new(from, len, self.follower.max_children);
        self.find_own(at);
        while at < len {
            self.settle(at);
            if let Some(mut search) = self.search.take() {
                if self.budget.exceeds(effort, search.num_screened()) {
                    return None;
                }
                self.find_moved(&mut search, at);
                self.search = Some(search);
            }
            if let Some(run) = self.best.take() {
                let end = run.end;
                let start = run.start.max(self.floor);
                match run.kinship {
                    Kinship::Moved => self.budget.earn(end - start),
                    // It may be shorter than a stride, so that windows after it have been tried.
                    Kinship::Own => self.tried = self.tried.min(end),
                }
                self.previous = run.last_slot().unwrap_or(self.previous);
                self.goes_on.clear();
                self.moved_on = true;
                runs.push(run.tail(start));
                at = end;
                self.floor = end;
                if let Some(search) = &mut self.search {
                    search.begin_round();
                }
            } else {
                at = self.next(at);
            }
        }
        Some(runs)
    }

    /// Chooses the best known run that contains the token `at`, and drops known runs that end before it.
    fn settle(&mut self, at: usize) {
        let moved_on = std::mem::take(&mut self.moved_on);
        for mut run in std::mem::take(&mut self.later) {
            let start = run.start.max(self.floor);
            if run.end < start + self.min_run {
                continue;
            }
            if moved_on {
                run.in_order = self.is_in_order(&run, start, at);
            }
            if run.start > at {
                self.later.push(run);
            } else {
                self.improve(run, at);
            }
        }
        while self.own_later.front().is_some_and(|run| run.start <= at) {
            let run = self.own_later.pop_front().filter(|run| run.end > at);
            if let Some(run) = run {
                self.improve(run, at);
            }
        }
    }

    fn improve(&mut self, run: Run, at: usize) {
        if self
            .best
            .as_ref()
            .is_none_or(|best| self.is_better(&run, best, at))
        {
            self.best = Some(run);
        }
    }

    fn first_later(&self) -> Option<&Run> {
        let runs = self.later.iter().chain(self.own_later.front());
        runs.min_by_key(|run| run.start)
    }

    fn next(&mut self, at: usize) -> usize {
        let len = self.follower.prompt.tokens.len();
        let known = self.first_later().map_or(len, |run| run.start);
        let Some(search) = &mut self.search else {
            return known;
        };
        // The first kept window of a run begins less than a stride after the run's start.
        let window = search.first_hit(self.tried).unwrap_or(len);
        known.min((window + 1).saturating_sub(search.stride()).max(at + 1))
    }

    /// Finds the best moved run that contains the token `at`, and possibly later ones.
    fn find_moved(&mut self, search: &mut Search<'a>, at: usize) {
        let stride = search.stride();
        if let Some(resumes) = self.budget.resumes(at, self.found(at)) {
            self.pass_over(at, resumes, stride);
            return;
        }
        // A run with min_run tokens from `at` on has a kept window in any stride of them.
        let until = at.saturating_add(stride);
        self.try_windows(search, at.max(self.tried)..until, at);
        self.tried = self.tried.max(until);
    }

    fn found(&self, at: usize) -> usize {
        self.best.as_ref().map_or(0, |best| best.end - at)
    }

    /// Skips windows because no look is left: up to `resumes`, or only those of one stride if a run is known.
    fn pass_over(&mut self, at: usize, resumes: usize, stride: usize) {
        let until = if self.best.is_some() {
            at.saturating_add(stride)
        } else {
            resumes
        };
        let from = self.tried.max(at);
        let until = until.min(self.follower.moved_len).max(from);
        self.skipped += (until - from) as u64;
        self.tried = until;
    }

    fn try_windows(&mut self, search: &mut Search<'a>, range: Range<usize>, at: usize) {
        let mut hits = std::mem::take(&mut self.hits);
        let mut tried = std::mem::take(&mut self.trying);
        search.hits(range, &mut hits);
        hits.retain(|&hit| {
            let is_crowded = search.is_crowded(hit);
            if !is_crowded {
                tried.extend(self.places(search, hit, at));
            }
            is_crowded
        });
        self.try_places(search, &mut tried, at);
        // If all windows have too many places, one run suffices. No window is tried twice before a run is found.
        let mut is_enough = false;
        for &hit in &hits {
            if !is_enough && search.is_new(hit) {
                tried.extend(self.places(search, hit, at));
                self.try_places(search, &mut tried, at);
                is_enough = self.best.is_some();
            }
        }
        self.hits = hits;
        self.trying = tried;
    }

    /// Looks up the places of a window, unless the budget is spent. Returns them with the window's last token.
    fn places(
        &mut self,
        search: &mut Search<'a>,
        hit: Hit,
        at: usize,
    ) -> Option<(usize, Range<usize>)> {
        if self.budget.is_spent(at, self.found(at)) {
            self.skipped += 1;
            return None;
        }
        let before = search.num_places();
        let places = search.places(hit);
        self.budget.spend(search.num_places() - before);
        self.spend_on_scope();
        Some((hit.start + WINDOW - 1, places))
    }

    fn try_places(
        &mut self,
        search: &Search<'a>,
        tried: &mut Vec<(usize, Range<usize>)>,
        at: usize,
    ) {
        // Once the most promising place was followed, most others need not be followed.
        let first = self.most_promising(search, tried);
        if let Some((last, place)) = first {
            self.try_place(search, search.place(place), last, at);
        }
        for (last, places) in tried.drain(..) {
            for place in places.filter(|&place| Some((last, place)) != first) {
                let place = search.place(place);
                if let Some(best) = &self.best
                    && best.in_order
                    && place.room() < best.end.saturating_sub(last)
                {
                    // The other places of this window have no room to reach as far.
                    break;
                }
                if self.budget.is_spent(at, self.found(at)) {
                    self.skipped += 1;
                    continue;
                }
                self.try_place(search, place, last, at);
            }
        }
    }

    /// The place that may reach furthest; of several, the nearest.
    fn most_promising(
        &self,
        search: &Search<'_>,
        tried: &[(usize, Range<usize>)],
    ) -> Option<(usize, usize)> {
        let len = self.follower.moved_len;
        let mut found = None;
        let mut best = (0, Reverse(usize::MAX));
        for (last, places) in tried {
            for place in places.clone() {
                let source = search.place(place);
                let reach = len.min(last.saturating_add(source.room()));
                if reach < best.0 {
                    break;
                }
                let key = (reach, Reverse(last.abs_diff(source.last)));
                if key > best {
                    best = key;
                    found = Some((*last, place));
                }
            }
        }
        found
    }

    /// Follows a place that may have the prompt's token `last`, if it may improve the cover at the token `at` or later.
    fn try_place(&mut self, search: &Search<'a>, place: Candidate<'_>, last: usize, at: usize) {
        let prompt = self.follower.wanted(Kinship::Moved).tokens;
        self.budget.spend(1);
        let rival = self.rival(&place, last);
        let same = self.best.is_some().then_some(at);
        let is_better = rival.is_none_or(|rival| self.may_be_better(rival, &place, last, same));
        let rival = rival.map(|rival| (rival.start.max(at), rival.end, rival.in_order));
        if !is_better && rival.is_some_and(|(.., is_in_order)| is_in_order)
            || self.is_too_short(&place, last)
            || !place.may_be_run(prompt, last, at, self.min_run)
        {
            return;
        }
        let mut known = self.best.iter().chain(&self.later);
        if known.any(|run| run.meets(last, &place)) || last == place.last && self.is_own(&place) {
            return;
        }
        let Some(covered) = self.least(&place, last, at, rival, is_better) else {
            return;
        };
        let mut path = Pieces::new();
        let (min_run, floor) = (self.min_run.min(search.min_run()), self.floor);
        let follower = &self.follower;
        let least = || {
            // The run must have min_run tokens that are not covered, and it starts here at the earliest ...
            let first = (last + 1).saturating_sub(min_run).max(floor);
            let start = follower.up(place.node, place.last, last, first, &mut Pieces::new());
            // ... and it must reach further than the best known run that it has to outdo.
            covered.max(start + min_run)
        };
        let done = follower.down(
            Kinship::Moved,
            place.node,
            place.last,
            last,
            least,
            &mut path,
        );
        self.skipped += done.skipped;
        self.budget.spend(done.looks);
        self.budget.compare(done.compared);
        let end = done.end;
        if path.is_empty() || end < covered {
            self.spend_on_scope();
            return;
        }
        let start = follower.up(place.node, place.last, last, floor, &mut path);
        self.spend_on_scope();
        if end - start >= self.min_run {
            self.add(start, Kinship::Moved, path, at);
        } else if end - start >= search.min_run() {
            self.remember_short(start, &path);
        }
    }

    fn spend_on_scope(&mut self) {
        let looks = self.follower.scope.map_or(0, InScope::take_looks);
        self.budget.spend(looks);
    }

    /// Whether the run through this place is known to be shorter than the policy's `min_run`.
    fn is_too_short(&self, place: &Candidate<'_>, last: usize) -> bool {
        let diagonal = place.last.wrapping_sub(last);
        let known = self.short.get(&(place.node, diagonal));
        known.is_some_and(|tokens| tokens.contains(&last))
    }

    /// Remembers a run that is too short. It may have many windows, but is followed only once.
    fn remember_short(&mut self, start: usize, path: &Pieces) {
        let Some(first) = path.first() else {
            return;
        };
        let diagonal = first.start.wrapping_sub(start);
        if self.short.len() >= self.short.capacity() {
            // Runs that end before all windows still to come cannot be met again.
            let tried = self.tried;
            self.short.retain(|_, tokens| tokens.end > tried);
        }
        for piece in path {
            let tokens = piece.start.wrapping_sub(diagonal)..piece.end.wrapping_sub(diagonal);
            self.short.insert((piece.node, diagonal), tokens);
        }
    }

    fn add(&mut self, start: usize, kinship: Kinship, path: Pieces, at: usize) {
        let mut run = Run {
            kinship,
            ..Run::own(start, path)
        };
        run.hops = self.hops(&run, start);
        if kinship == Kinship::Moved {
            run.in_order = self.is_in_order(&run, start.max(at), at);
        }
        if start <= at {
            self.improve(run, at);
        } else if kinship == Kinship::Own {
            self.own_later.push_back(run);
        } else if !self.is_outdone(&run) {
            self.later.retain(|known| !run.outdoes(known));
            self.later.push(run);
        }
    }

    fn is_outdone(&self, run: &Run) -> bool {
        let before = self
            .own_later
            .partition_point(|known| known.start <= run.start);
        let own = before.checked_sub(1).map(|at| &self.own_later[at]);
        let mut known = self.later.iter().chain(own);
        known.any(|known| known.outdoes(run))
    }

    /// The run that one through `place` and the prompt's token `last` is compared with: the best known one, or else the
    /// first later one if this one cannot begin before it.
    fn rival(&self, place: &Candidate<'_>, last: usize) -> Option<&Run> {
        let prompt = self.follower.prompt.tokens;
        self.best.as_ref().or_else(|| {
            self.first_later().filter(|first| {
                let token = first.start.checked_sub(1).map(|before| prompt[before]);
                let begins_within = last.checked_sub(first.start);
                begins_within.is_some_and(|back| place.begins_within(back + 1, token))
            })
        })
    }

    /// The end that a run through `place` must reach to be better than its rival, which is given as the token at which
    /// they are compared, its end, and whether it continues in order. `is_better` says whether the run may be better if
    /// both continue in order, or neither. `None` if it cannot be better.
    fn least(
        &mut self,
        place: &Candidate<'_>,
        last: usize,
        at: usize,
        rival: Option<(usize, usize, bool)>,
        is_better: bool,
    ) -> Option<usize> {
        let is_later = self.best.is_none();
        let (start, end, rival_goes_on) = rival.unwrap_or((at, at, false));
        if is_later && is_better && !rival_goes_on {
            return Some(at + 1);
        }
        let source = (place.last + start).checked_sub(last)?;
        match (self.goes_on(place.node, source, at), rival_goes_on) {
            (false, true) => None,
            (true, false) => Some(at + 1),
            _ => is_better.then_some(if is_later { at + 1 } else { end }),
        }
    }

    /// Whether the token `from` of a run continues in order.
    fn is_in_order(&mut self, run: &Run, from: usize, at: usize) -> bool {
        let source = run.source(from);
        let piece = run.path.iter().find(|piece| piece.end > source);
        piece.is_some_and(|piece| self.goes_on(piece.node, source, at))
    }

    /// Whether the slot `source` of an edge is after the previous one on a path that has both. Each edge between them
    /// is a look, once for each previous slot. If none is left, this counts as a place that was not tried.
    fn goes_on(&mut self, node: NodeIndex, source: usize, at: usize) -> bool {
        let (previous, end) = self.previous;
        if source < end {
            return false;
        }
        let forest = self.follower.forest;
        let mut above = node;
        let goes_on = loop {
            if end == 0 || above == previous {
                break true;
            }
            if let Some(&known) = self.goes_on.get(&above) {
                break known;
            }
            let edge = forest.node(above);
            if (edge.depth as usize * forest.block_size()) < end {
                break false;
            }
            if self.budget.is_spent(at, self.found(at)) {
                self.skipped += 1;
                return false;
            }
            self.budget.spend(1);
            above = edge.parent;
        };
        let mut below = node;
        while below != above {
            self.goes_on.insert(below, goes_on);
            below = forest.node(below).parent;
        }
        goes_on
    }

    /// Whether a run through `place` and the prompt's token `last` may be better than `known`, if both continue in
    /// order or neither: at the token `at`, which both contain, or at any token. It examines one edge only.
    fn may_be_better(
        &self,
        known: &Run,
        place: &Candidate<'_>,
        last: usize,
        at: Option<usize>,
    ) -> bool {
        let prompt = self.follower.wanted(Kinship::Moved).tokens;
        if known.end > prompt.len() {
            // A moved run does not reach as far.
            return false;
        }
        let Some(ahead) = known.end.checked_sub(last) else {
            return true;
        };
        // It must reach as far as the known run.
        if let Some(before) = ahead.checked_sub(1)
            && place
                .ahead(before)
                .is_some_and(|token| token != prompt[known.end - 1])
        {
            return false;
        }
        // If it reaches further, it is better.
        let goes_on = prompt
            .get(known.end)
            .is_some_and(|token| match place.ahead(ahead) {
                Some(other) => other == *token,
                None => place.room() > ahead,
            });
        goes_on || self.may_win_a_tie(known, place, last, at)
    }

    fn may_win_a_tie(
        &self,
        known: &Run,
        place: &Candidate<'_>,
        last: usize,
        at: Option<usize>,
    ) -> bool {
        let distance = last.abs_diff(place.last);
        // No run has fewer hops than a run of exact blocks.
        if known.hops > 1 || distance < known.distance() {
            return true;
        }
        let block_size = self.follower.forest.block_size();
        let node = self.follower.forest.node(place.node);
        let edge = node.depth as usize * block_size..node.end() as usize * block_size;
        let source = at.and_then(|at| (place.last + at).checked_sub(last).zip(Some(at)));
        let source = source.filter(|(source, _)| edge.contains(source));
        distance == known.distance()
            && source.is_none_or(|(source, at)| {
                self.slot(place.node, source) <= self.first_slot(known, at)
            })
    }

    fn slot(&self, node: NodeIndex, at: usize) -> u64 {
        if self.follower.path.is_some() {
            return at as u64;
        }
        let forest = self.follower.forest;
        let block_size = forest.block_size();
        let id = forest
            .node(node)
            .id(crate::ids::depth(at / block_size), block_size);
        u64::from(id) * block_size as u64 + (at % block_size) as u64
    }

    fn first_slot(&self, run: &Run, at: usize) -> u64 {
        let source = run.source(at);
        let piece = run.path.iter().find(|piece| piece.end > source);
        piece.map_or(0, |piece| self.slot(piece.node, source))
    }

    /// The most hops of the copy from the token `from` on.
    fn hops(&self, run: &Run, from: usize) -> u16 {
        let forest = self.follower.forest;
        let block_size = forest.block_size();
        let base = Usable::becomes(run.kinship, Label::EXACT).1;
        let source = run.source(from);
        let after = run.path.iter().filter(|piece| piece.end > source);
        let edges = after.map(|piece| {
            let node = forest.node(piece.node);
            if node.num_approximate() == 0 {
                return base;
            }
            let blocks = piece.start.max(source) / block_size..piece.end.div_ceil(block_size);
            let hops = blocks.map(|depth| {
                let label = node.payload(crate::ids::depth(depth), block_size).label;
                Usable::becomes(run.kinship, label).1
            });
            hops.max().unwrap_or(base)
        });
        edges.max().unwrap_or(base)
    }

    /// Whether the first of two runs that contain the token `at` is better. The order is: in order, further end, fewer
    /// hops from `at` on, smaller distance, lower source slot of `at`. Runs that share that slot end equally far in
    /// siblings: then fewer hops in the sibling win, then its lower slot.
    fn is_better(&self, first: &Run, second: &Run, at: usize) -> bool {
        let order = second
            .in_order
            .cmp(&first.in_order)
            .then_with(|| second.end.cmp(&first.end))
            .then_with(|| self.hops(first, at).cmp(&self.hops(second, at)))
            .then_with(|| first.distance().cmp(&second.distance()))
            .then_with(|| self.first_slot(first, at).cmp(&self.first_slot(second, at)))
            .then_with(|| self.last(first).cmp(&self.last(second)));
        order.is_lt()
    }

    fn last(&self, run: &Run) -> Option<(u16, u64)> {
        run.path.last().map(|piece| {
            let (node, at) = (piece.node, piece.end - 1);
            let forest = self.follower.forest;
            let block_size = forest.block_size();
            let depth = crate::ids::depth(at / block_size);
            let label = forest.node(node).payload(depth, block_size).label;
            (Usable::becomes(run.kinship, label).1, self.slot(node, at))
        })
    }
}
