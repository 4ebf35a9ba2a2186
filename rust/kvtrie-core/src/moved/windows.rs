//! The windows of everything cached, through which moved runs are found.
//!
//! A window is eight consecutive tokens. One is kept per `min_run − 7` positions, counted from the start of the
//! sequence, so each cached run of `min_run` tokens contains a whole one. The block with its last token names it: a
//! block keeps its name when edges are cut, and from there a run is verified backwards along unique parents and
//! followed forwards.
//!
//! When blocks come and go, their windows are queued and later applied in a batch. A place in a large table is rarely
//! in the CPU cache, and a batch waits for many cache lines at once. The call that fills the queue to [`QUEUE`] windows
//! empties it.

mod order;

use crate::moved::fingerprints::{Entry, Fingerprints, WINDOW, WindowHasher};

/// Length of the queue: enough to overlap cache misses, and few enough for one call to apply.
const QUEUE: usize = 512;

/// Largest initial size of a table, in entries. A table that outgrows it grows in larger steps.
const MOST: u64 = 1 << 24;

const NAMES: u64 = u32::MAX as u64;

#[derive(Debug, Default)]
struct Shelf {
    table: Option<Fingerprints>,
    adds: Vec<Entry>,
    removes: Vec<Entry>,
}

/// All windows. There is one table, unless the pool can have more than 2³² − 1 windows.
#[derive(Debug)]
pub(crate) struct Windows {
    shelves: Vec<Shelf>,
    hasher: WindowHasher,
    seed: u64,
    capacity: usize,
    block_size: usize,
    stride: usize,
    per_block: u64,
    waiting: usize,
}

impl Windows {
    pub(crate) const MIN_RUN: usize = WINDOW;

    pub(crate) fn new(
        num_blocks: u64,
        block_size: usize,
        min_run: usize,
        seed: u64,
        hash_bits: u32,
    ) -> Self {
        let stride = min_run.max(WINDOW) - (WINDOW - 1);
        let per_block = block_size.div_ceil(stride) as u64;
        let all = num_blocks * per_block;
        Self {
            shelves: (0..all.div_ceil(NAMES)).map(|_| Shelf::default()).collect(),
            hasher: WindowHasher::new(seed, hash_bits),
            seed,
            capacity: usize::try_from(all.min(MOST)).unwrap_or(usize::MAX),
            block_size,
            stride,
            per_block,
            waiting: 0,
        }
    }

    /// Positions of the last tokens of the windows that end in the block at `depth`.
    pub(crate) fn ends(&self, depth: u32) -> impl Iterator<Item = usize> + use<> {
        let (block_size, stride) = (self.block_size, self.stride);
        let from = depth as usize * block_size;
        let first = (from.max(WINDOW - 1) + 1).next_multiple_of(stride) - 1;
        (first..from + block_size).step_by(stride)
    }

    /// The table and the entry of a window; `which` numbers the windows of a block.
    fn place(&self, tree: u32, window: &[u32; WINDOW], id: u32, which: usize) -> (usize, Entry) {
        let name = u64::from(id) * self.per_block + which as u64;
        let local = u32::try_from(name % NAMES).unwrap_or_default();
        let shelf = usize::try_from(name / NAMES).unwrap_or_default();
        let entry = Entry {
            hash: self.hasher.hash(u64::from(tree), window),
            tree,
            name: local,
        };
        (shelf, entry)
    }

    pub(crate) fn add(&mut self, tree: u32, window: &[u32; WINDOW], id: u32, which: usize) {
        let (shelf, place) = self.place(tree, window, id, which);
        self.shelves[shelf].adds.push(place);
        self.waiting += 1;
    }

    /// Queues a removal. No window of that block may wait to be added.
    pub(crate) fn remove(&mut self, tree: u32, window: &[u32; WINDOW], id: u32, which: usize) {
        let (shelf, place) = self.place(tree, window, id, which);
        self.shelves[shelf].removes.push(place);
        self.waiting += 1;
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Position of the last token of the window `which` of a block.
    pub(crate) fn end(&self, depth: u32, which: u64) -> usize {
        let first = self.ends(depth).next().unwrap_or_default();
        first + usize::try_from(which).unwrap_or_default() * self.stride
    }

    pub(crate) fn hash_all(&self, tree: u32, tokens: &[u32], hashes: &mut Vec<u64>) {
        hashes.resize((tokens.len() + 1).saturating_sub(WINDOW), 0);
        self.hasher.hash_all(u64::from(tree), tokens, hashes);
    }

    pub(crate) fn screen(&self, hashes: &[u64], found: &mut Vec<u32>) {
        let first = found.len();
        let mut tables = 0;
        for table in self.shelves.iter().filter_map(|shelf| shelf.table.as_ref()) {
            table.screen(hashes, found);
            tables += 1;
        }
        if tables > 1 {
            found[first..].sort_unstable();
            let mut kept = first;
            for at in first..found.len() {
                if kept == first || found[kept - 1] != found[at] {
                    found[kept] = found[at];
                    kept += 1;
                }
            }
            found.truncate(kept);
        }
    }

    fn tables(&self) -> impl Iterator<Item = (u64, &Fingerprints)> {
        let numbered = (0_u64..).zip(&self.shelves);
        numbered.filter_map(|(number, shelf)| Some((number, shelf.table.as_ref()?)))
    }

    fn block(&self, table: u64, name: u32) -> (u32, u64) {
        let name = table * NAMES + u64::from(name);
        let id = u32::try_from(name / self.per_block).unwrap_or_default();
        (id, name % self.per_block)
    }

    /// Number of places of a window. It may count a few places of other trees, unless it exceeds `enough`; then it is
    /// exact.
    pub(crate) fn num_places(
        &self,
        hash: u64,
        tree: u32,
        enough: usize,
        is_of_tree: impl Fn(u32) -> bool,
    ) -> usize {
        let tables = || {
            self.tables()
                .map(|(number, table)| (number, table.candidates(hash, tree)))
        };
        let count: usize = tables().map(|(_, places)| places.len()).sum();
        if count <= enough {
            return count;
        }
        let of_others = tables().map(|(number, places)| {
            let names = places.of_any_tree().iter();
            names
                .filter(|&&name| !is_of_tree(self.block(number, name).0))
                .count()
        });
        count - of_others.sum::<usize>()
    }

    /// The blocks in which windows of this hash end, each with the number of the window. Of one table, the most
    /// recently added come first. A few may be of other trees.
    pub(crate) fn places(&self, hash: u64, tree: u32) -> impl Iterator<Item = (u32, u64)> {
        self.tables().flat_map(move |(number, table)| {
            let names = table.candidates(hash, tree);
            names.map(move |name| self.block(number, name))
        })
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    pub(crate) fn is_due(&self) -> bool {
        self.waiting >= QUEUE
    }

    /// Applies the queue and returns the blocks whose windows were added. Removals go first, because a block that came
    /// back adds its windows again.
    pub(crate) fn apply(&mut self) -> Vec<u32> {
        let mut blocks = Vec::new();
        for (number, shelf) in (0..).zip(&mut self.shelves) {
            if shelf.adds.is_empty() && shelf.removes.is_empty() {
                continue;
            }
            let new = || Fingerprints::new(self.seed, self.capacity);
            let table = shelf.table.get_or_insert_with(new);
            let removed = table.remove_all(&shelf.removes);
            debug_assert_eq!(removed, shelf.removes.len(), "a window was not there");
            table.add_all(&shelf.adds);
            blocks.extend(shelf.adds.iter().map(|entry| {
                let name = number * NAMES + u64::from(entry.name);
                u32::try_from(name / self.per_block).unwrap_or_default()
            }));
            shelf.adds.clear();
            shelf.removes.clear();
        }
        self.waiting = 0;
        blocks
    }

    /// Number of windows, as if the queue were applied.
    pub(crate) fn len(&self) -> usize {
        let sum = |count: fn(&Shelf) -> usize| self.shelves.iter().map(count).sum::<usize>();
        let tables = sum(|shelf| shelf.table.as_ref().map_or(0, Fingerprints::len));
        tables + sum(|shelf| shelf.adds.len()) - sum(|shelf| shelf.removes.len())
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let bytes = |shelf: &Shelf| {
            let queued = shelf.adds.capacity() + shelf.removes.capacity();
            let table = shelf.table.as_ref().map_or(0, Fingerprints::heap_bytes);
            table + queued * size_of::<Entry>()
        };
        self.shelves.capacity() * size_of::<Shelf>() + self.shelves.iter().map(bytes).sum::<usize>()
    }

    pub(crate) fn check(
        &self,
        live: impl IntoIterator<Item = (u32, [u32; WINDOW], u32, usize)>,
    ) -> Result<(), String> {
        let mut expected = vec![std::collections::BTreeMap::new(); self.shelves.len()];
        for (tree, window, id, which) in live {
            let (shelf, entry) = self.place(tree, &window, id, which);
            expected[shelf].insert(entry.name, entry);
        }
        for (shelf, mut expected) in self.shelves.iter().zip(expected) {
            for entry in &shelf.adds {
                if expected.remove(&entry.name) != Some(*entry) {
                    let name = entry.name;
                    return Err(format!("window {name} waits to be added, but is not there"));
                }
            }
            expected.extend(shelf.removes.iter().map(|&entry| (entry.name, entry)));
            let expected = expected.into_values();
            match &shelf.table {
                Some(table) => table.check(expected)?,
                None if expected.len() == 0 => (),
                None => return Err("windows lack a table".to_owned()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_ends_at_every_position_of_the_stride_and_in_one_block() {
        for (block_size, min_run) in [(16, 16), (1, 8), (3, 9), (64, 16), (4, 100), (16, 22)] {
            let windows = Windows::new(1 << 20, block_size, min_run, 0, 64);
            let stride = min_run - 7;
            let ends: Vec<usize> = (0..60).flat_map(|depth| windows.ends(depth)).collect();
            let expected: Vec<usize> = (WINDOW - 1..60 * block_size)
                .filter(|end| (end + 1) % stride == 0)
                .collect();
            assert_eq!(ends, expected, "block_size {block_size}, min_run {min_run}");
            for depth in 0..60 {
                let count = windows.ends(depth).count();
                assert!(count as u64 <= windows.per_block);
                assert!(
                    windows
                        .ends(depth)
                        .all(|end| end / block_size == depth as usize)
                );
            }
        }
    }

    #[test]
    fn the_largest_pool_has_a_name_for_every_window() {
        let mut windows = Windows::new(1 << 31, 16, 16, 7, 64);
        let window = [1; WINDOW];
        let all = [(0, 0), (0, 1), ((1 << 31) - 1, 0), ((1 << 31) - 1, 1)];
        for (id, which) in all {
            windows.add(0, &window, id, which);
        }
        let mut blocks = windows.apply();
        blocks.sort_unstable();
        assert_eq!(blocks, [0, 0, (1 << 31) - 1, (1 << 31) - 1]);
        assert_eq!(windows.len(), 4);
        windows
            .check(all.map(|(id, which)| (0, window, id, which)))
            .unwrap();
        for (id, which) in all {
            windows.remove(0, &window, id, which);
        }
        windows.apply();
        assert_eq!(windows.len(), 0);
        windows.check([]).unwrap();
    }
}
