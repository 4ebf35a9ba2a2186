//! How a request begins.

use std::sync::Arc;

use super::labels::{Labels, LedgerSource};
use super::positions::Positions;
use super::present::{Islands, check_ranges};
use super::record::{Record, check_ids, check_unique};
use super::{RequestId, SequenceLedger};
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::plan::{Class, ReusePlan};
use crate::tokens::{Owner, TokenSequence};

const CALL: &str = "SequenceLedger.begin";

/// The tokens that have KV in the table when a request begins.
#[derive(Clone, Copy, Debug)]
pub enum Present<'a> {
    /// The tokens before this position.
    Below(usize),
    /// All tokens of the sequence except these ranges, ascending and disjoint.
    AllBut(&'a [(usize, usize)]),
}

/// How a request begins.
#[derive(Clone, Debug)]
pub struct Begin<'a> {
    /// The source of its KV.
    pub source: LedgerSource,
    /// The tokens that have KV. `None`: what the plan says, or nothing without a plan.
    pub present: Option<Present<'a>>,
    /// Only for a source that is not a plan: a plan whose blocks in place are the first of the table. They belong to
    /// the index and count as committed; the source describes the KV after them.
    pub in_place: Option<Arc<ReusePlan>>,
}

impl Default for Begin<'_> {
    /// Nothing has KV; all of it will be computed.
    fn default() -> Self {
        Self {
            source: LedgerSource::Computed,
            present: None,
            in_place: None,
        }
    }
}

impl Begin<'_> {
    /// A request that follows this plan.
    #[must_use]
    pub fn planned(plan: Arc<ReusePlan>) -> Self {
        Self {
            source: LedgerSource::Plan(plan),
            present: None,
            in_place: None,
        }
    }
}

impl SequenceLedger {
    /// Starts a request. Until [`finish`](Self::finish) or [`forget`](Self::forget), only the ledger changes its
    /// sequence.
    ///
    /// With a plan as source, its gaps and all tokens after the planned ones are missing, and its blocks in place count
    /// as committed.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): another request has the sequence; more tokens are
    ///   present than the sequence has, or than the blocks can hold; ranges that do not ascend, or that start in the
    ///   blocks in place; a plan of another block size, of other tokens, that pins nothing, or whose blocks in place
    ///   are not the first of the table; a plan as source together with [`present`](Begin::present) or
    ///   [`in_place`](Begin::in_place); an id that no pool can have, or hops above the limit.
    /// - [`BlockInUse`](crate::ErrorKind::BlockInUse): an id is given twice.
    ///
    /// # Complexity
    /// O(blocks · log blocks + missing ranges), plus a comparison of the plan's tokens if the sequence is not the one
    /// that was planned.
    pub fn begin(
        &mut self,
        seq: &mut TokenSequence,
        blocks: &[BlockId],
        begin: Begin<'_>,
    ) -> Result<RequestId> {
        if seq.is_owned() {
            return Err(Error::invalid(format!(
                "{CALL}: another request of a SequenceLedger has this sequence of {} tokens",
                seq.len()
            )));
        }
        begin.source.check(CALL)?;
        check_ids(blocks, CALL)?;
        check_unique(&[], blocks, CALL)?;
        let mut committed = 0;
        if let Some(plan) = &begin.in_place {
            if matches!(begin.source, LedgerSource::Plan(_)) {
                return Err(Error::invalid(format!(
                    "{CALL}: the source is a plan, and another plan is given beside it"
                )));
            }
            self.check_plan(plan, seq, blocks)?;
            committed = plan.blocks().len() * self.block_size;
        }
        let (computed, islands) = match (&begin.source, begin.present) {
            (LedgerSource::Plan(plan), None) => {
                self.check_plan(plan, seq, blocks)?;
                committed = plan.blocks().len() * self.block_size;
                let gaps = plan
                    .segments()
                    .iter()
                    .filter(|segment| segment.class == Class::Compute)
                    .map(|segment| (segment.start, segment.end));
                Islands::around(gaps, plan.snapshot().tokens.len())
            }
            (LedgerSource::Plan(_), Some(_)) => {
                return Err(Error::invalid(format!(
                    "{CALL}: a plan says itself what is computed; num_computed and missing are for other sources"
                )));
            }
            (_, None) => (committed, Islands::default()),
            (_, Some(Present::Below(computed))) => {
                if computed > seq.len() {
                    return Err(Error::invalid(format!(
                        "{CALL}: num_computed is {computed}; it must be in [0, {}], the tokens of the sequence",
                        seq.len()
                    )));
                }
                (computed.max(committed), Islands::default())
            }
            (_, Some(Present::AllBut(missing))) => {
                check_ranges(missing, seq.len(), CALL)?;
                if let Some(&(start, end)) = missing.iter().find(|range| range.0 < committed) {
                    return Err(Error::invalid(format!(
                        "{CALL}: missing has [{start}, {end}), but the first {committed} tokens are in place"
                    )));
                }
                Islands::around(missing.iter().copied(), seq.len())
            }
        };
        let (end, capacity) = (computed.max(islands.end()), blocks.len() * self.block_size);
        if end > capacity {
            return Err(Error::invalid(format!(
                "{CALL}: KV up to position {end} is said to be there, the {} blocks of {} tokens end at {capacity}",
                blocks.len(),
                self.block_size
            )));
        }
        crate::failpoints::before("SequenceLedger.begin")?;
        let owner = Arc::new(Owner);
        seq.give_to(&owner);
        crate::failpoints::within("begin: a sequence without a request");
        let record = self.records.insert(Record {
            owner,
            positions: Positions::new(seq.len(), computed, islands),
            blocks: blocks.to_vec(),
            committed,
            labels: Labels::new(&begin.source, begin.in_place.as_deref(), self.block_size),
            source: begin.source,
            in_place: begin.in_place,
            pins: Vec::new(),
            spans: Vec::new(),
        });
        Ok(RequestId(self.records.handle(record)))
    }

    fn check_plan(&self, plan: &ReusePlan, seq: &TokenSequence, blocks: &[BlockId]) -> Result<()> {
        if !plan.is_pinned() {
            return Err(Error::invalid(format!(
                "{CALL}: the plan pins nothing, so its {} blocks in place may have left the index",
                plan.blocks().len()
            )));
        }
        if plan.block_size() != self.block_size {
            return Err(Error::invalid(format!(
                "{CALL}: the plan is made for blocks of {} tokens, the ledger for {}",
                plan.block_size(),
                self.block_size
            )));
        }
        if !seq.starts_with(plan.snapshot()) {
            return Err(Error::invalid(format!(
                "{CALL}: the sequence of {} tokens does not start with the {} tokens of the plan in its namespace",
                seq.len(),
                plan.snapshot().tokens.len()
            )));
        }
        let in_place = plan.blocks();
        let differs = in_place
            .iter()
            .enumerate()
            .find(|&(at, id)| blocks.get(at) != Some(id));
        match differs {
            Some((at, id)) => Err(Error::invalid(match blocks.get(at) {
                Some(given) => format!(
                    "{CALL}: blocks[{at}] is {given}, but the plan has block {id} in place there"
                ),
                None => format!(
                    "{CALL}: {} blocks for a plan that has {} in place",
                    blocks.len(),
                    in_place.len()
                ),
            })),
            None => Ok(()),
        }
    }
}
