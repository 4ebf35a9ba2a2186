//! Bugs that were fixed, each with its smallest input.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use std::sync::Arc;

use kvtrie_core::{
    BUILT_IN_KINDS, BlockId, Config, InsertOptions, Namespace, PlanOptions, RadixIndex,
    ReusePolicy, Salt, Source, Span, TokenSequence,
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
