//! The windows in a snapshot. Those that share a hash are written in their order; the others are derived from the
//! cached blocks.

use std::collections::BTreeMap;

use super::{Shelf, Windows};
use crate::ids::{Depth, NodeIndex};
use crate::moved::fingerprints::{Entry, Fingerprints, WINDOW};

impl Windows {
    /// For each table, the names whose order has an effect, oldest first.
    pub(crate) fn order(&self, tree_of: impl Fn(u32) -> u32) -> impl Iterator<Item = Vec<u32>> {
        (0..).zip(&self.shelves).map(move |(number, shelf)| {
            let left = shelf.removes.iter().map(|entry| (entry.name, entry.tree));
            let left: BTreeMap<u32, u32> = left.collect();
            let tree = |name| {
                let tree = left.get(&name).copied();
                tree.unwrap_or_else(|| tree_of(self.block(number, name).0))
            };
            let table = shelf.table.as_ref();
            let mut names = table.map(|table| table.grouped(tree)).unwrap_or_default();
            names.retain(|name| !left.contains_key(name));
            names.extend(shelf.adds.iter().map(|entry| entry.name));
            names
        })
    }

    pub(crate) fn num_tables(&self) -> usize {
        self.shelves.len()
    }

    /// Fills empty tables with the windows of `blocks` (id, tree, node, depth), which ascend by id. Names in `order`
    /// come last.
    pub(crate) fn fill(
        &mut self,
        blocks: impl Iterator<Item = (u32, u32, NodeIndex, Depth)>,
        window: impl Fn(NodeIndex, usize) -> [u32; WINDOW],
        order: &[Vec<u32>],
    ) -> Result<(), String> {
        let mut places: Vec<Vec<Entry>> = vec![Vec::new(); self.shelves.len()];
        for (id, tree, node, depth) in blocks {
            for (which, end) in self.ends(depth).enumerate() {
                let (shelf, place) = self.place(tree, &window(node, end), id, which);
                places[shelf].push(place);
            }
        }
        for ((shelf, places), order) in self.shelves.iter_mut().zip(places).zip(order) {
            let mut is_named = vec![false; places.len()];
            let mut last = Vec::with_capacity(order.len());
            for &name in order {
                match places.binary_search_by_key(&name, |entry| entry.name) {
                    Ok(at) if !is_named[at] => {
                        is_named[at] = true;
                        last.push(places[at]);
                    }
                    Ok(_) => return Err(format!("window {name} is named twice")),
                    Err(_) => return Err(format!("window {name} is named, but not cached")),
                }
            }
            if places.is_empty() {
                continue;
            }
            let mut hashes: Vec<u64> = places.iter().map(|entry| entry.hash).collect();
            let mut table = Fingerprints::new(self.seed, self.capacity);
            if !table.spreads(&mut hashes) {
                return Err("windows collide as if they were chosen to".to_owned());
            }
            drop(hashes);
            let mut kept = is_named.iter().map(|is_named| !is_named);
            let mut first = places;
            first.retain(|_| kept.next().unwrap_or(true));
            table.add_all(&first);
            table.add_all(&last);
            *shelf = Shelf {
                table: Some(table),
                ..Shelf::default()
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const TREE: u32 = 3;

    fn empty(bits: u32) -> Windows {
        Windows::new(64, 8, 15, 7, bits)
    }

    /// Names of one hash, the newest first.
    fn places(windows: &mut Windows, hash: u64) -> Vec<u32> {
        windows.apply();
        let table = windows.shelves[0].table.as_ref();
        table.map_or(Vec::new(), |table| table.candidates(hash, TREE).collect())
    }

    proptest! {
        #[test]
        fn rebuilt_tables_keep_the_order_of_equal_windows(
            steps in prop::collection::vec((0_u32..20, 0_u32..4, prop::bool::weighted(0.1)), 0..120),
            bits in prop_oneof![Just(0_u32), Just(4), Just(64)],
        ) {
            let mut windows = empty(bits);
            // A second step for the same block removes it.
            let mut live: BTreeMap<u32, [u32; WINDOW]> = BTreeMap::new();
            for (id, token, apply) in steps {
                if let Some(window) = live.remove(&id) {
                    if windows.shelves[0].adds.iter().any(|entry| entry.name == id) {
                        windows.apply();
                    }
                    windows.remove(TREE, &window, id, 0);
                } else {
                    live.insert(id, [token; WINDOW]);
                    windows.add(TREE, &[token; WINDOW], id, 0);
                }
                if apply {
                    windows.apply();
                }
            }
            let order: Vec<Vec<u32>> = windows.order(|_| TREE).collect();
            let mut again = empty(bits);
            let blocks = live.keys().map(|&id| (id, TREE, id, 0));
            again.fill(blocks, |id, _| live[&id], &order).unwrap();
            for token in 0..4 {
                let hash = windows.hasher.hash(TREE.into(), &[token; WINDOW]);
                prop_assert_eq!(places(&mut again, hash), places(&mut windows, hash));
            }
        }
    }

    #[test]
    fn names_that_are_not_cached_or_come_twice_are_refused() {
        let blocks = || (0..3).map(|id| (id, TREE, id, 0));
        let window = |_, _| [1; WINDOW];
        assert!(empty(64).fill(blocks(), window, &[vec![2, 0]]).is_ok());
        assert!(empty(64).fill(blocks(), window, &[vec![3]]).is_err());
        assert!(empty(64).fill(blocks(), window, &[vec![1, 1]]).is_err());
    }

    #[test]
    fn chosen_hashes_are_distinguished_from_others() {
        let table = Fingerprints::new(7, 1 << 16);
        let hash = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut spread: Vec<u64> = (0..100_000).map(hash).collect();
        assert!(table.spreads(&mut spread));
        let mut equal = vec![hash(5); 100_000];
        assert!(table.spreads(&mut equal));
        // Many hashes of one segment with the same home bucket.
        let mut chosen: Vec<u64> = (0..5_000)
            .map(|n| n << 36)
            .chain((0..99).map(|n| n << 50))
            .collect();
        assert!(!table.spreads(&mut chosen));
    }
}
