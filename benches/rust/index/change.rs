//! What changes the tree: insert, evict, plan and release.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput};
use kvtrie_benches::{
    BLOCK_SIZE, Comb, NEW_SEEDS, Random, add, filled, filled_with_fingerprints, sequence, tokens,
};
use kvtrie_core::{BlockId, PlanOptions, RadixIndex, ReusePolicy, TokenSequence};

use crate::setup::{alone, fresh, lookups, sequences, size};

/// Tokens of a short leaf.
const LEAF: usize = 64;

/// 8,192 new tokens into a full pool, without fingerprints and with them.
pub(crate) fn insert(c: &mut Criterion) {
    let mut group = c.benchmark_group("insert");
    let len = 8_192;
    group.throughput(Throughput::Elements(len as u64));
    let full = sequences(len);
    let pool = "a pool of about a million blocks";
    let cases = [
        ("", filled(full, len, len)),
        (
            ", with fingerprints at 16M",
            filled_with_fingerprints(full, len),
        ),
        (
            ", with fingerprints at 1M",
            filled_with_fingerprints(full.div_ceil(16), len),
        ),
    ];
    for (kind, index) in cases {
        let mut index = index.expect(pool);
        let mut seeds = NEW_SEEDS..;
        let mut new = || sequence(seeds.next().unwrap_or(NEW_SEEDS), len).expect("a sequence");
        let evict = |index: &mut RadixIndex| {
            let ids = index.evict(len / BLOCK_SIZE);
            assert_eq!(ids.len(), len / BLOCK_SIZE, "evicted blocks");
            ids
        };
        // The eviction frees the blocks of the insert.
        alone(
            &mut group,
            &format!("8,192 new tokens, and evict as many{kind}"),
            &mut index,
            |_| new(),
            |index, seq| {
                let ids = evict(index);
                add(index, seq, 0, &ids).expect("held ids");
            },
            |_, _, ()| (),
        );
        alone(
            &mut group,
            &format!("8,192 new tokens{kind}"),
            &mut index,
            |index| (new(), evict(index)),
            |index, (seq, ids)| add(index, seq, 0, ids).expect("held ids"),
            |_, _, ()| (),
        );
        alone(
            &mut group,
            &format!("evict 8,192 tokens{kind}"),
            &mut index,
            |_| (),
            |index, ()| evict(index),
            |index, (), ids| add(index, &mut new(), 0, &ids).expect("held ids"),
        );
    }
    group.finish();
}

/// Runs of this many calls are timed as one, so that reading the clock does not count.
const RUN: usize = 100;

/// One leaf of 64 tokens, the oldest of 10⁵.
pub(crate) fn evict(c: &mut Criterion) {
    let mut group = c.benchmark_group("evict");
    group.throughput(Throughput::Elements(LEAF as u64));
    let leaves = size(100_000, 1_000);
    let plain = filled(leaves, LEAF, LEAF).expect("a pool of 400,000 blocks");
    let kept = filled_with_fingerprints(leaves, LEAF).expect("a pool of 400,000 blocks");
    one_leaf(&mut group, "one leaf of 64 tokens among 10^5", plain);
    one_leaf(
        &mut group,
        "one leaf of 64 tokens among 10^5, with fingerprints",
        kept,
    );
    group.finish();
}

fn one_leaf(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, mut index: RadixIndex) {
    let mut seeds = NEW_SEEDS..;
    group.bench_function(name, |b| {
        b.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            let mut left = usize::try_from(iterations).expect("a small count");
            let mut gone = Vec::with_capacity(RUN);
            while left > 0 {
                let now = left.min(RUN);
                let begun = Instant::now();
                for _ in 0..now {
                    gone.push(index.evict(LEAF / BLOCK_SIZE));
                }
                total += begun.elapsed();
                left -= now;
                for (ids, seed) in gone.drain(..).zip(seeds.by_ref()) {
                    assert_eq!(ids.len(), LEAF / BLOCK_SIZE, "a whole leaf");
                    let mut seq = sequence(seed, LEAF).expect("a sequence");
                    add(&mut index, &mut seq, 0, &ids).expect("held ids");
                }
            }
            total
        });
    });
}

/// Plan and release at the end of 1, 16 and 200 edges of 512 tokens.
pub(crate) fn pin(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan and release");
    let chain = Comb {
        levels: 200,
        edge: 512,
        children: 2,
        sibling: BLOCK_SIZE,
    };
    let mut index = chain.build(size(10, 1)).expect("a pool with room");
    let plan = |index: &mut RadixIndex, seq: &mut TokenSequence| {
        let options = PlanOptions {
            keep_last: 0,
            ..PlanOptions::default()
        };
        let plan = index
            .plan(seq, &ReusePolicy::EXACT_ONLY, options)
            .expect("an exact plan");
        assert_eq!(
            plan.blocks().len(),
            seq.len() / BLOCK_SIZE,
            "all blocks in place"
        );
        index.release(&plan).expect("a live plan");
        black_box(plan);
    };
    for (depth, name) in [
        (1, "1 edge of 512"),
        (16, "16 edges of 512"),
        (200, "200 edges of 512"),
    ] {
        let len = depth * chain.edge;
        group.throughput(Throughput::Elements(len as u64));
        let mut known = fresh(tokens(0, len));
        group.bench_function(format!("{name}, known sequence"), |b| {
            b.iter(|| plan(&mut index, &mut known));
        });
        alone(
            &mut group,
            &format!("{name}, fresh sequence"),
            &mut index,
            |_| fresh(tokens(0, len)),
            plan,
            |_, _, ()| (),
        );
    }
    group.finish();
}

/// Lookup and insert of 64 tokens with 10⁵ leaves below one node.
pub(crate) fn crowd(c: &mut Criterion) {
    let mut group = c.benchmark_group("crowd");
    group.throughput(Throughput::Elements(LEAF as u64));
    let count = size(100_000, 1_000);
    let mut index = filled(count, LEAF, LEAF).expect("a pool of 400,000 blocks");
    lookups(
        &mut group,
        "lookup of one of 10^5 leaves of 64 tokens, warm",
        &mut index,
        LEAF,
        || tokens(0, LEAF),
    );
    let mut random = Random::new(4);
    lookups(
        &mut group,
        "lookup of one of 10^5 leaves of 64 tokens, cold",
        &mut index,
        LEAF,
        || tokens(random.below(count), LEAF),
    );
    let mut seeds = NEW_SEEDS..;
    group.bench_function("insert of a leaf of 64 tokens with 10^5", |b| {
        b.iter_custom(|iterations| {
            let mut total = Duration::ZERO;
            let mut left = usize::try_from(iterations).expect("a small count");
            while left > 0 {
                let now = left.min(RUN);
                let mut new: Vec<(TokenSequence, Vec<BlockId>)> = seeds
                    .by_ref()
                    .take(now)
                    .map(|seed| {
                        let seq = sequence(seed, LEAF).expect("a sequence");
                        (seq, index.evict(LEAF / BLOCK_SIZE))
                    })
                    .collect();
                let begun = Instant::now();
                for (seq, ids) in &mut new {
                    add(&mut index, seq, 0, ids).expect("held ids");
                }
                total += begun.elapsed();
                left -= now;
            }
            total
        });
    });
    group.finish();
}
