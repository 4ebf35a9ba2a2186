//! Chains: linked lists of the places of windows that have many. Each tree has its own list, found without a search, so
//! one tree's places cost another tree nothing.

use hashbrown::HashTable;

use super::hasher::fold;
use super::{Entry, NO_NAME, index};

#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    name: u32,
    /// The place added after this one. In the newest link, it holds the length of the chain.
    pub(super) newer: u32,
    pub(super) older: u32,
}

#[derive(Clone, Copy, Debug)]
struct Head {
    location: u64,
    tree: u32,
    newest: u32,
}

/// Number of places of all trees at a location.
#[derive(Clone, Copy, Debug)]
struct Count {
    location: u64,
    places: u32,
}

trait Record: Copy {
    type Key: Copy + PartialEq;

    fn key(&self) -> Self::Key;

    fn number(key: Self::Key) -> u64;
}

impl Record for Link {
    type Key = u32;

    fn key(&self) -> u32 {
        self.name
    }

    fn number(name: u32) -> u64 {
        name.into()
    }
}

impl Record for Head {
    type Key = (u64, u32);

    fn key(&self) -> (u64, u32) {
        (self.location, self.tree)
    }

    fn number((location, tree): (u64, u32)) -> u64 {
        location.wrapping_add(u64::from(tree).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }
}

impl Record for Count {
    type Key = u64;

    fn key(&self) -> u64 {
        self.location
    }

    fn number(location: u64) -> u64 {
        location
    }
}

#[derive(Clone, Debug)]
struct Shards<T> {
    tables: Vec<HashTable<T>>,
    shard_bits: u32,
    secret: u64,
    len: usize,
    bytes: usize,
}

impl<T: Record> Shards<T> {
    fn new(shard_bits: u32, secret: u64) -> Self {
        Self {
            tables: Vec::new(),
            shard_bits,
            secret,
            len: 0,
            bytes: 0,
        }
    }

    fn heap_bytes(&self) -> usize {
        self.tables.capacity() * size_of::<HashTable<T>>() + self.bytes
    }

    fn hash(secret: u64, key: T::Key) -> u64 {
        fold(T::number(key) ^ !secret, secret)
    }

    /// The shard of a key. It uses other bits of the hash than the shard's table.
    fn shard(&self, hash: u64) -> usize {
        index((hash << 8 >> 1) >> (63 - self.shard_bits))
    }

    fn get(&self, key: T::Key) -> Option<&T> {
        let hash = Self::hash(self.secret, key);
        self.tables
            .get(self.shard(hash))?
            .find(hash, |record| record.key() == key)
    }

    fn get_mut(&mut self, key: T::Key) -> Option<&mut T> {
        let hash = Self::hash(self.secret, key);
        let shard = self.shard(hash);
        self.tables
            .get_mut(shard)?
            .find_mut(hash, |record| record.key() == key)
    }

    fn insert(&mut self, record: T) {
        if self.tables.is_empty() {
            self.tables = vec![HashTable::new(); 1 << self.shard_bits];
        }
        let secret = self.secret;
        let rehash = |record: &T| Self::hash(secret, record.key());
        let hash = rehash(&record);
        let shard = self.shard(hash);
        let shard = &mut self.tables[shard];
        if shard.len() == shard.capacity() {
            self.bytes -= shard.allocation_size();
            shard.reserve(1, rehash);
            self.bytes += shard.allocation_size();
        }
        shard.insert_unique(hash, record, rehash);
        self.len += 1;
    }

    fn remove(&mut self, key: T::Key) -> Option<T> {
        let secret = self.secret;
        let hash = Self::hash(secret, key);
        let shard = self.shard(hash);
        let shard = self.tables.get_mut(shard)?;
        let found = shard.find_entry(hash, |record| record.key() == key).ok()?;
        let (record, _) = found.remove();
        if shard.is_empty() || shard.len() < shard.num_buckets() / 8 {
            self.bytes -= shard.allocation_size();
            shard.shrink_to(shard.len() * 2, |record| Self::hash(secret, record.key()));
            self.bytes += shard.allocation_size();
        }
        self.len -= 1;
        Some(record)
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.tables.iter().flatten()
    }
}

/// All chains. A *location* is the shard and the tag that colliding windows share.
#[derive(Clone, Debug)]
pub(super) struct Links {
    places: Shards<Link>,
    heads: Shards<Head>,
    counts: Shards<Count>,
}

impl Links {
    pub(super) fn new(shard_bits: u32, secret: u64) -> Self {
        Self {
            places: Shards::new(shard_bits, secret),
            heads: Shards::new(shard_bits, secret),
            counts: Shards::new(shard_bits, secret),
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.places.heap_bytes() + self.heads.heap_bytes() + self.counts.heap_bytes()
    }

    pub(super) fn len(&self) -> usize {
        self.places.len
    }

    pub(super) fn get(&self, name: u32) -> Option<&Link> {
        self.places.get(name)
    }

    pub(super) fn newest(&self, location: u64, tree: u32) -> Option<(u32, usize)> {
        let newest = self.heads.get((location, tree))?.newest;
        let count = self.places.get(newest)?.newer;
        Some((newest, count as usize))
    }

    pub(super) fn add(&mut self, location: u64, tree: u32, name: u32) {
        let mut link = Link {
            name,
            newer: 1,
            older: NO_NAME,
        };
        if let Some(head) = self.heads.get_mut((location, tree)) {
            link.older = std::mem::replace(&mut head.newest, name);
            if let Some(older) = self.places.get_mut(link.older) {
                link.newer = std::mem::replace(&mut older.newer, name) + 1;
            }
        } else {
            self.heads.insert(Head {
                location,
                tree,
                newest: name,
            });
        }
        self.places.insert(link);
        if let Some(count) = self.counts.get_mut(location) {
            count.places += 1;
        } else {
            self.counts.insert(Count {
                location,
                places: 1,
            });
        }
    }

    /// Removes a place. Returns how many places of all trees are left, or `None` if it was not there.
    pub(super) fn remove(&mut self, location: u64, tree: u32, name: u32) -> Option<u32> {
        let newest = self.heads.get((location, tree))?.newest;
        let link = self.places.remove(name)?;
        if name != newest {
            if let Some(newer) = self.places.get_mut(link.newer) {
                newer.older = link.older;
            }
            if let Some(older) = self.places.get_mut(link.older) {
                older.newer = link.newer;
            }
            if let Some(newest) = self.places.get_mut(newest) {
                newest.newer -= 1;
            }
        } else if link.older == NO_NAME {
            self.heads.remove((location, tree));
        } else {
            if let Some(head) = self.heads.get_mut((location, tree)) {
                head.newest = link.older;
            }
            if let Some(older) = self.places.get_mut(link.older) {
                older.newer = link.newer - 1;
            }
        }
        let count = self.counts.get_mut(location)?;
        count.places -= 1;
        let left = count.places;
        if left == 0 {
            self.counts.remove(location);
        }
        Some(left)
    }

    /// The names of a chain, the newest first.
    pub(super) fn names(&self, newest: u32) -> impl Iterator<Item = u32> {
        let next = |&name: &u32| self.get(name).map(|link| link.older);
        std::iter::successors(Some(newest), next).take_while(|&name| name != NO_NAME)
    }

    pub(super) fn chains(&self) -> impl Iterator<Item = (u64, u32, u32)> {
        let heads = self.heads.iter();
        heads.map(|head| (head.location, head.tree, head.newest))
    }

    pub(super) fn count(&self, location: u64) -> usize {
        let count = self.counts.get(location);
        count.map_or(0, |count| count.places as usize)
    }

    pub(super) fn is_counted(&self) -> bool {
        fn is_counted<T: Record>(shards: &Shards<T>) -> bool {
            let bytes: usize = shards.tables.iter().map(HashTable::allocation_size).sum();
            bytes == shards.bytes && shards.iter().count() == shards.len
        }
        is_counted(&self.places) && is_counted(&self.heads) && is_counted(&self.counts)
    }

    /// Reads the links of a batch, so that their cache misses overlap.
    pub(super) fn touch(&self, batch: &[Entry]) {
        let links = batch.iter().filter_map(|entry| self.get(entry.name));
        std::hint::black_box(links.fold(0, |any, link| any | link.older));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Debug;

    use super::*;

    fn assert_spread<T: Record<Key: Debug>>(records: &[T]) {
        for secret in [0x0123_4567_89ab_cdef, 0xbf58_476d_1ce4_e5b9] {
            let mut shards = Shards::new(6, secret);
            for &record in records {
                shards.insert(record);
            }
            let hashes: BTreeSet<u64> = records
                .iter()
                .map(|record| Shards::<T>::hash(secret, record.key()))
                .collect();
            assert!(
                hashes.len() > records.len() * 999 / 1000,
                "many keys have one hash"
            );
            let fullest = shards.tables.iter().map(HashTable::len).max();
            assert!(fullest < Some(records.len() / 32), "{fullest:?}");
        }
    }

    #[test]
    fn hardly_two_records_have_one_hash_and_shards_are_filled_alike() {
        let (newer, older) = (1, NO_NAME);
        let link = |name| Link { name, newer, older };
        assert_spread::<Link>(&(0..20_000).map(link).collect::<Vec<_>>());
        let head = |at: u32| Head {
            location: u64::from(at % 200) << 40,
            tree: at / 200,
            newest: 1,
        };
        assert_spread::<Head>(&(0..20_000).map(head).collect::<Vec<_>>());
        let count = |at: u64| Count {
            location: at << 20,
            places: 1,
        };
        assert_spread::<Count>(&(0..20_000).map(count).collect::<Vec<_>>());
    }

    #[test]
    fn a_shard_shrinks_once_less_than_an_eighth_is_used_and_leaves_room_for_as_many() {
        let mut shards = Shards::new(0, 7);
        let (newer, older) = (1, NO_NAME);
        for name in 0..5_000 {
            shards.insert(Link { name, newer, older });
        }
        for name in 0..5_000 {
            let before = shards.tables[0].num_buckets();
            shards.remove(name);
            let (table, left) = (&shards.tables[0], 4_999 - name as usize);
            if left > 0 && left >= before / 8 {
                assert_eq!(table.num_buckets(), before, "{left} left");
            } else {
                assert!(table.num_buckets() < before, "{left} left");
                assert!(table.capacity() >= 2 * left, "{left} left");
            }
            assert_eq!(shards.bytes, table.allocation_size());
        }
        assert_eq!(shards.bytes, 0);
    }

    #[test]
    fn records_and_bytes_that_are_miscounted_are_noticed() {
        fn miscounts<T: Record>(of: impl Fn(&mut Links) -> &mut Shards<T>) {
            let mut links = Links::new(2, 7);
            links.add(1, 2, 3);
            links.add(1, 2, 4);
            assert!(links.is_counted());
            of(&mut links).len += 1;
            assert!(!links.is_counted());
            of(&mut links).len -= 1;
            of(&mut links).bytes += 1;
            assert!(!links.is_counted());
        }
        miscounts(|links| &mut links.places);
        miscounts(|links| &mut links.heads);
        miscounts(|links| &mut links.counts);
    }
}
