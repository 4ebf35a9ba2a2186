//! The order of the places of one window, and whether a table can be rebuilt from given hashes.

use std::collections::BTreeMap;

use super::Fingerprints;
use super::shard::FILL;

/// Most distinct windows with one home bucket. Hashes that nobody chose give [`FILL`] on average.
const CROWD: usize = 512;

impl Fingerprints {
    /// Names of the windows that share a location with another window of their tree, in groups: each group oldest
    /// first, and groups sorted by their names. The order of other windows has no effect.
    pub(crate) fn grouped(&self, tree_of: impl Fn(u32) -> u32) -> Vec<u32> {
        let mut groups: BTreeMap<(u64, u32), Vec<u32>> = BTreeMap::new();
        for (number, shard) in self.shards.iter().enumerate() {
            for (at, bucket) in shard.buckets.iter().enumerate() {
                for slot in 0..bucket.len() {
                    let tag = bucket.tag(slot);
                    let copies = shard.copies(tag);
                    let oldest = copies.places[0];
                    let is_oldest = (oldest.bucket, oldest.slot) == (at, slot);
                    if bucket.is_chained(slot)
                        || !is_oldest
                        || copies.len < 2 && copies.chained.is_none()
                    {
                        continue;
                    }
                    for copy in &copies.places[..copies.len] {
                        let name = shard.buckets[copy.bucket].names[copy.slot];
                        let group = (Self::location(number, tag), tree_of(name));
                        groups.entry(group).or_default().push(name);
                    }
                }
            }
        }
        for (location, tree, newest) in self.links.chains() {
            let mut names: Vec<u32> = self.links.names(newest).collect();
            names.reverse();
            groups.entry((location, tree)).or_default().extend(names);
        }
        let groups = groups.into_values().filter(|group| group.len() > 1);
        let mut groups: Vec<Vec<u32>> = groups.collect();
        groups.sort_unstable();
        groups.concat()
    }

    /// Whether the hashes are spread like unchosen ones, so that none costs more than a few steps. Sorts them.
    pub(crate) fn spreads(&self, hashes: &mut [u64]) -> bool {
        hashes.sort_unstable();
        let mut rest = hashes.iter().map(|&hash| self.locate(hash)).peekable();
        let mut tags = Vec::new();
        while let Some((shard, tag)) = rest.next() {
            tags.push(tag);
            if rest.peek().is_some_and(|&(next, _)| next == shard) {
                continue;
            }
            tags.dedup();
            let buckets = tags.len().div_ceil(FILL);
            let crowded = tags
                .windows(CROWD + 1)
                .any(|window| window[0].home(buckets) == window[CROWD].home(buckets));
            if crowded {
                return false;
            }
            tags.clear();
        }
        true
    }
}
