//! Reads and writes `MessagePack` values, only in their shortest form.

use std::ops::Range;

use rmp::Marker;
use rmp::encode::ByteBuf;

use crate::error::{Refusal, TransferError, refused};

pub(super) type Read<T> = Result<T, TransferError>;

pub(super) const READ: &str = "TransferManifest::from_bytes";

/// A range of the bytes, of which there are fewer than 2³².
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ByteRange {
    at: u32,
    len: u32,
}

impl ByteRange {
    pub(super) fn new(range: &Range<usize>) -> Self {
        Self {
            at: short(range.start),
            len: short(range.len()),
        }
    }

    pub(super) fn of(self, raw: &[u8]) -> &[u8] {
        let at = self.at as usize;
        &raw[at..at + self.len as usize]
    }

    pub(super) fn text(self, raw: &[u8]) -> &str {
        // The reader checked that it is UTF-8.
        std::str::from_utf8(self.of(raw)).unwrap_or_default()
    }
}

/// Reads values from the front of the bytes. Values nest only as deep as the caller asks for.
#[derive(Debug)]
pub(super) struct ByteReader<'a> {
    raw: &'a [u8],
    at: usize,
}

impl<'a> ByteReader<'a> {
    pub(super) fn new(raw: &'a [u8]) -> Self {
        Self { raw, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> usize {
        self.raw.len() - self.at
    }

    pub(super) fn wrong(&self, message: impl AsRef<str>) -> TransferError {
        refused(
            Refusal::Malformed,
            READ,
            format!("byte {}: {}", self.at, message.as_ref()),
        )
    }

    fn take(&mut self, len: usize, what: &str) -> Read<Range<usize>> {
        if len > self.left() {
            return Err(self.wrong(format!(
                "{what} takes {len} bytes, {} are left",
                self.left()
            )));
        }
        let range = self.at..self.at + len;
        self.at = range.end;
        Ok(range)
    }

    fn marker(&mut self, what: &str) -> Read<Marker> {
        let range = self.take(1, what)?;
        Ok(Marker::from_u8(self.raw[range.start]))
    }

    fn number(&mut self, bytes: usize, least: u64, what: &str) -> Read<u64> {
        let range = self.take(bytes, what)?;
        let digits = self.raw[range].iter();
        let number = digits.fold(0, |number, &digit| number << 8 | u64::from(digit));
        if number < least {
            return Err(self.wrong(format!("{what} {number} is not in its shortest form")));
        }
        Ok(number)
    }

    fn unexpected(&self, what: &str, marker: Marker) -> TransferError {
        self.wrong(format!("{what} is encoded as {marker:?}"))
    }

    pub(super) fn uint(&mut self, what: &str) -> Read<u64> {
        match self.marker(what)? {
            Marker::FixPos(number) => Ok(number.into()),
            Marker::U8 => self.number(1, 1 << 7, what),
            Marker::U16 => self.number(2, 1 << 8, what),
            Marker::U32 => self.number(4, 1 << 16, what),
            Marker::U64 => self.number(8, 1 << 32, what),
            other => Err(self.unexpected(what, other)),
        }
    }

    pub(super) fn array(&mut self, what: &str) -> Read<u64> {
        match self.marker(what)? {
            Marker::FixArray(len) => Ok(len.into()),
            Marker::Array16 => self.number(2, 1 << 4, what),
            Marker::Array32 => self.number(4, 1 << 16, what),
            other => Err(self.unexpected(what, other)),
        }
    }

    pub(super) fn array_of(&mut self, len: u64, what: &str) -> Read<()> {
        let found = self.array(what)?;
        if found == len {
            return Ok(());
        }
        Err(self.wrong(format!("{what} has {found} entries; it must have {len}")))
    }

    pub(super) fn bin(&mut self, what: &str) -> Read<Range<usize>> {
        let len = match self.marker(what)? {
            Marker::Bin8 => self.number(1, 0, what)?,
            Marker::Bin16 => self.number(2, 1 << 8, what)?,
            Marker::Bin32 => self.number(4, 1 << 16, what)?,
            other => return Err(self.unexpected(what, other)),
        };
        self.take(usize::try_from(len).unwrap_or(usize::MAX), what)
    }

    pub(super) fn bin_of(&mut self, len: usize, what: &str) -> Read<Range<usize>> {
        let range = self.bin(what)?;
        if range.len() == len {
            return Ok(range);
        }
        Err(self.wrong(format!(
            "{what} has {} bytes; it must have {len}",
            range.len()
        )))
    }

    pub(super) fn text(&mut self, what: &str) -> Read<Range<usize>> {
        let len = match self.marker(what)? {
            Marker::FixStr(len) => len.into(),
            Marker::Str8 => self.number(1, 1 << 5, what)?,
            Marker::Str16 => self.number(2, 1 << 8, what)?,
            Marker::Str32 => self.number(4, 1 << 16, what)?,
            other => return Err(self.unexpected(what, other)),
        };
        let range = self.take(usize::try_from(len).unwrap_or(usize::MAX), what)?;
        if std::str::from_utf8(&self.raw[range.clone()]).is_err() {
            return Err(self.wrong(format!("{what} is not UTF-8")));
        }
        if range.is_empty() {
            return Err(self.wrong(format!("{what} is empty")));
        }
        Ok(range)
    }

    /// A share from 0 to 1, without a sign.
    pub(super) fn share(&mut self, what: &str) -> Read<f64> {
        match self.marker(what)? {
            Marker::F64 => {}
            other => return Err(self.unexpected(what, other)),
        }
        let share = f64::from_bits(self.number(8, 0, what)?);
        if share.is_sign_positive() && (0.0..=1.0).contains(&share) {
            return Ok(share);
        }
        Err(self.wrong(format!("{what} is {share}; it must be in [0, 1]")))
    }

    /// A text that was read.
    pub(super) fn shown(&self, text: &Range<usize>) -> &'a str {
        std::str::from_utf8(&self.raw[text.clone()]).unwrap_or_default()
    }

    pub(super) fn nil(&mut self) -> bool {
        let is_nil = self.raw.get(self.at).copied().map(Marker::from_u8) == Some(Marker::Null);
        self.at += usize::from(is_nil);
        is_nil
    }
}

/// Writes values in their shortest form. Lengths are below 2³².
#[derive(Debug, Default)]
pub(super) struct ByteWriter(ByteBuf);

impl ByteWriter {
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self(ByteBuf::with_capacity(bytes))
    }

    pub(super) fn array(&mut self, len: usize) {
        let Ok(_) = rmp::encode::write_array_len(&mut self.0, short(len));
    }

    pub(super) fn uint(&mut self, number: usize) {
        let Ok(_) = rmp::encode::write_uint(&mut self.0, number as u64);
    }

    pub(super) fn text(&mut self, text: &str) {
        let Ok(()) = rmp::encode::write_str(&mut self.0, text);
    }

    pub(super) fn nil(&mut self) {
        let Ok(()) = rmp::encode::write_nil(&mut self.0);
    }

    pub(super) fn share(&mut self, share: f64) {
        let Ok(()) = rmp::encode::write_f64(&mut self.0, share.abs());
    }

    pub(super) fn optional(&mut self, number: Option<usize>) {
        match number {
            Some(number) => self.uint(number),
            None => self.nil(),
        }
    }

    pub(super) fn bin(&mut self, bytes: &[u8]) {
        let Ok(()) = rmp::encode::write_bin(&mut self.0, bytes);
    }

    pub(super) fn bin_of<const N: usize>(
        &mut self,
        len: usize,
        pieces: impl Iterator<Item = [u8; N]>,
    ) {
        let Ok(_) = rmp::encode::write_bin_len(&mut self.0, short(len));
        self.0.as_mut_vec().extend(pieces.flatten());
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0.into_vec()
    }
}

/// Converts a number below 2³², as all positions and lengths of a manifest are.
pub(super) fn short(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_any_longer_form_is_refused() {
        for number in [
            0,
            1,
            127,
            128,
            255,
            256,
            65_535,
            65_536,
            0xffff_ffff,
            1 << 32,
            usize::MAX,
        ] {
            let mut out = ByteWriter::default();
            out.uint(number);
            let raw = out.into_bytes();
            let mut cursor = ByteReader::new(&raw);
            assert_eq!(cursor.uint("n").unwrap(), number as u64);
            assert_eq!(cursor.left(), 0);
            for (marker, bytes) in [(0xcc, 1), (0xcd, 2), (0xce, 4), (0xcf, 8)] {
                let mut long = vec![marker];
                long.extend(&(number as u64).to_be_bytes()[8 - bytes..]);
                if long.len() > raw.len() {
                    assert!(
                        ByteReader::new(&long).uint("n").is_err(),
                        "{number} as {long:?}"
                    );
                }
            }
        }
        // These are 5 and 300 as signed numbers, true, and a float.
        for raw in [
            &[0xd0, 5][..],
            &[0xd1, 1, 44],
            &[0xc3],
            &[0xca, 0, 0, 0, 0],
            &[],
        ] {
            assert!(ByteReader::new(raw).uint("n").is_err());
        }
    }

    #[test]
    fn lengths_beyond_the_end_are_refused() {
        for raw in [
            &[0xc6, 0xff, 0xff, 0xff, 0xff][..],
            &[0xc4, 2, 1],
            &[0xc5, 0, 1, 7],
        ] {
            assert!(ByteReader::new(raw).bin("b").is_err());
        }
        for raw in [&[0xa2, 0x61][..], &[0xa1, 0xff], &[0xa0], &[0xd9, 1, 0x61]] {
            assert!(ByteReader::new(raw).text("t").is_err());
        }
        for raw in [&[0xdc, 0, 15][..], &[0xdd, 0, 0, 0xff, 0xff], &[0x81]] {
            assert!(ByteReader::new(raw).array("a").is_err());
        }
    }
}
