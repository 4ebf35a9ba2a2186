//! Tests what an insert returns and changes where the path has holes, approximate blocks or pins (D2, D12, D14).

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{
    Config, InsertOptions, Inserted, LookupOptions, RadixIndex, ReusePlan, ReusePolicy, Source,
};

use common::{WHOLE, approximate, ids, imported, sequence};

mod common;

const BLOCK_SIZE: usize = 4;

fn index() -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks: 32,
        block_size: BLOCK_SIZE,
        ..Config::seeded(0)
    })
    .unwrap()
}

/// Inserts one block per id; the tokens are 0, 1, 2 and so on.
fn put<const N: usize>(index: &mut RadixIndex, raw: [u32; N], source: Source<'_>) -> Inserted {
    let len = N * BLOCK_SIZE;
    let mut seq = sequence(0..u32::try_from(len).unwrap());
    let options = InsertOptions::new(len, source);
    let done = index.insert(&mut seq, &ids(raw), options).unwrap();
    index.check().unwrap();
    done
}

/// Plans `len` tokens from 0 on and reuses all cached ones, exact or approximate.
fn plan(index: &mut RadixIndex, len: u32) -> ReusePlan {
    let mut seq = sequence(0..len);
    index.plan(&mut seq, &approximate(), WHOLE).unwrap()
}

#[test]
fn nothing_is_taken_after_a_hole_whose_offer_is_condemned() {
    let mut index = index();
    put(&mut index, [0, 1, 2], Source::Computed);
    let held = plan(&mut index, 12);
    assert_eq!(index.discard(&ids([1])).unwrap(), []);
    let done = put(&mut index, [0, 1, 2, 3], Source::Computed);
    let expected = Inserted {
        blocks: ids([0]),
        num_exact: BLOCK_SIZE,
        surplus: ids([3]),
        ..Inserted::default()
    };
    assert_eq!(done, expected);
    assert_eq!((index.stats().indexed, index.stats().holes), (2, 1));
    index.release(&held).unwrap();
    assert_eq!(index.take_freed(), ids([1]));
}

#[test]
fn a_block_after_an_approximate_one_is_not_taken_from_its_pins() {
    let mut index = index();
    put(&mut index, [0, 1, 2], imported(BLOCK_SIZE, 0));
    let held = plan(&mut index, 12);
    assert_eq!(held.blocks(), ids([0, 1, 2]));
    // Block 7 was computed after the approximate block 1, so it is not better than block 2.
    let done = put(&mut index, [9, 1, 7], Source::Computed);
    let expected = Inserted {
        blocks: ids([0, 1, 2]),
        num_exact: BLOCK_SIZE,
        duplicates: ids([9, 7]),
        ..Inserted::default()
    };
    assert_eq!(done, expected);
    assert_eq!((index.stats().pinned, index.num_evictable()), (3, 0));
    index.release(&held).unwrap();
    index.check().unwrap();
    assert_eq!(index.evict(9), ids([2, 1, 0]));
}

#[test]
fn blocks_computed_after_approximate_ones_stay_approximate_when_these_are_evicted() {
    let mut index = index();
    let held = plan(&mut index, 12);
    put(&mut index, [0, 1, 2], imported(2 * BLOCK_SIZE, 0));
    let done = put(&mut index, [0, 1, 2], Source::Plan(&held));
    assert_eq!(done.num_exact, 2 * BLOCK_SIZE);
    index.discard(&ids([0, 1, 2])).unwrap();
    let done = put(&mut index, [3, 4, 5], Source::Plan(&held));
    assert_eq!(done.blocks, ids([3, 4, 5]));
    assert_eq!(done.num_exact, 2 * BLOCK_SIZE);
    assert_eq!(index.stats().approximate, 1);
}

#[test]
fn an_insert_of_less_than_is_known_walks_nothing_again() {
    let mut index = index();
    put(&mut index, [0, 1, 2, 3], Source::Computed);
    let mut seq = sequence((0..12).chain(90..94));
    let options = LookupOptions::default();
    let found = index.lookup(&mut seq, options, &mut Vec::new()).unwrap();
    assert_eq!(found.num_tokens, 12);
    let before = index.stats();
    let options = InsertOptions::new(8, Source::Computed);
    let done = index.insert(&mut seq, &ids([0, 1]), options).unwrap();
    let expected = Inserted {
        blocks: ids([0, 1]),
        num_exact: 8,
        ..Inserted::default()
    };
    assert_eq!(done, expected);
    let after = index.stats();
    assert_eq!(after.nodes_visited, before.nodes_visited);
    assert_eq!(after.bytes_compared, before.bytes_compared);
    index.check().unwrap();
}

#[test]
fn a_path_is_pinned_in_one_piece_again_when_its_hole_is_filled() {
    let mut index = index();
    put(&mut index, [0, 1, 2, 3], Source::Computed);
    let held = plan(&mut index, 16);
    assert_eq!(index.discard(&ids([1])).unwrap(), []);
    // The lease has two entries and the removed block.
    assert_eq!((index.stats().pinned, index.release_steps(&held)), (4, 3));
    let done = put(&mut index, [0, 9, 2, 3], Source::Plan(&held));
    assert_eq!(done.blocks, ids([0, 9, 2, 3]));
    assert_eq!((index.stats().pinned, index.release_steps(&held)), (5, 2));
    assert_eq!(index.discard(&ids([9])).unwrap(), []);
    index.release(&held).unwrap();
    assert_eq!(index.take_freed(), ids([1, 9]));
    index.check().unwrap();
}

#[test]
fn a_sequence_of_which_nothing_was_inserted_is_known_to_share_nothing() {
    let mut index = index();
    put(&mut index, [0, 1, 2], Source::Computed);
    let mut seq = sequence(0..12);
    let options = InsertOptions::new(0, Source::Computed);
    let done = index.insert(&mut seq, &ids([0, 1]), options).unwrap();
    assert_eq!(done, Inserted::default());
    assert_eq!((index.known_edges(&seq), index.unknown_steps(&seq)), (0, 3));
}

#[test]
fn a_plan_after_a_shorter_insert_has_the_blocks_that_are_there_now() {
    let mut index = index();
    put(&mut index, [0, 1, 2, 3], Source::Computed);
    // The branch makes the first two blocks an edge.
    let options = InsertOptions::new(12, Source::Computed);
    let mut branch = sequence((0..8).chain(90..94));
    index.insert(&mut branch, &ids([0, 1, 9]), options).unwrap();
    let mut seq = sequence(0..16);
    let mut planned = |index: &mut RadixIndex| {
        let plan = index.plan(&mut seq, &ReusePolicy::EXACT_ONLY, WHOLE);
        let plan = plan.unwrap();
        index.release(&plan).unwrap();
        let options = InsertOptions::new(8, Source::Computed);
        index.insert(&mut seq, &ids([0, 1]), options).unwrap();
        plan.blocks().to_vec()
    };
    assert_eq!(planned(&mut index), ids([0, 1, 2, 3]));
    assert_eq!(index.discard(&ids([3, 2])).unwrap(), ids([3, 2]));
    put(&mut index, [0, 1, 7], Source::Computed);
    assert_eq!(planned(&mut index), ids([0, 1, 7]));
}
