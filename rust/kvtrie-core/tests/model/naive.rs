//! The rules without a tree: a map from each whole token prefix to the entry of its last block.

use std::collections::{BTreeMap, BTreeSet};

use kvtrie_core::MovedRun;

use crate::grades::Grade;
use crate::plans::Planned;

/// The number of a namespace, and all tokens up to the end of a block.
pub(crate) type Prefix = (usize, Vec<u32>);

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) id: u32,
    pub(crate) exact: bool,
    pub(crate) hops: u16,
    /// Of no meaning if it is exact.
    pub(crate) grade: Grade,
    pub(crate) last_use: u64,
    pub(crate) tags: Vec<u64>,
    /// The sessions that the block belongs to, the one that came first at the front.
    pub(crate) sessions: Vec<u8>,
    /// Number of the call that marked the block dead, if one did.
    pub(crate) mark: Option<u64>,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Clone, Debug, Default)]
pub(crate) struct Lease {
    pub(crate) namespace: usize,
    pub(crate) tokens: Vec<u32>,
    pub(crate) pinned: bool,
    pub(crate) over: bool,
    pub(crate) held: BTreeSet<u32>,
    pub(crate) sources: BTreeSet<u32>,
    pub(crate) first_approximate: usize,
    /// `None` if the policy allows exact KV only.
    pub(crate) grade: Option<Grade>,
    pub(crate) blocks: Vec<u32>,
    pub(crate) segments: Vec<Planned>,
    pub(crate) moved_runs: Vec<MovedRun>,
    /// Whether an insert has used the plan, tokens to compute were chosen for it, and have to be before an insert.
    pub(crate) used: bool,
    pub(crate) chosen: bool,
    pub(crate) awaits: bool,
    /// Blocks of the plan that left after it was made.
    pub(crate) gone: BTreeSet<u32>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum From {
    Computed,
    Imported {
        exact_until: usize,
        hops: u16,
        grade: Grade,
    },
    Lease(usize),
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Inserted {
    pub(crate) blocks: Vec<u32>,
    pub(crate) num_exact: usize,
    pub(crate) duplicates: Vec<u32>,
    pub(crate) surplus: Vec<u32>,
    pub(crate) freed: Vec<u32>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Naive {
    pub(crate) block_size: usize,
    pub(crate) num_blocks: usize,
    pub(crate) entries: BTreeMap<Prefix, Entry>,
    pub(crate) leases: BTreeMap<usize, Lease>,
    pub(crate) condemned: BTreeSet<u32>,
    pub(crate) waiting: Vec<u32>,
    /// The quarantined blocks that are still condemned.
    pub(crate) quarantined: BTreeSet<u32>,
    pub(crate) clock: u64,
    /// Number of calls that marked a block.
    pub(crate) marks: u64,
    pub(crate) plans_without_scope: u64,
}

impl Naive {
    pub(crate) fn prefix(&self, namespace: usize, tokens: &[u32], block: usize) -> Prefix {
        (namespace, tokens[..(block + 1) * self.block_size].to_vec())
    }

    pub(crate) fn place_of(&self, id: u32) -> Option<&Prefix> {
        self.entries
            .iter()
            .find(|(_, entry)| entry.id == id)
            .map(|(prefix, _)| prefix)
    }

    pub(crate) fn pins(&self, id: u32) -> usize {
        self.leases
            .values()
            .map(|lease| {
                usize::from(lease.held.contains(&id)) + usize::from(lease.sources.contains(&id))
            })
            .sum()
    }

    pub(crate) fn is_held(&self, id: u32) -> bool {
        self.place_of(id).is_none()
            && !self.condemned.contains(&id)
            && !self.waiting.contains(&id)
            && !self.quarantined.contains(&id)
    }

    pub(crate) fn is_below(above: &Prefix, below: &Prefix) -> bool {
        above.0 == below.0 && below.1.len() > above.1.len() && below.1.starts_with(&above.1)
    }

    fn has_below(&self, prefix: &Prefix) -> bool {
        self.entries
            .keys()
            .any(|other| Self::is_below(prefix, other))
    }

    /// The prefixes without an entry that are above one.
    pub(crate) fn holes(&self) -> BTreeSet<Prefix> {
        let mut holes = BTreeSet::new();
        for (namespace, tokens) in self.entries.keys() {
            for block in 0..tokens.len() / self.block_size {
                let prefix = self.prefix(*namespace, tokens, block);
                if !self.entries.contains_key(&prefix) {
                    holes.insert(prefix);
                }
            }
        }
        holes
    }

    pub(crate) fn num_evictable(&self) -> usize {
        let protected = |prefix: &Prefix, entry: &Entry| {
            self.pins(entry.id) > 0
                || self
                    .entries
                    .iter()
                    .any(|(other, below)| Self::is_below(prefix, other) && self.pins(below.id) > 0)
        };
        self.entries
            .iter()
            .filter(|(prefix, entry)| {
                !protected(prefix, entry) || entry.mark.is_some() && self.may_go(prefix)
            })
            .count()
    }

    pub(crate) fn lookup(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        keep_last: usize,
        touch: bool,
    ) -> Vec<u32> {
        let found = self.exact_prefix(namespace, tokens, keep_last);
        if touch {
            self.clock += 1;
            self.touch_path(namespace, tokens, found.len());
        }
        found
    }

    fn exact_prefix(&self, namespace: usize, tokens: &[u32], keep_last: usize) -> Vec<u32> {
        let limit = tokens.len().saturating_sub(keep_last) / self.block_size;
        (0..limit)
            .map_while(|block| self.entries.get(&self.prefix(namespace, tokens, block)))
            .take_while(|entry| entry.exact)
            .map(|entry| entry.id)
            .collect()
    }

    fn touch_path(&mut self, namespace: usize, tokens: &[u32], blocks: usize) {
        for block in 0..blocks {
            let prefix = self.prefix(namespace, tokens, block);
            if let Some(entry) = self.entries.get_mut(&prefix) {
                entry.last_use = self.clock;
                entry.mark = None;
            }
        }
    }

    /// Inserts blocks; `None` if the index must refuse the call.
    #[expect(clippy::too_many_arguments, reason = "the fields of one step")]
    pub(crate) fn insert(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        ids: &[u32],
        num_computed: usize,
        start: usize,
        from: From,
        session: Option<u8>,
    ) -> Option<Inserted> {
        let first = start / self.block_size;
        let need = (num_computed / self.block_size).saturating_sub(first);
        let distinct: BTreeSet<&u32> = ids.iter().collect();
        if ids.len() < need || distinct.len() < ids.len() {
            return None;
        }
        for (at, &id) in ids.iter().enumerate() {
            if let Some(place) = self.place_of(id) {
                let end = (first + at + 1) * self.block_size;
                if end > tokens.len() || *place != (namespace, tokens[..end].to_vec()) {
                    return None;
                }
            }
        }
        if let From::Lease(lease) = from {
            let lease = &self.leases[&lease];
            if lease.namespace != namespace || !tokens.starts_with(&lease.tokens) {
                return None;
            }
            if lease.awaits && !lease.chosen {
                return None;
            }
        }
        if let From::Lease(lease) = from {
            self.leases.get_mut(&lease).unwrap().used = true;
        }
        self.clock += 1;
        let mut done = Inserted::default();
        let over = matches!(from, From::Lease(lease) if self.leases[&lease].over);
        let before: Vec<Option<Entry>> = (0..first)
            .map(|block| {
                self.entries
                    .get(&self.prefix(namespace, tokens, block))
                    .cloned()
            })
            .collect();
        if over || before.iter().any(Option::is_none) {
            done.surplus = ids.iter().copied().filter(|&id| self.is_held(id)).collect();
            return Some(done);
        }
        let mut approximate_before = before.iter().flatten().any(|entry| !entry.exact);
        let mut grade_before = Grade::STRICTEST;
        for entry in before.iter().flatten().filter(|entry| !entry.exact) {
            grade_before = grade_before.meet(&entry.grade);
        }
        let exact_before = before
            .iter()
            .flatten()
            .take_while(|entry| entry.exact)
            .count();
        let mut exact = exact_before;
        for (at, &id) in ids[..need].iter().enumerate() {
            let block = first + at;
            let end = (block + 1) * self.block_size;
            let said = match from {
                From::Computed => (true, 0),
                From::Imported {
                    exact_until, hops, ..
                } => (end <= exact_until, hops),
                From::Lease(lease) => {
                    let lease = &self.leases[&lease];
                    let start = end - self.block_size;
                    let inside = lease
                        .segments
                        .iter()
                        .filter(|segment| segment.start < end && start < segment.end);
                    let hops = inside.map(|segment| segment.hops).max().unwrap_or(0);
                    (end <= lease.first_approximate, hops)
                }
            };
            let (is_exact, hops) = match said {
                (true, _) => (!approximate_before, 0),
                (false, hops) => (false, hops),
            };
            let grade = match from {
                From::Computed => grade_before,
                From::Imported { grade, .. } => grade.meet(&grade_before),
                From::Lease(lease) => self.leases[&lease].grade.unwrap_or(grade_before),
            };
            let prefix = self.prefix(namespace, tokens, block);
            let held = self.is_held(id);
            let new = Entry {
                id,
                exact: is_exact,
                hops,
                grade,
                last_use: 0,
                tags: vec![0; self.block_size],
                sessions: Vec::new(),
                mark: None,
            };
            match self.entries.get(&prefix).cloned() {
                Some(now) if now.id == id => {}
                Some(now) => {
                    let no_worse = now.exact
                        || !is_exact
                            && now.hops <= hops
                            && now.grade.is_at_least_as_strict_as(&grade);
                    if held && !no_worse {
                        self.remove(&prefix);
                        if self.pins(now.id) > 0 {
                            self.condemned.insert(now.id);
                        } else {
                            done.freed.push(now.id);
                        }
                        self.entries.insert(
                            prefix.clone(),
                            Entry {
                                tags: now.tags,
                                sessions: now.sessions,
                                ..new
                            },
                        );
                    } else if held {
                        done.duplicates.push(id);
                    } else if !no_worse {
                        break;
                    }
                }
                None if held => {
                    self.entries.insert(prefix.clone(), new);
                }
                None => break,
            }
            let now = &self.entries[&prefix];
            if !now.exact {
                approximate_before = true;
                grade_before = grade_before.meet(&now.grade);
            }
            exact += usize::from(!approximate_before);
            done.blocks.push(now.id);
        }
        let end = if need == 0 {
            first.min(num_computed / self.block_size)
        } else {
            first + done.blocks.len()
        };
        exact = exact.min(end);
        done.num_exact = exact * self.block_size;
        self.touch_path(namespace, tokens, end);
        if let Some(session) = session {
            self.add_session(namespace, tokens, first, end, session);
        }
        if let From::Lease(lease) = from {
            let backing: Vec<u32> = (0..end)
                .map(|block| self.entries[&self.prefix(namespace, tokens, block)].id)
                .collect();
            let lease = self.leases.get_mut(&lease).unwrap();
            if exact < end {
                lease.first_approximate = lease.first_approximate.min(exact * self.block_size);
            }
            if lease.pinned {
                lease.held.extend(backing);
            }
        }
        done.surplus = ids[done.blocks.len()..]
            .iter()
            .copied()
            .filter(|&id| self.is_held(id))
            .collect();
        Some(done)
    }

    /// Adds a session to the blocks from `first` on, and to those above, up to the first that has it.
    fn add_session(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        first: usize,
        end: usize,
        session: u8,
    ) {
        for block in (0..end).rev() {
            let prefix = self.prefix(namespace, tokens, block);
            let sessions = &mut self.entries.get_mut(&prefix).unwrap().sessions;
            if !sessions.contains(&session) {
                sessions.push(session);
                if sessions.len() > 8 {
                    sessions.remove(0);
                }
            } else if block < first {
                break;
            }
        }
    }

    /// Removes an entry, and records in the leases that its block left.
    pub(crate) fn remove(&mut self, prefix: &Prefix) -> u32 {
        let entry = self.entries.remove(prefix).unwrap();
        for lease in self.leases.values_mut() {
            lease.gone.insert(entry.id);
        }
        entry.id
    }

    pub(crate) fn release(&mut self, lease: usize) {
        let ended = self.leases.remove(&lease).unwrap();
        self.wait_for(ended.held.union(&ended.sources).copied().collect());
    }

    pub(crate) fn release_sources(&mut self, lease: usize) {
        let sources = std::mem::take(&mut self.leases.get_mut(&lease).unwrap().sources);
        self.wait_for(sources);
    }

    fn wait_for(&mut self, unpinned: BTreeSet<u32>) {
        for id in unpinned {
            if self.pins(id) == 0 && self.condemned.remove(&id) && !self.quarantined.contains(&id) {
                self.waiting.push(id);
            }
        }
        self.bound_holes();
    }

    pub(crate) fn evict(&mut self, n: usize) -> Vec<u32> {
        let mut out: Vec<u32> = self.waiting.drain(..n.min(self.waiting.len())).collect();
        let mut any_dead = false;
        while out.len() < n {
            let Some(prefix) = self.next_dead() else {
                break;
            };
            out.push(self.remove(&prefix));
            any_dead = true;
        }
        while out.len() < n {
            let Some(prefix) = self.next_victim(|_| true) else {
                break;
            };
            out.push(self.remove(&prefix));
        }
        if any_dead {
            self.bound_holes();
        }
        out
    }

    fn next_victim(&self, wanted: impl Fn(&Prefix) -> bool) -> Option<Prefix> {
        self.entries
            .iter()
            .filter(|(prefix, entry)| {
                self.pins(entry.id) == 0 && !self.has_below(prefix) && wanted(prefix)
            })
            .min_by_key(|(prefix, entry)| {
                (entry.last_use, std::cmp::Reverse(prefix.1.len()), entry.id)
            })
            .map(|(prefix, _)| prefix.clone())
    }

    pub(crate) fn discard(&mut self, ids: &[u32]) -> Vec<u32> {
        let mut freed = Vec::new();
        for &id in ids {
            let Some(prefix) = self.place_of(id).cloned() else {
                continue;
            };
            self.remove(&prefix);
            if self.pins(id) > 0 {
                self.condemned.insert(id);
            } else {
                freed.push(id);
            }
        }
        self.bound_holes();
        freed
    }

    /// Quarantines ids and returns how many were not quarantined before (R7).
    pub(crate) fn quarantine(&mut self, ids: &[u32]) -> usize {
        let before = self.quarantined.len();
        for &id in ids {
            if let Some(prefix) = self.place_of(id).cloned() {
                self.remove(&prefix);
                if self.pins(id) > 0 {
                    self.condemned.insert(id);
                }
            }
            self.waiting.retain(|&known| known != id);
            self.quarantined.insert(id);
        }
        self.bound_holes();
        self.quarantined.len() - before
    }

    /// Keeps the number of holes at its bound (D10). Called after every call that may make holes.
    pub(crate) fn bound_holes(&mut self) {
        let mut bounded = BTreeSet::new();
        while self.holes().len() > self.num_blocks {
            let holes = self.holes();
            let cut_off = |prefix: &Prefix| holes.iter().any(|hole| Self::is_below(hole, prefix));
            let Some(prefix) = self.next_victim(cut_off) else {
                break;
            };
            bounded.insert(self.remove(&prefix));
        }
        self.waiting.extend(bounded);
    }

    pub(crate) fn drop_namespaces(&mut self, wanted: impl Fn(usize) -> bool) -> Vec<u32> {
        let gone: Vec<Prefix> = self
            .entries
            .keys()
            .filter(|prefix| wanted(prefix.0))
            .cloned()
            .collect();
        let ids: BTreeSet<u32> = gone.iter().map(|prefix| self.remove(prefix)).collect();
        for lease in self.leases.values_mut() {
            lease.over |= wanted(lease.namespace);
        }
        let (pinned, freed): (BTreeSet<u32>, BTreeSet<u32>) =
            ids.into_iter().partition(|&id| self.pins(id) > 0);
        self.condemned.extend(pinned);
        freed.into_iter().collect()
    }

    pub(crate) fn tag(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        start: usize,
        end: usize,
        mask: u64,
    ) {
        for at in start..end {
            let block = at / self.block_size;
            if (block + 1) * self.block_size > tokens.len() {
                break;
            }
            let prefix = self.prefix(namespace, tokens, block);
            if let Some(entry) = self.entries.get_mut(&prefix) {
                entry.tags[at % self.block_size] |= mask;
            }
        }
    }

    /// The tags of a path's whole blocks, as one mask per token.
    pub(crate) fn tags(&self, namespace: usize, tokens: &[u32]) -> Vec<u64> {
        (0..tokens.len() / self.block_size)
            .flat_map(
                |block| match self.entries.get(&self.prefix(namespace, tokens, block)) {
                    Some(entry) => entry.tags.clone(),
                    None => vec![0; self.block_size],
                },
            )
            .collect()
    }
}
