//! Checks of the table, for tests and [`check`](crate::RadixIndex::check).

use super::bucket::Bucket;
use super::shard::MOST;
use super::{Entry, Fingerprints, NO_NAME, TAG_BITS, Tag, WORD_BITS, index};

impl Fingerprints {
    /// Checks all invariants, and that the entries are those of `live`. O(entries · log entries).
    pub(crate) fn check(&self, live: impl IntoIterator<Item = Entry>) -> Result<(), String> {
        let must = |condition: bool, what: &str| {
            if condition {
                Ok(())
            } else {
                Err(format!("fingerprints: {what}"))
            }
        };
        let mut entries = Vec::with_capacity(self.len);
        let (mut buckets, mut links) = (0, 0);
        for (number, shard) in self.shards.iter().enumerate() {
            let size = shard.buckets.len();
            buckets += size;
            let lens = shard.buckets.iter().map(Bucket::len);
            must(lens.sum::<usize>() == shard.slots(), "slots are miscounted")?;
            must(shard.slots() <= size * MOST, "a shard is too full")?;
            must(!shard.is_sparse(), "a shard is too empty")?;
            for (at, bucket) in shard.buckets.iter().enumerate() {
                must(bucket.passed == shard.marks(at), "a mark is wrong")?;
                for slot in 0..bucket.len() {
                    let tag = bucket.tag(slot);
                    let word = self.filter[number << WORD_BITS | tag.word()];
                    must(
                        word & tag.bits() == tag.bits(),
                        "the filter misses an entry",
                    )?;
                    let name = bucket.names[slot];
                    if !bucket.is_chained(slot) {
                        entries.push((name, number, tag, None));
                        continue;
                    }
                    let twin = shard.walk(tag, |bucket, here| {
                        let mut twins = here.slots_of(tag).filter(|&twin| here.is_chained(twin));
                        twins.find(|&twin| (bucket, twin) != (at, slot))
                    });
                    must(twin.is_none(), "a slot of chains has a twin")?;
                    must(name == NO_NAME, "a slot of chains has a name")?;
                    let count = self.links.count(Self::location(number, tag));
                    must(count > 0, "a slot of chains has none")?;
                    links += count;
                }
            }
        }
        must(links == self.links.len(), "a link has no slot")?;
        for (location, tree, newest) in self.links.chains() {
            let count = self.links.get(newest).map_or(0, |link| link.newer);
            let mut newer = None;
            let mut left = count;
            for name in self.links.names(newest) {
                let link = self.links.get(name);
                let torn = link.is_none_or(|link| newer.is_some_and(|newer| link.newer != newer));
                must(!torn && left > 0, "a chain is torn")?;
                let tag = location & ((1 << TAG_BITS) - 1);
                let tag = Tag(u32::try_from(tag).unwrap_or_default());
                entries.push((name, index(location >> TAG_BITS), tag, Some(tree)));
                newer = Some(name);
                left -= 1;
            }
            must(left == 0, "a chain is too short")?;
        }
        must(buckets == self.buckets, "buckets are miscounted")?;
        must(self.links.is_counted(), "the bytes of links are miscounted")?;
        must(entries.len() == self.len, "entries are miscounted")?;
        let mut expected: Vec<_> = live
            .into_iter()
            .map(|Entry { hash, tree, name }| {
                let (shard, tag) = self.locate(hash);
                (name, shard, tag, tree)
            })
            .collect();
        expected.sort_unstable();
        entries.sort_unstable();
        let same = entries.iter().zip(&expected).all(|(entry, live)| {
            let tree = entry.3.unwrap_or(live.3);
            (entry.0, entry.1, entry.2, tree) == *live
        });
        must(
            same && entries.len() == expected.len(),
            "the entries are not the live ones",
        )
    }
}
