//! Bytes that claim to be a snapshot.
//!
//! The harness uses them as they are, or as the content of sections, or as changes of a true snapshot; most get a
//! length and a checksum that fit. The result is an error of one kind, or an index that passes its check.

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Config, ErrorKind, Imported, InsertOptions, Item, LookupOptions, Namespace,
    PlanOptions, RadixIndex, RestoredPool, ReusePolicy, Salt, Scope, Source, Span, TokenSequence,
};

use crate::bytes::Bytes;

/// The pool that `Config::seeded` names, still there.
const POOL: RestoredPool<'_> = RestoredPool::Kept(&[0; 16]);

const MAGIC: &[u8; 8] = b"KVTRIE\x1a\n";
const SECTIONS: [&[u8; 4]; 7] = [
    b"CONF", b"COUN", b"KIND", b"TREE", b"WAIT", b"WIND", b"GONE",
];

/// The result of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was refused.
    Refused,
    /// It was an index.
    Restored,
}

/// Runs one input.
///
/// # Panics
/// When a rule is broken.
pub fn run(data: &[u8]) -> Outcome {
    let mut bytes = Bytes::new(data);
    let blob = match bytes.below(4) {
        0 => data.get(1..).unwrap_or_default().to_vec(),
        1 => sections(&mut bytes),
        _ => changed(&mut bytes),
    };
    match RadixIndex::restore(&blob, POOL) {
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Snapshot, "{error}");
            Outcome::Refused
        }
        Ok(mut index) => {
            index.check().expect("an invariant is broken");
            let blob = index.snapshot();
            let again = RadixIndex::restore(&blob, POOL).expect("its own snapshot is refused");
            assert_eq!(again.digest(), index.digest());
            assert_eq!(
                again.snapshot(),
                blob,
                "a snapshot of a restored index differs"
            );
            use_up(&mut index);
            Outcome::Restored
        }
    }
}

/// Makes some calls on a restored index, until nothing is left.
fn use_up(index: &mut RadixIndex) {
    for space in namespaces() {
        for tokens in [vec![5; 24], vec![1, 2, 3, 4, 5, 6]] {
            let mut seq = sequence(&space, tokens, Vec::new());
            let policy = ReusePolicy {
                approximate: true,
                scope: Scope::Namespace,
                ..ReusePolicy::EXACT_ONLY
            };
            if let Ok(plan) = index.plan(&mut seq, &policy, PlanOptions::default()) {
                index.check().expect("an invariant is broken");
                index.release(&plan).expect("the plan lives");
            }
        }
    }
    let held = index.stats();
    let all = index.evict(usize::MAX).len() as u64;
    assert_eq!(all, held.indexed + held.waiting, "a block was lost");
    index.check().expect("an invariant is broken");
}

/// A header, and sections of any content.
fn sections(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let mut blob = header();
    for name in SECTIONS {
        let length = bytes.below(256);
        blob.extend(name);
        blob.extend((length as u64).to_le_bytes());
        blob.extend((0..length).map(|_| bytes.byte()));
    }
    sealed(blob)
}

/// A true snapshot with some of its bytes changed, cut out or doubled.
fn changed(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let mut blob = full(bytes.below(3)).snapshot();
    let is_sealed = !bytes.one_in(8);
    while !bytes.is_empty() {
        let at = bytes.place(blob.len());
        match bytes.below(8) {
            0 => bytes.cut(&mut blob, at, 64),
            1 => bytes.double(&mut blob, at, 64),
            2 => {
                // A count or a position at the edge of its type.
                let edge = [
                    0,
                    1,
                    u64::MAX,
                    u64::MAX - 1,
                    1 << 31,
                    1 << 32,
                    1 << 62,
                    1 << 63,
                ];
                let value = edge[bytes.below(edge.len())].to_le_bytes();
                for (to, from) in blob[at..].iter_mut().take(4 << bytes.below(2)).zip(value) {
                    *to = from;
                }
            }
            _ => {
                if let Some(place) = blob.get_mut(at) {
                    *place = bytes.byte();
                }
            }
        }
        blob.resize(blob.len().max(24), 0);
    }
    if is_sealed { sealed(blob) } else { blob }
}

fn header() -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend(1_u32.to_le_bytes());
    header.extend([0; 12]);
    header
}

/// The bytes with a matching length and checksum.
fn sealed(mut blob: Vec<u8>) -> Vec<u8> {
    let length = blob.len() as u64;
    blob[16..24].copy_from_slice(&length.to_le_bytes());
    let mut sum = crc32fast::Hasher::new();
    sum.update(&blob[..12]);
    sum.update(&blob[16..]);
    blob[12..16].copy_from_slice(&sum.finalize().to_le_bytes());
    blob
}

fn namespaces() -> [Arc<Namespace>; 2] {
    [Salt::Shared, Salt::Tenant("tenant".into())].map(|salt| {
        let namespace = Namespace::new("m", "auto", "default", Some("lora".into()), salt);
        Arc::new(namespace.expect("a valid namespace"))
    })
}

fn sequence(space: &Arc<Namespace>, tokens: Vec<u32>, items: Vec<Item>) -> TokenSequence {
    TokenSequence::new(Arc::clone(space), tokens, items).expect("a valid sequence")
}

/// An index that uses every feature: with windows of all hashes, or of few, or without.
fn full(kind: usize) -> RadixIndex {
    let mut index = RadixIndex::new(Config {
        num_blocks: 64,
        block_size: 2,
        seed: 7,
        hash_bits: if kind == 1 { 4 } else { 64 },
        moved_runs: kind < 2,
        min_run: 8,
        ..Config::seeded(0)
    })
    .expect("a valid config");
    let [shared, tenant] = namespaces();
    let items = [Item::new(3, 9, b"cat").expect("a valid item")];
    let mut branch = vec![5; 6];
    branch.extend([6; 18]);
    let imported = Source::Imported(Imported {
        exact_until: 10,
        hops: 3,
    });
    let ids = |from: u32, to: u32| (from..to).map(BlockId).collect::<Vec<BlockId>>();
    let computed = Source::Computed;
    let all = [
        (&shared, vec![5; 24], &items[..], ids(0, 12), computed),
        (&shared, branch, &items[..], ids(12, 24), imported),
        (&tenant, (1..7).collect(), &[], ids(40, 43), computed),
        (&tenant, vec![1, 2, 9, 9], &[], ids(50, 52), computed),
    ];
    let spans = ["reasoning", "mine"].map(|kind| Span {
        start: 1,
        end: 5,
        kind: kind.into(),
    });
    for (space, tokens, items, ids, source) in all {
        let mut seq = sequence(space, tokens, items.to_vec());
        let mut options = InsertOptions::new(seq.len(), source);
        if seq.len() > 4 {
            options.spans = &spans;
        }
        index.insert(&mut seq, &ids, options).expect("valid ids");
        seq.truncate(4).expect("it is longer");
        let found = index.lookup(&mut seq, LookupOptions::default(), &mut Vec::new());
        found.expect("a valid lookup");
    }
    let mut near = sequence(&tenant, vec![1, 2, 3, 9, 9], Vec::new());
    let plan = index
        .plan(&mut near, &ReusePolicy::EXACT_ONLY, PlanOptions::default())
        .expect("a valid plan");
    index
        .discard(&[BlockId(40), BlockId(4)])
        .expect("valid ids");
    let marked = index.quarantine(&[BlockId(41), BlockId(60)]);
    assert_eq!(marked.expect("valid ids"), 2);
    index.release(&plan).expect("the plan lives");
    index.evict(3);
    let long = sequence(&shared, vec![5; 24], items.to_vec());
    let marked = index.mark_dead(&long, &[(0, 2), (12, 18)]);
    assert_eq!(marked.expect("valid ranges"), 3);
    index
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::random_inputs;

    #[test]
    fn true_snapshots_are_restored() {
        for kind in 0..3 {
            let index = full(kind);
            let stats = index.stats();
            assert!(
                stats.holes > 0 && stats.approximate > 0 && stats.indexed > 10,
                "{stats:?}"
            );
            assert_eq!(
                run(&[2, kind, 0].map(|byte| u8::try_from(byte).unwrap())),
                Outcome::Restored
            );
        }
    }

    #[test]
    fn random_inputs_break_no_rule() {
        let mut restored = 0;
        for data in random_inputs() {
            restored += usize::from(run(&data) == Outcome::Restored);
        }
        assert!((100..3_900).contains(&restored), "{restored}");
    }
}
