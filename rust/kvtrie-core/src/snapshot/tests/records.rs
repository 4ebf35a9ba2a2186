//! Tests the records of edges: what is restored, and what is refused, one step on either side of each limit.

use super::*;
use crate::moved::Moved;
use crate::storage::extras::InnerUses;

const LABELS: u8 = 1;
const ITEMS: u8 = 1 << 1;
const TAGS: u8 = 1 << 2;
const USES: u8 = 1 << 3;
const SOURCES: u8 = 1 << 4;
const DEAD: u8 = 1 << 5;
const SESSIONS: u8 = 1 << 6;

/// The optional parts of an edge's record, valid or not.
#[derive(Default)]
struct Edge {
    has: u8,
    extras: Writer,
}

impl Edge {
    fn with(has: u8, write: impl FnOnce(&mut Writer)) -> Self {
        let mut extras = Writer::default();
        write(&mut extras);
        Self { has, extras }
    }

    fn items(items: &[(usize, usize)]) -> Self {
        Self::with(ITEMS, |out| {
            out.len(items.len());
            for &(start, end) in items {
                out.len(start);
                out.len(end);
                out.u8(3);
                out.raw(b"cat");
            }
        })
    }

    fn tags(tags: &[(usize, usize)]) -> Self {
        Self::with(TAGS, |out| {
            out.len(tags.len());
            for &(start, end) in tags {
                out.len(start);
                out.len(end);
                out.u64(1);
            }
        })
    }

    /// Runs of sessions, each as (from, to, the bytes that its digests consist of).
    fn sessions(runs: &[(u32, u32, &[u8])]) -> Self {
        Self::with(SESSIONS, |out| {
            out.len(runs.len());
            for &(from, to, members) in runs {
                out.u32(from);
                out.u32(to);
                out.u8(u8::try_from(members.len()).unwrap());
                for &member in members {
                    out.raw(&[member; 16]);
                }
            }
        })
    }

    fn uses(uses: &[(u32, u64)]) -> Self {
        Self::with(USES, |out| {
            out.len(uses.len());
            for &(end, time) in uses {
                out.u32(end);
                out.u64(time);
            }
        })
    }
}

fn tokens() -> Vec<u32> {
    (100..120).collect()
}

/// Writes a path with blocks of four tokens: edges over the depths [0, 2) and [2, 5), both last used at 3. The clock is
/// at 9.
fn two_edges(middle: u32, above: &Edge, below: &Edge) -> Vec<u8> {
    let mut index = empty(8, 4);
    *index.parts_mut().clock = 9;
    let mut out = Writer::default();
    out.len(1);
    out.len(0);
    for name in ["m", "bfloat16", "default"] {
        out.text(name);
    }
    for name in ["a", "x"] {
        out.u8(1);
        out.text(name);
    }
    // No grade has a number.
    out.u8(0);
    out.len(2);
    for (parent, blocks, ids, edge) in [
        (0, 2, &[0, 1][..], above),
        (1, 3, &[2, middle, 4][..], below),
    ] {
        out.u32(parent);
        out.u32(blocks);
        out.u8(edge.has);
        out.u64(3);
        let tokens = tokens();
        out.u32s(if parent == 0 {
            &tokens[..8]
        } else {
            &tokens[8..]
        });
        out.u32s(ids);
        out.raw(edge.extras.bytes());
    }
    with_section(&index, "TREE", &out)
}

fn read_below(edge: &Edge) -> RadixIndex {
    read_back(&two_edges(3, &Edge::default(), edge))
}

fn refused_below(edge: &Edge) -> String {
    refused(&two_edges(3, &Edge::default(), edge))
}

#[test]
fn what_an_edge_is_said_to_have_it_has() {
    read_below(&Edge::default());
    for (has, what) in [
        (ITEMS, "an empty list of items"),
        (TAGS, "tags that are out of order, empty or not joined"),
        (USES, "uses that are out of order, or none"),
        (SOURCES, "ranges that are out of order, or none"),
        (DEAD, "ranges that are out of order, or none"),
        (SESSIONS, "runs of sessions that are out of order, empty"),
    ] {
        says(what, &refused_below(&Edge::with(has, |out| out.len(0))));
    }
    let labels = |len: usize| Edge::with(LABELS, |out| out.raw(&vec![0; len]));
    says("labels of exact blocks alone", &refused_below(&labels(6)));
    says(
        "3 labels announced, 5 bytes left",
        &refused_below(&labels(5)),
    );
    says(
        "an edge has 0x80",
        &refused_below(&Edge::with(1 << 7, |_| ())),
    );
}

#[test]
fn runs_of_sessions_are_of_present_blocks_and_in_order() {
    let eight = [1, 2, 3, 4, 5, 6, 7, 8];
    for runs in [
        &[(2, 5, &[1][..])][..],
        &[(2, 3, &[1]), (3, 5, &[2, 1])],
        &[(4, 5, &eight)],
    ] {
        read_below(&Edge::sessions(runs));
    }
    for (runs, what) in [
        (
            &[(1, 3, &[1][..])][..],
            "sessions of the depths [1, 3) of 3 blocks from 2 on",
        ),
        (&[(4, 6, &[1])], "sessions of the depths [4, 6)"),
        (&[(4, 3, &[1])], "sessions of the depths [4, 3)"),
        (&[(3, 3, &[1])], "out of order, empty"),
        (&[(3, 4, &[1]), (2, 3, &[2])], "out of order"),
        (&[(2, 3, &[1]), (3, 4, &[1])], "out of order"),
        (&[(2, 3, &[1, 2, 1])], "repeated or too many"),
        (&[(2, 3, &[1, 2, 3, 4, 5, 6, 7, 8, 9])], "too many"),
    ] {
        let refusal = refused_below(&Edge::sessions(runs));
        says(what, &refusal);
    }
    let hole = two_edges(ABSENT, &Edge::default(), &Edge::sessions(&[(2, 4, &[1])]));
    says("sessions of the depths [2, 4)", &refused(&hole));
}

#[test]
fn items_lie_in_the_edge_or_go_on_from_above() {
    for items in [&[(8, 9)][..], &[(8, 12), (12, 20)], &[(19, 20)]] {
        let mut index = read_below(&Edge::items(items));
        let items = items
            .iter()
            .map(|&(start, end)| Item::new(start, end, b"cat"));
        let items = items.collect::<Result<Vec<Item>>>().unwrap();
        let mut seq = sequence("x", &tokens(), items);
        let found = index.lookup(&mut seq, LookupOptions::default(), &mut Vec::new());
        assert_eq!(found.unwrap().num_tokens, 20);
    }
    for (start, end) in [(7, 8), (19, 21)] {
        let what = format!("an item over the tokens [{start}, {end}) of an edge over [8, 20)");
        says(&what, &refused_below(&Edge::items(&[(start, end)])));
    }
    let both = |above, below| two_edges(3, &Edge::items(&[above]), &Edge::items(&[below]));
    read_back(&both((7, 8), (7, 9)));
    for above in [(6, 8), (5, 7)] {
        says(
            "an item from 7 on does not begin above the edge at 8",
            &refused(&both(above, (7, 9))),
        );
    }
}

#[test]
fn tags_lie_in_the_edge_and_in_no_hole() {
    for (start, end) in [(8, 9), (8, 20), (19, 20)] {
        let index = read_below(&Edge::tags(&[(start, end)]));
        let tags = index.tags(&sequence("x", &tokens(), Vec::new()));
        assert_eq!(
            tags,
            [Span {
                start,
                end,
                kind: index.kinds()[0].clone()
            }]
        );
    }
    for (start, end) in [(7, 9), (19, 21)] {
        let what = format!("tags 0x1 on the tokens [{start}, {end}) of an edge over [8, 20)");
        says(&what, &refused_below(&Edge::tags(&[(start, end)])));
    }
    let holed = |tags: &[(usize, usize)]| two_edges(ABSENT, &Edge::default(), &Edge::tags(tags));
    read_back(&holed(&[(8, 12), (16, 20)]));
    for tags in [(11, 13), (15, 17)] {
        let what = "the hole at position 12 has tags";
        says(what, &refused(&holed(&[tags])));
    }
}

#[test]
fn uses_end_inside_the_edge_after_the_last_of_the_whole() {
    read_below(&Edge::uses(&[(4, 4), (3, 9)]));
    for (end, time) in [(2, 4), (5, 4), (3, 3), (4, 3)] {
        let what =
            format!("a use at time {time} ends at depth {end} of an edge over [2, 5), used at 3");
        says(&what, &refused_below(&Edge::uses(&[(end, time)])));
    }
    says(
        "a use at time 10; the clock is at 9",
        &refused_below(&Edge::uses(&[(4, 10)])),
    );
}

#[test]
fn labels_of_blocks_that_left_are_not_written() {
    let mut index = empty(8, 2);
    let mut seq = sequence("x", &[1, 2, 3, 4], Vec::new());
    add(&mut index, &mut seq, &[5, 6], imported(2, 3));
    let kind = index.kinds()[0].clone();
    let tag = Span {
        start: 0,
        end: 1,
        kind,
    };
    index.tag(&seq, &[tag]).unwrap();
    index.discard(&[BlockId(6)]).unwrap();
    assert_eq!(index.stats().approximate, 0);
    let again = read_back(&index.snapshot());
    assert_eq!(again.digest(), index.digest());
}

#[test]
fn an_edge_ends_above_the_greatest_number_of_a_depth() {
    let bytes = two_edges(3, &Edge::default(), &Edge::default());
    let tree = bytes.windows(4).position(|name| name == b"TREE").unwrap();
    // The name and length of the section, two counts, the namespace and the numbers of grades and edges precede the
    // first edge.
    let first = tree + 12 + 16 + (9 + 16 + 15) + 2 * 10 + 1 + 8;
    // Each edge has 17 bytes, plus 20 per block.
    let second = first + 17 + 2 * 20;
    let with = |edge: usize, blocks: u32| {
        let mut other = bytes.clone();
        let place = edge + 4..edge + 8;
        assert!([[2, 0, 0, 0], [3, 0, 0, 0]].contains(&other[place.clone()].try_into().unwrap()));
        other[place].copy_from_slice(&blocks.to_le_bytes());
        refused(&sealed(other))
    };
    for (edge, depth) in [(first, 0), (second, 2)] {
        for blocks in [0, u32::MAX - depth, u32::MAX] {
            let what = format!("an edge of {blocks} blocks at depth {depth}");
            says(&what, &with(edge, blocks));
        }
        // One block fewer is valid, but the tokens are missing.
        let most = u32::MAX - depth - 1;
        let what = format!("{} bytes announced", u64::from(most) * 16);
        says(&what, &with(edge, most));
    }
}

#[test]
fn so_many_edges_are_read_under_short_hashes() {
    let mut index = empty(1 << 15, 1);
    let add = |index: &mut RadixIndex, salt: &str, id: u32| {
        let mut seq = sequence(salt, &[id], Vec::new());
        add(index, &mut seq, &[id], Source::Computed);
    };
    // Together with the two roots, these are as many edges as allowed.
    for id in 0..(1 << 14) - 2 {
        add(&mut index, if id % 2 == 0 { "x" } else { "y" }, id);
    }
    index.parts_mut().config.hash_bits = 31;
    assert!(check_foreign(&index.snapshot()));
    add(&mut index, "x", 1 << 14);
    says(
        "16385 edges under hashes cut short, a testing aid; the limit is 16384",
        &refused(&index.snapshot()),
    );
    index.parts_mut().config.hash_bits = 32;
    assert!(check_foreign(&index.snapshot()));
}

#[test]
fn what_has_no_adapter_and_no_salt_comes_back() {
    let mut index = empty(8, 2);
    let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
    let mut seq = TokenSequence::new(Arc::new(namespace), vec![1, 2, 3, 4], Vec::new()).unwrap();
    add(&mut index, &mut seq, &[5, 6], imported(2, 3));
    let bytes = index.snapshot();
    let again = RadixIndex::restore(&bytes, POOL).unwrap();
    assert_eq!(again.digest(), index.digest());
    assert_eq!(again.snapshot(), bytes);
    assert_eq!(again.stats().approximate, 1);
    // Without tags, no call searches for any.
    assert!(!again.tagging().is_tagged());
    assert_eq!(again.namespaces(), [Arc::clone(seq.namespace())]);
    assert_eq!(RadixIndex::pool_of_snapshot(&bytes).unwrap(), [0; 16]);
}

#[test]
fn contradictions_of_one_edge_are_refused() {
    spoilt("uses that are out of order", |index| {
        let edge = edge_with_extras(index);
        let pairs = [(5, 2), (6, 3)].into_iter().collect();
        assert!(InnerUses::from_pairs(pairs).is_none());
        let node = index.node_mut(edge);
        let (from, clock) = (node.depth, node.whole_use());
        node.extras_mut().uses.touch(from + 2, clock + 1);
        node.extras_mut().uses.touch(from + 1, clock + 1);
        *index.parts_mut().clock += 9;
    });
    spoilt("label", |index| {
        let edge = edge_with_extras(index);
        let edge = index.node_mut(edge);
        let depth = edge.depth + 2;
        let hole = Payload {
            id: ABSENT,
            label: Label::approximate(1, 0),
        };
        edge.set_payload(depth, hole, 2);
    });
    spoilt("has tags", |index| {
        let edge = edge_with_extras(index);
        let edge = index.node_mut(edge);
        let (from, end) = (edge.depth, edge.end());
        for depth in from + 1..end - 1 {
            edge.set_payload(depth, Payload::HOLE, 2);
        }
        let start = from as usize * 2;
        edge.extras_mut().tags.add(start + 1, start + 3, 1);
    });
    spoilt("tags 0x8000000000000000", |index| {
        let edge = edge_with_extras(index);
        let edge = index.node_mut(edge);
        let start = edge.depth as usize * 2;
        edge.extras_mut().tags.add(start, start + 1, 1 << 63);
    });
    spoilt("a range over the depths", |index| {
        let edge = edge_with_extras(index);
        let edge = index.node_mut(edge);
        let end = edge.end();
        edge.extras_mut().source_uses.set(end - 1, end + 1, 1);
    });
    spoilt("does not begin above", |index| {
        let edge = edge_with_extras(index);
        let item = Item::new(4, 9, b"cat").unwrap();
        index.node_mut(edge).extras_mut().items = vec![item];
    });
    spoilt(
        "an item over the tokens [3, 6) of an edge over [6, 22)",
        |index| {
            let edge = edge_with_extras(index);
            // Only the item's range is wrong.
            let item = Item::new(3, 6, b"cat").unwrap();
            index.node_mut(edge).extras_mut().items = vec![item];
        },
    );
    for earlier in [0, 1] {
        spoilt("a use at time", |index| {
            let edge = edge_with_extras(index);
            let node = index.node_mut(edge);
            let (from, whole) = (node.depth, node.whole_use());
            let uses = [(from + 1, whole - earlier)].into_iter().collect();
            node.extras_mut().uses = InnerUses::from_pairs(uses).unwrap();
        });
    }
    spoilt("ends in a hole", |index| {
        let edge = edge_with_extras(index);
        *index.parts_mut().moved = Moved::new(None);
        index.parts_mut().config.moved_runs = false;
        let edge = index.node_mut(edge);
        let last = edge.end() - 1;
        edge.set_payload(last, Payload::HOLE, 2);
    });
}

#[test]
fn counts_are_checked_against_the_bytes_that_are_left() {
    let bytes = full().snapshot();
    let name = bytes.windows(4).position(|name| name == b"TREE").unwrap();
    // Counts of tree indices and of vacant ones begin here.
    let trees = name + 4 + 8;
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let number = |at: usize| usize::try_from(word(at)).unwrap();
    assert_eq!((number(trees), number(trees + 8)), (3, 1));
    let left = number(trees - 8) - 8 - 8 - 4;
    let with = |at: usize, number: usize, len: usize| {
        let mut other = bytes.clone();
        other[at..at + len].copy_from_slice(&(number as u64).to_le_bytes()[..len]);
        refused(&sealed(other))
    };
    // A tree takes at least three one-letter names, two flags and the numbers of grades and edges.
    let most = left / 38 + 1;
    let announced = format!("{} trees announced, 1 of them vacant", most + 1);
    says(&announced, &with(trees, most + 1, 8));
    let message = with(trees, most, 8);
    assert!(!message.contains("trees announced"), "{message}");
    let few = with(trees, 0, 8);
    says("0 trees announced, 1 of them vacant", &few);
    // The namespace has names of 1, 8 and 7 letters, an adapter of one letter and a salt of one.
    let edges = trees + 20 + (8 + 1) + (8 + 8) + (8 + 7) + (1 + 8 + 1) + (1 + 8 + 1) + 1;
    let left = trees + number(trees - 8) - edges - 8;
    let most = left / (17 + 4 * 3);
    let message = with(edges, most + 1, 8);
    let announced = format!(
        "{} entries of 29 bytes or more announced, {left} bytes left",
        most + 1
    );
    says(&announced, &message);
    let message = with(edges, most, 8);
    assert!(!message.contains("announced"), "{message}");
    // An edge's parent must be the root or an earlier edge.
    says("edge 1 hangs below edge 1", &with(edges + 8, 1, 4));
}
