//! The keyed hash of windows.

use super::WINDOW;

/// Hashes each half of a window by a folded product of its tokens, and the two results by another.
#[derive(Clone, Debug)]
pub(crate) struct WindowHasher {
    keys: [u64; 4],
    mask: u64,
}

impl WindowHasher {
    /// Keeps `bits` bits (0 to 64) of each hash, so that tests can force collisions.
    pub(crate) fn new(seed: u64, bits: u32) -> Self {
        let mut state = seed;
        Self {
            keys: std::array::from_fn(|_| random(&mut state)),
            mask: u64::MAX
                .checked_shl(64_u32.saturating_sub(bits))
                .unwrap_or(0),
        }
    }

    /// Hashes one window. Each tree has a `space` of its own.
    #[inline]
    pub(crate) fn hash(&self, space: u64, window: &[u32; WINDOW]) -> u64 {
        let (first, second) = window.split_at(WINDOW / 2);
        self.whole(space, self.half(first), self.half(second))
    }

    /// Hashes all windows of `tokens`: `hashes[i]` is that of `tokens[i..i + 8]`.
    ///
    /// # Panics
    /// If `hashes` does not have one place per window.
    pub(crate) fn hash_all(&self, space: u64, tokens: &[u32], hashes: &mut [u64]) {
        assert_eq!(hashes.len(), (tokens.len() + 1).saturating_sub(WINDOW));
        let Some(first) = tokens.first_chunk::<{ WINDOW - 1 }>() else {
            return;
        };
        // Each window needs one new half. In a loop of their own the halves would be vectorised, which costs more in
        // moved numbers than it gains.
        let mut held: [u64; 4] = std::array::from_fn(|at| self.half(&first[at..]));
        let halves = tokens[WINDOW / 2..].windows(WINDOW / 2);
        for (hash, half) in hashes.iter_mut().zip(halves) {
            let next = self.half(half);
            *hash = self.whole(space, held[0], next);
            held = [held[1], held[2], held[3], next];
        }
    }

    /// Finds a window with a given hash. Whoever knows the keys can set one factor of a product to one.
    #[cfg(test)]
    pub(crate) fn window_of(&self, space: u64, hash: u64) -> [u32; WINDOW] {
        let tokens = |pair: u64| {
            let [low, high] = [pair & u64::from(u32::MAX), pair >> 32];
            [low, high].map(|token| u32::try_from(token).unwrap())
        };
        let half = |half: u64| [tokens(1 ^ self.keys[0]), tokens(half ^ self.keys[1])];
        let first = half(1 ^ self.keys[2] ^ space);
        let second = half(hash ^ self.keys[3]);
        let window = [first, second].concat().concat();
        window.try_into().unwrap()
    }

    #[inline]
    fn half(&self, tokens: &[u32]) -> u64 {
        let pair = |low, high| u64::from(low) | u64::from(high) << 32;
        fold(
            pair(tokens[0], tokens[1]) ^ self.keys[0],
            pair(tokens[2], tokens[3]) ^ self.keys[1],
        )
    }

    #[inline]
    fn whole(&self, space: u64, first: u64, second: u64) -> u64 {
        fold(first ^ self.keys[2] ^ space, second ^ self.keys[3]) & self.mask
    }
}

pub(super) fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *state;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
pub(super) fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::moved::fingerprints::index;

    proptest! {
        #[test]
        fn hashes_every_window_as_it_would_alone(
            tokens in prop::collection::vec(any::<u32>(), 0..200),
            space in any::<u64>(),
            bits in 0_u32..=64,
        ) {
            let hasher = WindowHasher::new(7, bits);
            let mut hashes = vec![0; (tokens.len() + 1).saturating_sub(WINDOW)];
            hasher.hash_all(space, &tokens, &mut hashes);
            for (hash, window) in hashes.iter().zip(tokens.windows(WINDOW)) {
                prop_assert_eq!(*hash, hasher.hash(space, window.try_into().unwrap()));
                prop_assert_eq!(hash.checked_shl(bits).unwrap_or(0), 0);
            }
        }
    }

    #[test]
    fn distinguishes_windows_tokens_orders_spaces_and_seeds() {
        let hasher = WindowHasher::new(1, 64);
        let window = [5, 6, 7, 8, 9, 10, 11, 12];
        let mut seen = BTreeSet::from([hasher.hash(0, &window)]);
        assert!(seen.insert(hasher.hash(1, &window)));
        assert!(seen.insert(WindowHasher::new(2, 64).hash(0, &window)));
        for at in 0..WINDOW {
            for bit in 0..32 {
                let mut other = window;
                other[at] ^= 1 << bit;
                assert!(seen.insert(hasher.hash(0, &other)));
            }
            for with in at + 1..WINDOW {
                let mut other = window;
                other.swap(at, with);
                assert!(seen.insert(hasher.hash(0, &other)));
            }
        }
    }

    #[test]
    fn seeds_are_drawn_as_splitmix64_draws() {
        // From https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64.
        let mut state = 1_234_567;
        let drawn: [u64; 5] = std::array::from_fn(|_| random(&mut state));
        let listed = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(drawn, listed);
    }

    #[test]
    fn a_space_changes_every_bit_of_a_key() {
        let hasher = WindowHasher::new(1, 64);
        for space in [0, 1, 5, 1 << 40, u64::MAX] {
            let window = hasher.window_of(space, 1234);
            assert_eq!(hasher.hash(space, &window), 1234);
        }
    }

    #[test]
    fn spreads_windows_of_plain_tokens_evenly() {
        let hasher = WindowHasher::new(1, 64);
        let mut kept = BTreeSet::new();
        let mut heads = [0_u32; 64];
        for n in 0..20_000 {
            let hash = hasher.hash(0, &[0, 0, n % 10, 1, 1, n / 10, 0, 0]);
            kept.insert(hash >> 28);
            heads[index(hash >> 58)] += 1;
        }
        assert!(kept.len() > 19_990);
        assert!(heads.iter().all(|&count| (220..420).contains(&count)));
    }
}
