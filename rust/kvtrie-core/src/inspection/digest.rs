//! A digest of an index, which ranks must agree on after the same calls.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::groups::IdState;
use crate::index::RadixIndex;
use crate::storage::blocks::BlockState;
use crate::storage::forest::Forest;

impl RadixIndex {
    /// A digest of the logical state: every entry with its tokens, block, label, grade, tags, sessions, mark and last
    /// use; pins; condemned and waiting blocks (these in order); the clock and the kinds; and the same of ids of further
    /// groups. It does not depend on seeds or on the order of splits.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let forest = self.forest();
        let mut all = DefaultHasher::new();
        (
            self.clock(),
            self.kinds(),
            self.config().block_size,
            self.config().num_blocks,
        )
            .hash(&mut all);
        self.pins().waiting().hash(&mut all);
        let pins = self.pins().pin_counts(forest);
        for (id, place) in forest.blocks().known() {
            let pins = pins.get(&id).copied().unwrap_or(0);
            if pins > 0 || !matches!(place, BlockState::Indexed { .. }) {
                (id, std::mem::discriminant(&place), pins).hash(&mut all);
            }
        }
        // Entries are summed, because siblings have no order in the logical state.
        let marks = self.eviction().dead().mark_ranks(forest);
        let entries = forest.trees().iter().fold(0u64, |sum, (_, tree)| {
            let mut namespace = DefaultHasher::new();
            tree.namespace.digest().hash(&mut namespace);
            sum.wrapping_add(digest_tree(forest, tree.root, namespace.finish(), &marks))
        });
        entries.hash(&mut all);
        if !self.groups().is_empty() {
            self.digest_groups(&mut all);
        }
        all.finish()
    }

    /// Adds every group's ids: at the block of group 0 at their place, waiting or condemned, with their pins and last
    /// uses.
    fn digest_groups(&self, all: &mut DefaultHasher) {
        let (forest, groups) = (self.forest(), self.groups());
        let pins = groups.pin_counts();
        for (number, column) in groups.columns().iter().enumerate() {
            let mut ids: Vec<_> = column.ids().collect();
            ids.sort_unstable_by_key(|&(id, _)| id);
            for (id, state) in ids {
                let pins = pins.get(&(number, id)).copied().unwrap_or(0);
                (id, pins).hash(all);
                match state {
                    IdState::Indexed(node, place) => {
                        let last_use = column.entry(node, place).map(|entry| entry.last_use);
                        let block = forest.node(node).id(place, forest.block_size());
                        (block, last_use).hash(all);
                    }
                    IdState::Condemned(_) => "condemned".hash(all),
                    IdState::Waiting => "waiting".hash(all),
                }
            }
            "end".hash(all);
        }
    }
}

fn digest_tree(forest: &Forest, root: u32, namespace: u64, marks: &BTreeMap<u64, usize>) -> u64 {
    // Parents come first. Each element is a node, the digest of the path above it, and its parent's index in the list.
    let mut order = vec![(root, namespace, 0)];
    let mut at = 0;
    while let Some(&(node, above, _)) = order.get(at) {
        let edge = forest.node(node);
        let mut path = above;
        for depth in edge.depth..edge.end() {
            path = path_digest(forest, path, node, depth);
        }
        let children = forest.children(node);
        order.extend(children.into_iter().map(|child| (child, path, at)));
        at += 1;
    }
    // Children come first here, so that the latest use below a block is known.
    let mut latest_below = vec![0; order.len()];
    let mut sum = 0u64;
    for (at, &(node, above, parent)) in order.iter().enumerate().rev() {
        let edge = forest.node(node);
        let mut path = above;
        for depth in edge.depth..edge.end() {
            path = path_digest(forest, path, node, depth);
            let payload = edge.payload(depth, forest.block_size());
            let mut entry = DefaultHasher::new();
            (
                path,
                payload.id,
                payload.label.is_exact(),
                payload.label.hops(),
            )
                .hash(&mut entry);
            if !payload.label.is_exact() {
                forest.grade(node, payload.label).hash(&mut entry);
            }
            if payload.is_present() {
                edge.last_use(depth).max(latest_below[at]).hash(&mut entry);
                let dead = edge.extras().and_then(|extras| extras.dead.as_ref());
                let mark = dead.and_then(|dead| dead.marks.get(depth));
                if let Some(rank) = mark.and_then(|mark| marks.get(&mark)) {
                    rank.hash(&mut entry);
                }
                for run in forest.tags_of_block(node, depth) {
                    (run.start, run.end, run.mask).hash(&mut entry);
                }
                let sessions = edge.sessions(depth);
                if !sessions.is_empty() {
                    sessions.hash(&mut entry);
                }
            }
            sum = sum.wrapping_add(entry.finish());
        }
        if at > 0 {
            let latest = latest_below[at].max(edge.latest_use());
            latest_below[parent] = latest_below[parent].max(latest);
        }
    }
    sum
}

fn path_digest(forest: &Forest, above: u64, node: u32, depth: u32) -> u64 {
    let (start, end) = forest.tokens_of(depth);
    let block = forest
        .node(node)
        .view(forest.block_size())
        .slice(start, end);
    let mut hasher = DefaultHasher::new();
    above.hash(&mut hasher);
    block.tokens.hash(&mut hasher);
    for item in block.items_inside() {
        item.hash(&mut hasher);
    }
    hasher.finish()
}
