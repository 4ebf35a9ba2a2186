//! Labels of the blocks of a request.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::depth;
use crate::index::{Imported, Source};
use crate::plan::{Class, ReusePlan};
use crate::storage::payload::Label;

/// The source of a request's KV, as [`Source`] for an insert. A plan is shared with its creator.
#[derive(Clone, Debug)]
pub enum LedgerSource {
    /// Built by this plan.
    Plan(Arc<ReusePlan>),
    /// Computed from scratch.
    Computed,
    /// Brought from elsewhere.
    Imported(Imported),
}

impl LedgerSource {
    /// The source as an insert takes it.
    #[must_use]
    pub fn as_source(&self) -> Source<'_> {
        match self {
            Self::Plan(plan) => Source::Plan(plan),
            Self::Computed => Source::Computed,
            Self::Imported(imported) => Source::Imported(*imported),
        }
    }

    /// A block that ends after this position is approximate.
    fn exact_until(&self) -> usize {
        match self {
            Self::Computed => usize::MAX,
            Self::Imported(imported) => imported.exact_until,
            Self::Plan(plan) => plan.first_approximate().unwrap_or(usize::MAX),
        }
    }

    pub(super) fn check(&self, call: &str) -> Result<()> {
        match self {
            Self::Imported(imported) if imported.hops > Label::MAX_HOPS => {
                Err(Error::invalid(format!(
                    "{call}: Imported.hops is {}; the limit is {}",
                    imported.hops,
                    Label::MAX_HOPS
                )))
            }
            _ => Ok(()),
        }
    }
}

/// Consecutive tokens of one label.
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

/// The labels of a request's blocks, as an index would give them (D14).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Labels {
    block_size: usize,
    /// End of the exact tokens by the source and the blocks in place.
    said: usize,
    /// End of the blocks in place that are not from the source.
    in_place: usize,
    /// End of the exact tokens by the index: later blocks are approximate, whatever their source.
    answered: usize,
}

impl Labels {
    pub(super) fn new(
        source: &LedgerSource,
        in_place: Option<&ReusePlan>,
        block_size: usize,
    ) -> Self {
        let (mut said, mut end) = (source.exact_until(), 0);
        if let Some(plan) = in_place {
            end = plan.blocks().len() * block_size;
            // The blocks in place have the labels of the index, whatever the source says.
            let first = plan.first_approximate().filter(|&first| first < end);
            said = first.unwrap_or(said.max(end));
        }
        Self {
            block_size,
            said,
            in_place: end,
            answered: usize::MAX,
        }
    }

    /// The end of the exact whole blocks below `end`.
    pub(super) fn exact_below(&self, end: usize) -> usize {
        let exact = self.said.min(self.answered).min(end);
        exact - exact % self.block_size
    }

    /// An index backs the sequence up to `end`, exactly up to `num_exact`.
    pub(super) fn answer(&mut self, end: usize, num_exact: usize) {
        if num_exact < self.exact_below(end) {
            self.answered = num_exact;
        }
    }

    /// The labels of the tokens `start..end`, in as few runs as possible.
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
            let (label, until) = match self.label(source, in_place, block) {
                label if label.is_exact() => (label, self.exact_below(usize::MAX)),
                label if at < self.in_place => (label, (block + 1) * size),
                label => match source {
                    // These sources give one label to the blocks below `said` and one to those after it.
                    LedgerSource::Imported(_) | LedgerSource::Computed => {
                        let said = self.said / size * size;
                        (label, if at < said { said } else { end })
                    }
                    LedgerSource::Plan(_) => (label, (block + 1) * size),
                },
            };
            let until = until.min(end);
            let class = if label.is_exact() {
                Class::Exact
            } else {
                Class::Approximate
            };
            push(at, until, class, label.hops());
            at = until;
        }
        runs
    }

    fn label(&self, source: &LedgerSource, in_place: Option<&ReusePlan>, block: usize) -> Label {
        let end = (block + 1) * self.block_size;
        if end > self.said {
            if end <= self.in_place {
                let hops = in_place.map_or(0, |plan| plan.hops_of_block(depth(block)));
                return Label::approximate(hops);
            }
            Label::approximate(match source {
                LedgerSource::Computed => 0,
                LedgerSource::Imported(imported) => imported.hops,
                LedgerSource::Plan(plan) => plan.hops_of_block(depth(block)),
            })
        } else if end > self.answered {
            Label::approximate(match source {
                LedgerSource::Plan(plan) => plan.hops_of_block(depth(block)),
                _ => 0,
            })
        } else {
            Label::EXACT
        }
    }
}
