//! Bugs that were fixed, each with its smallest input.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{
    BUILT_IN_KINDS, BlockId, Class, Config, Effort, ExplainOptions, InsertOptions, Item,
    LookupOptions, RadixIndex, Reason, ReusePolicy, Source, TokenSequence,
};

use common::{approximate, ids, imported, inserting, namespace, planned, put, sequence, span};

mod common;

fn index(num_blocks: u64, block_size: usize) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks,
        block_size,
        ..Config::seeded(0)
    })
    .unwrap()
}

/// A plan that had pinned the last block of a path counted that place as pinned when another block replaced it.
#[test]
fn a_block_that_follows_a_discarded_pinned_one_is_pinned_by_the_insert() {
    let mut index = index(8, 1);
    let mut seq = sequence([1, 2]);
    let plan = planned(&mut index, &mut seq, &ReusePolicy::EXACT_ONLY);
    let options = InsertOptions::new(2, Source::Plan(&plan));
    index
        .insert(&mut seq, &[BlockId(0), BlockId(1)], options.clone())
        .unwrap();
    index.discard(&[BlockId(1)]).unwrap();
    index
        .insert(&mut seq, &[BlockId(0), BlockId(2)], options)
        .unwrap();
    assert_eq!(index.num_evictable(), 0);
    index.check().unwrap();
}

/// An empty span tagged nothing and still used one of the 64 kinds.
#[test]
fn an_empty_span_does_not_name_a_kind() {
    let mut index = index(4, 2);
    let seq = sequence([1, 2]);
    let span = span(1, 1, "mine");
    index.tag(&seq, &[span]).unwrap();
    assert_eq!(index.kinds().len(), BUILT_IN_KINDS.len());
}

/// An anchor above another of the same lease hid that a place was anchored already. The place was anchored twice and
/// released once, so its blocks could never be evicted.
#[test]
fn an_anchor_of_a_fork_goes_with_its_plan() {
    let mut index = index(16, 1);
    let plan = planned(&mut index, &mut sequence([1, 2]), &ReusePolicy::EXACT_ONLY);
    let put = |index: &mut RadixIndex, tokens: &[u32], raw: &[u32]| {
        let ids = ids(raw.iter().copied());
        let options = InsertOptions::new(tokens.len(), Source::Plan(&plan));
        let mut seq = sequence(tokens.iter().copied());
        index.insert(&mut seq, &ids, options).unwrap();
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

/// Tokens after a hole used up the effort of a lookup, which therefore gave up at every call.
#[test]
fn a_lookup_with_little_effort_gets_past_a_hole() {
    let mut index = index(64, 2);
    put(&mut index, &mut sequence(0..64), 0..32);
    index.discard(&[BlockId(0)]).unwrap();
    let effort = Effort { nodes: 9, bytes: 8 };
    let options = LookupOptions::default();
    let found = index.lookup_within(&mut sequence(0..64), options, effort, &mut Vec::new());
    assert_eq!(found.unwrap().map(|found| found.num_tokens), Some(0));
}

/// Each insert that found its place remembered was counted as another edge.
#[test]
fn edges_of_a_grown_sequence_are_counted_once() {
    let mut index = index(64, 1);
    let mut seq = sequence([]);
    for token in 0..40 {
        seq.extend(&[token], Vec::new()).unwrap();
        let start = seq.len() - 1;
        let options = inserting(start..start + 1, Source::Computed);
        index.insert(&mut seq, &[BlockId(token)], options).unwrap();
    }
    assert_eq!((index.stats().nodes, index.known_edges(&seq)), (1, 1));
}

/// An index with `moved_runs` whose blocks back the sequence, in order.
fn filled(seq: &mut TokenSequence, config: &Config, options: InsertOptions<'_>) -> RadixIndex {
    let num_blocks = seq.len() / config.block_size;
    let mut index = RadixIndex::new(Config {
        num_blocks: num_blocks as u64,
        moved_runs: true,
        ..config.clone()
    })
    .unwrap();
    let blocks = ids(0..u32::try_from(num_blocks).unwrap());
    index.insert(seq, &blocks, options).unwrap();
    index
}

/// The digest of a block did not depend on where an item in it ends.
#[test]
fn a_block_whose_item_is_longer_was_not_evicted() {
    let picture = |end: usize| {
        let items = vec![Item::new(1, end, b"picture").unwrap()];
        TokenSequence::new(namespace(), vec![7; 4], items).unwrap()
    };
    let digest = |end: usize| {
        let mut index = index(8, 4);
        put(&mut index, &mut picture(end), [0]);
        index
    };
    assert_ne!(digest(2).digest(), digest(3).digest());
    let mut index = digest(2);
    index.evict(1);
    let mut reason = |end: usize| {
        let options = ExplainOptions::default();
        index.explain(&mut picture(end), &options).unwrap().reason
    };
    assert_eq!(reason(2), Reason::Evicted);
    assert_eq!(reason(3), Reason::NotCached);
}

/// Positions after the last one overflowed the largest number.
#[test]
fn a_min_run_longer_than_any_prompt_finds_nothing() {
    let tokens: Vec<u32> = (0..64).collect();
    for min_run in [100_000, usize::MAX / 2, usize::MAX] {
        let config = Config {
            block_size: 8,
            min_run,
            ..Config::seeded(0)
        };
        let options = InsertOptions::new(64, Source::Computed);
        let mut index = filled(&mut sequence(0..64), &config, options);
        let mut prompt = sequence([&[99][..], &tokens].concat());
        let plan = planned(&mut index, &mut prompt, &approximate());
        assert_eq!(plan.num_tokens(Class::Compute), 65);
    }
}

/// Every run of a path with holes was visited once for each of the others, which took minutes.
#[test]
fn a_path_of_many_holes_is_planned_in_one_pass() {
    let mut seq = sequence(0..320_000);
    let config = Config {
        block_size: 8,
        min_run: 8,
        ..Config::seeded(0)
    };
    let options = InsertOptions::new(seq.len(), Source::Computed);
    let mut index = filled(&mut seq, &config, options);
    index.discard(&ids((1..40_000).step_by(2))).unwrap();
    for policy in [ReusePolicy::EXACT_ONLY, approximate()] {
        let plan = planned(&mut index, &mut seq, &policy);
        assert_eq!(plan.num_tokens(Class::Exact), 160_000);
        index.release(&plan).unwrap();
    }
}

/// For every forbidden token of an approximate path, all blocks after it were visited.
#[test]
fn forbidden_tokens_are_passed_over_together() {
    let mut seq = sequence(0..320_000);
    let spans = [span(16, 160_000, "reasoning")];
    let options = InsertOptions {
        spans: &spans,
        ..InsertOptions::new(seq.len(), imported(8, 1))
    };
    let config = Config {
        block_size: 8,
        ..Config::seeded(0)
    };
    let mut index = filled(&mut seq, &config, options);
    let policy = ReusePolicy {
        forbid_kinds: vec!["reasoning".into()],
        ..approximate()
    };
    let plan = planned(&mut index, &mut seq, &policy);
    assert_eq!(plan.num_tokens(Class::Approximate), 160_007);
    assert_eq!(plan.num_tokens(Class::Compute), 160_000 - 16 + 1);
}

/// A run that is shorter than the policy's `min_run` was followed from each of its windows.
#[test]
fn a_run_that_is_too_short_is_followed_once() {
    let tokens: Vec<u32> = (0..160_000).collect();
    let options = InsertOptions::new(tokens.len(), Source::Computed);
    let mut index = filled(&mut sequence(0..160_000), &Config::seeded(0), options);
    let mut prompt = sequence([&[u32::MAX][..], &tokens, &[u32::MAX]].concat());
    for (min_run, found) in [(160_001, 0), (160_000, 160_000)] {
        let policy = ReusePolicy {
            min_run: Some(min_run),
            ..approximate()
        };
        let plan = planned(&mut index, &mut prompt, &policy);
        assert_eq!(plan.num_tokens(Class::Approximate), found);
    }
}

/// Two siblings shared as much. The one with the lower id was copied, where tokens before them had more hops than both.
#[test]
fn of_siblings_after_many_hops_the_one_with_fewer_is_copied() {
    let config = Config {
        num_blocks: 16,
        block_size: 4,
        min_run: 8,
        moved_runs: true,
        ..Config::seeded(0)
    };
    let text = |last: u32| -> Vec<u32> { (0..19).chain([last]).collect() };
    let mut index = RadixIndex::new(config).unwrap();
    let first = InsertOptions::new(20, imported(0, 2));
    let blocks = [4, 5, 6, 13, 0].map(BlockId);
    index
        .insert(&mut sequence(text(100)), &blocks, first)
        .unwrap();
    let second = inserting(16..20, Source::Computed);
    index
        .insert(&mut sequence(text(200)), &[BlockId(7)], second)
        .unwrap();
    // Another text shares so many of their tokens that all later windows are in the siblings.
    let before = (49..58).chain(0..11);
    put(&mut index, &mut sequence(before), 8..13);
    let prompt = [300].into_iter().chain(49..58).chain(text(400));
    let policy = ReusePolicy {
        max_hops: 9,
        ..approximate()
    };
    let plan = planned(&mut index, &mut sequence(prompt), &policy);
    let parts: Vec<_> = plan
        .segments()
        .iter()
        .map(|part| (part.start, part.end, part.hops))
        .collect();
    assert_eq!(
        parts,
        [(0, 1, 0), (1, 21, 1), (21, 26, 3), (26, 29, 1), (29, 30, 0)]
    );
    assert!(plan.source_blocks().contains(&BlockId(7)));
}
