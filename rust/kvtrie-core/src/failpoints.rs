//! Failures on demand, for tests: compiled in with the feature `failpoints` alone, and nothing at all without it.
//!
//! A *point* is a place in a call. At a point before the first change the call can fail with an error or panic: whatever
//! fails there leaves everything as it was. Between two changes it can only panic: the index or ledger is inconsistent then,
//! and whoever guards it must let nobody see it again, which a poisoned lock does. No call has a point between two changes
//! that returns an error: that would be a bug.
//!
//! A thread arms one failure at a time. Others are not disturbed.

use crate::error::Result;

/// What a point does.
#[cfg(feature = "failpoints")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The call fails with [`Malformed`](crate::ErrorKind::Malformed): at points before the first change.
    Error,
    /// The call panics: at any point.
    Panic,
}

/// A point that has failed.
#[cfg(feature = "failpoints")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fired {
    /// Its name.
    pub place: &'static str,
    /// Whether the call had changed anything, or might have.
    pub within: bool,
}

#[cfg(feature = "failpoints")]
mod armed {
    use std::cell::Cell;

    use super::{Failure, Fired};
    use crate::error::{Error, Result};

    thread_local! {
        static ARMED: Cell<Option<(Failure, u64)>> = const { Cell::new(None) };
        static FIRED: Cell<Option<Fired>> = const { Cell::new(None) };
    }

    /// From here on the point that this thread comes to as the `nth`, counted from 1, fails, once. Points that cannot fail
    /// like that do not count.
    pub fn arm(failure: Failure, nth: u64) {
        FIRED.set(None);
        ARMED.set(Some((failure, nth.max(1))));
    }

    /// No point fails any more. Returns the one that did.
    pub fn disarm() -> Option<Fired> {
        ARMED.set(None);
        FIRED.take()
    }

    pub(super) fn come_to(place: &'static str, within: bool) -> Result<()> {
        let Some((failure, nth)) = ARMED.get() else {
            return Ok(());
        };
        if within && failure == Failure::Error {
            return Ok(());
        }
        ARMED.set((nth > 1).then_some((failure, nth - 1)));
        if nth > 1 {
            return Ok(());
        }
        FIRED.set(Some(Fired { place, within }));
        match failure {
            Failure::Error => Err(Error::malformed(format!("{place}: a failpoint"))),
            Failure::Panic => panic!("{place}: a failpoint"),
        }
    }
}

#[cfg(feature = "failpoints")]
pub use armed::{arm, disarm};

/// A point before the first change of a call.
#[cfg_attr(
    not(feature = "failpoints"),
    expect(
        clippy::inline_always,
        clippy::unnecessary_wraps,
        reason = "it is nothing"
    )
)]
#[cfg_attr(not(feature = "failpoints"), inline(always))]
pub(crate) fn before(place: &'static str) -> Result<()> {
    #[cfg(feature = "failpoints")]
    armed::come_to(place, false)?;
    #[cfg(not(feature = "failpoints"))]
    let _ = place;
    Ok(())
}

/// A point between two changes of a call.
#[cfg_attr(
    not(feature = "failpoints"),
    expect(clippy::inline_always, reason = "it is nothing")
)]
#[cfg_attr(not(feature = "failpoints"), inline(always))]
pub(crate) fn within(place: &'static str) {
    #[cfg(feature = "failpoints")]
    // It panics, or there is nothing.
    drop(armed::come_to(place, true));
    #[cfg(not(feature = "failpoints"))]
    let _ = place;
}
