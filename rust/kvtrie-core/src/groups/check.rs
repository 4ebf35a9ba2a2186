//! Checks the invariants of groups besides group 0.

use std::collections::BTreeSet;

use crate::groups::{Column, Groups, IdState};
use crate::storage::forest::Forest;

impl Groups {
    /// Checks all columns and what leases pin; `is_lease` says whether a lease is live.
    pub(crate) fn check(
        &self,
        forest: &Forest,
        is_lease: impl Fn(u32) -> bool,
    ) -> Result<(), String> {
        if let Some(lease) = self.leases().find(|&lease| !is_lease(lease)) {
            return Err(format!("lease {lease} has ended, but pins ids of groups"));
        }
        let pins = self.pin_counts();
        for (number, column) in self.columns().iter().enumerate() {
            let pins = |id| pins.get(&(number, id)).copied().unwrap_or(0);
            check_column(column, forest, pins)
                .map_err(|what| format!("group {}: {what}", number + 1))?;
        }
        Ok(())
    }
}

fn must(condition: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(what()) }
}

fn check_column(column: &Column, forest: &Forest, pins: impl Fn(u32) -> u32) -> Result<(), String> {
    let block_size = forest.block_size();
    let (mut pinned, mut queued) = (0, 0);
    for ((node, place), entry) in column.entries() {
        let id = entry.id;
        must(
            column.state(id) == Some(IdState::Indexed(node, place)),
            || format!("id {id} is not known at its place"),
        )?;
        let edge = forest.node(node);
        must(
            !edge.is_vacant() && edge.depth <= place && place < edge.end(),
            || format!("id {id} is at a place that edge {node} does not have"),
        )?;
        must(edge.payload(place, block_size).is_exact(), || {
            format!("id {id} is where group 0 has no exact block")
        })?;
        must(entry.pins == pins(id), || {
            format!("id {id} has {} pins, plans say {}", entry.pins, pins(id))
        })?;
        let is_queued = column.is_queued(place, entry);
        must(is_queued || entry.pins > 0, || {
            format!("id {id} is unpinned and not in the order")
        })?;
        pinned += u64::from(entry.pins > 0);
        queued += usize::from(is_queued);
    }
    must(queued == column.num_queued(), || {
        "the order has strangers".to_owned()
    })?;
    let (mut indexed, mut condemned, mut waiting) = (0, 0, BTreeSet::new());
    for (id, state) in column.ids() {
        match state {
            IdState::Indexed(..) => indexed += 1,
            IdState::Condemned(left) => {
                condemned += 1;
                must(left > 0 && left == pins(id), || {
                    format!("condemned id {id} has {left} pins, plans say {}", pins(id))
                })?;
            }
            IdState::Waiting => {
                waiting.insert(id);
            }
        }
    }
    must(&waiting == column.waiting(), || {
        "the waiting ids are others".to_owned()
    })?;
    let counters = [
        ("indexed", indexed, column.num_indexed()),
        ("pinned", pinned, column.num_pinned()),
        ("condemned", condemned, column.num_condemned()),
    ];
    for (name, counted, known) in counters {
        must(counted == known, || {
            format!("{counted} {name} ids, the counter says {known}")
        })?;
    }
    Ok(())
}
