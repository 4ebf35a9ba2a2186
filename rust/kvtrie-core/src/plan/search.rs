//! Where the windows of a prompt stand: looked up a little ahead of where the cover is, and each window once.

use std::ops::Range;

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::blocks::Place;
use crate::fingerprints::WINDOW;
use crate::ids::NodeIndex;
use crate::tree::RadixIndex;
use crate::windows::Windows;

/// Windows that are looked up at once at most. Where a run was just found only those that are asked for are, as it is followed
/// and not looked up; while nothing is found, twice as many each time.
const MOST: usize = 1024;

/// Places that are remembered before all are forgotten: what a search holds is bounded, whatever the prompt.
const MOST_PLACES: usize = 1 << 14;

/// Tokens that are compared at most to tell whether to follow a place.
const MOST_TOKENS: usize = 64;

/// A place where a window of the prompt may stand.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) node: NodeIndex,
    /// Position of the window's last token on the path through the node, which holds it.
    pub(super) last: usize,
    /// The tokens of the edge before that one, and from it on.
    before: &'a [u32],
    behind: &'a [u32],
    /// Whether the path begins with the edge.
    is_first: bool,
    /// Whether the path ends with the edge.
    is_last: bool,
}

impl Candidate<'_> {
    /// How many tokens of the prompt may follow the source from the window's last on, at most.
    pub(super) fn room(&self) -> usize {
        if self.is_last {
            self.behind.len()
        } else {
            usize::MAX
        }
    }

    /// The token that lies `ahead` tokens behind the window's last: none if that is in another edge.
    pub(super) fn ahead(&self, ahead: usize) -> Option<u32> {
        self.behind.get(ahead).copied()
    }

    /// Whether a run through this place does not hold the token `back` places before the window's last, which is `token` in the
    /// prompt, or none there: as far as the edge tells.
    pub(super) fn begins_within(&self, back: usize, token: Option<u32>) -> bool {
        match self.before.len().checked_sub(back) {
            Some(at) => token != Some(self.before[at]),
            None => self.is_first || token.is_none(),
        }
    }

    /// Whether a run through this place and the token `last` of the prompt may have `min_run` tokens and go beyond the token
    /// `at`, as far as one edge and some tokens tell.
    pub(super) fn may_be_run(
        &self,
        prompt: &[u32],
        last: usize,
        at: usize,
        min_run: usize,
    ) -> bool {
        // A longer run is sooner followed than looked at twice.
        let min_run = min_run.min(MOST_TOKENS);
        let pairs = self.behind.iter().zip(&prompt[last..]).take(min_run);
        let same = pairs.take_while(|(a, b)| a == b).count();
        if same == min_run {
            return true;
        }
        let ends_here = same < self.behind.len() || self.is_last;
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

/// A window of the prompt that may stand somewhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hit {
    /// Position of its first token in the prompt.
    pub(super) start: usize,
    hash: u64,
}

/// What is known of the places of a window.
#[derive(Clone, Debug)]
struct Known {
    count: usize,
    /// Those that are tried, once they were asked for.
    tried: Option<Range<usize>>,
    /// The round in which they were tried last.
    round: u64,
}

/// The windows of one prompt.
#[derive(Debug)]
pub(super) struct Search<'a> {
    index: &'a RadixIndex,
    windows: &'a Windows,
    tree: u32,
    tokens: &'a [u32],
    max_candidates: usize,
    /// Windows that were looked up last, and those among them that may stand somewhere.
    screened: Range<usize>,
    hits: Vec<Hit>,
    chunk: usize,
    /// Where windows stand, by hash: those of repetitive prompts are asked for once.
    known: HashMap<u64, Known, FixedState>,
    places: Vec<Candidate<'a>>,
    round: u64,
    dropped: u64,
    /// Windows that were looked up.
    num_screened: u64,
    /// Places that windows were found to have.
    num_places: u64,
    hashes: Vec<u64>,
    found: Vec<u32>,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        index: &'a RadixIndex,
        windows: &'a Windows,
        tree: u32,
        tokens: &'a [u32],
        max_candidates: usize,
    ) -> Self {
        Self {
            index,
            windows,
            tree,
            tokens,
            max_candidates,
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

    /// How far apart the windows are of which one lies in every run.
    pub(super) fn stride(&self) -> usize {
        self.windows.stride()
    }

    /// The shortest run that is found at any place: a policy may ask for longer ones.
    pub(super) fn min_run(&self) -> usize {
        self.stride() + (WINDOW - 1)
    }

    /// Windows that were looked up.
    pub(super) fn num_screened(&self) -> u64 {
        self.num_screened
    }

    /// Places that windows were found to have.
    pub(super) fn num_places(&self) -> u64 {
        self.num_places
    }

    /// Places that were passed over, because a window has too many.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Writes the windows that begin in a range and may stand somewhere to `hits`.
    pub(super) fn hits(&mut self, range: Range<usize>, hits: &mut Vec<Hit>) {
        hits.clear();
        if self.places.len() > MOST_PLACES || self.known.len() > MOST_PLACES {
            self.places.clear();
            self.known.clear();
        }
        let (mut from, end) = (range.start, range.end.min(self.num_windows()));
        if end <= self.screened.start {
            // A few, before those that were looked up ahead.
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

    /// Where the first window from `from` on begins that may stand somewhere.
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

    /// Looks up some windows from `from` on, of which `count` are wanted; answers whether there were any.
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

    /// Looks up the windows that begin in a range.
    fn screen(&mut self, range: Range<usize>, hits: &mut Vec<Hit>) {
        if range.is_empty() {
            return;
        }
        self.num_screened += range.len() as u64;
        let tokens = &self.tokens[range.start..range.end + WINDOW - 1];
        self.windows.hash_all(self.tree, tokens, &mut self.hashes);
        self.found.clear();
        self.windows.screen(&self.hashes, &mut self.found);
        hits.extend(self.found.iter().map(|&at| Hit {
            start: range.start + at as usize,
            hash: self.hashes[at as usize],
        }));
    }

    /// Whether a window has more places than are tried.
    pub(super) fn is_crowded(&mut self, hit: Hit) -> bool {
        self.known(hit).count > self.max_candidates
    }

    fn known(&mut self, hit: Hit) -> &mut Known {
        let (index, tree) = (self.index, self.tree);
        let is_of_tree = |id| index.tree_of_block(id) == Some(tree);
        self.known.entry(hit.hash).or_insert_with(|| Known {
            count: self
                .windows
                .num_places(hit.hash, tree, self.max_candidates, is_of_tree),
            tried: None,
            round: 0,
        })
    }

    /// A run was found: what was tried in vain may be tried again.
    pub(super) fn begin_round(&mut self) {
        self.round += 1;
    }

    /// Whether a window is met for the first time in this round.
    pub(super) fn is_new(&mut self, hit: Hit) -> bool {
        let round = self.round;
        std::mem::replace(&mut self.known(hit).round, round) != round
    }

    /// Where a window may stand, as numbers for [`Self::place`]: its most recent places, those with the most room first.
    pub(super) fn places(&mut self, hit: Hit) -> Range<usize> {
        let known = self.known(hit);
        if let Some(tried) = &known.tried {
            return tried.clone();
        }
        let count = known.count;
        let first = self.places.len();
        let (index, windows, tree) = (self.index, self.windows, self.tree);
        let block_size = index.block_size();
        // Those of other trees are none of this window's: they are left out before the newest are taken.
        let places = windows
            .places(hit.hash, tree)
            .filter(|&(id, _)| index.tree_of_block(id) == Some(tree))
            .take(self.max_candidates);
        self.places.extend(places.filter_map(|(id, which)| {
            let Place::Indexed { node, depth } = index.blocks.place(id) else {
                return None;
            };
            let edge = &index.nodes[node];
            let last = windows.end(depth, which);
            let (before, behind) = edge
                .run
                .tokens(block_size)
                .split_at_checked(last - edge.depth as usize * block_size)?;
            Some(Candidate {
                node,
                last,
                before,
                behind,
                is_first: edge.depth == 0,
                is_last: !edge.has_children(),
            })
        }));
        let places = first..self.places.len();
        // What follows a source with room may make it needless to follow others.
        self.places[places.clone()].sort_by_key(|place| std::cmp::Reverse(place.room()));
        self.num_places += places.len() as u64;
        self.dropped += count.saturating_sub(self.max_candidates) as u64;
        self.known(hit).tried = Some(places.clone());
        places
    }

    pub(super) fn place(&self, at: usize) -> Candidate<'a> {
        self.places[at]
    }
}
