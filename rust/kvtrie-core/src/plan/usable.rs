//! What a policy allows a plan to use: which blocks, which tokens, and with how many hops.

use crate::grade::Grade;
use crate::ids::Depth;
use crate::plan::Class;
use crate::plan::cached::Cached;
use crate::policy::ReusePolicy;
use crate::storage::node::Node;
use crate::storage::payload::{Label, Payload};

/// Whether cached KV is at the prompt's own prefix and position, or moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kinship {
    /// The same whole prefix and position: exact KV stays exact, and no hop is added.
    Own,
    /// Another prefix or position: the copy is approximate and has one hop more.
    Moved,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Usable {
    pub(super) approximate: bool,
    max_hops: u16,
    /// Numbers of the grades that are strict enough, as a bit set.
    grades: u128,
    /// Kinds that may not be reused approximately, as a bit set.
    forbidden: u64,
    block_size: usize,
}

impl Usable {
    /// What a policy allows in a tree, of approximate blocks at least as strict as `asked`.
    pub(super) fn new(cached: &Cached<'_>, policy: &ReusePolicy, asked: &Grade, tree: u32) -> Self {
        Self {
            grades: cached.forest.trees()[tree].grades.usable(asked),
            approximate: policy.approximate,
            max_hops: policy.max_hops,
            forbidden: cached.tagging.kinds().mask(&policy.forbid_kinds),
            block_size: cached.forest.block_size(),
        }
    }

    pub(super) fn exact_only(self) -> Self {
        Self {
            approximate: false,
            ..self
        }
    }

    pub(super) fn moves(&self) -> bool {
        self.approximate && self.max_hops > 0
    }

    /// Whether a block of the prompt's own prefix may have tokens that may be used and others that may not.
    pub(super) fn splits_blocks(&self) -> bool {
        self.approximate && self.forbidden != 0
    }

    pub(super) fn becomes(kinship: Kinship, label: Label) -> (Class, u16) {
        match kinship {
            Kinship::Own if label.is_exact() => (Class::Exact, 0),
            Kinship::Own => (Class::Approximate, label.hops()),
            Kinship::Moved => (Class::Approximate, label.hops().saturating_add(1)),
        }
    }

    /// Whether a block may be used, as far as its label decides. Its kinds are not checked.
    fn block(&self, kinship: Kinship, payload: Payload) -> bool {
        let is_strict = payload.label.is_exact() || self.grades >> payload.label.grade() & 1 == 1;
        payload.is_present()
            && is_strict
            && match Self::becomes(kinship, payload.label) {
                (Class::Approximate, hops) => self.approximate && hops <= self.max_hops,
                _ => true,
            }
    }

    /// Whether a block may be used in place: it is exact, or the policy allows all of it.
    pub(super) fn in_place(&self, node: &Node, depth: Depth) -> bool {
        let payload = node.payload(depth, self.block_size);
        let (start, end) = (
            depth as usize * self.block_size,
            (depth as usize + 1) * self.block_size,
        );
        let forbidden = || {
            let tags = node
                .extras()
                .map_or(0, |extras| extras.tags.union(start, end));
            tags & self.forbidden != 0
        };
        self.block(Kinship::Own, payload) && (payload.is_exact() || !forbidden())
    }

    /// The first position in `at..limit` whose token may not be used.
    pub(super) fn end(&self, kinship: Kinship, node: &Node, at: usize, limit: usize) -> usize {
        if !has_other_blocks(node) {
            // Exact KV of the own path may be used whatever its kinds are.
            let first = (kinship == Kinship::Moved).then(|| self.tagged(node, at, limit).next());
            return first.flatten().map_or(limit, |(start, _)| start);
        }
        let block_size = self.block_size;
        let mut from = at;
        while from < limit {
            let depth = from / block_size;
            let to = limit.min((depth + 1) * block_size);
            let payload = node.payload(crate::ids::depth(depth), block_size);
            if !self.block(kinship, payload) {
                return from;
            }
            if !(kinship == Kinship::Own && payload.is_exact())
                && let Some((start, _)) = self.tagged(node, from, to).next()
            {
                return start;
            }
            from = to;
        }
        limit
    }

    /// The first position from `limit` on such that every token from there to `at` may be moved.
    pub(super) fn start(&self, node: &Node, at: usize, limit: usize) -> usize {
        if !has_other_blocks(node) {
            let last = self.tagged(node, limit, at).next_back();
            return last.map_or(limit, |(_, end)| end);
        }
        let block_size = self.block_size;
        let mut to = at;
        while to > limit {
            let depth = (to - 1) / block_size;
            let from = limit.max(depth * block_size);
            let payload = node.payload(crate::ids::depth(depth), block_size);
            if !self.block(Kinship::Moved, payload) {
                return to;
            }
            if let Some((_, end)) = self.tagged(node, from, to).next_back() {
                return end;
            }
            to = from;
        }
        limit
    }

    /// The next position at which usability may change.
    pub(super) fn skip(&self, kinship: Kinship, node: &Node, at: usize) -> usize {
        let depth = crate::ids::depth(at / self.block_size);
        let end = (at / self.block_size + 1) * self.block_size;
        if self.block(kinship, node.payload(depth, self.block_size)) {
            // The block may be used, so the token was refused for its kind.
            let tagged = self.tagged(node, at, end).next();
            tagged.map_or(at + 1, |(_, end)| end)
        } else {
            end
        }
    }

    fn tagged(
        &self,
        node: &Node,
        start: usize,
        end: usize,
    ) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        let tags = node.extras().filter(|_| self.forbidden != 0);
        tags.into_iter()
            .flat_map(move |extras| extras.tags.with(start, end, self.forbidden))
    }
}

/// Whether an edge has holes or approximate blocks. Its blocks are then checked one by one.
fn has_other_blocks(node: &Node) -> bool {
    node.num_holes() > 0 || node.num_approximate() > 0
}
