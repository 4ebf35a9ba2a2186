//! Group 0 and the further groups as maps from whole token prefixes, by brute force (rules D1 to D18, G1 to G7).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// All tokens up to the end of a block.
pub(crate) type Prefix = Vec<u32>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Window(usize),
    State,
}

#[derive(Clone, Debug)]
struct Entry {
    id: u32,
    /// How strict an approximate block is: 2 as the strictest policy, 1 as that of a plan, 0 as none. `None` if it is
    /// exact.
    approximate: Option<u8>,
    last_use: u64,
}

#[derive(Clone, Debug)]
struct GroupEntry {
    id: u32,
    is_needed: bool,
    last_use: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Column {
    kind: Kind,
    entries: BTreeMap<Prefix, GroupEntry>,
    condemned: BTreeSet<u32>,
    waiting: BTreeSet<u32>,
}

#[derive(Clone, Debug, Default)]
struct Lease {
    tokens: Vec<u32>,
    pinned: bool,
    over: bool,
    first_approximate: Option<usize>,
    blocks: BTreeSet<u32>,
    /// Pairs of column and id, with the block's number.
    groups: BTreeMap<(usize, u32), usize>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum From {
    Computed,
    Imported(usize),
    Plan(usize),
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupDone {
    pub(crate) blocks: Vec<Option<u32>>,
    pub(crate) duplicates: Vec<u32>,
    pub(crate) surplus: Vec<u32>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) blocks: Vec<u32>,
    pub(crate) num_exact: usize,
    pub(crate) duplicates: Vec<u32>,
    pub(crate) surplus: Vec<u32>,
    pub(crate) freed: Vec<u32>,
    pub(crate) groups: Vec<GroupDone>,
}

/// The ids that one call offers to a group, from 1, with their positions.
pub(crate) type Offers = (usize, Vec<(usize, u32)>);

/// One call of `insert`.
#[derive(Debug)]
pub(crate) struct Insertion {
    /// Number of the text.
    pub(crate) text: usize,
    pub(crate) blocks: Vec<u32>,
    pub(crate) num_computed: usize,
    /// Number of the first block.
    pub(crate) first: usize,
    pub(crate) from: From,
    pub(crate) offers: Vec<Offers>,
    pub(crate) stops: Vec<usize>,
}

#[derive(Debug)]
pub(crate) struct Naive {
    block_size: usize,
    num_blocks: usize,
    clock: u64,
    entries: BTreeMap<Prefix, Entry>,
    condemned: BTreeSet<u32>,
    waiting: Vec<u32>,
    leases: BTreeMap<usize, Lease>,
    pub(crate) columns: Vec<Column>,
}

impl Naive {
    pub(crate) fn new(block_size: usize, num_blocks: usize, kinds: &[Kind]) -> Self {
        let column = |&kind: &Kind| Column {
            kind,
            entries: BTreeMap::new(),
            condemned: BTreeSet::new(),
            waiting: BTreeSet::new(),
        };
        Self {
            block_size,
            num_blocks,
            clock: 0,
            entries: BTreeMap::new(),
            condemned: BTreeSet::new(),
            waiting: Vec::new(),
            leases: BTreeMap::new(),
            columns: kinds.iter().map(column).collect(),
        }
    }

    fn prefix(&self, tokens: &[u32], block: usize) -> Prefix {
        tokens[..(block + 1) * self.block_size].to_vec()
    }

    fn at(&self, tokens: &[u32], block: usize) -> Option<&Entry> {
        self.entries.get(&self.prefix(tokens, block))
    }

    fn place_of(&self, id: u32) -> Option<&Prefix> {
        let mut entries = self.entries.iter();
        entries.find(|(_, entry)| entry.id == id).map(|(at, _)| at)
    }

    fn is_held(&self, id: u32) -> bool {
        self.place_of(id).is_none() && !self.condemned.contains(&id) && !self.waiting.contains(&id)
    }

    fn is_pinned(&self, id: u32) -> bool {
        self.leases.values().any(|lease| lease.blocks.contains(&id))
    }

    fn is_group_pinned(&self, column: usize, id: u32) -> bool {
        let mut leases = self.leases.values();
        leases.any(|lease| lease.groups.contains_key(&(column, id)))
    }

    pub(crate) fn is_group_held(&self, column: usize, id: u32) -> bool {
        let own = &self.columns[column];
        !own.condemned.contains(&id)
            && !own.waiting.contains(&id)
            && own.entries.values().all(|entry| entry.id != id)
    }

    /// What the clients hold or have free, of group 0 or of a group from 1.
    pub(crate) fn held(&self, group: usize, pool: usize) -> Vec<u32> {
        let all = 0..u32::try_from(pool).unwrap();
        all.filter(|&id| match group {
            0 => self.is_held(id),
            _ => self.is_group_held(group - 1, id),
        })
        .collect()
    }

    fn group_leaves(&mut self, prefix: &Prefix) {
        for column in 0..self.columns.len() {
            if let Some(entry) = self.columns[column].entries.remove(prefix) {
                if self.is_group_pinned(column, entry.id) {
                    self.columns[column].condemned.insert(entry.id);
                } else {
                    self.columns[column].waiting.insert(entry.id);
                }
            }
        }
    }

    /// Removes an entry of group 0; returns its id if nothing pins it.
    fn remove(&mut self, prefix: &Prefix) -> Option<u32> {
        let entry = self.entries.remove(prefix).unwrap();
        self.group_leaves(prefix);
        if self.is_pinned(entry.id) {
            self.condemned.insert(entry.id);
            return None;
        }
        Some(entry.id)
    }

    /// Removes what is after holes while there are too many (D10).
    fn bound_holes(&mut self) {
        let mut freed = Vec::new();
        while self.num_holes() > self.num_blocks {
            let cut_off = |prefix: &Prefix| {
                let blocks = prefix.len() / self.block_size;
                (0..blocks).any(|block| self.at(prefix, block).is_none())
            };
            let next = self.leaves().into_iter().filter(cut_off);
            let Some(next) = next.min_by_key(|at| self.key(at)) else {
                break;
            };
            freed.extend(self.remove(&next));
        }
        freed.sort_unstable();
        self.waiting.extend(freed);
    }

    pub(crate) fn num_holes(&self) -> usize {
        let mut holes = BTreeSet::new();
        for prefix in self.entries.keys() {
            for block in 0..prefix.len() / self.block_size {
                let above = self.prefix(prefix, block);
                if !self.entries.contains_key(&above) {
                    holes.insert(above);
                }
            }
        }
        holes.len()
    }

    fn key(&self, prefix: &Prefix) -> (u64, Reverse<usize>, u32) {
        let entry = &self.entries[prefix];
        (entry.last_use, Reverse(prefix.len()), entry.id)
    }

    /// Unpinned entries with no present block below them.
    fn leaves(&self) -> Vec<Prefix> {
        let has_below = |prefix: &Prefix| {
            let mut others = self.entries.keys();
            others.any(|other| other.len() > prefix.len() && other.starts_with(prefix))
        };
        self.entries
            .iter()
            .filter(|(at, entry)| !has_below(at) && !self.is_pinned(entry.id))
            .map(|(at, _)| at.clone())
            .collect()
    }

    pub(crate) fn num_evictable(&self) -> usize {
        let is_protected = |prefix: &Prefix| {
            let mut others = self.entries.iter();
            others.any(|(other, entry)| other.starts_with(prefix) && self.is_pinned(entry.id))
        };
        self.entries.keys().filter(|at| !is_protected(at)).count()
    }

    /// (indexed, condemned and waiting, waiting, approximate, holes)
    pub(crate) fn counts(&self) -> [usize; 5] {
        let approximate = self
            .entries
            .values()
            .filter(|entry| entry.approximate.is_some());
        [
            self.entries.len(),
            self.condemned.len() + self.waiting.len(),
            self.waiting.len(),
            approximate.count(),
            self.num_holes(),
        ]
    }

    /// (indexed, pinned, condemned, waiting)
    pub(crate) fn group_counts(&self, column: usize) -> [usize; 4] {
        let own = &self.columns[column];
        let mut entries = own.entries.values();
        let pinned = entries
            .by_ref()
            .filter(|entry| self.is_group_pinned(column, entry.id));
        [
            own.entries.len(),
            pinned.count(),
            own.condemned.len(),
            own.waiting.len(),
        ]
    }

    /// The blocks that a group needs to continue after a number of blocks.
    fn needed(&self, column: usize, end: usize) -> std::ops::Range<usize> {
        match self.columns[column].kind {
            Kind::State => end.saturating_sub(1)..end,
            Kind::Window(window) => {
                // The first token of the last `window - 1` ones, and the block that it is in.
                let first = (end * self.block_size).saturating_sub(window - 1);
                first / self.block_size..end
            }
        }
    }

    fn has_needed(&self, tokens: &[u32], column: usize, end: usize) -> bool {
        let mut needed = self.needed(column, end);
        needed.all(|block| {
            let prefix = self.prefix(tokens, block);
            self.columns[column].entries.contains_key(&prefix)
        })
    }

    /// Blocks of group 0's match, and of the hit.
    pub(crate) fn hit(&self, tokens: &[u32], keep_last: usize) -> (usize, usize) {
        let most = tokens.len().saturating_sub(keep_last) / self.block_size;
        let is_exact = |&block: &usize| {
            let entry = self.at(tokens, block);
            entry.is_some_and(|entry| entry.approximate.is_none())
        };
        let exact = (0..most).take_while(is_exact).count();
        let allows = |end: &usize| {
            (0..self.columns.len()).all(|column| self.has_needed(tokens, column, *end))
        };
        (exact, (0..=exact).rev().find(allows).unwrap())
    }

    fn touch(&mut self, tokens: &[u32], end: usize) {
        for block in 0..end {
            let prefix = self.prefix(tokens, block);
            if let Some(entry) = self.entries.get_mut(&prefix) {
                entry.last_use = self.clock;
            }
        }
        self.touch_groups(tokens, end);
    }

    fn touch_groups(&mut self, tokens: &[u32], end: usize) {
        for column in 0..self.columns.len() {
            for block in self.needed(column, end) {
                let prefix = self.prefix(tokens, block);
                if let Some(entry) = self.columns[column].entries.get_mut(&prefix) {
                    entry.is_needed = true;
                    entry.last_use = self.clock;
                }
            }
        }
    }

    pub(crate) fn match_ids(&self, tokens: &[u32], end: usize) -> Vec<u32> {
        self.ids(tokens, end)
    }

    fn ids(&self, tokens: &[u32], end: usize) -> Vec<u32> {
        let id = |block| self.at(tokens, block).unwrap().id;
        (0..end).map(id).collect()
    }

    pub(crate) fn lookup(&mut self, tokens: &[u32], keep_last: usize, touch: bool) -> Vec<u32> {
        let (_, end) = self.hit(tokens, keep_last);
        if touch {
            self.clock += 1;
            self.touch(tokens, end);
        }
        self.ids(tokens, end)
    }

    /// The ids in place, and for each group the position and the ids.
    pub(crate) fn plan(
        &mut self,
        lease: usize,
        tokens: &[u32],
        keep_last: usize,
        pinned: bool,
    ) -> (Vec<u32>, Vec<(usize, Vec<u32>)>) {
        let (_, end) = self.hit(tokens, keep_last);
        self.clock += 1;
        self.touch(tokens, end);
        let ids = self.ids(tokens, end);
        let mut own = Lease {
            tokens: tokens.to_vec(),
            pinned,
            ..Lease::default()
        };
        let mut parts = Vec::new();
        for column in 0..self.columns.len() {
            let needed = self.needed(column, end);
            let start = match self.columns[column].kind {
                Kind::State => end,
                Kind::Window(_) => needed.start,
            };
            let mut found = Vec::new();
            for block in needed {
                let id = self.columns[column].entries[&self.prefix(tokens, block)].id;
                found.push(id);
                own.groups.insert((column, id), block);
            }
            parts.push((start * self.block_size, found));
        }
        own.blocks = ids.iter().copied().collect();
        if !pinned {
            own.blocks.clear();
            own.groups.clear();
        }
        self.leases.insert(lease, own);
        (ids, parts)
    }

    /// The id of a group, from 1, at a block.
    pub(crate) fn group_id(&self, group: usize, tokens: &[u32], block: usize) -> Option<u32> {
        let known = self.columns[group - 1]
            .entries
            .get(&self.prefix(tokens, block));
        known.map(|entry| entry.id)
    }

    /// Makes what no plan pins any more wait.
    fn unpinned(&mut self) {
        let condemned = std::mem::take(&mut self.condemned);
        for id in condemned {
            if self.is_pinned(id) {
                self.condemned.insert(id);
            } else {
                self.waiting.push(id);
            }
        }
        for column in 0..self.columns.len() {
            for id in std::mem::take(&mut self.columns[column].condemned) {
                let is_pinned = self.is_group_pinned(column, id);
                let own = &mut self.columns[column];
                if is_pinned {
                    own.condemned.insert(id);
                } else {
                    own.waiting.insert(id);
                }
            }
        }
    }

    pub(crate) fn release(&mut self, lease: usize) {
        self.leases.remove(&lease);
        self.unpinned();
        self.bound_holes();
    }

    pub(crate) fn advance(&mut self, lease: usize, position: usize) {
        let block_size = self.block_size;
        let kinds: Vec<Kind> = self.columns.iter().map(|column| column.kind).collect();
        let own = self.leases.get_mut(&lease).unwrap();
        let last = own.groups.values().max().map_or(0, |block| block + 1) * block_size;
        own.groups.retain(|&(column, _), &mut block| {
            let (start, end) = (block * block_size, (block + 1) * block_size);
            match kinds[column] {
                Kind::State => end >= position,
                // Some token that is still to be computed attends to one of the block, or is one of it.
                Kind::Window(window) => (position..=last.max(position))
                    .any(|query| (start..end).any(|key| key <= query && query < key + window)),
            }
        });
        self.unpinned();
    }

    /// The block that an offer of a group is at.
    fn block_of(&self, column: usize, position: usize) -> usize {
        match self.columns[column].kind {
            Kind::State => position / self.block_size - 1,
            Kind::Window(_) => position / self.block_size,
        }
    }

    /// Whether an insert is refused because an id is in use.
    pub(crate) fn is_in_use(
        &self,
        tokens: &[u32],
        ids: &[u32],
        first: usize,
        offers: &[Offers],
    ) -> bool {
        let full = tokens.len() / self.block_size;
        let mut seen = BTreeSet::new();
        let elsewhere = |at: usize, id: u32| {
            let own = (first + at < full).then(|| self.prefix(tokens, first + at));
            self.place_of(id)
                .is_some_and(|place| Some(place) != own.as_ref())
        };
        let is_used = ids
            .iter()
            .enumerate()
            .any(|(at, &id)| !seen.insert(id) || elsewhere(at, id));
        is_used
            || offers.iter().any(|(group, offers)| {
                let mut seen = BTreeSet::new();
                offers.iter().any(|&(position, id)| {
                    let own = self.prefix(tokens, self.block_of(group - 1, position));
                    let mut entries = self.columns[group - 1].entries.iter();
                    let place = entries.find(|(_, entry)| entry.id == id);
                    !seen.insert(id) || place.is_some_and(|(place, _)| *place != own)
                })
            })
    }

    pub(crate) fn insert(&mut self, tokens: &[u32], call: &Insertion) -> Done {
        self.clock += 1;
        let exact_until = match call.from {
            From::Computed => usize::MAX,
            From::Imported(until) => until,
            From::Plan(lease) => self.leases[&lease].first_approximate.unwrap_or(usize::MAX),
        };
        let (mut done, reached) = self.insert_blocks(tokens, call, exact_until);
        let limit = exact_until.min(call.num_computed) / self.block_size;
        for (group, offers) in &call.offers {
            let (column, range) = (group - 1, (reached, limit));
            let own = self.insert_group(tokens, column, offers, call.from, range);
            done.groups.push(own);
        }
        for ((group, offers), own) in call.offers.iter().zip(&done.groups) {
            if self.columns[group - 1].kind == Kind::State {
                let there = offers.iter().zip(&own.blocks);
                for ((position, _), _) in there.filter(|own| own.1.is_some()) {
                    self.touch_groups(tokens, position / self.block_size);
                }
            }
        }
        if let Some((end, _)) = reached {
            for stop in &call.stops {
                self.touch_groups(tokens, (stop / self.block_size).min(end));
            }
            self.touch_groups(tokens, end);
        }
        done
    }

    /// Inserts into group 0. Also returns the end of what is present and the number of exact blocks before it.
    fn insert_blocks(
        &mut self,
        tokens: &[u32],
        call: &Insertion,
        exact_until: usize,
    ) -> (Done, Option<(usize, usize)>) {
        let (ids, first, from) = (&call.blocks, call.first, call.from);
        let num_computed = call.num_computed;
        let full = num_computed / self.block_size;
        let need = full.saturating_sub(first);
        let built_by = match from {
            From::Computed => 2,
            From::Plan(_) => 1,
            From::Imported(_) => 0,
        };
        let is_over = matches!(from, From::Plan(lease) if self.leases[&lease].over);
        let is_whole = (0..first).all(|block| self.at(tokens, block).is_some());
        let mut done = Done::default();
        let mut reached = None;
        if !is_over && is_whole {
            let mut before: Option<u8> = None;
            let mut exact = 0;
            let mut end = first.min(full);
            for block in 0..end {
                let now = self.at(tokens, block).unwrap().approximate;
                before = now.map_or(before, |now| Some(before.map_or(now, |old| old.min(now))));
                exact += usize::from(before.is_none());
            }
            for (at, &offer) in ids[..need].iter().enumerate() {
                let block = first + at;
                let prefix = self.prefix(tokens, block);
                let is_built = (block + 1) * self.block_size > exact_until;
                let built = (is_built || before.is_some())
                    .then(|| before.map_or(built_by, |before| built_by.min(before)));
                let now = self.entries.get(&prefix).cloned();
                let is_held = self.is_held(offer);
                let stays = now
                    .as_ref()
                    .is_some_and(|now| match (now.approximate, built) {
                        (None, _) => true,
                        (Some(_), None) => false,
                        (Some(now), Some(offered)) => now >= offered,
                    });
                let (id, label) = match now {
                    Some(now) if now.id == offer => (offer, now.approximate),
                    Some(now) if stays => {
                        if is_held {
                            done.duplicates.push(offer);
                        }
                        (now.id, now.approximate)
                    }
                    _ if !is_held => break,
                    now => {
                        if now.is_some() {
                            done.freed.extend(self.remove(&prefix));
                        }
                        let entry = Entry {
                            id: offer,
                            approximate: built,
                            last_use: self.clock,
                        };
                        self.entries.insert(prefix, entry);
                        (offer, built)
                    }
                };
                before = label.map_or(before, |now| Some(before.map_or(now, |old| old.min(now))));
                exact += usize::from(before.is_none());
                done.blocks.push(id);
                end = block + 1;
            }
            done.num_exact = exact * self.block_size;
            self.touch(tokens, end);
            reached = Some((end, exact));
            if let From::Plan(lease) = from {
                let path = self.ids(tokens, end);
                let block_size = self.block_size;
                let own = self.leases.get_mut(&lease).unwrap();
                if exact < end {
                    let at = exact * block_size;
                    own.first_approximate =
                        Some(own.first_approximate.map_or(at, |known| known.min(at)));
                }
                if own.pinned {
                    own.blocks.extend(path);
                }
            }
        }
        let rest = ids[done.blocks.len()..].iter().copied();
        done.surplus = rest.filter(|&id| self.is_held(id)).collect();
        (done, reached)
    }

    fn insert_group(
        &mut self,
        tokens: &[u32],
        column: usize,
        offers: &[(usize, u32)],
        from: From,
        (reached, limit): (Option<(usize, usize)>, usize),
    ) -> GroupDone {
        let mut done = GroupDone::default();
        let (end, exact) = reached.unwrap_or_default();
        for &(position, id) in offers {
            let block = self.block_of(column, position);
            let prefix = self.prefix(tokens, block);
            let is_held = self.is_group_held(column, id);
            let known = self.columns[column].entries.get(&prefix);
            let known = known.filter(|_| block < end).map(|entry| entry.id);
            let now = if let Some(known) = known {
                if is_held {
                    done.duplicates.push(id);
                }
                Some(known)
            } else if is_held && block < end.min(exact).min(limit) {
                let entry = GroupEntry {
                    id,
                    is_needed: self.columns[column].kind == Kind::State,
                    last_use: self.clock,
                };
                self.columns[column].entries.insert(prefix, entry);
                Some(id)
            } else {
                if is_held {
                    done.surplus.push(id);
                }
                None
            };
            done.blocks.push(now);
            let Some(now) = now else { continue };
            if let From::Plan(lease) = from
                && self.columns[column].kind != Kind::State
            {
                let own = self.leases.get_mut(&lease).unwrap();
                if own.pinned {
                    own.groups.insert((column, now), block);
                }
            }
        }
        done
    }

    pub(crate) fn evict(&mut self, n: usize) -> Vec<u32> {
        let waiting = self.waiting.len().min(n);
        let mut out: Vec<u32> = self.waiting.drain(..waiting).collect();
        while out.len() < n {
            let Some(next) = self.leaves().into_iter().min_by_key(|at| self.key(at)) else {
                break;
            };
            out.extend(self.remove(&next));
        }
        out
    }

    pub(crate) fn evict_group(&mut self, group: usize, n: usize) -> Vec<u32> {
        let mut out = Vec::new();
        while out.len() < n {
            if let Some(id) = self.columns[group - 1].waiting.pop_first() {
                out.push(id);
                continue;
            }
            let free = self.columns[group - 1]
                .entries
                .iter()
                .filter(|(_, entry)| !self.is_group_pinned(group - 1, entry.id));
            let key = |(at, entry): &(&Prefix, &GroupEntry)| {
                (entry.is_needed, entry.last_use, Reverse(at.len()), entry.id)
            };
            let Some((at, id)) = free.min_by_key(key).map(|(at, own)| (at.clone(), own.id)) else {
                break;
            };
            self.columns[group - 1].entries.remove(&at);
            out.push(id);
        }
        out
    }

    pub(crate) fn take_freed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.waiting)
    }

    pub(crate) fn take_freed_group(&mut self, group: usize) -> Vec<u32> {
        let waiting = std::mem::take(&mut self.columns[group - 1].waiting);
        waiting.into_iter().collect()
    }

    pub(crate) fn discard(&mut self, ids: &[u32]) -> Vec<u32> {
        let mut freed = Vec::new();
        for &id in ids {
            if let Some(at) = self.place_of(id).cloned() {
                freed.extend(self.remove(&at));
            }
        }
        self.bound_holes();
        freed
    }

    pub(crate) fn discard_group(&mut self, group: usize, ids: &[u32]) -> Vec<u32> {
        let mut freed = Vec::new();
        for &id in ids {
            let own = &self.columns[group - 1].entries;
            let at = own.iter().find(|(_, entry)| entry.id == id);
            let Some(at) = at.map(|(at, _)| at.clone()) else {
                continue;
            };
            self.columns[group - 1].entries.remove(&at);
            if self.is_group_pinned(group - 1, id) {
                self.columns[group - 1].condemned.insert(id);
            } else {
                freed.push(id);
            }
        }
        freed
    }

    pub(crate) fn reset(&mut self) -> Vec<u32> {
        for lease in self.leases.values_mut() {
            lease.over = true;
        }
        let all: Vec<Prefix> = self.entries.keys().cloned().collect();
        let mut freed: Vec<u32> = all.iter().filter_map(|at| self.remove(at)).collect();
        freed.sort_unstable();
        freed
    }

    pub(crate) fn lease_tokens(&self, lease: usize) -> &[u32] {
        &self.leases[&lease].tokens
    }
}
