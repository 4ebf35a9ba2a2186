//! Represents tokens of items as single numbers, so that the model need not know what an item is.

use kvtrie_core::{Item, TokenSequence};

/// The factor between a token's id and the rest of its code: 0 for a plain token, else the item's digest and the offset
/// in it.
const PER_ID: u32 = 1000;
const PER_DIGEST: u32 = 100;

/// The id of all tokens in items. Some plain tokens have it too.
const PAD: u32 = 1;

pub(crate) fn code(digest: u32, offset: u32) -> u32 {
    PAD * PER_ID + 1 + digest * PER_DIGEST + offset
}

pub(crate) fn plain(id: u32) -> u32 {
    id * PER_ID
}

/// One number per token, ordered as the tokens are: by id, then no item before digest and offset.
pub(crate) fn codes(seq: &TokenSequence) -> Vec<u32> {
    let mut codes: Vec<u32> = seq.tokens().iter().map(|&id| plain(id)).collect();
    for item in seq.items() {
        for (offset, at) in (0..).zip(item.start()..item.end()) {
            codes[at] = code(item.digest()[0].into(), offset);
        }
    }
    codes
}

/// The ids and items of codes from position `base` on. An item whose beginning is missing starts with its first code.
pub(crate) fn pieces(codes: &[u32], base: usize) -> (Vec<u32>, Vec<Item>) {
    let mut items: Vec<(usize, usize, u32, u32)> = Vec::new();
    for (at, code) in (base..).zip(codes) {
        let Some(rest) = (code % PER_ID).checked_sub(1) else {
            continue;
        };
        let (digest, offset) = (rest / PER_DIGEST, rest % PER_DIGEST);
        match items.last_mut() {
            Some((_, end, known, next)) if (*end, *known, *next) == (at, digest, offset) => {
                *end += 1;
                *next += 1;
            }
            _ => items.push((at, at + 1, digest, offset + 1)),
        }
    }
    let items = items.into_iter().map(|(start, end, digest, _)| {
        Item::new(start, end, &[u8::try_from(digest).unwrap()]).unwrap()
    });
    (
        codes.iter().map(|code| code / PER_ID).collect(),
        items.collect(),
    )
}

/// The codes of letters: the first three are plain tokens, and the others are items, some of which begin alike.
pub(crate) fn spell(letters: &[u32]) -> Vec<u32> {
    let item = |digest: u32, len: u32| (0..len).map(move |offset| code(digest, offset)).collect();
    let codes = letters.iter().map(|&letter| -> Vec<u32> {
        match letter {
            0..3 => vec![plain(letter)],
            3 => item(0, 3),
            4 => item(1, 3),
            5 => item(0, 11),
            _ => item(1, 20),
        }
    });
    codes.flatten().collect()
}
