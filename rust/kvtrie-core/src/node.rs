//! The node record: an edge of whole blocks, its links, who used it last and who pins it.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::ids::{ABSENT, Depth, NO_NODE, NodeIndex};
use crate::lru::NOT_QUEUED;
use crate::span::Tags;
use crate::tokens::{Item, View};

/// How exact an entry is, and how often its KV was placed elsewhere: the class in one bit, the hops in fifteen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Label(u16);

impl Label {
    pub(crate) const EXACT: Self = Self(0);
    /// The most hops that a label can hold.
    pub(crate) const MAX_HOPS: u16 = (1 << 15) - 1;

    pub(crate) fn approximate(hops: u16) -> Self {
        Self(1 << 15 | hops.min(Self::MAX_HOPS))
    }

    pub(crate) fn is_exact(self) -> bool {
        self.0 >> 15 == 0
    }

    pub(crate) fn hops(self) -> u16 {
        self.0 & Self::MAX_HOPS
    }
}

/// What backs one block of a path: today one block id and its label. Layers that need several ids a position go here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Payload {
    pub(crate) id: u32,
    pub(crate) label: Label,
}

impl Payload {
    pub(crate) const HOLE: Self = Self {
        id: ABSENT,
        label: Label::EXACT,
    };

    pub(crate) fn is_present(self) -> bool {
        self.id != ABSENT
    }

    pub(crate) fn is_exact(self) -> bool {
        self.is_present() && self.label.is_exact()
    }
}

/// The tokens and payloads of an edge. Blocks are named by their depth; the front can be split off without moving
/// what stays.
#[derive(Debug, Default)]
pub(crate) struct Run {
    tokens: Vec<u32>,
    ids: Vec<u32>,
    /// Empty while every block is exact.
    labels: Vec<Label>,
    /// Blocks at the front of the vectors that were split off.
    skipped: usize,
}

impl Run {
    pub(crate) fn len(&self) -> usize {
        self.ids.len() - self.skipped
    }

    pub(crate) fn tokens(&self, block_size: usize) -> &[u32] {
        &self.tokens[self.skipped * block_size..]
    }

    pub(crate) fn ids(&self) -> &[u32] {
        &self.ids[self.skipped..]
    }

    pub(crate) fn get(&self, at: usize) -> Payload {
        let at = at + self.skipped;
        Payload {
            id: self.ids[at],
            label: self.labels.get(at).copied().unwrap_or(Label::EXACT),
        }
    }

    pub(crate) fn set(&mut self, at: usize, payload: Payload) {
        let at = at + self.skipped;
        self.ids[at] = payload.id;
        self.set_label(at, payload.label);
    }

    fn set_label(&mut self, at: usize, label: Label) {
        if self.labels.is_empty() && label != Label::EXACT {
            self.labels = vec![Label::EXACT; self.ids.len()];
        }
        if let Some(old) = self.labels.get_mut(at) {
            *old = label;
        }
    }

    pub(crate) fn extend(&mut self, tokens: &[u32], payloads: &[Payload]) {
        self.tokens.extend_from_slice(tokens);
        self.ids.extend(payloads.iter().map(|payload| payload.id));
        if !self.labels.is_empty() || payloads.iter().any(|payload| payload.label != Label::EXACT) {
            self.labels
                .resize(self.ids.len() - payloads.len(), Label::EXACT);
            self.labels
                .extend(payloads.iter().map(|payload| payload.label));
        }
    }

    /// Drops the last block.
    pub(crate) fn pop(&mut self, block_size: usize) {
        self.ids.pop();
        self.tokens.truncate(self.ids.len() * block_size);
        self.labels.truncate(self.ids.len());
        if self.tokens.capacity() > 4 * self.tokens.len().max(16 * block_size) {
            self.tokens.shrink_to(2 * self.tokens.len());
            self.ids.shrink_to(2 * self.ids.len());
        }
    }

    /// Splits off the first `blocks` blocks, at a cost that grows with `blocks` alone (amortised).
    pub(crate) fn split_front(&mut self, blocks: usize, block_size: usize) -> Self {
        let (from, to) = (self.skipped, self.skipped + blocks);
        let front = Self {
            tokens: self.tokens[from * block_size..to * block_size].to_vec(),
            ids: self.ids[from..to].to_vec(),
            labels: self
                .labels
                .get(from..to)
                .map(<[Label]>::to_vec)
                .unwrap_or_default(),
            skipped: 0,
        };
        self.skipped = to;
        if self.skipped >= self.len() {
            self.tokens.drain(..self.skipped * block_size);
            self.ids.drain(..self.skipped);
            if !self.labels.is_empty() {
                self.labels.drain(..self.skipped);
            }
            self.skipped = 0;
            self.tokens.shrink_to_fit();
            self.ids.shrink_to_fit();
            self.labels.shrink_to_fit();
        }
        front
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.tokens.capacity() * size_of::<u32>()
            + self.ids.capacity() * size_of::<u32>()
            + self.labels.capacity() * size_of::<Label>()
    }
}

/// When the blocks of an edge were last used.
///
/// A use of a path stamps every block above its end, so it is kept once, at the deepest node: the stamp of a block is
/// the latest among the uses that end behind it. A node that loses its last child takes over the child's latest use.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// (depth at which a use ended, stamp): ends descend, stamps ascend, so every pair says something.
    paths: SmallVec<[(Depth, u64); 2]>,
}

impl Uses {
    /// A use that ends behind the block `end - 1`, newer than all others.
    pub(crate) fn touch(&mut self, end: Depth, stamp: u64) {
        while self.paths.last().is_some_and(|&(old, _)| old <= end) {
            self.paths.pop();
        }
        self.paths.push((end, stamp));
    }

    /// A use of any age.
    pub(crate) fn add(&mut self, end: Depth, stamp: u64) {
        let at = self.paths.partition_point(|&(old, _)| old > end);
        let known = self
            .paths
            .get(at)
            .filter(|&&(old, _)| old == end)
            .map(|&(_, stamp)| stamp);
        let behind = at.checked_sub(1).map(|at| self.paths[at].1);
        if known.is_some_and(|known| known >= stamp) || behind.is_some_and(|behind| behind >= stamp)
        {
            return;
        }
        let until = at + self.paths[at..].partition_point(|&(_, old)| old <= stamp);
        self.paths.drain(at..until);
        self.paths.insert(at, (end, stamp));
    }

    /// Last path use of the block at `depth`; 0 if there was none.
    pub(crate) fn stamp(&self, depth: Depth) -> u64 {
        let behind = self.paths.partition_point(|&(end, _)| end > depth);
        behind.checked_sub(1).map_or(0, |at| self.paths[at].1)
    }

    /// The latest use of any block.
    pub(crate) fn latest(&self) -> u64 {
        self.paths.last().map_or(0, |&(_, stamp)| stamp)
    }

    /// The edge ends at `end` from here on.
    pub(crate) fn truncate(&mut self, end: Depth) {
        let beyond = self.paths.partition_point(|&(old, _)| old >= end);
        if let Some(last) = beyond.checked_sub(1) {
            self.paths[last].0 = end;
            self.paths.drain(..last);
        }
    }

    /// Splits off the uses that ended at or before `end`.
    pub(crate) fn split_front(&mut self, end: Depth) -> Self {
        let behind = self.paths.partition_point(|&(old, _)| old > end);
        Self {
            paths: self.paths.drain(behind..).collect(),
        }
    }

    fn heap_bytes(&self) -> usize {
        if self.paths.spilled() {
            self.paths.capacity() * size_of::<(Depth, u64)>()
        } else {
            0
        }
    }
}

/// What few nodes have.
#[derive(Debug, Default)]
pub(crate) struct Extras {
    /// Items that reach into the edge, in absolute positions.
    pub(crate) items: Vec<Item>,
    pub(crate) tags: Tags,
    /// Last use of a block as the source of a copy, by depth: such a use does not stamp what lies above.
    pub(crate) source_uses: BTreeMap<Depth, u64>,
    /// (end, count): leases whose pins protect the blocks before `end`, ends ascending.
    pub(crate) anchors: Vec<(Depth, u32)>,
}

/// One edge of the forest with its lower end.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) run: Run,
    pub(crate) uses: Uses,
    pub(crate) extras: Option<Box<Extras>>,
    /// Hash of the first block under the parent.
    pub(crate) hash: u64,
    pub(crate) namespace: u32,
    pub(crate) parent: NodeIndex,
    /// Blocks above this edge.
    pub(crate) depth: Depth,
    pub(crate) num_holes: u32,
    pub(crate) num_approximate: u32,
    /// All children, in a ring without order.
    pub(crate) first_child: NodeIndex,
    pub(crate) next: NodeIndex,
    pub(crate) previous: NodeIndex,
    pub(crate) num_children: u32,
    /// Children whose first block is present and exact, in token order: root of a treap, and this node's links in its
    /// parent's.
    pub(crate) sorted_root: NodeIndex,
    pub(crate) sorted_left: NodeIndex,
    pub(crate) sorted_right: NodeIndex,
    /// Children that have a protected block.
    pub(crate) protected_children: u32,
    /// Position in the eviction order.
    pub(crate) queued: u32,
    /// How often blocks at the end were dropped: a cursor into the edge is valid while this stands.
    pub(crate) trims: u32,
}

impl Node {
    pub(crate) fn new(namespace: u32, parent: NodeIndex, depth: Depth) -> Self {
        Self {
            run: Run::default(),
            uses: Uses::default(),
            extras: None,
            hash: 0,
            namespace,
            parent,
            depth,
            num_holes: 0,
            num_approximate: 0,
            first_child: NO_NODE,
            next: NO_NODE,
            previous: NO_NODE,
            num_children: 0,
            sorted_root: NO_NODE,
            sorted_left: NO_NODE,
            sorted_right: NO_NODE,
            protected_children: 0,
            queued: NOT_QUEUED,
            trims: 0,
        }
    }

    /// Depth of the edge's lower end.
    pub(crate) fn end(&self) -> Depth {
        self.depth + crate::ids::depth(self.run.len())
    }

    pub(crate) fn is_root(&self) -> bool {
        self.parent == NO_NODE
    }

    pub(crate) fn payload(&self, depth: Depth) -> Payload {
        self.run.get((depth - self.depth) as usize)
    }

    /// The tokens of the edge.
    pub(crate) fn view(&self, block_size: usize) -> View<'_> {
        View {
            tokens: self.run.tokens(block_size),
            base: self.depth as usize * block_size,
            items: self.extras.as_ref().map_or(&[], |extras| &extras.items),
        }
    }

    pub(crate) fn first_block(&self, block_size: usize) -> View<'_> {
        let base = self.depth as usize * block_size;
        self.view(block_size).slice(base, base + block_size)
    }

    /// First depth in `from..to` whose block is not present and exact; `to` if there is none.
    pub(crate) fn exact_until(&self, from: Depth, to: Depth) -> Depth {
        if self.num_holes == 0 && self.num_approximate == 0 {
            return to;
        }
        (from..to)
            .find(|&depth| !self.payload(depth).is_exact())
            .unwrap_or(to)
    }

    /// First depth in `from..to` without a block; `to` if there is none.
    pub(crate) fn present_until(&self, from: Depth, to: Depth) -> Depth {
        if self.num_holes == 0 {
            return to;
        }
        (from..to)
            .find(|&depth| !self.payload(depth).is_present())
            .unwrap_or(to)
    }

    /// Present blocks in `from..to`.
    pub(crate) fn num_present(&self, from: Depth, to: Depth) -> u32 {
        if self.num_holes == 0 {
            return to - from;
        }
        crate::ids::depth(
            (from..to)
                .filter(|&depth| self.payload(depth).is_present())
                .count(),
        )
    }

    /// Last use of a block by a path that ends in this edge, or as a source.
    pub(crate) fn last_use(&self, depth: Depth) -> u64 {
        let source = self
            .extras
            .as_ref()
            .and_then(|extras| extras.source_uses.get(&depth).copied());
        self.uses.stamp(depth).max(source.unwrap_or(0))
    }

    /// The blocks before this depth are pinned, or lie above a pinned one.
    pub(crate) fn protected_end(&self) -> Depth {
        if self.protected_children > 0 {
            return self.end();
        }
        let anchors = self
            .extras
            .as_ref()
            .map_or(&[][..], |extras| &extras.anchors);
        anchors.last().map_or(self.depth, |&(end, _)| end)
    }

    pub(crate) fn extras_mut(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let extras = self.extras.as_ref().map_or(0, |extras| {
            size_of::<Extras>()
                + extras.items.capacity() * size_of::<Item>()
                + extras.tags.heap_bytes()
                + extras.source_uses.len() * (size_of::<(Depth, u64)>() + size_of::<usize>())
                + extras.anchors.capacity() * size_of::<(Depth, u32)>()
        });
        self.run.heap_bytes() + self.uses.heap_bytes() + extras
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn uses_equal_one_stamp_per_block(
            steps in prop::collection::vec((0u8..4, 1u32..20, 1u64..30), 0..40)
        ) {
            let mut uses = Uses::default();
            let mut stamps = vec![0u64; 20];
            let mut clock = 100;
            let mut end = 20u32;
            for (kind, at, stamp) in steps {
                let at = at.min(end);
                match kind {
                    0 => {
                        clock += 1;
                        uses.touch(at, clock);
                        stamps[..at as usize].fill(clock);
                    }
                    1 => {
                        // A child's use reaches the edge's end.
                        uses.add(end, stamp);
                        stamps[..end as usize].iter_mut().for_each(|old| *old = (*old).max(stamp));
                    }
                    2 if at > 1 => {
                        uses.truncate(at);
                        end = at;
                        stamps.truncate(at as usize);
                    }
                    _ => {}
                }
                let found: Vec<u64> = (0..end).map(|depth| uses.stamp(depth)).collect();
                prop_assert_eq!(&found, &stamps);
                prop_assert_eq!(uses.latest(), stamps.iter().copied().max().unwrap_or(0));
            }
            let cut = end / 2;
            let whole: Vec<u64> = (0..end).map(|depth| uses.stamp(depth)).collect();
            let latest_behind = (cut..end).map(|depth| uses.stamp(depth)).max().unwrap_or(0);
            let front = uses.split_front(cut);
            for depth in 0..cut {
                prop_assert_eq!(front.stamp(depth).max(latest_behind), whole[depth as usize]);
            }
            for depth in cut..end {
                prop_assert_eq!(uses.stamp(depth), whole[depth as usize]);
            }
        }
    }

    #[test]
    fn run_keeps_payloads_through_splits_and_pops() {
        let payload = |id: u32| Payload {
            id,
            label: if id.is_multiple_of(3) {
                Label::approximate(1)
            } else {
                Label::EXACT
            },
        };
        let mut run = Run::default();
        let payloads: Vec<Payload> = (0..10).map(payload).collect();
        run.extend(&(0..20).collect::<Vec<u32>>(), &payloads);
        let front = run.split_front(3, 2);
        assert_eq!((front.len(), run.len()), (3, 7));
        assert_eq!(front.tokens(2), [0, 1, 2, 3, 4, 5]);
        assert_eq!(run.tokens(2)[..2], [6, 7]);
        let second = run.split_front(5, 2);
        assert_eq!(
            (0..5).map(|at| second.get(at)).collect::<Vec<_>>(),
            payloads[3..8]
        );
        run.pop(2);
        assert_eq!((run.len(), run.get(0)), (1, payload(8)));
    }

    #[test]
    fn label_keeps_class_and_hops() {
        assert!(Label::EXACT.is_exact());
        let label = Label::approximate(7);
        assert_eq!((label.is_exact(), label.hops()), (false, 7));
    }
}
