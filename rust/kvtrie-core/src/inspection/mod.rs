//! What an index says about itself.

pub(crate) mod check;
pub(crate) mod digest;
pub(crate) mod explain;
pub(crate) mod stats;
