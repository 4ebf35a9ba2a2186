//! Judges moved runs by their context (rule P17 in `docs/design.md`).
//!
//! A manifest is of one request, so all that a plan keeps of it comes from one path, and a run's context is what of
//! these stretches is before the run there. Costs a pass over the stretches for each run. They are at most 512; a later
//! run counts as if nothing of its context were kept.

use std::iter::Peekable;
use std::ops::Range;
use std::slice::Iter;

use kvtrie_core::ReusePolicy;

/// The most stretches before a run whose context is worked out.
pub(super) const MOST_STRETCHES: usize = 512;

/// Whether a policy limits the context of moved runs.
pub(super) fn is_limited(policy: &ReusePolicy) -> bool {
    policy.max_cuts.is_some() || policy.max_lost_context < 1.0 || policy.max_new_context < 1.0
}

/// Consecutive tokens of the prompt whose KV is that of consecutive tokens of the sender.
struct Stretch {
    start: usize,
    source: usize,
    len: usize,
}

pub(super) struct Contexts<'a> {
    policy: &'a ReusePolicy,
    /// What is not noted yet of the prompt's tokens whose KV is the sender's at the same position.
    in_place: Peekable<Iter<'a, Range<usize>>>,
    kept: Vec<Stretch>,
}

impl<'a> Contexts<'a> {
    pub(super) fn new(policy: &'a ReusePolicy, in_place: &'a [Range<usize>]) -> Self {
        Self {
            policy,
            in_place: in_place.iter().peekable(),
            kept: Vec::new(),
        }
    }

    /// Whether the policy allows a run, which is kept then. Runs come from left to right. `source` is the position of
    /// the run's first token at the sender.
    pub(super) fn admit(&mut self, run: Range<usize>, source: usize) -> bool {
        if !is_limited(self.policy) {
            return true;
        }
        while let Some(own) = self.in_place.next_if(|own| own.start < run.start) {
            self.keep(own.clone(), own.start);
        }
        let is_allowed = self.is_within(run.start, source);
        if is_allowed {
            self.keep(run, source);
        }
        is_allowed
    }

    fn keep(&mut self, range: Range<usize>, source: usize) {
        let (start, len) = (range.start, range.len());
        match self.kept.last_mut() {
            Some(last) if (last.start + last.len, last.source + last.len) == (start, source) => {
                last.len += len;
            }
            _ => self.kept.push(Stretch { start, source, len }),
        }
    }

    fn is_within(&self, start: usize, source: usize) -> bool {
        let (mut kept, mut cuts, mut next) = (0, 0, None);
        if self.kept.len() > MOST_STRETCHES {
            cuts = usize::from(ReusePolicy::MAX_CUTS);
        } else {
            for stretch in &self.kept {
                let len = stretch.len.min(source.saturating_sub(stretch.source));
                if len > 0 {
                    let at = (stretch.start, stretch.source);
                    cuts += usize::from(next.is_some_and(|next| next != at));
                    next = Some((at.0 + len, at.1 + len));
                    kept += len;
                }
            }
            cuts += usize::from(next.is_some_and(|next| next != (start, source)));
        }
        let policy = self.policy;
        policy.max_cuts.is_none_or(|most| cuts <= most.into())
            && without(kept, source) <= policy.max_lost_context
            && without(kept, start) <= policy.max_new_context
    }
}

/// The share of `all` tokens that are not among `kept` ones.
#[expect(
    clippy::cast_precision_loss,
    reason = "a share needs no more precision"
)]
fn without(kept: usize, all: usize) -> f64 {
    if all == 0 {
        return 0.0;
    }
    (1.0 - kept as f64 / all as f64).max(0.0)
}
