//! Groups of layers besides group 0: sliding windows and recurrent states (rules G1 to G9 in `docs/design.md`).
//!
//! Group 0, full attention, alone decides nodes and paths. Every other group is a [`Column`]: ids at places of group
//! 0's blocks, named by the edge and the depth of that block. So nothing of another group is in a node, and an index
//! without such groups pays one branch per call. A prompt continues at the deepest end of exact blocks at which every
//! group has what it needs: a window the blocks that reach into the last `window − 1` tokens, a state the slot of that
//! position. It is found from the end of group 0's match towards the front: each group in turn moves the place up to
//! the next one that it allows, and remembers the run of blocks that it has seen, so that no entry is visited twice.
//!
//! Only exact KV is taken, so an entry has no label: what is not exact is not there.
//!
//! | call | cost in addition to that of group 0 |
//! |---|---|
//! | the end of a hit | O(edges of the path between group 0's end and the start of the hit's windows · log entries + entries there), for each group |
//! | use of a hit | O(edges under its windows · log entries + entries there), for each group |
//! | pins of a hit, and their release | O(log entries) per id |
//! | what comes with moved runs, and its pins | O(log entries) per copied block under a window before a range to compute or the end |
//! | insert | O(log entries) per id; a use of the windows before its end, states and stops, of each block once; O(log entries) per entry that moves where an edge is cut |
//! | eviction from a group | O(log entries) per id, and per entry that was used or pinned since the last eviction |
//! | a block of group 0 that leaves | O(log entries), for each group |

mod check;
mod column;
mod config;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use foldhash::quality::FixedState;
use hashbrown::HashMap;
use smallvec::{SmallVec, smallvec};

use crate::effort::Steps;
use crate::ids::{BlockId, Depth, NodeIndex};
use crate::storage::forest::{Forest, Position};

use column::Known;

pub(crate) use column::{Column, IdState, NEEDED};
pub use config::{Group, GroupKind};

/// The place of an id that a plan copies from: it is not on the prompt's path, so no position of it ends the pin.
pub(crate) const SOURCE: Depth = Depth::MAX;

/// Where a prompt continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hit {
    pub(crate) end: Position,
    /// The group, from 1, that allows nothing deeper; `None` if group 0 does not.
    pub(crate) cut_by: Option<usize>,
}

#[derive(Debug)]
pub(crate) struct Groups {
    columns: Vec<Column>,
    /// What live plans pin: by lease, (column, id) with the place.
    held: HashMap<u32, BTreeMap<(usize, u32), Depth>, FixedState>,
}

impl Groups {
    pub(crate) fn new(groups: &[Group], seed: u64) -> Self {
        let columns = groups.iter().map(|group| Column::new(group, seed));
        Self::of_columns(columns.collect(), seed)
    }

    pub(crate) fn of_columns(columns: Vec<Column>, seed: u64) -> Self {
        Self {
            columns,
            held: HashMap::with_hasher(FixedState::with_seed(seed)),
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    pub(crate) fn columns(&self) -> &[Column] {
        &self.columns
    }

    pub(crate) fn column_mut(&mut self, column: usize) -> &mut Column {
        &mut self.columns[column]
    }

    /// The deepest place at or above `end`, the end of group 0's exact blocks, at which every group can continue.
    /// `None` if that takes more than the steps left.
    pub(crate) fn deepest(&self, forest: &Forest, end: Position, steps: &mut Steps) -> Option<Hit> {
        if let [only] = &self.columns[..] {
            let found = only.deepest(forest, end, &mut Known::default(), steps)?;
            if found.depth == end.depth {
                return Some(Hit { end, cut_by: None });
            }
            return Some(Hit {
                end: forest.normal(found),
                cut_by: Some(1),
            });
        }
        let mut hit = Hit { end, cut_by: None };
        let mut known: SmallVec<[Known; 4]> = smallvec![Known::default(); self.columns.len()];
        let (mut agreed, mut at) = (0, 0);
        while agreed < self.columns.len() && hit.end.depth > 0 {
            let end = self.columns[at].deepest(forest, hit.end, &mut known[at], steps)?;
            agreed += 1;
            if end.depth < hit.end.depth {
                (agreed, hit.cut_by) = (1, Some(at + 1));
            }
            hit.end = forest.normal(end);
            at = (at + 1) % self.columns.len();
        }
        Some(hit)
    }

    /// Touches what a sequence that continues at `at` needs.
    #[inline(never)]
    pub(crate) fn touch(&mut self, forest: &Forest, at: Position, time: u64) {
        for column in &mut self.columns {
            column.touch(forest, at, time);
        }
    }

    /// Touches what sequences need to continue at `ends`, which are on one path and ascend.
    pub(crate) fn touch_all(&mut self, forest: &Forest, ends: &[Position], time: u64) {
        for column in &mut self.columns {
            column.touch_all(forest, ends, time);
        }
    }

    /// Blocks of all groups that a sequence needs to continue after this number of blocks.
    pub(crate) fn num_needed(&self, end: Depth) -> u64 {
        let needed = self.columns.iter().map(|column| column.num_needed(end));
        needed.map(u64::from).sum()
    }

    /// For each group, the ids that a sequence needs to continue at `at`, ascending by place.
    pub(crate) fn needed(&mut self, forest: &Forest, at: Position) -> Vec<Vec<(Depth, BlockId)>> {
        let needed = |column: &mut Column| {
            let mut ids = Vec::new();
            column.each_needed(forest, &[at], |place, entry| {
                ids.push((place, BlockId(entry.id)));
            });
            ids.reverse();
            ids
        };
        self.columns.iter_mut().map(needed).collect()
    }

    #[inline(never)]
    pub(crate) fn split(&mut self, front: NodeIndex, tail: NodeIndex, cut: Depth) {
        for column in &mut self.columns {
            column.split(front, tail, cut);
        }
    }

    /// Removes the entries at places of group 0's blocks that leave.
    #[inline(never)]
    pub(crate) fn leave(&mut self, node: NodeIndex, from: Depth, to: Depth) {
        for column in &mut self.columns {
            column.leave(node, from, to);
        }
    }

    /// Pins an id for a lease, once.
    pub(crate) fn pin(&mut self, lease: u32, column: usize, id: u32, place: Depth) {
        let held = self.held.entry(lease).or_default();
        if held.insert((column, id), place).is_none() {
            self.columns[column].pin(id);
        }
    }

    /// Ends the pins of a lease for which `ends` holds, given the column and the place.
    pub(crate) fn unpin(&mut self, lease: u32, ends: impl Fn(usize, Depth) -> bool) {
        let Some(mut held) = self.held.remove(&lease) else {
            return;
        };
        held.retain(|&(column, id), &mut place| {
            let stays = !ends(column, place);
            if !stays {
                self.columns[column].unpin(id);
            }
            stays
        });
        if !held.is_empty() {
            self.held.insert(lease, held);
        }
    }

    /// Ids that a lease pins.
    pub(crate) fn num_held(&self, lease: u32) -> u64 {
        self.held.get(&lease).map_or(0, |held| held.len() as u64)
    }

    /// The number of plans that pin each id of each column.
    pub(crate) fn pin_counts(&self) -> BTreeMap<(usize, u32), u32> {
        let mut counts = BTreeMap::new();
        for id in self.held.values().flat_map(BTreeMap::keys) {
            *counts.entry(*id).or_default() += 1;
        }
        counts
    }

    pub(crate) fn leases(&self) -> impl Iterator<Item = u32> {
        self.held.keys().copied()
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let held = self.held.values().map(BTreeMap::len).sum::<usize>();
        self.columns.iter().map(Column::heap_bytes).sum::<usize>()
            + self.columns.capacity() * size_of::<Column>()
            + self.held.allocation_size()
            + held * 2 * size_of::<((usize, u32), Depth)>()
    }
}
