//! Tests the rules of the ledger, each with its smallest history.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use kvtrie_core::{
    BlockId, Class, Config, Error, Imported, InsertOptions, Namespace, PlanOptions, RadixIndex,
    ReusePlan, ReusePolicy, Salt, SessionId, Source, Span, TokenSequence,
};
use kvtrie_transfer::{Begin, LabelRun, LedgerSource, RequestId, SequenceLedger, Step, StepIds};

pub(super) const SIZE: usize = 4;

pub(super) fn sequence(tokens: impl IntoIterator<Item = u32>) -> TokenSequence {
    let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
    let tokens = tokens.into_iter().collect();
    TokenSequence::new(Arc::new(namespace), tokens, Vec::new()).unwrap()
}

pub(super) fn ids(ids: Range<u32>) -> Vec<BlockId> {
    ids.map(BlockId).collect()
}

fn config() -> Config {
    Config {
        num_blocks: 16,
        block_size: SIZE,
        ..Config::seeded(0)
    }
}

pub(super) fn index() -> RadixIndex {
    RadixIndex::new(config()).unwrap()
}

/// An index that finds moved runs of eight tokens.
fn index_of_moved_runs() -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks: 32,
        moved_runs: true,
        min_run: 8,
        ..config()
    })
    .unwrap()
}

/// Inserts the tokens into these blocks.
pub(super) fn put(
    index: &mut RadixIndex,
    tokens: Range<u32>,
    blocks: Range<u32>,
    source: Source<'_>,
) {
    let mut seq = sequence(tokens);
    let options = InsertOptions::new(seq.len(), source);
    index.insert(&mut seq, &ids(blocks), options).unwrap();
}

pub(super) fn span(start: usize, end: usize) -> Span {
    let kind = "user".to_owned();
    Span { start, end, kind }
}

/// An exact plan of all tokens but the last.
pub(super) fn planned(
    index: &mut RadixIndex,
    seq: &mut TokenSequence,
    pin: bool,
) -> Arc<ReusePlan> {
    let options = PlanOptions {
        pin,
        ..PlanOptions::default()
    };
    Arc::new(index.plan(seq, &ReusePolicy::EXACT_ONLY, options).unwrap())
}

/// The runs of labels as (start, end, class, hops).
fn labels(ledger: &SequenceLedger, id: RequestId, end: usize) -> Vec<(usize, usize, Class, u16)> {
    let runs = ledger.labels(id, 0, end).unwrap();
    let fields = |run: &LabelRun| (run.start, run.end, run.class, run.hops);
    runs.iter().map(fields).collect()
}

fn imported(exact_until: usize, hops: u16) -> Imported {
    Imported::new(exact_until, hops)
}

/// A request with imported KV that is exact up to `exact_until`.
pub(super) fn begin_imported(exact_until: usize, hops: u16, num_computed: usize) -> Begin<'static> {
    Begin {
        source: LedgerSource::Imported(imported(exact_until, hops)),
        num_computed,
        ..Begin::default()
    }
}

/// A request of so many tokens, all computed, in a table for 16.
pub(super) fn begun(tokens: u32) -> (SequenceLedger, TokenSequence, RequestId) {
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let mut seq = sequence(0..tokens);
    let id = ledger
        .begin(&mut seq, &ids(0..4), Begin::default())
        .unwrap();
    ledger.schedule(id, seq.len(), 0).unwrap();
    ledger.confirm(id, seq.len()).unwrap();
    (ledger, seq, id)
}

fn step(
    ledger: &mut SequenceLedger,
    (id, seq): (RequestId, &mut TokenSequence),
    (computed, scheduled, drafts): (usize, usize, usize),
    new: &[u32],
) {
    let step = Step {
        requests: &[id],
        num_scheduled: &[scheduled],
        num_computed: &[computed],
        ids: new,
        offsets: &[0, new.len()],
        num_drafts: Some(&[drafts]),
    };
    let done = ledger.step::<_, Error>(&step, |_, ids| ids.to(seq));
    done.unwrap();
}

#[test]
fn a_step_that_fails_rolls_back_every_request_before() {
    const REQUESTS: usize = 4;
    for failing in 0..REQUESTS {
        let mut ledger = SequenceLedger::new(SIZE).unwrap();
        let mut seqs: Vec<TokenSequence> = (0..4).map(|n| sequence(0..4 + n)).collect();
        let mut requests = Vec::new();
        for (seq, first) in seqs.iter_mut().zip([0, 10, 20, 30]) {
            let table = ids(first..first + 4);
            requests.push(ledger.begin(seq, &table, Begin::default()).unwrap());
        }
        let before = format!("{ledger:?}");
        let step = Step {
            requests: &requests,
            num_scheduled: &[1; REQUESTS],
            num_computed: &[0; REQUESTS],
            ids: &[7_u32, 8, 9, 10],
            offsets: &[0, 1, 2, 3, 4],
            num_drafts: None,
        };
        let calls = Cell::new(0);
        let visit = |at: usize, ids: StepIds<'_>| {
            calls.set(calls.get() + 1);
            if at == failing {
                return Err(
                    TokenSequence::new(Arc::clone(seqs[0].namespace()), vec![], vec![])
                        .unwrap()
                        .truncate(1)
                        .unwrap_err(),
                );
            }
            ids.to(&mut seqs[at])
        };
        let error = ledger.step(&step, visit).unwrap_err();
        assert_eq!(error.at, Some(failing));
        // Each earlier request was visited twice: to append its ids, and to remove them.
        assert_eq!(calls.get(), 2 * failing + 1);
        for (seq, tokens) in seqs.iter().zip(4..) {
            let tokens: Vec<u32> = (0..tokens).collect();
            assert_eq!(seq.tokens(), tokens, "request {failing} failed");
        }
        assert_eq!(format!("{ledger:?}"), before);
    }
}

#[test]
fn a_step_forgets_the_drafts_that_were_given_up() {
    let (mut ledger, mut seq, id) = begun(4);
    // A token and two drafts are issued. The engine counts only the token, because the drafts were rejected.
    step(&mut ledger, (id, &mut seq), (4, 3, 2), &[]);
    step(&mut ledger, (id, &mut seq), (5, 2, 0), &[50]);
    assert_eq!(ledger.lookahead(id), Ok((5, 7)));
    ledger.append(id, &mut seq, &[51]).unwrap();
    ledger.confirm(id, 6).unwrap();
    // No draft was verified, so the positions stay issued.
    assert_eq!(ledger.lookahead(id), Ok((6, 7)));
}

#[test]
fn a_rollback_forgets_the_draft_at_its_position() {
    for (to, kept) in [(4, false), (5, false), (6, true)] {
        let (mut ledger, mut seq, id) = begun(4);
        // The drafts start at 5.
        ledger.schedule(id, 3, 2).unwrap();
        ledger.rollback(id, to, false).unwrap();
        ledger.schedule(id, 7 - to, 0).unwrap();
        ledger.confirm(id, 7).unwrap();
        ledger.append(id, &mut seq, &[50, 51, 52]).unwrap();
        // An id after a draft proves nothing about its KV before the engine has counted.
        let end = if kept { 5 } else { 7 };
        assert_eq!(ledger.final_end(id), Ok(end), "rolled back to {to}");
    }
}

#[test]
fn a_rollback_drops_the_cached_segments_after_it() {
    // Of 12 tokens, 0..2, 4..6 and 8..10 have KV.
    let begin = |ledger: &mut SequenceLedger, seq: &mut TokenSequence| {
        let begin = Begin {
            missing: Some(&[(2, 4), (6, 8), (10, 12)]),
            ..Begin::default()
        };
        ledger.begin(seq, &ids(0..3), begin).unwrap()
    };
    // The issued positions, and the ranges that the rollback returns.
    let cases = [
        (0, 1, vec![(1, 2), (4, 6), (8, 10)]),
        (1, 3, vec![(4, 6), (8, 10)]),
        (2, 4, vec![(4, 6), (8, 10)]),
        (2, 5, vec![(5, 6), (8, 10)]),
    ];
    for (issued, to, gone) in cases {
        let mut ledger = SequenceLedger::new(SIZE).unwrap();
        let mut seq = sequence(0..12);
        let id = begin(&mut ledger, &mut seq);
        assert_eq!(ledger.missing(id).unwrap(), [(2, 4), (6, 8), (10, 12)]);
        ledger.schedule(id, issued, 0).unwrap();
        let back = ledger.rollback(id, to, false).unwrap();
        assert_eq!(back.ranges, gone, "rolled back to {to}");
        let there = ledger.final_end(id).unwrap();
        let missing: &[(usize, usize)] = match to {
            5 => &[(2, 4), (5, 12)],
            _ => &[(there, 12)],
        };
        assert_eq!(ledger.missing(id).unwrap(), missing, "rolled back to {to}");
        // Positions that are issued after the rollback skip nothing.
        ledger.schedule(id, 12 - to, 0).unwrap();
        assert_eq!(ledger.lookahead(id), Ok((there, 12)));
    }
}

#[test]
fn a_finish_after_its_plan_claims_what_is_committed_as_exact() {
    let mut index = index();
    put(&mut index, 0..4, 9..10, Source::Computed);
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let mut seq = sequence(0..16);
    let plan = planned(&mut index, &mut seq, true);
    let table = [9, 0, 1, 2].map(BlockId);
    let begin = Begin::planned(Arc::clone(&plan));
    let id = ledger.begin(&mut seq, &table, begin).unwrap();
    ledger.schedule(id, 4, 0).unwrap();
    ledger.confirm(id, 8).unwrap();
    let done = ledger.commit(id, &mut seq, &mut index).unwrap();
    assert_eq!((done.blocks, done.num_exact), (vec![BlockId(0)], 8));
    // Four more tokens are computed, and the plan is released before they are committed.
    ledger.schedule(id, 4, 0).unwrap();
    ledger.confirm(id, 12).unwrap();
    index.release(&plan).unwrap();
    let done = ledger.finish(id, &mut seq, &mut index).unwrap();
    assert_eq!(done.num_exact, 8, "no more than what the index has");
    assert_eq!(done.surplus, [1, 2].map(BlockId));
    assert!(done.blocks.is_empty());
}

#[test]
fn a_finish_offers_what_is_final_and_computed_alone() {
    let mut index = index();
    let (mut ledger, mut seq, id) = begun(9);
    // There is a draft at 10, and an id after it that no claim has confirmed.
    ledger.schedule(id, 3, 2).unwrap();
    ledger.confirm(id, 12).unwrap();
    ledger.append(id, &mut seq, &[50, 51, 52]).unwrap();
    let done = ledger.finish(id, &mut seq, &mut index).unwrap();
    assert_eq!((done.blocks, done.num_exact), (ids(0..2), 8));
    assert_eq!(done.surplus, ids(2..4));
}

#[test]
fn a_pin_that_its_holder_released_does_not_stop_a_commit_half_way() {
    let mut index = index();
    let (mut ledger, mut seq, id) = begun(4);
    ledger.commit(id, &mut seq, &mut index).unwrap();
    let pin = Arc::clone(&ledger.pins(id).unwrap()[0]);
    index.release(&pin).unwrap();
    ledger.schedule(id, 4, 0).unwrap();
    ledger.append(id, &mut seq, &[50, 51, 52, 53]).unwrap();
    ledger.confirm(id, 8).unwrap();
    let done = ledger.commit(id, &mut seq, &mut index).unwrap();
    assert_eq!(done.blocks, ids(1..2));
    assert_eq!(ledger.num_committed(id), Ok(8));
    // One plan pins the committed blocks.
    assert_eq!(ledger.pins(id).unwrap().len(), 1);
    assert_eq!((index.stats().live_plans, index.stats().pinned), (1, 2));
    ledger.finish(id, &mut seq, &mut index).unwrap();
    assert_eq!(index.stats().live_plans, 0);
}

#[test]
fn a_ledger_knows_its_block_size_and_which_requests_live() {
    let mut index = index();
    assert!(SequenceLedger::new(SIZE).unwrap().is_empty());
    let (mut ledger, mut seq, id) = begun(4);
    assert_eq!(ledger.block_size(), SIZE);
    assert!(!ledger.is_empty() && ledger.is_live(id));
    ledger.finish(id, &mut seq, &mut index).unwrap();
    assert!(ledger.is_empty() && !ledger.is_live(id));
}

#[test]
fn an_answer_that_is_less_exact_lowers_the_labels() {
    let mut index = index();
    let (mut ledger, mut seq, id) = begun(4);
    ledger.commit(id, &mut seq, &mut index).unwrap();
    // The pin is released, and other KV replaces the block.
    let pin = Arc::clone(&ledger.pins(id).unwrap()[0]);
    index.release(&pin).unwrap();
    assert_eq!(index.evict(1), ids(0..1));
    put(&mut index, 0..4, 9..10, Source::Imported(imported(0, 3)));
    ledger.append(id, &mut seq, &[50, 51, 52, 53, 54]).unwrap();
    ledger.schedule(id, 4, 0).unwrap();
    ledger.confirm(id, 8).unwrap();
    assert_eq!(ledger.labels(id, 0, 8).unwrap().len(), 1);
    let done = ledger.commit(id, &mut seq, &mut index).unwrap();
    assert_eq!((done.blocks, done.num_exact), (ids(1..2), 0));
    // The ledger does not know the hops in the index.
    assert_eq!(labels(&ledger, id, 16), [(0, 16, Class::Approximate, 0)]);
    // A commit without new blocks returns the same.
    let done = ledger.commit(id, &mut seq, &mut index).unwrap();
    assert_eq!((done.blocks, done.num_exact), (vec![], 0));
}

#[test]
fn spans_that_the_index_has_are_not_taken_back() {
    let mut index = index();
    let (mut ledger, mut seq, id) = begun(8);
    ledger.commit(id, &mut seq, &mut index).unwrap();
    ledger.append(id, &mut seq, &[50, 51, 52, 53]).unwrap();
    let given = [span(0, 4), span(6, 10), span(8, 12)];
    ledger.tag(id, &given).unwrap();
    // Only spans are new. The commit gives the committed part of the second and nothing of the third.
    ledger.commit(id, &mut seq, &mut index).unwrap();
    let told: Vec<_> = index.tags(&seq);
    let told: Vec<_> = told.iter().map(|span| (span.start, span.end)).collect();
    assert_eq!(told, [(0, 4), (6, 8)]);
    ledger.tag(id, &[span(0, 2)]).unwrap();
    ledger.untag(id).unwrap();
    assert_eq!(ledger.spans(id), Ok(given[..2].to_vec()));
}

#[test]
fn a_plan_in_place_leads_the_table_whatever_the_source_says() {
    let mut index = index();
    put(&mut index, 0..8, 8..10, Source::Computed);
    let mut seq = sequence(0..20);
    let begin = Begin {
        in_place: Some(planned(&mut index, &mut seq, true)),
        ..begin_imported(13, 2, 20)
    };
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let table = [8, 9, 0, 1, 2].map(BlockId);
    let id = ledger.begin(&mut seq, &table, begin).unwrap();
    assert_eq!(ledger.new_range(id), Ok((8, 20)));
    assert_eq!(
        labels(&ledger, id, 20),
        [(0, 12, Class::Exact, 0), (12, 20, Class::Approximate, 2)]
    );
    let done = ledger.commit(id, &mut seq, &mut index).unwrap();
    assert_eq!((done.blocks, done.num_exact), (ids(0..3), 12));
}

#[test]
fn pins_hold_only_blocks_in_place_and_stay_when_a_block_is_replaced() {
    let mut index = index_of_moved_runs();
    put(&mut index, 0..24, 20..26, Source::Computed);
    // The blocks are approximate, and their later tokens are cached elsewhere as well.
    let text = || sequence((90..94).chain(2..22));
    let mut seq = text();
    let begin = begin_imported(0, 1, 8);
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let id = ledger.begin(&mut seq, &ids(0..6), begin).unwrap();
    ledger.commit(id, &mut seq, &mut index).unwrap();
    let pin = &ledger.pins(id).unwrap()[0];
    assert_eq!(pin.blocks(), ids(0..2));
    assert_eq!(
        (pin.num_tokens(Class::Compute), pin.segments().len()),
        (16, 2)
    );
    // Another request computes the first block. The ledger's pin of the block that it replaces must stay.
    let mut other = text();
    let options = InsertOptions::new(4, Source::Computed);
    index.insert(&mut other, &ids(10..11), options).unwrap();
    assert_eq!(index.stats().condemned, 1);
    ledger.schedule(id, 4, 0).unwrap();
    ledger.confirm(id, 12).unwrap();
    ledger.commit(id, &mut seq, &mut index).unwrap();
    assert_eq!(ledger.pins(id).unwrap().len(), 2);
    assert_eq!(index.stats().condemned, 1);
    ledger.finish(id, &mut seq, &mut index).unwrap();
    assert_eq!(index.take_freed(), ids(0..1));
}

#[test]
fn every_commit_gives_the_session_of_its_request() {
    let mut index = index_of_moved_runs();
    let session = Some(SessionId::new("a").unwrap());
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let mut seq = sequence(0..16);
    let begin = Begin {
        num_computed: 8,
        session,
        ..Begin::default()
    };
    let id = ledger.begin(&mut seq, &ids(0..5), begin).unwrap();
    ledger.commit(id, &mut seq, &mut index).unwrap();
    ledger.schedule(id, 8, 0).unwrap();
    ledger.confirm(id, 16).unwrap();
    ledger.finish(id, &mut seq, &mut index).unwrap();
    let policy = ReusePolicy {
        approximate: true,
        ..ReusePolicy::EXACT_ONLY
    };
    for (session, count) in [(session, 16), (None, 0)] {
        let options = PlanOptions {
            session,
            ..PlanOptions::default()
        };
        let prompt = &mut sequence([90].into_iter().chain(0..16).chain([91]));
        let plan = index.plan(prompt, &policy, options).unwrap();
        assert_eq!(plan.num_tokens(Class::Approximate), count);
        index.release(&plan).unwrap();
    }
}

#[test]
fn what_is_in_place_has_the_hops_that_the_index_has() {
    let mut index = index();
    for (end, from) in [(16, imported(8, 1)), (20, imported(8, 3))] {
        let options = InsertOptions::new(end, Source::Imported(from));
        let mut known = sequence(0..20);
        index.insert(&mut known, &ids(8..13), options).unwrap();
    }
    let mut seq = sequence(0..32);
    let policy = ReusePolicy::LAXEST;
    let plan = index.plan(&mut seq, &policy, PlanOptions::default());
    let plan = Arc::new(plan.unwrap());
    assert_eq!(plan.blocks(), ids(8..13));
    let begin = |source| Begin {
        source,
        num_computed: 32,
        missing: None,
        in_place: Some(Arc::clone(&plan)),
        session: None,
    };
    let table = [8, 9, 10, 11, 12, 0, 1, 2].map(BlockId);
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    // Tokens computed after approximate blocks are approximate, with the hops of their source.
    let sources = [
        (LedgerSource::Imported(imported(30, 2)), 2),
        (LedgerSource::Computed, 0),
    ];
    for (source, hops) in sources {
        let id = ledger.begin(&mut seq, &table, begin(source)).unwrap();
        let expected = [
            (0, 8, Class::Exact, 0),
            (8, 16, Class::Approximate, 1),
            (16, 20, Class::Approximate, 3),
            (20, 32, Class::Approximate, hops),
        ];
        assert_eq!(labels(&ledger, id, 32), expected);
        ledger.forget(id).unwrap();
    }
}

#[test]
fn an_answer_lowers_the_labels_of_what_was_said_to_be_exact_alone() {
    let mut index = index();
    let mut ledger = SequenceLedger::new(SIZE).unwrap();
    let mut seq = sequence(0..24);
    let begin = begin_imported(18, 2, 8);
    let id = ledger.begin(&mut seq, &ids(0..6), begin).unwrap();
    ledger.commit(id, &mut seq, &mut index).unwrap();
    let pin = Arc::clone(&ledger.pins(id).unwrap()[0]);
    index.release(&pin).unwrap();
    assert_eq!(index.discard(&ids(1..2)).unwrap(), ids(1..2));
    let options = InsertOptions {
        start: 4,
        ..InsertOptions::new(8, Source::Imported(imported(0, 3)))
    };
    index
        .insert(&mut sequence(0..8), &ids(9..10), options)
        .unwrap();
    ledger.schedule(id, 4, 0).unwrap();
    ledger.confirm(id, 12).unwrap();
    let done = ledger.commit(id, &mut seq, &mut index).unwrap();
    assert_eq!((done.blocks, done.num_exact), (ids(2..3), 4));
    let expected = [
        (0, 4, Class::Exact, 0),
        (4, 16, Class::Approximate, 0),
        (16, 24, Class::Approximate, 2),
    ];
    assert_eq!(labels(&ledger, id, 24), expected);
}

#[test]
fn drafts_under_way_stand_so_much_further_in_front_as_others_were_refused() {
    let (mut ledger, mut seq, id) = begun(4);
    // A token and three drafts are issued, and before their ids arrive, another token and two drafts.
    step(&mut ledger, (id, &mut seq), (4, 4, 3), &[]);
    step(&mut ledger, (id, &mut seq), (8, 3, 2), &[]);
    assert_eq!(ledger.lookahead(id), Ok((4, 11)));
    // One of the three is accepted and two are rejected: the next step begins at 6, its drafts at 7.
    step(&mut ledger, (id, &mut seq), (9, 0, 0), &[50, 51]);
    assert_eq!(ledger.lookahead(id), Ok((6, 9)));
    ledger.append(id, &mut seq, &[52, 53]).unwrap();
    assert_eq!(
        ledger.final_end(id),
        Ok(7),
        "the draft at 7 is not counted yet"
    );
}

#[test]
fn what_is_held_is_no_worse_than_what_was_committed() {
    let mut index = index_of_moved_runs();
    // After an exact block, the index has an approximate one.
    put(&mut index, 0..8, 8..10, Source::Imported(imported(4, 1)));
    let (mut ledger, mut seq, id) = begun(4);
    ledger.append(id, &mut seq, &[4, 5, 6, 7, 8]).unwrap();
    ledger.commit(id, &mut seq, &mut index).unwrap();
    assert_eq!(ledger.pins(id).unwrap()[0].blocks(), ids(8..9));
    ledger.finish(id, &mut seq, &mut index).unwrap();
    // All tokens but the first are cached elsewhere as well, but they are not copied.
    put(&mut index, 40..56, 10..14, Source::Computed);
    let mut seq = sequence(39..55);
    let begin = begin_imported(0, 1, 4);
    let id = ledger.begin(&mut seq, &ids(20..24), begin).unwrap();
    ledger.commit(id, &mut seq, &mut index).unwrap();
    let pin = &ledger.pins(id).unwrap()[0];
    assert_eq!(
        (pin.blocks(), pin.num_tokens(Class::Compute)),
        (&ids(20..21)[..], 12)
    );
}
