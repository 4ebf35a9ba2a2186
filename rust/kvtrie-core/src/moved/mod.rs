//! Keeps the windows of cached tokens up to date, by which plans find moved runs.

mod fingerprints;
mod windows;

use crate::ids::{ABSENT, BlockId, Depth, NodeIndex};
use crate::storage::blocks::BlockState;
use crate::storage::forest::Forest;

pub(crate) use fingerprints::WINDOW;
#[cfg(test)]
pub(crate) use fingerprints::WindowHasher;
pub(crate) use windows::Windows;

#[derive(Debug)]
pub(crate) struct Moved {
    windows: Option<Windows>,
}

impl Moved {
    pub(crate) fn new(windows: Option<Windows>) -> Self {
        Self { windows }
    }

    pub(crate) fn windows(&self) -> Option<&Windows> {
        self.windows.as_ref()
    }

    /// Adds the windows of blocks that entered a path from depth `from` on. `tokens` begin at position 0.
    #[inline]
    pub(crate) fn add_run(
        &mut self,
        forest: &mut Forest,
        tree: u32,
        tokens: &[u32],
        from: Depth,
        ids: &[BlockId],
    ) {
        let Some(windows) = &mut self.windows else {
            return;
        };
        for (place, &BlockId(id)) in (from..).zip(ids) {
            forest.blocks_mut().set_pending(id);
            for (which, end) in windows.ends(place).enumerate() {
                if let Some(window) = tokens[..=end].last_chunk::<WINDOW>() {
                    windows.add(tree, window, id, which);
                }
            }
            if windows.is_due() {
                apply(windows, forest);
            }
        }
    }

    pub(crate) fn add(&mut self, forest: &mut Forest, node: NodeIndex, place: Depth, id: u32) {
        let Some(windows) = &mut self.windows else {
            return;
        };
        forest.blocks_mut().set_pending(id);
        let tree = forest.node(node).tree;
        for (which, end) in windows.ends(place).enumerate() {
            windows.add(tree, &forest.last_tokens(node, end), id, which);
        }
        if windows.is_due() {
            apply(windows, forest);
        }
    }

    /// Removes the windows of blocks that are about to leave. Their tokens must still be stored.
    pub(crate) fn remove(&mut self, forest: &mut Forest, node: NodeIndex, from: Depth, to: Depth) {
        let Some(windows) = &mut self.windows else {
            return;
        };
        let (tree, block_size) = (forest.node(node).tree, forest.block_size());
        for place in from..to {
            let id = forest.node(node).id(place, block_size);
            if id == ABSENT {
                continue;
            }
            if forest.blocks().is_pending(id) {
                apply(windows, forest);
            }
            for (which, end) in windows.ends(place).enumerate() {
                windows.remove(tree, &forest.last_tokens(node, end), id, which);
            }
            if windows.is_due() {
                apply(windows, forest);
            }
        }
    }

    pub(crate) fn apply(&mut self, forest: &mut Forest) {
        if let Some(windows) = self.windows.as_mut().filter(|windows| windows.is_waiting()) {
            apply(windows, forest);
        }
    }

    pub(crate) fn restore(&mut self, forest: &Forest, order: &[Vec<u32>]) -> Result<(), String> {
        let Some(windows) = &mut self.windows else {
            return Ok(());
        };
        let blocks = forest.blocks().known();
        let blocks = blocks.filter_map(|(id, place)| match place {
            BlockState::Indexed { node, depth } => Some((id, forest.node(node).tree, node, depth)),
            _ => None,
        });
        windows.fill(blocks, |node, end| forest.last_tokens(node, end), order)
    }

    pub(crate) fn check(&self, forest: &Forest) -> Result<(), String> {
        let Some(windows) = &self.windows else {
            return Ok(());
        };
        let mut live = Vec::new();
        for (id, place) in forest.blocks().known() {
            if let BlockState::Indexed { node, depth } = place {
                let tree = forest.node(node).tree;
                let ends = windows.ends(depth).enumerate();
                live.extend(ends.map(|(at, end)| (tree, forest.last_tokens(node, end), id, at)));
            }
        }
        windows.check(live)
    }
}

fn apply(windows: &mut Windows, forest: &mut Forest) {
    let applied = windows.apply();
    forest.blocks_mut().clear_pending(applied);
}
