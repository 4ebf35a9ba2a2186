//! Small numbers from fuzzer input.

/// Reads choices from a byte string; past its end every choice is 0.
pub struct Bytes<'a> {
    data: &'a [u8],
}

impl<'a> Bytes<'a> {
    /// Reads from `data`.
    pub fn new(data: &'a [u8]) -> Self {
        Self { data }
    }

    /// Whether all was read.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// A number below `limit`, or 0 where the limit is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        let Some((&byte, rest)) = self.data.split_first() else {
            return 0;
        };
        self.data = rest;
        usize::from(byte) % limit.max(1)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    /// Any byte.
    pub fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap_or(u8::MAX)
    }

    /// An index into `len` bytes, or 0 where there are none.
    pub fn place(&mut self, len: usize) -> usize {
        (self.below(256) << 8 | self.below(256)) % len.max(1)
    }

    /// Cuts a piece of less than `most` bytes out of `raw`.
    pub fn cut(&mut self, raw: &mut Vec<u8>, at: usize, most: usize) {
        let end = (at + self.below(most)).min(raw.len());
        raw.drain(at..end);
    }

    /// Doubles a piece of less than `most` bytes of `raw`.
    pub fn double(&mut self, raw: &mut Vec<u8>, at: usize, most: usize) {
        let end = (at + self.below(most)).min(raw.len());
        let piece = raw[at..end].to_vec();
        raw.splice(at..at, piece);
    }

    /// Changes one place of `raw`, which is `MessagePack`: cuts a piece out, doubles one, writes a length that is a lie,
    /// or another byte.
    pub fn disturb(&mut self, raw: &mut Vec<u8>) {
        let at = self.place(raw.len());
        match self.below(4) {
            0 => self.cut(raw, at, 80),
            1 => self.double(raw, at, 80),
            2 => {
                let marker = [0xdd, 0xc6, 0xdb, 0xce][self.below(4)];
                raw.splice(at..at + 1, [marker, 0xff, 0xff, 0xff, 0xff]);
            }
            _ => raw[at] = self.byte(),
        }
    }
}

/// Random inputs of up to 39 bytes, the same in every run.
#[cfg(test)]
pub(crate) fn random_inputs() -> impl Iterator<Item = Vec<u8>> {
    let mut state = 1_u64;
    let mut next = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..4_000).map(move |len| (0..len % 40).map(|_| next()).collect())
}
