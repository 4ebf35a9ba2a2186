//! Every invariant of the index, for tests, fuzzers and a careful engine.

use std::collections::{BTreeMap, BTreeSet};

use crate::blocks::Place;
use crate::error::{Error, Result};
use crate::ids::{Depth, NO_NODE, NodeIndex};
use crate::lru::NOT_QUEUED;
use crate::node::Node;
use crate::siblings;
use crate::tree::RadixIndex;

/// Fails with a sentence unless `condition` holds.
fn must(condition: bool, what: impl FnOnce() -> String) -> Result<()> {
    if condition {
        Ok(())
    } else {
        Err(Error::malformed(format!("RadixIndex.check: {}", what())))
    }
}

/// Counters recomputed from the trees.
#[derive(Default)]
struct Totals {
    nodes: usize,
    indexed: u64,
    holes: u64,
    approximate: u64,
    protected: u64,
}

impl RadixIndex {
    /// Verifies every invariant: links, depths, block ownership, counters, order of eviction, pins and anchors, tags, siblings.
    ///
    /// # Errors
    /// [`Malformed`](crate::ErrorKind::Malformed) with the first broken invariant: a bug in this crate.
    ///
    /// # Complexity
    /// O(tokens held · log blocks).
    pub fn check(&self) -> Result<()> {
        let anchors = self.check_leases()?;
        let mut totals = Totals::default();
        for (tree, state) in self.trees.iter() {
            must(self.tree_of.get(&state.namespace) == Some(&tree), || {
                format!("tree {tree} is not its namespace's")
            })?;
            must(self.nodes[state.root].is_root(), || {
                format!("the root of tree {tree} has a parent")
            })?;
            must(self.nodes[state.root].num_children > 0, || {
                format!("tree {tree} is empty")
            })?;
            self.check_tree(tree, state.root, &anchors, &mut totals)?;
        }
        must(self.tree_of.len() == self.trees.len(), || {
            "a namespace has no tree".into()
        })?;
        must(totals.nodes == self.nodes.len(), || {
            format!("{} of {} edges are linked", totals.nodes, self.nodes.len())
        })?;
        must(
            self.edges.len() == self.nodes.len() - self.trees.len(),
            || "the edge table has strangers".into(),
        )?;
        let counters = [
            ("indexed", totals.indexed, self.num_indexed),
            ("holes", totals.holes, self.num_holes),
            ("approximate", totals.approximate, self.num_approximate),
            ("protected", totals.protected, self.num_protected),
            (
                "indexed ids",
                self.blocks.indexed().count() as u64,
                self.num_indexed,
            ),
        ];
        for (name, counted, known) in counters {
            must(counted == known, || {
                format!("{counted} {name} blocks, the counter says {known}")
            })?;
        }
        must(self.num_holes <= self.config.num_blocks, || {
            format!("{} holes", self.num_holes)
        })?;
        for (at, &(key, node)) in self.order.entries().iter().enumerate() {
            must(self.nodes[node].queued as usize == at, || {
                format!("edge {node} is not where it is queued")
            })?;
            must(self.eviction_key(node) == Some(key), || {
                format!("edge {node} is queued under an old key")
            })?;
            must(
                at == 0 || self.order.entries()[(at - 1) / 4].0 <= key,
                || "the order of eviction is no heap".into(),
            )?;
        }
        Ok(())
    }

    /// Checks pins against leases; answers how many anchors each block should have.
    fn check_leases(&self) -> Result<BTreeMap<u32, u32>> {
        let mut pins: BTreeMap<u32, u32> = BTreeMap::new();
        let mut anchors: BTreeMap<u32, u32> = BTreeMap::new();
        for (lease, held) in self.leases.iter() {
            for &id in held.path.iter().chain(&held.aside).chain(&held.sources) {
                *pins.entry(id).or_default() += 1;
            }
            for &id in held.aside.iter().chain(&held.sources) {
                *anchors.entry(id).or_default() += 1;
            }
            let is_indexed = |id: &u32| matches!(self.blocks.place(*id), Place::Indexed { .. });
            let deepest = held.path.iter().rev().copied().find(is_indexed);
            must(held.anchor == deepest, || {
                format!(
                    "lease {lease} anchors at {:?}, not {deepest:?}",
                    held.anchor
                )
            })?;
            if let Some(id) = deepest {
                *anchors.entry(id).or_default() += 1;
            }
            must(held.pinned || held.path.is_empty(), || {
                format!("lease {lease} pins though it must not")
            })?;
        }
        let mut condemned = 0;
        let mut waiting = BTreeSet::new();
        let mut pinned = 0;
        for (id, place, count) in self.blocks.noteworthy() {
            must(pins.remove(&id).unwrap_or(0) == count, || {
                format!("block {id} has {count} pins, the leases differ")
            })?;
            pinned += u64::from(count > 0);
            match place {
                Place::Condemned => {
                    condemned += 1;
                    must(count > 0, || {
                        format!("block {id} is condemned without a pin")
                    })?;
                }
                Place::Waiting => {
                    waiting.insert(id);
                    must(count == 0, || format!("block {id} waits with a pin"))?;
                }
                Place::Indexed { .. } => {}
                Place::Unknown => must(false, || format!("block {id} is pinned but not known"))?,
            }
        }
        must(pins.is_empty(), || {
            "a lease holds a block without a pin".into()
        })?;
        must(waiting == self.waiting.iter().copied().collect(), || {
            "the waiting blocks differ from the queue".into()
        })?;
        must(waiting.len() == self.waiting.len(), || {
            "a block waits twice".into()
        })?;
        must(condemned == self.num_condemned, || {
            format!("{condemned} condemned, counter {}", self.num_condemned)
        })?;
        must(pinned == self.num_pinned, || {
            format!("{pinned} pinned, counter {}", self.num_pinned)
        })?;
        Ok(anchors)
    }

    fn check_tree(
        &self,
        tree: u32,
        root: NodeIndex,
        anchors: &BTreeMap<u32, u32>,
        totals: &mut Totals,
    ) -> Result<()> {
        let mut open = vec![root];
        while let Some(at) = open.pop() {
            let node = &self.nodes[at];
            totals.nodes += 1;
            must(node.namespace == tree, || {
                format!("edge {at} is in the wrong tree")
            })?;
            self.check_edge(at, node, anchors, totals)?;
            let (mut child, mut previous, mut count, mut protected) =
                (node.first_child, NO_NODE, 0, 0);
            let mut sorted = BTreeSet::new();
            while child != NO_NODE {
                let below = &self.nodes[child];
                must(below.parent == at && below.previous == previous, || {
                    format!("edge {child} is linked badly")
                })?;
                must(below.depth == node.end(), || {
                    format!("edge {child} starts at {}, not {}", below.depth, node.end())
                })?;
                must(below.run.len() > 0, || format!("edge {child} is empty"))?;
                let first = below.first_block(self.block_size());
                must(self.hasher.edge(at, first) == below.hash, || {
                    format!("edge {child} has an old hash")
                })?;
                let known = self
                    .edges
                    .find(below.hash, |&known| known == child)
                    .is_some();
                must(known, || format!("edge {child} is not in the edge table"))?;
                if below.payload(below.depth).is_exact() {
                    sorted.insert(child);
                }
                protected += u32::from(below.protected_end() > below.depth);
                count += 1;
                open.push(child);
                previous = child;
                child = below.next;
            }
            must(count == node.num_children, || {
                format!("edge {at} has {count} children, not {}", node.num_children)
            })?;
            must(protected == node.protected_children, || {
                format!("edge {at} has {protected} protected children")
            })?;
            must(self.sorted_children(at) == sorted, || {
                format!("the sorted children of edge {at} are not its exact ones")
            })?;
        }
        Ok(())
    }

    /// The sorted children, if they are in order.
    fn sorted_children(&self, at: NodeIndex) -> BTreeSet<NodeIndex> {
        let mut found = BTreeSet::new();
        for child in siblings::all(&self.nodes, at) {
            // A child that is out of order is not found from the root again.
            if siblings::contains(&self.nodes, self.block_size(), child) {
                found.insert(child);
            }
        }
        found
    }

    fn check_edge(
        &self,
        at: NodeIndex,
        node: &Node,
        anchors: &BTreeMap<u32, u32>,
        totals: &mut Totals,
    ) -> Result<()> {
        let (mut holes, mut approximate) = (0, 0);
        let mut own: Vec<(Depth, u32)> = Vec::new();
        for depth in node.depth..node.end() {
            let payload = node.payload(depth);
            if !payload.is_present() {
                holes += 1;
                continue;
            }
            approximate += u32::from(!payload.label.is_exact());
            let place = self.blocks.place(payload.id);
            must(place == Place::Indexed { node: at, depth }, || {
                format!(
                    "block {} stands in edge {at} at depth {depth}, its entry says {place:?}",
                    payload.id
                )
            })?;
            if let Some(&count) = anchors.get(&payload.id) {
                own.push((depth + 1, count));
            }
        }
        must(holes == node.num_holes, || {
            format!("edge {at} has {holes} holes, not {}", node.num_holes)
        })?;
        must(approximate == node.num_approximate, || {
            format!("edge {at} has {approximate} approximate blocks")
        })?;
        let anchored = node
            .extras
            .as_ref()
            .map_or(&[][..], |extras| &extras.anchors);
        must(own == anchored, || {
            format!("edge {at} has the anchors {anchored:?}, not {own:?}")
        })?;
        if node.num_children == 0 && !node.is_root() {
            let last = node.payload(node.end() - 1);
            must(last.is_present(), || format!("edge {at} ends in a hole"))?;
            must(
                (self.blocks.pins(last.id) == 0) == (node.queued != NOT_QUEUED),
                || format!("the leaf {at} is queued although pinned, or the other way round"),
            )?;
        } else {
            must(node.queued == NOT_QUEUED, || {
                format!("edge {at} is no leaf but queued")
            })?;
        }
        if let Some(extras) = &node.extras {
            let (start, end) = (
                node.depth as usize * self.block_size(),
                node.end() as usize * self.block_size(),
            );
            let runs = extras.tags.runs();
            must(
                runs.iter().all(|run| run.start >= start && run.end <= end),
                || format!("edge {at} has tags outside its tokens"),
            )?;
            for depth in (node.depth..node.end()).filter(|&depth| !node.payload(depth).is_present())
            {
                let tags = self.tags_of_block(at, depth);
                must(tags.is_empty(), || {
                    format!("the hole at depth {depth} of edge {at} has tags")
                })?;
            }
            must(
                extras
                    .source_uses
                    .keys()
                    .all(|depth| (node.depth..node.end()).contains(depth)),
                || format!("edge {at} knows uses of blocks that it does not have"),
            )?;
        }
        totals.holes += u64::from(holes);
        totals.indexed += u64::from(node.num_present(node.depth, node.end()));
        totals.approximate += u64::from(approximate);
        totals.protected += u64::from(node.num_present(node.depth, node.protected_end()));
        Ok(())
    }
}
