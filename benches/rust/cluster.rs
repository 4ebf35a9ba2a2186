//! Times of an index of many workers, and its bytes per entry, which are those of one block of one worker.
//!
//! Prompts have 1,000 blocks of 16 tokens, of which all workers have the first 250 in common. Every worker stores its
//! prompts from the bytes of vLLM's events, 8 blocks in each; all together store a million entries. With sessions, each
//! prompt is of its own, and runs are promised.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    reason = "a program that prints figures"
)]

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use kvtrie_benches::Random;
use kvtrie_cluster::{FindOptions, IndexerConfig, KvIndexer, Stream, WorkerId};
use kvtrie_core::{Namespace, ReusePolicy, Salt, Scope, TokenSequence};
use rmp::encode::{
    ByteBuf, ValueWriteError, write_array_len, write_f64, write_map_len, write_nil, write_str,
    write_uint,
};

type Failure = Box<dyn std::error::Error>;

const SIZE: usize = 16;
const BLOCKS: usize = 1_000;
const SHARED: usize = 250;
const ENTRIES: usize = 1_000_000;
const PER_EVENT: usize = 8;
const ASKED: usize = 400;

/// A token id of a vocabulary of 150,000.
fn token(random: &mut Random) -> u32 {
    u32::try_from(random.below(150_000)).unwrap_or_default()
}

fn nil(into: &mut ByteBuf) -> Result<(), ValueWriteError<Infallible>> {
    write_nil(into).map_err(ValueWriteError::InvalidMarkerWrite)
}

/// One batch of one event, as vLLM writes it: each number in its shortest form.
fn message(
    hashes: &[u64],
    parent: Option<u64>,
    tokens: &[u32],
    session: Option<&str>,
) -> Result<Vec<u8>, ValueWriteError<Infallible>> {
    let mut out = ByteBuf::new();
    let into = &mut out;
    write_array_len(into, 3)?;
    write_f64(into, 0.0)?;
    write_array_len(into, 1)?;
    write_map_len(into, 8 + u32::from(session.is_some()))?;
    write_str(into, "type")?;
    write_str(into, "BlockStored")?;
    write_str(into, "block_hashes")?;
    write_array_len(into, hashes.len() as u32)?;
    for &hash in hashes {
        write_uint(into, hash)?;
    }
    write_str(into, "parent_block_hash")?;
    match parent {
        Some(parent) => drop(write_uint(into, parent)?),
        None => nil(into)?,
    }
    write_str(into, "token_ids")?;
    write_array_len(into, tokens.len() as u32)?;
    for &token in tokens {
        write_uint(into, token.into())?;
    }
    write_str(into, "block_size")?;
    write_uint(into, SIZE as u64)?;
    write_str(into, "lora_id")?;
    nil(into)?;
    write_str(into, "medium")?;
    write_str(into, "GPU")?;
    write_str(into, "lora_name")?;
    nil(into)?;
    if let Some(session) = session {
        write_str(into, "session_id")?;
        write_str(into, session)?;
    }
    write_uint(into, 0)?;
    Ok(out.into_vec())
}

/// Hashes as those of vLLM: equal for equal prefixes.
fn hashes(tokens: &[u32]) -> Vec<u64> {
    let mut last = 0;
    let hash = |block: &[u32]| {
        last = block.iter().fold(last, |sum: u64, &token| {
            Random::new(sum ^ u64::from(token)).next_u64()
        });
        last
    };
    tokens.chunks(SIZE).map(hash).collect()
}

/// Events that store a prompt from a block on: how many blocks each, and its bytes.
fn messages_of(
    tokens: &[u32],
    first: usize,
    session: Option<&str>,
) -> Result<Vec<(usize, Vec<u8>)>, Failure> {
    let hashes = hashes(tokens);
    let mut messages = Vec::new();
    let mut at = first;
    while at < BLOCKS {
        let end = if at < SHARED {
            SHARED.min(at + PER_EVENT)
        } else {
            BLOCKS.min(at + PER_EVENT)
        };
        let parent = at.checked_sub(1).map(|before| hashes[before]);
        let tokens = &tokens[at * SIZE..end * SIZE];
        let raw = message(&hashes[at..end], parent, tokens, session);
        messages.push((end - at, raw.map_err(|error| error.to_string())?));
        at = end;
    }
    Ok(messages)
}

/// A policy that promises runs of a conversation.
fn policy() -> ReusePolicy {
    ReusePolicy {
        min_run: Some(2 * SIZE),
        scope: Scope::Conversation,
        ..ReusePolicy::LAXEST
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure(num_workers: usize, moved_runs: bool, sessions: bool) -> Result<(), Failure> {
    let mut random = Random::new(5);
    let space = Arc::new(Namespace::new("m", "auto", "default", None, Salt::Shared)?);
    let config = IndexerConfig {
        moved_runs,
        ..IndexerConfig::new(SIZE)
    };
    let mut index = KvIndexer::new(config, &[7; 32])?;
    let shared: Vec<u32> = (0..SHARED * SIZE).map(|_| token(&mut random)).collect();
    let workers: Vec<WorkerId> = (0..num_workers)
        .map(|_| index.add_worker(Arc::clone(&space)))
        .collect::<Result<_, _>>()?;
    if sessions {
        for &worker in &workers {
            index.set_policy(worker, Some(&policy()))?;
        }
    }
    let per_worker = (ENTRIES / num_workers).saturating_sub(SHARED) / (BLOCKS - SHARED);
    let mut prompts = Vec::new();
    let mut messages = Vec::new();
    for _ in 0..per_worker {
        for &worker in &workers {
            let mut tokens = shared.clone();
            tokens.extend((SHARED * SIZE..BLOCKS * SIZE).map(|_| token(&mut random)));
            let first = if prompts.len() < num_workers {
                0
            } else {
                SHARED
            };
            let session = format!("chat-{}", prompts.len());
            let session = sessions.then_some(&*session);
            for (count, raw) in messages_of(&tokens, first, session)? {
                messages.push((worker, count, raw));
            }
            prompts.push(tokens);
        }
    }
    let began = Instant::now();
    for (worker, _, raw) in &messages {
        let batch = index.reader().read(raw)?;
        index.apply(*worker, Stream::Engine, &batch)?;
    }
    let stored: usize = messages.iter().map(|one| one.1).sum();
    let rate = stored as f64 / began.elapsed().as_secs_f64() / 1e6;
    let began = Instant::now();
    for (_, _, raw) in &messages {
        std::hint::black_box(index.reader().read(raw)?);
    }
    let read = stored as f64 / began.elapsed().as_secs_f64() / 1e6;
    let stats = index.stats();
    let [mut ready, mut computed, mut moved] = [const { Vec::new() }; 3];
    for at in 0..ASKED {
        let number = at * 7_919 % prompts.len();
        let mut tokens = prompts[number].clone();
        tokens.truncate(tokens.len() - random.below(4_000) as usize);
        tokens.resize(BLOCKS * SIZE, 1);
        let seq = TokenSequence::new(Arc::clone(&space), tokens, Vec::new())?;
        let began = Instant::now();
        let prompt = index.prompt(&seq, false);
        let prepared = began.elapsed().as_secs_f64();
        let began = Instant::now();
        std::hint::black_box(index.find(&prompt, FindOptions::default())?);
        let found = began.elapsed().as_secs_f64();
        ready.push(found * 1e6);
        computed.push((prepared + found) * 1e6);
        if moved_runs {
            let session = format!("chat-{number}");
            let began = Instant::now();
            let prompt = index.prompt(&seq, true);
            std::hint::black_box(index.find(
                &prompt,
                FindOptions {
                    moved: true,
                    session: sessions.then_some(&session),
                    ..FindOptions::default()
                },
            )?);
            moved.push(began.elapsed().as_secs_f64() * 1e6);
        }
    }
    let moved = if moved_runs { median(&mut moved) } else { 0.0 };
    println!(
        "{num_workers} workers, moved runs {moved_runs}, sessions {sessions}: {} entries, {} blocks, {} edges, {:.1} bytes an entry; store from bytes {rate:.2} M blocks/s (reading alone {read:.2}); find {:.2} us with digests ready, {:.1} us computed, {moved:.0} us with moved runs",
        stats.entries,
        stats.blocks,
        stats.edges,
        stats.bytes as f64 / stats.entries as f64,
        median(&mut ready),
        median(&mut computed),
    );
    Ok(())
}

fn main() -> Result<(), Failure> {
    for num_workers in [8, 64, 256] {
        for (moved_runs, sessions) in [(false, false), (true, false), (true, true)] {
            measure(num_workers, moved_runs, sessions)?;
        }
    }
    Ok(())
}
