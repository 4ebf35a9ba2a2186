//! Checks of numbers in a snapshot against the index into which they are read.

use super::bytes::Reader;
use crate::error::Result;
use crate::index::RadixIndex;
use crate::storage::blocks::BlockState;

pub(super) fn new_id(index: &RadixIndex, from: &Reader<'_>, id: u32) -> Result<()> {
    from.must(u64::from(id) < index.config().num_blocks, || {
        format!(
            "block id {id} is not in [0, {}) (num_blocks)",
            index.config().num_blocks
        )
    })?;
    from.must(
        index.forest().blocks().state(id) == BlockState::Unknown,
        || format!("block {id} comes twice"),
    )
}

/// Reads a last use, which must not be after the clock.
pub(super) fn read_time(index: &RadixIndex, from: &mut Reader<'_>) -> Result<u64> {
    let time = from.u64()?;
    from.must(time <= index.clock(), || {
        format!("a use at time {time}; the clock is at {}", index.clock())
    })?;
    Ok(time)
}
