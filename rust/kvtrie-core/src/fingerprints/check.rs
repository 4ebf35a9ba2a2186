//! Every invariant of the table.

use hashbrown::HashTable;

use super::bucket::Bucket;
use super::segment::MOST;
use super::{Fingerprints, NO_NAME, WORD_BITS};

impl Fingerprints {
    /// Verifies every invariant, and that the entries are those of `live`, each with its hash; says what is wrong.
    ///
    /// O(entries · log entries).
    pub(crate) fn check(&self, live: impl IntoIterator<Item = (u64, u32)>) -> Result<(), String> {
        let must = |condition: bool, what: &str| {
            if condition {
                Ok(())
            } else {
                Err(format!("Fingerprints.check: {what}"))
            }
        };
        let mut entries = Vec::with_capacity(self.len);
        let (mut buckets, mut links) = (0, 0);
        for (number, segment) in self.segments.iter().enumerate() {
            let size = segment.buckets.len();
            buckets += size;
            let lens = segment.buckets.iter().map(Bucket::len);
            must(
                lens.sum::<usize>() == segment.slots(),
                "slots are miscounted",
            )?;
            must(segment.slots() <= size * MOST, "a segment is too full")?;
            must(!segment.is_sparse(), "a segment is too empty")?;
            for (at, bucket) in segment.buckets.iter().enumerate() {
                must(bucket.passed == segment.marks(at), "a mark is wrong")?;
                for slot in 0..bucket.len() {
                    let tag = bucket.tag(slot);
                    let word = self.filter[number << WORD_BITS | tag.word()];
                    must(
                        word & tag.bits() == tag.bits(),
                        "the filter misses an entry",
                    )?;
                    let twin = segment.walk(tag, |bucket, here| {
                        let mut twins = here.slots_of(tag);
                        twins.find(|&twin| (bucket, twin) != (at, slot))
                    });
                    let mut name = bucket.names[slot];
                    if !bucket.is_chained(slot) {
                        entries.push((name, number, tag));
                        continue;
                    }
                    must(twin.is_none(), "a chain has a twin")?;
                    let count = self.links.get(name).map_or(0, |link| link.newer as usize);
                    must(count > 1, "a chain is too short")?;
                    links += count;
                    let mut newer = None;
                    for _ in 0..count {
                        let Some(link) = self.links.get(name) else {
                            return must(false, "a chain lacks a link");
                        };
                        must(
                            newer.is_none_or(|newer| link.newer == newer),
                            "a chain is torn",
                        )?;
                        entries.push((name, number, tag));
                        newer = Some(name);
                        name = link.older;
                    }
                    must(name == NO_NAME, "a chain goes on")?;
                }
            }
        }
        must(buckets == self.buckets, "buckets are miscounted")?;
        must(links == self.links.len, "a link has no chain")?;
        let shards = self.links.shards.iter();
        let bytes = shards.map(HashTable::allocation_size).sum::<usize>();
        must(
            bytes == self.links.bytes,
            "the bytes of links are miscounted",
        )?;
        must(entries.len() == self.len, "entries are miscounted")?;
        let mut expected: Vec<_> = live
            .into_iter()
            .map(|(hash, name)| {
                let (segment, tag) = self.locate(hash);
                (name, segment, tag)
            })
            .collect();
        expected.sort_unstable();
        entries.sort_unstable();
        must(entries == expected, "the entries are not the live ones")
    }
}
