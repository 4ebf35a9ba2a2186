//! Transfers between engines: manifests of blocks, and plans of what to load from them.
//!
//! A sender names runs of blocks with their positions and token digests. A receiver loads a token only if a digest
//! proves that its own prompt has this token there. It trusts no length that the sender states.
//!
//! # Cost of hashing
//!
//! The prompt is hashed once per group as blocks, and once as prefixes if a run starts after position 0. A block of n
//! tokens without items has 4n + 12 bytes; one compression takes 128.
//!
//! A search for moved blocks hashes two windows at every uncovered position: one of a block, and one of the partial
//! block if that is long enough to be moved alone. Each window is hashed at most once. A keyed digest cannot be rolled
//! from one window to the next, so each window takes about `block_size / 32` compressions.

mod built;
mod context;
mod continued;
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
mod tables;
#[cfg(test)]
mod tests;
mod wire;
mod writer;

pub use digests::TransferKey;
pub use limits::TransferLimits;
pub use manifest::{BlockRun, TransferManifest};
pub use offer::{Offer, OfferedGroup};
pub use pairs::BlockPair;
pub use plan::{LocalGroup, TransferOptions, TransferPlan};
pub use tables::Table;
pub use writer::SentGroup;
