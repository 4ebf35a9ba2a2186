//! Plans: how to build the KV of a prompt, and the lease that keeps it true (D7, D13, D19).
//!
//! This version plans exact reuse: whole blocks in place, then the exact tokens of one block copied behind them.

use std::collections::BTreeSet;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::ids::{BlockId, NO_NODE};
use crate::lease::Lease;
use crate::node::Node;
use crate::policy::ReusePolicy;
use crate::siblings;
use crate::slab::Handle;
use crate::tokens::{Snapshot, TokenSequence};
use crate::tree::{Effort, Position, RadixIndex};

/// How exact the KV of a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// Same whole prefix, same position, computed from exact KV.
    Exact = 0,
    /// Same tokens in another context or at another position.
    Approximate = 1,
    /// Not there: the engine computes it.
    Compute = 2,
}

/// A range of the prompt and where its KV comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First token of the prompt.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
    /// Position at which the source's first token stands; `start` for what is computed.
    pub old_start: usize,
    /// How exact it is.
    pub class: Class,
    /// Hops of the source; 0 for what is computed.
    pub hops: u16,
    /// Kinds of spans that the source tokens are tagged with, as a bit set (see [`RadixIndex::kinds`]).
    pub kinds: u64,
}

impl Segment {
    /// New position minus old position.
    #[must_use]
    pub fn delta(&self) -> i64 {
        i64::try_from(self.start).unwrap_or(i64::MAX)
            - i64::try_from(self.old_start).unwrap_or(i64::MAX)
    }
}

/// One copy: consecutive slots, inside one source and one destination block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// First slot read: block · `block_size` + offset.
    pub source_slot: u64,
    /// First slot written.
    pub dest_slot: u64,
    /// Tokens copied.
    pub num_tokens: u64,
    /// By how many positions K is turned.
    pub delta: i64,
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

/// How to build the KV of one prompt. It is released by [`RadixIndex::release`]; until then what it pins stays.
#[derive(Debug)]
pub struct ReusePlan {
    index: u64,
    lease: Handle,
    block_size: usize,
    num_blocks: u64,
    pinned: bool,
    snapshot: Snapshot,
    /// Counts plans: what has left since is told by it.
    number: u64,
    /// The ids used in place, with more behind them where the sequence knows more.
    ids: Arc<Vec<BlockId>>,
    num_blocks_in_place: usize,
    edges: u64,
    /// The block that is copied from, and how many of its tokens.
    copied: Option<(BlockId, usize)>,
    segments: Vec<Segment>,
}

impl ReusePlan {
    /// Ids used in place, for the first whole blocks of the prompt.
    #[must_use]
    pub fn blocks(&self) -> &[BlockId] {
        &self.ids[..self.num_blocks_in_place]
    }

    /// Blocks that the caller must bring for the rest of the prompt.
    #[must_use]
    pub fn num_new_blocks(&self) -> usize {
        self.snapshot.tokens.len().div_ceil(self.block_size) - self.num_blocks_in_place
    }

    /// Covers every token of the prompt once, ascending.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Tokens of one class.
    #[must_use]
    pub fn num_tokens(&self, class: Class) -> usize {
        self.segments
            .iter()
            .filter(|segment| segment.class == class)
            .map(|segment| segment.end - segment.start)
            .sum()
    }

    /// Blocks that are copied from, ascending, each once.
    #[must_use]
    pub fn source_blocks(&self) -> Vec<BlockId> {
        self.copied.iter().map(|&(source, _)| source).collect()
    }

    /// Places that a search for moved runs did not try. Exact plans search none.
    #[must_use]
    pub fn candidates_dropped(&self) -> u64 {
        0
    }

    /// Edges of the path in place as it was walked: a release takes a step for each that nobody else pins.
    #[must_use]
    pub fn num_edges(&self) -> u64 {
        self.edges
    }

    /// Whether the plan was made to pin what it uses.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// The copies that fill `table` between the positions `start` and `end`, as plain data: what a worker without an
    /// index needs.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the range is reversed or beyond the prompt, the table is too short for
    /// it, holds an id outside the pool, or writes a block that the plan reads.
    pub fn moves(&self, table: &[BlockId], start: usize, end: usize) -> Result<Vec<Move>> {
        const CALL: &str = "ReusePlan.moves";
        let len = self.snapshot.tokens.len();
        if start > end || end > len {
            return Err(Error::invalid(format!(
                "{CALL}: the range {start}..{end} must ascend and end within {len} tokens"
            )));
        }
        if table.len() < end.div_ceil(self.block_size) {
            return Err(Error::invalid(format!(
                "{CALL}: the table has {} blocks, {end} tokens need {}",
                table.len(),
                end.div_ceil(self.block_size)
            )));
        }
        if let Some(id) = table.iter().find(|id| u64::from(id.0) >= self.num_blocks) {
            return Err(Error::invalid(format!(
                "{CALL}: block id {id} is not in 0..{} (num_blocks)",
                self.num_blocks
            )));
        }
        let Some((source, from)) = self.copied else {
            return Ok(Vec::new());
        };
        let at = self.num_blocks_in_place * self.block_size;
        let (start, end) = (start.max(at), end.min(at + from));
        if start >= end {
            return Ok(Vec::new());
        }
        let dest = table[self.num_blocks_in_place];
        if dest == source || self.blocks().contains(&dest) {
            return Err(Error::invalid(format!(
                "{CALL}: block {dest} would be written, but the plan reads it"
            )));
        }
        let slot = |id: BlockId, position: usize| {
            u64::from(id.0) * self.block_size as u64 + (position - at) as u64
        };
        Ok(vec![Move {
            source_slot: slot(source, start),
            dest_slot: slot(dest, start),
            num_tokens: (end - start) as u64,
            delta: 0,
        }])
    }

    pub(crate) fn snapshot(&self) -> &Snapshot {
        &self.snapshot
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

fn check_policy(policy: &ReusePolicy) -> Result<()> {
    if policy.approximate {
        return Err(Error::invalid(
            "RadixIndex.plan: the policy allows approximate reuse, which this version cannot plan; use EXACT_ONLY",
        ));
    }
    Ok(())
}

impl RadixIndex {
    /// Plans the KV of a prompt, and pins what the plan uses.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the policy allows approximate reuse, which this version cannot plan.
    ///
    /// # Complexity
    /// That of [`lookup`](Self::lookup), plus O(blocks in place), plus expected O(log siblings) comparisons of one block.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::default() })?;
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
        check_policy(policy)?;
        let end = self.exact_prefix(seq, options.keep_last, Effort::ANY);
        Ok(self.plan_from(seq, policy, options, end))
    }

    /// As [`plan`](Self::plan), unless finding the path takes more than `effort`: then nothing is planned or stamped, and the
    /// sequence remembers how far it was matched, so that the next call goes on from there.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    ///
    /// # Complexity
    /// O(effort + blocks in place), plus one step for each of [`known_edges`](Self::known_edges).
    pub fn plan_within(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
        effort: Effort,
    ) -> Result<Option<ReusePlan>> {
        check_policy(policy)?;
        let end = self.exact_prefix(seq, options.keep_last, effort);
        Ok(end.map(|end| self.plan_from(seq, policy, options, Some(end))))
    }

    /// Plans a prompt whose exact prefix ends at `end`.
    fn plan_from(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
        end: Option<Position>,
    ) -> ReusePlan {
        let end = end.filter(|end| end.node != NO_NODE);
        let mut ids = Arc::default();
        let mut copied = None;
        if let Some(end) = end {
            ids = self.remembered_ids(seq, end);
            if policy.partial_blocks {
                copied = self.nearest_block(seq, end, options.keep_last);
            }
        }

        let stamp = self.tick();
        if let Some(end) = end {
            self.stamp(end, stamp);
        }
        if let Some((source, ..)) = copied {
            self.stamp_source(source.0, stamp);
        }
        let in_place = end.map_or(0, |end| end.depth as usize);
        let segments = self.segments(seq, end, in_place, copied);
        let copied = copied.map(|(id, tokens, _)| (id, tokens));
        let source = copied.map(|(source, _)| source);
        let lease = self.lease(seq, options.pin, end, source);
        ReusePlan {
            index: self.uid,
            lease,
            block_size: self.block_size(),
            num_blocks: self.config.num_blocks,
            pinned: options.pin,
            snapshot: seq.snapshot(),
            number: self.blocks.count_plan(),
            ids,
            num_blocks_in_place: in_place,
            edges: self.known_edges(seq),
            copied,
            segments,
        }
    }

    /// Ends the plan: nothing is pinned under it any more. Condemned blocks that nobody else pins wait for
    /// [`take_freed`](Self::take_freed).
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle) if it was released before; [`InvalidArgument`](crate::ErrorKind::InvalidArgument)
    /// for a plan of another index.
    pub fn release(&mut self, plan: &ReusePlan) -> Result<()> {
        let lease = plan.lease_index(self, "ReusePlan.release")?;
        self.end_lease(lease);
        Ok(())
    }

    /// Ends the pins of the blocks that the plan copies from. A second time it does nothing.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    pub fn release_sources(&mut self, plan: &ReusePlan) -> Result<()> {
        let lease = plan.lease_index(self, "ReusePlan.release_sources")?;
        self.unpin_sources(lease);
        Ok(())
    }

    /// Whether the plan was released.
    #[must_use]
    pub fn is_released(&self, plan: &ReusePlan) -> bool {
        plan.lease_index(self, "").is_err()
    }

    /// One answer a segment: whether what it uses is there as it was planned, pinned or not gone since.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a plan of another index.
    pub fn validate(&self, plan: &ReusePlan) -> Result<Vec<bool>> {
        plan.check_index(self, "ReusePlan.validate")?;
        let lease = self.leases.get(plan.lease).filter(|lease| lease.pinned);
        let stayed = |block: BlockId| self.blocks.stayed(block.0, plan.number);
        let in_place = plan.num_blocks_in_place * plan.block_size;
        Ok(plan
            .segments
            .iter()
            .map(|segment| match segment.class {
                Class::Compute => true,
                _ if segment.end <= in_place => {
                    lease.is_some() || plan.blocks().iter().copied().all(stayed)
                }
                _ => {
                    lease.is_some_and(|lease| !lease.sources.is_empty())
                        || plan.copied.is_none_or(|(source, _)| stayed(source))
                }
            })
            .collect())
    }

    /// The present exact block at the end of the match that shares most tokens with the rest of the prompt: its id, how
    /// many, and its kinds.
    fn nearest_block(
        &self,
        seq: &TokenSequence,
        end: Position,
        keep_last: usize,
    ) -> Option<(BlockId, usize, u64)> {
        let block_size = self.block_size();
        let at = end.depth as usize * block_size;
        let until = seq.len().saturating_sub(keep_last).min(at + block_size);
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
        let source: &Node = &self.nodes[node];
        let kinds = source
            .extras()
            .map_or(0, |extras| extras.tags.union(at, at + shared));
        Some((BlockId(source.id(end.depth, block_size)), shared, kinds))
    }

    fn segments(
        &self,
        seq: &TokenSequence,
        end: Option<Position>,
        blocks: usize,
        copied: Option<(BlockId, usize, u64)>,
    ) -> Vec<Segment> {
        let in_place = blocks * self.block_size();
        let copy_end = in_place + copied.map_or(0, |(_, tokens, _)| tokens);
        let kinds = end.map_or(0, |end| self.kinds_on_path(end, 0, in_place));
        let exact = |start, end, kinds| Segment {
            start,
            end,
            old_start: start,
            class: Class::Exact,
            hops: 0,
            kinds,
        };
        [
            exact(0, in_place, kinds),
            exact(in_place, copy_end, copied.map_or(0, |(.., kinds)| kinds)),
            Segment {
                class: Class::Compute,
                ..exact(copy_end, seq.len(), 0)
            },
        ]
        .into_iter()
        .filter(|segment| segment.start < segment.end)
        .collect()
    }

    /// Opens the lease of a plan and pins what the plan uses.
    fn lease(
        &mut self,
        seq: &TokenSequence,
        pinned: bool,
        end: Option<Position>,
        source: Option<BlockId>,
    ) -> Handle {
        let lease = self.leases.insert(Lease {
            namespace: Arc::clone(seq.namespace()),
            pinned,
            over: false,
            anchors: SmallVec::new(),
            kept: BTreeSet::new(),
            sources: SmallVec::new(),
            first_approximate: None,
        });
        if let (true, Some(end)) = (pinned, end) {
            self.pin_path(lease, end);
            if let Some(BlockId(id)) = source {
                self.pin_source(lease, id);
            }
        }
        self.leases.handle(lease)
    }
}
