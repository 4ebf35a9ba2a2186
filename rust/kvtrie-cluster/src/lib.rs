//! An index of many workers: which of them holds how much of a prompt, from the KV events that their engines publish.
//! The crate is pure Rust, without Python, I/O or unsafe code of its own.
//!
//! The rules C1 to C11 and C13 in `docs/design.md` are its contract.
//!
//! # The model
//!
//! - A **worker** is one engine, or one data-parallel rank of it. It has a name that is never used twice
//!   ([`WorkerId`]), and a namespace.
//! - A **block** is `block_size` tokens after one whole prefix in one namespace. It is named by a keyed digest of two
//!   halves of 64 bits; the index keeps no token, no salt and no key of an image.
//! - A worker **holds** a block while it has more copies stored than removed, in any [`Tier`]. Workers name blocks by
//!   hashes of their own, which mean nothing to other workers.
//! - A search returns for each worker how many tokens it holds from position 0 (*exact*), and how many of the rest it
//!   holds elsewhere in runs of at least `min_run` tokens (*possible*). The second is a hint: fingerprints are compared,
//!   not tokens, and engines decide what they reuse. Where a worker's policy and the sessions of its events are known,
//!   some of these tokens are promised (*moved*).
//!
//! # Calls and costs
//!
//! *Lives* are the workers, those of the last clears and deaths that are not reclaimed yet, and one more for each
//! worker with approximate blocks.
//!
//! | call | cost |
//! |---|---|
//! | [`EventReader::read`] | O(bytes), without a lock |
//! | [`apply`](KvIndexer::apply) | per block O(1), and O(log) of the holes and workers of its edge; where an edge is cut, its shorter part is visited once |
//! | [`prompt`](KvIndexer::prompt) | O(tokens), without a lock through [`EventReader::prompt`] |
//! | [`find`](KvIndexer::find) | O(edges of the path · (lives/64 + log blocks of the edge) + lives), and O(log) for each worker where it leaves |
//! | `find` with moved runs | + O(tokens), and O(runs found · edges · workers that hold them); each worker adds at most four blocks of equal tokens; to promise runs of a conversation, + O(edges above each run), 16,384 in all |
//! | [`clear_worker`](KvIndexer::clear_worker), [`remove_worker`](KvIndexer::remove_worker) | O(workers); each event applied later visits four edges to give the memory back |
//! | [`stats`](KvIndexer::stats) | O(edges + blocks/64) |
//! | [`reclaim`](KvIndexer::reclaim) | O(edges) |
//! | [`digest`](KvIndexer::digest) | O(entries of the worker) |
//! | [`check`](KvIndexer::check) | O(blocks + entries) |
//!
//! `cargo run --release -p kvtrie-benches --bin cluster` prints times and bytes per entry.
//!
//! # Structure
//!
//! `keys` has the digests, `events` reads bytes. `tree` has the unique blocks in edges and who holds them, `owners` the
//! edge of each; `holdings` the blocks of one worker by its engine's hashes; `fingerprints` finds blocks by their tokens
//! alone. `blocks` changes the three together, `scores` asks them, `promises` judges what they find, `indexer` has the
//! calls and the workers. `sessions` says who stored the blocks of an edge, in at most 32 runs per worker.
//!
//! A unique block takes 17 bytes (its digest, and the room that a growing list has), an entry of a worker 14 to 15 (its
//! hash and its block, in a table that is 75 to 90 % full), and edges come on top: 31 to 33 bytes for a block that one
//! worker holds, and 5 to 6 more with moved runs, for which every second block is listed. Where events name
//! sessions, they take 24 bytes per edge, 32 more per worker in it, and 16 for each change of the session. Each block has its own place in
//! these tables, and waiting for their memory is much of what a store costs. So a caller may have it fetched while an
//! event's tokens are read ([`EventReader::read_ahead`], [`KvIndexer::lines`]), and `blocks` reads the places of up to 16
//! blocks of an event before the first of them is stored, and appends them to the end of a path together.
//!
//! # Threads
//!
//! Calls that change the index take `&mut KvIndexer`: a caller with threads puts a lock around it, reads batches and
//! prepares prompts outside of it.
#![forbid(unsafe_code)]

mod blocks;
mod config;
mod digests;
mod error;
mod events;
mod fingerprints;
mod holdings;
mod indexer;
mod keys;
mod lanes;
mod owners;
mod promises;
mod runs;
mod scores;
mod sessions;
mod table;
mod tree;

pub use config::IndexerConfig;
pub use error::{EventError, EventRefusal};
pub use events::{BlocksAhead, EventBatch, EventReader, Refused, Tier};
pub use indexer::{
    Applied, FindOptions, IndexerStats, KvIndexer, OverlapScores, Prompt, Stream, WorkerId,
    WorkerStats,
};
