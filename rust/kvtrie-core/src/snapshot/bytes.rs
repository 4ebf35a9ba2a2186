//! Reads and writes numbers, names and lists. Reading checks every length against the remaining bytes.

use std::fmt::Display;

use crate::error::{Error, Result};

#[derive(Debug, Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.raw(&value.to_le_bytes());
    }

    pub(super) fn len(&mut self, value: usize) {
        self.u64(value as u64);
    }

    pub(super) fn text(&mut self, text: &str) {
        self.len(text.len());
        self.raw(text.as_bytes());
    }

    pub(super) fn u32s(&mut self, values: &[u32]) {
        if cfg!(target_endian = "little") {
            self.raw(bytemuck::cast_slice(values));
        } else {
            self.bytes
                .extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
    }

    pub(super) fn end(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn patch<const N: usize>(&mut self, at: usize, value: [u8; N]) {
        self.bytes[at..at + N].copy_from_slice(&value);
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

#[derive(Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The section that messages name.
    section: &'static str,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8], section: &'static str) -> Self {
        Self {
            bytes,
            at: 0,
            section,
        }
    }

    pub(super) fn wrong(&self, what: impl Display) -> Error {
        Error::snapshot(format_args!(
            "{what} (section {}, byte {})",
            self.section, self.at
        ))
    }

    pub(super) fn must<D: Display>(&self, condition: bool, what: impl FnOnce() -> D) -> Result<()> {
        if condition {
            Ok(())
        } else {
            Err(self.wrong(what()))
        }
    }

    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(super) fn raw(&mut self, len: usize) -> Result<&'a [u8]> {
        self.must(len <= self.left(), || {
            format!("{len} bytes announced, {} left", self.left())
        })?;
        let raw = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(raw)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.raw(N)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(super) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn size(&mut self) -> Result<usize> {
        let size = self.u64()?;
        usize::try_from(size)
            .map_err(|_| self.wrong(format_args!("{size} is more than an address")))
    }

    /// Reads a count of entries that take at least `bytes` bytes each.
    pub(super) fn count(&mut self, bytes: usize) -> Result<usize> {
        let count = self.size()?;
        self.must(count <= self.left() / bytes, || {
            format!(
                "{count} entries of {bytes} bytes or more announced, {} bytes left",
                self.left()
            )
        })?;
        Ok(count)
    }

    pub(super) fn text(&mut self) -> Result<String> {
        let len = self.count(1)?;
        let raw = self.raw(len)?;
        let text = std::str::from_utf8(raw);
        Ok(text
            .map_err(|_| self.wrong("a name is not UTF-8"))?
            .to_owned())
    }

    pub(super) fn u32s(&mut self, count: usize) -> Result<Vec<u32>> {
        let bytes = count.checked_mul(size_of::<u32>());
        let raw = self.raw(bytes.unwrap_or(usize::MAX))?;
        let numbers = raw.chunks_exact(size_of::<u32>());
        Ok(numbers
            .map(|raw| u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]))
            .collect())
    }

    pub(super) fn finish(&self) -> Result<()> {
        self.must(self.left() == 0, || {
            format!("{} bytes too many", self.left())
        })
    }
}
