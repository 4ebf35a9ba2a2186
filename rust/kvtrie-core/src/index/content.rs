//! Updates of the table of windows when blocks enter and leave.

use crate::ids::{ABSENT, BlockId, Depth, NodeIndex};
use crate::index::RadixIndex;
use crate::moved::fingerprints::WINDOW;
use crate::moved::windows::Windows;
use crate::storage::blocks::Place;
use crate::storage::node::Node;

impl RadixIndex {
    /// Blocks entered the path of `tokens`, which begin at position 0, from depth `from` on.
    pub(super) fn add_windows(&mut self, tree: u32, tokens: &[u32], from: Depth, ids: &[BlockId]) {
        let Some(windows) = &mut self.windows else {
            return;
        };
        for (place, &BlockId(id)) in (from..).zip(ids) {
            self.blocks.set_bringing(id);
            for (which, end) in windows.ends(place).enumerate() {
                if let Some(window) = tokens[..=end].last_chunk::<WINDOW>() {
                    windows.add(tree, window, id, which);
                }
            }
            if windows.is_due() {
                let applied = windows.apply();
                self.blocks.clear_bringing(applied);
            }
        }
    }

    /// A block filled a hole.
    pub(super) fn add_windows_of(&mut self, node: NodeIndex, place: Depth, id: u32) {
        let Some(windows) = &self.windows else {
            return;
        };
        self.blocks.set_bringing(id);
        let tree = self.nodes[node].tree;
        for (which, end) in windows.ends(place).enumerate() {
            let window = self.window(node, end);
            if let Some(windows) = &mut self.windows {
                windows.add(tree, &window, id, which);
            }
        }
        self.apply_due();
    }

    /// The blocks `from..to` of a node are about to leave. Their tokens are still needed here.
    pub(super) fn remove_windows_of(&mut self, node: NodeIndex, from: Depth, to: Depth) {
        let (tree, block_size) = (self.nodes[node].tree, self.block_size());
        for place in from..to {
            let Some(windows) = &self.windows else {
                return;
            };
            let ends = windows.ends(place);
            let id = self.nodes[node].id(place, block_size);
            if id == ABSENT {
                continue;
            }
            if self.blocks.is_bringing(id) {
                self.apply_windows();
            }
            for (which, end) in ends.enumerate() {
                let window = self.window(node, end);
                if let Some(windows) = &mut self.windows {
                    windows.remove(tree, &window, id, which);
                }
            }
            self.apply_due();
        }
    }

    fn apply_due(&mut self) {
        if self.windows.as_ref().is_some_and(Windows::is_due) {
            self.apply_windows();
        }
    }

    pub(crate) fn apply_windows(&mut self) {
        if let Some(windows) = &mut self.windows {
            let applied = windows.apply();
            self.blocks.clear_bringing(applied);
        }
    }

    pub(crate) fn tree_of_block(&self, id: u32) -> Option<u32> {
        match self.blocks.place(id) {
            Place::Indexed { node, .. } => Some(self.nodes[node].tree),
            _ => None,
        }
    }

    /// The window that ends with the token at position `end` of the path through a node that contains it.
    pub(crate) fn window(&self, node: NodeIndex, end: usize) -> [u32; WINDOW] {
        let block_size = self.block_size();
        let (mut edge, mut until) = (&self.nodes[node], end + 1);
        let base = |edge: &Node| edge.depth as usize * block_size;
        let first = until - WINDOW;
        let mut window = [0; WINDOW];
        while until > first {
            let from = base(edge).max(first);
            let tokens = &edge.run.tokens(block_size)[from - base(edge)..until - base(edge)];
            window[from - first..until - first].copy_from_slice(tokens);
            if from > first {
                edge = &self.nodes[edge.parent];
            }
            until = from;
        }
        window
    }

    /// All windows that the table must contain: (tree, window, block, number of the window in the block).
    pub(crate) fn live_windows(&self) -> Vec<(u32, [u32; WINDOW], u32, usize)> {
        let mut found = Vec::new();
        let Some(windows) = &self.windows else {
            return found;
        };
        for (id, place) in self.blocks.known() {
            if let Place::Indexed { node, depth } = place {
                let tree = self.nodes[node].tree;
                let ends = windows.ends(depth).enumerate();
                found.extend(ends.map(|(at, end)| (tree, self.window(node, end), id, at)));
            }
        }
        found
    }
}
