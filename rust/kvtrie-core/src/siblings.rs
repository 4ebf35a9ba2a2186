//! Siblings in token order: which child of a node shares most tokens with a block that none of them equals?
//!
//! A treap threaded through the node records, with the edge hash as priority. It holds the children whose first block
//! is present and exact, for only such a block may be copied as exact. Expected O(log n) comparisons of one block.

use std::cmp::Ordering;

use crate::ids::{NO_NODE, NodeIndex};
use crate::node::Node;
use crate::slab::Slab;
use crate::tokens::View;

/// Where a link of the treap is stored.
#[derive(Clone, Copy)]
enum Link {
    Root(NodeIndex),
    Left(NodeIndex),
    Right(NodeIndex),
}

fn get(nodes: &Slab<Node>, link: Link) -> NodeIndex {
    match link {
        Link::Root(parent) => nodes[parent].sorted_root,
        Link::Left(node) => nodes[node].sorted_left,
        Link::Right(node) => nodes[node].sorted_right,
    }
}

fn set(nodes: &mut Slab<Node>, link: Link, to: NodeIndex) {
    match link {
        Link::Root(parent) => nodes[parent].sorted_root = to,
        Link::Left(node) => nodes[node].sorted_left = to,
        Link::Right(node) => nodes[node].sorted_right = to,
    }
}

/// How the first block of `a` sorts against that of its sibling `b`.
fn order(nodes: &Slab<Node>, block_size: usize, a: NodeIndex, b: NodeIndex) -> Ordering {
    nodes[a]
        .first_block(block_size)
        .order(nodes[b].first_block(block_size))
}

/// Adds `node` to the sorted children of its parent.
pub(crate) fn insert(nodes: &mut Slab<Node>, block_size: usize, node: NodeIndex) {
    let mut link = Link::Root(nodes[node].parent);
    let mut at = get(nodes, link);
    while at != NO_NODE && nodes[at].hash >= nodes[node].hash {
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

/// Takes `node` out of the sorted children of its parent, if it is among them.
pub(crate) fn remove(nodes: &mut Slab<Node>, block_size: usize, node: NodeIndex) {
    let Some(mut link) = find(nodes, block_size, node, node) else {
        return;
    };
    let (mut left, mut right) = (nodes[node].sorted_left, nodes[node].sorted_right);
    while left != NO_NODE && right != NO_NODE {
        if nodes[left].hash >= nodes[right].hash {
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
    nodes[node].sorted_left = NO_NODE;
    nodes[node].sorted_right = NO_NODE;
}

/// Puts `new` in the place of `old`, if that is among the sorted children. The first block, the parent and the hash of
/// `new` are those that `old` was added with; `old` may have changed since.
pub(crate) fn replace(nodes: &mut Slab<Node>, block_size: usize, old: NodeIndex, new: NodeIndex) {
    let Some(link) = find(nodes, block_size, new, old) else {
        return;
    };
    set(nodes, link, new);
    nodes[new].sorted_left = nodes[old].sorted_left;
    nodes[new].sorted_right = nodes[old].sorted_right;
    nodes[old].sorted_left = NO_NODE;
    nodes[old].sorted_right = NO_NODE;
}

/// The link to `wanted`, on the way that the first block of `like` leads.
fn find(nodes: &Slab<Node>, block_size: usize, like: NodeIndex, wanted: NodeIndex) -> Option<Link> {
    let mut link = Link::Root(nodes[like].parent);
    loop {
        let at = get(nodes, link);
        if at == wanted {
            return Some(link);
        }
        if at == NO_NODE {
            return None;
        }
        link = match order(nodes, block_size, like, at) {
            Ordering::Less => Link::Left(at),
            Ordering::Greater => Link::Right(at),
            Ordering::Equal => return None,
        };
    }
}

/// The sorted child of `parent` that shares most tokens with `wanted` (at most one block, at the children's depth), and
/// how many; of several, the one whose tokens sort first.
pub(crate) fn nearest(
    nodes: &Slab<Node>,
    block_size: usize,
    parent: NodeIndex,
    wanted: View<'_>,
) -> Option<(NodeIndex, usize)> {
    let mut most = 0;
    let mut at = nodes[parent].sorted_root;
    while at != NO_NODE {
        let first = nodes[at].first_block(block_size);
        most = most.max(wanted.common(first));
        at = match wanted.order(first) {
            Ordering::Greater => nodes[at].sorted_right,
            _ => nodes[at].sorted_left,
        };
    }
    if most == 0 {
        return None;
    }
    let shared = wanted.slice(wanted.base, wanted.base + most);
    let mut found = None;
    at = nodes[parent].sorted_root;
    while at != NO_NODE {
        if nodes[at].first_block(block_size).order(shared) == Ordering::Less {
            at = nodes[at].sorted_right;
        } else {
            found = Some((at, most));
            at = nodes[at].sorted_left;
        }
    }
    found
}

/// Every sorted child of `parent`, in no particular order.
pub(crate) fn all(nodes: &Slab<Node>, parent: NodeIndex) -> Vec<NodeIndex> {
    let mut found = Vec::new();
    let mut open = vec![nodes[parent].sorted_root];
    while let Some(at) = open.pop() {
        if at != NO_NODE {
            found.push(at);
            open.extend([nodes[at].sorted_left, nodes[at].sorted_right]);
        }
    }
    found
}

/// Whether the way by token order leads to `node` from its parent's root.
pub(crate) fn contains(nodes: &Slab<Node>, block_size: usize, node: NodeIndex) -> bool {
    find(nodes, block_size, node, node).is_some()
}
