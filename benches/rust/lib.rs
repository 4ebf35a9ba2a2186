//! Seeded trees that the benchmarks, the reports and the instruction counts share.
//!
//! Everything is drawn from seeds, so that two runs do the same work. A wrong result of a call panics, because its time
//! would mean nothing.

pub mod workloads;

use std::env;
use std::io::{self, Write};
use std::sync::Arc;

use kvtrie_core::{
    BlockId, Config, Error, Group, GroupOffers, GroupOptions, InsertOptions, Namespace, RadixIndex,
    Salt, Source, TokenSequence,
};

/// Token slots in a block, everywhere here.
pub const BLOCK_SIZE: usize = 16;

/// Blocks that the pool has in addition to those of a tree.
const SPARE_BLOCKS: u64 = 1 << 16;

/// Seeds from here on are used by no sequence that [`filled`] caches.
pub const NEW_SEEDS: u64 = 1 << 40;

/// Seeds of the siblings in a [`comb`].
const SIBLING_SEEDS: u64 = 1 << 50;

/// Random numbers from a seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The numbers of one seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next_u64() % limit
    }
}

/// The namespace of everything cached here.
///
/// # Errors
/// None: its parts are not empty.
pub fn namespace() -> Result<Arc<Namespace>, Error> {
    Ok(Arc::new(Namespace::new(
        "model",
        "bfloat16",
        "default",
        None,
        Salt::Shared,
    )?))
}

/// `len` token ids below 2¹⁷, from a seed.
#[must_use]
pub fn tokens(seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len)
        .map(|_| u32::try_from(random.next_u64() >> 47).unwrap_or_default())
        .collect()
}

/// A sequence of tokens from a seed.
///
/// # Errors
/// None: there are no items.
pub fn sequence(seed: u64, len: usize) -> Result<TokenSequence, Error> {
    TokenSequence::new(namespace()?, tokens(seed, len), Vec::new())
}

/// Hands out block ids in ascending order.
#[derive(Debug, Default)]
pub struct Ids(u32);

impl Ids {
    /// The next `count` ids.
    pub fn take(&mut self, count: usize) -> Vec<BlockId> {
        (0..count)
            .map(|_| {
                self.0 += 1;
                BlockId(self.0 - 1)
            })
            .collect()
    }
}

/// An empty index with room for `tokens` tokens and some.
///
/// # Errors
/// If the pool would pass 2³¹ blocks.
pub fn empty(tokens: u64) -> Result<RadixIndex, Error> {
    RadixIndex::new(config(tokens))
}

fn config(tokens: u64) -> Config {
    Config {
        num_blocks: tokens / BLOCK_SIZE as u64 + SPARE_BLOCKS,
        block_size: BLOCK_SIZE,
        ..Config::seeded(0)
    }
}

/// Inserts the whole blocks from `start` on, under new ids.
///
/// # Errors
/// As [`RadixIndex::insert`].
///
/// # Panics
/// If the index did not take every id.
pub fn add(
    index: &mut RadixIndex,
    seq: &mut TokenSequence,
    start: usize,
    ids: &[BlockId],
) -> Result<(), Error> {
    let options = InsertOptions {
        start,
        ..InsertOptions::new(seq.len(), Source::Computed)
    };
    let done = index.insert(seq, ids, options)?;
    assert_eq!(done.blocks, ids, "an insert of new tokens takes every id");
    Ok(())
}

/// An index that holds `count` sequences of `len` tokens (whole blocks), from the seeds 0 to `count` − 1, each inserted in
/// steps of `step` tokens.
///
/// # Errors
/// If the pool would pass 2³¹ blocks.
pub fn filled(count: u64, len: usize, step: usize) -> Result<RadixIndex, Error> {
    fill(empty(count * len as u64)?, count, len, step)
}

/// The same, inserted at once, in an index that keeps fingerprints of windows.
///
/// # Errors
/// As [`filled`].
pub fn filled_with_fingerprints(count: u64, len: usize) -> Result<RadixIndex, Error> {
    let index = RadixIndex::new(Config {
        moved_runs: true,
        ..config(count * len as u64)
    })?;
    fill(index, count, len, len)
}

/// The same, inserted at once, in an index with a group of this window, of which each sequence has its last blocks.
///
/// # Errors
/// As [`filled`].
pub fn filled_with_window(count: u64, len: usize, window: usize) -> Result<RadixIndex, Error> {
    let blocks = (window - 1).div_ceil(BLOCK_SIZE).min(len / BLOCK_SIZE);
    let num_blocks = count * blocks as u64;
    let mut index = RadixIndex::new(Config {
        groups: vec![Group::window("window", window, num_blocks, BLOCK_SIZE)],
        ..config(count * len as u64)
    })?;
    let (mut next, mut own) = (Ids::default(), Ids::default());
    let namespace = namespace()?;
    for seed in 0..count {
        let mut seq = TokenSequence::new(Arc::clone(&namespace), tokens(seed, len), Vec::new())?;
        let first = len / BLOCK_SIZE - blocks;
        let ids = own.take(blocks);
        let offers: Vec<(usize, BlockId)> =
            (first..).map(|block| block * BLOCK_SIZE).zip(ids).collect();
        let offers = [GroupOffers {
            group: 1,
            offers: &offers,
        }];
        let groups = GroupOptions {
            offers: &offers,
            stops: &[],
        };
        let options = InsertOptions::new(len, Source::Computed);
        index.insert_groups(&mut seq, &next.take(len / BLOCK_SIZE), options, groups)?;
    }
    Ok(index)
}

fn fill(mut index: RadixIndex, count: u64, len: usize, step: usize) -> Result<RadixIndex, Error> {
    let mut next = Ids::default();
    let namespace = namespace()?;
    for seed in 0..count {
        let all = tokens(seed, len);
        let mut seq = TokenSequence::new(Arc::clone(&namespace), Vec::new(), Vec::new())?;
        for part in all.chunks(step) {
            let start = seq.len();
            seq.extend(part, Vec::new())?;
            add(
                &mut index,
                &mut seq,
                start,
                &next.take(part.len() / BLOCK_SIZE),
            )?;
        }
    }
    Ok(index)
}

/// A chain of edges: an edge ends only where something else branches off.
#[derive(Clone, Copy, Debug)]
pub struct Comb {
    /// Edges of a chain.
    pub levels: usize,
    /// Tokens of an edge, whole blocks.
    pub edge: usize,
    /// Children at the end of every edge but the last; one of them goes on.
    pub children: u64,
    /// Tokens of the children that do not go on, whole blocks.
    pub sibling: usize,
}

impl Comb {
    /// Tokens of a chain.
    #[must_use]
    pub fn len(&self) -> usize {
        self.levels * self.edge
    }

    /// Whether a chain has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Edges of a chain and of what branches off it.
    #[must_use]
    pub fn edges(&self) -> u64 {
        let levels = self.levels as u64;
        levels + levels.saturating_sub(1) * (self.children - 1)
    }

    /// Tokens of a chain and of what branches off it.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.len() as u64 + (self.edges() - self.levels as u64) * self.sibling as u64
    }

    /// An index that holds `count` such chains, of the tokens of the seeds 0 to `count` − 1.
    ///
    /// # Errors
    /// If the pool would pass 2³¹ blocks.
    ///
    /// # Panics
    /// If the index did not cut its edges where expected.
    pub fn build(&self, count: u64) -> Result<RadixIndex, Error> {
        let mut index = empty(count * self.tokens())?;
        let mut next = Ids::default();
        let mut sibling = SIBLING_SEEDS;
        let namespace = namespace()?;
        for seed in 0..count {
            let chain = tokens(seed, self.len());
            let mut seq = TokenSequence::new(Arc::clone(&namespace), Vec::new(), Vec::new())?;
            for edge in chain.chunks(self.edge) {
                let start = seq.len();
                seq.extend(edge, Vec::new())?;
                add(
                    &mut index,
                    &mut seq,
                    start,
                    &next.take(self.edge / BLOCK_SIZE),
                )?;
                if start == 0 {
                    continue;
                }
                for _ in 1..self.children {
                    sibling += 1;
                    seq.truncate(start)?;
                    seq.extend(&tokens(sibling, self.sibling), Vec::new())?;
                    add(
                        &mut index,
                        &mut seq,
                        start,
                        &next.take(self.sibling / BLOCK_SIZE),
                    )?;
                }
                seq.truncate(start)?;
                seq.extend(edge, Vec::new())?;
            }
        }
        assert_eq!(
            index.stats().nodes,
            count * self.edges(),
            "edges end where siblings branch off"
        );
        Ok(index)
    }
}

/// Whether the arguments of this process have a flag.
#[must_use]
pub fn flag(name: &str) -> bool {
    env::args().skip(1).any(|argument| argument == name)
}

/// One line of a report.
#[derive(Debug)]
pub struct Row {
    work: String,
    unit: &'static str,
    values: Vec<(&'static str, f64)>,
}

impl Row {
    /// A row without values.
    pub fn new(work: impl Into<String>, unit: &'static str) -> Self {
        Self {
            work: work.into(),
            unit,
            values: Vec::new(),
        }
    }

    /// Adds a value.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: f64) -> Self {
        self.values.push((name, value));
        self
    }

    /// Prints the row: as one JSON object per line, or for people.
    ///
    /// # Errors
    /// If the output is closed.
    pub fn print(&self, json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if json {
            write!(
                out,
                "{{\"work\": \"{}\", \"unit\": \"{}\"",
                self.work, self.unit
            )?;
            for (name, value) in &self.values {
                write!(out, ", \"{name}\": {value}")?;
            }
            writeln!(out, "}}")
        } else {
            write!(out, "{:<58}{:>7}", self.work, self.unit)?;
            for (_, value) in &self.values {
                let digits = if value.fract() == 0.0 { 0 } else { 3 };
                write!(out, "{value:>18.digits$}")?;
            }
            writeln!(out)
        }
    }

    /// Prints the names of the values above them, for people.
    ///
    /// # Errors
    /// If the output is closed.
    pub fn print_head(&self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        write!(out, "{:<58}{:>7}", "", "unit")?;
        for (name, _) in &self.values {
            write!(out, "{:>18}", name.replace('_', " "))?;
        }
        writeln!(out)
    }
}

/// The value below which a share of the sorted values is.
///
/// # Panics
/// If there are no values.
#[must_use]
pub fn quantile(sorted: &[u64], share: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "an index into a list"
    )]
    let at = ((sorted.len() - 1) as f64 * share).round() as usize;
    sorted[at]
}
