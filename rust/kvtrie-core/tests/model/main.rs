//! Compares random calls with a model that has no tree: every result, every counter, every invariant.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::too_many_lines,
    reason = "a test stops at what it does not expect, and a step is read in one piece"
)]

#[cfg(feature = "failpoints")]
mod failures;
mod grades;
mod items;
mod naive;
mod plans;
mod spans;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use grades::Grade;
use items::{codes, pieces, spell};
use kvtrie_core::{
    BlockId, Class, Config, Effort, ExplainOptions, IdRange, Imported, InsertOptions,
    LookupOptions, Match, Namespace, PlanOptions, RadixIndex, Reason, Repair, RestoredPool,
    ReusePlan, ReusePolicy, Salt, Scope, SessionId, Source, Span, TokenSequence,
};
use naive::{From, Lease, Naive};
use plans::{Ask, Planned};
use proptest::prelude::*;
use spans::ranges;

/// The pool that `Config::seeded` names, which still exists.
const POOL: RestoredPool<'_> = RestoredPool::Kept(&[0; 16]);

const SEQUENCES: usize = 4;

/// Number of letters that sequences are spelt with. [`spell`] knows them all.
const LETTERS: u32 = 7;

#[derive(Clone, Debug)]
enum Step {
    /// Truncates a live sequence and extends it by other tokens.
    Edit {
        seq: usize,
        keep: usize,
        tokens: Vec<u32>,
    },
    /// Appends a piece of another sequence, or of itself.
    Splice {
        seq: usize,
        like: usize,
        from: usize,
        count: usize,
    },
    /// Makes a live sequence a copy of the beginning of another.
    Fork {
        seq: usize,
        like: usize,
        keep: usize,
        namespace: usize,
    },
    Lookup {
        seq: usize,
        keep_last: usize,
        touch: bool,
        start: usize,
    },
    Insert {
        seq: usize,
        computed: usize,
        start: usize,
        picks: Vec<u8>,
        source: usize,
        cut: usize,
        hops: u16,
        session: Option<u8>,
    },
    Plan {
        seq: usize,
        keep_last: usize,
        pin: bool,
        session: Option<u8>,
        moved_end: Option<usize>,
        policy: ReusePolicy,
    },
    /// Computes tokens of a plan: those picked that are moved, or simply those picked, maybe in a bad order.
    Recompute {
        plan: usize,
        picks: Vec<bool>,
        is_wild: bool,
    },
    Release {
        plan: usize,
    },
    ReleaseSources {
        plan: usize,
    },
    Evict {
        n: usize,
    },
    Discard {
        ids: Vec<u32>,
    },
    Quarantine {
        ids: Vec<u32>,
    },
    MarkDead {
        seq: usize,
        ranges: Vec<(usize, usize)>,
    },
    RemoveSpans {
        seq: usize,
        ranges: Vec<(usize, usize)>,
        force: bool,
    },
    Drop {
        namespace: usize,
    },
    Reset,
    TakeFreed,
    /// Restores the index from a snapshot that is taken before or after all plans are released.
    Restore {
        while_pinned: bool,
    },
    Tag {
        seq: usize,
        start: usize,
        end: usize,
        kind: usize,
    },
}

fn policy() -> impl Strategy<Value = ReusePolicy> {
    let limits = (
        prop_oneof![4 => Just(None), 1 => (10usize..30).prop_map(Some)],
        prop_oneof![3 => Just(1u16), 1 => 0u16..4],
        prop_oneof![4 => Just(1.0), 1 => 0.0f64..1.0],
    );
    let left_out = prop_oneof![3 => Just((0usize, 0usize)), 1 => (0usize..4, 0usize..4)];
    let kinds = prop_oneof![3 => Just(None), 1 => (0usize..9).prop_map(Some)];
    let share = || prop_oneof![4 => Just(1.0), 1 => 0.0f64..1.0];
    let contexts = (
        prop_oneof![4 => Just(None), 1 => (0u16..4).prop_map(Some)],
        share(),
        share(),
    );
    let repair = prop_oneof![
        3 => Just((0.0, Repair::Fronts)),
        1 => (0.0f64..=1.0, prop_oneof![5 => Just(Repair::Fronts), 1 => Just(Repair::Ngrams), 1 => Just(Repair::Probe)]),
    ];
    (
        prop::bool::weighted(0.7),
        limits,
        left_out,
        kinds,
        contexts,
        scope(),
        repair,
        prop::bool::weighted(0.8),
    )
        .prop_map(
            |(
                approximate,
                (min_run, max_hops, share),
                (first, last),
                kind,
                (max_cuts, max_lost_context, max_new_context),
                (scope, shared_prefix),
                repair,
                partial_blocks,
            )| {
                ReusePolicy {
                    approximate,
                    min_run,
                    max_hops,
                    max_approximate_share: share,
                    recompute_first: first,
                    recompute_last: last,
                    forbid_kinds: kind.iter().map(|kind| format!("kind {kind}")).collect(),
                    max_cuts,
                    max_lost_context,
                    max_new_context,
                    scope,
                    shared_prefix,
                    recompute_share: repair.0,
                    repair: repair.1,
                    partial_blocks,
                }
            },
        )
}

fn scope() -> impl Strategy<Value = (Scope, usize)> {
    let scope = prop_oneof![2 => Just(Scope::Namespace), 3 => Just(Scope::Conversation)];
    (scope, prop_oneof![8 => 1usize..5, 1 => Just(16)])
}

/// A few conversations most often, and sometimes one of more than a block belongs to.
fn session() -> impl Strategy<Value = Option<u8>> {
    prop_oneof![2 => Just(None), 3 => (0u8..3).prop_map(Some), 2 => (0u8..12).prop_map(Some)]
}

fn moved_end() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![2 => Just(None), 1 => (0usize..60).prop_map(Some)]
}

fn session_id(number: u8) -> SessionId {
    SessionId::new(&format!("session {number}")).unwrap()
}

/// One of the first `letters` letters, most often a plain token.
fn letter(letters: u32) -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0..letters.min(3), 1 => 0..letters]
}

fn step(num_blocks: u32, letters: u32) -> impl Strategy<Value = Step> {
    let seq = 0..SEQUENCES;
    let tokens = prop::collection::vec(letter(letters), 0..9);
    prop_oneof![
        6 => (seq.clone(), 0usize..30, tokens).prop_map(|(seq, keep, tokens)| Step::Edit { seq, keep, tokens }),
        2 => (seq.clone(), seq.clone(), 0usize..14, prop_oneof![5 => Just(0usize), 1 => Just(1)])
            .prop_map(|(seq, like, keep, namespace)| Step::Fork { seq, like, keep, namespace }),
        4 => (seq.clone(), 0usize..3, any::<bool>(), 0usize..4)
            .prop_map(|(seq, keep_last, touch, start)| Step::Lookup { seq, keep_last, touch, start }),
        14 => (seq.clone(), 0usize..3, prop_oneof![3 => Just(0usize), 1 => 0usize..4], prop::collection::vec(0u8..200, 24), 0usize..8, 0usize..12, 0u16..3, session())
            .prop_map(|(seq, computed, start, picks, source, cut, hops, session)|
                Step::Insert { seq, computed, start, picks, source, cut, hops, session }),
        8 => (seq.clone(), seq.clone(), 0usize..24, 8usize..24)
            .prop_map(|(seq, like, from, count)| Step::Splice { seq, like, from, count }),
        8 => (seq.clone(), 0usize..3, prop::bool::weighted(0.8), session(), moved_end(), policy())
            .prop_map(|(seq, keep_last, pin, session, moved_end, policy)|
                Step::Plan { seq, keep_last, pin, session, moved_end, policy }),
        4 => (0usize..6, prop::collection::vec(any::<bool>(), 0..40), prop::bool::weighted(0.2))
            .prop_map(|(plan, picks, is_wild)| Step::Recompute { plan, picks, is_wild }),
        3 => (0usize..6).prop_map(|plan| Step::Release { plan }),
        1 => (0usize..6).prop_map(|plan| Step::ReleaseSources { plan }),
        3 => (0usize..4).prop_map(|n| Step::Evict { n }),
        1 => Just(Step::Evict { n: usize::MAX }),
        5 => (seq.clone(), ranges()).prop_map(|(seq, ranges)| Step::MarkDead { seq, ranges }),
        3 => (seq.clone(), ranges(), any::<bool>())
            .prop_map(|(seq, ranges, force)| Step::RemoveSpans { seq, ranges, force }),
        3 => prop::collection::vec(0..num_blocks, 0..4).prop_map(|ids| Step::Discard { ids }),
        1 => prop::collection::vec(0..num_blocks, 1..3).prop_map(|ids| Step::Quarantine { ids }),
        1 => prop_oneof![5 => Just(Step::TakeFreed), 1 => Just(Step::Reset), 3 => (0usize..2).prop_map(|namespace| Step::Drop { namespace })],
        2 => Just(Step::TakeFreed),
        1 => any::<bool>().prop_map(|while_pinned| Step::Restore { while_pinned }),
        2 => (seq, 0usize..14, 0usize..14, 0usize..9)
            .prop_map(|(seq, start, end, kind)| Step::Tag { seq, start, end, kind }),
    ]
}

struct Pair {
    index: RadixIndex,
    model: Naive,
    namespaces: [Arc<Namespace>; 2],
    /// Live sequences as the index knows them, each with the number of its namespace.
    live: Vec<(usize, TokenSequence)>,
    plans: BTreeMap<usize, (ReusePlan, Lease)>,
    next_plan: usize,
    /// Every prefix that had a block at any time.
    ever: BTreeSet<naive::Prefix>,
}

fn ids(raw: &[u32]) -> Vec<BlockId> {
    raw.iter().copied().map(BlockId).collect()
}

fn raw(ids: &[BlockId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

impl Pair {
    /// Looks up at once, or with little effort as often as needed. Then a call takes one block or edge.
    fn look_up(&mut self, seq: usize, options: LookupOptions, out: &mut Vec<BlockId>) -> Match {
        let (index, seq) = (&mut self.index, &mut self.live[seq].1);
        // Where calls fail, a step is one call.
        let pins = !cfg!(feature = "failpoints") && options.touch && options.keep_last > 0;
        if options.start == 0 && pins {
            // A pin that has ended leaves what a lookup leaves.
            let mut ranges = Vec::new();
            let pinned = index.lookup_pinned_within(seq, options, Effort::ANY, &mut ranges);
            let (found, pin) = pinned.unwrap().unwrap();
            out.clear();
            out.extend(ranges.into_iter().flat_map(IdRange::ids));
            index.check().unwrap();
            index.release_pin(&pin).unwrap();
            return found;
        }
        if options.start == 0 {
            return index.lookup(seq, options, out).unwrap();
        }
        let effort = Effort { nodes: 0, bytes: 0 };
        for _ in 0..=2 * seq.len() {
            let mut ranges = Vec::new();
            let found = index.lookup_ranges_within(seq, options, effort, &mut ranges);
            if let Some(found) = found.unwrap() {
                out.clear();
                out.extend(ranges.into_iter().flat_map(IdRange::ids));
                return found;
            }
        }
        // One call removes the marks of all dead blocks, and one reads the ids of many edges.
        assert!(index.stats().dead > 0 || index.known_edges(seq) > 3);
        index.lookup(seq, options, out).unwrap()
    }

    /// Plans as [`Self::look_up`] looks up. A plan that gave up has touched and pinned nothing, as the comparison after
    /// the step shows.
    fn plan(&mut self, seq: usize, policy: &ReusePolicy, options: PlanOptions) -> ReusePlan {
        let (index, seq) = (&mut self.index, &mut self.live[seq].1);
        if options.keep_last == 0 {
            return index.plan(seq, policy, options).unwrap();
        }
        let effort = Effort { nodes: 0, bytes: 0 };
        for _ in 0..=2 * seq.len() {
            if let Some(plan) = index.plan_within(seq, policy, options, effort).unwrap() {
                return plan;
            }
        }
        // Each call follows the blocks after holes again, removes the marks of all dead blocks, and restarts the
        // search.
        assert!(policy.approximate || index.has_broken_paths() || index.stats().dead > 0);
        index.plan(seq, policy, options).unwrap()
    }

    /// Makes a call with little effort. If that is too little, checks that nothing has changed and repeats it with
    /// enough.
    fn at_once<R>(
        &mut self,
        work: impl Fn(&mut RadixIndex, &TokenSequence, Effort) -> kvtrie_core::Result<Option<R>>,
        seq: usize,
    ) -> kvtrie_core::Result<R> {
        let (index, seq) = (&mut self.index, &self.live[seq % self.live.len()].1);
        let (before, unknown) = (index.digest(), index.stats().unknown_discards);
        let kinds = index.kinds().len();
        let effort = Effort {
            nodes: before % 7,
            bytes: 64,
        };
        if let Some(done) = work(index, seq, effort)? {
            return Ok(done);
        }
        assert_eq!((index.digest(), index.kinds().len()), (before, kinds));
        assert_eq!(index.stats().unknown_discards, unknown);
        Ok(work(index, seq, Effort::ANY)?.unwrap())
    }

    fn new(block_size: usize, num_blocks: u32, hash_bits: u32) -> Self {
        let config = Config {
            num_blocks: num_blocks.into(),
            block_size,
            seed: 7,
            hash_bits,
            // Windows are kept at every position, at every third, or not at all.
            moved_runs: num_blocks != 5,
            item_positions: false,
            min_run: if num_blocks == 12 { 8 } else { 10 },
            // No place is dropped.
            max_candidates: 1 << 20,
            pool_id: vec![0; 16],
            groups: Vec::new(),
        };
        let namespace = |salt: &str| {
            Arc::new(
                Namespace::new("m", "bfloat16", "default", None, Salt::Tenant(salt.into()))
                    .unwrap(),
            )
        };
        let namespaces = [namespace("a"), namespace("b")];
        let live = (0..SEQUENCES)
            .map(|_| {
                (
                    0,
                    TokenSequence::new(Arc::clone(&namespaces[0]), Vec::new(), Vec::new()).unwrap(),
                )
            })
            .collect();
        Self {
            index: RadixIndex::new(config).unwrap(),
            model: Naive {
                block_size,
                num_blocks: num_blocks as usize,
                ..Naive::default()
            },
            namespaces,
            live,
            plans: BTreeMap::new(),
            next_plan: 0,
            ever: BTreeSet::new(),
        }
    }

    fn tokens(&self, seq: usize) -> (usize, Vec<u32>) {
        (self.live[seq].0, codes(&self.live[seq].1))
    }

    fn run(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let block_size = self.model.block_size;
        match step {
            Step::Edit { seq, keep, tokens } => {
                let sequence = &mut self.live[*seq].1;
                sequence.truncate((*keep).min(sequence.len())).unwrap();
                let (ids, items) = pieces(&spell(tokens), sequence.len());
                sequence.extend(&ids, items).unwrap();
            }
            Step::Splice {
                seq,
                like,
                from,
                count,
            } => {
                let tokens = codes(&self.live[*like].1);
                let from = (*from).min(tokens.len());
                let piece = &tokens[from..(from + count).min(tokens.len())];
                let sequence = &mut self.live[*seq].1;
                let room = 60 - sequence.len().min(60);
                let (ids, items) = pieces(&piece[..piece.len().min(room)], sequence.len());
                sequence.extend(&ids, items).unwrap();
            }
            Step::Fork {
                seq,
                like,
                keep,
                namespace,
            } => {
                let tokens = codes(&self.live[*like].1);
                let (ids, items) = pieces(&tokens[..(*keep).min(tokens.len())], 0);
                let space = Arc::clone(&self.namespaces[*namespace]);
                self.live[*seq] = (*namespace, TokenSequence::new(space, ids, items).unwrap());
            }
            Step::Lookup {
                seq,
                keep_last,
                touch,
                start,
            } => {
                let (namespace, tokens) = self.tokens(*seq);
                let start = (start * block_size).min(tokens.len() / block_size * block_size);
                let options = LookupOptions {
                    keep_last: *keep_last,
                    touch: *touch,
                    start,
                };
                let mut out = Vec::new();
                let found = self.look_up(*seq, options, &mut out);
                let expected = self.model.lookup(namespace, &tokens, *keep_last, *touch);
                prop_assert_eq!(found.num_tokens, expected.len() * block_size);
                prop_assert_eq!(
                    raw(&out),
                    expected.get(start / block_size..).unwrap_or_default()
                );
            }
            Step::Insert {
                seq,
                computed,
                start,
                picks,
                source,
                cut,
                hops,
                session,
            } => {
                self.insert(
                    *seq, *computed, *start, picks, *source, *cut, *hops, *session,
                )?;
            }
            Step::Plan {
                seq,
                keep_last,
                pin,
                session,
                moved_end,
                policy,
            } => {
                let moved_end = moved_end.map(|end| end.min(self.live[*seq].1.len()));
                let options = PlanOptions {
                    keep_last: *keep_last,
                    pin: *pin,
                    session: session.map(session_id),
                    moved_end,
                };
                self.check_plan(*seq, options, *session, policy)?;
            }
            Step::Recompute {
                plan,
                picks,
                is_wild,
            } => self.recompute(*plan, picks, *is_wild)?,
            Step::Release { plan } => {
                let Some(&key) = self.plans.keys().nth(*plan) else {
                    return Ok(());
                };
                self.index.release(&self.plans[&key].0).unwrap();
                let (plan, _) = self.plans.remove(&key).unwrap();
                prop_assert!(self.index.release(&plan).is_err());
                prop_assert!(self.index.release_sources(&plan).is_err());
                self.model.release(key);
            }
            Step::ReleaseSources { plan } => {
                let Some(&key) = self.plans.keys().nth(*plan) else {
                    return Ok(());
                };
                self.index.release_sources(&self.plans[&key].0).unwrap();
                self.model.release_sources(key);
            }
            Step::Evict { n } => self.evict(*n)?,
            Step::MarkDead { seq, ranges } => self.mark_dead(*seq, ranges)?,
            Step::RemoveSpans { seq, ranges, force } => self.remove_spans(*seq, ranges, *force)?,
            Step::Discard { ids: list } => {
                let expected = self.model.discard(list);
                let freed = self.at_once(
                    |index, _, effort| index.discard_within(&ids(list), effort),
                    0,
                );
                prop_assert_eq!(raw(&freed.unwrap()), expected);
            }
            Step::Quarantine { ids: list } => {
                let expected = self.model.quarantine(list) as u64;
                prop_assert_eq!(self.index.quarantine(&ids(list)).unwrap(), expected);
            }
            Step::Drop { namespace } => {
                let freed = self.index.drop_namespace(&self.namespaces[*namespace]);
                prop_assert_eq!(
                    raw(&freed),
                    self.model.drop_namespaces(|space| space == *namespace)
                );
            }
            Step::Reset => prop_assert_eq!(
                raw(&self.index.reset()),
                self.model.drop_namespaces(|_| true)
            ),
            Step::TakeFreed => {
                prop_assert_eq!(
                    raw(&self.index.take_freed()),
                    std::mem::take(&mut self.model.waiting)
                );
            }
            Step::Restore { while_pinned } => self.restore(*while_pinned)?,
            Step::Tag {
                seq,
                start,
                end,
                kind,
            } => {
                let (namespace, tokens) = self.tokens(*seq);
                let (start, end) = ((*start).min(tokens.len()), (*end).min(tokens.len()));
                let spans = [Span {
                    start,
                    end,
                    kind: format!("kind {kind}"),
                }];
                let tagged = self.at_once(
                    |index, seq, effort| index.tag_within(seq, &spans, effort),
                    *seq,
                );
                prop_assert_eq!(tagged.is_err(), start > end);
                if start < end {
                    let bit = self
                        .index
                        .kinds()
                        .iter()
                        .position(|known| *known == spans[0].kind)
                        .unwrap();
                    self.model.tag(namespace, &tokens, start, end, 1 << bit);
                }
            }
        }
        Ok(())
    }

    /// The kinds that a policy forbids, of those that are known now.
    fn forbidden(&self, policy: &ReusePolicy) -> u64 {
        let kinds = self.index.kinds().iter().enumerate();
        let forbidden = kinds.filter(|(_, kind)| policy.forbid_kinds.contains(kind));
        forbidden.fold(0, |mask, (bit, _)| mask | 1 << bit)
    }

    fn check_plan(
        &mut self,
        seq: usize,
        options: PlanOptions,
        session: Option<u8>,
        policy: &ReusePolicy,
    ) -> Result<(), TestCaseError> {
        let (namespace, tokens) = self.tokens(seq);
        let plan = self.plan(seq, policy, options);
        prop_assert_eq!(plan.moved_end(), options.moved_end);
        let config = self.index.config();
        let ask = Ask {
            namespace,
            tokens: &tokens,
            keep_last: options.keep_last,
            policy,
            forbidden: self.forbidden(policy),
            min_run: policy.min_run.unwrap_or(config.min_run),
            moved_runs: config.moved_runs,
            session,
            moved_end: options.moved_end,
        };
        let lease = self.model.plan(&ask, options.pin);
        prop_assert_eq!(plan.candidates_dropped(), 0);
        prop_assert_eq!(raw(plan.blocks()), lease.blocks.clone());
        prop_assert_eq!(plan.moved_runs(), &lease.moved_runs);
        prop_assert_eq!(plan.awaits().is_some(), lease.awaits);
        let copied = lease.segments.iter().filter(|segment| !segment.in_place);
        let sources: BTreeSet<u32> = copied.flat_map(|segment| segment.blocks.clone()).collect();
        prop_assert_eq!(
            raw(&plan.source_blocks()),
            sources.into_iter().collect::<Vec<_>>()
        );
        self.check_segments(&plan, &lease)?;
        self.check_moves(&plan, &lease)?;
        self.model.leases.insert(self.next_plan, lease.clone());
        self.plans.insert(self.next_plan, (plan, lease));
        self.next_plan += 1;
        Ok(())
    }

    fn recompute(
        &mut self,
        plan: usize,
        picks: &[bool],
        is_wild: bool,
    ) -> Result<(), TestCaseError> {
        let Some(&key) = self.plans.keys().nth(plan) else {
            return Ok(());
        };
        let (plan, lease) = &self.plans[&key];
        let in_place = lease.blocks.len() * self.model.block_size;
        let is_moved = |token: usize| {
            let holds = |segment: &&Planned| (segment.start..segment.end).contains(&token);
            lease.segments.iter().find(holds).is_some_and(|segment| {
                segment.class == Class::Approximate && segment.start >= in_place
            })
        };
        let picked = (0..picks.len()).filter(|&at| picks[at] && (is_wild || is_moved(at)));
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for token in picked {
            match ranges.last_mut() {
                Some(last) if last.1 == token && token % 3 > 0 => last.1 += 1,
                _ => ranges.push((token, token + 1)),
            }
        }
        match picks.len() % 4 {
            0 if is_wild => ranges.reverse(),
            1 => ranges.insert(0, (0, 0)),
            2 => ranges.push((lease.tokens.len(), lease.tokens.len())),
            _ => {}
        }
        let (sources, digest) = (plan.source_blocks(), self.index.digest());
        let made = self.index.recompute(plan, &ranges);
        prop_assert_eq!(self.index.digest(), digest);
        let Ok(made) = made else {
            // A call may fail by chance, too; then the model is as before, and the step is repeated.
            prop_assert!(!self.model.clone().recompute(key, &ranges));
            return Ok(());
        };
        prop_assert!(self.model.recompute(key, &ranges));
        prop_assert!(self.index.is_released(plan));
        prop_assert!(self.index.release(plan).is_err());
        let lease = self.model.leases[&key].clone();
        prop_assert_eq!(made.source_blocks(), sources);
        prop_assert_eq!(made.awaits(), None);
        self.check_segments(&made, &lease)?;
        self.check_moves(&made, &lease)?;
        self.plans.insert(key, (made, lease));
        Ok(())
    }

    fn check_segments(&self, plan: &ReusePlan, lease: &Lease) -> Result<(), TestCaseError> {
        let in_place = lease.blocks.len() * self.model.block_size;
        let found: Vec<Planned> = plan
            .segments()
            .iter()
            .zip(&lease.segments)
            .map(|(segment, expected)| Planned {
                start: segment.start,
                end: segment.end,
                old_start: segment.old_start,
                class: segment.class,
                hops: segment.hops,
                kinds: segment.kinds,
                blocks: expected.blocks.clone(),
                in_place: segment.class != Class::Compute && segment.end <= in_place,
            })
            .collect();
        prop_assert_eq!(found, lease.segments.clone());
        prop_assert_eq!(plan.segments().len(), lease.segments.len());
        Ok(())
    }

    /// Checks that every copied token comes from the slot that the model says, and that no other slot is written.
    fn check_moves(&self, plan: &ReusePlan, lease: &Lease) -> Result<(), TestCaseError> {
        let block_size = self.model.block_size;
        let in_place = plan.blocks();
        let reads: BTreeSet<u32> = lease
            .segments
            .iter()
            .flat_map(|segment| segment.blocks.clone())
            .collect();
        // Blocks that the plan does not read follow the blocks in place.
        let sources = plan.source_blocks();
        let spare = (0..self.model.num_blocks as u32)
            .filter(|id| !reads.contains(id) && !sources.contains(&BlockId(*id)));
        let mut table = in_place.to_vec();
        table.extend(spare.take(plan.num_new_blocks()).map(BlockId));
        if table.len() < lease.tokens.len().div_ceil(block_size) {
            return Ok(());
        }
        let moves = plan.moves(&table, 0, lease.tokens.len()).unwrap();
        let mut found = Vec::new();
        for piece in &moves {
            prop_assert!(piece.num_tokens > 0);
            for at in 0..piece.num_tokens {
                found.push((piece.dest_slot + at, piece.source_slot + at, piece.delta));
            }
            let ends = |slot: u64| slot % block_size as u64 + piece.num_tokens <= block_size as u64;
            prop_assert!(ends(piece.source_slot) && ends(piece.dest_slot));
        }
        let mut expected = Vec::new();
        for segment in lease
            .segments
            .iter()
            .filter(|segment| !segment.in_place && !segment.blocks.is_empty())
        {
            for at in segment.start..segment.end {
                let source = segment.old_start + at - segment.start;
                let block = segment.blocks[source / block_size - segment.old_start / block_size];
                expected.push((
                    u64::from(table[at / block_size].0) * block_size as u64
                        + (at % block_size) as u64,
                    u64::from(block) * block_size as u64 + (source % block_size) as u64,
                    segment.start.cast_signed() as i64 - segment.old_start.cast_signed() as i64,
                ));
            }
        }
        prop_assert_eq!(found, expected);
        Ok(())
    }

    /// Replaces the index by a restored one. The sequences still know the old one.
    fn restore(&mut self, while_pinned: bool) -> Result<(), TestCaseError> {
        let pinned = self.index.snapshot();
        let waiting = self.model.waiting.clone();
        let condemned = self.model.condemned.difference(&self.model.quarantined);
        let condemned: Vec<u32> = condemned.copied().collect();
        while !self.plans.is_empty() {
            self.run(&Step::Release { plan: 0 })?;
        }
        let bytes = if while_pinned {
            self.model.waiting = [waiting, condemned].concat();
            pinned
        } else {
            self.index.snapshot()
        };
        let restored = RadixIndex::restore(&bytes, POOL)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        if !while_pinned {
            prop_assert_eq!(restored.digest(), self.index.digest());
        }
        let (old, new) = (self.index.stats(), restored.stats());
        prop_assert_eq!(
            (
                new.nodes,
                new.windows,
                new.unknown_discards,
                new.bytes_compared
            ),
            (
                old.nodes,
                old.windows,
                old.unknown_discards,
                old.bytes_compared
            )
        );
        self.index = restored;
        self.model.plans_without_scope = 0;
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one step")]
    fn insert(
        &mut self,
        seq: usize,
        computed: usize,
        start: usize,
        picks: &[u8],
        source: usize,
        cut: usize,
        hops: u16,
        session: Option<u8>,
    ) -> Result<(), TestCaseError> {
        let block_size = self.model.block_size;
        let (namespace, tokens) = self.tokens(seq);
        let start = (start * block_size).min(tokens.len() / block_size * block_size);
        let num_computed = tokens.len().saturating_sub(computed);
        // Most ids are the cached one or a fresh one; some are any id.
        let mut fresh =
            (0..u32::try_from(self.model.num_blocks).unwrap()).filter(|&id| self.model.is_held(id));
        let wanted = picks
            .len()
            .min(tokens.len() / block_size - start / block_size + 1);
        let offers: Vec<u32> = (0..wanted)
            .filter_map(|at| {
                let block = start / block_size + at;
                let known = ((block + 1) * block_size <= tokens.len())
                    .then(|| {
                        self.model
                            .entries
                            .get(&self.model.prefix(namespace, &tokens, block))
                    })
                    .flatten();
                match (picks[at], known) {
                    (0, _) => Some(
                        u32::from(picks[(at + 1) % picks.len()])
                            % u32::try_from(self.model.num_blocks).unwrap(),
                    ),
                    (1, _) => self
                        .model
                        .condemned
                        .first()
                        .or_else(|| self.model.quarantined.first())
                        .copied()
                        .or_else(|| fresh.next()),
                    (2..160, Some(entry)) => Some(entry.id),
                    _ => fresh.next(),
                }
            })
            .collect();
        let lease = self.plans.keys().nth(source.saturating_sub(4)).copied();
        let built = ReusePolicy {
            max_hops: if hops > 0 { 2 } else { ReusePolicy::MAX_HOPS },
            recompute_first: usize::from(hops > 1),
            forbid_kinds: (hops > 1).then(|| "kind 1".into()).into_iter().collect(),
            ..ReusePolicy::LAXEST
        };
        let from = match (source, lease) {
            (0 | 1, _) | (_, None) => From::Computed,
            (2 | 3, _) => From::Imported {
                exact_until: cut,
                hops,
                grade: Grade::of(&built, self.forbidden(&built)),
            },
            (_, Some(key)) => From::Lease(key),
        };
        let before = (self.index.digest(), self.index.stats());
        let source = match from {
            From::Computed => Source::Computed,
            From::Imported {
                exact_until, hops, ..
            } => Source::Imported(Imported {
                exact_until,
                hops,
                policy: (hops > 0).then(|| Arc::new(built)),
            }),
            From::Lease(key) => Source::Plan(&self.plans[&key].0),
        };
        let options = InsertOptions {
            start,
            session: session.map(session_id),
            ..InsertOptions::new(num_computed, source)
        };
        let done = self
            .index
            .insert(&mut self.live[seq].1, &ids(&offers), options);
        match self.model.insert(
            namespace,
            &tokens,
            &offers,
            num_computed,
            start,
            from,
            session,
        ) {
            None => {
                prop_assert!(done.is_err(), "{done:?}");
                let mut stats = self.index.stats();
                stats.bytes = before.1.bytes;
                prop_assert_eq!(before, (self.index.digest(), stats));
            }
            Some(expected) => {
                let done = done.map_err(|error| TestCaseError::fail(error.to_string()))?;
                let found = naive::Inserted {
                    blocks: raw(&done.blocks),
                    num_exact: done.num_exact,
                    duplicates: raw(&done.duplicates),
                    surplus: raw(&done.surplus),
                    freed: raw(&done.freed),
                };
                prop_assert_eq!(found, expected);
            }
        }
        Ok(())
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        self.index
            .check()
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        let stats = self.index.stats();
        prop_assert_eq!(stats.indexed as usize, self.model.entries.len());
        let condemned = self.model.condemned.len() + self.model.waiting.len();
        prop_assert_eq!(stats.condemned as usize, condemned);
        prop_assert_eq!(stats.waiting as usize, self.model.waiting.len());
        let marked = raw(&self.index.quarantined().collect::<Vec<_>>());
        prop_assert!(marked.iter().eq(&self.model.quarantined));
        let on_the_way = self.model.condemned.intersection(&self.model.quarantined);
        let there = marked.len() - on_the_way.count();
        prop_assert_eq!(stats.quarantined as usize, there);
        prop_assert_eq!(stats.holes as usize, self.model.holes().len());
        prop_assert_eq!(stats.evictable as usize, self.model.num_evictable());
        prop_assert_eq!(stats.clock, self.model.clock);
        prop_assert_eq!(stats.plans_without_scope, self.model.plans_without_scope);
        let dead = self
            .model
            .entries
            .values()
            .filter(|entry| entry.mark.is_some());
        prop_assert_eq!(stats.dead as usize, dead.count());
        let approximate = self
            .model
            .entries
            .values()
            .filter(|entry| !entry.exact)
            .count();
        prop_assert_eq!(stats.approximate as usize, approximate);
        for (namespace, seq) in &self.live {
            let masks = self.model.tags(*namespace, &codes(seq));
            let mut found = vec![0u64; masks.len()];
            for span in self.index.tags(seq) {
                let bit = self
                    .index
                    .kinds()
                    .iter()
                    .position(|known| *known == span.kind)
                    .unwrap();
                found[span.start..span.end]
                    .iter_mut()
                    .for_each(|mask| *mask |= 1 << bit);
            }
            prop_assert_eq!(found, masks);
        }
        for (key, (plan, lease)) in &self.plans {
            prop_assert_eq!(
                self.index.validate(plan).unwrap(),
                self.model.validate(Some(*key), lease)
            );
        }
        Ok(())
    }

    /// Checks that the reason why a match ends is true, and that nothing is touched.
    fn explain(&mut self, seq: usize) -> Result<(), TestCaseError> {
        self.ever.extend(self.model.entries.keys().cloned());
        let block_size = self.model.block_size;
        let digest = self.index.digest();
        let (namespace, seq) = &self.live[seq];
        let tokens = &codes(seq)[..];
        // A copy is explained, because the live sequences must know only what other calls record.
        let space = Arc::clone(seq.namespace());
        let mut asked =
            TokenSequence::new(space, seq.tokens().to_vec(), seq.items().to_vec()).unwrap();
        let options = ExplainOptions::default();
        let why = self.index.explain(&mut asked, &options).unwrap();
        let exact = self.model.lookup(*namespace, tokens, 0, false).len();
        prop_assert_eq!(why.num_exact, exact * block_size);
        let block = exact * block_size..(exact + 1) * block_size;
        if block.end > tokens.len() {
            prop_assert_eq!(why.reason, Reason::Complete);
            prop_assert_eq!(why.position, block.start);
            return Ok(());
        }
        prop_assert!(block.contains(&why.position));
        let prefix = self.model.prefix(*namespace, tokens, exact);
        let entry = self.model.entries.get(&prefix);
        let was = self.ever.contains(&prefix);
        // Other tokens are known at that place, as a hole or with a block.
        let others = self.model.entries.keys().any(|(space, path)| {
            space == namespace
                && path.len() >= block.end
                && path.starts_with(&tokens[..block.start])
        });
        match why.reason {
            Reason::ApproximateOnly | Reason::LaxerPolicy => {
                let asked = Grade::of(&options.policy, 0);
                let is_strict = |entry: &naive::Entry| entry.grade.is_at_least_as_strict_as(&asked);
                let expected = why.reason == Reason::ApproximateOnly;
                prop_assert_eq!(entry.map(is_strict), Some(expected));
            }
            Reason::Evicted => prop_assert!(entry.is_none() && was),
            Reason::Diverged => {
                prop_assert!(entry.is_none() && others);
                let shared = why.position;
                let other = self.model.entries.keys().any(|(space, path)| {
                    space == namespace
                        && path.len() >= block.end
                        && path.starts_with(&tokens[..shared])
                        && path[shared] != tokens[shared]
                });
                prop_assert!(other);
            }
            Reason::NotCached => prop_assert!(entry.is_none() && !others),
            Reason::Complete | Reason::OtherNamespace => {
                prop_assert!(false, "{:?}", why.reason);
            }
        }
        prop_assert_eq!(self.index.digest(), digest);
        Ok(())
    }

    /// Releases and evicts everything, and checks that nothing is left.
    fn drain(&mut self) -> Result<(), TestCaseError> {
        while !self.plans.is_empty() {
            self.run(&Step::Release { plan: 0 })?;
        }
        self.run(&Step::Evict { n: 1000 })?;
        self.compare()?;
        let stats = self.index.stats();
        prop_assert_eq!(
            (
                stats.indexed,
                stats.condemned,
                stats.waiting,
                stats.pinned,
                stats.nodes
            ),
            (0, 0, 0, 0, 0)
        );
        Ok(())
    }
}

fn run(
    block_size: usize,
    num_blocks: u32,
    hash_bits: u32,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let mut pair = Pair::new(block_size, num_blocks, hash_bits);
    for (at, step) in steps.iter().enumerate() {
        pair.run(step)?;
        pair.explain(at % SEQUENCES)?;
        pair.compare()?;
    }
    pair.drain()
}

/// Steps that fill an index with conversations that repeat pieces of each other, and look up more of these.
fn scene(letters: u32) -> impl Strategy<Value = Vec<Step>> {
    let piece = move |seq: usize| {
        prop_oneof![
            4 => (0usize..3, 0usize..30, 8usize..24)
                .prop_map(move |(like, from, count)| Step::Splice { seq, like, from, count }),
            1 => prop::collection::vec(letter(letters), 1..6)
                .prop_map(move |tokens| Step::Edit { seq, keep: usize::MAX, tokens }),
        ]
    };
    let insert = |seq: usize| {
        (
            prop::collection::vec(190u8..200, 30),
            0usize..10,
            0usize..40,
            0u16..3,
            session(),
        )
            .prop_map(move |(picks, source, cut, hops, session)| Step::Insert {
                seq,
                computed: 0,
                start: 0,
                picks,
                source,
                cut,
                hops,
                session,
            })
    };
    let conversation = move |seq: usize| {
        let first = prop::collection::vec(letter(letters.max(3)), 1..30);
        (
            0usize..10,
            first,
            prop::collection::vec(piece(seq), 0..4),
            insert(seq),
        )
            .prop_map(move |(keep, tokens, pieces, insert)| {
                let mut steps = vec![Step::Edit { seq, keep, tokens }];
                steps.extend(pieces);
                steps.push(insert);
                steps
            })
    };
    let ask = (
        0usize..3,
        prop::bool::weighted(0.8),
        session(),
        moved_end(),
        policy(),
    )
        .prop_map(|(keep_last, pin, session, moved_end, policy)| Step::Plan {
            seq: 3,
            keep_last,
            pin,
            session,
            moved_end,
            policy,
        });
    let prompt = (
        0usize..30,
        prop::collection::vec(piece(3), 1..5),
        ask,
        prop::option::of(insert(3)),
        prop::collection::vec(step(60, letters), 0..5),
    )
        .prop_map(|(keep, pieces, ask, insert, others)| {
            let mut steps = vec![Step::Edit {
                seq: 3,
                keep,
                tokens: Vec::new(),
            }];
            steps.extend(pieces);
            steps.push(ask);
            steps.extend(insert);
            steps.extend(others);
            steps
        });
    let conversations = [conversation(0), conversation(1), conversation(2)];
    (conversations, prop::collection::vec(prompt, 1..6)).prop_map(|(conversations, prompts)| {
        conversations.into_iter().chain(prompts).flatten().collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn index_equals_the_model(
        block_size in 1usize..4,
        num_blocks in prop_oneof![1 => Just(5u32), 2 => Just(12), 5 => Just(40)],
        hash_bits in prop_oneof![Just(0u32), Just(4), Just(8), Just(64)],
        steps in prop::collection::vec(step(12, 2), 1..120),
    ) {
        run(block_size, num_blocks, hash_bits, &steps.into_iter().map(|step| match step {
            Step::Discard { ids } => Step::Discard { ids: ids.into_iter().map(|id| id % num_blocks).collect() },
            Step::Quarantine { ids } => Step::Quarantine { ids: ids.into_iter().map(|id| id % num_blocks).collect() },
            other => other,
        }).collect::<Vec<_>>())?;
    }

    #[test]
    fn plans_equal_the_model(
        block_size in prop_oneof![5 => 1usize..6, 1 => Just(12), 1 => Just(20)],
        hash_bits in prop_oneof![Just(0u32), Just(4), Just(8), Just(64)],
        steps in scene(2),
    ) {
        run(block_size, 60, hash_bits, &steps)?;
    }

    #[test]
    fn items_equal_the_model(
        block_size in 1usize..6,
        hash_bits in prop_oneof![Just(0u32), Just(64)],
        steps in scene(LETTERS),
    ) {
        run(block_size, 60, hash_bits, &steps)?;
    }
}
