//! What a ledger knows of a live request, as a manifest says it.

use crate::error::Result;
use crate::ids::BlockId;
use crate::ledger::{LabelRun, RequestId, SequenceLedger};
use crate::tokens::TokenSequence;
use crate::transfer::digests::TransferKey;
use crate::transfer::manifest::{SentGroup, TransferManifest};

/// What a live request has that others may load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Tokens of a block.
    pub block_size: usize,
    /// The block table, from position 0.
    pub blocks: Vec<BlockId>,
    /// Final tokens with KV, ascending and disjoint.
    pub labels: Vec<LabelRun>,
    /// Where what was issued ends.
    pub lookahead_end: usize,
}

impl Offer {
    /// What a request has; `seq` is the sequence that it began with.
    ///
    /// # Errors
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): another sequence.
    pub fn of(ledger: &SequenceLedger, id: RequestId, seq: &TokenSequence) -> Result<Self> {
        ledger.check_owns(id, seq, "TransferManifest.from_ledger")?;
        let (mut labels, mut at) = (Vec::new(), 0);
        let missing = ledger.missing(id)?;
        for (start, end) in missing.into_iter().chain([(seq.len(), seq.len())]) {
            if at < start {
                labels.extend(ledger.labels(id, at, start)?);
            }
            at = end;
        }
        let end = labels.last().map_or(0, |label| label.end);
        Ok(Self {
            block_size: ledger.block_size(),
            blocks: ledger.blocks(id)?.to_vec(),
            labels,
            lookahead_end: ledger.lookahead(id)?.1.max(end),
        })
    }

    /// The manifest of it, as one group of blocks.
    ///
    /// # Errors
    /// As [`TransferManifest::new`].
    pub fn manifest(
        &self,
        seq: &TokenSequence,
        group: u32,
        key: &TransferKey,
    ) -> Result<TransferManifest> {
        let table = SentGroup {
            group,
            block_size: self.block_size,
            blocks: &self.blocks,
        };
        TransferManifest::new(seq, &[table], &self.labels, self.lookahead_end, key)
    }
}
