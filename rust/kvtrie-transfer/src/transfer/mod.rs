//! Transfers between engines: manifests of blocks, and plans of what to load from them.
//!
//! A list of block ids does not say what the blocks hold: a receiver that trims it by a length from another engine
//! loads wrong blocks unnoticed. So a sender names its blocks in runs, each with its start position, its number of
//! tokens and digests of them (`manifest`). A receiver loads a token only if a digest proves that its own prompt has
//! this token there (`plan`). Nothing is counted from the end of a list, and no length of the sender is trusted.
//!
//! # Structure
//!
//! - `wire`: `MessagePack` values in their shortest form. `offsets`: the format, and 32 bytes per run for the offsets of
//!   its parts. `digests`: keyed `BLAKE2b` of blocks, of the tokens before a run, of runs and of salts. The key is the
//!   deployment's.
//! - `writer`: which blocks are sent, in which runs. `reader`: checks on untrusted bytes before they become a manifest;
//!   `limits`: the sizes it accepts. `manifest`: the bytes with their offsets. `offer`: the KV of a live request, from a
//!   ledger.
//! - `plan` combines: `own` finds blocks after the same whole prefix, block by block from each run's prefix digest on;
//!   `moved` finds blocks anywhere else in the prompt, if the policy allows it; `pairs` cuts the result at the block
//!   edges of both engines.
//!
//! # Cost of hashing
//!
//! The prompt is hashed once per group as blocks, and once as prefixes if a run starts after position 0. One
//! compression takes 128 bytes, and a block of n tokens without items has 4n + 12: one compression for 16 tokens, two
//! for 32.
//!
//! A search for moved blocks hashes, at every uncovered position, a window of one block, and one of the partial block
//! if that is long enough to be moved alone, each at most once. Keyed digests do not roll, so each window is hashed
//! whole, in about `block_size / 32` compressions: the time grows with uncovered tokens times block size. Hits are
//! followed block by block.

mod digests;
mod limits;
mod manifest;
mod moved;
mod offer;
mod offsets;
mod own;
mod pairs;
mod plan;
mod reader;
#[cfg(test)]
mod tests;
mod wire;
mod writer;

pub use digests::TransferKey;
pub use limits::TransferLimits;
pub use manifest::{BlockRun, TransferManifest};
pub use offer::Offer;
pub use pairs::BlockPair;
pub use plan::{LocalGroup, TransferOptions, TransferPlan};
pub use writer::SentGroup;
