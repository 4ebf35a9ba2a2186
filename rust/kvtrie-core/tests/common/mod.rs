//! Helpers that tests of the index share.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use std::sync::Arc;

use kvtrie_core::{BlockId, Namespace, Salt, TokenSequence};

/// A sequence in a namespace that all tests share.
pub(crate) fn sequence(tokens: impl IntoIterator<Item = u32>) -> TokenSequence {
    let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
    let tokens = tokens.into_iter().collect();
    TokenSequence::new(Arc::new(namespace), tokens, Vec::new()).unwrap()
}

pub(crate) fn ids(raw: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    raw.into_iter().map(BlockId).collect()
}
