//! Leases: what a live plan pins, and what that protects from eviction.
//!
//! A pin is a count at the block id. What a pin *protects* (the block and everything above it) is kept per node: the
//! deepest anchored end, and how many children have a protected block. So `num_evictable` is a counter, and a pin costs
//! one step per node that it newly protects.

use crate::blocks::Place;
use crate::ids::NO_NODE;
use crate::tree::RadixIndex;

impl RadixIndex {
    /// Pins a block; the caller anchors it.
    pub(crate) fn pin(&mut self, id: u32) {
        if self.blocks.pin(id) == 1 {
            self.num_pinned += 1;
            self.requeue_block(id);
        }
    }

    /// Unpins a block; a condemned one that nobody else pins is added to `released`.
    fn unpin(&mut self, id: u32, released: &mut Vec<u32>) {
        if self.blocks.unpin(id) > 0 {
            return;
        }
        self.num_pinned -= 1;
        match self.blocks.place(id) {
            Place::Indexed { .. } => self.requeue_block(id),
            Place::Condemned => {
                self.blocks.set_waiting(id);
                self.num_condemned -= 1;
                released.push(id);
            }
            Place::Unknown | Place::Waiting => {}
        }
    }

    /// Protects the block and everything above it.
    pub(crate) fn anchor(&mut self, id: u32) {
        let Place::Indexed { node, depth } = self.blocks.place(id) else {
            return;
        };
        let before = self.nodes[node].protected_end();
        let anchors = &mut self.nodes[node].extras_mut().anchors;
        match anchors.binary_search_by_key(&(depth + 1), |&(end, _)| end) {
            Ok(at) => anchors[at].1 += 1,
            Err(at) => anchors.insert(at, (depth + 1, 1)),
        }
        self.protection_changed(node, before);
    }

    /// Takes one protection of the block away.
    pub(crate) fn unanchor(&mut self, id: u32) {
        let Place::Indexed { node, depth } = self.blocks.place(id) else {
            return;
        };
        let before = self.nodes[node].protected_end();
        let anchors = &mut self.nodes[node].extras_mut().anchors;
        if let Ok(at) = anchors.binary_search_by_key(&(depth + 1), |&(end, _)| end) {
            anchors[at].1 -= 1;
            if anchors[at].1 == 0 {
                anchors.remove(at);
            }
        }
        self.protection_changed(node, before);
    }

    /// Counts what became protected, or no longer is, from `node` up.
    fn protection_changed(&mut self, mut at: u32, mut before: u32) {
        loop {
            let node = &self.nodes[at];
            let after = node.protected_end();
            if after >= before {
                self.num_protected += u64::from(node.num_present(before, after));
            } else {
                self.num_protected -= u64::from(node.num_present(after, before));
            }
            let (was, is) = (before > node.depth, after > node.depth);
            if was == is || node.parent == NO_NODE {
                return;
            }
            at = node.parent;
            let parent = &mut self.nodes[at];
            before = parent.protected_end();
            if is {
                parent.protected_children += 1;
            } else {
                parent.protected_children -= 1;
            }
        }
    }

    /// A pinned block is about to leave its place: whoever anchors there anchors at the next block above that it pins.
    pub(crate) fn move_anchors(&mut self, id: u32) {
        let mut anchored_at = Vec::new();
        for (_, lease) in self.leases.iter_mut() {
            if lease.anchor == Some(id) {
                let above = lease
                    .path
                    .iter()
                    .rposition(|&known| known == id)
                    .unwrap_or(0);
                lease.anchor = lease.path[..above]
                    .iter()
                    .rev()
                    .copied()
                    .find(|&id| matches!(self.blocks.place(id), Place::Indexed { .. }));
                anchored_at.extend(lease.anchor);
            }
        }
        for above in anchored_at {
            self.anchor(above);
        }
        let Place::Indexed { node, depth } = self.blocks.place(id) else {
            return;
        };
        let before = self.nodes[node].protected_end();
        if let Some(extras) = &mut self.nodes[node].extras {
            extras.anchors.retain(|&(end, _)| end != depth + 1);
        }
        self.protection_changed(node, before);
    }

    /// Pins under a lease the blocks that back a sequence from position 0 on: `ids` are those from the depth `from`.
    ///
    /// `whole` gives all of them, and is asked only if the blocks before `from` may not all be the lease's own.
    pub(crate) fn pin_path(
        &mut self,
        lease: u32,
        from: usize,
        ids: &[u32],
        synced: (u64, u64),
        whole: impl FnOnce(&Self) -> Vec<u32>,
    ) {
        let held = &self.leases[lease];
        if !held.pinned {
            return;
        }
        let known = held.path.len();
        if held.synced == Some(synced) && from <= known {
            // The lease's path is a path of this sequence; only what lies behind it is new.
            let new = ids.get(known - from..).unwrap_or(&[]);
            self.extend_path(lease, new);
        } else {
            let whole = whole(self);
            let same = self.leases[lease]
                .path
                .iter()
                .zip(&whole)
                .take_while(|(a, b)| a == b)
                .count();
            let on_path = same == known;
            if on_path {
                self.extend_path(lease, &whole[same..]);
                self.leases[lease].synced = Some(synced);
                return;
            }
            for (depth, &id) in whole.iter().enumerate().skip(same) {
                // A block stands at one depth, so the path can hold it there alone.
                let held = &mut self.leases[lease];
                if held.path.get(depth) != Some(&id) && held.aside.insert(id) {
                    self.pin(id);
                    self.anchor(id);
                }
            }
        }
    }

    fn extend_path(&mut self, lease: u32, new: &[u32]) {
        let mut last = None;
        for &id in new {
            if self.leases[lease].aside.remove(&id) {
                // Pinned and anchored aside already: it moves to the path with its pin.
                self.unanchor(id);
            } else {
                self.pin(id);
            }
            self.leases[lease].path.push(id);
            last = Some(id);
        }
        if let Some(last) = last {
            self.anchor(last);
            if let Some(old) = self.leases[lease].anchor.replace(last) {
                self.unanchor(old);
            }
        }
    }

    /// Ends the pins of the sources of a lease.
    pub(crate) fn unpin_sources(&mut self, lease: u32) {
        let sources = std::mem::take(&mut self.leases[lease].sources);
        let mut released = Vec::new();
        for id in sources {
            self.unanchor(id);
            self.unpin(id, &mut released);
        }
        self.wait(released);
    }

    /// Ends a lease with all its pins.
    pub(crate) fn end_lease(&mut self, lease: u32) {
        let Some(ended) = self.leases.remove(lease) else {
            return;
        };
        if let Some(anchor) = ended.anchor {
            self.unanchor(anchor);
        }
        let mut released = Vec::new();
        for &id in ended.aside.iter().chain(&ended.sources) {
            self.unanchor(id);
            self.unpin(id, &mut released);
        }
        for &id in ended.path.iter().rev() {
            self.unpin(id, &mut released);
        }
        self.wait(released);
    }

    /// Queues condemned blocks whose last pin ended, ascending, for `take_freed` and `evict`.
    fn wait(&mut self, mut released: Vec<u32>) {
        released.sort_unstable();
        self.waiting.extend(released);
    }
}
