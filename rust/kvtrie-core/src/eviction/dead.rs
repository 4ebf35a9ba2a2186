//! Dead blocks: `mark_dead` marks them, a use removes the mark, and an eviction skips them while they are pinned (D8,
//! D11).
//!
//! An edge stores the marks of its own blocks. [`DeadOrder`] holds those that may be evicted, and an edge updates its
//! runs there when its pins or blocks change. So an eviction visits no pinned block.

use std::collections::{BTreeMap, BTreeSet};

use crate::effort::Steps;
use crate::eviction::dead_order::{DeadOrder, DeadRun};
use crate::ids::{Depth, NO_NODE, NodeIndex};
use crate::storage::forest::{Forest, PathPart, Position, Sources};
use crate::storage::node::Node;

#[derive(Debug, Default)]
pub(crate) struct DeadBlocks {
    order: DeadOrder,
    num_blocks: u64,
    num_loose: u64,
    last_mark: u64,
}

impl DeadBlocks {
    pub(crate) fn order(&self) -> &DeadOrder {
        &self.order
    }

    pub(crate) fn num_blocks(&self) -> u64 {
        self.num_blocks
    }

    /// Number of dead blocks that are protected, but only by sources below, and so may be evicted.
    pub(crate) fn num_loose(&self) -> u64 {
        self.num_loose
    }

    pub(crate) fn last_mark(&self) -> u64 {
        self.last_mark
    }

    pub(crate) fn restore_last_mark(&mut self, mark: u64) {
        self.last_mark = mark;
    }

    /// Counts restored marks; [`Self::requeue`] must follow.
    pub(crate) fn restore(&mut self, forest: &mut Forest, tree: u32, marks: u64) {
        self.num_blocks += marks;
        *forest.trees_mut().num_dead_mut(tree) += marks;
    }

    /// Marks the parts that are not extended and returns how many blocks are newly marked. A call that marks no block
    /// does not count as a mark.
    pub(crate) fn mark(
        &mut self,
        forest: &mut Forest,
        parts: &[(NodeIndex, Vec<PathPart>)],
    ) -> u64 {
        let mut marked = 0;
        let mark = self.last_mark + 1;
        for (node, parts) in parts {
            let parts = parts.iter().filter(|part| !part.is_extended);
            let mut parts = parts.map(|part| (part.from, part.to)).peekable();
            if parts.peek().is_none() {
                continue;
            }
            let new = forest.mark(*node, parts, mark);
            if new > 0 {
                let tree = forest.node(*node).tree;
                *forest.trees_mut().num_dead_mut(tree) += new;
                marked += new;
                crate::failpoints::within("mark_dead: marks that are not counted");
                self.requeue(forest, *node);
            }
        }
        if marked > 0 {
            self.num_blocks += marked;
            self.last_mark = mark;
        }
        marked
    }

    #[cold]
    pub(crate) fn revive_path(&mut self, forest: &mut Forest, at: Position) {
        let tree = forest.node(at.node).tree;
        let (mut node, mut end) = (at.node, at.depth);
        while node != NO_NODE && forest.trees()[tree].num_dead > 0 {
            let start = forest.node(node).depth;
            self.unmark(forest, node, start, end);
            end = start;
            node = forest.node(node).parent;
        }
    }

    #[inline]
    pub(crate) fn unmark(&mut self, forest: &mut Forest, node: NodeIndex, from: Depth, to: Depth) {
        if self.num_blocks == 0 || !forest.node(node).has_dead() || from >= to {
            return;
        }
        let (protected, tree) = (forest.protected_end(node), forest.node(node).tree);
        let Some(dead) = forest.dead_mut(node) else {
            return;
        };
        let mut loose = 0;
        for range in dead.marks.within(from, to) {
            for run in self.order.cut(range.value, range.from, range.to) {
                loose += run.to.min(protected).saturating_sub(run.from);
            }
        }
        let gone = u64::from(dead.marks.clear(from, to));
        dead.loose -= loose;
        self.num_loose -= u64::from(loose);
        self.num_blocks -= gone;
        *forest.trees_mut().num_dead_mut(tree) -= gone;
        forest.drop_marks(node);
    }

    pub(crate) fn unqueue(&mut self, forest: &mut Forest, node: NodeIndex) {
        let Some(dead) = forest.dead_mut(node) else {
            return;
        };
        for range in dead.marks.as_slice() {
            self.order.cut(range.value, range.from, range.to);
        }
        self.num_loose -= u64::from(dead.loose);
        dead.loose = 0;
    }

    pub(crate) fn requeue(&mut self, forest: &mut Forest, node: NodeIndex) {
        self.unqueue(forest, node);
        let protected = forest.protected_end(node);
        let runs = free_runs(forest, node);
        let below = |run: &DeadRun| run.to.min(protected).saturating_sub(run.from);
        let loose = runs.iter().map(below).sum();
        for run in runs {
            self.order.add(run);
        }
        self.num_loose += u64::from(loose);
        if let Some(dead) = forest.dead_mut(node) {
            dead.loose = loose;
        }
    }

    pub(crate) fn mark_ranks(&self, forest: &Forest) -> BTreeMap<u64, usize> {
        let mut marks = BTreeSet::new();
        if self.num_blocks > 0 {
            let ranges = forest.nodes().flat_map(Node::dead_marks);
            marks = ranges.map(|range| range.value).collect();
        }
        marks.into_iter().zip(0..).collect()
    }
}

fn free_runs(forest: &Forest, node: NodeIndex) -> Vec<DeadRun> {
    let (mut free, edge) = (Vec::new(), forest.node(node));
    let Some(dead) = edge.extras().and_then(|extras| extras.dead.as_ref()) else {
        return free;
    };
    let path_end = forest.path_end(node);
    let pinned = forest.sources_of(node).map(Sources::pinned);
    let pinned = pinned.unwrap_or_default();
    for range in dead.marks.as_slice() {
        let (mark, mut from) = (range.value, range.from.max(path_end));
        let first = pinned.partition_point(|&(_, to)| to <= from);
        let inside = pinned[first..]
            .iter()
            .take_while(|&&(start, _)| start < range.to);
        for &(start, end) in inside.chain([&(range.to, range.to)]) {
            let to = start;
            if from < to {
                free.push(DeadRun {
                    mark,
                    node,
                    from,
                    to,
                });
            }
            from = from.max(end);
        }
    }
    free
}

/// Takes the steps of reviving the path to `at`: one per edge and per dead run.
#[cold]
pub(crate) fn count_revival(forest: &Forest, at: Position, steps: &mut Steps) -> Option<()> {
    if forest.trees()[forest.node(at.node).tree].num_dead == 0 {
        return Some(());
    }
    let mut node = at.node;
    while node != NO_NODE {
        let edge = forest.node(node);
        steps.take(1 + edge.dead_marks().len() as u64)?;
        node = edge.parent;
    }
    Some(())
}
