//! Makes the manifest of a live request from its ledger.

use kvtrie_core::{BlockId, GroupKind, Result, ReusePolicy, TokenSequence};

use crate::ledger::{LabelRun, RequestId, SequenceLedger};
use crate::transfer::digests::TransferKey;
use crate::transfer::manifest::TransferManifest;
use crate::transfer::tables::Table;
use crate::transfer::writer::{Sent, SentGroup};

/// The KV of a live request that others may load.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    /// Tokens per block.
    pub block_size: usize,
    /// The block table, from position 0.
    pub blocks: Vec<BlockId>,
    /// Labels of the final tokens with KV, ascending and disjoint.
    pub labels: Vec<LabelRun>,
    /// The end of the issued positions.
    pub lookahead_end: usize,
    /// The policy that the approximate KV was built under, if it is known.
    pub policy: Option<ReusePolicy>,
    /// The groups besides group 0, in the order of the ledger.
    pub groups: Vec<OfferedGroup>,
}

/// What a live request has of a group besides group 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedGroup {
    /// What its layers keep.
    pub kind: GroupKind,
    /// Pairs of a position and an id, ascending.
    pub ids: Vec<(usize, BlockId)>,
}

impl Offer {
    /// Makes the offer of a request. `seq` is the sequence that the request began with.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle): the request is not live.
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): another sequence.
    pub fn of(ledger: &SequenceLedger, id: RequestId, seq: &TokenSequence) -> Result<Self> {
        const CALL: &str = "Offer::of";
        ledger.check_owns(id, seq, CALL)?;
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
            policy: ledger.built_under(id)?.cloned(),
            groups: ledger.offered(id)?,
        })
    }

    /// Writes the manifest of the offer. `group` is the number of group 0; the ledger's other groups have the numbers
    /// after it, in their order.
    ///
    /// # Errors
    /// As [`TransferManifest::new`].
    pub fn manifest(
        &self,
        seq: &TokenSequence,
        group: u32,
        key: &TransferKey,
    ) -> Result<TransferManifest> {
        let table = Table::Full(&self.blocks);
        let further = self.groups.iter().map(|own| Table::At(own.kind, &own.ids));
        let tables = std::iter::once(table).chain(further);
        let groups: Vec<SentGroup<'_>> = (group..)
            .zip(tables)
            .map(|(group, table)| SentGroup {
                group,
                block_size: self.block_size,
                table,
            })
            .collect();
        let sent = Sent {
            seq,
            groups: &groups,
            labels: &self.labels,
            lookahead_end: self.lookahead_end,
            policy: self.policy.as_ref(),
        };
        TransferManifest::written("Offer::manifest", sent, key)
    }
}
