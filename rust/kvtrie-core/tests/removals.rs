//! Tests what is removed, and what other sequences still know of it (D8, D9, D10).

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{BlockId, Config, LookupOptions, RadixIndex, Removed, TokenSequence};

use common::{ids, sequence};

mod common;

fn index(num_blocks: u64) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks,
        block_size: 1,
        ..Config::seeded(0)
    })
    .unwrap()
}

fn put(index: &mut RadixIndex, seq: &mut TokenSequence, raw: impl IntoIterator<Item = u32>) {
    common::put(index, seq, raw);
    index.check().unwrap();
}

fn found(index: &mut RadixIndex, seq: &mut TokenSequence) -> Vec<BlockId> {
    let mut out = Vec::new();
    index
        .lookup(seq, LookupOptions::default(), &mut out)
        .unwrap();
    out
}

/// Two sequences of eight blocks, with the ids 0 to 7 and 10 to 17, and what is known of them.
fn two() -> (RadixIndex, TokenSequence, TokenSequence) {
    let (mut index, mut seq, mut other) = (index(32), sequence(0..8), sequence(100..108));
    put(&mut index, &mut seq, 0..8);
    put(&mut index, &mut other, 10..18);
    (index, seq, other)
}

#[test]
fn discards_of_ids_that_are_not_indexed_are_counted() {
    let (mut index, ..) = two();
    let freed = index.discard(&ids([20, 7, 21, 20])).unwrap();
    assert_eq!((freed, index.stats().unknown_discards), (ids([7]), 2));
    assert_eq!(index.discard(&ids([7])).unwrap(), []);
    assert_eq!(index.stats().unknown_discards, 3);
}

#[test]
fn other_sequences_stay_known_when_blocks_are_discarded_from_an_end() {
    let (mut index, _, other) = two();
    assert_eq!(index.discard(&ids([7])).unwrap(), ids([7]));
    assert_eq!(index.unknown_steps(&other), 0);
    assert_eq!(index.discard(&ids([3])).unwrap(), ids([3]));
    assert_eq!(index.unknown_steps(&other), 8);
}

#[test]
fn other_sequences_stay_known_when_one_span_is_removed_from_an_end() {
    let (mut index, seq, other) = two();
    let removed = index.remove_spans(&seq, &[(6, 8)], false).unwrap();
    assert_eq!(
        (removed.freed, index.unknown_steps(&other)),
        (ids([6, 7]), 0)
    );
    let removed = index.remove_spans(&seq, &[(2, 3)], false).unwrap();
    assert_eq!((removed.freed, index.unknown_steps(&other)), (ids([2]), 8));
}

#[test]
fn a_sequence_is_looked_up_again_after_spans_left_two_edges_at_once() {
    let (mut index, seq, _) = two();
    // Another branch starts after four blocks.
    put(
        &mut index,
        &mut sequence([0, 1, 2, 3, 90]),
        [0, 1, 2, 3, 20],
    );
    let mut short = sequence(0..4);
    assert_eq!(found(&mut index, &mut short), ids(0..4));
    let removed = index.remove_spans(&seq, &[(2, 4), (6, 8)], true).unwrap();
    assert_eq!(removed.freed, ids([2, 3, 6, 7]));
    assert_eq!(found(&mut index, &mut short), ids([0, 1]));
    index.check().unwrap();
}

#[test]
fn removing_and_marking_what_is_a_hole_already_changes_nothing() {
    let (mut index, seq, mut other) = two();
    assert_eq!(index.discard(&ids([3, 4])).unwrap(), ids([3, 4]));
    assert_eq!(found(&mut index, &mut other), ids(10..18));
    let (stats, digest) = (index.stats(), index.digest());
    let removed = index.remove_spans(&seq, &[(3, 5)], false).unwrap();
    assert_eq!(removed, Removed::default());
    assert_eq!(index.mark_dead(&seq, &[(3, 5)]).unwrap(), 0);
    index.check().unwrap();
    assert_eq!((index.stats(), index.digest()), (stats, digest));
    assert_eq!(index.unknown_steps(&other), 0);
}

#[test]
fn of_tails_the_least_recently_used_leaves_and_none_that_is_not_cut_off() {
    let mut index = index(8);
    put(&mut index, &mut sequence([90]), [7]);
    let (mut first, mut second) = (sequence(0..3), sequence(10..14));
    put(&mut index, &mut first, 0..3);
    put(&mut index, &mut second, 3..7);
    // The first sequence was used after the second.
    found(&mut index, &mut first);
    index.remove_spans(&first, &[(0, 2)], false).unwrap();
    index.remove_spans(&second, &[(0, 3)], false).unwrap();
    let mut third = sequence(20..25);
    put(&mut index, &mut third, [0, 1, 3, 4, 5]);
    assert_eq!(index.stats().holes, 5);
    index.remove_spans(&third, &[(0, 4)], false).unwrap();
    // Nine holes are one too many. Of the tails 2, 6 and 5, the second one's leaves, with its three holes.
    assert_eq!((index.take_freed(), index.stats().holes), (ids([6]), 6));
    index.check().unwrap();
}

#[test]
fn tails_leave_until_there_are_as_many_holes_as_blocks() {
    let mut index = index(8);
    let mut paths = [sequence(0..2), sequence(10..15), sequence(20..25)];
    put(&mut index, &mut paths[0], [0, 1]);
    index.discard(&ids([0])).unwrap();
    put(&mut index, &mut paths[1], [0, 2, 3, 4, 5]);
    index.discard(&ids([0, 2, 3, 4])).unwrap();
    put(&mut index, &mut paths[2], [0, 2, 3, 4, 6]);
    index.discard(&ids([0, 2, 3])).unwrap();
    assert_eq!((index.stats().holes, index.take_freed()), (8, vec![]));
    index.discard(&ids([4])).unwrap();
    assert_eq!((index.stats().holes, index.take_freed()), (8, ids([1])));
    index.check().unwrap();
}

#[test]
fn a_tail_is_cut_off_by_a_hole_in_an_edge_above() {
    let mut index = index(8);
    let mut path = sequence(0..5);
    put(&mut index, &mut path, 0..5);
    // The branch starts after four blocks that will be holes.
    put(&mut index, &mut sequence([0, 1, 2, 3, 90]), [0, 1, 2, 3, 5]);
    index.remove_spans(&path, &[(0, 4)], true).unwrap();
    let mut second = sequence(10..14);
    put(&mut index, &mut second, 0..4);
    index.discard(&ids([0, 1, 2])).unwrap();
    let mut third = sequence(20..22);
    put(&mut index, &mut third, [0, 1]);
    assert_eq!((index.stats().holes, index.num_waiting()), (7, 0));
    index.discard(&ids([0])).unwrap();
    let mut fourth = sequence(30..32);
    put(&mut index, &mut fourth, [0, 2]);
    index.discard(&ids([0])).unwrap();
    // The holes of the first path stay until both its tails have left. These are the least recently used ones.
    assert_eq!((index.take_freed(), index.stats().holes), (ids([4, 5]), 5));
    index.check().unwrap();
}
