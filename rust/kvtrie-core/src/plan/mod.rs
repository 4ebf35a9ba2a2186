//! Plans: how to build the KV of a prompt, and the lease that keeps a plan valid (D7, D13, D19).
//!
//! A plan is made in one pass from left to right, as a function of the prompt, the policy and the cache:
//!
//! 1. In place: whole blocks of the exact prefix, then, if the policy allows it, approximate entries of the same whole
//!    prefix.
//! 2. Copied: the exact tokens of the block in which that path leaves the prompt, from the sibling that shares most of
//!    them.
//! 3. A cover of the rest by *runs*: maximal common runs with anything cached, of at least `min_run` tokens. At the
//!    first token that is not covered, the run that contains it and reaches furthest is taken up to its end. So the
//!    fewest runs cover every token that any run contains.
//!
//! A run under the prompt's own whole prefix, after a hole, stays exact if it is; any other run is approximate.
//!
//! # Structure and costs
//!
//! - `draft` assembles the parts. A plan is a draft whose blocks are touched and pinned.
//! - `cover` covers one token at a time. A run that contains the token has a window of eight tokens within `2 ·
//!   min_run` tokens around it, so some two dozen windows are looked up per run, whatever its length, and those inside
//!   are skipped.
//! - `search` looks windows up, in chunks that grow while nothing is found. A window with more than `max_candidates`
//!   places is tried at the most recent ones.
//! - `reach` follows the prompt along a source by comparing memory. Of several places, it follows only those that may
//!   reach further than the best so far; the token after the end of the best one rules out most.
//! - `usable` says what a policy allows of an edge.
//!
//! So a plan costs the lookup, one comparison of each run, a few cache misses per run, and the lookup of one window per
//! token that nothing covers.

mod budget;
mod cover;
mod draft;
mod moves;
mod reach;
mod search;
#[cfg(test)]
mod tests;
mod usable;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{BlockId, Depth, NO_NODE};
use crate::index::{Effort, RadixIndex};
use crate::pins::lease::Lease;
use crate::policy::ReusePolicy;
use crate::storage::node::Node;
use crate::storage::slab::Handle;
use crate::tokens::{Snapshot, TokenSequence};

use draft::Draft;

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
    /// Position of the source's first token; `start` for what is computed.
    pub old_start: usize,
    /// How exact it is.
    pub class: Class,
    /// Hops of the KV in the prompt: those of the source, plus one for a moved run; 0 for what is computed.
    pub hops: u16,
    /// Kinds of spans that the source tokens are tagged with, as a bit set (see [`RadixIndex::kinds`]).
    pub kinds: u64,
}

impl Segment {
    /// New position minus old position.
    #[must_use]
    pub fn delta(&self) -> i64 {
        Self::distance(self.start, self.old_start)
    }

    fn distance(new: usize, old: usize) -> i64 {
        i64::try_from(new).unwrap_or(i64::MAX) - i64::try_from(old).unwrap_or(i64::MAX)
    }
}

/// The source of one segment of copied tokens.
#[derive(Clone, Debug)]
pub(crate) struct Copied {
    start: usize,
    end: usize,
    old_start: usize,
    /// Its blocks among the plan's source ids. The first contains `old_start`.
    ids: Range<usize>,
}

/// How to plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// Tokens at the end of the prompt that are computed in any case.
    pub keep_last: usize,
    /// Whether the plan pins what it uses.
    pub pin: bool,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            keep_last: 1,
            pin: true,
        }
    }
}

/// How to build the KV of one prompt. What it pins stays until [`RadixIndex::release`].
#[derive(Debug)]
pub struct ReusePlan {
    index: u64,
    lease: Handle,
    block_size: usize,
    num_blocks: u64,
    pinned: bool,
    snapshot: Snapshot,
    /// The number of this plan. Departures after it are detected by this number.
    number: u64,
    /// The ids used in place, followed by more if the sequence knows more.
    ids: Arc<Vec<BlockId>>,
    num_blocks_in_place: usize,
    edges: u64,
    segments: Vec<Segment>,
    copies: Vec<Copied>,
    source_ids: Vec<BlockId>,
    candidates_dropped: u64,
}

impl ReusePlan {
    /// Ids used in place, for the first whole blocks of the prompt.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.ids[..self.num_blocks_in_place]
    }

    /// Number of blocks that the caller must provide for the rest of the prompt.
    #[must_use]
    pub fn num_new_blocks(&self) -> usize {
        self.snapshot.tokens.len().div_ceil(self.block_size) - self.num_blocks_in_place
    }

    /// The segments, ascending. They cover every token of the prompt once.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Number of tokens of one class.
    #[must_use]
    pub fn num_tokens(&self, class: Class) -> usize {
        draft::num_tokens(&self.segments, class)
    }

    /// Blocks to copy from, ascending, each once.
    #[must_use]
    pub fn source_blocks(&self) -> Vec<BlockId> {
        let mut ids = self.source_ids.clone();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// Places that the search for moved runs did not try, because a window of the prompt has more than
    /// [`max_candidates`](crate::Config::max_candidates) or because its budget of steps was used up (rule P16). While
    /// it is 0, the plan does not depend on the seed.
    #[must_use]
    pub fn candidates_dropped(&self) -> u64 {
        self.candidates_dropped
    }

    /// Edges of the path in place, as it was walked. A release takes one step per edge that nobody else pins.
    #[must_use]
    pub fn num_edges(&self) -> u64 {
        self.edges
    }

    /// Segments, and block ids that they name: the cost of reading the plan.
    #[must_use]
    pub fn num_entries(&self) -> usize {
        self.segments.len() + self.num_blocks_in_place + self.source_ids.len()
    }

    /// Whether the plan was made to pin what it uses.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// The most hops of any token in the block at a depth.
    pub(crate) fn hops_of_block(&self, place: Depth) -> u16 {
        let start = place as usize * self.block_size;
        let first = self
            .segments
            .partition_point(|segment| segment.end <= start);
        let inside = self.segments[first..]
            .iter()
            .take_while(|segment| segment.start < start + self.block_size);
        inside.map(|segment| segment.hops).max().unwrap_or(0)
    }

    /// The first approximate token.
    pub(crate) fn first_approximate(&self) -> Option<usize> {
        let mut segments = self.segments.iter();
        let first = segments.find(|segment| segment.class == Class::Approximate);
        first.map(|segment| segment.start)
    }

    /// The plan's lease, if this is its index and it was not released.
    pub(crate) fn lease_index(&self, index: &RadixIndex, call: &str) -> Result<u32> {
        self.check_index(index, call)?;
        match index.leases.get(self.lease) {
            Some(_) => Ok(self.lease.index),
            None => Err(Error::stale(format!(
                "{call}: the plan was released already"
            ))),
        }
    }

    fn check_index(&self, index: &RadixIndex, call: &str) -> Result<()> {
        if self.index == index.uid {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "{call}: the plan belongs to another index"
        )))
    }
}

impl RadixIndex {
    /// Plans the KV of a prompt, and pins what the plan uses.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a field of the policy is beyond its limits, or the
    /// policy asks for runs shorter than the index's [`min_run`](crate::Config::min_run).
    ///
    /// # Complexity
    /// That of [`lookup`](Self::lookup), plus expected O(log siblings) comparisons of one block. If the policy allows
    /// approximate reuse, plus O(tokens of the rest): a search takes a bounded number of steps per token of the prompt
    /// and per token that it covers, whatever is cached (rule P16).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns.clone(), vec![1, 2, 3, 4], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// let mut prompt = TokenSequence::new(ns, vec![1, 2, 3, 9, 9], vec![])?;
    /// let plan = index.plan(&mut prompt, &ReusePolicy::EXACT_ONLY, PlanOptions::default())?;
    /// assert_eq!(plan.blocks(), [BlockId(6)]);
    /// assert_eq!((plan.num_tokens(Class::Exact), plan.num_tokens(Class::Compute)), (3, 2));
    /// let moves = plan.moves(&[BlockId(6), BlockId(1), BlockId(2)], 0, 5)?;
    /// assert_eq!((moves[0].source_slot, moves[0].dest_slot, moves[0].num_tokens), (0, 2, 1));
    /// index.release(&plan)?;
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn plan(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
    ) -> Result<ReusePlan> {
        policy.check(self.config.min_run, "RadixIndex.plan")?;
        crate::failpoints::before("RadixIndex.plan")?;
        Ok(self.plan_checked(seq, policy, options))
    }

    /// Like [`plan`](Self::plan), with a policy that is within its limits: it cannot fail.
    pub(crate) fn plan_checked(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
    ) -> ReusePlan {
        let draft = self.draft(seq, policy, options, Effort::ANY);
        // `Effort::ANY` is never exceeded.
        self.settle_on(seq, options, draft.unwrap_or_default())
    }

    /// Like [`plan`](Self::plan), but returns `None` and touches nothing if following the prompt's own path (the exact
    /// prefix or what is after holes) or searching for moved runs takes more than `effort`. The sequence remembers how
    /// far it was matched, so the next call continues from there; a search starts again.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    ///
    /// # Complexity
    /// O(effort), plus one step for each of [`known_edges`](Self::known_edges).
    pub fn plan_within(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
        effort: Effort,
    ) -> Result<Option<ReusePlan>> {
        policy.check(self.config.min_run, "RadixIndex.plan")?;
        crate::failpoints::before("RadixIndex.plan")?;
        if effort != Effort::ANY && self.is_broken_path(seq, options, effort) {
            return Ok(None);
        }
        let draft = self.draft(seq, policy, options, effort);
        Ok(draft.map(|draft| self.settle_on(seq, options, draft)))
    }

    /// Whether the prompt's own path takes more than `effort`: after the exact prefix it continues through holes and
    /// approximate blocks, each of which a plan looks at by itself, or it has many dead runs, which a plan revives.
    fn is_broken_path(
        &mut self,
        seq: &mut TokenSequence,
        options: PlanOptions,
        effort: Effort,
    ) -> bool {
        if !self.has_broken_paths() && self.num_dead == 0 {
            return false;
        }
        let exact = match self.exact_prefix(seq, options.keep_last, effort) {
            Some(exact) if exact.node == NO_NODE => return false,
            Some(exact) => exact,
            None => return true,
        };
        if self.num_dead > 0 && self.count_revival(exact, &mut effort.steps()).is_none() {
            return true;
        }
        let len = seq.len().saturating_sub(options.keep_last);
        let limit = crate::ids::depth(len / self.block_size());
        let (mut steps, mut is_long) = (effort.steps(), false);
        let pass = |node: &Node, from, to| {
            if node.num_holes() > 0 || node.num_approximate() > 0 {
                is_long |= steps.take(u64::from(to - from)).is_none();
            }
        };
        let whole = |_: &Node, _, to| to;
        let walked = self.walk(seq.view(), exact, limit, effort, whole, pass);
        walked.gave_up || is_long
    }

    /// Makes a plan of a draft: touches and pins what it uses.
    fn settle_on(
        &mut self,
        seq: &mut TokenSequence,
        options: PlanOptions,
        draft: Draft,
    ) -> ReusePlan {
        let stamp = self.tick();
        if let Some(end) = draft.in_place {
            self.stamp(end, stamp);
        }
        self.stamp_sources(&draft.sources, stamp);
        let lease = self.lease(seq, options.pin, &draft);
        let plan = ReusePlan {
            index: self.uid,
            lease,
            block_size: self.block_size(),
            num_blocks: self.config.num_blocks,
            pinned: options.pin,
            snapshot: seq.snapshot(),
            number: self.blocks.count_plan(),
            ids: draft.ids,
            num_blocks_in_place: draft.in_place.map_or(0, |end| end.depth as usize),
            edges: self.known_edges(seq),
            segments: draft.segments,
            copies: draft.copies,
            source_ids: draft.source_ids,
            candidates_dropped: draft.candidates_dropped,
        };
        crate::failpoints::within("a lease whose plan is lost");
        self.leases[lease.index].first_approximate = plan.first_approximate();
        plan
    }

    /// Ends the plan and its pins. Condemned blocks that nobody else pins wait for [`take_freed`](Self::take_freed).
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle) if it was released before;
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a plan of another index.
    pub fn release(&mut self, plan: &ReusePlan) -> Result<()> {
        let lease = plan.lease_index(self, "ReusePlan.release")?;
        crate::failpoints::before("ReusePlan.release")?;
        self.end_lease(lease);
        Ok(())
    }

    /// Ends a plan of this index unless it was released before; it cannot fail.
    pub(crate) fn release_if_live(&mut self, plan: &ReusePlan) {
        if let Ok(lease) = plan.lease_index(self, "ReusePlan.release") {
            self.end_lease(lease);
        }
    }

    /// Ends the pins of the blocks that the plan copies from. A second call does nothing.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    pub fn release_sources(&mut self, plan: &ReusePlan) -> Result<()> {
        let lease = plan.lease_index(self, "ReusePlan.release_sources")?;
        crate::failpoints::before("ReusePlan.release_sources")?;
        self.unpin_sources(lease);
        Ok(())
    }

    /// How many steps it takes to end the plan, each about as long as a look at an edge. O(1).
    #[must_use]
    pub fn release_steps(&self, plan: &ReusePlan) -> u64 {
        let lease = self.leases.get(plan.lease);
        let entries = lease.map_or(0, Lease::num_entries) as u64;
        // A step up an edge takes a fraction of a look at it.
        entries + plan.edges / 4 + self.bound_steps(0)
    }

    /// Whether the plan was released.
    #[must_use]
    pub fn is_released(&self, plan: &ReusePlan) -> bool {
        plan.lease_index(self, "").is_err()
    }

    /// Returns for each segment whether its blocks are still there as planned: pinned, or not gone since.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a plan of another index.
    pub fn validate(&self, plan: &ReusePlan) -> Result<Vec<bool>> {
        plan.check_index(self, "ReusePlan.validate")?;
        let lease = self.leases.get(plan.lease).filter(|lease| lease.pinned);
        let stayed = |block: BlockId| self.blocks.stayed(block.0, plan.number);
        let in_place = plan.num_blocks_in_place * plan.block_size;
        let has_sources = lease.is_some_and(Lease::pins_sources);
        let mut copies = plan.copies.iter();
        Ok(plan
            .segments
            .iter()
            .map(|segment| {
                if segment.class == Class::Compute {
                    true
                } else if segment.end <= in_place {
                    let blocks = segment.start / plan.block_size..segment.end / plan.block_size;
                    lease.is_some() || plan.blocks()[blocks].iter().copied().all(stayed)
                } else {
                    let ids = copies.next().map_or(0..0, |copy| copy.ids.clone());
                    has_sources || plan.source_ids[ids].iter().copied().all(stayed)
                }
            })
            .collect())
    }

    fn lease(&mut self, seq: &TokenSequence, pinned: bool, draft: &Draft) -> Handle {
        let namespace = Arc::clone(seq.namespace());
        let lease = self.leases.insert(Lease::new(namespace, pinned));
        crate::failpoints::within("a lease without pins");
        if let Some(end) = draft.in_place {
            self.pin_path(lease, end);
        }
        self.pin_sources(lease, &draft.sources);
        self.leases.handle(lease)
    }
}
