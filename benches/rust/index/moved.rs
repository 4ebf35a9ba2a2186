//! Plans of prompts whose runs have moved.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput};
use kvtrie_benches::{NEW_SEEDS, Random, filled_with_fingerprints, tokens, workloads};
use kvtrie_core::{Class, PlanOptions, RadixIndex, ReusePlan, ReusePolicy, Scope, TokenSequence};

use crate::setup::{fresh, size};

/// 20,000 tokens of an agent's run of which all reasoning was dropped, with 10⁶ and 10⁷ cached tokens, and 100,000
/// tokens of which nothing is cached.
pub(crate) fn moved(c: &mut Criterion) {
    let mut group = c.benchmark_group("moved");
    for (name, file) in [("10^6", "W11-1M"), ("10^7", size("W11-10M", ""))] {
        if file.is_empty() {
            continue;
        }
        let path = workloads::path(file);
        let conversations = workloads::read(&path)
            .unwrap_or_else(|error| panic!("run `make workloads` first: {error}"));
        let mut index = workloads::cached(&conversations).expect("a pool of a million blocks");
        let longest = conversations.iter().map(|each| each.prompt.len()).max();
        let longest = longest.expect("conversations");
        let asked = conversations
            .iter()
            .map(|each| &each.prompt)
            .filter(|prompt| prompt.len() == longest);
        let asked: Vec<_> = asked.collect();
        group.throughput(Throughput::Elements(longest as u64));
        for prompt in &asked {
            let plan = plan(&mut index, &mut fresh((*prompt).clone()));
            let reused = plan.num_tokens(Class::Exact) + plan.num_tokens(Class::Approximate);
            assert!(reused * 100 > longest * 98, "{reused} of {longest} tokens");
        }
        for (state, count) in [("warm", 1), ("cold", asked.len() as u64)] {
            let mut random = Random::new(3);
            let mut next = || {
                let number = usize::try_from(random.below(count)).unwrap_or_default();
                fresh(asked[number].clone())
            };
            let work = format!("plan of 20,000 tokens of W11 with {name} cached, {state}");
            group.bench_function(work, |b| {
                b.iter_batched_ref(
                    &mut next,
                    |seq| plan(&mut index, seq),
                    BatchSize::PerIteration,
                );
            });
        }
    }
    let len = size(100_000, 10_000);
    let mut index = filled_with_fingerprints(200, 4_992).expect("a small pool");
    let mut seed = NEW_SEEDS;
    group.throughput(Throughput::Elements(len as u64));
    group.bench_function(
        "plan of 100,000 tokens with nothing to find with 10^6 cached",
        |b| {
            b.iter_batched_ref(
                || {
                    seed += 1;
                    fresh(tokens(seed, len))
                },
                |seq| plan(&mut index, seq),
                BatchSize::PerIteration,
            );
        },
    );
    group.finish();
}

/// Plans a prompt and releases the plan.
fn plan(index: &mut RadixIndex, seq: &mut TokenSequence) -> ReusePlan {
    let policy = ReusePolicy {
        approximate: true,
        scope: Scope::Namespace,
        ..ReusePolicy::EXACT_ONLY
    };
    let plan = index
        .plan(seq, &policy, PlanOptions::default())
        .expect("a policy");
    index.release(&plan).expect("a live plan");
    black_box(plan)
}
