//! Tests what a ledger refuses, one step on either side of each limit, and that a refused call changes nothing (L1 to
//! L10).

use std::sync::Arc;

use kvtrie_core::{BlockId, Class, Config, Error, ErrorKind, Group, RadixIndex, ReusePlan, Source};
use kvtrie_transfer::{Begin, SequenceLedger, Step, StepError};

use super::rules::{SIZE, begin_imported, begun, ids, index, planned, put, sequence, span};

const MAX_HOPS: u16 = 255;

/// Makes one field of a step wrong.
type Change<'a> = &'a dyn Fn(&mut Step<'_, i64>);

fn assert_refused(error: &Error, kind: ErrorKind, words: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(words), "{error}: not {words:?}");
}

fn assert_invalid<T: std::fmt::Debug>(done: Result<T, Error>, words: &str) {
    assert_refused(&done.unwrap_err(), ErrorKind::InvalidArgument, words);
}

/// The tokens 0 to 8 in the blocks 9 and 10.
fn filled() -> RadixIndex {
    let mut index = index();
    put(&mut index, 0..8, 9..11, Source::Computed);
    index
}

#[test]
fn hops_of_what_was_imported() {
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    for hops in [MAX_HOPS + 1, u16::MAX] {
        let done = ledger.begin(&mut sequence(0..4), &ids(0..1), begin_imported(0, hops, 0));
        assert_invalid(
            done,
            &format!("hops of source are {hops}; they must be in [0, {MAX_HOPS}]"),
        );
    }
    assert!(ledger.is_empty());
    let begin = begin_imported(0, MAX_HOPS, 0);
    let id = ledger.begin(&mut sequence(0..4), &ids(0..1), begin);
    let labels = ledger.labels(id.unwrap(), 0, 4).unwrap();
    assert_eq!((labels.len(), labels[0].hops), (1, MAX_HOPS));
}

#[test]
fn ids_of_a_table() {
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let most = u32::try_from(BlockId::MAX_BLOCKS).unwrap();
    let table = |last: u32| vec![BlockId(0), BlockId(last)];
    for id in [most, u32::MAX] {
        let done = ledger.begin(&mut sequence(0..8), &table(id), Begin::default());
        assert_invalid(done, &format!("blocks has {id}; it must be in [0, {most})"));
    }
    let mut seq = sequence(0..8);
    let id = ledger.begin(&mut seq, &table(most - 1), Begin::default());
    let id = id.unwrap();
    assert_invalid(ledger.add_blocks(id, &[BlockId(most)]), "blocks has");
    assert_eq!(ledger.blocks(id).unwrap(), table(most - 1));
}

#[test]
fn ids_that_come_twice() {
    // A few ids are searched one by one; many are sorted.
    for count in [2, 7, 8, 9, 20] {
        let unique: Vec<BlockId> = (1..=count).map(BlockId).collect();
        let with = |id: u32| {
            let mut table = unique.clone();
            *table.last_mut().unwrap() = BlockId(id);
            table
        };
        let mut ledger = SequenceLedger::new(SIZE).unwrap();
        let twice = ledger.begin(&mut sequence(0..4), &with(1), Begin::default());
        assert_refused(
            &twice.unwrap_err(),
            ErrorKind::BlockInUse,
            "block 1 comes twice",
        );
        let mut seq = sequence(0..4);
        let id = ledger
            .begin(&mut seq, &ids(50..52), Begin::default())
            .unwrap();
        for twice in [with(51), with(1)] {
            let error = ledger.add_blocks(id, &twice).unwrap_err();
            assert_refused(
                &error,
                ErrorKind::BlockInUse,
                "comes twice in the table of 2 and",
            );
        }
        ledger.add_blocks(id, &unique).unwrap();
        assert_eq!(ledger.blocks(id).unwrap().len(), 2 + unique.len());
    }
}

/// A ledger without groups commits group 0 alone, so the window of what it said was cached would be missing.
#[test]
fn an_index_with_groups_and_its_plans() {
    let mut index = RadixIndex::new(Config {
        num_blocks: 16,
        block_size: SIZE,
        groups: vec![Group::window("swa", 5, 4, SIZE)],
        ..Config::seeded(0)
    })
    .unwrap();
    put(&mut index, 0..8, 9..11, Source::Computed);
    let before = index.digest();
    let (mut ledger, mut other, id) = begun(8);
    for done in [
        ledger.commit(id, &mut other, &mut index),
        ledger.finish(id, &mut other, &mut index),
    ] {
        assert_invalid(
            done,
            "the index has group \"swa\" where the ledger has no group",
        );
    }
    assert_eq!(index.digest(), before);
    assert!(other.is_owned() && !ledger.is_empty());
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let mut seq = sequence(0..12);
    let plan = planned(&mut index, &mut seq, true);
    for in_place in [None, Some(Arc::clone(&plan))] {
        let begin = match in_place {
            None => Begin::planned(Arc::clone(&plan)),
            Some(_) => Begin {
                in_place,
                ..Begin::default()
            },
        };
        let done = ledger.begin(&mut seq, &ids(0..3), begin);
        assert_invalid(done, "with 1 groups besides group 0, the ledger has 0");
    }
    assert!(ledger.is_empty() && !seq.is_owned());
}

#[test]
fn a_plan_that_does_not_fit() {
    let mut index = filled();
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let mut seq = sequence(0..12);
    let plan = planned(&mut index, &mut seq, true);
    assert_eq!(plan.blocks(), [BlockId(9), BlockId(10)]);
    let table = [9, 10, 0].map(BlockId);
    let unpinned = planned(&mut index, &mut seq, false);
    let both = |plan: &Arc<ReusePlan>| {
        let in_place = Begin {
            in_place: Some(Arc::clone(plan)),
            ..Begin::default()
        };
        [Begin::planned(Arc::clone(plan)), in_place]
    };
    for begin in both(&unpinned) {
        let done = ledger.begin(&mut seq, &table, begin);
        assert_invalid(done, "the plan pins nothing, so its 2 blocks in place");
    }
    for begin in both(&plan) {
        let done = SequenceLedger::new(8)
            .unwrap()
            .begin(&mut seq, &table, begin);
        assert_invalid(done, "made for blocks of 4 tokens, the ledger for 8");
    }
    for begin in both(&plan) {
        let done = ledger.begin(&mut sequence(1..13), &table, begin);
        assert_invalid(done, "does not start with the 12 tokens of the plan");
    }
    for begin in both(&plan) {
        let done = ledger.begin(&mut seq, &[9, 11, 0].map(BlockId), begin);
        assert_invalid(done, "blocks[1] is 11, but the plan has block 10 in place");
    }
    for begin in both(&plan) {
        let done = ledger.begin(&mut seq, &[BlockId(9)], begin);
        assert_invalid(done, "1 blocks for a plan that has 2 in place");
    }
    let twice = Begin {
        in_place: Some(Arc::clone(&plan)),
        ..Begin::planned(Arc::clone(&plan))
    };
    let done = ledger.begin(&mut seq, &table, twice);
    assert_invalid(done, "another plan is given with it");
    let begin = Begin {
        num_computed: 8,
        ..Begin::planned(Arc::clone(&plan))
    };
    assert_invalid(ledger.begin(&mut seq, &table, begin), "a plan says itself");
    assert!(ledger.is_empty() && !seq.is_owned());
    let [begin, _] = both(&plan);
    ledger.begin(&mut seq, &table, begin).unwrap();
}

#[test]
fn computed_and_missing_tokens_of_begin() {
    let mut index = filled();
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let mut seq = sequence(0..12);
    let plan = planned(&mut index, &mut seq, true);
    let table = [9, 10, 0, 1].map(BlockId);
    let mut begin = |table: &[BlockId], num_computed, missing: Option<&[(usize, usize)]>| {
        let begin = Begin {
            num_computed,
            missing,
            in_place: Some(Arc::clone(&plan)),
            ..Begin::default()
        };
        let mut seq = sequence(0..12);
        let id = ledger.begin(&mut seq, table, begin)?;
        let known = (ledger.num_committed(id)?, ledger.missing(id)?);
        Ok::<_, Error>(known)
    };
    let refused = [
        ((13, None), "num_computed is 13; it must be in [0, 12]"),
        (
            (0, Some(&[(12, 13)][..])),
            "missing has [12, 13); it must ascend and lie in [0, 12]",
        ),
        ((0, Some(&[(10, 9)])), "missing has [10, 9); it must ascend"),
        (
            (0, Some(&[(9, 11), (10, 12)])),
            "[10, 12) after a range that ends at 11",
        ),
        (
            (0, Some(&[(7, 9)])),
            "missing has [7, 9), but the first 8 tokens are in place",
        ),
        (
            (9, Some(&[(9, 10)])),
            "num_computed is 9 and missing is given; they exclude each other",
        ),
    ];
    for ((num_computed, missing), words) in refused {
        assert_invalid(begin(&table, num_computed, missing), words);
    }
    let short = "KV is claimed up to position 9, the 2 blocks of 4 tokens end at 8";
    assert_invalid(begin(&table[..2], 9, None), short);
    assert_eq!(begin(&table[..2], 8, None), Ok((8, vec![(8, 12)])));
    // Blocks in place count as computed, whatever `num_computed` says.
    assert_eq!(begin(&table, 3, None), Ok((8, vec![(8, 12)])));
    assert_eq!(begin(&table, 12, None), Ok((8, vec![])));
    let gaps = [(8, 9), (9, 9), (9, 10)];
    assert_eq!(begin(&table, 0, Some(&gaps)), Ok((8, vec![(8, 10)])));
    assert!(!seq.is_owned());
}

#[test]
fn ids_that_are_no_tokens() {
    let (mut ledger, mut seq, id) = begun(4);
    let cases: [(&[i64], &str); 4] = [
        (&[5, -2], "ids[1] is -2; it must be in [0, 4294967296)"),
        (
            &[1 << 32],
            "ids[0] is 4294967296; it must be in [0, 4294967296)",
        ),
        (
            &[5, -1, 6],
            "ids[1] is a placeholder (-1), but a final id follows it at 2",
        ),
        (
            &[-1, -1, 6, -1],
            "ids[0] is a placeholder (-1), but a final id follows it at 2",
        ),
    ];
    for (new, words) in cases {
        assert_invalid(ledger.append(id, &mut seq, new), words);
        assert_eq!(seq.len(), 4);
    }
    ledger
        .append(id, &mut seq, &[(1_i64 << 32) - 1, -1])
        .unwrap();
    assert_eq!(seq.tokens(), [0, 1, 2, 3, u32::MAX]);
}

#[test]
fn another_sequence_or_index() {
    let mut index = filled();
    let (mut ledger, mut seq, id) = begun(5);
    let (_, mut others, _) = begun(5);
    let before = format!("{ledger:?}");
    for wrong in [&mut sequence(0..5), &mut others] {
        let words = "is not the one of 5 tokens that the request began with";
        assert_invalid(ledger.append(id, wrong, &[7]), words);
        assert_invalid(ledger.commit(id, wrong, &mut index), words);
        assert_invalid(ledger.finish(id, wrong, &mut index), words);
    }
    let other_size = Config {
        num_blocks: 16,
        block_size: 2,
        ..Config::seeded(0)
    };
    let mut other_size = RadixIndex::new(other_size).unwrap();
    let words = "the index has blocks of 2 tokens, the ledger of 4";
    assert_invalid(ledger.commit(id, &mut seq, &mut other_size), words);
    assert_invalid(ledger.finish(id, &mut seq, &mut other_size), words);
    assert_eq!(format!("{ledger:?}"), before);

    // Another index made the request's plan. Without new blocks, no insert would refuse it.
    let mut planning = sequence(0..9);
    let plan = planned(&mut index, &mut planning, true);
    let begin = Begin::planned(plan);
    let table = [9, 10, 0].map(BlockId);
    let id = ledger.begin(&mut planning, &table, begin).unwrap();
    let mut other = filled();
    let digest = other.digest();
    let done = ledger.commit(id, &mut planning, &mut other);
    assert_invalid(done, "another index");
    let done = ledger.finish(id, &mut planning, &mut other);
    assert_invalid(done, "another index");
    assert_eq!((other.digest(), other.stats().live_plans), (digest, 0));
    ledger.finish(id, &mut planning, &mut index).unwrap();
}

#[test]
fn a_plan_that_was_released_is_stale() {
    let mut index = filled();
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let mut seq = sequence(0..12);
    let plan = planned(&mut index, &mut seq, true);
    let begin = Begin::planned(Arc::clone(&plan));
    let id = ledger
        .begin(&mut seq, &[9, 10, 0].map(BlockId), begin)
        .unwrap();
    ledger.schedule(id, 4, 0).unwrap();
    ledger.confirm(id, 12).unwrap();
    index.release(&plan).unwrap();
    let error = ledger.commit(id, &mut seq, &mut index).unwrap_err();
    assert_refused(&error, ErrorKind::StaleHandle, "");
    assert_eq!(ledger.num_committed(id), Ok(8));
}

#[test]
fn ranges_of_labels_and_blocks() {
    let (ledger, _seq, id) = begun(6);
    assert_invalid(ledger.labels(id, 3, 2), "start and end are 3 and 2");
    assert_invalid(ledger.labels(id, 0, 17), "lie in [0, 16], the table");
    let labels = ledger.labels(id, 1, 16).unwrap();
    let found: Vec<_> = labels
        .iter()
        .map(|run| (run.start, run.end, run.class))
        .collect();
    assert_eq!(found, [(1, 16, Class::Exact)]);
    assert_eq!(ledger.labels(id, 16, 16), Ok(vec![]));
    assert_invalid(ledger.blocks_for(id, 3, 2), "start and end are 3 and 2");
    assert_invalid(
        ledger.blocks_for(id, 0, 7),
        "lie in [0, 6], the tokens that are final",
    );
    assert_eq!(ledger.blocks_for(id, 5, 5), Ok(&[][..]));
    assert_eq!(ledger.blocks_for(id, 3, 6), Ok(&ids(0..2)[..]));
}

#[test]
fn steps_whose_lists_do_not_fit() {
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let (mut one, mut two) = (sequence(0..4), sequence(0..4));
    let first = ledger
        .begin(&mut one, &ids(0..2), Begin::default())
        .unwrap();
    let second = ledger
        .begin(&mut two, &ids(2..4), Begin::default())
        .unwrap();
    let before = format!("{ledger:?}");
    let good = Step {
        requests: &[first, second],
        num_scheduled: &[1, 1],
        num_computed: &[0, 0],
        ids: &[7_i64, 8],
        offsets: &[0, 1, 2],
        num_drafts: Some(&[0, 0]),
    };
    let cases: [(Change<'_>, &str); 8] = [
        (
            &|step| step.num_scheduled = &[1],
            "num_scheduled has 1 items; 2 requests need 2",
        ),
        (
            &|step| step.num_computed = &[0; 3],
            "num_computed has 3 items; 2 requests need 2",
        ),
        (
            &|step| step.num_drafts = Some(&[0]),
            "num_drafts has 1 items; 2 requests need 2",
        ),
        (
            &|step| step.offsets = &[0, 2],
            "offsets has 2 items; 2 requests need 3",
        ),
        (
            &|step| step.offsets = &[1, 1, 2],
            "offsets go from 1 to 2; they must ascend from 0 to the 2 ids",
        ),
        (&|step| step.offsets = &[0, 1, 1], "offsets go from 0 to 1"),
        (&|step| step.offsets = &[0, 1, 3], "offsets go from 0 to 3"),
        (&|step| step.offsets = &[0, 3, 2], "offsets go from 0 to 2"),
    ];
    let refused = |done: Result<(), StepError>, at: Option<usize>, words: &str| {
        let error = done.unwrap_err();
        assert_eq!(error.at, at);
        assert_refused(&error.error, ErrorKind::InvalidArgument, words);
    };
    for (change, words) in cases {
        let mut step = good;
        change(&mut step);
        let done = ledger.step::<_, Error>(&step, |_, _| panic!("no ids are given"));
        refused(done, None, words);
    }
    let ids = Step {
        ids: &[7, -2],
        ..good
    };
    let done = ledger.step::<_, Error>(&ids, |_, _| panic!("no ids are given"));
    refused(done, Some(1), "of the ids from 1 on, ids[0] is -2");
    let same = Step {
        requests: &[first, first],
        ..good
    };
    let done = ledger.step::<_, Error>(&same, |_, _| panic!("no ids are given"));
    refused(done, Some(1), "the request at 1 came before in this step");
    assert_eq!(format!("{ledger:?}"), before);
    let mut seqs = [&mut one, &mut two];
    ledger
        .step::<_, Error>(&good, |at, ids| ids.to(seqs[at]))
        .unwrap();
    assert_eq!((one.len(), two.len()), (5, 5));
}

#[test]
fn spans_outside_the_sequence() {
    let (mut ledger, _seq, id) = begun(6);
    assert_invalid(ledger.tag(id, &[span(0, 4), span(4, 7)]), "");
    assert_eq!(ledger.spans(id), Ok(vec![]));
    ledger.tag(id, &[span(0, 6)]).unwrap();
}

#[test]
fn requests_that_ended() {
    let mut index = index();
    let (mut ledger, mut seq, id) = begun(4);
    ledger.finish(id, &mut seq, &mut index).unwrap();
    let mut other = sequence(1..2);
    let stale = |error: Error| {
        assert_refused(
            &error,
            ErrorKind::StaleHandle,
            "the ledger has no such request",
        );
    };
    stale(ledger.labels(id, 0, 0).unwrap_err());
    stale(ledger.blocks_for(id, 0, 0).unwrap_err());
    stale(ledger.pins(id).unwrap_err());
    stale(ledger.untag(id).unwrap_err());
    stale(ledger.source(id).unwrap_err());
    stale(ledger.num_committed(id).unwrap_err());
    stale(ledger.append(id, &mut other, &[1]).unwrap_err());
    stale(ledger.commit(id, &mut other, &mut index).unwrap_err());
    stale(ledger.finish(id, &mut other, &mut index).unwrap_err());
    stale(ledger.forget(id).unwrap_err());
}

/// `finish` and an index without groups cannot return the ids of a ledger with groups.
#[test]
fn a_ledger_with_groups_is_finished_with_their_ids() {
    let groups = vec![Group::window("swa", 5, 4, SIZE)];
    let mut index = RadixIndex::new(Config {
        num_blocks: 16,
        block_size: SIZE,
        groups: groups.clone(),
        ..Config::seeded(0)
    })
    .unwrap();
    let mut ledger = SequenceLedger::with_groups(SIZE, groups).unwrap();
    let mut seq = sequence(0..8);
    let begin = Begin {
        num_computed: 8,
        ..Begin::default()
    };
    let id = ledger.begin(&mut seq, &ids(0..3), begin).unwrap();
    for group in [0, 2] {
        assert_invalid(
            ledger.hold(id, group, &[]),
            "the ledger has 1 groups besides group 0, from 1",
        );
    }
    ledger
        .hold(id, 1, &[(SIZE, BlockId(2)), (2 * SIZE, BlockId(3))])
        .unwrap();
    let before = index.digest();
    assert_invalid(
        ledger.finish(id, &mut seq, &mut index),
        "the ledger has group \"swa\" besides group 0; finish_groups returns its ids",
    );
    assert_eq!(index.digest(), before);
    let (done, of_groups) = ledger.finish_groups(id, &mut seq, &mut index, &[]).unwrap();
    assert_eq!((done.blocks, done.surplus), (ids(0..2), ids(2..3)));
    assert_eq!(of_groups[0].blocks, [Some(BlockId(2))]);
    assert_eq!(of_groups[0].surplus, [BlockId(3)]);
}
