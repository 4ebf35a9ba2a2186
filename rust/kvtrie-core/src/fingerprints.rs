//! Where were these eight tokens stored before? A table from the hash of a window to the names of its places.
//!
//! Moved runs are found through windows of [`WINDOW`] tokens: every few stored positions one is added, and every
//! window of a prompt is looked up. The table nominates and never decides: it keeps a few bits of each hash, so a
//! caller compares tokens before it believes a place. A *name* is a `u32` of the caller's choice, below `u32::MAX`; it
//! has at most one entry at a time, and is removed with the hash that it was added with.
//!
//! # Promises
//!
//! - Every place of a window is among its candidates, most recently added first. Nothing is dropped: a caller that
//!   wants the newest few takes so many, and knows the number of all.
//! - The same calls on a table of the same seed give the same answers in the same order. Without the candidates that
//!   are places of other windows, answers do not depend on the seed.
//! - A window with 10⁶ places costs what 10⁶ windows cost, within a small factor, and its neighbours nothing.
//! - Nothing is rehashed as a whole: the longest pause is that of one segment, about 2,000 entries.
//!
//! # Costs
//!
//! `add` and `remove` are expected O(1), as is a candidate. A single one waits for three cache lines; a batch asks for
//! those of [`BATCH`] entries before it uses the first. Measured (Zen 4 at 2.6 GHz, 32 MB of shared third-level cache,
//! pages of 4 KB), medians in µs:
//!
//! | work | add | remove |
//! |---|---|---|
//! | 910 places in batches, among 1.8 M, right after the last ones | 40 | 45 |
//! | … after 4 MB of other memory were written | 50 | 55 |
//! | … after 96 MB were (nothing is left in any cache) | 110 | 145 |
//! | 910 places one by one, right after the last ones | 70 | 140 |
//! | 910 places of one window in batches, among 1.8 M places of it | 45 | 90 |
//!
//! | 100,000 windows with nothing to find | 111,000 entries | 1.1 M | 1.8 M |
//! |---|---|---|---|
//! | hashed (140) and screened | 300 | 440 | 470 |
//! | screened after 96 MB of other memory were written | 380 | 920 | 1,010 |
//!
//! The longest pause of one call is 20 µs. An entry takes 10 bytes where the table holds what it was made for (9.4 to
//! 10.6 by size, 10⁵ to 2·10⁶): 1.1 bytes a token at one window in nine. Of these, filter and segments (1 to 2 bytes
//! for each entry that the table was made for) are there from the start. A place of a window that has more than four
//! takes about 15 bytes instead.
//!
//! # Structure
//!
//! The head of a hash chooses a *segment*, a small table of *buckets* of 18 entries in two cache lines, which is
//! rebuilt a few buckets larger or smaller by itself. The next 23 bits are the *tag*, the only bits kept: the home
//! bucket is the tag's share of the segment, so a segment of any size can be rebuilt from tags alone, and a growing
//! one stays 78 to 89 % full. Of 100,000 windows that are not there, some 20 have a false candidate. An entry that
//! finds its home full goes to the next bucket with room, and leaves a mark where it passed.
//!
//! Entries of one tag stand in the order in which they came. From the fifth on they share one slot, which holds the
//! name of the newest; behind it they hang as a linked list in a hash table by name, so that any of them leaves at
//! once.
//!
//! In front lies a *filter* of two bits an entry, in words that the head of the hash names: small enough for the
//! second-level cache where the buckets are not. A removed entry leaves its bits until its segment is wiped, after as
//! many removals as a quarter of its entries.
//!
//! Tried and dropped: looking misses up in the buckets alone (8 to 24 ns a window from 10⁵ to 10⁶ entries; with the
//! filter 2 to 4); buckets of nine in one cache line (no faster to write, and twice as many entries find their home
//! full); a filter kept exact at each removal (200 ns a removal); half as large a filter (a quarter more time for
//! misses at 10⁵ entries, for half a byte an entry); NH, a sum of products, as the hash (1.6 to 2 ns a window without
//! AVX2, now 1.4).

use hashbrown::HashTable;

/// Tokens of a window.
pub(crate) const WINDOW: usize = 8;

/// "No place": ends a chain, and is the name of none.
const NO_NAME: u32 = u32::MAX;

/// Entries of a bucket: as many as fit two cache lines.
const SLOTS: usize = 18;

/// Entries a bucket, on average over a segment, at which it grows; with which it is rebuilt; below which it shrinks.
const MOST: usize = 16;
const FILL: usize = 14;
const LEAST: usize = 9;

/// Bits of the hash that an entry keeps.
const TAG_BITS: u32 = 23;

/// Set beside the tag of a slot that stands for a chain.
const CHAINED: u8 = 0x80;

/// Places of one window that have a slot each; more of them share one slot, and a chain.
const MAX_INLINE: usize = 4;

/// Entries of a segment when the table holds as many as it was made for: between half of it and all.
const SEGMENT_ENTRIES: usize = 2048;

/// Most segments, whatever the table is made for.
const MAX_SEGMENT_BITS: u32 = 16;

/// Words of the filter for a segment.
const WORD_BITS: u32 = 8;

/// Steps of a batch: so many cache lines are asked for before the first is used.
const BATCH: usize = 64;

/// Hashes that are screened together.
const SCREEN: usize = 256;

/// The keyed hash of windows: a folded product of tokens for each half, and one of these two.
#[derive(Clone, Debug)]
pub(crate) struct WindowHasher {
    keys: [u64; 4],
    mask: u64,
}

impl WindowHasher {
    /// `bits` (0 to 64) cuts every hash, so that tests can force collisions.
    pub(crate) fn new(seed: u64, bits: u32) -> Self {
        let mut state = seed;
        Self {
            keys: std::array::from_fn(|_| random(&mut state)),
            mask: u64::MAX
                .checked_shl(64_u32.saturating_sub(bits))
                .unwrap_or(0),
        }
    }

    /// Hash of one window. Equal windows of different spaces (a number for each namespace) are different windows.
    #[inline]
    pub(crate) fn hash(&self, space: u64, window: &[u32; WINDOW]) -> u64 {
        let (first, second) = window.split_at(WINDOW / 2);
        self.whole(space, self.half(first), self.half(second))
    }

    /// Hashes of all windows of `tokens`, in order: `hashes[i]` is that of `tokens[i..i + 8]`.
    ///
    /// # Panics
    /// If `hashes` has not one place for each window.
    pub(crate) fn hash_all(&self, space: u64, tokens: &[u32], hashes: &mut [u64]) {
        assert_eq!(hashes.len(), (tokens.len() + 1).saturating_sub(WINDOW));
        let Some(first) = tokens.first_chunk::<{ WINDOW - 1 }>() else {
            return;
        };
        // One half a window: the other is what was computed four windows ago. In two loops, one for all halves, the
        // compiler would vectorise what it can, and lose more by moving numbers than it gains.
        let mut held: [u64; 4] = std::array::from_fn(|at| self.half(&first[at..]));
        let halves = tokens[WINDOW / 2..].windows(WINDOW / 2);
        for (hash, half) in hashes.iter_mut().zip(halves) {
            let next = self.half(half);
            *hash = self.whole(space, held[0], next);
            held = [held[1], held[2], held[3], next];
        }
    }

    #[inline]
    fn half(&self, tokens: &[u32]) -> u64 {
        let pair = |low, high| u64::from(low) | u64::from(high) << 32;
        fold(
            pair(tokens[0], tokens[1]) ^ self.keys[0],
            pair(tokens[2], tokens[3]) ^ self.keys[1],
        )
    }

    #[inline]
    fn whole(&self, space: u64, first: u64, second: u64) -> u64 {
        fold(first ^ self.keys[2] ^ space, second ^ self.keys[3]) & self.mask
    }
}

/// The next number of splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *state;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// The two halves of a product, xored.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

/// A number below 2³² as an index.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "callers keep it small")]
fn index(bits: u64) -> usize {
    bits as usize
}

/// What an entry keeps of its hash: the bits behind those that chose the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Tag(u32);

impl Tag {
    #[inline]
    fn low(self) -> u16 {
        let [low, high, _, _] = self.0.to_le_bytes();
        u16::from_le_bytes([low, high])
    }

    #[inline]
    fn high(self) -> u8 {
        self.0.to_le_bytes()[2]
    }

    /// Of so many buckets, the one where an entry is looked for first. It grows with the tag.
    #[inline]
    fn home(self, buckets: usize) -> usize {
        index((u64::from(self.0) * buckets as u64) >> TAG_BITS)
    }

    /// The word of the filter among those of the segment.
    #[inline]
    fn word(self) -> usize {
        (self.0 >> (TAG_BITS - WORD_BITS)) as usize
    }

    /// The two bits of that word.
    #[inline]
    fn bits(self) -> u64 {
        1 << (self.0 & 63) | 1 << (self.0 >> 6 & 63)
    }

    /// The bit of [`Bucket::passed`] that says that such an entry may have gone on from there.
    #[inline]
    fn mark(self) -> u8 {
        1 << (self.0 & 7)
    }
}

/// Two cache lines of entries. The first line tells whether a tag is here; entries of one tag stand oldest first.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
struct Bucket {
    low: [u16; SLOTS],
    high: [u8; SLOTS],
    len: u8,
    /// Marks of the entries that found no room here or before, and went on.
    passed: u8,
    names: [u32; SLOTS],
}

impl Bucket {
    const EMPTY: Self = Self {
        low: [0; SLOTS],
        high: [0; SLOTS],
        len: 0,
        passed: 0,
        names: [NO_NAME; SLOTS],
    };

    #[inline]
    fn len(&self) -> usize {
        // The minimum is free, and spares the checks of every slot below it.
        usize::from(self.len).min(SLOTS)
    }

    #[inline]
    fn tag(&self, slot: usize) -> Tag {
        Tag(u32::from(self.high[slot] & !CHAINED) << 16 | u32::from(self.low[slot]))
    }

    #[inline]
    fn is_chained(&self, slot: usize) -> bool {
        self.high[slot] & CHAINED != 0
    }

    #[inline]
    fn passes_on(&self, tag: Tag) -> bool {
        self.passed & tag.mark() != 0
    }

    /// Whether a slot may hold the tag: always if one does, hardly ever else. Compares all slots at once.
    #[inline]
    fn may_hold(&self, tag: Tag) -> bool {
        let wanted = tag.low();
        self.low
            .iter()
            .fold(0, |any, &low| any | u16::from(low == wanted))
            != 0
    }

    /// The slots that hold the tag, oldest first.
    fn slots_of(&self, tag: Tag) -> impl Iterator<Item = usize> {
        (0..self.len()).filter(move |&slot| self.tag(slot) == tag)
    }

    /// The slot of this entry, or of the chain that it is part of if it exists.
    #[inline]
    fn slot_of(&self, tag: Tag, name: u32) -> Option<usize> {
        let mut slot = SLOTS;
        for (at, &here) in self.names.iter().enumerate() {
            slot = if here == name { at } else { slot };
        }
        if slot < self.len() && self.tag(slot) == tag {
            return Some(slot);
        }
        if self.may_hold(tag) {
            return self.slots_of(tag).find(|&slot| self.is_chained(slot));
        }
        None
    }

    fn push(&mut self, tag: Tag, flag: u8, name: u32) {
        let slot = self.len();
        self.low[slot] = tag.low();
        self.high[slot] = tag.high() | flag;
        self.names[slot] = name;
        self.len += 1;
    }

    fn take_out(&mut self, slot: usize) {
        let last = self.len() - 1;
        let moved = self.low[last];
        if self.low.iter().filter(|&&low| low == moved).count() == 1 {
            self.low[slot] = moved;
            self.high[slot] = self.high[last];
            self.names[slot] = self.names[last];
        } else {
            // The last entry may have a twin here, and must stay behind it.
            self.low.copy_within(slot + 1..=last, slot);
            self.high.copy_within(slot + 1..=last, slot);
            self.names.copy_within(slot + 1..=last, slot);
        }
        self.low[last] = 0;
        self.names[last] = NO_NAME;
        self.len -= 1;
    }
}

/// Where an entry stands in its segment.
#[derive(Clone, Copy, Debug)]
struct Place {
    bucket: usize,
    slot: usize,
}

/// The buckets for one range of hashes.
#[derive(Clone, Debug, Default)]
struct Segment {
    buckets: Box<[Bucket]>,
    /// Slots in use.
    slots: u32,
    /// Slots given up since the words of the filter were last wiped.
    gone: u32,
}

impl Segment {
    #[inline]
    fn slots(&self) -> usize {
        self.slots as usize
    }

    #[inline]
    fn home(&self, tag: Tag) -> Option<&Bucket> {
        self.buckets.get(tag.home(self.buckets.len()))
    }

    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() {
            0
        } else {
            bucket + 1
        }
    }

    /// Calls `visit` with each bucket that may hold the tag, until it answers.
    #[inline]
    fn walk<T>(&self, tag: Tag, mut visit: impl FnMut(usize, &Bucket) -> Option<T>) -> Option<T> {
        let mut at = tag.home(self.buckets.len());
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            if let Some(found) = visit(at, bucket) {
                return Some(found);
            }
            if !bucket.passes_on(tag) {
                break;
            }
            at = self.next(at);
        }
        None
    }

    /// The entries of a tag, oldest first, and how many they are.
    #[inline]
    fn copies(&self, tag: Tag) -> ([Place; MAX_INLINE], usize) {
        let mut copies = [Place { bucket: 0, slot: 0 }; MAX_INLINE];
        let mut num_copies = 0;
        self.walk(tag, |bucket, here| {
            if here.may_hold(tag) {
                for slot in here.slots_of(tag) {
                    copies[num_copies] = Place { bucket, slot };
                    num_copies += 1;
                }
            }
            None::<()>
        });
        (copies, num_copies)
    }

    /// Adds an entry in its home, or in the next bucket with room.
    fn push(&mut self, tag: Tag, flag: u8, name: u32) {
        let mut at = tag.home(self.buckets.len());
        while self.buckets[at].len() == SLOTS {
            self.buckets[at].passed |= tag.mark();
            at = self.next(at);
        }
        self.buckets[at].push(tag, flag, name);
        self.slots += 1;
    }

    fn take_out(&mut self, place: Place) {
        let home = self.buckets[place.bucket]
            .tag(place.slot)
            .home(self.buckets.len());
        self.buckets[place.bucket].take_out(place.slot);
        self.slots -= 1;
        self.gone += 1;
        let mut at = place.bucket;
        while at != home {
            at = at.checked_sub(1).unwrap_or(self.buckets.len() - 1);
            self.buckets[at].passed = self.marks(at);
        }
    }

    /// The marks that a bucket needs, if those of the buckets behind it are right.
    fn marks(&self, bucket: usize) -> u8 {
        let buckets = self.buckets.len();
        let mut marks = 0;
        let mut at = bucket;
        for distance in 1..buckets {
            at = self.next(at);
            let here = &self.buckets[at];
            for tag in (0..here.len()).map(|slot| here.tag(slot)) {
                let home = tag.home(buckets);
                let come = if at < home { at + buckets } else { at } - home;
                if come >= distance {
                    marks |= tag.mark();
                }
            }
            if here.passed == 0 {
                break;
            }
        }
        marks
    }

    /// Whether it has buckets to spare.
    fn is_sparse(&self) -> bool {
        let buckets = self.buckets.len();
        self.slots() < buckets * LEAST && self.slots().div_ceil(FILL) < buckets
    }

    /// Moves all entries to as many buckets as suit `slots` of them.
    #[cold]
    fn resize(&mut self, slots: usize) {
        let mut resized = Self {
            buckets: vec![Bucket::EMPTY; slots.div_ceil(FILL)].into(),
            slots: 0,
            gone: self.gone,
        };
        // By home, and not as they stand: entries that went on from the last bucket stand in the first ones.
        for home in 0..self.buckets.len() {
            let mut at = home;
            for _ in 0..self.buckets.len() {
                let bucket = &self.buckets[at];
                for slot in 0..bucket.len() {
                    let tag = bucket.tag(slot);
                    if tag.home(self.buckets.len()) == home {
                        let flag = bucket.high[slot] & CHAINED;
                        resized.push(tag, flag, bucket.names[slot]);
                    }
                }
                if bucket.passed == 0 {
                    break;
                }
                at = self.next(at);
            }
        }
        *self = resized;
    }

    /// Writes the words of the filter anew, without the bits of entries that are gone.
    #[cold]
    fn wipe(&mut self, words: &mut [u64]) {
        self.gone = 0;
        words.fill(0);
        for bucket in &self.buckets {
            for tag in (0..bucket.len()).map(|slot| bucket.tag(slot)) {
                words[tag.word()] |= tag.bits();
            }
        }
    }
}

/// One place of a window that has many.
#[derive(Clone, Copy, Debug)]
struct Link {
    name: u32,
    /// The place added after this one; in the newest, how many there are.
    newer: u32,
    /// The place added before this one, or [`NO_NAME`].
    older: u32,
}

/// The links of all chains, by name, in shards that grow by themselves.
#[derive(Clone, Debug)]
struct Links {
    /// None before the first chain.
    shards: Vec<HashTable<Link>>,
    shard_bits: u32,
    key: u64,
    len: usize,
    bytes: usize,
}

impl Links {
    fn hash(key: u64, name: u32) -> u64 {
        fold(u64::from(name) ^ !key, key)
    }

    /// The shard of a hash. A shard's table takes other bits.
    fn shard(&self, hash: u64) -> usize {
        index((hash << 8 >> 1) >> (63 - self.shard_bits))
    }

    fn get(&self, name: u32) -> Option<&Link> {
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

    fn insert(&mut self, link: Link) {
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
    fn put_before(&mut self, newest: u32, name: u32) {
        let count = std::mem::replace(&mut self.get_mut(newest).newer, name);
        self.insert(Link {
            name,
            newer: count + 1,
            older: newest,
        });
    }

    /// Takes `name` out of the chain whose newest place is `newest`. Answers the newest that is left, and how many
    /// are; a single one has no link.
    fn take_out(&mut self, name: u32, newest: u32) -> Option<(u32, u32)> {
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
    fn touch(&self, batch: &[(u64, u32)]) {
        let links = batch.iter().filter_map(|&(_, name)| self.get(name));
        std::hint::black_box(links.fold(0, |any, link| any | link.older));
    }
}

/// The table.
#[derive(Clone, Debug)]
pub(crate) struct Fingerprints {
    hasher: WindowHasher,
    /// Two bits an entry, and those of some that are gone.
    filter: Vec<u64>,
    segments: Vec<Segment>,
    segment_bits: u32,
    links: Links,
    len: usize,
    buckets: usize,
}

impl Fingerprints {
    /// A table for `capacity` entries. It takes more, but its longest pause and its false candidates grow with them;
    /// one that stays emptier has the filter and the segments of a full one.
    ///
    /// `hash_bits` (0 to 64) cuts every hash, so that tests can force collisions.
    pub(crate) fn new(seed: u64, hash_bits: u32, capacity: usize) -> Self {
        let segment_bits = (capacity / SEGMENT_ENTRIES + 1)
            .next_power_of_two()
            .ilog2()
            .min(MAX_SEGMENT_BITS);
        let mut state = !seed;
        Self {
            hasher: WindowHasher::new(seed, hash_bits),
            filter: vec![0; 1 << (segment_bits + WORD_BITS)],
            segments: vec![Segment::default(); 1 << segment_bits],
            segment_bits,
            links: Links {
                shards: Vec::new(),
                shard_bits: segment_bits,
                key: random(&mut state),
                len: 0,
                bytes: 0,
            },
            len: 0,
            buckets: 0,
        }
    }

    /// What hashes the windows of this table.
    pub(crate) fn hasher(&self) -> &WindowHasher {
        &self.hasher
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.filter.capacity() * size_of::<u64>()
            + self.segments.capacity() * size_of::<Segment>()
            + self.buckets * size_of::<Bucket>()
            + self.links.shards.capacity() * size_of::<HashTable<Link>>()
            + self.links.bytes
    }

    /// The segment and the tag of a hash.
    #[inline]
    fn locate(&self, hash: u64) -> (usize, Tag) {
        let segment = (hash >> 1) >> (63 - self.segment_bits);
        let tag = (hash << self.segment_bits) >> (64 - TAG_BITS);
        (index(segment), Tag((tag & 0xffff_ffff) as u32))
    }

    /// The word of the filter for a hash.
    #[inline]
    fn word(&self, hash: u64) -> usize {
        index(hash >> (64 - WORD_BITS - self.segment_bits))
    }

    /// Adds a place of a window. The name has no entry yet.
    pub(crate) fn add(&mut self, hash: u64, name: u32) {
        debug_assert_ne!(name, NO_NAME, "no place has this name");
        let (number, tag) = self.locate(hash);
        let word = self.word(hash);
        self.filter[word] |= tag.bits();
        self.len += 1;
        let segment = &mut self.segments[number];
        if segment.slots() >= segment.buckets.len() * MOST {
            self.buckets -= segment.buckets.len();
            segment.resize(segment.slots() + 1);
            self.buckets += segment.buckets.len();
        }
        let (copies, num_copies) = segment.copies(tag);
        if num_copies == 0 {
            segment.push(tag, 0, name);
            return;
        }
        let names = copies.map(|place| segment.buckets[place.bucket].names[place.slot]);
        let Place { bucket, slot } = copies[0];
        if segment.buckets[bucket].is_chained(slot) {
            let newest = std::mem::replace(&mut segment.buckets[bucket].names[slot], name);
            self.links.put_before(newest, name);
        } else if num_copies < MAX_INLINE {
            segment.push(tag, 0, name);
            // Room was found behind the others or between them, but the order is that of age.
            let (copies, _) = segment.copies(tag);
            for (place, name) in copies.iter().zip(names[..num_copies].iter().chain([&name])) {
                segment.buckets[place.bucket].names[place.slot] = *name;
            }
        } else {
            // A chain of one, that is its own newest.
            self.links.insert(Link {
                name: names[0],
                newer: 1,
                older: NO_NAME,
            });
            self.links.put_before(names[0], names[1]);
            self.links.put_before(names[1], names[2]);
            self.links.put_before(names[2], names[3]);
            self.links.put_before(names[3], name);
            for &place in copies[1..].iter().rev() {
                segment.take_out(place);
            }
            segment.buckets[bucket].high[slot] |= CHAINED;
            segment.buckets[bucket].names[slot] = name;
            self.settle(number);
        }
    }

    /// Wipes or shrinks a segment that lost entries, where it is time to.
    fn settle(&mut self, number: usize) {
        let segment = &mut self.segments[number];
        if segment.gone > segment.slots / 4 + 8 {
            segment.wipe(&mut self.filter[number << WORD_BITS..][..1 << WORD_BITS]);
        }
        if segment.is_sparse() {
            self.buckets -= segment.buckets.len();
            segment.resize(segment.slots());
            self.buckets += segment.buckets.len();
        }
    }

    /// Removes the place that was added with this hash and name; answers whether there was one. No other hash has an
    /// entry of this name.
    pub(crate) fn remove(&mut self, hash: u64, name: u32) -> bool {
        let (number, tag) = self.locate(hash);
        let segment = &mut self.segments[number];
        let found = segment.walk(tag, |bucket, here| {
            let slot = here.slot_of(tag, name)?;
            Some(Place { bucket, slot })
        });
        let Some(place) = found else {
            return false;
        };
        let bucket = &mut segment.buckets[place.bucket];
        if bucket.is_chained(place.slot) {
            let newest = &mut bucket.names[place.slot];
            let Some((left, count)) = self.links.take_out(name, *newest) else {
                return false;
            };
            *newest = left;
            if count == 1 {
                bucket.high[place.slot] &= !CHAINED;
            }
        } else {
            segment.take_out(place);
            self.settle(number);
        }
        self.len -= 1;
        true
    }

    /// Adds places, in this order, as [`add`](Self::add) does; their cache misses overlap.
    pub(crate) fn add_all(&mut self, places: &[(u64, u32)]) {
        let mut links = false;
        for batch in places.chunks(BATCH) {
            self.touch(batch, links);
            let before = self.links.len;
            for &(hash, name) in batch {
                self.add(hash, name);
            }
            links = self.links.len - before > batch.len() / 2;
        }
    }

    /// Removes places as [`remove`](Self::remove) does, and answers how many there were; their cache misses overlap.
    pub(crate) fn remove_all(&mut self, places: &[(u64, u32)]) -> usize {
        let (mut links, all) = (false, self.len);
        for batch in places.chunks(BATCH) {
            self.touch(batch, links);
            let before = self.links.len;
            for &(hash, name) in batch {
                self.remove(hash, name);
            }
            links = before - self.links.len > batch.len() / 2;
        }
        all - self.len
    }

    /// Reads a little of every cache line that a batch will need: of links only if the last batch was about those.
    fn touch(&self, batch: &[(u64, u32)], links: bool) {
        let mut touched = 0;
        for &(hash, _) in batch {
            let (segment, tag) = self.locate(hash);
            touched |= self.filter[self.word(hash)];
            if let Some(bucket) = self.segments[segment].home(tag) {
                touched |= u64::from(bucket.passed) | u64::from(bucket.names[SLOTS - 1]);
            }
        }
        std::hint::black_box(touched);
        if links {
            self.links.touch(batch);
        }
    }

    /// The places of a window, most recently added first, among which may be some of other windows.
    #[inline]
    pub(crate) fn candidates(&self, hash: u64) -> Candidates<'_> {
        let (segment, tag) = self.locate(hash);
        let segment = &self.segments[segment];
        let mut found = Candidates {
            links: &self.links,
            names: [NO_NAME; MAX_INLINE],
            left: 0,
            chained: false,
        };
        segment.walk(tag, |_, bucket| {
            if bucket.may_hold(tag) {
                for slot in bucket.slots_of(tag) {
                    found.names[found.left] = bucket.names[slot];
                    found.left += 1;
                    found.chained |= bucket.is_chained(slot);
                }
            }
            None::<()>
        });
        if found.chained {
            let newest = self.links.get(found.names[0]);
            found.left = newest.map_or(0, |link| link.newer as usize);
        }
        found
    }

    /// Appends the positions in `hashes` of those that have candidates, and of hardly any other.
    ///
    /// Much faster than asking for the candidates of each where few have any: three rounds over some hundred hashes,
    /// each of which reads one cache line for what the last one left, and waits for none before it asks for the next.
    pub(crate) fn screen(&self, hashes: &[u64], found: &mut Vec<u32>) {
        let mut kept = [0_u32; SCREEN];
        for (chunk, first) in hashes.chunks(SCREEN).zip((0_u32..).step_by(SCREEN)) {
            let mut num_kept = 0;
            for (at, &hash) in (0_u32..).zip(chunk) {
                let word = self.filter[self.word(hash)];
                let Tag(tag) = self.locate(hash).1;
                kept[num_kept % SCREEN] = at;
                num_kept += index(word >> (tag & 63) & word >> (tag >> 6 & 63) & 1);
            }
            let mut num_held = 0;
            for at in 0..num_kept {
                let (segment, tag) = self.locate(chunk[kept[at] as usize]);
                let home = self.segments[segment].home(tag);
                kept[num_held] = kept[at];
                num_held += usize::from(home.is_some_and(|b| b.may_hold(tag) | b.passes_on(tag)));
            }
            for &at in &kept[..num_held] {
                let (segment, tag) = self.locate(chunk[at as usize]);
                let held = |_, bucket: &Bucket| bucket.may_hold(tag).then_some(());
                if self.segments[segment].walk(tag, held).is_some() {
                    found.push(first + at);
                }
            }
        }
    }

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

/// Places that a window may stand at, most recently added first; knows how many they are.
#[derive(Clone, Debug)]
pub(crate) struct Candidates<'a> {
    links: &'a Links,
    /// Those left, oldest first; of a chain, the next.
    names: [u32; MAX_INLINE],
    left: usize,
    chained: bool,
}

impl Iterator for Candidates<'_> {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        self.left = self.left.checked_sub(1)?;
        if !self.chained {
            return Some(self.names[self.left]);
        }
        let name = self.names[0];
        if self.left > 0 {
            self.names[0] = self.links.get(name)?.older;
        }
        Some(name)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Candidates<'_> {}

#[cfg(test)]
mod tests;
