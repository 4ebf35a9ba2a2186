//! The pieces of a prompt that are loaded, as pairs of a sender's and a receiver's block.

use std::ops::Range;

use kvtrie_core::{BlockId, Class};

use crate::transfer::manifest::BlockRun;
use crate::transfer::tables::Table;

/// Tokens to load. They are inside one block of the sender and one of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPair {
    /// The group that both blocks belong to.
    pub group: u32,
    /// The sender's block.
    pub remote: BlockId,
    /// The receiver's block, which is block `start / block_size` of its table. `None` if no table was given, or if it
    /// has no id there.
    pub local: Option<BlockId>,
    /// First position in the prompt. Of a state, the number of tokens before it, as `end`. At the sender, the token is at
    /// `start - delta`.
    pub start: usize,
    /// One past the last position.
    pub end: usize,
    /// Number of positions by which K must be rotated.
    pub delta: i64,
    /// The label of the KV in the prompt.
    pub class: Class,
    /// Hops of the KV in the prompt.
    pub hops: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) source: usize,
    pub(super) class: Class,
    pub(super) hops: u16,
    pub(super) run: usize,
}

impl Piece {
    pub(super) fn inside(mut self, range: &Range<usize>) -> Option<Self> {
        let start = self.start.max(range.start);
        self.source += start - self.start;
        self.start = start;
        self.end = self.end.min(range.end);
        (self.start < self.end).then_some(self)
    }
}

pub(super) fn cut(pieces: &[Piece], ranges: &[Range<usize>]) -> Vec<Piece> {
    let mut found = Vec::with_capacity(pieces.len());
    let mut first = 0;
    for range in ranges {
        while pieces
            .get(first)
            .is_some_and(|piece| piece.end <= range.start)
        {
            first += 1;
        }
        let inside = pieces[first..]
            .iter()
            .take_while(|piece| piece.start < range.end);
        found.extend(inside.filter_map(|piece| piece.inside(range)));
    }
    found
}

pub(super) fn gaps(range: Range<usize>, pieces: &[Piece]) -> Vec<Range<usize>> {
    let (mut found, mut at) = (Vec::new(), range.start);
    for piece in pieces.iter().filter(|piece| piece.end > range.start) {
        if piece.start >= range.end {
            break;
        }
        if at < piece.start {
            found.push(at..piece.start);
        }
        at = at.max(piece.end);
    }
    if at < range.end {
        found.push(at..range.end);
    }
    found
}

pub(super) fn pair_up(
    pieces: &[Piece],
    runs: &[BlockRun<'_>],
    block_size: usize,
    table: Option<Table<'_>>,
    out: &mut Vec<BlockPair>,
) {
    let local = |at: usize| match table? {
        Table::Full(blocks) => blocks.get(at / block_size).copied(),
        Table::At(_, ids) => {
            let first = at - at % block_size;
            let found = ids.binary_search_by_key(&first, |&(position, _)| position);
            found.ok().map(|found| ids[found].1)
        }
    };
    for piece in pieces {
        let run = &runs[piece.run];
        let theirs = run.block_size();
        let delta = distance(piece.start, piece.source);
        let mut at = piece.start;
        let mut is_state = at == piece.end;
        while at < piece.end || is_state {
            is_state = false;
            let source = piece.source + at - piece.start;
            let left = (theirs - source % theirs).min(block_size - at % block_size);
            let end = (at + left).min(piece.end);
            out.push(BlockPair {
                group: run.group(),
                remote: run.block((source - run.start()) / theirs),
                local: local(at),
                start: at,
                end,
                delta,
                class: piece.class,
                hops: piece.hops,
            });
            at = end;
        }
    }
}

pub(super) fn distance(here: usize, there: usize) -> i64 {
    i64::try_from(here).unwrap_or(i64::MAX) - i64::try_from(there).unwrap_or(i64::MAX)
}
