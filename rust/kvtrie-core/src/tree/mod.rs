//! The radix forest: its fields, its counters, and how a path is found.

mod content;
mod edges;
mod insert;
mod lookup;
mod pins;
mod recency;
mod remove;
mod tags;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::arena::Arena;
use crate::blocks::BlockTable;
use crate::cursor::Cursor;
use crate::edge_table::EdgeTable;
use crate::error::{Error, Result};
use crate::hash::EdgeHasher;
use crate::ids::{BlockId, Depth, NO_NODE, NodeIndex, depth};
use crate::lease::Lease;
use crate::lru::EvictionOrder;
use crate::namespace::Namespace;
use crate::node::Node;
use crate::siblings;
use crate::slab::Slab;
use crate::span::Kinds;
use crate::tokens::{TokenSequence, View};
use crate::windows::Windows;

use pins::Anchors;

pub use insert::{Imported, InsertOptions, Inserted, Source};
pub use lookup::{Effort, LookupOptions, Match};

/// What an index is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Blocks in the engine's pool, 1 to 2³¹; ids lie in `0..num_blocks`.
    pub num_blocks: u64,
    /// Token slots in a block, 1 to 4,096.
    pub block_size: usize,
    /// Seeds every internal hash. With several tenants: a secret, the same on all ranks.
    pub seed: u64,
    /// Bits kept of every internal hash, 0 to 64 (hashes of edges have 32). A testing aid: results do not depend on it.
    pub hash_bits: u32,
    /// Whether windows of everything cached are kept, by which moved runs are found. This version keeps them, and does not
    /// look for runs yet.
    pub moved_runs: bool,
    /// Tokens of the shortest run that is to be found, at least 8.
    pub min_run: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            num_blocks: 1 << 16,
            block_size: 16,
            seed: 0,
            hash_bits: 64,
            moved_runs: false,
            min_run: 16,
        }
    }
}

impl Config {
    /// The largest block, in token slots.
    pub const MAX_BLOCK_SIZE: usize = 4096;
    /// The shortest run that can be looked for, in tokens.
    pub const MIN_RUN: usize = Windows::MIN_RUN;
}

/// One namespace's tree.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) root: NodeIndex,
    /// Renewed whenever a block in the middle of a path leaves or is replaced: what cursors know of the
    /// blocks above stands while this does. Never used twice in one index.
    pub(crate) version: u64,
}

/// A place in a tree: `depth` blocks from the root, `node` being the edge that holds the last of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) node: NodeIndex,
    pub(crate) depth: Depth,
}

/// A forest of radix trees, one a namespace, that maps token runs to block ids.
///
/// See the [crate's documentation](crate) for what it promises and what its calls cost.
#[derive(Debug)]
pub struct RadixIndex {
    /// Tells plans and cursors of different indexes apart.
    pub(crate) uid: u64,
    pub(crate) config: Config,
    pub(crate) nodes: Arena,
    /// Every node with a sibling, by (parent, first block): an only child is followed without hashing.
    pub(crate) edges: EdgeTable,
    pub(crate) hasher: EdgeHasher,
    pub(crate) trees: Slab<Tree>,
    pub(crate) tree_of: HashMap<Arc<Namespace>, u32, FixedState>,
    pub(crate) blocks: BlockTable,
    pub(crate) order: EvictionOrder,
    /// None where moved runs are off.
    pub(crate) windows: Option<Windows>,
    pub(crate) leases: Slab<Lease>,
    /// Where leases anchor.
    pub(crate) anchors: HashMap<NodeIndex, Anchors, FixedState>,
    /// Blocks that are pinned one by one, and how often.
    pub(crate) pins: HashMap<u32, u32, FixedState>,
    /// Condemned blocks whose last pin ended, oldest release first.
    pub(crate) waiting: VecDeque<u32>,
    pub(crate) kinds: Kinds,
    /// Whether any token was ever tagged.
    pub(crate) is_tagged: bool,
    pub(crate) clock: u64,
    pub(crate) last_version: u64,
    pub(crate) num_indexed: u64,
    pub(crate) num_condemned: u64,
    /// Indexed blocks that are pinned or lie above a pinned one.
    pub(crate) num_protected: u64,
    pub(crate) num_approximate: u64,
    pub(crate) num_holes: u64,
    pub(crate) unknown_discards: u64,
    pub(crate) work: Work,
}

/// How far a sequence was followed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walked {
    pub(crate) at: Position,
    pub(crate) work: Work,
    /// Effort was spent before the path ended.
    pub(crate) gave_up: bool,
}

/// What finding paths has cost since the index was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) nodes_visited: u64,
    pub(crate) bytes_compared: u64,
}

impl RadixIndex {
    /// An empty index.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a field of `config` lies outside its limits.
    pub fn new(config: Config) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if config.num_blocks == 0 || config.num_blocks > BlockId::MAX_BLOCKS {
            return Err(Error::invalid(format!(
                "RadixIndex: num_blocks is {}; it must lie in 1..={}",
                config.num_blocks,
                BlockId::MAX_BLOCKS
            )));
        }
        if config.block_size == 0 || config.block_size > Config::MAX_BLOCK_SIZE {
            return Err(Error::invalid(format!(
                "RadixIndex: block_size is {}; it must lie in 1..={}",
                config.block_size,
                Config::MAX_BLOCK_SIZE
            )));
        }
        if config.hash_bits > 64 {
            return Err(Error::invalid(format!(
                "RadixIndex: hash_bits is {}; it must lie in 0..=64",
                config.hash_bits
            )));
        }
        if config.min_run < Config::MIN_RUN {
            return Err(Error::invalid(format!(
                "RadixIndex: min_run is {}; it must be at least {}",
                config.min_run,
                Config::MIN_RUN
            )));
        }
        let windows = config.moved_runs.then(|| {
            let (blocks, size) = (config.num_blocks, config.block_size);
            Windows::new(blocks, size, config.min_run, config.seed, config.hash_bits)
        });
        Ok(Self {
            uid: NEXT.fetch_add(1, Ordering::Relaxed),
            hasher: EdgeHasher::new(config.seed, config.hash_bits),
            tree_of: HashMap::with_hasher(FixedState::with_seed(config.seed)),
            nodes: Arena::default(),
            edges: EdgeTable::default(),
            trees: Slab::default(),
            blocks: BlockTable::default(),
            order: EvictionOrder::default(),
            windows,
            leases: Slab::default(),
            anchors: HashMap::with_hasher(FixedState::with_seed(config.seed)),
            pins: HashMap::with_hasher(FixedState::with_seed(config.seed)),
            waiting: VecDeque::new(),
            kinds: Kinds::default(),
            is_tagged: false,
            clock: 0,
            last_version: 0,
            num_indexed: 0,
            num_condemned: 0,
            num_protected: 0,
            num_approximate: 0,
            num_holes: 0,
            unknown_discards: 0,
            work: Work::default(),
            config,
        })
    }

    /// What the index was made for.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Blocks that [`evict`](Self::evict) could take from the index: neither pinned nor above a pinned one. O(1).
    #[must_use]
    pub fn num_evictable(&self) -> u64 {
        self.num_indexed - self.num_protected
    }

    /// Names of the span kinds, by bit.
    #[must_use]
    pub fn kinds(&self) -> &[String] {
        self.kinds.names()
    }

    /// One tick of the logical clock.
    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(crate) fn block_size(&self) -> usize {
        self.config.block_size
    }

    pub(crate) fn next_version(&mut self) -> u64 {
        self.last_version += 1;
        self.last_version
    }

    /// Cursors of the namespace of `node` must look again.
    pub(crate) fn renew_version(&mut self, node: NodeIndex) {
        let version = self.next_version();
        let tree = self.nodes[node].tree;
        self.trees[tree].version = version;
    }

    /// Checks that ids lie in the pool.
    pub(crate) fn check_ids(&self, ids: &[BlockId], call: &str) -> Result<()> {
        match ids
            .iter()
            .find(|id| u64::from(id.0) >= self.config.num_blocks)
        {
            Some(id) => Err(Error::invalid(format!(
                "{call}: block id {id} is not in 0..{} (num_blocks)",
                self.config.num_blocks
            ))),
            None => Ok(()),
        }
    }

    /// Checks that `start` is a block boundary inside the sequence.
    pub(crate) fn check_start(&self, start: usize, len: usize, call: &str) -> Result<()> {
        if start > len || !start.is_multiple_of(self.block_size()) {
            return Err(Error::invalid(format!(
                "{call}: start is {start}; it must be a multiple of the block size {} and at most the {len} tokens of \
                 the sequence",
                self.block_size()
            )));
        }
        Ok(())
    }

    /// The root of a namespace's tree, if it has one.
    pub(crate) fn root(&self, namespace: &Arc<Namespace>) -> Option<Position> {
        let tree = *self.tree_of.get(namespace)?;
        Some(Position {
            node: self.trees[tree].root,
            depth: 0,
        })
    }

    /// The root of a namespace's tree, made if there is none.
    pub(crate) fn root_or_new(&mut self, namespace: &Arc<Namespace>) -> Position {
        if let Some(root) = self.root(namespace) {
            return root;
        }
        let version = self.next_version();
        let tree = self.trees.insert(Tree {
            namespace: Arc::clone(namespace),
            root: NO_NODE,
            version,
        });
        let root = self.nodes.insert(Node::new(tree, NO_NODE, 0));
        self.trees[tree].root = root;
        self.tree_of.insert(Arc::clone(namespace), tree);
        Position {
            node: root,
            depth: 0,
        }
    }

    /// Where the sequence's cursor stands, with how far the blocks above are exact.
    pub(crate) fn at_cursor(&self, seq: &TokenSequence) -> Option<(Position, Depth)> {
        let cursor = seq
            .cursor
            .as_ref()
            .filter(|cursor| cursor.index == self.uid)?;
        if !self.nodes.knows(cursor.node) {
            return None;
        }
        let tree = self.nodes[cursor.node.index].tree;
        if self.trees[tree].version != cursor.version {
            return None;
        }
        Some((
            self.normal(Position {
                node: cursor.node.index,
                depth: cursor.present,
            }),
            cursor.exact,
        ))
    }

    /// Remembers that the first blocks of `seq` are the present path down to `at`, exact in the first `exact` blocks.
    /// `walked` edges lie behind where the cursor stood before.
    pub(crate) fn set_cursor(
        &self,
        seq: &mut TokenSequence,
        at: Position,
        exact: Depth,
        walked: u64,
    ) {
        let node = &self.nodes[at.node];
        // Ids that were right when the old cursor was, and do not reach behind the new one, still are.
        let known = self.at_cursor(seq).is_some();
        let old = seq.cursor.take().filter(|_| known);
        let edges = old.as_ref().map_or(0, |old| old.edges) + walked;
        let ids = old.and_then(|old| old.ids);
        let ids = ids.filter(|ids| ids.len() <= at.depth as usize);
        seq.cursor = (at.depth > 0).then(|| Cursor {
            index: self.uid,
            node: self.nodes.handle(at.node),
            version: self.trees[node.tree].version,
            present: at.depth,
            exact,
            block_size: self.block_size(),
            edges,
            ids,
        });
    }

    /// The ids of the path of `seq` down to `at`: those that its cursor remembers are not read again.
    pub(crate) fn remembered_ids(
        &self,
        seq: &mut TokenSequence,
        at: Position,
    ) -> Arc<Vec<BlockId>> {
        let is_known = self.at_cursor(seq).is_some();
        let cursor = seq.cursor.as_mut().filter(|_| is_known);
        let known = cursor.as_ref().and_then(|cursor| cursor.ids.clone());
        if let Some(ids) = &known
            && ids.len() >= at.depth as usize
        {
            return Arc::clone(ids);
        }
        let mut ids = Vec::new();
        let from = known.as_ref().map_or(0, |known| known.len());
        self.path_ids(at, depth(from), &mut ids);
        if let Some(known) = known {
            ids.splice(..0, known.iter().copied());
        }
        let ids = Arc::new(ids);
        if let Some(cursor) = cursor {
            cursor.ids = Some(Arc::clone(&ids));
        }
        ids
    }

    /// The same place, named by the edge that holds the block before it.
    pub(crate) fn normal(&self, mut at: Position) -> Position {
        while at.depth <= self.nodes[at.node].depth && !self.nodes[at.node].is_root() {
            at.node = self.nodes[at.node].parent;
        }
        at
    }

    /// Follows `tokens` from `at` down, block by block, to at most `limit`, or until `effort` is spent: at least a block and
    /// an edge further. Of an edge, the blocks before `within(node, from, to)` are looked at, and what is the same there is
    /// told to `pass(node, from, to)`.
    pub(crate) fn walk(
        &self,
        tokens: View<'_>,
        mut at: Position,
        limit: Depth,
        effort: Effort,
        within: impl Fn(&Node, Depth, Depth) -> Depth,
        mut pass: impl FnMut(&Node, Depth, Depth),
    ) -> Walked {
        let block_size = self.block_size();
        let mut work = Work::default();
        let gave_up = loop {
            let node = &self.nodes[at.node];
            work.nodes_visited += 1;
            let end = node.end();
            if at.depth < end {
                let wanted = within(node, at.depth, end.min(limit));
                let left = effort.bytes.saturating_sub(work.bytes_compared);
                let affordable = usize::try_from(left).unwrap_or(usize::MAX) / (4 * block_size);
                let to = wanted.min(at.depth.saturating_add(depth(affordable.max(1))));
                let (from, until) = (at.depth as usize * block_size, to as usize * block_size);
                let same = tokens
                    .slice(from, until)
                    .common(node.view(block_size).slice(from, until));
                // The token that differs was compared as well.
                let compared = (same + 1).min(until - from);
                work.bytes_compared += (compared * size_of::<u32>()) as u64;
                let reached = at.depth + depth(same / block_size);
                pass(node, at.depth, reached);
                at.depth = reached;
                if reached < end {
                    break reached == to && to < wanted;
                }
            }
            if at.depth >= limit {
                break false;
            }
            let from = at.depth as usize * block_size;
            let Some(child) = self.child(at.node, tokens.slice(from, from + block_size)) else {
                break false;
            };
            if work.nodes_visited >= effort.nodes.max(2) {
                break true;
            }
            at.node = child;
        };
        Walked {
            at: self.normal(at),
            work,
            gave_up,
        }
    }

    /// Edges of the path that the sequence was last matched to, as far as it was walked: what planning it again goes over.
    #[must_use]
    pub fn known_edges(&self, seq: &TokenSequence) -> u64 {
        let is_known = self.at_cursor(seq).is_some();
        let cursor = seq.cursor.as_ref().filter(|_| is_known);
        cursor.map_or(0, |cursor| cursor.edges)
    }

    pub(crate) fn count_work(&mut self, work: Work) {
        self.work.nodes_visited += work.nodes_visited;
        self.work.bytes_compared += work.bytes_compared;
    }

    /// The child whose first block is `first`. An only child is answered unseen: the caller compares.
    fn child(&self, parent: NodeIndex, first: View<'_>) -> Option<NodeIndex> {
        if !self.nodes[parent].has_children() {
            return None;
        }
        if let Some(only) = siblings::only(&self.nodes, parent) {
            return Some(only);
        }
        let block_size = self.block_size();
        let hash = self.hasher.edge(parent, first);
        self.edges.find(hash, |child| {
            let node = &self.nodes[child];
            node.hash == hash
                && node.parent == parent
                && node.first_block(block_size).common(first) == block_size
        })
    }

    /// The edges on the way down to `at` that hold blocks from depth `from` on: (node, first depth, end).
    pub(crate) fn edges_to(&self, at: Position, from: Depth) -> Vec<(NodeIndex, Depth, Depth)> {
        let mut found = Vec::new();
        let (mut node, mut end) = (at.node, at.depth);
        while end > from {
            let start = self.nodes[node].depth;
            found.push((node, start.max(from), end));
            end = start;
            node = self.nodes[node].parent;
        }
        found.reverse();
        found
    }

    /// Writes the block ids of the path down to `at`, from depth `from` on, into `out`; holes are [`ABSENT`](crate::ids::ABSENT).
    pub(crate) fn path_ids(&self, at: Position, from: Depth, out: &mut Vec<BlockId>) {
        let block_size = self.block_size();
        out.clear();
        let (mut node, mut end) = (at.node, at.depth);
        let edge = &self.nodes[node];
        if edge.depth <= from && from < end {
            // One edge, the usual case: nothing is written twice.
            out.extend(edge.ids(from, end, block_size));
            return;
        }
        out.resize(end.saturating_sub(from) as usize, BlockId(0));
        while end > from {
            let edge = &self.nodes[node];
            let start = edge.depth.max(from);
            let to = &mut out[(start - from) as usize..(end - from) as usize];
            for (to, id) in to.iter_mut().zip(edge.ids(start, end, block_size)) {
                *to = id;
            }
            end = edge.depth;
            node = edge.parent;
        }
    }
}
