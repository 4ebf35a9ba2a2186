//! Finds where a prompt continues next to groups with windows and states, and what is loaded of these (rule G2 in
//! `docs/design.md`).
//!
//! A prompt continues at the deepest position within the exact tokens of the groups that attend to all of them, at
//! which each window has all blocks that reach into it, and each group of states one of exactly the tokens before it.
//! The search goes from the end towards the front, from one gap of a window or one state to the next.

use std::collections::BTreeMap;
use std::ops::Range;

use kvtrie_core::{Class, GroupKind, ReusePolicy};

use crate::transfer::digests::{Digest, Tokens, TransferKey};
use crate::transfer::manifest::BlockRun;
use crate::transfer::own;
use crate::transfer::pairs::{Piece, cut};

/// What is there of a group with a window or states: at the sender, or cached here.
pub(super) struct Further {
    kind: GroupKind,
    /// Tokens per block of the receiver.
    block_size: usize,
    /// What the sender has of the prompt, ascending. States are pieces without tokens.
    sent: Vec<Piece>,
    /// What the receiver has of a window's KV.
    cached: Range<usize>,
    /// Positions at which there is KV of a window, or states as empty ranges: ascending, disjoint and not adjacent.
    there: Vec<Range<usize>>,
}

impl Further {
    /// `cached` is the number of tokens at which the receiver can continue without the sender.
    pub(super) fn new(
        kind: GroupKind,
        block_size: usize,
        runs: &[BlockRun<'_>],
        prompt: Tokens<'_>,
        prefixes: &BTreeMap<usize, Digest>,
        key: &TransferKey,
        cached: usize,
    ) -> Self {
        let (sent, cached) = match kind {
            GroupKind::Window { window } => (
                own::in_place(runs, prompt, prefixes, key, &ReusePolicy::EXACT_ONLY, false),
                needed(window, block_size, cached),
            ),
            // A state inside a block of the receiver is in no table of it.
            GroupKind::State => (states(runs, prefixes, block_size), cached..cached),
        };
        let mut all: Vec<Range<usize>> = sent.iter().map(|piece| piece.start..piece.end).collect();
        all.push(cached.clone());
        all.sort_unstable_by_key(|range| (range.start, range.end));
        let mut there: Vec<Range<usize>> = Vec::with_capacity(all.len());
        for range in all {
            match there.last_mut() {
                Some(last) if range.start <= last.end && kind != GroupKind::State => {
                    last.end = last.end.max(range.end);
                }
                _ => there.push(range),
            }
        }
        Self {
            kind,
            block_size,
            sent,
            cached,
            there,
        }
    }

    /// The deepest position up to `end` at which the group has what it needs.
    fn at_most(&self, mut end: usize) -> usize {
        loop {
            let before = self.there.partition_point(|range| match self.kind {
                GroupKind::State => range.start <= end,
                GroupKind::Window { .. } => range.start < end,
            });
            let Some(range) = before.checked_sub(1).map(|at| &self.there[at]) else {
                return 0;
            };
            end = end.min(range.end);
            match self.kind {
                GroupKind::State => return end,
                GroupKind::Window { window }
                    if range.start <= needed(window, self.block_size, end).start =>
                {
                    return end;
                }
                // No position in this range has its window in it.
                GroupKind::Window { .. } => end = range.start,
            }
        }
    }

    /// What is loaded to continue at a position.
    pub(super) fn loaded(&self, at: usize) -> Vec<Piece> {
        match self.kind {
            GroupKind::Window { window } => {
                let (needed, cached) = (needed(window, self.block_size, at), &self.cached);
                let around = [
                    needed.start..needed.end.min(cached.start),
                    needed.start.max(cached.end)..needed.end,
                ];
                cut(&self.sent, &around)
            }
            GroupKind::State if at == 0 || at == self.cached.start => Vec::new(),
            GroupKind::State => {
                let place = self.sent.binary_search_by_key(&at, |piece| piece.start);
                place.map(|place| self.sent[place]).into_iter().collect()
            }
        }
    }
}

/// The tokens of a window's group that a prompt needs to continue at a position: all blocks that reach into the window.
fn needed(window: usize, block_size: usize, at: usize) -> Range<usize> {
    let first = at.saturating_sub(window - 1);
    first - first % block_size..at
}

fn states(
    runs: &[BlockRun<'_>],
    prefixes: &BTreeMap<usize, Digest>,
    block_size: usize,
) -> Vec<Piece> {
    let is_own = |run: &BlockRun<'_>| {
        let prefix = prefixes.get(&run.start());
        run.start().is_multiple_of(block_size)
            && prefix.is_some_and(|prefix| prefix == run.prefix())
    };
    let own = runs.iter().enumerate().filter(|(_, run)| is_own(run));
    let piece = |(at, run): (usize, &BlockRun<'_>)| Piece {
        start: run.start(),
        end: run.start(),
        source: run.start(),
        class: Class::Exact,
        hops: 0,
        run: at,
    };
    own.map(piece).collect()
}

/// The deepest position up to `end` at which all groups have what they need.
pub(super) fn at_most(groups: &[(usize, Further)], mut end: usize) -> usize {
    loop {
        let of_all = |end, (_, group): &(usize, Further)| group.at_most(end);
        let found = groups.iter().fold(end, of_all);
        if found == end {
            return found;
        }
        end = found;
    }
}
