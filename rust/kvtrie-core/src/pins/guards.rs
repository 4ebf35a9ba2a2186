//! Changes pins. Each change updates the counts of the nodes above and the eviction orders.

use smallvec::SmallVec;

use crate::eviction::Eviction;
use crate::pins::lease::Stretch;
use crate::storage::forest::{Change, Forest, SourceRun};

pub(super) fn settle(forest: &mut Forest, eviction: &mut Eviction, change: Option<Change>) {
    let Some(change) = change else {
        return;
    };
    let at = change.at;
    forest.recount(at, change.before, change.after);
    if eviction.any_dead() {
        eviction.dead_mut().requeue(forest, at);
    }
    if change.before != change.after {
        eviction.requeue(forest, at);
    }
    let (mut node, mut before) = (at, change.guard);
    loop {
        let edge = forest.node(node);
        let (after, parent) = (edge.guard(), edge.parent);
        if before == after {
            return;
        }
        let Some((above, guard)) = forest.guard_changed(parent, before, after) else {
            return;
        };
        if eviction.any_dead() {
            eviction.dead_mut().requeue(forest, above);
        }
        (node, before) = (above, guard);
    }
}

pub(super) fn anchor(forest: &mut Forest, eviction: &mut Eviction, id: u32) {
    if let Some((node, depth)) = forest.place_of(id) {
        let change = forest.anchor(node, depth + 1);
        settle(forest, eviction, change);
    }
}

pub(super) fn unanchor(forest: &mut Forest, eviction: &mut Eviction, id: u32) {
    if let Some((node, depth)) = forest.place_of(id) {
        let change = forest.unanchor(node, depth + 1);
        settle(forest, eviction, change);
    }
}

/// Pins runs. Adjacent runs of one node are added together.
pub(super) fn add_sources(forest: &mut Forest, eviction: &mut Eviction, runs: &[SourceRun]) {
    for own in runs.chunk_by(|a, b| a.node == b.node) {
        let change = forest.add_sources(own);
        settle(forest, eviction, Some(change));
    }
}

fn remove_sources(forest: &mut Forest, eviction: &mut Eviction, runs: &[SourceRun]) {
    for own in runs.chunk_by(|a, b| a.node == b.node) {
        let change = forest.remove_sources(own);
        settle(forest, eviction, Some(change));
    }
}

pub(super) fn pin_stretch(forest: &mut Forest, eviction: &mut Eviction, stretch: Stretch) {
    let parts: SmallVec<[SourceRun; 4]> = forest.parts(stretch.last, stretch.from).collect();
    add_sources(forest, eviction, &parts);
}

/// Unpins stretches, the last first, so that runs are removed from the end of a node's list.
pub(super) fn unpin_stretches(forest: &mut Forest, eviction: &mut Eviction, stretches: &[Stretch]) {
    if stretches.is_empty() {
        return;
    }
    let all = stretches.iter().rev();
    let parts: SmallVec<[SourceRun; 4]> = all
        .flat_map(|stretch| forest.parts(stretch.last, stretch.from))
        .collect();
    remove_sources(forest, eviction, &parts);
}
