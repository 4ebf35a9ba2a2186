//! Tests what calls refuse, one step on either side of each limit, and that a refused call changes nothing (D1, D4,
//! D16).

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use std::sync::Arc;

use kvtrie_core::{
    BlockAllocator, Config, Effort, Error, ErrorKind, InsertOptions, Item, LookupOptions,
    Namespace, PlanOptions, RadixIndex, RestoreLimits, RestoredPool, ReusePolicy, Salt, Source,
    TokenSequence,
};

use common::{approximate, ids, imported, inserting, put, span};

mod common;

type Change<'a> = &'a dyn Fn(&mut Config);

fn config() -> Config {
    Config {
        num_blocks: 8,
        block_size: 2,
        ..Config::seeded(0)
    }
}

fn sequence(len: u32) -> TokenSequence {
    common::sequence(0..len)
}

/// The tokens 0 to 6 in the blocks 0 to 2.
fn filled() -> RadixIndex {
    let mut index = RadixIndex::new(config()).unwrap();
    put(&mut index, &mut sequence(6), 0..3);
    index
}

fn assert_refused(error: &Error, words: &str) {
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains(words), "{error}: not {words:?}");
}

#[test]
fn limits_of_an_index() {
    let of = |change: Change<'_>| {
        let mut config = config();
        change(&mut config);
        let made = RadixIndex::new(config.clone());
        if let Ok(index) = &made {
            assert_eq!(*index.config(), config);
        }
        made
    };
    let max = Config::MAX_BLOCK_SIZE;
    let good: [Change<'_>; 11] = [
        &|config| config.num_blocks = 1,
        &|config| config.num_blocks = 1 << 31,
        &|config| config.block_size = 1,
        &|config| config.block_size = max,
        &|config| config.hash_bits = 0,
        &|config| config.hash_bits = 64,
        &|config| config.min_run = Config::MIN_RUN,
        &|config| config.max_candidates = 1,
        &|config| config.moved_runs = true,
        &|config| config.pool_id = vec![7],
        &|config| config.pool_id = vec![7; Config::MAX_POOL_ID],
    ];
    for change in good {
        of(change).unwrap();
    }
    let bad: [(Change<'_>, &str); 9] = [
        (&|config| config.num_blocks = 0, "num_blocks is 0"),
        (
            &|config| config.num_blocks = (1 << 31) + 1,
            "[1, 2147483648]",
        ),
        (&|config| config.block_size = 0, "block_size is 0"),
        (&|config| config.block_size = max + 1, "[1, 4096]"),
        (&|config| config.hash_bits = 65, "hash_bits is 65"),
        (
            &|config| config.min_run = Config::MIN_RUN - 1,
            "min_run is 7",
        ),
        (&|config| config.max_candidates = 0, "max_candidates is 0"),
        (&|config| config.pool_id = vec![], "pool_id has 0 bytes"),
        (
            &|config| config.pool_id = vec![7; Config::MAX_POOL_ID + 1],
            "pool_id has 65 bytes",
        ),
    ];
    for (change, words) in bad {
        assert_refused(&of(change).unwrap_err(), words);
    }
}

#[test]
fn limits_of_an_insert() {
    let with = |num_computed, start, source| inserting(start..num_computed, source);
    let most = ReusePolicy::MAX_HOPS;
    for (options, ids) in [
        (with(8, 0, Source::Computed), ids([0, 1, 2, 3])),
        (with(9, 0, Source::Computed), ids([0, 1, 2, 3])),
        (with(8, 6, Source::Computed), ids([3])),
        (with(9, 8, Source::Computed), ids([])),
        (with(2, 6, Source::Computed), ids([])),
        (with(8, 6, imported(0, most)), ids([7])),
    ] {
        let mut index = filled();
        index.insert(&mut sequence(9), &ids, options).unwrap();
        index.check().unwrap();
    }
    for (options, ids, words) in [
        (
            with(10, 0, Source::Computed),
            ids([0, 1, 2, 3, 4]),
            "num_computed is 10; it must be in [0, 9]",
        ),
        (with(8, 7, Source::Computed), ids([3]), "start is 7"),
        (with(8, 10, Source::Computed), ids([]), "start is 10"),
        (
            with(8, 0, Source::Computed),
            ids([0, 1, 2]),
            "ids has 3 ids; it must have 4",
        ),
        (
            with(8, 6, Source::Computed),
            ids([]),
            "ids has 0 ids; it must have 1",
        ),
        (
            with(8, 6, Source::Computed),
            ids([8]),
            "ids holds 8; it must be in [0, 8)",
        ),
        (
            with(8, 6, imported(0, most + 1)),
            ids([7]),
            "the hops of source are 256; they must be in [0, 255]",
        ),
    ] {
        let mut index = filled();
        let before = index.digest();
        let error = index.insert(&mut sequence(9), &ids, options).unwrap_err();
        assert_refused(&error, words);
        assert_eq!(index.digest(), before);
    }
}

#[test]
fn ids_that_back_other_tokens_or_come_twice() {
    let other = |mut seq: TokenSequence| {
        seq.truncate(0).unwrap();
        seq.extend(&[9, 9, 9, 9], Vec::new()).unwrap();
        seq
    };
    for offered in [ids([2, 3]), ids([3, 2]), ids([3, 3])] {
        let mut index = filled();
        let before = index.digest();
        let seq = &mut other(sequence(0));
        let options = InsertOptions::new(4, Source::Computed);
        let error = index.insert(seq, &offered, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BlockInUse, "{offered:?}");
        assert_eq!(index.digest(), before);
    }
}

#[test]
fn an_id_that_is_refused_is_named_with_both_its_places() {
    let mut index = filled();
    // Block 1 is offered for the place where it is cached, block 0 is not.
    let options = inserting(2..6, Source::Computed);
    let seq = &mut sequence(6);
    let error = index.insert(seq, &ids([1, 0]), options).unwrap_err();
    let words = "ids has 0, which is offered for the tokens from 4 on, but backs others at 0";
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn limits_of_a_lookup() {
    let mut index = filled();
    let before = index.digest();
    let mut out = Vec::new();
    let from = |start| LookupOptions {
        start,
        touch: false,
        ..LookupOptions::default()
    };
    for (start, num_ids) in [(0, 3), (2, 2), (6, 0), (8, 0)] {
        out.clear();
        let seq = &mut sequence(9);
        let found = index.lookup(seq, from(start), &mut out).unwrap();
        assert_eq!((found.num_tokens, out.len()), (6, num_ids));
    }
    for (start, words) in [(1, "start is 1"), (9, "start is 9"), (10, "start is 10")] {
        out.clear();
        let seq = &mut sequence(9);
        let error = index.lookup(seq, from(start), &mut out).unwrap_err();
        assert_refused(&error, words);
        assert!(out.is_empty());
    }
    assert_eq!(index.digest(), before);
}

#[test]
fn limits_of_spans_and_ids() {
    let mut index = filled();
    let span = |start, end| span(start, end, "user");
    let seq = &mut sequence(6);
    index.tag(seq, &[span(0, 6), span(3, 3)]).unwrap();
    index.mark_dead(seq, &[(2, 4)]).unwrap();
    let before = index.digest();
    for bad in [span(0, 7), span(4, 3)] {
        assert_eq!(
            index
                .tag(seq, std::slice::from_ref(&bad))
                .unwrap_err()
                .kind(),
            ErrorKind::InvalidArgument
        );
        let options = InsertOptions {
            spans: std::slice::from_ref(&bad),
            ..InsertOptions::new(6, Source::Computed)
        };
        let error = index.insert(seq, &ids([0, 1, 2]), options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    assert_refused(
        &index.discard(&ids([0, 8])).unwrap_err(),
        "ids holds 8; it must be in [0, 8)",
    );
    assert_eq!(index.digest(), before);
    assert_eq!(index.tags(seq), [span(0, 6)]);
    assert_eq!(index.discard(&ids([0, 7])).unwrap(), ids([0]));
}

#[test]
fn limits_of_a_policy() {
    let mut index = RadixIndex::new(config()).unwrap();
    let min_run = index.config().min_run;
    let mut of = |change: &dyn Fn(&mut ReusePolicy)| {
        let mut policy = approximate();
        change(&mut policy);
        index.plan(&mut sequence(4), &policy, PlanOptions::default())
    };
    let good: [&dyn Fn(&mut ReusePolicy); 11] = [
        &|policy| policy.recompute_share = 0.0,
        &|policy| policy.recompute_share = 1.0,
        &|policy| policy.min_run = Some(min_run),
        &|policy| policy.max_hops = 0,
        &|policy| policy.max_hops = ReusePolicy::MAX_HOPS,
        &|policy| policy.max_approximate_share = 0.0,
        &|policy| policy.max_approximate_share = 1.0,
        &|policy| policy.max_cuts = Some(0),
        &|policy| policy.max_cuts = Some(ReusePolicy::MAX_CUTS),
        &|policy| policy.max_lost_context = 0.0,
        &|policy| policy.max_new_context = 0.0,
    ];
    for change in good {
        of(change).unwrap();
    }
    let bad: [&dyn Fn(&mut ReusePolicy); 12] = [
        &|policy| policy.recompute_share = 1.1,
        &|policy| policy.recompute_share = f64::NAN,
        &|policy| policy.min_run = Some(min_run - 1),
        &|policy| policy.max_hops = ReusePolicy::MAX_HOPS + 1,
        &|policy| policy.max_approximate_share = -0.1,
        &|policy| policy.max_approximate_share = 1.1,
        &|policy| policy.max_approximate_share = f64::NAN,
        &|policy| policy.max_lost_context = -0.1,
        &|policy| policy.max_lost_context = f64::NAN,
        &|policy| policy.max_new_context = 1.1,
        &|policy| policy.max_new_context = f64::NAN,
        &|policy| policy.forbid_kinds = vec![String::new()],
    ];
    for change in bad {
        assert_refused(&of(change).unwrap_err(), "RadixIndex::plan");
    }
    let error = of(&|policy| policy.max_new_context = 1.5).unwrap_err();
    let wanted = "the policy's max_new_context is 1.5; it must be in [0, 1]";
    assert!(error.to_string().contains(wanted), "{error}");
}

fn assert_named<const N: usize>(errors: [(&str, Option<Error>); N]) {
    for (call, error) in errors {
        assert_eq!(error.as_ref().map(Error::call), Some(call));
        let text = error.unwrap().to_string();
        // Once, and no other.
        assert!(text.starts_with(&format!("{call}: ")), "{text}");
        assert_eq!(text.matches("::").count(), 1, "{text}");
    }
}

#[test]
fn an_error_of_a_constructor_names_it() {
    let no_config = Config {
        num_blocks: 0,
        ..config()
    };
    let namespace = Arc::clone(sequence(0).namespace());
    let item = Item::new(0, 2, b"d").unwrap();
    assert_named([
        ("BlockAllocator::new", BlockAllocator::new(0).err()),
        ("RadixIndex::new", RadixIndex::new(no_config).err()),
        (
            "Namespace::new",
            Namespace::new("", "", "", None, Salt::Shared).err(),
        ),
        ("Item::new", Item::new(1, 1, b"d").err()),
        (
            "TokenSequence::new",
            TokenSequence::new(namespace, vec![1], vec![item]).err(),
        ),
    ]);
}

#[test]
fn an_error_names_the_call_that_was_made() {
    let mut index = filled();
    let (seq, any) = (&mut sequence(6), Effort::ANY);
    let (outside, ranges) = (ids([8]), [(4, 2)]);
    let span = span(0, 7, "user");
    let spans = std::slice::from_ref(&span);
    let lookup = LookupOptions {
        start: 1,
        ..LookupOptions::default()
    };
    let insert = InsertOptions::new(7, Source::Computed);
    let policy = ReusePolicy {
        max_hops: ReusePolicy::MAX_HOPS + 1,
        ..ReusePolicy::EXACT_ONLY
    };
    let options = PlanOptions::default();
    let released = index.plan(seq, &ReusePolicy::EXACT_ONLY, options).unwrap();
    index.release(&released).unwrap();
    let path = sequence(6);
    let (pool, limits) = (RestoredPool::Kept(b"p"), RestoreLimits::default());
    let mut out = Vec::new();
    let errors = [
        ("RadixIndex::insert", index.insert(seq, &[], insert).err()),
        (
            "RadixIndex::lookup",
            index.lookup(seq, lookup, &mut out).err(),
        ),
        (
            "RadixIndex::lookup_within",
            index.lookup_within(seq, lookup, any, &mut out).err(),
        ),
        (
            "RadixIndex::lookup_ranges_within",
            index
                .lookup_ranges_within(seq, lookup, any, &mut Vec::new())
                .err(),
        ),
        (
            "RadixIndex::lookup_pinned_within",
            index
                .lookup_pinned_within(seq, lookup, any, &mut Vec::new())
                .err(),
        ),
        ("RadixIndex::plan", index.plan(seq, &policy, options).err()),
        (
            "RadixIndex::plan_from",
            index.plan_from(seq, &path, &policy, options).err(),
        ),
        (
            "RadixIndex::plan_within",
            index.plan_within(seq, &policy, options, any).err(),
        ),
        (
            "RadixIndex::recompute",
            index.recompute(&released, &[]).err(),
        ),
        ("RadixIndex::release", index.release(&released).err()),
        (
            "RadixIndex::release_sources",
            index.release_sources(&released).err(),
        ),
        ("RadixIndex::validate", filled().validate(&released).err()),
        ("RadixIndex::discard", index.discard(&outside).err()),
        (
            "RadixIndex::discard_within",
            index.discard_within(&outside, any).err(),
        ),
        ("RadixIndex::quarantine", index.quarantine(&outside).err()),
        ("RadixIndex::mark_dead", index.mark_dead(seq, &ranges).err()),
        (
            "RadixIndex::mark_dead_within",
            index.mark_dead_within(seq, &ranges, any).err(),
        ),
        (
            "RadixIndex::remove_spans",
            index.remove_spans(seq, &ranges, false).err(),
        ),
        (
            "RadixIndex::remove_spans_within",
            index.remove_spans_within(seq, &ranges, false, any).err(),
        ),
        ("RadixIndex::tag", index.tag(seq, spans).err()),
        (
            "RadixIndex::tag_within",
            index.tag_within(seq, spans, any).err(),
        ),
        ("RadixIndex::restore", RadixIndex::restore(b"", pool).err()),
        (
            "RadixIndex::restore_within",
            RadixIndex::restore_within(b"", pool, limits).err(),
        ),
        (
            "RadixIndex::pool_of_snapshot",
            RadixIndex::pool_of_snapshot(b"").err(),
        ),
        ("ReusePlan::moves", released.moves(&[], 1, 0).err()),
        ("TokenSequence::truncate", seq.truncate(7).err()),
    ];
    assert_named(errors);
}
