//! Lookup, plan, insert and evict beside 10⁶ cached blocks of 16 tokens.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvtrie_benches::{BLOCK_SIZE, filled, sequence, tokens};
use kvtrie_core::{InsertOptions, LookupOptions, PlanOptions, ReusePolicy, Source, TokenSequence};

/// Cached tokens beside which everything is measured: enough that a cold lookup leaves the processor's caches.
const CACHED: usize = 16_000_000;

fn lookup(c: &mut Criterion) {
    let mut group = c.benchmark_group("lookup");
    for len in [512, 8_192, 102_400] {
        let count = (CACHED / len) as u64;
        let mut index = filled(count, len, len).expect("a pool of about a million blocks");
        let namespace = kvtrie_benches::namespace().expect("a namespace");
        group.throughput(Throughput::Elements(len as u64));
        let mut out = Vec::new();
        // A fresh sequence a call, so that no cursor helps: one of all that are cached, or always the same.
        for (name, stride) in [("cold", 7_919), ("warm", 0)] {
            let mut seed = 0;
            group.bench_function(BenchmarkId::new(name, len), |b| {
                b.iter_batched_ref(
                    || {
                        seed = (seed + stride) % count;
                        let tokens = tokens(seed, len);
                        TokenSequence::new(Arc::clone(&namespace), tokens, Vec::new())
                            .expect("no items")
                    },
                    |seq| {
                        let found = index.lookup(seq, LookupOptions::default(), &mut out);
                        black_box(found.expect("a start of 0"))
                    },
                    BatchSize::SmallInput,
                );
            });
        }
    }
    group.finish();
}

fn grown(c: &mut Criterion) {
    let mut group = c.benchmark_group("grown");
    let len = 102_400;
    let mut index = filled(1, len, len).expect("a small pool");
    let mut seq = sequence(0, len).expect("a sequence");
    let mut out = Vec::new();
    index
        .lookup(&mut seq, LookupOptions::default(), &mut out)
        .expect("a start of 0");
    let options = LookupOptions {
        start: len - 16,
        ..LookupOptions::default()
    };
    group.bench_function("lookup, last block of 102,400 tokens", |b| {
        b.iter(|| {
            black_box(
                index
                    .lookup(&mut seq, options, &mut out)
                    .expect("a start inside"),
            )
        });
    });
    group.finish();
}

fn turn(c: &mut Criterion) {
    let mut group = c.benchmark_group("turn");
    let len = 8_192;
    let mut index =
        filled((CACHED / len) as u64, len, len).expect("a pool of about a million blocks");
    group.throughput(Throughput::Elements(len as u64));
    let mut seed = 1u64 << 40;
    group.bench_function("plan, insert, release and evict 8,192 new tokens", |b| {
        b.iter_batched_ref(
            || {
                seed += 1;
                sequence(seed, len).expect("a sequence")
            },
            |seq| {
                let plan = index
                    .plan(seq, &ReusePolicy::EXACT_ONLY, PlanOptions::default())
                    .expect("an exact plan");
                // What is evicted makes room for what is inserted.
                let ids = index.evict(len / BLOCK_SIZE);
                let done = index
                    .insert(seq, &ids, InsertOptions::new(len, Source::Plan(&plan)))
                    .expect("held ids");
                index.release(&plan).expect("a live plan");
                black_box(done)
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(benches, lookup, grown, turn);
criterion_main!(benches);
