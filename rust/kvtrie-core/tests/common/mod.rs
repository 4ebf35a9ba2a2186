//! Helpers that tests of the index share.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]
#![allow(dead_code, reason = "each test uses some of them")]

use std::ops::Range;
use std::sync::Arc;

use kvtrie_core::{
    BUILT_IN_KINDS, BlockId, Class, Imported, InsertOptions, Namespace, PlanOptions, RadixIndex,
    ReusePlan, ReusePolicy, Salt, Scope, Source, Span, TokenSequence,
};

/// Options for a plan that covers every token and pins its blocks.
pub(crate) const WHOLE: PlanOptions = PlanOptions {
    keep_last: 0,
    pin: true,
    session: None,
    moved_end: None,
};

/// The namespace that all tests share.
pub(crate) fn namespace() -> Arc<Namespace> {
    Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap())
}

/// A sequence in a namespace that all tests share.
pub(crate) fn sequence(tokens: impl IntoIterator<Item = u32>) -> TokenSequence {
    let tokens = tokens.into_iter().collect();
    TokenSequence::new(namespace(), tokens, Vec::new()).unwrap()
}

pub(crate) fn ids(raw: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    raw.into_iter().map(BlockId).collect()
}

pub(crate) fn span(start: usize, end: usize, kind: &str) -> Span {
    let kind = kind.into();
    Span { start, end, kind }
}

/// KV from elsewhere that was built under a policy so strict that all may use it.
pub(crate) fn imported(exact_until: usize, hops: u16) -> Source<'static> {
    let strict = ReusePolicy {
        min_run: Some(usize::MAX),
        max_hops: 0,
        max_approximate_share: 0.0,
        recompute_first: usize::MAX,
        recompute_last: usize::MAX,
        max_cuts: Some(0),
        max_lost_context: 0.0,
        max_new_context: 0.0,
        scope: Scope::Conversation,
        shared_prefix: usize::MAX,
        recompute_share: 1.0,
        forbid_kinds: BUILT_IN_KINDS.map(String::from).to_vec(),
        ..ReusePolicy::LAXEST
    };
    Source::Imported(Imported {
        policy: Some(Arc::new(strict)),
        ..Imported::new(exact_until, hops)
    })
}

/// Options for the insert of these tokens, after those that are cached.
pub(crate) fn inserting(tokens: Range<usize>, source: Source<'_>) -> InsertOptions<'_> {
    InsertOptions {
        start: tokens.start,
        ..InsertOptions::new(tokens.end, source)
    }
}

/// Inserts the whole blocks of a computed sequence with these ids.
pub(crate) fn put(
    index: &mut RadixIndex,
    seq: &mut TokenSequence,
    raw: impl IntoIterator<Item = u32>,
) {
    let options = InsertOptions::new(seq.len(), Source::Computed);
    index.insert(seq, &ids(raw), options).unwrap();
}

/// The exact policy, except that it allows approximate KV of the whole namespace.
pub(crate) fn approximate() -> ReusePolicy {
    ReusePolicy {
        approximate: true,
        scope: Scope::Namespace,
        ..ReusePolicy::EXACT_ONLY
    }
}

/// Plans with the default options.
pub(crate) fn planned(
    index: &mut RadixIndex,
    seq: &mut TokenSequence,
    policy: &ReusePolicy,
) -> ReusePlan {
    index.plan(seq, policy, PlanOptions::default()).unwrap()
}

/// The approximate segments of a plan as (start, end, old start).
pub(crate) fn moved(plan: &ReusePlan) -> Vec<(usize, usize, usize)> {
    plan.segments()
        .iter()
        .filter(|part| part.class == Class::Approximate)
        .map(|part| (part.start, part.end, part.old_start))
        .collect()
}
