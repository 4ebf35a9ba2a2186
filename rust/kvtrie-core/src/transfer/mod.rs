//! Transfers between engines: manifests of blocks, and plans of what to load of them.
//!
//! A list of block ids says nothing about what the blocks hold: whoever trims it by a length that another engine counted loads the
//! wrong ones without noticing. So a sender names its blocks in runs, each with the position of its first token, the number of its
//! tokens and digests of them (`manifest`); and a receiver loads a token if, and only if, a digest says that it is the one that its
//! own prompt has there (`plan`). Nothing is counted from the end of a list, and no length of the sender's is believed.
//!
//! # Structure
//!
//! - `digests`: keyed `BLAKE2b` of blocks, of the tokens before a run, of runs and of salts. The key is the deployment's.
//! - `wire`: `MessagePack` values in their shortest form. `reader`: what bytes of unknown origin must be to become a manifest.
//!   `limits`: how large they may be. `manifest` keeps the bytes as they are, and beside them 32 bytes a run that say where its parts
//!   stand: reading takes little more memory than the bytes, and writing them again is a copy.
//!   `live` asks a ledger what a running request has.
//! - `plan` puts together: `own` finds what stands behind the same whole prefix, block by block from each run's prefix digest on;
//!   `moved` looks for blocks anywhere else in the prompt, where the policy allows that; `pairs` cuts what was found at block edges
//!   of both engines.
//!
//! # What is hashed, and how often
//!
//! The prompt is hashed once for each group, as blocks, and once as prefixes if a run does not begin at position 0. A compression
//! takes 128 bytes, so that a block of 16 tokens is one of them, and a larger one is one for each 32 tokens begun.
//!
//! A search for moved blocks hashes a window of one block at every position that nothing covers, and one of the partial block if
//! that is long enough to be moved alone, each at most once. Keyed digests do not roll, so each window is hashed whole:
//! `block_size / 32` compressions a position, and so time that grows with uncovered tokens times block size. What is found is
//! followed block by block.

mod digests;
mod limits;
mod live;
mod manifest;
mod moved;
mod own;
mod pairs;
mod plan;
mod reader;
#[cfg(test)]
mod tests;
mod wire;

pub use digests::TransferKey;
pub use limits::TransferLimits;
pub use live::Offer;
pub use manifest::{BlockRun, SentGroup, TransferManifest};
pub use pairs::Pair;
pub use plan::{LocalGroup, TransferOptions, TransferPlan};
