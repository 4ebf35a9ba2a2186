//! What a caller allows a plan to do.

/// What a plan may reuse.
///
/// # Examples
/// ```
/// use kvtrie_core::ReusePolicy;
/// assert!(!ReusePolicy::EXACT_ONLY.approximate);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ReusePolicy {
    /// Whether KV of another context or position may be used at all.
    pub approximate: bool,
    /// Shortest moved run in tokens; the index's if none.
    pub min_run: Option<usize>,
    /// Most hops of what is used.
    pub max_hops: u16,
    /// Share of approximate tokens beyond which the plan is exact only.
    pub max_approximate_share: f64,
    /// Tokens at the front of every moved run that are computed anyway.
    pub recompute_first: usize,
    /// Tokens at the end of every moved run that are computed anyway.
    pub recompute_last: usize,
    /// Kinds of spans that are not reused approximately.
    pub forbid_kinds: Vec<String>,
    /// Whether the exact tokens of the block in which the match ends are copied.
    pub partial_blocks: bool,
}

impl ReusePolicy {
    /// Exact KV alone: the default everywhere.
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
}

impl Default for ReusePolicy {
    fn default() -> Self {
        Self::EXACT_ONLY
    }
}
