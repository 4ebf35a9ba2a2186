//! Grades without numbers: the fields of a policy, compared one by one.

use kvtrie_core::ReusePolicy;

/// How strict a policy was, with the kinds that were known then as a bit set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grade {
    min_run: usize,
    max_hops: u16,
    share: f64,
    first: usize,
    last: usize,
    forbidden: u64,
}

impl Grade {
    pub(crate) const STRICTEST: Self = Self {
        min_run: usize::MAX,
        max_hops: 0,
        share: 0.0,
        first: usize::MAX,
        last: usize::MAX,
        forbidden: u64::MAX,
    };

    pub(crate) fn of(policy: &ReusePolicy, forbidden: u64) -> Self {
        if !policy.approximate {
            return Self::STRICTEST;
        }
        Self {
            min_run: policy.min_run.unwrap_or(0),
            max_hops: policy.max_hops,
            share: policy.max_approximate_share,
            first: policy.recompute_first,
            last: policy.recompute_last,
            forbidden,
        }
    }

    pub(crate) fn is_at_least_as_strict_as(&self, other: &Self) -> bool {
        self.min_run >= other.min_run
            && self.max_hops <= other.max_hops
            && self.share <= other.share
            && self.first >= other.first
            && self.last >= other.last
            && other.forbidden & !self.forbidden == 0
    }

    pub(crate) fn meet(&self, other: &Self) -> Self {
        Self {
            min_run: self.min_run.min(other.min_run),
            max_hops: self.max_hops.max(other.max_hops),
            share: self.share.max(other.share),
            first: self.first.min(other.first),
            last: self.last.min(other.last),
            forbidden: self.forbidden & other.forbidden,
        }
    }
}
