//! Calls that read the state of an index and change nothing.

pub(crate) mod check;
pub(crate) mod digest;
pub(crate) mod explain;
pub(crate) mod stats;
