//! Events of workers that lie or flood: memory is bounded, everything is counted, and the scores of others stay.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test stops at what it does not expect"
)]

mod common;

use std::sync::Arc;

use common::{Event, Value, batch, cleared, removed, stored};
use kvtrie_cluster::{FindOptions, IndexerConfig, KvIndexer, OverlapScores, Stream, WorkerId};
use kvtrie_core::{Namespace, ReusePolicy, Salt, Scope, TokenSequence};
use proptest::prelude::*;

const LIMIT: usize = 100;

fn space() -> Arc<Namespace> {
    Arc::new(Namespace::new("m", "auto", "default", None, Salt::Shared).unwrap())
}

/// An index with a worker that has 20 blocks of a text, and one that has nothing yet.
fn two() -> (KvIndexer, WorkerId, WorkerId) {
    let config = IndexerConfig {
        max_blocks: LIMIT,
        max_parked: 10,
        ..IndexerConfig::new(common::SIZE)
    };
    let mut index = KvIndexer::new(config, &[3; 16]).unwrap();
    let honest = index.add_worker(space()).unwrap();
    let hostile = index.add_worker(space()).unwrap();
    let hashes: Vec<u64> = (0..20).collect();
    apply(&mut index, honest, &[stored(&hashes, None, &text(), "GPU")]);
    (index, honest, hostile)
}

fn text() -> Vec<u32> {
    (0..40).collect()
}

fn apply(index: &mut KvIndexer, worker: WorkerId, events: &[Event]) {
    let read = index.reader().read(&batch(events, true, None)).unwrap();
    index.apply(worker, Stream::Engine, &read).unwrap();
}

fn ask(index: &KvIndexer) -> OverlapScores {
    let seq = TokenSequence::new(space(), text(), Vec::new()).unwrap();
    let options = FindOptions {
        keep_last: 0,
        moved: true,
        ..FindOptions::default()
    };
    index.find(&index.prompt(&seq, true), options).unwrap()
}

#[test]
fn a_flood_ends_at_the_limit_of_its_worker() {
    let (mut index, honest, hostile) = two();
    for round in 0..1_000_u64 {
        let hash = 1_000 + round;
        apply(
            &mut index,
            hostile,
            &[stored(&[hash], None, &[round as u32, 7], "GPU")],
        );
    }
    index.check().unwrap();
    let stats = index.worker_stats(hostile).unwrap();
    assert_eq!(
        (stats.entries, stats.blocks, stats.over_limit),
        (100, 100, 900)
    );
    assert_eq!(index.stats().blocks, 120);
    let scores = ask(&index);
    assert_eq!((scores.exact[0], scores.uncertain[0]), (40, false));
    assert!(scores.uncertain[1], "blocks of it were left out");
    assert_eq!(index.worker_stats(honest).unwrap().over_limit, 0);
}

/// Each round leaves one block at the end of a chain of holes.
#[test]
fn holes_count_towards_the_limit() {
    let (mut index, _, hostile) = two();
    for round in 0..50_u64 {
        let hashes: Vec<u64> = (0..10).map(|at| round * 10 + at).collect();
        let tokens: Vec<u32> = (0..20).map(|at| 1_000 + round as u32 * 20 + at).collect();
        apply(
            &mut index,
            hostile,
            &[stored(&hashes, None, &tokens, "GPU")],
        );
        apply(&mut index, hostile, &[removed(&hashes[..9], "GPU")]);
        index.check().unwrap();
    }
    let stats = index.worker_stats(hostile).unwrap();
    assert_eq!((stats.blocks, stats.entries), (100, 10));
    assert!(stats.over_limit > 0);
    apply(&mut index, hostile, &[cleared()]);
    index.reclaim();
    index.check().unwrap();
    assert_eq!(index.worker_stats(hostile).unwrap().blocks, 0);
    assert_eq!(index.stats().blocks, 20);
}

#[test]
fn cycles_of_parents_wait_in_bounds() {
    let (mut index, _, hostile) = two();
    for hash in 0..500_u64 {
        // Each block follows the next one, the last the first, and some themselves.
        let parent = if hash % 7 == 0 {
            hash
        } else {
            (hash + 1) % 500
        };
        apply(
            &mut index,
            hostile,
            &[stored(&[hash], Some(parent), &[1, 2], "GPU")],
        );
    }
    let stats = index.worker_stats(hostile).unwrap();
    assert_eq!(
        (stats.parked, stats.entries, stats.dropped_parked),
        (10, 0, 490)
    );
    apply(&mut index, hostile, &[stored(&[10], None, &[1, 2], "GPU")]);
    index.check().unwrap();
    // 9 followed 10, 8 followed 9; 7 followed itself.
    assert_eq!(index.worker_stats(hostile).unwrap().entries, 3);
    assert_eq!(ask(&index).exact, [40, 0]);
}

/// The second was counted as a copy of the first, which then stayed after its only removal.
#[test]
fn a_hash_of_another_block_that_waits_is_a_conflict() {
    let others = [
        // Other tokens, another parent, or none; what follows in the event is not taken either.
        stored(&[7, 8], Some(6), &[8, 9, 4, 5], "GPU"),
        stored(&[7, 8], Some(5), &[0, 1, 4, 5], "GPU"),
        stored(&[7, 8], None, &[0, 1, 4, 5], "GPU"),
    ];
    for other in others {
        let (mut index, _, hostile) = two();
        let first = stored(&[7], Some(6), &[0, 1], "GPU");
        apply(&mut index, hostile, &[first.clone(), first, other]);
        let stats = index.worker_stats(hostile).unwrap();
        assert_eq!((stats.stored, stats.conflicts), (2, 2));
        assert_eq!((stats.entries, stats.parked), (0, 1));
        assert!(ask(&index).uncertain[1], "an event was left out");
        let twice = removed(&[7, 7], "GPU");
        apply(&mut index, hostile, &[twice]);
        assert_eq!(index.worker_stats(hostile).unwrap().parked, 0);
        index.check().unwrap();
    }
}

/// With an unknown parent, any block of a known hash was a copy of the known one, and the rest of the event followed it.
#[test]
fn a_hash_of_another_block_that_is_held_is_a_conflict_after_an_unknown_parent() {
    let (mut index, _, hostile) = two();
    let first = stored(&[6, 7], None, &[0, 1, 2, 3], "GPU");
    apply(&mut index, hostile, &[first]);
    for (hash, tokens) in [(7, [8, 9, 4, 5]), (6, [0, 1, 4, 5])] {
        let other = stored(&[hash, 8], Some(99), &tokens, "GPU");
        apply(&mut index, hostile, &[other]);
    }
    let stats = index.worker_stats(hostile).unwrap();
    assert_eq!((stats.stored, stats.conflicts, stats.entries), (2, 4, 2));
    // The same block, after a parent that is not known by this hash.
    let same = stored(&[7, 8], Some(99), &[2, 3, 4, 5], "GPU");
    apply(&mut index, hostile, &[same]);
    assert_eq!(ask(&index).exact, [40, 6]);
    apply(&mut index, hostile, &[removed(&[7], "GPU")]);
    assert_eq!(ask(&index).exact, [40, 6]);
    apply(&mut index, hostile, &[removed(&[7], "GPU")]);
    assert_eq!(ask(&index).exact, [40, 2]);
    index.check().unwrap();
}

#[test]
fn another_workers_hashes_are_only_ones_own() {
    let (mut index, honest, hostile) = two();
    let hashes: Vec<u64> = (0..20).collect();
    apply(&mut index, hostile, &[removed(&hashes, "GPU"), cleared()]);
    assert_eq!(ask(&index).exact, [40, 0]);
    // Under the hashes of the other, and after its blocks.
    apply(
        &mut index,
        hostile,
        &[stored(&[0, 1], None, &[9, 9, 8, 8], "GPU")],
    );
    apply(
        &mut index,
        hostile,
        &[stored(&[50], Some(19), &[40, 41], "GPU")],
    );
    apply(&mut index, hostile, &[stored(&[0], None, &[5, 5], "GPU")]);
    let stats = index.worker_stats(hostile).unwrap();
    assert_eq!((stats.conflicts, stats.parked), (1, 1));
    // One block under many hashes is one block, and leaves with the first.
    for hash in 100..200 {
        apply(
            &mut index,
            hostile,
            &[stored(&[hash], None, &text()[..2], "GPU")],
        );
    }
    assert_eq!(index.worker_stats(hostile).unwrap().aliases, 99);
    // The block may stay under another hash when the first is removed: what is said of it is no promise.
    assert_eq!(ask(&index).uncertain, [false, true]);
    assert_eq!(ask(&index).exact, [40, 2]);
    apply(&mut index, hostile, &[removed(&[100], "GPU")]);
    assert_eq!(ask(&index).exact, [40, 0]);
    index.remove_worker(hostile).unwrap();
    index.reclaim();
    index.check().unwrap();
    assert_eq!(ask(&index).exact, [40]);
    assert_eq!(index.worker_stats(honest).unwrap().entries, 20);
}

/// The block may stay under the other hash when the first is removed: a score that is too low is no promise.
#[test]
fn a_second_hash_of_a_block_makes_its_worker_uncertain() {
    let (mut index, _, other) = two();
    apply(
        &mut index,
        other,
        &[stored(&[50, 51], None, &text()[..4], "GPU")],
    );
    assert_eq!(ask(&index).uncertain, [false, false]);
    apply(
        &mut index,
        other,
        &[stored(&[60], None, &text()[..2], "GPU")],
    );
    let stats = index.worker_stats(other).unwrap();
    assert_eq!((stats.aliases, stats.conflicts), (1, 0));
    assert_eq!(ask(&index).uncertain, [false, true]);
    apply(&mut index, other, &[removed(&[50], "GPU")]);
    assert_eq!(
        (ask(&index).exact, ask(&index).uncertain),
        (vec![40, 0], vec![false, true])
    );
    apply(&mut index, other, &[cleared()]);
    assert_eq!(ask(&index).uncertain, [false, false]);
}

/// It was dropped when its parent came, and nobody was told.
#[test]
fn what_waited_and_cannot_be_stored_is_counted() {
    let (mut index, _, hostile) = two();
    // One block under two hashes, which wait for the same parent.
    for hash in [71, 72] {
        let waits = stored(&[hash], Some(70), &[3, 4], "GPU");
        apply(&mut index, hostile, &[waits]);
    }
    let parent = stored(&[70], None, &[1, 2], "GPU");
    apply(&mut index, hostile, &[parent]);
    let stats = index.worker_stats(hostile).unwrap();
    assert_eq!((stats.aliases, stats.over_limit), (1, 0));
    assert_eq!((stats.entries, stats.parked), (2, 0));
    assert_eq!(ask(&index).uncertain, [false, true]);
    apply(&mut index, hostile, &[cleared()]);
    // All blocks but one that it may have, and one that waits for the last.
    for round in 0..99_u32 {
        let one = stored(&[1_000 + u64::from(round)], None, &[round, 7], "GPU");
        apply(&mut index, hostile, &[one]);
    }
    let waits = stored(&[81], Some(80), &[3, 4], "GPU");
    apply(&mut index, hostile, &[waits]);
    assert_eq!(ask(&index).uncertain, [false, false]);
    let parent = stored(&[80], None, &[1, 2], "GPU");
    apply(&mut index, hostile, &[parent]);
    let stats = index.worker_stats(hostile).unwrap();
    assert_eq!((stats.aliases, stats.over_limit), (1, 1));
    assert_eq!((stats.entries, stats.parked), (100, 0));
    assert_eq!(ask(&index).uncertain, [false, true]);
    index.check().unwrap();
}

/// A text of one block again and again: each worker lists some of them.
#[test]
fn repeated_tokens_cost_each_worker_its_own_hints() {
    let (mut index, _, hostile) = two();
    for round in 0..90_u64 {
        let tokens = [100 + round as u32, 0, text()[2], text()[3]];
        apply(
            &mut index,
            hostile,
            &[stored(&[round * 2, round * 2 + 1], None, &tokens, "GPU")],
        );
    }
    index.check().unwrap();
    let mut tokens = vec![9];
    tokens.extend(text());
    let seq = TokenSequence::new(space(), tokens, Vec::new()).unwrap();
    let options = FindOptions {
        keep_last: 0,
        moved: true,
        ..FindOptions::default()
    };
    let scores = index.find(&index.prompt(&seq, true), options).unwrap();
    assert_eq!(scores.possible, [40, 0]);
}

/// Blocks that follow each other are appended at once, up to the first whose hash is known.
#[test]
fn a_known_hash_within_an_event_is_a_conflict_after_those_before_it() {
    let (mut index, _, hostile) = two();
    apply(
        &mut index,
        hostile,
        &[stored(&[0], None, &text()[..2], "GPU")],
    );
    let hashes: Vec<u64> = vec![1, 2, 3, 1, 4];
    let event = stored(&hashes, Some(0), &text()[2..12], "GPU");
    apply(&mut index, hostile, &[event]);
    index.check().unwrap();
    let stats = index.worker_stats(hostile).unwrap();
    assert_eq!((stats.stored, stats.conflicts, stats.entries), (4, 2, 4));
    assert_eq!(ask(&index).exact, [40, 8]);
}

/// Of two consecutive blocks one is listed, unless a run may have one block.
#[test]
fn runs_are_found_wherever_they_begin() {
    for (min_run, least) in [
        (common::SIZE, 1),
        (2 * common::SIZE, 2),
        (3 * common::SIZE, 3),
    ] {
        let config = IndexerConfig {
            min_run,
            ..IndexerConfig::new(common::SIZE)
        };
        let mut index = KvIndexer::new(config, &[3; 16]).unwrap();
        let worker = index.add_worker(space()).unwrap();
        let hashes: Vec<u64> = (0..20).collect();
        apply(&mut index, worker, &[stored(&hashes, None, &text(), "GPU")]);
        // Paths that leave the first one cut it at even and at odd places.
        for at in [4, 5, 9, 14] {
            let event = stored(&[100 + at], Some(at), &[900, at as u32], "GPU");
            apply(&mut index, worker, &[event]);
        }
        index.check().unwrap();
        for start in 0..20 {
            for end in start + 1..=20 {
                let mut tokens = vec![800];
                tokens.extend(&text()[start * common::SIZE..end * common::SIZE]);
                let seq = TokenSequence::new(space(), tokens, Vec::new()).unwrap();
                let options = FindOptions {
                    keep_last: 0,
                    moved: true,
                    ..FindOptions::default()
                };
                let scores = index.find(&index.prompt(&seq, true), options).unwrap();
                let blocks = if end - start >= least { end - start } else { 0 };
                let moved = (blocks * common::SIZE) as u32;
                assert_eq!(scores.possible, [moved], "{min_run} {start}..{end}");
            }
        }
    }
}

#[test]
fn workers_are_bounded_and_named_once() {
    let config = IndexerConfig {
        max_workers: 2,
        ..IndexerConfig::new(common::SIZE)
    };
    let mut index = KvIndexer::new(config, &[3; 16]).unwrap();
    let first = index.add_worker(space()).unwrap();
    let second = index.add_worker(space()).unwrap();
    let error = index.add_worker(space()).unwrap_err();
    assert!(error.message().contains("2 workers"), "{error}");
    index.remove_worker(first).unwrap();
    assert!(index.remove_worker(first).is_err());
    let third = index.add_worker(space()).unwrap();
    assert_eq!(index.workers().collect::<Vec<_>>(), [second, third]);
    for bad in [0, IndexerConfig::MAX_BLOCK_SIZE + 1] {
        let error = KvIndexer::new(IndexerConfig::new(bad), &[3; 16]).unwrap_err();
        assert!(
            error.message().contains(&format!("block_size is {bad}")),
            "{error}"
        );
    }
}

/// Lives that end keep no memory: the lanes and blocks are those of the living.
#[test]
fn a_worker_that_restarts_often_costs_what_it_holds() {
    let (mut index, _, hostile) = two();
    let hashes: Vec<u64> = (0..20).collect();
    let mut most = 0;
    for _ in 0..500 {
        apply(
            &mut index,
            hostile,
            &[stored(&hashes, None, &text(), "GPU")],
        );
        assert_eq!(ask(&index).exact, [40, 40]);
        index.clear_worker(hostile, None).unwrap();
        assert_eq!(ask(&index).exact, [40, 0]);
        most = most.max(index.stats().dead);
    }
    assert!(most <= 4, "{most} lives wait");
    index.check().unwrap();
}

/// Events that name another conversation for each block, and ids of any length.
#[test]
fn sessions_are_bounded_and_nobody_elses() {
    const BLOCKS: u64 = 20_000;
    let policy = ReusePolicy {
        scope: Scope::Conversation,
        min_run: Some(8),
        ..ReusePolicy::LAXEST
    };
    let asked = |index: &KvIndexer, session| {
        // The text without its beginning, which no path begins with.
        let seq = TokenSequence::new(space(), text()[2..].to_vec(), Vec::new()).unwrap();
        let options = FindOptions {
            moved: true,
            session: Some(session),
            ..FindOptions::default()
        };
        index.find(&index.prompt(&seq, true), options).unwrap()
    };
    let with = |event: Event, session: &'static str| {
        [event, vec![("session_id", Value::Text(session))]].concat()
    };
    let bytes_of = |is_told: bool| {
        let mut index = KvIndexer::new(IndexerConfig::new(common::SIZE), &[3; 16]).unwrap();
        let honest = index.add_worker(space()).unwrap();
        let hostile = index.add_worker(space()).unwrap();
        for worker in [honest, hostile] {
            index.set_policy(worker, Some(&policy)).unwrap();
        }
        let hashes: Vec<u64> = (0..20).collect();
        let event = stored(&hashes, None, &text(), "GPU");
        apply(&mut index, honest, &[with(event.clone(), "chat")]);
        let mut events = vec![event];
        let mut parent = None;
        for hash in 100..100 + BLOCKS {
            let event = stored(&[hash], parent, &[hash as u32, 7], "GPU");
            events.push(if is_told {
                with(event, ["chat", "other"][hash as usize % 2])
            } else {
                event
            });
            parent = Some(hash);
        }
        apply(&mut index, hostile, &events);
        index.check().unwrap();
        let scores = asked(&index, "chat");
        // Twice as many tokens as blocks, but for the first and the last seven.
        assert_eq!(
            (&*scores.moved, &*scores.possible),
            (&[31, 0][..], &[38, 38][..])
        );
        index.stats().bytes
    };
    let (without, told) = (bytes_of(false), bytes_of(true));
    assert!(
        told < without + 4_096,
        "{told} bytes, {without} without sessions"
    );

    // Of many paths of one block each, too.
    let of_short_paths = |is_told: bool| {
        let mut index = KvIndexer::new(IndexerConfig::new(common::SIZE), &[3; 16]).unwrap();
        let worker = index.add_worker(space()).unwrap();
        let events = (0..BLOCKS).map(|hash| {
            let event = stored(&[hash], None, &[hash as u32, 7], "GPU");
            if is_told { with(event, "chat") } else { event }
        });
        apply(&mut index, worker, &events.collect::<Vec<_>>());
        index.stats().bytes
    };
    let (without, told) = (of_short_paths(false), of_short_paths(true));
    let per_edge = (told - without) / BLOCKS;
    assert!((24..=88).contains(&per_edge), "{per_edge} bytes an edge");

    let mut index = two().0;
    let workers: Vec<WorkerId> = index.workers().collect();
    index.set_policy(workers[1], Some(&policy)).unwrap();
    let long = &*String::from_iter(['x'; 257]).leak();
    let hashes: Vec<u64> = (0..20).collect();
    let event = stored(&hashes, None, &text(), "GPU");
    for (id, promised) in [("", 0), (long, 0), (&long[1..], 31)] {
        index.clear_worker(workers[1], None).unwrap();
        apply(&mut index, workers[1], &[with(event.clone(), id)]);
        assert_eq!(
            asked(&index, &long[1..]).moved,
            [0, promised],
            "{} bytes",
            id.len()
        );
    }
    // An id that is no text names no conversation either, and the rest counts.
    for id in [
        Value::Int(7),
        Value::Nil,
        Value::Bytes(vec![7; 40]),
        Value::List(Vec::new()),
    ] {
        index.clear_worker(workers[1], None).unwrap();
        apply(
            &mut index,
            workers[1],
            &[[event.clone(), vec![("session_id", id)]].concat()],
        );
        let scores = asked(&index, "chat");
        assert_eq!((scores.moved[1], scores.possible[1]), (0, 38));
    }
}

/// Whatever the numbers are at which tables and lists grow.
#[test]
fn bytes_of_a_block_of_a_long_path_have_a_bound() {
    const PER_EVENT: u64 = 1_000;
    for (moved_runs, most) in [(false, 33), (true, 40)] {
        let config = IndexerConfig {
            moved_runs,
            ..IndexerConfig::new(common::SIZE)
        };
        let mut index = KvIndexer::new(config, &[3; 16]).unwrap();
        let worker = index.add_worker(space()).unwrap();
        for first in (0..300_000).step_by(PER_EVENT as usize) {
            let hashes: Vec<u64> = (first..first + PER_EVENT).collect();
            let tokens: Vec<u32> = (0..2 * PER_EVENT as u32)
                .map(|at| 2 * first as u32 + at)
                .collect();
            let event = stored(&hashes, first.checked_sub(1), &tokens, "GPU");
            apply(&mut index, worker, &[event]);
            let stats = index.stats();
            assert_eq!(stats.entries, first + PER_EVENT);
            if stats.entries >= 100_000 {
                let (bytes, entries) = (stats.bytes, stats.entries);
                assert!(
                    bytes <= most * entries,
                    "{bytes} bytes for {entries} blocks, moved runs {moved_runs}"
                );
            }
        }
    }
}

proptest! {
    /// Whatever the bytes are, reading them ends, and what is read can be applied.
    #[test]
    fn any_bytes_are_read_or_refused(
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let (mut index, _, hostile) = two();
        let events = [stored(&[1, 2], Some(5), &[1, 2, 3, 4], "GPU"), removed(&[5], "CPU"), cleared()];
        let mut raw = batch(&events, true, Some(0));
        for (at, byte) in flips {
            let at = at.index(raw.len());
            raw[at] = byte;
        }
        raw.truncate(cut.index(raw.len() * 3).max(1));
        if let Ok(read) = index.reader().read(&raw) {
            index.apply(hostile, Stream::Engine, &read).unwrap();
        }
        index.check().unwrap();
        prop_assert_eq!(ask(&index).exact[0], 40);
    }
}
