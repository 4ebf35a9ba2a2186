//! Failures on demand, for tests: only with the feature `failpoints`, never in a release.

use kvtrie_core::failpoints::{self, Failure};
use pyo3::prelude::*;

/// Make the `nth` point (from 1) that this thread reaches fail.
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

/// Disarm all points. Return the point that failed, and whether its call may have changed anything.
#[pyfunction]
pub(crate) fn _disarm_failpoint() -> Option<(&'static str, bool)> {
    failpoints::disarm().map(|fired| (fired.place, fired.within))
}
