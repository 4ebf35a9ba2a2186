//! Tests tokens of moved runs that are computed anyway (P7, P20).

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use common::{approximate, ids, imported, inserting, moved, put, sequence};
use kvtrie_core::{
    BlockId, Class, Config, ErrorKind, InsertOptions, PlanOptions, RadixIndex, Repair, ReusePlan,
    ReusePolicy, Source, TokenSequence,
};

mod common;

/// 40 tokens from 100 on, in blocks of four.
fn filled() -> RadixIndex {
    let config = Config {
        num_blocks: 64,
        block_size: 4,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(0)
    };
    let mut index = RadixIndex::new(config).unwrap();
    put(&mut index, &mut sequence(100..140), 0..10);
    index
}

/// Four new tokens, runs of 8, 12 and 20 tokens with a new token after each.
fn prompt() -> TokenSequence {
    let runs = [(100, 108), (110, 122), (120, 140)];
    let runs = runs.into_iter().zip(0..);
    let parts = runs.flat_map(|((from, to), new)| (from..to).chain([7 + new]));
    sequence((0..4).chain(parts))
}

fn policy(share: f64, repair: Repair) -> ReusePolicy {
    ReusePolicy {
        recompute_share: share,
        repair,
        min_run: Some(8),
        ..approximate()
    }
}

fn planned(share: f64, repair: Repair) -> (RadixIndex, TokenSequence, ReusePlan) {
    let mut index = filled();
    let mut seq = prompt();
    let plan = index.plan(&mut seq, &policy(share, repair), PlanOptions::default());
    (index, seq, plan.unwrap())
}

#[test]
fn a_share_is_one_number_of_first_tokens_for_all_runs() {
    let whole = [(4, 12, 0), (13, 25, 10), (26, 46, 20)];
    let cut = |first: usize| {
        let left = whole.iter().filter(|run| run.1 - run.0 > first);
        let left = left.map(|run| (run.0 + first, run.1, run.2 + first));
        left.collect::<Vec<_>>()
    };
    for (share, first) in [
        (0.0, 0),
        (0.001, 1),
        (3.0 / 40.0, 1),
        (0.076, 2),
        (0.5, 7),
        (0.6, 8),
        (0.61, 9),
        (0.8, 12),
        (0.81, 13),
        (1.0, 20),
    ] {
        let (_, _, plan) = planned(share, Repair::Fronts);
        assert_eq!(moved(&plan), cut(first), "{share}");
        assert_eq!(plan.awaits(), None);
    }
    // The larger of both limits counts.
    let both = ReusePolicy {
        recompute_first: 5,
        ..policy(0.1, Repair::Fronts)
    };
    assert_eq!(both.front([8, 12, 20]), 5);
    assert_eq!(both.front([]), 5);
    assert_eq!(
        ReusePolicy {
            recompute_share: 0.9,
            ..both
        }
        .front([8, 12, 20]),
        16
    );
}

#[test]
fn names_of_choices_are_read_back() {
    for (name, repair) in Repair::ALL {
        assert_eq!((Repair::named(name), repair.name()), (Some(repair), name));
    }
    assert_eq!(Repair::named("Fronts"), None);
    assert_eq!(Repair::default(), Repair::Fronts);
}

#[test]
fn chosen_tokens_are_computed_and_the_others_copied_from_where_they_were() {
    let (mut index, _, plan) = planned(0.0, Repair::Fronts);
    let sources = plan.source_blocks();
    let digest = index.digest();
    let new = index
        .recompute(&plan, &[(4, 12), (14, 14), (14, 15), (15, 16), (40, 46)])
        .unwrap();
    assert_eq!(moved(&new), [(13, 14, 10), (16, 25, 13), (26, 40, 20)]);
    let gaps: Vec<_> = new
        .segments()
        .iter()
        .filter(|segment| segment.class == Class::Compute)
        .map(|segment| (segment.start, segment.end))
        .collect();
    assert_eq!(gaps, [(0, 13), (14, 16), (25, 26), (40, 47)]);
    assert_eq!(new.num_tokens(Class::Compute), 13 + 2 + 1 + 7);
    assert_eq!(new.first_approximate(), Some(13));
    // The sources are pinned and named as before, and the old plan is as a released one.
    assert_eq!(new.source_blocks(), sources);
    assert_eq!(index.digest(), digest);
    assert!(index.is_released(&plan) && !index.is_released(&new));
    assert_eq!(
        index.release(&plan).unwrap_err().kind(),
        ErrorKind::StaleHandle
    );
    assert_eq!(index.evict(64), []);
    let table = ids(20..32);
    let moves = new.moves(&table, 0, 47).unwrap();
    let copied: u64 = moves.iter().map(|copy| copy.num_tokens).sum();
    assert_eq!(copied, 1 + 9 + 14);
    assert_eq!(moves[1].source_slot, 13);
    assert_eq!(moves[1].dest_slot, 20 * 4 + 16);
    index.release(&new).unwrap();
    assert_eq!(index.evict(64).len(), 10);
}

#[test]
fn labels_follow_the_first_token_that_remains() {
    let (mut index, mut seq, plan) = planned(0.0, Repair::Fronts);
    let plan = index.recompute(&plan, &[(4, 12)]).unwrap();
    let table: Vec<BlockId> = ids(20..32);
    let options = InsertOptions::new(44, Source::Plan(&plan));
    let done = index.insert(&mut seq, &table[..11], options).unwrap();
    assert_eq!(done.num_exact, 12);
    // Nothing approximate is left: what is built is exact.
    let (mut index, mut seq, plan) = planned(0.0, Repair::Fronts);
    let plan = index
        .recompute(&plan, &[(4, 12), (13, 25), (26, 46)])
        .unwrap();
    assert_eq!(plan.first_approximate(), None);
    let options = InsertOptions::new(47, Source::Plan(&plan));
    let done = index.insert(&mut seq, &table[..11], options).unwrap();
    assert_eq!(done.num_exact, 44);
}

#[test]
fn other_ranges_are_refused() {
    let (mut index, _, plan) = planned(0.0, Repair::Fronts);
    let mut at = |ranges: &[(usize, usize)], words: &str| {
        let error = index.recompute(&plan, ranges).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
        assert!(!index.is_released(&plan));
    };
    at(
        &[(4, 48)],
        "ranges has [4, 48); it must ascend and lie in [0, 47]",
    );
    at(&[(6, 5)], "ranges has [6, 5); it must ascend");
    at(
        &[(14, 16), (5, 6)],
        "ranges has [5, 6) after a range that ends at 16",
    );
    at(
        &[(5, 8), (7, 9)],
        "ranges has [7, 9) after a range that ends at 8",
    );
    at(
        &[(3, 6)],
        "ranges has [3, 6), and token 3 is to compute already",
    );
    at(
        &[(11, 14)],
        "ranges has [11, 14), and token 12 is to compute already",
    );
    // What is in place, and what is exact.
    let mut seq = sequence((100..106).chain(200..210));
    let mut other = sequence((300..302).chain(200..208));
    put(&mut index, &mut other, 40..42);
    let plan = index
        .plan(
            &mut seq,
            &policy(0.0, Repair::Fronts),
            PlanOptions::default(),
        )
        .unwrap();
    let mut at = |ranges: &[(usize, usize)], words: &str| {
        let error = index.recompute(&plan, ranges).unwrap_err();
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    };
    at(&[(3, 4)], "token 3 is in place");
    at(&[(4, 5)], "token 4 is exact");
}

#[test]
fn approximate_blocks_in_place_are_refused() {
    let mut index = filled();
    let mut seq = sequence(0..24);
    let options = inserting(0..16, imported(0, 1));
    index.insert(&mut seq, &ids(20..24), options).unwrap();
    let plan = index
        .plan(&mut seq, &approximate(), PlanOptions::default())
        .unwrap();
    assert_eq!(plan.blocks(), ids(20..24));
    let error = index.recompute(&plan, &[(2, 3)]).unwrap_err();
    assert!(error.to_string().contains("token 2 is in place"), "{error}");
    // Such a plan has nothing to choose from.
    let chosen = ReusePolicy {
        recompute_share: 0.5,
        repair: Repair::Probe,
        ..approximate()
    };
    let plan = index
        .plan(&mut seq, &chosen, PlanOptions::default())
        .unwrap();
    assert_eq!(plan.awaits(), None);
}

#[test]
fn tokens_are_chosen_once_and_before_an_insert() {
    let (mut index, mut seq, plan) = planned(0.0, Repair::Fronts);
    let plan = index.recompute(&plan, &[]).unwrap();
    let error = index.recompute(&plan, &[(5, 6)]).unwrap_err();
    assert!(error.to_string().contains("earlier call"), "{error}");
    let options = InsertOptions::new(4, Source::Plan(&plan));
    index.insert(&mut seq, &ids([20]), options).unwrap();
    let (mut index, mut seq, plan) = planned(0.0, Repair::Fronts);
    let options = InsertOptions::new(4, Source::Plan(&plan));
    index.insert(&mut seq, &ids([20]), options).unwrap();
    let error = index.recompute(&plan, &[(5, 6)]).unwrap_err();
    assert!(error.to_string().contains("source of an insert"), "{error}");
}

#[test]
fn an_insert_waits_for_the_choice_that_the_policy_demands() {
    for repair in [
        Repair::Ngrams,
        Repair::Probe,
        Repair::Question,
        Repair::Adaptive,
    ] {
        let (mut index, mut seq, plan) = planned(0.2, repair);
        assert_eq!(plan.num_tokens(Class::Approximate), 40);
        assert_eq!(plan.awaits(), Some(repair));
        let digest = index.digest();
        let options = InsertOptions::new(4, Source::Plan(&plan));
        let error = index.insert(&mut seq, &ids([20]), options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(repair.name()), "{error}");
        assert_eq!(index.digest(), digest);
        let plan = index.recompute(&plan, &[]).unwrap();
        assert_eq!(plan.awaits(), None);
        let options = InsertOptions::new(4, Source::Plan(&plan));
        index.insert(&mut seq, &ids([20]), options).unwrap();
        // Without a share there is nothing to choose.
        assert_eq!(planned(0.0, repair).2.awaits(), None);
    }
}
