//! Tests what a lookup that pins holds, and until when.

#![expect(clippy::unwrap_used, reason = "helpers of a test")]

use kvtrie_core::{
    BlockId, Config, Effort, ErrorKind, Group, IdRange, InsertOptions, LookupOptions, Match, Pin,
    PlanOptions, RadixIndex, ReusePolicy, Source, TokenSequence,
};

use common::{ids, sequence};

mod common;

fn index(groups: Vec<Group>) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks: 64,
        block_size: 2,
        groups,
        ..Config::seeded(0)
    })
    .unwrap()
}

fn insert(index: &mut RadixIndex, seq: &mut TokenSequence, ids: &[BlockId]) {
    let options = InsertOptions::new(seq.len(), Source::Computed);
    index.insert(seq, ids, options).unwrap();
}

fn pinned(
    index: &mut RadixIndex,
    seq: &mut TokenSequence,
    options: LookupOptions,
) -> (Match, Pin, Vec<IdRange>) {
    let mut ranges = Vec::new();
    let found = index.lookup_pinned_within(seq, options, Effort::ANY, &mut ranges);
    let (found, pin) = found.unwrap().unwrap();
    (found, pin, ranges)
}

#[test]
fn a_lookup_pins_what_it_finds_and_nothing_else() {
    let mut index = index(vec![]);
    let mut seq = sequence(0..12);
    insert(&mut index, &mut seq, &ids(10..16));
    let options = LookupOptions {
        keep_last: 5,
        ..LookupOptions::default()
    };
    let (found, pin, ranges) = pinned(&mut index, &mut seq, options);
    let first = BlockId(10);
    assert_eq!(found.num_tokens, 6);
    assert_eq!(ranges, [IdRange { first, len: 3 }]);
    assert_eq!(index.evict(9), [15, 14, 13].map(BlockId));
    // Two pins of one path end one by one.
    let (_, second, _) = pinned(&mut index, &mut sequence(0..4), LookupOptions::default());
    index.release_pin(&pin).unwrap();
    assert_eq!(index.evict(9), [BlockId(12)]);
    index.release_pin(&second).unwrap();
    assert_eq!(index.evict(9), [BlockId(11), BlockId(10)]);
}

#[test]
fn a_lookup_that_finds_nothing_pins_nothing() {
    let mut index = index(vec![]);
    let (found, pin, ranges) = pinned(&mut index, &mut sequence(0..4), LookupOptions::default());
    assert_eq!((found.num_tokens, ranges), (0, vec![]));
    let mut seq = sequence(0..4);
    insert(&mut index, &mut seq, &ids(0..2));
    assert_eq!(index.num_evictable(), 2);
    index.release_pin(&pin).unwrap();
    index.check().unwrap();
}

#[test]
fn a_pinned_block_that_leaves_waits_until_the_pin_ends() {
    let mut index = index(vec![]);
    let mut seq = sequence(0..8);
    insert(&mut index, &mut seq, &ids(0..4));
    let (_, pin, _) = pinned(&mut index, &mut seq, LookupOptions::default());
    assert_eq!(index.discard(&[BlockId(1)]).unwrap(), []);
    assert_eq!(index.num_waiting(), 0);
    index.release_pin(&pin).unwrap();
    assert_eq!(
        (index.num_waiting(), index.take_freed()),
        (1, vec![BlockId(1)])
    );
}

#[test]
fn what_groups_need_is_pinned_as_by_a_plan() {
    let window = Group::window("swa", 3, 8, 2);
    let mut by_plan = index(vec![window.clone()]);
    let mut by_pin = index(vec![window]);
    for index in [&mut by_plan, &mut by_pin] {
        let mut seq = sequence(0..8);
        let offers = [(4, BlockId(5)), (6, BlockId(7))];
        let groups = kvtrie_core::GroupOptions {
            offers: &[kvtrie_core::GroupOffers {
                group: 1,
                offers: &offers,
            }],
            stops: &[],
        };
        let options = InsertOptions::new(8, Source::Computed);
        index
            .insert_groups(&mut seq, &ids(0..4), options, groups)
            .unwrap();
    }
    let options = PlanOptions {
        keep_last: 0,
        ..PlanOptions::default()
    };
    let mut seq = sequence(0..8);
    let plan = by_plan
        .plan(&mut seq, &ReusePolicy::EXACT_ONLY, options)
        .unwrap();
    let (_, pin, _) = pinned(&mut by_pin, &mut sequence(0..8), LookupOptions::default());
    let state = |index: &RadixIndex| (index.num_evictable(), index.num_evictable_group(1).unwrap());
    assert_eq!(state(&by_plan), state(&by_pin));
    assert_eq!(state(&by_pin).1, 1);
    by_plan.release(&plan).unwrap();
    by_pin.release_pin(&pin).unwrap();
    assert_eq!(state(&by_plan), state(&by_pin));
    assert_eq!(state(&by_pin).1, 2);
}

#[test]
fn a_pin_ends_once_and_where_it_was_made() {
    let mut index = index(vec![]);
    let mut other = self::index(vec![]);
    let (_, pin, _) = pinned(&mut index, &mut sequence(0..4), LookupOptions::default());
    let error = other.release_pin(&pin).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    index.release_pin(&pin).unwrap();
    let error = index.release_pin(&pin).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleHandle);
    assert_eq!(
        error.to_string(),
        "RadixIndex::release_pin: the pin was released already"
    );
}
