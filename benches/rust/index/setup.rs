//! Sizes, and the loops that every benchmark shares.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup};
use kvtrie_benches::{BLOCK_SIZE, flag, namespace};
use kvtrie_core::{BlockId, LookupOptions, RadixIndex, TokenSequence};

/// Tokens that are cached in each measurement: a million blocks.
const CACHED: u64 = 16_000_000;

/// Whether criterion only runs everything once, by criterion's own rule.
pub(crate) fn quick() -> bool {
    flag("--test") || !flag("--bench")
}

/// `full`, or `small` where everything only runs once.
pub(crate) fn size<T>(full: T, small: T) -> T {
    if quick() { small } else { full }
}

/// Sequences of `len` tokens that make up a million blocks.
pub(crate) fn sequences(len: usize) -> u64 {
    (size(CACHED, 200_000) / len as u64).max(2)
}

/// A fresh sequence.
pub(crate) fn fresh(tokens: Vec<u32>) -> TokenSequence {
    let namespace = namespace().expect("a namespace");
    TokenSequence::new(namespace, tokens, Vec::new()).expect("no items")
}

/// Measures lookups with ids out of fresh sequences, all of which match `expected` tokens.
///
/// A query is made just before its lookup, as a request's is: batches are so small that its tokens are in the
/// processor's second-level cache.
pub(crate) fn lookups(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    index: &mut RadixIndex,
    expected: usize,
    mut query: impl FnMut() -> Vec<u32>,
) {
    let namespace = namespace().expect("a namespace");
    let mut out = Vec::new();
    let batch = (32_768 / query().len() as u64).max(1);
    group.bench_function(name, |b| {
        b.iter_batched_ref(
            || TokenSequence::new(Arc::clone(&namespace), query(), Vec::new()).expect("no items"),
            |seq| {
                look_up(index, seq, 0, expected, &mut out);
            },
            BatchSize::NumIterations(batch),
        );
    });
}

/// One lookup, checked.
pub(crate) fn look_up(
    index: &mut RadixIndex,
    seq: &mut TokenSequence,
    start: usize,
    expected: usize,
    out: &mut Vec<BlockId>,
) {
    let options = LookupOptions {
        start,
        ..LookupOptions::default()
    };
    let found = index.lookup(seq, options, out).expect("a start inside");
    assert_eq!(found.num_tokens, expected, "the tokens matched");
    assert_eq!(
        out.len(),
        (expected - start) / BLOCK_SIZE,
        "the ids written"
    );
    black_box(out);
}

/// Measures `call` only, without what `before` makes and what `after` does with the result.
pub(crate) fn alone<S, I, O>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    state: &mut S,
    mut before: impl FnMut(&mut S) -> I,
    mut call: impl FnMut(&mut S, &mut I) -> O,
    mut after: impl FnMut(&mut S, I, O),
) {
    group.bench_function(name, |b| {
        b.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            for _ in 0..iterations {
                let mut input = before(state);
                let begun = Instant::now();
                let output = black_box(call(state, &mut input));
                total += begun.elapsed();
                after(state, input, output);
            }
            total
        });
    });
}
