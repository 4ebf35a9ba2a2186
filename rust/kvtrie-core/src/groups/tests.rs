use std::sync::Arc;

use super::Group;
use crate::config::Config;
use crate::effort::Effort;
use crate::ids::{BlockId, Depth};
use crate::index::{GroupOffers, GroupOptions, InsertOptions, RadixIndex, Source};
use crate::namespace::{Namespace, Salt};
use crate::storage::forest::Position;
use crate::tokens::TokenSequence;

/// An index with a path of two edges, of 30 and 10 blocks, that has all blocks of a window of 20 and states everywhere.
fn filled() -> (RadixIndex, Vec<Position>) {
    let mut index = RadixIndex::new(Config {
        num_blocks: 64,
        block_size: 1,
        groups: vec![Group::window("w", 21, 64, 1), Group::state("s", 64, 1)],
        ..Config::seeded(0)
    })
    .unwrap();
    let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
    let namespace = Arc::new(namespace);
    let sequence = |tokens| TokenSequence::new(Arc::clone(&namespace), tokens, vec![]).unwrap();
    let ids: Vec<BlockId> = (0..40).map(BlockId).collect();
    let offers = |ahead| (0..40).map(move |at: usize| at + ahead).zip(ids.clone());
    let (window, state): (Vec<_>, Vec<_>) = (offers(0).collect(), offers(1).collect());
    let offers = [(1, &window), (2, &state)].map(|(group, offers)| GroupOffers { group, offers });
    let groups = GroupOptions {
        offers: &offers,
        stops: &[],
    };
    let mut seq = sequence((0..40).collect());
    let options = InsertOptions::new(40, Source::Computed);
    index
        .insert_groups(&mut seq, &ids, options, groups)
        .unwrap();
    let mut other = sequence((0..30).chain([99]).collect());
    let own: Vec<BlockId> = ids[..30].iter().copied().chain([BlockId(50)]).collect();
    let options = InsertOptions::new(31, Source::Computed);
    index.insert(&mut other, &own, options).unwrap();
    let end = index.exact_prefix(&mut seq, 0, Effort::ANY).unwrap();
    let edges = index.forest().edges_to(end, 0);
    assert_eq!(edges.len(), 2);
    let places = edges
        .into_iter()
        .flat_map(|(node, from, to)| (from..to).map(move |place| Position::at(node, place + 1)));
    (index, places.collect())
}

#[test]
fn what_several_ends_need_is_used_once() {
    let (mut index, places) = filled();
    let parts = index.parts_mut();
    let mut used = |column: usize, ends: &[Depth]| {
        let ends: Vec<Position> = ends.iter().map(|&end| places[end as usize - 1]).collect();
        let mut found = Vec::new();
        let column = parts.groups.column_mut(column);
        column.each_needed(parts.forest, &ends, |place, _| found.push(place));
        found.sort_unstable();
        found
    };
    let all: Vec<Depth> = (1..=40).collect();
    assert_eq!(used(0, &all), (0..40).collect::<Vec<_>>());
    assert_eq!(used(1, &all), (0..40).collect::<Vec<_>>());
    assert_eq!(
        used(0, &[5, 5, 30, 31]),
        [0..5, 10..31].into_iter().flatten().collect::<Vec<_>>()
    );
    assert_eq!(used(1, &[5, 5, 30, 31]), [4, 29, 30]);
    assert_eq!(used(0, &[40]), (20..40).collect::<Vec<_>>());
    assert_eq!(used(1, &[40]), [39]);
}
