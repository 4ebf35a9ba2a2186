//! The nodes of the forest, by index, in pages. A page never moves, so no node is copied when the index grows, and the
//! only slack is the unused part of the last page.

use crate::ids::{NO_NODE, NodeHandle, NodeIndex};
use crate::storage::node::Node;

const PAGE: usize = 128;

/// Vacant places form a linked list, so that they are used again.
#[derive(Debug)]
pub(crate) struct Arena {
    pages: Vec<Box<[Node; PAGE]>>,
    vacant: NodeIndex,
    len: usize,
    seed: u64,
}

impl Arena {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            pages: Vec::new(),
            vacant: NO_NODE,
            len: 0,
            seed,
        }
    }

    /// The node's priority in the treap of siblings. It cannot be predicted without the seed.
    pub(crate) fn priority(&self, index: NodeIndex) -> u64 {
        let mixed = (u64::from(index) ^ self.seed).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 29 ^ self.seed).wrapping_mul(0x94d0_49bb_1331_11eb)
    }

    pub(crate) fn insert(&mut self, mut node: Node) -> NodeIndex {
        if self.vacant == NO_NODE {
            self.add_page();
        }
        let index = self.vacant;
        let place = &mut self[index];
        node.generation = place.generation;
        let next = place.next_vacant();
        *place = node;
        self.vacant = next;
        self.len += 1;
        index
    }

    fn add_page(&mut self) {
        let from = crate::ids::depth(self.pages.len() * PAGE);
        // The list of vacant places is built so that lower indices are used first.
        self.pages.push(Box::new(std::array::from_fn(|at| {
            let next = crate::ids::depth(at + 1);
            Node::vacant(0, if at + 1 < PAGE { from + next } else { NO_NODE })
        })));
        self.vacant = from;
    }

    pub(crate) fn remove(&mut self, index: NodeIndex) -> Node {
        let next = self.vacant;
        let place = &mut self[index];
        let generation = place.generation.wrapping_add(1);
        let node = std::mem::replace(place, Node::vacant(generation, next));
        self.vacant = index;
        self.len -= 1;
        node
    }

    pub(crate) fn renew(&mut self, index: NodeIndex) {
        let node = &mut self[index];
        node.generation = node.generation.wrapping_add(1);
    }

    pub(crate) fn handle(&self, index: NodeIndex) -> NodeHandle {
        NodeHandle {
            index,
            generation: self[index].generation,
        }
    }

    pub(crate) fn knows(&self, handle: NodeHandle) -> bool {
        self[handle.index].generation == handle.generation
    }

    /// Calls `step` for `from` and the nodes above, until it returns false. A page is looked up once for consecutive
    /// nodes in it.
    pub(crate) fn climb(&mut self, from: NodeIndex, mut step: impl FnMut(&mut Node) -> bool) {
        let mut at = from;
        while at != NO_NODE {
            let number = at as usize / PAGE;
            let page = &mut self.pages[number];
            while at as usize / PAGE == number {
                let node = &mut page[at as usize % PAGE];
                if !step(node) {
                    return;
                }
                at = node.parent;
            }
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Node> {
        self.pages
            .iter()
            .flat_map(|page| page.iter())
            .filter(|node| !node.is_vacant())
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Box<[Node; PAGE]>>()
            + self.pages.len() * PAGE * size_of::<Node>()
    }
}

impl std::ops::Index<NodeIndex> for Arena {
    type Output = Node;

    fn index(&self, index: NodeIndex) -> &Node {
        &self.pages[index as usize / PAGE][index as usize % PAGE]
    }
}

impl std::ops::IndexMut<NodeIndex> for Arena {
    fn index_mut(&mut self, index: NodeIndex) -> &mut Node {
        &mut self.pages[index as usize / PAGE][index as usize % PAGE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_stale_once_its_node_has_gone_even_if_the_place_is_used_again() {
        let mut nodes = Arena::new(7);
        let index = nodes.insert(Node::new(0, NO_NODE, 0));
        let handle = nodes.handle(index);
        assert!(nodes.knows(handle));
        nodes.remove(index);
        assert!(!nodes.knows(handle));
        assert_eq!(nodes.insert(Node::new(0, NO_NODE, 0)), index);
        assert!(!nodes.knows(handle));
        assert_eq!(nodes.len(), 1);
    }

    #[test]
    fn a_handle_is_stale_once_renewed() {
        let mut nodes = Arena::new(7);
        let index = nodes.insert(Node::new(0, NO_NODE, 0));
        let handle = nodes.handle(index);
        nodes.renew(index);
        assert!(!nodes.knows(handle) && nodes.knows(nodes.handle(index)));
    }

    #[test]
    fn every_place_of_every_page_is_used_once() {
        let mut nodes = Arena::new(7);
        let all: Vec<u32> = (0..600)
            .map(|_| nodes.insert(Node::new(0, NO_NODE, 0)))
            .collect();
        assert_eq!(all, (0..600).collect::<Vec<u32>>());
        assert_eq!((nodes.iter().count(), nodes.len()), (600, 600));
    }

    #[test]
    fn a_node_takes_80_bytes() {
        assert_eq!(size_of::<Node>(), 80);
    }
}
