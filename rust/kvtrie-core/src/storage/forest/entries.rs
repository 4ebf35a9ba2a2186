//! Entries and their counters. Blocks enter only by [`Forest::place`], [`Forest::fill`] and a restore. They leave only
//! by [`Forest::vacate`], [`Forest::vacate_end`] and with their node.

use crate::grade::{Grade, Grades};
use crate::ids::{ABSENT, BlockId, Depth, NodeIndex};
use crate::storage::forest::{Forest, Position};
use crate::storage::node::Node;
use crate::storage::payload::{Label, Payload};
use crate::storage::siblings;
use crate::tokens::{Item, View};

#[derive(Clone, Copy)]
pub(crate) struct NewBlocks<'a> {
    pub(crate) ids: &'a [BlockId],
    /// One label per block, or none if all are exact.
    pub(crate) labels: &'a [Label],
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    approximate: u64,
    holes: u64,
}

impl Forest {
    pub(crate) fn num_indexed(&self) -> u64 {
        self.blocks.num_indexed()
    }

    pub(crate) fn num_approximate(&self) -> u64 {
        self.counts.approximate
    }

    pub(crate) fn num_holes(&self) -> u64 {
        self.counts.holes
    }

    pub(crate) fn has_broken_paths(&self) -> bool {
        self.counts.holes > 0 || self.counts.approximate > 0
    }

    pub(crate) fn place(&mut self, node: NodeIndex, tokens: View<'_>, new: NewBlocks<'_>) {
        let block_size = self.block_size;
        let edge = &mut self.nodes[node];
        let from = edge.end();
        let (start, end) = (
            from as usize * block_size,
            (from as usize + new.ids.len()) * block_size,
        );
        let before = edge.num_approximate();
        let own = tokens.slice(start, end).tokens;
        if from == edge.depth {
            let shift = Item::shift_at(tokens.items, start, 0);
            if shift != 0 {
                edge.extras_mut().shift = shift;
            }
        }
        edge.extend(own, new.ids, new.labels, block_size);
        self.counts.approximate += u64::from(edge.num_approximate() - before);
        for item in Item::within(tokens.items, start, end) {
            let items = &mut edge.extras_mut().items;
            // An item across the old end was cut there, and is replaced by the longer one.
            if items
                .last()
                .is_some_and(|last| last.start() == item.start())
            {
                items.pop();
            }
            items.push(item);
        }
        let tree = edge.tree;
        self.count_grades(tree, new.labels, Grades::add);
        crate::failpoints::within("blocks that are not indexed");
        self.blocks.enter_run(new.ids, node, from);
    }

    pub(crate) fn fill(&mut self, node: NodeIndex, place: Depth, new: Payload) {
        let block_size = self.block_size;
        let edge = &mut self.nodes[node];
        // Siblings are ordered by whether their first block is exact, so the node may have to move.
        let sorts = place == edge.depth && edge.starts_exact(block_size) != new.is_exact();
        if sorts {
            siblings::remove(&mut self.nodes, node);
        }
        self.nodes[node].set_payload(place, new, block_size);
        if sorts {
            siblings::insert(&mut self.nodes, block_size, node);
        }
        crate::failpoints::within("insert: a hole was filled");
        self.counts.holes -= 1;
        self.counts.approximate += u64::from(!new.label.is_exact());
        let tree = self.nodes[node].tree;
        self.count_grades(tree, &[new.label], Grades::add);
        // The canary of the fuzz target `engine`: a filled hole counts as evictable even if it is pinned.
        if !cfg!(feature = "canary") {
            let is_protected = place < self.protected_end(node);
            self.protection.count(is_protected.into(), true);
        }
        self.blocks.enter(new.id, node, place);
    }

    /// Replaces blocks with holes. They have no marks and were cut out of their pins. Calls `report` with each id and
    /// whether it is condemned, which is what `is_pinned` returns.
    pub(crate) fn vacate(
        &mut self,
        node: NodeIndex,
        from: Depth,
        to: Depth,
        is_pinned: impl Fn(u32) -> bool,
        mut report: impl FnMut(u32, bool),
    ) {
        let block_size = self.block_size;
        for depth in from..to {
            let id = self.nodes[node].id(depth, block_size);
            let condemned = is_pinned(id);
            self.blocks.depart(id, condemned);
            report(id, condemned);
        }
        crate::failpoints::within("blocks that left and have no hole");
        let protected = self.protected_end(node).min(to).saturating_sub(from);
        let edge = &self.nodes[node];
        let (tree, approximate) = (edge.tree, edge.num_approximate());
        let sorts = from == edge.depth && edge.starts_exact(block_size);
        if sorts {
            siblings::remove(&mut self.nodes, node);
        }
        if approximate > 0 {
            let labels: Vec<Label> = self.nodes[node].labels(from, to).to_vec();
            self.count_grades(tree, &labels, Grades::remove);
        }
        let edge = &mut self.nodes[node];
        edge.vacate(from, to, block_size);
        let approximate = approximate - edge.num_approximate();
        if sorts {
            siblings::insert(&mut self.nodes, block_size, node);
        }
        self.counts.holes += u64::from(to - from);
        self.counts.approximate -= u64::from(approximate);
        self.protection.count(protected.into(), false);
    }

    /// Removes unpinned blocks from the end of an edge without extras; [`Self::truncate`] or [`Self::remove_leaf`] must
    /// follow. Calls `report` for each, the last first.
    pub(crate) fn vacate_end(&mut self, node: NodeIndex, end: Depth, mut report: impl FnMut(u32)) {
        let edge = &self.nodes[node];
        let from = (end - edge.depth) as usize;
        for &id in edge.blocks.ids(self.block_size)[from..].iter().rev() {
            self.blocks.depart(id, false);
            report(id);
        }
    }

    /// Cuts the edge at `end`, after the blocks from there on have left.
    pub(crate) fn truncate(&mut self, node: NodeIndex, end: Depth) {
        let holes = self.nodes[node].truncate(end, self.block_size);
        self.nodes.renew(node);
        self.counts.holes -= u64::from(holes);
    }

    /// Removes an edge while its tree is removed. Calls `report` as [`Self::vacate`] does.
    pub(crate) fn drop_node(
        &mut self,
        at: NodeIndex,
        is_pinned: impl Fn(u32) -> bool,
        mut report: impl FnMut(u32, bool),
    ) {
        let node = self.remove_node(at);
        let ids = node.blocks.ids(self.block_size).iter();
        for &id in ids.filter(|&&id| id != ABSENT) {
            let condemned = is_pinned(id);
            self.blocks.depart(id, condemned);
            report(id, condemned);
        }
    }

    pub(super) fn remove_node(&mut self, at: NodeIndex) -> Node {
        let node = self.nodes.remove(at);
        let labels = node.labels(node.depth, node.end());
        self.count_grades(node.tree, labels, Grades::remove);
        self.counts.holes -= u64::from(node.num_holes());
        self.counts.approximate -= u64::from(node.num_approximate());
        node
    }

    pub(crate) fn restore_node(&mut self, node: Node) -> NodeIndex {
        let labels = node.labels(node.depth, node.end());
        self.count_grades(node.tree, labels, Grades::add);
        self.counts.holes += u64::from(node.num_holes());
        self.counts.approximate += u64::from(node.num_approximate());
        self.nodes.insert(node)
    }

    fn count_grades(&mut self, tree: u32, labels: &[Label], count: fn(&mut Grades, Label)) {
        for &label in labels.iter().filter(|label| !label.is_exact()) {
            count(self.trees.grades_mut(tree), label);
        }
    }

    /// The label of an approximate block that is about to enter the tree of `node`.
    pub(crate) fn approximate_label(&mut self, node: NodeIndex, hops: u16, grade: Grade) -> Label {
        let tree = self.nodes[node].tree;
        Label::approximate(hops, self.trees.grades_mut(tree).number(grade))
    }

    /// The grade of an approximate block in the tree of `node`.
    pub(crate) fn grade(&self, node: NodeIndex, label: Label) -> Grade {
        self.trees[self.nodes[node].tree].grades.get(label.grade())
    }

    /// The meet of the grades of approximate blocks in a range of depths on the path to `end`, which starts at `from`.
    pub(crate) fn grade_of_path(&self, end: Position, from: Depth) -> Grade {
        let mut numbers = 0_u128;
        for (node, from, to) in self.edges_to(end, from) {
            let labels = self.nodes[node].labels(from, to).iter();
            let approximate = labels.filter(|label| !label.is_exact());
            numbers = approximate.fold(numbers, |set, label| set | 1 << label.grade());
        }
        self.trees[self.nodes[end.node].tree].grades.meet(numbers)
    }

    pub(crate) fn restore_block(&mut self, id: u32, node: NodeIndex, place: Depth) {
        self.blocks.enter(id, node, place);
    }

    /// The end of the last present block; the edge's start if there is none.
    pub(crate) fn present_end(&self, at: NodeIndex) -> Depth {
        let edge = &self.nodes[at];
        if edge.num_holes() == 0 {
            return edge.end();
        }
        (edge.depth..edge.end())
            .rev()
            .find(|&depth| edge.id(depth, self.block_size) != ABSENT)
            .map_or(edge.depth, |last| last + 1)
    }
}
