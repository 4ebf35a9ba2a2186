//! What a caller allows a plan to do.

use crate::error::{Result, invalid};
use crate::storage::payload::Label;

/// Which cached blocks moved runs may come from (rule P18).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// Blocks of the plan's session, and blocks of paths that begin with the prompt's first
    /// [`shared_prefix`](ReusePolicy::shared_prefix) blocks.
    #[default]
    Conversation,
    /// All blocks of the namespace.
    Namespace,
}

/// Who chooses the tokens of moved runs that [`ReusePolicy::recompute_share`] has computed (rule P20).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Repair {
    /// The index: the first tokens of each moved run, equally many in all (rule P7).
    #[default]
    Fronts,
    /// The engine: tokens after which the text is continued otherwise than where the KV was computed.
    Ngrams,
    /// The engine: a quarter of them at fronts, the others where a layer's output changes most.
    Probe,
    /// The engine: tokens that the last message attends to, or that [`Probe`](Self::Probe) scores: the better of both
    /// ranks.
    Question,
    /// The engine: as [`Probe`](Self::Probe), more of a plan whose KV changed more.
    Adaptive,
}

impl Repair {
    /// All values, by name.
    pub const ALL: [(&'static str, Self); 5] = [
        ("fronts", Self::Fronts),
        ("ngrams", Self::Ngrams),
        ("probe", Self::Probe),
        ("question", Self::Question),
        ("adaptive", Self::Adaptive),
    ];

    /// The name that files and messages have.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fronts => "fronts",
            Self::Ngrams => "ngrams",
            Self::Probe => "probe",
            Self::Question => "question",
            Self::Adaptive => "adaptive",
        }
    }

    /// The value of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find_map(|(known, repair)| (known == name).then_some(repair))
    }
}

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
    /// Most cuts in the context of a moved run ([`MovedRun::cuts`](crate::MovedRun::cuts)). `None` means any number. A
    /// run beyond this limit, or one of the next two, is computed.
    pub max_cuts: Option<u16>,
    /// Largest share of a moved run's context that may be lost, 0 to 1
    /// ([`MovedRun::lost_context`](crate::MovedRun::lost_context)).
    pub max_lost_context: f64,
    /// Largest share of the prompt before a moved run that may be new to it, 0 to 1
    /// ([`MovedRun::new_context`](crate::MovedRun::new_context)).
    pub max_new_context: f64,
    /// Which cached blocks moved runs may come from.
    pub scope: Scope,
    /// Whole blocks, from the first on, that make two paths one conversation with [`Scope::Conversation`]. At least 1.
    pub shared_prefix: usize,
    /// Least share of the tokens of moved runs that is computed anyway, 0 to 1; with [`Repair::Adaptive`] that of a plan
    /// whose KV changed as after a typical edit.
    pub recompute_share: f64,
    /// Who chooses these tokens.
    pub repair: Repair,
    /// Whether the exact tokens of the block in which the match ends are copied. If this and `approximate` are `false`,
    /// nothing is copied.
    pub partial_blocks: bool,
}

impl ReusePolicy {
    /// The most hops that an index can record.
    pub const MAX_HOPS: u16 = Label::MAX_HOPS;

    /// The most cuts that are counted in a context.
    pub const MAX_CUTS: u16 = u16::MAX;

    /// Allows approximate KV and bounds nothing. KV of unknown origin counts as built under it (rule P19).
    pub const LAXEST: Self = Self::bounding_only(true, Self::MAX_HOPS, Scope::Namespace);

    /// Allows only exact KV. This is the default everywhere.
    pub const EXACT_ONLY: Self = Self::bounding_only(false, 1, Scope::Conversation);

    /// A policy that bounds nothing else.
    const fn bounding_only(approximate: bool, max_hops: u16, scope: Scope) -> Self {
        Self {
            approximate,
            min_run: None,
            max_hops,
            max_approximate_share: 1.0,
            recompute_first: 0,
            recompute_last: 0,
            forbid_kinds: Vec::new(),
            max_cuts: None,
            max_lost_context: 1.0,
            max_new_context: 1.0,
            scope,
            shared_prefix: 16,
            recompute_share: 0.0,
            repair: Repair::Fronts,
            partial_blocks: true,
        }
    }

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
        for (name, share) in [
            ("max_approximate_share", self.max_approximate_share),
            ("max_lost_context", self.max_lost_context),
            ("max_new_context", self.max_new_context),
            ("recompute_share", self.recompute_share),
        ] {
            if !(0.0..=1.0).contains(&share) {
                return Err(invalid!(
                    call,
                    "the policy's {name} is {share}; it must be in [0, 1]"
                ));
            }
        }
        if self.forbid_kinds.iter().any(String::is_empty) {
            return Err(invalid!(
                call,
                "the policy's forbid_kinds holds an empty name"
            ));
        }
        if self.shared_prefix == 0 {
            return Err(invalid!(
                call,
                "the policy's shared_prefix is 0; it must be at least 1 block (scope \"namespace\" allows all paths)"
            ));
        }
        Ok(())
    }

    /// How many tokens at the start of each moved run are computed, given the lengths of the runs:
    /// [`recompute_first`](Self::recompute_first), or the least number with which at least
    /// [`recompute_share`](Self::recompute_share) of all their tokens are. O(runs · log(runs)).
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a number of tokens is such a number"
    )]
    pub fn front(&self, runs: impl IntoIterator<Item = usize>) -> usize {
        if self.recompute_share <= 0.0 {
            return self.recompute_first;
        }
        let mut runs: Vec<usize> = runs.into_iter().collect();
        runs.sort_unstable();
        let total: usize = runs.iter().sum();
        let mut wanted = ((self.recompute_share * total as f64).ceil() as usize).min(total);
        for (at, &len) in runs.iter().enumerate() {
            let left = runs.len() - at;
            if len >= wanted.div_ceil(left) {
                return self.recompute_first.max(wanted.div_ceil(left));
            }
            wanted -= len;
        }
        self.recompute_first
    }
}

impl Default for ReusePolicy {
    fn default() -> Self {
        Self::EXACT_ONLY
    }
}
