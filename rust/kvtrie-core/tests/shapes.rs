//! Tests trees of hostile shapes. They are built, looked up, planned, evicted and dropped with a stack of 256 KiB, and
//! the work grows only with the request.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use std::thread;

use kvtrie_core::{
    BlockId, Class, Config, LookupOptions, RadixIndex, ReusePolicy, Source, TokenSequence,
};

use common::{inserting, namespace, planned, put, sequence};

mod common;

const DEEP: u32 = 1_000_000;
const WIDE: u32 = 100_000;

fn in_small_stack(test: impl FnOnce() + Send + 'static) {
    thread::Builder::new()
        .stack_size(256 * 1024)
        .spawn(test)
        .unwrap()
        .join()
        .unwrap();
}

fn index(num_blocks: u32, block_size: usize) -> RadixIndex {
    RadixIndex::new(Config {
        num_blocks: num_blocks.into(),
        block_size,
        ..Config::seeded(0)
    })
    .unwrap()
}

fn matched(index: &mut RadixIndex, seq: &mut TokenSequence) -> usize {
    index
        .lookup(seq, LookupOptions::default(), &mut Vec::new())
        .unwrap()
        .num_tokens
}

fn clear(index: &mut RadixIndex) {
    index.check().unwrap();
    let all = index.stats().indexed;
    let half = usize::try_from(all / 2).unwrap();
    assert_eq!(index.evict(half).len(), half);
    index.check().unwrap();
    assert_eq!(
        index.drop_namespace(&namespace()).len() as u64,
        all - half as u64
    );
    index.check().unwrap();
    assert_eq!(index.stats().nodes, 0);
}

#[test]
fn a_chain_that_grew_block_by_block() {
    in_small_stack(|| {
        let mut index = index(DEEP, 1);
        let mut seq = sequence([]);
        for block in 0..DEEP {
            seq.extend(&[block], Vec::new()).unwrap();
            let start = block as usize;
            let options = inserting(start..start + 1, Source::Computed);
            index.insert(&mut seq, &[BlockId(block)], options).unwrap();
        }
        assert_eq!(matched(&mut index, &mut sequence(0..DEEP)), DEEP as usize);
        clear(&mut index);
    });
}

#[test]
fn a_chain_of_one_edge_a_block() {
    in_small_stack(|| {
        // A comb: a chain with one branch at every block, cut from the front.
        let teeth = DEEP / 2;
        let mut index = index(DEEP, 1);
        let mut seq = sequence(0..teeth);
        put(&mut index, &mut seq, 0..teeth);
        let (mut tooth, mut out) = (sequence([]), Vec::new());
        for block in 0..teeth - 1 {
            tooth.extend(&[u32::MAX], Vec::new()).unwrap();
            let start = block as usize;
            let options = inserting(start..start + 1, Source::Computed);
            let done = index
                .insert(&mut tooth, &[BlockId(teeth + block)], options)
                .unwrap();
            assert_eq!(done.blocks, [BlockId(teeth + block)]);
            tooth.truncate(start).unwrap();
            tooth.extend(&[block], Vec::new()).unwrap();
            let options = LookupOptions {
                start,
                ..LookupOptions::default()
            };
            assert_eq!(
                index
                    .lookup(&mut tooth, options, &mut out)
                    .unwrap()
                    .num_tokens,
                start + 1
            );
            assert_eq!(out, [BlockId(block)]);
        }
        assert!(index.stats().nodes > u64::from(DEEP) - 10);
        assert_eq!(matched(&mut index, &mut sequence(0..teeth)), teeth as usize);
        let mut prompt = sequence(0..teeth);
        let plan = planned(&mut index, &mut prompt, &ReusePolicy::EXACT_ONLY);
        assert_eq!(plan.num_tokens(Class::Exact), teeth as usize - 1);
        index.release(&plan).unwrap();
        clear(&mut index);
    });
}

#[test]
fn a_fan_of_children_that_share_part_of_their_block() {
    in_small_stack(|| {
        let mut index = index(WIDE, 2);
        for child in 0..WIDE {
            put(&mut index, &mut sequence([7, child * 2]), [child]);
        }
        assert_eq!(matched(&mut index, &mut sequence([7, WIDE])), 2);
        // No child has an odd token: the first token is copied from the child that sorts first.
        let mut prompt = sequence([7, WIDE + 1, 3]);
        let plan = planned(&mut index, &mut prompt, &ReusePolicy::EXACT_ONLY);
        assert_eq!(
            (plan.num_tokens(Class::Exact), plan.source_blocks()),
            (1, vec![BlockId(0)])
        );
        index.release(&plan).unwrap();
        clear(&mut index);
    });
}

#[test]
fn one_token_repeated() {
    in_small_stack(|| {
        let mut index = index(WIDE, 3);
        let mut seq = sequence(vec![5; WIDE as usize * 3]);
        put(&mut index, &mut seq, 0..WIDE);
        assert_eq!(matched(&mut index, &mut sequence(vec![5; 100])), 99);
        assert_eq!(
            matched(&mut index, &mut sequence(vec![5; WIDE as usize * 3 + 50])),
            WIDE as usize * 3
        );
        clear(&mut index);
    });
}
