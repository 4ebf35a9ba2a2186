//! Tests that no plan uses approximate KV of a laxer policy (P19).

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Class, Config, Imported, InsertOptions, PlanOptions, RadixIndex, ReusePlan,
    ReusePolicy, Source, TokenSequence,
};

use common::{approximate, ids, inserting, planned, put, sequence};

mod common;

const BLOCK_SIZE: usize = 4;

fn index() -> RadixIndex {
    let config = Config {
        num_blocks: 4_000,
        block_size: BLOCK_SIZE,
        moved_runs: true,
        ..Config::seeded(0)
    };
    RadixIndex::new(config).unwrap()
}

/// A policy that computes the first tokens of runs.
fn first(count: usize) -> ReusePolicy {
    ReusePolicy {
        recompute_first: count,
        ..approximate()
    }
}

/// Inserts a sequence as a plan built it, with new ids from `next` on. Returns the ids that back it.
fn build(
    index: &mut RadixIndex,
    seq: &mut TokenSequence,
    plan: &ReusePlan,
    next: u32,
) -> Vec<BlockId> {
    let in_place = plan.blocks().len();
    let new = u32::try_from(seq.len() / BLOCK_SIZE - in_place).unwrap();
    let options = inserting(in_place * BLOCK_SIZE..seq.len(), Source::Plan(plan));
    let done = index.insert(seq, &ids(next..next + new), options).unwrap();
    index.check().unwrap();
    done.blocks
}

fn to_compute(index: &mut RadixIndex, seq: &TokenSequence, policy: &ReusePolicy) -> usize {
    let plan = planned(index, &mut seq.clone(), policy);
    let tokens = plan.num_tokens(Class::Compute);
    index.release(&plan).unwrap();
    tokens
}

/// An index with a conversation, and its next prompt, which lacks 40 tokens of it.
fn edited() -> (RadixIndex, TokenSequence) {
    let mut index = index();
    put(&mut index, &mut sequence(0..240), 0..60);
    let prompt = sequence((0..40).chain(80..240).chain(900..904));
    (index, prompt)
}

#[test]
fn a_stricter_policy_never_inherits_what_rotated_built() {
    let (mut index, mut prompt) = edited();
    let (rotated, strict) = (first(0), first(32));
    let (by_rotated, by_strict) = (4, 36);
    assert_eq!(to_compute(&mut index, &prompt, &rotated), by_rotated);
    assert_eq!(to_compute(&mut index, &prompt, &strict), by_strict);
    let plan = planned(&mut index, &mut prompt.clone(), &rotated);
    build(&mut index, &mut prompt, &plan, 100);
    // Somebody else's KV of the same prompt saves nothing.
    assert_eq!(to_compute(&mut index, &prompt, &rotated), 1);
    assert_eq!(to_compute(&mut index, &prompt, &strict), by_strict);
    // The stricter request replaces it, and the laxer one may use what it built.
    let mine = planned(&mut index, &mut prompt.clone(), &strict);
    let blocks = build(&mut index, &mut prompt, &mine, 200);
    assert!(blocks.iter().all(|id| id.0 >= 200), "{blocks:?}");
    assert_eq!(to_compute(&mut index, &prompt, &strict), BLOCK_SIZE);
    assert_eq!(to_compute(&mut index, &prompt, &rotated), 1);
    // The laxer request's blocks are duplicates of the stricter one's.
    let options = inserting(
        plan.blocks().len() * BLOCK_SIZE..prompt.len(),
        Source::Plan(&plan),
    );
    let again = ids(300..300 + u32::try_from(blocks.len()).unwrap());
    let done = index.insert(&mut prompt, &again, options).unwrap();
    assert_eq!((done.blocks, done.duplicates), (blocks, again));
}

#[test]
fn policies_that_are_each_stricter_in_one_field_share_nothing() {
    let (mut index, mut prompt) = edited();
    let kinds = ReusePolicy {
        forbid_kinds: vec!["reasoning".into()],
        ..approximate()
    };
    let fronts = first(8);
    let plan = planned(&mut index, &mut prompt.clone(), &kinds);
    build(&mut index, &mut prompt, &plan, 100);
    assert_eq!(to_compute(&mut index, &prompt, &kinds), 1);
    assert_eq!(to_compute(&mut index, &prompt, &fronts), 12);
    // Their meet is laxer than both.
    assert_eq!(to_compute(&mut index, &prompt, &first(0)), 1);
}

#[test]
fn a_plan_of_stricter_and_laxer_kv_claims_no_more_than_its_own_policy() {
    let hops = |count| ReusePolicy {
        max_hops: 2,
        ..first(count)
    };
    let mut index = index();
    put(&mut index, &mut sequence(0..240), 0..60);
    let mut theirs = sequence(2000..2240);
    put(&mut index, &mut theirs, 60..120);
    // The first prompt is built strictly, the second laxly, and of its source nothing is left.
    let mut strict = sequence((0..40).chain(80..240));
    let plan = planned(&mut index, &mut strict.clone(), &hops(32));
    build(&mut index, &mut strict, &plan, 200);
    let mut lax = sequence((2000..2040).chain(2080..2240));
    let plan = planned(&mut index, &mut lax.clone(), &hops(8));
    build(&mut index, &mut lax, &plan, 300);
    index.remove_spans(&theirs, &[(40, 240)], false).unwrap();
    // The third has both: the first in place, and the second moved.
    let mut both = sequence((0..40).chain(80..240).chain(2088..2240));
    let plan = planned(&mut index, &mut both.clone(), &hops(8));
    assert_eq!(plan.num_tokens(Class::Compute), 8 + 1);
    assert_eq!((plan.blocks().len(), plan.hops_of_block(60)), (50, 2));
    build(&mut index, &mut both, &plan, 400);
    let next = sequence((0..40).chain(80..240).chain(2088..2240).chain([1]));
    assert_eq!(to_compute(&mut index, &next, &hops(8)), 1);
    assert_eq!(to_compute(&mut index, &next, &hops(9)), 153);
}

#[test]
fn what_is_computed_after_approximate_kv_has_its_grade() {
    let (mut index, mut prompt) = edited();
    let plan = planned(&mut index, &mut prompt.clone(), &first(0));
    build(&mut index, &mut prompt, &plan, 100);
    let mut longer = sequence((0..40).chain(80..240).chain(900..920));
    let options = inserting(prompt.len()..longer.len(), Source::Computed);
    index.insert(&mut longer, &ids(200..204), options).unwrap();
    index.check().unwrap();
    let next = sequence((0..40).chain(80..240).chain(900..921));
    assert_eq!(to_compute(&mut index, &next, &first(0)), 1);
    assert_eq!(to_compute(&mut index, &next, &first(8)), 29);
}

#[test]
fn imported_kv_has_the_grade_that_is_said_or_the_laxest() {
    let tokens = sequence(0..64);
    let more = sequence(0..65);
    let laxest = ReusePolicy::LAXEST;
    for (policy, by_default, by_laxest) in [
        (None, 33, 1),
        (Some(approximate()), 1, 1),
        (Some(laxest.clone()), 33, 1),
        (Some(first(9)), 1, 1),
    ] {
        let mut index = index();
        let imported = Imported {
            policy: policy.map(Arc::new),
            ..Imported::new(32, 1)
        };
        let options = InsertOptions::new(64, Source::Imported(imported));
        index
            .insert(&mut tokens.clone(), &ids(0..16), options)
            .unwrap();
        assert_eq!(to_compute(&mut index, &more, &approximate()), by_default);
        assert_eq!(to_compute(&mut index, &more, &laxest), by_laxest);
        index.check().unwrap();
    }
}

#[test]
fn a_condemned_offer_does_not_get_an_entry_that_is_laxer() {
    let (mut index, mut prompt) = edited();
    let mine = planned(&mut index, &mut prompt.clone(), &first(32));
    let blocks = build(&mut index, &mut prompt, &mine, 100);
    // My blocks leave while my plan pins them, and a laxer request builds the same prompt.
    assert_eq!(index.discard(&blocks).unwrap(), []);
    let theirs = planned(&mut index, &mut prompt.clone(), &first(0));
    build(&mut index, &mut prompt, &theirs, 200);
    let options = inserting(
        mine.blocks().len() * BLOCK_SIZE..prompt.len(),
        Source::Plan(&mine),
    );
    let done = index.insert(&mut prompt, &blocks, options).unwrap();
    assert_eq!((done.blocks, done.surplus), (Vec::new(), Vec::new()));
}

#[test]
fn a_tenant_with_too_many_policies_loses_only_reuse() {
    let mut index = index();
    let policy = |first| {
        Some(Arc::new(ReusePolicy {
            recompute_first: first,
            ..approximate()
        }))
    };
    let offer = |index: &mut RadixIndex, at: usize| {
        let start = u32::try_from(at).unwrap() * 100;
        let mut seq = sequence(1_000 + start..1_000 + start + 4);
        let imported = Imported {
            policy: policy(at),
            ..Imported::new(0, 1)
        };
        let options = InsertOptions::new(4, Source::Imported(imported));
        let id = u32::try_from(at).unwrap();
        index.insert(&mut seq, &ids([id]), options).unwrap();
        index.check().unwrap();
        sequence(1_000 + start..1_000 + start + 5)
    };
    let prompts: Vec<TokenSequence> = (1..=127).map(|at| offer(&mut index, at)).collect();
    let crowded = offer(&mut index, 128);
    assert_eq!(to_compute(&mut index, &crowded, &approximate()), 5);
    assert_eq!(to_compute(&mut index, &crowded, &ReusePolicy::LAXEST), 1);
    for (at, prompt) in (1..).zip(&prompts) {
        assert_eq!(to_compute(&mut index, prompt, &first(at)), 1);
        assert_eq!(to_compute(&mut index, prompt, &first(at + 1)), 5);
    }
    // A grade without blocks gives its number away.
    index.discard(&ids([7, 128])).unwrap();
    let again = offer(&mut index, 128);
    assert_eq!(to_compute(&mut index, &again, &first(128)), 1);
    let restored =
        RadixIndex::restore(&index.snapshot(), kvtrie_core::RestoredPool::Kept(&[0; 16]));
    let mut restored = restored.unwrap();
    assert_eq!(restored.digest(), index.digest());
    assert_eq!(to_compute(&mut restored, &again, &first(128)), 1);
    assert_eq!(to_compute(&mut restored, &again, &first(129)), 5);
}

#[test]
fn blocks_in_place_are_pinned_whatever_their_grade() {
    let mut index = index();
    let mut seq = sequence(0..64);
    let options = InsertOptions::new(64, Source::Imported(Imported::new(0, 1)));
    index.insert(&mut seq, &ids(0..16), options).unwrap();
    assert_eq!(index.pin_in_place(&mut seq, true).blocks().len(), 16);
    let plan = index
        .plan(&mut seq, &approximate(), PlanOptions::default())
        .unwrap();
    assert_eq!(plan.blocks(), []);
}

#[test]
fn an_import_under_no_approximate_policy_is_refused() {
    let mut index = index();
    let imported = Imported {
        policy: Some(Arc::new(ReusePolicy::EXACT_ONLY)),
        ..Imported::new(0, 1)
    };
    let options = InsertOptions::new(4, Source::Imported(imported));
    let before = index.digest();
    let error = index.insert(&mut sequence(0..4), &ids([0]), options);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("approximate = false"), "{error}");
    assert_eq!(index.digest(), before);
}
