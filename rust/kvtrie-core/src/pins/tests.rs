use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::ids::{BlockId, NO_NODE};
use crate::index::{InsertOptions, RadixIndex};
use crate::storage::blocks::BlockState;
use crate::{Config, Namespace, PlanOptions, ReusePlan, ReusePolicy, Salt, Source, TokenSequence};

struct Live {
    plan: ReusePlan,
    paths: BTreeSet<u32>,
    sources: BTreeSet<u32>,
}

struct Bench {
    index: RadixIndex,
    live: Vec<Live>,
}

const BLOCKS: u32 = 40;

#[derive(Clone, Debug)]
enum Step {
    Insert {
        tokens: Vec<u32>,
        plan: usize,
    },
    Plan {
        tokens: Vec<u32>,
    },
    Sources {
        plan: usize,
        runs: Vec<(usize, u32, u32)>,
    },
    ReleaseSources {
        plan: usize,
    },
    Release {
        plan: usize,
    },
    Discard {
        ids: Vec<u32>,
    },
    Evict {
        n: usize,
    },
    Mark {
        like: usize,
        range: (usize, usize),
    },
    Remove {
        like: usize,
        range: (usize, usize),
        force: bool,
    },
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let tokens = || prop::collection::vec(0u32..2, 0..12);
    let run = (0usize..40, 0u32..8, 1u32..8);
    prop_oneof![
        6 => (tokens(), 0usize..6).prop_map(|(tokens, plan)| Step::Insert { tokens, plan }),
        3 => tokens().prop_map(|tokens| Step::Plan { tokens }),
        6 => (0usize..4, prop::collection::vec(run, 1..4))
            .prop_map(|(plan, runs)| Step::Sources { plan, runs }),
        1 => (0usize..4).prop_map(|plan| Step::ReleaseSources { plan }),
        2 => (0usize..4).prop_map(|plan| Step::Release { plan }),
        3 => prop::collection::vec(0..BLOCKS, 1..4).prop_map(|ids| Step::Discard { ids }),
        1 => (0usize..6).prop_map(|n| Step::Evict { n }),
        1 => Just(Step::Evict { n: usize::MAX }),
        8 => (0usize..40, range()).prop_map(|(like, range)| Step::Mark { like, range }),
        2 => (0usize..40, range(), any::<bool>())
            .prop_map(|(like, range, force)| Step::Remove { like, range, force }),
        1 => Just(Step::Reset),
    ]
}

fn range() -> impl Strategy<Value = (usize, usize)> {
    (0usize..12, 0usize..13).prop_map(|(a, b)| (a.min(b), a.max(b)))
}

fn sequence(tokens: &[u32]) -> TokenSequence {
    let namespace = Namespace::new("m", "bfloat16", "default", None, Salt::Shared).unwrap();
    TokenSequence::new(Arc::new(namespace), tokens.to_vec(), Vec::new()).unwrap()
}

impl Bench {
    fn run(&mut self, step: &Step) {
        match step {
            Step::Insert { tokens, plan } => self.insert(tokens, *plan),
            Step::Plan { tokens } => {
                let options = PlanOptions {
                    keep_last: 0,
                    ..PlanOptions::default()
                };
                let policy = ReusePolicy {
                    partial_blocks: false,
                    ..ReusePolicy::EXACT_ONLY
                };
                let plan = self
                    .index
                    .plan(&mut sequence(tokens), &policy, options)
                    .unwrap();
                let paths = plan.blocks().iter().map(|id| id.0).collect();
                self.live.push(Live {
                    plan,
                    paths,
                    sources: BTreeSet::new(),
                });
            }
            Step::Sources { plan, runs } => self.pin(*plan, runs),
            Step::ReleaseSources { plan } => {
                if let Some(live) = self.live.get_mut(*plan) {
                    self.index.release_sources(&live.plan).unwrap();
                    live.sources.clear();
                }
            }
            Step::Release { plan } => {
                if *plan < self.live.len() {
                    let live = self.live.remove(*plan);
                    self.index.release(&live.plan).unwrap();
                }
            }
            Step::Discard { ids } => {
                let ids: Vec<BlockId> = ids.iter().copied().map(BlockId).collect();
                for id in self.index.discard(&ids).unwrap() {
                    assert_eq!(self.pins(id.0), 0);
                }
            }
            Step::Mark { like, range } => {
                let tokens = self.path_like(*like);
                let range = (range.0.min(tokens.len()), range.1.min(tokens.len()));
                self.index.mark_dead(&sequence(&tokens), &[range]).unwrap();
            }
            Step::Remove { like, range, force } => {
                let tokens = self.path_like(*like);
                let range = (range.0.min(tokens.len()), range.1.min(tokens.len()));
                let seq = sequence(&tokens);
                let removed = self.index.remove_spans(&seq, &[range], *force).unwrap();
                for id in removed.freed {
                    assert_eq!(self.pins(id.0), 0);
                }
                for id in removed.condemned {
                    assert!(self.pins(id.0) > 0);
                }
            }
            Step::Evict { n } => {
                let able = self.index.num_waiting() + self.index.num_evictable();
                let evicted = self.index.evict(*n);
                assert_eq!(evicted.len(), (*n).min(usize::try_from(able).unwrap()));
                for id in evicted {
                    assert_eq!(self.pins(id.0), 0);
                }
            }
            Step::Reset => {
                for id in self.index.reset() {
                    assert_eq!(self.pins(id.0), 0);
                }
            }
        }
    }

    fn insert(&mut self, tokens: &[u32], plan: usize) {
        let starts =
            |live: &Live| tokens.starts_with(&live.plan.snapshot().tokens) && !self.is_over(live);
        let at = (plan < self.live.len() && starts(&self.live[plan])).then_some(plan);
        let source = at.map_or(Source::Computed, |at| Source::Plan(&self.live[at].plan));
        let free = self.index.free_ids();
        let mut seq = sequence(tokens);
        let known = self.index.ids_of(&mut seq);
        let mut ids: Vec<BlockId> = known.clone();
        ids.extend(free.into_iter().take(tokens.len() - known.len()));
        let full = ids.len().min(tokens.len());
        let options = InsertOptions::new(full, source);
        let done = self.index.insert(&mut seq, &ids, options).unwrap();
        if let Some(at) = at {
            self.live[at]
                .paths
                .extend(done.blocks.iter().map(|id| id.0));
        }
    }

    fn pin(&mut self, plan: usize, runs: &[(usize, u32, u32)]) {
        let nodes = self.nodes();
        let Some(live) = self.live.get_mut(plan) else {
            return;
        };
        if nodes.is_empty() {
            return;
        }
        let found: Vec<SourceRun> = runs
            .iter()
            .filter_map(|&(node, from, len)| {
                let node = nodes[node % nodes.len()];
                let edge = self.index.forest().node(node);
                let from = (edge.depth..edge.end())
                    .filter(|&at| edge.payload(at, 1).is_present())
                    .nth(from as usize)?;
                let to = edge.present_until(from, edge.end().min(from + len), 1);
                Some(SourceRun { node, from, to })
            })
            .collect();
        let lease = live
            .plan
            .lease_index(&self.index, "RadixIndex::release")
            .unwrap();
        let time = use_sources(&mut self.index, lease, &found);
        for run in found {
            let edge = self.index.forest().node(run.node);
            for (depth, id) in (run.from..).zip(edge.ids(run.from, run.to, 1)) {
                assert_eq!(edge.last_use(depth), time);
                live.sources.insert(id.0);
            }
        }
    }

    fn nodes(&self) -> Vec<NodeIndex> {
        let places = (0..BLOCKS).filter_map(|id| self.index.forest().place_of(id));
        let nodes: BTreeSet<NodeIndex> = places.map(|(node, _)| node).collect();
        nodes.into_iter().collect()
    }

    fn path_like(&self, like: usize) -> Vec<u32> {
        let mut leaves = self.nodes();
        leaves.retain(|&node| !self.index.forest().node(node).has_children());
        let mut tokens = Vec::new();
        if let Some(&leaf) = leaves.get(like % leaves.len().max(1)) {
            let mut at = leaf;
            while at != NO_NODE {
                let edge = self.index.forest().node(at);
                tokens.splice(..0, edge.blocks.tokens(1).iter().copied());
                at = edge.parent;
            }
        }
        tokens
    }

    fn is_over(&self, live: &Live) -> bool {
        let lease = live
            .plan
            .lease_index(&self.index, "RadixIndex::release")
            .unwrap();
        self.index.pins().leases()[lease].over
    }

    fn pins(&self, id: u32) -> u32 {
        let plans = self.live.iter();
        let pinning = plans.filter(|live| live.paths.contains(&id) || live.sources.contains(&id));
        crate::ids::depth(pinning.count())
    }

    fn compare(&self) {
        self.index.check().unwrap();
        let counts = self.index.pins().pin_counts(self.index.forest());
        for id in 0..BLOCKS {
            assert_eq!(
                counts.get(&id).copied().unwrap_or(0),
                self.pins(id),
                "block {id}"
            );
        }
        let places: Vec<(u32, (NodeIndex, Depth))> = (0..BLOCKS)
            .filter_map(|id| Some((id, self.index.forest().place_of(id)?)))
            .collect();
        let backs = |id: u32| self.live.iter().any(|live| live.paths.contains(&id));
        let is_free = |&(id, at): &(u32, (NodeIndex, Depth))| {
            let below = places
                .iter()
                .filter(|below| self.index.forest().is_above(at, below.1));
            let below: Vec<u32> = below.map(|&(id, _)| id).collect();
            let marks = self.index.forest().node(at.0).dead_marks();
            let is_dead = marks
                .iter()
                .any(|range| (range.from..range.to).contains(&at.1));
            below.iter().all(|&id| self.pins(id) == 0)
                || is_dead && self.pins(id) == 0 && !below.iter().any(|&id| backs(id))
        };
        let free = places.iter().filter(|at| is_free(at)).count();
        assert_eq!(self.index.num_evictable(), free as u64);
    }
}

/// Touches and pins sources as a plan does; returns the time.
fn use_sources(index: &mut RadixIndex, lease: u32, runs: &[SourceRun]) -> u64 {
    let parts = index.parts_mut();
    *parts.clock += 1;
    parts
        .eviction
        .touch_sources(parts.forest, runs, *parts.clock);
    parts
        .pins
        .pin_sources(parts.forest, parts.eviction, lease, runs);
    *parts.clock
}

impl RadixIndex {
    fn free_ids(&self) -> Vec<BlockId> {
        let free =
            (0..BLOCKS).filter(|&id| self.forest().blocks().state(id) == BlockState::Unknown);
        free.map(BlockId).collect()
    }

    fn ids_of(&mut self, seq: &mut TokenSequence) -> Vec<BlockId> {
        let mut ids = Vec::new();
        self.lookup(seq, crate::LookupOptions::default(), &mut ids)
            .unwrap();
        ids
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn runs_of_sources_pin_exactly_their_blocks(steps in prop::collection::vec(step(), 1..80)) {
        let config = Config { num_blocks: BLOCKS.into(), block_size: 1, ..Config::seeded(0) };
        let mut bench = Bench { index: RadixIndex::new(config).unwrap(), live: Vec::new() };
        for step in &steps {
            bench.run(step);
            bench.compare();
        }
        while !bench.live.is_empty() {
            bench.run(&Step::Release { plan: 0 });
            bench.compare();
        }
        bench.index.evict(usize::MAX);
        prop_assert_eq!(bench.index.stats().nodes, 0);
        prop_assert!(!bench.index.forest().has_sources() && bench.index.forest().num_anchored() == 0);
    }
}

/// Tests a part of D7: a plan pins exactly its source blocks.
#[test]
fn a_dead_block_above_a_pinned_source_may_go_and_no_other() {
    let config = Config {
        num_blocks: 40,
        block_size: 1,
        ..Config::seeded(0)
    };
    let mut index = RadixIndex::new(config).unwrap();
    let mut seq = sequence(&[1, 2, 3, 4, 5, 6]);
    let ids: Vec<BlockId> = (0..6).map(BlockId).collect();
    let options = InsertOptions::new(6, Source::Computed);
    index.insert(&mut seq, &ids, options).unwrap();
    let options = PlanOptions {
        keep_last: 0,
        ..PlanOptions::default()
    };
    let plan = index
        .plan(&mut sequence(&[9]), &ReusePolicy::EXACT_ONLY, options)
        .unwrap();
    let (node, _) = index.forest().place_of(3).unwrap();
    let run = [SourceRun {
        node,
        from: 3,
        to: 5,
    }];
    let lease = plan.lease_index(&index, "RadixIndex::release").unwrap();
    use_sources(&mut index, lease, &run);
    assert_eq!((index.num_evictable(), index.stats().pinned), (1, 2));
    assert_eq!(index.mark_dead(&seq, &[(1, 5)]).unwrap(), 4);
    index.check().unwrap();
    assert_eq!(index.num_evictable(), 3);
    let evicted = index.evict(9);
    assert_eq!(evicted, [BlockId(2), BlockId(1), BlockId(5)]);
    index.check().unwrap();
    // Block 0 is before the hole and not dead, so the sources still protect it.
    assert_eq!((index.num_evictable(), index.evict(9)), (0, Vec::new()));
    index.release_sources(&plan).unwrap();
    index.check().unwrap();
    assert_eq!(index.evict(9), [BlockId(4), BlockId(3), BlockId(0)]);
}
