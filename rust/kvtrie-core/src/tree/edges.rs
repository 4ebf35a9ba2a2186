//! Edges come, grow, are cut in two and go.

use crate::ids::{Depth, NO_NODE, NodeIndex, depth};
use crate::node::{Node, Payload};
use crate::siblings;
use crate::tokens::{Item, View};
use crate::tree::RadixIndex;

impl RadixIndex {
    /// Hangs a new edge below `parent`, whose blocks are taken from `tokens` at `from` on.
    pub(super) fn attach(
        &mut self,
        parent: NodeIndex,
        tokens: View<'_>,
        from: Depth,
        payloads: &[Payload],
    ) -> NodeIndex {
        let tree = self.nodes[parent].namespace;
        let child = self.nodes.insert(Node::new(tree, parent, from));
        self.append(child, tokens, payloads);
        let old = self.nodes[parent].first_child;
        if old != NO_NODE {
            self.nodes[old].previous = child;
        }
        self.nodes[child].next = old;
        self.nodes[parent].first_child = child;
        self.nodes[parent].num_children += 1;
        self.nodes[child].hash = self.hasher.edge(
            parent,
            self.nodes[child].first_block(self.config.block_size),
        );
        self.add_edge(child);
        if payloads[0].is_exact() {
            siblings::insert(&mut self.nodes, self.config.block_size, child);
        }
        self.requeue(parent);
        child
    }

    /// Lengthens an edge without children.
    pub(super) fn append(&mut self, node: NodeIndex, tokens: View<'_>, payloads: &[Payload]) {
        let block_size = self.config.block_size;
        let edge = &mut self.nodes[node];
        let from = edge.end();
        let (start, end) = (
            from as usize * block_size,
            (from as usize + payloads.len()) * block_size,
        );
        edge.run.extend(tokens.slice(start, end).tokens, payloads);
        for item in Item::within(tokens.items, start, end) {
            let items = &mut edge.extras_mut().items;
            // An item that reaches across the old end was cut there.
            if items
                .last()
                .is_some_and(|last| last.start() == item.start())
            {
                items.pop();
            }
            items.push(item);
        }
        let mut approximate = 0;
        for (at, payload) in payloads.iter().enumerate() {
            self.blocks.set_indexed(payload.id, node, from + depth(at));
            approximate += u32::from(!payload.label.is_exact());
        }
        edge.num_approximate += approximate;
        self.num_approximate += u64::from(approximate);
        self.num_indexed += payloads.len() as u64;
    }

    fn add_edge(&mut self, node: NodeIndex) {
        let nodes = &self.nodes;
        self.edges
            .insert_unique(nodes[node].hash, node, |&node| nodes[node].hash);
    }

    pub(super) fn remove_edge(&mut self, node: NodeIndex) {
        if let Ok(entry) = self
            .edges
            .find_entry(self.nodes[node].hash, |&known| known == node)
        {
            entry.remove();
        }
    }

    /// Cuts an edge in two at depth `at`, inside it. The lower part keeps the record and the children.
    pub(super) fn split(&mut self, tail: NodeIndex, at: Depth) -> NodeIndex {
        let block_size = self.config.block_size;
        let cut = at as usize * block_size;
        let node = &mut self.nodes[tail];
        let mut front = Node::new(node.namespace, node.parent, node.depth);
        front.run = node.run.split_front((at - node.depth) as usize, block_size);
        front.uses = node.uses.split_front(at);
        front.hash = node.hash;
        front.next = node.next;
        front.previous = node.previous;
        front.num_children = 1;
        front.first_child = tail;
        if let Some(extras) = &mut node.extras {
            let own = front.extras_mut();
            own.items = Item::within(&extras.items, 0, cut).collect();
            extras.items = Item::within(&extras.items, cut, usize::MAX).collect();
            own.tags = extras.tags.split_front(cut);
            let behind = extras.source_uses.split_off(&at);
            own.source_uses = std::mem::replace(&mut extras.source_uses, behind);
            let behind = extras.anchors.partition_point(|&(end, _)| end <= at);
            own.anchors = extras.anchors.drain(..behind).collect();
        }
        node.depth = at;
        front.num_holes = (at - front.depth)
            - if node.num_holes == 0 {
                at - front.depth
            } else {
                depth(
                    (front.depth..at)
                        .filter(|&depth| front.payload(depth).is_present())
                        .count(),
                )
            };
        if node.num_approximate > 0 {
            let approximate = |depth: &Depth| !front.payload(*depth).label.is_exact();
            front.num_approximate = depth((front.depth..at).filter(approximate).count());
        }
        node.num_holes -= front.num_holes;
        node.num_approximate -= front.num_approximate;
        front.protected_children = u32::from(node.protected_end() > node.depth);

        let (next, previous, parent) = (front.next, front.previous, front.parent);
        let front = self.nodes.insert(front);
        if next != NO_NODE {
            self.nodes[next].previous = front;
        }
        if previous == NO_NODE {
            self.nodes[parent].first_child = front;
        } else {
            self.nodes[previous].next = front;
        }
        siblings::replace(&mut self.nodes, block_size, tail, front);
        self.remove_edge(tail);
        self.add_edge(front);
        let node = &mut self.nodes[tail];
        node.parent = front;
        node.next = NO_NODE;
        node.previous = NO_NODE;
        self.nodes[tail].hash = self
            .hasher
            .edge(front, self.nodes[tail].first_block(block_size));
        self.add_edge(tail);
        if self.nodes[tail].payload(at).is_exact() {
            siblings::insert(&mut self.nodes, block_size, tail);
        }
        for &id in self.nodes[front].run.ids() {
            if id != crate::ids::ABSENT {
                self.blocks.set_node(id, front);
            }
        }
        front
    }

    /// Unlinks an empty edge without children; its parent takes over its latest use.
    pub(super) fn detach(&mut self, node: NodeIndex) {
        self.unqueue(node);
        let latest = self.nodes[node].uses.latest();
        let (parent, next, previous) = {
            let edge = &self.nodes[node];
            (edge.parent, edge.next, edge.previous)
        };
        if next != NO_NODE {
            self.nodes[next].previous = previous;
        }
        if previous == NO_NODE {
            self.nodes[parent].first_child = next;
        } else {
            self.nodes[previous].next = next;
        }
        self.nodes[parent].num_children -= 1;
        self.remove_edge(node);
        self.nodes.remove(node);
        let end = self.nodes[parent].end();
        if latest > 0 && end > self.nodes[parent].depth {
            self.nodes[parent].uses.add(end, latest);
        }
    }
}
