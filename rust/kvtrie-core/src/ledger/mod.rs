//! The ledger: what is known to be *computed* for every live request.
//!
//! A serving engine has many counters that almost say how much KV a request has: tokens scheduled, tokens computed, tokens
//! sampled, blocks allocated. They run ahead of each other, and whoever saves, shares or sends KV by the wrong one hands out
//! KV that was never computed, or of a token that was taken back. A length has one owner: here it is the ledger. It takes ids,
//! never counts of ids, and answers which range is final *and* computed.
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
//! - *F*, final ids: the length of the request's [`TokenSequence`], which nobody else changes while the ledger has it.
//! - *C*, computed: the engine's last claim. KV of everything below is written, or ordered before every reader. It may run
//!   ahead of *F* (asynchronous scheduling) and may come down again to *V* (rejected drafts).
//! - *S*, issued: what the engine has scheduled. `C <= S <= blocks · block_size`, always.
//! - *Drafts*: the last positions of what was issued may hold unverified tokens. KV there is not known to be that of the final
//!   id, until ids have arrived behind the first of them and a claim follows: the engine has counted the refused ones out.
//!   Later drafts that are still under way then stand right behind the ids that have arrived.
//! - *V* = min(*F*, *C*, first unverified draft): final and computed. It never falls but by [`rollback`].
//! - *Missing* is what of `0..F` has no KV. Behind a gap there may be *islands* that a plan has copied there; who computes a gap
//!   up to its end has computed the island too, and goes on behind it.
//! - *Committed*: whole blocks that were handed to an index. At most *V*, and never rolled back.
//!
//! # What it promises
//!
//! - [`commit`] inserts exactly the whole blocks of `committed..V`, with labels by where they came from.
//! - A call that contradicts what is known is an error that names both numbers, and changes nothing; [`step`] is all or nothing
//!   for all its requests.
//! - A sequence has one request at a time. It is its owner's again when the request ends, in whatever way, or the ledger is
//!   dropped.
//!
//! - What a request has committed stays until it ends: under its plan, or under one that the commit makes.
//!
//! It allocates and frees no blocks and moves no KV. Of two requests' tables, blocks may be the same: a shared prefix.
//!
//! # Costs
//!
//! All calls on one request are O(1) in the length of its sequence and table, but for what they are given or answer; `begin`
//! sorts the table, and `add_blocks` looks through it. [`step`] is O(requests + new ids), some tens of ns each. A request takes
//! about 250 bytes, 4 a block, and 56 a span.
//!
//! # Structure
//!
//! - `positions`: one request's numbers, and what each call does to them; `present`: islands.
//! - `begin`, `step`, `commit`: calls. `labels`: exactness of blocks. `ids`: placeholders. `record`: one request's state.
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

use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::plan::ReusePlan;
use crate::slab::{Handle, Slab};
use crate::span::Span;
use crate::tokens::TokenSequence;
use crate::tree::Config;

use record::{Record, Tagged, check_ids, check_unique, refuse};
use step::Scratch;

pub use begin::{Begin, Present};
pub use commit::Forgotten;
pub use ids::PLACEHOLDER;
pub use labels::{LabelRun, LedgerSource};
pub use step::{Step, StepError, StepIds};

/// Names a live request of a ledger. Once it has ended, the name is stale, for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId(pub(self) Handle);

/// What a rollback took back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RolledBack {
    /// Tokens whose KV counted as computed and does not any more: ascending, disjoint ranges.
    pub ranges: Vec<(usize, usize)>,
    /// Blocks that were cut off the table, the caller's from here on.
    pub blocks: Vec<BlockId>,
}

/// What is known to be computed for every live request of an engine.
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

    /// Token slots in a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Live requests.
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

    /// The engine issues the next `num_tokens` positions, the last `num_drafts` of them drafts. Islands are passed over.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): the table ends before that, or more drafts than tokens.
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

    /// Appends final ids: sampled ones, or drafts that were accepted. [`PLACEHOLDER`]s at the end are left out.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): an id that is none, or that stands behind a placeholder;
    ///   another sequence.
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

    /// KV of all positions below `num_computed` is written, or ordered before every reader.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): below what is final and computed, or behind what was
    ///   issued.
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
    /// - [`BlockInUse`](crate::ErrorKind::BlockInUse): an id is in the table already, or comes twice.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): an id that no pool can have.
    ///
    /// # Complexity
    /// O(blocks of the table), for a few; O(blocks · log blocks) for more.
    pub fn add_blocks(&mut self, id: RequestId, blocks: &[BlockId]) -> Result<()> {
        const CALL: &str = "SequenceLedger.add_blocks";
        let record = self.record_mut(id, CALL)?;
        check_ids(blocks, CALL)?;
        check_unique(&record.blocks, blocks, CALL)?;
        crate::failpoints::before("SequenceLedger.add_blocks")?;
        record.blocks.extend_from_slice(blocks);
        Ok(())
    }

    /// Nothing at or behind `to` is computed or issued from here on. The ids stay; with `drop_blocks`, blocks wholly behind
    /// `to` leave the table.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): below what was committed, or behind what was issued.
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

    /// Keeps spans, which the index gets with commits.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): a span is reversed, ends behind the final ids, or has an
    ///   empty kind.
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

    /// The spans that the request was tagged with, in that order.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn spans(&self, id: RequestId) -> Result<Vec<Span>> {
        let record = self.record(id, "SequenceLedger.spans")?;
        let spans = record.spans.iter().map(|tagged| tagged.span.clone());
        Ok(spans.collect())
    }

    /// The end of what is final and computed, which begins at position 0.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn final_end(&self, id: RequestId) -> Result<usize> {
        let record = self.record(id, "SequenceLedger.final_range")?;
        Ok(record.positions.verified())
    }

    /// What is final and computed and was not committed.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn new_range(&self, id: RequestId) -> Result<(usize, usize)> {
        let record = self.record(id, "SequenceLedger.new_range")?;
        Ok((record.committed, record.positions.verified()))
    }

    /// What is issued behind what is final and computed.
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
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): a reversed range, or one that ends behind that.
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

    /// How exact the tokens `start..end` are, as far as the table reaches, in as few runs as there are. A block is
    /// approximate as a whole.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): a reversed range, or one that ends behind the table.
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

    /// What commits without a plan have made to hold the blocks that they committed: one plan, as a rule.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn pins(&self, id: RequestId) -> Result<&[Arc<ReusePlan>]> {
        Ok(&self.record(id, "SequenceLedger.pins")?.pins)
    }

    /// Takes back the spans that no index was told of.
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

    /// Where the request's KV comes from.
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    pub fn source(&self, id: RequestId) -> Result<&LedgerSource> {
        Ok(&self.record(id, "SequenceLedger.source")?.source)
    }

    /// Tokens whose blocks are the index's.
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
