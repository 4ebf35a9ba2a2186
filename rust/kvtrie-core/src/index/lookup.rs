//! Finds the exact cached prefix of a sequence (D5).

use crate::effort::Effort;
use crate::error::{Error, Result, invalid};
use crate::eviction::count_revival;
use crate::ids::{BlockId, Depth, IdRange, NO_NODE, depth};
use crate::index::RadixIndex;
use crate::storage::blocks::BlockState;
use crate::storage::forest::{Position, Walked};
use crate::storage::node::Node;
use crate::storage::slab::Handle;
use crate::tokens::TokenSequence;

/// Options of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupOptions {
    /// Tokens at the end that are not matched: 1 leaves an engine one token to compute.
    pub keep_last: usize,
    /// Whether the blocks found are touched.
    pub touch: bool,
    /// Position of the first id to return, a multiple of the block size.
    pub start: usize,
}

impl Default for LookupOptions {
    fn default() -> Self {
        Self {
            keep_last: 0,
            touch: true,
            start: 0,
        }
    }
}

/// The result of a lookup. The block ids are in the caller's buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Tokens from position 0 whose exact KV is present: a whole number of blocks.
    pub num_tokens: usize,
}

/// The pins of what a lookup found, until [`RadixIndex::release_pin`].
#[derive(Clone, Copy, Debug)]
pub struct Pin {
    index: u64,
    lease: Handle,
    /// Edges of the pinned path.
    edges: u64,
}

impl RadixIndex {
    /// Finds the longest run of present exact blocks from position 0 and writes their ids, from `start` on, to `out`.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `start` is beyond the sequence or not a multiple of
    /// the block size.
    ///
    /// # Complexity
    /// As [listed](crate#calls-and-costs). Allocates only room in `out`; with `touch`, a use that ends inside an edge
    /// may also lengthen the edge's list of such uses.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// let mut ids = Vec::new();
    /// let found = index.lookup(&mut seq, LookupOptions::default(), &mut ids)?;
    /// assert_eq!((found.num_tokens, ids), (4, vec![BlockId(6), BlockId(0)]));
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn lookup(
        &mut self,
        seq: &mut TokenSequence,
        options: LookupOptions,
        out: &mut Vec<BlockId>,
    ) -> Result<Match> {
        let found = self
            .lookup_within(seq, options, Effort::ANY, out)
            .map_err(|error| error.in_call("RadixIndex::lookup"))?;
        Ok(found.unwrap_or_default())
    }

    /// As [`lookup`](Self::lookup), for callers that hold a lock. Returns `None`, without a touch, if it takes more
    /// than `effort`; the next call continues where this one ended. If reviving the dead blocks of the path alone
    /// exceeds `effort`, every call returns `None`. With groups besides group 0 it also returns `None` if finding where all
    /// of them can continue, from the end of group 0's match on, or touching what they need exceeds `effort`: each call
    /// starts with that again. O(effort + ids written).
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// # let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns.clone(), vec![1, 2, 3, 4, 5], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// let mut same = TokenSequence::new(ns, vec![1, 2, 3, 4], vec![])?;
    /// let (options, effort) = (LookupOptions::default(), Effort { nodes: 9, bytes: 8 });
    /// assert_eq!(index.lookup_within(&mut same, options, effort, &mut Vec::new())?, None);
    /// let found = index.lookup_within(&mut same, options, effort, &mut Vec::new())?;
    /// assert_eq!(found.map(|found| found.num_tokens), Some(4));
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn lookup_within(
        &mut self,
        seq: &mut TokenSequence,
        options: LookupOptions,
        effort: Effort,
        out: &mut Vec<BlockId>,
    ) -> Result<Option<Match>> {
        let Some(found) = self.found_within(seq, options, effort)? else {
            return Ok(None);
        };
        out.clear();
        if found.depth > 0 {
            let from = depth(options.start / self.block_size());
            self.forest.path_ids(found, from, out);
        }
        Ok(Some(self.matched(found)))
    }

    /// As [`lookup_within`](Self::lookup_within), with the ids as ranges of consecutive ones. Ids that were inserted
    /// together mostly are one. Allocates for the edges of the path.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// # let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5, 6], vec![])?;
    /// let ids = [BlockId(6), BlockId(7), BlockId(3)];
    /// index.insert(&mut seq, &ids, InsertOptions::new(6, Source::Computed))?;
    /// let mut ranges = Vec::new();
    /// index.lookup_ranges_within(&mut seq, LookupOptions::default(), Effort::ANY, &mut ranges)?;
    /// let (two, one) = (IdRange { first: BlockId(6), len: 2 }, IdRange { first: BlockId(3), len: 1 });
    /// assert_eq!(ranges, [two, one]);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn lookup_ranges_within(
        &mut self,
        seq: &mut TokenSequence,
        options: LookupOptions,
        effort: Effort,
        out: &mut Vec<IdRange>,
    ) -> Result<Option<Match>> {
        let found = self
            .found_within(seq, options, effort)
            .map_err(|error| error.in_call("RadixIndex::lookup_ranges_within"))?;
        let Some(found) = found else {
            return Ok(None);
        };
        self.ranges_to(found, options.start, out);
        Ok(Some(self.matched(found)))
    }

    /// As [`lookup_ranges_within`](Self::lookup_ranges_within), and pins what was found until
    /// [`release_pin`](Self::release_pin). It is touched in any case.
    ///
    /// # Errors
    /// As [`lookup`](Self::lookup).
    ///
    /// # Complexity
    /// A lookup + O(edges newly pinned).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// # let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(7)], InsertOptions::new(4, Source::Computed))?;
    /// let (options, mut ranges) = (LookupOptions::default(), Vec::new());
    /// let pinned = index.lookup_pinned_within(&mut seq, options, Effort::ANY, &mut ranges)?;
    /// assert_eq!(index.evict(8), []);
    /// if let Some((_, pin)) = pinned {
    ///     index.release_pin(&pin)?;
    /// }
    /// assert_eq!(index.evict(8), [BlockId(7), BlockId(6)]);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn lookup_pinned_within(
        &mut self,
        seq: &mut TokenSequence,
        options: LookupOptions,
        effort: Effort,
        out: &mut Vec<IdRange>,
    ) -> Result<Option<(Match, Pin)>> {
        let options = LookupOptions {
            touch: true,
            ..options
        };
        let found = self
            .found_within(seq, options, effort)
            .map_err(|error| error.in_call("RadixIndex::lookup_pinned_within"))?;
        let Some(found) = found else {
            return Ok(None);
        };
        self.ranges_to(found, options.start, out);
        let end = (found.depth > 0).then_some(found);
        let lease = self.lease(seq, true, end, &[]);
        if !self.groups.is_empty() {
            let time = self.clock;
            self.hold_groups(end, lease.index, time);
        }
        let pin = Pin {
            index: self.forest.uid(),
            lease,
            edges: self.known_edges(seq),
        };
        Ok(Some((self.matched(found), pin)))
    }

    /// Ends the pins of a lookup. Condemned blocks that nothing else pins wait for [`take_freed`](Self::take_freed).
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle) if they were ended before;
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a pin of another index.
    ///
    /// # Complexity
    /// As [`release`](Self::release).
    pub fn release_pin(&mut self, pin: &Pin) -> Result<()> {
        const CALL: &str = "RadixIndex::release_pin";
        if pin.index != self.forest.uid() {
            return Err(invalid!(CALL, "the pin belongs to another index"));
        }
        if self.pins.leases().get(pin.lease).is_none() {
            return Err(Error::stale(CALL, "the pin was released already"));
        }
        crate::failpoints::before(CALL)?;
        self.end_lease(pin.lease.index);
        Ok(())
    }

    /// Steps that [`release_pin`](Self::release_pin) takes, as [`release_steps`](Self::release_steps) of a plan. O(1).
    #[must_use]
    pub fn release_pin_steps(&self, pin: &Pin) -> u64 {
        self.lease_steps(pin.lease, pin.edges)
    }

    fn ranges_to(&mut self, found: Position, start: usize, out: &mut Vec<IdRange>) {
        out.clear();
        if found.depth > 0 {
            let from = depth(start / self.block_size());
            self.forest.path_ranges(found, from, out);
        }
    }

    fn matched(&self, found: Position) -> Match {
        Match {
            num_tokens: found.depth as usize * self.block_size(),
        }
    }

    /// The end of a lookup, which is touched if the options say so.
    fn found_within(
        &mut self,
        seq: &mut TokenSequence,
        options: LookupOptions,
        effort: Effort,
    ) -> Result<Option<Position>> {
        const CALL: &str = "RadixIndex::lookup_within";
        self.check_start(options.start, seq.len(), CALL)?;
        crate::failpoints::before(CALL)?;
        let Some(found) = self.exact_prefix(seq, options.keep_last, effort) else {
            return Ok(None);
        };
        let mut found = found;
        if !self.groups.is_empty() {
            let Some(end) = self.within_groups(found, effort) else {
                return Ok(None);
            };
            // The use of an entry takes a quarter of a step or less.
            let is_bounded = options.touch && effort != Effort::ANY;
            if is_bounded && self.groups.num_needed(end.depth) / 4 > effort.nodes {
                return Ok(None);
            }
            found = end;
        }
        // Reading an id takes a quarter of a step or less.
        let is_deep = u64::from(found.depth) / 4 > effort.nodes;
        if is_deep && self.known_edges(seq) / 4 > effort.nodes {
            return Ok(None);
        }
        if options.touch {
            if self.eviction.any_dead()
                && found.depth > 0
                && count_revival(&self.forest, found, &mut effort.steps()).is_none()
            {
                return Ok(None);
            }
            let time = self.next_time();
            crate::failpoints::within("lookup: a time without a use");
            self.eviction.touch(&mut self.forest, found, time);
            if !self.groups.is_empty() {
                self.groups.touch(&self.forest, found, time);
            }
        }
        Ok(Some(found))
    }

    /// The tokens of the whole path down to a block, its own last; `None` if the block is not indexed. They are the
    /// context that the block's KV was computed in, so far as the index knows it. O(tokens).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5, 6], vec![])?;
    /// let ids = [BlockId(6), BlockId(0), BlockId(3)];
    /// index.insert(&mut seq, &ids, InsertOptions::new(6, Source::Computed))?;
    /// assert_eq!(index.path_tokens(BlockId(0)), Some(vec![1, 2, 3, 4]));
    /// assert_eq!(index.path_tokens(BlockId(5)), None);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    #[must_use]
    pub fn path_tokens(&self, id: BlockId) -> Option<Vec<u32>> {
        if u64::from(id.0) >= self.config.num_blocks {
            return None;
        }
        let BlockState::Indexed { node, depth } = self.forest.blocks().state(id.0) else {
            return None;
        };
        let block_size = self.block_size();
        let (mut at, mut end) = (node, depth + 1);
        let mut tokens = vec![0; end as usize * block_size];
        loop {
            let edge = self.forest.node(at);
            let (from, to) = (edge.depth as usize * block_size, end as usize * block_size);
            let own = edge.blocks.tokens(block_size).get(..to - from)?;
            tokens.get_mut(from..to)?.copy_from_slice(own);
            if edge.depth == 0 {
                return Some(tokens);
            }
            (at, end) = (edge.parent, edge.depth);
        }
    }

    /// Finds the end of the exact prefix of `seq` without its last `keep_last` tokens. If the namespace has no tree,
    /// the position has depth 0 and no node.
    pub(crate) fn exact_prefix(
        &mut self,
        seq: &mut TokenSequence,
        keep_last: usize,
        effort: Effort,
    ) -> Option<Position> {
        const NOWHERE: Position = Position::at(NO_NODE, 0);
        let limit = depth(seq.len().saturating_sub(keep_last) / self.block_size());
        let (mut at, exact) = match self.forest.at_cursor(seq) {
            Some(known) => known,
            None => match self.forest.root(seq.namespace()) {
                Some(root) => (root, 0),
                None => return Some(NOWHERE),
            },
        };
        let known: Depth = exact.min(limit);
        if at.depth > known {
            // The path is known up to here: what follows is an approximate block, a hole or the limit.
            at.depth = known;
            return Some(self.forest.normal(at));
        }
        let block_size = self.block_size();
        let within = |node: &Node, from, to| node.exact_until(from, to, block_size);
        let Walked {
            at: end,
            work,
            gave_up,
        } = self
            .forest
            .walk(seq.view(), at, limit, effort, within, |_, _, _| ());
        self.work.add_walk(work);
        if end != at {
            self.forest
                .set_cursor(seq, end, end.depth, work.nodes_visited - 1);
        }
        (!gave_up).then_some(end)
    }
}
