//! Chains: the places of windows that have many, linked by name.

use hashbrown::HashTable;

use super::hasher::fold;
use super::{NO_NAME, index};

/// One place of a window that has many.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) name: u32,
    /// The place added after this one; in the newest, how many there are.
    pub(super) newer: u32,
    /// The place added before this one, or [`NO_NAME`].
    pub(super) older: u32,
}

/// The links of all chains, by name, in shards that grow by themselves.
#[derive(Clone, Debug)]
pub(super) struct Links {
    /// None before the first chain.
    pub(super) shards: Vec<HashTable<Link>>,
    shard_bits: u32,
    key: u64,
    pub(super) len: usize,
    pub(super) bytes: usize,
}

impl Links {
    pub(super) fn new(shard_bits: u32, key: u64) -> Self {
        Self {
            shards: Vec::new(),
            shard_bits,
            key,
            len: 0,
            bytes: 0,
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.shards.capacity() * size_of::<HashTable<Link>>() + self.bytes
    }

    fn hash(key: u64, name: u32) -> u64 {
        fold(u64::from(name) ^ !key, key)
    }

    /// The shard of a hash. A shard's table takes other bits.
    fn shard(&self, hash: u64) -> usize {
        index((hash << 8 >> 1) >> (63 - self.shard_bits))
    }

    pub(super) fn get(&self, name: u32) -> Option<&Link> {
        let hash = Self::hash(self.key, name);
        self.shards
            .get(self.shard(hash))?
            .find(hash, |link| link.name == name)
    }

    /// The link of a name that is known to have one.
    fn get_mut(&mut self, name: u32) -> &mut Link {
        let hash = Self::hash(self.key, name);
        let shard = self.shard(hash);
        self.shards[shard]
            .find_mut(hash, |link| link.name == name)
            .expect("a chain names a place that has no link")
    }

    pub(super) fn insert(&mut self, link: Link) {
        if self.shards.is_empty() {
            self.shards = vec![HashTable::new(); 1 << self.shard_bits];
        }
        let key = self.key;
        let hash = Self::hash(key, link.name);
        let shard = self.shard(hash);
        let shard = &mut self.shards[shard];
        if shard.len() == shard.capacity() {
            self.bytes -= shard.allocation_size();
            shard.reserve(1, |link| Self::hash(key, link.name));
            self.bytes += shard.allocation_size();
        }
        shard.insert_unique(hash, link, |link| Self::hash(key, link.name));
        self.len += 1;
    }

    fn remove(&mut self, name: u32) -> Option<Link> {
        let key = self.key;
        let hash = Self::hash(key, name);
        let shard = self.shard(hash);
        let shard = self.shards.get_mut(shard)?;
        let found = shard.find_entry(hash, |link| link.name == name).ok()?;
        let (link, _) = found.remove();
        if shard.is_empty() || shard.len() < shard.num_buckets() / 8 {
            self.bytes -= shard.allocation_size();
            shard.shrink_to(shard.len() * 2, |link| Self::hash(key, link.name));
            self.bytes += shard.allocation_size();
        }
        self.len -= 1;
        Some(link)
    }

    /// Puts `name` in front of the chain whose newest place is `newest`.
    pub(super) fn put_before(&mut self, newest: u32, name: u32) {
        let count = std::mem::replace(&mut self.get_mut(newest).newer, name);
        self.insert(Link {
            name,
            newer: count + 1,
            older: newest,
        });
    }

    /// Takes `name` out of the chain whose newest place is `newest`. Answers the newest that is left, and how many
    /// are; a single one has no link.
    pub(super) fn take_out(&mut self, name: u32, newest: u32) -> Option<(u32, u32)> {
        let link = self.remove(name)?;
        let (newest, count) = if name == newest {
            (link.older, link.newer - 1)
        } else {
            self.get_mut(link.newer).older = link.older;
            if link.older != NO_NAME {
                self.get_mut(link.older).newer = link.newer;
            }
            (newest, self.get_mut(newest).newer - 1)
        };
        if count == 1 {
            self.remove(newest);
        } else {
            self.get_mut(newest).newer = count;
        }
        Some((newest, count))
    }

    /// Looks for the links of a batch, so that their cache misses overlap.
    pub(super) fn touch(&self, batch: &[(u64, u32)]) {
        let links = batch.iter().filter_map(|&(_, name)| self.get(name));
        std::hint::black_box(links.fold(0, |any, link| any | link.older));
    }
}
