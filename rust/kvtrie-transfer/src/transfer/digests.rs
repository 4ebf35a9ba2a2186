//! Keyed digests of tokens, salts and runs: `BLAKE2b` with 16 bytes of output, and one `person` per purpose.
//!
//! `docs/transfers.md` has the encoding of tokens. Counts come last, so that all prefixes of a sequence are hashed in
//! one pass. The version comes first, so that a cloned state has already compressed the key.

use std::fmt;

use blake2b_simd::{Params, State};
use kvtrie_core::{Item, Result, TokenSequence};

use crate::error::invalid;
use crate::transfer::offsets::VERSION;
use crate::transfer::wire::{ByteWriter, short};

pub(super) const DIGEST: usize = 16;

/// Added to the length of an item's digest if two more numbers follow: the positions that it takes, and its tokens.
const TAKES: usize = 1 << 8;

pub(super) type Digest = [u8; DIGEST];

#[derive(Clone, Copy)]
pub(super) struct Tokens<'a> {
    pub(super) ids: &'a [u32],
    base: usize,
    items: &'a [Item],
}

impl<'a> Tokens<'a> {
    pub(super) fn of(seq: &'a TokenSequence) -> Self {
        Self {
            ids: seq.tokens(),
            base: 0,
            items: seq.items(),
        }
    }

    pub(super) fn slice(self, start: usize, end: usize) -> Self {
        Self {
            ids: &self.ids[start - self.base..end - self.base],
            base: start,
            ..self
        }
    }
}

const ENCODING: u32 = 1;

/// The key of a deployment. Whoever has it can state what blocks hold.
///
/// # Examples
/// ```
/// use kvtrie_transfer::TransferKey;
/// assert!(TransferKey::new(&[7; 32]).is_ok());
/// assert!(TransferKey::new(b"short").is_err());
/// ```
#[derive(Clone)]
pub struct TransferKey {
    block: State,
    prefix: State,
    run: State,
    salt: State,
}

impl TransferKey {
    /// The shortest key, in bytes.
    pub const MIN_LEN: usize = 16;
    /// The longest key, in bytes.
    pub const MAX_LEN: usize = blake2b_simd::KEYBYTES;

    /// Makes a key from bytes.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if it does not have 16 to 64 bytes.
    pub fn new(key: &[u8]) -> Result<Self> {
        if !(Self::MIN_LEN..=Self::MAX_LEN).contains(&key.len()) {
            return Err(invalid!(
                "TransferKey::new",
                "the key has {} bytes; it must have {} to {}",
                key.len(),
                Self::MIN_LEN,
                Self::MAX_LEN
            ));
        }
        let state = |person: &[u8]| {
            let mut params = Params::new();
            params.hash_length(DIGEST).key(key).personal(person);
            params.to_state()
        };
        let of_tokens = |person: &[u8]| {
            let mut state = state(person);
            state.update(&ENCODING.to_le_bytes());
            state
        };
        Ok(Self {
            block: of_tokens(b"kvtrie.block"),
            prefix: of_tokens(b"kvtrie.prefix"),
            run: state(b"kvtrie.run"),
            salt: state(b"kvtrie.salt"),
        })
    }

    /// The longest context, in bytes.
    pub const MAX_CONTEXT: usize = 1_024;

    /// This key, for manifests about one thing only, such as one request of one engine. Runs that were written with
    /// another context do not verify. An empty context changes nothing.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if it has more than 1,024 bytes.
    pub fn bound_to(mut self, context: &[u8]) -> Result<Self> {
        if context.len() > Self::MAX_CONTEXT {
            return Err(invalid!(
                "TransferKey::bound_to",
                "the context has {} bytes; the limit is {}",
                context.len(),
                Self::MAX_CONTEXT
            ));
        }
        if !context.is_empty() {
            let mut packed = ByteWriter::with_capacity(context.len() + 3);
            packed.bin(context);
            self.run.update(packed.bytes());
        }
        Ok(self)
    }

    pub(super) fn block(&self, tokens: Tokens<'_>) -> Digest {
        let mut state = self.block.clone();
        update(&mut state, tokens.ids);
        finish(state, tokens)
    }

    /// The digest of the tokens before each of `starts`, which must ascend.
    pub(super) fn prefixes(&self, sequence: Tokens<'_>, starts: &[usize]) -> Vec<Digest> {
        let mut state = self.prefix.clone();
        let mut at = 0;
        let digest = |&start: &usize| {
            update(&mut state, &sequence.ids[at..start]);
            at = start;
            finish(state.clone(), sequence.slice(0, start))
        };
        starts.iter().map(digest).collect()
    }

    pub(super) fn salt(&self, salt: &str) -> Digest {
        digest(self.salt.clone().update(salt.as_bytes()))
    }

    /// `signed` is the namespace and the policy, as the manifest has them; `heads` are those of all groups.
    pub(super) fn runs(&self, signed: &[u8], heads: &[u8]) -> RunHasher {
        let mut before = ByteWriter::default();
        before.uint(VERSION);
        let mut state = self.run.clone();
        state.update(before.bytes()).update(signed).update(heads);
        RunHasher(state)
    }
}

impl fmt::Debug for TransferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TransferKey")
    }
}

pub(super) struct RunHasher(State);

impl RunHasher {
    /// The hasher of the runs of one group.
    pub(super) fn of_group(&self, group: u32) -> Self {
        let mut number = ByteWriter::default();
        number.uint(group as usize);
        let mut state = self.0.clone();
        state.update(number.bytes());
        Self(state)
    }

    pub(super) fn digest(&self, fields: &[u8]) -> Digest {
        digest(self.0.clone().update(fields))
    }

    /// Compares in constant time.
    pub(super) fn verifies(&self, fields: &[u8], expected: &[u8]) -> bool {
        self.0.clone().update(fields).finalize() == *expected
    }
}

fn digest(state: &State) -> Digest {
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(state.finalize().as_bytes());
    digest
}

fn update(state: &mut State, tokens: &[u32]) {
    if cfg!(target_endian = "little") {
        state.update(bytemuck::cast_slice(tokens));
    } else {
        for token in tokens {
            state.update(&token.to_le_bytes());
        }
    }
}

fn finish(mut state: State, range: Tokens<'_>) -> Digest {
    let end = range.base + range.ids.len();
    let first = range.items.partition_point(|item| item.end() <= range.base);
    let inside = range.items[first..]
        .iter()
        .take_while(|item| item.start() < end);
    let mut pieces = 0;
    for item in inside {
        let start = item.start().max(range.base);
        let positions = item.positions();
        let place = [
            start - range.base,
            item.end().min(end) - range.base,
            start - item.start(),
            item.digest().len() | if positions.is_some() { TAKES } else { 0 },
        ];
        for number in place {
            state.update(&short(number).to_le_bytes());
        }
        if let Some(positions) = positions {
            for number in [positions, item.num_tokens()] {
                state.update(&short(number).to_le_bytes());
            }
        }
        state.update(item.digest());
        pieces += 1;
    }
    let mut counts = [0; 8];
    counts[..4].copy_from_slice(&short(pieces).to_le_bytes());
    counts[4..].copy_from_slice(&short(range.ids.len()).to_le_bytes());
    digest(state.update(&counts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> TransferKey {
        TransferKey::new(b"0123456789abcdef").unwrap()
    }

    fn view<'a>(tokens: &'a [u32], items: &'a [Item]) -> Tokens<'a> {
        Tokens {
            ids: tokens,
            base: 0,
            items,
        }
    }

    #[test]
    fn digests_are_those_of_python() {
        // import hashlib, struct
        // def h(person, data): return hashlib.blake2b(data, digest_size=16, key=b"0123456789abcdef", person=person).hexdigest()
        // h(b"kvtrie.block", struct.pack("<I3I", 1, 7, 8, 9) + struct.pack("<2I", 0, 3))
        // h(b"kvtrie.block", struct.pack("<I3I", 1, 7, 8, 9) + struct.pack("<4I", 1, 3, 0, 1) + b"x" + struct.pack("<2I", 1, 3))
        // h(b"kvtrie.prefix", struct.pack("<I", 1) + struct.pack("<2I", 0, 0)), h(b"kvtrie.salt", b"tenant")
        let hex = |digest: Digest| format!("{:032x}", u128::from_be_bytes(digest));
        let items = [Item::new(1, 5, b"x").unwrap()];
        let found = [
            hex(key().block(view(&[7, 8, 9], &[]))),
            hex(key().block(view(&[7, 8, 9], &items))),
            hex(key().prefixes(view(&[7], &[]), &[0])[0]),
            hex(key().salt("tenant")),
        ];
        assert_eq!(found, PYTHON);
    }

    const PYTHON: [&str; 4] = [
        "f7a9d4b6c36ed452475003b83f87722b",
        "49038910c8a1fbb59951f5725854ed51",
        "a0df026e585f62a62f57896b47892e5e",
        "dbf354270f17f4988a54fa58a5830932",
    ];

    #[test]
    fn prefixes_in_one_pass_are_those_of_each() {
        let tokens: Vec<u32> = (0..300).collect();
        let items = [
            Item::new(3, 40, b"a").unwrap(),
            Item::new(41, 200, b"b").unwrap(),
        ];
        let all = view(&tokens, &items);
        let starts = [0, 1, 16, 40, 41, 64, 128, 129, 300];
        let together = key().prefixes(all, &starts);
        for (start, digest) in starts.iter().zip(together) {
            assert_eq!(key().prefixes(all, &[*start]), [digest]);
        }
    }

    #[test]
    fn a_digest_distinguishes_place_and_kind() {
        let tokens = [1, 1, 1, 1];
        let whole = [Item::new(0, 4, b"x").unwrap()];
        let halves = [
            Item::new(0, 2, b"x").unwrap(),
            Item::new(2, 4, b"x").unwrap(),
        ];
        let block = |items| key().block(view(&tokens, items));
        assert_ne!(block(&whole), block(&halves));
        assert_ne!(block(&whole), block(&[]));
        assert_ne!(key().block(view(&tokens[..3], &[])), block(&[]));
        assert_ne!(key().prefixes(view(&tokens, &[]), &[4])[0], block(&[]));
        // The same part of an item, at two positions of a sequence.
        let later = [Item::new(1, 5, b"x").unwrap()];
        let shifted = [0, 1, 1, 1, 1];
        let part = view(&shifted, &later).slice(2, 4);
        assert_eq!(
            key().block(part),
            key().block(view(&tokens, &whole).slice(1, 3))
        );
    }

    #[test]
    fn keys_have_16_to_64_bytes() {
        for len in [0, 15, 65] {
            let error = TransferKey::new(&vec![1; len]).unwrap_err();
            assert!(
                error.to_string().contains(&format!("{len} bytes")),
                "{error}"
            );
        }
        assert_eq!(format!("{:?}", key()), "TransferKey");
    }
}
