//! The binding's locks under a scheduler: no interleaving deadlocks or shows half a change, and each planted twin is
//! detected.

use std::panic::catch_unwind;

use kvtrie_locks::{Twin, run};

/// Interleavings tried, each chosen by the scheduler from a random seed.
const TRIES: usize = 20_000;

#[test]
fn no_interleaving_deadlocks_or_shows_half_a_change() {
    shuttle::check_random(|| run(Twin::Faithful, false), TRIES);
    shuttle::check_pct(|| run(Twin::Faithful, false), TRIES, 3);
}

#[test]
fn after_a_panic_nobody_sees_what_it_left_and_nobody_waits() {
    shuttle::check_random(|| run(Twin::Faithful, true), TRIES);
    shuttle::check_pct(|| run(Twin::Faithful, true), TRIES, 3);
}

/// The scheduler's message about a twin.
fn found_out(twin: Twin, panics: bool) -> String {
    let done = catch_unwind(|| shuttle::check_random(move || run(twin, panics), TRIES));
    let panic = done.expect_err("the twin was not found out");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_default()
}

#[test]
fn a_commit_that_takes_the_index_first_deadlocks() {
    assert!(found_out(Twin::IndexBeforeSequence, false).contains("deadlock"));
}

#[test]
fn a_thread_that_waits_attached_deadlocks() {
    assert!(found_out(Twin::WaitsAttached, false).contains("deadlock"));
}

#[test]
fn a_step_that_lets_go_of_the_ledger_is_seen() {
    let message = found_out(Twin::LetsGoOfTheLedger, false);
    assert!(message.contains("does not know"), "{message}");
}

#[test]
fn an_index_under_a_poisoned_lock_is_seen() {
    let message = found_out(Twin::IgnoresPoison, true);
    assert!(message.contains("half is changed"), "{message}");
}
