//! Adds and removes many places at once, so that their cache misses overlap.

use super::bucket::SLOTS;
use super::{BATCH, Entry, Fingerprints};

impl Fingerprints {
    pub(crate) fn add_all(&mut self, entries: &[Entry]) {
        let mut links = false;
        for batch in entries.chunks(BATCH) {
            self.touch(batch, links);
            let before = self.links.len();
            for &entry in batch {
                self.add(entry);
            }
            links = self.links.len() - before > batch.len() / 2;
        }
    }

    pub(crate) fn remove_all(&mut self, entries: &[Entry]) -> usize {
        let (mut links, all) = (false, self.len);
        for batch in entries.chunks(BATCH) {
            self.touch(batch, links);
            let before = self.links.len();
            for &entry in batch {
                self.remove(entry);
            }
            links = before - self.links.len() > batch.len() / 2;
        }
        all - self.len
    }

    /// Reads a little of each cache line that the batch will need. Links are read only if most of the last batch were
    /// links.
    fn touch(&self, batch: &[Entry], links: bool) {
        let mut touched = 0;
        for &Entry { hash, .. } in batch {
            let (shard, tag) = self.locate(hash);
            touched |= self.filter[self.word(hash)];
            if let Some(bucket) = self.shards[shard].home(tag) {
                touched |= u64::from(bucket.passed) | u64::from(bucket.names[SLOTS - 1]);
            }
        }
        std::hint::black_box(touched);
        if links {
            self.links.touch(batch);
        }
    }
}
