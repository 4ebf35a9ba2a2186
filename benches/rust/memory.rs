//! Reports what cached tokens cost in memory: bytes asked of the allocator, and resident pages, which include what the
//! allocator adds. Each shape is measured in its own process.
//!
//! `memory [--json]`

use std::alloc::System;
use std::env;
use std::error::Error;
use std::fs;
use std::process::Command;
use std::sync::Arc;

use kvtrie_benches::{
    BLOCK_SIZE, Comb, Ids, Row, add, empty, filled, filled_with_fingerprints, flag, namespace,
    tokens,
};
use kvtrie_core::{RadixIndex, TokenSequence};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes that a block takes in the table from block ids to places: 11, and a bit.
const TABLE: f64 = 11.125;

enum Shape {
    /// Sequences that share nothing, and tokens of each, inserted at once.
    Edges(u64, u64),
    /// The same, in an index that keeps fingerprints of windows.
    Fingerprints(u64, u64),
    /// As the first, inserted one block at a time: an edge grows up to some length, then gets a child.
    Grown(u64, u64),
    /// Chains, and what they look like.
    Chains(u64, Comb),
    /// Edges from the root to a leaf, each of as many tokens and with 4 children.
    Fours(u32, u64),
}

const SHAPES: [(&str, Shape); 8] = [
    ("edges of 102,400 tokens", Shape::Edges(64, 102_400)),
    (
        "edges of 102,400 tokens, with fingerprints",
        Shape::Fingerprints(64, 102_400),
    ),
    ("edges of 512 tokens", Shape::Edges(12_800, 512)),
    (
        "edges of 512 tokens, two below each, 200 deep",
        Shape::Chains(
            32,
            Comb {
                levels: 200,
                edge: 512,
                children: 2,
                sibling: 512,
            },
        ),
    ),
    (
        "edges of 64 tokens, four below each, 8 deep",
        Shape::Fours(8, 64),
    ),
    ("grown by one block to 8,192", Shape::Grown(800, 8_192)),
    ("grown by one block to 4,992", Shape::Grown(1_300, 4_992)),
    (
        "leaves of one block below one node",
        Shape::Edges(200_000, BLOCK_SIZE as u64),
    ),
];

impl Shape {
    /// The index, and how many edges it must have, where that is known.
    fn build(&self) -> Result<(RadixIndex, Option<u64>), Box<dyn Error>> {
        Ok(match self {
            Self::Edges(count, len) => {
                let len = usize::try_from(*len)?;
                (filled(*count, len, len)?, Some(*count))
            }
            Self::Fingerprints(count, len) => (
                filled_with_fingerprints(*count, usize::try_from(*len)?)?,
                Some(*count),
            ),
            Self::Grown(count, len) => (filled(*count, usize::try_from(*len)?, BLOCK_SIZE)?, None),
            Self::Chains(count, comb) => (comb.build(*count)?, Some(count * comb.edges())),
            Self::Fours(depth, edge) => {
                let (index, edges) = fours(*depth, usize::try_from(*edge)?)?;
                (index, Some(edges))
            }
        })
    }
}

/// Every edge has 4 children down to `depth` edges.
fn fours(depth: u32, edge: usize) -> Result<(RadixIndex, u64), Box<dyn Error>> {
    let edges: u64 = (1..=depth).map(|level| 4u64.pow(level)).sum();
    let mut index = empty(edges * edge as u64)?;
    let mut ids = Ids::default();
    let namespace = namespace()?;
    for leaf in 0..4u64.pow(depth) {
        let mut seq = TokenSequence::new(Arc::clone(&namespace), Vec::new(), Vec::new())?;
        for level in 1..=depth {
            // The leaf's first `level` digits to the base 4 name the edge.
            let name = leaf >> (2 * (depth - level));
            let start = seq.len();
            seq.extend(&tokens(u64::from(level) << 32 | name, edge), Vec::new())?;
            // The first leaf below an edge creates it.
            if leaf.trailing_zeros() >= 2 * (depth - level) {
                add(&mut index, &mut seq, start, &ids.take(edge / BLOCK_SIZE))?;
            }
        }
    }
    Ok((index, edges))
}

/// Resident bytes of this process; 0 where the system does not report them.
fn resident() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(0.0) * 1024.0
}

#[expect(clippy::cast_precision_loss, reason = "ratios for people")]
fn measure(shape: usize, json: bool) -> Result<(), Box<dyn Error>> {
    let (name, shape) = SHAPES.get(shape).ok_or("no such shape")?;
    let before = resident();
    let region = Region::new(ALLOCATOR);
    let (index, expected) = shape.build()?;
    let change = region.change();
    let asked = change.bytes_allocated as f64 - change.bytes_deallocated as f64;
    let pages = resident() - before;
    let stats = index.stats();
    if let Some(edges) = expected.filter(|&edges| edges != stats.nodes) {
        return Err(format!("{name}: {} edges, not {edges}", stats.nodes).into());
    }
    let blocks = stats.indexed as f64;
    let tokens = blocks * BLOCK_SIZE as f64;
    let edges = stats.nodes as f64;
    // Four bytes per token, four per block for its id, and the table.
    let payload = tokens * 4.0 + blocks * (4.0 + TABLE);
    let row = Row::new(*name, "bytes")
        .with("tokens", tokens)
        .with("edges", edges)
        .with("a_token", asked / tokens)
        .with("a_block", asked / blocks)
        .with("an_edge", asked / edges)
        .with("an_edge_overhead", (asked - payload) / edges)
        .with("resident_a_token", pages / tokens)
        .with("resident_a_block", pages / blocks);
    if !json && *name == SHAPES[0].0 {
        row.print_head()?;
    }
    row.print(json)?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let json = flag("--json");
    if let Some(shape) = env::args().nth(1).and_then(|shape| shape.parse().ok()) {
        return measure(shape, json);
    }
    for (shape, (name, _)) in SHAPES.iter().enumerate() {
        let mut run = Command::new(env::current_exe()?);
        run.arg(shape.to_string());
        if json {
            run.arg("--json");
        }
        if !run.status()?.success() {
            return Err(format!("{name}: could not be measured").into());
        }
    }
    Ok(())
}
