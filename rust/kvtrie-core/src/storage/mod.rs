//! Stores what is cached and where: the forest with its nodes and block ids, and the latest departures.

pub(crate) mod arena;
pub(crate) mod blocks;
pub(crate) mod edge_blocks;
pub(crate) mod edge_table;
pub(crate) mod extras;
pub(crate) mod forest;
pub(crate) mod gone;
pub(crate) mod node;
pub(crate) mod paged;
pub(crate) mod payload;
pub(crate) mod salts;
pub(crate) mod siblings;
pub(crate) mod slab;
pub(crate) mod trees;
