//! Tests P18: which cached blocks moved runs may come from, and which tokens they may supply.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{
    BlockId, Class, Config, ErrorKind, ExplainOptions, InsertOptions, PlanOptions, RadixIndex,
    RestoredPool, ReusePlan, ReusePolicy, Scope, SessionId, Source, TokenSequence,
};

use common::{approximate, ids, moved, sequence, span};

mod common;

const SIZE: usize = 4;
const NEW: u32 = 7000;

fn index() -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks: 200,
        block_size: SIZE,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(7)
    })
    .unwrap()
}

#[expect(clippy::unnecessary_wraps, reason = "options take it like this")]
fn session(id: &str) -> Option<SessionId> {
    Some(SessionId::new(id).unwrap())
}

/// Inserts all whole blocks with ids from `first` on, for a session.
fn insert(
    index: &mut RadixIndex,
    tokens: impl IntoIterator<Item = u32>,
    first: u32,
    session: Option<SessionId>,
) -> TokenSequence {
    let mut seq = sequence(tokens);
    let count = u32::try_from(seq.len() / SIZE).unwrap();
    let options = InsertOptions {
        session,
        ..InsertOptions::new(seq.len() / SIZE * SIZE, Source::Computed)
    };
    index
        .insert(&mut seq, &ids(first..first + count), options)
        .unwrap();
    seq
}

/// The default scope, with one block that paths must share.
fn conversation(shared_prefix: usize) -> ReusePolicy {
    ReusePolicy {
        approximate: true,
        shared_prefix,
        ..ReusePolicy::EXACT_ONLY
    }
}

fn plan(
    index: &mut RadixIndex,
    tokens: impl IntoIterator<Item = u32>,
    policy: &ReusePolicy,
    session: Option<SessionId>,
    moved_end: Option<usize>,
) -> ReusePlan {
    let options = PlanOptions {
        session,
        moved_end,
        ..PlanOptions::default()
    };
    index.plan(&mut sequence(tokens), policy, options).unwrap()
}

/// A prompt with another head: what is cached from position 0 comes at position 4.
fn edited(tokens: impl IntoIterator<Item = u32>) -> impl Iterator<Item = u32> {
    (NEW..NEW + 4).chain(tokens).chain([NEW + 4])
}

#[test]
fn moved_runs_come_from_the_session_of_the_plan_alone() {
    let mut index = index();
    insert(&mut index, 0..40, 0, session("mine"));
    insert(&mut index, 100..140, 10, session("other"));
    insert(&mut index, 200..240, 20, None);
    let prompt = || edited((0..40).chain(100..140).chain(200..240));
    let policy = conversation(16);
    for (id, found) in [
        (session("mine"), vec![(4, 44, 0)]),
        (session("other"), vec![(44, 84, 0)]),
        (session("of no block"), vec![]),
        (None, vec![]),
    ] {
        let plan = plan(&mut index, prompt(), &policy, id, None);
        assert_eq!(moved(&plan), found);
        index.release(&plan).unwrap();
    }
    let plan = plan(&mut index, prompt(), &approximate(), None, None);
    assert_eq!(moved(&plan), [(4, 44, 0), (44, 84, 0), (84, 124, 0)]);
}

/// Whether each moved run of a plan is of the same conversation.
fn same(plan: &ReusePlan) -> Vec<bool> {
    let runs = plan.moved_runs().iter();
    runs.map(|run| run.same_conversation).collect()
}

/// Runs from the whole namespace.
fn wide(shared_prefix: usize) -> ReusePolicy {
    ReusePolicy {
        scope: Scope::Namespace,
        ..conversation(shared_prefix)
    }
}

#[test]
fn a_run_says_whether_its_blocks_belong_to_the_session_of_the_plan() {
    let mut index = index();
    insert(&mut index, 0..40, 0, session("mine"));
    insert(&mut index, 100..140, 10, session("other"));
    insert(&mut index, 200..240, 20, None);
    let prompt = || edited((0..40).chain(100..140).chain(200..240));
    for (id, found) in [
        (session("mine"), [true, false, false]),
        (session("other"), [false, true, false]),
        (session("of no block"), [false; 3]),
        (None, [false; 3]),
    ] {
        let plan = plan(&mut index, prompt(), &wide(16), id, None);
        assert_eq!(same(&plan), found);
        index.release(&plan).unwrap();
        let plan = self::plan(&mut index, prompt(), &conversation(16), id, None);
        assert!(same(&plan).into_iter().all(|same| same));
        index.release(&plan).unwrap();
    }
}

#[test]
fn a_run_says_whether_its_path_begins_as_the_prompt_does() {
    let mut index = index();
    insert(&mut index, (0..8).chain(100..140), 0, None);
    insert(&mut index, (0..4).chain(300..304).chain(200..240), 20, None);
    let text = |tokens| (0..8).chain([NEW]).chain(tokens).chain([NEW]);
    for (shared, found) in [
        (1, [true, true]),
        (2, [true, false]),
        (3, [false, false]),
        (1000, [false, false]),
    ] {
        for (tokens, found) in [100..140, 200..240].into_iter().zip(found) {
            let plan = plan(&mut index, text(tokens), &wide(shared), None, None);
            assert_eq!(same(&plan), [found], "{shared}");
            index.release(&plan).unwrap();
        }
    }
}

#[test]
fn tokens_at_the_ends_of_a_run_that_are_computed_are_of_no_conversation() {
    let mut index = index();
    insert(&mut index, 0..24, 0, session("long"));
    insert(&mut index, 0..40, 10, session("longer"));
    for (last, found) in [(0, false), (15, false), (16, true)] {
        let policy = ReusePolicy {
            recompute_last: last,
            ..wide(16)
        };
        let plan = plan(&mut index, edited(0..40), &policy, session("long"), None);
        assert_eq!(same(&plan), [found], "{last}");
        index.release(&plan).unwrap();
    }
}

#[test]
fn a_run_from_a_named_path_says_whose_it_is() {
    let mut index = index();
    let path = insert(&mut index, 0..40, 0, session("mine"));
    for (id, found) in [("mine", true), ("other", false)] {
        let options = PlanOptions {
            session: session(id),
            ..PlanOptions::default()
        };
        let mut prompt = sequence(edited(0..40));
        let plan = index.plan_from(&mut prompt, &path, &conversation(16), options);
        assert_eq!(same(&plan.unwrap()), [found], "{id}");
    }
}

#[test]
fn after_16384_edges_no_path_begins_as_the_prompt_does() {
    const EDGES: u32 = 400;
    let mut index = RadixIndex::new(Config {
        num_blocks: 40_000,
        block_size: 1,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(0)
    })
    .unwrap();
    let text = |branch: u32, len| (1000 * branch..).take(len as usize);
    let mut next = 0;
    // Inserts what comes after the first `start` tokens, which are cached.
    let mut put = |start, text: &mut dyn Iterator<Item = u32>| {
        let mut seq = sequence([NEW].into_iter().chain(text));
        let end = next + u32::try_from(seq.len() - start).unwrap();
        let options = InsertOptions {
            start,
            ..InsertOptions::new(seq.len(), Source::Computed)
        };
        index.insert(&mut seq, &ids(next..end), options).unwrap();
        next = end;
    };
    put(0, &mut [].into_iter());
    for branch in 1..=42 {
        put(1, &mut text(branch, EDGES + 8));
        for edge in 1..=EDGES {
            // A sibling ends an edge there.
            put(1 + edge as usize, &mut text(branch, edge).chain([NEW + 1]));
        }
    }
    let ends = (1..=42).flat_map(|branch| text(branch, EDGES + 8).skip(EDGES as usize));
    let tokens: Vec<u32> = [NEW, NEW + 2].into_iter().chain(ends).collect();
    let mut looks = |shared| {
        let before = index.stats().search_looks;
        let prompt = tokens.iter().copied().chain([NEW + 3]);
        let plan = plan(&mut index, prompt, &wide(shared), None, None);
        assert_eq!(moved(&plan).len(), 42);
        let same = same(&plan);
        index.release(&plan).unwrap();
        (same, index.stats().search_looks - before)
    };
    let (without, least) = looks(1000);
    assert!(without.iter().all(|&same| !same));
    let (found, most) = looks(1);
    // Each run follows 401 edges.
    let expected: Vec<bool> = (0..42).map(|number| number < 40).collect();
    assert_eq!(found, expected);
    assert!((16_384..16_400).contains(&(most - least)));
}

#[test]
fn moved_runs_come_from_paths_that_begin_with_the_same_blocks() {
    let mut index = index();
    insert(&mut index, (0..8).chain(100..140), 0, None);
    insert(&mut index, (0..4).chain(300..304).chain(200..240), 20, None);
    let prompt = || {
        (0..8)
            .chain([NEW])
            .chain(100..140)
            .chain(200..240)
            .chain([NEW])
    };
    for (shared, found) in [
        (1, vec![(9, 49, 8), (49, 89, 8)]),
        (2, vec![(9, 49, 8)]),
        // The cached path has more blocks, but not the prompt's third.
        (3, vec![]),
        (1000, vec![]),
    ] {
        let plan = plan(&mut index, prompt(), &conversation(shared), None, None);
        assert_eq!(moved(&plan), found, "{shared}");
        assert_eq!(plan.num_tokens(Class::Exact), 8);
        index.release(&plan).unwrap();
    }
}

#[test]
fn the_shared_blocks_themselves_are_in_scope_through_holes() {
    let mut index = index();
    insert(&mut index, 0..40, 0, None);
    index.discard(&ids([1, 2])).unwrap();
    let prompt = || (0..16).chain([NEW]).chain(16..40).chain([NEW]);
    let plan = plan(&mut index, prompt(), &conversation(4), None, None);
    assert_eq!(moved(&plan), [(17, 41, 16)]);
    index.release(&plan).unwrap();
    // A prompt repeats its own beginning.
    let mut index = self::index();
    insert(&mut index, 0..40, 0, None);
    let plan = self::plan(
        &mut index,
        (0..16).chain(0..16).chain([NEW]),
        &conversation(4),
        None,
        None,
    );
    assert_eq!(moved(&plan), [(16, 32, 0)]);
}

#[test]
fn a_block_belongs_to_every_session_that_inserted_it() {
    let mut index = index();
    for (first, id) in [(0, "a"), (10, "b"), (20, "c")] {
        insert(&mut index, 0..40, first, session(id));
    }
    for id in ["a", "b", "c"] {
        let plan = plan(
            &mut index,
            edited(0..40),
            &conversation(16),
            session(id),
            None,
        );
        assert_eq!(moved(&plan), [(4, 44, 0)], "{id}");
        index.release(&plan).unwrap();
    }
    // `b` goes on after 20 tokens, and `a` inserts the same later with `start` at their end.
    let mut longer = insert(&mut index, (0..20).chain(500..520), 30, session("b"));
    let options = InsertOptions {
        start: 40,
        session: session("a"),
        ..InsertOptions::new(40, Source::Computed)
    };
    index.insert(&mut longer, &[], options).unwrap();
    let prompt = || edited(500..520);
    for (id, count) in [("a", 1), ("b", 1), ("c", 0)] {
        let plan = plan(&mut index, prompt(), &conversation(16), session(id), None);
        assert_eq!(moved(&plan).len(), count, "{id}");
        index.release(&plan).unwrap();
    }
}

#[test]
fn the_ninth_session_of_a_block_replaces_the_first() {
    let mut index = index();
    for number in 0..9 {
        insert(
            &mut index,
            0..40,
            10 * number,
            session(&format!("s{number}")),
        );
    }
    for number in 0..9 {
        let id = session(&format!("s{number}"));
        let plan = plan(&mut index, edited(0..40), &conversation(16), id, None);
        assert_eq!(moved(&plan).len(), usize::from(number > 0), "{number}");
        index.release(&plan).unwrap();
    }
    // A session that is there already does not come last again.
    insert(&mut index, 0..40, 0, session("s1"));
    insert(&mut index, 0..40, 0, session("new"));
    let plan = plan(
        &mut index,
        edited(0..40),
        &conversation(16),
        session("s1"),
        None,
    );
    assert_eq!(moved(&plan), []);
}

#[test]
fn runs_end_token_by_token_where_the_scope_does() {
    let mut index = index();
    // The blocks 3 to 5 of the path are of both sessions, the others of one.
    insert(&mut index, 0..24, 0, session("long"));
    insert(&mut index, (0..24).chain(24..40), 10, session("longer"));
    let plan = plan(
        &mut index,
        edited(0..40),
        &conversation(16),
        session("long"),
        None,
    );
    assert_eq!(moved(&plan), [(4, 28, 0)]);
}

#[test]
fn a_block_that_left_belongs_to_those_that_insert_it_again() {
    let mut index = index();
    insert(&mut index, 0..40, 0, session("old"));
    index.discard(&ids(4..10)).unwrap();
    insert(&mut index, 0..40, 20, session("new"));
    for (id, found) in [("old", (4, 20, 0)), ("new", (4, 44, 0))] {
        let plan = plan(
            &mut index,
            edited(0..40),
            &conversation(16),
            session(id),
            None,
        );
        assert_eq!(moved(&plan), [found], "{id}");
        index.release(&plan).unwrap();
    }
}

#[test]
fn a_replaced_block_keeps_its_sessions() {
    let mut index = index();
    let mut seq = sequence(0..40);
    let options = InsertOptions {
        session: session("a"),
        ..InsertOptions::new(40, common::imported(0, 0))
    };
    index.insert(&mut seq, &ids(0..10), options).unwrap();
    let done = index
        .insert(
            &mut seq,
            &ids(10..20),
            InsertOptions::new(40, Source::Computed),
        )
        .unwrap();
    assert_eq!(done.freed, ids(0..10));
    let plan = plan(
        &mut index,
        edited(0..40),
        &conversation(16),
        session("a"),
        None,
    );
    assert_eq!(moved(&plan), [(4, 44, 0)]);
}

#[test]
fn moved_runs_supply_no_token_from_moved_end_on() {
    let mut index = index();
    insert(&mut index, 0..40, 0, session("a"));
    // The run must have `min_run` tokens before the end.
    for end in 0..46 {
        let plan = plan(
            &mut index,
            edited(0..40),
            &conversation(16),
            session("a"),
            Some(end),
        );
        let found = moved(&plan);
        let until = end.min(44);
        let wanted = if until >= 12 {
            vec![(4, until, 0)]
        } else {
            vec![]
        };
        assert_eq!(found, wanted, "{end}");
        assert_eq!(plan.moved_end(), Some(end));
        index.release(&plan).unwrap();
    }
    let plan = plan(
        &mut index,
        edited(0..40),
        &conversation(16),
        session("a"),
        None,
    );
    assert_eq!(plan.moved_end(), None);
}

#[test]
fn exact_reuse_ignores_scope_and_moved_end() {
    let mut index = index();
    insert(&mut index, 0..41, 0, session("other"));
    index.discard(&ids([4])).unwrap();
    // In place, after a hole, and part of a block.
    let prompt = || (0..38).chain([NEW, NEW]);
    let exact = plan(&mut index, prompt(), &ReusePolicy::EXACT_ONLY, None, None);
    let limited = plan(&mut index, prompt(), &conversation(16), None, Some(0));
    assert_eq!(exact.segments(), limited.segments());
    assert_eq!(exact.num_tokens(Class::Exact), 34);
}

#[test]
fn plans_with_neither_session_nor_prefix_are_counted() {
    let mut index = index();
    let count = |index: &RadixIndex| index.stats().plans_without_scope;
    plan(&mut index, edited(0..40), &conversation(1), None, None);
    assert_eq!(count(&index), 0, "nothing is cached");
    insert(&mut index, 0..40, 0, session("a"));
    for (policy, id, wanted) in [
        (conversation(1), None, 1),
        (conversation(1), session("unknown"), 1),
        (approximate(), None, 1),
        (ReusePolicy::EXACT_ONLY, None, 1),
        (conversation(16), None, 2),
    ] {
        plan(&mut index, edited(0..40), &policy, id, None);
        assert_eq!(count(&index), wanted);
    }
    // All is in place, or no moved run may supply what is not.
    plan(&mut index, 0..41, &conversation(16), None, None);
    plan(&mut index, edited(0..40), &conversation(16), None, Some(0));
    assert_eq!(count(&index), 2);
}

#[test]
fn moved_end_is_a_position_of_the_prompt() {
    let mut index = index();
    let digest = index.digest();
    for policy in [ReusePolicy::EXACT_ONLY, approximate()] {
        let options = PlanOptions {
            moved_end: Some(11),
            ..PlanOptions::default()
        };
        let error = index
            .plan(&mut sequence(0..10), &policy, options)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(
            error
                .to_string()
                .contains("moved_end is 11; it must be in [0, 10]")
        );
    }
    let error = index
        .plan(
            &mut sequence(0..10),
            &conversation(0),
            PlanOptions::default(),
        )
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("shared_prefix is 0; it must be at least 1")
    );
    assert_eq!(index.digest(), digest);
}

#[test]
fn a_plan_from_one_path_ignores_the_scope() {
    let mut index = index();
    let path = insert(&mut index, 0..40, 0, None);
    let plan = index
        .plan_from(
            &mut sequence(edited(0..40)),
            &path,
            &conversation(16),
            PlanOptions::default(),
        )
        .unwrap();
    assert_eq!(moved(&plan), [(4, 44, 0)]);
    assert_eq!(index.stats().plans_without_scope, 0);
}

#[test]
fn explain_says_how_much_is_out_of_scope() {
    let mut index = index();
    insert(&mut index, 0..40, 0, session("a"));
    let mut prompt = sequence(edited(0..40));
    let why = index
        .explain(&mut prompt, &ExplainOptions::default())
        .unwrap();
    assert_eq!(why.would_save.out_of_scope, 40);
    assert_eq!(why.would_save.compute, 45);
    assert!(why.to_string().contains("40 are cached, but out of scope"));
    let options = ExplainOptions {
        session: session("a"),
        moved_end: Some(24),
        ..ExplainOptions::default()
    };
    let why = index.explain(&mut prompt, &options).unwrap();
    assert_eq!(why.would_save.out_of_scope, 0);
    assert_eq!(why.would_save.approximate, 20);
    assert_eq!(index.stats().plans_without_scope, 0);
}

#[test]
fn digests_and_snapshots_cover_sessions() {
    let digest = |id: Option<&str>| {
        let mut index = index();
        insert(&mut index, 0..40, 0, id.and_then(session));
        index.digest()
    };
    assert_ne!(digest(None), digest(Some("a")));
    assert_ne!(digest(Some("b")), digest(Some("a")));
    let mut index = index();
    for number in 0..12 {
        let id = session(&format!("s{number}"));
        insert(
            &mut index,
            (0..4 * number + 8).chain([number; 4]),
            14 * number,
            id,
        );
    }
    index.discard(&ids([1])).unwrap();
    let mut again = RadixIndex::restore(&index.snapshot(), RestoredPool::Kept(&[0; 16])).unwrap();
    assert_eq!(again.digest(), index.digest());
    for number in 0..12 {
        let id = session(&format!("s{number}"));
        let plans = [&mut index, &mut again]
            .map(|index| plan(index, edited(0..60), &conversation(16), id, None));
        assert_eq!(plans[0].segments(), plans[1].segments());
    }
}

/// One system prompt and 10⁵ sessions: a block and an insert cost the same as with eight.
#[test]
fn a_prompt_of_many_sessions_takes_no_more_memory_and_time_than_one_of_eight() {
    let mut index = RadixIndex::new(Config {
        num_blocks: 1000,
        block_size: 16,
        ..Config::seeded(0)
    })
    .unwrap();
    let mut seq = sequence(0..16_000);
    let table = ids(0..1000);
    let mut insert = |index: &mut RadixIndex, number: u32| {
        let options = InsertOptions {
            start: 16_000,
            session: session(&format!("session {number}")),
            ..InsertOptions::new(16_000, Source::Computed)
        };
        index.insert(&mut seq, &[], options).unwrap();
    };
    let mut first = sequence(0..16_000);
    let options = InsertOptions::new(16_000, Source::Computed);
    index.insert(&mut first, &table, options).unwrap();
    let without = index.stats().bytes;
    for number in 0..8 {
        insert(&mut index, number);
    }
    let bytes = index.stats().bytes;
    assert!(bytes <= without + 1000, "{bytes} bytes after {without}");
    let mut visited = |index: &mut RadixIndex, numbers: std::ops::Range<u32>| {
        let before = index.stats().nodes_visited;
        for number in numbers {
            insert(index, number);
        }
        index.stats().nodes_visited - before
    };
    let early = visited(&mut index, 8..10_008);
    visited(&mut index, 10_008..90_000);
    assert_eq!(visited(&mut index, 90_000..100_000), early);
    assert_eq!(index.stats().bytes, bytes);
    index.check().unwrap();
}

/// The worst that sessions can do to memory: prefixes of every length, each of a session of its own.
#[test]
fn sessions_take_at_most_320_bytes_per_block() {
    const BLOCKS: u32 = 1000;
    let mut index = RadixIndex::new(Config {
        num_blocks: BLOCKS.into(),
        block_size: 1,
        ..Config::seeded(0)
    })
    .unwrap();
    let table: Vec<BlockId> = ids(0..BLOCKS);
    let mut without = 0;
    for number in (0..BLOCKS).rev() {
        let mut seq = sequence(0..=number);
        let options = InsertOptions {
            session: (number + 1 < BLOCKS).then(|| SessionId::new(&number.to_string()).unwrap()),
            ..InsertOptions::new(seq.len(), Source::Computed)
        };
        let offers = &table[..=number as usize];
        index.insert(&mut seq, offers, options).unwrap();
        if number + 1 == BLOCKS {
            without = index.stats().bytes;
        }
    }
    let each = (index.stats().bytes - without) / u64::from(BLOCKS);
    assert!((150..=320).contains(&each), "{each} bytes per block");
    index.check().unwrap();
}

#[test]
fn tags_and_sessions_limit_moved_runs_together() {
    let mut index = index();
    let seq = insert(&mut index, 0..40, 0, session("a"));
    index.tag(&seq, &[span(16, 20, "reasoning")]).unwrap();
    let policy = ReusePolicy {
        forbid_kinds: vec!["reasoning".into()],
        ..conversation(16)
    };
    let plan = plan(&mut index, edited(0..40), &policy, session("a"), Some(40));
    assert_eq!(moved(&plan), [(4, 20, 0), (24, 40, 20)]);
}
