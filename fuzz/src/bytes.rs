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
}
