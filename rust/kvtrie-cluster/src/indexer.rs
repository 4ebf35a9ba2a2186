//! The calls of an index, and what it knows of its workers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvtrie_core::{Error, ErrorKind, Item, Namespace, Result, ReusePolicy, TokenSequence};

use crate::blocks::{AT_ONCE, Above, Blocks, Lost, NotStored};
use crate::config::IndexerConfig;
use crate::error::{EventError, EventRefusal};
use crate::events::{
    BlocksAhead, Event, EventBatch, EventReader, Refused, SESSION_BYTES, Stored, Tier,
};
use crate::holdings::Copies;
use crate::keys::{Digest, Keys, packed};
use crate::lanes::Lane;
use crate::promises::{MOST_VISITED, Promise, Promises};
use crate::scores::{self, Piece, Places, Windows};

/// Number of edges that each applied event visits to give back the memory of workers that ended.
const RECLAIMED: usize = 4;

/// The same for each life that ends, so that lives cannot end faster than they are forgotten.
const RECLAIMED_AT_ENDS: usize = 64;

/// Where a worker's events come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The engine's own events.
    #[default]
    Engine,
    /// kvtrie's events of approximate blocks, which count as moved runs only.
    Approximate,
}

/// Names a live worker of one index. No number is given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// What is counted of one worker since it was added; `entries`, `parked` and `blocks` are those of this moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerStats {
    /// Batches that were applied.
    pub batches: u64,
    /// Batches that could not be read, or were refused as a whole.
    pub refused_batches: u64,
    /// Blocks that events stored, repeats among them.
    pub stored: u64,
    /// Copies that events removed.
    pub removed: u64,
    /// Removals of copies that the worker did not have.
    pub unknown_removals: u64,
    /// Blocks whose hash names another block of the worker.
    pub conflicts: u64,
    /// Blocks that the worker holds under another hash.
    pub aliases: u64,
    /// Blocks beyond `max_blocks`, with those after them in their event.
    pub over_limit: u64,
    /// Blocks with an unknown parent beyond `max_parked`.
    pub dropped_parked: u64,
    /// Events that were left out, by [`Refused`].
    pub refused: [u64; Refused::COUNT],
    /// Hashes that the worker holds blocks under.
    pub entries: u64,
    /// Blocks whose parent is not known, held back until it arrives.
    pub parked: u64,
    /// Blocks that the worker has added to the index.
    pub blocks: u64,
}

impl WorkerStats {
    /// Counts what waited and cannot be stored; whether the worker's scores may be too low, or last too long, for it.
    fn lose(&mut self, lost: Lost, is_approximate: bool) -> bool {
        self.over_limit += lost.over_limit;
        self.aliases += lost.aliases;
        self.conflicts += lost.conflicts;
        lost.over_limit + lost.conflicts > 0 || (lost.aliases > 0 && !is_approximate)
    }
}

/// What is counted of an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexerStats {
    /// Live workers.
    pub workers: u64,
    /// Unique blocks, holes among them.
    pub blocks: u64,
    /// Edges of the tree.
    pub edges: u64,
    /// Blocks of live workers: one per worker and hash.
    pub entries: u64,
    /// Lives of workers that ended and whose memory is not given back yet.
    pub dead: u64,
    /// Bytes of memory for blocks, hashes and fingerprints; some per worker besides are not counted.
    pub bytes: u64,
}

/// What a batch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Applied {
    /// Events of the batch.
    pub events: u64,
    /// Events that were left out.
    pub refused: u64,
    /// Whether the batch cleared the worker's blocks.
    pub cleared: bool,
}

/// The digests of a prompt under the key of one index, for several searches.
#[derive(Clone, Debug)]
pub struct Prompt {
    root: Digest,
    digests: Vec<Digest>,
    windows: Vec<u64>,
    num_tokens: usize,
    keys: u64,
}

impl Prompt {
    /// Number of tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }
}

/// How much of a prompt each live worker holds, in the order in which the workers were added. `moved` and `possible` are
/// empty if no moved runs were looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverlapScores {
    /// Tokens from position 0 whose KV the worker has in place.
    pub exact: Vec<u32>,
    /// Tokens after these in runs elsewhere that the worker's own plan reuses, as far as its policy and the sessions of
    /// its events are known: it reuses `exact + moved` tokens at least where the exact ones are in the device
    /// ([`KvIndexer::set_policy`]).
    pub moved: Vec<u32>,
    /// All tokens after the exact ones in runs that the worker holds elsewhere, those of `moved` among them. What it may
    /// reuse of the others is not known.
    pub possible: Vec<u32>,
    /// The slowest tier from which one of the exact tokens must be loaded.
    pub tier: Vec<Tier>,
    /// Whether the worker's events may be incomplete, so that the other figures are not promised.
    pub uncertain: Vec<bool>,
}

#[derive(Debug)]
struct Worker {
    id: WorkerId,
    namespace: Arc<Namespace>,
    root: Digest,
    lane: Lane,
    approximate: Option<Lane>,
    group: Option<u64>,
    rank: Option<u64>,
    is_uncertain: bool,
    /// When its figures are no longer promised, if nobody says so again.
    certain_until: Option<Instant>,
    /// Events were left out that bear on what a prompt finds.
    is_incomplete: bool,
    has_slow: bool,
    /// What is known of its plans.
    promise: Option<Promise>,
    stats: WorkerStats,
}

/// Which worker holds how much of a prompt. The crate's documentation has the model and the costs.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use kvtrie_cluster::{FindOptions, IndexerConfig, KvIndexer, Stream};
/// use kvtrie_core::{Namespace, Salt, TokenSequence};
///
/// let mut index = KvIndexer::new(IndexerConfig::new(2), b"sixteen bytes ..")?;
/// let space = Arc::new(Namespace::new("m", "auto", "default", None, Salt::Shared)?);
/// let worker = index.add_worker(Arc::clone(&space))?;
///
/// // [0.0, [{"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None,
/// //         "token_ids": [1, 2], "block_size": 2}]]
/// let raw = b"\x92\xcb\0\0\0\0\0\0\0\0\x91\x85\xa4type\xabBlockStored\xacblock_hashes\x91\x07\
///     \xb1parent_block_hash\xc0\xa9token_ids\x92\x01\x02\xaablock_size\x02";
/// let batch = index.reader().read(raw)?;
/// index.apply(worker, Stream::Engine, &batch)?;
///
/// let seq = TokenSequence::new(space, vec![1, 2, 3], Vec::new())?;
/// let prompt = index.prompt(&seq, true);
/// assert_eq!(index.find(&prompt, FindOptions::default())?.exact, [2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct KvIndexer {
    config: IndexerConfig,
    reader: EventReader,
    blocks: Blocks,
    /// In the order of their ids.
    workers: Vec<Worker>,
    /// The worker of each lane, by number; `usize::MAX` for others.
    column_of: Vec<usize>,
    /// What is promised of each lane.
    promises: Vec<Option<Promise>>,
    next_id: u64,
}

/// What a search asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FindOptions<'a> {
    /// The last tokens of the prompt, which never count: an engine computes at least one.
    pub keep_last: usize,
    /// Whether moved runs are looked for. The prompt must have been made for it.
    pub moved: bool,
    /// The id of the prompt's conversation, as its worker will be told it: 1 to 256 bytes.
    pub session: Option<&'a str>,
    /// Where the last message begins, of which moved runs supply nothing. None: they may supply all of the prompt.
    pub moved_end: Option<usize>,
}

impl KvIndexer {
    /// An index without workers. Indexes with equal keys and block sizes have equal digests.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if a bound is outside its limits, or the key does
    /// not have 16 to 64 bytes.
    pub fn new(config: IndexerConfig, key: &[u8]) -> Result<Self> {
        config.check()?;
        let reader = EventReader {
            keys: Arc::new(Keys::new(key, config.block_size)?),
            block_size: config.block_size,
            max_bytes: config.max_batch_bytes,
            moved_runs: config.moved_runs,
        };
        Ok(Self {
            blocks: Blocks::new(Arc::clone(&reader.keys), &config),
            config,
            reader,
            workers: Vec::new(),
            column_of: Vec::new(),
            promises: Vec::new(),
            next_id: 0,
        })
    }

    /// What the index was made with.
    #[must_use]
    pub fn config(&self) -> &IndexerConfig {
        &self.config
    }

    /// Reads batches for this index, outside of its lock.
    #[must_use]
    pub fn reader(&self) -> &EventReader {
        &self.reader
    }

    /// Adds a worker. `namespace` is that of a request without an adapter and without a salt of its own; events
    /// replace the adapter and the salt.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if there are `max_workers` already.
    pub fn add_worker(&mut self, namespace: Arc<Namespace>) -> Result<WorkerId> {
        if self.workers.len() >= self.config.max_workers {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "KvIndexer::add_worker",
                format!(
                    "there are {} workers; the limit is max_workers",
                    self.workers.len()
                ),
            ));
        }
        let id = WorkerId(self.next_id);
        self.next_id += 1;
        self.workers.push(Worker {
            id,
            root: self.reader.keys.root(&namespace, None, None),
            namespace,
            lane: self.blocks.open(false),
            approximate: None,
            group: None,
            rank: None,
            is_uncertain: false,
            certain_until: None,
            is_incomplete: false,
            has_slow: false,
            promise: None,
            stats: WorkerStats::default(),
        });
        self.number_columns();
        Ok(id)
    }

    /// Removes a worker. It is gone from the next search on; its memory comes back as events are applied.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker.
    ///
    /// # Complexity
    /// O(workers), whatever it holds.
    pub fn remove_worker(&mut self, worker: WorkerId) -> Result<()> {
        let at = self.column(worker, "KvIndexer::remove_worker")?;
        self.blocks.reclaim(RECLAIMED_AT_ENDS);
        let worker = self.workers.remove(at);
        self.blocks.close(worker.lane);
        if let Some(lane) = worker.approximate {
            self.blocks.close(lane);
        }
        self.number_columns();
        Ok(())
    }

    /// Forgets what a worker holds: of one stream, or of both if none is given.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker.
    ///
    /// # Complexity
    /// O(workers), whatever it holds.
    pub fn clear_worker(&mut self, worker: WorkerId, stream: Option<Stream>) -> Result<()> {
        let at = self.column(worker, "KvIndexer::clear_worker")?;
        if stream != Some(Stream::Approximate) {
            self.clear(at, Stream::Engine);
            let worker = &mut self.workers[at];
            (worker.group, worker.rank, worker.has_slow) = (None, None, false);
        }
        if stream != Some(Stream::Engine) {
            self.clear(at, Stream::Approximate);
        }
        Ok(())
    }

    /// Says whether events of a worker may be missing. Its figures are then not promised.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker.
    pub fn set_uncertain(&mut self, worker: WorkerId, uncertain: bool) -> Result<()> {
        let at = self.column(worker, "KvIndexer::set_uncertain")?;
        self.workers[at].is_uncertain = uncertain;
        Ok(())
    }

    /// Says that no event of a worker waits to be applied. From so long after this call on its figures are not
    /// promised, unless it is said again; without a time, they are until [`set_uncertain`](Self::set_uncertain) says
    /// otherwise, as those of a new worker. So whoever feeds an index and sleeps, or is late, leaves no old figures
    /// that count as certain.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker.
    pub fn set_certain_for(&mut self, worker: WorkerId, time: Option<Duration>) -> Result<()> {
        let at = self.column(worker, "KvIndexer::set_certain_for")?;
        // A time that no clock reaches has no end.
        self.workers[at].certain_until = time.and_then(|time| Instant::now().checked_add(time));
        Ok(())
    }

    /// Says by which policy a worker plans. Its moved runs are promised as far as such a plan must reuse them; without a
    /// policy, as those of a new worker, none are.
    ///
    /// None is promised either under a policy without approximate reuse, or with a limit that depends on more than an
    /// index knows: `max_hops` of 0, `max_approximate_share`, `recompute_first`, `recompute_last`, `recompute_share`,
    /// `forbid_kinds`, `max_cuts`, `max_lost_context` and `max_new_context`.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker;
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if the policy promises runs and has no `min_run`.
    pub fn set_policy(&mut self, worker: WorkerId, policy: Option<&ReusePolicy>) -> Result<()> {
        const CALL: &str = "KvIndexer::set_policy";
        let at = self.column(worker, CALL)?;
        let promise = policy.map_or(Ok(None), |policy| Promise::of(policy, CALL))?;
        self.workers[at].promise = promise;
        self.number_columns();
        Ok(())
    }

    /// Counts a batch that could not be read.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker.
    pub fn count_refused_batch(&mut self, worker: WorkerId) -> Result<()> {
        let at = self.column(worker, "KvIndexer::count_refused_batch")?;
        self.workers[at].stats.refused_batches += 1;
        Ok(())
    }

    /// The live workers, in the order of [`OverlapScores`].
    pub fn workers(&self) -> impl ExactSizeIterator<Item = WorkerId> {
        self.workers.iter().map(|worker| worker.id)
    }

    /// Whether a worker's events have named a slower tier than the device.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker.
    pub fn has_slower_tiers(&self, worker: WorkerId) -> Result<bool> {
        let at = self.column(worker, "KvIndexer::has_slower_tiers")?;
        Ok(self.workers[at].has_slow)
    }

    /// Gives the addresses of memory that [`apply`](Self::apply) will wait for when it stores these blocks of a worker, so
    /// that a caller may have it fetched while the rest of the batch is read. Nothing of it is read or changed, and none is
    /// given if there is no such worker.
    ///
    /// # Complexity
    /// O(blocks), and of these at most [`MOST_AHEAD`](BlocksAhead::MOST).
    pub fn lines(&self, worker: WorkerId, ahead: BlocksAhead<'_>, each: impl FnMut(*const u8)) {
        if let Ok(at) = self.column(worker, "KvIndexer::lines") {
            let holdings = self.blocks.holdings(self.workers[at].lane);
            holdings.lines(ahead.hashes(), each);
        }
    }

    /// Applies a batch of a worker.
    ///
    /// # Errors
    /// The batch is of another data-parallel rank than those before it, was read for an index with another key, or the
    /// worker is gone. Nothing is applied then.
    ///
    /// # Complexity
    /// O(1) per block of a path that exists or grows, and O(log) of the holes and the workers with parts of its edge.
    pub fn apply(
        &mut self,
        worker: WorkerId,
        stream: Stream,
        batch: &EventBatch,
    ) -> std::result::Result<Applied, EventError> {
        let refuse = |refusal, message: String| Err(EventError::new(refusal, message));
        let at = match self.column(worker, "KvIndexer::apply") {
            Ok(at) => at,
            Err(error) => return refuse(EventRefusal::Worker, error.message().to_owned()),
        };
        if batch.keys != self.reader.keys.check() {
            let message = "the batch was read for an index with another key".to_owned();
            return refuse(EventRefusal::Key, message);
        }
        let known = &mut self.workers[at];
        if let (Some(before), Some(rank)) = (known.rank, batch.rank)
            && before != rank
        {
            return refuse(
                EventRefusal::Rank,
                format!(
                    "data-parallel rank {rank}, after batches of rank {before}: add one worker per rank"
                ),
            );
        }
        known.rank = known.rank.or(batch.rank);
        let mut applied = Applied::default();
        for event in &batch.events {
            applied.events += 1;
            self.event(at, stream, event, batch, &mut applied);
            self.blocks.reclaim(RECLAIMED);
        }
        self.workers[at].stats.batches += 1;
        Ok(applied)
    }

    fn event(
        &mut self,
        at: usize,
        stream: Stream,
        event: &Event,
        batch: &EventBatch,
        applied: &mut Applied,
    ) {
        let refused = match event {
            Event::Stored(stored) if self.follows(at, stored.group) => {
                let group = &mut self.workers[at].group;
                *group = group.or(stored.group);
                self.stored(at, stream, stored, batch);
                return;
            }
            // A hash is the same in all groups.
            Event::Removed {
                hashes,
                tier,
                group,
            } if self.follows(at, *group) => {
                self.removed(at, stream, &batch.removed[hashes.clone()], *tier);
                return;
            }
            Event::Stored(_) | Event::Removed { .. } => Refused::OtherGroup,
            Event::Cleared => {
                self.clear(at, stream);
                applied.cleared = true;
                return;
            }
            Event::Refused(refused) => *refused,
        };
        let worker = &mut self.workers[at];
        worker.stats.refused[refused as usize] += 1;
        applied.refused += 1;
        // With several groups an engine finds what all of them hold, and an event of an unknown type
        // may have removed blocks.
        worker.is_incomplete |= matches!(
            refused,
            Refused::SlidingWindow
                | Refused::StateSpace
                | Refused::OtherGroup
                | Refused::UnknownType
        );
    }

    /// Whether a group is the one that is followed: the first of full attention.
    fn follows(&self, at: usize, group: Option<u64>) -> bool {
        match (self.workers[at].group, group) {
            (Some(known), Some(group)) => known == group,
            _ => true,
        }
    }

    fn lane(&mut self, at: usize, is_approximate: bool) -> Lane {
        let worker = &mut self.workers[at];
        if !is_approximate {
            return worker.lane;
        }
        if let Some(lane) = worker.approximate {
            return lane;
        }
        let lane = self.blocks.open(true);
        worker.approximate = Some(lane);
        self.number_columns();
        lane
    }

    fn stored(&mut self, at: usize, stream: Stream, event: &Stored, batch: &EventBatch) {
        let is_approximate = event.is_approximate || stream == Stream::Approximate;
        let lane = self.lane(at, is_approximate);
        let keys = &self.reader.keys;
        let worker = &mut self.workers[at];
        worker.has_slow |= event.tier != Tier::Device;
        let blocks = &mut self.blocks;
        let exact = worker.lane;
        // The lane that has a block, and where.
        let known = |blocks: &Blocks, hash: u64| {
            let held = |lane| Some((lane, blocks.holdings(lane).get(hash)?.slot));
            // An approximate block may follow an exact one.
            held(lane).or_else(|| is_approximate.then(|| held(exact)).flatten())
        };
        let (mut above, mut parent) = match event.parent {
            None if event.adapter.is_none() && event.salt.is_none() => {
                (Some(Above::Root(worker.root)), 0)
            }
            None => {
                let root = keys.root(&worker.namespace, event.adapter.as_deref(), event.salt);
                (Some(Above::Root(root)), 0)
            }
            Some(parent) => {
                let held = known(blocks, parent);
                (held.map(|(_, slot)| Above::Block(slot)), parent)
            }
        };
        let stats = &mut worker.stats;
        let all = &batch.blocks[event.blocks.clone()];
        let (mut done, mut read) = (0, 0);
        while let Some(block) = all.get(done) {
            let left = &all[done..];
            let Some(before) = above else {
                // A repeat of a known block, after an unknown one.
                let repeated = match known(blocks, block.hash) {
                    None => {
                        let max_parked = self.config.max_parked;
                        let parked = blocks.park(lane, parent, block, event.tier, max_parked);
                        parked.map(|()| true)
                    }
                    Some((of, slot)) if blocks.is_at(of, block, slot) => {
                        above = Some(Above::Block(slot));
                        Ok(blocks.repeat(lane, block.hash, event.tier, event.session))
                    }
                    Some(_) => Err(NotStored::Conflict),
                };
                match repeated {
                    Ok(is_stored) => stats.stored += u64::from(is_stored),
                    Err(NotStored::Conflict) => {
                        stats.conflicts += left.len() as u64;
                        worker.is_incomplete = true;
                        return;
                    }
                    Err(NotStored::Full | NotStored::Alias(_)) => {
                        stats.dropped_parked += 1;
                        worker.is_incomplete = true;
                    }
                }
                parent = block.hash;
                done += 1;
                continue;
            };
            let next = &left[..left.len().min(AT_ONCE)];
            if done >= read {
                blocks.touch(lane, before, next);
                read = done + AT_ONCE;
            }
            let approximate = worker.approximate.filter(|_| !is_approximate);
            if event.tier == Tier::Device {
                let slots = blocks.append(lane, approximate, before, next, event.session);
                if let Some(last) = slots.clone().last() {
                    stats.stored += slots.len() as u64;
                    done += slots.len();
                    above = Some(Above::Block(last));
                    continue;
                }
            }
            done += 1;
            match blocks.store(lane, before, block, Copies::of(event.tier), event.session) {
                Ok(slot) => {
                    stats.stored += 1;
                    for own in [Some(lane), approximate].into_iter().flatten() {
                        let lost = blocks.attach(own, block.hash, slot);
                        worker.is_incomplete |= stats.lose(lost, is_approximate || own != lane);
                    }
                    above = Some(Above::Block(slot));
                }
                Err(NotStored::Alias(slot)) => {
                    stats.aliases += 1;
                    // It may outlive the hash that counts.
                    worker.is_incomplete |= !is_approximate;
                    above = Some(Above::Block(slot));
                }
                Err(NotStored::Conflict) => {
                    stats.conflicts += left.len() as u64;
                    worker.is_incomplete = true;
                    return;
                }
                Err(NotStored::Full) => {
                    stats.over_limit += left.len() as u64;
                    worker.is_incomplete = true;
                    return;
                }
            }
        }
    }

    fn removed(&mut self, at: usize, stream: Stream, hashes: &[u64], tier: Tier) {
        let worker = &mut self.workers[at];
        let lanes = match stream {
            Stream::Engine => [Some(worker.lane), worker.approximate],
            Stream::Approximate => [worker.approximate, None],
        };
        for &hash in hashes {
            let mut lanes = lanes.into_iter().flatten();
            if lanes.any(|lane| self.blocks.remove(lane, hash, tier)) {
                worker.stats.removed += 1;
            } else {
                worker.stats.unknown_removals += 1;
            }
        }
    }

    fn clear(&mut self, at: usize, stream: Stream) {
        self.blocks.reclaim(RECLAIMED_AT_ENDS);
        let worker = &mut self.workers[at];
        match stream {
            Stream::Engine => {
                worker.is_incomplete = false;
                if self.blocks.is_unused(worker.lane) {
                    return;
                }
                self.blocks.close(worker.lane);
                worker.lane = self.blocks.open(false);
            }
            Stream::Approximate => {
                if let Some(lane) = worker.approximate.take() {
                    self.blocks.close(lane);
                }
            }
        }
        self.number_columns();
    }

    fn column(&self, worker: WorkerId, call: &'static str) -> Result<usize> {
        let found = self.workers.binary_search_by_key(&worker, |known| known.id);
        found.map_err(|_| {
            let message = format!(
                "there is no worker {}: it was removed, or is another index's",
                worker.0
            );
            Error::new(ErrorKind::StaleHandle, call, message)
        })
    }

    fn number_columns(&mut self) {
        self.column_of.clear();
        self.column_of.resize(self.blocks.num_lanes(), usize::MAX);
        self.promises.clear();
        if self.workers.iter().any(|worker| worker.promise.is_some()) {
            self.promises.resize(self.blocks.num_lanes(), None);
        }
        for (at, worker) in self.workers.iter().enumerate() {
            self.column_of[worker.lane as usize] = at;
            if let Some(promise) = self.promises.get_mut(worker.lane as usize) {
                *promise = worker.promise;
            }
            if let Some(lane) = worker.approximate {
                self.column_of[lane as usize] = at;
            }
        }
    }

    /// The digests of a prompt, and with `moved` its fingerprints. A prompt ends before its first
    /// [`Item`]: events name images in ways of their engines.
    ///
    /// # Complexity
    /// O(tokens).
    #[must_use]
    pub fn prompt(&self, seq: &TokenSequence, moved: bool) -> Prompt {
        self.reader.prompt(seq, moved)
    }

    /// How much of a prompt each worker holds.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if the prompt was made with another key, a session
    /// does not have 1 to 256 bytes, or `moved_end` is beyond the prompt.
    ///
    /// # Complexity
    /// O(edges of the path · (lives of workers / 64 + log blocks) + lives), and O(log) for each worker that leaves the
    /// path. Moved runs: O(tokens), and O(runs · edges · workers that hold them); where workers have a policy with a scope,
    /// and O(edges above each run), 16,384 in all.
    pub fn find(&self, prompt: &Prompt, options: FindOptions<'_>) -> Result<OverlapScores> {
        if prompt.keys != self.reader.keys.check() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "KvIndexer::find",
                "the prompt was made by an index with another key or block size",
            ));
        }
        let refuse = |message| Error::new(ErrorKind::InvalidArgument, "KvIndexer::find", message);
        if let Some(id) = options.session
            && !SESSION_BYTES.contains(&id.len())
        {
            return Err(refuse(format!(
                "session has {} bytes; it must have {} to {}",
                id.len(),
                SESSION_BYTES.start(),
                SESSION_BYTES.end()
            )));
        }
        if let Some(end) = options.moved_end
            && end > prompt.num_tokens
        {
            return Err(refuse(format!(
                "moved_end is {end}; it must be in [0, {}], the tokens of the prompt",
                prompt.num_tokens
            )));
        }
        let size = self.config.block_size;
        let usable = prompt.num_tokens.saturating_sub(options.keep_last);
        let digests = &prompt.digests[..prompt.digests.len().min(usable / size)];
        let blocks = &self.blocks;
        let front = scores::front(&blocks.tree, blocks.exact(), blocks.num_lanes(), digests);
        let mut scores = OverlapScores {
            exact: Vec::with_capacity(self.workers.len()),
            moved: Vec::new(),
            possible: Vec::new(),
            tier: Vec::with_capacity(self.workers.len()),
            uncertain: Vec::with_capacity(self.workers.len()),
        };
        // Asked once, and only if a worker has such a time.
        let mut now = None;
        for worker in &self.workers {
            let is_late = worker
                .certain_until
                .is_some_and(|until| *now.get_or_insert_with(Instant::now) >= until);
            let lane = worker.lane as usize;
            let tokens = front.blocks[lane] as usize * size;
            scores.exact.push(u32::try_from(tokens).unwrap_or(u32::MAX));
            scores.tier.push(front.tiers[lane]);
            scores
                .uncertain
                .push(worker.is_uncertain || worker.is_incomplete || is_late);
        }
        if let (true, Some(fingerprints)) = (options.moved, &blocks.fingerprints) {
            let count = (usable + 1).saturating_sub(size).min(prompt.windows.len());
            let places = Places {
                keys: &self.reader.keys,
                tree: &blocks.tree,
                fingerprints,
                live: blocks.live(),
            };
            let windows = Windows {
                fingerprints: &prompt.windows[..count],
                apart: Keys::apart(prompt.root),
                block_size: size,
            };
            let promises = (!self.promises.is_empty()).then(|| Promises {
                tree: &blocks.tree,
                of: &self.promises,
                session: options.session.map(|id| self.reader.keys.session(id)),
                digests: &prompt.digests,
                end: options.moved_end.unwrap_or(usable).min(usable),
                visits_left: MOST_VISITED,
            });
            scores.moved = vec![0; self.workers.len()];
            scores.possible = vec![0; self.workers.len()];
            let run_blocks = self.config.run_blocks();
            let [held, promised] = scores::runs(places, windows, run_blocks, promises);
            self.count(held, &scores.exact, &mut scores.possible);
            self.count(promised, &scores.exact, &mut scores.moved);
        }
        Ok(scores)
    }

    /// Counts the tokens of each worker's pieces once, those after its exact prefix alone.
    fn count(&self, mut pieces: Vec<Piece>, exact: &[u32], sums: &mut [u32]) {
        for piece in &mut pieces {
            // From here on the number is the worker's.
            let column = self.column_of[piece.lane as usize];
            piece.lane = u32::try_from(column).unwrap_or(u32::MAX);
        }
        pieces.sort_unstable();
        let mut last = (u32::MAX, 0);
        for piece in pieces {
            let column = piece.lane as usize;
            let Some(sum) = sums.get_mut(column) else {
                continue;
            };
            let seen = if last.0 == piece.lane {
                last.1
            } else {
                exact[column] as usize
            };
            let start = piece.start.max(seen);
            let more = piece.end.saturating_sub(start);
            *sum += u32::try_from(more).unwrap_or(u32::MAX);
            last = (piece.lane, seen.max(piece.end));
        }
    }

    /// Gives back the memory of workers that ended, at once.
    ///
    /// # Complexity
    /// O(edges).
    pub fn reclaim(&mut self) {
        while self.blocks.num_dead() > 0 {
            self.blocks.reclaim(1_024);
        }
    }

    /// What is counted of a worker.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker.
    pub fn worker_stats(&self, worker: WorkerId) -> Result<WorkerStats> {
        let worker = &self.workers[self.column(worker, "KvIndexer::worker_stats")?];
        let mut stats = worker.stats.clone();
        for lane in [Some(worker.lane), worker.approximate]
            .into_iter()
            .flatten()
        {
            let holdings = self.blocks.holdings(lane);
            stats.entries += holdings.len() as u64;
            stats.parked += holdings.num_parked() as u64;
            stats.blocks += u64::from(self.blocks.charged(lane));
        }
        Ok(stats)
    }

    /// What a worker holds, in one number: its namespace, and each hash with its block and its copies, parked ones too.
    /// Equal in indexes with equal keys and block sizes for workers that hold the same, in whatever order it came; two
    /// others are alike with a probability below 2⁻⁸⁰ (`keys`). What is counted, and whether the worker is uncertain, is not part of it.
    ///
    /// # Errors
    /// [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle) if there is no such worker.
    ///
    /// # Complexity
    /// O(entries of the worker).
    pub fn digest(&self, worker: WorkerId) -> Result<u128> {
        let worker = &self.workers[self.column(worker, "KvIndexer::digest")?];
        let (keys, tree) = (&self.reader.keys, &self.blocks.tree);
        let mut sum = keys.holding(&[packed(worker.root)]);
        let lanes = [(0, Some(worker.lane)), (1, worker.approximate)];
        for (kind, lane) in lanes {
            let Some(lane) = lane else { continue };
            let holdings = self.blocks.holdings(lane);
            for (hash, held) in holdings.iter() {
                let words = [
                    kind,
                    hash.into(),
                    packed(tree.digest(held.slot)),
                    held.copies.word(),
                ];
                sum = sum.wrapping_add(keys.holding(&words));
            }
            for (hash, parked) in holdings.all_parked() {
                let parent = parked.parent.into();
                let words = [
                    kind | 2,
                    hash.into(),
                    parent,
                    packed(parked.contents),
                    parked.copies.word(),
                ];
                sum = sum.wrapping_add(keys.holding(&words));
            }
        }
        Ok(sum)
    }

    /// A number that is equal for indexes with equal keys and block sizes, and only for them but for one case in 2⁶⁴. Who
    /// has it can test guesses of the key, and learns nothing else of it.
    #[must_use]
    pub fn key_check(&self) -> u64 {
        self.reader.keys.check()
    }

    /// What is counted of the index.
    ///
    /// # Complexity
    /// O(edges + blocks/64).
    #[must_use]
    pub fn stats(&self) -> IndexerStats {
        let lanes = self.blocks.live().iter();
        let entries = lanes.map(|lane| self.blocks.holdings(lane).len() as u64);
        IndexerStats {
            workers: self.workers.len() as u64,
            blocks: self.blocks.tree.num_blocks().into(),
            edges: self.blocks.tree.num_edges() as u64,
            entries: entries.sum(),
            dead: self.blocks.num_dead() as u64,
            bytes: (size_of::<Self>() + self.blocks.heap_bytes()) as u64,
        }
    }

    /// Checks the invariants of trees, hashes, holdings and fingerprints.
    ///
    /// # Errors
    /// [`BrokenInvariant`](kvtrie_core::ErrorKind::BrokenInvariant) says which one is broken.
    pub fn check(&self) -> Result<()> {
        let checked = self.blocks.check();
        checked
            .map_err(|message| Error::new(ErrorKind::BrokenInvariant, "KvIndexer::check", message))
    }
}

impl EventReader {
    /// Whether a search that may find moved runs looks for them: the index must keep fingerprints.
    #[must_use]
    pub fn looks_for_moved(&self, moved: bool) -> bool {
        moved && self.moved_runs
    }

    /// As [`KvIndexer::prompt`], outside of the lock of the index.
    #[must_use]
    pub fn prompt(&self, seq: &TokenSequence, moved: bool) -> Prompt {
        let end = seq.items().first().map_or(seq.len(), Item::start);
        let tokens = &seq.tokens()[..end];
        let root = self.keys.root(seq.namespace(), None, None);
        let mut digest = root;
        let digests = tokens.chunks_exact(self.block_size).map(|block| {
            digest = self.keys.child(digest, self.keys.contents(block), false);
            digest
        });
        Prompt {
            root,
            digests: digests.collect(),
            windows: if self.looks_for_moved(moved) {
                self.keys.windows(tokens)
            } else {
                Vec::new()
            },
            num_tokens: seq.len(),
            keys: self.keys.check(),
        }
    }
}
