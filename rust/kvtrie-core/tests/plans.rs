//! Tests what a plan returns and refuses, on prompts whose plans are worked out by hand (D7, D13, D19).

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test stops at what it does not expect, and its numbers are small"
)]

use kvtrie_core::{
    BlockId, Class, Config, Effort, ErrorKind, InsertOptions, Move, PlanOptions, RadixIndex,
    ReusePlan, ReusePolicy, Source, TokenSequence,
};

use common::{approximate, ids, imported, inserting, moved, planned, put, sequence, span};

mod common;

const BLOCK_SIZE: usize = 4;

/// A token that is cached nowhere.
const NEW: u32 = 1000;

fn config() -> Config {
    Config {
        num_blocks: 64,
        block_size: BLOCK_SIZE,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(0)
    }
}

fn index() -> RadixIndex {
    RadixIndex::new(config()).unwrap()
}

/// An index with blocks of another size.
fn index_of(block_size: usize) -> RadixIndex {
    RadixIndex::new(Config {
        block_size,
        ..config()
    })
    .unwrap()
}

fn plan(index: &mut RadixIndex, seq: &mut TokenSequence, pin: bool) -> ReusePlan {
    let options = PlanOptions {
        pin,
        ..PlanOptions::default()
    };
    index.plan(seq, &approximate(), options).unwrap()
}

/// The tokens 0 to 40 in the blocks 20 to 29.
fn cached() -> RadixIndex {
    let mut index = index();
    put(&mut index, &mut sequence(0..40), 20..30);
    index
}

/// Two blocks and two tokens unchanged, three new tokens, the tokens from 17 to 33, and two new tokens: 31 tokens in
/// eight blocks, six of them new.
fn edited() -> TokenSequence {
    let tail = [NEW + 3, NEW + 4];
    sequence((0..10).chain(NEW..NEW + 3).chain(17..33).chain(tail))
}

fn table() -> Vec<BlockId> {
    ids([20, 21].into_iter().chain(40..46))
}

#[test]
fn a_plan_says_what_it_uses() {
    let mut index = cached();
    let seq = &mut edited();
    let plan = plan(&mut index, seq, true);
    assert_eq!(plan.blocks(), ids([20, 21]));
    assert_eq!(plan.num_new_blocks(), 6);
    assert_eq!(plan.source_blocks(), ids([22, 24, 25, 26, 27, 28]));
    let parts: Vec<_> = plan
        .segments()
        .iter()
        .map(|part| (part.start, part.end, part.class, part.hops, part.delta()))
        .collect();
    assert_eq!(
        parts,
        [
            (0, 8, Class::Exact, 0, 0),
            (8, 10, Class::Exact, 0, 0),
            (10, 13, Class::Compute, 0, 0),
            (13, 29, Class::Approximate, 1, -4),
            (29, 31, Class::Compute, 0, 0),
        ]
    );
    assert_eq!(plan.num_tokens(Class::Exact), 10);
    assert_eq!(plan.num_tokens(Class::Approximate), 16);
    assert_eq!(plan.num_tokens(Class::Compute), 5);
    assert_eq!(plan.candidates_dropped(), 0);
    assert_eq!(plan.num_edges(), 1);
    assert!(plan.is_pinned());
    assert!(!index.is_released(&plan));
    index.release(&plan).unwrap();
    assert!(index.is_released(&plan));
}

#[test]
fn a_prompt_of_nothing_but_its_last_token_uses_nothing() {
    let mut index = index();
    let plan = plan(&mut index, &mut sequence([7]), false);
    assert_eq!((plan.blocks(), plan.num_new_blocks()), (&[][..], 1));
    assert_eq!((plan.num_edges(), plan.is_pinned()), (0, false));
    assert_eq!(index.validate(&plan).unwrap(), [true]);
}

#[test]
fn a_prompt_of_two_edges_walks_both() {
    let mut index = cached();
    put(&mut index, &mut sequence((0..8).chain([NEW; 4])), [0, 1, 2]);
    let plan = plan(&mut index, &mut sequence(0..40), false);
    assert_eq!(plan.num_edges(), 2);
}

#[test]
fn places_that_were_not_tried_are_counted() {
    let mut index = RadixIndex::new(Config {
        max_candidates: 1,
        ..config()
    })
    .unwrap();
    for place in 0..3 {
        let seq = &mut sequence((0..4).map(|token| NEW * (place + 2) + token).chain(0..16));
        put(&mut index, seq, place * 5..place * 5 + 5);
    }
    let prompt = &mut sequence([NEW].into_iter().chain(0..16));
    let dropped = plan(&mut index, prompt, false).candidates_dropped();
    assert!(dropped > 0);
    // A plan that is exact only because of the share of what it found depends on the search too.
    let policy = ReusePolicy {
        max_approximate_share: 0.1,
        ..approximate()
    };
    let options = PlanOptions {
        keep_last: 1,
        pin: false,
        ..PlanOptions::default()
    };
    let plan = index.plan(prompt, &policy, options).unwrap();
    assert_eq!(plan.num_tokens(Class::Compute), 17);
    assert_eq!(plan.candidates_dropped(), dropped);
}

#[test]
fn what_finding_a_path_costs_is_counted() {
    let mut index = cached();
    put(
        &mut index,
        &mut sequence((0..8).chain([NEW; 4])),
        [20, 21, 2],
    );
    // Two edges are compared up to the first token that differs, including that token.
    for (tokens, compared) in [(16, 16), (40, 40), (17, 16)] {
        let before = index.stats().bytes_compared;
        plan(&mut index, &mut sequence((0..tokens).chain([NEW])), false);
        assert_eq!((index.stats().bytes_compared - before) / 4, compared);
    }
    let before = index.stats().bytes_compared;
    plan(&mut index, &mut sequence((0..16).chain([NEW; 9])), false);
    assert_eq!((index.stats().bytes_compared - before) / 4, 17);
}

/// Every token that is moved: destination slot, source slot and delta.
fn single(moves: &[Move]) -> Vec<(u64, u64, i64)> {
    let size = BLOCK_SIZE as u64;
    for at in moves {
        assert!(at.num_tokens > 0);
        for slot in [at.source_slot, at.dest_slot] {
            assert_eq!(slot / size, (slot + at.num_tokens - 1) / size, "{at:?}");
        }
    }
    moves
        .iter()
        .flat_map(|at| (0..at.num_tokens).map(|n| (at.dest_slot + n, at.source_slot + n, at.delta)))
        .collect()
}

#[test]
fn moves_of_every_range_are_the_copies_that_it_holds() {
    let mut index = cached();
    let plan = plan(&mut index, &mut edited(), false);
    let table = table();
    let slot = |id: BlockId, at: usize| u64::from(id.0) * 4 + at as u64 % 4;
    // The positions 8 and 9 come from the same positions, 13 to 29 from four positions further on.
    let expected = |start: usize, end: usize| -> Vec<(u64, u64, i64)> {
        let copied = (8..10)
            .map(|at| (at, at))
            .chain((13..29).map(|at| (at, at + 4)));
        copied
            .filter(|(at, _)| (start..end).contains(at))
            .map(|(at, old)| {
                let source = BlockId(20 + old as u32 / 4);
                let delta = if at == old { 0 } else { -4 };
                (slot(table[at / 4], at), slot(source, old), delta)
            })
            .collect()
    };
    for start in 0..=31 {
        for end in start..=31 {
            let moves = plan.moves(&table, start, end).unwrap();
            assert_eq!(single(&moves), expected(start, end), "{start}..{end}");
        }
    }
}

#[test]
fn moves_refuses_what_does_not_fit() {
    let mut index = cached();
    let plan = plan(&mut index, &mut edited(), false);
    let table = table();
    let refused = |table: &[BlockId], start, end| {
        let error = plan.moves(table, start, end).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    assert!(refused(&table, 9, 8).contains("start and end are 9 and 8; "));
    assert!(refused(&table, 0, 32).contains("must ascend and lie in [0, 31]"));
    assert!(
        refused(&table[..7], 0, 31).contains("table has 7 blocks; the 31 tokens before end need 8")
    );
    assert!(plan.moves(&table[..7], 0, 28).is_ok());
    assert!(plan.moves(&table, 31, 31).unwrap().is_empty());
    let mut outside = table.clone();
    outside[7] = BlockId(64);
    assert!(refused(&outside, 0, 31).contains("table[7] is 64; it must be in [0, 64)"));
    outside[7] = BlockId(63);
    assert!(plan.moves(&outside, 0, 31).is_ok());
}

#[test]
fn moves_refuses_a_table_that_does_not_begin_with_the_blocks_in_place() {
    let mut index = cached();
    let plan = plan(&mut index, &mut edited(), false);
    assert_eq!(plan.blocks(), ids([20, 21]));
    for at in 0..2 {
        let mut wrong = table();
        wrong[at] = BlockId(60);
        // The range does not use these blocks, but the table is wrong.
        for (start, end) in [(0, 31), (8, 31), (13, 29), (31, 31)] {
            let error = plan.moves(&wrong, start, end).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let wanted = format!("table[{at}] is 60; it must be {}", 20 + at);
            assert!(error.to_string().contains(&wanted), "{error}");
        }
    }
    // Ids in place are compared only as far as the table goes.
    assert!(plan.moves(&ids([20]), 0, 4).is_ok());
    assert!(plan.moves(&ids([21]), 0, 4).is_err());
    assert!(plan.moves(&[], 0, 0).is_ok());
}

#[test]
fn moves_refuses_a_block_that_comes_twice() {
    let mut index = cached();
    let plan = plan(&mut index, &mut edited(), false);
    for one in 0..8 {
        for other in (one + 1).max(2)..8 {
            let mut twice = table();
            twice[other] = twice[one];
            // Blocks after the range count too, because the engine fills them later.
            for end in [0, 8, 31] {
                let error = plan.moves(&twice, 0, end).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                let wanted = format!("table has block {} twice", twice[one]);
                assert!(error.to_string().contains(&wanted), "{error}");
            }
        }
    }
}

#[test]
fn moves_refuses_to_have_a_block_written_that_the_plan_reads() {
    let mut index = cached();
    let plan = plan(&mut index, &mut edited(), false);
    for read in [22, 24, 28] {
        // Blocks 2 and 3 are filled by copies in part; block 7 is computed except for one token.
        for at in 2..8 {
            let mut own = table();
            own[at] = BlockId(read);
            let error = plan.moves(&own, 0, 31).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let wanted = format!("table[{at}] is {read}; the plan reads this block");
            assert!(error.to_string().contains(&wanted), "{error}");
            // Blocks before and after the range are not written.
            assert!(plan.moves(&own, 31.min(4 * at + 4), 31).is_ok() == (at < 7));
            assert!(plan.moves(&own, 0, 4 * at).is_ok());
        }
    }
    let mut other = table();
    other[2] = BlockId(23);
    assert!(plan.moves(&other, 0, 31).is_ok());
}

#[test]
fn an_unpinned_plan_says_which_segments_are_there_as_planned() {
    for (gone, expected) in [
        (21, [false, true, true, true, true]),
        (22, [true, false, true, true, true]),
        (23, [true, true, true, true, true]),
        (24, [true, true, true, false, true]),
        (28, [true, true, true, false, true]),
        (29, [true, true, true, true, true]),
    ] {
        let mut index = cached();
        let plan = plan(&mut index, &mut edited(), false);
        assert_eq!(index.validate(&plan).unwrap(), [true; 5]);
        index.discard(&ids([gone])).unwrap();
        assert_eq!(index.validate(&plan).unwrap(), expected, "{gone}");
    }
}

#[test]
fn a_pinned_plan_is_there_until_it_is_released() {
    let mut index = cached();
    let plan = plan(&mut index, &mut edited(), true);
    // Both blocks leave the index and are kept for the plan.
    assert!(index.discard(&ids([21, 24])).unwrap().is_empty());
    assert_eq!(index.validate(&plan).unwrap(), [true; 5]);
    index.release_sources(&plan).unwrap();
    assert_eq!(
        index.validate(&plan).unwrap(),
        [true, true, true, false, true]
    );
    assert_eq!(index.take_freed(), ids([24]));
    index.release_sources(&plan).unwrap();
    index.release(&plan).unwrap();
    assert_eq!(
        index.validate(&plan).unwrap(),
        [false, true, true, false, true]
    );
    assert_eq!(index.take_freed(), ids([21]));
    for error in [
        index.release(&plan).unwrap_err(),
        index.release_sources(&plan).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::StaleHandle);
    }
    index.check().unwrap();
}

#[test]
fn a_plan_of_another_index_is_refused() {
    let (mut ours, mut theirs) = (cached(), cached());
    let plan = plan(&mut theirs, &mut edited(), true);
    let seq = &mut edited();
    let options = InsertOptions::new(31, Source::Plan(&plan));
    for error in [
        ours.validate(&plan).unwrap_err(),
        ours.release(&plan).unwrap_err(),
        ours.release_sources(&plan).unwrap_err(),
        ours.insert(seq, &table(), options).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("belongs to another index"));
    }
    theirs.release(&plan).unwrap();
}

#[test]
fn a_policy_beyond_its_limits_is_refused_whatever_the_effort() {
    let mut index = cached();
    let policy = ReusePolicy {
        min_run: Some(7),
        ..approximate()
    };
    let digest = index.digest();
    let options = PlanOptions::default();
    let seq = &mut edited();
    for error in [
        index.plan(seq, &policy, options).unwrap_err(),
        index
            .plan_within(seq, &policy, options, Effort::ANY)
            .unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
    assert_eq!(index.digest(), digest);
}

/// Pseudo-random numbers, the same in every run.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (self.0 >> 33) as usize % limit
    }
}

/// Every cached token is at one place only, so the lengths of the prompt's pieces determine which are found.
#[test]
fn pieces_of_long_prompts_are_found_if_they_are_long_enough() {
    const TEXT: usize = 4096;
    const TEXTS: usize = 3;
    for (block_size, min_run) in [(4, 8), (16, 9), (16, 16), (1, 20), (64, 40)] {
        let mut index = RadixIndex::new(Config {
            num_blocks: (TEXT * TEXTS / block_size) as u64,
            block_size,
            min_run,
            ..config()
        })
        .unwrap();
        for text in 0..TEXTS {
            let seq = &mut sequence((0..TEXT).map(|at| (text * TEXT + at) as u32));
            let each = (TEXT / block_size) as u32;
            put(
                &mut index,
                seq,
                text as u32 * each..(text as u32 + 1) * each,
            );
        }
        let new = (TEXT * TEXTS) as u32;
        let mut draws = Draws(min_run as u64);
        for gap in [1, 3, 30, 700, 3000] {
            let mut prompt: Vec<u32> = vec![new];
            let mut expected = Vec::new();
            while prompt.len() < 6000 {
                let len = match draws.below(4) {
                    0 => 1 + draws.below(min_run - 1),
                    1 => min_run + draws.below(2),
                    2 => min_run + draws.below(100),
                    _ => min_run + draws.below(1500),
                };
                let at = draws.below(TEXT - len);
                let from = draws.below(TEXTS) * TEXT + at;
                if len >= min_run {
                    expected.push((prompt.len(), prompt.len() + len, at));
                }
                prompt.extend((from..from + len).map(|token| token as u32));
                prompt.extend((0..=draws.below(gap)).map(|_| new));
            }
            let plan = plan(&mut index, &mut sequence(prompt), false);
            let found = moved(&plan);
            assert_eq!(found, expected, "min_run {min_run}, gap {gap}");
            assert_eq!(plan.num_tokens(Class::Exact), 0);
        }
    }
}

/// Ten texts of 40 tokens of their own, 64 that all share, and 40 of their own again.
#[test]
fn windows_with_too_many_places_are_tried_at_the_most_recent_ones() {
    let mut index = RadixIndex::new(Config {
        num_blocks: 360,
        min_run: 16,
        max_candidates: 2,
        ..config()
    })
    .unwrap();
    let own = |text: u32, from: u32, to: u32| (from..to).map(move |at| NEW * (text + 2) + at);
    let text = |text: u32| own(text, 0, 40).chain(0..64).chain(own(text, 40, 80));
    for number in 0..10 {
        put(
            &mut index,
            &mut sequence(text(number)),
            number * 36..(number + 1) * 36,
        );
    }
    let around = |tokens: Vec<u32>| sequence([NEW].into_iter().chain(tokens).chain([NEW + 1]));
    let mut found = |tokens: Vec<u32>| {
        let plan = plan(&mut index, &mut around(tokens), false);
        let parts = moved(&plan);
        (parts, plan.source_blocks(), plan.candidates_dropped() > 0)
    };
    // Tokens of one text only lead to it, and through those that all share.
    for number in 0..10 {
        let (parts, blocks, _) = found(text(number).skip(10).collect());
        assert_eq!(parts, [(1, 135, 10)]);
        assert_eq!(blocks, ids(number * 36 + 2..(number + 1) * 36));
    }
    // Of the two most recent texts, the one in the lower blocks is used.
    let (parts, blocks, is_dropped) = found((0..64).collect());
    assert_eq!(parts, [(1, 65, 40)]);
    assert_eq!(blocks, ids(8 * 36 + 10..8 * 36 + 26));
    assert!(is_dropped);
    // The tokens of one text only are found after the shared ones. If that text had been tried, the run would be one
    // piece.
    let (parts, blocks, is_dropped) = found((30..64).chain(own(3, 40, 70)).collect());
    assert_eq!(parts, [(1, 35, 70), (35, 65, 104)]);
    let (first, second) = (8 * 36 + 17..8 * 36 + 26, 3 * 36 + 26..3 * 36 + 34);
    assert_eq!(blocks, ids(second.chain(first)));
    assert!(is_dropped);
}

/// Runs that are one token too short, each cached at 64 places: a search remembers 256 such runs. A long run before
/// them pays for trying them all.
#[test]
fn a_search_that_forgets_places_finds_runs_after_them() {
    let mut index = RadixIndex::new(Config {
        num_blocks: 1 << 17,
        min_run: 16,
        ..config()
    })
    .unwrap();
    let text: Vec<u32> = (0..5_400).map(|at| 10_000 + at).collect();
    let blocks = text.len() / BLOCK_SIZE + 1;
    for copy in 0..64 {
        let head = 0..BLOCK_SIZE as u32;
        let tokens = head.map(|at| 4 * copy + at).chain(text.iter().copied());
        let first = copy * blocks as u32;
        put(
            &mut index,
            &mut sequence(tokens),
            first..first + blocks as u32,
        );
    }
    let paid: Vec<u32> = (0..24_000).map(|at| 20_000 + at).collect();
    let first = 64 * blocks as u32;
    let ids = first..first + (paid.len() / BLOCK_SIZE) as u32;
    put(&mut index, &mut sequence(paid.iter().copied()), ids);
    // The first run occurs again while it is remembered, and again after all were forgotten: then its places are looked
    // up again.
    let order = (0..256).chain([0, 256, 0]).chain(257..300);
    let piece = |number: usize| text[18 * number..][..15].iter().copied();
    let short = order.flat_map(|number| piece(number).chain([NEW]));
    let mut prompt: Vec<u32> = [NEW].into_iter().chain(paid).chain(short).collect();
    let at = prompt.len();
    prompt.extend(&text[100..200]);
    prompt.push(NEW);
    let plan = plan(&mut index, &mut sequence(prompt), true);
    assert_eq!(plan.candidates_dropped(), 0);
    assert_eq!(index.stats().search_looks, 40_541);
    let found = moved(&plan);
    assert_eq!(found, [(1, 24_001, 0), (at, at + 100, BLOCK_SIZE + 100)]);
    index.release(&plan).unwrap();
    index.check().unwrap();
}

/// The prompt's own path has a hole, whose tokens are cached at the same positions after another prefix.
#[test]
fn a_hole_is_covered_from_another_path_at_the_same_positions() {
    let mut index = index();
    let ours = &mut sequence(0..40);
    put(&mut index, ours, 0..10);
    put(
        &mut index,
        &mut sequence((NEW..NEW + 8).chain(8..24)),
        10..16,
    );
    index.remove_spans(ours, &[(8, 24)], true).unwrap();
    let plan = plan(&mut index, ours, false);
    let parts: Vec<_> = plan
        .segments()
        .iter()
        .map(|part| (part.start, part.end, part.old_start, part.class))
        .collect();
    assert_eq!(
        parts,
        [
            (0, 8, 0, Class::Exact),
            (8, 24, 8, Class::Approximate),
            (24, 39, 24, Class::Exact),
            (39, 40, 39, Class::Compute),
        ]
    );
    assert_eq!(plan.source_blocks(), ids((6..10).chain(12..16)));
}

/// In a text that repeats itself many places reach the prompt's end: the nearest is taken, and of two as near the
/// lowest slot, within a block and between blocks.
#[test]
fn of_places_that_reach_as_far_the_nearest_and_lowest_is_taken() {
    const LEN: usize = 48;
    for (period, block_size) in [(2, 4), (2, 16), (4, 8), (6, 16), (3, 4), (1, 8), (6, 4)] {
        for is_reversed in [false, true] {
            let blocks = LEN / block_size;
            let id = |block: usize| {
                if is_reversed {
                    blocks - 1 - block
                } else {
                    block
                }
            };
            let mut index = index_of(block_size);
            let text = |at: usize| (at % period) as u32;
            let seq = &mut sequence((0..LEN).map(text));
            put(&mut index, seq, (0..blocks).map(|block| id(block) as u32));
            for strange in 1..30_usize {
                for phase in 0..period {
                    let repeated = (0..10).map(|at| text(phase + at));
                    let tokens = (0..strange).map(|_| NEW).chain(repeated).chain([NEW]);
                    let plan = plan(&mut index, &mut sequence(tokens), false);
                    let slot = |at: usize| id(at / block_size) * block_size + at % block_size;
                    let expected = (0..=LEN - 10)
                        .filter(|at| at % period == phase)
                        .min_by_key(|&at| (at.abs_diff(strange), slot(at)))
                        .unwrap();
                    let moved = plan.segments()[1];
                    assert_eq!(
                        (moved.start, moved.end, moved.old_start),
                        (strange, strange + 10, expected),
                        "period {period}, block size {block_size}, phase {phase}"
                    );
                }
            }
        }
    }
}

/// Five texts of 32 equal tokens go on differently in the middle of a block, so that a run ends in one of five
/// children.
#[test]
fn of_children_that_share_as_much_the_lowest_id_is_copied() {
    for (order, max_candidates) in [
        ([4, 2, 0, 1, 3], 64),
        ([0, 1, 2, 3, 4], 64),
        ([4, 3, 2, 1, 0], 64),
        ([4, 2, 0, 1, 3], 4),
        ([4, 2, 0, 1, 3], 5),
    ] {
        let mut index = RadixIndex::new(Config {
            min_run: 16,
            max_candidates,
            ..config()
        })
        .unwrap();
        for (text, id) in order.into_iter().enumerate() {
            let other = (text as u32 + 1) * NEW;
            let seq = &mut sequence((0..32).chain([40, 41, other, other + 1]));
            put(&mut index, seq, (10..18).chain([id]));
        }
        // The run ends where the prompt does, so that no window after it is looked up.
        let prompt = [NEW].into_iter().chain(0..32).chain([40, 41, NEW]);
        let plan = plan(&mut index, &mut sequence(prompt), false);
        let part = plan.segments()[1];
        assert_eq!((part.start, part.end, part.old_start), (1, 35, 0));
        // Those that are not compared share no more.
        assert_eq!(plan.candidates_dropped(), 0);
        if max_candidates >= 5 {
            assert_eq!(plan.source_blocks(), ids([0].into_iter().chain(10..18)));
        }
        // Where those that are compared may not be used, one that is not might have been.
        let policy = ReusePolicy {
            forbid_kinds: vec!["reasoning".into()],
            ..approximate()
        };
        // First the second of their tokens is forbidden, then both.
        for (start, end) in [(33, 34), (32, 33)] {
            for text in 0..5 {
                let other = (text + 1) * NEW;
                let seq = sequence((0..32).chain([40, 41, other, other + 1]));
                index.tag(&seq, &[span(start, end, "reasoning")]).unwrap();
            }
            let prompt = [NEW].into_iter().chain(0..32).chain([40, 41, NEW]);
            let plan = planned(&mut index, &mut sequence(prompt), &policy);
            assert_eq!(plan.segments()[1].end, start + 1);
            let is_cut = max_candidates < 5;
            assert_eq!(plan.candidates_dropped() > 0, is_cut);
        }
    }
}

/// If several children share as many tokens, the run continues in the one with the lowest id, whichever the window was
/// found in.
#[test]
fn a_run_found_in_one_of_equal_children_is_copied_from_the_lowest_id() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]] {
        for shared in 5..8_u32 {
            let mut index = index_of(8);
            for (text, id) in order.into_iter().enumerate() {
                let other = (text as u32 + 2) * NEW;
                let tail = (8..8 + shared).chain(other..other + 8 - shared);
                put(&mut index, &mut sequence((0..8).chain(tail)), [10, id]);
            }
            // The block above shares too few tokens for a window, so all windows end in one of the children.
            let prompt = [NEW].into_iter().chain(4..8 + shared).chain([NEW; 2]);
            let plan = plan(&mut index, &mut sequence(prompt), false);
            let part = plan.segments()[1];
            let end = 5 + shared as usize;
            assert_eq!((part.start, part.end, part.old_start), (1, end, 4));
            assert_eq!(plan.source_blocks(), ids([0, 10]), "{order:?}, {shared}");
        }
    }
}

/// A token of a forbidden kind splits its run, wherever it is.
#[test]
fn tokens_of_a_forbidden_kind_are_computed() {
    let policy = ReusePolicy {
        forbid_kinds: vec!["reasoning".into()],
        ..approximate()
    };
    let spans = (0..40).flat_map(|start| (start + 1..=40).map(move |end| (start, end)));
    // Either the last block has too many hops, or no block has any.
    for ((start, end), exact_until) in spans.flat_map(|span| [(span, 40), (span, 36)]) {
        let mut index = index();
        let seq = &mut sequence(0..40);
        let options = InsertOptions::new(40, imported(exact_until, 1));
        index.insert(seq, &ids(20..30), options).unwrap();
        let spans = [span(start, end, "reasoning"), span(0, 40, "answer")];
        index.tag(seq, &spans).unwrap();
        let prompt = &mut sequence([NEW].into_iter().chain(0..40).chain([NEW]));
        let plan = planned(&mut index, prompt, &policy);
        let found: Vec<_> = moved(&plan)
            .into_iter()
            .map(|(start, end, old_start)| (old_start, end - start))
            .collect();
        let runs = [
            (0, start.min(exact_until)),
            (end, exact_until.saturating_sub(end)),
        ];
        let expected: Vec<_> = runs.into_iter().filter(|run| run.1 >= 8).collect();
        assert_eq!(found, expected, "{start}..{end}, exact until {exact_until}");
    }
}

/// KV with fewer hops is preferred to nearer KV with more, wherever in the run the hops are.
#[test]
fn of_places_that_reach_as_far_the_one_with_fewest_hops_is_taken() {
    for first_moved in [0, 4, 8, 12] {
        let mut index = index();
        let near = &mut sequence(0..16);
        for start in (0..16).step_by(4) {
            let source = if start == first_moved {
                imported(0, 2)
            } else {
                Source::Computed
            };
            let options = inserting(start..start + 4, source);
            let block = BlockId(start as u32 / 4);
            index.insert(near, &[block], options).unwrap();
        }
        put(&mut index, &mut sequence((500..520).chain(0..16)), 10..19);
        let policy = ReusePolicy {
            max_hops: 9,
            ..approximate()
        };
        let prompt = &mut sequence([NEW].into_iter().chain(0..16).chain([NEW]));
        let plan = planned(&mut index, prompt, &policy);
        let moved = plan.segments()[1];
        assert_eq!((moved.end, moved.old_start, moved.hops), (17, 20, 1));
    }
}

/// `recompute_first` and `recompute_last` may cover a whole edge. Its blocks are then no sources.
#[test]
fn the_ends_of_a_run_are_computed_across_edges() {
    let mut index = index();
    put(&mut index, &mut sequence(0..24), 20..26);
    // An edge ends where texts differ.
    put(
        &mut index,
        &mut sequence((0..8).chain(500..508)),
        [20, 21, 30, 31],
    );
    put(
        &mut index,
        &mut sequence((0..16).chain(600..608)),
        [20, 21, 22, 23, 32, 33],
    );
    for first in 0..24 {
        for last in 0..24 {
            let policy = ReusePolicy {
                recompute_first: first,
                recompute_last: last,
                ..approximate()
            };
            let prompt = &mut sequence([NEW].into_iter().chain(0..24).chain([NEW]));
            let plan = planned(&mut index, prompt, &policy);
            let moved = moved(&plan);
            let left = first + last < 24;
            let expected = left.then_some((1 + first, 25 - last, first));
            assert_eq!(moved, Vec::from_iter(expected), "{first}, {last}");
            let blocks = first as u32 / 4..(24 - last as u32).div_ceil(4);
            let expected = if left {
                ids(blocks.map(|block| 20 + block))
            } else {
                Vec::new()
            };
            assert_eq!(plan.source_blocks(), expected, "{first}, {last}");
        }
    }
}

/// Children that were not compared are counted on the prompt's own path too.
#[test]
fn children_of_the_own_path_that_were_not_compared_are_counted() {
    let mut index = RadixIndex::new(Config {
        moved_runs: false,
        max_candidates: 2,
        ..config()
    })
    .unwrap();
    let text = |other: u32| (0..8).chain([40, 41, other, other]);
    for other in 1..=4 {
        let seq = &mut sequence(text(100 * other));
        let options = InsertOptions::new(12, imported(0, 1));
        index.insert(seq, &ids([10, 11, other]), options).unwrap();
        let span = span(9, 10, "reasoning");
        index.tag(seq, &[span]).unwrap();
    }
    for (forbidden, dropped) in [(Vec::new(), false), (vec!["reasoning".into()], true)] {
        let policy = ReusePolicy {
            forbid_kinds: forbidden,
            ..approximate()
        };
        let prompt = &mut sequence(text(900));
        let plan = planned(&mut index, prompt, &policy);
        assert_eq!(
            plan.num_tokens(Class::Approximate),
            10 - usize::from(dropped)
        );
        assert_eq!(plan.candidates_dropped() > 0, dropped);
    }
}

/// Blocks of four tokens with the given hops, in this order in one edge.
fn labelled(hops: &[u16]) -> RadixIndex {
    let mut index = index();
    let seq = &mut sequence(0..4 * hops.len() as u32);
    for (number, &hops) in hops.iter().enumerate() {
        let options = inserting(4 * number..4 * number + 4, imported(0, hops));
        index
            .insert(seq, &[BlockId(number as u32)], options)
            .unwrap();
    }
    index
}

/// A moved run has a segment for each range of equal hops, and ends before a block with too many.
#[test]
fn a_run_is_cut_where_hops_change() {
    let mut index = labelled(&[5, 1, 3, 3, 1, 2]);
    let prompt = &mut sequence([NEW].into_iter().chain(0..24).chain([NEW]));
    for (max_hops, expected) in [
        (
            9,
            vec![(1, 5, 6), (5, 9, 2), (9, 17, 4), (17, 21, 2), (21, 25, 3)],
        ),
        (5, vec![(5, 9, 2), (9, 17, 4), (17, 21, 2), (21, 25, 3)]),
        (3, vec![(17, 21, 2), (21, 25, 3)]),
        (2, vec![]),
    ] {
        let policy = ReusePolicy {
            max_hops,
            ..approximate()
        };
        let plan = planned(&mut index, prompt, &policy);
        let moved: Vec<_> = plan
            .segments()
            .iter()
            .filter(|part| part.class == Class::Approximate)
            .map(|part| (part.start, part.end, part.hops))
            .collect();
        assert_eq!(moved, expected, "{max_hops}");
    }
}

/// An approximate block is used in place if none of its tokens has a forbidden kind.
#[test]
fn a_forbidden_token_keeps_its_block_from_being_used_in_place() {
    for token in 0..16 {
        let mut index = labelled(&[1, 1, 1, 1]);
        let seq = &mut sequence((0..16).chain([NEW]));
        let span = span(token, token + 1, "reasoning");
        index.tag(seq, &[span]).unwrap();
        let policy = ReusePolicy {
            forbid_kinds: vec!["reasoning".into()],
            ..approximate()
        };
        let plan = planned(&mut index, seq, &policy);
        assert_eq!(plan.blocks().len(), token / 4, "{token}");
    }
}

/// Exact KV after a hole is copied even if the policy is exact only.
#[test]
fn an_exact_plan_copies_blocks_after_a_hole() {
    let mut index = cached();
    let seq = &mut sequence(0..40);
    index.remove_spans(seq, &[(8, 24)], true).unwrap();
    let plan = planned(&mut index, seq, &ReusePolicy::EXACT_ONLY);
    let parts: Vec<_> = plan
        .segments()
        .iter()
        .map(|part| (part.start, part.end, part.class))
        .collect();
    let expected = [
        (0, 8, Class::Exact),
        (8, 24, Class::Compute),
        (24, 39, Class::Exact),
    ];
    assert_eq!(parts[..3], expected);
    assert_eq!(plan.source_blocks(), ids(26..30));
}

#[test]
fn a_plan_counts_what_reading_it_goes_over() {
    let mut index = cached();
    let plan = plan(&mut index, &mut edited(), true);
    // The plan has two blocks in place, a part of another, a gap, moved tokens of five blocks, and a gap at the end.
    assert_eq!((plan.blocks().len(), plan.segments().len()), (2, 5));
    assert_eq!(plan.num_entries(), 5 + 2 + 1 + 5);
}

#[test]
fn a_segment_in_place_is_valid_as_long_as_its_own_blocks_stay() {
    // The last approximate block and the last exact one leave, in both orders.
    for (gone, expected) in [
        ([29, 23], [[true, false, true], [false, false, true]]),
        ([23, 29], [[false, true, true], [false, false, true]]),
    ] {
        let mut index = index();
        let mut seq = sequence(0..40);
        let options = InsertOptions::new(40, imported(16, 1));
        index.insert(&mut seq, &ids(20..30), options).unwrap();
        let plan = plan(&mut index, &mut sequence(0..41), false);
        let places: Vec<_> = segments(&plan)
            .iter()
            .map(|&(start, end, _, class, _)| (start, end, class))
            .collect();
        assert_eq!(
            places,
            [
                (0, 16, Class::Exact),
                (16, 40, Class::Approximate),
                (40, 41, Class::Compute),
            ]
        );
        assert_eq!(index.validate(&plan).unwrap(), [true, true, true]);
        for (id, expected) in gone.into_iter().zip(expected) {
            index.discard(&ids([id])).unwrap();
            assert_eq!(index.validate(&plan).unwrap(), expected, "{gone:?}");
        }
    }
}

/// The segments as (start, end, old start, class, hops).
fn segments(plan: &ReusePlan) -> Vec<(usize, usize, usize, Class, u16)> {
    let all = plan.segments().iter();
    all.map(|segment| {
        let place = (segment.start, segment.end, segment.old_start);
        (place.0, place.1, place.2, segment.class, segment.hops)
    })
    .collect()
}

/// After a hole at the end of the prompt's own blocks, a part of the following block is copied, from the same edge or
/// from a child.
#[test]
fn a_part_of_the_block_after_the_last_hole_is_copied() {
    for is_shared in [false, true] {
        let mut index = index_of(16);
        put(&mut index, &mut sequence(0..80), 0..5);
        if is_shared {
            let other = (0..64).chain(2 * NEW..2 * NEW + 16);
            put(&mut index, &mut sequence(other), [0, 1, 2, 3, 10]);
        }
        index.discard(&ids([3])).unwrap();
        let prompt = (0..76).chain(NEW..NEW + 10);
        for policy in [ReusePolicy::EXACT_ONLY, approximate()] {
            let prompt = &mut sequence(prompt.clone());
            let plan = planned(&mut index, prompt, &policy);
            assert_eq!(
                segments(&plan),
                [
                    (0, 48, 0, Class::Exact, 0),
                    (48, 64, 48, Class::Compute, 0),
                    (64, 76, 64, Class::Exact, 0),
                    (76, 86, 76, Class::Compute, 0),
                ]
            );
            assert_eq!(plan.source_blocks(), ids([4]));
        }
    }
}

#[test]
fn a_sibling_of_a_hole_is_copied_as_far_as_its_tokens_are_the_same() {
    let mut index = index_of(16);
    let text: Vec<u32> = (0..96).collect();
    put(&mut index, &mut sequence(text.clone()), 0..6);
    // Another block follows at 48 and shares 12 of the next tokens.
    let sibling = text[..60].iter().copied().chain(NEW..NEW + 4);
    put(&mut index, &mut sequence(sibling), [0, 1, 2, 10]);
    // The sibling of a hole is found although no window leads to it.
    index.discard(&ids([1, 2, 3])).unwrap();
    let policy = ReusePolicy::EXACT_ONLY;
    let plan = planned(&mut index, &mut sequence(0..97), &policy);
    assert_eq!(
        segments(&plan),
        [
            (0, 16, 0, Class::Exact, 0),
            (16, 48, 16, Class::Compute, 0),
            (48, 60, 48, Class::Exact, 0),
            (60, 64, 60, Class::Compute, 0),
            (64, 96, 64, Class::Exact, 0),
            (96, 97, 96, Class::Compute, 0),
        ]
    );
    assert_eq!(plan.source_blocks(), ids([4, 5, 10]));
}

#[test]
fn tokens_that_are_recomputed_are_counted_over_all_that_is_approximate() {
    let mut index = index();
    let mut known = sequence(0..40);
    let options = InsertOptions::new(40, imported(20, 1));
    index.insert(&mut known, &ids(20..30), options).unwrap();
    for end in [24, 32] {
        let branch = (0..end).chain(NEW + end..NEW + end + 4);
        let table = (20..20 + end / 4).chain([30 + end]);
        put(&mut index, &mut sequence(branch), table);
    }
    // The prompt has the tokens 17 to 37, three of which were exact. The cases are: what is copied, for each number of
    // recomputed tokens.
    let text = || sequence((NEW..NEW + 5).chain(17..37).chain([NEW + 9]));
    for (first, last, expected) in [
        (0, 0, vec![(5, 8, 17, 1), (8, 25, 20, 2)]),
        (2, 0, vec![(7, 8, 19, 1), (8, 25, 20, 2)]),
        (5, 0, vec![(10, 25, 22, 2)]),
        (5, 6, vec![(10, 19, 22, 2)]),
        (0, 19, vec![(5, 6, 17, 1)]),
        (1, 18, vec![(6, 7, 18, 1)]),
        (15, 5, vec![]),
        (30, 30, vec![]),
    ] {
        let policy = ReusePolicy {
            max_hops: 2,
            recompute_first: first,
            recompute_last: last,
            ..approximate()
        };
        let plan = planned(&mut index, &mut text(), &policy);
        let found: Vec<_> = segments(&plan)
            .into_iter()
            .filter(|segment| segment.3 == Class::Approximate)
            .map(|(start, end, old_start, _, hops)| (start, end, old_start, hops))
            .collect();
        assert_eq!(found, expected, "{first} and {last}");
        index.release(&plan).unwrap();
    }
}

#[test]
fn a_segment_in_place_has_the_kinds_of_all_its_blocks() {
    let mut index = index();
    let mut known = sequence(0..40);
    let options = InsertOptions::new(40, imported(8, 1));
    index.insert(&mut known, &ids(20..30), options).unwrap();
    index
        .tag(&known, &[span(13, 14, "one"), span(25, 26, "two")])
        .unwrap();
    let plan = plan(&mut index, &mut sequence(0..41), true);
    assert_eq!(segments(&plan)[1], (8, 40, 8, Class::Approximate, 1));
    let kinds = index.kinds();
    let bit = |name: &str| 1 << kinds.iter().position(|kind| kind == name).unwrap();
    assert_eq!(plan.segments()[1].kinds, bit("one") | bit("two"));
    assert_eq!(plan.segments()[0].kinds, 0);
}
