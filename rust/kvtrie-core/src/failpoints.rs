//! Failures on demand, for tests. Without the feature `failpoints` the module compiles to nothing.
//!
//! A *point* is a place in a call. A point before the call's first change can return an error or panic, and nothing has
//! changed then. A point between two changes can only panic: the index is inconsistent then, and a poisoned lock keeps
//! it from being used again.
//!
//! Each thread arms one failure at a time, and only for itself. The module is public because `kvtrie-transfer` has
//! points too.

use crate::error::Result;

/// What a point does.
#[cfg(feature = "failpoints")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The call fails with [`BrokenInvariant`](crate::ErrorKind::BrokenInvariant). Only at points before the first
    /// change.
    Error,
    /// The call panics. Possible at every point.
    Panic,
}

/// A point that has failed.
#[cfg(feature = "failpoints")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fired {
    /// Its name.
    pub place: &'static str,
    /// Whether the point was between two changes of the call.
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

    /// Makes the `nth` point (from 1) that this thread reaches fail, once. Points that cannot fail in the given way are
    /// not counted.
    pub fn arm(failure: Failure, nth: u64) {
        FIRED.set(None);
        ARMED.set(Some((failure, nth.max(1))));
    }

    /// Disarms all points; returns the one that failed.
    pub fn disarm() -> Option<Fired> {
        ARMED.set(None);
        FIRED.take()
    }

    pub(super) fn reach(place: &'static str, within: bool) -> Result<()> {
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
            Failure::Error => Err(Error::broken_invariant(place, "a failpoint")),
            Failure::Panic => panic!("{place}: a failpoint"),
        }
    }
}

#[cfg(feature = "failpoints")]
pub use armed::{arm, disarm};

/// Marks a point before the first change of a call.
///
/// # Errors
/// [`BrokenInvariant`](crate::ErrorKind::BrokenInvariant) where this thread armed an error.
///
/// # Panics
/// Where this thread armed a panic.
#[cfg_attr(
    not(feature = "failpoints"),
    expect(clippy::inline_always, reason = "it is nothing")
)]
#[cfg_attr(not(feature = "failpoints"), inline(always))]
pub fn before(place: &'static str) -> Result<()> {
    #[cfg(feature = "failpoints")]
    armed::reach(place, false)?;
    #[cfg(not(feature = "failpoints"))]
    let _ = place;
    Ok(())
}

/// Marks a point between two changes of a call.
///
/// # Panics
/// Where this thread armed a panic.
#[cfg_attr(
    not(feature = "failpoints"),
    expect(clippy::inline_always, reason = "it is nothing")
)]
#[cfg_attr(not(feature = "failpoints"), inline(always))]
pub fn within(place: &'static str) {
    #[cfg(feature = "failpoints")]
    // Between changes, an armed error does not fire, so the result is always `Ok`.
    drop(armed::reach(place, true));
    #[cfg(not(feature = "failpoints"))]
    let _ = place;
}
