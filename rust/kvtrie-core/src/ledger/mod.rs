//! The ledger: which KV is *computed* for each live request.
//!
//! A serving engine has many counters that almost say this: tokens scheduled, computed or sampled, blocks allocated.
//! They run ahead of each other. Code that saves, shares or sends KV by the wrong one hands out KV that was never
//! computed, or that belongs to a token taken back. The ledger therefore owns this length. It takes ids, never counts
//! of ids, and returns the range that is final *and* computed.
//!
//! # The positions of a request
//!
//! ```text
//!  0        committed       V            F          C            S      capacity
//!  |-----------|------------|------------|----------|------------|----------|
//!   the index's  to commit    not safe     ids not    issued, not   blocks,
//!                             to save      known yet  computed      empty
//! ```
//!
//! - *F*, final ids: the length of the request's [`TokenSequence`]. Only the ledger changes it.
//! - *C*, computed: the engine's last claim. KV of everything below is written, or ordered before every reader. *C* may
//!   run ahead of *F* (asynchronous scheduling) and may fall back to *V* (rejected drafts).
//! - *S*, issued: what the engine has scheduled. `C <= S <= blocks · block_size`, always.
//! - *Drafts*: the last issued positions may hold unverified tokens. They are verified once ids have arrived after the
//!   first draft and a claim follows, from which the engine has subtracted the refused drafts. Later drafts still under
//!   way then start right after the arrived ids.
//! - *V* = min(*F*, *C*, first unverified draft): final and computed. Only [`rollback`] lowers it.
//! - *Missing*: the part of `0..F` without KV. After a gap there may be cached segments, copied by a plan or imported.
//!   A claim that reaches the end of the gap includes the segment.
//! - *Committed*: whole blocks that were handed to an index. At most *V*, and never rolled back.
//!
//! # Guarantees
//!
//! - [`commit`] inserts exactly the whole blocks of `committed..V`, labelled by their source.
//! - A call that contradicts the known positions changes nothing and fails with both numbers. [`step`] is all or
//!   nothing for all its requests.
//! - A sequence has one request at a time. It returns to its owner when the request ends or the ledger is dropped.
//! - Committed blocks stay in the index until the request ends: its plan, or one made by the commit, pins them.
//!
//! The ledger allocates and frees no blocks and moves no KV. The tables of two requests may share blocks (a shared
//! prefix).
//!
//! # Costs
//!
//! A call on one request is O(size of its arguments and result), except `begin` and `add_blocks`. [`step`] takes some
//! tens of ns per request and new id. A request takes about 250 bytes, plus 4 per block and 56 per span.
//!
//! # Structure
//!
//! - `positions`: one request's numbers, and what each call does to them. `present`: cached segments after a gap
//!   (`Islands`).
//! - `begin`, `step`, `commit`: calls. `labels`: exactness of blocks. `ids`: placeholders. `record`: one request's
//!   state.
//!
//! [`rollback`]: SequenceLedger::rollback
//! [`commit`]: SequenceLedger::commit
//! [`step`]: SequenceLedger::step

mod begin;
mod commit;
mod ids;
mod labels;
mod positions;
mod present;
mod record;
mod step;

use std::sync::Arc;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::plan::ReusePlan;
use crate::span::Span;
use crate::storage::slab::{Handle, Slab};
use crate::tokens::TokenSequence;

use record::{Record, Tagged, check_ids, check_unique, refuse};
use step::Scratch;

pub use begin::{Begin, Present};
pub use commit::Forgotten;
pub use ids::PLACEHOLDER;
pub use labels::{LabelRun, LedgerSource};
pub use step::{Step, StepError, StepIds};

/// Names a live request of a ledger. It is stale for good once the request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId(pub(self) Handle);

/// What a rollback removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RolledBack {
    /// Tokens whose KV no longer counts as computed: ascending, disjoint ranges.
    pub ranges: Vec<(usize, usize)>,
    /// Blocks cut off the table. They belong to the caller.
    pub blocks: Vec<BlockId>,
}

/// Records what is computed for every live request of an engine.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use kvtrie_core::*;
/// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
/// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
/// let mut ledger = SequenceLedger::new(2)?;
/// let mut seq = TokenSequence::new(ns, vec![1, 2, 3], vec![])?;
/// let id = ledger.begin(&mut seq, &[BlockId(6), BlockId(0)], Begin::default())?;
/// ledger.schedule(id, 3, 0)?;
/// ledger.confirm(id, 3)?;
/// ledger.append(id, &mut seq, &[4])?;
/// // The last sampled token has no KV.
/// assert_eq!((seq.len(), ledger.final_end(id)?), (4, 3));
/// let done = ledger.finish(id, &mut seq, &mut index)?;
/// assert_eq!((done.blocks, done.surplus), (vec![BlockId(6)], vec![BlockId(0)]));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct SequenceLedger {
    block_size: usize,
    records: Slab<Record>,
    scratch: Scratch,
}

impl SequenceLedger {
    /// A ledger without requests.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if `block_size` is not in 1..=[`Config::MAX_BLOCK_SIZE`].
    pub fn new(block_size: usize) -> Result<Self> {
        if block_size == 0 || block_size > Config::MAX_BLOCK_SIZE {
            return Err(Error::invalid(format!(
                "SequenceLedger: block_size is {block_size}; it must be in [1, {}]",
                Config::MAX_BLOCK_SIZE
            )));
        }
        Ok(Self {
            block_size,
            records: Slab::default(),
            scratch: Scratch::default(),
        })
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of live requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether no request is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a request is live.
    #[must_use]
    pub fn is_live(&self, id: RequestId) -> bool {
        self.records.get(id.0).is_some()
    }

    /// Notes that the engine issues the next `num_tokens` positions, the last `num_drafts` of them drafts. Cached
    /// segments after a gap are skipped.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): the positions exceed the table, or there are more
    ///   drafts than tokens.
    pub fn schedule(&mut self, id: RequestId, num_tokens: usize, num_drafts: usize) -> Result<()> {
        const CALL: &str = "SequenceLedger.schedule";
        let block_size = self.block_size;
        crate::failpoints::before("SequenceLedger.schedule")?;
        let record = self.record_mut(id, CALL)?;
        let blocks = record.blocks.len();
        let done = record
            .positions
            .schedule(num_tokens, num_drafts, blocks * block_size);
        done.map_err(|why| refuse(why, blocks, block_size, CALL))
    }

    /// Appends final ids: sampled ones, or accepted drafts. [`PLACEHOLDER`]s at the end are skipped.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): a value that is not a token id, an id after a
    ///   placeholder, or another sequence.
    pub fn append<T: Copy + Into<i64>>(
        &mut self,
        id: RequestId,
        seq: &mut TokenSequence,
        ids: &[T],
    ) -> Result<()> {
        const CALL: &str = "SequenceLedger.append";
        let record = self.record_mut(id, CALL)?;
        record.check_owns(seq, CALL)?;
        let tokens = ids::checked(ids, CALL)?;
        crate::failpoints::before("SequenceLedger.append")?;
        seq.push(&tokens);
        crate::failpoints::within("append: ids that are not counted");
        record.positions.append(tokens.len());
        Ok(())
    }

    /// Notes that KV of all positions below `num_computed` is written, or ordered before every reader.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): below what is final and computed, above what was
    ///   issued, or lower than the last claim while no ids have arrived for the first drafts.
    pub fn confirm(&mut self, id: RequestId, num_computed: usize) -> Result<()> {
        const CALL: &str = "SequenceLedger.confirm";
        let block_size = self.block_size;
        crate::failpoints::before("SequenceLedger.confirm")?;
        let record = self.record_mut(id, CALL)?;
        let done = record.positions.confirm(num_computed);
        done.map_err(|why| refuse(why, record.blocks.len(), block_size, CALL))
    }

    /// Appends blocks to the table.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`BlockInUse`](crate::ErrorKind::BlockInUse): an id is in the table already, or is given twice.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): an id that no pool can have.
    ///
    /// # Complexity
    /// O(blocks of the table) for a few blocks; O(blocks · log blocks) for more.
    pub fn add_blocks(&mut self, id: RequestId, blocks: &[BlockId]) -> Result<()> {
        const CALL: &str = "SequenceLedger.add_blocks";
        let record = self.record_mut(id, CALL)?;
        check_ids(blocks, CALL)?;
        check_unique(&record.blocks, blocks, CALL)?;
        crate::failpoints::before("SequenceLedger.add_blocks")?;
        record.blocks.extend_from_slice(blocks);
        Ok(())
    }

    /// Resets what is computed and issued to the positions below `to`. The ids stay. With `drop_blocks`, blocks wholly
    /// after `to` leave the table.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): `to` is below what was committed or above what was
    ///   issued.
    pub fn rollback(&mut self, id: RequestId, to: usize, drop_blocks: bool) -> Result<RolledBack> {
        const CALL: &str = "SequenceLedger.rollback";
        let block_size = self.block_size;
        let record = self.record_mut(id, CALL)?;
        if to < record.committed {
            return Err(Error::invalid(format!(
                "{CALL}: to is {to}, but blocks of the first {} tokens are committed; finish the request and begin anew",
                record.committed
            )));
        }
        let issued = record.positions.issued();
        if to > issued {
            return Err(Error::invalid(format!(
                "{CALL}: to is {to}, but only the positions below {issued} were issued"
            )));
        }
        crate::failpoints::before("SequenceLedger.rollback")?;
        let ranges = record.positions.rollback(to);
        crate::failpoints::within("rollback: the table is as before");
        let blocks = if drop_blocks {
            let keep = to.div_ceil(block_size).min(record.blocks.len());
            record.blocks.split_off(keep)
        } else {
            Vec::new()
        };
        Ok(RolledBack { ranges, blocks })
    }

    /// Stores spans; commits give them to the index.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): a span is reversed, ends after the final ids, or has
    ///   an empty kind.
    pub fn tag(&mut self, id: RequestId, spans: &[Span]) -> Result<()> {
        const CALL: &str = "SequenceLedger.tag";
        let record = self.record_mut(id, CALL)?;
        let len = record.positions.num_final;
        for span in spans {
            let (start, end) = (span.start, span.end);
            if start > end || end > len {
                return Err(Error::invalid(format!(
                    "{CALL}: spans has [{start}, {end}); it must ascend and lie in [0, {len}], the final tokens"
                )));
            }
            if span.kind.is_empty() {
                return Err(Error::invalid(format!(
                    "{CALL}: the kind of the span [{start}, {end}) is empty"
                )));
            }
        }
        crate::failpoints::before("SequenceLedger.tag")?;
        record.spans.extend(spans.iter().map(|span| Tagged {
            span: span.clone(),
            given_until: 0,
        }));
        Ok(())
    }

    /// The spans of the request, in the order in which they were tagged.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn spans(&self, id: RequestId) -> Result<Vec<Span>> {
        let record = self.record(id, "SequenceLedger.spans")?;
        let spans = record.spans.iter().map(|tagged| tagged.span.clone());
        Ok(spans.collect())
    }

    /// The end of the final and computed tokens, which start at position 0.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn final_end(&self, id: RequestId) -> Result<usize> {
        let record = self.record(id, "SequenceLedger.final_range")?;
        Ok(record.positions.verified())
    }

    /// The tokens that are final and computed but not committed.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn new_range(&self, id: RequestId) -> Result<(usize, usize)> {
        let record = self.record(id, "SequenceLedger.new_range")?;
        Ok((record.committed, record.positions.verified()))
    }

    /// The issued positions after the final and computed tokens.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn lookahead(&self, id: RequestId) -> Result<(usize, usize)> {
        let record = self.record(id, "SequenceLedger.lookahead")?;
        Ok((record.positions.verified(), record.positions.issued()))
    }

    /// Ranges of final tokens without KV, ascending and disjoint.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn missing(&self, id: RequestId) -> Result<Vec<(usize, usize)>> {
        let record = self.record(id, "SequenceLedger.missing")?;
        Ok(record.positions.missing())
    }

    /// The table, from position 0.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn blocks(&self, id: RequestId) -> Result<&[BlockId]> {
        Ok(&self.record(id, "SequenceLedger.blocks")?.blocks)
    }

    /// The blocks that hold exactly the tokens `start..end`, all of which are final and computed.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): a range that is reversed or not all final and
    ///   computed.
    pub fn blocks_for(&self, id: RequestId, start: usize, end: usize) -> Result<&[BlockId]> {
        const CALL: &str = "SequenceLedger.blocks_for";
        let record = self.record(id, CALL)?;
        let verified = record.positions.verified();
        if start > end || end > verified {
            return Err(Error::invalid(format!(
                "{CALL}: start and end are {start} and {end}; the range must ascend and lie in [0, {verified}], the tokens that are final and \
                 computed"
            )));
        }
        if start == end {
            return Ok(&[]);
        }
        Ok(&record.blocks[start / self.block_size..end.div_ceil(self.block_size)])
    }

    /// The labels of the tokens `start..end`, in as few runs as possible. The tokens of a block share one label.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): a range that is reversed or ends after the table.
    ///
    /// # Complexity
    /// O(blocks · log segments) with a plan that copies anything approximate; else O(1).
    pub fn labels(&self, id: RequestId, start: usize, end: usize) -> Result<Vec<LabelRun>> {
        const CALL: &str = "SequenceLedger.labels";
        let record = self.record(id, CALL)?;
        let capacity = record.blocks.len() * self.block_size;
        if start > end || end > capacity {
            return Err(Error::invalid(format!(
                "{CALL}: start and end are {start} and {end}; the range must ascend and lie in [0, {capacity}], the table"
            )));
        }
        let in_place = record.in_place.as_deref();
        Ok(record.labels.runs(&record.source, in_place, start, end))
    }

    /// The plans by which commits pin their blocks, if the source is not a plan. Usually one.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn pins(&self, id: RequestId) -> Result<&[Arc<ReusePlan>]> {
        Ok(&self.record(id, "SequenceLedger.pins")?.pins)
    }

    /// Removes the spans that no index has been given.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn untag(&mut self, id: RequestId) -> Result<()> {
        let record = self.record_mut(id, "SequenceLedger.untag")?;
        record
            .spans
            .retain(|tagged| tagged.given_until > tagged.span.start);
        Ok(())
    }

    /// The source of the request's KV.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn source(&self, id: RequestId) -> Result<&LedgerSource> {
        Ok(&self.record(id, "SequenceLedger.source")?.source)
    }

    /// Number of tokens whose blocks belong to the index.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn num_committed(&self, id: RequestId) -> Result<usize> {
        Ok(self.record(id, "SequenceLedger.num_committed")?.committed)
    }

    /// Checks that a request is live and that this is its sequence.
    pub(crate) fn check_owns(&self, id: RequestId, seq: &TokenSequence, call: &str) -> Result<()> {
        self.record(id, call)?.check_owns(seq, call)
    }

    fn record(&self, id: RequestId, call: &str) -> Result<&Record> {
        self.records.get(id.0).ok_or_else(|| not_live(call))
    }

    fn record_mut(&mut self, id: RequestId, call: &str) -> Result<&mut Record> {
        match self.records.get(id.0) {
            Some(_) => Ok(&mut self.records[id.0.index]),
            None => Err(not_live(call)),
        }
    }
}

#[cold]
fn not_live(call: &str) -> Error {
    Error::stale(format!(
        "{call}: the ledger has no such request: it was finished or forgotten, or never begun"
    ))
}
