//! How long a plan looks for moved runs: bounded by its prompt and by what it finds, whatever is cached.
//!
//! Work is counted in *looks*: a place that is looked up or tried, a child that is compared, [`TOKENS_PER_LOOK`] tokens that are
//! compared as memory. A look waits for a few cache lines, 0.03 to 0.1 µs.
//!
//! # Promises
//!
//! - With 64 [candidates](crate::Config::max_candidates) a search of `n` tokens takes at most 256 + `n` / 8 looks, or 512 if that is
//!   less, one more for every 10 tokens, one for each token that it covers, and 32 for each of these up to 16,384 in all; and those
//!   of the window and the place that were tried last. Fewer candidates change nothing; with more, these numbers grow in
//!   proportion, but for the one per covered token.
//! - What is left untried once that is used up is counted: the plan says so in
//!   [`candidates_dropped`](crate::ReusePlan::candidates_dropped).
//! - Runs that are found pay for the search. `benches/python/reuse.py` prints what prompts drop: those of texts of their own
//!   nothing; those that share boilerplate some, as where a window has too many places. `benches/python/fan.py` measures what
//!   a prompt costs whose windows lead nowhere.
//!
//! Looks are counted, not timed: the same calls on two indexes of the same seed make the same plans.

/// Tokens that are compared as memory in about the time of a look: a cache line.
pub(super) const TOKENS_PER_LOOK: usize = 16;

/// Looks that it takes to find where the prompt sorts among the children of an edge.
pub(super) const CHOICE: u64 = 24;

/// A budget is for so many candidates at least.
const LEAST_CANDIDATES: u64 = 64;

/// Looks before anything is found, for each candidate of a window.
const FIRST: u64 = 4;

/// Tokens to be searched that add to [`FIRST`] a look for each candidate, ...
const TOKENS_PER_FIRST: u64 = 512;

/// ... up to so many in all. A short prompt that finds nothing is to cost no large multiple of what it costs anyway.
const MOST_FIRST: u64 = 8;

/// Tokens of the prompt that earn a look for each candidate.
const TOKENS_PER_CANDIDATE: u64 = 640;

/// Covered tokens that earn a look for each candidate, beyond one each.
const COVERED_PER_CANDIDATE: u64 = 2;

/// Looks that covered tokens earn at most for each candidate, beyond one each: with 64 candidates 16,384.
const MOST: u64 = 256;

/// Looks that are saved up before a search goes on, while nothing is looked up.
const SAVED: u64 = 2;

/// What a search took, and what it may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// Where the search began.
    from: usize,
    /// Places that are tried of a window at most, or [`LEAST_CANDIDATES`].
    candidates: u64,
    /// Looks before anything is found.
    first: u64,
    looks: u64,
    covered: u64,
}

impl Budget {
    /// That of a search from position `from` to the end of a prompt of `len` tokens.
    pub(super) fn new(from: usize, len: usize, max_candidates: usize) -> Self {
        let candidates = (max_candidates as u64).max(LEAST_CANDIDATES);
        let each = |looks: u64| looks.saturating_mul(candidates);
        let tokens = len.saturating_sub(from) as u64;
        Self {
            from,
            candidates,
            first: each(FIRST)
                .saturating_add(each(tokens) / TOKENS_PER_FIRST)
                .min(each(MOST_FIRST)),
            looks: 0,
            covered: 0,
        }
    }

    /// Work was done.
    pub(super) fn spend(&mut self, looks: u64) {
        self.looks += looks;
    }

    /// Tokens were covered.
    pub(super) fn earn(&mut self, tokens: usize) {
        self.covered += tokens as u64;
    }

    /// What was spent.
    pub(super) fn looks(&self) -> u64 {
        self.looks
    }

    /// How many looks were taken beyond what is allowed at position `at` of the prompt, from which on a run of `found` tokens is
    /// known; none if some are left.
    fn debt(&self, at: usize, found: usize) -> Option<u64> {
        let each = |looks: u64| looks.saturating_mul(self.candidates);
        let tokens = at.saturating_sub(self.from) as u64;
        let allowed = (self.covered + found as u64)
            .saturating_add(self.first)
            .saturating_add(each(tokens) / TOKENS_PER_CANDIDATE)
            .saturating_add((each(self.covered) / COVERED_PER_CANDIDATE).min(each(MOST)));
        self.looks.checked_sub(allowed)
    }

    /// Whether nothing is left at position `at` of the prompt, from which on a run of `found` tokens is known.
    pub(super) fn is_spent(&self, at: usize, found: usize) -> bool {
        self.debt(at, found).is_some()
    }

    /// Where to go on if nothing is left at position `at` of the prompt, from which on a run of `found` tokens is known.
    pub(super) fn resumes(&self, at: usize, found: usize) -> Option<usize> {
        let debt = self.debt(at, found)?;
        let tokens = (debt + SAVED).saturating_mul(TOKENS_PER_CANDIDATE) / self.candidates;
        Some(at.saturating_add(usize::try_from(tokens).unwrap_or(usize::MAX)))
    }
}
