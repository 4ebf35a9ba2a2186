//! Reads `MessagePack` values from untrusted bytes, front to back, without recursion.

use std::ops::Range;

use rmp::Marker;

use crate::error::{EventError, EventRefusal};

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

    fn take(&mut self, len: usize, what: &str) -> Read<&'a [u8]> {
        if len > self.left() {
            return Err(self.wrong(format!(
                "{what} takes {len} bytes, {} are left",
                self.left()
            )));
        }
        let taken = &self.raw[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    fn marker(&mut self, what: &str) -> Read<Marker> {
        Ok(Marker::from_u8(self.take(1, what)?[0]))
    }

    fn number(&mut self, bytes: usize, what: &str) -> Read<u64> {
        let digits = self.take(bytes, what)?.iter();
        Ok(digits.fold(0, |number, &digit| number << 8 | u64::from(digit)))
    }

    /// A length; every element takes a byte or more.
    fn len(&mut self, bytes: usize, each: u64, what: &str) -> Read<usize> {
        let len = self.number(bytes, what)?;
        self.fitting(len, each, what)
    }

    fn fitting(&self, len: u64, each: u64, what: &str) -> Read<usize> {
        match usize::try_from(len) {
            Ok(fitting) if len.saturating_mul(each) <= self.left() as u64 => Ok(fitting),
            _ => Err(self.wrong(format!(
                "{what} announces {len} elements, {} bytes are left",
                self.left()
            ))),
        }
    }

    pub(super) fn nil(&mut self) -> bool {
        let is_nil = self.raw.get(self.at) == Some(&0xc0);
        self.at += usize::from(is_nil);
        is_nil
    }

    pub(super) fn array(&mut self, what: &str) -> Read<usize> {
        match self.marker(what)? {
            Marker::FixArray(len) => self.fitting(len.into(), 1, what),
            Marker::Array16 => self.len(2, 1, what),
            Marker::Array32 => self.len(4, 1, what),
            other => Err(self.unexpected(what, other)),
        }
    }

    /// The number of entries of a map, or of elements of an array.
    pub(super) fn fields(&mut self, what: &str) -> Read<EventForm> {
        match self.marker(what)? {
            Marker::FixMap(len) => Ok(EventForm::Map(self.fitting(len.into(), 2, what)?)),
            Marker::Map16 => Ok(EventForm::Map(self.len(2, 2, what)?)),
            Marker::Map32 => Ok(EventForm::Map(self.len(4, 2, what)?)),
            Marker::FixArray(len) => Ok(EventForm::Array(self.fitting(len.into(), 1, what)?)),
            Marker::Array16 => Ok(EventForm::Array(self.len(2, 1, what)?)),
            Marker::Array32 => Ok(EventForm::Array(self.len(4, 1, what)?)),
            other => Err(self.unexpected(what, other)),
        }
    }

    /// Text or bytes, whichever it is.
    fn bytes_of(&mut self, marker: Marker, what: &str) -> Read<&'a [u8]> {
        let len = match marker {
            Marker::FixStr(len) => len.into(),
            Marker::Str8 | Marker::Bin8 => self.len(1, 1, what)?,
            Marker::Str16 | Marker::Bin16 => self.len(2, 1, what)?,
            Marker::Str32 | Marker::Bin32 => self.len(4, 1, what)?,
            other => return Err(self.unexpected(what, other)),
        };
        self.take(len, what)
    }

    pub(super) fn text(&mut self, what: &str) -> Read<&'a str> {
        let marker = self.marker(what)?;
        let bytes = self.bytes_of(marker, what)?;
        std::str::from_utf8(bytes).map_err(|_| self.wrong(format!("{what} is not UTF-8")))
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
            Marker::U8 => (self.number(1, what)?, false),
            Marker::U16 => (self.number(2, what)?, false),
            Marker::U32 => (self.number(4, what)?, false),
            Marker::U64 => (self.number(8, what)?, false),
            Marker::I8 => signed(i8::from_be_bytes([self.take(1, what)?[0]]).into()),
            Marker::I16 => signed((self.number(2, what)? << 48).cast_signed() >> 48),
            Marker::I32 => signed((self.number(4, what)? << 32).cast_signed() >> 32),
            Marker::I64 => signed(self.number(8, what)?.cast_signed()),
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
        let marker = self.marker(what)?;
        match marker {
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => {
                Ok(RawHash::Bytes(self.bytes_of(marker, what)?))
            }
            marker => Ok(RawHash::Int(self.int_of(marker, what)?.0)),
        }
    }

    /// Appends the token ids of an array.
    pub(super) fn tokens(&mut self, into: &mut Vec<u32>) -> Read<()> {
        let what = "token_ids";
        let count = self.array(what)?;
        into.reserve(count);
        for _ in 0..count {
            let rest = &self.raw[self.at..];
            // The four encodings that writers use for ids.
            let (token, len) = match *rest {
                [byte @ 0..=0x7f, ..] => (u32::from(byte), 1),
                [0xcd, a, b, ..] => (u32::from(u16::from_be_bytes([a, b])), 3),
                [0xce, a, b, c, d, ..] => (u32::from_be_bytes([a, b, c, d]), 5),
                [0xcc, byte, ..] => (u32::from(byte), 2),
                _ => {
                    let token = self.uint("a token id")?;
                    let token = u32::try_from(token).map_err(|_| {
                        self.wrong(format!(
                            "a token id is {token}; it must be in [0, {})",
                            1_u64 << 32
                        ))
                    })?;
                    (token, 0)
                }
            };
            self.at += len;
            into.push(token);
        }
        Ok(())
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
                Marker::Ext8 => (self.len(1, 1, what)? + 1, 0),
                Marker::Ext16 => (self.len(2, 1, what)? + 1, 0),
                Marker::Ext32 => (self.len(4, 1, what)? + 1, 0),
                Marker::FixStr(len) => (len.into(), 0),
                Marker::Str8 | Marker::Bin8 => (self.len(1, 1, what)?, 0),
                Marker::Str16 | Marker::Bin16 => (self.len(2, 1, what)?, 0),
                Marker::Str32 | Marker::Bin32 => (self.len(4, 1, what)?, 0),
                Marker::FixArray(len) => (0, u64::from(len)),
                Marker::Array16 => (0, self.len(2, 1, what)? as u64),
                Marker::Array32 => (0, self.len(4, 1, what)? as u64),
                Marker::FixMap(len) => (0, 2 * u64::from(len)),
                Marker::Map16 => (0, 2 * self.len(2, 2, what)? as u64),
                Marker::Map32 => (0, 2 * self.len(4, 2, what)? as u64),
                Marker::Reserved => return Err(self.unexpected(what, marker)),
            };
            self.take(bytes, what)?;
            left += inside;
        }
        Ok(start..self.at)
    }
}

/// How an event is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventForm {
    /// So many names with values.
    Map(usize),
    /// So many values, the event's name first.
    Array(usize),
}
