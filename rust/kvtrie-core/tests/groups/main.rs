//! Groups besides group 0 against a brute-force model: random calls on indexes with one to four groups.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

#[path = "../common/mod.rs"]
mod common;
mod moved;
mod naive;
#[path = "../common/numbers.rs"]
mod numbers;
mod steps;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use common::{ids, sequence};
use kvtrie_core::{
    BlockId, Config, Error, ErrorKind, Group, GroupInserted, GroupOffers, GroupOptions, Imported,
    InsertOptions, Inserted, LookupOptions, PlanOptions, RadixIndex, RestoredPool, ReusePlan,
    ReusePolicy, Source, TokenSequence,
};
use naive::{Done, From, GroupDone, Insertion, Kind, Naive, Offers};

/// The shared generator, for lengths.
struct Numbers(numbers::Numbers);

impl Numbers {
    fn of(seed: u64) -> Self {
        Self(numbers::Numbers(seed))
    }

    fn below(&mut self, end: usize) -> usize {
        let end = u32::try_from(end.max(1)).unwrap();
        usize::try_from(self.0.below(end)).unwrap()
    }

    fn one_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }
}

fn raw(ids: &[BlockId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

/// What an insert returned, as the model says it.
fn found(done: &Inserted, groups: &[GroupInserted]) -> Done {
    let of_group = |own: &GroupInserted| GroupDone {
        blocks: own.blocks.iter().map(|id| id.map(|id| id.0)).collect(),
        duplicates: raw(&own.duplicates),
        surplus: raw(&own.surplus),
    };
    Done {
        blocks: raw(&done.blocks),
        num_exact: done.num_exact,
        duplicates: raw(&done.duplicates),
        surplus: raw(&done.surplus),
        freed: raw(&done.freed),
        groups: groups.iter().map(of_group).collect(),
    }
}

/// One run: the index, its twin with another seed and short hashes, and the model.
struct World {
    numbers: Numbers,
    block_size: usize,
    pool: usize,
    /// Kinds and pools of the groups besides group 0.
    groups: Vec<(Kind, usize)>,
    index: RadixIndex,
    twin: RadixIndex,
    model: Naive,
    texts: Vec<Vec<u32>>,
    sequences: Vec<[TokenSequence; 2]>,
    plans: BTreeMap<usize, [ReusePlan; 2]>,
    next_plan: usize,
    met: BTreeMap<&'static str, u64>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut numbers = Numbers::of(seed);
        let block_size = 1 + numbers.below(3);
        let pool = 6 + numbers.below(24);
        let mut groups = Vec::new();
        let mut kinds = Vec::new();
        // Group 0 counts, so there are one to four.
        for at in 0..numbers.below(4) {
            let own_pool = 4 + numbers.below(12);
            let most = (own_pool * block_size).min(4 * block_size) + 1;
            let (kind, group) = if numbers.one_in(3) {
                let group = Group::state(&format!("s{at}"), own_pool as u64, block_size);
                (Kind::State, group)
            } else {
                let window = 2 + numbers.below(most - 1);
                let group = Group::window(&format!("w{at}"), window, own_pool as u64, block_size);
                (Kind::Window(window), group)
            };
            kinds.push(kind);
            groups.push((kind, own_pool, group));
        }
        let config = |seed, hash_bits| Config {
            num_blocks: pool as u64,
            block_size,
            hash_bits,
            groups: groups.iter().map(|(.., group)| group.clone()).collect(),
            ..Config::seeded(seed)
        };
        let texts = Self::texts(&mut numbers, block_size);
        let sequences = texts
            .iter()
            .map(|text| [sequence(text.clone()), sequence(text.clone())]);
        Self {
            block_size,
            pool,
            index: RadixIndex::new(config(seed, 64)).unwrap(),
            twin: RadixIndex::new(config(seed ^ 0x4d, 3)).unwrap(),
            model: Naive::new(block_size, pool, &kinds),
            sequences: sequences.collect(),
            texts,
            groups: groups
                .into_iter()
                .map(|(kind, pool, _)| (kind, pool))
                .collect(),
            numbers,
            plans: BTreeMap::new(),
            next_plan: 0,
            met: BTreeMap::new(),
        }
    }

    /// Texts that branch off each other at any token.
    fn texts(numbers: &mut Numbers, block_size: usize) -> Vec<Vec<u32>> {
        let mut texts: Vec<Vec<u32>> = Vec::new();
        for _ in 0..8 {
            let mut text = match texts.len() {
                0 => Vec::new(),
                known => {
                    let from = &texts[numbers.below(known)];
                    from[..numbers.below(from.len() + 1)].to_vec()
                }
            };
            let more = 1 + numbers.below(8 * block_size);
            text.extend((0..more).map(|_| u32::try_from(numbers.below(3)).unwrap()));
            texts.push(text);
        }
        texts
    }

    fn met(&mut self, what: &'static str) {
        *self.met.entry(what).or_default() += 1;
    }

    fn step(&mut self) {
        match self.numbers.below(20) {
            0..=6 => self.insert(),
            7..=8 => self.lookup(),
            9..=11 => self.plan(),
            12..=13 => self.release(),
            14 => self.advance(),
            15 => self.evict(),
            16..=17 => self.evict_group(),
            18 if self.numbers.one_in(4) => self.restore(),
            18 => self.take_freed(),
            _ => self.remove(),
        }
    }

    fn check(&self) {
        self.index.check().unwrap();
        let stats = self.index.stats();
        let counts = [
            stats.indexed,
            stats.condemned,
            stats.waiting,
            stats.approximate,
            stats.holes,
        ];
        let expected = self.model.counts().map(|count| count as u64);
        assert_eq!(counts, expected);
        assert_eq!(
            self.index.num_evictable(),
            self.model.num_evictable() as u64
        );
        for group in 1..=self.groups.len() {
            let stats = self.index.group_stats(group).unwrap();
            let counts = [stats.indexed, stats.pinned, stats.condemned, stats.waiting];
            let expected = self.model.group_counts(group - 1).map(|count| count as u64);
            assert_eq!(counts, expected);
            assert_eq!(stats.evictable, stats.indexed - stats.pinned);
            assert_eq!(
                self.index.num_evictable_group(group).unwrap(),
                stats.evictable
            );
        }
        assert_eq!(self.index.digest(), self.twin.digest());
    }

    fn text(&mut self) -> usize {
        self.numbers.below(self.texts.len())
    }

    /// Held ids in any order, sometimes with one that the index knows.
    fn some_ids(&mut self, group: usize, n: usize) -> Vec<u32> {
        let pool = match group {
            0 => self.pool,
            _ => self.groups[group - 1].1,
        };
        let mut held = self.model.held(group, pool);
        let mut found = Vec::new();
        for _ in 0..n {
            if held.is_empty() {
                break;
            }
            let at = self.numbers.below(held.len());
            found.push(held.swap_remove(at));
        }
        if !found.is_empty() && self.numbers.one_in(12) {
            let at = self.numbers.below(found.len());
            found[at] = u32::try_from(self.numbers.below(pool)).unwrap();
        }
        found
    }

    fn offers(&mut self, text: usize) -> Vec<Offers> {
        let full = self.texts[text].len() / self.block_size;
        let mut offers = Vec::new();
        for group in 1..=self.groups.len() {
            if self.numbers.one_in(5) {
                continue;
            }
            let blocks = match self.groups[group - 1].0 {
                // All, or the last ones, or any.
                Kind::Window(_) if self.numbers.one_in(3) => (0..full).collect(),
                Kind::Window(_) if self.numbers.one_in(2) => {
                    (full - self.numbers.below(full + 1)..full).collect()
                }
                _ => {
                    let mut all: Vec<usize> = (0..full).collect();
                    all.retain(|_| self.numbers.one_in(2));
                    all
                }
            };
            let mut ids = self.some_ids(group, blocks.len());
            let ahead = usize::from(self.groups[group - 1].0 == Kind::State);
            let at = |block: usize| (block + ahead) * self.block_size;
            // Where there are too few ids, the last blocks get them.
            let blocks = &blocks[blocks.len() - ids.len()..];
            if self.numbers.one_in(3) {
                // Those at their places already.
                for (&block, id) in blocks.iter().zip(&mut ids) {
                    let known = self.model.group_id(group, &self.texts[text], block);
                    *id = known.unwrap_or(*id);
                }
            }
            let own = blocks.iter().map(|&block| at(block)).zip(ids).collect();
            offers.push((group, own));
        }
        offers
    }

    /// A call of `insert`; none if there are too few ids.
    fn insertion(&mut self) -> Option<Insertion> {
        let text = self.text();
        let mut from = match self.numbers.below(8) {
            0 => From::Imported(self.numbers.below(self.texts[text].len() + 1)),
            _ => From::Computed,
        };
        let plans = self.plans.keys().copied().collect::<Vec<_>>();
        if !plans.is_empty() && self.numbers.one_in(2) {
            let plan = plans[self.numbers.below(plans.len())];
            if self.texts[text].starts_with(self.model.lease_tokens(plan)) {
                from = From::Plan(plan);
                self.met("insert with a plan");
            }
        }
        let len = self.texts[text].len();
        let num_computed = if self.numbers.one_in(2) {
            len
        } else {
            self.numbers.below(len + 1)
        };
        let full = num_computed / self.block_size;
        let first = if self.numbers.one_in(3) {
            self.numbers.below(len / self.block_size + 1)
        } else {
            0
        };
        let offers = self.offers(text);
        let need = full.saturating_sub(first);
        let more = if self.numbers.one_in(4) { 2 } else { 0 };
        // Ids at their places, then held ones.
        let known = self.model.hit(&self.texts[text], 0).0;
        let tokens = self.texts[text].clone();
        let mut given: Vec<u32> = Vec::new();
        if first < known && self.numbers.one_in(2) {
            given =
                self.model.match_ids(&tokens, known)[first..known.min(full).max(first)].to_vec();
        }
        let rest = (need + more).saturating_sub(given.len());
        given.extend(self.some_ids(0, rest));
        if given.len() < need {
            return None;
        }
        let mut stops: Vec<usize> = (0..=len / self.block_size).collect();
        stops.retain(|_| self.numbers.one_in(6));
        let stops: Vec<usize> = stops.iter().map(|stop| stop * self.block_size).collect();
        Some(Insertion {
            text,
            blocks: given,
            num_computed,
            first,
            from,
            offers,
            stops,
        })
    }

    fn insert(&mut self) {
        let Some(call) = self.insertion() else { return };
        let tokens = self.texts[call.text].clone();
        let refused = self
            .model
            .is_in_use(&tokens, &call.blocks, call.first, &call.offers);
        let before = self.index.digest();
        let results = self.insert_in_both(&call);
        if refused {
            for result in results {
                assert_eq!(result.unwrap_err().kind(), ErrorKind::BlockInUse);
            }
            assert_eq!(self.index.digest(), before);
            self.met("refused insert");
            return;
        }
        let end = call.first + call.blocks.len();
        if self.offers_known_after(&call, end) {
            self.met("id of a group at its place, after group 0's ids");
        }
        let expected = self.model.insert(&tokens, &call);
        for result in results {
            assert_eq!(result.unwrap(), expected);
        }
        let taken = expected.groups.iter();
        if taken.flat_map(|own| &own.blocks).any(Option::is_some) {
            self.met("insert into groups");
        }
    }

    /// Whether an offer after a number of blocks has the id that is at its place already.
    fn offers_known_after(&self, call: &Insertion, end: usize) -> bool {
        let tokens = &self.texts[call.text];
        call.offers.iter().any(|(group, own)| {
            let ahead = usize::from(self.groups[group - 1].0 == Kind::State);
            own.iter().any(|&(position, id)| {
                let block = position / self.block_size - ahead;
                block >= end && self.model.group_id(*group, tokens, block) == Some(id)
            })
        })
    }

    fn insert_in_both(&mut self, call: &Insertion) -> Vec<Result<Done, Error>> {
        let offers: Vec<(usize, Vec<(usize, BlockId)>)> = call
            .offers
            .iter()
            .map(|(group, own)| {
                let own = own.iter().map(|&(at, id)| (at, BlockId(id)));
                (*group, own.collect())
            })
            .collect();
        let offers: Vec<GroupOffers<'_>> = offers
            .iter()
            .map(|(group, offers)| GroupOffers {
                group: *group,
                offers,
            })
            .collect();
        let groups = GroupOptions {
            offers: &offers,
            stops: &call.stops,
        };
        let blocks = ids(call.blocks.iter().copied());
        let mut results = Vec::new();
        for (which, index) in [&mut self.index, &mut self.twin].into_iter().enumerate() {
            let source = match call.from {
                From::Computed => Source::Computed,
                From::Imported(until) => Source::Imported(Imported::new(until, 0)),
                From::Plan(plan) => Source::Plan(&self.plans[&plan][which]),
            };
            let options = InsertOptions {
                start: call.first * self.block_size,
                ..InsertOptions::new(call.num_computed, source)
            };
            let seq = &mut self.sequences[call.text][which];
            let done = index.insert_groups(seq, &blocks, options, groups);
            results.push(done.map(|(done, groups)| found(&done, &groups)));
        }
        results
    }

    fn lookup(&mut self) {
        let (text, keep_last) = (self.text(), self.numbers.below(3));
        let touch = self.numbers.one_in(2);
        let tokens = self.texts[text].clone();
        let (exact, end) = self.model.hit(&tokens, keep_last);
        if end < exact {
            self.met("hit cut by a group");
        }
        if end > 0 && !self.groups.is_empty() {
            self.met("hit with groups");
        }
        let expected = self.model.lookup(&tokens, keep_last, touch);
        for (which, index) in [&mut self.index, &mut self.twin].into_iter().enumerate() {
            let options = LookupOptions {
                keep_last,
                touch,
                start: 0,
            };
            let mut out = Vec::new();
            let seq = &mut self.sequences[text][which];
            let found = index.lookup(seq, options, &mut out).unwrap();
            assert_eq!(raw(&out), expected);
            assert_eq!(found.num_tokens, expected.len() * self.block_size);
        }
    }

    fn plan(&mut self) {
        if self.plans.len() > 4 {
            return self.release();
        }
        let (text, keep_last) = (self.text(), self.numbers.below(3));
        let pin = !self.numbers.one_in(6);
        // The model copies nothing. Nor does an index with further groups, whatever the policy says.
        let policy = ReusePolicy {
            partial_blocks: !self.groups.is_empty(),
            ..ReusePolicy::EXACT_ONLY
        };
        let plan = self.next_plan;
        self.next_plan += 1;
        let (blocks, parts) = self.model.plan(plan, &self.texts[text], keep_last, pin);
        let mut made = Vec::new();
        for (which, index) in [&mut self.index, &mut self.twin].into_iter().enumerate() {
            let options = PlanOptions {
                keep_last,
                pin,
                ..PlanOptions::default()
            };
            let seq = &mut self.sequences[text][which];
            let own = index.plan(seq, &policy, options).unwrap();
            assert_eq!(raw(own.blocks()), blocks);
            let found: Vec<(usize, Vec<u32>)> = own
                .groups()
                .iter()
                .map(|part| (part.start, raw(&part.blocks)))
                .collect();
            if !self.groups.is_empty() {
                assert_eq!(found, parts);
                assert!(own.source_blocks().is_empty());
            }
            made.push(own);
        }
        let twin = made.pop().unwrap();
        self.plans.insert(plan, [made.pop().unwrap(), twin]);
    }

    /// Goes on with indexes restored from snapshots, after all plans were released.
    fn restore(&mut self) {
        while !self.plans.is_empty() {
            self.release();
        }
        for index in [&mut self.index, &mut self.twin] {
            let bytes = index.snapshot();
            let again = RadixIndex::restore(&bytes, RestoredPool::Kept(&[0; 16])).unwrap();
            assert_eq!(again.config(), index.config());
            assert_eq!(again.snapshot(), bytes);
            *index = again;
        }
        self.met("restore");
    }

    fn any_plan(&mut self) -> Option<usize> {
        let plans: Vec<usize> = self.plans.keys().copied().collect();
        let at = self.numbers.below(plans.len());
        plans.get(at).copied()
    }

    fn release(&mut self) {
        let Some(plan) = self.any_plan() else { return };
        let [own, twin] = self.plans.remove(&plan).unwrap();
        self.index.release(&own).unwrap();
        self.twin.release(&twin).unwrap();
        self.model.release(plan);
    }

    fn advance(&mut self) {
        let Some(plan) = self.any_plan() else { return };
        let position = self.numbers.below(12 * self.block_size);
        let [own, twin] = &self.plans[&plan];
        self.index.advance(own, position).unwrap();
        self.twin.advance(twin, position).unwrap();
        self.model.advance(plan, position);
    }

    fn evict(&mut self) {
        let n = self.numbers.below(4);
        let expected = self.model.evict(n);
        assert_eq!(raw(&self.index.evict(n)), expected);
        assert_eq!(raw(&self.twin.evict(n)), expected);
    }

    fn evict_group(&mut self) {
        if self.groups.is_empty() {
            return self.evict();
        }
        let (group, n) = (
            1 + self.numbers.below(self.groups.len()),
            self.numbers.below(4),
        );
        let expected = self.model.evict_group(group, n);
        if !expected.is_empty() {
            self.met("eviction from a group");
        }
        assert_eq!(raw(&self.index.evict_group(group, n).unwrap()), expected);
        assert_eq!(raw(&self.twin.evict_group(group, n).unwrap()), expected);
    }

    fn take_freed(&mut self) {
        let group = self.numbers.below(self.groups.len() + 1);
        if group == 0 {
            let expected = self.model.take_freed();
            assert_eq!(raw(&self.index.take_freed()), expected);
            assert_eq!(raw(&self.twin.take_freed()), expected);
            return;
        }
        let expected = self.model.take_freed_group(group);
        if !expected.is_empty() {
            self.met("ids of a group that left with blocks");
        }
        assert_eq!(raw(&self.index.take_freed_group(group).unwrap()), expected);
        assert_eq!(raw(&self.twin.take_freed_group(group).unwrap()), expected);
    }

    fn remove(&mut self) {
        if self.numbers.one_in(12) {
            let expected = self.model.reset();
            assert_eq!(raw(&self.index.reset()), expected);
            assert_eq!(raw(&self.twin.reset()), expected);
            return;
        }
        let group = self.numbers.below(self.groups.len() + 1);
        let pool = match group {
            0 => self.pool,
            _ => self.groups[group - 1].1,
        };
        let n = self.numbers.below(3);
        let gone: Vec<u32> = (0..n)
            .map(|_| u32::try_from(self.numbers.below(pool)).unwrap())
            .collect();
        let blocks = ids(gone.iter().copied());
        if group == 0 {
            let expected = self.model.discard(&gone);
            assert_eq!(raw(&self.index.discard(&blocks).unwrap()), expected);
            assert_eq!(raw(&self.twin.discard(&blocks).unwrap()), expected);
            return;
        }
        let expected = self.model.discard_group(group, &gone);
        let found = self.index.discard_group(group, &blocks).unwrap();
        assert_eq!(raw(&found), expected);
        let found = self.twin.discard_group(group, &blocks).unwrap();
        assert_eq!(raw(&found), expected);
    }
}

/// Random calls; each result, all counters and every invariant are compared with the model. `KVTRIE_GROUPS` sets the
/// number of calls, `KVTRIE_GROUPS_SEED` the first seed.
#[test]
fn groups_equal_a_model_without_a_tree() {
    const CALLS_PER_WORLD: usize = 400;
    let calls: u64 = std::env::var("KVTRIE_GROUPS").map_or(20_000, |calls| calls.parse().unwrap());
    let first = std::env::var("KVTRIE_GROUPS_SEED").map_or(1, |seed| seed.parse().unwrap());
    let (mut done, mut met) = (0, BTreeMap::new());
    let mut worlds = [0_u64; 4];
    for seed in first.. {
        if done >= calls {
            break;
        }
        let mut world = World::new(seed);
        worlds[world.groups.len()] += 1;
        for _ in 0..CALLS_PER_WORLD {
            world.step();
            world.check();
            done += 1;
        }
        for (what, times) in world.met {
            *met.entry(what).or_default() += times;
        }
    }
    let mut report = format!("{done} calls, worlds with 1 to 4 groups: {worlds:?}");
    for (what, times) in &met {
        let _ = write!(report, ", {what}: {times}");
    }
    println!("{report}");
    assert!(worlds.iter().all(|&count| count > 0), "{report}");
    for what in [
        "hit cut by a group",
        "hit with groups",
        "insert into groups",
        "insert with a plan",
        "refused insert",
        "id of a group at its place, after group 0's ids",
        "eviction from a group",
        "ids of a group that left with blocks",
        "restore",
    ] {
        let times: u64 = met.get(what).copied().unwrap_or_default();
        assert!(times * 2_000 > done, "{what}: {times} of {report}");
    }
}
