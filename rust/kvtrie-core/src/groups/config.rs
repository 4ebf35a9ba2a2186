//! What an engine's further groups of layers are.

use crate::error::{Result, invalid};
use crate::ids::BlockId;

/// What a group of layers keeps of the tokens before a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// KV of the last `window − 1` tokens, in blocks: attention over a sliding window.
    Window {
        /// Tokens that a token attends to, itself included, at least 2.
        window: usize,
    },
    /// One state of all tokens before it, in a slot: recurrent layers.
    State,
}

/// A group of layers besides group 0, whose layers attend to all tokens. It has a pool of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its name, 1 to 64 bytes, which no other group of the index has.
    pub name: String,
    /// What it keeps.
    pub kind: GroupKind,
    /// Blocks, or slots of states, in its pool: 1 to 2³¹; ids are in `0..num_blocks`.
    pub num_blocks: u64,
    /// Tokens per block. It must be the block size of group 0, which is also the distance of states.
    pub block_size: usize,
}

impl Group {
    /// The most groups besides group 0.
    pub const MAX: usize = 15;
    /// The longest name, in bytes.
    pub const MAX_NAME: usize = 64;

    /// A group of layers with a sliding window.
    #[must_use]
    pub fn window(name: &str, window: usize, num_blocks: u64, block_size: usize) -> Self {
        Self {
            name: name.to_owned(),
            kind: GroupKind::Window { window },
            num_blocks,
            block_size,
        }
    }

    /// A group of layers with a recurrent state, for an index of this block size.
    #[must_use]
    pub fn state(name: &str, num_slots: u64, block_size: usize) -> Self {
        Self {
            name: name.to_owned(),
            kind: GroupKind::State,
            num_blocks: num_slots,
            block_size,
        }
    }

    /// Blocks before a position that must be there to continue at it; 0 for a state, which is one.
    pub(crate) fn reach(&self) -> usize {
        match self.kind {
            GroupKind::Window { window } => (window - 1).div_ceil(self.block_size),
            GroupKind::State => 0,
        }
    }

    /// Refuses groups that an index of this block size cannot have.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) of this call.
    pub fn check_all(groups: &[Self], block_size: usize, call: &'static str) -> Result<()> {
        if groups.len() > Self::MAX {
            return Err(invalid!(
                call,
                "groups has {} groups; it must have at most {}",
                groups.len(),
                Self::MAX
            ));
        }
        for (at, group) in groups.iter().enumerate() {
            group.check(block_size, call)?;
            if groups[..at].iter().any(|other| other.name == group.name) {
                return Err(invalid!(
                    call,
                    "groups has two groups of the name {:?}",
                    group.name
                ));
            }
        }
        Ok(())
    }

    fn check(&self, block_size: usize, call: &'static str) -> Result<()> {
        if self.name.is_empty() || self.name.len() > Self::MAX_NAME {
            return Err(invalid!(
                call,
                "the name of a group has {} bytes; it must have 1 to {}",
                self.name.len(),
                Self::MAX_NAME
            ));
        }
        let name = &self.name;
        if self.num_blocks == 0 || self.num_blocks > BlockId::MAX_BLOCKS {
            return Err(invalid!(
                call,
                "group {name:?} has num_blocks {}; it must be in [1, {}]",
                self.num_blocks,
                BlockId::MAX_BLOCKS
            ));
        }
        if self.block_size != block_size {
            return Err(invalid!(
                call,
                "group {name:?} has block_size {}; it must be that of the index, {block_size}",
                self.block_size
            ));
        }
        let GroupKind::Window { window } = self.kind else {
            return Ok(());
        };
        if window < 2 {
            return Err(invalid!(
                call,
                "group {name:?} has window {window}; it must be at least 2"
            ));
        }
        if self.reach() as u64 > self.num_blocks {
            return Err(invalid!(
                call,
                "group {name:?} has window {window}, which takes {} blocks of {block_size}; its pool has {}",
                self.reach(),
                self.num_blocks
            ));
        }
        Ok(())
    }
}
