//! Tests items that say how many positions they take (rule D20): how far plans move KV in positions, and what is
//! refused.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

mod common;
#[path = "common/numbers.rs"]
mod numbers;

use std::collections::BTreeMap;

use common::{WHOLE, approximate, ids, inserting, namespace, put, sequence};
use kvtrie_core::{
    BlockId, Class, Config, ErrorKind, InsertOptions, Item, PlanOptions, RadixIndex, RestoredPool,
    ReusePolicy, Source, TokenSequence,
};
use numbers::Numbers;

/// The id of each token of an image.
const PAD: u32 = 9;

/// A part of a prompt: some text, or an image of a digest, with its tokens and the positions that it takes.
#[derive(Clone, Copy, Debug)]
enum Part {
    Text(u32, u32),
    Image(u8, usize, Option<usize>),
}

use Part::{Image, Text};

/// The tokens of the parts, and the position of each; for a token of an image, that of its first one plus its place in
/// the image, which stands for what the image adds on each axis.
fn spelled(parts: &[Part]) -> (TokenSequence, Vec<i64>) {
    let (mut tokens, mut items, mut positions, mut next) = (vec![], vec![], vec![], 0);
    for &part in parts {
        match part {
            Text(from, to) => {
                tokens.extend(from..to);
                positions.extend((0..i64::from(to - from)).map(|at| next + at));
                next += i64::from(to - from);
            }
            Image(digest, len, takes) => {
                let start = tokens.len();
                let item = Item::new(start, start + len, &[digest]).unwrap();
                items.push(
                    takes
                        .map_or(Ok(item.clone()), |takes| item.taking(takes, len))
                        .unwrap(),
                );
                tokens.extend(vec![PAD; len]);
                let len = i64::try_from(len).unwrap();
                positions.extend((0..len).map(|at| next + at));
                next += takes.map_or(len, |takes| i64::try_from(takes).unwrap());
            }
        }
    }
    let seq = TokenSequence::new(namespace(), tokens, items).unwrap();
    (seq, positions)
}

fn config(block_size: usize) -> Config {
    Config {
        num_blocks: 1 << 15,
        block_size,
        moved_runs: true,
        min_run: 8,
        ..Config::seeded(3)
    }
}

/// Where the KV of each slot was computed for, by block.
#[derive(Default)]
struct Slots {
    positions: BTreeMap<(u64, usize), i64>,
    next_id: u32,
}

impl Slots {
    /// New blocks that hold the tokens of these positions, of which the first is at the start of a block.
    fn filled(&mut self, positions: &[i64], block_size: usize) -> Vec<BlockId> {
        let blocks = positions.chunks(block_size).map(|block| {
            self.next_id += 1;
            for (at, &position) in block.iter().enumerate() {
                self.positions.insert((self.next_id.into(), at), position);
            }
            BlockId(self.next_id)
        });
        blocks.collect()
    }

    fn at(&self, slot: u64, block_size: usize) -> i64 {
        let size = block_size as u64;
        let place = usize::try_from(slot % size).unwrap();
        self.positions[&(slot / size, place)]
    }
}

fn parts(numbers: &mut Numbers, known: &[Vec<Part>]) -> Vec<Part> {
    let mut found = Vec::new();
    for _ in 0..=numbers.below(5) {
        match numbers.below(6) {
            0 => found.push(Text(100, 101 + numbers.below(30))),
            1 => {
                let from = 1000 * numbers.below(40);
                found.push(Text(from, from + 1 + numbers.below(20)));
            }
            kind @ (2 | 3) => {
                let digest = u8::try_from(numbers.below(2)).unwrap();
                let takes = [None, Some(2), Some(3), Some(20)][numbers.below(4) as usize];
                found.push(Image(digest, if kind == 2 { 6 } else { 13 }, takes));
            }
            _ if !known.is_empty() => {
                let many = u32::try_from(known.len()).unwrap();
                let other = &known[numbers.below(many) as usize];
                let from = numbers.below(1 + u32::try_from(other.len()).unwrap()) as usize;
                found.extend(&other[from..]);
            }
            _ => {}
        }
    }
    found
}

/// Asserts that a sequence says the position of each token.
fn says_positions(seq: &TokenSequence, positions: &[i64]) {
    for (at, &position) in positions.iter().enumerate().take(seq.len()) {
        let mut items = seq.items().iter();
        let item = items
            .find(|item| item.positions().is_some() && (item.start()..item.end()).contains(&at));
        let inside = item.map_or(0, |item| at - item.start());
        let first = seq.position(at).unwrap();
        assert_eq!(first + inside, usize::try_from(position).unwrap());
    }
}

/// Random prompts with images that take fewer or more positions than tokens, or say nothing; cut anywhere; moved,
/// evicted and restored in between. K of every slot that a plan reads, rotated by what the plan says, is at the
/// position of the token that it is written for.
#[test]
fn every_move_ends_at_the_position_of_its_token() {
    let (mut num_moved, mut num_shifted, mut num_images) = (0, 0, 0);
    for seed in 0..200 {
        let mut numbers = Numbers(seed);
        let block_size = [1, 2, 4, 5, 16][numbers.below(5) as usize];
        let mut index = RadixIndex::new(config(block_size)).unwrap();
        let policy = ReusePolicy {
            max_hops: 3,
            recompute_first: numbers.below(3) as usize,
            partial_blocks: numbers.below(2) > 0,
            ..approximate()
        };
        let (mut slots, mut known) = (Slots::default(), Vec::new());
        for _ in 0..24 {
            let parts = parts(&mut numbers, &known);
            let (mut seq, positions) = spelled(&parts);
            if numbers.below(4) == 0 {
                let most = u32::try_from(seq.len()).unwrap();
                seq.truncate(numbers.below(1 + most) as usize).unwrap();
            }
            let len = seq.len();
            if len == 0 {
                continue;
            }
            says_positions(&seq, &positions);
            let plan = index.plan(&mut seq, &policy, WHOLE).unwrap();
            let in_place = plan.blocks().len();
            for (at, &id) in plan.blocks().iter().enumerate() {
                for place in 0..block_size {
                    let position = positions[at * block_size + place];
                    assert_eq!(
                        slots.positions[&(id.0.into(), place)],
                        position,
                        "seed {seed}"
                    );
                }
            }
            let new = slots.filled(&positions[in_place * block_size..len], block_size);
            let table = [plan.blocks(), &new].concat();
            for copy in plan.moves(&table, 0, len).unwrap() {
                for at in 0..copy.num_tokens {
                    let old = slots.at(copy.source_slot + at, block_size);
                    let wanted = slots.at(copy.dest_slot + at, block_size);
                    assert_eq!(old + copy.delta, wanted, "seed {seed}: {parts:?}, {copy:?}");
                }
            }
            for part in plan.segments() {
                let is_plain = part.class != Class::Approximate;
                assert!(!is_plain || part.position_delta == part.delta());
                num_moved += usize::from(part.delta() != 0);
                num_shifted += usize::from(part.position_delta != part.delta());
                num_images += seq
                    .items()
                    .iter()
                    .filter(|item| {
                        part.position_delta != 0
                            && item.end() > part.start
                            && item.start() < part.end
                    })
                    .count();
            }
            let whole = len / block_size * block_size;
            let options = inserting(plan.blocks().len() * block_size..whole, Source::Plan(&plan));
            if plan.blocks().len() * block_size < whole {
                index
                    .insert(
                        &mut seq,
                        &new[..whole / block_size - plan.blocks().len()],
                        options,
                    )
                    .unwrap();
            }
            index.release(&plan).unwrap();
            if numbers.below(5) == 0 {
                index.evict(numbers.below(20) as usize);
                index.take_freed();
            }
            if numbers.below(8) == 0 {
                let bytes = index.snapshot();
                let pool = index.config().pool_id.clone();
                let restored = RadixIndex::restore(&bytes, RestoredPool::Kept(&pool)).unwrap();
                assert_eq!(restored.digest(), index.digest());
                index = restored;
            }
            index.check().unwrap();
            known.push(parts);
        }
    }
    assert!(
        num_moved > 500 && num_shifted > 200 && num_images > 100,
        "{num_moved}, {num_shifted}, {num_images}"
    );
}

#[test]
fn deleting_an_image_moves_the_rest_by_its_positions() {
    let image = Image(1, 96, Some(12));
    let (mut cached, _) = spelled(&[Text(0, 20), image, Text(20, 60)]);
    let mut index = RadixIndex::new(config(4)).unwrap();
    put(&mut index, &mut cached, 1..40);
    let (mut edited, _) = spelled(&[Text(0, 20), Text(20, 60), Text(70, 72)]);
    let plan = index.plan(&mut edited, &approximate(), WHOLE).unwrap();
    let moved = plan
        .segments()
        .iter()
        .find(|part| part.old_start == 116)
        .unwrap();
    assert_eq!(
        (moved.start, moved.end, moved.delta(), moved.position_delta),
        (20, 60, -96, -12)
    );
    index.release(&plan).unwrap();
    // The other way round, the text comes after an image that was not there.
    let (mut with_one, _) = spelled(&[Text(80, 90), Image(2, 10, Some(30)), Text(20, 60)]);
    let plan = index.plan(&mut with_one, &approximate(), WHOLE).unwrap();
    let moved = plan
        .segments()
        .iter()
        .find(|part| part.old_start == 116)
        .unwrap();
    assert_eq!((moved.delta(), moved.position_delta), (20 - 116, 40 - 32));
}

#[test]
fn an_image_that_takes_other_positions_is_another_image() {
    let whole = |takes| spelled(&[Text(0, 8), Image(1, 8, takes), Text(8, 40)]).0;
    let mut index = RadixIndex::new(config(4)).unwrap();
    put(&mut index, &mut whole(Some(2)), 1..13);
    for (takes, exact) in [(Some(2), 48), (Some(3), 8), (None, 8)] {
        let plan = index
            .plan(&mut whole(takes), &ReusePolicy::EXACT_ONLY, WHOLE)
            .unwrap();
        assert_eq!(plan.num_tokens(Class::Exact), exact, "{takes:?}");
        index.release(&plan).unwrap();
    }
    // One that has more tokens in its whole is another one too, though the cached tokens are the same.
    let (mut cut, _) = spelled(&[Text(0, 8), Image(1, 9, Some(2))]);
    cut.truncate(16).unwrap();
    assert_eq!((cut.items()[0].end(), cut.items()[0].num_tokens()), (16, 9));
    let plan = index
        .plan(&mut cut, &ReusePolicy::EXACT_ONLY, WHOLE)
        .unwrap();
    assert_eq!(plan.num_tokens(Class::Exact), 8);
}

#[test]
fn a_cut_image_goes_on_where_the_whole_one_comes() {
    let all = [Text(0, 6), Image(1, 20, Some(5)), Text(6, 30)];
    let (mut cut, _) = spelled(&all);
    cut.truncate(12).unwrap();
    let mut index = RadixIndex::new(config(4)).unwrap();
    put(&mut index, &mut cut, 1..4);
    let (mut whole, _) = spelled(&all);
    let options = InsertOptions {
        start: 12,
        ..InsertOptions::new(48, Source::Computed)
    };
    index.insert(&mut whole, &ids(4..13), options).unwrap();
    index.check().unwrap();
    let (mut moved, _) = spelled(&[Text(90, 92), Text(6, 30), Text(90, 91)]);
    let plan = index
        .plan(&mut moved, &approximate(), PlanOptions::default())
        .unwrap();
    let part = plan
        .segments()
        .iter()
        .find(|part| part.class == Class::Approximate)
        .unwrap();
    assert_eq!(
        (part.start, part.old_start, part.position_delta),
        (2, 26, 2 - 11)
    );
}

#[test]
fn an_appended_item_starts_after_the_shift_of_those_before() {
    let text = [Text(0, 3), Image(1, 4, Some(2)), Text(3, 5)];
    let (whole, _) = spelled(&[&text[..], &[Image(2, 4, Some(9)), Text(5, 8)]].concat());
    let (mut grown, _) = spelled(&text);
    let (tokens, items) = (whole.tokens(), whole.items());
    let item = Item::new(9, 13, &[2]).unwrap().taking(9, 4).unwrap();
    assert_eq!(items[1], item);
    grown.extend(&tokens[9..], vec![item]).unwrap();
    assert_eq!(
        (grown.position(9).unwrap(), grown.position(16).unwrap()),
        (7, 19)
    );
    for at in 0..=whole.len() {
        assert_eq!(grown.position(at).unwrap(), whole.position(at).unwrap());
    }
}

#[test]
fn positions_beyond_their_limits_are_refused() {
    let item = || Item::new(2, 6, b"d").unwrap();
    for (positions, num_tokens) in [(0, 4), (1 << 31, 4), (3, 3), (3, 1 << 31)] {
        let refused = item().taking(positions, num_tokens).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
    }
    let part = item().taking(3, 9).unwrap();
    assert_eq!(
        (part.positions(), part.num_tokens(), part.end()),
        (Some(3), 9, 6)
    );
    let with = |len| TokenSequence::new(namespace(), vec![PAD; len], vec![part.clone()]);
    let refused = with(7).unwrap_err();
    assert!(
        refused.message().contains("the first of 9 tokens"),
        "{refused}"
    );
    let mut cut = with(6).unwrap();
    assert_eq!((cut.position(1).unwrap(), cut.position(5).unwrap()), (1, 2));
    for refused in [
        cut.position(6).unwrap_err(),
        cut.position(7).unwrap_err(),
        cut.extend(&[1], Vec::new()).unwrap_err(),
    ] {
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
    }
    assert_eq!(cut.len(), 6);
    cut.extend(&[], Vec::new()).unwrap();
    let owner = cut.own().unwrap();
    assert!(cut.extend_as(&owner, &[1]).is_err());
    assert_eq!(cut.len(), 6);
    cut.truncate_as(&owner, 2).unwrap();
    cut.extend_as(&owner, &[1]).unwrap();
    assert_eq!(cut.position(3).unwrap(), 3);
    assert_eq!(sequence(0..5).position(5).unwrap(), 5);
}
