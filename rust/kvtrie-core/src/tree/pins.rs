//! Leases: what a live plan pins, and what that protects from eviction.
//!
//! A lease anchors at the deepest block of a path and so pins the path. What is pinned *protects* itself and everything
//! above it, which is kept per node: the deepest end at which somebody anchors there, and how many children have a
//! protected block. So `num_evictable` is a counter, a leaf knows by itself whether it may go, and a pin costs one step per
//! node that it newly protects.
//!
//! Blocks that are pinned one by one (sources of copies, and what is left of a path of which a pinned block was taken out)
//! are counted by id, and protect in the same way.

use std::cmp::Reverse;

use smallvec::SmallVec;

use crate::blocks::Place;
use crate::ids::{BlockId, Depth, NodeIndex};
use crate::node::Node;
use crate::tree::{Position, RadixIndex};

/// Where leases anchor in a node: (end of the protected blocks, how many leases), ends ascending.
pub(crate) type Anchors = SmallVec<[(Depth, u32); 2]>;

impl RadixIndex {
    /// The blocks of a node before this depth are pinned, or lie above a pinned one.
    pub(crate) fn protected_end(&self, at: NodeIndex) -> Depth {
        let node = &self.nodes[at];
        match node.protection {
            0 => node.depth,
            Node::ANCHORED => {
                let ends = self.anchors.get(&at).and_then(|ends| ends.last());
                ends.map_or(node.depth, |&(end, _)| end)
            }
            _ => node.end(),
        }
    }

    /// Protects the blocks of a node before `end`, and everything above.
    fn anchor_at(&mut self, at: NodeIndex, end: Depth) {
        let before = self.protected_end(at);
        let ends = self.anchors.entry(at).or_default();
        match ends.binary_search_by_key(&end, |&(end, _)| end) {
            Ok(known) => ends[known].1 += 1,
            Err(new) => ends.insert(new, (end, 1)),
        }
        self.nodes[at].protection |= Node::ANCHORED;
        let after = before.max(end);
        if after > before {
            let node = &self.nodes[at];
            let (present, is_new) = (
                node.num_present(before, after, self.config.block_size),
                before == node.depth,
            );
            self.num_protected += u64::from(present);
            if is_new {
                self.protect_above(at);
            }
            self.requeue(at);
        }
    }

    /// Takes `count` protections of the blocks before `end` away.
    fn unanchor_at(&mut self, at: NodeIndex, end: Depth, count: u32) {
        let Some(ends) = self.anchors.get_mut(&at) else {
            return;
        };
        let Ok(known) = ends.binary_search_by_key(&end, |&(end, _)| end) else {
            return;
        };
        let node = &mut self.nodes[at];
        let last = |ends: &Anchors| ends.last().map_or(node.depth, |&(end, _)| end);
        let before = last(ends);
        ends[known].1 -= count;
        if ends[known].1 == 0 {
            ends.remove(known);
        }
        let mut after = last(ends);
        if ends.is_empty() {
            self.anchors.remove(&at);
            node.protection &= !Node::ANCHORED;
        }
        if node.protection & !Node::ANCHORED > 0 {
            // A child protects the whole edge.
            after = before;
        }
        if after < before {
            let node = &self.nodes[at];
            let (present, is_over) = (
                node.num_present(after, before, self.config.block_size),
                after == node.depth,
            );
            self.num_protected -= u64::from(present);
            if is_over {
                self.unprotect_above(at);
            }
            self.requeue(at);
        }
    }

    fn anchor(&mut self, id: u32) {
        if let Some((node, depth)) = self.anchor_place(id) {
            self.anchor_at(node, depth + 1);
        }
    }

    /// Does nothing for a block that has left its place: its anchors went with it.
    fn unanchor(&mut self, id: u32) {
        if let Some((node, depth)) = self.anchor_place(id) {
            self.unanchor_at(node, depth + 1, 1);
        }
    }

    /// A node has its first protected block: so everything above it is protected.
    fn protect_above(&mut self, node: NodeIndex) {
        let (block_size, mut protected, mut anchored) = (self.block_size(), 0, false);
        let mut top = self.nodes[node].parent;
        self.nodes.climb(top, |node| {
            node.protection += 1;
            if node.protection == 1 {
                protected += u64::from(node.present(block_size));
                top = node.parent;
                return true;
            }
            anchored = node.protection == Node::ANCHORED | 1;
            false
        });
        self.num_protected += protected;
        if anchored {
            self.num_protected += self.behind_anchors(top);
        }
    }

    /// A node has lost its last protected block.
    fn unprotect_above(&mut self, node: NodeIndex) {
        let (block_size, mut protected, mut anchored) = (self.block_size(), 0, false);
        let mut top = self.nodes[node].parent;
        self.nodes.climb(top, |node| {
            node.protection -= 1;
            if node.protection == 0 {
                protected += u64::from(node.present(block_size));
                top = node.parent;
                return true;
            }
            anchored = node.protection == Node::ANCHORED;
            false
        });
        self.num_protected -= protected;
        if anchored {
            self.num_protected -= self.behind_anchors(top);
        }
    }

    /// Present blocks of a node behind the last end at which somebody anchors there.
    fn behind_anchors(&self, at: NodeIndex) -> u64 {
        let node = &self.nodes[at];
        let ends = self.anchors.get(&at).and_then(|ends| ends.last());
        let from = ends.map_or(node.depth, |&(end, _)| end);
        u64::from(node.num_present(from, node.end(), self.block_size()))
    }

    /// The front part of an edge that was cut takes over what anchors there.
    pub(super) fn split_anchors(&mut self, front: NodeIndex, tail: NodeIndex) {
        let cut = self.nodes[tail].depth;
        if self.nodes[tail].protection & Node::ANCHORED != 0
            && let Some(ends) = self.anchors.get_mut(&tail)
        {
            let behind = ends.partition_point(|&(end, _)| end <= cut);
            let own: Anchors = ends.drain(..behind).collect();
            if ends.is_empty() {
                self.anchors.remove(&tail);
                self.nodes[tail].protection &= !Node::ANCHORED;
            }
            if !own.is_empty() {
                self.anchors.insert(front, own);
                self.nodes[front].protection |= Node::ANCHORED;
            }
        }
        self.nodes[front].protection += u32::from(self.nodes[tail].protection > 0);
    }

    /// Pins a block by itself, and protects it.
    fn keep(&mut self, id: u32) {
        *self.pins.entry(id).or_default() += 1;
        self.anchor(id);
    }

    /// Ends one such pin; a condemned block that nobody else pins is added to `released`.
    fn unkeep(&mut self, id: u32, released: &mut Vec<u32>) {
        self.unanchor(id);
        if let Some(count) = self.pins.get_mut(&id) {
            *count -= 1;
            if *count > 0 {
                return;
            }
            self.pins.remove(&id);
        }
        if self.blocks.place(id) == Place::Condemned {
            self.blocks.set_waiting(id);
            self.num_condemned -= 1;
            released.push(id);
        }
    }

    /// Where an indexed block stands.
    pub(crate) fn anchor_place(&self, id: u32) -> Option<(NodeIndex, Depth)> {
        match self.blocks.place(id) {
            Place::Indexed { node, depth } => Some((node, depth)),
            _ => None,
        }
    }

    /// Whether the block at `place` of `node` is the block at `below` of `under`, or lies above it.
    fn is_above(
        &self,
        (node, place): (NodeIndex, Depth),
        (mut under, below): (NodeIndex, Depth),
    ) -> bool {
        if place > below {
            return false;
        }
        while self.nodes[under].depth > place {
            under = self.nodes[under].parent;
        }
        under == node
    }

    /// A block is about to leave its place: whoever pins the path through it pins the rest of that path one by one from
    /// here on, and the path down to the block above it. Answers whether the block is pinned.
    pub(crate) fn unpath(&mut self, node: NodeIndex, place: Depth, id: u32) -> bool {
        if place < self.protected_end(node) {
            let cut: Vec<(u32, u32)> = self
                .leases
                .iter()
                .flat_map(|(lease, held)| held.anchors.iter().map(move |&anchor| (lease, anchor)))
                .filter(|&(_, anchor)| {
                    self.anchor_place(anchor)
                        .is_some_and(|at| self.is_above((node, place), at))
                })
                .collect();
            for (lease, anchor) in cut {
                self.cut_path(lease, anchor, place);
            }
            // Those that are left at this block pin it by itself.
            let own = self.anchors.get(&node).and_then(|ends| {
                let known = ends.binary_search_by_key(&(place + 1), |&(end, _)| end);
                known.ok().map(|at| ends[at].1)
            });
            if let Some(count) = own {
                self.unanchor_at(node, place + 1, count);
            }
        }
        self.pins.contains_key(&id)
    }

    /// A lease that pins the path down to `anchor` pins it down to the depth `place`, and what lies behind one by one.
    fn cut_path(&mut self, lease: u32, anchor: u32, place: Depth) {
        let ids = self.path_through(anchor, place.saturating_sub(1));
        let mut rest = ids.iter().map(|id| id.0);
        let held = &mut self.leases[lease];
        held.anchors.retain(|known| *known != anchor);
        // What is left is protected before the old anchor goes: nothing is unprotected in between.
        if place > 0
            && let Some(above) = rest.next()
            && !held.anchors.contains(&above)
        {
            held.anchors.push(above);
            self.anchor(above);
        }
        for id in rest {
            if self.leases[lease].kept.insert(id) {
                self.keep(id);
            }
        }
        self.unanchor(anchor);
    }

    /// The ids of the path that ends in this indexed block, from the depth `from` on.
    pub(crate) fn path_through(&self, id: u32, from: Depth) -> Vec<BlockId> {
        let mut ids = Vec::new();
        if let Some((node, depth)) = self.anchor_place(id) {
            let end = Position {
                node,
                depth: depth + 1,
            };
            self.path_ids(end, from, &mut ids);
        }
        ids
    }

    /// Pins under a lease the blocks that back a sequence down to `end`.
    pub(crate) fn pin_path(&mut self, lease: u32, end: Position) {
        if !self.leases[lease].pinned || end.depth == 0 {
            return;
        }
        let at = (end.node, end.depth - 1);
        let id = self.nodes[end.node].id(at.1, self.block_size());
        let mut covered = SmallVec::<[u32; 2]>::new();
        for &anchor in &self.leases[lease].anchors {
            let Some(known) = self.anchor_place(anchor) else {
                continue;
            };
            if self.is_above(at, known) {
                return;
            }
            if self.is_above(known, at) {
                covered.push(anchor);
            }
        }
        // The deeper anchor first: nothing is unprotected in between.
        self.anchor_at(at.0, end.depth);
        let anchors = &mut self.leases[lease].anchors;
        anchors.retain(|known| !covered.contains(known));
        anchors.push(id);
        for anchor in covered {
            self.unanchor(anchor);
        }
    }

    /// Pins a block that a plan copies from.
    pub(crate) fn pin_source(&mut self, lease: u32, id: u32) {
        self.leases[lease].sources.push(id);
        self.keep(id);
    }

    /// Ends the pins of the sources of a lease.
    pub(crate) fn unpin_sources(&mut self, lease: u32) {
        let sources = std::mem::take(&mut self.leases[lease].sources);
        let mut released = Vec::new();
        for id in sources {
            self.unkeep(id, &mut released);
        }
        self.wait(released);
    }

    /// Ends a lease with all its pins.
    pub(crate) fn end_lease(&mut self, lease: u32) {
        let Some(ended) = self.leases.remove(lease) else {
            return;
        };
        for &anchor in &ended.anchors {
            self.unanchor(anchor);
        }
        // Deepest first, as the ends of a node are taken off in no time.
        let mut kept: Vec<u32> = ended.kept.iter().chain(&ended.sources).copied().collect();
        kept.sort_by_key(|&id| Reverse(self.anchor_place(id).map(|(_, depth)| depth)));
        let mut released = Vec::new();
        for id in kept {
            self.unkeep(id, &mut released);
        }
        self.wait(released);
    }

    /// Every path that is pinned in a tree is pinned block by block, without protecting anything: the tree goes.
    pub(super) fn keep_all_of(&mut self, tree: u32) {
        let paths: Vec<(u32, u32)> = self
            .leases
            .iter()
            .flat_map(|(lease, held)| held.anchors.iter().map(move |&anchor| (lease, anchor)))
            .filter(|&(_, anchor)| {
                self.anchor_place(anchor)
                    .is_some_and(|(node, _)| self.nodes[node].tree == tree)
            })
            .collect();
        for (lease, anchor) in paths {
            let ids = self.path_through(anchor, 0);
            let held = &mut self.leases[lease];
            held.anchors.retain(|known| *known != anchor);
            for id in ids {
                if held.kept.insert(id.0) {
                    *self.pins.entry(id.0).or_default() += 1;
                }
            }
        }
    }

    /// Blocks that somebody pins, indexed or condemned.
    pub(crate) fn num_pinned(&self) -> u64 {
        if self.pins.is_empty() {
            // Then everything that is protected stands on a pinned path.
            return self.num_protected;
        }
        let block_size = self.block_size();
        // How far each node is on a pinned path.
        let mut ends =
            hashbrown::HashMap::<NodeIndex, Depth, foldhash::quality::FixedState>::default();
        let mut pinned = 0;
        for (_, lease) in self.leases.iter() {
            for place in lease.anchors.iter().filter_map(|&id| self.anchor_place(id)) {
                let (mut node, mut end) = (place.0, place.1 + 1);
                loop {
                    let edge = &self.nodes[node];
                    let known = ends.entry(node).or_insert(edge.depth);
                    if edge.is_root() || *known >= end {
                        break;
                    }
                    pinned += u64::from(edge.num_present(*known, end, block_size));
                    let above = *known > edge.depth;
                    *known = end;
                    if above {
                        break;
                    }
                    end = edge.depth;
                    node = edge.parent;
                }
            }
        }
        let on_path = |id: u32| {
            self.anchor_place(id)
                .is_some_and(|(node, depth)| ends.get(&node).is_some_and(|&end| depth < end))
        };
        pinned + self.pins.keys().filter(|&&id| !on_path(id)).count() as u64
    }

    /// Queues condemned blocks whose last pin ended, ascending, for `take_freed` and `evict`.
    fn wait(&mut self, mut released: Vec<u32>) {
        released.sort_unstable();
        self.waiting.extend(released);
    }
}
