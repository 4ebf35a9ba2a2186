//! Bytes that claim to be a snapshot.
//!
//! The harness uses them as they are, or as the content of a section of a true snapshot, or as changes of one; most get
//! a length and a checksum that fit. The result is an error of one kind, or an index that passes its check.

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Config, ErrorKind, Group, GroupOffers, GroupOptions, Imported, InsertOptions, Item,
    LookupOptions, Namespace, PlanOptions, RadixIndex, RestoredPool, ReusePolicy, Salt, Scope,
    Source, Span, TokenSequence,
};

use crate::bytes::Bytes;

/// The pool that `Config::seeded` names, still there.
const POOL: RestoredPool<'_> = RestoredPool::Kept(&[0; 16]);

const HEADER: usize = 24;
/// The kinds of [`full`].
const KINDS: usize = 4;

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
            let moved = ReusePolicy {
                approximate: true,
                scope: Scope::Namespace,
                ..ReusePolicy::EXACT_ONLY
            };
            // Next to states, no run is moved.
            for policy in [moved, ReusePolicy::EXACT_ONLY] {
                if let Ok(plan) = index.plan(&mut seq, &policy, PlanOptions::default()) {
                    index.check().expect("an invariant is broken");
                    index.release(&plan).expect("the plan lives");
                }
            }
        }
    }
    for group in 1..=index.config().groups.len() {
        let held = index.group_stats(group).expect("a group");
        let all = index.evict_group(group, usize::MAX).expect("a group");
        let expected = held.indexed + held.waiting;
        assert_eq!(all.len() as u64, expected, "an id of a group was lost");
    }
    let held = index.stats();
    let all = index.evict(usize::MAX).len() as u64;
    assert_eq!(all, held.indexed + held.waiting, "a block was lost");
    index.check().expect("an invariant is broken");
}

/// A true snapshot with one section of any content.
fn sections(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let whole = full(bytes.below(KINDS)).snapshot();
    let (mut found, mut at) = (Vec::new(), HEADER);
    while let Some(length) = whole.get(at + 4..at + 12) {
        let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
        let end = at + 12 + usize::try_from(length).expect("a length in memory");
        found.push((&whole[at..at + 4], &whole[at + 12..end]));
        at = end;
    }
    let changed = bytes.below(found.len());
    let mut blob = whole[..HEADER].to_vec();
    for (number, (name, content)) in found.into_iter().enumerate() {
        let mut content = content.to_vec();
        if number == changed {
            let length = bytes.below(256);
            content = (0..length).map(|_| bytes.byte()).collect();
        }
        blob.extend(name);
        blob.extend((content.len() as u64).to_le_bytes());
        blob.extend(content);
    }
    sealed(blob)
}

/// A true snapshot with some of its bytes changed, cut out or doubled.
fn changed(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let mut blob = full(bytes.below(KINDS)).snapshot();
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
        blob.resize(blob.len().max(HEADER), 0);
    }
    if is_sealed { sealed(blob) } else { blob }
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

/// An index that uses every feature: with windows of all hashes, or of few, or without, or without and with groups.
fn full(kind: usize) -> RadixIndex {
    let mut index = RadixIndex::new(Config {
        num_blocks: 64,
        block_size: 2,
        seed: 7,
        hash_bits: if kind == 1 { 4 } else { 64 },
        moved_runs: kind < 2,
        min_run: 8,
        groups: if kind == 3 {
            vec![Group::window("swa", 5, 16, 2), Group::state("gdn", 8, 2)]
        } else {
            Vec::new()
        },
        ..Config::seeded(0)
    })
    .expect("a valid config");
    if kind == 3 {
        fill_groups(&mut index);
    }
    let [shared, tenant] = namespaces();
    let items = [Item::new(3, 9, b"cat").expect("a valid item")];
    let mut branch = vec![5; 6];
    branch.extend([6; 18]);
    let imported = Source::Imported(Imported::new(10, 3));
    let ids = |from: u32, to: u32| (from..to).map(BlockId).collect::<Vec<BlockId>>();
    let all = [
        (
            &shared,
            vec![5; 24],
            &items[..],
            ids(0, 12),
            Source::Computed,
        ),
        (&shared, branch, &items[..], ids(12, 24), imported),
        (
            &tenant,
            (1..7).collect(),
            &[],
            ids(40, 43),
            Source::Computed,
        ),
        (
            &tenant,
            vec![1, 2, 9, 9],
            &[],
            ids(50, 52),
            Source::Computed,
        ),
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

/// Inserts what [`full`] has first, with ids of groups.
fn fill_groups(index: &mut RadixIndex) {
    let [shared, _] = namespaces();
    let items = vec![Item::new(3, 9, b"cat").expect("a valid item")];
    let mut seq = sequence(&shared, vec![5; 24], items);
    let ids: Vec<BlockId> = (0..12).map(BlockId).collect();
    let window: Vec<(usize, BlockId)> = (0..12).map(|at| 2 * at).zip(ids.clone()).collect();
    let state = [(8, BlockId(3)), (24, BlockId(5))];
    let offers = [(1, &window[..]), (2, &state)];
    let offers = offers.map(|(group, offers)| GroupOffers { group, offers });
    let groups = GroupOptions {
        offers: &offers,
        stops: &[4],
    };
    let options = InsertOptions::new(24, Source::Computed);
    let done = index.insert_groups(&mut seq, &ids, options, groups);
    done.expect("valid ids");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::random_inputs;

    #[test]
    fn true_snapshots_are_restored() {
        for kind in 0..KINDS {
            let index = full(kind);
            if kind == 3 {
                let stats = [1, 2].map(|group| index.group_stats(group).expect("a group"));
                assert!(stats.iter().all(|own| own.indexed > 0), "{stats:?}");
                assert!(stats[0].waiting > 0, "{stats:?}");
            }
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
