//! One number for the logical state: two ranks that were fed the same calls must agree on it.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::ids::NO_NODE;
use crate::tree::RadixIndex;

impl RadixIndex {
    /// A digest of the logical state: every entry with its tokens, block, label, tags and last use, pins, what is
    /// condemned or waits (in order), the clock and the kinds. Results of calls depend on nothing else. Seeds and the order in which
    /// edges came to be split are not in it.
    ///
    /// # Complexity
    /// O(tokens held).
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut all = DefaultHasher::new();
        (
            self.clock,
            self.kinds(),
            self.config.block_size,
            self.config.num_blocks,
        )
            .hash(&mut all);
        self.waiting.hash(&mut all);
        for (id, place, pins) in self.blocks.noteworthy() {
            let place = std::mem::discriminant(&place);
            (id, place, pins).hash(&mut all);
        }
        // Entries are summed, since no order among siblings is part of the state.
        let entries = self.trees.iter().fold(0u64, |sum, (_, tree)| {
            let mut namespace = DefaultHasher::new();
            tree.namespace.hash(&mut namespace);
            sum.wrapping_add(self.digest_tree(tree.root, namespace.finish()))
        });
        entries.hash(&mut all);
        all.finish()
    }

    fn digest_tree(&self, root: u32, namespace: u64) -> u64 {
        // Parents first, with the digest of the path above each edge.
        let mut order = vec![(root, namespace)];
        let mut at = 0;
        while let Some(&(node, above)) = order.get(at) {
            at += 1;
            let edge = &self.nodes[node];
            let mut path = above;
            for depth in edge.depth..edge.end() {
                path = self.path_digest(path, node, depth);
            }
            let mut child = edge.first_child;
            while child != NO_NODE {
                order.push((child, path));
                child = self.nodes[child].next;
            }
        }
        // Children first, so that a block knows the latest use below it.
        let mut latest_below = vec![0; order.len()];
        let place_of: std::collections::BTreeMap<u32, usize> = order
            .iter()
            .enumerate()
            .map(|(at, &(node, _))| (node, at))
            .collect();
        let mut sum = 0u64;
        for (at, &(node, above)) in order.iter().enumerate().rev() {
            let edge = &self.nodes[node];
            let mut path = above;
            for depth in edge.depth..edge.end() {
                path = self.path_digest(path, node, depth);
                let payload = edge.payload(depth);
                let mut entry = DefaultHasher::new();
                (
                    path,
                    payload.id,
                    payload.label.is_exact(),
                    payload.label.hops(),
                )
                    .hash(&mut entry);
                if payload.is_present() {
                    edge.last_use(depth).max(latest_below[at]).hash(&mut entry);
                    for run in self.tags_of_block(node, depth) {
                        (run.start, run.end, run.mask).hash(&mut entry);
                    }
                }
                sum = sum.wrapping_add(entry.finish());
            }
            if let Some(&parent) = place_of.get(&edge.parent) {
                latest_below[parent] = latest_below[parent]
                    .max(latest_below[at])
                    .max(edge.uses.latest());
            }
        }
        sum
    }

    /// The digest of a path that is one block longer.
    fn path_digest(&self, above: u64, node: u32, depth: u32) -> u64 {
        let (start, end) = self.tokens_of(depth);
        let block = self.nodes[node].view(self.block_size()).slice(start, end);
        let mut hasher = DefaultHasher::new();
        above.hash(&mut hasher);
        block.tokens.hash(&mut hasher);
        for item in block.item_starts() {
            item.hash(&mut hasher);
        }
        hasher.finish()
    }
}
