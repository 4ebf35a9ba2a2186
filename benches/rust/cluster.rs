//! Times of an index of many workers, and its bytes per entry, which are those of one block of one worker.
//!
//! Prompts have 1,000 blocks of 16 tokens, of which all workers have the first 250 in common. Every worker stores its
//! prompts from the bytes of vLLM's events, 8 blocks in each; all together store a million entries.

#![expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    reason = "a program that prints figures"
)]

use std::sync::Arc;
use std::time::Instant;

use kvtrie_cluster::{FindOptions, IndexerConfig, KvIndexer, Stream, WorkerId};
use kvtrie_core::{Namespace, Salt, TokenSequence};

const SIZE: usize = 16;
const BLOCKS: usize = 1_000;
const SHARED: usize = 250;
const ENTRIES: usize = 1_000_000;
const PER_EVENT: usize = 8;
const ASKED: usize = 400;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// A token id of a vocabulary of 150,000.
    fn token(&mut self) -> u32 {
        u32::try_from(self.next() % 150_000).unwrap_or_default()
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xa0 | u8::try_from(text.len()).unwrap_or_default());
    out.extend_from_slice(text.as_bytes());
}

fn array(out: &mut Vec<u8>, len: usize) {
    out.push(0xdc);
    out.extend_from_slice(&u16::try_from(len).unwrap_or_default().to_be_bytes());
}

fn number(out: &mut Vec<u8>, number: u64) {
    out.push(0xcf);
    out.extend_from_slice(&number.to_be_bytes());
}

/// One batch of one event, as vLLM writes it.
fn message(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Vec<u8> {
    let mut out = vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x88];
    let into = &mut out;
    text(into, "type");
    text(into, "BlockStored");
    text(into, "block_hashes");
    array(into, hashes.len());
    for &hash in hashes {
        number(into, hash);
    }
    text(into, "parent_block_hash");
    match parent {
        Some(parent) => number(into, parent),
        None => into.push(0xc0),
    }
    text(into, "token_ids");
    array(into, tokens.len());
    for token in tokens {
        into.push(0xce);
        into.extend_from_slice(&token.to_be_bytes());
    }
    text(into, "block_size");
    into.push(16);
    text(into, "lora_id");
    into.push(0xc0);
    text(into, "medium");
    text(into, "GPU");
    text(into, "lora_name");
    into.push(0xc0);
    into.push(0);
    out
}

/// Hashes as those of vLLM: equal for equal prefixes.
fn hashes(tokens: &[u32]) -> Vec<u64> {
    let mut last = 0;
    let hash = |block: &[u32]| {
        last = block.iter().fold(last, |sum: u64, &token| {
            Random(sum ^ u64::from(token)).next()
        });
        last
    };
    tokens.chunks(SIZE).map(hash).collect()
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure(num_workers: usize, moved_runs: bool) -> Result<(), Box<dyn std::error::Error>> {
    let mut random = Random(5);
    let space = Arc::new(Namespace::new("m", "auto", "default", None, Salt::Shared)?);
    let config = IndexerConfig {
        moved_runs,
        ..IndexerConfig::new(SIZE)
    };
    let mut index = KvIndexer::new(config, &[7; 32])?;
    let shared: Vec<u32> = (0..SHARED * SIZE).map(|_| random.token()).collect();
    let workers: Vec<WorkerId> = (0..num_workers)
        .map(|_| index.add_worker(Arc::clone(&space)))
        .collect::<Result<_, _>>()?;
    let per_worker = (ENTRIES / num_workers).saturating_sub(SHARED) / (BLOCKS - SHARED);
    let mut prompts = Vec::new();
    let mut messages = Vec::new();
    for _ in 0..per_worker {
        for &worker in &workers {
            let mut tokens = shared.clone();
            tokens.extend((SHARED * SIZE..BLOCKS * SIZE).map(|_| random.token()));
            let hashes = hashes(&tokens);
            let first = if prompts.len() < num_workers {
                0
            } else {
                SHARED
            };
            let mut at = first;
            while at < BLOCKS {
                let end = if at < SHARED {
                    SHARED.min(at + PER_EVENT)
                } else {
                    BLOCKS.min(at + PER_EVENT)
                };
                let parent = at.checked_sub(1).map(|before| hashes[before]);
                messages.push((
                    worker,
                    end - at,
                    message(&hashes[at..end], parent, &tokens[at * SIZE..end * SIZE]),
                ));
                at = end;
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
        let mut tokens = prompts[at * 7_919 % prompts.len()].clone();
        tokens.truncate(tokens.len() - random.next() as usize % 4_000);
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
            let began = Instant::now();
            let prompt = index.prompt(&seq, true);
            std::hint::black_box(index.find(
                &prompt,
                FindOptions {
                    keep_last: 0,
                    moved: true,
                },
            )?);
            moved.push(began.elapsed().as_secs_f64() * 1e6);
        }
    }
    let moved = if moved_runs { median(&mut moved) } else { 0.0 };
    println!(
        "{num_workers} workers, moved runs {moved_runs}: {} entries, {} blocks, {} edges, {:.1} bytes an entry; store from bytes {rate:.2} M blocks/s (reading alone {read:.2}); find {:.2} us with digests ready, {:.1} us computed, {moved:.0} us with moved runs",
        stats.entries,
        stats.blocks,
        stats.edges,
        stats.bytes as f64 / stats.entries as f64,
        median(&mut ready),
        median(&mut computed),
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for num_workers in [8, 256] {
        for moved_runs in [false, true] {
            measure(num_workers, moved_runs)?;
        }
    }
    Ok(())
}
