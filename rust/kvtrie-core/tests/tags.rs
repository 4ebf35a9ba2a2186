//! Tests which kinds an index knows, and the memory of tags (D17).

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{BUILT_IN_KINDS, Config, RadixIndex, TokenSequence};

use common::{put, sequence, span};

mod common;

/// A sequence of six blocks of four tokens, three in one edge and three in the next.
fn of_two_edges() -> (RadixIndex, TokenSequence) {
    let mut index = RadixIndex::new(Config {
        num_blocks: 16,
        block_size: 4,
        ..Config::seeded(0)
    })
    .unwrap();
    let mut seq = sequence(0..24);
    put(&mut index, &mut seq, 0..6);
    let mut branch = sequence((0..12).chain(90..94));
    put(&mut index, &mut branch, [0, 1, 2, 6]);
    (index, seq)
}

#[test]
fn an_empty_span_next_to_others_does_not_name_a_kind() {
    let (mut index, seq) = of_two_edges();
    let spans = [span(1, 1, "mine"), span(2, 9, "yours")];
    index.tag(&seq, &spans).unwrap();
    assert_eq!(index.kinds()[BUILT_IN_KINDS.len()..], ["yours"]);
    assert_eq!(index.tags(&seq), spans[1..]);
}

#[test]
fn a_kind_is_one_span_where_other_kinds_begin_and_end_within_it() {
    let (mut index, seq) = of_two_edges();
    let spans = [span(1, 21, "user"), span(5, 9, "tool"), span(9, 14, "tool")];
    index.tag(&seq, &spans).unwrap();
    let expected = [span(1, 21, "user"), span(5, 14, "tool")];
    assert_eq!(index.tags(&seq), expected);
}

#[test]
fn tags_take_memory_on_the_edges_alone_whose_tokens_have_them() {
    let taken = |start: usize, end: usize| {
        let (mut index, seq) = of_two_edges();
        let before = index.stats().bytes;
        index.tag(&seq, &[span(start, end, "tool")]).unwrap();
        index.check().unwrap();
        index.stats().bytes - before
    };
    let of_one_edge = taken(0, 8);
    assert!(of_one_edge > 0);
    // The tags follow tokens without tags, or start with the first token of an edge.
    assert_eq!(
        [taken(4, 12), taken(12, 20), taken(16, 24)],
        [of_one_edge; 3]
    );
    assert_eq!(taken(8, 16), 2 * of_one_edge);
}
