//! Where moved runs are found.

pub(crate) mod fingerprints;
pub(crate) mod windows;
