//! Blocks leave the index: discard, evict, drop, reset (D8, D9, D12, D18), and the bound on holes (D10).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use crate::blocks::Place;
use crate::error::Result;
use crate::ids::{BlockId, Depth, NO_NODE, NodeIndex};
use crate::lru::Key;
use crate::namespace::Namespace;
use crate::node::Payload;
use crate::siblings;
use crate::tree::RadixIndex;

impl RadixIndex {
    /// Takes these ids out of the index wherever they stand, and answers those that nobody pins, in call order. Pinned
    /// ones are condemned. Ids that do not stand in the index are counted.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if an id lies outside the pool; nothing is discarded then.
    ///
    /// # Complexity
    /// O(log leaves) a block; a pinned one O(live plans), and past the bound on holes one pass over the leaves.
    pub fn discard(&mut self, ids: &[BlockId]) -> Result<Vec<BlockId>> {
        self.check_ids(ids, "RadixIndex.discard")?;
        let mut unknown = Vec::new();
        let mut freed = Vec::new();
        for &id in ids {
            let place = self.blocks.place(id.0);
            // An id that comes again counts once, whatever it was the first time.
            if self.blocks.offer(id.0) {
                continue;
            }
            let Place::Indexed { node, depth } = place else {
                unknown.push(id);
                continue;
            };
            let edge = &self.nodes[node];
            if edge.num_children > 0 || depth + 1 < edge.end() {
                self.renew_version(node);
            }
            let (_, condemned) = self.leave(node, depth);
            if !condemned {
                freed.push(id);
            }
            self.settle(node);
        }
        self.blocks.clear_offered(ids.iter().map(|id| id.0));
        self.unknown_discards += unknown.len() as u64;
        self.bound_holes();
        Ok(freed)
    }

    /// Hands out at most `n` blocks: those that wait for [`take_freed`](Self::take_freed) first, then unpinned blocks with no
    /// present block below, by (last use, deepest, lowest id).
    ///
    /// # Complexity
    /// O(log leaves) a block.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::default() })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// assert_eq!(index.evict(1), [BlockId(0)]);
    /// assert_eq!(index.evict(9), [BlockId(6)]);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn evict(&mut self, n: usize) -> Vec<BlockId> {
        let mut out = Vec::new();
        while out.len() < n {
            let Some(id) = self.waiting.pop_front() else {
                break;
            };
            self.blocks.set_unknown(id);
            out.push(BlockId(id));
        }
        while out.len() < n {
            let Some(&(_, node)) = self.order.first() else {
                break;
            };
            let (id, _) = self.leave(node, self.nodes[node].end() - 1);
            out.push(BlockId(id));
            self.settle(node);
        }
        out
    }

    /// Hands out the condemned blocks whose last pin ended, oldest release first, ascending within one release.
    pub fn take_freed(&mut self) -> Vec<BlockId> {
        let taken: Vec<u32> = self.waiting.drain(..).collect();
        for &id in &taken {
            self.blocks.set_unknown(id);
        }
        taken.into_iter().map(BlockId).collect()
    }

    /// Forgets a namespace: answers its unpinned blocks, ascending, and condemns the pinned ones. Plans made before can
    /// insert nothing any more.
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

    /// Forgets everything, as [`drop_namespace`](Self::drop_namespace) does for one namespace.
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
        // Every anchor of the tree goes with it: plans pin blocks of one namespace alone.
        for (_, lease) in self.leases.iter_mut() {
            let anchored = lease.anchor.map(|id| self.blocks.place(id));
            if let Some(Place::Indexed { node, .. }) = anchored
                && self.nodes[node].namespace == tree
            {
                lease.anchor = None;
            }
        }
        let mut open = vec![self.trees[tree].root];
        while let Some(at) = open.pop() {
            self.unqueue(at);
            self.remove_edge(at);
            let Some(node) = self.nodes.remove(at) else {
                continue;
            };
            self.num_protected -= u64::from(node.num_present(node.depth, node.protected_end()));
            self.num_holes -= u64::from(node.num_holes);
            self.num_approximate -= u64::from(node.num_approximate);
            for &id in node.run.ids().iter().filter(|&&id| id != Payload::HOLE.id) {
                self.num_indexed -= 1;
                if self.blocks.depart(id) {
                    self.num_condemned += 1;
                } else {
                    freed.push(BlockId(id));
                }
            }
            let mut child = node.first_child;
            while child != NO_NODE {
                open.push(child);
                child = self.nodes[child].next;
            }
        }
        self.remove_tree(tree);
    }

    fn remove_tree(&mut self, tree: u32) {
        if let Some(gone) = self.trees.remove(tree) {
            self.tree_of.remove(&gone.namespace);
        }
    }

    /// A block leaves its place, which becomes a hole; the caller settles the edge. Answers the id and whether it is
    /// condemned.
    pub(crate) fn leave(&mut self, node: NodeIndex, place: Depth) -> (u32, bool) {
        let payload = self.nodes[node].payload(place);
        if self.blocks.pins(payload.id) > 0 {
            self.move_anchors(payload.id);
            // What takes its place is not what the leases pinned.
            self.renew_version(node);
        }
        if place == self.nodes[node].depth && payload.is_exact() {
            siblings::remove(&mut self.nodes, self.config.block_size, node);
        }
        let (start, end) = self.tokens_of(place);
        let edge = &mut self.nodes[node];
        let approximate = u32::from(!payload.label.is_exact());
        let protected = place < edge.protected_end();
        edge.run.set((place - edge.depth) as usize, Payload::HOLE);
        edge.num_holes += 1;
        edge.num_approximate -= approximate;
        if let Some(extras) = &mut edge.extras {
            extras.tags.clear(start, end);
            extras.source_uses.remove(&place);
        }
        self.num_holes += 1;
        self.num_indexed -= 1;
        self.num_approximate -= u64::from(approximate);
        self.num_protected -= u64::from(protected);
        let condemned = self.blocks.depart(payload.id);
        self.num_condemned += u64::from(condemned);
        (payload.id, condemned)
    }

    /// Drops what no present block hangs below: trailing holes, empty edges, an empty tree. Answers the edge that is left.
    fn settle(&mut self, mut at: NodeIndex) -> Option<NodeIndex> {
        loop {
            if self.nodes[at].num_children > 0 {
                self.requeue(at);
                return Some(at);
            }
            if self.nodes[at].is_root() {
                let tree = self.nodes[at].namespace;
                self.nodes.remove(at);
                self.remove_tree(tree);
                return None;
            }
            self.trim(at);
            let edge = &self.nodes[at];
            if edge.run.len() > 0 {
                self.requeue(at);
                return Some(at);
            }
            let parent = edge.parent;
            self.detach(at);
            at = parent;
        }
    }

    /// Drops the trailing holes of an edge without children.
    fn trim(&mut self, at: NodeIndex) {
        let block_size = self.config.block_size;
        let edge = &mut self.nodes[at];
        let mut dropped = 0;
        while edge.run.len() > 0 && !edge.payload(edge.end() - 1).is_present() {
            edge.run.pop(block_size);
            dropped += 1;
        }
        if dropped == 0 {
            return;
        }
        edge.num_holes -= dropped;
        edge.trims = edge.trims.wrapping_add(1);
        let end = edge.end();
        edge.uses.truncate(end);
        if let Some(extras) = &mut edge.extras
            && !extras.items.is_empty()
        {
            extras.items =
                crate::tokens::Item::within(&extras.items, 0, end as usize * block_size).collect();
        }
        self.num_holes -= u64::from(dropped);
    }

    /// D10: at most `num_blocks` holes. Past that, unpinned cut-off blocks with none below leave in the order of eviction,
    /// and wait.
    fn bound_holes(&mut self) {
        if self.num_holes <= self.config.num_blocks {
            return;
        }
        let mut candidates: BinaryHeap<Reverse<(Key, NodeIndex)>> = self
            .order
            .entries()
            .iter()
            .filter(|&&(_, node)| self.is_cut_off(node))
            .map(|&entry| Reverse(entry))
            .collect();
        let mut freed = Vec::new();
        while self.num_holes > self.config.num_blocks {
            let Some(Reverse((_, node))) = candidates.pop() else {
                break;
            };
            let (id, _) = self.leave(node, self.nodes[node].end() - 1);
            freed.push(id);
            // The edge that is left may end in the next candidate.
            if let Some(next) = self.settle(node)
                && let Some(key) = self.eviction_key(next)
                && self.is_cut_off(next)
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

    fn is_cut_off(&self, mut at: NodeIndex) -> bool {
        loop {
            let node = &self.nodes[at];
            if node.num_holes > 0 {
                return true;
            }
            if node.is_root() {
                return false;
            }
            at = node.parent;
        }
    }
}
