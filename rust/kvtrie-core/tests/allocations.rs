//! Tests what is allocated: nothing by a lookup, and a known number of bytes for cached tokens.
//!
//! There is one test only, because the counter counts the whole process.

use std::alloc::System;

use common::{ids, inserting, sequence};
use kvtrie_core::{BlockId, Config, InsertOptions, LookupOptions, RadixIndex, Source};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

mod common;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const BLOCK_SIZE: usize = 16;
const BLOCKS: u32 = 6_400;

#[test]
fn a_lookup_allocates_nothing_and_a_long_edge_costs_79_bytes_a_block() {
    let tokens: Vec<u32> = (0..BLOCKS * 16).collect();
    let blocks = ids(0..BLOCKS);
    let mut seq = sequence(tokens.clone());
    let mut index = RadixIndex::new(Config::seeded(0)).unwrap();

    let region = Region::new(ALLOCATOR);
    let options = InsertOptions::new(tokens.len(), Source::Computed);
    index.insert(&mut seq, &blocks, options).unwrap();
    let change = region.change();
    let held = change.bytes_allocated - change.bytes_deallocated;
    // Each block takes 4 bytes per token, 4 for its id and 11 in the table of ids. Partly used pages of that table and
    // of nodes take 40 KiB.
    let expected = BLOCKS as usize * (4 * BLOCK_SIZE + 4 + 11);
    assert!(
        (expected..expected + (40 << 10) + BLOCKS as usize / 8).contains(&held),
        "{held} bytes, {expected} expected"
    );

    // Another sequence leaves the first in the middle of its edge.
    let half = tokens.len() / 2;
    let mut other = sequence([&tokens[..half], &[u32::MAX; BLOCK_SIZE][..]].concat());
    let options = inserting(half..half + BLOCK_SIZE, Source::Computed);
    index
        .insert(&mut other, &[BlockId(BLOCKS)], options)
        .unwrap();

    let mut out = Vec::with_capacity(BLOCKS as usize + 1);
    // Each prompt, and whether its match ends inside an edge. A touch then stores a use there, with one allocation.
    let prompts = [
        (tokens.clone(), 0),
        (tokens[..half].to_vec(), 0),
        (tokens[..half + 40].to_vec(), 1),
        (vec![9, 9, 9], 0),
    ];
    for _ in 0..2 {
        for (prompt, kept) in &prompts {
            let mut cold = sequence(prompt.clone());
            for (touch, allowed) in [(false, 0), (true, *kept), (true, 0)] {
                let region = Region::new(ALLOCATOR);
                let options = LookupOptions {
                    touch,
                    ..LookupOptions::default()
                };
                index.lookup(&mut cold, options, &mut out).unwrap();
                assert_eq!(region.change().allocations, allowed);
            }
        }
    }
}
