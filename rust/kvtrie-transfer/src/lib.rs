//! Records what KV of a live request is computed, and plans what another engine loads of it. The crate has no Python,
//! I/O or unsafe code, and never reads KV bytes.
//!
//! - A [`SequenceLedger`] takes final ids and the engine's claims, returns the range that is final and computed, and
//!   commits exactly that range to a [`RadixIndex`](kvtrie_core::RadixIndex).
//! - A [`TransferManifest`] names the blocks of one request with digests of their tokens. A [`TransferPlan`] says which
//!   of them a receiver loads, where, and what it computes.
//!
//! A caller with threads puts a lock around each ledger, and takes it before those of sequences and of the index.
#![forbid(unsafe_code)]

mod error;
mod ledger;
mod transfer;

pub use error::{Refusal, TransferError};
pub use ledger::{
    Begin, Forgotten, LabelRun, LedgerSource, PLACEHOLDER, RequestId, RolledBack, SequenceLedger,
    Step, StepError, StepIds,
};
pub use transfer::{
    BlockPair, BlockRun, LocalGroup, Offer, OfferedGroup, SentGroup, Table, TransferKey,
    TransferLimits, TransferManifest, TransferOptions, TransferPlan,
};
