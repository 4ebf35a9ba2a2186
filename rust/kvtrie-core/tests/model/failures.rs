//! Compares random calls with the model while failures are injected at random.
//!
//! A call that fails with an error, or panics before its first change, has changed nothing: the model is reset to its
//! state before the call, index and model are compared, and the call is repeated. A call that panics between two
//! changes leaves an unusable index. It is dropped, its engine begins with an empty one, and the sequences, which know
//! the old one, are kept.
//!
//! `KVTRIE_FAILURES` is the number of calls; the default takes a few seconds.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kvtrie_core::failpoints::{Failure, Fired, arm, disarm};
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::*;

/// Counts of what happened in a run.
#[derive(Debug, Default)]
struct Met {
    calls: usize,
    errors: BTreeMap<&'static str, usize>,
    panics_before: BTreeMap<&'static str, usize>,
    panics_within: BTreeMap<&'static str, usize>,
    /// Number of blocks missing from the sum of free, held, indexed, condemned and quarantined blocks.
    lost: u64,
}

impl Met {
    fn total(of: &BTreeMap<&'static str, usize>) -> usize {
        of.values().sum()
    }
}

/// The failure for a random number; `None` for half of the numbers.
fn failure(number: u64) -> Option<(Failure, u64)> {
    let nth = 1 + number / 32 % 8;
    match number % 32 {
        0..16 => None,
        // A call has one such point, or one for each time that it gives up.
        16..29 => Some((Failure::Error, 1)),
        _ => Some((Failure::Panic, nth)),
    }
}

impl Pair {
    /// The state that no failed call may change.
    fn state(&self) -> (u64, String, Vec<Vec<u32>>) {
        let mut stats = self.index.stats();
        // Reserved memory and wasted work may differ.
        (stats.bytes, stats.nodes_visited, stats.bytes_compared) = (0, 0, 0);
        let tokens = self.live.iter().map(|(_, seq)| seq.tokens().to_vec());
        (self.index.digest(), format!("{stats:?}"), tokens.collect())
    }

    /// Makes a call with a failure armed, and repeats it without one if it failed.
    fn run_failing(
        &mut self,
        step: &Step,
        number: u64,
        met: &mut Met,
    ) -> Result<(), TestCaseError> {
        met.calls += 1;
        let is_of_many_calls = matches!(step, Step::Restore { .. });
        let Some((failure, nth)) = failure(number).filter(|_| !is_of_many_calls) else {
            return self.run(step);
        };
        let (before, model) = (self.state(), self.model.clone());
        arm(failure, nth);
        let done = catch_unwind(AssertUnwindSafe(|| self.run(step)));
        let Some(Fired { place, within }) = disarm() else {
            return done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        };
        let counted = match (failure, within) {
            (Failure::Error, _) => &mut met.errors,
            (Failure::Panic, false) => &mut met.panics_before,
            (Failure::Panic, true) => &mut met.panics_within,
        };
        *counted.entry(place).or_default() += 1;
        self.model = model;
        if within {
            self.begin_with_empty_index();
            return Ok(());
        }
        prop_assert_eq!(
            before,
            self.state(),
            "{} failed and changed something",
            place
        );
        self.compare()?;
        self.run(step)
    }

    /// Replaces an unusable index by an empty one of the same configuration.
    fn begin_with_empty_index(&mut self) {
        self.index = RadixIndex::new(self.index.config().clone()).unwrap();
        self.model = Naive {
            block_size: self.model.block_size,
            num_blocks: self.model.num_blocks,
            ..Naive::default()
        };
        self.plans.clear();
        self.ever.clear();
    }

    /// The number of blocks that are neither free or held, indexed, condemned, nor quarantined.
    fn num_lost(&self) -> u64 {
        let stats = self.index.stats();
        let num_blocks = u32::try_from(self.model.num_blocks).unwrap();
        let held = (0..num_blocks).filter(|&id| self.model.is_held(id)).count() as u64;
        let known = stats.indexed + stats.condemned + stats.quarantined;
        u64::from(num_blocks).abs_diff(held + known)
    }
}

/// Runs random histories until `calls` calls were made.
fn run_calls(calls: usize) -> Met {
    let mut met = Met::default();
    let seed = std::env::var("KVTRIE_FAILURES_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&u64::to_le_bytes(seed));
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let shape = (1usize..5, prop_oneof![Just(0u32), Just(8), Just(64)]);
    let calls_of = (
        shape,
        prop_oneof![prop::collection::vec(step(60, 2), 1..120), scene(2)],
        prop::collection::vec(any::<u64>(), 200),
    );
    while met.calls < calls {
        let ((block_size, hash_bits), steps, numbers) =
            calls_of.new_tree(&mut runner).unwrap().current();
        let mut pair = Pair::new(block_size, 60, hash_bits);
        for (step, number) in steps.iter().zip(numbers.iter().cycle()) {
            let at = met.calls;
            let done = pair.run_failing(step, *number, &mut met);
            let done = done.and_then(|()| pair.compare());
            done.unwrap_or_else(|error| panic!("call {at} of seed {seed}: {step:?}: {error}"));
            met.lost += pair.num_lost();
        }
        pair.drain().unwrap();
        met.lost += pair.num_lost();
    }
    met
}

#[test]
fn failed_calls_change_nothing() {
    let calls = std::env::var("KVTRIE_FAILURES").map_or(40_000, |calls| calls.parse().unwrap());
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload_as_str().unwrap_or_default();
        if !text.contains("a failpoint") {
            hook(panic);
        }
    }));
    let met = run_calls(calls);
    println!("{met:#?}");
    println!(
        "{} calls, {} errors, {} panics before a change, {} within, {} blocks lost",
        met.calls,
        Met::total(&met.errors),
        Met::total(&met.panics_before),
        Met::total(&met.panics_within),
        met.lost
    );
    assert_eq!(met.lost, 0);
    // Every kind of call has failed, at most of the points.
    assert!(met.errors.len() >= 9, "{met:#?}");
    assert!(met.panics_within.len() >= 12, "{met:#?}");
}
