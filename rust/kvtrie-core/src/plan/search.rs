//! Finds where the windows of a prompt are cached. They are looked up a little ahead of the cover, each window once.

use std::ops::Range;

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::ids::NodeIndex;
use crate::moved::{WINDOW, Windows};
use crate::plan::cached::Cached;
use crate::plan::path::CachedPath;
use crate::plan::scope::InScope;
use crate::storage::blocks::BlockState;
use crate::storage::forest::Forest;

/// The most windows looked up at once. While none is found, each lookup takes twice as many. After a run, which is
/// followed by comparison, a lookup takes only the requested ones.
const MOST: usize = 1024;

/// Number of places remembered before all are forgotten, which bounds the memory of a search.
const MOST_PLACES: usize = 1 << 14;

/// The most tokens compared to decide whether to follow a place.
const MOST_TOKENS: usize = 64;

/// In a plan restricted to a path or a scope, the number of other places that may be skipped per place that may be
/// tried.
const PASSED_OVER: usize = 16;

/// Number of places of a window that are examined to see whether one is on the path.
const FEW_PLACES: usize = 4;

#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) node: NodeIndex,
    /// Position of the window's last token on the path through the node.
    pub(super) last: usize,
    /// Tokens of the edge before that token, and those from it on.
    before: &'a [u32],
    after: &'a [u32],
    is_first: bool,
    is_last: bool,
}

impl Candidate<'_> {
    /// The most tokens that can be equal from the window's last token on.
    pub(super) fn room(&self) -> usize {
        if self.is_last {
            self.after.len()
        } else {
            usize::MAX
        }
    }

    /// The token `ahead` places after the window's last token, if it is in this edge.
    pub(super) fn ahead(&self, ahead: usize) -> Option<u32> {
        self.after.get(ahead).copied()
    }

    /// Whether a run through this place cannot include the token `back` places before the window's last. `token` is the
    /// prompt's token there. Only this edge is examined.
    pub(super) fn begins_within(&self, back: usize, token: Option<u32>) -> bool {
        match self.before.len().checked_sub(back) {
            Some(at) => token != Some(self.before[at]),
            None => self.is_first || token.is_none(),
        }
    }

    /// Whether a run through this place and the token `last` of the prompt may have `min_run` tokens and reach beyond
    /// the token `at`. Only this edge and a limited number of tokens are examined.
    pub(super) fn may_be_run(
        &self,
        prompt: &[u32],
        last: usize,
        at: usize,
        min_run: usize,
    ) -> bool {
        // Following a longer run is cheaper than checking it first.
        let min_run = min_run.min(MOST_TOKENS);
        let pairs = self.after.iter().zip(&prompt[last..]).take(min_run);
        let same = pairs.take_while(|(a, b)| a == b).count();
        if same == min_run {
            return true;
        }
        let ends_here = same < self.after.len() || self.is_last;
        if same == 0 || ends_here && last + same <= at {
            return false;
        }
        let pairs = self.before.iter().rev().zip(prompt[..last].iter().rev());
        let more = pairs
            .take(min_run - same)
            .take_while(|(a, b)| a == b)
            .count();
        same + more >= min_run || !ends_here || more == self.before.len() && !self.is_first
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Hit {
    pub(super) start: usize,
    hash: u64,
}

#[derive(Clone, Debug)]
struct Known {
    count: usize,
    /// The places tried; set on first request.
    tried: Option<Range<usize>>,
    round: u64,
}

#[derive(Debug)]
pub(super) struct Search<'a> {
    forest: &'a Forest,
    windows: &'a Windows,
    tree: u32,
    path: Option<&'a CachedPath>,
    scope: Option<&'a InScope<'a>>,
    tokens: &'a [u32],
    max_candidates: usize,
    /// The range of windows looked up last, and those of them that may be cached.
    screened: Range<usize>,
    hits: Vec<Hit>,
    chunk: usize,
    /// Windows by hash, so that a repetitive prompt looks up each once.
    known: HashMap<u64, Known, FixedState>,
    places: Vec<Candidate<'a>>,
    round: u64,
    dropped: u64,
    num_screened: u64,
    num_places: u64,
    hashes: Vec<u64>,
    found: Vec<u32>,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        cached: &Cached<'a>,
        windows: &'a Windows,
        tree: u32,
        tokens: &'a [u32],
    ) -> Self {
        Self {
            forest: cached.forest,
            windows,
            tree,
            path: cached.path,
            scope: cached.scope,
            tokens,
            max_candidates: cached.config.max_candidates,
            screened: 0..0,
            hits: Vec::new(),
            chunk: 1,
            known: HashMap::default(),
            places: Vec::new(),
            round: 1,
            dropped: 0,
            num_screened: 0,
            num_places: 0,
            hashes: Vec::new(),
            found: Vec::new(),
        }
    }

    fn num_windows(&self) -> usize {
        (self.tokens.len() + 1).saturating_sub(WINDOW)
    }

    /// Of any this many consecutive windows, one is kept.
    pub(super) fn stride(&self) -> usize {
        self.windows.stride()
    }

    pub(super) fn min_run(&self) -> usize {
        self.stride() + (WINDOW - 1)
    }

    pub(super) fn num_screened(&self) -> u64 {
        self.num_screened
    }

    pub(super) fn num_places(&self) -> u64 {
        self.num_places
    }

    /// Number of places that were not tried because their window has too many.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The windows that begin in a range and may be cached.
    pub(super) fn hits(&mut self, range: Range<usize>, hits: &mut Vec<Hit>) {
        hits.clear();
        if self.places.len() > MOST_PLACES || self.known.len() > MOST_PLACES {
            self.places.clear();
            self.known.clear();
        }
        let (mut from, end) = (range.start, range.end.min(self.num_windows()));
        if end <= self.screened.start {
            // These few windows precede the range that was looked up ahead.
            self.screen(from..end, hits);
            return;
        }
        while from < end {
            if !self.screened.contains(&from) && !self.screen_ahead(from, end - from) {
                return;
            }
            let until = end.min(self.screened.end);
            let first = self.hits.partition_point(|hit| hit.start < from);
            hits.extend(
                self.hits[first..]
                    .iter()
                    .take_while(|hit| hit.start < until),
            );
            from = until;
        }
    }

    pub(super) fn first_hit(&mut self, from: usize) -> Option<usize> {
        let mut from = from;
        loop {
            if !self.screened.contains(&from) && !self.screen_ahead(from, 1) {
                return None;
            }
            let first = self.hits.partition_point(|hit| hit.start < from);
            if let Some(hit) = self.hits.get(first) {
                return Some(hit.start);
            }
            from = self.screened.end;
        }
    }

    /// Looks up windows from `from` on; returns whether there were any.
    fn screen_ahead(&mut self, from: usize, count: usize) -> bool {
        self.chunk = if from == self.screened.end {
            (2 * self.chunk).clamp(count, MOST.max(count))
        } else {
            count
        };
        self.screened = from..self
            .num_windows()
            .min(from.saturating_add(self.chunk))
            .max(from);
        let mut hits = std::mem::take(&mut self.hits);
        hits.clear();
        self.screen(self.screened.clone(), &mut hits);
        self.hits = hits;
        !self.screened.is_empty()
    }

    fn screen(&mut self, range: Range<usize>, hits: &mut Vec<Hit>) {
        if range.is_empty() {
            return;
        }
        self.num_screened += range.len() as u64;
        let tokens = &self.tokens[range.start..range.end + WINDOW - 1];
        self.windows.hash_all(self.tree, tokens, &mut self.hashes);
        self.found.clear();
        self.windows.screen(&self.hashes, &mut self.found);
        if let Some(path) = self.path {
            let mut found = std::mem::take(&mut self.found);
            found.retain(|&at| self.may_be_on(path, self.hashes[at as usize]));
            self.found = found;
        }
        hits.extend(self.found.iter().map(|&at| Hit {
            start: range.start + at as usize,
            hash: self.hashes[at as usize],
        }));
    }

    /// Whether a window has a place on a path, or more places than are examined.
    fn may_be_on(&self, path: &CachedPath, hash: u64) -> bool {
        let mut places = self.windows.places(hash, self.tree);
        let is_on = |(id, _)| match self.forest.blocks().state(id) {
            BlockState::Indexed { node, depth } => {
                path.end_after(self.forest, node, depth).is_some()
            }
            _ => false,
        };
        places.by_ref().take(FEW_PLACES).any(is_on) || places.next().is_some()
    }

    /// Whether the window has more places than are tried.
    pub(super) fn is_crowded(&mut self, hit: Hit) -> bool {
        let most = self.most_looked_at();
        self.path.is_none() && self.known(hit).count > most
    }

    /// Counts of places are exact above this number. For a path it is 0, because its places are known only when they
    /// are tried.
    fn enough(&self) -> usize {
        self.path.map_or(self.max_candidates, |_| 0)
    }

    /// The most places of a window that are looked at. More than `max_candidates` are, where some may be skipped.
    fn most_looked_at(&self) -> usize {
        if self.path.is_some() || self.scope.is_some() {
            self.max_candidates.saturating_mul(PASSED_OVER)
        } else {
            self.max_candidates
        }
    }

    fn known(&mut self, hit: Hit) -> &mut Known {
        let (forest, tree) = (self.forest, self.tree);
        let is_of_tree = |id| forest.tree_of_block(id) == Some(tree);
        let enough = self.enough();
        self.known.entry(hit.hash).or_insert_with(|| Known {
            count: self.windows.num_places(hit.hash, tree, enough, is_of_tree),
            tried: None,
            round: 0,
        })
    }

    /// Begins a round after a run was found: windows that were tried in vain may be tried again.
    pub(super) fn begin_round(&mut self) {
        self.round += 1;
    }

    pub(super) fn is_new(&mut self, hit: Hit) -> bool {
        let round = self.round;
        std::mem::replace(&mut self.known(hit).round, round) != round
    }

    /// The most recent places of a window, sorted by room, as numbers for [`Self::place`].
    pub(super) fn places(&mut self, hit: Hit) -> Range<usize> {
        let known = self.known(hit);
        if let Some(tried) = &known.tried {
            return tried.clone();
        }
        let count = known.count;
        let first = self.places.len();
        let (forest, windows, tree) = (self.forest, self.windows, self.tree);
        // Places of other trees are not among the recent ones.
        let places = windows
            .places(hit.hash, tree)
            .filter(|&(id, _)| forest.tree_of_block(id) == Some(tree));
        let most = self.most_looked_at();
        let mut num_looked_at = 0;
        for (id, which) in places.take(most) {
            if self.places.len() - first == self.max_candidates {
                break;
            }
            num_looked_at += 1;
            self.places.extend(self.candidate(id, which));
        }
        let places = first..self.places.len();
        // Those with the most room come first, so that others may be skipped.
        self.places[places.clone()].sort_by_key(|place| std::cmp::Reverse(place.room()));
        self.num_places += num_looked_at as u64;
        self.dropped += count.saturating_sub(num_looked_at.max(self.enough())) as u64;
        self.known(hit).tried = Some(places.clone());
        places
    }

    /// The place of a window; `None` if the plan may not use it.
    fn candidate(&self, id: u32, which: u64) -> Option<Candidate<'a>> {
        let (forest, windows) = (self.forest, self.windows);
        let BlockState::Indexed { node, depth } = forest.blocks().state(id) else {
            return None;
        };
        let edge = forest.node(node);
        let block_size = forest.block_size();
        let last = windows.end(depth, which);
        let mut tokens = edge.blocks.tokens(block_size);
        let mut is_last = !edge.has_children();
        if let Some(path) = self.path {
            let end = path.end_after(forest, node, depth)?;
            tokens = tokens.get(..(end - edge.depth) as usize * block_size)?;
            is_last = path.edge_at(end).is_none();
        }
        if self.scope.is_some_and(|scope| !scope.has(node, depth)) {
            return None;
        }
        let (before, after) = tokens.split_at_checked(last - edge.depth as usize * block_size)?;
        Some(Candidate {
            node,
            last,
            before,
            after,
            is_first: edge.depth == 0,
            is_last,
        })
    }

    pub(super) fn place(&self, at: usize) -> Candidate<'a> {
        self.places[at]
    }
}
