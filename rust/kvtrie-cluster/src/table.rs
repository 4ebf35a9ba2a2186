//! A table of small cells that stay in the order of their keys, at a high load.
//!
//! Keys are spread evenly over 64 bits, so the place at which a cell would be alone follows its key. A cell whose place
//! is taken goes after it. A search stops at the first larger key, so it looks at few neighbouring cells, and growing
//! by an eighth is one pass from front to back without a branch for a processor to guess. 8 to 9 places of 10 are taken
//! while a table grows.

use std::hint::black_box;

pub(crate) trait Cell: Copy {
    const EMPTY: Self;

    fn is_empty(&self) -> bool;

    fn key(&self) -> u64;
}

#[derive(Clone, Debug)]
pub(crate) struct Table<C> {
    cells: Vec<C>,
    /// Number of places that keys are spread over. A few cells are after them.
    places: usize,
    len: usize,
}

impl<C> Default for Table<C> {
    fn default() -> Self {
        Self {
            cells: Vec::new(),
            places: 0,
            len: 0,
        }
    }
}

const FEWEST: usize = 16;

impl<C: Cell> Table<C> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn home(&self, key: u64) -> usize {
        let wide = u128::from(key) * self.places as u128;
        usize::try_from(wide >> 64).unwrap_or_default()
    }

    /// The first cell whose key is not smaller, or the empty one before it.
    fn lower(&self, key: u64) -> usize {
        let mut at = self.home(key);
        while self
            .cells
            .get(at)
            .is_some_and(|cell| !cell.is_empty() && cell.key() < key)
        {
            at += 1;
        }
        at
    }

    /// Reads the places of keys that are asked for next, so that their memory is waited for once and not key by key.
    pub(crate) fn touch(&self, keys: impl Iterator<Item = u64>) {
        for key in keys {
            black_box(self.cells.get(self.home(key)).map(C::key));
        }
    }

    /// The cells with this key.
    pub(crate) fn all(&self, key: u64) -> impl Iterator<Item = &C> {
        let cells = self.cells.get(self.lower(key)..).unwrap_or_default();
        cells
            .iter()
            .take_while(move |cell| !cell.is_empty() && cell.key() == key)
    }

    pub(crate) fn first_mut(&mut self, key: u64) -> Option<&mut C> {
        let at = self.lower(key);
        let cell = self.cells.get_mut(at)?;
        (!cell.is_empty() && cell.key() == key).then_some(cell)
    }

    pub(crate) fn insert(&mut self, cell: C) {
        if (self.len + 1) * 10 > self.places * 9 {
            self.resize(self.places + self.places / 8);
        }
        let at = self.lower(cell.key());
        let empty = self.cells[at.min(self.cells.len())..]
            .iter()
            .position(C::is_empty);
        let end = empty.map_or(self.cells.len(), |after| at + after);
        if end == self.cells.len() {
            self.cells.push(C::EMPTY);
        }
        self.cells.copy_within(at..end, at + 1);
        self.cells[at] = cell;
        self.len += 1;
    }

    /// Removes a cell with this key that `is` the one.
    pub(crate) fn remove(&mut self, key: u64, is: impl Fn(&C) -> bool) -> bool {
        let mut at = self.lower(key);
        while let Some(cell) = self.cells.get(at) {
            if cell.is_empty() || cell.key() != key {
                return false;
            }
            if is(cell) {
                break;
            }
            at += 1;
        }
        if at >= self.cells.len() {
            return false;
        }
        // The cells after it that are not at their own places move up.
        let moves = |at: &usize| {
            let cell = &self.cells[*at];
            !cell.is_empty() && self.home(cell.key()) < *at
        };
        let end = at + 1 + (at + 1..self.cells.len()).take_while(moves).count();
        self.cells.copy_within(at + 1..end, at);
        self.cells[end - 1] = C::EMPTY;
        self.len -= 1;
        if self.places > FEWEST && self.len * 4 < self.places {
            self.resize(self.len * 3 / 2);
        }
        true
    }

    fn resize(&mut self, places: usize) {
        self.places = places.max(FEWEST);
        let size = self.places + self.places / 64 + 8;
        let old = std::mem::take(&mut self.cells);
        let mut new = vec![C::EMPTY; size];
        // The first cell that is free; an empty cell is written there too, and replaced by the next one.
        let mut free = 0;
        for cell in old {
            let at = self.home(cell.key()).max(free);
            if at >= new.len() {
                new.resize(at + 1, C::EMPTY);
            }
            new[at] = cell;
            free = if cell.is_empty() { free } else { at + 1 };
        }
        self.cells = new;
    }

    /// All cells, by key.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &C> {
        self.cells.iter().filter(|cell| !cell.is_empty())
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.cells.capacity() * size_of::<C>()
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let mut last = 0;
        let mut count = 0;
        // The first cell after the last empty one.
        let mut start = 0;
        for (at, cell) in self.cells.iter().enumerate() {
            if cell.is_empty() {
                start = at + 1;
                continue;
            }
            let home = self.home(cell.key());
            if cell.key() < last || home > at || home < start {
                return Err(format!("cell {at} of a table is out of order"));
            }
            (last, count) = (cell.key(), count + 1);
        }
        if count == self.len {
            Ok(())
        } else {
            Err(format!("{count} cells of a table, {} counted", self.len))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    struct Pair(u64, u32);

    impl Cell for Pair {
        const EMPTY: Self = Self(0, u32::MAX);

        fn is_empty(&self) -> bool {
            self.1 == u32::MAX
        }

        fn key(&self) -> u64 {
            self.0
        }
    }

    proptest! {
        #[test]
        fn a_table_is_a_set_of_pairs(
            steps in proptest::collection::vec((0_u8..4, any::<u64>(), 0_u32..3), 1..400),
            crowd in 0_u32..62,
        ) {
            let (mut table, mut set) = (Table::default(), BTreeSet::new());
            for (step, key, value) in steps {
                // Keys that crowd at one end, and few of them.
                let key = (key % 64) << 58 >> crowd | if crowd % 2 == 0 { 0 } else { !0 << 63 };
                if step > 0 {
                    if set.insert((key, value)) {
                        table.insert(Pair(key, value));
                    }
                } else {
                    let removed = table.remove(key, |pair| pair.1 == value);
                    prop_assert_eq!(removed, set.remove(&(key, value)));
                }
                table.check().unwrap();
                prop_assert_eq!(table.len(), set.len());
                let found: BTreeSet<_> = table.all(key).map(|pair| pair.1).collect();
                let expected = set.range((key, 0)..=(key, u32::MAX)).map(|pair| pair.1).collect();
                prop_assert_eq!(found, expected);
                prop_assert_eq!(table.first_mut(key).is_some(), set.iter().any(|one| one.0 == key));
            }
            let all: BTreeSet<_> = table.iter().map(|pair| (pair.0, pair.1)).collect();
            prop_assert_eq!(all, set);
        }
    }
}
