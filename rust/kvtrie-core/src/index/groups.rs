//! The calls of groups besides group 0 (rules G1 to G9).

use crate::effort::Effort;
use crate::error::{Error, Result, invalid};
use crate::groups::{Group, GroupKind, IdState, SOURCE};
use crate::ids::{BlockId, Depth, NodeIndex, depth};
use crate::index::RadixIndex;
use crate::index::insert::{InsertOptions, Source};
use crate::plan::{Carried, GroupPart, ReusePlan};
use crate::policy::ReusePolicy;
use crate::storage::blocks::BlockState;
use crate::storage::forest::Position;
use crate::storage::node::Node;
use crate::tokens::TokenSequence;

/// Ids of one group that an insert offers.
#[derive(Clone, Copy, Debug)]
pub struct GroupOffers<'a> {
    /// The group, from 1.
    pub group: usize,
    /// Pairs of a position and an id, ascending. The position of a block is that of its first token, the position of a
    /// state the number of tokens before it.
    pub offers: &'a [(usize, BlockId)],
}

/// What an insert says of groups besides group 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct GroupOptions<'a> {
    /// The ids of each group, each group at most once.
    pub offers: &'a [GroupOffers<'a>],
    /// Positions at which later prompts may continue, ascending multiples of the block size: ends of turns, and where
    /// reasoning begins. What they need is evicted after all else, as that of the sequence's end and of states.
    pub stops: &'a [usize],
}

/// What an insert did with the ids of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupInserted {
    /// For each offer, the id that is at its place now; `None` if the place is empty, or after the blocks that the
    /// insert returns.
    pub blocks: Vec<Option<BlockId>>,
    /// Held ids that were not taken, because others are at their places.
    pub duplicates: Vec<BlockId>,
    /// Held ids that were not taken, because their places take none or are after the blocks that the insert returns.
    pub surplus: Vec<BlockId>,
}

/// Counters of one group besides group 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Ids at places of group 0's blocks.
    pub indexed: u64,
    /// Indexed ids that plans pin.
    pub pinned: u64,
    /// Ids that [`evict_group`](RadixIndex::evict_group) can remove from their places: indexed and not pinned.
    pub evictable: u64,
    /// Ids that left while pinned, and still are.
    pub condemned: u64,
    /// Ids that [`take_freed_group`](RadixIndex::take_freed_group) returns.
    pub waiting: u64,
}

/// The place of an offer, as the depth of the block of group 0 there.
fn place_of(group: &Group, position: usize) -> usize {
    let before = match group.kind {
        GroupKind::Window { .. } => position,
        GroupKind::State => position.saturating_sub(1),
    };
    before / group.block_size
}

impl RadixIndex {
    fn column_of(&self, group: usize, call: &'static str) -> Result<(usize, &Group)> {
        let groups = &self.config.groups;
        let column = group.wrapping_sub(1);
        let found = groups.get(column).map(|found| (column, found));
        found.ok_or_else(|| match groups.len() {
            0 => invalid!(call, "group is {group}; the index has group 0 alone"),
            last => invalid!(
                call,
                "group is {group}; it must be in [1, {last}], the groups of the index besides group 0"
            ),
        })
    }

    /// Refuses what an index with further groups does not do.
    pub(super) fn refuse_groups(&self, what: &str, call: &'static str) -> Result<()> {
        match self.config.groups.first() {
            None => Ok(()),
            Some(group) => Err(invalid!(
                call,
                "the index has group {:?} besides group 0; {what} is for group 0 alone",
                group.name
            )),
        }
    }

    pub(super) fn refuse_moved(&self, policy: &ReusePolicy, call: &'static str) -> Result<()> {
        let groups = &self.config.groups;
        let state = groups.iter().find(|group| group.kind == GroupKind::State);
        match state.filter(|_| policy.approximate) {
            Some(group) => Err(invalid!(
                call,
                "the index has group {:?} with states, which cannot be moved; the policy has approximate = true",
                group.name
            )),
            None => Ok(()),
        }
    }

    /// The policy of group 0's plan in an index with further groups: no partial block is copied, and nothing at all if
    /// the plan is exact (G5).
    pub(super) fn without_copies(policy: &ReusePolicy, approximate: bool) -> ReusePolicy {
        ReusePolicy {
            approximate,
            partial_blocks: false,
            ..policy.clone()
        }
    }

    /// Whether group 0's plan may have moved runs next to windows that are rebuilt.
    pub(crate) fn may_rebuild(&self, policy: &ReusePolicy) -> bool {
        policy.approximate && self.refuse_moved(policy, "").is_ok()
    }

    /// The deepest place at or above `end` at which every group can continue.
    #[inline(never)]
    pub(super) fn within_groups(&self, end: Position, effort: Effort) -> Option<Position> {
        if end.depth == 0 {
            return Some(end);
        }
        let hit = self
            .groups
            .deepest(&self.forest, end, &mut effort.steps())?;
        Some(hit.end)
    }

    pub(super) fn check_groups(
        &self,
        seq: &TokenSequence,
        options: GroupOptions<'_>,
    ) -> Result<()> {
        const CALL: &str = "RadixIndex::insert";
        self.check_stops(seq, options.stops)?;
        let offered = options.offers;
        for (at, offers) in offered.iter().enumerate() {
            let (_, group) = self.column_of(offers.group, CALL)?;
            let name = &group.name;
            if offered[..at]
                .iter()
                .any(|other| other.group == offers.group)
            {
                return Err(invalid!(CALL, "groups has group {name:?} twice"));
            }
            let (first, last) = match group.kind {
                GroupKind::Window { .. } => (0, seq.len().checked_sub(group.block_size)),
                GroupKind::State => (group.block_size, Some(seq.len())),
            };
            let mut before = None;
            for &(position, id) in offers.offers {
                if position < first
                    || last.is_none_or(|last| position > last)
                    || !position.is_multiple_of(group.block_size)
                {
                    return Err(invalid!(
                        CALL,
                        "group {name:?} has an offer at position {position}; it must be a multiple of the block size \
                         {} and inside the {} tokens of the sequence",
                        group.block_size,
                        seq.len()
                    ));
                }
                if before.is_some_and(|before| before >= position) {
                    return Err(invalid!(
                        CALL,
                        "group {name:?} has an offer at position {position} after one at {}; positions must ascend",
                        before.unwrap_or_default()
                    ));
                }
                before = Some(position);
                Self::check_group_id(group, id, CALL)?;
            }
            let mut ids: Vec<u32> = offers.offers.iter().map(|(_, id)| id.0).collect();
            ids.sort_unstable();
            if let Some(&[id, _]) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(Error::block_in_use(
                    CALL,
                    format!("group {name:?} has id {id}, which is offered twice"),
                ));
            }
        }
        Ok(())
    }

    fn check_stops(&self, seq: &TokenSequence, stops: &[usize]) -> Result<()> {
        const CALL: &str = "RadixIndex::insert";
        let mut before = None;
        for &stop in stops {
            if stop > seq.len() || !stop.is_multiple_of(self.block_size()) {
                return Err(invalid!(
                    CALL,
                    "stops has {stop}; it must be a multiple of the block size {} and at most the {} tokens of the \
                     sequence",
                    self.block_size(),
                    seq.len()
                ));
            }
            if before.is_some_and(|before| before >= stop) {
                return Err(invalid!(
                    CALL,
                    "stops has {stop} after {}; stops must ascend",
                    before.unwrap_or_default()
                ));
            }
            before = Some(stop);
        }
        Ok(())
    }

    fn check_group_id(group: &Group, id: BlockId, call: &'static str) -> Result<()> {
        if u64::from(id.0) < group.num_blocks {
            return Ok(());
        }
        Err(invalid!(
            call,
            "group {:?} has id {id}; it must be in [0, {}), its pool",
            group.name,
            group.num_blocks
        ))
    }

    /// Refuses ids that are at another place than that of their offer, given the end of the blocks of `seq` that are
    /// known so far.
    pub(super) fn check_group_places(
        &self,
        seq: &TokenSequence,
        known: Option<Position>,
        offered: &[GroupOffers<'_>],
    ) -> Result<()> {
        let path = known.map(|known| self.path_to_offers(seq, known, offered));
        for offers in offered {
            let (column, group) = self.column_of(offers.group, "RadixIndex::insert")?;
            let places = Places::of(self, path, group, offers);
            for &(position, id) in offers.offers {
                let Some(IdState::Indexed(node, place)) = self.groups.columns()[column].state(id.0)
                else {
                    continue;
                };
                if places.at(depth(place_of(group, position))) != Some((node, place)) {
                    return Err(Error::block_in_use(
                        "RadixIndex::insert",
                        format!(
                            "group {:?} has id {id}, which is offered at position {position}, but is at another place",
                            group.name
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// The end of the blocks of `seq` up to the last offer, at `known` or after it.
    fn path_to_offers(
        &self,
        seq: &TokenSequence,
        known: Position,
        offered: &[GroupOffers<'_>],
    ) -> Position {
        let last = offered.iter().filter_map(|offers| {
            let (position, _) = offers.offers.last()?;
            Some(place_of(&self.config.groups[offers.group - 1], *position))
        });
        let end = last.max().map_or(0, |last| depth(last + 1));
        if end <= known.depth {
            return known;
        }
        let from = match self.forest.at_cursor(seq) {
            Some((at, _)) if at.depth >= end => {
                return self.forest.normal(Position::at(at.node, end));
            }
            Some((at, _)) if at.depth > known.depth => at,
            _ => known,
        };
        let whole = |_: &Node, _, to| to;
        let walked = self
            .forest
            .walk(seq.view(), from, end, Effort::ANY, whole, |_, _, _| ());
        walked.at
    }

    /// The position up to which the source's KV is exact in further groups, before the insert; 0 without such groups.
    #[inline]
    pub(super) fn groups_exact_until(
        &self,
        options: &InsertOptions<'_>,
        lease: Option<u32>,
    ) -> usize {
        if self.groups.is_empty() {
            return 0;
        }
        self.exact_until(options, lease)
    }

    #[inline(never)]
    fn exact_until(&self, options: &InsertOptions<'_>, lease: Option<u32>) -> usize {
        match &options.source {
            Source::Computed => usize::MAX,
            Source::Imported(imported) => imported.exact_until,
            Source::Plan(plan) => {
                let first = lease.and_then(|lease| self.pins.leases()[lease].first_approximate);
                let rebuilt = plan.first_rebuilt().unwrap_or(usize::MAX);
                first.unwrap_or(usize::MAX).min(rebuilt)
            }
        }
    }

    /// Takes the ids of groups for the path to `reached`, of which a number of blocks are exact, and the offers at most
    /// `limit` blocks deep (G3). Touches what a sequence needs to continue at its end, and at each state and stop.
    #[inline(never)]
    pub(super) fn take_groups(
        &mut self,
        reached: Option<(Position, Depth)>,
        limit: Depth,
        lease: Option<u32>,
        time: u64,
        options: GroupOptions<'_>,
    ) -> Vec<GroupInserted> {
        let GroupOptions {
            offers: offered,
            stops,
        } = options;
        let mut done = Vec::with_capacity(offered.len());
        let mut ends = Vec::new();
        let lease = lease.filter(|&lease| self.pins.leases()[lease].pinned);
        for offers in offered {
            let column = offers.group - 1;
            let group = self.config.groups[column].clone();
            let limit = reached.map_or(0, |(end, exact)| end.depth.min(exact).min(limit));
            let places = Places::of(self, reached.map(|(end, _)| end), &group, offers);
            let mut own = GroupInserted::default();
            for &(position, id) in offers.offers {
                let place = depth(place_of(&group, position));
                let at = places.at(place);
                let column = self.groups.column_mut(column);
                let is_held = column.state(id.0).is_none();
                let known = at.and_then(|(node, place)| column.entry(node, place));
                let now = match (at, known) {
                    (Some(_), Some(entry)) => {
                        let now = entry.id;
                        if is_held {
                            own.duplicates.push(id);
                        }
                        Some(now)
                    }
                    (Some(at), None) if is_held && place < limit => {
                        column.add(at, id.0, time);
                        Some(id.0)
                    }
                    _ => {
                        if is_held {
                            own.surplus.push(id);
                        }
                        None
                    }
                };
                own.blocks.push(now.map(BlockId));
                let (Some(now), Some((node, _))) = (now, at) else {
                    continue;
                };
                if group.kind == GroupKind::State {
                    ends.push(Position::at(node, place + 1));
                } else if let Some(lease) = lease {
                    self.groups.pin(lease, offers.group - 1, now, place);
                }
            }
            done.push(own);
        }
        if let Some((end, _)) = reached.filter(|(end, _)| end.depth > 0) {
            ends.push(end);
            let stops = stops.iter().map(|stop| depth(stop / self.block_size()));
            let mut stops = stops.filter(|&stop| 0 < stop && stop < end.depth);
            if let Some(first) = stops.next() {
                let path = Places(self.forest.edges_to(end, first - 1));
                let at = |stop: Depth| path.at(stop - 1).map(|(node, _)| Position::at(node, stop));
                ends.extend(std::iter::once(first).chain(stops).filter_map(at));
            }
        }
        ends.sort_unstable_by_key(|end| end.depth);
        self.groups.touch_all(&self.forest, &ends, time);
        done
    }

    /// Touches and pins what a plan needs of every group to continue at `end`.
    #[inline(never)]
    pub(super) fn hold_groups(
        &mut self,
        end: Option<Position>,
        lease: u32,
        time: u64,
    ) -> Vec<GroupPart> {
        let of_group = |group: &Group| GroupPart {
            kind: group.kind,
            start: 0,
            blocks: Vec::new(),
            carried: Vec::new(),
        };
        let Some(end) = end else {
            return self.config.groups.iter().map(of_group).collect();
        };
        self.groups.touch(&self.forest, end, time);
        let needed = self.groups.needed(&self.forest, end);
        let is_pinned = self.pins.leases()[lease].pinned;
        let mut parts = Vec::with_capacity(needed.len());
        for (column, mut ids) in needed.into_iter().enumerate() {
            if self.groups.columns()[column].is_window() {
                ids.drain(..start_of_last_run(&ids, end.depth));
            }
            if is_pinned {
                for &(place, id) in &ids {
                    self.groups.pin(lease, column, id.0, place);
                }
            }
            let group = &self.config.groups[column];
            let first = ids.first().map_or(end.depth, |&(place, _)| place);
            let start = match group.kind {
                GroupKind::Window { .. } => first,
                GroupKind::State => end.depth,
            };
            parts.push(GroupPart {
                kind: group.kind,
                start: start as usize * group.block_size,
                blocks: ids.into_iter().map(|(_, id)| id).collect(),
                carried: Vec::new(),
            });
        }
        parts
    }

    /// Finds, and pins until the plan is released, what windows take along with moved runs (G9): of the tokens that
    /// [`rebuild`](ReusePlan::rebuild) would list, those whose source has the group's block.
    #[inline(never)]
    pub(super) fn carry_windows(&mut self, plan: &mut ReusePlan, lease: u32) {
        let is_pinned = self.pins.leases()[lease].pinned;
        for column in 0..self.config.groups.len() {
            let part = &plan.groups()[column];
            let mut carried = Vec::new();
            for (_, lacking) in plan.lacking(part) {
                for (tokens, source, offset, delta) in plan.copied_in(&lacking) {
                    let BlockState::Indexed { node, depth } = self.forest.blocks().state(source.0)
                    else {
                        continue;
                    };
                    if let Some(entry) = self.groups.columns()[column].entry(node, depth) {
                        carried.push(Carried {
                            start: tokens.start,
                            num_tokens: tokens.len(),
                            id: BlockId(entry.id),
                            offset,
                            delta,
                        });
                    }
                }
            }
            if is_pinned {
                for own in &carried {
                    self.groups.pin(lease, column, own.id.0, SOURCE);
                }
            }
            plan.groups_mut()[column].carried = carried;
        }
    }

    /// Ends the pins of ids of further groups that a request no longer reads once all tokens before `position` are
    /// computed: blocks before the last `window − 1` tokens, and states. Those of group 0 stay.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    ///
    /// # Complexity
    /// O(ids of groups that the plan pins · log entries).
    pub fn advance(&mut self, plan: &ReusePlan, position: usize) -> Result<()> {
        let lease = plan.lease_index(self, "RadixIndex::advance")?;
        crate::failpoints::before("RadixIndex::advance")?;
        if self.groups.is_empty() {
            return Ok(());
        }
        let block_size = self.block_size();
        let groups = &self.config.groups;
        self.groups.unpin(lease, |column, place| {
            let end = (place as usize + 1) * block_size;
            match groups[column].kind {
                _ if place == SOURCE => false,
                // The next token attends to `window` tokens, itself the last, and later ones to none before these.
                GroupKind::Window { window } => end <= position.saturating_sub(window - 1),
                GroupKind::State => end < position,
            }
        });
        Ok(())
    }

    /// Number of ids that [`evict_group`](Self::evict_group) can remove, besides those that wait.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the index has no such group.
    pub fn num_evictable_group(&self, group: usize) -> Result<u64> {
        let (column, _) = self.column_of(group, "RadixIndex::num_evictable_group")?;
        Ok(self.groups.columns()[column].num_evictable())
    }

    /// Removes and returns at most `n` ids of a group besides group 0 (rule G6): waiting ones, then unpinned ones that no
    /// call has needed to continue, then the others, each by (last use, deepest first, lowest id). Group 0 keeps its
    /// blocks.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the index has no such group.
    ///
    /// # Complexity
    /// O(log entries) per id, and per entry of the group that was used or pinned since its last eviction.
    pub fn evict_group(&mut self, group: usize, n: usize) -> Result<Vec<BlockId>> {
        let (column, _) = self.column_of(group, "RadixIndex::evict_group")?;
        crate::failpoints::before("RadixIndex::evict_group")?;
        let mut out = Vec::new();
        let column = self.groups.column_mut(column);
        column.take_waiting(n, &mut out);
        column.evict(n, &mut out);
        Ok(out)
    }

    /// Returns the ids of a group that left with blocks of group 0, ascending; pinned ones after their last release.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the index has no such group.
    ///
    /// # Complexity
    /// O(ids returned · log ids).
    pub fn take_freed_group(&mut self, group: usize) -> Result<Vec<BlockId>> {
        let (column, _) = self.column_of(group, "RadixIndex::take_freed_group")?;
        crate::failpoints::before("RadixIndex::take_freed_group")?;
        let mut out = Vec::new();
        self.groups
            .column_mut(column)
            .take_waiting(usize::MAX, &mut out);
        Ok(out)
    }

    /// Removes ids of a group from their places. Returns the unpinned ones in call order; pinned ones wait after their
    /// last release. Others are ignored. Group 0 keeps its blocks.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the index has no such group, or an id is outside its
    /// pool; nothing is discarded then.
    ///
    /// # Complexity
    /// O(log entries) per id.
    pub fn discard_group(&mut self, group: usize, ids: &[BlockId]) -> Result<Vec<BlockId>> {
        const CALL: &str = "RadixIndex::discard_group";
        let (column, own) = self.column_of(group, CALL)?;
        for &id in ids {
            Self::check_group_id(own, id, CALL)?;
        }
        crate::failpoints::before(CALL)?;
        let column = self.groups.column_mut(column);
        let mut freed = Vec::new();
        for &id in ids {
            if let Some(IdState::Indexed(node, place)) = column.state(id.0)
                && let Some((_, false)) = column.remove((node, place))
            {
                freed.push(id);
            }
        }
        Ok(freed)
    }

    /// Counters of a group besides group 0. O(1).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the index has no such group.
    pub fn group_stats(&self, group: usize) -> Result<GroupStats> {
        let (column, _) = self.column_of(group, "RadixIndex::group_stats")?;
        let column = &self.groups.columns()[column];
        Ok(GroupStats {
            indexed: column.num_indexed(),
            pinned: column.num_pinned(),
            evictable: column.num_evictable(),
            condemned: column.num_condemned(),
            waiting: column.waiting().len() as u64,
        })
    }
}

/// Where the blocks without a gap up to `end` begin in a list of blocks with their places.
fn start_of_last_run(blocks: &[(Depth, BlockId)], end: Depth) -> usize {
    let mut at = blocks.len();
    let mut next = end;
    while at > 0 && blocks[at - 1].0 + 1 == next {
        at -= 1;
        next -= 1;
    }
    at
}

/// The edges of a path at and after the first offer.
struct Places(Vec<(NodeIndex, Depth, Depth)>);

impl Places {
    fn of(
        index: &RadixIndex,
        end: Option<Position>,
        group: &Group,
        offers: &GroupOffers<'_>,
    ) -> Self {
        let first = offers.offers.first();
        let (Some(end), Some(&(position, _))) = (end, first) else {
            return Self(Vec::new());
        };
        Self(index.forest.edges_to(end, depth(place_of(group, position))))
    }

    fn at(&self, place: Depth) -> Option<(NodeIndex, Depth)> {
        let found = self.0.partition_point(|&(_, _, end)| end <= place);
        let &(node, from, _) = self.0.get(found)?;
        (from <= place).then_some((node, place))
    }
}
