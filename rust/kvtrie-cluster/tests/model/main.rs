//! Compares random events with a model that has no tree: one set of blocks per worker.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test stops at what it does not expect"
)]

#[path = "../common/mod.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use common::{SIZE, Value, batch, cleared, removed, stored};
use kvtrie_cluster::{FindOptions, IndexerConfig, KvIndexer, Stream, Tier, WorkerId};
use kvtrie_core::{Namespace, ReusePolicy, Salt, Scope, TokenSequence};

const MEDIA: [&str; 4] = ["GPU", "CPU", "DISK", "EXTERNAL"];
const RUN_BLOCKS: usize = 2;
const SESSIONS: [&str; 3] = ["chat-1", "chat-2", "chat-3"];

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

type Node = usize;

/// All blocks that events may name: a forest of prefixes, some of whose blocks have equal tokens.
struct Universe {
    parents: Vec<Option<Node>>,
    tokens: Vec<[u32; SIZE]>,
}

impl Universe {
    fn new(random: &mut Random, count: usize) -> Self {
        let mut universe = Self {
            parents: Vec::new(),
            tokens: Vec::new(),
        };
        let mut known = BTreeSet::new();
        while universe.parents.len() < count {
            let len = universe.parents.len();
            let parent = match random.below(10) {
                _ if len == 0 => None,
                0 => None,
                1..=3 => Some(random.below(len)),
                _ => Some(len - 1),
            };
            // Each third block at most has the same tokens: fewer than an index lists.
            let letter = random.below(count / 3) as u32;
            if known.insert((parent, letter)) {
                universe.parents.push(parent);
                universe.tokens.push([letter, letter ^ 1]);
            }
        }
        let mut times = BTreeMap::new();
        for tokens in &mut universe.tokens {
            let seen = times.entry(tokens[0]).or_insert(0_u32);
            *seen += 1;
            // Beyond that, a block has tokens of its own.
            if *seen > 3 {
                tokens[1] = 1_000 + *seen * 1_000 + tokens[0];
            }
        }
        universe
    }

    /// The blocks from the root to this one.
    fn path(&self, node: Node) -> Vec<Node> {
        let mut path = vec![node];
        while let Some(parent) = self.parents[*path.last().unwrap()] {
            path.push(parent);
        }
        path.reverse();
        path
    }

    fn spell(&self, nodes: &[Node]) -> Vec<u32> {
        nodes.iter().flat_map(|&node| self.tokens[node]).collect()
    }
}

type Counts = [u32; 4];

fn fastest(counts: &Counts) -> Option<usize> {
    counts.iter().position(|&count| count > 0)
}

/// What one worker holds.
#[derive(Default)]
struct Naive {
    known: BTreeMap<Node, Counts>,
    /// Of known blocks in the device whose session is known.
    sessions: BTreeMap<Node, &'static str>,
    /// Of the worker's plans.
    policy: Option<ReusePolicy>,
    parked: BTreeMap<Node, Counts>,
}

impl Naive {
    fn store(
        &mut self,
        universe: &Universe,
        nodes: &[Node],
        tier: usize,
        session: Option<&'static str>,
    ) {
        let parent = universe.parents[nodes[0]];
        let mut is_known = parent.is_none_or(|parent| self.known.contains_key(&parent));
        for &node in nodes {
            is_known |= self.known.contains_key(&node);
            let into = if is_known {
                &mut self.known
            } else {
                &mut self.parked
            };
            into.entry(node).or_default()[tier] += 1;
            if is_known && tier == 0 {
                match session {
                    Some(session) => self.sessions.insert(node, session),
                    None => self.sessions.remove(&node),
                };
            }
            if is_known {
                self.attach(universe);
            }
        }
    }

    fn attach(&mut self, universe: &Universe) {
        loop {
            let is_ready = |&&node: &&Node| {
                let parent = universe.parents[node];
                self.known.contains_key(&node)
                    || parent.is_none_or(|parent| self.known.contains_key(&parent))
            };
            let Some(&node) = self.parked.keys().find(is_ready) else {
                return;
            };
            let counts = self.parked.remove(&node).unwrap();
            let into = self.known.entry(node).or_default();
            for (sum, count) in into.iter_mut().zip(counts) {
                *sum += count;
            }
        }
    }

    fn remove(&mut self, node: Node, tier: usize) {
        for from in [&mut self.known, &mut self.parked] {
            if let Some(counts) = from.get_mut(&node) {
                let had = *counts;
                counts[tier] = counts[tier].saturating_sub(1);
                if *counts != had {
                    self.sessions.remove(&node);
                }
                if fastest(counts).is_none() {
                    from.remove(&node);
                }
                return;
            }
        }
    }

    /// Number of blocks from the front, and the slowest tier among them.
    fn front(&self, path: &[Node]) -> (usize, usize) {
        let mut slowest = 0;
        for (at, node) in path.iter().enumerate() {
            match self.known.get(node) {
                Some(counts) => slowest = slowest.max(fastest(counts).unwrap()),
                None => return (at, slowest),
            }
        }
        (path.len(), slowest)
    }

    /// The parts of a prompt that are runs of some of the known blocks, each up to one of their ends.
    fn runs(
        &self,
        universe: &Universe,
        prompt: &[u32],
        wanted: impl Fn(Node) -> bool,
    ) -> Vec<(usize, usize)> {
        let is_at = |node: Node, at: usize| {
            prompt.get(at..at + SIZE) == Some(&universe.tokens[node][..])
                && self.known.contains_key(&node)
                && wanted(node)
        };
        let mut runs = Vec::new();
        for at in 0..prompt.len() {
            for &last in self.known.keys().filter(|&&node| is_at(node, at)) {
                // The run that ends with this block.
                let (mut start, mut node) = (at, last);
                while let Some(parent) = universe.parents[node]
                    && start >= SIZE
                    && is_at(parent, start - SIZE)
                {
                    (start, node) = (start - SIZE, parent);
                }
                runs.push((start, at + SIZE));
            }
        }
        runs
    }

    /// Tokens after the front in runs that are held anywhere.
    fn possible(&self, universe: &Universe, prompt: &[u32], front: usize) -> usize {
        let mut covered = vec![false; prompt.len()];
        for (start, end) in self.runs(universe, prompt, |_| true) {
            if end - start >= RUN_BLOCKS * SIZE {
                covered[start..end].fill(true);
            }
        }
        covered[front..].iter().filter(|&&one| one).count()
    }

    /// Tokens after the front with so many of a run in scope from each on that a plan takes it. `path` has the blocks of
    /// the prompt.
    fn promised(&self, asked: &Asked<'_>, path: &[Node], front: usize) -> usize {
        let Some(policy) = &self.policy else { return 0 };
        let (universe, min_run) = (asked.universe, policy.min_run.unwrap());
        let in_scope = |node: Node| {
            let of = universe.path(node);
            let shared = policy.shared_prefix;
            let begins = shared <= path.len() && of.get(..shared) == Some(&path[..shared]);
            let session = self.sessions.get(&node).copied();
            self.known[&node][0] > 0
                && (policy.scope == Scope::Namespace
                    || begins
                    || (session.is_some() && session == asked.session))
        };
        let mut covered = vec![false; asked.prompt.len()];
        for (start, end) in self.runs(universe, asked.prompt, in_scope) {
            let end = end.min(asked.moved_end.unwrap_or(end));
            if start + min_run <= end {
                covered[start..=end - min_run].fill(true);
            }
        }
        covered[front..].iter().filter(|&&one| one).count()
    }
}

/// A search with moved runs.
struct Asked<'a> {
    universe: &'a Universe,
    prompt: &'a [u32],
    session: Option<&'static str>,
    moved_end: Option<usize>,
}

/// A policy that promises runs, or none.
fn policy(random: &mut Random) -> Option<ReusePolicy> {
    let scope = match random.below(4) {
        0 => return None,
        1 => Scope::Namespace,
        _ => Scope::Conversation,
    };
    Some(ReusePolicy {
        scope,
        shared_prefix: 1 + random.below(4),
        min_run: Some(RUN_BLOCKS * SIZE - 1 + random.below(5)),
        approximate: true,
        ..ReusePolicy::LAXEST
    })
}

fn space() -> Arc<Namespace> {
    Arc::new(Namespace::new("m", "auto", "default", None, Salt::Shared).unwrap())
}

fn index() -> KvIndexer {
    let config = IndexerConfig {
        min_run: RUN_BLOCKS * SIZE,
        ..IndexerConfig::new(SIZE)
    };
    KvIndexer::new(config, b"the key of tests").unwrap()
}

/// Workers of one thread, with their models.
struct Driver<'a> {
    universe: &'a Universe,
    random: Random,
    workers: Vec<(WorkerId, Naive)>,
    steps: BTreeMap<&'static str, u64>,
    probes: u64,
}

impl Driver<'_> {
    fn count(&mut self, what: &'static str) {
        *self.steps.entry(what).or_default() += 1;
    }

    /// Engines name blocks in ways of their own.
    fn hash(worker: WorkerId, node: Node) -> u64 {
        (node as u64 + 1).wrapping_mul(0x1234_5678_9abc_def1) ^ worker.0 << 40
    }

    fn step(&mut self, index: &Mutex<KvIndexer>) {
        let universe = self.universe;
        let at = self.random.below(self.workers.len());
        let choice = self.random.below(1_000);
        let tier = if self.random.below(4) == 0 {
            self.random.below(4)
        } else {
            0
        };
        let node = self.random.below(universe.parents.len());
        let as_maps = self.random.below(2) == 0;
        let session = SESSIONS.get(self.random.below(SESSIONS.len() + 1)).copied();
        let (id, naive) = &mut self.workers[at];
        let id = *id;
        let hash = |&node: &Node| Self::hash(id, node);
        let event = match choice {
            0 => {
                let mut index = index.lock().unwrap();
                index.remove_worker(id).unwrap();
                let new = index.add_worker(space()).unwrap();
                self.workers[at] = (new, Naive::default());
                self.count("death");
                return;
            }
            2..6 => {
                naive.policy = policy(&mut self.random);
                let mut index = index.lock().unwrap();
                index.set_policy(id, naive.policy.as_ref()).unwrap();
                self.count("policy");
                return;
            }
            1 => {
                *naive = Naive {
                    policy: naive.policy.take(),
                    ..Naive::default()
                };
                self.count("clear");
                cleared()
            }
            6..450 => {
                // One of the blocks that are there, or any.
                let len = naive.known.len().max(1);
                let pick = naive.known.keys().nth(node % len);
                let node = pick.copied().filter(|_| choice > 20).unwrap_or(node);
                naive.remove(node, tier);
                self.count("remove");
                removed(&[hash(&node)], MEDIA[tier])
            }
            _ => {
                let path = universe.path(node);
                let most = if choice < 600 {
                    1 + choice % 7
                } else {
                    path.len()
                };
                let nodes = &path[path.len().saturating_sub(most)..];
                let parent = universe.parents[nodes[0]].as_ref().map(hash);
                let hashes: Vec<u64> = nodes.iter().map(hash).collect();
                // The array form ends before sessions.
                let session = session.filter(|_| as_maps);
                naive.store(universe, nodes, tier, session);
                self.count("store");
                let mut event = stored(&hashes, parent, &universe.spell(nodes), MEDIA[tier]);
                if let Some(session) = session {
                    event.push(("session_id", Value::Text(session)));
                }
                event
            }
        };
        let raw = batch(&[event], as_maps, None);
        let mut index = index.lock().unwrap();
        let read = index.reader().read(&raw).unwrap();
        index.apply(id, Stream::Engine, &read).unwrap();
    }

    fn probe(&mut self, index: &Mutex<KvIndexer>, moved: bool) {
        let node = self.random.below(self.universe.parents.len());
        let mut nodes = self.universe.path(node);
        if moved {
            // Texts in another order have moved runs.
            let cut = self.random.below(nodes.len());
            nodes.rotate_left(cut);
            let other = self.random.below(self.universe.parents.len());
            nodes.extend(self.universe.path(other));
        }
        let prompt = self.universe.spell(&nodes);
        let seq = TokenSequence::new(space(), prompt.clone(), Vec::new()).unwrap();
        // The blocks of the prompt, by what is before them.
        let mut path: Vec<Node> = Vec::new();
        for block in prompt.chunks(SIZE) {
            let parent = path.last().copied();
            let all = 0..self.universe.parents.len();
            let mut found = all.filter(|&node| {
                self.universe.parents[node] == parent && self.universe.tokens[node] == block
            });
            match found.next() {
                Some(node) => path.push(node),
                None => break,
            }
        }
        let asked = Asked {
            universe: self.universe,
            prompt: &prompt,
            session: SESSIONS.get(self.random.below(SESSIONS.len() + 1)).copied(),
            moved_end: (self.random.below(2) == 0).then(|| self.random.below(prompt.len() + 1)),
        };
        let options = FindOptions {
            keep_last: 0,
            moved,
            session: asked.session,
            moved_end: asked.moved_end,
        };
        let index = index.lock().unwrap();
        let scores = index.find(&index.prompt(&seq, moved), options).unwrap();
        let columns: Vec<WorkerId> = index.workers().collect();
        drop(index);
        for (id, naive) in &self.workers {
            let column = columns.binary_search(id).unwrap();
            let (front, slowest) = naive.front(&path);
            assert_eq!(
                scores.exact[column] as usize,
                front * SIZE,
                "{id:?} {nodes:?}"
            );
            assert_eq!(scores.tier[column], Tier::ALL[slowest], "{id:?} {nodes:?}");
            assert!(!scores.uncertain[column]);
            if moved {
                let possible = naive.possible(self.universe, &prompt, front * SIZE);
                assert_eq!(
                    scores.possible[column] as usize, possible,
                    "{id:?} {nodes:?}"
                );
                let promised = naive.promised(&asked, &path, front * SIZE);
                assert_eq!(scores.moved[column] as usize, promised, "{id:?} {nodes:?}");
                assert!(promised <= possible);
                *self.steps.entry("tokens promised").or_default() += promised as u64;
            } else {
                assert!(scores.moved.is_empty() && scores.possible.is_empty());
            }
            self.probes += 1;
        }
    }
}

/// The digest of a worker that holds the same, in an index of its own that got it in another order.
fn again(universe: &Universe, id: WorkerId, naive: &Naive) -> u128 {
    let mut index = index();
    let worker = index.add_worker(space()).unwrap();
    let hash = |&node: &Node| Driver::hash(id, node);
    let mut apply = |event| {
        let read = index.reader().read(&batch(&[event], true, None)).unwrap();
        index.apply(worker, Stream::Engine, &read).unwrap();
    };
    let one = |node: Node, tier: usize| {
        let parent = universe.parents[node].as_ref().map(hash);
        stored(&[hash(&node)], parent, &universe.tokens[node], MEDIA[tier])
    };
    // All of their paths first, so that no block waits; then what was not asked for leaves.
    let paths: BTreeSet<Node> = naive
        .known
        .keys()
        .flat_map(|&node| universe.path(node))
        .collect();
    for &node in &paths {
        apply(one(node, 0));
    }
    for (&node, counts) in naive.known.iter().rev() {
        for tier in (0..4).rev() {
            for _ in 0..counts[tier] {
                apply(one(node, tier));
            }
        }
    }
    for &node in paths.iter().rev() {
        apply(removed(&[hash(&node)], "GPU"));
    }
    for (&node, counts) in naive.parked.iter().rev() {
        for (tier, &count) in counts.iter().enumerate() {
            for _ in 0..count {
                apply(one(node, tier));
            }
        }
    }
    index.check().unwrap();
    index.digest(worker).unwrap()
}

/// Runs so many operations on so many workers in so many threads; returns what was done.
fn run(
    seed: u64,
    num_workers: usize,
    num_threads: usize,
    operations: u64,
) -> (BTreeMap<&'static str, u64>, u64) {
    let mut random = Random(seed);
    let universe = Universe::new(&mut random, 90);
    let index = Mutex::new(index());
    let mut drivers: Vec<Driver<'_>> = (0..num_threads)
        .map(|thread| Driver {
            universe: &universe,
            random: Random(seed ^ (thread as u64 + 1) << 32),
            workers: Vec::new(),
            steps: BTreeMap::new(),
            probes: 0,
        })
        .collect();
    for worker in 0..num_workers {
        let id = index.lock().unwrap().add_worker(space()).unwrap();
        drivers[worker % num_threads]
            .workers
            .push((id, Naive::default()));
    }
    let each = operations / num_threads as u64;
    // A probe looks at every worker of its thread, so the work of both is alike.
    let every = (num_workers as u64 / 2).max(1);
    std::thread::scope(|scope| {
        for driver in &mut drivers {
            scope.spawn(|| {
                for step in 0..each {
                    driver.step(&index);
                    if step % every == 0 {
                        driver.probe(&index, step % (16 * every) == 0);
                    }
                    if step % 8_192 == 100 {
                        index.lock().unwrap().check().unwrap();
                    }
                }
            });
        }
    });
    let mut index = index.into_inner().unwrap();
    index.check().unwrap();
    for (id, naive) in drivers.iter().flat_map(|driver| &driver.workers) {
        let digest = index.digest(*id).unwrap();
        assert_eq!(digest, again(&universe, *id, naive), "{id:?}");
    }
    index.reclaim();
    index.check().unwrap();
    let live: Vec<WorkerId> = index.workers().collect();
    for id in live {
        index.remove_worker(id).unwrap();
    }
    index.reclaim();
    index.check().unwrap();
    assert_eq!((index.stats().blocks, index.stats().edges), (0, 0));
    let mut steps = BTreeMap::new();
    for driver in &drivers {
        for (what, count) in &driver.steps {
            *steps.entry(*what).or_default() += count;
        }
    }
    (steps, drivers.iter().map(|driver| driver.probes).sum())
}

#[test]
fn an_index_answers_as_a_set_of_blocks_per_worker() {
    let mut promised = 0;
    for num_workers in [1, 8, 64, 256] {
        for num_threads in [1, 3] {
            if num_threads <= num_workers {
                for seed in 0..2 {
                    let (steps, _) = run(seed, num_workers, num_threads, 6_000);
                    promised += steps.get("tokens promised").copied().unwrap_or_default();
                }
            }
        }
    }
    assert!(promised > 1_000, "{promised} tokens");
}

/// `make soak-cluster` sets the number of operations.
#[test]
#[ignore = "minutes"]
fn soak() {
    let asked = std::env::var("KVTRIE_CLUSTER_OPERATIONS");
    let operations = asked
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(10_000_000);
    for num_threads in [1, 4] {
        for num_workers in [1, 8, 64, 256] {
            if num_threads > num_workers {
                continue;
            }
            let began = Instant::now();
            let (steps, probes) = run(7, num_workers, num_threads, operations);
            println!(
                "{num_workers} workers, {num_threads} threads: {steps:?}, {probes} scores compared, 0 wrong, {:.0} s",
                began.elapsed().as_secs_f64()
            );
        }
    }
}
