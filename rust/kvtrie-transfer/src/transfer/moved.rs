//! Finds moved runs: blocks of a sender whose tokens the prompt has at other positions. They have one hop more.
//!
//! A *match* is a maximal chain of consecutive blocks of the sender whose tokens the prompt has at one distance. From
//! left to right, the match that contains the next token and reaches furthest is used. Of several, it is the one with
//! fewer hops, then the smaller distance, then the lowest slot. It is a run if that is long enough, and it is loaded if
//! the policy allows its context. Every match that contains a token has a block that
//! contains it, or ends in a partial block after such a block. So few windows are looked up per token.

use std::ops::Range;

use foldhash::quality::FixedState;
use hashbrown::HashMap;
use kvtrie_core::{Class, ReusePolicy};

use crate::transfer::context::Contexts;
use crate::transfer::digests::{Digest, Tokens, TransferKey};
use crate::transfer::manifest::BlockRun;
use crate::transfer::pairs::{Piece, distance};
use crate::transfer::wire::short;

/// The most places at which one window is tried. The nearest are chosen.
pub(super) const MAX_CANDIDATES: usize = 64;
pub(super) const MIN_RUN: usize = 16;

/// Contents of a window that is not hashed yet, and of one that the sender does not have.
const UNKNOWN: u32 = u32::MAX;
const NOWHERE: u32 = u32::MAX - 1;

#[derive(Clone, Copy)]
struct SentBlock {
    at: usize,
    len: usize,
    /// Number of the block's content. Blocks of equal tokens have the same.
    content: u32,
    run: usize,
    place: usize,
    hops: u16,
}

#[derive(Clone)]
struct MovedRun {
    start: usize,
    end: usize,
    blocks: Range<usize>,
}

pub(super) struct MoveSearch<'a> {
    runs: &'a [BlockRun<'a>],
    prompt: Tokens<'a>,
    key: &'a TransferKey,
    min_run: usize,
    block_size: usize,
    blocks: Vec<SentBlock>,
    /// Lengths of the partial block and of a whole block.
    lengths: [usize; 2],
    contents: HashMap<Digest, u32, FixedState>,
    places: Vec<Vec<u32>>,
    /// The content of each window, by window length and position.
    windows: [Vec<u32>; 2],
    /// The match found last at each distance.
    known: HashMap<i64, MovedRun, FixedState>,
}

impl<'a> MoveSearch<'a> {
    pub(super) fn new(
        runs: &'a [BlockRun<'a>],
        prompt: Tokens<'a>,
        key: &'a TransferKey,
        policy: &ReusePolicy,
        is_strict: bool,
    ) -> Self {
        let mut search = Self {
            runs,
            prompt,
            key,
            min_run: policy.min_run.unwrap_or(MIN_RUN),
            block_size: runs.first().map_or(1, BlockRun::block_size),
            blocks: Vec::new(),
            lengths: [0, runs.first().map_or(1, BlockRun::block_size)],
            contents: HashMap::default(),
            places: Vec::new(),
            windows: [Vec::new(), Vec::new()],
            known: HashMap::default(),
        };
        for (at, run) in runs.iter().enumerate() {
            let hops = run.hops() + 1;
            let is_usable = run.class() == Class::Exact || is_strict;
            if run.is_lookahead() || !is_usable || hops > policy.max_hops {
                continue;
            }
            for (place, digest) in run.digests().iter().enumerate() {
                let from = run.start() + place * search.block_size;
                search.add(
                    SentBlock {
                        at: from,
                        len: search.block_size.min(run.end() - from),
                        content: 0,
                        run: at,
                        place,
                        hops,
                    },
                    *digest,
                );
            }
        }
        search
    }

    fn add(&mut self, block: SentBlock, digest: Digest) {
        let next = short(self.places.len());
        let content = *self.contents.entry(digest).or_insert(next);
        if content == next {
            self.places.push(Vec::new());
        }
        self.places[content as usize].push(short(self.blocks.len()));
        if block.len < self.block_size {
            self.lengths[0] = block.len;
        }
        self.blocks.push(SentBlock { content, ..block });
    }

    /// The runs that fill the gaps. `in_place` are the prompt's tokens whose KV is the sender's at the same position,
    /// which is context of the runs.
    pub(super) fn cover(
        &mut self,
        gaps: &[Range<usize>],
        in_place: &[Range<usize>],
        policy: &ReusePolicy,
    ) -> Vec<Piece> {
        let (mut pieces, mut runs) = (Vec::new(), Vec::new());
        if self.blocks.is_empty() {
            return pieces;
        }
        for gap in gaps {
            let mut at = gap.start;
            // A match that contains `at` has a block from this position on, so earlier windows are not needed.
            let mut from = (at + 1).saturating_sub(self.block_size + self.lengths[0]);
            while at < gap.end {
                // What other runs leave of a run is one only if it is long enough.
                let best = self.best(from, at, gap.end);
                let Some((found, end)) = best.filter(|(_, end)| end - at >= self.min_run) else {
                    at += 1;
                    from = at;
                    continue;
                };
                runs.push((found, at..end));
                at = end;
                from = (at + 1).saturating_sub(self.block_size + self.lengths[0]);
            }
        }
        // The share is one of the runs that are loaded, and contexts are those without it (rules P7 and P17).
        let mut contexts = Contexts::new(policy, in_place);
        runs.retain(|(found, range)| {
            let start = range.start.saturating_add(policy.recompute_first);
            let stop = range.end.saturating_sub(policy.recompute_last);
            start < stop && contexts.admit(start..stop, self.source(found, start))
        });
        // Nobody chooses tokens of a transfer, so a policy's share is that of fronts.
        let front = policy.front(runs.iter().map(|(_, range)| range.len()));
        for (found, range) in runs {
            let start = (range.start + front).min(range.end);
            let stop = range.end.saturating_sub(policy.recompute_last).max(start);
            self.emit(&found, start..stop, &mut pieces);
        }
        pieces
    }

    /// The match that contains `at` and reaches furthest, found through a window that starts in `from..=at`, and its
    /// end, which is at most `limit`.
    fn best(&mut self, from: usize, at: usize, limit: usize) -> Option<(MovedRun, usize)> {
        let mut best: Option<(usize, (u16, u64, u64), MovedRun)> = None;
        for window in from..=at {
            for length in [1, 0] {
                // A partial block alone is a match only if it is long enough.
                if length == 0 && (self.lengths[0] < self.min_run || self.lengths[0] == 0) {
                    continue;
                }
                let content = self.content(window, length);
                if content == NOWHERE {
                    continue;
                }
                for place in self.nearest(content, window) {
                    let found = self.follow(window, place);
                    let is_long = found.end - found.start >= self.min_run;
                    if !is_long || !(found.start..found.end).contains(&at) {
                        continue;
                    }
                    let end = found.end.min(limit);
                    if best.as_ref().is_some_and(|best| best.0 > end) {
                        continue;
                    }
                    let rank = self.rank(&found, at, end);
                    let is_better = best
                        .as_ref()
                        .is_none_or(|best| end > best.0 || rank < best.1);
                    if is_better {
                        best = Some((end, rank, found));
                    }
                }
            }
        }
        best.map(|(end, _, found)| (found, end))
    }

    fn rank(&self, found: &MovedRun, at: usize, end: usize) -> (u16, u64, u64) {
        let block = |token: usize| found.blocks.start + (token - found.start) / self.block_size;
        let hops = self.blocks[block(at)..=block(end - 1)]
            .iter()
            .map(|block| block.hops);
        let first = &self.blocks[found.blocks.start];
        let (source, here) = (first.at + at - found.start, &self.blocks[block(at)]);
        let id = self.runs[here.run].block(here.place);
        let slot = u64::from(id.0) * self.block_size as u64 + (source - here.at) as u64;
        (
            hops.max().unwrap_or(0),
            distance(at, source).unsigned_abs(),
            slot,
        )
    }

    /// The places of a content that are nearest to a window. At equal distance, the earlier place comes first.
    fn nearest(&self, content: u32, window: usize) -> Vec<usize> {
        let places = &self.places[content as usize];
        let at = |place: u32| self.blocks[place as usize].at;
        let (mut low, mut high) = (0, 0);
        if places.len() <= MAX_CANDIDATES {
            high = places.len();
        } else {
            low = places.partition_point(|&place| at(place) < window);
            high = high.max(low);
            while high - low < MAX_CANDIDATES {
                let before = low.checked_sub(1).map(|low| window - at(places[low]));
                let after = places.get(high).map(|&place| at(place) - window);
                match (before, after) {
                    (Some(before), Some(after)) if before > after => high += 1,
                    (Some(_), _) => low -= 1,
                    _ => high += 1,
                }
            }
        }
        places[low..high]
            .iter()
            .map(|&place| place as usize)
            .collect()
    }

    fn follow(&mut self, window: usize, place: usize) -> MovedRun {
        let delta = distance(window, self.blocks[place].at);
        if let Some(known) = self.known.get(&delta)
            && known.blocks.contains(&place)
        {
            return known.clone();
        }
        let mut found = MovedRun {
            start: window,
            end: window + self.blocks[place].len,
            blocks: place..place + 1,
        };
        while let Some(before) = found.blocks.start.checked_sub(1)
            && self.adjoin(before, found.blocks.start)
            && let Some(start) = found.start.checked_sub(self.block_size)
            && self.content(start, 1) == self.blocks[before].content
        {
            (found.start, found.blocks.start) = (start, before);
        }
        while found.blocks.end < self.blocks.len()
            && self.adjoin(found.blocks.end - 1, found.blocks.end)
        {
            let next = &self.blocks[found.blocks.end];
            let (len, content) = (next.len, next.content);
            let length = usize::from(len == self.block_size);
            if self.content(found.end, length) != content {
                break;
            }
            found.end += len;
            found.blocks.end += 1;
        }
        self.known.insert(delta, found.clone());
        found
    }

    fn adjoin(&self, before: usize, after: usize) -> bool {
        self.blocks[before].at + self.block_size == self.blocks[after].at
    }

    fn content(&mut self, window: usize, length: usize) -> u32 {
        let len = self.lengths[length];
        let end = window + len;
        if len == 0 || end > self.prompt.ids.len() {
            return NOWHERE;
        }
        let known = &mut self.windows[length];
        if known.is_empty() {
            known.resize(self.prompt.ids.len(), UNKNOWN);
        }
        if known[window] == UNKNOWN {
            let digest = self.key.block(self.prompt.slice(window, end));
            known[window] = self.contents.get(&digest).copied().unwrap_or(NOWHERE);
        }
        known[window]
    }

    /// The sender's position of a token of a match.
    fn source(&self, found: &MovedRun, at: usize) -> usize {
        self.blocks[found.blocks.start].at + at - found.start
    }

    fn emit(&self, found: &MovedRun, range: Range<usize>, pieces: &mut Vec<Piece>) {
        let mut at = range.start;
        while at < range.end {
            let first = found.blocks.start + (at - found.start) / self.block_size;
            let run = self.blocks[first].run;
            let other = self.blocks[first..found.blocks.end]
                .iter()
                .position(|block| block.run != run);
            let end = other.map_or(range.end, |blocks| {
                let token = found.start + (first + blocks - found.blocks.start) * self.block_size;
                token.min(range.end)
            });
            pieces.push(Piece {
                start: at,
                end,
                source: self.source(found, at),
                class: Class::Approximate,
                hops: self.blocks[first].hops,
                run,
            });
            at = end;
        }
    }
}
