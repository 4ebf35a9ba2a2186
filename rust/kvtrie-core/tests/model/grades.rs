//! Grades without numbers: the fields of a policy, compared one by one.

use kvtrie_core::{Repair, ReusePolicy, Scope};

/// How strict a policy was, with the kinds that were known then as a bit set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Grade {
    min_run: usize,
    max_hops: u16,
    share: f64,
    first: usize,
    last: usize,
    /// `u32::MAX` means any number.
    cuts: u32,
    lost: f64,
    new: f64,
    /// Blocks of the shared prefix; 0 for the whole namespace.
    shared_prefix: usize,
    /// What is computed of moved runs, by who chooses it.
    shares: [f64; 5],
    forbidden: u64,
}

impl Grade {
    pub(crate) const STRICTEST: Self = Self {
        min_run: usize::MAX,
        max_hops: 0,
        share: 0.0,
        first: usize::MAX,
        last: usize::MAX,
        cuts: 0,
        lost: 0.0,
        new: 0.0,
        shared_prefix: usize::MAX,
        shares: [f64::INFINITY; 5],
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
            cuts: policy.max_cuts.map_or(u32::MAX, u32::from),
            lost: policy.max_lost_context,
            new: policy.max_new_context,
            shared_prefix: match policy.scope {
                Scope::Conversation => policy.shared_prefix,
                Scope::Namespace => 0,
            },
            shares: Repair::ALL.map(|(_, repair)| {
                if repair == policy.repair {
                    policy.recompute_share
                } else {
                    0.0
                }
            }),
            forbidden,
        }
    }

    pub(crate) fn is_at_least_as_strict_as(&self, other: &Self) -> bool {
        self.min_run >= other.min_run
            && self.max_hops <= other.max_hops
            && self.share <= other.share
            && self.first >= other.first
            && self.last >= other.last
            && self.cuts <= other.cuts
            && self.lost <= other.lost
            && self.new <= other.new
            && self.shared_prefix >= other.shared_prefix
            && (0..4).all(|at| self.shares[at] >= other.shares[at])
            && other.forbidden & !self.forbidden == 0
    }

    pub(crate) fn meet(&self, other: &Self) -> Self {
        Self {
            min_run: self.min_run.min(other.min_run),
            max_hops: self.max_hops.max(other.max_hops),
            share: self.share.max(other.share),
            first: self.first.min(other.first),
            last: self.last.min(other.last),
            cuts: self.cuts.max(other.cuts),
            lost: self.lost.max(other.lost),
            new: self.new.max(other.new),
            shared_prefix: self.shared_prefix.min(other.shared_prefix),
            shares: std::array::from_fn(|at| self.shares[at].min(other.shares[at])),
            forbidden: self.forbidden & other.forbidden,
        }
    }
}
