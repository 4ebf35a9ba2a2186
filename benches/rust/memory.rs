//! Reports what cached tokens cost in memory: bytes asked of the allocator, and resident pages, which include what the
//! allocator adds. Each shape is measured in a process of its own.

use std::alloc::System;
use std::env;
use std::error::Error;
use std::fs;
use std::io::{self, Write};
use std::process::Command;

use kvtrie_benches::{BLOCK_SIZE, filled};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// (name, sequences, tokens of each, tokens of an insert)
const SHAPES: [(&str, u32, u32, u32); 4] = [
    ("edges of 102,400 tokens", 64, 102_400, 102_400),
    ("edges of 512 tokens", 12_800, 512, 512),
    ("grown by one block to 8,192", 800, 8_192, 16),
    ("edges of one block", 200_000, 16, 16),
];

/// Resident bytes of this process; 0 where the system does not tell.
fn resident() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(0.0) * 1024.0
}

#[expect(clippy::cast_precision_loss, reason = "ratios for people")]
fn measure(shape: usize) -> Result<(), Box<dyn Error>> {
    let (name, count, len, step) = *SHAPES.get(shape).ok_or("no such shape")?;
    let before = resident();
    let region = Region::new(ALLOCATOR);
    let index = filled(count.into(), len as usize, step as usize)?;
    let change = region.change();
    let asked = change.bytes_allocated as f64 - change.bytes_deallocated as f64;
    let tokens = f64::from(count) * f64::from(len);
    let blocks = tokens / BLOCK_SIZE as f64;
    let edges = index.stats().nodes as f64;
    writeln!(
        io::stdout(),
        "{name:<30}{:>10.2}{:>10.1}{:>12.1}{:>14.2}{:>14.1}",
        asked / tokens,
        asked / blocks,
        asked / edges,
        (resident() - before) / tokens,
        (resident() - before) / blocks,
    )?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(shape) = env::args().nth(1) {
        return measure(shape.parse()?);
    }
    writeln!(
        io::stdout(),
        "{:<30}{:>10}{:>10}{:>12}{:>14}{:>14}",
        "shape (block 16)",
        "B/token",
        "B/block",
        "B/edge",
        "RSS B/token",
        "RSS B/block"
    )?;
    for shape in 0..SHAPES.len() {
        Command::new(env::current_exe()?)
            .arg(shape.to_string())
            .status()?;
    }
    Ok(())
}
