//! How a request hands blocks to an index, and how it ends.

use std::sync::Arc;

use super::labels::LedgerSource;
use super::record::Record;
use super::{RequestId, SequenceLedger};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::BlockId;
use crate::index::{InsertOptions, Inserted, RadixIndex};
use crate::plan::{PlanOptions, ReusePlan};
use crate::policy::ReusePolicy;
use crate::span::Span;
use crate::tokens::TokenSequence;

/// What is left of a request that was forgotten.
#[derive(Clone, Debug)]
pub struct Forgotten {
    /// The blocks of its table that it did not commit.
    pub blocks: Vec<BlockId>,
    /// The plans that pin its blocks. The caller releases those that are still live.
    pub plans: Vec<Arc<ReusePlan>>,
}

impl SequenceLedger {
    /// Inserts exactly the whole blocks of `committed..verified`. The table then has the ids that the index returned;
    /// `duplicates` and `freed` belong to the caller. Blocks that were not taken stay in the table, so `surplus` is
    /// empty.
    ///
    /// If the source is not a plan, [`pins`](Self::pins) keep committed blocks in the index. If no block is new, the
    /// index is called only when there are spans to tag.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live, or its plan was released.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): another sequence, an index of another block size, and
    ///   what [`RadixIndex::insert`] refuses.
    /// - [`BlockInUse`](crate::ErrorKind::BlockInUse): as for [`RadixIndex::insert`].
    ///
    /// # Complexity
    /// That of the insert.
    pub fn commit(
        &mut self,
        id: RequestId,
        seq: &mut TokenSequence,
        index: &mut RadixIndex,
    ) -> Result<Inserted> {
        const CALL: &str = "SequenceLedger.commit";
        let block_size = self.block_size;
        let record = self.record_mut(id, CALL)?;
        record.check_owns(seq, CALL)?;
        record.check_index(index, block_size, CALL)?;
        let end = record.positions.verified();
        let end = end - end % block_size;
        let spans = record.spans_to_give(end);
        if end == record.committed {
            if !spans.is_empty() {
                index.tag(seq, &spans)?;
                record.gave(end);
            }
            return Ok(Inserted {
                num_exact: record.labels.exact_below(end),
                ..Inserted::default()
            });
        }
        let offered = record.committed / block_size..end / block_size;
        let mut done = record.insert(seq, index, end, offered, &spans)?;
        crate::failpoints::within("commit: the table has other ids");
        done.surplus = Vec::new();
        record.take(&done, block_size);
        record.gave(record.committed);
        if !matches!(record.source, LedgerSource::Plan(_)) && !done.blocks.is_empty() {
            record.hold(done.num_exact, seq, index);
        }
        Ok(done)
    }

    /// Ends a request: commits a last time, returns the rest of the table in `surplus`, releases its plans, and returns
    /// the sequence to its owner. If the insert is refused, the request stays as it is. If its plan was released
    /// before, nothing is inserted, and `surplus` has all blocks that were not committed.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    ///
    /// # Complexity
    /// That of the insert and the release.
    pub fn finish(
        &mut self,
        id: RequestId,
        seq: &mut TokenSequence,
        index: &mut RadixIndex,
    ) -> Result<Inserted> {
        const CALL: &str = "SequenceLedger.finish";
        let block_size = self.block_size;
        let record = self.record(id, CALL)?;
        record.check_owns(seq, CALL)?;
        record.check_index(index, block_size, CALL)?;
        let end = record.positions.verified();
        let spans = record.spans_to_give(end - end % block_size);
        let offered = record.committed / block_size..record.blocks.len();
        let done = match &record.source {
            LedgerSource::Plan(plan) if index.is_released(plan) => Inserted {
                num_exact: record.labels.exact_below(record.committed),
                surplus: record.blocks[offered].to_vec(),
                ..Inserted::default()
            },
            _ => record.insert(seq, index, end, offered, &spans)?,
        };
        for plan in record.plans() {
            index.release_if_live(plan);
        }
        crate::failpoints::within("finish: a request without its plans");
        self.records.remove(id.0.index);
        Ok(done)
    }

    /// Ends a request without an index. The sequence returns to its owner.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    ///
    /// # Complexity
    /// O(blocks).
    pub fn forget(&mut self, id: RequestId) -> Result<Forgotten> {
        self.record(id, "SequenceLedger.forget")?;
        crate::failpoints::before("SequenceLedger.forget")?;
        let record = self.records.remove(id.0.index);
        let (mut blocks, mut plans) = (Vec::new(), Vec::new());
        if let Some(record) = record {
            blocks.extend_from_slice(&record.blocks[record.committed / self.block_size..]);
            plans.extend(record.plans().cloned());
        }
        Ok(Forgotten { blocks, plans })
    }
}

impl Record {
    fn insert(
        &self,
        seq: &mut TokenSequence,
        index: &mut RadixIndex,
        num_computed: usize,
        offered: std::ops::Range<usize>,
        spans: &[Span],
    ) -> Result<Inserted> {
        let options = InsertOptions {
            num_computed,
            start: self.committed,
            source: self.source.as_source(),
            spans,
        };
        index.insert(seq, &self.blocks[offered], options)
    }

    /// Refuses an index of another block size, and one that did not make the request's plans.
    fn check_index(&self, index: &RadixIndex, block_size: usize, call: &str) -> Result<()> {
        check_block_size(index, block_size, call)?;
        for plan in self.plans() {
            match plan.lease_index(index, call) {
                Err(error) if error.kind() == ErrorKind::InvalidArgument => return Err(error),
                // Released: an insert with it is refused.
                _ => {}
            }
        }
        Ok(())
    }

    /// All plans that pin blocks for this request.
    fn plans(&self) -> impl Iterator<Item = &Arc<ReusePlan>> {
        let own = match &self.source {
            LedgerSource::Plan(plan) => Some(plan),
            LedgerSource::Computed | LedgerSource::Imported(_) => None,
        };
        own.into_iter().chain(&self.in_place).chain(&self.pins)
    }

    /// Pins the committed blocks. Earlier pins are released, unless an exact block has replaced an approximate one that
    /// the request still uses. The index has already taken the blocks, so nothing here may fail.
    fn hold(&mut self, num_exact: usize, seq: &mut TokenSequence, index: &mut RadixIndex) {
        let policy = ReusePolicy {
            approximate: num_exact < self.committed,
            max_hops: ReusePolicy::MAX_HOPS,
            // Longer than any run: only blocks in place are wanted.
            min_run: Some(seq.len().max(index.config().min_run) + 1),
            partial_blocks: false,
            ..ReusePolicy::EXACT_ONLY
        };
        let options = PlanOptions {
            keep_last: 0,
            pin: true,
        };
        let plan = Arc::new(index.plan_checked(seq, &policy, options));
        let num_committed = self.committed / plan.block_size();
        // The index may have more of the sequence than the request has computed.
        if plan.blocks().starts_with(&self.blocks[..num_committed]) {
            // The caller of `pins` may have released them.
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
            self.labels.answer(self.committed, done.num_exact);
        }
    }

    /// Spans with tokens below `end` that the index does not have yet.
    fn spans_to_give(&self, end: usize) -> Vec<Span> {
        self.spans
            .iter()
            .filter(|tagged| tagged.span.start < end)
            .filter(|tagged| tagged.given_until < end.min(tagged.span.end))
            .map(|tagged| tagged.span.clone())
            .collect()
    }

    /// The index has the tags of all tokens below `end`.
    fn gave(&mut self, end: usize) {
        for tagged in &mut self.spans {
            tagged.given_until = tagged.given_until.max(end);
        }
    }
}

fn check_block_size(index: &RadixIndex, block_size: usize, call: &str) -> Result<()> {
    let found = index.config().block_size;
    if found == block_size {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{call}: the index has blocks of {found} tokens, the ledger of {block_size}"
    )))
}
