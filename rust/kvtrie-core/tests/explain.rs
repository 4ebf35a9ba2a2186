//! Tests every reason that `explain` gives, and what it shows with it.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Config, ErrorKind, ExplainOptions, Explanation, Imported, InsertOptions, Item,
    LookupOptions, Namespace, NamespaceDifference, RadixIndex, Reason, RestoredPool, ReusePolicy,
    Salt, Source, TokenSequence, WouldSave,
};

use common::{approximate, ids, imported, planned, span};

mod common;

/// The pool that `Config::seeded` names, which still exists.
const POOL: RestoredPool<'_> = RestoredPool::Kept(&[0; 16]);

fn namespace(model: &str, adapter: Option<&str>, salt: &str) -> Arc<Namespace> {
    let (adapter, salt) = (adapter.map(String::from), Salt::Tenant(salt.into()));
    Arc::new(Namespace::new(model, "bfloat16", "default", adapter, salt).unwrap())
}

fn sequence(tokens: &[u32]) -> TokenSequence {
    TokenSequence::new(namespace("m", None, "a"), tokens.to_vec(), Vec::new()).unwrap()
}

fn index(num_blocks: u64) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks,
        block_size: 4,
        seed: 7,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(0)
    })
    .unwrap()
}

/// Inserts all whole blocks, which were computed, with ids from `first` on.
fn insert(index: &mut RadixIndex, seq: &mut TokenSequence, first: u32) {
    insert_from(index, seq, first, Source::Computed);
}

fn insert_from(index: &mut RadixIndex, seq: &mut TokenSequence, first: u32, source: Source<'_>) {
    let count = u32::try_from(seq.len() / 4).unwrap();
    let options = InsertOptions::new(seq.len() / 4 * 4, source);
    let blocks = ids(first..first + count);
    index.insert(seq, &blocks, options).unwrap();
}

/// Explains twice, from fresh sequences, and checks that nothing was touched.
fn explain(index: &mut RadixIndex, seq: &mut TokenSequence) -> Explanation {
    let before = (index.digest(), index.stats().clock);
    let why = index.explain(seq, &ExplainOptions::default()).unwrap();
    let namespace = Arc::clone(seq.namespace());
    let tokens = seq.tokens().to_vec();
    let mut fresh = TokenSequence::new(namespace, tokens, seq.items().to_vec()).unwrap();
    let again = index.explain(&mut fresh, &ExplainOptions::default());
    assert_eq!(again.unwrap(), why);
    assert_eq!((index.digest(), index.stats().clock), before);
    let options = LookupOptions {
        touch: false,
        ..LookupOptions::default()
    };
    let found = index.lookup(seq, options, &mut Vec::new()).unwrap();
    assert_eq!(found.num_tokens, why.num_exact);
    index.check().unwrap();
    why
}

fn counted(exact: usize, approximate: usize, compute: usize) -> WouldSave {
    WouldSave {
        exact,
        approximate,
        compute,
        out_of_scope: 0,
    }
}

#[test]
fn complete_names_no_reason_for_tokens_after_the_last_whole_block() {
    let mut index = index(16);
    let tokens: Vec<u32> = (10..20).collect();
    let mut seq = sequence(&tokens);
    insert(&mut index, &mut seq, 0);
    let why = explain(&mut index, &mut seq);
    assert_eq!(
        (why.reason, why.position, why.num_exact),
        (Reason::Complete, 8, 8)
    );
    assert_eq!(why.would_save, counted(8, 0, 2));
    assert_eq!(
        why.to_string(),
        "8 of 10 tokens match exactly (2 whole blocks of 4). Every whole block is cached. A plan would take 8 tokens exactly and 0 \
         approximately, and leave 2 to compute."
    );
    for len in 0..4 {
        let mut short = sequence(&tokens[..len]);
        let why = explain(&mut index, &mut short);
        assert_eq!((why.reason, why.position), (Reason::Complete, 0));
    }
}

#[test]
fn diverged_is_exact_to_the_token_in_and_after_an_edge() {
    let mut index = index(16);
    let tokens: Vec<u32> = (10..26).collect();
    let mut seq = sequence(&tokens);
    insert(&mut index, &mut seq, 0);
    for at in 0..16 {
        let mut other = tokens.clone();
        other[at] = 99;
        let mut other = sequence(&other);
        let why = explain(&mut index, &mut other);
        assert_eq!((why.reason, why.position), (Reason::Diverged, at));
        assert_eq!(why.num_exact, at / 4 * 4);
        let (start, end) = (at.saturating_sub(8), (at + 8).min(16));
        assert_eq!(why.context.start, start);
        assert_eq!(why.context.theirs, tokens[start..end]);
        assert_eq!(why.context.ours, other.tokens()[start..end]);
    }
    // There are two branches. The one that shares more is shown, whatever its token order.
    for (token, first) in [(50, 8), (5, 12)] {
        let mut branch = tokens[..8].to_vec();
        branch.extend([18, 19, token, token]);
        insert(&mut index, &mut sequence(&branch), first);
    }
    let mut near = sequence(&[&tokens[..8], &[18, 19, 5, 6]].concat());
    let why = explain(&mut index, &mut near);
    assert_eq!((why.reason, why.position), (Reason::Diverged, 11));
    assert_eq!(why.context.theirs[8..], [5]);
    assert!(why.to_string().contains(
        "At position 11 other tokens are cached: [5] where the prompt has [6], both after [13, 14, 15, 16, 17, 18, 19, 5]."
    ));
}

#[test]
fn context_is_as_long_as_asked_for() {
    let mut index = index(16);
    let tokens: Vec<u32> = (10..26).collect();
    insert(&mut index, &mut sequence(&tokens), 0);
    let mut other = tokens.clone();
    other[9] = 99;
    for context in [0, 1, 3, usize::MAX] {
        let options = ExplainOptions {
            context,
            ..ExplainOptions::default()
        };
        let why = index.explain(&mut sequence(&other), &options).unwrap();
        let start = 9_usize.saturating_sub(context);
        let end = 9_usize.saturating_add(context).min(16);
        assert_eq!(why.context.start, start);
        assert_eq!(why.context.ours, other[start..end]);
        assert_eq!(why.context.theirs, tokens[start..end]);
    }
}

#[test]
fn not_cached_where_the_cache_ends_or_knows_nothing() {
    let mut index = index(16);
    let tokens: Vec<u32> = (10..26).collect();
    let mut seq = sequence(&tokens);
    assert_eq!(explain(&mut index, &mut seq).reason, Reason::NotCached);
    insert(&mut index, &mut sequence(&tokens[..8]), 0);
    let why = explain(&mut index, &mut seq);
    assert_eq!((why.reason, why.position), (Reason::NotCached, 8));
    assert_eq!(why.context.theirs, tokens[..8]);
    assert_eq!(why.context.ours, tokens);
    assert!(
        why.to_string()
            .contains("The cache ends at position 8, after [10, 11")
    );
    // The departures of a dropped namespace are forgotten.
    index.drop_namespace(seq.namespace());
    assert_eq!(explain(&mut index, &mut seq).reason, Reason::NotCached);
}

#[test]
fn evicted_is_known_at_every_depth() {
    for n in 1..=4 {
        let mut index = index(16);
        let tokens: Vec<u32> = (10..26).collect();
        let mut seq = sequence(&tokens);
        insert(&mut index, &mut seq, 0);
        index.evict(n);
        let why = explain(&mut index, &mut seq);
        assert_eq!(
            (why.reason, why.position),
            (Reason::Evicted, 16 - 4 * n),
            "{n}"
        );
        // The other blocks are evicted as well, one by one.
        for n in n + 1..=4 {
            index.evict(1);
            let why = explain(&mut index, &mut seq);
            assert_eq!((why.reason, why.position), (Reason::Evicted, 16 - 4 * n));
        }
        // A prompt that differs in the evicted block was never cached.
        let mut other = tokens.clone();
        other[3] = 99;
        assert_eq!(
            explain(&mut index, &mut sequence(&other)).reason,
            Reason::NotCached
        );
    }
}

#[test]
fn evicted_is_reported_for_the_same_prefix_only() {
    let mut index = index(32);
    let tail = [1, 2, 3, 4, 5, 6, 7, 8];
    let mut old = sequence(&[&[9, 9, 9, 9], &tail[..]].concat());
    insert(&mut index, &mut old, 0);
    let mut new = sequence(&[&[8, 8, 8, 8], &tail[..]].concat());
    insert(&mut index, &mut sequence(&new.tokens()[..4]), 10);
    index.evict(2);
    assert_eq!(explain(&mut index, &mut old).reason, Reason::Evicted);
    // The same tokens at the same position after other tokens are not evicted ones.
    assert_eq!(explain(&mut index, &mut new).reason, Reason::NotCached);
    // Another namespace has the first evicted block.
    index.evict(1);
    assert_eq!(explain(&mut index, &mut old).reason, Reason::Evicted);
    let other = namespace("m", None, "b");
    let mut foreign = TokenSequence::new(other, old.tokens().to_vec(), Vec::new()).unwrap();
    assert_eq!(explain(&mut index, &mut foreign).reason, Reason::NotCached);
}

#[test]
fn holes_are_evicted_whatever_is_next_to_them() {
    let mut index = index(16);
    let tokens: Vec<u32> = (10..30).collect();
    let mut seq = sequence(&tokens);
    insert(&mut index, &mut seq, 0);
    index.discard(&[BlockId(1)]).unwrap();
    let why = explain(&mut index, &mut seq);
    assert_eq!((why.reason, why.position), (Reason::Evicted, 4));
    // Under its own prefix, KV after the hole is exact.
    assert_eq!(why.would_save, counted(15, 0, 5));
    let mut branch = tokens[..4].to_vec();
    branch.extend([7; 8]);
    insert(&mut index, &mut sequence(&branch), 10);
    assert_eq!(explain(&mut index, &mut seq).reason, Reason::Evicted);
}

#[test]
fn kv_that_a_laxer_policy_built_is_named_with_the_fields() {
    let mut index = index(16);
    let mut seq = sequence(&(10..26).collect::<Vec<u32>>());
    let unknown = Source::Imported(Imported::new(8, 1));
    insert_from(&mut index, &mut seq, 0, unknown);
    let asks = |policy| ExplainOptions {
        policy,
        ..ExplainOptions::default()
    };
    let strict = ReusePolicy {
        max_hops: 1,
        recompute_first: 4,
        forbid_kinds: vec!["reasoning".into()],
        ..ReusePolicy::LAXEST
    };
    let why = index.explain(&mut seq, &asks(strict)).unwrap();
    assert_eq!((why.reason, why.position), (Reason::LaxerPolicy, 8));
    let fields = "laxer in max_hops, recompute_first and forbid_kinds.";
    assert!(why.to_string().contains(fields), "{why}");
    assert_eq!(why.would_save, counted(8, 0, 8));
    for policy in [ReusePolicy::LAXEST, ReusePolicy::EXACT_ONLY] {
        let why = index.explain(&mut seq, &asks(policy)).unwrap();
        assert_eq!(why.reason, Reason::ApproximateOnly);
    }
}

#[test]
fn approximate_only_where_the_same_tokens_are_approximate() {
    let mut index = index(16);
    let tokens: Vec<u32> = (10..26).collect();
    let mut seq = sequence(&tokens);
    insert_from(&mut index, &mut seq, 0, imported(8, 1));
    let why = explain(&mut index, &mut seq);
    assert_eq!((why.reason, why.position), (Reason::ApproximateOnly, 8));
    assert_eq!(why.would_save, counted(8, 7, 1));
    assert!(
        why.to_string()
            .contains("the same tokens are cached, [18, 19")
    );
    let options = ExplainOptions {
        policy: ReusePolicy::EXACT_ONLY,
        keep_last: 0,
        ..ExplainOptions::default()
    };
    let why = index.explain(&mut seq, &options).unwrap();
    assert_eq!(why.would_save, counted(8, 0, 8));
}

#[test]
fn another_namespace_of_the_salt_is_named_and_no_other() {
    let mut index = index(32);
    let tokens: Vec<u32> = (10..26).collect();
    let of = |model, adapter, salt, len: usize| {
        let namespace = namespace(model, adapter, salt);
        TokenSequence::new(namespace, tokens[..len].to_vec(), Vec::new()).unwrap()
    };
    insert(&mut index, &mut of("m", None, "b", 16), 0);
    let mut seq = of("m", None, "a", 16);
    let why = explain(&mut index, &mut seq);
    assert_eq!((why.reason, why.other_namespace), (Reason::NotCached, None));
    insert(&mut index, &mut of("n", Some("x"), "a", 12), 4);
    insert(&mut index, &mut of("n", None, "a", 12), 8);
    insert(&mut index, &mut of("m", Some("y"), "a", 8), 12);
    let why = explain(&mut index, &mut seq);
    assert_eq!((why.reason, why.position), (Reason::OtherNamespace, 0));
    let expected = NamespaceDifference {
        fields: vec!["model"],
        num_tokens: 12,
    };
    assert_eq!(why.other_namespace, Some(expected));
    assert!(
        why.to_string()
            .contains("Where model differs, 12 tokens match.")
    );
    // That is no reason where this namespace has as many blocks.
    insert(&mut index, &mut of("m", None, "a", 12), 16);
    let why = explain(&mut index, &mut seq);
    assert_eq!((why.reason, why.other_namespace), (Reason::NotCached, None));
    // An eviction takes precedence as the reason.
    insert(&mut index, &mut of("n", Some("x"), "a", 16), 4);
}

#[test]
fn kinds_of_both_sides_of_the_position_are_named() {
    let mut index = index(16);
    let tokens: Vec<u32> = (10..26).collect();
    let mut seq = sequence(&tokens);
    insert(&mut index, &mut seq, 0);
    let spans = [
        span(2, 6, "user"),
        span(5, 9, "mine"),
        span(6, 16, "reasoning"),
    ];
    index.tag(&seq, &spans).unwrap();
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    for (at, before, here) in [
        (0, vec![], vec![]),
        (2, vec![], vec!["user"]),
        (6, vec!["user", "mine"], vec!["reasoning", "mine"]),
        (9, vec!["reasoning", "mine"], vec!["reasoning"]),
    ] {
        let mut other = tokens.clone();
        other[at] = 99;
        let why = explain(&mut index, &mut sequence(&other));
        assert_eq!(
            (why.kinds_before, why.kinds),
            (names(&before), names(&here)),
            "{at}"
        );
    }
    let longer: Vec<u32> = (10..40).collect();
    let why = explain(&mut index, &mut sequence(&longer));
    assert_eq!(
        (why.kinds_before, why.kinds),
        (vec!["reasoning".into()], vec![])
    );
}

#[test]
fn items_are_distinguished() {
    let mut index = index(16);
    let with = |digest: &[u8]| {
        let items = vec![Item::new(2, 7, digest).unwrap()];
        TokenSequence::new(namespace("m", None, "a"), vec![5; 12], items).unwrap()
    };
    insert(&mut index, &mut with(b"cat"), 0);
    let why = explain(&mut index, &mut with(b"dog"));
    assert_eq!((why.reason, why.position), (Reason::Diverged, 2));
    index.evict(3);
    assert_eq!(
        explain(&mut index, &mut with(b"cat")).reason,
        Reason::Evicted
    );
    assert_eq!(
        explain(&mut index, &mut with(b"dog")).reason,
        Reason::NotCached
    );
}

#[test]
fn a_plan_finds_what_explain_says_that_it_would() {
    let mut index = index(64);
    let tokens: Vec<u32> = (10..74).collect();
    insert(&mut index, &mut sequence(&tokens), 0);
    let mut edited = tokens[..20].to_vec();
    edited.extend([1, 2, 3]);
    edited.extend_from_slice(&tokens[22..]);
    let mut edited = sequence(&edited);
    let policy = approximate();
    let options = ExplainOptions {
        policy: policy.clone(),
        ..ExplainOptions::default()
    };
    let why = index.explain(&mut edited, &options).unwrap();
    assert_eq!((why.reason, why.position), (Reason::Diverged, 20));
    assert_eq!(why.would_save, counted(20, 41, 4));
    let plan = planned(&mut index, &mut edited, &policy);
    assert_eq!(plan.num_tokens(kvtrie_core::Class::Approximate), 41);
}

#[test]
fn a_policy_beyond_its_limits_is_refused() {
    let mut index = index(16);
    let options = ExplainOptions {
        policy: ReusePolicy {
            min_run: Some(7),
            ..ExplainOptions::default().policy
        },
        ..ExplainOptions::default()
    };
    let error = index.explain(&mut sequence(&[1]), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(
        error.to_string().starts_with("RadixIndex::explain: "),
        "{error}"
    );
}

#[test]
fn departures_beyond_the_record_are_forgotten_oldest_first() {
    let mut index = index(8192);
    let all: Vec<[u32; 4]> = (0..4100).map(|n| [n, n, n, n]).collect();
    for (id, tokens) in (0..).zip(&all) {
        insert(&mut index, &mut sequence(tokens), id);
    }
    index.evict(4100);
    let reason = |index: &mut RadixIndex, n: usize| explain(index, &mut sequence(&all[n])).reason;
    assert_eq!(reason(&mut index, 3), Reason::NotCached);
    assert_eq!(reason(&mut index, 4), Reason::Evicted);
    assert_eq!(reason(&mut index, 4099), Reason::Evicted);
    let mut restored = RadixIndex::restore(&index.snapshot(), POOL).unwrap();
    assert_eq!(reason(&mut restored, 3), Reason::NotCached);
    assert_eq!(reason(&mut restored, 4), Reason::Evicted);
}

#[test]
fn a_restored_index_knows_what_left() {
    let mut index = index(32);
    let tokens: Vec<u32> = (10..26).collect();
    let mut seq = sequence(&tokens);
    insert(&mut index, &mut seq, 0);
    let mut branch = tokens[..8].to_vec();
    branch.extend([7; 8]);
    let mut branch = sequence(&branch);
    insert(&mut index, &mut branch, 10);
    insert(&mut index, &mut seq, 0);
    index.evict(2);
    for index in [
        &mut RadixIndex::restore(&index.snapshot(), POOL).unwrap(),
        &mut index,
    ] {
        let why = explain(index, &mut branch);
        assert_eq!((why.reason, why.position), (Reason::Evicted, 8));
        assert_eq!(explain(index, &mut seq).reason, Reason::Complete);
    }
}

#[test]
fn namespaces_that_hold_something_are_listed_in_order() {
    let mut index = index(16);
    let names = [("n", "b"), ("m", "b"), ("m", "a")];
    for (id, (model, salt)) in (0..).zip(names) {
        let space = namespace(model, None, salt);
        let mut seq = TokenSequence::new(space, vec![1, 2, 3, 4], Vec::new()).unwrap();
        insert(&mut index, &mut seq, id);
    }
    let all =
        [("m", "a"), ("m", "b"), ("n", "b")].map(|(model, salt)| namespace(model, None, salt));
    assert_eq!(index.namespaces(), all);
    index.drop_namespace(&all[1]);
    assert_eq!(
        index.namespaces(),
        [Arc::clone(&all[0]), Arc::clone(&all[2])]
    );
}

#[test]
fn many_blocks_that_leave_together_do_not_hide_what_left_before() {
    let mut index = index(6_000);
    let mut first = sequence(&[7; 4]);
    insert(&mut index, &mut first, 0);
    assert_eq!(index.evict(1), [BlockId(0)]);
    let tokens: Vec<u32> = (0..20_000).collect();
    insert(&mut index, &mut sequence(&tokens), 0);
    insert(&mut index, &mut sequence(&[9; 4]), 5_000);
    assert_eq!(index.evict(5_000).len(), 5_000);
    assert_eq!(explain(&mut index, &mut first).reason, Reason::Evicted);
    let mut second = sequence(&tokens);
    assert_eq!(explain(&mut index, &mut second).reason, Reason::Evicted);
}

#[test]
fn kinds_before_are_found_where_the_prompt_leaves_between_two_edges() {
    let mut index = index(16);
    let text = |last: u32| -> Vec<u32> { (10..18).chain([last; 4]).collect() };
    let mut seq = sequence(&text(50));
    insert(&mut index, &mut seq, 0);
    let mut other = sequence(&text(60));
    common::put(&mut index, &mut other, [0, 1, 9]);
    let span = span(7, 8, "tool");
    index.tag(&seq, &[span]).unwrap();
    let why = explain(&mut index, &mut sequence(&text(70)));
    assert_eq!((why.reason, why.position), (Reason::Diverged, 8));
    assert_eq!(
        (why.kinds, why.kinds_before),
        (vec![], vec!["tool".to_owned()])
    );
}
