//! Tests blocks of a closed turn that are marked dead, or removed from the middle (D8, D10, D11).

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{
    Config, ErrorKind, LookupOptions, RadixIndex, Removed, ReusePlan, ReusePolicy, Source,
    TokenSequence,
};

use common::{WHOLE, ids, inserting, sequence, span};

mod common;

const BLOCK_SIZE: usize = 2;

fn index(num_blocks: u64) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks,
        block_size: BLOCK_SIZE,
        ..Config::seeded(0)
    })
    .unwrap()
}

/// Inserts the whole blocks of a sequence with these ids.
fn put(index: &mut RadixIndex, seq: &mut TokenSequence, raw: impl IntoIterator<Item = u32>) {
    common::put(index, seq, raw);
    index.check().unwrap();
}

fn plan(index: &mut RadixIndex, seq: &mut TokenSequence) -> ReusePlan {
    index.plan(seq, &ReusePolicy::EXACT_ONLY, WHOLE).unwrap()
}

fn matched(index: &mut RadixIndex, seq: &mut TokenSequence) -> usize {
    let options = LookupOptions {
        touch: false,
        ..LookupOptions::default()
    };
    index
        .lookup(seq, options, &mut Vec::new())
        .unwrap()
        .num_tokens
}

/// Eight blocks, ids 0 to 7: a prompt (0..4), reasoning (4..12) and an answer (12..16).
fn turn(num_blocks: u64) -> (RadixIndex, TokenSequence) {
    let mut index = index(num_blocks);
    let mut seq = sequence(0..16);
    put(&mut index, &mut seq, 0..8);
    (index, seq)
}

#[test]
fn dead_blocks_go_first_and_the_prompt_and_the_answer_survive() {
    let (mut index, mut seq) = turn(32);
    let mut older = sequence(100..104);
    put(&mut index, &mut older, [20, 21]);
    matched(&mut index, &mut seq);
    assert_eq!(index.mark_dead(&seq, &[(4, 12)]).unwrap(), 4);
    assert_eq!(index.stats().dead, 4);
    index.check().unwrap();
    // The marked blocks are the most recently used ones, but they are evicted first, the last block first.
    assert_eq!(index.evict(3), ids([5, 4, 3]));
    assert_eq!((index.stats().dead, index.stats().holes), (1, 3));
    assert_eq!(index.evict(1), ids([2]));
    index.check().unwrap();
    assert_eq!(matched(&mut index, &mut seq), 4);
    assert_eq!(matched(&mut index, &mut older), 4);
    assert_eq!(index.evict(9), ids([7, 6, 1, 0, 21, 20]));
}

#[test]
fn the_oldest_mark_goes_first_and_a_block_keeps_its_first() {
    let (mut index, seq) = turn(32);
    assert_eq!(index.mark_dead(&seq, &[(2, 4)]).unwrap(), 1);
    assert_eq!(index.mark_dead(&seq, &[(0, 6), (8, 10)]).unwrap(), 3);
    assert_eq!(index.mark_dead(&seq, &[(0, 6)]).unwrap(), 0);
    index.check().unwrap();
    assert_eq!(index.evict(4), ids([1, 4, 2, 0]));
}

#[test]
fn waiting_blocks_go_before_dead_ones() {
    let (mut index, mut seq) = turn(32);
    let plan = plan(&mut index, &mut seq);
    index.discard(&ids([7])).unwrap();
    index.release(&plan).unwrap();
    index.mark_dead(&seq, &[(0, 2)]).unwrap();
    assert_eq!(index.evict(2), ids([7, 0]));
}

#[test]
fn any_use_revives() {
    let revived = |use_it: &dyn Fn(&mut RadixIndex, &mut TokenSequence)| {
        let (mut index, mut seq) = turn(32);
        assert_eq!(index.mark_dead(&seq, &[(4, 16)]).unwrap(), 6);
        use_it(&mut index, &mut seq);
        index.check().unwrap();
        6 - index.stats().dead
    };
    let look_up = |index: &mut RadixIndex, tokens: u32, touch: bool| {
        let options = LookupOptions {
            touch,
            ..LookupOptions::default()
        };
        index
            .lookup(&mut sequence(0..tokens), options, &mut Vec::new())
            .unwrap();
    };
    assert_eq!(revived(&|index, _| look_up(index, 16, true)), 6);
    assert_eq!(revived(&|index, _| look_up(index, 9, true)), 2);
    assert_eq!(revived(&|index, _| look_up(index, 16, false)), 0);
    assert_eq!(
        revived(&|index, seq| assert!(!plan(index, seq).blocks().is_empty())),
        6
    );
    assert_eq!(revived(&|index, seq| put(index, seq, 0..8)), 6);
    // The prompt is in place, and one block is a source.
    let prompt = || sequence([0, 1, 2, 3, 4, 99]);
    assert_eq!(
        revived(&|index, _| assert_eq!(plan(index, &mut prompt()).source_blocks(), ids([2]))),
        1
    );
    let span = span(0, 16, "reasoning");
    assert_eq!(
        revived(&|index, seq| index.tag(seq, std::slice::from_ref(&span)).unwrap()),
        0
    );
}

#[test]
fn what_straddles_an_edge_of_a_range_stays() {
    let (mut index, seq) = turn(32);
    assert_eq!(index.mark_dead(&seq, &[(3, 9), (9, 10)]).unwrap(), 3);
    assert_eq!(index.evict(3), ids([4, 3, 2]));
    let removed = index.remove_spans(&seq, &[(11, 15)], false).unwrap();
    assert_eq!(removed.freed, ids([6]));
    assert_eq!(
        index
            .remove_spans(&seq, &[(15, 15), (15, 16)], false)
            .unwrap(),
        Removed::default()
    );
}

#[test]
fn blocks_that_another_sequence_may_need_are_skipped() {
    let (mut index, seq) = turn(32);
    // One sequence has another answer after the same reasoning, another one continues the same prompt differently.
    let mut other = sequence((0..12).chain([90, 91]));
    put(&mut index, &mut other, (0..6).chain([20]));
    assert_eq!(index.mark_dead(&seq, &[(0, 16)]).unwrap(), 2);
    assert_eq!(index.mark_dead(&sequence(0..8), &[(0, 8)]).unwrap(), 0);
    let removed = index.remove_spans(&seq, &[(8, 14)], false).unwrap();
    assert_eq!(
        (removed.freed, removed.kept, removed.condemned),
        (ids([6]), ids([4, 5]), vec![])
    );
    assert_eq!(matched(&mut index, &mut other), 14);
    index.check().unwrap();
    let removed = index.remove_spans(&seq, &[(8, 14)], true).unwrap();
    assert_eq!((removed.freed, removed.kept), (ids([4, 5]), vec![]));
    assert_eq!(matched(&mut index, &mut other), 8);
    index.check().unwrap();
}

#[test]
fn the_tail_is_attached_again_when_the_hole_is_filled() {
    let (mut index, mut seq) = turn(32);
    let removed = index.remove_spans(&seq, &[(4, 8), (8, 12)], false).unwrap();
    assert_eq!(removed.freed, ids(2..6));
    index.check().unwrap();
    assert_eq!((matched(&mut index, &mut seq), index.stats().holes), (4, 4));
    let options = inserting(4..12, Source::Computed);
    index.insert(&mut seq, &ids(10..14), options).unwrap();
    assert_eq!(
        (matched(&mut index, &mut seq), index.stats().holes),
        (16, 0)
    );
    let mut found = Vec::new();
    index
        .lookup(&mut seq, LookupOptions::default(), &mut found)
        .unwrap();
    assert_eq!(found, ids([0, 1, 10, 11, 12, 13, 6, 7]));
}

#[test]
fn what_is_removed_from_the_end_leaves_no_hole() {
    let (mut index, mut seq) = turn(32);
    let removed = index.remove_spans(&seq, &[(8, 16)], false).unwrap();
    assert_eq!(removed.freed, ids(4..8));
    assert_eq!((index.stats().holes, matched(&mut index, &mut seq)), (0, 8));
    index.remove_spans(&seq, &[(0, 16)], false).unwrap();
    assert_eq!((index.stats().nodes, index.stats().namespaces), (0, 0));
    assert_eq!(
        index.remove_spans(&seq, &[(0, 16)], false).unwrap(),
        Removed::default()
    );
    assert_eq!(index.mark_dead(&seq, &[(0, 16)]).unwrap(), 0);
}

#[test]
fn pinned_blocks_are_skipped_while_they_are_pinned() {
    let (mut index, mut seq) = turn(32);
    let plan = plan(&mut index, &mut seq);
    assert_eq!(index.mark_dead(&seq, &[(4, 12)]).unwrap(), 4);
    assert_eq!((index.num_evictable(), index.stats().dead), (0, 4));
    assert_eq!(index.evict(9), []);
    index.check().unwrap();
    index.release(&plan).unwrap();
    index.check().unwrap();
    assert_eq!(
        (index.num_evictable(), index.evict(5)),
        (8, ids([5, 4, 3, 2, 7]))
    );
}

#[test]
fn pinned_blocks_that_are_removed_come_back_after_their_last_release() {
    let (mut index, mut seq) = turn(32);
    let plan = plan(&mut index, &mut sequence(0..6));
    let removed = index.remove_spans(&seq, &[(2, 12)], false).unwrap();
    assert_eq!(
        (removed.freed, removed.condemned),
        (ids([3, 4, 5]), ids([1, 2]))
    );
    index.check().unwrap();
    assert_eq!(
        (index.stats().condemned, matched(&mut index, &mut seq)),
        (2, 2)
    );
    // The other blocks of the plan's path are still pinned.
    assert_eq!((index.stats().pinned, index.evict(9)), (3, ids([7, 6])));
    index.release(&plan).unwrap();
    assert_eq!(index.take_freed(), ids([1, 2]));
    index.check().unwrap();
}

#[test]
fn holes_are_bounded_after_removals_and_after_evictions_of_the_dead() {
    for evicts in [false, true] {
        let mut index = index(8);
        let mut tails = Vec::new();
        for turn in 0..3 {
            let mut seq = sequence((0..8).map(|token| token + 100 * turn));
            let free: Vec<u32> = (0..8).filter(|&id| !tails.contains(&id)).take(4).collect();
            put(&mut index, &mut seq, free.clone());
            tails.push(free[3]);
            if evicts {
                assert_eq!(index.mark_dead(&seq, &[(0, 6)]).unwrap(), 3);
                assert_eq!(index.evict(3), ids(free[..3].iter().rev().copied()));
            } else {
                let removed = index.remove_spans(&seq, &[(0, 6)], false).unwrap();
                assert_eq!(removed.freed, ids(free[..3].iter().copied()));
            }
            index.check().unwrap();
        }
        // Nine holes are one too many: the least recently used tail left with its three holes.
        assert_eq!(index.stats().holes, 6);
        assert_eq!(index.take_freed(), ids([tails[0]]));
    }
}

#[test]
fn bad_ranges_change_nothing() {
    let (mut index, seq) = turn(32);
    index.mark_dead(&seq, &[(14, 16)]).unwrap();
    let before = (index.digest(), index.stats());
    let bad: [(&[(usize, usize)], &str); 4] = [
        (&[(0, 2), (6, 4)], "[6, 4)"),
        (&[(0, 17)], "[0, 16]"),
        (&[(4, 8), (0, 2)], "ends at 8"),
        (&[(4, 8), (6, 10)], "ends at 8"),
    ];
    for (ranges, says) in bad {
        let marked = index.mark_dead(&seq, ranges).unwrap_err();
        let removed = index.remove_spans(&seq, ranges, true).unwrap_err();
        for (error, call) in [(marked, "mark_dead"), (removed, "remove_spans")] {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let text = error.to_string();
            assert!(text.contains(says) && text.contains(call), "{text}");
        }
    }
    assert_eq!((index.digest(), index.stats()), before);
}

#[test]
fn marks_are_part_of_the_digest_and_their_numbers_are_not() {
    let make = |calls: &[(usize, usize)]| {
        let (mut index, seq) = turn(32);
        for &range in calls {
            index.mark_dead(&seq, &[range]).unwrap();
        }
        (index, seq)
    };
    let ((plain, _), (mut two, seq)) = (make(&[]), make(&[(14, 16), (0, 2), (4, 6)]));
    assert_ne!(plain.digest(), two.digest());
    assert_ne!(
        make(&[(0, 2), (4, 6)]).0.digest(),
        make(&[(4, 6), (0, 2)]).0.digest()
    );
    index_without(&mut two, &seq);
    let (mut one, seq) = make(&[(0, 2), (4, 6)]);
    index_without(&mut one, &seq);
    assert_eq!(one.digest(), two.digest());
}

fn index_without(index: &mut RadixIndex, seq: &TokenSequence) {
    let removed = index.remove_spans(seq, &[(14, 16)], false).unwrap();
    assert_eq!(removed.freed, ids([7]));
}

#[test]
fn an_edge_that_is_cut_keeps_its_marks() {
    let (mut index, seq) = turn(32);
    assert_eq!(index.mark_dead(&seq, &[(2, 14)]).unwrap(), 6);
    // The edge is cut after three blocks. The fork has touched those that it shares.
    let mut fork = sequence((0..6).chain([50, 51]));
    put(&mut index, &mut fork, [0, 1, 2, 30]);
    assert_eq!(index.stats().dead, 4);
    assert_eq!(index.evict(4), ids([6, 5, 4, 3]));
    index.check().unwrap();
}

#[test]
fn a_call_that_marks_nothing_is_no_mark() {
    let (mut index, seq) = turn(32);
    assert_eq!(index.mark_dead(&seq, &[(2, 8)]).unwrap(), 3);
    let before = index.snapshot();
    assert_eq!(index.mark_dead(&seq, &[(4, 8)]).unwrap(), 0);
    assert_eq!(index.snapshot(), before);
}

#[test]
fn a_use_of_blocks_that_are_not_dead_takes_no_memory() {
    let (mut index, seq) = turn(32);
    let mut other = sequence((0..12).chain([90, 91]));
    put(&mut index, &mut other, (0..6).chain([20]));
    assert_eq!(index.mark_dead(&seq, &[(12, 16)]).unwrap(), 2);
    let before = index.stats().bytes;
    index
        .lookup(&mut other, LookupOptions::default(), &mut Vec::new())
        .unwrap();
    assert_eq!((index.stats().bytes, index.stats().dead), (before, 2));
}

#[test]
fn other_sequences_stay_known_when_dead_blocks_leave_from_an_end() {
    let (mut index, mut seq) = turn(32);
    let mut other = sequence(100..104);
    put(&mut index, &mut other, [20, 21]);
    assert_eq!(index.mark_dead(&seq, &[(4, 6), (14, 16)]).unwrap(), 2);
    assert_eq!(index.evict(1), ids([7]));
    assert_eq!(index.unknown_steps(&other), 0);
    // A block removed from the middle may be on their path, so they are looked up again.
    assert_eq!(index.evict(1), ids([2]));
    assert_eq!(index.unknown_steps(&other), 2);
    assert_eq!(matched(&mut index, &mut seq), 4);
}

#[test]
fn windows_of_blocks_that_are_removed_and_inserted_again_do_not_pile_up() {
    let blocks = 8_000;
    let mut index = RadixIndex::new(Config {
        moved_runs: true,
        min_run: Config::MIN_RUN,
        ..index(blocks.into()).config().clone()
    })
    .unwrap();
    let mut seq = sequence(0..2 * blocks);
    common::put(&mut index, &mut seq, 0..blocks);
    let full = index.stats();
    // Each block has two windows, and a waiting window takes 16 bytes: 256,000 bytes.
    let gone = [(2, seq.len() - 2)];
    let freed = index.remove_spans(&seq, &gone, false).unwrap().freed;
    assert_eq!(index.stats().windows, 2);
    assert!(index.stats().bytes < full.bytes + 64_000);
    common::put(&mut index, &mut seq, 0..blocks);
    assert_eq!((freed.len(), index.stats().windows), (7_998, full.windows));
    assert!(index.stats().bytes < full.bytes + 64_000);
}
