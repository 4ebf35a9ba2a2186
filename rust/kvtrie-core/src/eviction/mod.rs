//! What is evicted, and in which order.

pub(crate) mod dead_order;
pub(crate) mod lru;
