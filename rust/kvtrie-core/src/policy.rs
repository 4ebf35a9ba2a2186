//! What a caller allows a plan to do.

use crate::error::{Result, invalid};
use crate::storage::payload::Label;

/// What a plan may reuse. Exact KV is always allowed. Approximate KV that a field forbids is treated as not cached.
#[derive(Clone, Debug, PartialEq)]
pub struct ReusePolicy {
    /// Whether KV of another context or position may be used at all.
    pub approximate: bool,
    /// Shortest moved run to use, in tokens. `None` means the index's `min_run`, which is also the smallest value
    /// allowed.
    pub min_run: Option<usize>,
    /// Most hops of approximate KV in the prompt, at most [`ReusePolicy::MAX_HOPS`]. A moved run has one hop more than
    /// its source.
    pub max_hops: u16,
    /// Largest approximate share of the prompt's tokens, 0 to 1. If a plan would exceed it, the plan uses exact KV
    /// only.
    pub max_approximate_share: f64,
    /// Tokens at the start of every moved run that are computed anyway.
    pub recompute_first: usize,
    /// Tokens at the end of every moved run that are computed anyway.
    pub recompute_last: usize,
    /// Kinds of spans that are not reused approximately.
    pub forbid_kinds: Vec<String>,
    /// Whether the exact tokens of the block in which the match ends are copied. If this and `approximate` are `false`,
    /// nothing is copied.
    pub partial_blocks: bool,
}

impl ReusePolicy {
    /// The most hops that an index can record.
    pub const MAX_HOPS: u16 = Label::MAX_HOPS;

    /// Allows approximate KV and bounds nothing. KV of unknown origin counts as built under it (rule P19).
    pub const LAXEST: Self = Self {
        approximate: true,
        min_run: None,
        max_hops: Self::MAX_HOPS,
        max_approximate_share: 1.0,
        recompute_first: 0,
        recompute_last: 0,
        forbid_kinds: Vec::new(),
        partial_blocks: true,
    };

    /// Allows only exact KV. This is the default everywhere.
    pub const EXACT_ONLY: Self = Self {
        approximate: false,
        min_run: None,
        max_hops: 1,
        max_approximate_share: 1.0,
        recompute_first: 0,
        recompute_last: 0,
        forbid_kinds: Vec::new(),
        partial_blocks: true,
    };

    /// Checks the fields, and [`min_run`](Self::min_run) against the shortest run that can be found.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) of this call.
    pub fn check(&self, min_run: usize, call: &'static str) -> Result<()> {
        if let Some(asked) = self.min_run
            && asked < min_run
        {
            return Err(invalid!(
                call,
                "the policy's min_run is {asked}; this index finds runs of {min_run} tokens and more (its min_run)"
            ));
        }
        if self.max_hops > Self::MAX_HOPS {
            return Err(invalid!(
                call,
                "the policy's max_hops is {}; it must be in [0, {}]",
                self.max_hops,
                Self::MAX_HOPS
            ));
        }
        if !(0.0..=1.0).contains(&self.max_approximate_share) {
            return Err(invalid!(
                call,
                "the policy's max_approximate_share is {}; it must be in [0, 1]",
                self.max_approximate_share
            ));
        }
        if self.forbid_kinds.iter().any(String::is_empty) {
            return Err(invalid!(
                call,
                "the policy's forbid_kinds holds an empty name"
            ));
        }
        Ok(())
    }
}

impl Default for ReusePolicy {
    fn default() -> Self {
        Self::EXACT_ONLY
    }
}
