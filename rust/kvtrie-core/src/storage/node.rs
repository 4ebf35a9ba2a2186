//! The node record: an edge of whole blocks with its links. It takes 80 bytes, because most nodes are small leaves.
//! Data that only few edges have is in [`Extras`], allocated when first needed.

use crate::ids::{ABSENT, BlockId, Depth, NO_NODE, NodeIndex};
use crate::ranges::{Range, Ranges};
use crate::session::SessionId;
use crate::span::TagRun;
use crate::storage::edge_blocks::EdgeBlocks;
use crate::storage::extras::{Dead, Extras};
use crate::storage::payload::{Label, Payload};
use crate::tokens::{Item, View};

/// One word that holds an inner node's first child, or a leaf's place in the eviction order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Below(u32);

impl Below {
    const NOTHING: Self = Self(NO_NODE);
    /// Set if the word is a place in the eviction order. There are fewer than 2³¹ nodes, because each contains a
    /// present block or is above one.
    const QUEUED: u32 = 1 << 31;
}

/// The strongest kind of pin at or below a node. It says which blocks above may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guard {
    Nothing,
    /// Blocks that a plan copies from. Dead blocks above them may be evicted.
    Source,
    /// Blocks that back a sequence. No block above them may be evicted.
    Path,
}

/// An edge with the node at its lower end. The fields that a walk reads are adjacent.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Node {
    pub(crate) blocks: EdgeBlocks,
    extras: Option<Box<Extras>>,
    pub(crate) parent: NodeIndex,
    /// Number of children under [`Guard::Path`], with the bits [`Self::ANCHORED`] and [`Self::SOURCED`].
    pub(crate) protection: u32,
    pub(crate) depth: Depth,
    below: Below,
    /// Last use of the whole edge: by a path that ends at the node, or that ended in a child which left; 0 if there is
    /// none.
    time: u64,
    pub(crate) tree: u32,
    /// Links of the treap of siblings, in token order. The parent stores its root.
    pub(crate) left: NodeIndex,
    pub(crate) right: NodeIndex,
    pub(crate) up: NodeIndex,
    /// The first token, in which most siblings differ.
    pub(crate) first: u32,
    /// Incremented to make handles of the node stale.
    pub(crate) generation: u32,
}

impl Node {
    /// Set in `protection` if pinned paths end in this node.
    pub(crate) const ANCHORED: u32 = 1 << 31;
    /// Set in `protection` if the node is in the table of sources. Fewer than 2³⁰ children are counted, because each
    /// has the end of a pinned path at or below it.
    pub(crate) const SOURCED: u32 = 1 << 30;
    const VACANT: NodeIndex = NO_NODE - 1;

    pub(crate) fn new(tree: u32, parent: NodeIndex, depth: Depth) -> Self {
        Self {
            blocks: EdgeBlocks::default(),
            extras: None,
            time: 0,
            tree,
            parent,
            depth,
            below: Below::NOTHING,
            left: NO_NODE,
            right: NO_NODE,
            up: NO_NODE,
            first: 0,
            protection: 0,
            generation: 0,
        }
    }

    pub(crate) fn of_parts(
        (tree, parent, depth): (u32, NodeIndex, Depth),
        tokens: &[u32],
        ids: &[u32],
        time: u64,
        mut extras: Extras,
        block_size: usize,
    ) -> Self {
        let mut node = Self::new(tree, parent, depth);
        node.first = tokens.first().copied().unwrap_or_default();
        node.time = time;
        node.blocks.extend(tokens, ids.iter().copied(), block_size);
        let holes = ids.iter().filter(|&&id| id == ABSENT).count();
        extras.num_holes = crate::ids::depth(holes);
        let labels = extras.labels.iter();
        let approximate = labels.filter(|label| !label.is_exact()).count();
        extras.num_approximate = crate::ids::depth(approximate);
        if !extras.is_empty() {
            node.extras = Some(Box::new(extras));
        }
        node
    }

    pub(crate) fn vacant(generation: u32, next: NodeIndex) -> Self {
        Self {
            generation,
            up: next,
            ..Self::new(0, Self::VACANT, 0)
        }
    }

    pub(crate) fn is_vacant(&self) -> bool {
        self.parent == Self::VACANT
    }

    pub(crate) fn next_vacant(&self) -> NodeIndex {
        self.up
    }

    pub(crate) fn end(&self) -> Depth {
        self.depth + self.blocks.num_blocks()
    }

    /// Whether pinned paths go through the node to a child. If so, the whole edge is protected.
    pub(crate) fn has_paths_below(&self) -> bool {
        self.protection & !(Self::ANCHORED | Self::SOURCED) != 0
    }

    pub(crate) fn guard(&self) -> Guard {
        match self.protection {
            0 => Guard::Nothing,
            Self::SOURCED => Guard::Source,
            _ => Guard::Path,
        }
    }

    pub(crate) fn is_root(&self) -> bool {
        self.parent == NO_NODE
    }

    pub(crate) fn has_children(&self) -> bool {
        self.first_child() != NO_NODE
    }

    pub(crate) fn first_child(&self) -> NodeIndex {
        if self.below == Below::NOTHING || self.below.0 & Below::QUEUED != 0 {
            NO_NODE
        } else {
            self.below.0
        }
    }

    /// Links a child. A leaf must leave the eviction order before.
    pub(crate) fn set_first_child(&mut self, child: NodeIndex) {
        debug_assert!(self.queued().is_none());
        self.below = Below(child);
    }

    pub(crate) fn queued(&self) -> Option<u32> {
        (self.below != Below::NOTHING && self.below.0 & Below::QUEUED != 0)
            .then_some(self.below.0 & !Below::QUEUED)
    }

    pub(crate) fn set_queued(&mut self, position: Option<u32>) {
        debug_assert!(!self.has_children());
        self.below = position.map_or(Below::NOTHING, |at| Below(at | Below::QUEUED));
    }

    pub(crate) fn id(&self, depth: Depth, block_size: usize) -> u32 {
        self.blocks.id((depth - self.depth) as usize, block_size)
    }

    /// The block ids of a range of depths, with [`ABSENT`] for holes.
    pub(crate) fn ids(
        &self,
        from: Depth,
        to: Depth,
        block_size: usize,
    ) -> impl Iterator<Item = BlockId> {
        let ids = self.blocks.ids(block_size);
        ids[(from - self.depth) as usize..(to - self.depth) as usize]
            .iter()
            .map(|&id| BlockId(id))
    }

    pub(crate) fn payload(&self, depth: Depth, block_size: usize) -> Payload {
        Payload {
            id: self.id(depth, block_size),
            label: self.label(depth),
        }
    }

    fn label(&self, depth: Depth) -> Label {
        let at = (depth - self.depth) as usize;
        let labels = self
            .extras
            .as_ref()
            .map_or(&[][..], |extras| &extras.labels);
        labels.get(at).copied().unwrap_or(Label::EXACT)
    }

    /// The labels of a range of depths; nothing if all blocks of the edge are exact.
    pub(crate) fn labels(&self, from: Depth, to: Depth) -> &[Label] {
        let labels = self
            .extras
            .as_ref()
            .map_or(&[][..], |extras| &extras.labels);
        let range = (from - self.depth) as usize..(to - self.depth) as usize;
        labels.get(range).unwrap_or_default()
    }

    pub(crate) fn num_holes(&self) -> u32 {
        self.extras.as_ref().map_or(0, |extras| extras.num_holes)
    }

    pub(crate) fn num_approximate(&self) -> u32 {
        self.extras
            .as_ref()
            .map_or(0, |extras| extras.num_approximate)
    }

    pub(crate) fn set_payload(&mut self, depth: Depth, new: Payload, block_size: usize) {
        let at = (depth - self.depth) as usize;
        let len = self.blocks.len();
        let old = self.payload(depth, block_size);
        self.blocks.set_id(at, new.id, block_size);
        let plain = |payload: Payload| payload.is_present() && payload.label == Label::EXACT;
        if plain(old) && plain(new) {
            return;
        }
        let extras = self.extras_mut();
        extras.num_holes -= u32::from(!old.is_present());
        extras.num_holes += u32::from(!new.is_present());
        extras.num_approximate -= u32::from(!old.label.is_exact());
        extras.num_approximate += u32::from(!new.label.is_exact());
        if extras.labels.is_empty() && new.label != Label::EXACT {
            extras.labels = vec![Label::EXACT; len];
        }
        if let Some(label) = extras.labels.get_mut(at) {
            *label = new.label;
        }
        self.prune();
    }

    pub(crate) fn vacate(&mut self, from: Depth, to: Depth, block_size: usize) {
        let (start, end) = ((from - self.depth) as usize, (to - self.depth) as usize);
        for at in start..end {
            self.blocks.set_id(at, ABSENT, block_size);
        }
        let (tokens_from, tokens_to) = (from as usize * block_size, to as usize * block_size);
        let extras = self.extras_mut();
        extras.num_holes += to - from;
        if let Some(labels) = extras.labels.get_mut(start..end) {
            let approximate = labels.iter().filter(|label| !label.is_exact()).count();
            extras.num_approximate -= crate::ids::depth(approximate);
            labels.fill(Label::EXACT);
        }
        extras.tags.clear(tokens_from, tokens_to);
        extras.sessions.clear(from, to);
        extras.source_uses.clear(from, to);
    }

    /// Appends blocks. Exact blocks need no `labels`. The caller touches them.
    pub(crate) fn extend(
        &mut self,
        tokens: &[u32],
        ids: &[BlockId],
        labels: &[Label],
        block_size: usize,
    ) {
        if self.blocks.len() == 0 {
            self.first = tokens.first().copied().unwrap_or_default();
        }
        self.blocks
            .extend(tokens, ids.iter().map(|id| id.0), block_size);
        let keeps_labels = |extras: &Extras| !extras.labels.is_empty();
        if !labels.is_empty() || self.extras.as_deref().is_some_and(keeps_labels) {
            let len = self.blocks.len();
            let extras = self.extras_mut();
            extras.labels.resize(len - ids.len(), Label::EXACT);
            extras.labels.extend(labels);
            extras.labels.resize(len, Label::EXACT);
            let approximate = labels.iter().filter(|label| !label.is_exact()).count();
            extras.num_approximate += crate::ids::depth(approximate);
        }
    }

    /// Cuts the edge at `end`, before which a block is present. Returns the number of holes dropped.
    pub(crate) fn truncate(&mut self, end: Depth, block_size: usize) -> u32 {
        let len = (end - self.depth) as usize;
        let holes = (end..self.end())
            .filter(|&depth| self.num_holes() > 0 && self.id(depth, block_size) == ABSENT)
            .count();
        let holes = crate::ids::depth(holes);
        let approximate = (end..self.end())
            .filter(|&depth| !self.label(depth).is_exact())
            .count();
        self.blocks.truncate(len, block_size);
        if let Some(extras) = &mut self.extras {
            extras.labels.truncate(len);
            extras.num_holes -= holes;
            extras.num_approximate -= crate::ids::depth(approximate);
            self.time = self.time.max(extras.uses.truncate(end));
            Item::cut(&mut extras.items, end as usize * block_size);
            extras.tags.clear(end as usize * block_size, usize::MAX);
            extras.sessions.clear(end, Depth::MAX);
            extras.source_uses.clear(end, Depth::MAX);
            self.prune();
        }
        holes
    }

    pub(crate) fn split_front(&mut self, at: Depth, block_size: usize) -> Self {
        let mut front = Self::new(self.tree, self.parent, self.depth);
        let blocks = at - self.depth;
        front.blocks = self.blocks.split_front(blocks as usize, block_size);
        front.first = self.first;
        self.first = self.blocks.tokens(block_size)[0];
        self.depth = at;
        if let Some(extras) = &mut self.extras {
            let own = front.extras.insert(Box::default());
            let cut = at as usize * block_size;
            if !extras.labels.is_empty() {
                let after = extras.labels.split_off(blocks as usize);
                own.labels = std::mem::replace(&mut extras.labels, after);
                let approximate = own.labels.iter().filter(|label| !label.is_exact()).count();
                own.num_approximate = crate::ids::depth(approximate);
                extras.num_approximate -= own.num_approximate;
            }
            if extras.num_holes > 0 {
                let holes = front
                    .blocks
                    .ids(block_size)
                    .iter()
                    .filter(|&&id| id == ABSENT);
                own.num_holes = crate::ids::depth(holes.count());
                extras.num_holes -= own.num_holes;
            }
            own.shift = extras.shift;
            extras.shift = Item::shift_at(&extras.items, cut, extras.shift);
            own.items = Item::within(&extras.items, 0, cut).collect();
            extras.items = Item::within(&extras.items, cut, usize::MAX).collect();
            own.tags = extras.tags.split_front(cut);
            own.sessions = extras.sessions.split_front(at);
            own.source_uses = extras.source_uses.split_front(at);
            if let Some(dead) = &mut extras.dead {
                let marks = dead.marks.split_front(at);
                if !marks.is_empty() {
                    own.dead.get_or_insert_default().marks = marks;
                }
                if dead.marks.is_empty() {
                    extras.dead = None;
                }
            }
            own.uses = extras.uses.split_front(at);
            front.time = own.uses.truncate(at);
            front.prune();
            self.prune();
        }
        front
    }

    pub(crate) fn view(&self, block_size: usize) -> View<'_> {
        View {
            tokens: self.blocks.tokens(block_size),
            base: self.depth as usize * block_size,
            items: self.extras.as_ref().map_or(&[], |extras| &extras.items),
        }
    }

    /// The shift at token `at` of the edge: how far its position is from its number in the prompt.
    pub(crate) fn shift_at(&self, at: usize) -> i64 {
        self.extras
            .as_ref()
            .map_or(0, |extras| Item::shift_at(&extras.items, at, extras.shift))
    }

    pub(crate) fn first_block(&self, block_size: usize) -> View<'_> {
        let base = self.depth as usize * block_size;
        self.view(block_size).slice(base, base + block_size)
    }

    pub(crate) fn starts_exact(&self, block_size: usize) -> bool {
        self.extras.is_none() || self.payload(self.depth, block_size).is_exact()
    }

    /// First depth in `from..to` whose block is not both present and exact, or `to`.
    pub(crate) fn exact_until(&self, from: Depth, to: Depth, block_size: usize) -> Depth {
        if self.num_holes() == 0 && self.num_approximate() == 0 {
            return to;
        }
        (from..to)
            .find(|&depth| !self.payload(depth, block_size).is_exact())
            .unwrap_or(to)
    }

    /// First depth in `from..to` without a block, or `to`.
    pub(crate) fn present_until(&self, from: Depth, to: Depth, block_size: usize) -> Depth {
        if self.num_holes() == 0 {
            return to;
        }
        (from..to)
            .find(|&depth| self.id(depth, block_size) == ABSENT)
            .unwrap_or(to)
    }

    /// First depth in `from..to` with a block, or `to`.
    pub(crate) fn absent_until(&self, from: Depth, to: Depth, block_size: usize) -> Depth {
        (from..to)
            .find(|&depth| self.id(depth, block_size) != ABSENT)
            .unwrap_or(to)
    }

    pub(crate) fn num_present(&self, from: Depth, to: Depth, block_size: usize) -> u32 {
        if self.num_holes() == 0 {
            return to - from;
        }
        let present = (from..to).filter(|&depth| self.id(depth, block_size) != ABSENT);
        crate::ids::depth(present.count())
    }

    pub(crate) fn present(&self, block_size: usize) -> u32 {
        if self.extras.is_none() {
            return self.blocks.num_blocks();
        }
        self.num_present(self.depth, self.end(), block_size)
    }

    /// Records a use by a path that ends at `end`. It is newer than all others.
    pub(crate) fn touch(&mut self, end: Depth, time: u64) {
        if end < self.end() {
            let extras = self.extras_mut();
            extras.uses.touch(end, time);
            extras.source_uses.clear(0, end);
            return;
        }
        self.time = time;
        if let Some(extras) = &mut self.extras {
            extras.uses.clear();
            extras.source_uses = Ranges::default();
            self.prune();
        }
    }

    /// Records a use of the whole edge, of any age.
    pub(crate) fn add_use(&mut self, time: u64) {
        self.time = self.time.max(time);
        if let Some(extras) = &mut self.extras {
            extras.uses.cover(time);
            self.prune();
        }
    }

    /// The last use of a block by a path that ends in this edge, or as a source.
    pub(crate) fn last_use(&self, depth: Depth) -> u64 {
        let Some(extras) = &self.extras else {
            return self.time;
        };
        let source = extras.source_uses.get(depth).unwrap_or(0);
        self.time.max(extras.uses.time(depth)).max(source)
    }

    pub(crate) fn latest_use(&self) -> u64 {
        let inner = self
            .extras
            .as_ref()
            .map_or(0, |extras| extras.uses.latest());
        self.time.max(inner)
    }

    pub(crate) fn whole_use(&self) -> u64 {
        self.time
    }

    /// Whether the edge has no extras: all blocks are present, exact, not dead, without tags, sessions or items, and
    /// have one last use.
    pub(crate) fn is_plain(&self) -> bool {
        self.extras.is_none()
    }

    pub(crate) fn has_dead(&self) -> bool {
        self.extras
            .as_ref()
            .is_some_and(|extras| extras.dead.is_some())
    }

    pub(crate) fn tags(&self) -> &[TagRun] {
        self.extras().map_or(&[], |extras| extras.tags.runs())
    }

    pub(crate) fn sessions(&self, depth: Depth) -> &[SessionId] {
        self.extras()
            .map_or(&[], |extras| extras.sessions.of(depth))
    }

    pub(crate) fn dead_marks(&self) -> &[Range] {
        let dead = self.extras.as_ref().and_then(|extras| extras.dead.as_ref());
        dead.map_or(&[], |dead| dead.marks.as_slice())
    }

    pub(crate) fn dead_mut(&mut self) -> Option<&mut Dead> {
        self.extras.as_mut()?.dead.as_deref_mut()
    }

    pub(crate) fn extras(&self) -> Option<&Extras> {
        self.extras.as_deref()
    }

    /// The extras, created if needed. [`Self::prune`] drops them once they are empty.
    pub(crate) fn extras_mut(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    pub(crate) fn prune(&mut self) {
        if self.extras.as_ref().is_some_and(|extras| extras.is_empty()) {
            self.extras = None;
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.blocks.heap_bytes() + self.extras.as_ref().map_or(0, |extras| extras.heap_bytes())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCK_SIZE: usize = 2;

    fn edge(blocks: u32) -> Node {
        let mut node = Node::new(0, 1, 0);
        let ids: Vec<BlockId> = (0..blocks).map(BlockId).collect();
        let tokens: Vec<u32> = (0..2 * blocks).collect();
        node.extend(&tokens, &ids, &[], BLOCK_SIZE);
        node
    }

    proptest! {
        #[test]
        fn uses_equal_one_time_per_block(
            steps in prop::collection::vec((0u8..4, 1u32..20, 1u64..30), 0..40)
        ) {
            let mut node = edge(20);
            let mut times = vec![0u64; 20];
            let mut clock = 100;
            for (kind, at, time) in steps {
                let at = at.min(node.end());
                match kind {
                    0 => {
                        clock += 1;
                        node.touch(at, clock);
                        times[..at as usize].fill(clock);
                    }
                    1 => {
                        node.add_use(time);
                        for old in &mut times {
                            *old = (*old).max(time);
                        }
                    }
                    2 if at > 1 => {
                        node.truncate(at, BLOCK_SIZE);
                        times.truncate(at as usize);
                    }
                    _ => {}
                }
                let found: Vec<u64> = (0..node.end()).map(|depth| node.last_use(depth)).collect();
                prop_assert_eq!(&found, &times);
                prop_assert_eq!(node.latest_use(), times.iter().copied().max().unwrap_or(0));
            }
            let (cut, end) = (node.end() / 2, node.end());
            if cut > 0 {
                let latest_after = (cut..end).map(|depth| node.last_use(depth)).max().unwrap_or(0);
                let front = node.split_front(cut, BLOCK_SIZE);
                for depth in 0..cut {
                    prop_assert_eq!(front.last_use(depth).max(latest_after), times[depth as usize]);
                }
                for depth in cut..end {
                    prop_assert_eq!(node.last_use(depth), times[depth as usize]);
                }
            }
        }

        #[test]
        fn payloads_stay_through_changes_splits_and_cuts(
            changes in prop::collection::vec((0u32..12, 0u8..3), 0..20), cut in 1u32..12, keep in 1u32..12
        ) {
            let mut node = edge(12);
            let mut known: Vec<Payload> = (0..12).map(|at| node.payload(at, BLOCK_SIZE)).collect();
            for (at, kind) in changes {
                let new = match kind {
                    0 => Payload::HOLE,
                    1 => Payload { id: at + 50, label: Label::approximate(3, 1) },
                    _ => Payload { id: at + 90, label: Label::EXACT },
                };
                node.set_payload(at, new, BLOCK_SIZE);
                known[at as usize] = new;
            }
            prop_assert_eq!(node.is_plain(), known.iter().all(|payload| payload.is_exact()));
            let front = node.split_front(cut, BLOCK_SIZE);
            let keep = keep.max(cut + 1).min(12);
            node.truncate(keep, BLOCK_SIZE);
            for (edge, from, to) in [(&front, 0, cut), (&node, cut, keep)] {
                let part = &known[from as usize..to as usize];
                let found: Vec<Payload> =
                    (from..to).map(|depth| edge.payload(depth, BLOCK_SIZE)).collect();
                prop_assert_eq!(&found[..], part);
                let holes = part.iter().filter(|payload| !payload.is_present()).count();
                let approximate = part.iter().filter(|payload| !payload.label.is_exact()).count();
                prop_assert_eq!(edge.num_holes() as usize, holes);
                prop_assert_eq!(edge.num_approximate() as usize, approximate);
                prop_assert_eq!(edge.is_plain(), holes + approximate == 0);
            }
        }
    }
}
