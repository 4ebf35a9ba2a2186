//! Commits blocks of a request to an index, and ends requests.

use std::sync::Arc;

use kvtrie_core::{
    BlockId, GroupInserted, GroupOptions, InsertOptions, Inserted, RadixIndex, Result, ReusePlan,
    Span, TokenSequence, failpoints,
};

use super::groups::numbered;
use super::labels::LedgerSource;
use super::request::Request;
use super::{RequestId, SequenceLedger};
use crate::error::invalid;

/// What remains of a request that ended without a commit.
#[derive(Clone, Debug)]
pub struct Forgotten {
    /// The blocks of its table that it did not commit.
    pub blocks: Vec<BlockId>,
    /// The request's own ids of each group besides group 0.
    pub groups: Vec<Vec<BlockId>>,
    /// The plans that pin its blocks. The caller releases those that are still live.
    pub plans: Vec<Arc<ReusePlan>>,
}

impl SequenceLedger {
    /// Inserts exactly the whole blocks of `committed..V` into the index. The table then has the ids that the index
    /// returned; `duplicates` and `freed` belong to the caller. Blocks that were not taken stay in the table, so
    /// `surplus` is empty.
    ///
    /// If the source is not a plan, [`pins`](Self::pins) keep committed blocks in the index. If no block is new, the
    /// index is called only when there are spans to tag.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle): the request is not live, or its plan was released.
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): another sequence, an index of another block
    ///   size, and what [`RadixIndex::insert`] refuses.
    /// - [`BlockInUse`](kvtrie_core::ErrorKind::BlockInUse): as for [`RadixIndex::insert`].
    ///
    /// # Complexity
    /// That of the insert.
    pub fn commit(
        &mut self,
        id: RequestId,
        seq: &mut TokenSequence,
        index: &mut RadixIndex,
    ) -> Result<Inserted> {
        const CALL: &str = "SequenceLedger::commit";
        let block_size = self.block_size;
        self.check_groups(index, CALL)?;
        let request = self.request_mut(id, CALL)?;
        request.check_owns(seq, CALL)?;
        request.check_index(index, block_size, CALL)?;
        let end = request.positions.verified();
        let end = end - end % block_size;
        let spans = request.spans_to_give(end);
        if end == request.committed {
            if !spans.is_empty() {
                index.tag(seq, &spans)?;
                request.gave(end);
            }
            return Ok(Inserted {
                num_exact: request.labels.exact_below(end),
                ..Inserted::default()
            });
        }
        let offered = request.committed / block_size..end / block_size;
        let mut done = request
            .insert(seq, index, end, offered, (&spans, GroupOptions::default()))?
            .0;
        failpoints::within("commit: the table has other ids");
        done.surplus = Vec::new();
        request.take(&done, block_size);
        request.gave(request.committed);
        if !matches!(request.source, LedgerSource::Plan(_)) && !done.blocks.is_empty() {
            request.hold(done.num_exact, seq, index);
        }
        Ok(done)
    }

    /// Commits a last time and ends the request. It releases the request's plans, returns the sequence to its owner,
    /// and returns the rest of the table in `surplus`. If the insert is refused, the request stays. If the request's
    /// plan was released before, nothing is inserted, and `surplus` has all blocks that were not committed.
    ///
    /// # Errors
    /// As [`commit`](Self::commit); and [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if the ledger has
    /// groups, whose ids [`finish_groups`](Self::finish_groups) returns.
    ///
    /// # Complexity
    /// That of the insert and the release.
    pub fn finish(
        &mut self,
        id: RequestId,
        seq: &mut TokenSequence,
        index: &mut RadixIndex,
    ) -> Result<Inserted> {
        if let Some(group) = self.groups().first() {
            return Err(invalid!(
                "SequenceLedger::finish",
                "the ledger has group {:?} besides group 0; finish_groups returns its ids",
                group.name
            ));
        }
        let (done, _) = self.finish_groups(id, seq, index, &[])?;
        Ok(done)
    }

    /// As [`finish`](Self::finish), and offers the index the request's own ids of groups at computed tokens. Returns
    /// what became of them, for each group; what was not offered is in its `surplus`. The insert gets `stops`, as
    /// [`GroupOptions`] has them.
    ///
    /// # Errors
    /// As [`commit`](Self::commit), and as [`RadixIndex::insert_groups`].
    ///
    /// # Complexity
    /// That of the insert and the release.
    pub fn finish_groups(
        &mut self,
        id: RequestId,
        seq: &mut TokenSequence,
        index: &mut RadixIndex,
        stops: &[usize],
    ) -> Result<(Inserted, Vec<GroupInserted>)> {
        const CALL: &str = "SequenceLedger::finish";
        let block_size = self.block_size;
        self.check_groups(index, CALL)?;
        let request = self.request(id, CALL)?;
        request.check_owns(seq, CALL)?;
        request.check_index(index, block_size, CALL)?;
        let end = request.positions.verified();
        let spans = request.spans_to_give(end - end % block_size);
        let offered = request.committed / block_size..request.blocks.len();
        let mut offers = request.offers(&self.groups, end);
        let (done, results) = match &request.source {
            LedgerSource::Plan(plan) if index.is_released(plan) => {
                offers.iter_mut().for_each(Vec::clear);
                let done = Inserted {
                    num_exact: request.labels.exact_below(request.committed),
                    surplus: request.blocks[offered].to_vec(),
                    ..Inserted::default()
                };
                (done, Vec::new())
            }
            _ => {
                let numbered = numbered(&offers);
                let options = GroupOptions {
                    offers: &numbered,
                    stops,
                };
                request.insert(seq, index, end, offered, (&spans, options))?
            }
        };
        let results = request.with_rest(&offers, results);
        for plan in request.plans() {
            index.release_if_live(plan);
        }
        failpoints::within("finish: a request without its plans");
        self.requests.remove(id);
        Ok((done, results))
    }

    /// Ends a request without an index. The sequence returns to its owner.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle): the request is not live.
    ///
    /// # Complexity
    /// O(blocks).
    pub fn forget(&mut self, id: RequestId) -> Result<Forgotten> {
        const CALL: &str = "SequenceLedger::forget";
        self.request(id, CALL)?;
        failpoints::before(CALL)?;
        let request = self.requests.remove(id);
        let (mut blocks, mut plans, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        if let Some(request) = request {
            blocks.extend_from_slice(&request.blocks[request.committed / self.block_size..]);
            plans.extend(request.plans().cloned());
            groups = request.own_of_groups();
        }
        Ok(Forgotten {
            blocks,
            groups,
            plans,
        })
    }
}

impl Request {
    fn insert(
        &self,
        seq: &mut TokenSequence,
        index: &mut RadixIndex,
        num_computed: usize,
        offered: std::ops::Range<usize>,
        (spans, groups): (&[Span], GroupOptions<'_>),
    ) -> Result<(Inserted, Vec<GroupInserted>)> {
        let options = InsertOptions {
            num_computed,
            start: self.committed,
            source: self.source.as_source(),
            spans,
            session: self.session,
        };
        index.insert_groups(seq, &self.blocks[offered], options, groups)
    }

    pub(super) fn check_index(
        &self,
        index: &RadixIndex,
        block_size: usize,
        call: &'static str,
    ) -> Result<()> {
        check_block_size(index, block_size, call)?;
        for plan in self.plans() {
            if !plan.is_of(index) {
                return Err(invalid!(call, "the plan belongs to another index"));
            }
        }
        Ok(())
    }

    fn plans(&self) -> impl Iterator<Item = &Arc<ReusePlan>> {
        let own = self.source_plan();
        own.into_iter().chain(&self.in_place).chain(&self.pins)
    }

    pub(super) fn source_plan(&self) -> Option<&Arc<ReusePlan>> {
        match &self.source {
            LedgerSource::Plan(plan) => Some(plan),
            LedgerSource::Computed | LedgerSource::Imported(_) => None,
        }
    }

    /// Pins the committed blocks. Earlier pins stay if an exact block has replaced an approximate one that the request
    /// still uses. This cannot fail: the index has already taken the blocks.
    fn hold(&mut self, num_exact: usize, seq: &mut TokenSequence, index: &mut RadixIndex) {
        let plan = Arc::new(index.pin_in_place(seq, num_exact < self.committed));
        let num_committed = self.committed / plan.block_size();
        // The index may have more blocks of the sequence than the request has computed.
        if plan.blocks().starts_with(&self.blocks[..num_committed]) {
            for before in self.pins.drain(..) {
                index.release_if_live(&before);
            }
        }
        self.pins.push(plan);
    }

    fn take(&mut self, done: &Inserted, block_size: usize) {
        let first = self.committed / block_size;
        self.blocks[first..first + done.blocks.len()].copy_from_slice(&done.blocks);
        self.committed += done.blocks.len() * block_size;
        if !done.blocks.is_empty() {
            self.labels.note_index(self.committed, done.num_exact);
        }
    }

    fn spans_to_give(&self, end: usize) -> Vec<Span> {
        self.spans
            .iter()
            .filter(|tagged| tagged.span.start < end)
            .filter(|tagged| tagged.given_until < end.min(tagged.span.end))
            .map(|tagged| tagged.span.clone())
            .collect()
    }

    fn gave(&mut self, end: usize) {
        for tagged in &mut self.spans {
            tagged.given_until = tagged.given_until.max(end);
        }
    }
}

fn check_block_size(index: &RadixIndex, block_size: usize, call: &'static str) -> Result<()> {
    let found = index.config().block_size;
    if found == block_size {
        return Ok(());
    }
    Err(invalid!(
        call,
        "the index has blocks of {found} tokens, the ledger of {block_size}"
    ))
}
