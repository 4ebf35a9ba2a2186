//! Follows a prompt along cached tokens, forwards and backwards, as far as the two are equal.

use smallvec::SmallVec;

use crate::ids::{Depth, NodeIndex};
use crate::plan::budget::CHOICE;
use crate::plan::path::CachedPath;
use crate::plan::scope::InScope;
use crate::plan::usable::{Kinship, Usable};
use crate::storage::forest::Forest;
use crate::storage::node::Node;
use crate::tokens::View;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) node: NodeIndex,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Pieces of consecutive edges, from top to bottom.
pub(super) type Pieces = SmallVec<[Piece; 2]>;

/// Number of tokens compared first. It doubles while they are equal.
const FEW: usize = 256;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Followed {
    pub(super) end: usize,
    /// Number of children that might continue further and were not compared.
    pub(super) skipped: u64,
    /// Number of children compared.
    pub(super) looks: u64,
    /// Number of tokens compared.
    pub(super) compared: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Follower<'a> {
    pub(super) forest: &'a Forest,
    /// The prompt without the tokens that are always computed.
    pub(super) prompt: View<'a>,
    /// Number of the prompt's tokens that moved runs may supply.
    pub(super) moved_len: usize,
    /// If set, moved runs come only from blocks in this scope.
    pub(super) scope: Option<&'a InScope<'a>>,
    /// If set, only this path may be followed.
    pub(super) path: Option<&'a CachedPath>,
    pub(super) usable: Usable,
    /// The most children compared where none continues with a whole block.
    pub(super) max_children: usize,
}

impl<'a> Follower<'a> {
    fn end_of(&self, node: NodeIndex, edge: &Node) -> Depth {
        let restricted = self.path.and_then(|path| path.end_in(node, edge.depth));
        restricted.unwrap_or(edge.end())
    }

    /// The tokens of the prompt that runs of this kind may supply.
    pub(super) fn wanted(&self, kinship: Kinship) -> View<'a> {
        match kinship {
            Kinship::Own => self.prompt,
            Kinship::Moved => self.prompt.slice(0, self.moved_len),
        }
    }

    /// The first position in `at..limit` of an edge whose token may not be used.
    fn end(
        &self,
        kinship: Kinship,
        node: NodeIndex,
        edge: &Node,
        at: usize,
        limit: usize,
    ) -> usize {
        let limit = match (kinship, self.scope) {
            (Kinship::Moved, Some(scope)) => scope.end(node, at, limit),
            _ => limit,
        };
        self.usable.end(kinship, edge, at, limit)
    }

    /// Follows the prompt from token `at` and position `from` of an edge downwards. A run that ends before `least` is
    /// of no use: a child that shares part of a block is followed only if it reaches `least`.
    pub(super) fn down(
        &self,
        kinship: Kinship,
        mut node: NodeIndex,
        mut from: usize,
        mut at: usize,
        least: impl Fn() -> usize,
        path: &mut Pieces,
    ) -> Followed {
        let block_size = self.forest.block_size();
        let prompt = self.wanted(kinship);
        let len = prompt.tokens.len();
        let begin = at;
        let mut done = Followed::default();
        loop {
            let edge = self.forest.node(node);
            let (start, end) = (from, self.end_of(node, edge) as usize * block_size);
            // Usability is checked only a little ahead, because the tokens may differ soon.
            let mut ahead = FEW;
            while from < end && at < len {
                let wanted = ahead.min(end - from).min(len - at);
                let until = self.end(kinship, node, edge, from, from + wanted);
                let known = edge.view(block_size).slice(from, until);
                let same = known.common(prompt.slice(at, at + until - from));
                (from, at) = (from + same, at + same);
                if same < wanted {
                    break;
                }
                ahead *= 2;
            }
            if start < from {
                path.push(Piece {
                    node,
                    start,
                    end: from,
                });
            }
            let child = if from < end || at == len {
                None
            } else {
                self.child(kinship, node, at, &least, &mut done)
            };
            let Some(child) = child else {
                done.end = at;
                done.compared = at - begin;
                return done;
            };
            node = child;
        }
    }

    /// The child that continues with a whole block of equal tokens, or else with most of them, if that reaches `least`.
    /// Of several, the one with the fewest hops, then with the lowest block id.
    fn child(
        &self,
        kinship: Kinship,
        parent: NodeIndex,
        at: usize,
        least: impl Fn() -> usize,
        done: &mut Followed,
    ) -> Option<NodeIndex> {
        let (forest, block_size) = (self.forest, self.forest.block_size());
        if let Some(path) = self.path {
            done.looks += 1;
            return path
                .edge_at(forest.node(parent).end())
                .map(|(child, _)| child);
        }
        if !forest.node(parent).has_children() {
            return None;
        }
        done.looks += 1;
        if let Some(only) = forest.only_child(parent) {
            return Some(only);
        }
        done.looks += CHOICE;
        let base = forest.node(parent).end() as usize * block_size;
        let prompt = self.wanted(kinship);
        let until = prompt.tokens.len().min(at + block_size);
        let wanted = prompt.slice(at, until);
        if until == at + block_size
            && let Some(child) = forest.child(parent, wanted)
            && self.end(kinship, child, forest.node(child), base, base + block_size)
                == base + block_size
        {
            return Some(child);
        }
        let least = least().saturating_sub(at).max(1);
        let mut best: Option<(usize, u16, u32, NodeIndex)> = None;
        for exact in [true, false] {
            let children = forest.most_similar_children(parent, exact, wanted);
            for (looked_at, (child, shared)) in children.enumerate() {
                done.looks += 1;
                if shared < best.map_or(least, |(most, ..)| most) {
                    break;
                }
                if looked_at >= self.max_children {
                    // Of more children, only those next to the prompt in sort order are compared.
                    done.skipped += u64::from(best.is_none_or(|(most, ..)| shared > most));
                    break;
                }
                let edge = forest.node(child);
                let shared = self.end(kinship, child, edge, base, base + shared) - base;
                let (id, hops) = (
                    edge.id(edge.depth, block_size),
                    Usable::becomes(kinship, edge.payload(edge.depth, block_size).label).1,
                );
                let is_better = best.is_none_or(|(most, least_hops, least_id, _)| {
                    shared > most || shared == most && (hops, id) < (least_hops, least_id)
                });
                if shared > 0 && is_better {
                    best = Some((shared, hops, id, child));
                }
            }
        }
        best.map(|(.., child)| child)
    }

    /// Follows the prompt upwards from before token `at` and position `from` of an edge, down to token `enough` of the
    /// prompt at most. Returns where the common tokens begin.
    pub(super) fn up(
        &self,
        mut node: NodeIndex,
        mut from: usize,
        mut at: usize,
        enough: usize,
        path: &mut Pieces,
    ) -> usize {
        let block_size = self.forest.block_size();
        // Filled from the last piece to the first.
        let mut above = Pieces::new();
        while at > enough {
            let edge = self.forest.node(node);
            let start = edge.depth as usize * block_size;
            if from == start {
                if edge.is_root() {
                    break;
                }
                node = edge.parent;
                continue;
            }
            let limit = start.max(from.saturating_sub(at - enough));
            let limit = self
                .scope
                .map_or(limit, |scope| scope.start(node, from, limit));
            let usable = self.usable.start(edge, from, limit);
            let known = edge.view(block_size).slice(usable, from);
            let same = known.common_end(self.prompt.slice(enough, at));
            if same > 0 {
                match path.first_mut() {
                    Some(first) if first.node == node => first.start -= same,
                    _ => above.push(Piece {
                        node,
                        start: from - same,
                        end: from,
                    }),
                }
            }
            (from, at) = (from - same, at - same);
            if from > start {
                break;
            }
        }
        above.reverse();
        path.insert_many(0, above);
        at
    }
}
