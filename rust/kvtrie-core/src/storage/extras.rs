//! The data that only few edges have: holes, labels, tags, sessions, items, dead marks, and uses that end inside the
//! edge.

use smallvec::SmallVec;

use crate::ids::Depth;
use crate::ranges::Ranges;
use crate::session::Sessions;
use crate::span::Tags;
use crate::storage::payload::Label;
use crate::tokens::Item;

/// Uses of paths that end inside an edge.
///
/// A use touches every block above its end, so it is stored once, at the deepest node. The last use of a block is the
/// latest use that ends after it. A node that loses a child inherits the child's latest use.
#[derive(Debug, Default)]
pub(crate) struct InnerUses {
    /// Pairs of the depth at which a use ended and its time. Depths descend, times ascend.
    paths: SmallVec<[(Depth, u64); 2]>,
}

impl InnerUses {
    pub(crate) fn pairs(&self) -> &[(Depth, u64)] {
        &self.paths
    }

    pub(crate) fn from_pairs(pairs: SmallVec<[(Depth, u64); 2]>) -> Option<Self> {
        let sorted = pairs
            .windows(2)
            .all(|pair| pair[0].0 > pair[1].0 && pair[0].1 < pair[1].1);
        sorted.then_some(Self { paths: pairs })
    }

    pub(crate) fn touch(&mut self, end: Depth, time: u64) {
        while self.paths.last().is_some_and(|&(old, _)| old <= end) {
            self.paths.pop();
        }
        self.paths.push((end, time));
    }

    pub(crate) fn clear(&mut self) {
        self.paths.clear();
    }

    /// Forgets the uses that are not newer than a use of the whole edge.
    pub(crate) fn cover(&mut self, time: u64) {
        let hidden = self.paths.partition_point(|&(_, old)| old <= time);
        self.paths.drain(..hidden);
    }

    /// The latest use that ends after `depth`; 0 if there is none.
    pub(crate) fn time(&self, depth: Depth) -> u64 {
        let after = self.paths.partition_point(|&(end, _)| end > depth);
        after.checked_sub(1).map_or(0, |at| self.paths[at].1)
    }

    pub(crate) fn latest(&self) -> u64 {
        self.paths.last().map_or(0, |&(_, time)| time)
    }

    /// Removes the uses that end at `end` or after it, and returns the latest.
    pub(crate) fn truncate(&mut self, end: Depth) -> u64 {
        let beyond = self.paths.partition_point(|&(old, _)| old >= end);
        let latest = beyond.checked_sub(1).map_or(0, |at| self.paths[at].1);
        self.paths.drain(..beyond);
        latest
    }

    pub(crate) fn split_front(&mut self, end: Depth) -> Self {
        let after = self.paths.partition_point(|&(old, _)| old > end);
        Self {
            paths: self.paths.drain(after..).collect(),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Dead {
    /// Marks by depth. Only present blocks are marked.
    pub(crate) marks: Ranges,
    /// Number of dead blocks that are protected by a source below and may be evicted all the same.
    pub(crate) loose: u32,
}

impl Dead {
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of::<Self>() + self.marks.heap_bytes()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Extras {
    /// One label per block, or none while every block is exact.
    pub(crate) labels: Vec<Label>,
    pub(crate) num_holes: u32,
    pub(crate) num_approximate: u32,
    /// Items that overlap the edge, at absolute positions.
    pub(crate) items: Vec<Item>,
    /// The shift at the edge's first token: how far its position is from its number in the prompt.
    pub(crate) shift: i64,
    pub(crate) tags: Tags,
    pub(crate) sessions: Sessions,
    pub(crate) uses: InnerUses,
    /// Last uses of blocks as a copy source, where newer than the uses by paths.
    pub(crate) source_uses: Ranges,
    pub(crate) dead: Option<Box<Dead>>,
}

impl Extras {
    pub(crate) fn is_empty(&self) -> bool {
        self.num_holes == 0
            && self.num_approximate == 0
            && self.items.is_empty()
            && self.shift == 0
            && self.tags.runs().is_empty()
            && self.sessions.is_empty()
            && self.uses.paths.is_empty()
            && self.source_uses.is_empty()
            && self.dead.is_none()
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        size_of::<Self>()
            + self.labels.capacity() * size_of::<Label>()
            + self.items.capacity() * size_of::<Item>()
            + self.tags.heap_bytes()
            + self.sessions.heap_bytes()
            + if self.uses.paths.spilled() {
                self.uses.paths.capacity()
            } else {
                0
            } * size_of::<(Depth, u64)>()
            + self.source_uses.heap_bytes()
            + self.dead.as_ref().map_or(0, |dead| dead.heap_bytes())
    }
}
