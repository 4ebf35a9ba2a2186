//! An index of an engine's KV pool. It says which KV of a prompt is cached, in which blocks, how exact it is, and what
//! must be computed.
//!
//! A forest of radix trees maps token ids to block ids. The crate is pure Rust, without Python, I/O or unsafe code of
//! its own, and never reads KV bytes.
//!
//! # The model
//!
//! - A [`TokenSequence`] is token ids from position 0 in a [`Namespace`], which is everything else that KV depends on.
//!   No query returns KV of another namespace. A token that represents something else (an [`Item`]: an image) is
//!   compared by its id, the item's digest and its offset in the item.
//! - A **block** is `block_size` consecutive token slots of the pool, named by a [`BlockId`]. Only whole blocks are
//!   shared.
//! - An **entry** says that a block holds the KV of the last block of one whole token prefix. It is *exact* or
//!   *approximate*. A label never goes down, and [`RadixIndex::lookup`] never returns approximate KV.
//! - A [`ReusePlan`] says how to build the KV of a prompt: blocks in place, tokens to copy, and tokens to compute. If
//!   the [`ReusePolicy`] allows it, the copies include *moved runs*: cached tokens at another position or after another
//!   prefix. A plan is a lease: what it uses is pinned until it is released.
//! - A block is **free** or **held** (managed by the engine), **indexed**, **condemned** (it left the index while
//!   pinned, and [`RadixIndex::take_freed`] returns it after its last release), or **quarantined** (out of use
//!   permanently).
//!
//! # Calls and costs
//!
//! A sequence remembers the cached prefix that its last call on this index found; *n* is the number of tokens after it,
//! so a grown sequence costs only its new tokens. The memory is void once a block in the middle of a path of its
//! namespace leaves or is replaced, or a block of the edge in which the prefix ends is evicted. Costs do not depend on
//! what else is cached, except where the table says so. *Cuts* remove leaving blocks from the plans that pin them:
//! O(live plans · edges of their paths and sources in the same namespaces), once per call, and only if one of the
//! blocks is pinned. A *pass* visits all leaves, and only when the number of holes exceeds its bound.
//!
//! | call | cost |
//! |---|---|
//! | [`lookup`](RadixIndex::lookup) | O(*n* + ids written); allocates nothing (exceptions: see there) |
//! | [`lookup_pinned_within`](RadixIndex::lookup_pinned_within) | a lookup + O(edges newly pinned) |
//! | [`plan`](RadixIndex::plan) | a lookup + O(new ids + edges newly pinned) + expected O(log siblings) comparisons of one block; if something cached is approximate or has left a hole, + O(tokens of the prompt's path after the match) |
//! | `plan` with [`approximate`](ReusePolicy::approximate) | + O(tokens of the rest): a bounded number of looks per token and per covered token, whatever is cached (rule P16 in `docs/design.md`); tokens of a run are compared as memory |
//! | [`insert`](RadixIndex::insert) | O(*n* + ids given); where an edge is cut, its shorter part is copied once; with a session, + O(edges and runs of sessions above the ids, up to the first block that has it) |
//! | [`release`](RadixIndex::release), [`release_pin`](RadixIndex::release_pin) | O(edges no longer pinned + log leaves), and O(runs of sources + edges above them no longer pinned) |
//! | [`evict`](RadixIndex::evict) | O(log leaves) per leaf or run of dead blocks, and O(1) per block; a pass |
//! | [`discard`](RadixIndex::discard) | O(log leaves) per block; cuts; a pass |
//! | [`quarantine`](RadixIndex::quarantine) | as `discard`, and O(waiting blocks) if one of the blocks is waiting |
//! | [`mark_dead`](RadixIndex::mark_dead) | O(*n* + edges of the path) and O(log dead runs) per run of blocks; afterwards, each use in a namespace with dead blocks costs O(edges of its path) |
//! | [`remove_spans`](RadixIndex::remove_spans) | O(*n* + edges of the path + blocks removed), and O(log leaves) per edge; cuts; a pass |
//! | [`tag`](RadixIndex::tag), [`tags`](RadixIndex::tags) | O(*n* + edges and tags of the path + spans · log spans), and O(blocks) in its edges with holes |
//! | [`num_evictable`](RadixIndex::num_evictable) | O(1) |
//! | [`drop_namespace`](RadixIndex::drop_namespace), [`reset`](RadixIndex::reset) | O(blocks dropped + blocks that live plans pin there) |
//! | [`explain`](RadixIndex::explain) | a plan without pins + O(log namespaces) + a lookup in each of at most 64 namespaces of the same salt |
//! | [`snapshot`](RadixIndex::snapshot), [`restore`](RadixIndex::restore) | O(tokens held + windows), O(bytes · log bytes) |
//! | [`stats`](RadixIndex::stats) | O(edges) |
//! | [`digest`](RadixIndex::digest), [`check`](RadixIndex::check) | O(tokens held + pinned blocks, counted once per plan) |
//!
//! No call recurses: a chain of 10⁶ edges is walked with any stack size. No table is moved as a whole: `cargo run
//! --release -p kvtrie-benches --bin pauses` prints the longest of 10⁵ single inserts and evictions.
//! `docs/benchmarks.md` has the times of all calls.
//!
//! # Groups
//!
//! An index may have [groups](Config::groups) of layers besides group 0: sliding windows and recurrent states (rules G1 to
//! G9). A prompt then continues at the deepest end of exact blocks at which every group has what it needs. The calls
//! above cost what the table says, and for each such group: O(log ids) per block that leaves; O(edges · log ids + blocks)
//! of its window per hit; O(log ids) per id that a plan pins or releases. A lookup and a plan also take O(edges · log ids +
//! ids), for each group, of the path between the end of group 0's match and the place where the prompt continues.
//!
//! | call | cost |
//! |---|---|
//! | [`insert_groups`](RadixIndex::insert_groups) | an insert, O(log ids) per id given and per id on an edge that is cut, and a use of the windows before its end, states and stops: O(edges · log ids + blocks), each block once |
//! | [`evict_group`](RadixIndex::evict_group) | O(log ids) per id, and per id of the group that was used or pinned since its last eviction |
//! | [`take_freed_group`](RadixIndex::take_freed_group), [`discard_group`](RadixIndex::discard_group), [`advance`](RadixIndex::advance) | O(log ids) per id |
//! | [`group_stats`](RadixIndex::group_stats), [`num_evictable_group`](RadixIndex::num_evictable_group) | O(1) |
//!
//! # Memory
//!
//! A cached block takes 4 · `block_size` bytes for its tokens, 4 for its id, 11¼ in the table of ids (in pages of 1,024
//! ids) and, in an edge that holds an approximate block, 2 for its label. An edge takes 80 bytes in the arena, about 6½
//! in the table of children if it has siblings, and 12 in the eviction order if it is an evictable leaf. An edge of
//! fewer than 256 blocks that grows keeps room for up to a quarter more; one whose first blocks were cut off keeps up
//! to a quarter of them. An edge with tags, uses as a source or dead blocks takes about 200 bytes more, plus 24 per run
//! of tags, 16 per use as a source, and 16 per run of dead blocks in the edge and again in the eviction order. An edge
//! with sessions takes these 200 bytes, 32 per run of blocks with equal sessions, and up to 128 more where a run has
//! several; at most 320 per block.
//!
//! With [`moved_runs`](Config::moved_runs), one window is kept for every `min_run − 7` tokens, at about 10 bytes each
//! in a table sized for the pool: 1.1 bytes per token at a `min_run` of 16. The latest 4,096 departures, which
//! [`explain`](RadixIndex::explain) reads, take 80 KiB after the first departure.
//!
//! `cargo run --release -p kvtrie-benches --bin memory` measures, at 16 tokens per block, bytes requested from the
//! allocator and resident pages, which include the allocator's overhead:
//!
//! | shape | bytes per token | per block | per edge, without its blocks | resident, per token |
//! |---|---|---|---|---|
//! | edges of 102,400 tokens | 4.96 | 79.3 | – | 5.16 |
//! | edges of 102,400 tokens, with windows | 6.06 | 96.9 | – | 6.56 |
//! | edges of 512 tokens | 5.15 | 82.4 | 106 | 5.23 |
//! | edges of 512 tokens, two below each, 200 deep | 5.14 | 82.2 | 99 | 5.55 |
//! | grown by one block to 8,192 | 5.08 | 81.3 | – | 5.26 |
//! | leaves of one block below one node | 11.1 | 178 | 98.9 | 12.0 |
//!
//! # Structure
//!
//! Each folder owns its fields and counters: `storage`, `pins`, `eviction`, `moved` and `tagging` are the components of
//! an index; `groups` has what layers without full attention keep; `index` has the calls, one algorithm per file; `plan`, `inspection` and `snapshot` read.
//!
//! # Hashes
//!
//! A seeded hash of (parent, first block) nominates a child of a node that has several; a hash of eight tokens
//! nominates places of a moved run. Token ids are compared before a match counts. So a collision costs time, or makes a
//! plan skip a place that it would have tried ([`ReusePlan::candidates_dropped`]); it never returns wrong KV. With
//! several tenants the seed is a secret.
//!
//! # Threads
//!
//! Calls take `&mut RadixIndex` and `&mut TokenSequence`: a caller with threads puts a lock around each (order:
//! sequence, then index).
//!
//! # What it does not decide
//!
//! Which requests run, when to evict, what the bytes of a block are, and whether approximate reuse is good enough for a
//! model: the default, [`ReusePolicy::EXACT_ONLY`], does not use it. The index moves nothing: a [`Move`] names the
//! slots, the number of tokens and the number of positions by which the engine must rotate K.
#![forbid(unsafe_code)]

mod allocator;
mod config;
mod cursor;
mod effort;
mod error;
mod eviction;
pub mod failpoints;
mod grade;
mod groups;
mod hash;
mod ids;
mod index;
mod inspection;
mod moved;
mod namespace;
mod pins;
mod plan;
mod policy;
mod ranges;
mod session;
mod snapshot;
mod span;
mod storage;
mod tagging;
mod tokens;

pub use allocator::BlockAllocator;
pub use config::Config;
pub use effort::Effort;
pub use error::{Error, ErrorKind, Result};
pub use groups::{Group, GroupKind};
pub use ids::{BlockId, IdRange};
pub use index::{
    GroupInserted, GroupOffers, GroupOptions, GroupStats, Imported, InsertOptions, Inserted,
    LookupOptions, Match, Pin, RadixIndex, Removed, Source,
};
pub use inspection::explain::{
    Context, ExplainOptions, Explanation, GroupCut, NamespaceDifference, Reason, WouldSave,
};
pub use inspection::stats::Stats;
pub use namespace::{Namespace, Salt};
pub use plan::{Class, GroupPart, Move, MovedRun, PlanOptions, ReusePlan, Segment};
pub use policy::{Repair, ReusePolicy, Scope};
pub use session::SessionId;
pub use snapshot::{RestoreLimits, RestoredPool};
pub use span::{BUILT_IN_KINDS, MAX_KINDS, Span};
pub use tokens::{Item, SequenceOwner, TokenSequence};
