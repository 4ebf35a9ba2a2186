//! Seeded trees that the benchmarks and the memory report share.

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Config, Error, InsertOptions, Namespace, RadixIndex, Salt, Source, TokenSequence,
};

/// Token slots in a block, everywhere here.
pub const BLOCK_SIZE: usize = 16;

/// The namespace of everything cached here.
///
/// # Errors
/// None: its parts are not empty.
pub fn namespace() -> Result<Arc<Namespace>, Error> {
    Ok(Arc::new(Namespace::new(
        "model",
        "bfloat16",
        "default",
        None,
        Salt::Shared,
    )?))
}

/// `len` token ids below 2¹⁷, from a seed (splitmix64).
#[must_use]
pub fn tokens(seed: u64, len: usize) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from((mixed ^ (mixed >> 31)) >> 47).unwrap_or_default()
    };
    (0..len).map(|_| next()).collect()
}

/// A sequence of tokens from a seed.
///
/// # Errors
/// None: there are no items.
pub fn sequence(seed: u64, len: usize) -> Result<TokenSequence, Error> {
    TokenSequence::new(namespace()?, tokens(seed, len), Vec::new())
}

/// An index that holds `count` sequences of `len` tokens (whole blocks), from the seeds 0 to `count` − 1, each inserted in
/// steps of `step` tokens.
///
/// # Errors
/// If the pool would pass 2³¹ blocks.
pub fn filled(count: u64, len: usize, step: usize) -> Result<RadixIndex, Error> {
    let blocks_each = len / BLOCK_SIZE;
    let num_blocks = count * blocks_each as u64 + (1 << 16);
    let mut index = RadixIndex::new(Config {
        num_blocks,
        block_size: BLOCK_SIZE,
        ..Config::default()
    })?;
    let mut next = 0u32;
    for seed in 0..count {
        let mut seq = sequence(seed, len)?;
        for start in (0..len).step_by(step) {
            let until = (start + step).min(len);
            let ids: Vec<BlockId> = (0..(until - start) / BLOCK_SIZE)
                .map(|_| {
                    next += 1;
                    BlockId(next - 1)
                })
                .collect();
            let options = InsertOptions {
                start,
                ..InsertOptions::new(until, Source::Computed)
            };
            index.insert(&mut seq, &ids, options)?;
        }
    }
    Ok(index)
}
