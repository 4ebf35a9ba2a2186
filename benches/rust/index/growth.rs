//! The same lookup in indexes with more and more cached tokens.

use criterion::{Criterion, Throughput};
use kvtrie_benches::{Random, filled, tokens};

use crate::setup::{fresh, look_up, lookups, size};

const LEN: usize = 8_192;

/// 8,192 tokens in one edge next to 10⁴ to 10⁷ others in edges of as many: the same edges are visited and the same
/// bytes compared, warm and cold; only the distance to the memory grows.
pub(crate) fn growth(c: &mut Criterion) {
    let mut group = c.benchmark_group("growth");
    group.throughput(Throughput::Elements(LEN as u64));
    let mut first = None;
    for (cached, name) in [
        (10_000, "10^4"),
        (100_000, "10^5"),
        (1_000_000, size("10^6", "")),
        (10_000_000, size("10^7", "")),
    ] {
        if name.is_empty() {
            continue;
        }
        let count = 2 + cached / LEN as u64;
        let mut index = filled(count, LEN, LEN).expect("a pool of at most a million blocks");
        let mut work = Vec::new();
        let mut out = Vec::new();
        for seed in [0, count - 1] {
            let before = index.stats();
            look_up(&mut index, &mut fresh(tokens(seed, LEN)), 0, LEN, &mut out);
            let after = index.stats();
            work.push((
                after.nodes_visited - before.nodes_visited,
                after.bytes_compared - before.bytes_compared,
            ));
        }
        assert!(
            work[0].1 >= 4 * LEN as u64,
            "a hit compares all of its tokens: {work:?}"
        );
        assert_eq!(work[0], work[1], "any cached sequence takes the same work");
        assert_eq!(
            *first.get_or_insert(work[0]),
            work[0],
            "(edges visited, bytes compared) do not grow with what is cached"
        );
        lookups(
            &mut group,
            &format!("8,192 tokens with {name} cached, warm"),
            &mut index,
            LEN,
            || tokens(0, LEN),
        );
        let mut random = Random::new(3);
        lookups(
            &mut group,
            &format!("8,192 tokens with {name} cached, cold"),
            &mut index,
            LEN,
            || tokens(random.below(count), LEN),
        );
    }
    group.finish();
}
