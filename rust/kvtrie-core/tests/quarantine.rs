//! Tests blocks that are permanently out of use (R7), on cases worked out by hand.

#![expect(clippy::unwrap_used, reason = "helpers of a test")]

use kvtrie_core::{
    Config, ErrorKind, InsertOptions, LookupOptions, RadixIndex, RestoredPool, ReusePolicy, Source,
    TokenSequence,
};

use common::{WHOLE, ids, put, sequence};

mod common;

const POOL: RestoredPool<'_> = RestoredPool::Kept(&[0; 16]);

fn index() -> RadixIndex {
    let config = Config {
        num_blocks: 8,
        block_size: 1,
        ..Config::seeded(0)
    };
    RadixIndex::new(config).unwrap()
}

/// An index with the tokens 5, 6, 7 in the blocks 0, 1, 2.
fn filled() -> (RadixIndex, TokenSequence) {
    let (mut index, mut seq) = (index(), sequence([5, 6, 7]));
    put(&mut index, &mut seq, 0..3);
    (index, seq)
}

/// Checks that free or held, indexed, condemned and quarantined blocks add up to the pool.
fn check_sum(index: &RadixIndex, free_and_held: u64) {
    let stats = index.stats();
    let known = stats.indexed + stats.condemned + stats.quarantined;
    assert_eq!(known + free_and_held, 8, "{stats:?}");
    index.check().unwrap();
}

#[test]
fn a_block_in_quarantine_leaves_and_is_handed_out_by_no_call() {
    let (mut index, mut seq) = filled();
    assert_eq!(index.quarantine(&ids([1, 1])).unwrap(), 1);
    assert_eq!(index.quarantine(&ids([1])).unwrap(), 0);
    check_sum(&index, 5);
    let mut found = Vec::new();
    index
        .lookup(&mut seq, LookupOptions::default(), &mut found)
        .unwrap();
    assert_eq!(found, ids([0]));
    assert_eq!(index.discard(&ids([1])).unwrap(), []);
    assert_eq!(index.evict(9), ids([2, 0]));
    assert_eq!(index.take_freed(), []);
    assert_eq!(index.reset(), []);
    check_sum(&index, 7);
    assert_eq!(index.quarantined().collect::<Vec<_>>(), ids([1]));
}

#[test]
fn a_pinned_block_goes_to_quarantine_after_its_last_release() {
    let (mut index, mut seq) = filled();
    let mut plan = || {
        index
            .plan(&mut seq, &ReusePolicy::EXACT_ONLY, WHOLE)
            .unwrap()
    };
    let (one, two) = (plan(), plan());
    assert_eq!(index.quarantine(&ids([2])).unwrap(), 1);
    assert_eq!(index.discard(&ids([1])).unwrap(), []);
    assert_eq!(index.quarantine(&ids([1])).unwrap(), 1);
    let stats = index.stats();
    assert_eq!((stats.condemned, stats.quarantined), (2, 0));
    let blob = index.snapshot();
    index.release(&one).unwrap();
    check_sum(&index, 5);
    index.release(&two).unwrap();
    let stats = index.stats();
    assert_eq!(
        (stats.condemned, stats.waiting, stats.quarantined),
        (0, 0, 2)
    );
    check_sum(&index, 5);
    assert_eq!(index.take_freed(), []);
    let again = RadixIndex::restore(&blob, POOL).unwrap();
    assert_eq!(again.digest(), index.digest());
    assert_eq!(again.stats().quarantined, 2);
}

#[test]
fn a_waiting_block_goes_to_quarantine_at_once() {
    let (mut index, mut seq) = filled();
    let plan = index
        .plan(&mut seq, &ReusePolicy::EXACT_ONLY, WHOLE)
        .unwrap();
    index.discard(&ids([0, 1, 2])).unwrap();
    index.release(&plan).unwrap();
    assert_eq!(index.quarantine(&ids([1])).unwrap(), 1);
    check_sum(&index, 5);
    assert_eq!(index.take_freed(), ids([0, 2]));
    check_sum(&index, 7);
}

#[test]
fn an_id_that_the_index_does_not_know_is_quarantined_and_counted() {
    let mut index = index();
    assert_eq!(index.quarantine(&ids([4, 4, 3])).unwrap(), 2);
    assert_eq!(
        (index.stats().quarantined, index.stats().unknown_discards),
        (2, 2)
    );
    assert_eq!(index.quarantine(&ids([4])).unwrap(), 0);
    assert_eq!(index.stats().unknown_discards, 3);
    check_sum(&index, 6);
}

#[test]
fn an_insert_stops_at_a_block_in_quarantine() {
    let (mut index, mut seq) = (index(), sequence([5, 6, 7]));
    index.quarantine(&ids([1])).unwrap();
    let computed = InsertOptions::new(3, Source::Computed);
    let done = index
        .insert(&mut seq, &ids([0, 1, 2]), computed.clone())
        .unwrap();
    assert_eq!(
        (done.blocks, done.surplus, done.duplicates),
        (ids([0]), ids([2]), vec![])
    );
    // Another block at its place stays.
    index
        .insert(&mut seq, &ids([0, 3, 2]), computed.clone())
        .unwrap();
    let done = index.insert(&mut seq, &ids([0, 1, 2]), computed).unwrap();
    assert_eq!(
        (done.blocks, done.surplus, done.duplicates),
        (ids([0, 3, 2]), vec![], vec![])
    );
    check_sum(&index, 4);
}

#[test]
fn quarantine_survives_reset_drop_and_snapshot_and_is_in_the_digest() {
    let (mut index, seq) = filled();
    let before = index.digest();
    index.quarantine(&ids([7])).unwrap();
    assert_ne!(index.digest(), before);
    index.quarantine(&ids([2])).unwrap();
    index.drop_namespace(seq.namespace());
    assert_eq!(index.stats().quarantined, 2);
    index.reset();
    let again = RadixIndex::restore(&index.snapshot(), POOL).unwrap();
    assert_eq!(again.quarantined().collect::<Vec<_>>(), ids([2, 7]));
    assert_eq!(again.digest(), index.digest());
    check_sum(&again, 6);
}

#[test]
fn an_id_outside_the_pool_changes_nothing() {
    let (mut index, _) = filled();
    let before = (index.digest(), index.stats());
    let error = index.quarantine(&ids([1, 8])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(
        error.to_string(),
        "RadixIndex::quarantine: ids holds 8; it must be in [0, 8) (num_blocks)"
    );
    assert_eq!((index.digest(), index.stats()), before);
}
