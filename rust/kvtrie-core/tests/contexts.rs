//! Tests the contexts of moved runs and the policy's limits on them (P17).

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{Config, MovedRun, RadixIndex, ReusePlan, ReusePolicy};

use common::{approximate, ids, moved, planned, put, sequence};

mod common;

/// A token that is cached nowhere.
const NEW: u32 = 100_000;

fn index_of(block_size: usize, num_blocks: u64) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks,
        block_size,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(0)
    })
    .unwrap()
}

/// The tokens 0 to 64.
fn cached() -> RadixIndex {
    let mut index = index_of(4, 64);
    put(&mut index, &mut sequence(0..64), 20..36);
    index
}

fn plan(
    index: &mut RadixIndex,
    tokens: impl IntoIterator<Item = u32>,
    policy: &ReusePolicy,
) -> ReusePlan {
    let tokens = tokens.into_iter().chain([NEW]);
    let plan = planned(index, &mut sequence(tokens), policy);
    assert_eq!(plan.candidates_dropped(), 0);
    plan
}

/// Start, old start, cuts, lost and new context of the runs of a plan.
fn contexts(plan: &ReusePlan) -> Vec<(usize, usize, u16, f64, f64)> {
    let of = |run: &MovedRun| {
        let (start, old_start) = (run.start, run.old_start);
        assert_eq!(run.distance() as u64, run.delta().unsigned_abs());
        (
            start,
            old_start,
            run.cuts,
            run.lost_context,
            run.new_context,
        )
    };
    plan.moved_runs().iter().map(of).collect()
}

fn contexts_of(tokens: impl IntoIterator<Item = u32>) -> Vec<(usize, usize, u16, f64, f64)> {
    let mut index = cached();
    let plan = plan(&mut index, tokens, &approximate());
    let parts = plan.moved_runs().iter();
    let parts: Vec<_> = parts
        .map(|run| (run.start, run.end, run.old_start))
        .collect();
    assert_eq!(parts, moved(&plan));
    contexts(&plan)
}

#[test]
fn text_left_out_is_one_cut_and_lost() {
    assert_eq!(contexts_of((0..8).chain(16..32)), [(8, 16, 1, 0.5, 0.0)]);
    // The tokens copied from the block in which the prompt leaves its path are kept, too.
    assert_eq!(contexts_of((0..10).chain(20..32)), [(10, 20, 1, 0.5, 0.0)]);
}

#[test]
fn text_put_in_is_one_cut_and_new() {
    let prompt = (0..8).chain([NEW; 8]).chain(8..32);
    assert_eq!(contexts_of(prompt), [(16, 8, 1, 0.0, 0.5)]);
}

#[test]
fn each_place_where_text_is_left_out_is_a_cut() {
    assert_eq!(
        contexts_of((0..8).chain(16..24).chain(32..40).chain(48..64)),
        [
            (8, 16, 1, 0.5, 0.0),
            (16, 32, 2, 0.5, 0.0),
            (24, 48, 3, 0.5, 0.0),
        ]
    );
}

#[test]
fn a_change_of_order_is_a_cut_of_what_comes_after_both() {
    assert_eq!(
        contexts_of((0..8).chain(24..32).chain(16..24).chain(48..64)),
        [
            (8, 24, 1, 1.0 - 8.0 / 24.0, 0.0),
            // What comes before it now came after it in the source.
            (16, 16, 1, 0.5, 0.5),
            (24, 48, 3, 0.5, 0.0),
        ]
    );
}

#[test]
fn text_that_comes_twice_counts_twice_in_the_prompt() {
    let prompt = (0..8).chain([NEW]).chain(0..8).chain([NEW]).chain(8..24);
    assert_eq!(
        contexts_of(prompt),
        [(9, 0, 0, 0.0, 1.0), (18, 8, 2, 0.0, 1.0 - 16.0 / 18.0)]
    );
}

#[test]
fn a_text_from_elsewhere_keeps_nothing() {
    let mut index = cached();
    // Another text has a token of its own before the same head as a third one.
    let other = [NEW + 1, NEW + 2, NEW + 3, NEW + 4]
        .into_iter()
        .chain(200..216);
    put(&mut index, &mut sequence(other), 40..45);
    put(&mut index, &mut sequence(300..316), 45..49);
    let prompt = (0..8).chain(200..216).chain(300..316).chain(32..48);
    let plan = plan(&mut index, prompt, &approximate());
    assert_eq!(
        contexts(&plan),
        [
            (8, 4, 0, 1.0, 1.0),
            // Nothing came before it in its source, so nothing is lost.
            (24, 0, 0, 0.0, 1.0),
            (40, 32, 1, 0.75, 1.0 - 8.0 / 40.0),
        ]
    );
}

#[test]
fn paths_that_part_share_what_is_above() {
    let mut index = index_of(4, 64);
    let head = || NEW + 1..NEW + 9;
    for (text, first) in [(100, 0), (200, 20)] {
        let tail = (0..16).chain(text..text + 16);
        put(
            &mut index,
            &mut sequence(head().chain(tail)),
            (0..6).chain(first + 6..first + 10),
        );
    }
    // All of the shared tokens, moved, and the tails of both: each keeps what is shared.
    let prompt = [NEW].into_iter().chain(head()).chain(0..16);
    let prompt = prompt.chain(100..116).chain([NEW]).chain(200..216);
    let plan = plan(&mut index, prompt, &approximate());
    assert_eq!(
        contexts(&plan),
        [(1, 0, 0, 0.0, 1.0), (42, 24, 1, 0.0, 1.0 - 24.0 / 42.0)]
    );
}

#[test]
fn recomputed_tokens_are_not_kept() {
    let mut index = cached();
    let policy = ReusePolicy {
        recompute_first: 4,
        recompute_last: 2,
        ..approximate()
    };
    let plan = plan(&mut index, (0..8).chain(16..32).chain(40..64), &policy);
    assert_eq!(moved(&plan), [(12, 22, 20), (28, 46, 44)]);
    assert_eq!(
        contexts(&plan),
        [
            (12, 20, 1, 1.0 - 8.0 / 20.0, 1.0 - 8.0 / 12.0),
            (28, 44, 2, 1.0 - 18.0 / 44.0, 1.0 - 18.0 / 28.0),
        ]
    );
}

#[test]
fn a_run_beyond_a_limit_is_computed_and_not_kept() {
    let prompt = || (0..8).chain(16..24).chain(32..40).chain(48..64);
    let all = [(8, 16, 16), (16, 24, 32), (24, 40, 48)];
    let cuts = |most| ReusePolicy {
        max_cuts: Some(most),
        ..approximate()
    };
    let lost = |most| ReusePolicy {
        max_lost_context: most,
        ..approximate()
    };
    let new = |most| ReusePolicy {
        max_new_context: most,
        ..approximate()
    };
    for (policy, expected) in [
        (cuts(0), &all[..0]),
        (cuts(1), &all[..1]),
        (cuts(2), &all[..2]),
        (cuts(3), &all[..]),
        (lost(0.5), &all[..]),
        // The first is computed, so that more is lost before the others.
        (lost(0.499), &all[..0]),
        (new(0.0), &all[..]),
    ] {
        let mut index = cached();
        let plan = plan(&mut index, prompt(), &policy);
        let found: Vec<_> = plan
            .moved_runs()
            .iter()
            .map(|run| (run.start, run.end, run.old_start))
            .collect();
        let expected: Vec<_> = expected.to_vec();
        assert_eq!(found, expected, "{policy:?}");
        assert_eq!(moved(&plan), expected);
        let read = expected.iter().map(|&(start, end, old_start)| {
            20 + u32::try_from(old_start / 4).unwrap()
                ..20 + u32::try_from((old_start + end - start) / 4).unwrap()
        });
        assert_eq!(plan.source_blocks(), ids(read.flatten()));
    }
}

#[test]
fn what_was_refused_is_not_context_of_a_later_run() {
    let prompt = || {
        (0..8)
            .chain([NEW; 16])
            .chain(16..24)
            .chain([NEW])
            .chain(24..64)
    };
    let mut index = cached();
    let all = plan(&mut index, prompt(), &approximate());
    assert_eq!(
        contexts(&all),
        [
            (24, 16, 1, 0.5, 1.0 - 8.0 / 24.0),
            (33, 24, 2, 1.0 - 16.0 / 24.0, 1.0 - 16.0 / 33.0),
        ]
    );
    let policy = ReusePolicy {
        max_lost_context: 0.45,
        ..approximate()
    };
    // The second run would be within the limit after the first.
    let strict = plan(&mut index, prompt(), &policy);
    assert_eq!(contexts(&strict), []);
}

#[test]
fn without_moved_runs_there_is_no_context() {
    let mut index = cached();
    let none = ReusePolicy {
        max_approximate_share: 0.25,
        ..approximate()
    };
    for policy in [ReusePolicy::EXACT_ONLY, none] {
        let plan = plan(&mut index, (0..8).chain(16..32), &policy);
        assert_eq!(contexts(&plan), []);
    }
}

const MOST_SEGMENTS: usize = 512;

/// Pieces of ten tokens, of which two are left out after each.
#[test]
fn after_512_copied_segments_a_run_has_the_worst_context() {
    let runs = MOST_SEGMENTS + 4;
    let len = 10 * runs;
    let mut index = index_of(4, 4_000);
    let text = || 0..u32::try_from(len).unwrap();
    put(
        &mut index,
        &mut sequence(text()),
        0..u32::try_from(len / 4).unwrap(),
    );
    let prompt = || text().filter(|token| token % 10 < 8);
    // Nothing is in place.
    let plan = plan(
        &mut index,
        [NEW].into_iter().chain(prompt()),
        &approximate(),
    );
    let found = plan.moved_runs();
    assert_eq!(found.len(), runs);
    for (number, run) in found.iter().enumerate() {
        if number <= MOST_SEGMENTS {
            assert_eq!(usize::from(run.cuts), number);
            assert!(number == 0 || run.lost_context < 0.21 && run.new_context < 0.2);
        } else {
            assert_eq!(run.cuts, ReusePolicy::MAX_CUTS);
            assert_eq!((run.lost_context, run.new_context), (1.0, 1.0));
        }
    }
}

#[test]
fn after_16384_edges_a_run_has_the_worst_context() {
    let mut index = index_of(1, 4_000);
    let (edges, len) = (400, 1_200);
    put(&mut index, &mut sequence(0..len), 0..len);
    for edge in 1..edges {
        // A sibling ends an edge there.
        put(
            &mut index,
            &mut sequence((0..edge).chain([NEW])),
            (0..edge).chain([len + edge]),
        );
    }
    let text = (edges..len).filter(|token| token % 10 < 8);
    let plan = plan(&mut index, [NEW].into_iter().chain(text), &approximate());
    let cuts: Vec<_> = plan.moved_runs().iter().map(|run| run.cuts).collect();
    assert_eq!(cuts.len(), 80);
    let worst = cuts.iter().position(|&cuts| cuts == ReusePolicy::MAX_CUTS);
    // Each run and its copy follow 400 edges.
    assert_eq!(worst, Some(20));
    assert!(cuts[20..].iter().all(|&cuts| cuts == ReusePolicy::MAX_CUTS));
}
