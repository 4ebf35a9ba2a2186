//! Tests plans that only pin blocks in place, and what a plan reports about itself.

#![expect(clippy::unwrap_used, reason = "helpers of a test")]

use std::sync::Arc;

use common::{ids, imported, put, sequence};
use kvtrie_core::{Config, InsertOptions, Namespace, RadixIndex, ReusePolicy, Salt, TokenSequence};

mod common;

fn index() -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks: 32,
        block_size: 2,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(0)
    })
    .unwrap()
}

/// Two exact and two approximate blocks of 32 tokens, all of which are cached after another prefix as well.
fn filled() -> (RadixIndex, TokenSequence) {
    let mut index = index();
    let mut other = sequence([100, 101].into_iter().chain(0..32));
    put(&mut index, &mut other, 4..21);
    let mut seq = sequence(0..32);
    let options = InsertOptions::new(8, imported(4, 3));
    index.insert(&mut seq, &ids(0..4), options).unwrap();
    (index, seq)
}

#[test]
fn pin_in_place_pins_exact_blocks_or_all_and_copies_nothing() {
    let (mut index, mut seq) = filled();
    assert_eq!(index.num_evictable(), 21);
    for (approximate, blocks) in [(false, 2), (true, 4)] {
        let plan = index.pin_in_place(&mut seq, approximate);
        assert_eq!(plan.blocks(), ids(0..blocks));
        assert_eq!(plan.source_blocks(), []);
        assert_eq!(index.num_evictable(), 21 - u64::from(blocks));
        // A plan with the same permission copies the remaining tokens.
        let policy = ReusePolicy {
            max_hops: ReusePolicy::MAX_HOPS,
            ..common::approximate()
        };
        let moved = common::planned(&mut index, &mut seq.clone(), &policy);
        assert!(!moved.source_blocks().is_empty());
        index.release(&moved).unwrap();
        self::index().release_if_live(&plan);
        assert!(!index.is_released(&plan));
        index.release_if_live(&plan);
        index.release_if_live(&plan);
        assert!(index.is_released(&plan));
        assert_eq!(index.num_evictable(), 21);
    }
}

#[test]
fn a_plan_knows_its_index_its_tokens_and_its_labels() {
    let (mut index, mut seq) = filled();
    let plan = index.pin_in_place(&mut seq, true);
    assert!(plan.is_of(&index) && !plan.is_of(&self::index()));
    assert_eq!(plan.block_size(), 2);
    assert_eq!(plan.first_approximate(), Some(4));
    let hops = [0, 1, 2, 3, 4, 99].map(|block| plan.hops_of_block(block));
    assert_eq!(hops, [0, 0, 3, 3, 0, 0]);
    seq.extend(&[7], Vec::new()).unwrap();
    assert!(plan.is_prefix_of(&seq) && plan.is_prefix_of(&sequence(0..40)));
    assert!(!plan.is_prefix_of(&sequence(0..31)));
    let other = Namespace::new("n", "bfloat16", "default", None, Salt::Shared).unwrap();
    let other = TokenSequence::new(Arc::new(other), (0..40).collect(), Vec::new()).unwrap();
    assert!(!plan.is_prefix_of(&other));
    let exact = index.pin_in_place(&mut seq, false);
    assert_eq!(exact.first_approximate(), None);
}
