//! Bugs that were fixed, each with its smallest input.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use std::sync::Arc;

use kvtrie_core::{
    BUILT_IN_KINDS, BlockId, Config, Effort, InsertOptions, LookupOptions, Namespace, PlanOptions,
    RadixIndex, ReusePolicy, Salt, Source, Span, TokenSequence,
};

fn index(num_blocks: u64, block_size: usize) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks,
        block_size,
        ..Config::default()
    })
    .unwrap()
}

fn sequence(tokens: &[u32]) -> TokenSequence {
    let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
    TokenSequence::new(Arc::new(namespace), tokens.to_vec(), Vec::new()).unwrap()
}

/// A plan that had pinned the last block of a path took that place for pinned when another block came to stand there.
#[test]
fn a_block_that_follows_a_discarded_pinned_one_is_pinned_by_the_insert() {
    let mut index = index(8, 1);
    let mut seq = sequence(&[1, 2]);
    let plan = index
        .plan(&mut seq, &ReusePolicy::EXACT_ONLY, PlanOptions::default())
        .unwrap();
    let options = InsertOptions::new(2, Source::Plan(&plan));
    index
        .insert(&mut seq, &[BlockId(0), BlockId(1)], options)
        .unwrap();
    index.discard(&[BlockId(1)]).unwrap();
    index
        .insert(&mut seq, &[BlockId(0), BlockId(2)], options)
        .unwrap();
    assert_eq!(index.num_evictable(), 0);
    index.check().unwrap();
}

/// An empty span tagged nothing and took one of the 64 kinds all the same.
#[test]
fn an_empty_span_does_not_name_a_kind() {
    let mut index = index(4, 2);
    let seq = sequence(&[1, 2]);
    let span = Span {
        start: 1,
        end: 1,
        kind: "mine".into(),
    };
    index.tag(&seq, &[span]).unwrap();
    assert_eq!(index.kinds().len(), BUILT_IN_KINDS.len());
}

/// An anchor that stood above another of the same lease hid that a place was anchored already: it was anchored twice, and
/// given back once, so that its blocks could never be evicted.
#[test]
fn an_anchor_of_a_fork_goes_with_its_plan() {
    let mut index = index(16, 1);
    let plan = index
        .plan(
            &mut sequence(&[1, 2]),
            &ReusePolicy::EXACT_ONLY,
            PlanOptions::default(),
        )
        .unwrap();
    let put = |index: &mut RadixIndex, tokens: &[u32], ids: &[u32]| {
        let ids: Vec<BlockId> = ids.iter().copied().map(BlockId).collect();
        let options = InsertOptions::new(tokens.len(), Source::Plan(&plan));
        index.insert(&mut sequence(tokens), &ids, options).unwrap();
        index.check().unwrap();
    };
    put(&mut index, &[1, 2, 3], &[0, 1, 2]);
    put(&mut index, &[1, 2, 4], &[0, 1, 3]);
    index.discard(&[BlockId(2)]).unwrap();
    for _ in 0..2 {
        put(&mut index, &[1, 2, 4, 5], &[0, 1, 3, 4]);
    }
    put(&mut index, &[1, 2, 4, 5, 6], &[0, 1, 3, 4, 5]);
    index.release(&plan).unwrap();
    index.check().unwrap();
    assert_eq!(index.num_evictable(), 5);
}

/// Tokens behind a hole spent the effort of a lookup, which gave up whenever it was called.
#[test]
fn a_lookup_with_little_effort_gets_past_a_hole() {
    let mut index = index(64, 2);
    let tokens: Vec<u32> = (0..64).collect();
    let ids: Vec<BlockId> = (0..32).map(BlockId).collect();
    index
        .insert(
            &mut sequence(&tokens),
            &ids,
            InsertOptions::new(64, Source::Computed),
        )
        .unwrap();
    index.discard(&[BlockId(0)]).unwrap();
    let effort = Effort { nodes: 9, bytes: 8 };
    let found = index
        .lookup_within(
            &mut sequence(&tokens),
            LookupOptions::default(),
            effort,
            &mut Vec::new(),
        )
        .unwrap();
    assert_eq!(found.map(|found| found.num_tokens), Some(0));
}

/// Each insert that found its place remembered was taken for one edge more.
#[test]
fn edges_of_a_grown_sequence_are_counted_once() {
    let mut index = index(64, 1);
    let mut seq = sequence(&[]);
    for token in 0..40 {
        seq.extend(&[token], Vec::new()).unwrap();
        let start = seq.len() - 1;
        let options = InsertOptions {
            start,
            ..InsertOptions::new(start + 1, Source::Computed)
        };
        index.insert(&mut seq, &[BlockId(token)], options).unwrap();
    }
    assert_eq!((index.stats().nodes, index.known_edges(&seq)), (1, 1));
}
