//! The ids that a request has of groups besides group 0 (rule L10).
//!
//! Group 0 decides the positions of a request; a group only adds which of its ids are at which of them. A request begins
//! with what its plan has in place, [`hold`](SequenceLedger::hold) adds the engine's own ids,
//! [`advance`](SequenceLedger::advance) ends those of windows that are no longer read, and
//! [`finish_groups`](SequenceLedger::finish_groups) offers the rest to the index. In between, the index has none of the
//! request's own ids, so no eviction takes a window from under it.
//!
//! A table is a list of ids by position, O(log ids) to look in, and the set of these ids; a request without groups has
//! none. Ids that come in the order of their positions are added in O(1) each.

use foldhash::quality::FixedState;
use hashbrown::HashSet;
use kvtrie_core::{
    BlockId, Error, Group, GroupInserted, GroupKind, GroupOffers, GroupOptions, RadixIndex, Result,
    ReusePlan, TokenSequence, failpoints,
};

use super::request::Request;
use super::{RequestId, SequenceLedger};
use crate::error::{block_in_use, invalid};
use crate::transfer::OfferedGroup;

/// An id of a group at a position, as an index is offered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    position: usize,
    id: BlockId,
    /// Whether it is the index's, and the plan pins it.
    in_place: bool,
}

/// What a request has of one group.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupTable {
    /// Ascending by position.
    held: Vec<Held>,
    ids: HashSet<BlockId, FixedState>,
}

impl GroupTable {
    /// The tables that a request begins with, of a plan or of none.
    pub(super) fn all(groups: &[Group], plan: Option<&ReusePlan>) -> Vec<Self> {
        let table = |(at, group): (usize, &Group)| {
            let Some(part) = plan.and_then(|plan| plan.group(at + 1)) else {
                return Self::default();
            };
            let held = |(block, &id): (usize, &BlockId)| Held {
                position: part.start + block * group.block_size,
                id,
                in_place: true,
            };
            Self {
                held: part.blocks.iter().enumerate().map(held).collect(),
                ids: part.blocks.iter().copied().collect(),
            }
        };
        groups.iter().enumerate().map(table).collect()
    }

    fn has(&self, position: usize) -> bool {
        let found = self
            .held
            .binary_search_by_key(&position, |held| held.position);
        found.is_ok()
    }

    /// Adds ids of positions that are not taken, ascending.
    fn add(&mut self, offers: &[(usize, BlockId)]) {
        let last = self.held.last().map(|held| held.position);
        let is_in_order = offers.first().is_none_or(|first| last < Some(first.0));
        self.held.extend(offers.iter().map(|&(position, id)| Held {
            position,
            id,
            in_place: false,
        }));
        self.ids.extend(offers.iter().map(|&(_, id)| id));
        if !is_in_order {
            // Two sorted parts, which a stable sort merges.
            self.held.sort_by_key(|held| held.position);
        }
    }

    fn own(&self) -> impl Iterator<Item = &Held> {
        self.held.iter().filter(|held| !held.in_place)
    }

    /// Takes the entries out that `goes` names, and returns those of them that are the caller's.
    fn take(&mut self, goes: impl Fn(&Held) -> bool) -> Vec<BlockId> {
        let own = self.own().filter(|held| goes(held)).map(|held| held.id);
        let own = own.collect();
        let ids = &mut self.ids;
        self.held.retain(|held| {
            let stays = !goes(held);
            if !stays {
                ids.remove(&held.id);
            }
            stays
        });
        own
    }
}

/// The first position that the group needs to continue at `to` and has no id at.
fn lacks(group: &Group, table: &GroupTable, to: usize) -> Option<usize> {
    if to == 0 {
        return None;
    }
    match group.kind {
        GroupKind::State => (!table.has(to)).then_some(to),
        GroupKind::Window { window } => {
            let first = to.saturating_sub(window - 1) / group.block_size;
            let mut needed = (first..to.div_ceil(group.block_size)).map(|at| at * group.block_size);
            needed.find(|&position| !table.has(position))
        }
    }
}

impl SequenceLedger {
    /// Makes a ledger without requests for an index with these groups besides group 0.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) as for [`new`](Self::new), and if an index of this
    /// block size could not have these groups.
    pub fn with_groups(block_size: usize, groups: Vec<Group>) -> Result<Self> {
        let mut ledger = Self::new(block_size)?;
        Group::check_all(&groups, block_size, "SequenceLedger::with_groups")?;
        ledger.groups = groups;
        Ok(ledger)
    }

    /// The groups besides group 0.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    fn column(&self, group: usize, call: &'static str) -> Result<(usize, &Group)> {
        let column = group.wrapping_sub(1);
        let found = self.groups.get(column).map(|found| (column, found));
        found.ok_or_else(|| {
            invalid!(
                call,
                "group is {group}; the ledger has {} groups besides group 0, from 1",
                self.groups.len()
            )
        })
    }

    /// Adds the engine's own ids of a group to a request: pairs of a position and an id, ascending, as for
    /// [`GroupOffers`]. A window's block may be added before it is computed; a state is there from the start, so its
    /// position is at most *V*.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`BlockInUse`](kvtrie_core::ErrorKind::BlockInUse): an id that the request has in the group, or that is given
    ///   twice.
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): no such group; an id outside its pool; a position
    ///   that is not a multiple of the block size, not after the one before, or taken; a block after the end of group
    ///   0's table, a state at 0 or after *V*.
    ///
    /// # Complexity
    /// O(k log k) in the ids that are given; and O(n) in those that the request has of the group, if it has one after the
    /// first of them.
    pub fn hold(&mut self, id: RequestId, group: usize, offers: &[(usize, BlockId)]) -> Result<()> {
        const CALL: &str = "SequenceLedger::hold";
        let (column, group) = self.column(group, CALL)?;
        let request = self.request(id, CALL)?;
        let table = &request.groups[column];
        let (name, size) = (&group.name, group.block_size);
        let (first, end, limit) = match group.kind {
            GroupKind::Window { .. } => {
                let capacity = request.blocks.len() * size;
                (0, capacity, "inside the table of group 0, which ends")
            }
            GroupKind::State => {
                let verified = request.positions.verified();
                (
                    size,
                    verified + 1,
                    "among the final and computed tokens, which end before",
                )
            }
        };
        let last = table.held.last().map(|held| held.position);
        let mut before = None;
        for &(position, id) in offers {
            if !position.is_multiple_of(size) || position < first || position >= end {
                return Err(invalid!(
                    CALL,
                    "group {name:?} is given an id at position {position}; it must be a multiple of {size} from {first} on, \
                     and {limit} at {end}"
                ));
            }
            if before.is_some_and(|before| before >= position) {
                return Err(invalid!(
                    CALL,
                    "group {name:?} is given position {position} after {}; positions must ascend",
                    before.unwrap_or_default()
                ));
            }
            before = Some(position);
            if Some(position) <= last && table.has(position) {
                return Err(invalid!(
                    CALL,
                    "the request has an id of group {name:?} at position {position}"
                ));
            }
            if u64::from(id.0) >= group.num_blocks {
                return Err(invalid!(
                    CALL,
                    "group {name:?} is given id {id}; it must be in [0, {}), its pool",
                    group.num_blocks
                ));
            }
        }
        let known = offers.iter().find(|(_, id)| table.ids.contains(id));
        let mut given: Vec<BlockId> = offers.iter().map(|offer| offer.1).collect();
        given.sort_unstable();
        let twice = given.windows(2).find(|pair| pair[0] == pair[1]);
        if let Some(id) = known.map(|offer| offer.1).or(twice.map(|pair| pair[0])) {
            return Err(block_in_use(
                CALL,
                format!("id {id} of group {name:?} comes twice in the request"),
            ));
        }
        failpoints::before(CALL)?;
        self.request_mut(id, CALL)?.groups[column].add(offers);
        Ok(())
    }

    /// What a request has of a group: pairs of a position and an id, ascending.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): no such group.
    pub fn held(&self, id: RequestId, group: usize) -> Result<Vec<(usize, BlockId)>> {
        const CALL: &str = "SequenceLedger::held";
        let (column, _) = self.column(group, CALL)?;
        let table = &self.request(id, CALL)?.groups[column];
        Ok(table
            .held
            .iter()
            .map(|held| (held.position, held.id))
            .collect())
    }

    /// What a request has of each group, for a manifest: pairs of a position and an id. Blocks of a plan's windows that
    /// are not as exact as group 0's are left out (rule G9), and the request's own from *V* on: that group 0 has KV there
    /// says nothing of them.
    pub(crate) fn offered(&self, id: RequestId) -> Result<Vec<OfferedGroup>> {
        let request = self.request(id, "SequenceLedger::offered")?;
        let rebuilt = request.begun_with().and_then(|plan| {
            let of_groups = (1..=self.groups.len()).flat_map(|group| plan.rebuild(group));
            of_groups.map(|(start, _)| start).min()
        });
        let exact = rebuilt.unwrap_or(usize::MAX);
        let verified = request.positions.verified();
        let is_sent = |held: &Held, group: &Group| {
            let end = verified + usize::from(group.kind == GroupKind::State);
            held.in_place || (held.position + group.block_size <= exact && held.position < end)
        };
        let offered = |(table, group): (&GroupTable, &Group)| OfferedGroup {
            kind: group.kind,
            ids: table
                .held
                .iter()
                .filter(|held| is_sent(held, group))
                .map(|held| (held.position, held.id))
                .collect(),
        };
        Ok(request
            .groups
            .iter()
            .zip(&self.groups)
            .map(offered)
            .collect())
    }

    /// Takes from the tables what no later token reads, given that all tokens before *V* are computed: blocks that end
    /// before a window, and the plan's states before *V*. Own states stay, for the index. The plan's pins on them end.
    /// Returns the request's own ids, for each group; they belong to the caller.
    ///
    /// # Errors
    /// - [`StaleHandle`](kvtrie_core::ErrorKind::StaleHandle): the request is not live, or its plan was released.
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): an index with other groups, or of another plan.
    ///
    /// # Complexity
    /// O(ids of groups that the request has).
    pub fn advance(&mut self, id: RequestId, index: &mut RadixIndex) -> Result<Vec<Vec<BlockId>>> {
        const CALL: &str = "SequenceLedger::advance";
        self.check_groups(index, CALL)?;
        let request = self.request(id, CALL)?;
        request.check_index(index, self.block_size, CALL)?;
        let position = request.positions.verified();
        if let Some(plan) = request.begun_with() {
            index.advance(plan, position)?;
        }
        failpoints::within("advance: pins that ended, tables as before");
        let groups = self.groups.clone();
        let tables = &mut self.request_mut(id, CALL)?.groups;
        let passed = |(table, group): (&mut GroupTable, &Group)| match group.kind {
            GroupKind::Window { window } => {
                let first = position.saturating_sub(window - 1);
                table.take(|held| held.position + group.block_size <= first)
            }
            GroupKind::State => table.take(|held| held.in_place && held.position < position),
        };
        Ok(tables.iter_mut().zip(&groups).map(passed).collect())
    }

    /// About the most steps that a finish takes for ids of groups, besides those of its insert; 0 without groups.
    #[must_use]
    pub fn group_steps(
        &self,
        id: RequestId,
        seq: &TokenSequence,
        index: &RadixIndex,
        stops: &[usize],
    ) -> u64 {
        let Some(request) = self.requests.get(id) else {
            return 0;
        };
        if self.groups.is_empty() {
            return 0;
        }
        let offers = request.offers(&self.groups, request.positions.verified());
        let options = GroupOptions {
            offers: &numbered(&offers),
            stops,
        };
        index.group_steps(seq, options)
    }

    /// Refuses an index with other groups than the ledger's.
    pub(super) fn check_groups(&self, index: &RadixIndex, call: &'static str) -> Result<()> {
        let theirs = &index.config().groups;
        if *theirs == self.groups {
            return Ok(());
        }
        let differs = (0..theirs.len().max(self.groups.len()))
            .find(|&at| theirs.get(at) != self.groups.get(at))
            .map_or((None, None), |at| (theirs.get(at), self.groups.get(at)));
        let name = |group: Option<&Group>| {
            group.map_or_else(
                || "no group".to_owned(),
                |group| format!("group {:?}", group.name),
            )
        };
        Err(invalid!(
            call,
            "the index has {} where the ledger has {}: both must have the same groups besides group 0",
            name(differs.0),
            name(differs.1)
        ))
    }

    /// Refuses a plan of an index with other groups.
    pub(super) fn check_plan_groups(&self, plan: &ReusePlan, call: &'static str) -> Result<()> {
        let theirs = plan.groups().iter().map(|part| part.kind);
        if theirs.eq(self.groups.iter().map(|group| group.kind)) {
            return Ok(());
        }
        Err(invalid!(
            call,
            "the plan is of an index with {} groups besides group 0, the ledger has {}: both must have the same",
            plan.groups().len(),
            self.groups.len()
        ))
    }

    /// Refuses a plan without what a group needs to continue after its blocks in place.
    pub(super) fn check_continues(
        &self,
        plan: &ReusePlan,
        to: usize,
        call: &'static str,
    ) -> Result<()> {
        let tables = GroupTable::all(&self.groups, Some(plan));
        for (group, table) in self.groups.iter().zip(&tables) {
            if let Some(position) = lacks(group, table, to) {
                return Err(invalid!(
                    call,
                    "the plan has {to} tokens in place and nothing of group {:?} at position {position}; plan without \
                     approximate reuse",
                    group.name
                ));
            }
        }
        Ok(())
    }

    /// Refuses a rollback to a position at which a group cannot continue.
    pub(super) fn check_rollback(
        &self,
        request: &Request,
        to: usize,
        call: &'static str,
    ) -> Result<()> {
        if !request.positions.loses(to) {
            return Ok(());
        }
        for (group, table) in self.groups.iter().zip(&request.groups) {
            if let Some(position) = lacks(group, table, to) {
                return Err(cannot_continue(group, to, position, call));
            }
        }
        Ok(())
    }

    /// Takes from the tables what a rollback ends: states after `to`, and with `drop_blocks` blocks from it on.
    pub(super) fn roll_groups_back(
        groups: &[Group],
        request: &mut Request,
        to: usize,
        drop_blocks: bool,
    ) -> Vec<Vec<BlockId>> {
        let rolled = |(table, group): (&mut GroupTable, &Group)| match group.kind {
            GroupKind::State => table.take(|held| held.position > to),
            GroupKind::Window { .. } if drop_blocks => table.take(|held| held.position >= to),
            GroupKind::Window { .. } => Vec::new(),
        };
        request.groups.iter_mut().zip(groups).map(rolled).collect()
    }
}

#[cold]
fn cannot_continue(group: &Group, to: usize, position: usize, call: &'static str) -> Error {
    match group.kind {
        GroupKind::State => invalid!(
            call,
            "to is {to}, but the request has no state of group {:?} there; the one that it computes is of later tokens",
            group.name
        ),
        GroupKind::Window { window } => invalid!(
            call,
            "to is {to}, but the request has no block of group {:?} at position {position}, which is in the window of \
             {window} tokens there",
            group.name
        ),
    }
}

impl Request {
    /// The plan whose ids lead the tables.
    fn begun_with(&self) -> Option<&ReusePlan> {
        let plan = self.source_plan().or(self.in_place.as_ref())?;
        Some(plan)
    }

    /// What the index is offered of each group: own ids of computed tokens.
    pub(super) fn offers(&self, groups: &[Group], verified: usize) -> Vec<Vec<(usize, BlockId)>> {
        let offers = |(table, group): (&GroupTable, &Group)| {
            let tokens = match group.kind {
                GroupKind::Window { .. } => group.block_size,
                GroupKind::State => 0,
            };
            let own = table
                .own()
                .filter(|held| held.position + tokens <= verified);
            own.map(|held| (held.position, held.id)).collect()
        };
        self.groups.iter().zip(groups).map(offers).collect()
    }

    /// The results of the groups, with what was not offered as surplus.
    pub(super) fn with_rest(
        &self,
        offers: &[Vec<(usize, BlockId)>],
        mut done: Vec<GroupInserted>,
    ) -> Vec<GroupInserted> {
        done.resize_with(offers.len(), GroupInserted::default);
        for ((done, table), offers) in done.iter_mut().zip(&self.groups).zip(offers) {
            let rest = table.own().filter(|held| {
                let at = offers.binary_search_by_key(&held.position, |offer| offer.0);
                at.is_err()
            });
            done.surplus.extend(rest.map(|held| held.id));
        }
        done
    }

    /// The request's own ids of each group.
    pub(super) fn own_of_groups(&self) -> Vec<Vec<BlockId>> {
        let own = |table: &GroupTable| table.own().map(|held| held.id).collect();
        self.groups.iter().map(own).collect()
    }
}

/// Offers by number of the group.
pub(super) fn numbered(offers: &[Vec<(usize, BlockId)>]) -> Vec<GroupOffers<'_>> {
    let numbered = offers.iter().enumerate();
    numbered
        .map(|(column, offers)| GroupOffers {
            group: column + 1,
            offers,
        })
        .collect()
}
