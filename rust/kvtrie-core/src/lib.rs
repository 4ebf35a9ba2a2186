//! Radix index over token runs and KV blocks.

mod allocator;
mod blocks;
mod check;
mod digest;
mod error;
mod hash;
mod ids;
mod lru;
mod namespace;
mod node;
mod pins;
mod plan;
mod policy;
mod siblings;
mod slab;
mod span;
mod stats;
mod tokens;
mod tree;

pub use allocator::BlockAllocator;
pub use error::{Error, ErrorKind, Result};
pub use ids::BlockId;
pub use namespace::{Namespace, Salt};
pub use plan::{Class, Move, PlanOptions, ReusePlan, Segment};
pub use policy::ReusePolicy;
pub use span::{BUILT_IN_KINDS, MAX_KINDS, Span};
pub use stats::Stats;
pub use tokens::{Item, TokenSequence};
pub use tree::{
    Config, Imported, InsertOptions, Inserted, LookupOptions, Match, RadixIndex, Source,
};
