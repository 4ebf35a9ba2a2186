//! What calls on an index with groups count in advance, and that they give up before they change anything.

use kvtrie_core::{
    BlockId, Config, Effort, Group, GroupOffers, GroupOptions, InsertOptions, LookupOptions,
    PlanOptions, RadixIndex, ReusePolicy, Scope, Source,
};

use crate::common::{WHOLE, ids, sequence};

const BLOCKS: u32 = 200;
const WINDOW: usize = 40;

fn steps(nodes: u64) -> Effort {
    Effort {
        nodes,
        bytes: u64::MAX,
    }
}

/// An index with blocks of one token, a window and states, and a sequence of which it has these ids of groups.
fn filled(windows: std::ops::Range<usize>, states: &[usize]) -> RadixIndex {
    let mut index = RadixIndex::new(Config {
        num_blocks: 1_000,
        block_size: 1,
        groups: vec![
            Group::window("w", WINDOW + 1, 1_000, 1),
            Group::state("s", 1_000, 1),
        ],
        ..Config::seeded(0)
    })
    .unwrap();
    let window: Vec<(usize, BlockId)> = windows.clone().zip(ids(0..BLOCKS)).collect();
    let state: Vec<(usize, BlockId)> = states.iter().copied().zip(ids(0..BLOCKS)).collect();
    let offers = [(1, &window), (2, &state)].map(|(group, offers)| GroupOffers { group, offers });
    let groups = GroupOptions {
        offers: &offers,
        stops: &[],
    };
    let options = InsertOptions::new(BLOCKS as usize, Source::Computed);
    let mut seq = sequence(0..BLOCKS);
    index
        .insert_groups(&mut seq, &ids(0..BLOCKS), options, groups)
        .unwrap();
    index
}

#[test]
fn an_insert_takes_steps_for_what_its_ends_need() {
    let index = filled(0..0, &[]);
    let seq = sequence(0..BLOCKS);
    let (window, state) = ([(8, BlockId(1)), (9, BlockId(2))], [(5, BlockId(3))]);
    let offers = [(1, &window[..]), (2, &state)];
    let offers = offers.map(|(group, offers)| GroupOffers { group, offers });
    let of = |offers, stops| index.group_steps(&seq, GroupOptions { offers, stops });
    // The end needs a window and a state, four at a step.
    let blocks = WINDOW as u64;
    assert_eq!(of(&[], &[]), (blocks + 1) / 4);
    // The path may have as many edges as blocks, and is followed for stops. Each stop is looked at and needs as much.
    let edges = u64::from(BLOCKS) / 4;
    assert_eq!(of(&[], &[3, 9]), edges + 2 + 3 * (blocks + 1) / 4);
    // A block is needed once, so 50 stops need no more than all.
    let stops: Vec<usize> = (0..50).collect();
    assert_eq!(of(&[], &stops), edges + 50 + (u64::from(BLOCKS) + 51) / 4);
    // The path is followed twice for each group. A state needs a window.
    assert_eq!(of(&offers[..1], &[]), 2 * edges + 2 + (blocks + 1) / 4);
    assert_eq!(of(&offers, &[]), 4 * edges + 3 + 2 * (blocks + 1) / 4);
    let plain = RadixIndex::new(Config::seeded(0)).unwrap();
    let groups = GroupOptions {
        offers: &[],
        stops: &stops,
    };
    assert_eq!(plain.group_steps(&seq, groups), 50);
}

#[test]
fn a_release_takes_a_step_for_each_id_of_a_group() {
    let mut index = filled(0..200, &[200]);
    let mut seq = sequence(0..BLOCKS);
    let plan = index
        .plan(&mut seq, &ReusePolicy::EXACT_ONLY, WHOLE)
        .unwrap();
    assert_eq!(plan.blocks().len(), 200);
    // One more is for the path.
    assert_eq!(index.release_steps(&plan), WINDOW as u64 + 1 + 1);
    index.advance(&plan, 210).unwrap();
    assert_eq!(index.release_steps(&plan), 30 + 1);
    index.release(&plan).unwrap();
    assert_eq!(index.release_steps(&plan), 0);
}

#[test]
fn a_use_of_many_blocks_is_long() {
    let mut index = filled(0..200, &[200]);
    let digest = index.digest();
    let mut seq = sequence(0..BLOCKS);
    let (needed, policy) = (WINDOW as u64 + 1, ReusePolicy::EXACT_ONLY);
    let mut plan = |index: &mut RadixIndex, nodes| {
        index
            .plan_within(&mut seq, &policy, WHOLE, steps(nodes))
            .unwrap()
    };
    assert!(plan(&mut index, needed - 1).is_none());
    assert_eq!(index.digest(), digest);
    let plan = plan(&mut index, needed).unwrap();
    index.release(&plan).unwrap();
}

/// The search was made while a lock was held, thrown away, and made again.
#[test]
fn what_a_plan_pins_of_a_window_is_known_before_its_search() {
    let mut index = RadixIndex::new(Config {
        num_blocks: 1_000,
        block_size: 1,
        moved_runs: true,
        min_run: 8,
        groups: vec![Group::window("w", WINDOW + 1, 1_000, 1)],
        ..Config::seeded(0)
    })
    .unwrap();
    let options = InsertOptions::new(BLOCKS as usize, Source::Computed);
    index
        .insert(&mut sequence(0..BLOCKS), &ids(0..BLOCKS), options)
        .unwrap();
    let policy = ReusePolicy {
        approximate: true,
        scope: Scope::Namespace,
        ..ReusePolicy::EXACT_ONLY
    };
    let mut seq = sequence((0..100).chain(120..BLOCKS));
    let mut looks = |index: &mut RadixIndex, nodes| {
        let before = index.stats().search_looks;
        let plan = index
            .plan_within(&mut seq, &policy, WHOLE, steps(nodes))
            .unwrap();
        let is_planned = plan.is_some();
        if let Some(plan) = plan {
            index.release(&plan).unwrap();
        }
        (is_planned, index.stats().search_looks - before)
    };
    let (is_planned, searched) = looks(&mut index, 10_000);
    assert!(is_planned && searched > 0);
    // Enough for the match, and one step too few for the pins.
    assert_eq!(looks(&mut index, WINDOW as u64 - 1), (false, 0));
}

/// Group 0's match goes on without a state, so each call searches 100 blocks for the place where the prompt continues.
#[test]
fn a_search_for_where_all_groups_continue_starts_again() {
    let mut index = filled(0..200, &[100]);
    // Each block is an edge.
    for at in 1..BLOCKS {
        let branch = || (0..at).chain([BLOCKS + at]);
        let options = InsertOptions::new(at as usize + 1, Source::Computed);
        let own = ids(branch());
        index
            .insert(&mut sequence(branch()), &own, options)
            .unwrap();
    }
    let digest = index.digest();
    let mut seq = sequence(0..BLOCKS);
    let (options, mut out) = (LookupOptions::default(), Vec::new());
    let (policy, planned) = (ReusePolicy::EXACT_ONLY, PlanOptions::default());
    for _ in 0..10 {
        let found = index.lookup_within(&mut seq, options, steps(90), &mut out);
        assert_eq!(found.unwrap(), None);
        let plan = index.plan_within(&mut seq, &policy, planned, steps(90));
        assert!(plan.unwrap().is_none());
    }
    // The end of group 0's match is known since the third call, and nothing was touched.
    assert_eq!(index.unknown_steps(&seq), 0);
    assert_eq!(index.digest(), digest);
    let found = index.lookup_within(&mut seq, options, steps(250), &mut out);
    assert_eq!(found.unwrap().map(|found| found.num_tokens), Some(100));
    let plan = index.plan_within(&mut seq, &policy, planned, steps(250));
    assert_eq!(plan.unwrap().unwrap().blocks(), ids(0..100));
    index.check().unwrap();
}
