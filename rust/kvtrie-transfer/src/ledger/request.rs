//! The state of one live request.

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Error, Result, ReusePlan, SequenceOwner, SessionId, Span, TokenSequence,
};

use super::groups::GroupTable;
use super::labels::{LedgerSource, RequestLabels};
use super::positions::{Contradiction, Positions};
use crate::error::{block_in_use, invalid};

#[derive(Debug)]
pub(super) struct Request {
    pub(super) owner: SequenceOwner,
    pub(super) positions: Positions,
    pub(super) blocks: Vec<BlockId>,
    /// What it has of each group besides group 0.
    pub(super) groups: Vec<GroupTable>,
    /// Number of tokens whose blocks belong to the index: whole blocks, at most the final and computed ones.
    pub(super) committed: usize,
    pub(super) source: LedgerSource,
    /// The plan that pins the blocks in place at the beginning, if the source is not a plan.
    pub(super) in_place: Option<Arc<ReusePlan>>,
    /// The plans that pin the committed blocks, if the source is not a plan.
    pub(super) pins: Vec<Arc<ReusePlan>>,
    pub(super) labels: RequestLabels,
    pub(super) spans: Vec<Tagged>,
    /// The conversation that its commits name.
    pub(super) session: Option<SessionId>,
}

#[derive(Clone, Debug)]
pub(super) struct Tagged {
    pub(super) span: Span,
    pub(super) given_until: usize,
}

impl Request {
    pub(super) fn check_owns(&self, seq: &TokenSequence, call: &'static str) -> Result<()> {
        if seq.is_owned_by(&self.owner) {
            return Ok(());
        }
        Err(invalid!(
            call,
            "the sequence of {} tokens is not the one of {} tokens that the request began with",
            seq.len(),
            self.positions.num_final
        ))
    }
}

/// `old` is already checked.
pub(super) fn check_unique(old: &[BlockId], new: &[BlockId], call: &'static str) -> Result<()> {
    /// Up to this many ids, a linear search is used.
    const FEW: usize = 8;
    let twice = if new.len() <= FEW {
        let mut known = (0..new.len()).filter(|&at| {
            let id = new[at];
            old.contains(&id) || new[..at].contains(&id)
        });
        known.next().map(|at| new[at])
    } else {
        let mut all: Vec<BlockId> = old.iter().chain(new).copied().collect();
        all.sort_unstable();
        all.windows(2)
            .find(|pair| pair[0] == pair[1])
            .map(|pair| pair[0])
    };
    match twice {
        Some(id) => Err(block_in_use(
            call,
            format!(
                "block {id} comes twice in the table of {} and {} new blocks",
                old.len(),
                new.len()
            ),
        )),
        None => Ok(()),
    }
}

pub(super) fn check_ids(ids: &[BlockId], call: &'static str) -> Result<()> {
    match ids.iter().find(|id| u64::from(id.0) >= BlockId::MAX_BLOCKS) {
        Some(id) => Err(invalid!(
            call,
            "blocks has {id}; it must be in [0, {}), the ids that a pool can have",
            BlockId::MAX_BLOCKS
        )),
        None => Ok(()),
    }
}

#[cold]
pub(super) fn refuse(
    why: Contradiction,
    blocks: usize,
    block_size: usize,
    call: &'static str,
) -> Error {
    match why {
        Contradiction::Below { claimed, verified } => invalid!(
            call,
            "num_computed is {claimed}, below the {verified} tokens that are final and computed; a rollback \
             takes them back"
        ),
        Contradiction::NotIssued { claimed, issued } => invalid!(
            call,
            "num_computed is {claimed}, but only the positions below {issued} were issued"
        ),
        Contradiction::Refused {
            claimed,
            computed,
            draft,
        } => invalid!(
            call,
            "num_computed comes down from {computed} to {claimed}, but no id has arrived for the drafts from {draft} \
             on: ids and the counter without what was refused go into one call"
        ),
        Contradiction::NoRoom { end, capacity } => invalid!(
            call,
            "positions up to {end} would be issued, the {blocks} blocks of {block_size} tokens end at {capacity}"
        ),
        Contradiction::Drafts { drafts, tokens } => invalid!(
            call,
            "{drafts} drafts are more than the {tokens} tokens that are issued"
        ),
    }
}
