//! Removal of blocks: discard, evict, drop, reset (D8, D9, D12, D18), and the bound on holes (D10).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::effort::{Effort, Steps};
use crate::error::Result;
use crate::eviction::eviction_key;
use crate::ids::{BlockId, Depth, NodeIndex};
use crate::index::RadixIndex;
use crate::namespace::Namespace;
use crate::pins::{Cuts, Leaving};
use crate::storage::blocks::BlockState;

impl RadixIndex {
    /// Removes ids from the index, wherever they are. Returns the unpinned ones in call order and condemns the pinned
    /// ones. Ids that are not indexed are only counted.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if an id is outside the pool; nothing is discarded then.
    pub fn discard(&mut self, ids: &[BlockId]) -> Result<Vec<BlockId>> {
        let freed = self
            .discard_within(ids, Effort::ANY)
            .map_err(|error| error.in_call("RadixIndex::discard"))?;
        Ok(freed.unwrap_or_default())
    }

    /// As [`discard`](Self::discard); `None`, and nothing is discarded or counted, if that takes more than `effort`.
    /// O(effort + ids).
    ///
    /// # Errors
    /// As [`discard`](Self::discard).
    pub fn discard_within(
        &mut self,
        ids: &[BlockId],
        effort: Effort,
    ) -> Result<Option<Vec<BlockId>>> {
        self.check_ids(ids, "RadixIndex::discard_within")?;
        crate::failpoints::before("RadixIndex::discard_within")?;
        let mut steps = effort.steps();
        let cuts = self
            .count_removal(ids.len() as u64, &mut steps)
            .and_then(|()| {
                self.pins
                    .find_cuts(&self.forest, &self.pinned_of(ids), &mut steps)
            });
        let Some(cuts) = cuts else {
            return Ok(None);
        };
        self.cut_out(cuts);
        let mut unknown = Vec::new();
        let mut freed = Vec::new();
        for &id in ids {
            let place = self.forest.blocks().state(id.0);
            if self.forest.blocks_mut().see(id.0) {
                continue;
            }
            let BlockState::Indexed { node, depth } = place else {
                unknown.push(id);
                continue;
            };
            if !self.remove_block(node, depth) {
                freed.push(id);
            }
        }
        self.forest
            .blocks_mut()
            .clear_seen(ids.iter().map(|id| id.0));
        self.unknown_discards += unknown.len() as u64;
        self.bound_holes();
        Ok(Some(freed))
    }

    pub(super) fn pinned_of(&self, ids: &[BlockId]) -> Leaving {
        let place = |id: &BlockId| match self.forest.blocks().state(id.0) {
            BlockState::Indexed { node, depth } if self.forest.may_be_pinned(node, depth) => {
                Some((node, depth))
            }
            _ => None,
        };
        let mut places: Vec<(NodeIndex, Depth)> = ids.iter().filter_map(place).collect();
        places.sort_unstable();
        places.dedup();
        let mut leaving = Leaving::default();
        for (node, depth) in places {
            leaving.add(self.forest.node(node).tree, node, depth, depth + 1);
        }
        leaving
    }

    /// Takes one step per block and those of [`Self::bound_steps`]; `None` if fewer are left.
    pub(super) fn count_removal(&self, blocks: u64, steps: &mut Steps) -> Option<()> {
        steps.take(blocks)?;
        steps.take(self.bound_steps(blocks))
    }

    /// The most steps that [`Self::bound_holes`] takes once there are `holes` more.
    pub(crate) fn bound_steps(&self, holes: u64) -> u64 {
        if self.forest.num_holes() + holes > self.config.num_blocks {
            self.eviction.leaves().entries().len() as u64
        } else {
            0
        }
    }

    pub(super) fn remove_block(&mut self, node: NodeIndex, depth: Depth) -> bool {
        let edge = self.forest.node(node);
        if edge.has_children() || depth + 1 < edge.end() {
            self.forest.renew_version(node);
        }
        let (_, condemned) = self.remove_entry(node, depth);
        crate::failpoints::within("a block left");
        self.settle(node);
        condemned
    }

    /// Removes and returns at most `n` blocks: waiting ones ([`take_freed`](Self::take_freed)), then dead ones
    /// ([`mark_dead`](Self::mark_dead)), then unpinned blocks without a present block below, by (last use, deepest
    /// first, lowest id).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// # let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// assert_eq!(index.evict(1), [BlockId(0)]);
    /// assert_eq!(index.evict(9), [BlockId(6)]);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn evict(&mut self, n: usize) -> Vec<BlockId> {
        let evicted = self.evict_within(n, Effort::ANY);
        evicted.unwrap_or_default()
    }

    /// As [`evict`](Self::evict); `None`, and nothing is evicted, if that takes more than `effort`.
    ///
    /// # Complexity
    /// O(effort).
    pub fn evict_within(&mut self, n: usize, effort: Effort) -> Option<Vec<BlockId>> {
        let there = self.num_evictable() + self.num_waiting();
        let mut steps = effort.steps();
        steps.take(there.min(n as u64))?;
        if self.eviction.any_dead() {
            let dead = self.eviction.dead().num_blocks();
            steps.take(self.bound_steps(dead.min(n as u64)))?;
        }
        let mut out = Vec::new();
        while out.len() < n {
            let Some(id) = self.pins.pop_waiting() else {
                break;
            };
            crate::failpoints::within("evict: a block no longer waits");
            self.forest.blocks_mut().take(id);
            out.push(BlockId(id));
        }
        let mut any_dead = false;
        while out.len() < n {
            let Some(run) = self.eviction.dead().order().first() else {
                break;
            };
            self.evict_dead(run, n, &mut out);
            crate::failpoints::within("evict: dead blocks left");
            any_dead = true;
        }
        while out.len() < n {
            let Some(leaf) = self.eviction.leaves().first() else {
                break;
            };
            self.evict_from(leaf, n, &mut out);
            crate::failpoints::within("evict: blocks left");
        }
        if any_dead {
            self.bound_holes();
        }
        Some(out)
    }

    /// Evicts blocks from the end of a leaf, until `out` has `n` or another leaf comes first.
    fn evict_from(&mut self, leaf: NodeIndex, n: usize, out: &mut Vec<BlockId>) {
        let edge = self.forest.node(leaf);
        if !edge.is_plain() {
            let id = self.leave(leaf, edge.end() - 1);
            out.push(BlockId(id));
            self.settle(leaf);
            return;
        }
        // All blocks of the leaf have one last use, so it stays first unless another leaf has the same.
        let alone = self
            .eviction
            .leaves()
            .second_time()
            .is_none_or(|next| next > edge.last_use(edge.depth));
        let unprotected = edge.end() - self.forest.protected_end(leaf);
        let wanted = crate::ids::depth(n - out.len());
        let count = if alone { unprotected.min(wanted) } else { 1 };
        let end = edge.end() - count;
        let (start, parent) = (edge.depth, edge.parent);
        self.moved.remove(&mut self.forest, leaf, end, end + count);
        if !self.groups.is_empty() {
            self.groups.leave(leaf, end, end + count);
        }
        self.forest
            .vacate_end(leaf, end, |id| out.push(BlockId(id)));
        if end == start {
            self.detach(leaf);
            self.settle(parent);
        } else {
            self.cut_end(leaf, end);
            self.eviction.requeue(&mut self.forest, leaf);
        }
    }

    /// Returns the condemned blocks whose last pin ended: oldest release first, ascending within a release.
    ///
    /// # Complexity
    /// O([`num_waiting`](Self::num_waiting)).
    pub fn take_freed(&mut self) -> Vec<BlockId> {
        let taken: Vec<u32> = std::iter::from_fn(|| self.pins.pop_waiting()).collect();
        crate::failpoints::within("take_freed: none waits");
        for &id in &taken {
            self.forest.blocks_mut().take(id);
        }
        taken.into_iter().map(BlockId).collect()
    }

    /// Removes a namespace. Returns its unpinned blocks, ascending, and condemns the pinned ones. Plans made before
    /// insert no blocks.
    pub fn drop_namespace(&mut self, namespace: &Arc<Namespace>) -> Vec<BlockId> {
        self.pins.finish(|lease| lease.namespace == *namespace);
        let mut freed = Vec::new();
        if let Some(tree) = self.forest.trees().of(namespace) {
            self.clear_tree(tree, &mut freed);
        }
        freed.sort_unstable();
        freed
    }

    /// Removes all namespaces, as [`drop_namespace`](Self::drop_namespace) does one.
    pub fn reset(&mut self) -> Vec<BlockId> {
        self.pins.finish(|_| true);
        let trees: Vec<u32> = self.forest.trees().iter().map(|(tree, _)| tree).collect();
        let mut freed = Vec::new();
        for tree in trees {
            self.clear_tree(tree, &mut freed);
        }
        freed.sort_unstable();
        freed
    }

    fn clear_tree(&mut self, tree: u32, freed: &mut Vec<BlockId>) {
        self.pins.keep_all_of(&self.forest, tree);
        let root = self.forest.trees()[tree].root;
        let mut all = vec![root];
        let mut next = 0;
        while let Some(&at) = all.get(next) {
            all.extend(self.forest.children(at));
            next += 1;
            // A window may include tokens of the edges above, which are still stored.
            let node = self.forest.node(at);
            let (start, end) = (node.depth, node.end());
            self.moved.remove(&mut self.forest, at, start, end);
            if !self.groups.is_empty() {
                self.groups.leave(at, start, end);
            }
        }
        let mut open = vec![root];
        while let Some(at) = open.pop() {
            self.eviction.unqueue(&mut self.forest, at);
            let node = self.forest.node(at);
            let (start, end) = (node.depth, node.end());
            self.unmark(at, start, end);
            self.forest.drop_protection(at);
            open.extend(self.forest.unhash_children(at));
            crate::failpoints::within("a tree of which edges are gone");
            let pins = &self.pins;
            let is_pinned = |id| pins.keeps(id);
            self.forest.drop_node(at, is_pinned, |id, condemned| {
                if !condemned {
                    freed.push(BlockId(id));
                }
            });
        }
        self.forest.remove_tree(tree);
    }

    pub(super) fn cut_out(&mut self, cuts: Cuts) {
        self.pins
            .cut_out(&mut self.forest, &mut self.eviction, cuts);
    }

    pub(super) fn cut_out_all(&mut self, leaving: &Leaving) {
        let mut steps = Effort::ANY.steps();
        let cuts = self.pins.find_cuts(&self.forest, leaving, &mut steps);
        self.cut_out(cuts.unwrap_or_default());
    }

    fn unpin(&mut self, node: NodeIndex, place: Depth) {
        if self.forest.may_be_pinned(node, place) {
            let mut leaving = Leaving::default();
            leaving.add(self.forest.node(node).tree, node, place, place + 1);
            self.cut_out_all(&leaving);
        }
    }

    /// Replaces a block with a hole and returns its id. The caller settles the edge.
    fn leave(&mut self, node: NodeIndex, place: Depth) -> u32 {
        self.unpin(node, place);
        self.remove_entry(node, place).0
    }

    /// As [`Self::leave`], for a block that was cut out of its pins. Also returns whether it is condemned.
    pub(super) fn remove_entry(&mut self, node: NodeIndex, place: Depth) -> (u32, bool) {
        let id = self.forest.node(node).id(place, self.block_size());
        self.unmark(node, place, place + 1);
        let mut left = (id, false);
        self.vacate(node, place, place + 1, |id, condemned| {
            left = (id, condemned);
        });
        left
    }

    pub(super) fn unmark(&mut self, node: NodeIndex, from: Depth, to: Depth) {
        let dead = self.eviction.dead_mut();
        dead.unmark(&mut self.forest, node, from, to);
    }

    /// Replaces blocks with holes. They have no marks and were cut out of their pins; the caller settles the edge.
    /// Calls `report` with each id and whether it is condemned.
    pub(super) fn vacate(
        &mut self,
        node: NodeIndex,
        from: Depth,
        to: Depth,
        report: impl FnMut(u32, bool),
    ) {
        self.moved.remove(&mut self.forest, node, from, to);
        if !self.groups.is_empty() {
            self.groups.leave(node, from, to);
        }
        let is_pinned = |id| self.pins.keeps(id);
        self.forest.vacate(node, from, to, is_pinned, report);
    }

    /// Drops trailing holes, then empty edges upwards, then an empty tree. Returns the edge that remains.
    pub(super) fn settle(&mut self, mut at: NodeIndex) -> Option<NodeIndex> {
        loop {
            let edge = self.forest.node(at);
            if edge.has_children() {
                return Some(at);
            }
            if edge.is_root() {
                self.forest.remove_root(at);
                return None;
            }
            let (start, end, parent) = (edge.depth, edge.end(), edge.parent);
            let present = self.forest.present_end(at);
            if present > start {
                if present < end {
                    self.cut_end(at, present);
                }
                self.eviction.requeue(&mut self.forest, at);
                return Some(at);
            }
            // The edge is found by its tokens up to this moment.
            self.detach(at);
            at = parent;
        }
    }

    /// Keeps the number of holes at its bound (D10): above it, unpinned blocks after holes leave in eviction order and
    /// wait.
    #[inline]
    pub(super) fn bound_holes(&mut self) {
        if self.forest.num_holes() > self.config.num_blocks {
            self.remove_tails();
        }
    }

    #[cold]
    fn remove_tails(&mut self) {
        let mut known = HashMap::with_hasher(FixedState::default());
        let mut candidates: BinaryHeap<Reverse<_>> = self
            .eviction
            .leaves()
            .entries()
            .filter(|&(_, node)| self.forest.is_cut_off(node, &mut known))
            .filter_map(|(_, node)| Some(Reverse((eviction_key(&self.forest, node)?, node))))
            .collect();
        let mut freed = Vec::new();
        while self.forest.num_holes() > self.config.num_blocks {
            let Some(Reverse((_, node))) = candidates.pop() else {
                break;
            };
            let id = self.leave(node, self.forest.node(node).end() - 1);
            crate::failpoints::within("too many holes");
            freed.push(id);
            if let Some(next) = self.settle(node)
                && let Some(key) = eviction_key(&self.forest, next)
                && self
                    .forest
                    .is_cut_off(next, &mut HashMap::with_hasher(FixedState::default()))
            {
                candidates.push(Reverse((key, next)));
            }
        }
        freed.sort_unstable();
        self.pins.wait(&mut self.forest, &freed);
    }
}
