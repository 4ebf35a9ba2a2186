//! Makes random calls on a ledger with injected errors. A call that fails changes nothing, and is repeated.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvtrie_core::failpoints::{Failure, arm, disarm};
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;

impl Test {
    /// Makes a call and lets its first point fail, if it has one, then repeats it. Returns the point.
    fn run_failing(&mut self, call: &Call) -> Option<&'static str> {
        // These calls consist of several.
        if let Call::Begin { .. }
        | Call::Fill { .. }
        | Call::Speculate { .. }
        | Call::AddBlocks { .. }
        | Call::Evict { .. } = call
        {
            self.run(call);
            return None;
        }
        let before = self.dump();
        let naive = self
            .live
            .iter()
            .map(|live| live.as_ref().map(|live| live.naive.clone()));
        let naive: Vec<Option<Request>> = naive.collect();
        arm(Failure::Error, 1);
        let done = catch_unwind(AssertUnwindSafe(|| self.run(call)));
        let Some(fired) = disarm() else {
            done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            return None;
        };
        assert_eq!(before, self.dump(), "{call:?} failed at {}", fired.place);
        for (live, naive) in self.live.iter_mut().zip(naive) {
            assert_eq!(live.is_some(), naive.is_some());
            if let (Some(live), Some(naive)) = (live, naive) {
                live.naive = naive;
            }
        }
        self.run(call);
        Some(fired.place)
    }
}

#[test]
fn failed_calls_change_nothing() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !panic.to_string().contains("a failpoint") {
            hook(panic);
        }
    }));
    let histories = prop::collection::vec(calls(), 1..60);
    let mut runner = TestRunner::deterministic();
    let mut met = BTreeSet::new();
    for _ in 0..2_400 {
        let mut test = Test::new();
        for call in histories.new_tree(&mut runner).unwrap().current() {
            met.extend(test.run_failing(&call));
        }
    }
    let wanted = [
        "RadixIndex::insert",
        "RadixIndex::tag_within",
        "SequenceLedger::append",
        "SequenceLedger::confirm",
        "SequenceLedger::forget",
        "SequenceLedger::rollback",
        "SequenceLedger::schedule",
        "SequenceLedger::step",
        "SequenceLedger::tag",
    ];
    for place in wanted {
        assert!(met.contains(place), "{place} is not among {met:?}");
    }
}

#[test]
fn a_commit_and_a_finish_fail_before_their_first_change_or_not_at_all() {
    for nth in 1..6 {
        let mut test = Test::new();
        let mut index = World::new().index;
        let mut seq = test.sequence(&(0..12).collect::<Vec<u32>>());
        let table = [0, 1, 2].map(BlockId);
        let id = test
            .ledger
            .begin(&mut seq, &table, Begin::default())
            .unwrap();
        test.ledger.schedule(id, 12, 0).unwrap();
        // The first commit makes a plan. The second makes another and releases the first.
        for end in [4, 8] {
            test.ledger.confirm(id, end).unwrap();
            let before = (format!("{:?}", test.ledger), index.digest());
            arm(Failure::Error, nth);
            let done = test.ledger.commit(id, &mut seq, &mut index);
            assert_eq!(
                disarm().map(|fired| fired.place),
                (nth == 1).then_some("RadixIndex::insert")
            );
            if done.is_err() {
                assert_eq!(before, (format!("{:?}", test.ledger), index.digest()));
                test.ledger.commit(id, &mut seq, &mut index).unwrap();
            }
        }
        test.ledger.confirm(id, 12).unwrap();
        let before = (format!("{:?}", test.ledger), index.digest());
        arm(Failure::Error, nth);
        let done = test.ledger.finish(id, &mut seq, &mut index);
        assert_eq!(disarm().is_some(), nth == 1);
        if done.is_err() {
            assert_eq!(before, (format!("{:?}", test.ledger), index.digest()));
            test.ledger.finish(id, &mut seq, &mut index).unwrap();
        }
        assert_eq!((index.stats().indexed, index.stats().live_plans), (3, 0));
    }
}
