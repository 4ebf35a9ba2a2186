//! A vector in pages: it grows without moving values, and the only slack is the unused part of the last page.

use std::ops::{Index, IndexMut};

const PAGE: usize = 512;

#[derive(Debug)]
pub(crate) struct Paged<T> {
    pages: Vec<Box<[T; PAGE]>>,
    len: usize,
}

impl<T> Default for Paged<T> {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            len: 0,
        }
    }
}

impl<T: Copy> Paged<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn push(&mut self, value: T) {
        if self.len == self.pages.len() * PAGE {
            self.pages.push(Box::new([value; PAGE]));
        }
        self.len += 1;
        let last = self.len - 1;
        self[last] = value;
    }

    /// Removes the value at `at`, and moves the last value there.
    ///
    /// # Panics
    /// If `at` is not below the length.
    pub(crate) fn swap_remove(&mut self, at: usize) -> T {
        let value = self[at];
        self[at] = self[self.len - 1];
        self.len -= 1;
        // One spare page is kept, so that a length that goes up and down does not allocate.
        self.pages.truncate(self.len.div_ceil(PAGE) + 1);
        value
    }

    pub(crate) fn swap(&mut self, a: usize, b: usize) {
        (self[a], self[b]) = (self[b], self[a]);
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = T> {
        (0..self.len).map(|at| self[at])
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Box<[T; PAGE]>>()
            + self.pages.len() * size_of::<[T; PAGE]>()
    }
}

impl<T> Index<usize> for Paged<T> {
    type Output = T;

    fn index(&self, at: usize) -> &T {
        debug_assert!(at < self.len, "{at} of {}", self.len);
        &self.pages[at / PAGE][at % PAGE]
    }
}

impl<T> IndexMut<usize> for Paged<T> {
    fn index_mut(&mut self, at: usize) -> &mut T {
        debug_assert!(at < self.len, "{at} of {}", self.len);
        &mut self.pages[at / PAGE][at % PAGE]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_equals_a_vector_across_pages() {
        let (mut paged, mut plain) = (Paged::default(), Vec::new());
        for value in 0..3 * PAGE {
            paged.push(value);
            plain.push(value);
        }
        paged.swap(1, 2 * PAGE);
        plain.swap(1, 2 * PAGE);
        for at in (0..2 * PAGE).step_by(3) {
            assert_eq!(paged.swap_remove(at), plain.swap_remove(at));
            assert_eq!(paged.len(), plain.len());
        }
        assert_eq!(paged.iter().collect::<Vec<_>>(), plain);
    }

    #[test]
    fn it_gives_pages_back() {
        let mut paged = Paged::default();
        for value in 0..10 * PAGE {
            paged.push(value);
        }
        while paged.len() > 0 {
            paged.swap_remove(0);
        }
        assert!(paged.heap_bytes() < 3 * size_of::<[usize; PAGE]>());
    }
}
