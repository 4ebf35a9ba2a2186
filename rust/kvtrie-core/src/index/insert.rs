//! Adds computed blocks (D1, D2, D3, D12, D14, P19).

use std::sync::Arc;

use crate::effort::{Effort, Work};
use crate::error::{Error, Result, invalid};
use crate::grade::Grade;
use crate::ids::{BlockId, Depth, NodeIndex, depth};
use crate::index::RadixIndex;
use crate::index::groups::{GroupInserted, GroupOptions};
use crate::pins::Leaving;
use crate::plan::ReusePlan;
use crate::policy::ReusePolicy;
use crate::session::SessionId;
use crate::span::Span;
use crate::storage::blocks::BlockState;
use crate::storage::forest::{Forest, NewBlocks, Position, Walked};
use crate::storage::node::Node;
use crate::storage::payload::{Label, Payload};
use crate::tokens::TokenSequence;

/// Says that KV came from elsewhere, and how exact it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// Only blocks that end at or before this position are exact.
    pub exact_until: usize,
    /// Hops of the approximate rest.
    pub hops: u16,
    /// The policy that the approximate rest was built under. `None` if it is not known: then only plans whose policy
    /// bounds nothing use it ([`ReusePolicy::LAXEST`]).
    pub policy: Option<Arc<ReusePolicy>>,
}

impl Imported {
    /// KV whose approximate rest was built under a policy that is not known.
    #[must_use]
    pub const fn new(exact_until: usize, hops: u16) -> Self {
        Self {
            exact_until,
            hops,
            policy: None,
        }
    }

    /// Checks the fields.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) of this call.
    pub fn check(&self, call: &'static str) -> Result<()> {
        if self.hops > ReusePolicy::MAX_HOPS {
            return Err(invalid!(
                call,
                "the hops of source are {}; they must be in [0, {}]",
                self.hops,
                ReusePolicy::MAX_HOPS
            ));
        }
        let Some(policy) = &self.policy else {
            return Ok(());
        };
        if !policy.approximate {
            return Err(invalid!(
                call,
                "the policy of source has approximate = false; nothing approximate is built under it"
            ));
        }
        policy.check(0, call)
    }
}

/// The source of offered KV (D14).
#[derive(Clone, Debug)]
pub enum Source<'a> {
    /// The KV was built by this plan. All blocks from its first approximate token on are approximate.
    Plan(&'a ReusePlan),
    /// The engine computed all of it.
    Computed,
    /// The KV was imported from elsewhere.
    Imported(Imported),
}

/// Options of an insert.
#[derive(Clone, Debug)]
pub struct InsertOptions<'a> {
    /// Computed tokens; only blocks that end at or before this position are taken.
    pub num_computed: usize,
    /// Position of the first id, a multiple of the block size.
    pub start: usize,
    /// The source of the KV.
    pub source: Source<'a>,
    /// Tags to add.
    pub spans: &'a [Span],
    /// The conversation that the sequence belongs to (rule P18).
    pub session: Option<SessionId>,
}

impl<'a> InsertOptions<'a> {
    /// Inserts the first `num_computed` tokens, from position 0, without tags.
    #[must_use]
    pub fn new(num_computed: usize, source: Source<'a>) -> Self {
        Self {
            num_computed,
            start: 0,
            source,
            spans: &[],
            session: None,
        }
    }
}

/// The result of an insert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inserted {
    /// Ids that back the sequence from `start` on.
    pub blocks: Vec<BlockId>,
    /// Position up to which these blocks are exact.
    pub num_exact: usize,
    /// Held ids that were not taken: other blocks have their places.
    pub duplicates: Vec<BlockId>,
    /// Held ids after the last block that was taken.
    pub surplus: Vec<BlockId>,
    /// Ids that were replaced and are not pinned; they now belong to the caller.
    pub freed: Vec<BlockId>,
}

struct Path {
    at: Position,
    /// Depth up to which all blocks are present, and depth up to which they are exact as well.
    present: Depth,
    exact: Depth,
}

impl Path {
    /// Finds the path of `seq` through holes and approximate blocks, at most `limit` blocks deep.
    fn of(forest: &Forest, seq: &TokenSequence, limit: Depth) -> (Option<Self>, Work) {
        let (from, exact_before) = match forest.at_cursor(seq) {
            Some((at, exact)) if at.depth <= limit => (at, exact),
            Some((at, exact)) => {
                let at = forest.normal(Position::at(at.node, limit));
                let path = Self {
                    at,
                    present: limit,
                    exact: exact.min(limit),
                };
                return (Some(path), Work::default());
            }
            None => match forest.root(seq.namespace()) {
                Some(root) => (root, 0),
                None => return (None, Work::default()),
            },
        };
        let block_size = forest.block_size();
        let (mut present, mut exact) = (from.depth, exact_before);
        let (mut whole, mut all_exact) = (true, exact_before == from.depth);
        let pass = |node: &Node, start, end| {
            if all_exact {
                exact = node.exact_until(start, end, block_size);
                all_exact = exact == end;
            }
            if whole {
                present = node.present_until(start, end, block_size);
                whole = present == end;
            }
        };
        let whole_edges = |_: &Node, _, to| to;
        let Walked { at, work, .. } =
            forest.walk(seq.view(), from, limit, Effort::ANY, whole_edges, pass);
        let path = Self {
            at,
            present,
            exact: exact.min(present),
        };
        (Some(path), work)
    }
}

impl RadixIndex {
    /// Adds the blocks that end at or before `num_computed`, and returns the blocks that back the sequence.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument): an id outside the pool, too few ids, `num_computed` or
    ///   `start` beyond the sequence, `start` inside a block, a bad span, a plan of another index, or a sequence that
    ///   does not start with the plan's tokens.
    /// - [`BlockInUse`](crate::ErrorKind::BlockInUse): an id backs another place, or occurs twice.
    /// - [`StaleHandle`](crate::ErrorKind::StaleHandle): the plan was released.
    ///
    /// # Complexity
    /// As [listed](crate#calls-and-costs); where an edge is split, also expected O(log siblings) comparisons of one
    /// block.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// # let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5], vec![])?;
    /// let done = index.insert(&mut seq, &[BlockId(6), BlockId(0), BlockId(3)], InsertOptions::new(5, Source::Computed))?;
    /// assert_eq!((done.blocks, done.surplus), (vec![BlockId(6), BlockId(0)], vec![BlockId(3)]));
    /// let again = index.insert(&mut seq, &[BlockId(4)], InsertOptions::new(2, Source::Computed))?;
    /// assert_eq!((again.blocks, again.duplicates), (vec![BlockId(6)], vec![BlockId(4)]));
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    pub fn insert(
        &mut self,
        seq: &mut TokenSequence,
        ids: &[BlockId],
        options: InsertOptions<'_>,
    ) -> Result<Inserted> {
        let (done, _) = self.insert_groups(seq, ids, options, GroupOptions::default())?;
        Ok(done)
    }

    /// As [`insert`](Self::insert), with ids of further groups for the same tokens (rule G3). The results of the groups
    /// have the order of their offers.
    ///
    /// # Errors
    /// As [`insert`](Self::insert); and [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a group that the
    /// index does not have or that is given twice, a position or a stop that is beyond the sequence, not a multiple of
    /// the block size or not after the one before, and an id outside the group's pool;
    /// [`BlockInUse`](crate::ErrorKind::BlockInUse) for an id that is at another place of its group, or twice in a call.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// # let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let groups = vec![Group::window("swa", 3, 8, 2), Group::state("gdn", 4, 2)];
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, groups, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, (0..9).collect(), vec![])?;
    /// let ids = [BlockId(6), BlockId(0), BlockId(3), BlockId(1)];
    /// let offers = [
    ///     GroupOffers { group: 1, offers: &[(2, BlockId(5)), (4, BlockId(7))] },
    ///     GroupOffers { group: 2, offers: &[(6, BlockId(2))] },
    /// ];
    /// let options = InsertOptions::new(8, Source::Computed);
    /// let groups = GroupOptions { offers: &offers, stops: &[] };
    /// let (_, groups) = index.insert_groups(&mut seq, &ids, options, groups)?;
    /// assert_eq!(groups[1].blocks, [Some(BlockId(2))]);
    /// let plan = index.plan(&mut seq, &ReusePolicy::EXACT_ONLY, PlanOptions::default())?;
    /// assert_eq!(plan.blocks(), &ids[..3]);
    /// let parts: Vec<_> = plan.groups().iter().map(|part| (part.start, &part.blocks[..])).collect();
    /// assert_eq!(parts, [(4, &[BlockId(7)][..]), (6, &[BlockId(2)])]);
    /// index.release(&plan)?;
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    #[expect(
        clippy::needless_pass_by_value,
        reason = "options are made for one call"
    )]
    pub fn insert_groups(
        &mut self,
        seq: &mut TokenSequence,
        ids: &[BlockId],
        options: InsertOptions<'_>,
        groups: GroupOptions<'_>,
    ) -> Result<(Inserted, Vec<GroupInserted>)> {
        let block_size = self.block_size();
        let first = options.start / block_size;
        let need = (options.num_computed / block_size).saturating_sub(first);
        let lease = self.check_insert(seq, ids, &options, need)?;
        self.check_items(seq, "RadixIndex::insert")?;
        self.check_groups(seq, groups)?;
        crate::failpoints::before("RadixIndex::insert")?;
        let (path, work) = Path::of(
            &self.forest,
            seq,
            depth((first + ids.len()).min(seq.len() / block_size)),
        );
        if !groups.offers.is_empty() {
            self.check_group_places(seq, path.as_ref().map(|path| path.at), groups.offers)?;
        }
        let mut existing = Vec::new();
        if let Some(path) = &path {
            self.forest.path_ids(path.at, depth(first), &mut existing);
        }
        // Most tables begin with ids that are at their places already. These need no check.
        let same = ids[..need.min(existing.len())]
            .iter()
            .zip(&existing)
            .take_while(|(offer, known)| offer == known)
            .count();
        let rest = existing.get(same..).unwrap_or_default();
        let known_until = same + self.check_offers(&ids[same..], rest, first + same)?;

        self.work.add_walk(work);
        let edges_before = self.forest.num_edges();
        let time = self.next_time();
        if let Some(lease) = lease {
            self.pins.note_use(lease);
        }
        let whole_before = path
            .as_ref()
            .is_some_and(|path| path.present as usize >= first)
            || first == 0;
        let over = lease.is_some_and(|lease| self.pins.leases()[lease].over);
        let mut done = Inserted::default();
        let mut taken = 0;
        let exact_before = path.as_ref().map_or(0, |path| path.exact);
        let full = depth(options.num_computed / block_size);
        let mut reached = None;
        let exact_until = self.groups_exact_until(&options, lease);
        if !over && whole_before {
            let (end, exact) = if need == 0 {
                let end = depth(first).min(full);
                (
                    path.map(|path| self.forest.normal(Position::at(path.at.node, end))),
                    exact_before.min(end),
                )
            } else {
                let labels = Labels::of(self, &options, lease);
                let offers = Offers {
                    ids: &ids[..need],
                    on_path: existing.len(),
                    same,
                    known_until,
                };
                let reached = self.take(seq, &offers, path, first, &labels, &mut done);
                taken = done.blocks.len();
                // Ids that were taken are no longer marked as offered; duplicates still are.
                self.forest
                    .blocks_mut()
                    .clear_offers(&ids[same..taken.min(existing.len()).max(same)]);
                reached
            };
            done.num_exact = exact as usize * block_size;
            reached = end.map(|end| (end, exact));
            crate::failpoints::within("insert: blocks were taken");
            if let Some(end) = end {
                self.eviction.touch(&mut self.forest, end, time);
                if let Some(session) = options.session {
                    self.forest.add_session(end, depth(first), session);
                }
                if end.depth as usize >= first {
                    let new = self.forest.num_edges() - edges_before;
                    let walked = work.nodes_visited.saturating_sub(1);
                    self.forest.set_cursor(seq, end, exact, walked + new);
                }
                if let Some(lease) = lease {
                    self.pin_inserted(lease, end, exact);
                }
            }
        }
        let rest = &ids[taken..];
        self.forest.blocks_mut().clear_offers(rest);
        done.surplus = rest
            .iter()
            .copied()
            .filter(|id| self.forest.blocks().state(id.0) == BlockState::Unknown)
            .collect();
        crate::failpoints::within("insert: before the tags");
        let _ = self
            .tagging
            .add(&mut self.forest, seq, options.spans, Effort::ANY);
        let mut taken = Vec::new();
        if !self.groups.is_empty() {
            let limit = depth(exact_until.min(options.num_computed) / block_size);
            taken = self.take_groups(reached, limit, lease, time, groups);
        }
        Ok((done, taken))
    }

    fn check_insert(
        &self,
        seq: &TokenSequence,
        ids: &[BlockId],
        options: &InsertOptions<'_>,
        need: usize,
    ) -> Result<Option<u32>> {
        const CALL: &str = "RadixIndex::insert";
        self.check_start(options.start, seq.len(), CALL)?;
        if options.num_computed > seq.len() {
            return Err(invalid!(
                CALL,
                "num_computed is {}; it must be in [0, {}], the tokens of the sequence",
                options.num_computed,
                seq.len()
            ));
        }
        if ids.len() < need {
            return Err(invalid!(
                CALL,
                "ids has {} ids; it must have {need}, one for each whole computed block from position {} to {}",
                ids.len(),
                options.start,
                options.num_computed
            ));
        }
        self.check_ids(ids, CALL)?;
        self.tagging.kinds().check(options.spans, seq.len(), CALL)?;
        if let Source::Imported(imported) = &options.source {
            imported.check(CALL)?;
        }
        let Source::Plan(plan) = options.source else {
            return Ok(None);
        };
        let lease = plan.lease_index(self, CALL)?;
        if let Some(repair) = plan.awaits() {
            return Err(invalid!(
                CALL,
                "source is a plan whose policy has repair {:?}; recompute must be called first, with the tokens that the \
                 engine chose",
                repair.name()
            ));
        }
        if !seq.starts_with(plan.snapshot()) {
            return Err(invalid!(
                CALL,
                "seq of {} tokens does not start with the {} tokens of source, a plan, in its namespace",
                seq.len(),
                plan.snapshot().tokens.len()
            ));
        }
        Ok(Some(lease))
    }

    /// Refuses an id that occurs twice or backs a place other than its own on the path, which `existing` lists (D3).
    /// Marks unknown ids as offered; returns the number of ids up to the last known one.
    fn check_offers(
        &mut self,
        ids: &[BlockId],
        existing: &[BlockId],
        first: usize,
    ) -> Result<usize> {
        const CALL: &str = "RadixIndex::insert";
        let (mut known_until, mut at) = (0, 0);
        let (mut seen, mut refused) = (Vec::new(), None);
        loop {
            at += self.forest.blocks_mut().offer(&ids[at..]);
            let Some(&id) = ids.get(at) else {
                break;
            };
            let (place, is_first) = self.forest.blocks_mut().offer_known(id.0);
            seen.push(id.0);
            let why = match place {
                _ if !is_first => Some("is offered twice".to_owned()),
                BlockState::Indexed { depth, .. } if existing.get(at) != Some(&id) => {
                    Some(format!(
                        "is offered for the tokens from {} on, but backs others at {}",
                        (first + at) * self.block_size(),
                        depth as usize * self.block_size()
                    ))
                }
                _ => None,
            };
            at += 1;
            if let Some(why) = why {
                refused = Some(Error::block_in_use(
                    CALL,
                    format!("ids has {id}, which {why}"),
                ));
                break;
            }
            known_until = at;
        }
        self.forest.blocks_mut().clear_seen(seen.into_iter());
        match refused {
            Some(error) => {
                self.forest.blocks_mut().clear_offers(&ids[..at]);
                Err(error)
            }
            None => Ok(known_until),
        }
    }

    /// Inserts the offered ids from depth `first` on; all places before it are present. Returns the end of the present
    /// blocks and the end of the exact ones.
    fn take(
        &mut self,
        seq: &TokenSequence,
        offers: &Offers<'_>,
        path: Option<Path>,
        first: usize,
        labels: &Labels<'_>,
        done: &mut Inserted,
    ) -> (Option<Position>, Depth) {
        let ids = offers.ids;
        let from = depth(first + offers.same);
        done.blocks.extend_from_slice(&ids[..offers.same]);
        let mut exact = path.as_ref().map_or(0, |path| path.exact).min(from);
        let mut before = None;
        let settled = ids.len().min(offers.on_path);
        if let Some(path) = &path {
            if exact < from {
                before = Some(if labels.depends_on_path {
                    let at = self.forest.normal(Position::at(path.at.node, from));
                    self.forest.grade_of_path(at, exact)
                } else {
                    Grade::STRICTEST
                });
            }
            let until = Position::at(path.at.node, depth(first + settled));
            let edges = self.forest.edges_to(self.forest.normal(until), from);
            if self.forest.num_approximate() > 0 && self.pins.leases().len() > 0 {
                let leaving = self.replaced(&edges, &ids[offers.same..], labels, before);
                self.cut_out_all(&leaving);
            }
            'path: for (node, from, to) in edges {
                for place in from..to {
                    let offer = ids[done.blocks.len()];
                    let built = labels.built(place, before);
                    let Some((id, now)) = self.settle_offer(node, place, offer, built, done) else {
                        break 'path;
                    };
                    before = Built::meet(before, now);
                    exact += u32::from(before.is_none());
                    done.blocks.push(id);
                }
            }
        }
        let reached = depth(first + done.blocks.len());
        let at = path.map(|path| self.forest.normal(Position::at(path.at.node, reached)));
        if done.blocks.len() < settled {
            return (at, exact);
        }
        let new = &ids[settled..];
        let known = offers.known_until.saturating_sub(settled).min(new.len());
        let known = new[..known]
            .iter()
            .position(|id| self.forest.blocks().state(id.0) != BlockState::Unknown);
        let new = &new[..known.unwrap_or(new.len())];
        if new.is_empty() {
            return (at, exact);
        }
        let end = reached + depth(new.len());
        let mut at = at.unwrap_or_else(|| self.forest.root_or_new(seq.namespace()));
        let grade = labels.grade(before);
        let is_exact = before.is_none() && labels.exact_until >= end as usize * self.block_size();
        let labels = if is_exact {
            Vec::new()
        } else {
            let label = self.forest.approximate_label(at.node, 0, grade);
            labels.of_new(reached, end, before, label.grade())
        };
        if before.is_none() {
            let all_exact = labels.iter().position(|label| !label.is_exact());
            exact += depth(all_exact.unwrap_or(new.len()));
        }
        done.blocks.extend_from_slice(new);

        if reached < self.forest.node(at.node).end() {
            at.node = self.split(at.node, reached);
        }
        crate::failpoints::within("insert: the path is ready");
        let edge = self.forest.node(at.node);
        let grows = edge.blocks.can_grow(new.len(), self.block_size());
        let new = NewBlocks {
            ids: new,
            labels: &labels,
        };
        if edge.is_root() || edge.has_children() || !grows {
            at.node = self.attach(at.node, seq.view(), reached, new);
        } else {
            self.append(at.node, seq.view(), new);
        }
        at.depth = end;
        (Some(at), exact)
    }

    fn replaced(
        &self,
        edges: &[(NodeIndex, Depth, Depth)],
        ids: &[BlockId],
        labels: &Labels<'_>,
        mut before: Option<Grade>,
    ) -> Leaving {
        let mut leaving = Leaving::default();
        let places = edges
            .iter()
            .flat_map(|&(node, from, to)| (from..to).map(move |place| (node, place)));
        for ((node, place), &offer) in places.zip(ids) {
            let built = labels.built(place, before);
            let outcome = Outcome::of(&self.forest, node, place, offer, built);
            if outcome == Outcome::Replaces && self.forest.may_be_pinned(node, place) {
                leaving.add(self.forest.node(node).tree, node, place, place + 1);
            }
            before = match outcome {
                Outcome::Stays | Outcome::Duplicate => {
                    Built::meet(before, Built::at(&self.forest, node, place))
                }
                Outcome::Fills | Outcome::Replaces => Built::meet(before, built),
                Outcome::Refused => break,
            };
        }
        leaving
    }

    /// Handles one offer and returns the block that is at the place afterwards. A block that it replaces has been cut
    /// out of its pins before.
    fn settle_offer(
        &mut self,
        node: u32,
        place: Depth,
        offer: BlockId,
        built: Option<Built>,
        done: &mut Inserted,
    ) -> Option<(BlockId, Option<Built>)> {
        let outcome = Outcome::of(&self.forest, node, place, offer, built);
        if outcome == Outcome::Refused {
            return None;
        }
        if matches!(outcome, Outcome::Stays | Outcome::Duplicate) {
            if outcome == Outcome::Duplicate {
                done.duplicates.push(offer);
            }
            let id = self.forest.node(node).id(place, self.block_size());
            return Some((BlockId(id), Built::at(&self.forest, node, place)));
        }
        if outcome == Outcome::Fills {
            self.fill(node, place, offer, built);
            return Some((offer, built));
        }
        let tags = self.forest.tags_of_block(node, place);
        let sessions = self.forest.sessions_of_block(node, place);
        let (old, condemned) = self.remove_entry(node, place);
        crate::failpoints::within("insert: a block was replaced");
        if !condemned {
            done.freed.push(BlockId(old));
        }
        self.fill(node, place, offer, built);
        self.forest.restore_tags(node, tags);
        self.forest.restore_sessions(node, place, &sessions);
        self.forest.renew_version(node);
        Some((offer, built))
    }

    fn fill(&mut self, node: u32, place: Depth, id: BlockId, built: Option<Built>) {
        let label = built.map_or(Label::EXACT, |built| {
            self.forest.approximate_label(node, built.hops, built.grade)
        });
        let new = Payload { id: id.0, label };
        self.forest.fill(node, place, new);
        self.moved.add(&mut self.forest, node, place, new.id);
    }

    fn pin_inserted(&mut self, lease: u32, end: Position, exact: Depth) {
        if exact < end.depth {
            let at = exact as usize * self.block_size();
            self.pins.lower_first_approximate(lease, at);
        }
        self.pins
            .pin_path(&mut self.forest, &mut self.eviction, lease, end);
    }
}

/// How approximate KV was built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Built {
    hops: u16,
    grade: Grade,
}

impl Built {
    /// How the block at a place was built; `None` if it is exact.
    fn at(forest: &Forest, node: NodeIndex, place: Depth) -> Option<Self> {
        let label = forest.node(node).payload(place, forest.block_size()).label;
        (!label.is_exact()).then(|| Self {
            hops: label.hops(),
            grade: forest.grade(node, label),
        })
    }

    /// The meet of the grades of the approximate blocks before a place, with one more block; `None` if all are exact.
    fn meet(before: Option<Grade>, next: Option<Self>) -> Option<Grade> {
        let Some(next) = next else {
            return before;
        };
        Some(before.map_or(next.grade, |before| before.meet(&next.grade)))
    }

    /// Whether KV built like `now` may stand in for KV built like `offered` (D2).
    fn is_no_worse(now: Option<Self>, offered: Option<Self>) -> bool {
        match (now, offered) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(now), Some(offered)) => {
                now.hops <= offered.hops && now.grade.is_at_least_as_strict_as(&offered.grade)
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// The entry stays, and the offer is not returned because the caller does not hold it.
    Stays,
    /// The entry stays, and the offer is returned as a duplicate.
    Duplicate,
    Fills,
    Replaces,
    /// The offer cannot be taken, and there is no entry that is as good.
    Refused,
}

impl Outcome {
    fn of(
        forest: &Forest,
        node: NodeIndex,
        place: Depth,
        offer: BlockId,
        built: Option<Built>,
    ) -> Self {
        let now = forest.node(node).payload(place, forest.block_size());
        if now.id == offer.0 {
            return Self::Stays;
        }
        let is_held = forest.blocks().state(offer.0) == BlockState::Unknown;
        let may_stay =
            now.is_present() && Built::is_no_worse(Built::at(forest, node, place), built);
        match (may_stay, is_held) {
            (true, true) => Self::Duplicate,
            (true, false) => Self::Stays,
            (false, true) if now.is_present() => Self::Replaces,
            (false, true) => Self::Fills,
            (false, false) => Self::Refused,
        }
    }
}

struct Offers<'a> {
    ids: &'a [BlockId],
    /// Number of ids with a place on the path.
    on_path: usize,
    /// Number of ids at the start that are at their places already.
    same: usize,
    /// From this index on, all ids are unknown.
    known_until: usize,
}

struct Labels<'a> {
    block_size: usize,
    /// A block that ends after this position is approximate, whatever is before it.
    exact_until: usize,
    source: &'a Source<'a>,
    /// The grade of what the source built.
    grade: Grade,
    /// Whether approximate blocks before a new one count for its grade. A plan knows what it built on.
    depends_on_path: bool,
}

impl<'a> Labels<'a> {
    fn of(index: &RadixIndex, options: &'a InsertOptions<'a>, lease: Option<u32>) -> Self {
        let (exact_until, grade) = match &options.source {
            Source::Computed => (usize::MAX, Grade::STRICTEST),
            Source::Imported(imported) => {
                let policy = imported.policy.as_deref();
                let grade = policy.map_or(Grade::LAXEST, |policy| index.grade_of(policy));
                (imported.exact_until, grade)
            }
            Source::Plan(plan) => {
                let first = lease.and_then(|lease| index.pins.leases()[lease].first_approximate);
                (first.unwrap_or(usize::MAX), plan.grade())
            }
        };
        Self {
            block_size: index.block_size(),
            exact_until,
            source: &options.source,
            grade,
            depends_on_path: match &options.source {
                Source::Plan(plan) => !plan.policy().approximate,
                Source::Computed | Source::Imported(_) => true,
            },
        }
    }

    fn hops(&self, place: Depth) -> u16 {
        match self.source {
            Source::Computed => 0,
            Source::Imported(imported) => imported.hops,
            Source::Plan(plan) => plan.hops_of_block(place as usize),
        }
    }

    /// The grade of a new approximate block, given that of the approximate blocks before it.
    fn grade(&self, before: Option<Grade>) -> Grade {
        let before = before.filter(|_| self.depends_on_path);
        before.map_or(self.grade, |before| self.grade.meet(&before))
    }

    /// How a new block was built, given the grade of the approximate blocks before it; `None` if it is exact.
    fn built(&self, place: Depth, before: Option<Grade>) -> Option<Built> {
        let is_built = (place as usize + 1) * self.block_size > self.exact_until;
        (is_built || before.is_some()).then(|| Built {
            hops: if is_built { self.hops(place) } else { 0 },
            grade: self.grade(before),
        })
    }

    /// The labels of new blocks after which nothing is cached. They all have one grade, whose number is given.
    fn of_new(&self, from: Depth, to: Depth, before: Option<Grade>, grade: u8) -> Vec<Label> {
        let mut before = before;
        let next = |place| {
            let built = self.built(place, before);
            before = Built::meet(before, built);
            built.map_or(Label::EXACT, |built| Label::approximate(built.hops, grade))
        };
        (from..to).map(next).collect()
    }
}
