//! Leases: what a live plan pins, and what that protects from eviction.
//!
//! A lease pins stretches: whole paths that back sequences, and the source blocks of copies, without the blocks above.
//! A stretch is named by its last block. A pin *protects* its stretch and everything above, which is stored per node.
//! So `num_evictable` is a counter, a leaf knows by itself whether it may be evicted, and a pin costs one step per
//! newly protected node and nothing per block.
//!
//! A dead block may be evicted from above a source, but not from above a block that backs a sequence. So the [`Guard`]
//! of a node is the stronger kind pinned at or below it, and its parent counts its children by guard. The counts and
//! runs of sources are in a separate table.

use foldhash::quality::FixedState;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use smallvec::SmallVec;

use crate::ids::{BlockId, Depth, NO_NODE, NodeIndex};
use crate::index::{Effort, Position, RadixIndex, Steps};
use crate::pins::lease::{Lease, Stretch};
use crate::storage::blocks::Place;
use crate::storage::node::{Guard, Node};

/// Ends of pinned paths in a node, ascending: (end, number of pins).
pub(crate) type Anchors = SmallVec<[(Depth, u32); 2]>;

/// Consecutive present blocks of one edge: a copy source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SourceRun {
    pub(crate) node: NodeIndex,
    pub(crate) from: Depth,
    pub(crate) to: Depth,
}

/// Present blocks that are about to leave their places.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    /// By node, as ascending, disjoint ranges.
    parts: HashMap<NodeIndex, Vec<(Depth, Depth)>, FixedState>,
    /// By tree: the range of depths that contains them.
    within: HashMap<u32, (Depth, Depth), FixedState>,
}

impl Leaving {
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Adds blocks of a node, after those added before.
    pub(super) fn add(&mut self, tree: u32, node: NodeIndex, from: Depth, to: Depth) {
        let within = self.within.entry(tree).or_insert((from, to));
        *within = (within.0.min(from), within.1.max(to));
        let parts = self.parts.entry(node).or_default();
        match parts.last_mut() {
            Some(last) if last.1 == from => last.1 = to,
            _ => parts.push((from, to)),
        }
    }
}

/// A pinned stretch, and the parts of it that leave, last first.
#[derive(Debug)]
pub(super) struct Cut {
    whole: Stretch,
    is_source: bool,
    parts: Vec<SourceRun>,
}

/// Cuts, by lease.
pub(super) type Cuts = Vec<(u32, Vec<Cut>)>;

/// The pins of sources that protect blocks of a node.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    /// Children under [`Guard::Source`].
    pub(crate) children: u32,
    /// Pinned blocks of the node itself: (end, first, number of pins), ascending.
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

    /// Whether the block at `depth` of the node is pinned.
    fn covers(&self, depth: Depth) -> bool {
        let behind = self.runs.partition_point(|&(to, ..)| to <= depth);
        self.runs[behind..]
            .iter()
            .any(|&(_, from, _)| from <= depth)
    }

    /// The pinned blocks of the node itself, as ascending ranges that do not touch.
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

    pub(crate) fn heap_bytes(&self) -> usize {
        if self.runs.spilled() {
            self.runs.capacity() * size_of::<(Depth, Depth, u32)>()
        } else {
            0
        }
    }
}

impl RadixIndex {
    /// End of the blocks of a node that are pinned or above a pinned block.
    pub(crate) fn protected_end(&self, at: NodeIndex) -> Depth {
        let node = &self.nodes[at];
        match node.protection {
            0 => node.depth,
            own if own & Node::SOURCED == 0 => self.path_end(at),
            _ => self.path_end(at).max(self.source_end(at)),
        }
    }

    /// End of the blocks of a node that are on a pinned path.
    pub(crate) fn path_end(&self, at: NodeIndex) -> Depth {
        let node = &self.nodes[at];
        match node.protection & !Node::SOURCED {
            0 => node.depth,
            Node::ANCHORED => {
                let ends = self.anchors.get(&at).and_then(|ends| ends.last());
                ends.map_or(node.depth, |&(end, _)| end)
            }
            _ => node.end(),
        }
    }

    /// End of the blocks of a node that are pinned sources, or above a source that is on no pinned path.
    fn source_end(&self, at: NodeIndex) -> Depth {
        let node = &self.nodes[at];
        match self.sources.get(&at) {
            Some(sources) if sources.children > 0 => node.end(),
            Some(sources) => sources.runs.last().map_or(node.depth, |&(end, ..)| end),
            None => node.depth,
        }
    }

    /// Protection in a node ends at `after`, not at `before`. Returns whether they differ.
    #[inline]
    fn recount(&mut self, at: NodeIndex, before: Depth, after: Depth) -> bool {
        let (node, block_size) = (&self.nodes[at], self.config.block_size);
        if after > before {
            self.num_protected += u64::from(node.num_present(before, after, block_size));
        } else if after < before {
            self.num_protected -= u64::from(node.num_present(after, before, block_size));
        }
        if self.num_dead > 0 {
            self.requeue_dead(at);
        }
        after != before
    }

    /// Adds a pinned path that ends in the node at `end`.
    fn anchor_at(&mut self, at: NodeIndex, end: Depth) {
        let ends = self.anchors.entry(at).or_default();
        let before = ends.last().copied();
        match ends.binary_search_by_key(&end, |&(end, _)| end) {
            Ok(known) => ends[known].1 += 1,
            Err(new) => ends.insert(new, (end, 1)),
        }
        let after = ends.last().copied();
        let guard = self.nodes[at].guard();
        self.nodes[at].protection |= Node::ANCHORED;
        self.anchors_changed(at, guard, before, after);
    }

    fn unanchor_at(&mut self, at: NodeIndex, end: Depth) {
        let Some(ends) = self.anchors.get_mut(&at) else {
            return;
        };
        let Ok(known) = ends.binary_search_by_key(&end, |&(end, _)| end) else {
            return;
        };
        let before = ends.last().copied();
        ends[known].1 -= 1;
        if ends[known].1 == 0 {
            ends.remove(known);
        }
        let after = ends.last().copied();
        let guard = self.nodes[at].guard();
        if after.is_none() {
            self.anchors.remove(&at);
            self.nodes[at].protection &= !Node::ANCHORED;
        }
        self.anchors_changed(at, guard, before, after);
    }

    /// The last end of a path in a node changed; its other protection did not.
    fn anchors_changed(
        &mut self,
        at: NodeIndex,
        guard: Guard,
        before: Option<(Depth, u32)>,
        after: Option<(Depth, u32)>,
    ) {
        let node = &self.nodes[at];
        if node.has_paths_below() {
            return;
        }
        let mut others = node.depth;
        if node.protection & Node::SOURCED != 0 {
            others = self.source_end(at);
        }
        let end = |last: Option<(Depth, u32)>| last.map_or(others, |(end, _)| end.max(others));
        self.protection_changed(at, guard, end(before), end(after));
    }

    /// Pins sources; adjacent runs of one node are handled together.
    fn add_sources(&mut self, runs: &[SourceRun]) {
        for own in runs.chunk_by(|a, b| a.node == b.node) {
            let at = own[0].node;
            let (guard, before) = (self.nodes[at].guard(), self.protected_end(at));
            let sources = self.sources.entry(at).or_default();
            let mut after = before;
            for run in own {
                sources.add(run.from, run.to, 1);
                after = after.max(run.to);
            }
            self.nodes[at].protection |= Node::SOURCED;
            self.protection_changed(at, guard, before, after);
        }
    }

    fn remove_sources(&mut self, runs: &[SourceRun]) {
        for own in runs.chunk_by(|a, b| a.node == b.node) {
            let at = own[0].node;
            let (guard, before) = (self.nodes[at].guard(), self.protected_end(at));
            self.change_sources(at, |sources| {
                for run in own {
                    sources.remove(run.from, run.to);
                }
            });
            self.protection_changed(at, guard, before, self.protected_end(at));
        }
    }

    /// Changes the sources of a node, and drops their entry once it is empty.
    fn change_sources(&mut self, at: NodeIndex, change: impl FnOnce(&mut Sources)) {
        if let Some(sources) = self.sources.get_mut(&at) {
            change(sources);
            if sources.is_empty() {
                self.sources.remove(&at);
                self.nodes[at].protection &= !Node::SOURCED;
            }
        }
    }

    /// Protection in a node ends at `after`, not at `before`, and its guard was `guard`.
    fn protection_changed(&mut self, at: NodeIndex, guard: Guard, before: Depth, after: Depth) {
        if self.recount(at, before, after) {
            self.requeue(at);
        }
        self.tell_above(at, guard);
    }

    /// The guard of a node was `before`: updates the counts of the nodes above.
    fn tell_above(&mut self, node: NodeIndex, mut before: Guard) {
        let mut after = self.nodes[node].guard();
        let mut at = self.nodes[node].parent;
        while before != after && at != NO_NODE {
            // The usual case: only this path protects the edges above.
            if before == Guard::Nothing && after == Guard::Path {
                at = self.climb_over(at, 0, 1);
            } else if before == Guard::Path && after == Guard::Nothing {
                at = self.climb_over(at, 1, 0);
            }
            if at == NO_NODE {
                return;
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
                    self.sources.entry(at).or_default().children += 1;
                    self.nodes[at].protection |= Node::SOURCED;
                }
                Guard::Path => self.nodes[at].protection += 1,
            }
            if was_above && self.nodes[at].has_paths_below() {
                return;
            }
            self.recount(at, end, self.protected_end(at));
            (before, after) = (guard, self.nodes[at].guard());
            at = self.nodes[at].parent;
        }
    }

    /// Sets `protection` from `from` to `to` in `at` and above, until a node has another value or dead blocks. Returns
    /// that node.
    fn climb_over(&mut self, at: NodeIndex, from: u32, to: u32) -> NodeIndex {
        let (block_size, mut present, mut next) = (self.block_size(), 0, at);
        let any_dead = self.num_dead > 0;
        self.nodes.climb(at, |node| {
            if node.protection != from || any_dead && node.has_dead() {
                return false;
            }
            node.protection = to;
            present += u64::from(node.present(block_size));
            next = node.parent;
            true
        });
        if to > from {
            self.num_protected += present;
        } else {
            self.num_protected -= present;
        }
        next
    }

    fn anchor(&mut self, id: u32) {
        if let Some((node, depth)) = self.anchor_place(id) {
            self.anchor_at(node, depth + 1);
        }
    }

    fn unanchor(&mut self, id: u32) {
        if let Some((node, depth)) = self.anchor_place(id) {
            self.unanchor_at(node, depth + 1);
        }
    }

    /// The front of a split edge takes over its part of the protection.
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
            self.sources.insert(front, own);
            self.nodes[front].protection |= Node::SOURCED;
        }
    }

    pub(crate) fn anchor_place(&self, id: u32) -> Option<(NodeIndex, Depth)> {
        match self.blocks.place(id) {
            Place::Indexed { node, depth } => Some((node, depth)),
            _ => None,
        }
    }

    /// Whether one place is the other or above it.
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

    /// The parts of a stretch by node, last first.
    pub(crate) fn parts(&self, stretch: Stretch) -> impl Iterator<Item = SourceRun> {
        let mut next = self
            .anchor_place(stretch.last)
            .map(|(node, depth)| (node, depth + 1));
        std::iter::from_fn(move || {
            let (node, to) = next?;
            let edge = &self.nodes[node];
            let from = stretch.from.max(edge.depth);
            next = (from > stretch.from).then_some((edge.parent, from));
            Some(SourceRun { node, from, to })
        })
    }

    /// Whether the block at a place is pinned; may be true for an unpinned block above the rest of a cut path.
    pub(super) fn may_be_pinned(&self, node: NodeIndex, place: Depth) -> bool {
        let is_source = || {
            let sources = self.sources.get(&node);
            sources.is_some_and(|sources| sources.covers(place))
        };
        place < self.path_end(node) || place < self.protected_end(node) && is_source()
    }

    /// The pinned stretches that contain leaving blocks; `None` if this takes more steps than are left.
    ///
    /// One step per pinned stretch. In the trees of those blocks also one per edge of a stretch, from its end up to the
    /// first of them, and one per block found.
    pub(super) fn find_cuts(&self, leaving: &Leaving, steps: &mut Steps) -> Option<Cuts> {
        let mut cuts = Cuts::new();
        for (lease, held) in self.leases.iter() {
            let paths = held.paths.iter().map(|&path| (path, false));
            let sources = held.sources.iter().map(|&source| (source, true));
            let mut own = Vec::new();
            for (stretch, is_source) in paths.chain(sources) {
                steps.take(1)?;
                let Some((node, last)) = self.anchor_place(stretch.last) else {
                    continue;
                };
                let Some(&(from, to)) = leaving.within.get(&self.nodes[node].tree) else {
                    continue;
                };
                if stretch.from >= to || last < from {
                    continue;
                }
                let mut parts = Vec::new();
                for part in self.parts(stretch) {
                    steps.take(1)?;
                    let gone = leaving.parts.get(&part.node);
                    for &(start, end) in gone.into_iter().flatten().rev() {
                        let (from, to) = (start.max(part.from), end.min(part.to));
                        if from < to {
                            steps.take(u64::from(to - from))?;
                            parts.push(SourceRun { from, to, ..part });
                        }
                    }
                    if part.from <= from {
                        break;
                    }
                }
                if !parts.is_empty() {
                    own.push(Cut {
                        whole: stretch,
                        is_source,
                        parts,
                    });
                }
            }
            if !own.is_empty() {
                cuts.push((lease, own));
            }
        }
        Some(cuts)
    }

    /// Before blocks leave: leases keep those that they pin by id, and still pin the rest.
    pub(super) fn cut_out(&mut self, cuts: Cuts) {
        for (lease, cuts) in cuts {
            let key = |is_source, stretch: &Stretch| (is_source, stretch.last, stretch.from);
            let mut wholes: Vec<_> = cuts
                .iter()
                .map(|cut| key(cut.is_source, &cut.whole))
                .collect();
            wholes.sort_unstable();
            let stays =
                |is_source, known: &Stretch| wholes.binary_search(&key(is_source, known)).is_err();
            let held = &mut self.leases[lease];
            held.paths.retain(|known| stays(false, known));
            held.sources.retain(|known| stays(true, known));
            let ends = held.paths.iter().enumerate();
            let mut ends: HashMap<u32, usize, FixedState> =
                ends.map(|(at, path)| (path.last, at)).collect();
            for cut in &cuts {
                self.cut_stretch(lease, cut, &mut ends);
            }
        }
    }

    /// Cuts blocks out of a pinned stretch.
    fn cut_stretch(&mut self, lease: u32, cut: &Cut, ends: &mut HashMap<u32, usize, FixedState>) {
        let (whole, block_size) = (cut.whole, self.block_size());
        let mut rest: SmallVec<[Stretch; 2]> = SmallVec::new();
        let mut last = Some(whole.last);
        let mut end = self.anchor_place(whole.last).map_or(0, |at| at.1 + 1);
        let mut gone = Vec::new();
        for run in &cut.parts {
            let edge = &self.nodes[run.node];
            gone.extend(edge.ids(run.from, run.to, block_size).map(|id| id.0));
            if let Some(last) = last
                && run.to < end
            {
                let from = run.to;
                rest.push(Stretch { last, from });
            }
            end = run.from;
            last = (run.from > whole.from).then(|| {
                let above = self.normal(Position {
                    node: run.node,
                    depth: run.from,
                });
                self.nodes[above.node].id(above.depth - 1, block_size)
            });
        }
        if let Some(last) = last {
            let from = whole.from;
            rest.push(Stretch { last, from });
        }
        // The rest is pinned before the whole is unpinned: nothing is unprotected in between.
        if cut.is_source {
            self.leases[lease].sources.extend(rest.iter().copied());
            for &part in &rest {
                self.pin_stretch(part);
            }
            self.unpin_stretches(&[whole]);
        } else {
            for part in rest {
                let paths = &mut self.leases[lease].paths;
                match ends.entry(part.last) {
                    Entry::Occupied(known) => {
                        let known = &mut paths[*known.get()];
                        known.from = known.from.min(part.from);
                    }
                    Entry::Vacant(new) => {
                        new.insert(paths.len());
                        paths.push(part);
                        self.anchor(part.last);
                    }
                }
            }
            self.unanchor(whole.last);
        }
        for id in gone {
            if self.leases[lease].keep(id, cut.is_source) {
                *self.pins.entry(id).or_default() += 1;
            }
        }
    }

    /// Before a block leaves: leases that pin it keep it by id.
    pub(crate) fn unpath(&mut self, node: NodeIndex, place: Depth) {
        if self.may_be_pinned(node, place) {
            let mut leaving = Leaving::default();
            leaving.add(self.nodes[node].tree, node, place, place + 1);
            let cuts = self.find_cuts(&leaving, &mut Effort::ANY.steps());
            self.cut_out(cuts.unwrap_or_default());
        }
    }

    /// The ids of the path that ends in this indexed block, from depth `from` on.
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

    /// Pins the blocks that back a sequence up to `end`. The same call has touched them.
    pub(crate) fn pin_path(&mut self, lease: u32, end: Position) {
        if !self.leases[lease].pinned || end.depth == 0 {
            return;
        }
        let at = (end.node, end.depth - 1);
        let id = self.nodes[end.node].id(at.1, self.block_size());
        let mut covered = SmallVec::<[u32; 2]>::new();
        // The pinned stretch that continues the new path.
        let mut joined = None;
        for &Stretch { last, from } in &self.leases[lease].paths {
            let Some(known) = self.anchor_place(last) else {
                continue;
            };
            if self.is_above(at, known) {
                if from == 0 {
                    return;
                }
                if from <= end.depth {
                    joined = Some(last);
                }
            } else if self.is_above(known, at) {
                covered.push(last);
            }
        }
        // The deeper anchor first: nothing is unprotected in between.
        if joined.is_none() {
            self.anchor_at(at.0, end.depth);
        }
        let paths = &mut self.leases[lease].paths;
        paths.retain(|known| !covered.contains(&known.last));
        match paths.iter_mut().find(|known| Some(known.last) == joined) {
            Some(known) => known.from = 0,
            None => paths.push(Stretch { last: id, from: 0 }),
        }
        for last in covered {
            self.unanchor(last);
        }
    }

    /// Pins copy sources until [`Self::unpin_sources`] or [`Self::end_lease`]. The blocks above are protected unless
    /// they are dead. The same call has touched the sources ([`Self::stamp_sources`]).
    ///
    /// Runs may have any order, and may overlap. To pin or unpin one costs O(log pins in its node), plus one step per
    /// edge above that nothing else protects, and nothing per block.
    pub(crate) fn pin_sources(&mut self, lease: u32, runs: &[SourceRun]) {
        if !self.leases[lease].pinned {
            return;
        }
        let block_size = self.block_size();
        for run in runs {
            let last = self.nodes[run.node].id(run.to - 1, block_size);
            let from = run.from;
            self.leases[lease].sources.push(Stretch { last, from });
            crate::failpoints::within("a source that is not pinned");
        }
        self.add_sources(runs);
    }

    fn pin_stretch(&mut self, stretch: Stretch) {
        let parts: SmallVec<[SourceRun; 4]> = self.parts(stretch).collect();
        self.add_sources(&parts);
    }

    /// Removes one pin per stretch of sources, in reverse order of insertion, so that runs are removed from the end of
    /// a node's list.
    fn unpin_stretches(&mut self, stretches: &[Stretch]) {
        let all = stretches.iter().rev();
        let parts: SmallVec<[SourceRun; 4]> =
            all.flat_map(|&stretch| self.parts(stretch)).collect();
        self.remove_sources(&parts);
    }

    pub(crate) fn unpin_sources(&mut self, lease: u32) {
        let held = &mut self.leases[lease];
        let sources = std::mem::take(&mut held.sources);
        let kept = held.take_kept_sources();
        crate::failpoints::within("sources that stay pinned");
        self.unpin_stretches(&sources);
        self.unkeep(kept);
    }

    pub(crate) fn end_lease(&mut self, lease: u32) {
        let Some(ended) = self.leases.remove(lease) else {
            return;
        };
        crate::failpoints::within("pins without a lease");
        // Sources first, while the paths still protect most nodes above them.
        self.unpin_stretches(&ended.sources);
        for path in &ended.paths {
            self.unanchor(path.last);
        }
        self.unkeep(ended.kept());
    }

    /// Removes one pin per condemned block. Blocks without pins wait, ascending, for `take_freed` and `evict`, or go to
    /// quarantine.
    fn unkeep(&mut self, kept: impl IntoIterator<Item = u32>) {
        let mut released = Vec::new();
        for id in kept {
            if let Some(count) = self.pins.get_mut(&id) {
                *count -= 1;
                if *count == 0 {
                    self.pins.remove(&id);
                    self.num_condemned -= 1;
                    if self.blocks.place(id) == Place::CondemnedForGood {
                        self.put_in_quarantine(id);
                    } else {
                        self.blocks.set_waiting(id);
                        released.push(id);
                    }
                }
            }
        }
        if !released.is_empty() {
            released.sort_unstable();
            self.waiting.extend(released);
        }
        // The released blocks may have kept the holes beyond their bound.
        self.bound_holes();
    }

    /// Before a tree is removed: converts its pins to ids, which protect nothing.
    pub(super) fn keep_all_of(&mut self, tree: u32) {
        let is_there = |index: &Self, stretch: &Stretch| {
            let place = index.anchor_place(stretch.last);
            place.is_some_and(|(node, _)| index.nodes[node].tree == tree)
        };
        let mut stretches = Vec::new();
        for (lease, held) in self.leases.iter() {
            let paths = held.paths.iter().map(|&path| (path, false));
            let sources = held.sources.iter().map(|&source| (source, true));
            let there = paths.chain(sources).filter(|(at, _)| is_there(self, at));
            stretches.extend(there.map(|(at, is_source)| (lease, at, is_source)));
        }
        for (lease, stretch, is_source) in stretches {
            let ids = self.path_through(stretch.last, stretch.from);
            let held = &mut self.leases[lease];
            let own = if is_source {
                &mut held.sources
            } else {
                &mut held.paths
            };
            own.retain(|known| *known != stretch);
            for id in ids {
                if held.keep(id.0, is_source) {
                    *self.pins.entry(id.0).or_default() += 1;
                }
            }
        }
    }

    /// Pinned blocks, indexed or condemned.
    pub(crate) fn num_pinned(&self) -> u64 {
        let is_whole = |lease: &Lease| lease.paths.iter().all(|path| path.from == 0);
        if self.sources.is_empty() && self.leases.iter().all(|(_, lease)| is_whole(lease)) {
            // Every protected block is then on a pinned path.
            return self.num_protected + self.num_condemned;
        }
        let block_size = self.block_size();
        // By node: end of the paths that are pinned from the root on.
        let mut ends = HashMap::<NodeIndex, Depth, FixedState>::default();
        let mut pinned = self.num_condemned;
        let mut parts = Vec::new();
        for (_, lease) in self.leases.iter() {
            for &path in &lease.paths {
                if path.from > 0 {
                    parts.extend(self.parts(path).map(|part| (part.node, part.from, part.to)));
                    continue;
                }
                let Some(place) = self.anchor_place(path.last) else {
                    continue;
                };
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
            for &source in &lease.sources {
                let own = self.parts(source);
                parts.extend(own.map(|part| (part.node, part.from, part.to)));
            }
        }
        parts.sort_unstable();
        for (node, from, to) in parts {
            let known = ends.entry(node).or_default();
            let from = from.max(*known);
            if from < to {
                pinned += u64::from(to - from);
                *known = to;
            }
        }
        pinned
    }
}

#[cfg(test)]
mod tests;
