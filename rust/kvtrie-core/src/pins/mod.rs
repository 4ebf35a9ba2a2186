//! What live plans pin.

pub(crate) mod lease;
