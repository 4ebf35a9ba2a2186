//! The ledger: records which KV is *computed* for each live request.
//!
//! The counters of an engine run ahead of each other. KV saved by the wrong counter was never computed, or belongs to a
//! token that was taken back. So the ledger takes ids, never counts of ids, and returns the range that is final *and*
//! computed.
//!
//! # The positions of a request
//!
//! ```text
//!  0        committed       V            F          C            S      capacity
//!  |-----------|------------|------------|----------|------------|----------|
//! ```
//!
//! - *F*, final ids: the length of the request's [`TokenSequence`]. Only the ledger changes it.
//! - *C*, computed: the engine's last claim. The KV of everything below is written, or ordered before every reader. *C*
//!   may run ahead of *F* (asynchronous scheduling) and may fall back to *V* (rejected drafts).
//! - *S*, issued: what the engine has scheduled. `C <= S <= blocks · block_size`.
//! - *Drafts*: unverified tokens at the last issued positions. The first claim after ids that follow the first draft
//!   verifies them; the engine has subtracted the rejected drafts. Later drafts under way start right after the ids.
//! - *V* = min(*F*, *C*, first unverified draft): final and computed. Only [`rollback`] lowers it.
//! - *Missing*: the part of `0..F` without KV. Cached segments may follow a gap; a claim that reaches the end of the
//!   gap includes the segment.
//! - *Committed*: whole blocks in an index. At most *V*, and never rolled back.
//!
//! # Guarantees
//!
//! - [`commit`] inserts exactly the whole blocks of `committed..V`, labelled by their source.
//! - A call that contradicts the known positions changes nothing and fails with both numbers.
//! - A sequence has one request at a time. It returns to its owner when the request ends or the ledger is dropped.
//! - Committed blocks stay in the index until the request ends: its plan, or one made by the commit, pins them.
//!
//! The ledger allocates and frees no blocks and moves no KV. The tables of two requests may share blocks.
//!
//! # Costs
//!
//! A call on one request is O(size of its arguments and result), except `begin` and `add_blocks`. [`step`] takes some
//! tens of ns per request and new id. A request takes about 250 bytes, plus 4 per block and 56 per span.
//!
//! [`rollback`]: SequenceLedger::rollback
//! [`commit`]: SequenceLedger::commit
//! [`step`]: SequenceLedger::step

mod begin;
mod cached;
mod commit;
mod groups;
mod ids;
mod labels;
mod positions;
mod request;
mod requests;
mod step;

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Config, Error, Group, Result, ReusePlan, ReusePolicy, Span, TokenSequence, failpoints,
};

use crate::error::{invalid, stale};

use request::{Request, Tagged, check_ids, check_unique, refuse};
use requests::Requests;
use step::Scratch;

pub use begin::Begin;
pub use commit::Forgotten;
pub use ids::PLACEHOLDER;
pub use labels::{LabelRun, LedgerSource};
pub use requests::RequestId;
pub use step::{Step, StepError, StepIds};

/// What a rollback has removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RolledBack {
    /// Tokens whose KV no longer counts as computed: ascending, disjoint ranges.
    pub ranges: Vec<(usize, usize)>,
    /// Blocks cut off the table. They belong to the caller.
    pub blocks: Vec<BlockId>,
    /// The request's own ids of each group that left its table. They belong to the caller.
    pub groups: Vec<Vec<BlockId>>,
}

/// Records what is computed for every live request of an engine.
///
/// Every call on a request that is not live fails with [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use kvtrie_core::*;
/// # use kvtrie_transfer::*;
/// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
/// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
/// let mut ledger = SequenceLedger::new(2)?;
/// let mut seq = TokenSequence::new(ns, vec![1, 2, 3], vec![])?;
/// let id = ledger.begin(&mut seq, &[BlockId(6), BlockId(0)], Begin::default())?;
/// ledger.schedule(id, 3, 0)?;
/// ledger.confirm(id, 3)?;
/// ledger.append(id, &mut seq, &[4])?;
/// assert_eq!((seq.len(), ledger.final_end(id)?), (4, 3));
/// let done = ledger.finish(id, &mut seq, &mut index)?;
/// assert_eq!((done.blocks, done.surplus), (vec![BlockId(6)], vec![BlockId(0)]));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct SequenceLedger {
    block_size: usize,
    groups: Vec<Group>,
    requests: Requests,
    scratch: Scratch,
}

impl SequenceLedger {
    /// Makes a ledger without requests.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if `block_size` is not in
    /// 1..=[`Config::MAX_BLOCK_SIZE`].
    pub fn new(block_size: usize) -> Result<Self> {
        if block_size == 0 || block_size > Config::MAX_BLOCK_SIZE {
            return Err(invalid!(
                "SequenceLedger::new",
                "block_size is {block_size}; it must be in [1, {}]",
                Config::MAX_BLOCK_SIZE
            ));
        }
        Ok(Self {
            block_size,
            groups: Vec::new(),
            requests: Requests::default(),
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
        self.requests.len()
    }

    /// Whether no request is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a request is live.
    #[must_use]
    pub fn is_live(&self, id: RequestId) -> bool {
        self.requests.get(id).is_some()
    }

    /// Records that the engine issues the next `num_tokens` positions, the last `num_drafts` of them drafts. Cached
    /// segments after a gap are skipped.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): more positions than the table has, or more
    ///   drafts than tokens.
    pub fn schedule(&mut self, id: RequestId, num_tokens: usize, num_drafts: usize) -> Result<()> {
        const CALL: &str = "SequenceLedger::schedule";
        let block_size = self.block_size;
        failpoints::before(CALL)?;
        let request = self.request_mut(id, CALL)?;
        let blocks = request.blocks.len();
        let done = request
            .positions
            .schedule(num_tokens, num_drafts, blocks * block_size);
        done.map_err(|why| refuse(why, blocks, block_size, CALL))
    }

    /// Appends final ids: sampled ones, or accepted drafts. [`PLACEHOLDER`]s at the end are skipped.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): no token id, an id after a placeholder, or
    ///   another sequence.
    pub fn append<T: Copy + Into<i64>>(
        &mut self,
        id: RequestId,
        seq: &mut TokenSequence,
        ids: &[T],
    ) -> Result<()> {
        const CALL: &str = "SequenceLedger::append";
        let request = self.request_mut(id, CALL)?;
        request.check_owns(seq, CALL)?;
        let tokens = ids::checked(ids, CALL)?;
        failpoints::before(CALL)?;
        seq.extend_as(&request.owner, &tokens)?;
        failpoints::within("append: ids that are not counted");
        request.positions.append(tokens.len());
        Ok(())
    }

    /// Records that the KV of all positions below `num_computed` is written, or ordered before every reader.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): below *V*, above *S*, or lower than the last
    ///   claim while no ids have arrived for the first drafts.
    pub fn confirm(&mut self, id: RequestId, num_computed: usize) -> Result<()> {
        const CALL: &str = "SequenceLedger::confirm";
        let block_size = self.block_size;
        failpoints::before(CALL)?;
        let request = self.request_mut(id, CALL)?;
        let done = request.positions.confirm(num_computed);
        done.map_err(|why| refuse(why, request.blocks.len(), block_size, CALL))
    }

    /// Appends blocks to the table of a request.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`BlockInUse`](kvtrie_core::ErrorKind::BlockInUse): an id is in the table already, or is given twice.
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): an id that no pool can have.
    ///
    /// # Complexity
    /// O(blocks of the table) for a few blocks; O(blocks · log blocks) for more.
    pub fn add_blocks(&mut self, id: RequestId, blocks: &[BlockId]) -> Result<()> {
        const CALL: &str = "SequenceLedger::add_blocks";
        let request = self.request_mut(id, CALL)?;
        check_ids(blocks, CALL)?;
        check_unique(&request.blocks, blocks, CALL)?;
        failpoints::before(CALL)?;
        request.blocks.extend_from_slice(blocks);
        Ok(())
    }

    /// Lowers *C* and *S* to `to`. The ids stay. With `drop_blocks`, the blocks wholly after `to` leave the table.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): `to` is below what was committed or above *S*; or a
    ///   group has nothing to continue with at `to`: no state there, or not all of its window.
    pub fn rollback(&mut self, id: RequestId, to: usize, drop_blocks: bool) -> Result<RolledBack> {
        const CALL: &str = "SequenceLedger::rollback";
        let block_size = self.block_size;
        let request = self.request(id, CALL)?;
        if to < request.committed {
            return Err(invalid!(
                CALL,
                "to is {to}, but blocks of the first {} tokens are committed; finish the request and begin it again",
                request.committed
            ));
        }
        let issued = request.positions.issued();
        if to > issued {
            return Err(invalid!(
                CALL,
                "to is {to}, but only the positions below {issued} were issued"
            ));
        }
        self.check_rollback(request, to, CALL)?;
        failpoints::before(CALL)?;
        let Some(request) = self.requests.get_mut(id) else {
            return Err(not_live(CALL));
        };
        let ranges = request.positions.rollback(to);
        failpoints::within("rollback: the table is as before");
        let groups = Self::roll_groups_back(&self.groups, request, to, drop_blocks);
        let blocks = if drop_blocks {
            let keep = to.div_ceil(block_size).min(request.blocks.len());
            request.blocks.split_off(keep)
        } else {
            Vec::new()
        };
        Ok(RolledBack {
            ranges,
            blocks,
            groups,
        })
    }

    /// Stores spans, which the next commit gives to the index.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): a span is reversed, ends after the final ids, or
    ///   has an empty kind.
    pub fn tag(&mut self, id: RequestId, spans: &[Span]) -> Result<()> {
        const CALL: &str = "SequenceLedger::tag";
        let request = self.request_mut(id, CALL)?;
        let len = request.positions.num_final;
        for span in spans {
            let (start, end) = (span.start, span.end);
            if start > end || end > len {
                return Err(invalid!(
                    CALL,
                    "spans has [{start}, {end}); it must ascend and lie in [0, {len}], the final tokens"
                ));
            }
            if span.kind.is_empty() {
                return Err(invalid!(
                    CALL,
                    "the kind of the span [{start}, {end}) is empty"
                ));
            }
        }
        failpoints::before(CALL)?;
        request.spans.extend(spans.iter().map(|span| Tagged {
            span: span.clone(),
            given_until: 0,
        }));
        Ok(())
    }

    /// The spans of the request, in call order.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn spans(&self, id: RequestId) -> Result<Vec<Span>> {
        let request = self.request(id, "SequenceLedger::spans")?;
        let spans = request.spans.iter().map(|tagged| tagged.span.clone());
        Ok(spans.collect())
    }

    /// The end of the final and computed tokens, *V*.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn final_end(&self, id: RequestId) -> Result<usize> {
        let request = self.request(id, "SequenceLedger::final_end")?;
        Ok(request.positions.verified())
    }

    /// The range that is final and computed but not committed, `committed..V`.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn new_range(&self, id: RequestId) -> Result<(usize, usize)> {
        let request = self.request(id, "SequenceLedger::new_range")?;
        Ok((request.committed, request.positions.verified()))
    }

    /// The range that is issued but not final and computed, `V..S`.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn lookahead(&self, id: RequestId) -> Result<(usize, usize)> {
        let request = self.request(id, "SequenceLedger::lookahead")?;
        Ok((request.positions.verified(), request.positions.issued()))
    }

    /// Ranges of final tokens without KV, ascending and disjoint.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn missing(&self, id: RequestId) -> Result<Vec<(usize, usize)>> {
        let request = self.request(id, "SequenceLedger::missing")?;
        Ok(request.positions.missing())
    }

    /// The block table, from position 0.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn blocks(&self, id: RequestId) -> Result<&[BlockId]> {
        Ok(&self.request(id, "SequenceLedger::blocks")?.blocks)
    }

    /// The blocks that hold the tokens `start..end`, which must be final and computed.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): a range that is reversed or ends after *V*.
    pub fn blocks_for(&self, id: RequestId, start: usize, end: usize) -> Result<&[BlockId]> {
        const CALL: &str = "SequenceLedger::blocks_for";
        let request = self.request(id, CALL)?;
        let verified = request.positions.verified();
        if start > end || end > verified {
            return Err(invalid!(
                CALL,
                "start and end are {start} and {end}; the range must ascend and lie in [0, {verified}], the tokens that are final and \
                 computed"
            ));
        }
        if start == end {
            return Ok(&[]);
        }
        Ok(&request.blocks[start / self.block_size..end.div_ceil(self.block_size)])
    }

    /// The labels of the tokens `start..end`, in as few runs as possible. All tokens of a block have one label.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): a range that is reversed or ends after the
    ///   table.
    ///
    /// # Complexity
    /// O(blocks · log segments) with a plan that copies anything approximate; else O(1).
    pub fn labels(&self, id: RequestId, start: usize, end: usize) -> Result<Vec<LabelRun>> {
        const CALL: &str = "SequenceLedger::labels";
        let request = self.request(id, CALL)?;
        let capacity = request.blocks.len() * self.block_size;
        if start > end || end > capacity {
            return Err(invalid!(
                CALL,
                "start and end are {start} and {end}; the range must ascend and lie in [0, {capacity}], the table"
            ));
        }
        let in_place = request.in_place.as_deref();
        Ok(request.labels.runs(&request.source, in_place, start, end))
    }

    /// The policy that the request's approximate KV was built under. `None` if none is, if it is not known, or if parts
    /// were built under two policies of which neither is as strict as the other.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn built_under(&self, id: RequestId) -> Result<Option<&ReusePolicy>> {
        let request = self.request(id, "SequenceLedger::built_under")?;
        let in_place = request.in_place.as_deref();
        Ok(request.labels.policy(&request.source, in_place))
    }

    /// The plans with which commits pin their blocks. There are none if the source is a plan.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn pins(&self, id: RequestId) -> Result<&[Arc<ReusePlan>]> {
        Ok(&self.request(id, "SequenceLedger::pins")?.pins)
    }

    /// Removes the spans that were not yet given to an index.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn untag(&mut self, id: RequestId) -> Result<()> {
        let request = self.request_mut(id, "SequenceLedger::untag")?;
        request
            .spans
            .retain(|tagged| tagged.given_until > tagged.span.start);
        Ok(())
    }

    /// The source of the request's KV.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn source(&self, id: RequestId) -> Result<&LedgerSource> {
        Ok(&self.request(id, "SequenceLedger::source")?.source)
    }

    /// Number of tokens whose blocks belong to the index.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    pub fn num_committed(&self, id: RequestId) -> Result<usize> {
        Ok(self.request(id, "SequenceLedger::num_committed")?.committed)
    }

    pub(crate) fn check_owns(
        &self,
        id: RequestId,
        seq: &TokenSequence,
        call: &'static str,
    ) -> Result<()> {
        self.request(id, call)?.check_owns(seq, call)
    }

    fn request(&self, id: RequestId, call: &'static str) -> Result<&Request> {
        self.requests.get(id).ok_or_else(|| not_live(call))
    }

    fn request_mut(&mut self, id: RequestId, call: &'static str) -> Result<&mut Request> {
        self.requests.get_mut(id).ok_or_else(|| not_live(call))
    }
}

#[cold]
fn not_live(call: &'static str) -> Error {
    stale(
        call,
        "the ledger has no such request: it was finished or forgotten, or never begun",
    )
}
