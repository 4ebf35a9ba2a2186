//! A hash table of children, from (parent, first block) to node. It is split into shards that grow separately, so no
//! insert pays for moving the whole table.

use hashbrown::HashTable;

use crate::ids::NodeIndex;

const SHARDS: usize = 256;

#[derive(Debug)]
pub(crate) struct EdgeTable {
    shards: Box<[HashTable<NodeIndex>; SHARDS]>,
    len: usize,
}

impl Default for EdgeTable {
    fn default() -> Self {
        Self {
            shards: Box::new(std::array::from_fn(|_| HashTable::new())),
            len: 0,
        }
    }
}

/// The shard and the hash within it. The highest byte chooses the shard. The hash is mixed again, because a shard's
/// table uses its lowest and highest bits.
fn place(hash: u64) -> (usize, u64) {
    let [.., shard] = hash.to_le_bytes();
    (shard.into(), hash.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl EdgeTable {
    /// Adds a node. `hash_of` is called for nodes that the shard moves when it grows.
    pub(crate) fn add(&mut self, hash: u64, node: NodeIndex, hash_of: impl Fn(NodeIndex) -> u64) {
        let (shard, hash) = place(hash);
        self.shards[shard].insert_unique(hash, node, |&node| place(hash_of(node)).1);
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, hash: u64, node: NodeIndex) {
        let (shard, hash) = place(hash);
        if let Ok(entry) = self.shards[shard].find_entry(hash, |&known| known == node) {
            entry.remove();
            self.len -= 1;
        }
    }

    /// Replaces a node with another that has the same hash.
    pub(crate) fn replace(&mut self, hash: u64, old: NodeIndex, new: NodeIndex) {
        let (shard, hash) = place(hash);
        if let Some(entry) = self.shards[shard].find_mut(hash, |&known| known == old) {
            *entry = new;
        }
    }

    pub(crate) fn find(
        &self,
        hash: u64,
        mut is_wanted: impl FnMut(NodeIndex) -> bool,
    ) -> Option<NodeIndex> {
        let (shard, hash) = place(hash);
        self.shards[shard]
            .find(hash, |&node| is_wanted(node))
            .copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let tables: usize = self.shards.iter().map(HashTable::allocation_size).sum();
        tables + SHARDS * size_of::<HashTable<NodeIndex>>()
    }
}
