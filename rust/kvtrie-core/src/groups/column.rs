//! One group's entries: blocks of a window, or states, at places of group 0's paths.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::effort::Steps;
use crate::groups::config::{Group, GroupKind};
use crate::ids::{BlockId, Depth, NodeIndex, depth};
use crate::storage::forest::{Forest, Position};

/// Set in the last use of an entry if a call continued there or ended there. Such entries are evicted after all others.
pub(crate) const NEEDED: u64 = 1 << 63;

type Key = (u64, Reverse<Depth>, u32);

/// The edge and the depth of a place in one number, which compares fast.
const fn key(node: NodeIndex, place: Depth) -> u64 {
    (node as u64) << 32 | place as u64
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the depth is the lower half"
)]
const fn place_of(key: u64) -> Depth {
    key as Depth
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) id: u32,
    /// Number of plans that pin it.
    pub(crate) pins: u32,
    /// The clock at its last use, with [`NEEDED`].
    pub(crate) last_use: u64,
    /// The use under which it is in the order: an older one, or 0 if it is not in it.
    queued: u64,
}

/// Where an id is that the group knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdState {
    Indexed(NodeIndex, Depth),
    /// It left while this number of plans pinned it.
    Condemned(u32),
    Waiting,
}

/// The blocks above a place of which it is known that they are all there.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    low: Option<Position>,
    high: Depth,
}

/// The entries of one group. An entry is named by the edge and the depth of the block of group 0 at its place.
#[derive(Debug)]
pub(crate) struct Column {
    is_window: bool,
    /// Blocks that a window needs before a position.
    reach: Depth,
    entries: BTreeMap<u64, Entry>,
    ids: HashMap<u32, IdState, FixedState>,
    /// Unpinned entries by a use that may be older than their last; others may be in it as well. Whoever takes from it
    /// corrects it, so that a use costs nothing here.
    order: BTreeSet<Key>,
    waiting: BTreeSet<u32>,
    num_pinned: u64,
    num_condemned: u64,
}

impl Column {
    pub(crate) fn new(group: &Group, seed: u64) -> Self {
        Self {
            is_window: group.kind != GroupKind::State,
            reach: depth(group.reach()),
            entries: BTreeMap::new(),
            ids: HashMap::with_hasher(FixedState::with_seed(seed)),
            order: BTreeSet::new(),
            waiting: BTreeSet::new(),
            num_pinned: 0,
            num_condemned: 0,
        }
    }

    pub(crate) fn is_window(&self) -> bool {
        self.is_window
    }

    pub(crate) fn num_indexed(&self) -> u64 {
        self.entries.len() as u64
    }

    pub(crate) fn num_evictable(&self) -> u64 {
        self.num_indexed() - self.num_pinned
    }

    pub(crate) fn num_pinned(&self) -> u64 {
        self.num_pinned
    }

    pub(crate) fn num_condemned(&self) -> u64 {
        self.num_condemned
    }

    pub(crate) fn waiting(&self) -> &BTreeSet<u32> {
        &self.waiting
    }

    pub(crate) fn state(&self, id: u32) -> Option<IdState> {
        self.ids.get(&id).copied()
    }

    pub(crate) fn entry(&self, node: NodeIndex, place: Depth) -> Option<&Entry> {
        self.entries.get(&key(node, place))
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = ((NodeIndex, Depth), &Entry)> {
        let place = |(&key, entry)| (((key >> 32) as NodeIndex, place_of(key)), entry);
        self.entries.iter().map(place)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = (u32, IdState)> {
        self.ids.iter().map(|(&id, &state)| (id, state))
    }

    pub(crate) fn is_queued(&self, place: Depth, entry: &Entry) -> bool {
        let key = (entry.queued, Reverse(place), entry.id);
        entry.queued > 0 && entry.queued <= entry.last_use && self.order.contains(&key)
    }

    pub(crate) fn num_queued(&self) -> usize {
        self.order.len()
    }

    /// Adds an entry where there is none, of an id that the group does not know.
    pub(crate) fn add(&mut self, (node, place): (NodeIndex, Depth), id: u32, last_use: u64) {
        let entry = Entry {
            id,
            pins: 0,
            last_use,
            queued: last_use,
        };
        self.entries.insert(key(node, place), entry);
        self.ids.insert(id, IdState::Indexed(node, place));
        self.order.insert((last_use, Reverse(place), id));
    }

    pub(crate) fn restore_waiting(&mut self, id: u32) {
        self.ids.insert(id, IdState::Waiting);
        self.waiting.insert(id);
    }

    /// Moves the entries before `cut` from an edge to the one that was cut off its front.
    pub(crate) fn split(&mut self, front: NodeIndex, tail: NodeIndex, cut: Depth) {
        let own: Vec<(Depth, Entry)> = self
            .entries
            .range(key(tail, 0)..key(tail, cut))
            .map(|(&at, &entry)| (place_of(at), entry))
            .collect();
        for (place, entry) in own {
            self.entries.remove(&key(tail, place));
            self.entries.insert(key(front, place), entry);
            self.ids.insert(entry.id, IdState::Indexed(front, place));
        }
    }

    /// Removes the entries at places whose blocks leave. They wait, pinned ones after their last release.
    pub(crate) fn leave(&mut self, node: NodeIndex, from: Depth, to: Depth) {
        let gone = self.entries.range(key(node, from)..key(node, to));
        let gone: Vec<Depth> = gone.map(|(&at, _)| place_of(at)).collect();
        for place in gone {
            if let Some((id, false)) = self.remove((node, place)) {
                self.ids.insert(id, IdState::Waiting);
                self.waiting.insert(id);
            }
        }
    }

    /// Removes an entry. Returns its id and whether it is condemned; otherwise the group no longer knows it.
    pub(crate) fn remove(&mut self, at: (NodeIndex, Depth)) -> Option<(u32, bool)> {
        let entry = self.entries.remove(&key(at.0, at.1))?;
        if entry.queued > 0 {
            self.order.remove(&(entry.queued, Reverse(at.1), entry.id));
        }
        if entry.pins > 0 {
            self.ids.insert(entry.id, IdState::Condemned(entry.pins));
            self.num_pinned -= 1;
            self.num_condemned += 1;
        } else {
            self.ids.remove(&entry.id);
        }
        Some((entry.id, entry.pins > 0))
    }

    pub(crate) fn pin(&mut self, id: u32) {
        if let Some(IdState::Indexed(node, place)) = self.state(id)
            && let Some(entry) = self.entries.get_mut(&key(node, place))
        {
            self.num_pinned += u64::from(entry.pins == 0);
            entry.pins += 1;
        }
    }

    pub(crate) fn unpin(&mut self, id: u32) {
        match self.state(id) {
            Some(IdState::Indexed(node, place)) => {
                let Some(entry) = self.entries.get_mut(&key(node, place)) else {
                    return;
                };
                entry.pins -= 1;
                if entry.pins > 0 {
                    return;
                }
                self.num_pinned -= 1;
                if entry.queued == 0 {
                    entry.queued = entry.last_use;
                    self.order.insert((entry.queued, Reverse(place), id));
                }
            }
            Some(IdState::Condemned(1)) => {
                self.num_condemned -= 1;
                self.ids.insert(id, IdState::Waiting);
                self.waiting.insert(id);
            }
            Some(IdState::Condemned(pins)) => {
                self.ids.insert(id, IdState::Condemned(pins - 1));
            }
            Some(IdState::Waiting) | None => {}
        }
    }

    pub(crate) fn take_waiting(&mut self, n: usize, out: &mut Vec<BlockId>) {
        while out.len() < n
            && let Some(id) = self.waiting.pop_first()
        {
            self.ids.remove(&id);
            out.push(BlockId(id));
        }
    }

    /// Evicts unpinned entries, the least recently used first, until `out` has `n` ids.
    pub(crate) fn evict(&mut self, n: usize, out: &mut Vec<BlockId>) {
        while out.len() < n
            && let Some((queued, Reverse(place), id)) = self.order.pop_first()
        {
            let Some(IdState::Indexed(node, _)) = self.state(id) else {
                continue;
            };
            let Some(entry) = self.entries.get_mut(&key(node, place)) else {
                continue;
            };
            entry.queued = 0;
            if entry.pins > 0 {
                continue;
            }
            if queued < entry.last_use {
                entry.queued = entry.last_use;
                self.order.insert((entry.queued, Reverse(place), id));
                continue;
            }
            self.entries.remove(&key(node, place));
            self.ids.remove(&id);
            out.push(BlockId(id));
        }
    }

    /// Blocks that a sequence needs to continue after this number of blocks.
    pub(crate) fn num_needed(&self, end: Depth) -> Depth {
        self.reach.max(1).min(end)
    }

    /// Calls `use_entry` for the entries of the path to `at` from depth `low` on, the last first.
    #[inline]
    fn each_from(
        &mut self,
        forest: &Forest,
        low: Depth,
        mut at: Position,
        mut use_entry: impl FnMut(Depth, &mut Entry),
    ) {
        while at.depth > low {
            let edge = forest.node(at.node);
            // A range without a start is found with half the comparisons.
            let (from, end) = (key(at.node, edge.depth.max(low)), key(at.node, at.depth));
            for (&at, entry) in self.entries.range_mut(..end).rev() {
                if at < from {
                    break;
                }
                use_entry(place_of(at), entry);
            }
            at = Position::at(edge.parent, edge.depth);
        }
    }

    /// Calls `use_entry` for each entry that a sequence needs to continue at one of `ends`, which are on one path and
    /// ascend: once, however many of them need it. Those of an end come together, the last first.
    pub(crate) fn each_needed(
        &mut self,
        forest: &Forest,
        ends: &[Position],
        mut use_entry: impl FnMut(Depth, &mut Entry),
    ) {
        let mut before = 0;
        for &end in ends {
            // What is needed here and before an earlier end is needed there as well.
            let low = before.max(end.depth - self.num_needed(end.depth));
            self.each_from(forest, low, end, &mut use_entry);
            before = end.depth;
        }
    }

    /// Touches what a sequence needs to continue at `at`.
    pub(crate) fn touch(&mut self, forest: &Forest, at: Position, time: u64) {
        let low = at.depth.saturating_sub(self.reach.max(1));
        self.each_from(forest, low, at, |_, entry| entry.last_use = time | NEEDED);
    }

    /// Touches what sequences need to continue at `ends`, which are on one path and ascend.
    pub(crate) fn touch_all(&mut self, forest: &Forest, ends: &[Position], time: u64) {
        self.each_needed(forest, ends, |_, entry| entry.last_use = time | NEEDED);
    }

    /// The deepest place at or above `at` at which a sequence can continue. One step per edge and per four entries.
    pub(crate) fn deepest(
        &self,
        forest: &Forest,
        at: Position,
        known: &mut Known,
        steps: &mut Steps,
    ) -> Option<Position> {
        if !self.is_window {
            return self.last_before(forest, at, steps);
        }
        let mut at = at;
        let mut low = match known.low {
            Some(low) if low.depth < at.depth && at.depth <= known.high => low,
            _ => at,
        };
        loop {
            low = self.start_of_run(forest, low, at.depth.saturating_sub(self.reach), steps)?;
            if low.depth == 0 || at.depth - low.depth >= self.reach {
                *known = Known {
                    low: Some(low),
                    high: at.depth,
                };
                return Some(at);
            }
            // No place after the gap above `low` has its whole window, up to `at`.
            at = self.last_before(forest, low, steps)?;
            low = at;
        }
    }

    /// The start of the entries without a gap before `low`, at `until` or after it.
    fn start_of_run(
        &self,
        forest: &Forest,
        mut low: Position,
        until: Depth,
        steps: &mut Steps,
    ) -> Option<Position> {
        while low.depth > until {
            let before = low.depth;
            let edge = forest.node(low.node);
            let from = edge.depth.max(until);
            let (start, end) = (key(low.node, from), key(low.node, low.depth));
            let mut next = end;
            for (&at, _) in self.entries.range(..end).rev() {
                if at < start || at + 1 < next {
                    break;
                }
                next = at;
            }
            low.depth = place_of(next);
            steps.take(1 + u64::from((before - low.depth) / 4))?;
            if low.depth > from {
                return Some(low);
            }
            if low.depth == edge.depth {
                low.node = edge.parent;
            }
        }
        Some(low)
    }

    /// The place after the last entry above `at`; the start of the sequence if there is none.
    fn last_before(&self, forest: &Forest, at: Position, steps: &mut Steps) -> Option<Position> {
        let mut at = at;
        while at.depth > 0 {
            steps.take(1)?;
            let edge = forest.node(at.node);
            let own = key(at.node, edge.depth)..key(at.node, at.depth);
            if let Some((&last, _)) = self.entries.range(own).next_back() {
                return Some(Position::at(at.node, place_of(last) + 1));
            }
            at = Position::at(edge.parent, edge.depth);
        }
        Some(at)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        // Nodes of a B-tree are about half full where keys come in order, otherwise fuller: 1.6 to 2.2 times its entries.
        let entry = 2 * size_of::<(u64, Entry)>();
        self.entries.len() * entry
            + self.order.len() * 2 * size_of::<Key>()
            + self.waiting.len() * 2 * size_of::<u32>()
            + self.ids.allocation_size()
    }
}
