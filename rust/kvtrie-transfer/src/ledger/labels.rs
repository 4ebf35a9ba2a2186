//! The labels of a request's blocks.

use std::sync::Arc;

use kvtrie_core::{Class, Imported, Result, ReusePlan, ReusePolicy, Source};

/// The source of a request's KV, as [`Source`] for an insert. A plan is shared with the caller that made it.
#[derive(Clone, Debug)]
pub enum LedgerSource {
    /// The KV is built by this plan.
    Plan(Arc<ReusePlan>),
    /// The engine computes all of it.
    Computed,
    /// The KV was imported from elsewhere.
    Imported(Imported),
}

impl LedgerSource {
    /// The source as an insert takes it.
    #[must_use]
    pub fn as_source(&self) -> Source<'_> {
        match self {
            Self::Plan(plan) => Source::Plan(plan),
            Self::Computed => Source::Computed,
            Self::Imported(imported) => Source::Imported(imported.clone()),
        }
    }

    /// The position after which every block that ends is approximate.
    fn exact_until(&self) -> usize {
        match self {
            Self::Computed => usize::MAX,
            Self::Imported(imported) => imported.exact_until,
            Self::Plan(plan) => plan.first_approximate().unwrap_or(usize::MAX),
        }
    }

    pub(super) fn check(&self, call: &'static str) -> Result<()> {
        match self {
            Self::Imported(imported) => imported.check(call),
            _ => Ok(()),
        }
    }
}

/// Consecutive tokens with one label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LabelRun {
    /// First token.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
    /// [`Class::Exact`] or [`Class::Approximate`].
    pub class: Class,
    /// The most hops in its blocks; 0 if exact.
    pub hops: u16,
}

const EXACT: (Class, u16) = (Class::Exact, 0);

/// The labels of a request's blocks, as an index would set them (D14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestLabels {
    block_size: usize,
    /// End of the exact tokens according to the source and the blocks in place.
    by_source: usize,
    /// End of the blocks in place, whose KV does not come from the source.
    in_place: usize,
    /// End of the exact tokens according to the index. Later blocks are approximate, whatever their source.
    by_index: usize,
}

impl RequestLabels {
    pub(super) fn new(
        source: &LedgerSource,
        in_place: Option<&ReusePlan>,
        block_size: usize,
    ) -> Self {
        let (mut by_source, mut end) = (source.exact_until(), 0);
        if let Some(plan) = in_place {
            end = plan.blocks().len() * block_size;
            let first = plan.first_approximate().filter(|&first| first < end);
            by_source = first.unwrap_or(by_source.max(end));
        }
        Self {
            block_size,
            by_source,
            in_place: end,
            by_index: usize::MAX,
        }
    }

    /// The policy that all approximate blocks were built under, if it is known. Blocks that an index has in the place
    /// of the request's own may be of any.
    pub(super) fn policy<'a>(
        &self,
        source: &'a LedgerSource,
        in_place: Option<&'a ReusePlan>,
    ) -> Option<&'a ReusePolicy> {
        if self.by_index != usize::MAX {
            return None;
        }
        let built = match source {
            LedgerSource::Computed => None,
            LedgerSource::Imported(imported) => Some(imported.policy.as_deref()?),
            LedgerSource::Plan(plan) => Some(plan.policy()),
        };
        let is_in_place = |first: usize| first < self.in_place;
        let in_place = in_place.filter(|plan| plan.first_approximate().is_some_and(is_in_place));
        let (built, in_place) = (
            built.filter(|policy| policy.approximate),
            in_place.map(ReusePlan::policy),
        );
        match (built, in_place) {
            (Some(a), Some(b)) if a.is_at_least_as_strict_as(b) => Some(b),
            (Some(a), Some(b)) if b.is_at_least_as_strict_as(a) => Some(a),
            (Some(_), Some(_)) => None,
            (one, other) => one.or(other),
        }
    }

    pub(super) fn exact_below(&self, end: usize) -> usize {
        let exact = self.by_source.min(self.by_index).min(end);
        exact - exact % self.block_size
    }

    /// Records that an index backs the sequence up to `end`, with exact KV up to `num_exact`.
    pub(super) fn note_index(&mut self, end: usize, num_exact: usize) {
        if num_exact < self.exact_below(end) {
            self.by_index = num_exact;
        }
    }

    pub(super) fn runs(
        &self,
        source: &LedgerSource,
        in_place: Option<&ReusePlan>,
        start: usize,
        end: usize,
    ) -> Vec<LabelRun> {
        let mut runs: Vec<LabelRun> = Vec::new();
        let mut push = |start: usize, end: usize, class: Class, hops: u16| match runs.last_mut() {
            Some(last) if last.class == class && last.hops == hops => last.end = end,
            _ if start < end => runs.push(LabelRun {
                start,
                end,
                class,
                hops,
            }),
            _ => {}
        };
        let size = self.block_size;
        let mut at = start;
        while at < end {
            let block = at / size;
            let ((class, hops), until) = match self.label(source, in_place, block) {
                label if label == EXACT => (label, self.exact_below(usize::MAX)),
                label if at < self.in_place => (label, (block + 1) * size),
                label => match source {
                    LedgerSource::Imported(_) | LedgerSource::Computed => {
                        let until = self.by_source / size * size;
                        (label, if at < until { until } else { end })
                    }
                    LedgerSource::Plan(_) => (label, (block + 1) * size),
                },
            };
            let until = until.min(end);
            push(at, until, class, hops);
            at = until;
        }
        runs
    }

    fn label(
        &self,
        source: &LedgerSource,
        in_place: Option<&ReusePlan>,
        block: usize,
    ) -> (Class, u16) {
        let approximate = |hops| (Class::Approximate, hops);
        let end = (block + 1) * self.block_size;
        if end > self.by_source {
            if end <= self.in_place {
                let hops = in_place.map_or(0, |plan| plan.hops_of_block(block));
                return approximate(hops);
            }
            approximate(match source {
                LedgerSource::Computed => 0,
                LedgerSource::Imported(imported) => imported.hops,
                LedgerSource::Plan(plan) => plan.hops_of_block(block),
            })
        } else if end > self.by_index {
            approximate(match source {
                LedgerSource::Plan(plan) => plan.hops_of_block(block),
                _ => 0,
            })
        } else {
            EXACT
        }
    }
}
