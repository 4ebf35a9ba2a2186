//! Plans: how to build the KV of a prompt, and the lease that keeps a plan valid (D7, D13, D19).
//!
//! A plan is made in one pass from left to right, as a function of the prompt, the policy and the cache. It has blocks
//! in place, the partial block after them, and *runs* that cover the rest (rules P1 to P20 in `docs/design.md`).
//!
//! `draft` assembles the parts, `cover` covers one token at a time, `search` looks up windows, `reach` follows the
//! prompt along a source by comparing memory, `usable` says what a policy allows, and `context` what a moved run was
//! computed after. A run with `min_run` tokens from a token on has a kept window of eight tokens within `min_run`
//! tokens after it, so about a dozen windows are looked up per run, whatever its length. Of several places, only those
//! that may continue in order, or reach further than the best so far, are followed. So a plan costs the lookup, one
//! comparison of each run, a few cache misses per run, and one window lookup per token that no run covers.

mod budget;
mod cached;
mod carried;
mod context;
mod cover;
mod draft;
mod moves;
mod path;
mod reach;
mod rebuild;
mod recompute;
mod scope;
mod search;
#[cfg(test)]
mod tests;
mod usable;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Result, invalid};
use crate::grade::Grade;
use crate::groups::GroupKind;
use crate::ids::BlockId;
use crate::pins::Lease;
use crate::policy::{Repair, ReusePolicy};
use crate::session::SessionId;
use crate::storage::slab::Handle;
use crate::tokens::{Item, Snapshot, TokenSequence};

pub(crate) use cached::Cached;
pub(crate) use carried::Carried;
pub(crate) use draft::Draft;
pub(crate) use path::CachedPath;
pub(crate) use scope::InScope;

pub use context::MovedRun;
pub use moves::Move;

/// How exact the KV of a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// The same whole prefix and position, computed from exact KV.
    Exact = 0,
    /// The same tokens in another context or at another position.
    Approximate = 1,
    /// Not cached: the engine computes it.
    Compute = 2,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Approximate => "approximate",
            Self::Compute => "to compute",
        })
    }
}

/// A range of the prompt and where its KV comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First token of the prompt.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
    /// Where the source's first token is in its own prompt, in tokens. For tokens to compute, equal to `start`.
    pub old_start: usize,
    /// New position minus old position of every token: by how much K is rotated. It differs from
    /// [`delta`](Self::delta) only where items say how many positions they take ([`Item::taking`](crate::Item::taking)).
    pub position_delta: i64,
    /// How exact the KV is.
    pub class: Class,
    /// Hops of the KV in the prompt: those of the source, plus one for a moved run. 0 for tokens to compute.
    pub hops: u16,
    /// Kinds of spans of the source tokens, as a bit set (see [`RadixIndex::kinds`](crate::RadixIndex::kinds)).
    pub kinds: u64,
}

impl Segment {
    /// New place minus old place, in tokens.
    #[must_use]
    pub fn delta(&self) -> i64 {
        Self::distance(self.start, self.old_start)
    }

    fn distance(new: usize, old: usize) -> i64 {
        i64::try_from(new).unwrap_or(i64::MAX) - i64::try_from(old).unwrap_or(i64::MAX)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Copied {
    start: usize,
    end: usize,
    old_start: usize,
    position_delta: i64,
    /// Blocks of the source, as a range of the plan's source ids. The first contains `old_start`.
    ids: Range<usize>,
}

/// What a plan continues with in one group besides group 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPart {
    /// What the group keeps.
    pub kind: GroupKind,
    /// Position of the first block's first token; of a state, the number of tokens before it.
    pub start: usize,
    /// The blocks from there to the end of what is in place, or the slot of the state. Empty if nothing is in place, or
    /// if a window has to be copied ([`ReusePlan::moves_of_group`]) or rebuilt ([`ReusePlan::rebuild`]) as a whole.
    pub blocks: Vec<BlockId>,
    /// Of a window, what comes with moved runs ([`ReusePlan::moves_of_group`]), ascending: of the tokens that it needs
    /// and lacks, those that it has at their source.
    pub(crate) carried: Vec<Carried>,
}

/// Options of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// Tokens at the end of the prompt that are computed in any case.
    pub keep_last: usize,
    /// Whether the plan pins what it uses.
    pub pin: bool,
    /// The conversation that the prompt belongs to (rule P18).
    pub session: Option<SessionId>,
    /// Moved runs supply no token at or after this position: where the last message begins. `None` sets no limit.
    pub moved_end: Option<usize>,
}

impl PlanOptions {
    pub(crate) fn check(&self, len: usize, call: &'static str) -> Result<()> {
        match self.moved_end {
            Some(end) if end > len => Err(invalid!(
                call,
                "moved_end is {end}; it must be in [0, {len}], the tokens of the prompt"
            )),
            _ => Ok(()),
        }
    }
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            keep_last: 1,
            pin: true,
            session: None,
            moved_end: None,
        }
    }
}

/// How to build the KV of one prompt. What the plan uses is pinned until
/// [`RadixIndex::release`](crate::RadixIndex::release).
#[derive(Debug)]
pub struct ReusePlan {
    index: u64,
    lease: Handle,
    block_size: usize,
    num_blocks: u64,
    pinned: bool,
    snapshot: Snapshot,
    /// Number of the plan, by which later departures are detected.
    number: u64,
    moved_end: Option<usize>,
    /// The ids in place, possibly followed by more that the sequence knows.
    ids: Arc<Vec<BlockId>>,
    num_blocks_in_place: usize,
    edges: u64,
    segments: Vec<Segment>,
    copies: Vec<Copied>,
    source_ids: Vec<BlockId>,
    moved_runs: Vec<MovedRun>,
    candidates_dropped: u64,
    policy: ReusePolicy,
    /// The grade of the policy when the plan was made, with the kinds that were known then.
    grade: Grade,
    repair: Repaired,
    groups: Vec<GroupPart>,
}

#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) policy: ReusePolicy,
    pub(crate) grade: Grade,
    pub(crate) index: u64,
    pub(crate) lease: Handle,
    pub(crate) block_size: usize,
    pub(crate) num_blocks: u64,
    pub(crate) pinned: bool,
    pub(crate) number: u64,
    pub(crate) moved_end: Option<usize>,
    pub(crate) edges: u64,
    pub(crate) repair: Repaired,
    pub(crate) groups: Vec<GroupPart>,
}

/// Whether the tokens that a policy has computed within moved runs are chosen (P20).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repaired {
    /// Nothing has to be chosen.
    May,
    /// The engine has to choose.
    Must(Repair),
    /// The engine has chosen.
    Done,
}

impl ReusePlan {
    #[inline]
    pub(crate) fn new(origin: Origin, snapshot: Snapshot, draft: Draft) -> Self {
        Self {
            index: origin.index,
            lease: origin.lease,
            block_size: origin.block_size,
            num_blocks: origin.num_blocks,
            pinned: origin.pinned,
            snapshot,
            number: origin.number,
            moved_end: origin.moved_end,
            ids: draft.ids,
            num_blocks_in_place: draft.in_place.map_or(0, |end| end.depth as usize),
            edges: origin.edges,
            segments: draft.segments,
            copies: draft.copies,
            source_ids: draft.source_ids,
            moved_runs: draft.moved_runs,
            candidates_dropped: draft.candidates_dropped,
            policy: origin.policy,
            grade: origin.grade,
            repair: origin.repair,
            groups: origin.groups,
        }
    }

    /// The policy that the plan was made under.
    #[must_use]
    pub fn policy(&self) -> &ReusePolicy {
        &self.policy
    }

    pub(crate) fn grade(&self) -> Grade {
        self.grade
    }

    /// Ids used in place, for the first whole blocks of the prompt.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.ids[..self.num_blocks_in_place]
    }

    /// The items of the prompt, ascending.
    #[must_use]
    pub fn items(&self) -> &[Item] {
        &self.snapshot.items
    }

    /// What the plan continues with in each group besides group 0, in their order.
    #[must_use]
    pub fn groups(&self) -> &[GroupPart] {
        &self.groups
    }

    /// What the plan continues with in a group besides group 0, from 1; `None` if the index has no such group.
    #[must_use]
    pub fn group(&self, group: usize) -> Option<&GroupPart> {
        self.groups.get(group.checked_sub(1)?)
    }

    /// Number of blocks that the caller must provide for the rest of the prompt.
    #[must_use]
    pub fn num_new_blocks(&self) -> usize {
        self.snapshot.tokens.len().div_ceil(self.block_size) - self.num_blocks_in_place
    }

    /// The segments, ascending: every token of the prompt once.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The moved runs and their contexts, ascending: one per piece of the cover that is moved, without the tokens that
    /// the policy has computed at its ends.
    #[must_use]
    pub fn moved_runs(&self) -> &[MovedRun] {
        &self.moved_runs
    }

    /// Number of tokens of one class.
    #[must_use]
    pub fn num_tokens(&self, class: Class) -> usize {
        draft::num_tokens(&self.segments, class)
    }

    /// Blocks to copy from, ascending and without repetition.
    #[must_use]
    pub fn source_blocks(&self) -> Vec<BlockId> {
        let mut ids = self.source_ids.clone();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Number of places that the search for moved runs did not try, because a window has more than
    /// [`max_candidates`](crate::Config::max_candidates) or because the search's budget was used up (rule P16). While
    /// it is 0, the plan does not depend on the seed.
    #[must_use]
    pub fn candidates_dropped(&self) -> u64 {
        self.candidates_dropped
    }

    /// The position from which on no moved run supplies a token, if the caller gave one.
    #[must_use]
    pub fn moved_end(&self) -> Option<usize> {
        self.moved_end
    }

    /// Number of edges of the path in place. A release takes one step per edge that no other plan pins.
    #[must_use]
    pub fn num_edges(&self) -> u64 {
        self.edges
    }

    /// Number of segments and of block ids that they name, which is the cost of reading the plan.
    #[must_use]
    pub fn num_entries(&self) -> usize {
        self.segments.len() + self.num_blocks_in_place + self.source_ids.len()
    }

    /// Whether the plan was made to pin what it uses.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// Tokens per block of the index that made the plan.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether the sequence begins with the planned tokens, in their namespace. O(1) if it is the sequence that was
    /// planned.
    #[must_use]
    pub fn is_prefix_of(&self, seq: &TokenSequence) -> bool {
        seq.starts_with(&self.snapshot)
    }

    pub(crate) fn groups_mut(&mut self) -> &mut [GroupPart] {
        &mut self.groups
    }

    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The most hops of any token in the prompt's block number `block`, counted from 0.
    #[must_use]
    pub fn hops_of_block(&self, block: usize) -> u16 {
        let start = block * self.block_size;
        let first = self
            .segments
            .partition_point(|segment| segment.end <= start);
        let inside = self.segments[first..]
            .iter()
            .take_while(|segment| segment.start < start + self.block_size);
        inside.map(|segment| segment.hops).max().unwrap_or(0)
    }

    /// Position of the first approximate token, if there is one. Tokens that are computed after a window that was
    /// rebuilt are approximate.
    #[must_use]
    pub fn first_approximate(&self) -> Option<usize> {
        let mut segments = self.segments.iter();
        let first = segments.find(|segment| segment.class == Class::Approximate);
        let first = first.map(|segment| segment.start);
        if self.groups.is_empty() {
            return first;
        }
        first.into_iter().chain(self.first_after_rebuilt()).min()
    }

    pub(crate) fn index(&self) -> u64 {
        self.index
    }

    pub(crate) fn lease(&self) -> Handle {
        self.lease
    }

    /// Whether each segment is valid. `lease` is the plan's own, if the plan is live and pins; `stayed` says whether a
    /// block has not left its place since the plan of a given number.
    pub(crate) fn validity(
        &self,
        lease: Option<&Lease>,
        stayed: impl Fn(BlockId, u64) -> bool,
    ) -> Vec<bool> {
        let stayed = |block: BlockId| stayed(block, self.number);
        let in_place = self.num_blocks_in_place * self.block_size;
        let has_sources = lease.is_some_and(Lease::pins_sources);
        let mut copies = self.copies.iter();
        self.segments
            .iter()
            .map(|segment| {
                if segment.class == Class::Compute {
                    true
                } else if segment.end <= in_place {
                    let blocks = segment.start / self.block_size..segment.end / self.block_size;
                    lease.is_some() || self.blocks()[blocks].iter().copied().all(stayed)
                } else {
                    let ids = copies.next().map_or(0..0, |copy| copy.ids.clone());
                    has_sources || self.source_ids[ids].iter().copied().all(stayed)
                }
            })
            .collect()
    }
}
