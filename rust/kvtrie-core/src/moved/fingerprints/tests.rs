use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// Names by hash and tree, each list oldest first.
#[derive(Default)]
struct Model {
    places: BTreeMap<(u64, u32), Vec<u32>>,
    live: BTreeMap<u32, Entry>,
}

impl Model {
    fn add(&mut self, entry: Entry) {
        let places = self.places.entry((entry.hash, entry.tree));
        places.or_default().push(entry.name);
        self.live.insert(entry.name, entry);
    }

    fn remove(&mut self, name: u32) -> Option<Entry> {
        let entry = self.live.remove(&name)?;
        let places = self.places.get_mut(&(entry.hash, entry.tree))?;
        places.retain(|&place| place != name);
        Some(entry)
    }

    fn live(&self) -> impl Iterator<Item = Entry> {
        self.live.values().copied()
    }

    fn candidates(&self, hash: u64, tree: u32) -> Vec<u32> {
        let places = self.places.get(&(hash, tree)).into_iter().flatten();
        places.rev().copied().collect()
    }

    fn compare(&self, table: &Fingerprints) {
        table.check(self.live()).expect("an invariant is broken");
        assert_eq!(table.len(), self.live.len());
        let mut hashes = Vec::new();
        for &(hash, tree) in self.places.keys() {
            let candidates = table.candidates(hash, tree);
            assert!(candidates.of_any_tree().len() <= MAX_INLINE);
            let is_other = |name: &u32| self.live[name].tree != tree;
            let others = candidates
                .of_any_tree()
                .iter()
                .filter(|&name| is_other(name));
            let own = candidates.len() - others.count();
            assert_eq!(own, self.candidates(hash, tree).len());
            let candidates: Vec<u32> = candidates.filter(|name| !is_other(name)).collect();
            assert_eq!(candidates, self.candidates(hash, tree));
            hashes.push(hash);
        }
        let tree_of = |name: u32| self.live[&name].tree;
        let groups = self.places.values().filter(|names| names.len() > 1);
        let mut groups: Vec<_> = groups.cloned().collect();
        groups.sort_unstable();
        assert_eq!(table.grouped(tree_of), groups.concat());
        let mut found = Vec::new();
        table.screen(&hashes, &mut found);
        let found: BTreeSet<u32> = found.into_iter().collect();
        for (at, &hash) in (0..).zip(&hashes) {
            let is_live = self.live().any(|entry| entry.hash == hash);
            assert!(found.contains(&at) || !is_live);
        }
    }
}

fn hash_of(number: u32) -> u64 {
    let mut state = u64::from(number);
    random(&mut state)
}

fn of_first(hash: u64, name: u32) -> Entry {
    Entry {
        hash,
        tree: 0,
        name,
    }
}

#[derive(Clone, Copy, Debug)]
enum Shape {
    /// Any hashes, cut to this many bits.
    Cut(u32),
    /// Hashes that nearly all have one home bucket.
    Packed,
}

impl Shape {
    /// Hashes of different numbers differ in the bits that every table keeps.
    fn hash(self, number: u32) -> u64 {
        match self {
            Self::Cut(bits) => {
                let kept = u64::MAX.checked_shl(64 - bits.min(TAG_BITS));
                hash_of(number) & kept.unwrap_or(0)
            }
            Self::Packed => u64::from(number) << (64 - TAG_BITS),
        }
    }
}

fn entry(shape: Shape, number: u32, name: u32) -> Entry {
    Entry {
        hash: shape.hash(number),
        tree: number % 3,
        name,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add(u32),
    Remove(u32),
    AddAll(Vec<u32>),
    RemoveAll(Vec<u32>),
    RemoveOldest(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let number = || prop_oneof![3 => 0_u32..4, 3 => 0_u32..40, 4 => 0_u32..100_000];
    let step = prop_oneof![
        4 => number().prop_map(Step::Add),
        4 => (0_u32..3_000).prop_map(Step::Remove),
        2 => prop::collection::vec(number(), 0..200).prop_map(Step::AddAll),
        1 => prop::collection::vec(0_u32..3_000, 0..200).prop_map(Step::RemoveAll),
        1 => (0_usize..400).prop_map(Step::RemoveOldest),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn returns_what_lists_by_hash_would(
        steps in steps(),
        shape in prop_oneof![
            Just(Shape::Cut(0)), Just(Shape::Cut(4)), Just(Shape::Cut(8)), Just(Shape::Cut(64)), Just(Shape::Packed),
        ],
        capacity in prop_oneof![Just(0_usize), Just(3_000), Just(200_000)],
        seed in any::<u64>(),
    ) {
        let mut table = Fingerprints::new(seed, capacity);
        let mut model = Model::default();
        let mut unused = 0..;
        for step in steps {
            match step {
                Step::Add(number) => {
                    let entry = entry(shape, number, unused.next().unwrap());
                    table.add(entry);
                    model.add(entry);
                }
                Step::AddAll(numbers) => {
                    let places: Vec<_> = numbers
                        .into_iter()
                        .map(|number| entry(shape, number, unused.next().unwrap()))
                        .collect();
                    table.add_all(&places);
                    for entry in places {
                        model.add(entry);
                    }
                }
                Step::Remove(name) => {
                    let known = model.remove(name);
                    let entry = known.unwrap_or(of_first(0, name));
                    prop_assert_eq!(table.remove(entry), known.is_some());
                }
                Step::RemoveAll(names) => {
                    let known: Vec<_> = names.into_iter().map(|name| (model.remove(name), name)).collect();
                    let there = known.iter().filter(|(known, _)| known.is_some()).count();
                    let places: Vec<_> =
                        known.into_iter().map(|(known, name)| known.unwrap_or(of_first(0, name))).collect();
                    prop_assert_eq!(table.remove_all(&places), there);
                }
                Step::RemoveOldest(count) => {
                    let places: Vec<_> = model.live().take(count).collect();
                    prop_assert_eq!(table.remove_all(&places), places.len());
                    for entry in places {
                        model.remove(entry.name);
                    }
                }
            }
        }
        model.compare(&table);
        for entry in model.live().collect::<Vec<_>>() {
            prop_assert!(table.remove(entry));
            prop_assert!(!table.remove(entry));
        }
        prop_assert_eq!((table.len(), table.buckets, table.links.len()), (0, 0, 0));
    }
}

#[test]
fn grows_and_shrinks_a_shard_at_a_time_within_bounded_memory() {
    let capacity = 60_000;
    let mut table = Fingerprints::new(3, capacity);
    let empty = table.heap_bytes();
    let places: Vec<_> = (0..60_000)
        .map(|name| of_first(hash_of(name), name))
        .collect();
    table.add_all(&places);
    table.check(places.iter().copied()).unwrap();
    assert!(
        table.heap_bytes() * 10 < capacity * 115,
        "{}",
        table.heap_bytes()
    );
    let largest = table.shards.iter().map(Shard::slots).max();
    assert!(largest < Some(SHARD_ENTRIES * 5 / 4));
    assert_eq!(table.remove_all(&places), capacity);
    assert_eq!(table.heap_bytes(), empty);
}

#[test]
fn churn_keeps_size_and_filter_bounded() {
    let live = 10_000;
    let mut table = Fingerprints::new(3, live as usize);
    let place = |n: u32| of_first(hash_of(n), n);
    table.add_all(&(0..live).map(place).collect::<Vec<_>>());
    for n in live..live * 12 {
        table.add(place(n));
        assert!(table.remove(place(n - live)));
    }
    table.check((live * 11..live * 12).map(place)).unwrap();
    assert!(
        table.heap_bytes() < live as usize * 13,
        "{}",
        table.heap_bytes()
    );
    let set: u32 = table.filter.iter().map(|word| word.count_ones()).sum();
    assert!(set < live * 5 / 2, "{set} bits for {live} entries");
    let absent: Vec<_> = (0..live).map(|n| place(n).hash).collect();
    let mut found = Vec::new();
    table.screen(&absent, &mut found);
    assert!(found.len() < 30, "{} of {live}", found.len());
}

#[test]
fn a_window_with_very_many_places_costs_its_neighbours_nothing() {
    let many = 60_000;
    for period in [1_u32, 2, 17] {
        let mut table = Fingerprints::new(3, many as usize);
        let place = |n: u32| of_first(hash_of(n % period), n);
        let places: Vec<_> = (0..many).map(place).collect();
        table.add_all(&places);
        // Four places have slots of their own, and the others share one.
        assert_eq!(
            table.shards.iter().map(Shard::slots).sum::<usize>(),
            period as usize * (MAX_INLINE + 1)
        );
        let candidates = table.candidates(places[0].hash, 0);
        assert_eq!(candidates.len(), (many as usize).div_ceil(period as usize));
        let newest = (0..many).rev().filter(|n| n % period == 0).take(64);
        assert!(candidates.take(64).eq(newest));
        assert!(table.heap_bytes() < many as usize * 30);
        table.check(places.iter().copied()).unwrap();
        let (old, rest) = places.split_at(20_000);
        let (middle, new) = rest.split_at(20_000);
        assert_eq!(table.remove_all(middle), middle.len());
        assert_eq!(table.remove_all(old), old.len());
        table.check(new.iter().copied()).unwrap();
        for &entry in new.iter().rev() {
            assert!(table.remove(entry));
        }
        assert_eq!((table.len(), table.buckets, table.links.len()), (0, 0, 0));
    }
}

#[test]
fn forced_collisions_stay_near_linear() {
    for bits in [0, 4, 8] {
        let hasher = WindowHasher::new(5, bits);
        let mut table = Fingerprints::new(5, 20_000);
        let places: Vec<_> = (0..20_000)
            .map(|n| of_first(hasher.hash(0, &[n; WINDOW]), n))
            .collect();
        table.add_all(&places);
        table.check(places.iter().copied()).unwrap();
        let hash = places[19_999].hash;
        assert_eq!(table.candidates(hash, 0).next(), Some(19_999));
        let all: BTreeSet<u32> = table.candidates(hash, 0).collect();
        assert!(
            places
                .iter()
                .all(|entry| entry.hash != hash || all.contains(&entry.name))
        );
        assert_eq!(table.remove_all(&places), places.len());
    }
}

#[test]
fn the_same_calls_answer_the_same_and_other_seeds_find_the_same_places() {
    let results = |seed| {
        let hasher = WindowHasher::new(seed, 64);
        let mut table = Fingerprints::new(seed, 5_000);
        let windows: Vec<[u32; WINDOW]> = (0..5_000_u32).map(|n| [n % 1_000; WINDOW]).collect();
        for (name, window) in (0..).zip(&windows) {
            let hash = hasher.hash(0, window);
            table.add(of_first(hash, name));
        }
        let all = windows.iter().map(|window| {
            let hash = hasher.hash(0, window);
            table.candidates(hash, 0).collect::<Vec<_>>()
        });
        all.collect::<Vec<_>>()
    };
    assert_eq!(results(1), results(1));
    assert_eq!(results(1), results(2));
}

#[test]
fn check_notices_what_is_missing_or_wrong() {
    let mut table = Fingerprints::new(1, 10);
    let (first, second) = (of_first(5, 1), of_first(5, 2));
    table.add(first);
    table.add(second);
    table.check([second, first]).unwrap();
    assert!(table.check([first]).is_err());
    assert!(table.check([first, of_first(u64::MAX, 2)]).is_err());
    table.filter.fill(0);
    assert!(table.check([second, first]).is_err());
}

#[test]
fn places_of_other_trees_are_neither_met_nor_counted_however_many_collide() {
    let mut table = Fingerprints::new(1, 100_000);
    let of = |tree, name| Entry {
        hash: 5,
        tree,
        name,
    };
    table.add_all(&[of(0, 0), of(0, 1)]);
    // Newer places, some of them in many trees.
    table.add_all(&(2..50_000).map(|name| of(1, name)).collect::<Vec<_>>());
    table.add_all(
        &(50_000..60_000)
            .map(|name| of(name, name))
            .collect::<Vec<_>>(),
    );
    table.add(of(0, 60_000));
    let found: Vec<u32> = table.candidates(5, 0).collect();
    assert!(found.len() <= 3 + MAX_INLINE, "{found:?}");
    let is_own = |name: &&u32| [0, 1, 60_000].contains(*name);
    let own: Vec<&u32> = found.iter().filter(is_own).collect();
    assert_eq!(own, [&60_000, &1, &0]);
    assert_eq!(
        table.shards.iter().map(Shard::slots).sum::<usize>(),
        MAX_INLINE + 1
    );
}
