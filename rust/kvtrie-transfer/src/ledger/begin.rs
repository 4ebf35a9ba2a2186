//! Begins a request: where its KV comes from, and what is missing.

use std::sync::Arc;

use kvtrie_core::{BlockId, Class, Error, Result, ReusePlan, SessionId, TokenSequence, failpoints};

use super::cached::{CachedRanges, check_ranges};
use super::groups::GroupTable;
use super::labels::{LedgerSource, RequestLabels};
use super::positions::Positions;
use super::request::{Request, check_ids, check_unique};
use super::{RequestId, SequenceLedger};
use crate::error::invalid;

const CALL: &str = "SequenceLedger::begin";

/// How a request begins: the source of its KV, and which tokens have KV.
#[derive(Clone, Debug)]
pub struct Begin<'a> {
    /// The source of its KV.
    pub source: LedgerSource,
    /// Number of tokens from position 0 that have KV in the table. 0 if the source is a plan, or if `missing` is given.
    pub num_computed: usize,
    /// The ranges of the sequence without KV, ascending and disjoint. `None` means what the plan has to compute;
    /// without a plan, everything from `num_computed` on.
    pub missing: Option<&'a [(usize, usize)]>,
    /// A plan whose blocks in place are the first of the table, only for a source that is not a plan. These blocks
    /// count as committed; the source describes the KV after them.
    pub in_place: Option<Arc<ReusePlan>>,
    /// The conversation that the sequence belongs to: every commit inserts with it.
    pub session: Option<SessionId>,
}

impl Default for Begin<'_> {
    fn default() -> Self {
        Self {
            source: LedgerSource::Computed,
            num_computed: 0,
            missing: None,
            in_place: None,
            session: None,
        }
    }
}

impl Begin<'_> {
    /// The plan whose blocks in place lead the tables.
    fn plan(&self) -> Option<&ReusePlan> {
        match &self.source {
            LedgerSource::Plan(plan) => Some(plan),
            _ => self.in_place.as_deref(),
        }
    }

    /// Begins a request that follows this plan.
    #[must_use]
    pub fn planned(plan: Arc<ReusePlan>) -> Self {
        Self {
            source: LedgerSource::Plan(plan),
            ..Self::default()
        }
    }
}

impl SequenceLedger {
    /// Starts a request. Until it ends, only the ledger changes its sequence.
    ///
    /// With a plan as source, its gaps and all tokens after the planned ones are missing, and its blocks in place count
    /// as committed.
    ///
    /// # Errors
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): another request has the sequence; more tokens
    ///   are present than the sequence has, or than the blocks can hold; ranges that do not ascend, or that start in
    ///   the blocks in place; a plan of another block size, of an index with other
    ///   groups, of other tokens, that pins nothing, or whose blocks in
    ///   place are not the first of the table, or, next to another source, one whose groups cannot continue after these
    ///   blocks (rule G2), as an approximate one's windows may not; a plan as source together with other fields of
    ///   [`Begin`], or `num_computed` with `missing`; an id that no pool can have, or hops above the limit.
    /// - [`BlockInUse`](kvtrie_core::ErrorKind::BlockInUse): an id is given twice.
    ///
    /// # Complexity
    /// O(blocks · log blocks + missing ranges), plus a comparison with the plan's tokens if the sequence is not the
    /// planned one.
    pub fn begin(
        &mut self,
        seq: &mut TokenSequence,
        blocks: &[BlockId],
        begin: Begin<'_>,
    ) -> Result<RequestId> {
        if seq.is_owned() {
            return Err(owned_already(seq));
        }
        begin.source.check(CALL)?;
        check_ids(blocks, CALL)?;
        check_unique(&[], blocks, CALL)?;
        let mut committed = 0;
        if let Some(plan) = &begin.in_place {
            if matches!(begin.source, LedgerSource::Plan(_)) {
                return Err(invalid!(
                    CALL,
                    "the source is a plan, and another plan is given with it"
                ));
            }
            self.check_plan(plan, seq, blocks)?;
            committed = plan.blocks().len() * self.block_size;
            self.check_continues(plan, committed, CALL)?;
        }
        let num_computed = begin.num_computed;
        let (computed, cached) = match (&begin.source, begin.missing) {
            (LedgerSource::Plan(_), missing) if num_computed > 0 || missing.is_some() => {
                return Err(invalid!(
                    CALL,
                    "a plan says itself what is computed; num_computed and missing are for other sources"
                ));
            }
            (LedgerSource::Plan(plan), _) => {
                self.check_plan(plan, seq, blocks)?;
                committed = plan.blocks().len() * self.block_size;
                let gaps = plan
                    .segments()
                    .iter()
                    .filter(|segment| segment.class == Class::Compute)
                    .map(|segment| (segment.start, segment.end));
                CachedRanges::around(gaps, num_planned(plan))
            }
            (_, None) => {
                if num_computed > seq.len() {
                    return Err(invalid!(
                        CALL,
                        "num_computed is {num_computed}; it must be in [0, {}], the tokens of the sequence",
                        seq.len()
                    ));
                }
                (num_computed.max(committed), CachedRanges::default())
            }
            (_, Some(_)) if num_computed > 0 => {
                return Err(invalid!(
                    CALL,
                    "num_computed is {num_computed} and missing is given; they exclude each other"
                ));
            }
            (_, Some(missing)) => {
                check_ranges(missing, seq.len(), CALL)?;
                if let Some(&(start, end)) = missing.iter().find(|range| range.0 < committed) {
                    return Err(invalid!(
                        CALL,
                        "missing has [{start}, {end}), but the first {committed} tokens are in place"
                    ));
                }
                CachedRanges::around(missing.iter().copied(), seq.len())
            }
        };
        let (end, capacity) = (computed.max(cached.end()), blocks.len() * self.block_size);
        if end > capacity {
            return Err(invalid!(
                CALL,
                "KV is claimed up to position {end}, the {} blocks of {} tokens end at {capacity}",
                blocks.len(),
                self.block_size
            ));
        }
        failpoints::before(CALL)?;
        let Some(owner) = seq.own() else {
            return Err(owned_already(seq));
        };
        failpoints::within("begin: a sequence without a request");
        Ok(self.requests.insert(Request {
            owner,
            positions: Positions::new(seq.len(), computed, cached),
            blocks: blocks.to_vec(),
            groups: GroupTable::all(&self.groups, begin.plan()),
            committed,
            labels: RequestLabels::new(&begin.source, begin.in_place.as_deref(), self.block_size),
            source: begin.source,
            in_place: begin.in_place,
            pins: Vec::new(),
            spans: Vec::new(),
            session: begin.session,
        }))
    }

    fn check_plan(&self, plan: &ReusePlan, seq: &TokenSequence, blocks: &[BlockId]) -> Result<()> {
        if !plan.is_pinned() {
            return Err(invalid!(
                CALL,
                "the plan pins nothing, so its {} blocks in place may have left the index",
                plan.blocks().len()
            ));
        }
        self.check_plan_groups(plan, CALL)?;
        if plan.block_size() != self.block_size {
            return Err(invalid!(
                CALL,
                "the plan is made for blocks of {} tokens, the ledger for {}",
                plan.block_size(),
                self.block_size
            ));
        }
        if !plan.is_prefix_of(seq) {
            return Err(invalid!(
                CALL,
                "the sequence of {} tokens does not start with the {} tokens of the plan in its namespace",
                seq.len(),
                num_planned(plan)
            ));
        }
        let in_place = plan.blocks();
        let differs = in_place
            .iter()
            .enumerate()
            .find(|&(at, id)| blocks.get(at) != Some(id));
        match differs {
            Some((at, id)) => Err(match blocks.get(at) {
                Some(given) => invalid!(
                    CALL,
                    "blocks[{at}] is {given}, but the plan has block {id} in place there"
                ),
                None => invalid!(
                    CALL,
                    "{} blocks for a plan that has {} in place",
                    blocks.len(),
                    in_place.len()
                ),
            }),
            None => Ok(()),
        }
    }
}

fn num_planned(plan: &ReusePlan) -> usize {
    plan.segments().last().map_or(0, |segment| segment.end)
}

#[cold]
fn owned_already(seq: &TokenSequence) -> Error {
    invalid!(
        CALL,
        "another request of a SequenceLedger has this sequence of {} tokens",
        seq.len()
    )
}
