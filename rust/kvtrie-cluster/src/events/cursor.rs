//! Reads `MessagePack` values from untrusted bytes, front to back, without recursion.

use std::ops::Range;

use rmp::Marker;

use crate::error::{EventError, EventRefusal};
use crate::keys::{Factors, Keys, Sums};

pub(super) type Read<T> = Result<T, EventError>;

/// An engine's block hash, as it was encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RawHash<'a> {
    Int(u64),
    Bytes(&'a [u8]),
}

#[derive(Debug)]
pub(super) struct EventCursor<'a> {
    raw: &'a [u8],
    at: usize,
}

impl<'a> EventCursor<'a> {
    pub(super) fn new(raw: &'a [u8]) -> Self {
        Self { raw, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> usize {
        self.raw.len() - self.at
    }

    #[cold]
    pub(super) fn wrong(&self, message: impl AsRef<str>) -> EventError {
        EventError::new(
            EventRefusal::Malformed,
            format!("byte {}: {}", self.at, message.as_ref()),
        )
    }

    #[cold]
    fn unexpected(&self, what: &str, marker: Marker) -> EventError {
        self.wrong(format!("{what} is encoded as {marker:?}"))
    }

    #[cold]
    fn too_short(&self, len: usize, what: &str) -> EventError {
        self.wrong(format!(
            "{what} takes {len} bytes, {} are left",
            self.left()
        ))
    }

    #[inline]
    fn take(&mut self, len: usize, what: &str) -> Read<&'a [u8]> {
        match self.raw[self.at..].get(..len) {
            Some(taken) => {
                self.at += len;
                Ok(taken)
            }
            None => Err(self.too_short(len, what)),
        }
    }

    /// Text of up to 31 bytes, as most texts of events are. None, and nothing is read, if the next value is no such text.
    fn short_text(&mut self) -> Option<&'a [u8]> {
        let (&marker, rest) = self.raw.get(self.at..)?.split_first()?;
        if marker >> 5 != 0b101 {
            return None;
        }
        let text = rest.get(..usize::from(marker & 0x1f))?;
        self.at += 1 + text.len();
        Some(text)
    }

    /// The name of a field. Whether one that nobody knows is UTF-8 has yet to be looked at.
    pub(super) fn name(&mut self) -> Read<&'a [u8]> {
        if let Some(name) = self.short_text() {
            return Ok(name);
        }
        self.text("a field's name").map(str::as_bytes)
    }

    #[inline]
    fn marker(&mut self, what: &str) -> Read<Marker> {
        match self.raw.get(self.at) {
            Some(&marker) => {
                self.at += 1;
                Ok(Marker::from_u8(marker))
            }
            None => Err(self.too_short(1, what)),
        }
    }

    fn number<const N: usize>(&mut self, what: &str) -> Read<u64> {
        let mut digits = [0; 8];
        digits[8 - N..].copy_from_slice(self.take(N, what)?);
        Ok(u64::from_be_bytes(digits))
    }

    /// A length; every element takes a byte or more.
    fn len<const N: usize>(&mut self, each: u64, what: &str) -> Read<usize> {
        let len = self.number::<N>(what)?;
        self.fitting(len, each, what)
    }

    #[inline]
    fn fitting(&self, len: u64, each: u64, what: &str) -> Read<usize> {
        match usize::try_from(len) {
            Ok(fitting) if len.saturating_mul(each) <= self.left() as u64 => Ok(fitting),
            _ => Err(self.too_many(len, what)),
        }
    }

    #[cold]
    fn too_many(&self, len: u64, what: &str) -> EventError {
        self.wrong(format!(
            "{what} announces {len} elements, {} bytes are left",
            self.left()
        ))
    }

    pub(super) fn nil(&mut self) -> bool {
        let is_nil = self.raw.get(self.at) == Some(&0xc0);
        self.at += usize::from(is_nil);
        is_nil
    }

    pub(super) fn array(&mut self, what: &str) -> Read<usize> {
        match self.marker(what)? {
            Marker::FixArray(len) => self.fitting(len.into(), 1, what),
            Marker::Array16 => self.len::<2>(1, what),
            Marker::Array32 => self.len::<4>(1, what),
            other => Err(self.unexpected(what, other)),
        }
    }

    /// The number of entries of a map, or of elements of an array.
    pub(super) fn fields(&mut self, what: &str) -> Read<EventForm> {
        match self.marker(what)? {
            Marker::FixMap(len) => Ok(EventForm::Map(self.fitting(len.into(), 2, what)?)),
            Marker::Map16 => Ok(EventForm::Map(self.len::<2>(2, what)?)),
            Marker::Map32 => Ok(EventForm::Map(self.len::<4>(2, what)?)),
            Marker::FixArray(len) => Ok(EventForm::Array(self.fitting(len.into(), 1, what)?)),
            Marker::Array16 => Ok(EventForm::Array(self.len::<2>(1, what)?)),
            Marker::Array32 => Ok(EventForm::Array(self.len::<4>(1, what)?)),
            other => Err(self.unexpected(what, other)),
        }
    }

    /// Text or bytes, whichever it is.
    fn bytes_of(&mut self, marker: Marker, what: &str) -> Read<&'a [u8]> {
        let len = match marker {
            Marker::FixStr(len) => len.into(),
            Marker::Str8 | Marker::Bin8 => self.len::<1>(1, what)?,
            Marker::Str16 | Marker::Bin16 => self.len::<2>(1, what)?,
            Marker::Str32 | Marker::Bin32 => self.len::<4>(1, what)?,
            other => return Err(self.unexpected(what, other)),
        };
        self.take(len, what)
    }

    pub(super) fn text(&mut self, what: &str) -> Read<&'a str> {
        let bytes = if let Some(bytes) = self.short_text() {
            bytes
        } else {
            let marker = self.marker(what)?;
            self.bytes_of(marker, what)?
        };
        std::str::from_utf8(bytes).map_err(|_| self.no_text(what))
    }

    #[cold]
    fn no_text(&self, what: &str) -> EventError {
        self.wrong(format!("{what} is not UTF-8"))
    }

    pub(super) fn optional_text(&mut self, what: &str) -> Read<Option<&'a str>> {
        if self.nil() {
            return Ok(None);
        }
        self.text(what).map(Some)
    }

    /// Text, if the next value is text; else nothing is read.
    pub(super) fn text_if(&mut self) -> Read<Option<&'a str>> {
        match self.raw.get(self.at).map(|&byte| Marker::from_u8(byte)) {
            Some(Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32) => {
                self.text("text").map(Some)
            }
            _ => Ok(None),
        }
    }

    /// An integer. A negative one has the bits of its two's complement.
    fn int_of(&mut self, marker: Marker, what: &str) -> Read<(u64, bool)> {
        let signed = |number: i64| (number.cast_unsigned(), number < 0);
        Ok(match marker {
            Marker::FixPos(number) => (number.into(), false),
            Marker::FixNeg(number) => signed(number.into()),
            Marker::U8 => (self.number::<1>(what)?, false),
            Marker::U16 => (self.number::<2>(what)?, false),
            Marker::U32 => (self.number::<4>(what)?, false),
            Marker::U64 => (self.number::<8>(what)?, false),
            Marker::I8 => signed(i8::from_be_bytes([self.take(1, what)?[0]]).into()),
            Marker::I16 => signed((self.number::<2>(what)? << 48).cast_signed() >> 48),
            Marker::I32 => signed((self.number::<4>(what)? << 32).cast_signed() >> 32),
            Marker::I64 => signed(self.number::<8>(what)?.cast_signed()),
            other => return Err(self.unexpected(what, other)),
        })
    }

    pub(super) fn uint(&mut self, what: &str) -> Read<u64> {
        let marker = self.marker(what)?;
        match self.int_of(marker, what)? {
            (number, false) => Ok(number),
            (number, true) => Err(self.wrong(format!("{what} is {}", number.cast_signed()))),
        }
    }

    pub(super) fn optional_uint(&mut self, what: &str) -> Read<Option<u64>> {
        if self.nil() {
            return Ok(None);
        }
        self.uint(what).map(Some)
    }

    pub(super) fn hash(&mut self, what: &str) -> Read<RawHash<'a>> {
        // Nearly all hashes are as long as they can be.
        if let Some(&[0xcf, ref digits @ ..]) = self.raw.get(self.at..)
            && let Some(digits) = digits.first_chunk()
        {
            self.at += 9;
            return Ok(RawHash::Int(u64::from_be_bytes(*digits)));
        }
        let marker = self.marker(what)?;
        match marker {
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => {
                Ok(RawHash::Bytes(self.bytes_of(marker, what)?))
            }
            marker => Ok(RawHash::Int(self.int_of(marker, what)?.0)),
        }
    }

    /// Reads the token ids of a block of so many, and adds them. Of those beyond 32 bits the low half is added, and they go
    /// to `wide` as they are, with their places. `lens` are those of all ids of the event.
    pub(super) fn block(
        &mut self,
        size: usize,
        keys: &Keys,
        lens: &mut LensOfIds,
        wide: &mut Vec<(usize, u64)>,
    ) -> Read<Sums> {
        let mut sums = keys.sums();
        let factors = keys.factors().chunks(EIGHT);
        for (first, factors) in (0..size).step_by(EIGHT).zip(factors) {
            if let Ok(factors) = factors.try_into()
                && let Some(start) = self.at.checked_sub(DIGITS)
                && let Some(window) = self.raw.get(start..).and_then(<[u8]>::first_chunk)
                && let Some(lens) = lens.at(self.raw, self.at)
                && let Some((len, more)) = eight_ids(window, lens, factors, sums)
            {
                self.at += len;
                sums = more;
                continue;
            }
            for (place, &factors) in (first..).zip(factors) {
                sums.add(self.token(place, wide)?, factors);
            }
        }
        Ok(sums)
    }

    /// Reads so many token ids that are no whole block.
    pub(super) fn rest(&mut self, count: usize) -> Read<()> {
        (0..count).try_for_each(|_| self.uint("a token id").map(drop))
    }

    #[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
    fn token(&mut self, at: usize, wide: &mut Vec<(usize, u64)>) -> Read<u32> {
        let token = self.uint("a token id")?;
        if token >= 1 << 32 {
            wide.push((at, token));
        }
        Ok(token as u32)
    }

    /// Skips one value, however deep it is.
    pub(super) fn skip(&mut self) -> Read<Range<usize>> {
        let start = self.at;
        let what = "a value";
        let mut left = 1_u64;
        while left > 0 {
            left -= 1;
            let marker = self.marker(what)?;
            let (bytes, inside) = match marker {
                Marker::FixPos(_)
                | Marker::FixNeg(_)
                | Marker::Null
                | Marker::True
                | Marker::False => (0, 0),
                Marker::U8 | Marker::I8 => (1, 0),
                Marker::U16 | Marker::I16 | Marker::FixExt1 => (2, 0),
                Marker::U32 | Marker::I32 | Marker::F32 => (4, 0),
                Marker::U64 | Marker::I64 | Marker::F64 => (8, 0),
                Marker::FixExt2 => (3, 0),
                Marker::FixExt4 => (5, 0),
                Marker::FixExt8 => (9, 0),
                Marker::FixExt16 => (17, 0),
                Marker::Ext8 => (self.len::<1>(1, what)? + 1, 0),
                Marker::Ext16 => (self.len::<2>(1, what)? + 1, 0),
                Marker::Ext32 => (self.len::<4>(1, what)? + 1, 0),
                Marker::FixStr(len) => (len.into(), 0),
                Marker::Str8 | Marker::Bin8 => (self.len::<1>(1, what)?, 0),
                Marker::Str16 | Marker::Bin16 => (self.len::<2>(1, what)?, 0),
                Marker::Str32 | Marker::Bin32 => (self.len::<4>(1, what)?, 0),
                Marker::FixArray(len) => (0, u64::from(len)),
                Marker::Array16 => (0, self.len::<2>(1, what)? as u64),
                Marker::Array32 => (0, self.len::<4>(1, what)? as u64),
                Marker::FixMap(len) => (0, 2 * u64::from(len)),
                Marker::Map16 => (0, 2 * self.len::<2>(2, what)? as u64),
                Marker::Map32 => (0, 2 * self.len::<4>(2, what)? as u64),
                Marker::Reserved => return Err(self.unexpected(what, marker)),
            };
            self.take(bytes, what)?;
            left += inside;
        }
        Ok(start..self.at)
    }
}

/// Number of token ids that are read at once, and of digits of the longest.
const EIGHT: usize = 8;
const DIGITS: usize = 4;

/// Bytes at which one of eight ids may begin, and a few more.
const PLACES: usize = 64;

/// Bytes of a window: the digits before the first id, and its places with the digits of one that ends there.
const WINDOW: usize = DIGITS + PLACES + DIGITS;

/// Bytes whose lengths are computed at once: the ids of eight blocks of 16, as most events have. Tests pass several.
const STRETCH: usize = if cfg!(test) {
    2 * PLACES
} else {
    EIGHT * 16 * (1 + DIGITS) + PLACES
};

/// How long an id is that begins with a byte, for a stretch of bytes.
///
/// Each id says where the next one begins. To find that out byte by byte takes longer than to add an id, and a processor
/// would guess wrong at many ids of a large vocabulary. So the lengths are computed for all bytes first, whatever they are,
/// many bytes at once and without a branch; reading an id waits for one of them.
#[derive(Debug)]
pub(super) struct LensOfIds {
    of: [u8; STRETCH],
    /// Where the stretch begins, and how long it is.
    start: usize,
    len: usize,
    /// Where no stretch of these ids goes on.
    end: usize,
}

impl LensOfIds {
    /// Of so many ids that begin at a byte.
    pub(super) fn new(at: usize, count: usize) -> Self {
        Self {
            of: [0; STRETCH],
            start: at,
            len: 0,
            end: at.saturating_add(count.saturating_mul(1 + DIGITS).saturating_add(PLACES)),
        }
    }

    /// The lengths from a byte on; none near the end of the bytes.
    fn at(&mut self, raw: &[u8], at: usize) -> Option<&[u8; PLACES]> {
        let known = at.checked_sub(self.start);
        if known.is_none_or(|known| known + PLACES > self.len) {
            let bytes = raw.get(at..raw.len().min(self.end))?;
            let bytes = &bytes[..bytes.len().min(STRETCH)];
            for (len, &byte) in self.of.iter_mut().zip(bytes) {
                // After cc, cd and ce there are 1, 2 and 4 digits. What is no id has some length.
                let digits = u8::from(byte == 0xcc)
                    + 2 * u8::from(byte == 0xcd)
                    + 4 * u8::from(byte == 0xce);
                *len = 1 + digits;
            }
            (self.start, self.len) = (at, bytes.len());
        }
        self.of[at - self.start..self.len].first_chunk()
    }
}

/// By the first byte of a number below 2³²: the bits of its last four bytes that are its own, which are those of this
/// byte if it is the number. None for all other bytes.
const OWN_BITS: [u32; 256] = {
    let mut bits = [0; 256];
    let mut number = 0;
    while number < 0x80 {
        bits[number] = 0x7f;
        number += 1;
    }
    bits[0xcc] = 0xff;
    bits[0xcd] = 0xffff;
    bits[0xce] = 0xffff_ffff;
    bits
};

/// Adds eight ids below 2³² from a window that begins `DIGITS` bytes before them to the sums of those before, and returns
/// how many bytes they take; none if there is another value among them, which is noticed at the end.
#[inline]
fn eight_ids(
    window: &[u8; WINDOW],
    lens: &[u8; PLACES],
    factors: &[Factors; EIGHT],
    mut sums: Sums,
) -> Option<(usize, Sums)> {
    let (mut at, mut all_bits) = (0, u32::MAX);
    for &factors in factors {
        // Eight ids have fewer bytes than there are places.
        let bits = OWN_BITS[usize::from(window[DIGITS + at])];
        at = (at + usize::from(lens[at])) % PLACES;
        let last = [window[at], window[at + 1], window[at + 2], window[at + 3]];
        sums.add(u32::from_be_bytes(last) & bits, factors);
        all_bits &= bits;
    }
    (all_bits != 0).then_some((at, sums))
}

/// How an event is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventForm {
    /// So many names with values.
    Map(usize),
    /// So many values, the event's name first.
    Array(usize),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rmp::encode::{ByteBuf, write_u8, write_u16, write_u32, write_u64, write_uint};

    use super::*;

    proptest! {
        #[test]
        fn token_ids_are_read_in_every_encoding(
            ids in proptest::collection::vec((any::<u32>(), 0_u32..32, 0_u8..20), 0..200),
            (size, claimed, after) in (1_usize..40, 0_usize..200, 0_usize..80),
        ) {
            let mut raw = ByteBuf::new();
            let mut expected = Vec::new();
            for (id, shift, encoding) in ids {
                let mut id = id >> shift;
                // The shortest that holds it, or a longer one.
                match encoding {
                    1 => {
                        id &= 0xff;
                        write_u8(&mut raw, u8::try_from(id).unwrap()).unwrap();
                    }
                    2 => {
                        id &= 0xffff;
                        write_u16(&mut raw, u16::try_from(id).unwrap()).unwrap();
                    }
                    3 => write_u32(&mut raw, id).unwrap(),
                    4 => write_u64(&mut raw, id.into()).unwrap(),
                    _ => {
                        write_uint(&mut raw, id.into()).unwrap();
                    }
                }
                expected.push(id);
            }
            let mut raw = raw.into_vec();
            let end = raw.len();
            raw.resize(end + after, 0xcd);
            let keys = Keys::new(b"0123456789abcdef", size).unwrap();
            let read = |raw: &[u8]| {
                let mut cursor = EventCursor::new(raw);
                // Nobody depends on how many there are said to be.
                let mut lens = LensOfIds::new(0, claimed);
                let mut found = Vec::new();
                for _ in 0..expected.len() / size {
                    let sums = cursor.block(size, &keys, &mut lens, &mut Vec::new())?;
                    found.push(sums.contents());
                }
                cursor.rest(expected.len() % size)?;
                Ok::<_, EventError>((found, cursor.at()))
            };
            let contents = expected.chunks_exact(size).map(|ids| keys.contents(ids)).collect();
            prop_assert_eq!(read(&raw).unwrap(), (contents, end));
            let mut cursor = EventCursor::new(&raw);
            cursor.rest(expected.len()).unwrap();
            prop_assert_eq!(cursor.at(), end);
            // The last one is cut short.
            if let (true, Some(cut)) = (after == 0, end.checked_sub(1)) {
                prop_assert!(read(&raw[..cut]).is_err());
                prop_assert!(EventCursor::new(&raw[..cut]).rest(expected.len()).is_err());
            }
        }
    }
}
