//! Makes and releases plans (D7, D13, D19).

use crate::effort::Effort;
use crate::error::{Error, Result, invalid};
use crate::eviction::count_revival;
use crate::grade::Grade;
use crate::ids::NO_NODE;
use crate::index::RadixIndex;
use crate::pins::Lease;
use crate::plan::{
    Cached, CachedPath, Class, Draft, InScope, Origin, PlanOptions, Repaired, ReusePlan, Segment,
};
use crate::policy::ReusePolicy;
use crate::storage::forest::{Position, SourceRun};
use crate::storage::node::Node;
use crate::storage::slab::Handle;
use crate::tokens::TokenSequence;

impl RadixIndex {
    /// Plans the KV of a prompt, and pins what the plan uses.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a field of the policy is beyond its limits, or the
    /// policy asks for runs shorter than the index's [`min_run`](crate::Config::min_run).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns.clone(), vec![1, 2, 3, 4], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// let mut prompt = TokenSequence::new(ns, vec![1, 2, 3, 9, 9], vec![])?;
    /// let plan = index.plan(&mut prompt, &ReusePolicy::EXACT_ONLY, PlanOptions::default())?;
    /// assert_eq!(plan.blocks(), [BlockId(6)]);
    /// assert_eq!((plan.num_tokens(Class::Exact), plan.num_tokens(Class::Compute)), (3, 2));
    /// let moves = plan.moves(&[BlockId(6), BlockId(1), BlockId(2)], 0, 5)?;
    /// assert_eq!((moves[0].source_slot, moves[0].dest_slot, moves[0].num_tokens), (0, 2, 1));
    /// index.release(&plan)?;
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn plan(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
    ) -> Result<ReusePlan> {
        policy.check(self.config.min_run, "RadixIndex::plan")?;
        self.refuse_moved(policy, "RadixIndex::plan")?;
        options.check(seq.len(), "RadixIndex::plan")?;
        self.check_items(seq, "RadixIndex::plan")?;
        crate::failpoints::before("RadixIndex::plan")?;
        Ok(self.plan_checked(seq, policy, options))
    }

    /// Pins the blocks that a sequence has in place: exact ones, or with `approximate` all. It copies nothing, searches
    /// for no moved run, and cannot fail. It pins blocks of group 0 also where other groups cannot continue.
    ///
    /// # Complexity
    /// As [`plan`](Self::plan) without a search.
    pub fn pin_in_place(&mut self, seq: &mut TokenSequence, approximate: bool) -> ReusePlan {
        let policy = ReusePolicy {
            approximate,
            // A longer run than any prompt has, so none is searched for.
            min_run: Some(seq.len().max(self.config.min_run) + 1),
            partial_blocks: false,
            ..ReusePolicy::LAXEST
        };
        let options = PlanOptions {
            keep_last: 0,
            ..PlanOptions::default()
        };
        let draft = match self.exact_prefix(seq, options.keep_last, Effort::ANY) {
            None => None,
            Some(end) if end.node == NO_NODE => Some(Draft::computed(seq.len())),
            // Group 0's blocks, wherever the others end.
            Some(end) => {
                let asked = (&policy, &Grade::LAXEST);
                self.draft_after(end, seq, None, asked, options, Effort::ANY)
            }
        };
        let built = (&ReusePolicy::LAXEST, Grade::LAXEST);
        self.settle_on(seq, built, options, draft.unwrap_or_default())
    }

    fn plan_checked(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
    ) -> ReusePlan {
        let grade = self.grade_of(policy);
        let draft = self.draft(seq, None, (policy, &grade), options, Effort::ANY);
        self.settle_on(seq, (policy, grade), options, draft.unwrap_or_default())
    }

    /// The grade of a policy, with the kinds that are known now.
    pub(crate) fn grade_of(&self, policy: &ReusePolicy) -> Grade {
        Grade::of(policy, self.tagging.kinds().mask(&policy.forbid_kinds))
    }

    /// As [`plan`](Self::plan), but uses only KV on the path of the sequence `path`: what one sequence could give to
    /// another. Ties of runs at the same distance go to the earlier position. Places of a window on other paths are
    /// skipped. Each costs a look, and at most 16 per [candidate](crate::Config::max_candidates) are skipped; further
    /// places count as [dropped](ReusePlan::candidates_dropped).
    ///
    /// # Errors
    /// As [`plan`](Self::plan); and [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the sequences are of
    /// different namespaces.
    ///
    /// # Complexity
    /// As [`plan`](Self::plan), and a lookup of `path`.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// # let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns.clone(), vec![1, 2, 3, 4, 5], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// let other = TokenSequence::new(ns, vec![1, 2, 9, 9], vec![])?;
    /// let plan = index.plan_from(&mut seq, &other, &ReusePolicy::EXACT_ONLY, PlanOptions::default())?;
    /// assert_eq!(plan.blocks(), [BlockId(6)]);
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn plan_from(
        &mut self,
        seq: &mut TokenSequence,
        path: &TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
    ) -> Result<ReusePlan> {
        policy.check(self.config.min_run, "RadixIndex::plan_from")?;
        self.refuse_groups("a plan from one path", "RadixIndex::plan_from")?;
        options.check(seq.len(), "RadixIndex::plan_from")?;
        self.check_items(seq, "RadixIndex::plan_from")?;
        if seq.namespace() != path.namespace() {
            return Err(invalid!(
                "RadixIndex::plan_from",
                "path is of another namespace than the prompt"
            ));
        }
        crate::failpoints::before("RadixIndex::plan_from")?;
        let path = CachedPath::of(&self.forest, path);
        let grade = self.grade_of(policy);
        let draft = self.draft(seq, Some(&path), (policy, &grade), options, Effort::ANY);
        Ok(self.settle_on(seq, (policy, grade), options, draft.unwrap_or_default()))
    }

    /// As [`plan`](Self::plan). Returns `None`, and touches nothing, if following the prompt's own path or searching
    /// for moved runs takes more than `effort`. The next call continues where the match ended; a search starts again.
    /// With groups besides group 0, it also returns `None` if finding where all of them can continue, from the end of
    /// group 0's match on, or pinning what they need takes more than `effort`; that starts again as well. O(effort), plus
    /// one step for each of [`known_edges`](Self::known_edges), and, of a plan with moved runs, one for each copied block
    /// under a window of a further group.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_within(
        &mut self,
        seq: &mut TokenSequence,
        policy: &ReusePolicy,
        options: PlanOptions,
        effort: Effort,
    ) -> Result<Option<ReusePlan>> {
        policy.check(self.config.min_run, "RadixIndex::plan_within")?;
        self.refuse_moved(policy, "RadixIndex::plan_within")?;
        options.check(seq.len(), "RadixIndex::plan_within")?;
        self.check_items(seq, "RadixIndex::plan_within")?;
        crate::failpoints::before("RadixIndex::plan_within")?;
        if effort != Effort::ANY && self.is_broken_path(seq, options, effort) {
            return Ok(None);
        }
        let grade = self.grade_of(policy);
        let draft = self.draft(seq, None, (policy, &grade), options, effort);
        Ok(draft.map(|draft| self.settle_on(seq, (policy, grade), options, draft)))
    }

    /// Whether the prompt's own path takes more than `effort`: holes and approximate blocks are checked one by one, and
    /// dead runs are revived.
    fn is_broken_path(
        &mut self,
        seq: &mut TokenSequence,
        options: PlanOptions,
        effort: Effort,
    ) -> bool {
        if !self.has_broken_paths() && !self.eviction.any_dead() {
            return false;
        }
        let exact = match self.exact_prefix(seq, options.keep_last, effort) {
            Some(exact) if exact.node == NO_NODE => return false,
            Some(exact) => exact,
            None => return true,
        };
        if self.eviction.any_dead()
            && count_revival(&self.forest, exact, &mut effort.steps()).is_none()
        {
            return true;
        }
        let len = seq.len().saturating_sub(options.keep_last);
        let limit = crate::ids::depth(len / self.block_size());
        let (mut steps, mut is_long) = (effort.steps(), false);
        let pass = |node: &Node, from, to| {
            if node.num_holes() > 0 || node.num_approximate() > 0 {
                is_long |= steps.take(u64::from(to - from)).is_none();
            }
        };
        let whole = |_: &Node, _, to| to;
        let walked = self
            .forest
            .walk(seq.view(), exact, limit, effort, whole, pass);
        walked.gave_up || is_long
    }

    /// Refuses a sequence with an item whose positions are not known, if the index needs them: keys after it would be
    /// rotated by another number. O(items).
    pub(super) fn check_items(&self, seq: &TokenSequence, call: &'static str) -> Result<()> {
        if !self.config.item_positions {
            return Ok(());
        }
        match seq.items().iter().find(|item| item.positions().is_none()) {
            Some(item) => Err(invalid!(
                call,
                "the item at [{}, {}) does not say how many positions it takes, and the index has item_positions",
                item.start(),
                item.end()
            )),
            None => Ok(()),
        }
    }

    fn settle_on(
        &mut self,
        seq: &mut TokenSequence,
        (policy, grade): (&ReusePolicy, Grade),
        options: PlanOptions,
        draft: Draft,
    ) -> ReusePlan {
        let time = self.next_time();
        self.work.plans_without_scope += u64::from(draft.is_without_scope);
        if let Some(end) = draft.in_place {
            self.eviction.touch(&mut self.forest, end, time);
        }
        self.eviction
            .touch_sources(&mut self.forest, &draft.sources, time);
        let lease = self.lease(seq, options.pin, draft.in_place, &draft.sources);
        let mut groups = Vec::new();
        if !self.groups.is_empty() {
            groups = self.hold_groups(draft.in_place, lease.index, time);
        }
        let origin = Origin {
            policy: policy.clone(),
            grade,
            index: self.forest.uid(),
            lease,
            block_size: self.block_size(),
            num_blocks: self.config.num_blocks,
            pinned: options.pin,
            number: self.forest.blocks_mut().count_plan(),
            moved_end: options.moved_end,
            edges: self.known_edges(seq),
            repair: Repaired::by(policy, &draft, self.block_size()),
            groups,
        };
        let mut plan = ReusePlan::new(origin, seq.snapshot(), draft);
        if !self.groups.is_empty() {
            self.carry_windows(&mut plan, lease.index);
        }
        crate::failpoints::within("a lease whose plan is lost");
        if let Some(at) = plan.first_approximate() {
            self.pins.lower_first_approximate(lease.index, at);
        }
        plan
    }

    /// The plan, with the tokens in `ranges` to compute as well (P20). It has the pins of `plan` and takes its place:
    /// `plan` is then as a released one. Ranges are positions of the prompt, ascending and disjoint; touching ranges
    /// are one, empty ones are ignored.
    ///
    /// Sources stay pinned, also those that nothing is copied from any more. The first approximate token is the first
    /// that remains, because tokens before it are computed from exact KV.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if a range is reversed, overlaps the one before, ends
    /// beyond the prompt, or has a token that is not an approximate token to be copied; if the plan is of another
    /// index, was the source of an insert, or had its tokens chosen by this call;
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle) if it was released. Nothing changes then.
    ///
    /// # Complexity
    /// O(segments + ranges).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 8, moved_runs: true, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns.clone(), (0..16).collect(), vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(16, Source::Computed))?;
    /// let mut prompt = TokenSequence::new(ns, [99].into_iter().chain(0..16).chain([98]).collect(), vec![])?;
    /// let policy = ReusePolicy { approximate: true, scope: Scope::Namespace, ..ReusePolicy::EXACT_ONLY };
    /// let plan = index.plan(&mut prompt, &policy, PlanOptions::default())?;
    /// assert_eq!(plan.num_tokens(Class::Approximate), 16);
    /// let plan = index.recompute(&plan, &[(3, 5)])?;
    /// let ranges: Vec<_> = plan.segments().iter().map(|segment| (segment.start, segment.end)).collect();
    /// assert_eq!(ranges, [(0, 1), (1, 3), (3, 5), (5, 17), (17, 18)]);
    /// index.release(&plan)?;
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn recompute(&mut self, plan: &ReusePlan, ranges: &[(usize, usize)]) -> Result<ReusePlan> {
        const CALL: &str = "RadixIndex::recompute";
        let lease = plan.lease_index(self, CALL)?;
        if self.pins.leases()[lease].is_used {
            return Err(invalid!(
                CALL,
                "the plan was the source of an insert; its tokens to compute must be chosen before"
            ));
        }
        let mut plan = plan.recomputed(ranges, CALL)?;
        crate::failpoints::before(CALL)?;
        if self.pins.leases()[lease].pins_sources() {
            self.carry_windows(&mut plan, lease);
        } else {
            // Other prompts may have the ids of what it copies by now.
            plan.carry_nothing();
        }
        plan.set_lease(self.pins.renew(lease, plan.first_approximate()));
        Ok(plan)
    }

    /// Releases the plan and its pins. Condemned blocks that no other plan pins wait for
    /// [`take_freed`](Self::take_freed).
    ///
    /// # Errors
    /// [`StaleHandle`](crate::ErrorKind::StaleHandle) if it was released before;
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a plan of another index.
    pub fn release(&mut self, plan: &ReusePlan) -> Result<()> {
        let lease = plan.lease_index(self, "RadixIndex::release")?;
        crate::failpoints::before("RadixIndex::release")?;
        self.end_lease(lease);
        Ok(())
    }

    /// As [`release`](Self::release), but ignores a plan that was released before or is of another index.
    pub fn release_if_live(&mut self, plan: &ReusePlan) {
        if let Ok(lease) = plan.lease_index(self, "RadixIndex::release_if_live") {
            self.end_lease(lease);
        }
    }

    /// Ends the pins of the blocks that the plan copies from. A second call does nothing.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    pub fn release_sources(&mut self, plan: &ReusePlan) -> Result<()> {
        let lease = plan.lease_index(self, "RadixIndex::release_sources")?;
        crate::failpoints::before("RadixIndex::release_sources")?;
        self.pins
            .unpin_sources(&mut self.forest, &mut self.eviction, lease);
        // Pins may have kept the number of holes above its bound.
        self.bound_holes();
        Ok(())
    }

    /// Steps that a release takes, each about as long as a visit of an edge. O(1).
    #[must_use]
    pub fn release_steps(&self, plan: &ReusePlan) -> u64 {
        self.lease_steps(plan.lease(), plan.num_edges())
    }

    /// Steps that the end of a lease takes whose path has so many edges.
    pub(super) fn lease_steps(&self, handle: Handle, edges: u64) -> u64 {
        let lease = self.pins.leases().get(handle);
        let entries = lease.map_or(0, Lease::num_entries) as u64;
        let held = lease.map_or(0, |_| self.groups.num_held(handle.index));
        // A step up to the next edge takes about a quarter of a visit.
        entries + held + edges / 4 + self.bound_steps(0)
    }

    /// Whether the plan was released.
    #[must_use]
    pub fn is_released(&self, plan: &ReusePlan) -> bool {
        plan.lease_index(self, "RadixIndex::is_released").is_err()
    }

    /// For each segment, whether its blocks still hold what the plan says: they are pinned, or have not left since.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a plan of another index.
    pub fn validate(&self, plan: &ReusePlan) -> Result<Vec<bool>> {
        plan.check_index(self, "RadixIndex::validate")?;
        let lease = self.pins.leases().get(plan.lease());
        let lease = lease.filter(|lease| lease.pinned);
        let blocks = self.forest.blocks();
        Ok(plan.validity(lease, |id, plan| blocks.stayed(id.0, plan)))
    }

    #[inline]
    pub(super) fn lease(
        &mut self,
        seq: &TokenSequence,
        pinned: bool,
        in_place: Option<Position>,
        sources: &[SourceRun],
    ) -> Handle {
        let lease = self.pins.open(seq.namespace(), pinned);
        crate::failpoints::within("a lease without pins");
        let (forest, eviction) = (&mut self.forest, &mut self.eviction);
        if let Some(end) = in_place {
            self.pins.pin_path(forest, eviction, lease.index, end);
        }
        self.pins
            .pin_sources(forest, eviction, lease.index, sources);
        lease
    }

    pub(super) fn end_lease(&mut self, lease: u32) {
        self.pins
            .end_lease(&mut self.forest, &mut self.eviction, lease);
        if !self.groups.is_empty() {
            self.groups.unpin(lease, |_, _| true);
        }
        self.bound_holes();
    }

    /// Drafts a plan, from the blocks of `path` alone if one is given, with approximate blocks at least as strict as
    /// the grade. Returns `None` if this takes more than `effort`.
    pub(crate) fn draft(
        &mut self,
        seq: &mut TokenSequence,
        path: Option<&CachedPath>,
        (policy, asked): (&ReusePolicy, &Grade),
        options: PlanOptions,
        effort: Effort,
    ) -> Option<Draft> {
        let end = self.exact_prefix(seq, options.keep_last, effort)?;
        if end.node == NO_NODE {
            return Some(Draft::computed(seq.len()));
        }
        let end = path.map_or(end, |path| path.common(&self.forest, end));
        if self.groups.is_empty() {
            return self.draft_after(end, seq, path, (policy, asked), options, effort);
        }
        // No plan from a path: such a call refuses an index with groups.
        self.draft_with_groups(end, seq, (policy, asked), options, effort)
    }

    /// Drafts a plan of an index with further groups, given the end of group 0's match: one with moved runs (G9), or the
    /// exact one of what is in place in all groups (G2).
    #[inline(never)]
    fn draft_with_groups(
        &mut self,
        end: Position,
        seq: &mut TokenSequence,
        (policy, asked): (&ReusePolicy, &Grade),
        options: PlanOptions,
        effort: Effort,
    ) -> Option<Draft> {
        // What groups need is pinned, at a step each.
        let is_brief = |index: &Self, end: Position| {
            !options.pin || index.groups.num_needed(end.depth) <= effort.nodes
        };
        let mut tried = None;
        if self.may_rebuild(policy) {
            if !is_brief(self, end) {
                return None;
            }
            let policy = Self::without_copies(policy, true);
            let draft = self.draft_after(end, seq, None, (&policy, asked), options, effort)?;
            let is_approximate = |segment: &Segment| segment.class == Class::Approximate;
            if draft.segments.iter().any(is_approximate) {
                return Some(draft);
            }
            tried = Some(draft);
        }
        let end = self.within_groups(end, effort)?;
        if !is_brief(self, end) {
            return None;
        }
        let policy = Self::without_copies(policy, false);
        let exact = self.draft_after(end, seq, None, (&policy, asked), options, effort)?;
        Some(match tried {
            Some(tried) => exact.instead_of(&tried),
            None => exact,
        })
    }

    /// Drafts a plan whose exact blocks in place end at `end`.
    #[inline]
    fn draft_after(
        &mut self,
        end: Position,
        seq: &mut TokenSequence,
        path: Option<&CachedPath>,
        (policy, asked): (&ReusePolicy, &Grade),
        options: PlanOptions,
        effort: Effort,
    ) -> Option<Draft> {
        if policy.approximate {
            self.moved.apply(&mut self.forest);
        }
        let ids = self.forest.remembered_ids(seq, end);
        let len = seq.len().saturating_sub(options.keep_last);
        let scope = if policy.approximate && path.is_none() {
            InScope::of_policy(&self.forest, seq, options.session, policy, self.config.seed)
        } else {
            None
        };
        let cached = Cached {
            forest: &self.forest,
            windows: self.moved.windows(),
            tagging: &self.tagging,
            config: &self.config,
            path,
            scope: scope.as_deref(),
            session: options.session,
            moved_end: options.moved_end.unwrap_or(usize::MAX),
        };
        let draft = Draft::new(&cached, seq, (policy, asked), len, (end, &ids), effort);
        self.work.search_looks += draft.as_ref().map_or(0, |draft| draft.looks);
        draft
    }
}

impl ReusePlan {
    /// Whether this index made the plan.
    #[must_use]
    pub fn is_of(&self, index: &RadixIndex) -> bool {
        self.index() == index.forest.uid()
    }

    pub(crate) fn lease_index(&self, index: &RadixIndex, call: &'static str) -> Result<u32> {
        self.check_index(index, call)?;
        match index.pins.leases().get(self.lease()) {
            Some(_) => Ok(self.lease().index),
            None => Err(Error::stale(call, "the plan was released already")),
        }
    }

    fn check_index(&self, index: &RadixIndex, call: &'static str) -> Result<()> {
        if self.is_of(index) {
            return Ok(());
        }
        Err(invalid!(call, "the plan belongs to another index"))
    }
}
