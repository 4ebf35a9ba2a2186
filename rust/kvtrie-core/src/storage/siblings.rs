//! The children of a node in token order, to find the child that shares most tokens with a block.
//!
//! They form a treap in the node records, with seeded priorities. Children with a present and exact first block come
//! first: only these may be copied as exact. A call makes expected O(log n) comparisons, of the first token where it
//! differs, else of a block. Removal compares nothing.

use std::cmp::Ordering;

use crate::ids::{NO_NODE, NodeIndex};
use crate::storage::arena::Arena;
use crate::storage::node::Node;
use crate::tokens::View;

#[derive(Clone, Copy)]
enum Link {
    Root(NodeIndex),
    Left(NodeIndex),
    Right(NodeIndex),
}

fn get(nodes: &Arena, link: Link) -> NodeIndex {
    match link {
        Link::Root(parent) => nodes[parent].first_child(),
        Link::Left(node) => nodes[node].left,
        Link::Right(node) => nodes[node].right,
    }
}

fn set(nodes: &mut Arena, link: Link, to: NodeIndex) {
    let up = match link {
        Link::Root(parent) => {
            nodes[parent].set_first_child(to);
            NO_NODE
        }
        Link::Left(node) => {
            nodes[node].left = to;
            node
        }
        Link::Right(node) => {
            nodes[node].right = to;
            node
        }
    };
    if to != NO_NODE {
        nodes[to].up = up;
    }
}

fn link_to(nodes: &Arena, node: NodeIndex) -> Link {
    let up = nodes[node].up;
    if up == NO_NODE {
        Link::Root(nodes[node].parent)
    } else if nodes[up].left == node {
        Link::Left(up)
    } else {
        Link::Right(up)
    }
}

fn order(nodes: &Arena, block_size: usize, a: NodeIndex, b: NodeIndex) -> Ordering {
    let (a, b) = (&nodes[a], &nodes[b]);
    b.starts_exact(block_size)
        .cmp(&a.starts_exact(block_size))
        .then(a.first.cmp(&b.first))
        .then_with(|| a.first_block(block_size).order(b.first_block(block_size)))
}

/// How many tokens `wanted` shares with the node's first block, and how the two are ordered.
fn compare(wanted: View<'_>, node: &Node, block_size: usize) -> (usize, Ordering) {
    if let Some(first) = wanted.tokens.first()
        && *first != node.first
    {
        return (0, first.cmp(&node.first));
    }
    let first = node.first_block(block_size);
    (wanted.common(first), wanted.order(first))
}

/// Adds a node to the treap of its parent, which must not be in the eviction order.
pub(crate) fn insert(nodes: &mut Arena, block_size: usize, node: NodeIndex) {
    let mut link = Link::Root(nodes[node].parent);
    let mut at = get(nodes, link);
    while at != NO_NODE && nodes.priority(at) >= nodes.priority(node) {
        link = match order(nodes, block_size, node, at) {
            Ordering::Less => Link::Left(at),
            _ => Link::Right(at),
        };
        at = get(nodes, link);
    }
    set(nodes, link, node);
    let (mut smaller, mut larger) = (Link::Left(node), Link::Right(node));
    while at != NO_NODE {
        if order(nodes, block_size, at, node) == Ordering::Less {
            set(nodes, smaller, at);
            smaller = Link::Right(at);
            at = get(nodes, smaller);
        } else {
            set(nodes, larger, at);
            larger = Link::Left(at);
            at = get(nodes, larger);
        }
    }
    set(nodes, smaller, NO_NODE);
    set(nodes, larger, NO_NODE);
}

pub(crate) fn remove(nodes: &mut Arena, node: NodeIndex) {
    let mut link = link_to(nodes, node);
    let (mut left, mut right) = (nodes[node].left, nodes[node].right);
    while left != NO_NODE && right != NO_NODE {
        if nodes.priority(left) >= nodes.priority(right) {
            set(nodes, link, left);
            link = Link::Right(left);
            left = get(nodes, link);
        } else {
            set(nodes, link, right);
            link = Link::Left(right);
            right = get(nodes, link);
        }
    }
    set(nodes, link, if left == NO_NODE { right } else { left });
    nodes[node].left = NO_NODE;
    nodes[node].right = NO_NODE;
    nodes[node].up = NO_NODE;
}

pub(crate) fn only(nodes: &Arena, parent: NodeIndex) -> Option<NodeIndex> {
    let child = nodes[parent].first_child();
    (child != NO_NODE && nodes[child].left == NO_NODE && nodes[child].right == NO_NODE)
        .then_some(child)
}

/// Finds the exact child whose first block is `wanted`, if it is near the treap's root: reading a few records is faster
/// than a hash table. Among many siblings it is hardly ever there, and records that are in no cache are read for
/// nothing. That there are many is seen from the priority of the root, which is the largest of all.
pub(crate) fn at_top(
    nodes: &Arena,
    block_size: usize,
    parent: NodeIndex,
    wanted: View<'_>,
) -> Option<NodeIndex> {
    const FEW: usize = 3;
    /// The largest priority of 64 siblings is above this in 63 of 100 cases, that of 1,000 always but for one in 10⁷.
    const OF_MANY: u64 = u64::MAX - u64::MAX / 64;
    let mut at = nodes[parent].first_child();
    if nodes.priority(at) > OF_MANY {
        return None;
    }
    for _ in 0..FEW {
        if at == NO_NODE {
            return None;
        }
        let order = if nodes[at].starts_exact(block_size) {
            compare(wanted, &nodes[at], block_size).1
        } else {
            Ordering::Less
        };
        at = match order {
            Ordering::Equal => return Some(at),
            Ordering::Less => nodes[at].left,
            Ordering::Greater => nodes[at].right,
        };
    }
    None
}

/// Finds the exact child that shares most tokens with `wanted` (at most one block, at the children's depth), and their
/// number. Of several, the first in token order is returned.
pub(crate) fn nearest(
    nodes: &Arena,
    block_size: usize,
    parent: NodeIndex,
    wanted: View<'_>,
) -> Option<(NodeIndex, usize)> {
    let exact = |at: NodeIndex| nodes[at].starts_exact(block_size);
    let mut most = 0;
    let mut at = nodes[parent].first_child();
    while at != NO_NODE {
        at = if exact(at) {
            let (shared, order) = compare(wanted, &nodes[at], block_size);
            most = most.max(shared);
            match order {
                Ordering::Greater => nodes[at].right,
                _ => nodes[at].left,
            }
        } else {
            nodes[at].left
        };
    }
    if most == 0 {
        return None;
    }
    let shared = wanted.slice(wanted.base, wanted.base + most);
    let mut found = None;
    at = nodes[parent].first_child();
    while at != NO_NODE {
        let sorts_before = || compare(shared, &nodes[at], block_size).1 == Ordering::Greater;
        if exact(at) && sorts_before() {
            at = nodes[at].right;
        } else {
            found = exact(at).then_some((at, most)).or(found);
            at = nodes[at].left;
        }
    }
    found
}

/// The children whose first block is exact (or not, as `exact` says), with the number of tokens that each shares with
/// `wanted` (at most one block). Most tokens come first; ties have no useful order.
pub(crate) fn most_similar<'a>(
    nodes: &'a Arena,
    block_size: usize,
    parent: NodeIndex,
    exact: bool,
    wanted: View<'a>,
) -> impl Iterator<Item = (NodeIndex, usize)> + 'a {
    let (mut left, mut right) = (NO_NODE, NO_NODE);
    let mut at = nodes[parent].first_child();
    while at != NO_NODE {
        // Exact children sort before the others.
        let sorts_before = match nodes[at].starts_exact(block_size) {
            here if here != exact => here,
            _ => compare(wanted, &nodes[at], block_size).1 == Ordering::Greater,
        };
        at = if sorts_before {
            left = at;
            nodes[at].right
        } else {
            right = at;
            nodes[at].left
        };
    }
    let shared = move |node: NodeIndex| {
        (node != NO_NODE && nodes[node].starts_exact(block_size) == exact)
            .then(|| (node, compare(wanted, &nodes[node], block_size).0))
    };
    let mut sides = [shared(left), shared(right)];
    std::iter::from_fn(move || {
        let of = |side: Option<(NodeIndex, usize)>| side.map(|(_, tokens)| tokens);
        let side = usize::from(of(sides[1]) > of(sides[0]));
        let found = sides[side]?;
        sides[side] = shared(adjacent(nodes, found.0, side == 1));
        Some(found)
    })
}

fn adjacent(nodes: &Arena, node: NodeIndex, forward: bool) -> NodeIndex {
    let towards = |at: NodeIndex, forward: bool| {
        if forward {
            nodes[at].right
        } else {
            nodes[at].left
        }
    };
    let mut at = towards(node, forward);
    if at != NO_NODE {
        while towards(at, !forward) != NO_NODE {
            at = towards(at, !forward);
        }
        return at;
    }
    let mut below = node;
    at = nodes[node].up;
    while at != NO_NODE && towards(at, forward) == below {
        below = at;
        at = nodes[at].up;
    }
    at
}

/// All children, sorted by index so that a pass reads memory in order.
pub(crate) fn all(nodes: &Arena, parent: NodeIndex) -> Vec<NodeIndex> {
    let mut found = Vec::new();
    let mut open = vec![nodes[parent].first_child()];
    while let Some(at) = open.pop() {
        if at != NO_NODE {
            found.push(at);
            open.extend([nodes[at].left, nodes[at].right]);
        }
    }
    found.sort_unstable();
    found
}

pub(crate) fn check(nodes: &Arena, block_size: usize, parent: NodeIndex) -> bool {
    let all = all(nodes, parent);
    let linked = all
        .iter()
        .all(|&node| get(nodes, link_to(nodes, node)) == node);
    let heap = all.iter().all(|&node| {
        let up = nodes[node].up;
        up == NO_NODE || nodes.priority(up) >= nodes.priority(node)
    });
    // If a search from the root finds the node, it is in order with all nodes on the way.
    let ordered = all.iter().all(|&node| {
        let mut at = nodes[parent].first_child();
        while at != NO_NODE && at != node {
            at = match order(nodes, block_size, node, at) {
                Ordering::Less => nodes[at].left,
                _ => nodes[at].right,
            };
        }
        at == node
    });
    linked && heap && ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of a node's children are found near the root of their treap.
    fn found_at_top(num_children: u32, seed: u64) -> usize {
        let mut nodes = Arena::new(seed);
        let parent = nodes.insert(Node::new(0, NO_NODE, 0));
        for token in 0..num_children {
            let mut node = Node::new(0, parent, 0);
            node.first = token;
            node.blocks.extend(&[token], std::iter::once(token), 1);
            let child = nodes.insert(node);
            insert(&mut nodes, 1, child);
        }
        all(&nodes, parent)
            .into_iter()
            .filter(|&child| {
                let wanted = nodes[child].first_block(1);
                at_top(&nodes, 1, parent, wanted) == Some(child)
            })
            .count()
    }

    #[test]
    fn of_two_children_both_are_at_the_top_and_of_many_none_is_looked_for_there() {
        let seeds = 0..64;
        let both = seeds
            .clone()
            .filter(|&seed| found_at_top(2, seed) == 2)
            .count();
        assert!(both >= 58, "with {both} seeds of 64");
        assert!(seeds.into_iter().all(|seed| found_at_top(2000, seed) == 0));
    }
}
