//! Bytes that claim to be a transfer manifest.
//!
//! The harness uses them as they are, or as changes of a true manifest. The result is a refusal, or a manifest of the
//! same bytes; every load of that has the tokens that the sender really had.

use std::sync::Arc;

use kvtrie_core::{BlockId, Class, Namespace, ReusePolicy, Salt, TokenSequence};
use kvtrie_transfer::{
    LabelRun, LocalGroup, SentGroup, Table, TransferError, TransferKey, TransferLimits,
    TransferManifest, TransferOptions, TransferPlan,
};

use crate::bytes::Bytes;

const BLOCK_SIZE: usize = 4;

/// The result of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was refused, when it was read or planned with.
    Refused,
    /// It was true.
    Planned,
}

/// Runs one input.
///
/// # Panics
/// When a rule is broken.
pub fn run(data: &[u8]) -> Outcome {
    let key = TransferKey::new(&[7; 32]).expect("a valid key");
    let theirs: Vec<u32> = (0..45).map(|token| token % 11).collect();
    let table: Vec<BlockId> = (0..14).map(|id| BlockId(id * 5 % 14)).collect();
    let mut bytes = Bytes::new(data);
    let raw = if bytes.one_in(4) {
        data.get(1..).unwrap_or_default().to_vec()
    } else {
        changed(
            &mut bytes,
            true_manifest(&theirs, &table, &key).to_bytes().to_vec(),
        )
    };
    let manifest = match TransferManifest::from_bytes(&raw, &TransferLimits::default()) {
        Ok(manifest) => manifest,
        Err(error) => return refused(&error),
    };
    assert_eq!(manifest.to_bytes(), raw, "other bytes come out");
    let _ = format!("{manifest:?} {:?}", manifest.runs().collect::<Vec<_>>());
    let mine: Vec<u32> = theirs[..9].iter().chain(&theirs[14..]).copied().collect();
    let local = [LocalGroup {
        group: 0,
        block_size: Some(3),
        table: Some(Table::Full(&table)),
    }];
    let policy = policy();
    let options = TransferOptions {
        policy: &policy,
        ..TransferOptions::default()
    };
    match TransferPlan::new(&manifest, &sequence(&mine), &local, &key, &options) {
        Ok(plan) => {
            for pair in plan.pairs() {
                let source = usize::try_from(pair.start as i64 - pair.delta).expect("a position");
                let end = source + pair.end - pair.start;
                assert_eq!(
                    mine[pair.start..pair.end],
                    theirs[source..end],
                    "wrong tokens"
                );
                assert_eq!(pair.remote, table[source / BLOCK_SIZE], "a wrong block");
                assert!((end - 1) / BLOCK_SIZE == source / BLOCK_SIZE, "two blocks");
            }
            Outcome::Planned
        }
        Err(error) => refused(&error),
    }
}

/// What the true manifest's approximate KV was built under, and the receiver asks for.
fn policy() -> ReusePolicy {
    ReusePolicy {
        approximate: true,
        min_run: Some(8),
        max_hops: 2,
        ..ReusePolicy::EXACT_ONLY
    }
}

fn refused(error: &TransferError) -> Outcome {
    assert!(error.refusal().is_some(), "{error:?}");
    Outcome::Refused
}

fn sequence(tokens: &[u32]) -> TokenSequence {
    let namespace = Namespace::new("m", "auto", "default", None, Salt::Shared);
    let namespace = Arc::new(namespace.expect("a valid namespace"));
    TokenSequence::new(namespace, tokens.to_vec(), Vec::new()).expect("a valid sequence")
}

fn true_manifest(tokens: &[u32], table: &[BlockId], key: &TransferKey) -> TransferManifest {
    let group = SentGroup {
        group: 0,
        block_size: BLOCK_SIZE,
        table: Table::Full(table),
    };
    let label = |start, end, class, hops| LabelRun {
        start,
        end,
        class,
        hops,
    };
    let labels = [
        label(0, 20, Class::Exact, 0),
        label(20, 30, Class::Approximate, 1),
        label(36, 45, Class::Exact, 0),
    ];
    let seq = sequence(tokens);
    let made = TransferManifest::built_under(Some(&policy()), &seq, &[group], &labels, 56, key);
    made.expect("a true manifest")
}

/// Bytes with some of them changed, cut out or doubled.
fn changed(bytes: &mut Bytes<'_>, mut raw: Vec<u8>) -> Vec<u8> {
    while !bytes.is_empty() && !raw.is_empty() {
        bytes.disturb(&mut raw);
    }
    raw
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::random_inputs;

    #[test]
    fn the_true_manifest_is_planned_with() {
        assert_eq!(run(&[0]), Outcome::Planned);
        assert_eq!(run(&[3]), Outcome::Refused);
    }

    #[test]
    fn random_inputs_break_no_rule() {
        for data in random_inputs() {
            run(&data);
        }
    }
}
