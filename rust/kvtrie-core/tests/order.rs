//! Tests which of several sources a plan takes (P5): those that continue in order first, and no piece below `min_run`.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{Class, Config, RadixIndex, ReusePlan};

use common::{approximate, ids, moved, planned, put, sequence};

mod common;

/// Tokens that are cached nowhere, or with one text alone.
const NEW: u32 = 1000;

fn index() -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks: 64,
        block_size: 4,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(0)
    })
    .unwrap()
}

fn plan(index: &mut RadixIndex, tokens: impl IntoIterator<Item = u32>) -> ReusePlan {
    let plan = planned(index, &mut sequence(tokens), &approximate());
    assert_eq!(plan.candidates_dropped(), 0);
    plan
}

/// The text 0 to 32, and another one with the tokens 16 to `end` after four of its own.
fn continued_elsewhere(end: u32) -> RadixIndex {
    let mut index = index();
    put(&mut index, &mut sequence(0..32), 20..28);
    let other = (NEW..NEW + 4).chain(16..end);
    put(&mut index, &mut sequence(other), 30..30 + (end - 12) / 4);
    index
}

#[test]
fn a_source_in_order_is_preferred_to_a_repeat_that_reaches_further() {
    let mut index = continued_elsewhere(40);
    let plan = plan(&mut index, (0..8).chain(16..40).chain([NEW + 9]));
    assert_eq!(plan.blocks(), ids([20, 21]));
    assert_eq!(moved(&plan), [(8, 24, 16), (24, 32, 20)]);
    assert_eq!(plan.source_blocks(), ids([24, 25, 26, 27, 35, 36]));
}

#[test]
fn a_piece_that_is_split_off_and_shorter_than_min_run_is_computed() {
    for (end, expected) in [
        (36, vec![(8, 24, 16)]),
        (40, vec![(8, 24, 16), (24, 32, 20)]),
    ] {
        let mut index = continued_elsewhere(end);
        let plan = plan(&mut index, (0..8).chain(16..end).chain([NEW + 9]));
        assert_eq!(moved(&plan), expected);
    }
}

#[test]
fn without_a_source_in_order_the_one_that_reaches_furthest_is_taken() {
    let mut index = continued_elsewhere(40);
    // The first text's tokens are before the last one in place.
    let plan = plan(&mut index, (0..28).chain(16..40).chain([NEW + 9]));
    assert_eq!(moved(&plan), [(28, 52, 4)]);
}

#[test]
fn a_slot_before_the_previous_one_is_not_in_order() {
    let mut index = index();
    // The tokens 8 to 18 are twice in the text. The first place is nearer.
    let text = (0..20).chain([NEW; 2]).chain(8..18);
    put(&mut index, &mut sequence(text), 0..8);
    let plan = plan(
        &mut index,
        (0..20).chain([NEW + 1]).chain(8..18).chain([NEW + 2]),
    );
    assert_eq!(moved(&plan), [(21, 31, 22)]);
}

#[test]
fn order_counts_from_the_previous_piece_wherever_it_is_from() {
    for first in [0, 1] {
        let mut index = index();
        let own = |text: u32| 100 * (text + 1)..100 * (text + 1) + 12;
        for text in 0..2 {
            // Both end with the same tokens, at the same positions.
            let tokens = own(text).chain(0..12);
            put(&mut index, &mut sequence(tokens), 6 * text..6 * text + 6);
        }
        let prompt = [NEW]
            .into_iter()
            .chain(own(first))
            .chain([NEW])
            .chain(0..12);
        let plan = plan(&mut index, prompt.chain([NEW]));
        assert_eq!(moved(&plan), [(1, 13, 0), (14, 26, 12)]);
        assert_eq!(plan.source_blocks(), ids(6 * first..6 * first + 6));
    }
}

#[test]
fn of_sources_in_order_the_one_that_reaches_furthest_is_taken() {
    let mut index = index();
    // After the same eight tokens, the tokens 16 to 32 follow twice; the second time two more are the same.
    let text = (0..8)
        .chain([NEW; 4])
        .chain(16..32)
        .chain([NEW; 4])
        .chain(16..36);
    put(&mut index, &mut sequence(text), 0..13);
    let plan = plan(&mut index, (0..8).chain(16..34).chain([NEW + 1]));
    assert_eq!(moved(&plan), [(8, 26, 32)]);
}

#[test]
fn tokens_of_the_same_prefix_are_copied_however_few_are_left() {
    let mut index = index();
    let ours = &mut sequence(0..40);
    put(&mut index, ours, 0..10);
    // Another text has the tokens of the first hole, and four of those after it.
    let other = (NEW..NEW + 8).chain(8..20);
    put(&mut index, &mut sequence(other), 10..15);
    index
        .remove_spans(ours, &[(8, 16), (24, 32)], true)
        .unwrap();
    let plan = planned(&mut index, ours, &approximate());
    let parts: Vec<_> = plan
        .segments()
        .iter()
        .map(|part| (part.start, part.end, part.class))
        .collect();
    let expected = [
        (0, 8, Class::Exact),
        (8, 20, Class::Approximate),
        (20, 24, Class::Exact),
    ];
    assert_eq!(parts[..3], expected);
    index.release(&plan).unwrap();
}

#[test]
fn exact_plans_do_not_depend_on_order() {
    let mut index = continued_elsewhere(40);
    let text = &mut sequence(0..32);
    index.remove_spans(text, &[(8, 16)], true).unwrap();
    let policy = kvtrie_core::ReusePolicy::EXACT_ONLY;
    let plan = planned(&mut index, &mut sequence(0..33), &policy);
    assert_eq!(plan.num_tokens(Class::Exact), 24);
    assert_eq!(plan.source_blocks(), ids(24..28));
    assert!(plan.moved_runs().is_empty());
}
