//! Lookups: hits in one edge and in many, misses, and sequences that grew.

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use kvtrie_benches::{
    BLOCK_SIZE, Comb, Ids, NEW_SEEDS, Random, add, empty, filled, sequence, tokens,
};
use kvtrie_core::RadixIndex;

use crate::setup::{fresh, look_up, lookups, sequences, size};

/// Tokens of the longest prompts.
const LONG: usize = 102_400;

/// Hits of all tokens, ids out: in one edge, and in chains of edges of 512 tokens.
pub(crate) fn edges(c: &mut Criterion) {
    for (len, name) in [
        (512, "512 tokens in one edge"),
        (1_024, "1,024 tokens in one edge"),
        (8_192, "8,192 tokens in one edge"),
        (LONG, "102,400 tokens in one edge"),
    ] {
        let count = sequences(len);
        let mut index = filled(count, len, len).expect("a pool of about a million blocks");
        hits(c, name, &mut index, count, len);
    }
    for (children, name) in [
        (2, "102,400 tokens in edges of 512"),
        (4, "102,400 tokens in edges of 512, 4 children at each"),
    ] {
        let chain = Comb {
            levels: LONG / 512,
            edge: 512,
            children,
            sibling: BLOCK_SIZE,
        };
        let count = sequences(LONG);
        let mut index = chain
            .build(count)
            .expect("a pool of about a million blocks");
        hits(c, name, &mut index, count, LONG);
    }
}

fn hits(c: &mut Criterion, name: &str, index: &mut RadixIndex, count: u64, len: usize) {
    let mut group = c.benchmark_group("lookup");
    group.throughput(Throughput::Elements(len as u64));
    lookups(&mut group, &format!("{name}, warm"), index, len, || {
        tokens(0, len)
    });
    let mut random = Random::new(1);
    lookups(&mut group, &format!("{name}, cold"), index, len, || {
        tokens(random.below(count), len)
    });
    group.finish();
}

/// A prompt whose first token is another one, and prompts whose last one is.
pub(crate) fn misses(c: &mut Criterion) {
    let mut group = c.benchmark_group("miss");
    for (len, name) in [
        (8_192, "last of 8,192 tokens"),
        (LONG, "last of 102,400 tokens"),
    ] {
        let count = sequences(len);
        let mut index = filled(count, len, len).expect("a pool of about a million blocks");
        let other = 1 << 17;
        group.throughput(Throughput::Elements(len as u64));
        let matched = len - BLOCK_SIZE;
        let mut random = Random::new(2);
        lookups(
            &mut group,
            &format!("{name}, warm"),
            &mut index,
            matched,
            || {
                let mut query = tokens(0, len);
                query[len - 1] = other;
                query
            },
        );
        lookups(
            &mut group,
            &format!("{name}, cold"),
            &mut index,
            matched,
            || {
                let mut query = tokens(random.below(count), len);
                query[len - 1] = other;
                query
            },
        );
        if len == LONG {
            let first = || {
                let mut query = tokens(random.below(count), len);
                query[0] = other + u32::try_from(random.below(1 << 17)).unwrap_or_default();
                query
            };
            miss(&mut group, &mut index, first);
        }
    }
    group.finish();
}

/// Misses at the first token, from fresh sequences, and from a few in turn: a miss records nothing in a sequence, and
/// the clock is not read between the calls.
fn miss(
    group: &mut BenchmarkGroup<'_, WallTime>,
    index: &mut RadixIndex,
    mut query: impl FnMut() -> Vec<u32>,
) {
    let mut few: Vec<_> = (0..size(64, 2)).map(|_| fresh(query())).collect();
    let mut out = Vec::new();
    let mut calls = 0;
    group.bench_function("first of 102,400 tokens, warm", |b| {
        b.iter(|| {
            calls += 1;
            let at = calls % few.len();
            look_up(index, &mut few[at], 0, 0, &mut out);
        });
    });
    lookups(group, "first of 102,400 tokens, fresh", index, 0, query);
}

/// One more block of a sequence of 102,400 tokens that was looked up or inserted before: new ids in and out.
pub(crate) fn grown(c: &mut Criterion) {
    let mut group = c.benchmark_group("grown");
    group.throughput(Throughput::Elements(BLOCK_SIZE as u64));
    // As many blocks are added one by one, then the sequence is truncated.
    let steps = size(1_024, 4);
    let until = LONG + steps * BLOCK_SIZE;
    let all = tokens(NEW_SEEDS, until);
    let count = sequences(LONG);

    let mut index = filled(count, LONG, LONG).expect("a pool of about a million blocks");
    let mut ids = Ids::default();
    ids.take(usize::try_from(count).expect("a small count") * LONG / BLOCK_SIZE);
    let mut seq = sequence(NEW_SEEDS, until).expect("a sequence");
    add(&mut index, &mut seq, 0, &ids.take(until / BLOCK_SIZE)).expect("a pool with room");
    let mut out = Vec::new();
    seq.truncate(LONG).expect("a shorter length");
    look_up(&mut index, &mut seq, 0, LONG, &mut out);
    group.bench_function("16 more tokens at 102,400, extend and lookup", |b| {
        b.iter(|| {
            if seq.len() == until {
                seq.truncate(LONG).expect("a shorter length");
            }
            let len = seq.len();
            let end = len + BLOCK_SIZE;
            seq.extend(&all[len..end], Vec::new()).expect("no items");
            look_up(&mut index, &mut seq, len, end, &mut out);
        });
    });

    let mut index = empty((until * 2) as u64).expect("a small pool");
    let mut ids = Ids::default();
    let mut seq = sequence(NEW_SEEDS, LONG).expect("a sequence");
    add(&mut index, &mut seq, 0, &ids.take(LONG / BLOCK_SIZE)).expect("a pool with room");
    let ids = ids.take(steps);
    let mut next = 0;
    group.bench_function("16 more tokens at 102,400, extend and insert", |b| {
        b.iter_custom(|iterations| {
            let mut total = std::time::Duration::ZERO;
            let mut left = usize::try_from(iterations).expect("a small count");
            while left > 0 {
                let now = left.min(steps - next);
                let begun = std::time::Instant::now();
                for id in &ids[next..next + now] {
                    let len = seq.len();
                    seq.extend(&all[len..len + BLOCK_SIZE], Vec::new())
                        .expect("no items");
                    add(&mut index, &mut seq, len, std::slice::from_ref(id))
                        .expect("a pool with room");
                }
                total += begun.elapsed();
                next += now;
                left -= now;
                if next == steps {
                    next = 0;
                    seq.truncate(LONG).expect("a shorter length");
                    let gone = index.discard(&ids).expect("ids in the pool");
                    assert_eq!(gone.len(), steps, "all blocks left");
                }
            }
            total
        });
    });
    group.finish();
}
