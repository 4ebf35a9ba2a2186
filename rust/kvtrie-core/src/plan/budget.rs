//! Bounds the search for moved runs (rule P16 in `docs/design.md`).
//!
//! Work is counted in *looks*: a place looked up or tried, a child compared, or `TOKENS_PER_LOOK` tokens compared as
//! memory. A look waits for a few cache lines, 0.03 to 0.1 µs. Looks are counted, not timed, so that the same calls on
//! two indexes of the same seed make the same plans. A search may exceed the bound by the looks of the last window and
//! place. Runs that are found pay for the search: `benches/python/reuse.py` prints what prompts drop,
//! `benches/python/fan.py` the cost of windows that lead to no run.

use crate::effort::Effort;

/// Tokens in a cache line.
const TOKENS_PER_LOOK: usize = 16;

/// Bytes of a cache line.
const BYTES_PER_LOOK: u64 = 64;

/// Looks in about the time of a walk to a node that is in no CPU cache.
const LOOKS_PER_NODE: u64 = 4;

/// Bytes compared in about the time of one window lookup.
const BYTES_PER_WINDOW: u64 = 64;

/// Looks to find where the prompt sorts among the children of an edge.
pub(super) const CHOICE: u64 = 24;

/// The smallest number of candidates that a budget is computed with.
const LEAST_CANDIDATES: u64 = 64;

/// Looks per candidate before anything is found.
const FIRST: u64 = 4;

/// This many tokens to be searched add one look per candidate to [`FIRST`], ...
const TOKENS_PER_FIRST: u64 = 512;

/// ... up to this total: a short prompt that finds nothing must not cost a large multiple of its other costs.
const MOST_FIRST: u64 = 8;

/// This many tokens of the prompt earn one look per candidate.
const TOKENS_PER_CANDIDATE: u64 = 640;

/// This many covered tokens earn one look per candidate, in addition to one look per token, ...
const COVERED_PER_CANDIDATE: u64 = 2;

/// ... up to this many per candidate: 16,384 with 64 candidates.
const MOST: u64 = 256;

/// Looks that are saved up before a search continues.
const SAVED: u64 = 2;

#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    from: usize,
    /// `max_candidates`, but at least [`LEAST_CANDIDATES`].
    candidates: u64,
    first: u64,
    looks: u64,
    /// Looks that compared tokens as memory, a cache line each.
    compared: u64,
    covered: u64,
}

impl Budget {
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
            compared: 0,
            covered: 0,
        }
    }

    pub(super) fn spend(&mut self, looks: u64) {
        self.looks += looks;
    }

    /// Spends the looks that comparing this many tokens as memory takes.
    pub(super) fn compare(&mut self, tokens: usize) {
        let looks = (tokens / TOKENS_PER_LOOK) as u64;
        self.compared += looks;
        self.looks += looks;
    }

    pub(super) fn earn(&mut self, tokens: usize) {
        self.covered += tokens as u64;
    }

    pub(super) fn looks(&self) -> u64 {
        self.looks
    }

    /// Whether the looks, and the windows looked up, take more than `effort`.
    pub(super) fn exceeds(&self, effort: Effort, windows: u64) -> bool {
        let waits = self.looks - self.compared;
        let compared = self.compared.saturating_mul(BYTES_PER_LOOK);
        waits > effort.nodes.saturating_mul(LOOKS_PER_NODE)
            || compared.saturating_add(windows.saturating_mul(BYTES_PER_WINDOW)) > effort.bytes
    }

    /// Looks beyond those allowed at `at`, if a run of `found` tokens from there is known; `None` if one is left.
    fn debt(&self, at: usize, found: usize) -> Option<u64> {
        let each = |looks: u64| looks.saturating_mul(self.candidates);
        let tokens = at.saturating_sub(self.from) as u64;
        let allowed = (self.covered + found as u64)
            .saturating_add(self.first)
            .saturating_add(each(tokens) / TOKENS_PER_CANDIDATE)
            .saturating_add((each(self.covered) / COVERED_PER_CANDIDATE).min(each(MOST)));
        self.looks.checked_sub(allowed)
    }

    pub(super) fn is_spent(&self, at: usize, found: usize) -> bool {
        self.debt(at, found).is_some()
    }

    pub(super) fn resumes(&self, at: usize, found: usize) -> Option<usize> {
        let debt = self.debt(at, found)?;
        let tokens = (debt + SAVED).saturating_mul(TOKENS_PER_CANDIDATE) / self.candidates;
        Some(at.saturating_add(usize::try_from(tokens).unwrap_or(usize::MAX)))
    }
}
