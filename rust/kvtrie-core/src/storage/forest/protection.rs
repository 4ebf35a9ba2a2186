//! What pins protect. A node records the ends of pinned paths and the pinned sources in it, and the blocks above them
//! are protected.

use foldhash::quality::FixedState;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use smallvec::SmallVec;

use crate::ids::{Depth, NO_NODE, NodeIndex};
use crate::storage::forest::{Forest, SourceRun};
use crate::storage::node::{Guard, Node};

/// Pairs of the depth at which pinned paths end and the number of pins, ascending.
type Anchors = SmallVec<[(Depth, u32); 2]>;

#[derive(Debug)]
pub(super) struct Protection {
    anchors: HashMap<NodeIndex, Anchors, FixedState>,
    sources: HashMap<NodeIndex, Sources, FixedState>,
    num_blocks: u64,
}

impl Protection {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            anchors: HashMap::with_hasher(FixedState::with_seed(seed)),
            sources: HashMap::with_hasher(FixedState::with_seed(seed)),
            num_blocks: 0,
        }
    }

    pub(super) fn count(&mut self, blocks: u64, is_new: bool) {
        if is_new {
            self.num_blocks += blocks;
        } else {
            self.num_blocks -= blocks;
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let sources = self.sources.values();
        self.anchors.allocation_size()
            + self.sources.allocation_size()
            + sources.map(Sources::heap_bytes).sum::<usize>()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) at: NodeIndex,
    pub(crate) guard: Guard,
    pub(crate) before: Depth,
    pub(crate) after: Depth,
}

#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub(crate) children: u32,
    /// Triples of (end, first, number of pins), ascending.
    pub(crate) runs: SmallVec<[(Depth, Depth, u32); 1]>,
}

impl Sources {
    fn add(&mut self, from: Depth, to: Depth, count: u32) {
        match self.find(from, to) {
            Ok(known) => self.runs[known].2 += count,
            Err(new) => self.runs.insert(new, (to, from, count)),
        }
    }

    fn remove(&mut self, from: Depth, to: Depth) {
        if let Ok(known) = self.find(from, to) {
            self.runs[known].2 -= 1;
            if self.runs[known].2 == 0 {
                self.runs.remove(known);
            }
        }
    }

    fn find(&self, from: Depth, to: Depth) -> Result<usize, usize> {
        let key = (to, from);
        self.runs
            .binary_search_by_key(&key, |&(to, from, _)| (to, from))
    }

    fn is_empty(&self) -> bool {
        self.children == 0 && self.runs.is_empty()
    }

    fn covers(&self, depth: Depth) -> bool {
        let first = self.runs.partition_point(|&(to, ..)| to <= depth);
        self.runs[first..].iter().any(|&(_, from, _)| from <= depth)
    }

    /// The pinned depths, as ascending ranges that do not touch.
    pub(crate) fn pinned(&self) -> Vec<(Depth, Depth)> {
        let mut found: Vec<(Depth, Depth)> = Vec::new();
        for &(to, from, _) in self.runs.iter().rev() {
            match found.last_mut() {
                Some(last) if last.0 <= to => last.0 = last.0.min(from),
                _ => found.push((from, to)),
            }
        }
        found.reverse();
        found
    }

    fn heap_bytes(&self) -> usize {
        if self.runs.spilled() {
            self.runs.capacity() * size_of::<(Depth, Depth, u32)>()
        } else {
            0
        }
    }
}

impl Forest {
    /// End of the blocks of this edge that are pinned or above a pinned block.
    pub(crate) fn protected_end(&self, at: NodeIndex) -> Depth {
        let node = &self.nodes[at];
        match node.protection {
            0 => node.depth,
            own if own & Node::SOURCED == 0 => self.path_end(at),
            _ => self.path_end(at).max(self.source_end(at)),
        }
    }

    /// End of the blocks of this edge that are on a pinned path.
    pub(crate) fn path_end(&self, at: NodeIndex) -> Depth {
        let node = &self.nodes[at];
        match node.protection & !Node::SOURCED {
            0 => node.depth,
            Node::ANCHORED => {
                let ends = self
                    .protection
                    .anchors
                    .get(&at)
                    .and_then(|ends| ends.last());
                ends.map_or(node.depth, |&(end, _)| end)
            }
            _ => node.end(),
        }
    }

    /// End of the blocks of this edge that are pinned sources, or above a source that is on no pinned path.
    fn source_end(&self, at: NodeIndex) -> Depth {
        let node = &self.nodes[at];
        match self.protection.sources.get(&at) {
            Some(sources) if sources.children > 0 => node.end(),
            Some(sources) => sources.runs.last().map_or(node.depth, |&(end, ..)| end),
            None => node.depth,
        }
    }

    fn change_sources(&mut self, at: NodeIndex, change: impl FnOnce(&mut Sources)) {
        if let Some(sources) = self.protection.sources.get_mut(&at) {
            change(sources);
            if sources.is_empty() {
                self.protection.sources.remove(&at);
                self.nodes[at].protection &= !Node::SOURCED;
            }
        }
    }

    /// Sets `protection` to `to` in `at` and the nodes above, until one has another value than `from` or dead blocks.
    /// Returns that node.
    fn climb_over(&mut self, at: NodeIndex, from: u32, to: u32) -> NodeIndex {
        let (block_size, mut present, mut next) = (self.block_size, 0, at);
        self.nodes.climb(at, |node| {
            if node.protection != from || node.has_dead() {
                return false;
            }
            node.protection = to;
            present += u64::from(node.present(block_size));
            next = node.parent;
            true
        });
        self.protection.count(present, to > from);
        next
    }

    pub(super) fn split_anchors(&mut self, front: NodeIndex, tail: NodeIndex) {
        let cut = self.nodes[tail].depth;
        if self.nodes[tail].protection & Node::ANCHORED != 0
            && let Some(ends) = self.protection.anchors.get_mut(&tail)
        {
            let before = ends.partition_point(|&(end, _)| end <= cut);
            let own: Anchors = ends.drain(..before).collect();
            if ends.is_empty() {
                self.protection.anchors.remove(&tail);
                self.nodes[tail].protection &= !Node::ANCHORED;
            }
            if !own.is_empty() {
                self.protection.anchors.insert(front, own);
                self.nodes[front].protection |= Node::ANCHORED;
            }
        }
        let mut own = Sources::default();
        if self.nodes[tail].protection & Node::SOURCED != 0 {
            self.change_sources(tail, |sources| {
                for (to, from, count) in std::mem::take(&mut sources.runs) {
                    if from < cut {
                        own.add(from, to.min(cut), count);
                    }
                    if to > cut {
                        sources.add(from.max(cut), to, count);
                    }
                }
            });
        }
        match self.nodes[tail].guard() {
            Guard::Nothing => {}
            Guard::Source => own.children = 1,
            Guard::Path => self.nodes[front].protection += 1,
        }
        if !own.is_empty() {
            self.protection.sources.insert(front, own);
            self.nodes[front].protection |= Node::SOURCED;
        }
    }

    /// Whether a block may be pinned. Cut pins can make this true for an unpinned block above the rest of a cut path.
    pub(crate) fn may_be_pinned(&self, node: NodeIndex, place: Depth) -> bool {
        let is_source = || {
            let sources = self.sources_of(node);
            sources.is_some_and(|sources| sources.covers(place))
        };
        place < self.path_end(node) || place < self.protected_end(node) && is_source()
    }

    pub(crate) fn num_protected(&self) -> u64 {
        self.protection.num_blocks
    }

    pub(crate) fn has_sources(&self) -> bool {
        !self.protection.sources.is_empty()
    }

    pub(crate) fn sources_of(&self, at: NodeIndex) -> Option<&Sources> {
        self.protection.sources.get(&at)
    }

    /// The ends of pinned paths in a node and their numbers of pins, ascending.
    pub(crate) fn anchors_of(&self, at: NodeIndex) -> &[(Depth, u32)] {
        self.protection.anchors.get(&at).map_or(&[], |ends| ends)
    }

    pub(crate) fn num_anchored(&self) -> usize {
        self.protection.anchors.len()
    }

    #[inline]
    pub(crate) fn anchor(&mut self, at: NodeIndex, end: Depth) -> Option<Change> {
        let ends = self.protection.anchors.entry(at).or_default();
        let before = ends.last().copied();
        match ends.binary_search_by_key(&end, |&(end, _)| end) {
            Ok(known) => ends[known].1 += 1,
            Err(new) => ends.insert(new, (end, 1)),
        }
        let after = ends.last().copied();
        let node = &mut self.nodes[at];
        let guard = node.guard();
        node.protection |= Node::ANCHORED;
        self.anchors_changed(at, guard, before, after)
    }

    #[inline]
    pub(crate) fn unanchor(&mut self, at: NodeIndex, end: Depth) -> Option<Change> {
        let Entry::Occupied(mut entry) = self.protection.anchors.entry(at) else {
            return None;
        };
        let ends = entry.get_mut();
        let known = ends.binary_search_by_key(&end, |&(end, _)| end).ok()?;
        let before = ends.last().copied();
        ends[known].1 -= 1;
        if ends[known].1 == 0 {
            ends.remove(known);
        }
        let after = ends.last().copied();
        let node = &mut self.nodes[at];
        let guard = node.guard();
        if after.is_none() {
            entry.remove();
            node.protection &= !Node::ANCHORED;
        }
        self.anchors_changed(at, guard, before, after)
    }

    /// What changes when the last end of a pinned path in a node does. The node's other protection is unchanged.
    #[inline]
    fn anchors_changed(
        &self,
        at: NodeIndex,
        guard: Guard,
        before: Option<(Depth, u32)>,
        after: Option<(Depth, u32)>,
    ) -> Option<Change> {
        let node = &self.nodes[at];
        if node.has_paths_below() {
            return None;
        }
        let mut others = node.depth;
        if node.protection & Node::SOURCED != 0 {
            others = self.source_end(at);
        }
        let end = |last: Option<(Depth, u32)>| last.map_or(others, |(end, _)| end.max(others));
        Some(Change {
            at,
            guard,
            before: end(before),
            after: end(after),
        })
    }

    pub(crate) fn add_sources(&mut self, runs: &[SourceRun]) -> Change {
        let at = runs[0].node;
        let (guard, before) = (self.nodes[at].guard(), self.protected_end(at));
        let sources = self.protection.sources.entry(at).or_default();
        let mut after = before;
        for run in runs {
            sources.add(run.from, run.to, 1);
            after = after.max(run.to);
        }
        self.nodes[at].protection |= Node::SOURCED;
        Change {
            at,
            guard,
            before,
            after,
        }
    }

    pub(crate) fn remove_sources(&mut self, runs: &[SourceRun]) -> Change {
        let at = runs[0].node;
        let (guard, before) = (self.nodes[at].guard(), self.protected_end(at));
        self.change_sources(at, |sources| {
            for run in runs {
                sources.remove(run.from, run.to);
            }
        });
        Change {
            at,
            guard,
            before,
            after: self.protected_end(at),
        }
    }

    /// Counts blocks after the end of protection in a node moved from `before` to `after`.
    #[inline]
    pub(crate) fn recount(&mut self, at: NodeIndex, before: Depth, after: Depth) {
        let (node, block_size) = (&self.nodes[at], self.block_size);
        let (from, to) = (before.min(after), before.max(after));
        if from < to {
            let blocks = u64::from(node.num_present(from, to, block_size));
            self.protection.count(blocks, after > before);
        }
    }

    /// Updates `at` and the edges above that only its child protects. Returns the first other node and its former
    /// guard.
    #[inline]
    pub(crate) fn guard_changed(
        &mut self,
        mut at: NodeIndex,
        before: Guard,
        after: Guard,
    ) -> Option<(NodeIndex, Guard)> {
        // Usually only this path protects the edges above.
        if before == Guard::Nothing && after == Guard::Path {
            at = self.climb_over(at, 0, 1);
        } else if before == Guard::Path && after == Guard::Nothing {
            at = self.climb_over(at, 1, 0);
        }
        if at == NO_NODE {
            return None;
        }
        let was_above = self.nodes[at].has_paths_below();
        let (guard, end) = (self.nodes[at].guard(), self.protected_end(at));
        match before {
            Guard::Nothing => {}
            Guard::Source => self.change_sources(at, |sources| sources.children -= 1),
            Guard::Path => self.nodes[at].protection -= 1,
        }
        match after {
            Guard::Nothing => {}
            Guard::Source => {
                self.protection.sources.entry(at).or_default().children += 1;
                self.nodes[at].protection |= Node::SOURCED;
            }
            Guard::Path => self.nodes[at].protection += 1,
        }
        if was_above && self.nodes[at].has_paths_below() {
            return None;
        }
        self.recount(at, end, self.protected_end(at));
        Some((at, guard))
    }

    pub(crate) fn drop_protection(&mut self, at: NodeIndex) {
        let node = &self.nodes[at];
        let blocks = node.num_present(node.depth, self.protected_end(at), self.block_size);
        self.protection.count(blocks.into(), false);
        self.protection.anchors.remove(&at);
        self.protection.sources.remove(&at);
    }
}
