//! Compares random calls on a ledger with a list of slots, and its commits with inserts into an index of the same
//! history.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_wrap,
    clippy::needless_pass_by_value,
    clippy::too_many_lines,
    reason = "a test stops at what it does not expect, and a step is read in one piece"
)]

#[cfg(feature = "failpoints")]
mod failures;
mod naive;
mod refusals;
mod rules;

use std::sync::Arc;

use kvtrie_core::{
    BlockAllocator, BlockId, Class, Config, Error, Imported, InsertOptions, Inserted, Namespace,
    PlanOptions, RadixIndex, ReusePlan, ReusePolicy, Salt, Source, Span, TokenSequence,
};
use kvtrie_transfer::{Begin, LabelRun, LedgerSource, RequestId, SequenceLedger, Step};
use naive::Request;
use proptest::prelude::*;

const SIZE: usize = 4;
const NUM_BLOCKS: usize = 64;
const LIVE: usize = 3;

#[derive(Clone, Debug)]
enum Call {
    Begin {
        at: usize,
        tokens: Vec<u32>,
        how: usize,
        part: usize,
        extra: usize,
    },
    Schedule {
        at: usize,
        tokens: usize,
        drafts: usize,
    },
    /// Issues and computes all missing tokens.
    Fill {
        at: usize,
    },
    /// Issues drafts and claims them before it is known which are accepted.
    Speculate {
        at: usize,
        drafts: usize,
    },
    Append {
        at: usize,
        ids: Vec<i64>,
    },
    /// A claim relative to the final and computed tokens or to the issued ones, so that most calls are valid.
    Confirm {
        at: usize,
        ahead: i64,
    },
    Step {
        items: Vec<(usize, Vec<i64>, i64, usize, usize)>,
        with_drafts: bool,
    },
    AddBlocks {
        at: usize,
        count: usize,
        twice: bool,
    },
    Rollback {
        at: usize,
        back: i64,
        drop: bool,
    },
    Tag {
        at: usize,
        start: usize,
        len: usize,
        kind: usize,
    },
    Commit {
        at: usize,
    },
    Finish {
        at: usize,
    },
    Forget {
        at: usize,
    },
    Evict {
        count: usize,
    },
}

fn ids() -> impl Strategy<Value = Vec<i64>> {
    let id = prop_oneof![12 => 0i64..2, 2 => Just(-1), 1 => Just(1 << 32)];
    prop::collection::vec(id, 0..6)
}

/// Unrelated texts, and one text without a part of it.
fn texts() -> impl Strategy<Value = Vec<u32>> {
    let without = |(cut, len): (usize, usize)| -> Vec<u32> {
        let text = (0..48u32).map(|at| at * at % 23 % 7);
        let kept = text.enumerate().filter(|&(at, _)| at < 8 || at >= 8 + cut);
        kept.map(|(_, token)| token).take(len).collect()
    };
    prop_oneof![
        prop::collection::vec(0u32..2, 0..44),
        (prop_oneof![Just(0usize), Just(5), Just(8)], 0usize..44).prop_map(without),
    ]
}

fn calls() -> impl Strategy<Value = Call> {
    let at = 0..LIVE;
    let few = prop_oneof![0usize..6, 0usize..24];
    let drafts = prop_oneof![3 => Just(0usize), 2 => 0usize..4];
    let item = (
        at.clone(),
        ids(),
        prop_oneof![-2i64..9, Just(20)],
        few.clone(),
        drafts.clone(),
    );
    prop_oneof![
        4 => (at.clone(), texts(), 0usize..6, 0usize..40, 0usize..4)
            .prop_map(|(at, tokens, how, part, extra)| Call::Begin { at, tokens, how, part, extra }),
        4 => (at.clone(), few.clone(), drafts).prop_map(|(at, tokens, drafts)| Call::Schedule { at, tokens, drafts }),
        5 => at.clone().prop_map(|at| Call::Fill { at }),
        4 => (at.clone(), 1usize..5).prop_map(|(at, drafts)| Call::Speculate { at, drafts }),
        5 => (at.clone(), ids()).prop_map(|(at, ids)| Call::Append { at, ids }),
        4 => (at.clone(), -2i64..24).prop_map(|(at, ahead)| Call::Confirm { at, ahead }),
        6 => (prop::collection::vec(item, 1..4), any::<bool>())
            .prop_map(|(items, with_drafts)| Call::Step { items, with_drafts }),
        2 => (at.clone(), 0usize..4, prop::bool::weighted(0.1))
            .prop_map(|(at, count, twice)| Call::AddBlocks { at, count, twice }),
        1 => (at.clone(), -3i64..12, any::<bool>()).prop_map(|(at, back, drop)| Call::Rollback { at, back, drop }),
        1 => (at.clone(), 0usize..30, 0usize..12, 0usize..2)
            .prop_map(|(at, start, len, kind)| Call::Tag { at, start, len, kind }),
        3 => at.clone().prop_map(|at| Call::Commit { at }),
        2 => at.clone().prop_map(|at| Call::Finish { at }),
        1 => at.prop_map(|at| Call::Forget { at }),
        1 => (0usize..6).prop_map(|count| Call::Evict { count }),
    ]
}

/// An index with its free list. The ledger commits to one world, and plain inserts go to its twin.
struct World {
    index: RadixIndex,
    pool: BlockAllocator,
}

impl World {
    fn new() -> Self {
        let config = Config {
            num_blocks: NUM_BLOCKS as u64,
            block_size: SIZE,
            moved_runs: true,
            min_run: 8,
            ..Config::seeded(0)
        };
        Self {
            index: RadixIndex::new(config).unwrap(),
            pool: BlockAllocator::new(NUM_BLOCKS as u64).unwrap(),
        }
    }

    fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        self.pool.allocate(count, Some(&mut self.index)).ok()
    }

    fn free(&mut self, ids: &[BlockId]) {
        self.pool.free(ids).unwrap();
    }

    fn settle(&mut self, done: &Inserted) {
        self.free(&done.duplicates);
        self.free(&done.freed);
    }

    fn reclaim(&mut self) {
        let freed = self.index.take_freed();
        self.free(&freed);
    }
}

struct LiveRequest {
    id: RequestId,
    seq: TokenSequence,
    naive: Request,
    twin: TokenSequence,
    source: LedgerSource,
    /// The twin's plans of committed blocks, if the source is not a plan.
    pins: Vec<ReusePlan>,
    spans: Vec<Span>,
    given: usize,
    given_until: usize,
    /// End of the exact tokens according to the source and the blocks in place.
    by_source: usize,
    /// End of the exact tokens according to the index.
    by_index: usize,
}

struct Test {
    namespace: Arc<Namespace>,
    ledger: SequenceLedger,
    ours: World,
    twin: World,
    live: Vec<Option<LiveRequest>>,
    refused: usize,
    ended: usize,
}

fn plain(ids: &[BlockId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

fn blocks(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().copied().map(BlockId).collect()
}

fn positions(ranges: &[(usize, usize)]) -> Vec<usize> {
    for pair in ranges.windows(2) {
        assert!(pair[0].1 < pair[1].0, "{ranges:?} ascend, with gaps");
    }
    assert!(ranges.iter().all(|range| range.0 < range.1), "{ranges:?}");
    ranges.iter().flat_map(|&(start, end)| start..end).collect()
}

impl Test {
    fn new() -> Self {
        let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
        Self {
            namespace: Arc::new(namespace),
            ledger: SequenceLedger::new(SIZE).unwrap(),
            ours: World::new(),
            twin: World::new(),
            live: (0..LIVE).map(|_| None).collect(),
            refused: 0,
            ended: 0,
        }
    }

    /// The state that no refused call may change.
    fn dump(&self) -> String {
        let seqs: Vec<_> = self
            .live
            .iter()
            .map(|live| live.as_ref().map(|live| live.seq.tokens().to_vec()))
            .collect();
        let (free, digest) = (self.ours.pool.num_free(), self.ours.index.digest());
        format!("{:?} {seqs:?} {free} {digest}", self.ledger)
    }

    fn sequence(&self, tokens: &[u32]) -> TokenSequence {
        TokenSequence::new(Arc::clone(&self.namespace), tokens.to_vec(), Vec::new()).unwrap()
    }

    fn run(&mut self, call: &Call) {
        let before = self.dump();
        if self.call(call).is_err() {
            self.refused += 1;
            assert_eq!(
                before,
                self.dump(),
                "{call:?} was refused and changed something"
            );
        }
        self.check();
    }

    /// Makes the call in both worlds. If both refuse it, returns the error.
    fn call(&mut self, call: &Call) -> Result<(), ()> {
        match call {
            Call::Begin {
                at,
                tokens,
                how,
                part,
                extra,
            } => self.begin(*at, tokens, *how, *part, *extra),
            Call::Schedule { at, tokens, drafts } => {
                let Some(live) = &mut self.live[*at] else {
                    return Ok(());
                };
                same(
                    self.ledger.schedule(live.id, *tokens, *drafts),
                    live.naive.schedule(*tokens, *drafts),
                )
            }
            Call::Fill { at } => {
                let Some(live) = &self.live[*at] else {
                    return Ok(());
                };
                let issued = live.naive.issued();
                let tokens = live
                    .naive
                    .missing()
                    .iter()
                    .filter(|&&at| at >= issued)
                    .count();
                self.call(&Call::Schedule {
                    at: *at,
                    tokens,
                    drafts: 0,
                })?;
                self.call(&Call::Confirm { at: *at, ahead: 20 })
            }
            Call::Speculate { at, drafts } => {
                self.call(&Call::Schedule {
                    at: *at,
                    tokens: drafts + 1,
                    drafts: *drafts,
                })?;
                self.call(&Call::Confirm { at: *at, ahead: 20 })
            }
            Call::Append { at, ids } => {
                let Some(live) = &mut self.live[*at] else {
                    return Ok(());
                };
                let done = same(
                    self.ledger.append(live.id, &mut live.seq, ids),
                    live.naive.append(ids),
                );
                live.follow();
                done
            }
            Call::Confirm { at, ahead } => {
                let Some(live) = &mut self.live[*at] else {
                    return Ok(());
                };
                let to = live.ahead(*ahead);
                same(self.ledger.confirm(live.id, to), live.naive.confirm(to))
            }
            Call::Step { items, with_drafts } => self.step(items, *with_drafts),
            Call::AddBlocks { at, count, twice } => {
                if self.live[*at].is_none() {
                    return Ok(());
                }
                let Some(mut new) = self.ours.allocate(*count) else {
                    return Ok(());
                };
                assert_eq!(self.twin.allocate(*count).unwrap(), new);
                let live = self.live[*at].as_mut().unwrap();
                if *twice {
                    let again = live.naive.table.first().copied().map(BlockId);
                    let again = again.or(new.first().copied());
                    let bad: Vec<BlockId> = new.iter().copied().chain(again).collect();
                    let done = same(
                        self.ledger.add_blocks(live.id, &bad),
                        live.naive.add_blocks(&plain(&bad)),
                    );
                    self.ours.free(&new);
                    self.twin.free(&new);
                    new.clear();
                    // Only the order of the free list may differ.
                    assert!(done.is_err() || bad.is_empty());
                    return Ok(());
                }
                // Without a plan, a block of the table may have been evicted after it was committed.
                let done = same(
                    self.ledger.add_blocks(live.id, &new),
                    live.naive.add_blocks(&plain(&new)),
                );
                if done.is_err() {
                    self.ours.free(&new);
                    self.twin.free(&new);
                }
                done
            }
            Call::Rollback { at, back, drop } => {
                let Some(live) = &mut self.live[*at] else {
                    return Ok(());
                };
                let to = live.naive.issued() as i64 - back;
                let to = usize::try_from(to).unwrap_or(0);
                match (
                    self.ledger.rollback(live.id, to, *drop),
                    live.naive.rollback(to, *drop),
                ) {
                    (Ok(back), Ok((gone, cut))) => {
                        assert_eq!(positions(&back.ranges), gone);
                        assert_eq!(plain(&back.blocks), cut);
                        self.ours.free(&back.blocks);
                        self.twin.free(&back.blocks);
                        Ok(())
                    }
                    (Err(_), Err(())) => Err(()),
                    (ours, theirs) => panic!("{ours:?} instead of {theirs:?}"),
                }
            }
            Call::Tag {
                at,
                start,
                len,
                kind,
            } => {
                let Some(live) = &mut self.live[*at] else {
                    return Ok(());
                };
                let span = Span {
                    start: *start,
                    end: start + len,
                    kind: ["user", "mine"][*kind].to_owned(),
                };
                let fits = span.end <= live.naive.tokens.len();
                let done = same(
                    self.ledger.tag(live.id, std::slice::from_ref(&span)),
                    if fits { Ok(()) } else { Err(()) },
                );
                if done.is_ok() {
                    live.spans.push(span);
                }
                done
            }
            Call::Commit { at } => {
                self.commit(*at);
                Ok(())
            }
            Call::Finish { at } => {
                self.finish(*at);
                Ok(())
            }
            Call::Forget { at } => {
                let Some(live) = &self.live[*at] else {
                    return Ok(());
                };
                let left = self.ledger.forget(live.id).unwrap();
                let live = self.live[*at].take().unwrap();
                let held = &live.naive.table[live.naive.committed / SIZE..];
                assert_eq!(plain(&left.blocks), held);
                for plan in &left.plans {
                    self.ours.index.release(plan).unwrap();
                }
                if let LedgerSource::Plan(twin) = &live.source {
                    self.twin.index.release(twin).unwrap();
                }
                for pin in &live.pins {
                    self.twin.index.release(pin).unwrap();
                }
                for world in [&mut self.ours, &mut self.twin] {
                    world.free(&left.blocks);
                    world.reclaim();
                }
                self.ended(live);
                Ok(())
            }
            Call::Evict { count } => {
                for world in [&mut self.ours, &mut self.twin] {
                    let freed = world.index.evict(*count);
                    world.free(&freed);
                }
                Ok(())
            }
        }
    }

    fn begin(
        &mut self,
        at: usize,
        tokens: &[u32],
        how: usize,
        part: usize,
        extra: usize,
    ) -> Result<(), ()> {
        if let Some(live) = &mut self.live[at] {
            // A live request owns the sequence.
            let again = self.ledger.begin(&mut live.seq, &[], Begin::default());
            return same(again, Err(()));
        }
        let (mut seq, mut twin) = (self.sequence(tokens), self.sequence(tokens));
        let plan_of = |world: &mut World, seq: &mut TokenSequence| -> Arc<ReusePlan> {
            let policy = ReusePolicy {
                approximate: part.is_multiple_of(2),
                ..ReusePolicy::EXACT_ONLY
            };
            let plan = world.index.plan(seq, &policy, PlanOptions::default());
            Arc::new(plan.unwrap())
        };
        let (source, theirs) = match how {
            0..=2 => (
                LedgerSource::Plan(plan_of(&mut self.ours, &mut seq)),
                LedgerSource::Plan(plan_of(&mut self.twin, &mut twin)),
            ),
            3 => {
                let imported = LedgerSource::Imported(Imported::new(part, 2));
                (imported.clone(), imported)
            }
            _ => (LedgerSource::Computed, LedgerSource::Computed),
        };
        let need = tokens.len().div_ceil(SIZE);
        let in_place = match &source {
            LedgerSource::Plan(plan) => plan.blocks().to_vec(),
            _ => Vec::new(),
        };
        // Some tables are one block too short.
        let wanted = (need - in_place.len() + extra).saturating_sub(1);
        let Some(fresh) = self.ours.allocate(wanted) else {
            if let (LedgerSource::Plan(plan), LedgerSource::Plan(twin)) = (&source, &theirs) {
                self.ours.index.release(plan).unwrap();
                self.twin.index.release(twin).unwrap();
            }
            return Ok(());
        };
        assert_eq!(self.twin.allocate(wanted).unwrap(), fresh);
        let table: Vec<BlockId> = in_place.iter().chain(&fresh).copied().collect();
        let mut naive = Request::new(SIZE, tokens.to_vec(), plain(&table));
        let mut missing: Option<Vec<(usize, usize)>> = None;
        let mut num_computed = 0;
        let there: Vec<usize> = match &source {
            LedgerSource::Plan(plan) => {
                naive.committed = in_place.len() * SIZE;
                plan.segments()
                    .iter()
                    .filter(|segment| segment.class != Class::Compute)
                    .flat_map(|segment| segment.start..segment.end)
                    .collect()
            }
            _ if how == 5 => {
                // There are two gaps at any places.
                let (a, b) = (part % 7, part % 11);
                let ranges = vec![(a, a + b), (a + b + 3, a + b + 5)];
                let gone = positions_of(&ranges);
                missing = Some(ranges);
                (0..tokens.len()).filter(|at| !gone.contains(at)).collect()
            }
            _ => {
                num_computed = part;
                (0..part).collect()
            }
        };
        let mut ends = missing.iter().flatten().map(|range| range.1);
        let inside = num_computed <= tokens.len() && ends.all(|end| end <= tokens.len());
        let fits = inside && there.iter().all(|&at| at < naive.slots.len());
        let begin = Begin {
            source: source.clone(),
            num_computed,
            missing: missing.as_deref(),
            in_place: None,
            session: None,
        };
        let Ok(id) = self.ledger.begin(&mut seq, &table, begin) else {
            assert!(!fits, "{table:?} for {tokens:?} was refused");
            assert!(!seq.is_owned());
            if let (LedgerSource::Plan(plan), LedgerSource::Plan(twin)) = (&source, &theirs) {
                self.ours.index.release(plan).unwrap();
                self.twin.index.release(twin).unwrap();
            }
            for world in [&mut self.ours, &mut self.twin] {
                world.free(&fresh);
                world.reclaim();
            }
            return Ok(());
        };
        assert!(fits);
        for at in there {
            naive.slots[at].present = true;
        }
        // Tokens without a gap before them count as claimed.
        for at in 0..naive.issued() {
            naive.slots[at] = naive::Slot {
                present: false,
                issued: true,
                claimed: true,
            };
        }
        let by_source = match &source {
            LedgerSource::Plan(plan) => plan
                .segments()
                .iter()
                .find(|segment| segment.class == Class::Approximate)
                .map_or(usize::MAX, |segment| segment.start),
            LedgerSource::Imported(imported) => imported.exact_until,
            LedgerSource::Computed => usize::MAX,
        };
        self.live[at] = Some(LiveRequest {
            id,
            seq,
            naive,
            twin,
            source: theirs,
            pins: Vec::new(),
            spans: Vec::new(),
            given: 0,
            given_until: 0,
            by_source,
            by_index: usize::MAX,
        });
        Ok(())
    }

    fn step(
        &mut self,
        items: &[(usize, Vec<i64>, i64, usize, usize)],
        with_drafts: bool,
    ) -> Result<(), ()> {
        let items: Vec<_> = items
            .iter()
            .filter(|item| self.live[item.0].is_some())
            .collect();
        let mut naive: Vec<Option<Request>> = self
            .live
            .iter()
            .map(|live| live.as_ref().map(|live| live.naive.clone()))
            .collect();
        let mut named = [false; LIVE];
        let (mut requests, mut computed, mut scheduled) = (Vec::new(), Vec::new(), Vec::new());
        let (mut ids, mut offsets, mut drafts) = (Vec::new(), vec![0], Vec::new());
        let mut expected = Ok(());
        for (at, new, ahead, count, last) in items.iter().copied() {
            let live = self.live[*at].as_ref().unwrap();
            let claimed = live.ahead(*ahead);
            let last = if with_drafts { *last } else { 0 };
            requests.push(live.id);
            computed.push(claimed);
            scheduled.push(*count);
            drafts.push(last);
            ids.extend_from_slice(new);
            offsets.push(ids.len());
            let own = naive[*at].as_mut().unwrap();
            if std::mem::replace(&mut named[*at], true)
                || own.step(new, claimed, *count, last).is_err()
            {
                expected = Err(());
            }
        }
        let step = Step {
            requests: &requests,
            num_scheduled: &scheduled,
            num_computed: &computed,
            ids: &ids,
            offsets: &offsets,
            num_drafts: with_drafts.then_some(&drafts),
        };
        let live = &mut self.live;
        let done = self.ledger.step::<_, Error>(&step, |at, ids| {
            ids.to(&mut live[items[at].0].as_mut().unwrap().seq)
        });
        if done.is_ok() {
            for (live, naive) in self.live.iter_mut().zip(naive) {
                if let (Some(live), Some(naive)) = (live, naive) {
                    live.naive = naive;
                    live.follow();
                }
            }
        }
        same(done, expected)
    }

    fn commit(&mut self, at: usize) {
        let Some(live) = &mut self.live[at] else {
            return;
        };
        let end = live.naive.verified() / SIZE * SIZE;
        let done = self
            .ledger
            .commit(live.id, &mut live.seq, &mut self.ours.index)
            .unwrap();
        let first = live.naive.committed;
        let spans = live.spans_to_give(end);
        if end == first {
            assert!(done.blocks.is_empty() && done.duplicates.is_empty() && done.freed.is_empty());
            assert_eq!(done.num_exact, live.exact_until().min(end) / SIZE * SIZE);
            if !spans.is_empty() {
                self.twin.index.tag(&live.twin, &spans).unwrap();
                live.gave(end);
            }
            return;
        }
        let theirs = live.insert(&mut self.twin.index, end, first / SIZE..end / SIZE, &spans);
        assert!(done.surplus.is_empty());
        assert_eq!(
            (&done.blocks, &done.duplicates, &done.freed, done.num_exact),
            (
                &theirs.blocks,
                &theirs.duplicates,
                &theirs.freed,
                theirs.num_exact
            )
        );
        for (offset, id) in done.blocks.iter().enumerate() {
            live.naive.table[first / SIZE + offset] = id.0;
        }
        live.naive.committed += done.blocks.len() * SIZE;
        let committed = live.naive.committed;
        live.gave(committed);
        if !done.blocks.is_empty()
            && done.num_exact < committed.min(live.exact_until() / SIZE * SIZE)
        {
            live.by_index = done.num_exact;
        }
        if !matches!(live.source, LedgerSource::Plan(_)) && !done.blocks.is_empty() {
            live.hold(done.num_exact, &mut self.twin.index);
        }
        self.ours.settle(&done);
        self.twin.settle(&theirs);
    }

    fn finish(&mut self, at: usize) {
        let Some(live) = &mut self.live[at] else {
            return;
        };
        let done = self
            .ledger
            .finish(live.id, &mut live.seq, &mut self.ours.index)
            .unwrap();
        let mut live = self.live[at].take().unwrap();
        let end = live.naive.verified();
        let spans = live.spans_to_give(end / SIZE * SIZE);
        let offered = live.naive.committed / SIZE..live.naive.table.len();
        let theirs = live.insert(&mut self.twin.index, end, offered, &spans);
        if let LedgerSource::Plan(plan) = &live.source {
            self.twin.index.release(plan).unwrap();
        }
        for pin in &live.pins {
            self.twin.index.release(pin).unwrap();
        }
        assert_eq!(done, theirs);
        for world in [&mut self.ours, &mut self.twin] {
            world.settle(&done);
            world.free(&done.surplus);
            world.reclaim();
        }
        self.ended(live);
    }

    fn ended(&mut self, mut live: LiveRequest) {
        assert!(!live.seq.is_owned());
        assert!(!self.ledger.is_live(live.id));
        assert!(self.ledger.confirm(live.id, 0).is_err());
        live.seq.extend(&[1], Vec::new()).unwrap();
        self.ended += 1;
    }

    fn check(&self) {
        assert_eq!(self.ledger.len(), self.live.iter().flatten().count());
        assert_eq!(self.ours.index.digest(), self.twin.index.digest());
        self.ours.index.check().unwrap();
        let mut held = 0;
        for live in self.live.iter().flatten() {
            let (id, naive) = (live.id, &live.naive);
            let verified = naive.verified();
            assert!(live.seq.is_owned());
            assert_eq!(live.seq.tokens(), naive.tokens);
            assert_eq!(self.ledger.final_end(id).unwrap(), verified);
            assert_eq!(
                self.ledger.lookahead(id).unwrap(),
                (verified, naive.issued())
            );
            assert_eq!(
                self.ledger.new_range(id).unwrap(),
                (naive.committed, verified)
            );
            assert!(naive.committed <= verified);
            assert_eq!(
                positions(&self.ledger.missing(id).unwrap()),
                naive.missing()
            );
            assert_eq!(plain(self.ledger.blocks(id).unwrap()), naive.table);
            for start in 0..=verified {
                let end = (start + 5).min(verified);
                let want = &naive.table[start / SIZE..end.div_ceil(SIZE).max(start / SIZE)];
                let want = if start == end { &[][..] } else { want };
                assert_eq!(plain(self.ledger.blocks_for(id, start, end).unwrap()), want);
            }
            assert!(self.ledger.blocks_for(id, 0, verified + 1).is_err());
            assert_eq!(self.ledger.spans(id).unwrap(), live.spans);
            let capacity = naive.table.len() * SIZE;
            let starts = [0, verified.min(3), verified / 2, verified];
            for (start, end) in starts
                .into_iter()
                .flat_map(|start| [(start, verified), (start, capacity)])
            {
                let runs = self.ledger.labels(id, start, end).unwrap();
                let mut at = start;
                for run in &runs {
                    assert!(run.start == at && run.end > at, "{runs:?}");
                    for token in run.start..run.end {
                        assert_eq!(
                            (run.class, run.hops),
                            live.label(token / SIZE),
                            "{token}: {runs:?}"
                        );
                    }
                    at = run.end;
                }
                assert_eq!(at, end);
                let is_new = |pair: &[LabelRun]| {
                    (pair[0].class, pair[0].hops) != (pair[1].class, pair[1].hops)
                };
                assert!(runs.windows(2).all(is_new), "{runs:?} are few");
            }
            assert!(self.ledger.labels(id, 0, capacity + 1).is_err());
            assert!(self.ledger.labels(id, 1, 0).is_err());
            held += naive.table.len() - naive.committed / SIZE;
        }
        let stats = self.ours.index.stats();
        let known = self.ours.pool.num_free() + stats.indexed + stats.condemned;
        assert_eq!(known + held as u64, NUM_BLOCKS as u64);
    }
}

fn positions_of(ranges: &[(usize, usize)]) -> Vec<usize> {
    ranges.iter().flat_map(|&(start, end)| start..end).collect()
}

/// Checks that both worlds made the call, or both refused it.
fn same<T: std::fmt::Debug, E: std::fmt::Debug>(
    ours: Result<T, E>,
    theirs: Result<(), ()>,
) -> Result<(), ()> {
    assert_eq!(ours.is_ok(), theirs.is_ok(), "{ours:?}");
    theirs
}

impl LiveRequest {
    fn exact_until(&self) -> usize {
        self.by_source.min(self.by_index)
    }

    /// The class of a block, and the hops of its KV.
    fn label(&self, block: usize) -> (Class, u16) {
        let (start, end) = (block * SIZE, (block + 1) * SIZE);
        if end <= self.exact_until() {
            return (Class::Exact, 0);
        }
        let hops = match &self.source {
            LedgerSource::Plan(plan) => {
                let segments = plan.segments().iter();
                let inside = segments.filter(|segment| segment.start < end && segment.end > start);
                inside.map(|segment| segment.hops).max().unwrap_or(0)
            }
            // It is unknown which block the index has there.
            LedgerSource::Imported(imported) if end > self.by_source => imported.hops,
            _ => 0,
        };
        (Class::Approximate, hops)
    }

    /// Pins the blocks in place with a plan, then releases the previous plan.
    fn hold(&mut self, num_exact: usize, index: &mut RadixIndex) {
        let plan = index.pin_in_place(&mut self.twin, num_exact < self.naive.committed);
        let committed = &self.naive.table[..self.naive.committed / SIZE];
        if plain(plan.blocks()).starts_with(committed) {
            for before in self.pins.drain(..) {
                index.release(&before).unwrap();
            }
        }
        self.pins.push(plan);
    }

    /// A position relative to the final and computed tokens, or to the end of the issued ones.
    fn ahead(&self, ahead: i64) -> usize {
        if ahead >= 20 {
            return self.naive.issued();
        }
        usize::try_from(self.naive.verified() as i64 + ahead).unwrap_or(0)
    }

    /// Appends the request's new tokens to the twin's sequence.
    fn follow(&mut self) {
        let known = self.twin.len();
        self.twin
            .extend(&self.naive.tokens[known..], Vec::new())
            .unwrap();
    }

    fn spans_to_give(&self, end: usize) -> Vec<Span> {
        self.spans
            .iter()
            .enumerate()
            .filter(|(at, span)| {
                let until = if *at < self.given {
                    self.given_until
                } else {
                    0
                };
                span.start < end && until < end.min(span.end)
            })
            .map(|(_, span)| span.clone())
            .collect()
    }

    fn gave(&mut self, end: usize) {
        self.given = self.spans.len();
        self.given_until = self.given_until.max(end);
    }

    fn insert(
        &mut self,
        index: &mut RadixIndex,
        num_computed: usize,
        offered: std::ops::Range<usize>,
        spans: &[Span],
    ) -> Inserted {
        let ids = blocks(&self.naive.table[offered]);
        let source = match &self.source {
            LedgerSource::Plan(plan) => Source::Plan(plan),
            LedgerSource::Computed => Source::Computed,
            LedgerSource::Imported(imported) => Source::Imported(imported.clone()),
        };
        let options = InsertOptions {
            num_computed,
            start: self.naive.committed,
            source,
            spans,
            session: None,
        };
        index.insert(&mut self.twin, &ids, options).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_ledger_equals_a_list_of_slots(calls in prop::collection::vec(calls(), 1..60)) {
        let mut test = Test::new();
        for call in &calls {
            test.run(call);
        }
        for at in 0..LIVE {
            test.run(&Call::Finish { at });
        }
        let stats = test.ours.index.stats();
        prop_assert_eq!(test.ours.pool.num_free() + stats.indexed, NUM_BLOCKS as u64);
    }
}
