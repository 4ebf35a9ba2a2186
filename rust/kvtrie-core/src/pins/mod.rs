//! Leases: what a live plan pins, and what that protects from eviction.
//!
//! A lease pins stretches: whole paths that back sequences, and the source blocks of copies, without the blocks above.
//! A pin *protects* its stretch and everything above it from eviction. The protection is stored per node, so
//! `num_evictable` is a counter, a leaf's record says whether it may be evicted, and a pin costs one step per newly
//! protected node and nothing per block.
//!
//! A dead block above a source may be evicted, but not one above a block that backs a sequence. So the
//! [`Guard`](crate::storage::node::Guard) of a node is the stronger kind of pin at or below it, and its parent counts
//! its children by guard. [`Sources`](crate::storage::forest::Sources) are in a separate table.

mod cuts;
mod guards;
mod lease;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use foldhash::quality::FixedState;
use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::eviction::Eviction;
use crate::ids::{Depth, NodeIndex};
use crate::namespace::Namespace;
use crate::storage::forest::{Forest, Position, SourceRun};
use crate::storage::slab::{Handle, Slab};

use guards::{add_sources, settle, unanchor, unpin_stretches};
use lease::Stretch;

pub(crate) use cuts::{Cuts, Leaving};
pub(crate) use lease::Lease;

#[derive(Debug)]
pub(crate) struct Pins {
    leases: Slab<Lease>,
    /// Number of pins of each condemned block.
    kept: HashMap<u32, u32, FixedState>,
    /// Unpinned condemned blocks until a call takes them, oldest release first.
    waiting: VecDeque<u32>,
}

impl Pins {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            leases: Slab::default(),
            kept: HashMap::with_hasher(FixedState::with_seed(seed)),
            waiting: VecDeque::new(),
        }
    }

    pub(crate) fn leases(&self) -> &Slab<Lease> {
        &self.leases
    }

    #[inline]
    pub(crate) fn open(&mut self, namespace: &Arc<Namespace>, pinned: bool) -> Handle {
        let lease = Lease::new(Arc::clone(namespace), pinned);
        let lease = self.leases.insert(lease);
        self.leases.handle(lease)
    }

    /// Sets the first approximate token of a lease, unless it is lower already.
    pub(crate) fn lower_first_approximate(&mut self, lease: u32, at: usize) {
        let known = &mut self.leases[lease].first_approximate;
        *known = Some(known.map_or(at, |known| known.min(at)));
    }

    /// Renews the handle of a lease, for a plan that has another first approximate token.
    pub(crate) fn renew(&mut self, lease: u32, first_approximate: Option<usize>) -> Handle {
        self.leases[lease].first_approximate = first_approximate;
        self.leases.renew(lease)
    }

    pub(crate) fn note_use(&mut self, lease: u32) {
        self.leases[lease].is_used = true;
    }

    /// Ends the right to insert of some leases: from now on their inserts take nothing.
    pub(crate) fn finish(&mut self, which: impl Fn(&Lease) -> bool) {
        for (_, lease) in self.leases.iter_mut() {
            lease.over |= which(lease);
        }
    }

    pub(crate) fn kept(&self) -> &HashMap<u32, u32, FixedState> {
        &self.kept
    }

    #[inline]
    pub(crate) fn keeps(&self, id: u32) -> bool {
        self.kept.contains_key(&id)
    }

    pub(crate) fn waiting(&self) -> &VecDeque<u32> {
        &self.waiting
    }

    pub(crate) fn wait(&mut self, forest: &mut Forest, ids: &[u32]) {
        for &id in ids {
            forest.blocks_mut().wait(id);
        }
        self.waiting.extend(ids);
    }

    pub(crate) fn pop_waiting(&mut self) -> Option<u32> {
        self.waiting.pop_front()
    }

    pub(crate) fn retain_waiting(&mut self, waits: impl Fn(u32) -> bool) {
        self.waiting.retain(|&id| waits(id));
    }

    /// Pins a path that the same call has touched.
    pub(crate) fn pin_path(
        &mut self,
        forest: &mut Forest,
        eviction: &mut Eviction,
        lease: u32,
        end: Position,
    ) {
        if !self.leases[lease].pinned || end.depth == 0 {
            return;
        }
        let at = (end.node, end.depth - 1);
        let id = forest.node(end.node).id(at.1, forest.block_size());
        let mut covered = SmallVec::<[u32; 2]>::new();
        let mut joined = None;
        for &Stretch { last, from } in &self.leases[lease].paths {
            let Some(known) = forest.place_of(last) else {
                continue;
            };
            if forest.is_above(at, known) {
                if from == 0 {
                    return;
                }
                if from <= end.depth {
                    joined = Some(last);
                }
            } else if forest.is_above(known, at) {
                covered.push(last);
            }
        }
        // The deeper end is pinned before covered ones are unpinned, so the path never loses its protection.
        if joined.is_none() {
            let change = forest.anchor(at.0, end.depth);
            settle(forest, eviction, change);
        }
        let paths = &mut self.leases[lease].paths;
        paths.retain(|known| !covered.contains(&known.last));
        match paths.iter_mut().find(|known| Some(known.last) == joined) {
            Some(known) => known.from = 0,
            None => paths.push(Stretch { last: id, from: 0 }),
        }
        for last in covered {
            unanchor(forest, eviction, last);
        }
    }

    /// Pins copy sources that the same call has touched. The blocks above become protected unless they are dead. Runs
    /// may have any order and may overlap. A run costs O(log pins in its node), plus one step per edge above that
    /// nothing else protects, and nothing per block.
    pub(crate) fn pin_sources(
        &mut self,
        forest: &mut Forest,
        eviction: &mut Eviction,
        lease: u32,
        runs: &[SourceRun],
    ) {
        if !self.leases[lease].pinned {
            return;
        }
        let block_size = forest.block_size();
        for run in runs {
            let last = forest.node(run.node).id(run.to - 1, block_size);
            let from = run.from;
            self.leases[lease].sources.push(Stretch { last, from });
            crate::failpoints::within("a source that is not pinned");
        }
        add_sources(forest, eviction, runs);
    }

    pub(crate) fn unpin_sources(
        &mut self,
        forest: &mut Forest,
        eviction: &mut Eviction,
        lease: u32,
    ) {
        let held = &mut self.leases[lease];
        let sources = std::mem::take(&mut held.sources);
        let kept = held.take_kept_sources();
        crate::failpoints::within("sources that stay pinned");
        unpin_stretches(forest, eviction, &sources);
        self.unkeep(forest, kept);
    }

    pub(crate) fn end_lease(&mut self, forest: &mut Forest, eviction: &mut Eviction, lease: u32) {
        let Some(ended) = self.leases.remove(lease) else {
            return;
        };
        crate::failpoints::within("pins without a lease");
        // Sources are unpinned first, while the paths still protect most nodes above them, which saves work.
        unpin_stretches(forest, eviction, &ended.sources);
        for path in &ended.paths {
            unanchor(forest, eviction, path.last);
        }
        self.unkeep(forest, ended.kept());
    }

    /// Removes one pin of each block. Blocks without pins then wait, ascending, or are quarantined.
    fn unkeep(&mut self, forest: &mut Forest, kept: impl IntoIterator<Item = u32>) {
        let mut released = Vec::new();
        for id in kept {
            if let Some(count) = self.kept.get_mut(&id) {
                *count -= 1;
                if *count == 0 {
                    self.kept.remove(&id);
                    if forest.blocks_mut().release(id) {
                        released.push(id);
                    }
                }
            }
        }
        if !released.is_empty() {
            released.sort_unstable();
            self.waiting.extend(released);
        }
    }

    pub(crate) fn num_pinned(&self, forest: &Forest) -> u64 {
        let is_whole = |lease: &Lease| lease.paths.iter().all(|path| path.from == 0);
        if !forest.has_sources() && self.leases.iter().all(|(_, lease)| is_whole(lease)) {
            // Without sources and partial paths, every protected block is on a pinned path.
            return forest.num_protected() + forest.blocks().num_condemned();
        }
        let block_size = forest.block_size();
        let mut ends = HashMap::<NodeIndex, Depth, FixedState>::default();
        let mut pinned = forest.blocks().num_condemned();
        let mut parts = Vec::new();
        for (_, lease) in self.leases.iter() {
            for &path in &lease.paths {
                if path.from > 0 {
                    parts.extend(
                        forest
                            .parts(path.last, path.from)
                            .map(|part| (part.node, part.from, part.to)),
                    );
                    continue;
                }
                let Some(place) = forest.place_of(path.last) else {
                    continue;
                };
                let (mut node, mut end) = (place.0, place.1 + 1);
                loop {
                    let edge = forest.node(node);
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
                let own = forest.parts(source.last, source.from);
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

    /// For each pinned block, the number of plans that pin it.
    pub(crate) fn pin_counts(&self, forest: &Forest) -> BTreeMap<u32, u32> {
        let mut counts = BTreeMap::new();
        for (_, lease) in self.leases.iter() {
            let mut own: BTreeSet<u32> = lease.kept().collect();
            for stretch in lease.paths.iter().chain(&lease.sources) {
                let ids = forest.path_through(stretch.last, stretch.from);
                own.extend(ids.iter().map(|id| id.0));
            }
            for id in own {
                *counts.entry(id).or_default() += 1;
            }
        }
        counts
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let leases = self.leases.iter();
        self.kept.allocation_size()
            + self.leases.heap_bytes()
            + leases.map(|(_, lease)| lease.heap_bytes()).sum::<usize>()
            + self.waiting.capacity() * size_of::<u32>()
    }

    #[cfg(test)]
    pub(crate) fn waiting_mut(&mut self) -> &mut VecDeque<u32> {
        &mut self.waiting
    }
}
