//! A table of small cells that stay in the order of their keys, at a high load.
//!
//! Keys are spread evenly over 64 bits, so the place at which a cell would be alone follows its key. A cell whose place
//! is taken goes after it. A search stops at the first larger key, so it looks at few neighbouring cells.
//!
//! The first bits of a key name a *part*, and each part grows by itself, by a fifth, in one pass from front to back
//! without a branch for a processor to guess. Parts are small, so that this pass stays in the nearest caches, and an
//! allocator finds their room where another part was. When parts are full, all are cut in two. New parts have different
//! loads, so that they do not grow at the same time: 82 places of 100 are taken, whatever the number of cells.

use std::hint::black_box;

pub(crate) trait Cell: Copy {
    const EMPTY: Self;

    fn is_empty(&self) -> bool;

    fn key(&self) -> u64;
}

#[derive(Clone, Debug)]
pub(crate) struct Table<C> {
    /// A power of two of them, in the order of their keys.
    parts: Vec<Part<C>>,
    bits: u32,
    len: usize,
}

#[derive(Clone, Debug)]
struct Part<C> {
    cells: Vec<C>,
    /// Number of places that keys are spread over. A few cells are after them.
    places: usize,
    len: usize,
}

/// Fewest places of a part that has cells.
const FEWEST: usize = 16;

/// Cells after the places of a part, and as many more where these are taken.
const AFTER: usize = 12;

/// Cells of a part, on average, before all parts are cut in two. Tests cut often.
const MOST: usize = if cfg!(test) { 8 } else { 2_048 };

/// Lines of memory of a key: a cell goes before those after it, up to the next empty place, which is 20 cells on on
/// average.
const LINES: usize = 4;

impl<C> Default for Table<C> {
    fn default() -> Self {
        Self {
            parts: vec![Part::default()],
            bits: 0,
            len: 0,
        }
    }
}

impl<C> Default for Part<C> {
    fn default() -> Self {
        Self {
            cells: Vec::new(),
            places: 0,
            len: 0,
        }
    }
}

impl<C: Cell> Table<C> {
    /// Number of cells that a line of a processor's cache has.
    const PER_LINE: usize = 64 / size_of::<C>();

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn number(key: u64, bits: u32) -> usize {
        usize::try_from(key >> 1 >> (63 - bits)).unwrap_or_default()
    }

    fn part(&self, key: u64) -> &Part<C> {
        &self.parts[Self::number(key, self.bits)]
    }

    fn part_mut(&mut self, key: u64) -> &mut Part<C> {
        &mut self.parts[Self::number(key, self.bits)]
    }

    /// Reads the places of keys that are asked for next, so that their memory is waited for once and not key by key.
    pub(crate) fn touch(&self, keys: impl Iterator<Item = u64>) {
        let mut seen = 0;
        for key in keys {
            let part = self.part(key);
            let home = part.home(key, self.bits);
            seen ^= part.cells.get(home).map_or(0, C::key);
        }
        black_box(seen);
    }

    /// Gives the addresses of the lines of memory at which keys are looked for and inserted.
    pub(crate) fn lines(&self, keys: impl Iterator<Item = u64>, mut each: impl FnMut(*const u8)) {
        for key in keys {
            let part = self.part(key);
            let home = part.home(key, self.bits);
            for line in 0..LINES {
                if let Some(cell) = part.cells.get(home + line * Self::PER_LINE) {
                    each(std::ptr::from_ref(cell).cast());
                }
            }
        }
    }

    /// The cells with this key.
    pub(crate) fn all(&self, key: u64) -> impl Iterator<Item = &C> {
        let part = self.part(key);
        let from = part.lower(key, self.bits);
        let cells = part.cells.get(from..).unwrap_or_default();
        cells
            .iter()
            .take_while(move |cell| !cell.is_empty() && cell.key() == key)
    }

    pub(crate) fn first_mut(&mut self, key: u64) -> Option<&mut C> {
        let bits = self.bits;
        let part = self.part_mut(key);
        let at = part.lower(key, bits);
        let cell = part.cells.get_mut(at)?;
        (!cell.is_empty() && cell.key() == key).then_some(cell)
    }

    pub(crate) fn insert(&mut self, cell: C) {
        let bits = self.bits;
        let part = self.part_mut(cell.key());
        let at = part.place(cell.key(), bits);
        part.insert(at, cell);
        self.count_one_more();
    }

    /// Inserts a cell unless there is one with its key.
    pub(crate) fn insert_new(&mut self, cell: C) -> bool {
        let (key, bits) = (cell.key(), self.bits);
        let part = self.part_mut(key);
        let at = part.place(key, bits);
        let known = part.cells.get(at);
        if known.is_some_and(|known| !known.is_empty() && known.key() == key) {
            return false;
        }
        part.insert(at, cell);
        self.count_one_more();
        true
    }

    fn count_one_more(&mut self) {
        self.len += 1;
        if self.len > MOST << self.bits && self.bits < 24 {
            self.cut(self.bits + 1);
        }
    }

    /// Removes a cell with this key that `is` the one.
    pub(crate) fn remove(&mut self, key: u64, is: impl Fn(&C) -> bool) -> bool {
        let bits = self.bits;
        if !self.part_mut(key).remove(key, bits, is) {
            return false;
        }
        self.len -= 1;
        if bits > 0 && self.len < (MOST << bits) / 8 {
            self.cut(bits - 1);
        }
        true
    }

    /// Makes so many parts of those that there are.
    fn cut(&mut self, bits: u32) {
        let old = std::mem::take(&mut self.parts);
        let cells = old.into_iter().flat_map(|part| part.cells);
        let mut cells = cells.filter(|cell| !cell.is_empty()).peekable();
        let mut list = Vec::new();
        self.bits = bits;
        for number in 0..1_usize << bits {
            list.clear();
            while let Some(cell) = cells.next_if(|cell| Self::number(cell.key(), bits) == number) {
                list.push(cell);
            }
            let mut part = Part::default();
            // From 90 down to 75 of 100 are taken, part by part.
            let places = list.len() * 10 / 9 + 1;
            part.fill(&list, places + places * (number % 8) / 40, bits);
            self.parts.push(part);
        }
    }

    /// All cells, by key.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &C> {
        let cells = self.parts.iter().flat_map(|part| &part.cells);
        cells.filter(|cell| !cell.is_empty())
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let cells = self.parts.iter().map(|part| part.cells.capacity());
        cells.sum::<usize>() * size_of::<C>() + self.parts.capacity() * size_of::<Part<C>>()
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let mut count = 0;
        for (number, part) in self.parts.iter().enumerate() {
            let is_here = |cell: &&C| Self::number(cell.key(), self.bits) == number;
            let cells = part.cells.iter().filter(|cell| !cell.is_empty());
            if part.len != cells.filter(is_here).count() {
                return Err(format!("part {number} of a table has other cells"));
            }
            part.check(self.bits)?;
            count += part.len;
        }
        if count == self.len && self.parts.len() == 1 << self.bits {
            Ok(())
        } else {
            Err(format!("{count} cells of a table, {} counted", self.len))
        }
    }
}

impl<C: Cell> Part<C> {
    /// The place of a key whose first bits name the part.
    fn home(&self, key: u64, bits: u32) -> usize {
        let wide = u128::from(key << bits) * self.places as u128;
        usize::try_from(wide >> 64).unwrap_or_default()
    }

    /// The first cell whose key is not smaller, or the empty one before it.
    fn lower(&self, key: u64, bits: u32) -> usize {
        let mut at = self.home(key, bits);
        while self
            .cells
            .get(at)
            .is_some_and(|cell| !cell.is_empty() && cell.key() < key)
        {
            at += 1;
        }
        at
    }

    /// The same, after making room for one more.
    fn place(&mut self, key: u64, bits: u32) -> usize {
        if (self.len + 1) * 10 > self.places * 9 {
            self.resize(self.places + self.places / 5, bits);
        }
        self.lower(key, bits)
    }

    /// Puts a cell before those from a place on, up to the next empty one.
    fn insert(&mut self, at: usize, cell: C) {
        self.len += 1;
        let mut moved = cell;
        // Cell by cell: most move a few places, and their number is not known before.
        for place in self.cells.iter_mut().skip(at) {
            std::mem::swap(place, &mut moved);
            if moved.is_empty() {
                return;
            }
        }
        self.cells.reserve_exact(AFTER);
        self.cells.push(moved);
    }

    fn remove(&mut self, key: u64, bits: u32, is: impl Fn(&C) -> bool) -> bool {
        let mut at = self.lower(key, bits);
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
            !cell.is_empty() && self.home(cell.key(), bits) < *at
        };
        let end = at + 1 + (at + 1..self.cells.len()).take_while(moves).count();
        self.cells.copy_within(at + 1..end, at);
        self.cells[end - 1] = C::EMPTY;
        self.len -= 1;
        if self.places > FEWEST && self.len * 4 < self.places {
            self.resize(self.len * 3 / 2, bits);
        }
        true
    }

    fn resize(&mut self, places: usize, bits: u32) {
        let old = std::mem::take(&mut self.cells);
        self.fill(&old, places, bits);
    }

    /// Places the cells of a list, which is ordered but for empty ones, again.
    fn fill(&mut self, list: &[C], places: usize, bits: u32) {
        self.places = places.max(FEWEST);
        let size = self.places + AFTER;
        let mut new = vec![C::EMPTY; size];
        let mut count = 0;
        // The first cell that is free; an empty cell is written there too, and replaced by the next one.
        let mut free = 0;
        let mut left: &[C] = &[];
        for (number, &cell) in list.iter().enumerate() {
            let at = self.home(cell.key(), bits).max(free);
            let Some(place) = new.get_mut(at) else {
                left = &list[number..];
                break;
            };
            *place = cell;
            let is_one = usize::from(!cell.is_empty());
            free = if is_one == 0 { free } else { at + 1 };
            count += is_one;
        }
        let left = left.iter().filter(|cell| !cell.is_empty());
        count += left.clone().count();
        new.extend(left);
        self.cells = new;
        self.len = count;
    }

    fn check(&self, bits: u32) -> Result<(), String> {
        let mut last = 0;
        // The first cell after the last empty one.
        let mut start = 0;
        for (at, cell) in self.cells.iter().enumerate() {
            if cell.is_empty() {
                start = at + 1;
                continue;
            }
            let home = self.home(cell.key(), bits);
            if cell.key() < last || home > at || home < start {
                return Err(format!("cell {at} of a table is out of order"));
            }
            last = cell.key();
        }
        Ok(())
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

    #[test]
    fn cells_go_past_the_last_place() {
        let mut table = Table::default();
        for value in 0..500 {
            let key = u64::MAX - u64::from(value % 7);
            table.insert(Pair(key, value));
            table.check().unwrap();
            assert!(table.all(key).any(|pair| pair.1 == value));
        }
        assert_eq!((table.len(), table.iter().count()), (500, 500));
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
