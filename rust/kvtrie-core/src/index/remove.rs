//! Removal of blocks: discard, evict, drop, reset (D8, D9, D12, D18), and the bound on holes (D10).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::error::Result;
use crate::ids::{ABSENT, BlockId, Depth, NodeIndex};
use crate::index::pins::Leaving;
use crate::index::{Effort, RadixIndex, Steps};
use crate::namespace::Namespace;
use crate::storage::blocks::Place;
use crate::storage::payload::Payload;
use crate::storage::siblings;

impl RadixIndex {
    /// Removes ids wherever they are. Returns the unpinned ones in call order, condemns the pinned ones, and counts
    /// those that are not indexed.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if an id is outside the pool; nothing is discarded then.
    ///
    /// # Complexity
    /// O(log leaves) per block; if some are pinned, once O(live plans · edges of their paths and sources in the same
    /// namespaces); above the limit on holes, one pass over the nodes.
    pub fn discard(&mut self, ids: &[BlockId]) -> Result<Vec<BlockId>> {
        let freed = self.discard_within(ids, Effort::ANY)?;
        Ok(freed.unwrap_or_default())
    }

    /// As [`discard`](Self::discard); `None`, and nothing is discarded or counted, if that takes more than `effort`.
    ///
    /// # Errors
    /// As [`discard`](Self::discard).
    ///
    /// # Complexity
    /// O(effort + ids).
    pub fn discard_within(
        &mut self,
        ids: &[BlockId],
        effort: Effort,
    ) -> Result<Option<Vec<BlockId>>> {
        self.check_ids(ids, "RadixIndex.discard", "block_ids")?;
        crate::failpoints::before("RadixIndex.discard")?;
        let mut steps = effort.steps();
        let cuts = self
            .count_removal(ids.len() as u64, &mut steps)
            .and_then(|()| self.find_cuts(&self.pinned_of(ids), &mut steps));
        let Some(cuts) = cuts else {
            return Ok(None);
        };
        self.cut_out(cuts);
        let mut unknown = Vec::new();
        let mut freed = Vec::new();
        for &id in ids {
            let place = self.blocks.place(id.0);
            // A repeated id counts once.
            if self.blocks.see(id.0) {
                continue;
            }
            let Place::Indexed { node, depth } = place else {
                unknown.push(id);
                continue;
            };
            if !self.remove_block(node, depth) {
                freed.push(id);
            }
        }
        self.blocks.clear_seen(ids.iter().map(|id| id.0));
        self.unknown_discards += unknown.len() as u64;
        self.bound_holes();
        Ok(Some(freed))
    }

    /// The possibly pinned blocks among these ids.
    pub(super) fn pinned_of(&self, ids: &[BlockId]) -> Leaving {
        let place = |id: &BlockId| match self.blocks.place(id.0) {
            Place::Indexed { node, depth } if self.may_be_pinned(node, depth) => {
                Some((node, depth))
            }
            _ => None,
        };
        let mut places: Vec<(NodeIndex, Depth)> = ids.iter().filter_map(place).collect();
        places.sort_unstable();
        places.dedup();
        let mut leaving = Leaving::default();
        for (node, depth) in places {
            leaving.add(self.nodes[node].tree, node, depth, depth + 1);
        }
        leaving
    }

    /// Counts the steps of a removal, one per block and [`Self::bound_steps`]; `None` if fewer are left.
    pub(super) fn count_removal(&self, blocks: u64, steps: &mut Steps) -> Option<()> {
        steps.take(blocks)?;
        steps.take(self.bound_steps(blocks))
    }

    /// Most steps of [`Self::bound_holes`] after so many more: one per leaf, if the bound may be exceeded.
    pub(crate) fn bound_steps(&self, holes: u64) -> u64 {
        if self.num_holes + holes > self.config.num_blocks {
            self.order.entries().len() as u64
        } else {
            0
        }
    }

    /// Removes a block that was cut out of its pins; returns whether it is condemned.
    pub(super) fn remove_block(&mut self, node: NodeIndex, depth: Depth) -> bool {
        let edge = &self.nodes[node];
        if edge.has_children() || depth + 1 < edge.end() {
            self.renew_version(node);
        }
        let (_, condemned) = self.take_out(node, depth);
        crate::failpoints::within("a block left");
        self.settle(node);
        condemned
    }

    /// Removes and returns at most `n` blocks: waiting ones ([`take_freed`](Self::take_freed)), then dead ones
    /// ([`mark_dead`](Self::mark_dead)), then unpinned blocks without a present block below, by (last use, deepest
    /// first, lowest id).
    ///
    /// # Complexity
    /// O(log leaves) per leaf or run of dead blocks, and O(1) per block; above the limit on holes, one pass over the
    /// nodes.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4], vec![])?;
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
        if self.num_dead > 0 {
            steps.take(self.bound_steps(self.num_dead.min(n as u64)))?;
        }
        let mut out = Vec::new();
        while out.len() < n {
            let Some(id) = self.waiting.pop_front() else {
                break;
            };
            crate::failpoints::within("evict: a block no longer waits");
            self.blocks.set_unknown(id);
            out.push(BlockId(id));
        }
        let mut any_dead = false;
        while out.len() < n {
            let Some(run) = self.dead.first() else {
                break;
            };
            self.evict_dead(run, n, &mut out);
            crate::failpoints::within("evict: dead blocks left");
            any_dead = true;
        }
        while out.len() < n {
            let Some(leaf) = self.order.first() else {
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

    /// Evicts blocks from the end of the first leaf, while it is the first, until `out` has `n`.
    fn evict_from(&mut self, leaf: NodeIndex, n: usize, out: &mut Vec<BlockId>) {
        let block_size = self.block_size();
        let edge = &self.nodes[leaf];
        if !edge.is_plain() {
            let (id, _) = self.leave(leaf, edge.end() - 1);
            out.push(BlockId(id));
            self.settle(leaf);
            return;
        }
        // All its blocks have one last use: it stays first unless another leaf has the same.
        let alone = self
            .order
            .second_stamp()
            .is_none_or(|next| next > edge.last_use(edge.depth));
        let unprotected = edge.end() - self.protected_end(leaf);
        let wanted = crate::ids::depth(n - out.len());
        let count = if alone { unprotected.min(wanted) } else { 1 };
        let end = edge.end() - count;
        let from = (end - edge.depth) as usize;
        self.remove_windows_of(leaf, end, end + count);
        let edge = &self.nodes[leaf];
        for &id in edge.run.ids(block_size)[from..].iter().rev() {
            self.blocks.depart(id, false);
            out.push(BlockId(id));
        }
        self.num_indexed -= u64::from(count);
        if from == 0 {
            let parent = edge.parent;
            self.detach(leaf);
            self.settle(parent);
        } else {
            self.cut_end(leaf, end);
            self.requeue(leaf);
        }
    }

    /// Returns the condemned blocks whose last pin ended: oldest release first, ascending within a release.
    ///
    /// # Complexity
    /// O([`num_waiting`](Self::num_waiting)).
    pub fn take_freed(&mut self) -> Vec<BlockId> {
        let taken: Vec<u32> = self.waiting.drain(..).collect();
        crate::failpoints::within("take_freed: none waits");
        for &id in &taken {
            self.blocks.set_unknown(id);
        }
        taken.into_iter().map(BlockId).collect()
    }

    /// Removes a namespace: returns its unpinned blocks, ascending, and condemns the pinned ones. Plans made before
    /// insert nothing.
    ///
    /// # Complexity
    /// O(blocks and live plans).
    pub fn drop_namespace(&mut self, namespace: &Arc<Namespace>) -> Vec<BlockId> {
        for (_, lease) in self.leases.iter_mut() {
            lease.over |= lease.namespace == *namespace;
        }
        let mut freed = Vec::new();
        if let Some(&tree) = self.tree_of.get(namespace) {
            self.clear_tree(tree, &mut freed);
        }
        freed.sort_unstable();
        freed
    }

    /// Removes all namespaces, as [`drop_namespace`](Self::drop_namespace) does one.
    ///
    /// # Complexity
    /// O(blocks and live plans).
    pub fn reset(&mut self) -> Vec<BlockId> {
        for (_, lease) in self.leases.iter_mut() {
            lease.over = true;
        }
        let trees: Vec<u32> = self.trees.iter().map(|(tree, _)| tree).collect();
        let mut freed = Vec::new();
        for tree in trees {
            self.clear_tree(tree, &mut freed);
        }
        freed.sort_unstable();
        freed
    }

    fn clear_tree(&mut self, tree: u32, freed: &mut Vec<BlockId>) {
        self.keep_all_of(tree);
        let block_size = self.block_size();
        let mut all = vec![self.trees[tree].root];
        let mut next = 0;
        while let Some(&at) = all.get(next) {
            all.extend(siblings::all(&self.nodes, at));
            next += 1;
            // Windows may include tokens of the nodes above, which are still there.
            let node = &self.nodes[at];
            self.remove_windows_of(at, node.depth, node.end());
        }
        let mut open = vec![self.trees[tree].root];
        while let Some(at) = open.pop() {
            self.unqueue(at);
            self.forget_dead(at);
            self.num_protected -= {
                let node = &self.nodes[at];
                let end = self.protected_end(at);
                u64::from(node.num_present(node.depth, end, block_size))
            };
            let children = siblings::all(&self.nodes, at);
            if children.len() > 1 {
                for &child in &children {
                    self.remove_edge(child);
                }
            }
            open.extend(children);
            self.anchors.remove(&at);
            self.sources.remove(&at);
            crate::failpoints::within("a tree of which edges are gone");
            let node = self.nodes.remove(at);
            self.num_holes -= u64::from(node.num_holes());
            self.num_approximate -= u64::from(node.num_approximate());
            for &id in node.run.ids(block_size).iter().filter(|&&id| id != ABSENT) {
                self.num_indexed -= 1;
                let pinned = self.pins.contains_key(&id);
                self.blocks.depart(id, pinned);
                if pinned {
                    self.num_condemned += 1;
                } else {
                    freed.push(BlockId(id));
                }
            }
        }
        self.remove_tree(tree);
    }

    fn remove_tree(&mut self, tree: u32) {
        if let Some(gone) = self.trees.remove(tree) {
            self.tree_of.remove(&gone.namespace);
            self.salts.remove(&gone.namespace);
        }
    }

    /// Turns the place of a block into a hole; the caller settles the edge. Returns the id and whether it is condemned.
    pub(crate) fn leave(&mut self, node: NodeIndex, place: Depth) -> (u32, bool) {
        self.unpath(node, place);
        self.take_out(node, place)
    }

    /// As [`Self::leave`], for a block that was cut out of its pins.
    pub(super) fn take_out(&mut self, node: NodeIndex, place: Depth) -> (u32, bool) {
        let id = self.nodes[node].id(place, self.block_size());
        self.unmark(node, place, place + 1);
        let mut left = (id, false);
        self.vacate(node, place, place + 1, |id, condemned| {
            left = (id, condemned);
        });
        left
    }

    /// Turns present blocks, unmarked and cut out of their pins, into holes; the caller settles the edge. Calls `tell`
    /// with each id and whether it is condemned.
    pub(super) fn vacate(
        &mut self,
        node: NodeIndex,
        from: Depth,
        to: Depth,
        mut tell: impl FnMut(u32, bool),
    ) {
        let block_size = self.block_size();
        self.remove_windows_of(node, from, to);
        for depth in from..to {
            let id = self.nodes[node].id(depth, block_size);
            let condemned = self.pins.contains_key(&id);
            self.blocks.depart(id, condemned);
            self.num_condemned += u64::from(condemned);
            tell(id, condemned);
        }
        crate::failpoints::within("blocks that left and have no hole");
        let protected = self.protected_end(node).min(to).saturating_sub(from);
        let edge = &self.nodes[node];
        let approximate = edge.num_approximate();
        let sorts = from == edge.depth && edge.starts_exact(block_size);
        if sorts {
            siblings::remove(&mut self.nodes, node);
        }
        let edge = &mut self.nodes[node];
        edge.vacate(from, to, block_size);
        let approximate = approximate - edge.num_approximate();
        if sorts {
            siblings::insert(&mut self.nodes, block_size, node);
        }
        let count = u64::from(to - from);
        self.num_holes += count;
        self.num_indexed -= count;
        self.num_approximate -= u64::from(approximate);
        self.num_protected -= u64::from(protected);
    }

    /// Replaces a payload; the caller counts. Siblings are sorted by whether their first block is exact.
    pub(crate) fn put(&mut self, node: NodeIndex, place: Depth, new: Payload) {
        let block_size = self.block_size();
        let edge = &mut self.nodes[node];
        let sorts = place == edge.depth && edge.starts_exact(block_size) != new.is_exact();
        if sorts {
            siblings::remove(&mut self.nodes, node);
        }
        self.nodes[node].set_payload(place, new, block_size);
        if sorts {
            siblings::insert(&mut self.nodes, block_size, node);
        }
    }

    /// Drops trailing holes, empty edges and an empty tree. Returns the remaining edge.
    pub(super) fn settle(&mut self, mut at: NodeIndex) -> Option<NodeIndex> {
        loop {
            let edge = &self.nodes[at];
            if edge.has_children() {
                return Some(at);
            }
            if edge.is_root() {
                let tree = edge.tree;
                self.nodes.remove(at);
                self.remove_tree(tree);
                return None;
            }
            if self.trim(at) {
                self.requeue(at);
                return Some(at);
            }
            let parent = self.nodes[at].parent;
            self.detach(at);
            at = parent;
        }
    }

    /// Drops the trailing holes of an edge without children; returns whether a block is left. If none is, the tokens
    /// stay: [`Self::detach`] needs them to find the edge.
    fn trim(&mut self, at: NodeIndex) -> bool {
        let block_size = self.config.block_size;
        let edge = &self.nodes[at];
        if edge.num_holes() == 0 {
            return true;
        }
        let end = (edge.depth..edge.end())
            .rev()
            .find(|&depth| edge.id(depth, block_size) != ABSENT)
            .map_or(edge.depth, |last| last + 1);
        if end == edge.depth {
            self.num_holes -= u64::from(edge.num_holes());
            return false;
        }
        if end < edge.end() {
            let holes = self.cut_end(at, end);
            self.num_holes -= u64::from(holes);
        }
        true
    }

    /// D10: at most `num_blocks` holes. Above that, unpinned blocks after holes leave in eviction order and wait.
    #[inline]
    pub(super) fn bound_holes(&mut self) {
        if self.num_holes > self.config.num_blocks {
            self.remove_tails();
        }
    }

    #[cold]
    fn remove_tails(&mut self) {
        let mut known = HashMap::with_hasher(FixedState::default());
        let mut candidates: BinaryHeap<Reverse<_>> = self
            .order
            .entries()
            .filter(|&(_, node)| self.is_cut_off(node, &mut known))
            .filter_map(|(_, node)| Some(Reverse((self.eviction_key(node)?, node))))
            .collect();
        let mut freed = Vec::new();
        while self.num_holes > self.config.num_blocks {
            let Some(Reverse((_, node))) = candidates.pop() else {
                break;
            };
            let (id, _) = self.leave(node, self.nodes[node].end() - 1);
            crate::failpoints::within("too many holes");
            freed.push(id);
            // The remaining edge may end in the next candidate.
            if let Some(next) = self.settle(node)
                && let Some(key) = self.eviction_key(next)
                && self.is_cut_off(next, &mut HashMap::with_hasher(FixedState::default()))
            {
                candidates.push(Reverse((key, next)));
            }
        }
        freed.sort_unstable();
        for &id in &freed {
            self.blocks.set_waiting(id);
        }
        self.waiting.extend(freed);
    }

    /// Whether a hole is above the end of a node. `known` caches results.
    pub(crate) fn is_cut_off(
        &self,
        from: NodeIndex,
        known: &mut HashMap<NodeIndex, bool, FixedState>,
    ) -> bool {
        let mut passed = Vec::new();
        let mut at = from;
        let is_cut_off = loop {
            let node = &self.nodes[at];
            if let Some(&answer) = known.get(&at) {
                break answer;
            }
            passed.push(at);
            if node.num_holes() > 0 || node.is_root() {
                break node.num_holes() > 0;
            }
            at = node.parent;
        };
        known.extend(passed.into_iter().map(|node| (node, is_cut_off)));
        is_cut_off
    }
}
