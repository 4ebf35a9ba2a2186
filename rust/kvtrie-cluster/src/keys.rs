//! Keyed digests and fingerprints. No token can be read back from them without the key.
//!
//! A block has two names of 128 bits, each of two halves modulo p = 2⁶⁴ − 59, the largest prime of 64 bits. Of its
//! *contents* the first half is a polynomial of its tokens at a secret point, the second the sum of its tokens times a
//! secret number of their place. A block's *digest* is (its parent's digest + its contents) times another secret number,
//! in each half. So two others of *n* tokens after one namespace have the same digest with probability (n/p)² at most,
//! 2⁻⁹⁴ for 131,072 tokens. That needs secret numbers, and no digest leaves the index but through `SipHash`. Namespaces,
//! salts and extra keys are names under `SipHash` themselves.
//!
//! Two things follow from the polynomial. The first half of the contents rolls over a prompt one token at a
//! time, so it is the block's *fingerprint* too. And a digest and that of its parent give the fingerprint back, so that
//! nobody has to keep it.

use std::fmt;
use std::hash::Hasher;
use std::sync::Arc;

use blake2b_simd::Params;
use kvtrie_core::{Error, ErrorKind, Namespace, Result, Salt};
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::sessions::Session;

/// Names a block and everything before it in one namespace.
pub(crate) type Digest = [u64; 2];

/// Names the tokens of a block, and what else its KV depends on besides the blocks before it.
pub(crate) type Contents = [u64; 2];

/// Stretches of a prompt whose windows are computed at once.
const STRETCHES: usize = 4;

/// The modulus, and how much it is below 2⁶⁴.
const PRIME: u64 = 0_u64.wrapping_sub(BELOW);
const BELOW: u64 = 59;

/// How digests are made, above all sizes of a block: replicas whose digests are made in another way are refused as
/// those with another key are.
const FORM: u64 = 3 << 32;

/// Everything that is derived from the key of an index.
#[derive(Clone)]
pub(crate) struct Keys {
    extra: SipHasher24,
    wide: SipHasher24,
    chain: Chain,
    approximate: Chain,
    namespace: SipHasher24,
    salt: SipHasher24,
    session: SipHasher24,
    engine: SipHasher24,
    holding: SipHasher24,
    /// The second is odd.
    spread: [u64; 2],
    /// By place in a block.
    factors: Arc<[Factors]>,
    /// The sums of no token: tokens count from 1, so all powers together.
    sums: Sums,
    /// The point of the fingerprints, and its power by which a token leaves the window.
    point: u64,
    leaving: u64,
    block_size: usize,
    check: u64,
}

/// The secret numbers by which a token is multiplied at its place in a block, for each half: powers of the point of the
/// fingerprints, and numbers of no order.
pub(crate) type Factors = [u64; 2];

/// The contents of a block of which not all tokens have been added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums([u128; 2]);

impl Sums {
    /// A product has 96 bits at most and a block 2¹² tokens, so that no sum overflows.
    pub(crate) fn add(&mut self, token: u32, factors: Factors) {
        for (sum, factor) in self.0.iter_mut().zip(factors) {
            *sum += u128::from(token) * u128::from(factor);
        }
    }

    pub(crate) fn contents(self) -> Contents {
        self.0.map(reduced)
    }
}

/// The secret numbers by which digests follow each other.
#[derive(Clone, Copy)]
struct Chain {
    factors: [u64; 2],
    /// One over the first.
    inverse: u64,
}

impl Chain {
    fn new(factors: [u64; 2]) -> Self {
        Self {
            factors,
            inverse: inverse(factors[0]),
        }
    }
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
        let derived = |person: &[u8], of: &[u8]| -> [u64; 2] {
            let mut params = Params::new();
            let digest = params.hash_length(16).key(key).personal(person).hash(of);
            let mut halves = [0; 2];
            for (half, bytes) in halves.iter_mut().zip(digest.as_bytes().chunks_exact(8)) {
                *half = bytes
                    .iter()
                    .fold(0, |word, &byte| word << 8 | u64::from(byte));
            }
            halves
        };
        let words = |person: &[u8]| derived(person, b"kvtrie");
        let sip = |person: &[u8]| {
            let [first, second] = words(person);
            SipHasher24::new_with_keys(first, second)
        };
        let [first, second] = words(b"kvtrie.tables");
        // Neither 0 nor 1, at which all windows would be alike.
        let secret = |word: u64| word % (PRIME - 2) + 2;
        let [point, check] = words(b"kvtrie.point");
        let point = secret(point);
        // The last token has a factor too: no token changes the low bits alone.
        let mut leaving = point;
        let mut factors = vec![Factors::default(); block_size];
        for (place, factors) in factors.iter_mut().enumerate().rev() {
            let [other, _] = derived(b"kvtrie.place", &(place as u64).to_le_bytes());
            *factors = [leaving, secret(other)];
            leaving = times(leaving, point);
        }
        let powers = factors.iter().map(|&[power, _]| u128::from(power));
        let chain = |person: &[u8]| Chain::new(words(person).map(secret));
        Ok(Self {
            extra: sip(b"kvtrie.extra"),
            wide: sip(b"kvtrie.wide"),
            chain: chain(b"kvtrie.chain"),
            approximate: chain(b"kvtrie.moved"),
            namespace: sip(b"kvtrie.space"),
            salt: sip(b"kvtrie.salt"),
            session: sip(b"kvtrie.session"),
            engine: sip(b"kvtrie.engine"),
            holding: sip(b"kvtrie.holding"),
            spread: [first, second | 1],
            sums: Sums([powers.sum(), 0]),
            factors: factors.into(),
            point,
            leaving,
            block_size,
            check: check.wrapping_add(block_size as u64 + FORM),
        })
    }

    /// Equal for equal keys and block sizes. It says nothing about the key.
    pub(crate) fn check(&self) -> u64 {
        self.check
    }

    /// The contents of one block.
    pub(crate) fn contents(&self, tokens: &[u32]) -> Contents {
        let mut sums = self.sums;
        for (&token, &factors) in tokens.iter().zip(&*self.factors) {
            sums.add(token, factors);
        }
        sums.contents()
    }

    /// The sums of no token.
    pub(crate) fn sums(&self) -> Sums {
        self.sums
    }

    /// The factors of a block's tokens.
    pub(crate) fn factors(&self) -> &[Factors] {
        &self.factors
    }

    /// The contents of a block whose KV depends on more than its tokens.
    pub(crate) fn with_extra(&self, contents: Contents, extra: &[u8]) -> Contents {
        let mut hasher = self.extra;
        hasher.write(&packed(contents).to_le_bytes());
        hasher.write(extra);
        halves(hasher)
    }

    /// The contents of a block with token ids beyond 32 bits, as some engines write them in the place of images: these,
    /// and their places in the block.
    pub(crate) fn with_wide(&self, contents: Contents, ids: &[(usize, u64)]) -> Contents {
        let mut hasher = self.wide;
        hasher.write(&packed(contents).to_le_bytes());
        for &(at, id) in ids {
            hasher.write(&(at as u64).to_le_bytes());
            hasher.write(&id.to_le_bytes());
        }
        halves(hasher)
    }

    fn chain(&self, approximate: bool) -> &Chain {
        if approximate {
            &self.approximate
        } else {
            &self.chain
        }
    }

    pub(crate) fn child(&self, parent: Digest, contents: Contents, approximate: bool) -> Digest {
        let factors = self.chain(approximate).factors;
        [
            times(plus(parent[0], contents[0]), factors[0]),
            times(plus(parent[1], contents[1]), factors[1]),
        ]
    }

    /// The fingerprint of a block, from the first halves of its digest and of its parent's.
    pub(crate) fn fingerprint(&self, digest: Digest, parent: u64, approximate: bool) -> u64 {
        let sum = times(digest[0], self.chain(approximate).inverse);
        plus(sum, PRIME - parent)
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
        halves(hasher)
    }

    pub(crate) fn salt(&self, salt: &[u8]) -> u128 {
        self.salt.hash(salt).as_u128()
    }

    /// What is kept of the id of a conversation.
    pub(crate) fn session(&self, id: &str) -> Session {
        let digest = self.session.hash(id.as_bytes()).as_u64().0;
        #[expect(clippy::cast_possible_truncation, reason = "the halves are wanted")]
        Session([(digest >> 32) as u32, digest as u32])
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
        root[0]
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
            *sum = self.contents(&tokens[at..at + self.block_size])[0];
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

/// Both halves in one word.
pub(crate) fn packed(halves: [u64; 2]) -> u128 {
    u128::from(halves[0]) << 64 | u128::from(halves[1])
}

/// What tells digests apart in a table, in all 64 bits.
pub(crate) fn bucket(digest: Digest) -> u64 {
    digest[0] ^ digest[1]
}

fn halves(hasher: SipHasher24) -> [u64; 2] {
    let (first, second) = hasher.finish128().as_u64();
    [first % PRIME, second % PRIME]
}

/// One over a number that is not 0.
fn inverse(number: u64) -> u64 {
    // The power p − 2.
    let (mut inverse, mut power) = (1, number);
    for bit in 0..64 {
        if (PRIME - 2) >> bit & 1 == 1 {
            inverse = times(inverse, power);
        }
        power = times(power, power);
    }
    inverse
}

/// The sum of two numbers below the prime modulo the prime.
pub(crate) fn plus(a: u64, b: u64) -> u64 {
    let (sum, is_over) = a.overflowing_add(b);
    if is_over || sum >= PRIME {
        sum.wrapping_sub(PRIME)
    } else {
        sum
    }
}

/// Tokens count from 1, so that leading zeros matter.
fn value(token: u32) -> u64 {
    u64::from(token) + 1
}

fn times(a: u64, b: u64) -> u64 {
    reduced(u128::from(a) * u128::from(b))
}

/// A number modulo the prime: 2⁶⁴ is `BELOW` there.
fn reduced(wide: u128) -> u64 {
    let wide = u128::from(low(wide)) + (wide >> 64) * u128::from(BELOW);
    // What is above 2⁶⁴ now is at most `BELOW`, so a sum that overflows again is small.
    let (sum, is_over) = low(wide).overflowing_add(low(wide >> 64) * BELOW);
    if is_over || sum >= PRIME {
        sum.wrapping_sub(PRIME)
    } else {
        sum
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
fn low(wide: u128) -> u64 {
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
            assert_eq!(window, keys.contents(&tokens[at..at + 4])[0], "at {at}");
        }
        assert!(keys.windows(&tokens[..3]).is_empty());
    }

    #[test]
    fn contents_are_sums_modulo_the_prime() {
        let prime = u128::from(PRIME);
        for size in [1, 2, 3, 16, 31, 32, 33, 70, 4_096] {
            let keys = Keys::new(b"0123456789abcdef", size).unwrap();
            let ascending = (0..u32::MAX).step_by(1_000_003).take(size).collect();
            for tokens in [vec![u32::MAX; size], ascending] {
                let (mut first, mut second) = (0, 0);
                for (&token, factors) in tokens.iter().zip(keys.factors()) {
                    let [power, other] = factors.map(u128::from);
                    first = (first + u128::from(value(token)) * power % prime) % prime;
                    second = (second + u128::from(token) * other) % prime;
                }
                let [mine, other] = keys.contents(&tokens).map(u128::from);
                assert_eq!((mine, other), (first, second), "{size} tokens");
            }
        }
    }

    #[test]
    fn arithmetic_is_that_of_the_prime() {
        let most = PRIME - 1;
        for (a, b) in [
            (most, most),
            (3, most),
            (0, 5),
            (1 << 63, 2),
            (1 << 63, 1 << 63),
        ] {
            let expected = u128::from(a) * u128::from(b) % u128::from(PRIME);
            assert_eq!(u128::from(times(a, b)), expected);
            let expected = (u128::from(a) + u128::from(b)) % u128::from(PRIME);
            assert_eq!(u128::from(plus(a, b)), expected);
        }
        let edges = [0, u128::from(PRIME), 1 << 64, u128::MAX - 1, u128::MAX];
        let near = (1..59).map(|above| (u128::from(PRIME) << 64) + above * u128::from(u64::MAX));
        for wide in edges.into_iter().chain(near) {
            assert_eq!(
                u128::from(reduced(wide)),
                wide % u128::from(PRIME),
                "{wide}"
            );
        }
        for number in [1, 2, 77, PRIME - 1] {
            assert_eq!(times(number, inverse(number)), 1);
        }
    }

    #[test]
    fn names_depend_on_every_part() {
        let keys = keys();
        let contents = keys.contents(&[1, 2, 3, 4]);
        let most = [u32::MAX; 4];
        for other in [[1, 2, 3, 5], [0, 2, 3, 4], [2, 1, 3, 4], most] {
            let other = keys.contents(&other);
            assert_ne!(other[0], contents[0]);
            assert_ne!(other[1], contents[1]);
        }
        assert_ne!(contents, keys.with_extra(contents, b"x"));
        assert_ne!(contents, keys.with_wide(contents, &[(0, 1 << 32)]));
        let (first, second) = ([1, 2], [2, 1]);
        let child = keys.child(first, contents, false);
        for other in [
            keys.child(second, contents, false),
            keys.child(first, contents, true),
            keys.child(first, second, false),
        ] {
            assert_ne!(child[0], other[0]);
            assert_ne!(child[1], other[1]);
        }
        let other = Keys::new(b"0123456789abcdeg", 4).unwrap();
        assert_ne!(contents, other.contents(&[1, 2, 3, 4]));
        assert_ne!(keys.check(), other.check());
        assert_eq!(format!("{keys:?}"), "Keys");
    }

    #[test]
    fn digests_give_fingerprints_back() {
        let keys = keys();
        let mut digest = keys.root(
            &Namespace::new("m", "auto", "default", None, Salt::Shared).unwrap(),
            None,
            None,
        );
        for token in 0..100 {
            let contents = keys.contents(&[token, u32::MAX, 7, token * 3]);
            let approximate = token % 3 == 0;
            let child = keys.child(digest, contents, approximate);
            assert_eq!(keys.fingerprint(child, digest[0], approximate), contents[0]);
            digest = child;
        }
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
