//! Which KV do I already have for this prompt, where does it lie, how exact is it, and what must be computed?
//!
//! An index of an engine's KV pool: a forest of radix trees that maps runs of token ids to block ids. Pure Rust, without
//! Python, I/O or unsafe code of its own. It moves no bytes and knows no tensors.
//!
//! # The model
//!
//! - A [`TokenSequence`] is token ids from position 0 in a [`Namespace`], which is everything else that KV depends on.
//!   Namespaces are walls: no query sees across one. A token that stands for something else (an [`Item`]: an image)
//!   compares as its id, the item's digest and its offset in the item.
//! - A **block** is `block_size` consecutive token slots of the pool, named by a [`BlockId`]. Only whole blocks are shared.
//! - An **entry** says that a block holds the KV of the last block of one whole token prefix. It is *exact* or
//!   *approximate*; a label never goes down, and nothing approximate is ever answered by [`RadixIndex::lookup`].
//! - A [`ReusePlan`] says how to build the KV of a prompt. It is a lease: what it uses is pinned until it is released.
//! - A block is **free** or **held** (the engine's business), **indexed**, or **condemned**: it left the index while
//!   pinned, and comes back through [`RadixIndex::take_freed`] after its last release.
//!
//! # Calls and costs
//!
//! *n* is the number of tokens given that the sequence was not known to share when it was last used with this index;
//! a grown sequence costs its new tokens. No call's cost depends on what else is cached but where said.
//!
//! | call | cost |
//! |---|---|
//! | [`lookup`](RadixIndex::lookup) | O(*n* + ids written); allocates nothing (but see there) |
//! | [`plan`](RadixIndex::plan) | a lookup + O(blocks in place) + expected O(log siblings) comparisons of one block |
//! | [`insert`](RadixIndex::insert) | O(*n* + ids given); where an edge is cut, the shared part of that edge is copied once |
//! | [`release`](RadixIndex::release) | O(blocks pinned + log leaves) |
//! | [`evict`](RadixIndex::evict) | O(log leaves) a block |
//! | [`discard`](RadixIndex::discard) | O(log leaves) a block; for a pinned one O(live plans); past the bound on holes, one pass over the leaves |
//! | [`tag`](RadixIndex::tag), [`tags`](RadixIndex::tags) | O(blocks and tags of the path) |
//! | [`num_evictable`](RadixIndex::num_evictable) | O(1) |
//! | [`drop_namespace`](RadixIndex::drop_namespace), [`reset`](RadixIndex::reset) | O(blocks dropped + live plans) |
//! | [`stats`](RadixIndex::stats) | O(edges) |
//! | [`digest`](RadixIndex::digest), [`check`](RadixIndex::check) | O(tokens held) |
//!
//! Nothing recurses: a chain of 10⁶ edges is walked in any stack.
//!
//! # Memory
//!
//! A cached block takes 4 · `block_size` bytes for its tokens, 4 for its id, 16 in the table of ids (in pages of 1,024
//! ids) and, in an edge that holds an approximate block, 2 for its label. An edge takes about 200 bytes in the arena and
//! about 45 in the edge table and the order of eviction, times the room that growing vectors keep (up to 2). Tags take 24
//! bytes a run. At 16 tokens a block, measured:
//!
//! | shape | bytes a token | a block | resident, a token | a block |
//! |---|---|---|---|---|
//! | edges of 102,400 tokens | 5.26 | 84.2 | 5.39 | 86.2 |
//! | edges of 512 tokens | 5.85 | 93.6 | 5.81 | 93.0 |
//! | grown by one block to 8,192 | 5.30 | 84.7 | 5.33 | 85.3 |
//! | edges of one block | 25.4 | 406.8 | 23.0 | 367.5 |
//!
//! `cargo run --release -p kvtrie-benches --bin memory` prints this table: bytes asked of the allocator, and resident
//! pages, which include what the allocator adds.
//!
//! # Hashes
//!
//! A seeded hash of (parent, first block) nominates a child where there are several. Token ids are compared before
//! anything counts as found, so a collision costs time and never an answer. With several tenants the seed is a secret.
//!
//! # Threads
//!
//! Calls take `&mut RadixIndex` and `&mut TokenSequence`: a caller with threads puts a lock around each (order: sequence,
//! then index).
//!
//! # What it does not decide
//!
//! Which requests run, when to evict, what a block's bytes are, or whether approximate reuse is good enough for a model.
//! This version plans exact reuse alone: approximate entries are kept apart and labelled, and never reused.
#![forbid(unsafe_code)]

mod allocator;
mod arena;
mod blocks;
mod check;
mod cursor;
mod digest;
mod edge_table;
mod error;
#[cfg_attr(
    not(test),
    expect(
        dead_code,
        reason = "the search for moved runs will read it; today it is kept up"
    )
)]
mod fingerprints;
mod hash;
mod ids;
mod lease;
mod lru;
mod namespace;
mod node;
mod paged;
mod plan;
mod policy;
mod run;
mod siblings;
mod slab;
mod span;
mod stats;
mod tokens;
mod tree;
mod windows;

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
    Config, Effort, Imported, InsertOptions, Inserted, LookupOptions, Match, RadixIndex, Source,
};
