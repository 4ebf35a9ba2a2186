//! The keyed hash that nominates children.
//!
//! foldhash XORs words of the input with secret words and multiplies. Whoever knows the secret words can choose tokens
//! or digests whose products are zero, so that all get one hash. foldhash's default takes six of these words from
//! constants of the process; here all come from the index's seed. Without the seed, a zero must be guessed at 61 bits.

use std::fmt;
use std::hash::Hasher;

use foldhash::SharedSeed;
use foldhash::quality::FoldHasher;

use crate::tokens::View;

/// Changes the seed of the shared words, so that the hasher has another seed than they have.
const APART: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Clone)]
pub(crate) struct EdgeHasher {
    seed: u64,
    words: SharedSeed,
    mask: u64,
}

/// Hides the seed.
impl fmt::Debug for EdgeHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EdgeHasher").finish_non_exhaustive()
    }
}

impl EdgeHasher {
    /// Keeps `bits` bits (0 to 64) of each hash, so that tests can force collisions.
    pub(crate) fn new(seed: u64, bits: u32) -> Self {
        let mask = if bits >= 64 {
            u64::MAX
        } else {
            (1 << bits) - 1
        };
        Self {
            seed,
            words: SharedSeed::from_u64(seed ^ APART),
            mask,
        }
    }

    pub(crate) fn edge(&self, parent: u32, first: View<'_>) -> u64 {
        let mut hasher = FoldHasher::with_seed(self.seed, &self.words);
        hasher.write_u32(parent);
        hasher.write(bytemuck::cast_slice(first.tokens));
        for (place, extent, digest) in first.items_inside() {
            hasher.write_u64(place);
            if extent != 0 {
                hasher.write_u64(extent);
            }
            hasher.write(digest);
        }
        hasher.finish() & self.mask
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::config::Config;
    use crate::ids::BlockId;
    use crate::index::{InsertOptions, RadixIndex, Source};
    use crate::namespace::{Namespace, Salt};
    use crate::tokens::{Item, TokenSequence};

    const SIBLINGS: u32 = 32_000;
    const BLOCK: usize = 16;

    #[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
    fn fold(a: u64, b: u64) -> u64 {
        let product = u128::from(a) * u128::from(b);
        (product >> 64) as u64 ^ product as u64
    }

    fn constants(shared: u64) -> [u64; 6] {
        let mut last = shared;
        std::array::from_fn(|_| {
            last = (0..3).fold(last, |word, _| fold(word, 0xbe54_66cf_34e9_0c6c));
            last | 1 << 63 | 1 << 31 | 1
        })
    }

    /// Seeds that an attacker may try: known constants.
    const GUESSES: [u64; 2] = [0x6b76_7472_6965_0001, 0];

    /// Blocks whose words 2 and 3 equal the constant of the XOR: both lanes end in a product with 0, whatever the
    /// key.
    fn zeroing(shared: u64) -> impl Iterator<Item = Vec<u32>> {
        let [word, ..] = constants(shared);
        let halves = [word, word >> 32].map(|half| (half & 0xffff_ffff) as u32);
        (0..SIBLINGS).map(move |n| {
            let mut tokens = vec![7; BLOCK];
            tokens[0] = n;
            tokens[4..8].copy_from_slice(&[halves[0], halves[1], halves[0], halves[1]]);
            tokens
        })
    }

    /// Digests that end in the constant for short strings: what was hashed before is multiplied by 0.
    fn zeroing_digests(shared: u64) -> impl Iterator<Item = [u8; 16]> {
        let [_, word, ..] = constants(shared);
        (0..u64::from(SIBLINGS)).map(move |n| {
            let mut digest = [0; 16];
            digest[..8].copy_from_slice(&n.to_le_bytes());
            digest[8..].copy_from_slice(&word.to_le_bytes());
            digest
        })
    }

    const SEEDS: [u64; 5] = [0, 1, u64::MAX, 0x6a09_e667_f3bc_c908, 0x2545_f491_4f6c_dd1d];

    fn attacks() -> impl Iterator<Item = (u64, u64)> {
        SEEDS
            .into_iter()
            .flat_map(|seed| GUESSES.map(|guess| (seed, guess)))
    }

    #[test]
    fn tokens_that_zero_a_product_do_not_collide_under_any_seed() {
        for (seed, guess) in attacks() {
            let hasher = EdgeHasher::new(seed, 64);
            let hashes = zeroing(guess).map(|tokens| {
                let view = View {
                    tokens: &tokens,
                    base: 0,
                    items: &[],
                };
                hasher.edge(3, view)
            });
            assert_eq!(
                hashes.collect::<BTreeSet<u64>>().len(),
                SIBLINGS as usize,
                "seed {seed}"
            );
        }
    }

    #[test]
    fn digests_that_zero_a_product_do_not_collide_under_any_seed() {
        for (seed, guess) in attacks() {
            let hasher = EdgeHasher::new(seed, 64);
            let hashes = zeroing_digests(guess).map(|digest| {
                let items = [Item::new(0, 4, &digest).unwrap()];
                hasher.edge(
                    3,
                    View {
                        tokens: &[7; BLOCK],
                        base: 0,
                        items: &items,
                    },
                )
            });
            assert_eq!(
                hashes.collect::<BTreeSet<u64>>().len(),
                SIBLINGS as usize,
                "seed {seed}"
            );
        }
    }

    /// The bytes of two items never equal the bytes of one.
    #[test]
    fn a_digest_that_spells_another_item_does_not_collide() {
        let hasher = EdgeHasher::new(5, 64);
        let two = [
            Item::new(0, 2, b"a").unwrap(),
            Item::new(4, 6, b"b").unwrap(),
        ];
        let view = |items| View {
            tokens: &[7; BLOCK],
            base: 0,
            items,
        };
        let hidden: Vec<u8> = {
            let (place, _, digest) = view(&two).items_inside().nth(1).unwrap();
            [b"a", &place.to_le_bytes()[..], digest].concat()
        };
        let one = [Item::new(0, 2, &hidden).unwrap()];
        assert_ne!(hasher.edge(3, view(&two)), hasher.edge(3, view(&one)));
    }

    /// Nodes compared when each first block below a root is looked up once.
    fn comparisons(seed: u64, blocks: impl Iterator<Item = Vec<u32>>) -> usize {
        let config = Config {
            num_blocks: SIBLINGS.into(),
            block_size: BLOCK,
            ..Config::seeded(seed)
        };
        let mut index = RadixIndex::new(config).unwrap();
        let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
        let namespace = Arc::new(namespace);
        for (id, tokens) in (0..).zip(blocks) {
            let mut seq = TokenSequence::new(Arc::clone(&namespace), tokens, Vec::new()).unwrap();
            let computed = InsertOptions::new(BLOCK, Source::Computed);
            index.insert(&mut seq, &[BlockId(id)], computed).unwrap();
        }
        let root = index.forest().root(&namespace).unwrap().node;
        let mut compared = 0;
        for child in index.forest().children(root) {
            compared += index.forest().comparisons_of(child).unwrap();
        }
        compared
    }

    #[test]
    fn a_flood_of_blocks_costs_no_comparisons() {
        let plain = || (0..SIBLINGS).map(|n| vec![n; BLOCK]);
        for seed in [0, SEEDS[4]] {
            let (plain, flood) = (
                comparisons(seed, plain()),
                comparisons(seed, zeroing(GUESSES[0])),
            );
            assert!(
                2 * flood <= 3 * plain,
                "seed {seed}: {flood} comparisons, {plain} of plain blocks"
            );
        }
    }
}
