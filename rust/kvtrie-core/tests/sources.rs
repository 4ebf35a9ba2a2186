//! Compares plans from the path of one sequence with plans of an index that contains only that sequence.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

mod common;
#[path = "common/numbers.rs"]
mod numbers;

use std::sync::Arc;

use common::{approximate, ids, imported, inserting, put, sequence, span};
use kvtrie_core::{
    Class, Config, ErrorKind, Namespace, PlanOptions, RadixIndex, ReusePlan, ReusePolicy, Salt,
    Scope, Source, Span, TokenSequence,
};
use numbers::Numbers;

const NUM_BLOCKS: u32 = 1 << 14;

fn index(block_size: usize) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks: NUM_BLOCKS.into(),
        block_size,
        moved_runs: true,
        min_run: 8,
        max_candidates: 1 << 10,
        ..Config::seeded(7)
    })
    .unwrap()
}

/// A number that depends only on the first tokens, so that each index caches the same for them.
fn fate(tokens: &[u32]) -> u32 {
    let mixed = tokens.iter().fold(17_u32, |mixed, &token| {
        (mixed ^ token).wrapping_mul(0x0100_0193).rotate_left(9)
    });
    mixed % 40
}

/// Inserts the whole blocks of sequences one by one. Most are exact, some have hops, some become holes, and some of
/// their tokens are tagged.
fn cache(index: &mut RadixIndex, texts: &[Vec<u32>]) {
    let block_size = index.config().block_size;
    let mut next_id = 0;
    let mut holes = Vec::new();
    for text in texts {
        for end in (block_size..=text.len()).step_by(block_size) {
            let source = match fate(&text[..end]) {
                0 => imported(0, 1),
                1 => imported(0, 2),
                _ => Source::Computed,
            };
            let options = inserting(end - block_size..end, source);
            let id = ids([next_id]);
            let done = index
                .insert(&mut sequence(text[..end].to_vec()), &id, options)
                .unwrap();
            if done.blocks == id {
                next_id += 1;
                holes.extend((fate(&text[..end]) == 2).then_some(id[0]));
            }
        }
        let tagged = (0..text.len() / block_size * block_size).filter(|&at| text[at] == 1);
        let spans: Vec<Span> = tagged.map(|at| span(at, at + 1, "reasoning")).collect();
        index.tag(&sequence(text.clone()), &spans).unwrap();
    }
    index.discard(&holes).unwrap();
}

fn plan(
    index: &mut RadixIndex,
    prompt: &[u32],
    source: Option<&[u32]>,
    policy: &ReusePolicy,
) -> ReusePlan {
    let mut prompt = sequence(prompt.to_vec());
    let options = PlanOptions::default();
    let plan = match source {
        Some(source) => index.plan_from(&mut prompt, &sequence(source.to_vec()), policy, options),
        None => index.plan(&mut prompt, policy, options),
    };
    let plan = plan.unwrap();
    index.check().unwrap();
    index.release(&plan).unwrap();
    plan
}

/// A text of random tokens and parts of other texts.
fn text(numbers: &mut Numbers, texts: &[Vec<u32>], symbols: u32) -> Vec<u32> {
    let mut tokens = Vec::new();
    for _ in 0..numbers.below(8) {
        if numbers.below(3) > 0 && !texts.is_empty() {
            let other = &texts[numbers.below(u32::try_from(texts.len()).unwrap()) as usize];
            let from = numbers.below(2) as usize
                * numbers.below(1 + u32::try_from(other.len()).unwrap()) as usize;
            let len = numbers.below(60) as usize;
            tokens.extend(&other[from..other.len().min(from + len)]);
        } else {
            tokens.extend((0..numbers.below(20)).map(|_| numbers.below(symbols)));
        }
    }
    tokens
}

#[test]
fn a_plan_from_one_sequence_is_that_of_an_index_that_holds_nothing_else() {
    let (mut num_moved, mut num_restricted) = (0, 0);
    for seed in 0..300 {
        let mut numbers = Numbers(seed);
        let block_size = [1, 2, 4, 16][numbers.below(4) as usize];
        let symbols = [3, 50][numbers.below(2) as usize];
        let mut texts = Vec::new();
        for _ in 0..6 {
            texts.push(text(&mut numbers, &texts, symbols));
        }
        let mut all = index(block_size);
        cache(&mut all, &texts);
        let forbidden = if numbers.below(3) == 0 {
            vec!["reasoning".into()]
        } else {
            Vec::new()
        };
        let policy = ReusePolicy {
            approximate: numbers.below(4) > 0,
            scope: Scope::Namespace,
            max_hops: u16::try_from(1 + numbers.below(3)).unwrap(),
            forbid_kinds: forbidden,
            partial_blocks: numbers.below(4) > 0,
            ..ReusePolicy::EXACT_ONLY
        };
        for _ in 0..4 {
            let prompt = text(&mut numbers, &texts, symbols);
            let source = &texts[numbers.below(6) as usize];
            let mut alone = index(block_size);
            cache(&mut alone, std::slice::from_ref(source));
            let found = plan(&mut all, &prompt, Some(source), &policy);
            let expected = plan(&mut alone, &prompt, None, &policy);
            assert_eq!(found.candidates_dropped(), 0, "seed {seed}");
            assert_eq!(expected.candidates_dropped(), 0, "seed {seed}");
            assert_eq!(
                found.segments(),
                expected.segments(),
                "seed {seed}: {source:?}, {prompt:?}"
            );
            num_moved += usize::from(found.segments().iter().any(|segment| segment.delta() != 0));
            let free = plan(&mut all, &prompt, None, &policy);
            num_restricted += usize::from(free.segments() != found.segments());
        }
    }
    assert!(
        num_moved > 100 && num_restricted > 100,
        "{num_moved}, {num_restricted}"
    );
}

#[test]
fn a_path_of_another_namespace_is_refused() {
    let mut index = index(2);
    let other = Namespace::new("other", "bfloat16", "default", None, Salt::Shared).unwrap();
    let source = TokenSequence::new(Arc::new(other), vec![1, 2], Vec::new()).unwrap();
    let error = index
        .plan_from(
            &mut sequence([1, 2]),
            &source,
            &ReusePolicy::EXACT_ONLY,
            PlanOptions::default(),
        )
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(
        error.to_string().contains("path is of another namespace"),
        "{error}"
    );
}

/// The same text after each of many heads. The first one is the oldest.
fn copies(count: u32) -> (RadixIndex, Vec<Vec<u32>>) {
    let mut index = RadixIndex::new(Config {
        num_blocks: NUM_BLOCKS.into(),
        block_size: 64,
        moved_runs: true,
        ..Config::seeded(7)
    })
    .unwrap();
    let with_head = |head: u32| (100_000 + head..=100_000 + head).chain(0..127).collect();
    let texts: Vec<Vec<u32>> = (0..count).map(with_head).collect();
    for (at, text) in (0..).zip(&texts) {
        put(
            &mut index,
            &mut sequence(text.clone()),
            [2 * at, 2 * at + 1],
        );
    }
    (index, texts)
}

#[test]
fn the_oldest_of_many_copies_is_found_where_the_plan_is_from_it() {
    let (mut index, texts) = copies(400);
    let prompt: Vec<u32> = (0..127).chain([1]).collect();
    let found = plan(&mut index, &prompt, Some(&texts[0]), &approximate());
    assert_eq!(found.candidates_dropped(), 0);
    assert_eq!(found.source_blocks(), ids([0, 1]));
    assert_eq!(found.num_tokens(Class::Approximate), 127);
}

#[test]
fn what_is_not_looked_at_among_too_many_copies_is_counted_and_no_other_copy_is_used() {
    let (mut index, texts) = copies(3_000);
    let prompt: Vec<u32> = (0..127).chain([1]).collect();
    let before = index.stats().search_looks;
    let found = plan(&mut index, &prompt, Some(&texts[0]), &approximate());
    // The first window takes 16 places per candidate, which leaves no look for a second window.
    assert_eq!(index.stats().search_looks - before, 16 * 64);
    assert!(found.candidates_dropped() >= 3_000 - 16 * 64);
    assert_eq!(found.num_tokens(Class::Compute), 128);
    let newest = plan(&mut index, &prompt, Some(&texts[2_999]), &approximate());
    assert_eq!(newest.source_blocks(), ids([5_998, 5_999]));
}
