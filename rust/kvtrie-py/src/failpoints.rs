//! Failures on demand from Python, for tests: built with the feature `failpoints` alone, never in a release.

use kvtrie_core::failpoints::{self, Failure};
use pyo3::prelude::*;

/// Let the point that this thread comes to as the `nth`, counted from 1, fail: with a panic, or with an error.
#[pyfunction]
#[pyo3(signature = (nth, panics))]
pub(crate) fn _arm_failpoint(nth: u64, panics: bool) {
    let failure = if panics {
        Failure::Panic
    } else {
        Failure::Error
    };
    failpoints::arm(failure, nth);
}

/// Let nothing fail any more; the name of the point that failed, and whether its call may have changed anything.
#[pyfunction]
pub(crate) fn _disarm_failpoint() -> Option<(&'static str, bool)> {
    failpoints::disarm().map(|fired| (fired.place, fired.within))
}
