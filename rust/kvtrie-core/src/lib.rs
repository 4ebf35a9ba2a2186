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
//! - A [`ReusePlan`] says how to build the KV of a prompt: blocks in place, tokens to copy, and tokens to compute. Where a
//!   [`ReusePolicy`] allows it, the copies are *moved runs* too: tokens that are cached behind another prefix or at another
//!   position. A plan is a lease: what it uses is pinned until it is released.
//! - A [`SequenceLedger`] knows what is *computed* for every live request: the one owner of its lengths. It takes final ids and
//!   the engine's claims, answers the range that is final and computed, and commits exactly that to an index.
//! - A block is **free** or **held** (the engine's business), **indexed**, or **condemned**: it left the index while
//!   pinned, and comes back through [`RadixIndex::take_freed`] after its last release; or it is **quarantined**, out of use for
//!   good.
//!
//! # Calls and costs
//!
//! *n* is the number of tokens given that the sequence was not known to share when it was last used with this index: a
//! grown sequence costs its new tokens. That knowledge lasts while nothing in the middle of a path of its namespace leaves
//! or is replaced, and nothing is evicted from the edge it ends in. No call's cost depends on what else is cached but where
//! said.
//!
//! | call | cost |
//! |---|---|
//! | [`lookup`](RadixIndex::lookup) | O(*n* + ids written); allocates nothing (but see there) |
//! | [`plan`](RadixIndex::plan) | a lookup + O(new ids + edges newly pinned) + expected O(log siblings) comparisons of one block; where something cached is approximate or has left a hole, + O(tokens that the prompt's path has behind the match) |
//! | the same, with [`approximate`](ReusePolicy::approximate) | + O(tokens of the rest): with 64 [`max_candidates`](Config::max_candidates) at most 256 + tokens / 8 looks at places and no more than 512 of these, one more for every 10 tokens, one for each token that is covered, and 32 for each of these up to 16,384 in all, whatever is cached (rule P16); tokens of a run are compared as memory |
//! | [`insert`](RadixIndex::insert) | O(*n* + ids given); where an edge is cut, its shorter part is copied once |
//! | [`release`](RadixIndex::release) | O(edges no longer pinned + log leaves), and O(runs of sources + edges above them no longer pinned) |
//! | [`evict`](RadixIndex::evict) | O(log leaves) a leaf or a run of dead blocks, and O(1) a block; past the bound on holes, one pass over the leaves |
//! | [`discard`](RadixIndex::discard) | O(log leaves) a block; if some are pinned, once O(live plans · edges of their paths and sources in the same namespaces); past the bound on holes, one pass over the leaves |
//! | [`quarantine`](RadixIndex::quarantine) | as `discard`, and O(blocks that wait) if one of them does |
//! | [`mark_dead`](RadixIndex::mark_dead) | O(*n* + edges of the path) and O(log dead runs) a run of blocks; from then on, a use costs O(edges of its path) in the namespaces that have dead blocks |
//! | [`remove_spans`](RadixIndex::remove_spans) | O(*n* + edges of the path + blocks removed), and O(log leaves) an edge; if some are pinned, once O(live plans · edges of their paths and sources in the same namespace); past the bound on holes, one pass over the leaves |
//! | [`tag`](RadixIndex::tag), [`tags`](RadixIndex::tags) | O(*n* + edges and tags of the path + spans · log spans), and O(blocks) in its edges with holes |
//! | [`num_evictable`](RadixIndex::num_evictable) | O(1) |
//! | [`drop_namespace`](RadixIndex::drop_namespace), [`reset`](RadixIndex::reset) | O(blocks dropped + blocks that live plans pin there) |
//! | [`explain`](RadixIndex::explain) | a plan without its pins + O(log namespaces) + a lookup in each of at most 64 of the same salt; of what left it knows the latest 4,096 departures, 20 bytes each |
//! | [`snapshot`](RadixIndex::snapshot), [`restore`](RadixIndex::restore) | O(tokens held + windows), O(bytes · log bytes); 4 · (`block_size` + 1) bytes a block and 17 an edge |
//! | [`stats`](RadixIndex::stats) | O(edges) |
//! | [`digest`](RadixIndex::digest), [`check`](RadixIndex::check) | O(tokens held + blocks pinned, once a plan) |
//!
//! Of a ledger, [`step`](SequenceLedger::step) costs O(requests + new ids), some tens of ns each; calls on one request cost what
//! they are given or answer, and a commit what its insert costs.
//!
//! Nothing recurses: a chain of 10⁶ edges is walked in any stack. No table is moved as a whole: `cargo run --release -p
//! kvtrie-benches --bin pauses` prints the longest of 10⁵ single inserts and evictions. The times of all calls are in
//! `docs/benchmarks.md`, beside other indexes and beside what the machine allows.
//!
//! # Memory
//!
//! A cached block takes 4 · `block_size` bytes for its tokens, 4 for its id, 11¼ in the table of ids (in pages of 1,024
//! ids) and, in an edge that holds an approximate block, 2 for its label. An edge takes 80 bytes in the arena; one with a
//! sibling about 6½ in the table of children, and a leaf that may be evicted 12 in the order of eviction. An edge that
//! grows has room for up to a quarter more, as far as it has fewer than 256 blocks; one whose front was cut off keeps up to
//! a quarter of it. Tags take 24 bytes a run, uses as a source 16 and dead blocks 16 and as many again in the order in which
//! they go, in an edge that has any and about 200 more. Where nothing is dead, that is all it takes.
//!
//! With [`moved_runs`](Config::moved_runs), one window is kept for every `min_run − 7` tokens, at about 10 bytes each in a table
//! made for what the pool can hold: 1.1 bytes a token at a `min_run` of 16. On long edges with blocks of 16 that makes
//! 4 + (4 + 11¼) / 16 + 10 / 9 = 6.1 bytes a token. The names of the latest 4,096 departures, by which
//! [`explain`](RadixIndex::explain) tells what left, take 80 KiB once anything has.
//!
//! At 16 tokens a block, and without windows but where said, measured:
//!
//! | shape | bytes a token | a block | an edge beside its blocks | resident, a token |
//! |---|---|---|---|---|
//! | edges of 102,400 tokens | 4.96 | 79.3 | – | 5.16 |
//! | edges of 102,400 tokens, with windows | 6.06 | 96.9 | – | 6.56 |
//! | edges of 512 tokens | 5.15 | 82.4 | 106 | 5.23 |
//! | edges of 512 tokens, two below each, 200 deep | 5.14 | 82.2 | 99 | 5.55 |
//! | grown by one block to 8,192 | 5.08 | 81.3 | – | 5.26 |
//! | leaves of one block below one node | 11.1 | 178 | 98.9 | 12.0 |
//!
//! `cargo run --release -p kvtrie-benches --bin memory` prints these rows: bytes asked of the allocator, and resident
//! pages, which include what the allocator adds.
//!
//! # Structure
//!
//! What was measured decided it; `make bench` measures it again.
//!
//! - Tokens of an edge lie together, ids behind them (`run`): comparing tokens takes the time of comparing that much memory,
//!   and ids are copied as memory. A hash a block would be computed for every block of every prompt.
//! - A node is 80 bytes (`node`): holes, labels, tags, items and uses that end inside an edge are in a record of their own
//!   that few edges have. Nodes lie in pages (`arena`), as does the order of eviction (`lru`), and the table of children is cut
//!   into shards (`edge_table`): no insert pays for moving one of them as a whole.
//! - An only child is followed without hashing, and is in no table. All children stand in a treap by token order
//!   (`siblings`), which finds the sibling that shares most of a block; a leaf leaves it without comparing anything.
//! - A plan anchors at the deepest block of its path and of each run that it copies from (`tree/pins`), and counts no pins at
//!   blocks. What is protected is counted per node, so a pin costs a step for each edge that nobody else pins.
//! - The order of eviction is a heap of 12 bytes a leaf, and a leaf is evicted as a whole. A list would cost less for a
//!   touch, but a node that becomes a leaf, or a pin that ends, brings a use of any age.
//! - Dead blocks that may go stand in an order of their own, by mark and depth (`tree/dead`), as runs; those that are pinned do
//!   not, and are put there when what protects their edge changes: an eviction looks at none that it cannot take.
//! - The table of ids says where a block stands, and when it last left, counted in plans (`blocks`): an unpinned plan is
//!   validated by that, without noting anything about its blocks when it is made.
//! - A sequence remembers its place, and the ids of its last plan (`cursor`).
//! - Moved runs are found through windows of eight tokens, not through hashes of chunks: one kept for every `min_run − 7` stored
//!   positions (`windows`) and looked up at any position of a prompt finds each run of `min_run` at any alignment. A window is
//!   named after the block of its last token, because parents are unique and children are not: a run is verified backwards and
//!   followed forwards. Keeping windows up costs more than searching them, so they are queued and applied in batches.
//! - The table of windows keeps 23 bits of a hash in buckets of two cache lines, with a filter in front (`fingerprints`): most
//!   windows of a prompt are cached nowhere, and the filter tells so without waiting for memory. What was tried and dropped is
//!   said there.
//! - A plan asks for the best run at one token, and passes over the windows inside a run that it has found (`plan/cover`). Of
//!   many places it follows only those that may reach further than the best so far: of most, one token tells (`plan/reach`).
//!   Runs under the prompt's own prefix, behind holes, are found on its path, without a search.
//! - What a plan copies from is pinned and stamped as runs of an edge, not block by block (`tree/pins`, `tree/recency`).
//! - What left is noted in a ring of fixed size, by the place that it stood behind (`gone`).
//!
//! # Hashes
//!
//! A seeded hash of (parent, first block) nominates a child where there are several, and one of eight tokens nominates places of
//! a run. Token ids are compared before anything counts as found, so a collision costs time and never wrong KV. It can cost a
//! place that a plan would have tried, which the plan counts ([`ReusePlan::candidates_dropped`]). With several tenants the seed is
//! a secret.
//!
//! # Threads
//!
//! Calls take `&mut RadixIndex` and `&mut TokenSequence`: a caller with threads puts a lock around each (order: sequence,
//! then index; a [`SequenceLedger`] before both).
//!
//! # What it does not decide
//!
//! Which requests run, when to evict, what a block's bytes are, or whether approximate reuse is good enough for a model: the
//! default, [`ReusePolicy::EXACT_ONLY`], does without. Nor does it move anything: a [`Move`] says from which slot to which, how
//! many tokens, and by how many positions K is to be turned, to whoever can turn it.
#![forbid(unsafe_code)]

mod allocator;
mod arena;
mod blocks;
mod check;
mod cursor;
mod dead;
mod digest;
mod edge_table;
mod error;
mod explain;
mod extras;
#[cfg(feature = "failpoints")]
pub mod failpoints;
#[cfg(not(feature = "failpoints"))]
mod failpoints;
mod fingerprints;
mod gone;
mod hash;
mod ids;
mod lease;
mod ledger;
mod lru;
mod namespace;
mod node;
mod paged;
mod payload;
mod plan;
mod policy;
mod ranges;
mod run;
mod salts;
mod siblings;
mod slab;
mod snapshot;
mod span;
mod stats;
mod tokens;
mod transfer;
mod tree;
mod windows;

pub use allocator::BlockAllocator;
pub use error::{Error, ErrorKind, Refusal, Result};
pub use explain::{Context, ExplainOptions, Explanation, NamespaceDifference, Reason, WouldSave};
pub use ids::BlockId;
pub use ledger::{
    Begin, Forgotten, LabelRun, LedgerSource, PLACEHOLDER, Present, RequestId, RolledBack,
    SequenceLedger, Step, StepError, StepIds,
};
pub use namespace::{Namespace, Salt};
pub use plan::{Class, Move, PlanOptions, ReusePlan, Segment};
pub use policy::ReusePolicy;
pub use snapshot::{RestoreLimits, RestoredPool};
pub use span::{BUILT_IN_KINDS, MAX_KINDS, Span};
pub use stats::Stats;
pub use tokens::{Item, TokenSequence};
pub use transfer::{
    BlockRun, LocalGroup, Offer, Pair, SentGroup, TransferKey, TransferLimits, TransferManifest,
    TransferOptions, TransferPlan,
};
pub use tree::{
    Config, Effort, Imported, InsertOptions, Inserted, LookupOptions, Match, RadixIndex, Removed,
    Source,
};
