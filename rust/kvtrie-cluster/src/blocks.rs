//! The blocks of all lanes: the tree, the fingerprints, and what each lane holds, changed together.

use std::ops::Range;
use std::sync::Arc;

use crate::config::IndexerConfig;
use crate::events::{EventBlock, Tier};
use crate::fingerprints::Fingerprints;
use crate::holdings::{Copies, Held, Holdings, Parked};
use crate::keys::{Digest, Keys, plus};
use crate::lanes::{Lane, Lanes};
use crate::sessions::Session;
use crate::tree::{Edge, EdgeIndex, Gone, NONE, Parent, Slot, Tree};

/// Number of blocks that are read ahead and appended at once, few enough for a processor to wait for at once.
pub(crate) const AT_ONCE: usize = 16;

/// What comes before a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Above {
    /// Nothing; this is the root of its namespace.
    Root(Digest),
    Block(Slot),
}

impl Above {
    fn apart(self, tree: &Tree) -> u64 {
        match self {
            Self::Root(root) => Keys::apart(root),
            Self::Block(slot) => tree.apart(slot),
        }
    }
}

/// Why a block was not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotStored {
    /// The lane has reached `max_blocks`.
    Full,
    /// The hash names another block already.
    Conflict,
    /// The lane holds this block under another hash, which alone counts.
    Alias(Slot),
}

/// What became of blocks that waited for one, and cannot be stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lost {
    /// The lane has reached `max_blocks`.
    pub(crate) over_limit: u64,
    /// The lane holds the block under another hash.
    pub(crate) aliases: u64,
    /// The hash names another block already.
    pub(crate) conflicts: u64,
}

#[derive(Debug, Default)]
struct LaneState {
    holdings: Holdings,
    is_approximate: bool,
}

/// A sweep through all edges, after which the lanes that it forgets are free.
#[derive(Debug)]
struct Sweep {
    lanes: Vec<Lane>,
    next: EdgeIndex,
    end: EdgeIndex,
}

#[derive(Debug)]
pub(crate) struct Blocks {
    keys: Arc<Keys>,
    pub(crate) tree: Tree,
    pub(crate) fingerprints: Option<Fingerprints>,
    lanes: Vec<LaneState>,
    /// Number of blocks of the tree that each lane has added.
    charged: Vec<u32>,
    /// Lanes of live workers: all, and those with exact blocks.
    live: Lanes,
    exact: Lanes,
    free: Vec<Lane>,
    dead: Vec<Lane>,
    sweep: Option<Sweep>,
    most: usize,
}

/// Takes what leaves the tree from the other tables.
struct Leaving<'a> {
    keys: &'a Keys,
    fingerprints: &'a mut Option<Fingerprints>,
    charged: &'a mut [u32],
}

impl Gone for Leaving<'_> {
    fn blocks(&mut self, tree: &Tree, edge: &Edge, start: u32) {
        if let Some(fingerprints) = self.fingerprints {
            for at in start..edge.len() {
                if fingerprints.lists_at(edge, at) {
                    let fingerprint = tree.fingerprint(self.keys, edge, at);
                    fingerprints.remove(edge.slot(at), fingerprint);
                }
            }
        }
        if let Some(charged) = self.charged.get_mut(edge.owner() as usize) {
            *charged -= edge.len() - start;
        }
    }
}

impl Blocks {
    pub(crate) fn new(keys: Arc<Keys>, config: &IndexerConfig) -> Self {
        let fingerprints = || Fingerprints::new(config.run_blocks());
        Self {
            keys,
            tree: Tree::default(),
            fingerprints: config.moved_runs.then(fingerprints),
            lanes: Vec::new(),
            charged: Vec::new(),
            live: Lanes::default(),
            exact: Lanes::default(),
            free: Vec::new(),
            dead: Vec::new(),
            sweep: None,
            most: config.max_blocks,
        }
    }

    pub(crate) fn num_lanes(&self) -> usize {
        self.lanes.len()
    }

    pub(crate) fn live(&self) -> &Lanes {
        &self.live
    }

    pub(crate) fn exact(&self) -> &Lanes {
        &self.exact
    }

    pub(crate) fn num_dead(&self) -> usize {
        self.dead.len() + self.sweep.as_ref().map_or(0, |sweep| sweep.lanes.len())
    }

    pub(crate) fn holdings(&self, lane: Lane) -> &Holdings {
        &self.lanes[lane as usize].holdings
    }

    pub(crate) fn charged(&self, lane: Lane) -> u32 {
        self.charged[lane as usize]
    }

    pub(crate) fn open(&mut self, is_approximate: bool) -> Lane {
        let lane = self.free.pop().unwrap_or_else(|| {
            self.lanes.push(LaneState::default());
            self.charged.push(0);
            u32::try_from(self.lanes.len() - 1).unwrap_or(NONE)
        });
        self.lanes[lane as usize].is_approximate = is_approximate;
        self.live.add(lane);
        if !is_approximate {
            self.exact.add(lane);
        }
        lane
    }

    /// Whether a lane has held nothing yet, or holds and owes nothing any more.
    pub(crate) fn is_unused(&self, lane: Lane) -> bool {
        let holdings = self.holdings(lane);
        holdings.len() == 0 && holdings.num_parked() == 0 && self.charged(lane) == 0
    }

    /// Ends a lane. What it holds is no longer found; its memory comes back in later calls.
    pub(crate) fn close(&mut self, lane: Lane) {
        self.live.remove(lane);
        self.exact.remove(lane);
        self.dead.push(lane);
    }

    /// Visits so many edges, if lanes have ended.
    pub(crate) fn reclaim(&mut self, edges: usize) {
        for _ in 0..edges {
            let sweep = match &mut self.sweep {
                Some(sweep) => sweep,
                None if self.dead.is_empty() => return,
                None => {
                    let lanes = std::mem::take(&mut self.dead);
                    let end = self.tree.begin_sweep();
                    self.sweep.insert(Sweep {
                        lanes,
                        next: 0,
                        end,
                    })
                }
            };
            let mut leaving = Leaving {
                keys: &self.keys,
                fingerprints: &mut self.fingerprints,
                charged: &mut self.charged,
            };
            if sweep.next < sweep.end {
                self.tree.sweep(sweep.next, &self.live, &mut leaving);
                sweep.next += 1;
            } else if let Some(edge) = self.tree.next_cut() {
                self.tree.sweep(edge, &self.live, &mut leaving);
            } else if let Some(sweep) = self.sweep.take() {
                for lane in sweep.lanes {
                    self.lanes[lane as usize] = LaneState::default();
                    self.charged[lane as usize] = 0;
                    self.free.push(lane);
                }
            }
        }
    }

    /// Reads ahead what is there of blocks that are stored next: where their hashes and fingerprints will be is known at
    /// once, and memory answers many questions in the time of one.
    pub(crate) fn touch(&self, lane: Lane, above: Above, blocks: &[EventBlock]) {
        let holdings = self.holdings(lane);
        holdings.touch(blocks.iter().map(|block| block.hash));
        if let Some(fingerprints) = &self.fingerprints {
            let (apart, depth) = match above {
                Above::Root(root) => (Keys::apart(root), 0),
                Above::Block(slot) => {
                    let (edge, at) = self.tree.at(slot);
                    let edge = self.tree.edge(edge);
                    (edge.apart(), edge.depth() + at + 1)
                }
            };
            let listed = (depth..).zip(blocks);
            let listed = listed.filter(|(depth, _)| fingerprints.lists(*depth));
            fingerprints.touch(listed.map(|(_, block)| plus(block.contents[0], apart)));
        }
    }

    /// Stores one copy in the device of each of the first blocks after a block, in a session, as long as nothing is there that they
    /// could be: the edge ends with that block and is this lane's alone, no block waits in it or in `other`, and no
    /// hash is known. Returns the slots of these blocks, which are consecutive.
    pub(crate) fn append(
        &mut self,
        lane: Lane,
        other: Option<Lane>,
        above: Above,
        blocks: &[EventBlock],
        session: Option<Session>,
    ) -> Range<Slot> {
        let waits = |lane: Lane| self.holdings(lane).num_parked() > 0;
        let Above::Block(above) = above else {
            return 0..0;
        };
        if waits(lane) || other.is_some_and(waits) {
            return 0..0;
        }
        let LaneState {
            holdings,
            is_approximate,
        } = &mut self.lanes[lane as usize];
        let charged = &mut self.charged[lane as usize];
        let room = self
            .most
            .saturating_sub(holdings.len().max(*charged as usize));
        let (Some(edge), Some((first, left))) =
            (self.tree.growing(above, lane), self.tree.next_slots())
        else {
            return 0..0;
        };
        let mut digests = [Digest::default(); AT_ONCE];
        let mut before = self.tree.digest(above);
        let mut end = first;
        let slots = first..first.saturating_add(left);
        for ((block, slot), digest) in blocks.iter().zip(slots).zip(&mut digests).take(room) {
            if !holdings.add_new(block.hash, slot) {
                break;
            }
            before = self.keys.child(before, block.contents, *is_approximate);
            *digest = before;
            end = slot + 1;
        }
        if end == first {
            return 0..0;
        }
        *charged += end - first;
        self.tree.append(edge, &digests[..(end - first) as usize]);
        let len = self.tree.edge(edge).len();
        self.tree
            .set_session(edge, lane, (len - (end - first), len), session);
        if let Some(fingerprints) = &mut self.fingerprints {
            let edge = self.tree.edge(edge);
            let depths = edge.depth() + edge.len() - (end - first)..;
            for ((slot, block), depth) in (first..end).zip(blocks).zip(depths) {
                if fingerprints.lists(depth) {
                    let fingerprint = plus(block.contents[0], edge.apart());
                    fingerprints.add(slot, fingerprint, lane, &self.tree);
                }
            }
        }
        first..end
    }

    /// Stores copies of a block after another one, in a session, and returns its slot.
    pub(crate) fn store(
        &mut self,
        lane: Lane,
        above: Above,
        block: &EventBlock,
        mut copies: Copies,
        session: Option<Session>,
    ) -> Result<Slot, NotStored> {
        let state = &mut self.lanes[lane as usize];
        let (before, parent) = match above {
            Above::Root(digest) => (digest, NONE),
            Above::Block(slot) => (self.tree.digest(slot), slot),
        };
        let is_approximate = state.is_approximate;
        let digest = self.keys.child(before, block.contents, is_approximate);
        let is_in_device = copies.fastest() == Some(Tier::Device);
        if let Some(held) = state.holdings.get(block.hash) {
            if self.tree.digest(held.slot) != digest {
                return Err(NotStored::Conflict);
            }
            let (slot, all) = (held.slot, held.copies.plus(copies));
            state.holdings.set(block.hash, Held { slot, copies: all });
            if all.fastest() != held.copies.fastest() {
                self.tree
                    .set_tier(slot, lane, all.fastest().unwrap_or_default());
            }
            if is_in_device {
                self.set_session(slot, lane, session);
            }
            return Ok(slot);
        }
        if let Some(parked) = state.holdings.parked(block.hash) {
            // What waits is for the block above, as far as that is known.
            let is_below = match above {
                Above::Root(_) => false,
                Above::Block(slot) => {
                    let waits_for = state.holdings.get(parked.parent);
                    waits_for.is_none_or(|held| held.slot == slot)
                }
            };
            if !is_below || parked.contents != block.contents {
                return Err(NotStored::Conflict);
            }
        }
        if state.holdings.len() >= self.most {
            return Err(NotStored::Full);
        }
        let slot = if let Some(slot) = self.tree.child(parent, digest) {
            let (edge, at) = self.tree.at(slot);
            if self.tree.edge(edge).is_held(lane, at) {
                return Err(NotStored::Alias(slot));
            }
            self.tree.hold(edge, lane, at, at + 1);
            slot
        } else {
            let charged = &mut self.charged[lane as usize];
            if *charged as usize >= self.most {
                return Err(NotStored::Full);
            }
            let parent = Parent {
                slot: parent,
                apart: above.apart(&self.tree),
                is_approximate,
            };
            let grown = self.tree.grow(parent, digest, lane);
            let grown = grown.ok_or(NotStored::Full)?;
            *charged += 1;
            if let Some(fingerprints) = &mut self.fingerprints {
                let tree = &self.tree;
                // The first block of an edge is listed, and a cut makes another one.
                let firsts = [grown.cut, Some(tree.edge_of(grown.slot))];
                for index in firsts.into_iter().flatten() {
                    let edge = tree.edge(index);
                    let is_new = grown.cut != Some(index);
                    let at = if is_new { edge.len() - 1 } else { 0 };
                    let is_missing = is_new || !fingerprints.lists(edge.depth());
                    if is_missing && fingerprints.lists_at(edge, at) {
                        let fingerprint = tree.fingerprint(&self.keys, edge, at);
                        fingerprints.add(edge.slot(at), fingerprint, edge.owner(), tree);
                    }
                }
            }
            grown.slot
        };
        if let Some(parked) = state.holdings.unpark(block.hash) {
            copies = copies.plus(parked.copies);
        }
        state.holdings.add(block.hash, Held { slot, copies });
        let tier = copies.fastest().unwrap_or_default();
        if tier != Tier::Device {
            self.tree.set_tier(slot, lane, tier);
        }
        if is_in_device {
            self.set_session(slot, lane, session);
        }
        Ok(slot)
    }

    /// Says in which session a lane has stored a block in the device, if that is known.
    fn set_session(&mut self, slot: Slot, lane: Lane, session: Option<Session>) {
        let (edge, at) = self.tree.at(slot);
        self.tree.set_session(edge, lane, (at, at + 1), session);
    }

    /// Whether an event's block, of which the block before is not known, has the tokens of the one in a lane's slot.
    pub(crate) fn is_at(&self, lane: Lane, block: &EventBlock, slot: Slot) -> bool {
        let before = self.tree.before(slot);
        before != NONE && {
            let is_approximate = self.lanes[lane as usize].is_approximate;
            let digest = self
                .keys
                .child(self.tree.digest(before), block.contents, is_approximate);
            digest == self.tree.digest(slot)
        }
    }

    /// Stores another copy of a block that the lane has; false if it has none.
    pub(crate) fn repeat(
        &mut self,
        lane: Lane,
        hash: u64,
        tier: Tier,
        session: Option<Session>,
    ) -> bool {
        let holdings = &mut self.lanes[lane as usize].holdings;
        let Some(held) = holdings.get(hash) else {
            return false;
        };
        let (slot, mut copies) = (held.slot, held.copies);
        copies.add(tier);
        holdings.set(hash, Held { slot, copies });
        if copies.fastest() != held.copies.fastest() {
            self.tree.set_tier(slot, lane, tier);
        }
        if tier == Tier::Device {
            self.set_session(slot, lane, session);
        }
        true
    }

    /// Stores what waited for a block, in this lane, and what waited for that. Returns what is not taken.
    pub(crate) fn attach(&mut self, lane: Lane, hash: u64, slot: Slot) -> Lost {
        let mut lost = Lost::default();
        if self.holdings(lane).num_parked() == 0 {
            return lost;
        }
        let mut known = vec![(hash, slot)];
        while let Some((parent, slot)) = known.pop() {
            while let Some(hash) = self.holdings(lane).next_waiting(parent) {
                let Some(parked) = self.lanes[lane as usize].holdings.unpark(hash) else {
                    break;
                };
                let block = EventBlock {
                    hash,
                    contents: parked.contents,
                };
                match self.store(lane, Above::Block(slot), &block, parked.copies, None) {
                    Ok(slot) => known.push((hash, slot)),
                    Err(NotStored::Alias(slot)) => {
                        lost.aliases += 1;
                        known.push((hash, slot));
                    }
                    Err(NotStored::Full) => lost.over_limit += 1,
                    Err(NotStored::Conflict) => lost.conflicts += 1,
                }
            }
        }
        lost
    }

    /// Keeps a block until its parent arrives, if there is room and its hash names no other that waits.
    pub(crate) fn park(
        &mut self,
        lane: Lane,
        parent: u64,
        block: &EventBlock,
        tier: Tier,
        max_parked: usize,
    ) -> Result<(), NotStored> {
        let holdings = &mut self.lanes[lane as usize].holdings;
        if let Some(parked) = holdings.parked_mut(block.hash) {
            if (parked.parent, parked.contents) != (parent, block.contents) {
                return Err(NotStored::Conflict);
            }
            parked.copies.add(tier);
            return Ok(());
        }
        // The canary of the fuzz target `events`: there is always room.
        if holdings.num_parked() >= max_parked && !cfg!(feature = "canary") {
            return Err(NotStored::Full);
        }
        let parked = Parked {
            parent,
            contents: block.contents,
            copies: Copies::of(tier),
        };
        holdings.park(block.hash, parked);
        Ok(())
    }

    /// Removes one copy; false if the lane has none in that tier.
    pub(crate) fn remove(&mut self, lane: Lane, hash: u64, tier: Tier) -> bool {
        let holdings = &mut self.lanes[lane as usize].holdings;
        let Some(held) = holdings.get(hash) else {
            let Some(parked) = holdings.parked_mut(hash) else {
                return false;
            };
            let had = parked.copies.take(tier);
            if parked.copies.fastest().is_none() {
                holdings.unpark(hash);
            }
            return had;
        };
        let mut copies = held.copies;
        if !copies.take(tier) {
            return false;
        }
        let slot = held.slot;
        holdings.set(hash, Held { slot, copies });
        match copies.fastest() {
            None => {
                let mut leaving = Leaving {
                    keys: &self.keys,
                    fingerprints: &mut self.fingerprints,
                    charged: &mut self.charged,
                };
                self.tree.release(slot, lane, &mut leaving);
            }
            Some(tier) => {
                if Some(tier) != held.copies.fastest() {
                    self.tree.set_tier(slot, lane, tier);
                }
                // Nobody knows whose copies are left.
                self.set_session(slot, lane, None);
            }
        }
        true
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let lanes = self.lanes.iter().map(|lane| lane.holdings.heap_bytes());
        let fingerprints = self.fingerprints.as_ref();
        self.tree.heap_bytes()
            + fingerprints.map_or(0, Fingerprints::heap_bytes)
            + lanes.sum::<usize>()
            + self.lanes.capacity() * size_of::<LaneState>()
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let num_lanes = u32::try_from(self.lanes.len()).unwrap_or(NONE);
        self.tree.check(&self.live, num_lanes)?;
        if let Some(fingerprints) = &self.fingerprints {
            fingerprints.check(&self.tree, &self.keys)?;
        }
        let mut held = vec![0_usize; self.lanes.len()];
        let mut charged = vec![0; self.lanes.len()];
        for (_, edge) in self.tree.edges() {
            for lane in edge.full().iter() {
                held[lane as usize] += edge.len() as usize;
            }
            for part in edge.parts() {
                let runs = part.runs.as_slice().iter();
                held[part.key as usize] += runs.map(|run| (run.1 - run.0) as usize).sum::<usize>();
            }
            if let Some(charged) = charged.get_mut(edge.owner() as usize) {
                *charged += edge.len();
            }
        }
        for lane in self.live.iter() {
            let holdings = self.holdings(lane);
            let mut count = 0;
            holdings.check()?;
            for (hash, held) in holdings.iter() {
                let (edge, at) = self.tree.at(held.slot);
                if holdings.get(hash) != Some(held) || held.copies.fastest().is_none() {
                    return Err(format!("lane {lane}: a hash is not found"));
                }
                if !self.tree.edge(edge).is_held(lane, at) {
                    return Err(format!("lane {lane}: a block of its hashes is not held"));
                }
                count += 1;
            }
            if count != held[lane as usize] || charged[lane as usize] != self.charged(lane) {
                return Err(format!(
                    "lane {lane}: {count} hashes for {} blocks; {} added, {} counted",
                    held[lane as usize],
                    charged[lane as usize],
                    self.charged(lane)
                ));
            }
        }
        Ok(())
    }
}
