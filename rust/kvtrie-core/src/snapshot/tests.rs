use std::sync::Arc;

use proptest::prelude::*;

mod groups;
mod records;

use super::bytes::Writer;
use super::*;
use crate::config::Config;
use crate::ids::{ABSENT, BlockId, NO_NODE};
use crate::index::{Imported, InsertOptions, LookupOptions, Source};
use crate::namespace::{Namespace, Salt};
use crate::plan::PlanOptions;
use crate::policy::{Repair, ReusePolicy};
use crate::span::Span;
use crate::storage::payload::{Label, Payload};
use crate::tokens::{Item, TokenSequence};
use crate::{ErrorKind, storage::blocks::BlockState};

const POOL: RestoredPool<'_> = RestoredPool::Kept(&[0; 16]);

fn sequence(salt: &str, tokens: &[u32], items: Vec<Item>) -> TokenSequence {
    let salt = Salt::Tenant(salt.into());
    let namespace = Namespace::new("m", "bfloat16", "default", Some("a".into()), salt).unwrap();
    TokenSequence::new(Arc::new(namespace), tokens.to_vec(), items).unwrap()
}

fn add(index: &mut RadixIndex, seq: &mut TokenSequence, ids: &[u32], source: Source<'_>) {
    let ids: Vec<BlockId> = ids.iter().copied().map(BlockId).collect();
    let options = InsertOptions::new(seq.len(), source);
    index.insert(seq, &ids, options).unwrap();
}

fn imported(exact_until: usize, hops: u16) -> Source<'static> {
    Source::Imported(Imported::new(exact_until, hops))
}

fn empty(num_blocks: u64, block_size: usize) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks,
        block_size,
        ..Config::seeded(0)
    })
    .unwrap()
}

/// Makes an index with every kind of content.
fn full() -> RadixIndex {
    let mut index = RadixIndex::new(Config {
        num_blocks: 64,
        block_size: 2,
        seed: 7,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(0)
    })
    .unwrap();
    let computed = Source::Computed;
    let long: Vec<u32> = vec![5; 24];
    let items = vec![Item::new(3, 9, b"cat").unwrap()];
    let mut first = sequence("x", &long, items.clone());
    add(
        &mut index,
        &mut first,
        &(0..12).collect::<Vec<u32>>(),
        computed.clone(),
    );
    // Adds a branch inside the item, partly approximate, another sequence, and one that leaves again.
    let mut branch = long.clone();
    branch[6..].fill(6);
    let mut branch = sequence("x", &branch, items);
    let ids: Vec<u32> = (0..3).chain(20..29).collect();
    add(&mut index, &mut branch, &ids, imported(10, 3));
    let mut other = sequence("y", &[1, 2, 3, 4, 5, 6], Vec::new());
    add(&mut index, &mut other, &[40, 41, 42], computed.clone());
    let mut lost = sequence("z", &[1, 2], Vec::new());
    add(&mut index, &mut lost, &[50], computed);
    index.discard(&[BlockId(50), BlockId(63)]).unwrap();
    // These blocks are condemned, and wait in the restored index.
    let spans = ["reasoning", "mine"].map(|kind| Span {
        start: 1,
        end: 7,
        kind: kind.into(),
    });
    index.tag(&first, &spans).unwrap();
    let mut part = sequence("y", &[1, 2, 3, 4, 9, 9], Vec::new());
    index
        .lookup(&mut part, LookupOptions::default(), &mut Vec::new())
        .unwrap();
    let mut near = sequence("y", &[1, 2, 3, 9, 9, 9], Vec::new());
    let plan = index
        .plan(&mut near, &ReusePolicy::EXACT_ONLY, PlanOptions::default())
        .unwrap();
    index.discard(&[BlockId(40)]).unwrap();
    index.release(&plan).unwrap();
    index.mark_dead(&branch, &[(12, 18), (20, 24)]).unwrap();
    let held = index
        .plan(&mut first, &ReusePolicy::EXACT_ONLY, PlanOptions::default())
        .unwrap();
    index.discard(&[BlockId(1), BlockId(0)]).unwrap();
    index.evict(2);
    assert_eq!(index.quarantine(&[BlockId(2), BlockId(62)]).unwrap(), 2);
    drop(held);
    let stats = index.stats();
    assert!(stats.holes > 0 && stats.condemned == 3 && stats.approximate > 0 && stats.windows > 0);
    assert!(stats.dead > 1, "{stats:?}");
    assert_eq!((stats.waiting, stats.namespaces), (0, 2));
    index.check().unwrap();
    index
}

fn refused(bytes: &[u8]) -> String {
    let error = RadixIndex::restore(bytes, POOL).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Snapshot, "{error}");
    assert!(error.to_string().starts_with("RadixIndex::restore: "));
    error.to_string()
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = bytes.len() as u64;
    bytes[16..24].copy_from_slice(&length.to_le_bytes());
    let sum = checksum(&bytes);
    bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Checks that foreign bytes are refused, or make an index that restores to the same. Returns whether they were
/// restored.
fn check_foreign(bytes: &[u8]) -> bool {
    match RadixIndex::restore(bytes, POOL) {
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Snapshot);
            false
        }
        Ok(mut index) => {
            index.check().unwrap();
            let again = RadixIndex::restore(&index.snapshot(), POOL).unwrap();
            assert_eq!(again.digest(), index.digest());
            index.evict(usize::MAX);
            index.check().unwrap();
            assert_eq!(index.stats().indexed, 0);
            for group in 1..=index.config().groups.len() {
                assert_eq!(index.group_stats(group).unwrap().indexed, 0);
            }
            true
        }
    }
}

#[test]
fn everything_but_plans_comes_back() {
    let index = full();
    let bytes = index.snapshot();
    let again = RadixIndex::restore(&bytes, POOL).unwrap();
    assert_eq!(again.config(), index.config());
    assert_eq!(again.kinds(), index.kinds());
    assert_eq!(
        again.pins().waiting().iter().copied().collect::<Vec<u32>>(),
        [0, 1]
    );
    let (old, new) = (index.stats(), again.stats());
    assert_eq!(
        (new.condemned, new.waiting, new.pinned, new.live_plans),
        (2, 2, 0, 0)
    );
    assert_eq!(new.evictable, new.indexed);
    let counted = |stats: crate::Stats| {
        (
            stats.indexed,
            stats.holes,
            stats.approximate,
            stats.dead,
            stats.windows,
            stats.clock,
            stats.unknown_discards,
            stats.nodes,
            stats.nodes_visited,
            stats.bytes_compared,
        )
    };
    assert_eq!(counted(new), counted(old));
    for (id, place) in index.forest().blocks().known() {
        let same = match (place, again.forest().blocks().state(id)) {
            (
                BlockState::Indexed { node, depth },
                BlockState::Indexed {
                    node: new,
                    depth: at,
                },
            ) => {
                let (old, new) = (index.forest().node(node), again.forest().node(new));
                depth == at
                    && old.payload(depth, 2) == new.payload(at, 2)
                    && old.last_use(depth) == new.last_use(at)
            }
            (BlockState::Condemned, found) => found == BlockState::Waiting,
            (BlockState::CondemnedForGood, found) => found == BlockState::Quarantined,
            (expected, found) => expected == found,
        };
        assert!(same, "block {id}: {place:?}");
    }
    assert_eq!(
        RadixIndex::restore(&again.snapshot(), POOL)
            .unwrap()
            .snapshot(),
        again.snapshot()
    );
}

#[test]
fn the_next_namespace_takes_the_place_that_it_would_have_taken() {
    let mut index = full();
    let mut again = RadixIndex::restore(&index.snapshot(), POOL).unwrap();
    for index in [&mut index, &mut again] {
        let mut new = sequence("w", &[9, 9], Vec::new());
        add(index, &mut new, &[60], Source::Computed);
    }
    let tree = |index: &RadixIndex| {
        index
            .forest()
            .trees()
            .of(sequence("w", &[], Vec::new()).namespace())
            .unwrap()
    };
    assert_eq!(tree(&index), tree(&again));
    assert_eq!(tree(&index), 2);
}

#[test]
fn truncated_or_longer_bytes_are_refused() {
    let bytes = full().snapshot();
    for len in 0..bytes.len() {
        refused(&bytes[..len]);
        if len >= HEADER {
            refused(&sealed(bytes[..len].to_vec()));
        }
    }
    let mut longer = bytes;
    longer.push(0);
    refused(&longer);
    refused(&sealed(longer));
}

#[test]
fn every_changed_byte_is_found() {
    let mut bytes = full().snapshot();
    for at in 0..bytes.len() {
        for change in [1, 0x80, 0xff] {
            bytes[at] ^= change;
            refused(&bytes);
            bytes[at] ^= change;
        }
    }
}

/// Changes each byte from `start` on in many ways and seals the result; the number of those that are restored.
fn restored_if_sealed(bytes: &[u8], start: usize) -> usize {
    let mut restored = 0;
    for at in start..bytes.len() {
        for value in [0, 1, 2, 5, 0x7f, 0x80, 0xfe, 0xff] {
            let mut other = bytes.to_vec();
            other[at] = value;
            restored += usize::from(check_foreign(&sealed(other)));
        }
        for value in [0, u64::MAX, 1 << 31, u64::MAX >> 1, 1 << 62, 3] {
            for len in [4, 8] {
                let mut other = bytes.to_vec();
                let Some(place) = other.get_mut(at..at + len) else {
                    continue;
                };
                place.copy_from_slice(&value.to_le_bytes()[..len]);
                restored += usize::from(check_foreign(&sealed(other)));
            }
        }
    }
    restored
}

#[test]
fn bytes_that_somebody_else_sealed_are_refused_or_in_order() {
    let restored = restored_if_sealed(&full().snapshot(), HEADER);
    // Changed tokens, names and ids are valid and make other indexes.
    assert!(restored > 1000, "{restored}");
}

proptest! {
    #[test]
    fn pieces_of_a_snapshot_in_any_order_are_refused_or_in_order(
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 1..4)
    ) {
        let mut bytes = full().snapshot();
        for (from, to, value) in cuts {
            let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
            let piece = bytes[from.min(to)..from.max(to)].to_vec();
            match value % 3 {
                0 => { bytes.splice(from..from, piece); }
                1 => { bytes.drain(from.min(to)..from.max(to)); }
                _ => bytes[from] = value,
            }
        }
        bytes.resize(bytes.len().max(HEADER), 0);
        check_foreign(&sealed(bytes));
    }

    #[test]
    fn noise_after_a_header_is_refused(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = full().snapshot();
        bytes.truncate(HEADER);
        bytes.extend(noise);
        refused(&sealed(bytes));
    }
}

#[test]
fn a_restored_index_has_secrets_of_its_own() {
    let index = full();
    let bytes = index.snapshot();
    let restored = [(); 2].map(|()| RadixIndex::restore(&bytes, POOL).unwrap());
    let seq = sequence("y", &[1, 2], Vec::new());
    let (hash, priority, tree) = (
        |index: &RadixIndex| index.forest().hash_of_child(0, seq.view()),
        |index: &RadixIndex| index.forest().priority(5),
        |index: &RadixIndex| index.forest().trees().hash_of(seq.namespace()),
    );
    let of: [&dyn Fn(&RadixIndex) -> u64; 3] = [&hash, &priority, &tree];
    for (what, of) in ["hash of an edge", "priority", "hash of a namespace"]
        .iter()
        .zip(of)
    {
        let (old, new, other) = (of(&index), of(&restored[0]), of(&restored[1]));
        assert!(
            new != old && other != old,
            "the {what} follows from the snapshot"
        );
        assert_ne!(new, other, "the {what} is the same in two restored indexes");
    }
}

fn spoilt(text: &str, spoil: impl FnOnce(&mut RadixIndex)) {
    let mut index = full();
    spoil(&mut index);
    says(text, &refused(&index.snapshot()));
}

/// Finds an edge of the full index with extras, and removes its dead marks.
fn edge_with_extras(index: &mut RadixIndex) -> u32 {
    let all = edges::numbers(index);
    let mut nodes = (0..).zip(all).filter(|&(_, number)| number != NO_NODE);
    let found = nodes.find(|&(node, _)| {
        let extras = index.forest().node(node).extras();
        extras.is_some_and(|extras| extras.num_approximate > 0)
    });
    let (edge, _) = found.unwrap();
    index.node_mut(edge).extras_mut().dead = None;
    edge
}

fn says(text: &str, message: &str) {
    assert!(message.contains(text), "{message}");
}

#[test]
fn contradictions_are_refused() {
    spoilt("the clock is at 0", |index| {
        *index.parts_mut().clock = 0;
    });
    spoilt("no count of anything", |index| {
        *index.parts_mut().unknown_discards = u64::MAX;
    });
    spoilt("comes twice", |index| {
        index.parts_mut().pins.waiting_mut().push_back(5);
    });
    spoilt("not in [0, 64)", |index| {
        index.parts_mut().pins.waiting_mut().push_back(64);
    });
    spoilt("not in [0, 20)", |index| {
        index.parts_mut().config.num_blocks = 20;
    });
    spoilt("the limit of this call", |index| {
        index.parts_mut().config.num_blocks = 1 << 25;
    });
    spoilt("pool_id", |index| index.parts_mut().config.pool_id.clear());
    spoilt("pool_id", |index| {
        index.parts_mut().config.pool_id = vec![0; 65];
    });
    spoilt("block 62 comes twice", |index| {
        index.parts_mut().pins.waiting_mut().push_back(62);
    });
    spoilt("min_run", |index| index.parts_mut().config.min_run = 7);
    spoilt("hash_bits", |index| index.parts_mut().config.hash_bits = 65);
    spoilt("block_size", |index| {
        index.parts_mut().config.block_size = 0;
    });
    spoilt("begin alike", |index| {
        let edge = edge_with_extras(index);
        let all = edges::numbers(index);
        let (tokens, parent) = (
            index.forest().node(edge).blocks.tokens(2).to_vec(),
            index.forest().node(edge).parent,
        );
        let twin = (0..u32::try_from(all.len()).unwrap())
            .find(|&node| {
                node != edge
                    && all[node as usize] != NO_NODE
                    && index.forest().node(node).parent == parent
            })
            .unwrap();
        let ids = index.forest().node(twin).blocks.ids(2).to_vec();
        let ids: Vec<u32> = ids.into_iter().take(tokens.len() / 2).collect();
        let (tree, depth) = (
            index.forest().node(edge).tree,
            index.forest().node(edge).depth,
        );
        let extras = crate::storage::extras::Extras {
            items: index.forest().node(edge).extras().unwrap().items.clone(),
            ..Default::default()
        };
        let tokens = &tokens[..2 * ids.len()];
        let mut new =
            crate::storage::node::Node::of_parts((tree, parent, depth), tokens, &ids, 0, extras, 2);
        let old = index.forest().node(twin);
        (new.left, new.right, new.up) = (old.left, old.right, old.up);
        *index.node_mut(twin) = new;
    });
}

#[test]
fn sections_are_refused_in_another_order_or_number() {
    let bytes = full().snapshot();
    let mut at = HEADER;
    let mut sections = Vec::new();
    while at < bytes.len() {
        let length: [u8; 8] = bytes[at + 4..at + 12].try_into().unwrap();
        let end = at + 12 + usize::try_from(u64::from_le_bytes(length)).unwrap();
        sections.push(&bytes[at..end]);
        at = end;
    }
    assert_eq!(sections.len(), SECTIONS.len());
    let build = |order: &[usize]| {
        let mut all = bytes[..HEADER].to_vec();
        for &section in order {
            all.extend_from_slice(sections[section]);
        }
        sealed(all)
    };
    let all: Vec<usize> = (0..SECTIONS.len()).collect();
    assert!(check_foreign(&build(&all)));
    for at in 0..all.len() {
        let mut fewer = all.clone();
        fewer.remove(at);
        refused(&build(&fewer));
        let mut more = all.clone();
        more.insert(at, at);
        refused(&build(&more));
        if at > 0 {
            let mut swapped = all.clone();
            swapped.swap(at - 1, at);
            refused(&build(&swapped));
        }
    }
}

#[test]
fn another_version_is_named() {
    let mut bytes = full().snapshot();
    bytes[8] = 2;
    assert!(refused(&sealed(bytes)).contains("version 2; this build reads versions 3 to 10"));
    assert!(refused(b"KVTRIE").contains("no snapshot") || refused(b"").contains("bytes"));
}

#[test]
fn a_pool_is_as_large_as_the_limit_allows() {
    let config = Config {
        num_blocks: 1 << 31,
        ..Config::seeded(0)
    };
    let bytes = RadixIndex::new(config).unwrap().snapshot();
    assert!(refused(&bytes).contains("the limit of this call is 16777216"));
    let limits = RestoreLimits {
        num_blocks: 1 << 31,
    };
    let index = RadixIndex::restore_within(&bytes, POOL, limits).unwrap();
    assert_eq!(index.config().num_blocks, 1 << 31);
}

#[test]
fn the_size_is_what_the_docs_say() {
    let mut index = empty(1 << 10, 16);
    let empty = index.snapshot().len();
    let tokens: Vec<u32> = (0..512 * 16).collect();
    let mut seq = sequence("x", &tokens, Vec::new());
    let ids: Vec<u32> = (0..512).collect();
    add(&mut index, &mut seq, &ids, Source::Computed);
    let namespace = "m".len() + "bfloat16".len() + "default".len() + "a".len() + "x".len();
    let expected = 512 * 4 * 17 + 17 + 51 + namespace;
    assert_eq!(index.snapshot().len() - empty, expected);
}

#[test]
fn a_snapshot_of_another_pool_is_refused_by_both_names() {
    let index = RadixIndex::new(Config {
        pool_id: vec![0xab, 1],
        ..Config::seeded(7)
    });
    let bytes = index.unwrap().snapshot();
    let error = RadixIndex::restore(&bytes, RestoredPool::Kept(&[0xcd])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Snapshot);
    says("pool ab01, not of cd", &error.to_string());
    RadixIndex::restore(&bytes, RestoredPool::Kept(&[0xab, 1])).unwrap();
    for id in [&[][..], &[0; 65]] {
        let error = RadixIndex::restore(&bytes, RestoredPool::Kept(id)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        says(
            &format!("pool_id has {} bytes; it must have 1 to 64", id.len()),
            &error.to_string(),
        );
    }
}

#[test]
fn a_lost_pool_gives_the_empty_index_of_the_configuration() {
    let index = full();
    let empty = RadixIndex::restore(&index.snapshot(), RestoredPool::Lost(b"new")).unwrap();
    let config = Config {
        pool_id: b"new".to_vec(),
        ..index.config().clone()
    };
    assert_eq!(empty.config(), &config);
    let fresh = RadixIndex::new(config).unwrap();
    assert_eq!(empty.digest(), fresh.digest());
    assert_eq!(empty.snapshot(), fresh.snapshot());
    let mut damaged = index.snapshot();
    *damaged.last_mut().unwrap() ^= 1;
    let error = RadixIndex::restore(&damaged, RestoredPool::Lost(b"new")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Snapshot);
}

fn with_section(index: &RadixIndex, name: &str, other: &Writer) -> Vec<u8> {
    let mut out = Writer::default();
    out.raw(&index.snapshot()[..HEADER]);
    for section in sections(!index.groups().is_empty()) {
        let mut content = Writer::default();
        if section.name == name {
            content.raw(other.bytes());
        } else {
            (section.write)(index, &mut content);
        }
        out.raw(section.name.as_bytes());
        out.len(content.end());
        out.raw(content.bytes());
    }
    sealed(out.into_bytes())
}

/// Restores an index and checks that its snapshot has the same bytes.
fn read_back(bytes: &[u8]) -> RadixIndex {
    let index = RadixIndex::restore(bytes, POOL).unwrap();
    assert_eq!(index.snapshot(), bytes);
    index
}

#[test]
fn a_departure_names_an_edge_that_exists() {
    let mut index = RadixIndex::new(Config::seeded(0)).unwrap();
    let mut seq = sequence("x", &[1; 16], Vec::new());
    add(&mut index, &mut seq, &[5], Source::Computed);
    let after = |number: u32| {
        let mut gone = Writer::default();
        gone.len(1);
        gone.u32(number);
        gone.u32(1);
        gone.u64(0x1234);
        with_section(&index, "GONE", &gone)
    };
    // Number 0 is the root of the tree, number 1 its edge.
    for number in [0, 1, NO_NODE] {
        read_back(&after(number));
    }
    for number in [2, NO_NODE - 1] {
        says(
            &format!("there is no edge {number} (section GONE"),
            &refused(&after(number)),
        );
    }
}

#[test]
fn grades_with_later_bounds_have_a_version_of_their_own() {
    let build = |repair| {
        let mut index = empty(8, 2);
        let policy = ReusePolicy {
            repair,
            recompute_share: 0.25,
            ..ReusePolicy::LAXEST
        };
        let source = Imported {
            policy: Some(Arc::new(policy)),
            ..Imported::new(2, 1)
        };
        let mut seq = sequence("x", &[1, 2, 3, 4], Vec::new());
        add(&mut index, &mut seq, &[0, 1], Source::Imported(source));
        index
    };
    for (repair, version) in [(Repair::Probe, 3), (Repair::Adaptive, 7)] {
        let bytes = build(repair).snapshot();
        assert_eq!(bytes[MAGIC.len()], version);
        let restored = RadixIndex::restore(&bytes, POOL).unwrap();
        assert_eq!(restored.digest(), build(repair).digest());
        let mut other = bytes;
        other[MAGIC.len()] = 10 - version;
        let said = format!("makes it version {version}, not {}", 10 - version);
        assert!(refused(&sealed(other)).contains(&said));
    }
    let [plain, later] = [Repair::Probe, Repair::Adaptive].map(|one| build(one).snapshot());
    assert_eq!(later.len(), plain.len() + size_of::<u64>());
}
