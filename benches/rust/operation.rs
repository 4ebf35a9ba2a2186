//! Does one operation a number of times, for a counter of instructions to run.
//!
//! `operation NAME DONE PREPARED`
//!
//! The inputs of PREPARED calls are made first, whatever DONE (at most PREPARED) is, and nothing is freed at the end.
//! So two runs that differ in DONE only differ by that many calls.

use std::env;
use std::error::Error;
use std::hint::black_box;
use std::ops::RangeFrom;
use std::process;
use std::sync::Arc;

use kvtrie_benches::{
    BLOCK_SIZE, Ids, add, empty, filled, filled_with_window, namespace, sequence, tokens,
};
use kvtrie_core::{
    BlockId, InsertOptions, LookupOptions, PlanOptions, RadixIndex, ReusePolicy, Source,
    TokenSequence,
};

/// Tokens of a long prompt.
const LONG: usize = 102_400;

/// Tokens of a middling prompt.
const MIDDLE: usize = 8_192;

/// Tokens of a window.
const WINDOW: usize = 512;

/// Middling prompts that are cached.
const CACHED: u64 = 64;

/// Tokens of a leaf, and how many there are.
const LEAF: usize = 64;
const LEAVES: usize = 10_000;

type Failure = Box<dyn Error>;

/// One operation: all that it needs, and what is done with it.
type Prepared = Box<dyn FnMut() -> Result<(), Failure>>;

fn expect(what: &str, found: usize, expected: usize) -> Result<(), Failure> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found}, not {expected}").into())
}

/// What was prepared for the next call. It is kept, so that the call does not free it.
fn next<'a, T>(prepared: &'a mut [T], calls: &mut RangeFrom<usize>) -> Result<&'a mut T, Failure> {
    let call = calls.next().ok_or("too many calls")?;
    Ok(prepared.get_mut(call).ok_or("too few are prepared")?)
}

/// Fresh sequences of one cached prompt.
fn fresh(prepared: usize) -> Result<Vec<TokenSequence>, Failure> {
    let namespace = namespace()?;
    let all = tokens(7, MIDDLE);
    (0..prepared)
        .map(|_| TokenSequence::new(Arc::clone(&namespace), all.clone(), Vec::new()))
        .map(|made| made.map_err(Failure::from))
        .collect()
}

fn look_up(
    index: &mut RadixIndex,
    seq: &mut TokenSequence,
    start: usize,
    out: &mut Vec<BlockId>,
) -> Result<(), Failure> {
    let options = LookupOptions {
        start,
        ..LookupOptions::default()
    };
    let found = index.lookup(seq, options, out)?;
    expect("tokens matched", found.num_tokens, seq.len())?;
    expect(
        "ids",
        black_box(&*out).len(),
        (seq.len() - start) / BLOCK_SIZE,
    )
}

/// Lookup of 8,192 cached tokens with ids out, from a fresh sequence.
fn lookup(prepared: usize) -> Result<Prepared, Failure> {
    let mut index = filled(CACHED, MIDDLE, MIDDLE)?;
    let mut out = Vec::with_capacity(MIDDLE / BLOCK_SIZE);
    let mut queries = fresh(prepared)?;
    // The first use allocates memory that later ones reuse.
    look_up(&mut index, &mut sequence(7, MIDDLE)?, 0, &mut out)?;
    let mut calls = 0..;
    Ok(Box::new(move || {
        let seq = next(&mut queries, &mut calls)?;
        look_up(&mut index, seq, 0, &mut out)
    }))
}

/// The same in an index that also has a group with a window of 512 tokens.
fn grouped(prepared: usize) -> Result<Prepared, Failure> {
    let mut index = filled_with_window(CACHED, MIDDLE, WINDOW)?;
    let mut out = Vec::with_capacity(MIDDLE / BLOCK_SIZE);
    let mut queries = fresh(prepared)?;
    look_up(&mut index, &mut sequence(7, MIDDLE)?, 0, &mut out)?;
    let mut calls = 0..;
    Ok(Box::new(move || {
        let seq = next(&mut queries, &mut calls)?;
        look_up(&mut index, seq, 0, &mut out)
    }))
}

/// Extends a sequence of 102,400 tokens by 16 that are cached, and looks them up.
fn grown(prepared: usize) -> Result<Prepared, Failure> {
    let until = LONG + prepared * BLOCK_SIZE;
    let mut index = empty(until as u64)?;
    let mut seq = sequence(7, until)?;
    let ids = Ids::default().take(until / BLOCK_SIZE);
    add(&mut index, &mut seq, 0, &ids)?;
    let all = seq.tokens().to_vec();
    seq.truncate(LONG)?;
    let mut out = Vec::with_capacity(LONG / BLOCK_SIZE);
    look_up(&mut index, &mut seq, 0, &mut out)?;
    Ok(Box::new(move || {
        let len = seq.len();
        seq.extend(&all[len..len + BLOCK_SIZE], Vec::new())?;
        look_up(&mut index, &mut seq, len, &mut out)
    }))
}

/// Inserts 8,192 new tokens, under ids that the index had before, as in a pool in use.
fn insert(prepared: usize) -> Result<Prepared, Failure> {
    let count = CACHED + prepared as u64;
    let mut index = filled(count, MIDDLE, MIDDLE)?;
    let mut new = Vec::with_capacity(prepared);
    for seed in count..count + prepared as u64 {
        let ids = index.evict(MIDDLE / BLOCK_SIZE);
        expect("blocks evicted", ids.len(), MIDDLE / BLOCK_SIZE)?;
        new.push((sequence(seed, MIDDLE)?, ids));
    }
    let mut calls = 0..;
    Ok(Box::new(move || {
        let (seq, ids) = next(&mut new, &mut calls)?;
        let done = index.insert(seq, ids, InsertOptions::new(MIDDLE, Source::Computed))?;
        expect("blocks taken", done.blocks.len(), ids.len())
    }))
}

/// Evicts the oldest of 10,000 leaves of 64 tokens.
fn evict(prepared: usize) -> Result<Prepared, Failure> {
    expect("leaves", prepared.max(LEAVES), LEAVES)?;
    let mut index = filled(LEAVES as u64, LEAF, LEAF)?;
    Ok(Box::new(move || {
        let gone = index.evict(LEAF / BLOCK_SIZE);
        expect("blocks evicted", black_box(gone).len(), LEAF / BLOCK_SIZE)
    }))
}

/// Plans 8,192 cached tokens from a fresh sequence, and releases the plan.
fn plan(prepared: usize) -> Result<Prepared, Failure> {
    let mut index = filled(CACHED, MIDDLE, MIDDLE)?;
    let mut queries = fresh(prepared)?;
    let mut calls = 0..;
    Ok(Box::new(move || {
        let seq = next(&mut queries, &mut calls)?;
        let options = PlanOptions {
            keep_last: 0,
            ..PlanOptions::default()
        };
        let plan = index.plan(seq, &ReusePolicy::EXACT_ONLY, options)?;
        expect("blocks in place", plan.blocks().len(), MIDDLE / BLOCK_SIZE)?;
        Ok(index.release(&plan)?)
    }))
}

/// What is counted.
#[inline(never)]
fn perform(operation: &mut Prepared, done: usize) -> Result<(), Failure> {
    for _ in 0..done {
        operation()?;
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [name, done, prepared] = &arguments[..] else {
        return Err("usage: operation NAME DONE PREPARED".into());
    };
    let (done, prepared) = (done.parse::<usize>()?, prepared.parse::<usize>()?);
    let mut operation = match name.as_str() {
        "lookup" => lookup(prepared),
        "grouped" => grouped(prepared),
        "grown" => grown(prepared),
        "insert" => insert(prepared),
        "evict" => evict(prepared),
        "plan" => plan(prepared),
        _ => Err(format!("{name}: one of lookup, grouped, grown, insert, evict and plan").into()),
    }?;
    if done > prepared {
        return Err(format!("{done} done, but only {prepared} prepared").into());
    }
    perform(&mut operation, done)?;
    // What is freed would depend on DONE.
    process::exit(0)
}
