//! Keyed digests and fingerprints. No token can be read back from them without the key.
//!
//! A block has three names. Its *contents* are two sums of its tokens, each times a secret number for its place, modulo
//! the prime 2⁶¹ − 1: two other blocks have the same with probability 2⁻¹²². Its *digest* is the `SipHash` of the
//! parent's digest and the contents, so it names the whole prefix. Its *fingerprint* is a polynomial of the tokens at a
//! secret point, which rolls over a prompt one token at a time.

use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;

use blake2b_simd::Params;
use kvtrie_core::{Error, ErrorKind, Namespace, Result, Salt};
use siphasher::sip128::{Hasher128, SipHasher24};

/// Names a block and everything before it in one namespace.
pub(crate) type Digest = u128;

/// Stretches of a prompt whose windows are computed at once.
const STRETCHES: usize = 4;

/// The modulus of fingerprints: a Mersenne prime.
const PRIME: u64 = (1 << 61) - 1;

/// Everything that is derived from the key of an index.
#[derive(Clone)]
pub(crate) struct Keys {
    extra: SipHasher24,
    wide: SipHasher24,
    chain: SipHasher24,
    approximate: SipHasher24,
    namespace: SipHasher24,
    salt: SipHasher24,
    engine: SipHasher24,
    holding: SipHasher24,
    /// The second is odd.
    spread: [u64; 2],
    /// By place in a block: the factors of the two sums, and the powers of the secret point.
    factors: Arc<[[u64; 3]]>,
    /// The secret point of the fingerprints, and its power by which a token leaves the window.
    point: u64,
    leaving: u64,
    block_size: usize,
    check: u64,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys")
    }
}

impl Keys {
    pub(crate) const MIN_LEN: usize = 16;
    pub(crate) const MAX_LEN: usize = blake2b_simd::KEYBYTES;

    pub(crate) fn new(key: &[u8], block_size: usize) -> Result<Self> {
        if !(Self::MIN_LEN..=Self::MAX_LEN).contains(&key.len()) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "KvIndexer::new",
                format!(
                    "the key has {} bytes; it must have {} to {}",
                    key.len(),
                    Self::MIN_LEN,
                    Self::MAX_LEN
                ),
            ));
        }
        let words = |person: &[u8]| -> [u64; 2] {
            let mut params = Params::new();
            let digest = params
                .hash_length(16)
                .key(key)
                .personal(person)
                .hash(b"kvtrie");
            let mut halves = [0; 2];
            for (half, bytes) in halves.iter_mut().zip(digest.as_bytes().chunks_exact(8)) {
                *half = bytes
                    .iter()
                    .fold(0, |word, &byte| word << 8 | u64::from(byte));
            }
            halves
        };
        let sip = |person: &[u8]| {
            let [first, second] = words(person);
            SipHasher24::new_with_keys(first, second)
        };
        let [first, second] = words(b"kvtrie.tables");
        let [point, check] = words(b"kvtrie.point");
        // Neither 0 nor 1, at which all windows would be alike.
        let point = point % (PRIME - 2) + 2;
        let drawn = sip(b"kvtrie.factors");
        // The last token has a factor too: no token changes the low bits alone.
        let mut leaving = point;
        let mut factors = vec![[0; 3]; block_size];
        for (place, factors) in factors.iter_mut().enumerate().rev() {
            let (first, second) = drawn.hash(&place.to_le_bytes()).as_u64();
            *factors = [first % PRIME, second % PRIME, leaving];
            leaving = times(leaving, point);
        }
        Ok(Self {
            extra: sip(b"kvtrie.extra"),
            wide: sip(b"kvtrie.wide"),
            chain: sip(b"kvtrie.chain"),
            approximate: sip(b"kvtrie.moved"),
            namespace: sip(b"kvtrie.space"),
            salt: sip(b"kvtrie.salt"),
            engine: sip(b"kvtrie.engine"),
            holding: sip(b"kvtrie.holding"),
            spread: [first, second | 1],
            factors: factors.into(),
            point,
            leaving,
            block_size,
            check: check.wrapping_add(block_size as u64),
        })
    }

    /// Equal for equal keys and block sizes. It says nothing about the key.
    pub(crate) fn check(&self) -> u64 {
        self.check
    }

    /// The contents and the fingerprint of one block.
    pub(crate) fn block(&self, tokens: &[u32]) -> (u128, u64) {
        let [first, second, fingerprint] = self.sums(tokens);
        (u128::from(first) << 64 | u128::from(second), fingerprint)
    }

    /// The contents alone.
    pub(crate) fn contents(&self, tokens: &[u32]) -> u128 {
        let [first, second] = self.sums(tokens);
        u128::from(first) << 64 | u128::from(second)
    }

    fn sums<const N: usize>(&self, tokens: &[u32]) -> [u64; N] {
        // A product has 94 bits at most and a block 2¹² tokens, so that no sum overflows.
        let mut sums = [0_u128; N];
        for (&token, factors) in tokens.iter().zip(&*self.factors) {
            let value = u128::from(value(token));
            for (sum, &factor) in sums.iter_mut().zip(factors) {
                *sum += value * u128::from(factor);
            }
        }
        sums.map(reduced)
    }

    /// The contents of a block whose KV depends on more than its tokens.
    pub(crate) fn with_extra(&self, contents: u128, extra: &[u8]) -> u128 {
        let mut hasher = self.extra;
        hasher.write(&contents.to_le_bytes());
        hasher.write(extra);
        hasher.finish128().as_u128()
    }

    /// The contents of a block with token ids beyond 32 bits, as some engines write them in the place of images: these,
    /// and their places in the block.
    pub(crate) fn with_wide(&self, contents: u128, ids: &[(usize, u64)]) -> u128 {
        let mut hasher = self.wide;
        hasher.write(&contents.to_le_bytes());
        for &(at, id) in ids {
            hasher.write(&(at as u64).to_le_bytes());
            hasher.write(&id.to_le_bytes());
        }
        hasher.finish128().as_u128()
    }

    pub(crate) fn child(&self, parent: Digest, contents: u128, approximate: bool) -> Digest {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&parent.to_le_bytes());
        bytes[16..].copy_from_slice(&contents.to_le_bytes());
        let hasher = if approximate {
            &self.approximate
        } else {
            &self.chain
        };
        hasher.hash(&bytes).as_u128()
    }

    /// The digest that the first blocks of a namespace have as their parent. `adapter` and `salt` replace the
    /// namespace's own if there are any.
    pub(crate) fn root(
        &self,
        namespace: &Namespace,
        adapter: Option<&str>,
        salt: Option<u128>,
    ) -> Digest {
        let mut hasher = self.namespace;
        let adapter = adapter.or(namespace.adapter());
        let texts = [
            Some(namespace.model()),
            Some(namespace.kv_dtype()),
            Some(namespace.rope()),
            adapter,
        ];
        for text in texts {
            hasher.write_u8(text.is_some().into());
            let text = text.unwrap_or_default();
            hasher.write(&(text.len() as u64).to_le_bytes());
            hasher.write(text.as_bytes());
        }
        let salt = salt.or(match namespace.salt() {
            Salt::Shared => None,
            Salt::Tenant(salt) => Some(self.salt(salt.as_bytes())),
        });
        hasher.write_u8(salt.is_some().into());
        hasher.write(&salt.unwrap_or_default().to_le_bytes());
        hasher.finish128().as_u128()
    }

    pub(crate) fn salt(&self, salt: &[u8]) -> u128 {
        self.salt.hash(salt).as_u128()
    }

    /// The 64 bits by which a block hash that is not an integer is known.
    pub(crate) fn engine_hash(&self, bytes: &[u8]) -> u64 {
        self.engine.hash(bytes).as_u64().0
    }

    /// One term of the digest of what a worker holds.
    pub(crate) fn holding(&self, words: &[u128]) -> u128 {
        let mut hasher = self.holding;
        for word in words {
            hasher.write(&word.to_le_bytes());
        }
        hasher.finish128().as_u128()
    }

    /// An engine's hash, spread over 64 bits in a way that nobody can foresee without the key. No two become one.
    pub(crate) fn spread(&self, hash: u64) -> u64 {
        let [first, second] = self.spread;
        let mut word = (hash ^ first).wrapping_mul(second);
        word = (word ^ word >> 32).wrapping_mul(first | 1);
        word = (word ^ word >> 29).wrapping_mul(second);
        word ^ word >> 32
    }

    /// What tells equal tokens of two namespaces apart.
    pub(crate) fn apart(root: Digest) -> u64 {
        low(root) % PRIME
    }

    /// The fingerprints of all windows of one block's length, by the position of their first token.
    pub(crate) fn windows(&self, tokens: &[u32]) -> Vec<u64> {
        let Some(count) = (tokens.len() + 1).checked_sub(self.block_size) else {
            return Vec::new();
        };
        let mut windows = vec![0; count];
        // Each window follows from the one before it. Several stretches at once hide how long that takes.
        let stretch = count.div_ceil(STRETCHES).max(1);
        let mut sums = [0; STRETCHES];
        for (sum, at) in sums.iter_mut().zip((0..count).step_by(stretch)) {
            *sum = self.block(&tokens[at..at + self.block_size]).1;
            windows[at] = *sum;
        }
        for step in 1..stretch {
            for (number, sum) in sums.iter_mut().enumerate() {
                let at = number * stretch + step;
                if let Some(window) = windows.get_mut(at) {
                    let gone = times(value(tokens[at - 1]), self.leaving);
                    let next = value(tokens[at + self.block_size - 1]);
                    *sum = plus(times(plus(*sum, next), self.point), PRIME - gone);
                    *window = *sum;
                }
            }
        }
        windows
    }
}

/// The sum modulo the prime.
pub(crate) fn plus(a: u64, b: u64) -> u64 {
    let sum = a + b;
    if sum >= PRIME { sum - PRIME } else { sum }
}

/// Tokens count from 1, so that leading zeros matter.
fn value(token: u32) -> u64 {
    u64::from(token) + 1
}

fn times(a: u64, b: u64) -> u64 {
    reduced(u128::from(a) * u128::from(b))
}

/// A number below 2¹²² modulo the prime.
fn reduced(wide: u128) -> u64 {
    let sum = low(wide & u128::from(PRIME)) + low(wide >> 61);
    if sum >= PRIME { sum - PRIME } else { sum }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
pub(crate) fn low(wide: u128) -> u64 {
    wide as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new(b"0123456789abcdef", 4).unwrap()
    }

    #[test]
    fn windows_are_the_fingerprints_of_their_tokens() {
        let keys = keys();
        let tokens: Vec<u32> = (0..100).map(|n| n * n * 77 + u32::MAX / 2).collect();
        let windows = keys.windows(&tokens);
        assert_eq!(windows.len(), 97);
        for (at, window) in windows.into_iter().enumerate() {
            assert_eq!(window, keys.block(&tokens[at..at + 4]).1, "at {at}");
        }
        assert!(keys.windows(&tokens[..3]).is_empty());
    }

    #[test]
    fn arithmetic_is_that_of_the_prime() {
        for (a, b) in [(PRIME - 1, PRIME - 1), (3, PRIME - 1), (0, 5), (1 << 60, 2)] {
            let expected = u128::from(a) * u128::from(b) % u128::from(PRIME);
            assert_eq!(u128::from(times(a, b)), expected);
            let expected = (u128::from(a) + u128::from(b)) % u128::from(PRIME);
            assert_eq!(u128::from(plus(a, b)), expected);
        }
    }

    #[test]
    fn names_depend_on_every_part() {
        let keys = keys();
        let contents = keys.block(&[1, 2, 3, 4]).0;
        let most = [u32::MAX; 4];
        for other in [[1, 2, 3, 5], [0, 2, 3, 4], [2, 1, 3, 4], most] {
            let (first, second) = (keys.block(&other).0, contents);
            assert_ne!(first, second);
            assert_ne!(first >> 64, second >> 64);
            assert_ne!(low(first), low(second));
        }
        assert_ne!(contents, keys.with_extra(contents, b"x"));
        assert_ne!(
            keys.child(1, contents, false),
            keys.child(2, contents, false)
        );
        assert_ne!(
            keys.child(1, contents, false),
            keys.child(1, contents, true)
        );
        let other = Keys::new(b"0123456789abcdeg", 4).unwrap();
        assert_ne!(contents, other.block(&[1, 2, 3, 4]).0);
        assert_ne!(keys.check(), other.check());
        assert_eq!(format!("{keys:?}"), "Keys");
    }

    #[test]
    fn a_root_is_that_of_one_namespace() {
        let keys = keys();
        let space = |adapter: Option<&str>, salt: Salt| {
            Namespace::new("m", "auto", "default", adapter.map(str::to_owned), salt).unwrap()
        };
        let tenant = |salt: &str| Salt::Tenant(salt.to_owned());
        let plain = space(None, Salt::Shared);
        assert_eq!(
            keys.root(&plain, Some("a"), Some(keys.salt(b"s"))),
            keys.root(&space(Some("a"), tenant("s")), None, None)
        );
        let all = [
            keys.root(&plain, None, None),
            keys.root(&plain, Some("a"), None),
            keys.root(&plain, None, Some(keys.salt(b"a"))),
            keys.root(&space(None, tenant("b")), None, None),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[at + 1..].contains(one));
        }
    }

    #[test]
    fn keys_have_16_to_64_bytes() {
        for len in [0, 15, 65] {
            let error = Keys::new(&vec![1; len], 4).unwrap_err();
            assert!(error.message().contains(&format!("{len} bytes")), "{error}");
        }
    }
}
