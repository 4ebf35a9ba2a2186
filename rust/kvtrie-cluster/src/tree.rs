//! The tree of unique blocks: edges of consecutive blocks, and which lanes hold which of them.
//!
//! A block has a *slot*, which it keeps as long as it is in the tree. An edge has its slots in runs, because blocks
//! that are stored together get consecutive slots. All lanes that hold a whole edge are one set of bits; a lane that
//! holds a part has a list of runs. So the cost of a search and the memory grow with edges, holes and W/64.

use hashbrown::HashTable;
use smallvec::SmallVec;

use crate::digests::Digests;
use crate::events::Tier;
use crate::keys::{Digest, Keys, bucket, plus};
use crate::lanes::{Lane, Lanes};
use crate::owners::Owners;
use crate::runs::{Run, Runs};
use crate::sessions::{EdgeSessions, Session};

pub(crate) type Slot = u32;
pub(crate) type EdgeIndex = u32;

/// No slot, no edge.
pub(crate) const NONE: u32 = u32::MAX;

/// The most slots of a tree: other tables use the bit above, and the last number.
const MAX_SLOTS: u32 = (1 << 31) - 1;

/// The most runs of slots of an edge that grows, because a block is sought in them.
const MAX_RUNS: usize = 32;

/// Consecutive slots of consecutive blocks.
#[derive(Clone, Copy, Debug)]
struct SlotRun {
    /// Number of blocks of the edge before it.
    start: u32,
    slot: Slot,
}

/// The runs of one lane in an edge, by `key`.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) key: u32,
    pub(crate) runs: Runs,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Edge {
    /// The last block of the edge above.
    parent: Slot,
    /// Number of blocks before the first.
    depth: u32,
    len: u32,
    children: u32,
    /// Who is charged for its blocks.
    owner: Lane,
    /// What tells fingerprints of its namespace from those of others.
    apart: u64,
    /// Its blocks are approximate.
    is_approximate: bool,
    slots: SmallVec<[SlotRun; 1]>,
    full: Lanes,
    /// Lanes that hold a part, ascending.
    parts: Vec<Part>,
    /// Blocks whose fastest copy is not in a device, by lane and tier, ascending. Most edges have none.
    slow: Vec<Part>,
}

impl Edge {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Number of blocks before the first.
    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    pub(crate) fn apart(&self) -> u64 {
        self.apart
    }

    pub(crate) fn full(&self) -> &Lanes {
        &self.full
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    pub(crate) fn owner(&self) -> Lane {
        self.owner
    }

    pub(crate) fn slot(&self, at: u32) -> Slot {
        let run = self.slots[self.slots.partition_point(|run| run.start <= at) - 1];
        run.slot + (at - run.start)
    }

    /// Number of blocks that `lane` holds from the start, if it does not hold all.
    pub(crate) fn at_front(&self, lane: Lane) -> u32 {
        find(&self.parts, lane).map_or(0, |at| self.parts[at].runs.at_front())
    }

    pub(crate) fn is_held(&self, lane: Lane, at: u32) -> bool {
        self.full.has(lane)
            || find(&self.parts, lane).is_ok_and(|part| self.parts[part].runs.has(at))
    }

    /// The lanes and tiers that have a block of their slower tiers before `end`, with the first such block.
    pub(crate) fn slow_before(&self, end: u32) -> impl Iterator<Item = (Lane, Tier, u32)> {
        self.slow.iter().filter_map(move |part| {
            let first = part.runs.as_slice().first()?.0;
            (first < end).then(|| (part.key >> 2, Tier::ALL[(part.key & 3) as usize], first))
        })
    }

    /// Leaves those of a lane's blocks that it has in its device, of which it holds all.
    pub(crate) fn keep_in_device(&self, lane: Lane, (start, end): Run, runs: &mut Runs) {
        let first = self.slow.partition_point(|part| part.key >> 2 < lane);
        let slow = self.slow[first..].iter();
        for part in slow.take_while(|part| part.key >> 2 == lane) {
            for &(start, end) in part.runs.within(start, end) {
                runs.remove(start, end);
            }
        }
    }

    fn holds_some(&self, lane: Lane) -> bool {
        self.full.has(lane) || find(&self.parts, lane).is_ok()
    }

    fn heap_bytes(&self) -> usize {
        let parts = [&self.parts, &self.slow].map(|parts| {
            let inside: usize = parts.iter().map(|part| part.runs.heap_bytes()).sum();
            parts.capacity() * size_of::<Part>() + inside
        });
        let slots = if self.slots.spilled() {
            self.slots.capacity() * size_of::<SlotRun>()
        } else {
            0
        };
        parts[0] + parts[1] + slots + self.full.heap_bytes()
    }
}

fn find(parts: &[Part], key: u32) -> Result<usize, usize> {
    parts.binary_search_by_key(&key, |part| part.key)
}

fn add(parts: &mut Vec<Part>, key: u32, start: u32, end: u32) -> usize {
    match find(parts, key) {
        Ok(at) => {
            parts[at].runs.add(start, end);
            at
        }
        Err(at) => {
            let runs = Runs::of(start, end);
            parts.insert(at, Part { key, runs });
            at
        }
    }
}

fn remove(parts: &mut Vec<Part>, key: u32, start: u32, end: u32) {
    if let Ok(at) = find(parts, key) {
        parts[at].runs.remove(start, end);
        if parts[at].runs.is_empty() {
            parts.remove(at);
        }
    }
}

fn split(parts: &mut Vec<Part>, at: u32) -> Vec<Part> {
    let mut after = Vec::new();
    parts.retain_mut(|part| {
        let (before, rest) = part.runs.split(at);
        if !rest.is_empty() {
            after.push(Part {
                key: part.key,
                runs: rest,
            });
        }
        part.runs = before;
        !part.runs.is_empty()
    });
    after
}

/// Makes room for so many more, in steps of an eighth, and of a 32nd where the list is long, whose memory most allocators
/// move without a copy. A list that doubles would be half empty at worst.
pub(crate) fn make_room<T>(list: &mut Vec<T>, more: usize) {
    let len = list.len();
    if len + more > list.capacity() {
        list.reserve_exact((len / 8).min(len / 32 + 4_096) + 64.max(more));
    }
}

/// What a new block follows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parent {
    /// None for the first block of a path.
    pub(crate) slot: Slot,
    pub(crate) apart: u64,
    /// Whether the new block is approximate.
    pub(crate) is_approximate: bool,
}

/// A block that was added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grown {
    pub(crate) slot: Slot,
    /// The lower part of an edge that was cut.
    pub(crate) cut: Option<EdgeIndex>,
}

/// What leaves the tree, to be taken from other tables.
pub(crate) trait Gone {
    /// The blocks of an edge from `start` on leave.
    fn blocks(&mut self, tree: &Tree, edge: &Edge, start: u32);
}

#[derive(Debug, Default)]
pub(crate) struct Tree {
    edges: Vec<Edge>,
    free_edges: Vec<EdgeIndex>,
    /// By the digest of the first block.
    heads: HashTable<EdgeIndex>,
    digests: Digests,
    owners: Owners,
    sessions: EdgeSessions,
    /// Runs of free slots.
    free_slots: Vec<(Slot, u32)>,
    num_blocks: u32,
    /// Edges made by cuts during a sweep, which may have the lanes that it forgets.
    cut: Vec<EdgeIndex>,
    is_swept: bool,
}

impl Tree {
    pub(crate) fn edge(&self, edge: EdgeIndex) -> &Edge {
        &self.edges[edge as usize]
    }

    fn edge_mut(&mut self, edge: EdgeIndex) -> &mut Edge {
        &mut self.edges[edge as usize]
    }

    pub(crate) fn digest(&self, slot: Slot) -> Digest {
        self.digests.get(slot)
    }

    pub(crate) fn edge_of(&self, slot: Slot) -> EdgeIndex {
        self.owners.get(slot)
    }

    /// The edge of a block, and the number of its blocks before it.
    pub(crate) fn at(&self, slot: Slot) -> (EdgeIndex, u32) {
        let index = self.edge_of(slot);
        let edge = self.edge(index);
        let mut end = edge.len;
        // Edges change at their ends most of the time.
        for run in edge.slots.iter().rev() {
            if (run.slot..run.slot + (end - run.start)).contains(&slot) {
                return (index, run.start + (slot - run.slot));
            }
            end = run.start;
        }
        debug_assert!(false, "slot {slot} is not in its edge");
        (index, 0)
    }

    pub(crate) fn apart(&self, slot: Slot) -> u64 {
        self.edge(self.edge_of(slot)).apart
    }

    /// The fingerprint of a block, apart from those of other namespaces.
    pub(crate) fn fingerprint(&self, keys: &Keys, edge: &Edge, at: u32) -> u64 {
        let before = if at > 0 {
            self.digest(edge.slot(at - 1))[0]
        } else if edge.parent == NONE {
            edge.apart
        } else {
            self.digest(edge.parent)[0]
        };
        let digest = self.digest(edge.slot(at));
        let fingerprint = keys.fingerprint(digest, before, edge.is_approximate);
        plus(fingerprint, edge.apart)
    }

    /// The block at this depth on the path to an edge, which it may be in, and how many edges were visited for it; none
    /// if the edge is above, or there are more edges than `most`.
    pub(crate) fn on_path(
        &self,
        mut edge: EdgeIndex,
        depth: u32,
        most: usize,
    ) -> (Option<Slot>, usize) {
        for visited in 0..most {
            let found = self.edge(edge);
            if let Some(at) = depth.checked_sub(found.depth) {
                return ((at < found.len).then(|| found.slot(at)), visited);
            }
            edge = self.edge_of(found.parent);
        }
        (None, most)
    }

    /// Those of the blocks `start..end` of an edge, all of which a lane holds, that it has in its device; of one session,
    /// or of any.
    pub(crate) fn in_device(
        &self,
        edge: EdgeIndex,
        lane: Lane,
        (start, end): Run,
        of: Option<Session>,
    ) -> Runs {
        let mut runs = Runs::default();
        match of {
            None => runs.add(start, end),
            Some(session) => {
                for (first, last) in self.sessions.of(edge, lane, session) {
                    runs.add(first.max(start), last.min(end));
                }
            }
        }
        self.edge(edge)
            .keep_in_device(lane, (start, end), &mut runs);
        runs
    }

    /// The block before this one on its path.
    pub(crate) fn before(&self, slot: Slot) -> Slot {
        let (edge, at) = self.at(slot);
        let edge = self.edge(edge);
        if at == 0 {
            edge.parent
        } else {
            edge.slot(at - 1)
        }
    }

    pub(crate) fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    pub(crate) fn num_edges(&self) -> usize {
        self.edges.len() - self.free_edges.len()
    }

    pub(crate) fn edges(&self) -> impl Iterator<Item = (EdgeIndex, &Edge)> {
        (0..).zip(&self.edges).filter(|(_, edge)| edge.len > 0)
    }

    /// The edge that begins with this block.
    pub(crate) fn head(&self, digest: Digest) -> Option<EdgeIndex> {
        let is = |&edge: &EdgeIndex| self.digest(self.edge(edge).slots[0].slot) == digest;
        self.heads.find(bucket(digest), is).copied()
    }

    /// The child of `parent` (or a first block) with this digest.
    pub(crate) fn child(&self, parent: Slot, digest: Digest) -> Option<Slot> {
        if parent != NONE {
            let (edge, at) = self.at(parent);
            let edge = self.edge(edge);
            if at + 1 < edge.len {
                let next = edge.slot(at + 1);
                return (self.digest(next) == digest).then_some(next);
            }
            if edge.children == 0 {
                return None;
            }
        }
        self.head(digest).map(|edge| self.edge(edge).slots[0].slot)
    }

    /// Adds a block that is not there, held by `lane`. Returns none if no slot is left.
    pub(crate) fn grow(&mut self, above: Parent, digest: Digest, lane: Lane) -> Option<Grown> {
        let (slot, _) = self.next_slots()?;
        let parent = above.slot;
        let mut cut = None;
        if parent != NONE {
            let (edge, at) = self.at(parent);
            if at + 1 < self.edge(edge).len {
                cut = Some(self.split(edge, at + 1));
            } else if self.grows(edge, lane) {
                self.append(edge, &[digest]);
                return Some(Grown { slot, cut });
            }
        }
        let depth = if parent == NONE {
            0
        } else {
            let (edge, at) = self.at(parent);
            let edge = self.edge_mut(edge);
            edge.children += 1;
            edge.depth + at + 1
        };
        let mut full = Lanes::default();
        full.add(lane);
        let edge = self.new_edge(Edge {
            parent,
            depth,
            owner: lane,
            apart: above.apart,
            is_approximate: above.is_approximate,
            full,
            ..Edge::default()
        });
        self.append(edge, &[digest]);
        self.add_head(edge);
        Some(Grown { slot, cut })
    }

    /// The edge that ends with a block, if it can be appended to: `lane` alone holds and has made it.
    pub(crate) fn growing(&self, slot: Slot, lane: Lane) -> Option<EdgeIndex> {
        let (edge, at) = self.at(slot);
        (at + 1 == self.edge(edge).len && self.grows(edge, lane)).then_some(edge)
    }

    /// The slots that [`append`](Self::append) gives next: the first, and how many.
    pub(crate) fn next_slots(&self) -> Option<(Slot, u32)> {
        if let Some(&run) = self.free_slots.last() {
            return Some(run);
        }
        let slot = u32::try_from(self.digests.len()).ok()?;
        (slot < MAX_SLOTS).then(|| (slot, MAX_SLOTS - slot))
    }

    /// Adds blocks to the end of an edge that is empty or [grows](Self::growing), no more than there are next slots.
    pub(crate) fn append(&mut self, edge: EdgeIndex, digests: &[Digest]) {
        let Some((slot, _)) = self.next_slots() else {
            return;
        };
        let count = u32::try_from(digests.len()).unwrap_or(NONE);
        if let Some((next, left)) = self.free_slots.last_mut() {
            *next += count;
            *left -= count;
            if *left == 0 {
                self.free_slots.pop();
            }
            self.digests.replace(slot, digests);
        } else {
            self.digests.extend(digests);
        }
        self.owners.set(slot, count, edge);
        self.num_blocks += count;
        let edge = self.edge_mut(edge);
        let at = edge.len;
        let continues = edge
            .slots
            .last()
            .is_some_and(|run| run.slot + (at - run.start) == slot);
        if !continues {
            edge.slots.push(SlotRun { start: at, slot });
        }
        edge.len += count;
    }

    fn grows(&self, edge: EdgeIndex, lane: Lane) -> bool {
        let edge = self.edge(edge);
        edge.children == 0
            && edge.slots.len() < MAX_RUNS
            && edge.owner == lane
            && edge.parts.is_empty()
            && edge.full.is_only(lane)
    }

    fn new_edge(&mut self, edge: Edge) -> EdgeIndex {
        if let Some(index) = self.free_edges.pop() {
            self.edges[index as usize] = edge;
            return index;
        }
        // There are no more edges than slots.
        let index = u32::try_from(self.edges.len()).unwrap_or(NONE);
        self.edges.push(edge);
        index
    }

    fn add_head(&mut self, edge: EdgeIndex) {
        let digest = self.digest(self.edge(edge).slots[0].slot);
        let (edges, digests) = (&self.edges, &self.digests);
        let hash = |&edge: &EdgeIndex| bucket(digests.get(edges[edge as usize].slots[0].slot));
        self.heads.insert_unique(bucket(digest), edge, hash);
    }

    fn remove_head(&mut self, edge: EdgeIndex) {
        let digest = self.digest(self.edge(edge).slots[0].slot);
        if let Ok(entry) = self
            .heads
            .find_entry(bucket(digest), |&other| other == edge)
        {
            entry.remove();
        }
    }

    fn rename_head(&mut self, edge: EdgeIndex, new: EdgeIndex) {
        let digest = self.digest(self.edge(edge).slots[0].slot);
        if let Some(head) = self.heads.find_mut(bucket(digest), |&other| other == edge) {
            *head = new;
        }
    }

    /// Cuts an edge before its block `at`, and returns the lower part. The shorter part is the one that moves.
    fn split(&mut self, edge: EdgeIndex, at: u32) -> EdgeIndex {
        let index = self.new_edge(Edge::default());
        if self.is_swept {
            self.cut.push(index);
        }
        let lower = if at <= self.edge(edge).len - at {
            // The lower part keeps the index.
            self.rename_head(edge, index);
            let whole = std::mem::take(self.edge_mut(edge));
            let (upper, lower) = Self::cut(whole, at);
            *self.edge_mut(index) = upper;
            *self.edge_mut(edge) = lower;
            self.relabel(index);
            self.add_head(edge);
            self.sessions.rename(edge, index);
            edge
        } else {
            let whole = std::mem::take(self.edge_mut(edge));
            let (upper, lower) = Self::cut(whole, at);
            *self.edge_mut(edge) = upper;
            *self.edge_mut(index) = lower;
            self.relabel(index);
            self.add_head(index);
            index
        };
        let upper = if lower == edge { index } else { edge };
        self.sessions.cut(upper, at, lower);
        for part in [upper, lower] {
            let edge = &self.edges[part as usize];
            self.sessions.retain(part, |lane| edge.holds_some(lane));
        }
        lower
    }

    fn cut(mut upper: Edge, at: u32) -> (Edge, Edge) {
        let whole = upper.len;
        let mut below = SmallVec::new();
        let first = upper.slots.partition_point(|run| run.start < at);
        for run in &upper.slots[first..] {
            below.push(SlotRun {
                start: run.start - at,
                slot: run.slot,
            });
        }
        let slot = upper.slot(at);
        if below.first().is_none_or(|run: &SlotRun| run.start > 0) {
            below.insert(0, SlotRun { start: 0, slot });
        }
        let mut lower = Edge {
            parent: upper.slot(at - 1),
            depth: upper.depth + at,
            len: whole - at,
            children: upper.children,
            owner: upper.owner,
            apart: upper.apart,
            is_approximate: upper.is_approximate,
            slots: below,
            full: upper.full.clone(),
            parts: split(&mut upper.parts, at),
            slow: split(&mut upper.slow, at),
        };
        upper.slots.truncate(first);
        upper.len = at;
        upper.children = 1;
        settle(&mut upper);
        settle(&mut lower);
        (upper, lower)
    }

    fn relabel(&mut self, index: EdgeIndex) {
        let edge = &self.edges[index as usize];
        for (at, run) in edge.slots.iter().enumerate() {
            let end = edge.slots.get(at + 1).map_or(edge.len, |next| next.start);
            self.owners.set(run.slot, end - run.start, index);
        }
    }

    /// Says that a lane holds blocks of an edge.
    pub(crate) fn hold(&mut self, edge: EdgeIndex, lane: Lane, start: u32, end: u32) {
        let edge = self.edge_mut(edge);
        if edge.full.has(lane) {
            return;
        }
        if start == 0 && end == edge.len {
            remove(&mut edge.parts, lane, start, end);
            edge.full.add(lane);
            return;
        }
        let at = add(&mut edge.parts, lane, start, end);
        if edge.parts[at].runs.is_all(edge.len) {
            edge.parts.remove(at);
            edge.full.add(lane);
        }
    }

    /// Says in which tier a lane's fastest copy of a block is.
    pub(crate) fn set_tier(&mut self, slot: Slot, lane: Lane, tier: Tier) {
        let (edge, at) = self.at(slot);
        let edge = self.edge_mut(edge);
        for other in &Tier::ALL[1..] {
            if !edge.slow.is_empty() && *other != tier {
                remove(&mut edge.slow, lane << 2 | *other as u32, at, at + 1);
            }
        }
        if tier != Tier::Device {
            add(&mut edge.slow, lane << 2 | tier as u32, at, at + 1);
        }
    }

    /// Says in which session a lane stored blocks of an edge, if that is known.
    pub(crate) fn set_session(
        &mut self,
        edge: EdgeIndex,
        lane: Lane,
        run: Run,
        session: Option<Session>,
    ) {
        self.sessions.set(edge, lane, run, session);
    }

    /// Says that a lane no longer holds a block. Blocks that nobody holds and that lead nowhere leave the tree.
    pub(crate) fn release(&mut self, slot: Slot, lane: Lane, gone: &mut impl Gone) {
        let (index, at) = self.at(slot);
        let edge = self.edge_mut(index);
        if edge.full.remove(lane) {
            add(&mut edge.parts, lane, 0, edge.len);
        }
        remove(&mut edge.parts, lane, at, at + 1);
        if !edge.slow.is_empty() {
            for tier in &Tier::ALL[1..] {
                remove(&mut edge.slow, lane << 2 | *tier as u32, at, at + 1);
            }
        }
        if !edge.holds_some(lane) {
            self.sessions.remove(index, lane);
        }
        self.prune(index, gone);
    }

    /// Forgets the lanes of an edge that are not in `live`.
    pub(crate) fn sweep(&mut self, index: EdgeIndex, live: &Lanes, gone: &mut impl Gone) {
        let edge = self.edge_mut(index);
        if edge.len == 0 {
            return;
        }
        edge.full.keep(live);
        edge.parts.retain(|part| live.has(part.key));
        edge.slow.retain(|part| live.has(part.key >> 2));
        if !live.has(edge.owner) {
            edge.owner = NONE;
        }
        self.sessions.retain(index, |lane| live.has(lane));
        self.prune(index, gone);
    }

    /// Begins a sweep and returns the number of places of edges that it visits.
    pub(crate) fn begin_sweep(&mut self) -> EdgeIndex {
        self.is_swept = true;
        u32::try_from(self.edges.len()).unwrap_or(NONE)
    }

    /// An edge that was cut off during the sweep; none ends the sweep.
    pub(crate) fn next_cut(&mut self) -> Option<EdgeIndex> {
        let next = self.cut.pop();
        self.is_swept = next.is_some();
        next
    }

    /// Removes the blocks at the end of an edge without children that nobody holds, then those above it.
    fn prune(&mut self, mut index: EdgeIndex, gone: &mut impl Gone) {
        loop {
            let edge = self.edge(index);
            if edge.children > 0 || !edge.full.is_empty() {
                return;
            }
            let end = edge.parts.iter().map(|part| part.runs.end()).max();
            let end = end.unwrap_or_default();
            if end == edge.len {
                return;
            }
            gone.blocks(self, edge, end);
            if end == 0 {
                self.remove_head(index);
            }
            let edge = self.edge_mut(index);
            let (len, parent) = (edge.len, edge.parent);
            let first = edge.slots.partition_point(|run| run.start < end);
            let mut freed: SmallVec<[(Slot, u32); 2]> = SmallVec::new();
            if first > 0 {
                let run = edge.slots[first - 1];
                let stop = edge.slots.get(first).map_or(len, |next| next.start);
                freed.push((run.slot + (end - run.start), stop - end));
            }
            for at in first..edge.slots.len() {
                let stop = edge.slots.get(at + 1).map_or(len, |next| next.start);
                freed.push((edge.slots[at].slot, stop - edge.slots[at].start));
            }
            edge.slots.truncate(first);
            edge.len = end;
            settle(edge);
            self.num_blocks -= len - end;
            self.free_slots
                .extend(freed.into_iter().filter(|run| run.1 > 0));
            if end > 0 {
                return;
            }
            self.edges[index as usize] = Edge::default();
            self.free_edges.push(index);
            if parent == NONE {
                return;
            }
            index = self.edge_of(parent);
            self.edge_mut(index).children -= 1;
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let edges: usize = self.edges.iter().map(Edge::heap_bytes).sum();
        edges
            + self.edges.capacity() * size_of::<Edge>()
            + self.free_edges.capacity() * size_of::<EdgeIndex>()
            + self.heads.allocation_size()
            + self.digests.heap_bytes()
            + self.owners.heap_bytes()
            + self.sessions.heap_bytes()
            + self.free_slots.capacity() * size_of::<(Slot, u32)>()
            + self.cut.capacity() * size_of::<EdgeIndex>()
    }

    pub(crate) fn check(&self, live: &Lanes, num_lanes: u32) -> Result<(), String> {
        self.owners.check()?;
        self.sessions
            .check_none(|edge| self.edges.get(edge).is_some_and(|edge| edge.len > 0))?;
        let mut children = vec![0; self.edges.len()];
        let mut known = 0;
        for (index, edge) in self.edges() {
            let bad = |what: &str| Err(format!("edge {index}: {what}"));
            known += edge.len;
            if edge.slots.first().is_none_or(|run| run.start != 0) {
                return bad("its first run starts late");
            }
            for at in 0..edge.len {
                if self.at(edge.slot(at)) != (index, at) {
                    return bad("a block is elsewhere");
                }
            }
            if self.head(self.digest(edge.slot(0))) != Some(index) {
                return bad("it has no head");
            }
            if edge.parent == NONE {
                if edge.depth != 0 {
                    return bad("it has no parent");
                }
            } else {
                let (above, at) = self.at(edge.parent);
                if at + 1 != self.edge(above).len {
                    return bad("its parent is inside an edge");
                }
                if self.edge(above).depth + self.edge(above).len != edge.depth {
                    return bad("its depth is not that after its parent");
                }
                children[above as usize] += 1;
            }
            let mut held_end = 0;
            for (parts, shift) in [(&edge.parts, 0), (&edge.slow, 2)] {
                if !parts.windows(2).all(|two| two[0].key < two[1].key) {
                    return bad("its parts do not ascend");
                }
                for part in parts {
                    part.runs.check(edge.len)?;
                    if part.runs.is_empty() || part.key >> shift >= num_lanes {
                        return bad("a part is empty, or of no lane");
                    }
                }
            }
            for part in &edge.parts {
                if edge.full.has(part.key) || part.runs.is_all(edge.len) {
                    return bad("a lane holds a part and all");
                }
                held_end = held_end.max(part.runs.end());
            }
            self.sessions
                .check(index, |lane| lane < num_lanes && edge.holds_some(lane))?;
            for part in edge.slow.iter().filter(|part| live.has(part.key >> 2)) {
                let held = |at| edge.is_held(part.key >> 2, at);
                if !part
                    .runs
                    .as_slice()
                    .iter()
                    .all(|&(start, end)| (start..end).all(held))
                {
                    return bad("a slow block is not held");
                }
            }
            if edge.children == 0 && edge.full.is_empty() && held_end < edge.len {
                return bad("nobody holds its end");
            }
        }
        for (index, edge) in self.edges() {
            if children[index as usize] != edge.children {
                return Err(format!("edge {index} has another number of children"));
            }
        }
        let free: u32 = self.free_slots.iter().map(|run| run.1).sum();
        if known != self.num_blocks || (known + free) as usize != self.digests.len() {
            return Err(format!(
                "{known} blocks, {free} free, {} counted",
                self.num_blocks
            ));
        }
        if self.heads.len() != self.num_edges() {
            return Err("heads and edges differ".to_owned());
        }
        Ok(())
    }
}

/// Lanes whose part has become the whole edge hold all of it.
fn settle(edge: &mut Edge) {
    let (len, full) = (edge.len, &mut edge.full);
    edge.parts.retain(|part| {
        let is_all = part.runs.is_all(len);
        if is_all {
            full.add(part.key);
        }
        !is_all
    });
}
