//! Finds the sender's blocks that are at the prompt's own prefix and position.

use std::collections::BTreeMap;

use kvtrie_core::{Class, ReusePolicy, TokenSequence};

use crate::transfer::digests::{Digest, Tokens, TransferKey};
use crate::transfer::manifest::{BlockRun, TransferManifest};
use crate::transfer::pairs::Piece;

pub(super) fn prefixes(
    manifest: &TransferManifest,
    seq: &TokenSequence,
    key: &TransferKey,
) -> BTreeMap<usize, Digest> {
    let computed = manifest.runs().filter(|run| !run.is_lookahead());
    let mut starts: Vec<usize> = computed
        .map(|run| run.start())
        .filter(|&start| start <= seq.len())
        .collect();
    starts.sort_unstable();
    starts.dedup();
    let digests = key.prefixes(Tokens::of(seq), &starts);
    starts.into_iter().zip(digests).collect()
}

/// For each run whose prefix is the prompt's, the blocks before the first that differs. Approximate runs count only if
/// `is_strict`: they were built under a policy as strict as this one.
pub(super) fn in_place(
    runs: &[BlockRun<'_>],
    prompt: Tokens<'_>,
    prefixes: &BTreeMap<usize, Digest>,
    key: &TransferKey,
    policy: &ReusePolicy,
    is_strict: bool,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (at, run) in runs.iter().enumerate() {
        let is_allowed = match run.class() {
            Class::Exact => true,
            Class::Approximate => policy.approximate && is_strict && run.hops() <= policy.max_hops,
            Class::Compute => false,
        };
        let start = run.start();
        let is_own = prefixes
            .get(&start)
            .is_some_and(|prefix| prefix == run.prefix());
        if !is_allowed || !is_own {
            continue;
        }
        let mut end = start;
        for digest in run.digests() {
            let stop = (end + run.block_size()).min(run.end());
            if stop > prompt.ids.len() || key.block(prompt.slice(end, stop)) != *digest {
                break;
            }
            end = stop;
        }
        if start < end {
            pieces.push(Piece {
                start,
                end,
                source: start,
                class: run.class(),
                hops: run.hops(),
                run: at,
            });
        }
    }
    pieces
}
