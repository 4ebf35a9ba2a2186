//! Tests that calls count in advance how many steps they hold an index for, and give up before they change anything.

#![expect(clippy::unwrap_used, reason = "helpers of a test")]

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Config, Effort, ExplainOptions, InsertOptions, LookupOptions, Namespace, PlanOptions,
    RadixIndex, Removed, ReusePlan, ReusePolicy, Salt, Source, Span, TokenSequence,
};

use common::{WHOLE, approximate, ids, imported, sequence, span};

mod common;

/// The effort that the binding allows a call that keeps the interpreter.
const BRIEF: Effort = Effort {
    nodes: 256,
    bytes: 1 << 20,
};

fn steps(nodes: u64) -> Effort {
    Effort {
        nodes,
        bytes: u64::MAX,
    }
}

fn namespace(adapter: Option<&str>, salt: Salt) -> Arc<Namespace> {
    let adapter = adapter.map(String::from);
    Arc::new(Namespace::new("m", "bfloat16", "default", adapter, salt).unwrap())
}

fn index(num_blocks: u64) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks,
        block_size: 1,
        ..Config::seeded(0)
    })
    .unwrap()
}

fn insert(index: &mut RadixIndex, seq: &mut TokenSequence, ids: &[BlockId]) {
    let options = InsertOptions::new(seq.len(), Source::Computed);
    index.insert(seq, ids, options).unwrap();
}

/// An index with a sequence of `blocks` blocks in one edge.
fn of_one_edge(blocks: u32) -> (RadixIndex, TokenSequence) {
    let mut index = index(8 * u64::from(blocks));
    let mut seq = sequence(0..blocks);
    insert(&mut index, &mut seq, &ids(0..blocks));
    (index, seq)
}

/// As [`of_one_edge`], with a branch after each block, so that each block is an edge.
fn of_many_edges(blocks: u32) -> (RadixIndex, TokenSequence) {
    let (mut index, seq) = of_one_edge(blocks);
    cut(&mut index, blocks);
    (index, seq)
}

/// Inserts a branch after each block of the sequence of [`of_one_edge`].
fn cut(index: &mut RadixIndex, blocks: u32) {
    for at in 1..blocks {
        let branch = || (0..at).chain([blocks + at]);
        insert(index, &mut sequence(branch()), &ids(branch()));
    }
}

fn plans(index: &mut RadixIndex, seq: &TokenSequence, count: usize) -> Vec<ReusePlan> {
    let mut one = || {
        index
            .plan(&mut seq.clone(), &ReusePolicy::EXACT_ONLY, WHOLE)
            .unwrap()
    };
    (0..count).map(|_| one()).collect()
}

#[test]
fn what_plans_pin_is_visited_once_however_many_blocks_are_discarded() {
    let (edges, leases, gone) = (200, 16, 64);
    let (mut index, seq) = of_many_edges(edges);
    let held = plans(&mut index, &seq, leases);
    let list = ids(1..=gone);
    // There is a step for each block, each plan, each of the plan's edges, and each block that it keeps by id.
    let most = u64::from(gone) + leases as u64 * u64::from(1 + edges + gone);
    assert_eq!(index.discard_within(&list, steps(most / 2)).unwrap(), None);
    let freed = index.discard_within(&list, steps(most)).unwrap();
    assert_eq!(freed, Some(vec![]));
    index.check().unwrap();
    for plan in &held {
        index.release(plan).unwrap();
    }
    assert_eq!(index.take_freed(), list);
    index.check().unwrap();
}

#[test]
fn what_other_namespaces_pin_costs_a_step_per_plan() {
    let (mut index, seq) = of_many_edges(200);
    let _held = plans(&mut index, &seq, 16);
    let other = namespace(Some("other"), Salt::Shared);
    let mut mine = TokenSequence::new(other, vec![1, 2, 3, 4], vec![]).unwrap();
    let own = ids(1_000..1_004);
    insert(&mut index, &mut mine, &own);
    let _pinned = plans(&mut index, &mine, 1);
    // There is a step for each of two blocks, 17 plans, an edge, and two blocks that the plan keeps.
    let done = index.remove_spans_within(&mine, &[(1, 3)], false, steps(40));
    assert_eq!(done.unwrap().unwrap().condemned, own[1..3]);
    index.check().unwrap();
}

#[test]
fn a_path_is_pinned_in_as_many_pieces_as_discards_leave() {
    let blocks = 4_000;
    let (mut index, seq) = of_one_edge(blocks);
    let held = plans(&mut index, &seq, 3);
    let list = ids((1..blocks).step_by(2));
    assert_eq!(index.discard(&list).unwrap(), []);
    assert_eq!(index.stats().pinned, u64::from(blocks));
    index.check().unwrap();
    // The remaining blocks of the first half leave the pieces.
    let rest = ids((0..blocks / 2).step_by(2));
    assert_eq!(index.discard(&rest).unwrap(), []);
    index.check().unwrap();
    for plan in &held {
        index.release(plan).unwrap();
    }
    assert_eq!(index.take_freed().len(), list.len() + rest.len());
    index.check().unwrap();
}

#[test]
fn forks_of_a_plan_share_what_is_left_before_them() {
    let mut index = index(64);
    let mut seq = sequence(0..8);
    insert(&mut index, &mut seq, &ids(0..8));
    let plan = plans(&mut index, &seq, 1).remove(0);
    // A second branch, after four blocks, is inserted with the same plan.
    let mut fork = sequence((0..8).chain(20..24));
    let options = InsertOptions::new(12, Source::Plan(&plan));
    let all = ids((0..8).chain(20..24));
    index.insert(&mut fork, &all, options).unwrap();
    assert_eq!(index.discard(&ids([2, 5, 21])).unwrap(), []);
    index.check().unwrap();
    index.release(&plan).unwrap();
    assert_eq!(index.take_freed(), ids([2, 5, 21]));
    index.check().unwrap();
}

#[test]
fn an_exact_plan_over_many_holes_is_known_to_be_long() {
    for many_edges in [false, true] {
        let blocks = 2_000;
        let (mut index, seq) = if many_edges {
            of_many_edges(blocks)
        } else {
            of_one_edge(blocks)
        };
        let policy = ReusePolicy::EXACT_ONLY;
        let options = PlanOptions::default();
        index.discard(&ids((1..blocks - 1).step_by(2))).unwrap();
        let (before, clock) = (index.digest(), index.stats().clock);
        let mut prompt = sequence(seq.tokens().iter().copied());
        let given_up = index.plan_within(&mut prompt, &policy, options, BRIEF);
        assert!(given_up.unwrap().is_none());
        assert_eq!((index.digest(), index.stats().clock), (before, clock));
        // A few of them do not count, and neither do holes elsewhere.
        let mut short = sequence(seq.tokens().iter().copied().take(50));
        let plan = index.plan_within(&mut short, &policy, options, BRIEF);
        index.release(&plan.unwrap().unwrap()).unwrap();
        let plan = index.plan_within(&mut prompt, &policy, options, Effort::ANY);
        index.release(&plan.unwrap().unwrap()).unwrap();
    }
}

#[test]
fn calls_that_may_have_to_bound_the_holes_are_known_to_be_long() {
    let leaves = 400;
    let mut index = index(1_000);
    for leaf in 0..leaves {
        insert(&mut index, &mut sequence([10_000 + leaf]), &ids([leaf]));
    }
    let mut free: Vec<BlockId> = ids(leaves..1_000);
    let mut number = 0;
    while index.stats().holes + 60 < 1_000 {
        let mut path = sequence((0..50).map(|at| 20_000 + 100 * number + at));
        number += 1;
        let blocks = free.split_off(free.len() - 50);
        insert(&mut index, &mut path, &blocks);
        free.extend(index.remove_spans(&path, &[(0, 49)], false).unwrap().freed);
    }
    let mut path = sequence((0..100).map(|at| 90_000 + at));
    let blocks = free.split_off(free.len() - 100);
    insert(&mut index, &mut path, &blocks);
    assert!(index.stats().evictable > 256);
    let before = index.digest();
    let within = index.remove_spans_within(&path, &[(0, 99)], false, BRIEF);
    assert_eq!(within.unwrap(), None);
    assert_eq!(index.discard_within(&blocks[..99], BRIEF).unwrap(), None);
    index.mark_dead(&path, &[(0, 99)]).unwrap();
    assert_eq!(index.evict_within(99, BRIEF), None);
    assert_ne!(index.digest(), before);
    assert_eq!(index.evict_within(99, Effort::ANY).unwrap().len(), 99);
    index.check().unwrap();
}

#[test]
fn a_use_that_revives_much_is_known_to_be_long() {
    let blocks = 2_000;
    let (mut index, seq) = of_one_edge(blocks);
    let marks: Vec<_> = (0..1_000).map(|at| (2 * at, 2 * at + 1)).collect();
    assert_eq!(index.mark_dead(&seq, &marks).unwrap(), 1_000);
    let (before, mut out) = (index.digest(), Vec::new());
    let mut prompt = sequence(0..blocks);
    let options = LookupOptions::default();
    for _ in 0..3 {
        let found = index.lookup_within(&mut prompt, options, BRIEF, &mut out);
        assert_eq!(found.unwrap(), None);
    }
    let planned = index.plan_within(
        &mut prompt,
        &ReusePolicy::EXACT_ONLY,
        PlanOptions::default(),
        BRIEF,
    );
    assert!(planned.unwrap().is_none());
    assert!(index.insert_steps(&prompt, 0) > BRIEF.nodes);
    assert_eq!(index.digest(), before);
    // A call that only reads removes no marks.
    let options = LookupOptions {
        touch: false,
        ..options
    };
    let found = index.lookup_within(&mut prompt, options, BRIEF, &mut out);
    assert_eq!(found.unwrap().unwrap().num_tokens, 2_000);
    index
        .lookup(&mut prompt, LookupOptions::default(), &mut out)
        .unwrap();
    assert_eq!(index.stats().dead, 0);
    index.check().unwrap();
}

#[test]
fn a_use_that_revives_little_is_not_long() {
    let (mut index, seq) = of_one_edge(200);
    assert_eq!(index.mark_dead(&seq, &[(0, 100), (150, 160)]).unwrap(), 110);
    let policy = ReusePolicy::EXACT_ONLY;
    let planned = index.plan_within(&mut seq.clone(), &policy, PlanOptions::default(), BRIEF);
    index.release(&planned.unwrap().unwrap()).unwrap();
    assert_eq!(index.stats().dead, 0);
}

#[test]
fn ids_of_very_many_edges_are_known_to_be_long() {
    let (mut index, _) = of_many_edges(1_500);
    let mut prompt = sequence(0..1_500);
    let mut out = Vec::new();
    let options = LookupOptions::default();
    let tries = (0..20).filter(|_| {
        let found = index.lookup_within(&mut prompt, options, BRIEF, &mut out);
        found.unwrap().is_some()
    });
    assert_eq!(tries.count(), 0);
    let found = index.lookup(&mut prompt, options, &mut out).unwrap();
    assert_eq!((found.num_tokens, out.len()), (1_500, 1_500));
}

#[test]
fn tags_after_the_prompt_are_not_read() {
    let (mut index, seq) = of_one_edge(20_000);
    let kind = |at: usize| ["user", "tool"][at % 2];
    let spans: Vec<Span> = (0..20_000).map(|at| span(at, at + 1, kind(at))).collect();
    assert_eq!(index.tag_within(&seq, &spans, BRIEF).unwrap(), None);
    assert!(index.tags(&seq).is_empty());
    index.tag(&seq, &spans).unwrap();
    let mut short = sequence(0..4);
    assert_eq!(index.tags_within(&short, steps(16)).unwrap(), spans[..4]);
    assert_eq!(index.tags_within(&seq, BRIEF), None);
    assert_eq!(index.tags(&seq), spans);
    insert(&mut index, &mut short, &ids(0..4));
    index.check().unwrap();
}

#[test]
fn explain_looks_at_64_namespaces_at_most() {
    let mut index = index(1_000);
    let tenant = || Salt::Tenant("t".to_owned());
    let tokens = vec![1, 2, 3, 4];
    let mut next = 0;
    for number in 0..100 {
        if number == 50 {
            continue;
        }
        let adapter = format!("{number:03}");
        let len = if number % 99 == 0 { 4 } else { 1 };
        let own = namespace(Some(&adapter), tenant());
        let mut seq = TokenSequence::new(own, tokens[..len].to_vec(), vec![]).unwrap();
        let blocks = ids(next..next + u32::try_from(len).unwrap());
        next += 4;
        insert(&mut index, &mut seq, &blocks);
    }
    let own = namespace(Some("050"), tenant());
    let mut prompt = TokenSequence::new(own, tokens.clone(), vec![]).unwrap();
    let other = |index: &mut RadixIndex, prompt: &mut TokenSequence| {
        let why = index.explain(prompt, &ExplainOptions::default()).unwrap();
        why.other_namespace.unwrap().num_tokens
    };
    // The two that have all of it are 49 places away; 32 are examined on each side.
    assert_eq!(other(&mut index, &mut prompt), 1);
    let near = namespace(Some("031"), tenant());
    let mut prompt = TokenSequence::new(near, tokens, vec![]).unwrap();
    assert_eq!(other(&mut index, &mut prompt), 4);
    index.check().unwrap();
}

#[test]
fn exact_blocks_replace_all_that_plans_pin_of_approximate_ones() {
    let blocks = 400;
    let mut index = index(4_000);
    let mut seq = sequence(0..blocks);
    let options = InsertOptions::new(seq.len(), imported(100, 1));
    index.insert(&mut seq, &ids(0..blocks), options).unwrap();
    let policy = approximate();
    let held: Vec<_> = (0..8)
        .map(|_| index.plan(&mut seq.clone(), &policy, WHOLE).unwrap())
        .collect();
    assert_eq!(held[0].blocks(), ids(0..blocks));
    let mut again = sequence(0..blocks);
    let offered = ids((0..100).chain(1_000..1_000 + blocks - 100));
    insert(&mut index, &mut again, &offered);
    index.check().unwrap();
    let stats = index.stats();
    assert_eq!((stats.condemned, stats.approximate), (300, 0));
    for plan in &held {
        assert!(index.validate(plan).unwrap().iter().all(|stayed| *stayed));
        index.release(plan).unwrap();
    }
    assert_eq!(index.take_freed(), ids(100..blocks));
    index.check().unwrap();
}

#[test]
fn a_release_takes_a_step_for_four_edges_and_one_for_each_block_that_left() {
    let (edges, gone) = (200, 6);
    let (mut index, seq) = of_many_edges(edges);
    let plan = plans(&mut index, &seq, 1).remove(0);
    assert_eq!(plan.num_edges(), u64::from(edges));
    let before = index.release_steps(&plan);
    // There is one more step for the lease's only entry.
    assert_eq!(before, u64::from(edges) / 4 + 1);
    // Every second block leaves, so that the lease has more entries.
    index.discard(&ids((0..gone).map(|at| 2 * at + 1))).unwrap();
    let after = index.release_steps(&plan);
    assert!(after >= before + u64::from(gone), "{after} steps");
    assert!(after <= before + 4 * u64::from(gone), "{after} steps");
    index.release(&plan).unwrap();
    assert!(index.is_released(&plan));
    assert_eq!(index.release_steps(&plan), u64::from(edges) / 4);
}

#[test]
fn a_release_takes_a_step_for_each_leaf_while_there_are_too_many_holes() {
    let mut index = index(100);
    for leaf in 0..10 {
        insert(&mut index, &mut sequence([leaf]), &ids([leaf]));
    }
    // Three paths of 34 holes, whose other blocks are pinned and cannot leave.
    let mut free = ids(10..100);
    let mut held = Vec::new();
    for number in 1..=3 {
        let mut path = sequence((0..50).map(|at| 100 * number + at));
        let blocks = free.split_off(free.len() - 50);
        insert(&mut index, &mut path, &blocks);
        if number == 3 {
            held.extend(plans(&mut index, &path, 1));
            assert_eq!(index.release_steps(&held[0]), 1);
        }
        free.extend(index.remove_spans(&path, &[(0, 34)], false).unwrap().freed);
        if number < 3 {
            held.extend(plans(&mut index, &path, 1));
        }
    }
    assert_eq!(index.stats().holes, 102);
    assert_eq!(index.release_steps(&held[0]), 1 + 10);
    // An eviction checks the bound only after dead blocks left, so this one takes a step for each block.
    assert_eq!(index.evict_within(1, steps(1)), Some(ids([0])));
    for plan in &held {
        index.release(plan).unwrap();
    }
    assert!(index.stats().holes <= 100);
    index.check().unwrap();
}

#[test]
fn an_exact_plan_over_approximate_blocks_is_long_and_over_exact_ones_is_not() {
    let planned = |index: &mut RadixIndex, blocks: u32| {
        let mut prompt = sequence(0..blocks);
        let policy = ReusePolicy::EXACT_ONLY;
        let plan = index.plan_within(&mut prompt, &policy, PlanOptions::default(), BRIEF);
        plan.unwrap().is_some()
    };
    // Everything after the first block is approximate.
    let blocks = 600;
    let mut approximate = index(1_000);
    let options = InsertOptions::new(blocks as usize, imported(1, 1));
    approximate
        .insert(&mut sequence(0..blocks), &ids(0..blocks), options)
        .unwrap();
    assert!(!planned(&mut approximate, blocks));
    assert!(planned(&mut approximate, 100));
    // The first of a few edges has one hole, and the others have only exact blocks.
    let mut broken = index(2_000);
    for end in [50, 300, blocks] {
        insert(&mut broken, &mut sequence(0..end), &ids(0..end));
        let branch = sequence((0..end).chain([9_999]));
        let table = ids((0..end).chain([blocks + end]));
        insert(&mut broken, &mut branch.clone(), &table);
    }
    broken.discard(&ids([10])).unwrap();
    assert_eq!(broken.stats().holes, 1);
    assert!(planned(&mut broken, blocks));
}

#[test]
fn marking_many_runs_of_an_edge_takes_a_step_for_each_that_is_or_comes_to_be_marked() {
    let (mut index, seq) = of_one_edge(1_000);
    let every_other = |from: usize, to: usize| -> Vec<(usize, usize)> {
        (from..to).map(|at| (2 * at, 2 * at + 1)).collect()
    };
    let mut mark = |ranges: &[(usize, usize)], nodes| {
        let marked = index.mark_dead_within(&seq, ranges, steps(nodes));
        index.check().unwrap();
        marked.unwrap()
    };
    assert_eq!(mark(&every_other(0, 300), 299), None);
    assert_eq!(mark(&every_other(0, 300), 300), Some(300));
    assert_eq!(mark(&every_other(300, 302), 301), None);
    assert_eq!(mark(&every_other(300, 302), 302), Some(2));
}

#[test]
fn a_use_that_revives_takes_a_step_for_each_edge_and_each_run() {
    let edges = 600;
    let (mut index, seq) = of_many_edges(edges);
    let all = seq.len();
    assert_eq!(index.mark_dead(&seq, &[(all - 1, all)]).unwrap(), 1);
    let (mut prompt, mut out) = (sequence(0..edges), Vec::new());
    let looks = LookupOptions {
        touch: false,
        ..LookupOptions::default()
    };
    index.lookup(&mut prompt, looks, &mut out).unwrap();
    // There is a step for the root, for each edge, and for the dead run in the last edge.
    let needed = 1 + u64::from(edges) + 1;
    let mut used = |nodes| {
        let options = LookupOptions::default();
        let found = index.lookup_within(&mut prompt, options, steps(nodes), &mut out);
        (found.unwrap().is_some(), index.stats().dead)
    };
    assert_eq!(used(needed - 1), (false, 1));
    assert_eq!(used(needed), (true, 0));
}

#[test]
fn a_use_where_nothing_is_cached_revives_nothing() {
    let (mut index, seq) = of_one_edge(4);
    assert_eq!(index.mark_dead(&seq, &[(1, 3)]).unwrap(), 2);
    let other = namespace(Some("other"), Salt::Shared);
    let mut prompt = TokenSequence::new(other, vec![0, 1, 2, 3], vec![]).unwrap();
    let (options, mut out) = (LookupOptions::default(), ids([9]));
    let found = index.lookup_within(&mut prompt, options, steps(0), &mut out);
    assert_eq!(found.unwrap().unwrap().num_tokens, 0);
    assert_eq!((out, index.stats().dead), (vec![], 2));
}

#[test]
fn ids_of_few_blocks_are_not_long_however_many_edges_were_walked() {
    let blocks = 1_500;
    let (mut index, _) = of_many_edges(blocks);
    let (mut prompt, mut out) = (sequence(0..blocks), Vec::new());
    let options = LookupOptions::default();
    index.lookup(&mut prompt, options, &mut out).unwrap();
    assert_eq!(index.known_edges(&prompt), u64::from(blocks));
    // The match may have at most four blocks per step.
    for (len, is_found) in [(1_028, false), (1_027, true), (200, true)] {
        prompt.truncate(len).unwrap();
        let found = index.lookup_within(&mut prompt, options, BRIEF, &mut out);
        assert_eq!(found.unwrap().is_some(), is_found, "{len} blocks");
    }
    assert_eq!(out.len(), 200);
}

#[test]
fn what_nobody_pins_is_removed_without_a_step_for_any_plan() {
    let (mut index, seq) = of_one_edge(200);
    let _held = plans(&mut index, &seq, 300);
    let mut mine = sequence([900, 901, 902, 903]);
    let own = ids(1_000..1_004);
    insert(&mut index, &mut mine, &own);
    let done = index.remove_spans_within(&mine, &[(1, 4)], false, steps(2));
    assert_eq!(done.unwrap(), None);
    let done = index.remove_spans_within(&mine, &[(1, 4)], false, steps(3));
    assert_eq!(done.unwrap().unwrap().freed, own[1..]);
    index.check().unwrap();
}

#[test]
fn a_block_above_a_source_is_not_looked_for_on_the_paths_that_plans_pin() {
    let mut index = RadixIndex::new(Config {
        moved_runs: true,
        ..index(1_000).config().clone()
    })
    .unwrap();
    let mut text = sequence(2_000..2_020);
    insert(&mut index, &mut text, &ids(500..520));
    let mut moved = sequence([9].into_iter().chain(2_004..2_020));
    let copied = index.plan(&mut moved, &approximate(), WHOLE).unwrap();
    assert_eq!(copied.source_blocks(), ids(504..520));
    // A plan pins a path of many edges in the same tree.
    let mut seq = sequence(0..100);
    insert(&mut index, &mut seq, &ids(0..100));
    cut(&mut index, 100);
    let _held = plans(&mut index, &seq, 1);
    // There is a step for the block, for what is copied, and for the path.
    let freed = index.discard_within(&ids([502]), steps(3)).unwrap();
    assert_eq!(freed, Some(ids([502])));
    index.check().unwrap();
}

#[test]
fn a_block_that_nobody_pins_takes_no_step_for_the_edges_of_pinned_paths() {
    let (mut index, seq) = of_many_edges(200);
    let _held = plans(&mut index, &seq, 1);
    // The only block of a branch takes a step, and the plan another.
    let gone = ids([250]);
    assert_eq!(index.discard_within(&gone, steps(1)).unwrap(), None);
    let freed = index.discard_within(&gone, steps(2)).unwrap();
    assert_eq!(freed, Some(gone));
}

#[test]
fn a_pinned_block_takes_a_step_for_each_edge_from_the_end_of_its_path_up_to_it() {
    let (mut index, seq) = of_many_edges(200);
    let _whole = plans(&mut index, &seq, 1);
    // This path ends above the block and is not visited.
    let _front = plans(&mut index, &sequence(0..100), 1);
    let gone = ids([150]);
    // There is a step for the block, for each of two plans, for the edges, and for the block that the plan keeps by id.
    let needed = 1 + 2 + 50 + 1;
    let discarded = index.discard_within(&gone, steps(needed - 1));
    assert_eq!(discarded.unwrap(), None);
    let freed = index.discard_within(&gone, steps(needed)).unwrap();
    assert_eq!((freed, index.stats().condemned), (Some(vec![]), 1));
    index.check().unwrap();
}

#[test]
fn blocks_directly_after_what_plans_pin_are_removed_without_a_step_for_any_plan() {
    let (mut index, seq) = of_one_edge(200);
    let _held = plans(&mut index, &sequence(0..100), 300);
    let mut remove = |nodes| {
        let done = index.remove_spans_within(&seq, &[(100, 103)], false, steps(nodes));
        done.unwrap().map(|removed| removed.freed)
    };
    assert_eq!(remove(2), None);
    assert_eq!(remove(3), Some(ids(100..103)));
    index.check().unwrap();
}

#[test]
fn a_range_without_a_whole_block_takes_no_step() {
    let (mut index, seq) = of_many_edges(200);
    let done = index.remove_spans_within(&seq, &[(3, 3)], false, steps(0));
    assert_eq!(done.unwrap(), Some(Removed::default()));
    let marked = index.mark_dead_within(&seq, &[(3, 3)], steps(0));
    assert_eq!(marked.unwrap(), Some(0));
}

/// 100 blocks in an edge of 40 and one of 60. The second edge has a hole.
fn of_two_edges_with_a_hole() -> (RadixIndex, TokenSequence) {
    let (mut index, seq) = of_one_edge(100);
    let mut branch = sequence((0..40).chain([900]));
    insert(&mut index, &mut branch, &ids((0..40).chain([700])));
    assert_eq!(index.discard(&ids([60])).unwrap(), ids([60]));
    (index, seq)
}

#[test]
fn tagging_takes_a_step_for_each_span_and_edge_and_for_each_block_of_edges_with_holes() {
    let (mut index, seq) = of_two_edges_with_a_hole();
    let spans = [span(0, 100, "tool")];
    let needed = 1 + 2 + 60;
    let tagged = index.tag_within(&seq, &spans, steps(needed - 1));
    assert_eq!(tagged.unwrap(), None);
    let tagged = index.tag_within(&seq, &spans, steps(needed));
    assert_eq!(tagged.unwrap(), Some(()));
    // There is one more step for each run of tags in the edges: one, and two around the hole.
    let needed = needed + 3;
    let tagged = index.tag_within(&seq, &spans, steps(needed - 1));
    assert_eq!(tagged.unwrap(), None);
    let tagged = index.tag_within(&seq, &spans, steps(needed));
    assert_eq!(tagged.unwrap(), Some(()));
    index.check().unwrap();
}

#[test]
fn marking_after_a_hole_takes_a_step_for_each_block_from_the_range_to_the_end_of_the_edge() {
    let (mut index, seq) = of_two_edges_with_a_hole();
    // There is a step for the edge above, where a branch begins, for the edge itself, and for its blocks.
    let needed = 1 + 1 + 30;
    let marked = index.mark_dead_within(&seq, &[(70, 72)], steps(needed - 1));
    assert_eq!(marked.unwrap(), None);
    let marked = index.mark_dead_within(&seq, &[(70, 72)], steps(needed));
    assert_eq!(marked.unwrap(), Some(2));
}

#[test]
fn discards_that_make_as_many_holes_as_there_may_be_take_no_step_for_the_leaves() {
    let mut index = index(8);
    let mut paths = [sequence(0..5), sequence(10..15)];
    insert(&mut index, &mut paths[0], &ids(0..5));
    assert_eq!(index.discard(&ids(0..4)).unwrap(), ids(0..4));
    let own = ids([0, 1, 2, 3, 5]);
    insert(&mut index, &mut paths[1], &own);
    assert_eq!(index.stats().holes, 4);
    let freed = index.discard_within(&own[..4], steps(4)).unwrap();
    assert_eq!(freed, Some(own[..4].to_vec()));
    assert_eq!((index.stats().holes, index.num_waiting()), (8, 0));
    index.check().unwrap();
}

#[test]
fn an_insert_takes_steps_for_what_is_unknown_offered_pinned_and_dead() {
    let mut index = RadixIndex::new(Config {
        block_size: 4,
        ..index(100).config().clone()
    })
    .unwrap();
    let mut seq = sequence(0..22);
    // Five whole blocks take a step each, and so do four ids together.
    assert_eq!(index.unknown_steps(&seq), 5);
    assert_eq!(index.insert_steps(&seq, 40), 5 + 10);
    let options = InsertOptions::new(8, Source::Computed);
    index.insert(&mut seq, &ids(0..2), options).unwrap();
    // 14 tokens are unknown.
    assert_eq!(index.unknown_steps(&seq), 3);
    let _held = plans(&mut index, &sequence(0..8), 3);
    assert_eq!(index.insert_steps(&seq, 40), 3 + 10);
    // Approximate blocks may be replaced, and each plan may pin each of them.
    let mut other = sequence(50..66);
    let options = InsertOptions::new(16, imported(0, 1));
    index.insert(&mut other, &ids(10..14), options).unwrap();
    assert_eq!(index.insert_steps(&seq, 40), 3 + 10 + 3 * 40);
    // A use may remove the marks of all dead blocks in the namespace.
    assert_eq!(index.mark_dead(&other, &[(8, 16)]).unwrap(), 2);
    assert_eq!(index.insert_steps(&seq, 40), 3 + 10 + 3 * 40 + 2);
    let elsewhere = namespace(Some("other"), Salt::Shared);
    let mine = TokenSequence::new(elsewhere, vec![1; 22], vec![]).unwrap();
    assert_eq!(index.insert_steps(&mine, 40), 5 + 10 + 3 * 40);
}

#[test]
fn a_path_is_broken_by_a_hole_or_by_an_approximate_block() {
    let (mut index, mut seq) = of_one_edge(4);
    assert!(!index.has_broken_paths());
    index.discard(&ids([1])).unwrap();
    assert!(index.has_broken_paths());
    insert(&mut index, &mut seq, &ids([0, 9, 2, 3]));
    assert!(!index.has_broken_paths());
    let options = InsertOptions::new(1, imported(0, 1));
    let mut other = sequence([50]);
    index.insert(&mut other, &ids([20]), options).unwrap();
    assert!(index.has_broken_paths());
}

#[test]
fn a_lookup_counts_the_edges_it_looked_at_and_the_tokens_it_compared() {
    let mut index = RadixIndex::new(Config {
        block_size: 2,
        ..index(100).config().clone()
    })
    .unwrap();
    insert(&mut index, &mut sequence(0..16), &ids(0..8));
    let mut looked = |seq: &mut TokenSequence, bytes| {
        let (effort, before) = (Effort { nodes: 9, bytes }, index.stats());
        let options = LookupOptions::default();
        let found = index.lookup_within(seq, options, effort, &mut Vec::new());
        let after = index.stats();
        (
            found.unwrap().map(|found| found.num_tokens),
            after.nodes_visited - before.nodes_visited,
            (after.bytes_compared - before.bytes_compared) / 4,
        )
    };
    // The root and the edge are visited. The token that differs was compared as well.
    let mut other = sequence([0, 1, 2, 3, 90, 91]);
    assert_eq!(looked(&mut other, u64::MAX), (Some(4), 2, 5));
    let mut seq = sequence(0..4);
    assert_eq!(looked(&mut seq, u64::MAX), (Some(4), 2, 4));
    // This lookup starts in the middle of the edge.
    seq.extend(&[4, 5, 6, 7], vec![]).unwrap();
    assert_eq!(looked(&mut seq, u64::MAX), (Some(8), 1, 4));
    // As many whole blocks are compared as the bytes suffice for.
    assert_eq!(looked(&mut sequence(0..16), 24), (None, 2, 6));
}

#[test]
fn an_eviction_takes_a_step_for_each_block_that_waits_or_may_go() {
    let (mut index, seq) = of_one_edge(10);
    assert_eq!(index.evict_within(1, steps(0)), None);
    assert_eq!(index.evict_within(1, steps(1)), Some(ids([9])));
    let held = plans(&mut index, &seq, 1);
    index.discard(&ids([7, 8])).unwrap();
    index.release(&held[0]).unwrap();
    assert_eq!((index.num_waiting(), index.num_evictable()), (2, 7));
    assert_eq!(index.evict_within(99, steps(8)), None);
    let evicted = index.evict_within(99, steps(9));
    assert_eq!(evicted, Some(ids([7, 8, 6, 5, 4, 3, 2, 1, 0])));
}
