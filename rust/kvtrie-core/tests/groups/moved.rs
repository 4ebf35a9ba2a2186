//! Moved runs next to groups with windows (G9): the plan is that of an index without groups, and what it says of windows
//! is compared token by token.

use std::collections::{BTreeMap, BTreeSet};

use kvtrie_core::{
    BlockId, Class, Config, ErrorKind, ExplainOptions, Group, GroupOffers, GroupOptions,
    InsertOptions, PlanOptions, RadixIndex, ReusePlan, ReusePolicy, Scope, Segment, Source,
    TokenSequence,
};

use crate::Numbers;
use crate::common::{ids, sequence};

const BLOCK: usize = 4;

struct Pair {
    grouped: RadixIndex,
    plain: RadixIndex,
    windows: Vec<usize>,
    /// Of each group, the ids at whole prefixes.
    known: Vec<BTreeMap<Vec<u32>, u32>>,
    next: u32,
}

fn policy() -> ReusePolicy {
    ReusePolicy {
        approximate: true,
        scope: Scope::Namespace,
        partial_blocks: false,
        ..ReusePolicy::EXACT_ONLY
    }
}

impl Pair {
    fn new(numbers: &mut Numbers) -> Self {
        let windows: Vec<usize> = (0..=numbers.below(2))
            .map(|_| 2 + numbers.below(24))
            .collect();
        let group =
            |(at, &window): (usize, &usize)| Group::window(&format!("w{at}"), window, 512, BLOCK);
        let config = Config {
            num_blocks: 512,
            block_size: BLOCK,
            moved_runs: true,
            min_run: 8,
            ..Config::seeded(5)
        };
        let groups = windows.iter().enumerate().map(group).collect();
        Self {
            grouped: RadixIndex::new(Config {
                groups,
                ..config.clone()
            })
            .unwrap(),
            plain: RadixIndex::new(config).unwrap(),
            known: vec![BTreeMap::new(); windows.len()],
            windows,
            next: 0,
        }
    }

    fn fresh(&mut self, n: usize) -> Vec<u32> {
        let from = self.next;
        self.next += u32::try_from(n).unwrap();
        (from..self.next).collect()
    }

    /// Inserts computed tokens in both, with window blocks at the places that `has` chooses.
    fn insert(&mut self, tokens: &[u32], mut has: impl FnMut(usize) -> bool) {
        let full = tokens.len() / BLOCK;
        let blocks = ids(self.fresh(full));
        let mut offers = Vec::new();
        for group in 0..self.windows.len() {
            let places: Vec<usize> = (0..full).filter(|&block| has(block)).collect();
            let own = ids(self.fresh(places.len()));
            let own = places.iter().map(|place| place * BLOCK).zip(own);
            offers.push((group + 1, own.collect::<Vec<_>>()));
        }
        let (num_exact, done) = self.offer(
            &mut sequence(tokens.to_vec()),
            &blocks,
            Source::Computed,
            &offers,
        );
        assert_eq!(num_exact, full * BLOCK);
        for (group, taken) in done.into_iter().enumerate() {
            for (&(position, _), id) in offers[group].1.iter().zip(taken) {
                let prefix = tokens[..position + BLOCK].to_vec();
                self.known[group].insert(prefix, id.unwrap().0);
            }
        }
        let mut seq = sequence(tokens.to_vec());
        let options = InsertOptions::new(tokens.len(), Source::Computed);
        self.plain.insert(&mut seq, &blocks, options).unwrap();
    }

    fn offer(
        &mut self,
        seq: &mut TokenSequence,
        blocks: &[BlockId],
        source: Source<'_>,
        offers: &[(usize, Vec<(usize, BlockId)>)],
    ) -> (usize, Vec<Vec<Option<BlockId>>>) {
        let offers: Vec<GroupOffers<'_>> = offers
            .iter()
            .map(|(group, offers)| GroupOffers {
                group: *group,
                offers,
            })
            .collect();
        let groups = GroupOptions {
            offers: &offers,
            stops: &[],
        };
        let options = InsertOptions::new(seq.len(), source);
        let done = self.grouped.insert_groups(seq, blocks, options, groups);
        let (done, groups) = done.unwrap();
        let groups = groups.into_iter().map(|own| own.blocks).collect();
        (done.num_exact, groups)
    }

    fn plan(index: &mut RadixIndex, tokens: &[u32]) -> ReusePlan {
        let mut seq = sequence(tokens.to_vec());
        let options = PlanOptions::default();
        index.plan(&mut seq, &policy(), options).unwrap()
    }
}

/// The tokens of the windows before `next` that are neither computed nor in place in the group, one by one.
fn missing(plan: &ReusePlan, group: usize, window: usize, next: usize) -> BTreeSet<usize> {
    let start = plan.group(group).unwrap().start;
    let in_place = plan.blocks().len() * BLOCK;
    let is_there = |at: usize| {
        let mut segments = plan.segments().iter();
        let segment = segments
            .find(|own| own.start <= at && at < own.end)
            .unwrap();
        segment.class == Class::Compute || at < in_place && at >= start
    };
    (next.saturating_sub(window - 1)..next)
        .filter(|&at| !is_there(at))
        .collect()
}

/// Of the tokens that a plan copies, the slots of group 0 that they are copied from, one by one.
fn copied(plan: &ReusePlan, num_tokens: usize) -> BTreeMap<usize, usize> {
    let sources = plan.source_blocks();
    let mut table = plan.blocks().to_vec();
    let free = (0..512).map(BlockId);
    let free = free.filter(|id| !sources.contains(id) && !plan.blocks().contains(id));
    table.extend(free.take(plan.num_new_blocks()));
    let mut found = BTreeMap::new();
    for own in plan.moves(&table, 0, num_tokens).unwrap() {
        for at in 0..usize::try_from(own.num_tokens).unwrap() {
            let dest = usize::try_from(own.dest_slot).unwrap() + at;
            let block = table.iter().position(|id| id.0 as usize == dest / BLOCK);
            let token = block.unwrap() * BLOCK + dest % BLOCK;
            let source = usize::try_from(own.source_slot).unwrap() + at;
            assert_eq!(found.insert(token, source), None);
        }
    }
    found
}

/// The tokens that a group lacks and has where they are copied from, with its slots there.
fn carried(
    pair: &Pair,
    plan: &ReusePlan,
    group: usize,
    lacking: &BTreeSet<usize>,
) -> BTreeMap<usize, usize> {
    let num_tokens = plan.segments().last().unwrap().end;
    let mut found = copied(plan, num_tokens);
    found.retain(|token, _| lacking.contains(token));
    let of_group = |(token, source): (usize, usize)| {
        let block = BlockId(u32::try_from(source / BLOCK).unwrap());
        let path = pair.grouped.path_tokens(block).unwrap();
        let id = pair.known[group - 1].get(&path)?;
        Some((token, *id as usize * BLOCK + source % BLOCK))
    };
    let found: BTreeMap<usize, usize> = found.into_iter().filter_map(of_group).collect();
    // What is copied is written to blocks that the plan does not read.
    let part = plan.group(group).unwrap();
    let read: BTreeSet<usize> = found.values().map(|slot| slot / BLOCK).collect();
    let free = (0..512).filter(|&id| !read.contains(&(id as usize)));
    let free = free.map(BlockId).filter(|id| !part.blocks.contains(id));
    let table: Vec<BlockId> = free.take(num_tokens.div_ceil(BLOCK)).collect();
    let moves = plan.moves_of_group(group, 512, &table, (0, num_tokens));
    let mut moved = BTreeMap::new();
    for own in moves.unwrap() {
        let number = |slot| usize::try_from(slot).unwrap();
        let (source, dest) = (number(own.source_slot), number(own.dest_slot));
        for at in 0..number(own.num_tokens) {
            let block = table
                .iter()
                .position(|id| id.0 as usize == (dest + at) / BLOCK);
            let token = block.unwrap() * BLOCK + (dest + at) % BLOCK;
            let mut segments = plan.segments().iter();
            let segment = segments.find(|segment| segment.end > token).unwrap();
            assert_eq!(own.delta, segment.position_delta);
            moved.insert(token, source + at);
        }
    }
    assert_eq!(moved, found);
    found
}

/// Texts that were edited in the middle: a range is left out, put in, or both.
fn edited(numbers: &mut Numbers, text: &[u32], next: &mut u32) -> Vec<u32> {
    let cut = numbers.below(text.len());
    let gone = numbers.below(text.len() - cut);
    let more = if numbers.one_in(2) {
        numbers.below(9)
    } else {
        0
    };
    let mut edited = text[..cut].to_vec();
    edited.extend((0..more).map(|_| {
        *next += 1;
        *next
    }));
    edited.extend(&text[cut + gone..]);
    edited
}

/// What a plan says of its windows.
struct Windows {
    /// The first token that is not exact, if there is one.
    first: Option<usize>,
    /// The first token of a window that is rebuilt.
    first_rebuilt: usize,
    rebuilds: bool,
    /// Tokens that come with moved runs.
    carries: bool,
}

fn is_approximate(segment: &Segment) -> bool {
    segment.class == Class::Approximate
}

/// Compares what a plan has of windows, and what it says of the rest, with the tokens one by one.
fn check_windows(pair: &Pair, plan: &ReusePlan, tokens: &[u32]) -> Windows {
    let in_place = plan.blocks().len();
    let computed = plan.segments().iter();
    let computed = computed.filter(|segment| segment.class == Class::Compute);
    let starts = computed.map(|segment| segment.start);
    let starts: Vec<usize> = starts.chain([tokens.len()]).collect();
    let approximate = plan.segments().iter().find(|own| is_approximate(own));
    let mut found = Windows {
        first: approximate.map(|own| own.start),
        first_rebuilt: usize::MAX,
        rebuilds: false,
        carries: false,
    };
    for group in 1..=pair.windows.len() {
        let window = pair.windows[group - 1];
        let part = plan.group(group).unwrap();
        // The blocks that are there, from the end of what is in place towards the front.
        let reach = (window - 1).div_ceil(BLOCK);
        let known = &pair.known[group - 1];
        let mut expected: Vec<BlockId> = (in_place.saturating_sub(reach)..in_place)
            .rev()
            .map_while(|block| known.get(&tokens[..(block + 1) * BLOCK]))
            .map(|&id| BlockId(id))
            .collect();
        expected.reverse();
        assert_eq!(part.blocks, expected);
        assert_eq!(part.start, (in_place - expected.len()) * BLOCK);
        let lacking = |&next: &usize| missing(plan, group, window, next);
        let lacking: BTreeSet<usize> = starts.iter().flat_map(lacking).collect();
        let carried = carried(pair, plan, group, &lacking);
        found.carries |= !carried.is_empty();
        let mut all = BTreeSet::new();
        for &next in &starts {
            let mut missing = missing(plan, group, window, next);
            missing.retain(|token| !carried.contains_key(token));
            if let Some(&start) = missing.first() {
                found.first = Some(found.first.map_or(next, |first| first.min(next)));
                found.first_rebuilt = found.first_rebuilt.min(start);
            }
            all.extend(missing);
        }
        let ranges = plan.rebuild(group);
        assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0));
        let ranges: BTreeSet<usize> = ranges.iter().flat_map(|&(from, to)| from..to).collect();
        assert_eq!(ranges, all);
        found.rebuilds |= !all.is_empty();
    }
    assert_eq!(plan.first_approximate(), found.first);
    found
}

/// Parts of the moved runs of a plan, for [`RadixIndex::recompute`].
fn chosen(numbers: &mut Numbers, plan: &ReusePlan) -> Vec<(usize, usize)> {
    let moved = plan.segments().iter().filter(|own| is_approximate(own));
    let part = |own: &Segment| {
        let from = own.start + numbers.below(own.end - own.start);
        let whole = numbers.one_in(4);
        let from = if whole { own.start } else { from };
        let to = if whole {
            own.end
        } else {
            from + numbers.below(own.end - from + 1)
        };
        (from, to)
    };
    moved.map(part).collect()
}

/// What a plan was.
#[derive(Default)]
struct Kind {
    /// It had moved runs. Such a plan copies or rebuilds windows.
    is_approximate: bool,
    /// What its windows do: bring KV along, and bring some and rebuild the rest.
    carried: (bool, bool),
    /// Some of their tokens were computed, and others were not.
    is_recomputed: bool,
}

fn check_plan(numbers: &mut Numbers, pair: &mut Pair, tokens: &[u32]) -> Kind {
    let mut plan = Pair::plan(&mut pair.grouped, tokens);
    let plain = Pair::plan(&mut pair.plain, tokens);
    let mut kind = Kind {
        is_approximate: plain.num_tokens(Class::Approximate) > 0,
        ..Kind::default()
    };
    if kind.is_approximate {
        assert_eq!(plan.segments(), plain.segments());
        assert_eq!(plan.blocks(), plain.blocks());
        assert_eq!(plan.source_blocks(), plain.source_blocks());
    } else {
        assert_eq!(plan.num_tokens(Class::Approximate), 0);
        assert!(plan.source_blocks().is_empty());
    }
    let options = ExplainOptions {
        policy: policy(),
        ..ExplainOptions::default()
    };
    let mut seq = sequence(tokens.iter().copied());
    let explained = pair.grouped.explain(&mut seq, &options).unwrap();
    if kind.is_approximate {
        assert_eq!(explained.cut_by, None);
    }
    let mut found = check_windows(pair, &plan, tokens);
    assert_eq!(found.rebuilds || found.carries, kind.is_approximate);
    kind.carried = (found.carries, found.carries && found.rebuilds);
    if kind.is_approximate && numbers.one_in(2) {
        let before = plan.num_tokens(Class::Approximate);
        let ranges = chosen(numbers, &plan);
        let again = pair.grouped.recompute(&plan, &ranges).unwrap();
        assert!(pair.grouped.is_released(&plan));
        plan = again;
        let left = plan.num_tokens(Class::Approximate);
        kind.is_recomputed = 0 < left && left < before;
        found = check_windows(pair, &plan, tokens);
    }
    check_labels(pair, &plan, tokens, (found.first, found.first_rebuilt));
    pair.grouped.release(&plan).unwrap();
    pair.plain.release(&plain).unwrap();
    pair.grouped.check().unwrap();
    kind
}

/// Offers all blocks of a prompt that a plan built; only what is before its first approximate token is exact.
fn check_labels(
    pair: &mut Pair,
    plan: &ReusePlan,
    tokens: &[u32],
    (first, first_rebuilt): (Option<usize>, usize),
) {
    let full = tokens.len() / BLOCK;
    let mut blocks = plan.blocks().to_vec();
    blocks.extend(ids(pair.fresh(full - plan.blocks().len())));
    let mut offers = Vec::new();
    for group in 1..=pair.windows.len() {
        let own = ids(pair.fresh(full));
        let own = (0..full).map(|block| block * BLOCK).zip(own);
        offers.push((group, own.collect::<Vec<_>>()));
    }
    let mut seq = sequence(tokens.to_vec());
    let (num_exact, done) = pair.offer(&mut seq, &blocks, Source::Plan(plan), &offers);
    let exact = first.unwrap_or(tokens.len());
    assert_eq!(num_exact, exact / BLOCK * BLOCK);
    for (group, taken) in done.into_iter().enumerate() {
        for (block, id) in taken.into_iter().enumerate() {
            let (end, prefix) = ((block + 1) * BLOCK, tokens[..(block + 1) * BLOCK].to_vec());
            let known = pair.known[group].get(&prefix).copied();
            let is_new = end <= exact.min(first_rebuilt);
            let new = offers[group].1[block].1.0;
            let expected = known.or(is_new.then_some(new));
            assert_eq!(id.map(|id| id.0), expected, "group {group}, block {block}");
        }
    }
    // A copy of the index would be needed to compare with the plain one after this, so the prompt leaves again.
    let gone: Vec<BlockId> = blocks[plan.blocks().len()..].to_vec();
    pair.grouped.discard(&gone).unwrap();
    for group in 1..=pair.windows.len() {
        let own: Vec<BlockId> = offers[group - 1].1.iter().map(|&(_, id)| id).collect();
        pair.grouped.discard_group(group, &own).unwrap();
    }
}

#[test]
fn windows_next_to_moved_runs_are_listed_token_by_token() {
    let (mut plans, mut approximate, mut recomputed) = (0, 0, 0);
    let (mut carried, mut both) = (0, 0);
    for seed in 0..300 {
        let mut numbers = Numbers::of(seed);
        let mut pair = Pair::new(&mut numbers);
        let mut next = 1000;
        let text: Vec<u32> = (0..40 + numbers.below(60))
            .map(|at| u32::try_from(at).unwrap())
            .collect();
        let other = edited(&mut numbers, &text, &mut next);
        for text in [&text, &other] {
            let sparse = numbers.one_in(2);
            pair.insert(text, |_| !sparse || numbers.one_in(2));
        }
        for _ in 0..4 {
            let from = if numbers.one_in(2) { &text } else { &other };
            let prompt = edited(&mut numbers, from, &mut next);
            if prompt.is_empty() || pair.next > 300 {
                continue;
            }
            plans += 1;
            let kind = check_plan(&mut numbers, &mut pair, &prompt);
            approximate += u32::from(kind.is_approximate);
            recomputed += u32::from(kind.is_recomputed);
            carried += u32::from(kind.carried.0);
            both += u32::from(kind.carried.1);
        }
    }
    println!("{plans} plans, {approximate} with moved runs, {recomputed} of them computed in part");
    println!("{carried} with windows that come with moved runs, {both} with others to rebuild");
    assert!(approximate > 200 && plans - approximate > 200 && recomputed > 100);
    assert!(carried > 100 && both > 50);
}

/// A plan that falls back to the exact one says what its search left untried, and that nothing was in scope, as that of an
/// index without groups does.
#[test]
fn an_exact_plan_tells_of_the_search_before_it() {
    let config = |groups| Config {
        num_blocks: 64,
        block_size: BLOCK,
        moved_runs: true,
        min_run: 8,
        max_candidates: 1,
        groups,
        ..Config::seeded(0)
    };
    let swa = || vec![Group::window("swa", 9, 64, BLOCK)];
    let policies = [
        (
            ReusePolicy {
                max_approximate_share: 0.1,
                ..policy()
            },
            0,
        ),
        (
            ReusePolicy {
                scope: Scope::Conversation,
                ..policy()
            },
            1,
        ),
    ];
    for (policy, without_scope) in policies {
        let found = [Vec::new(), swa()].map(|groups| {
            let mut index = RadixIndex::new(config(groups)).unwrap();
            for place in 0..3 {
                // The same run at three positions, of which one is tried.
                let text = (0..4).map(|token| 1000 * (place + 2) + token).chain(0..16);
                let own = ids(place * 5..place * 5 + 5);
                let options = InsertOptions::new(20, Source::Computed);
                index.insert(&mut sequence(text), &own, options).unwrap();
            }
            let mut prompt = sequence([1000].into_iter().chain(0..16));
            let plan = index
                .plan(&mut prompt, &policy, PlanOptions::default())
                .unwrap();
            assert_eq!(plan.num_tokens(Class::Compute), 17);
            (
                plan.candidates_dropped(),
                index.stats().plans_without_scope,
                index.stats().search_looks,
            )
        });
        assert_eq!(found[1], found[0]);
        assert_eq!(
            (found[0].0 > 0, found[0].1),
            (without_scope == 0, without_scope)
        );
    }
}

#[test]
fn a_state_is_not_moved() {
    let config = Config {
        num_blocks: 8,
        block_size: BLOCK,
        groups: vec![
            Group::window("swa", 9, 8, BLOCK),
            Group::state("gdn", 4, BLOCK),
        ],
        ..Config::seeded(0)
    };
    let mut index = RadixIndex::new(config).unwrap();
    let before = index.digest();
    let mut seq = sequence(0..9);
    let refused = index.plan(&mut seq, &policy(), PlanOptions::default());
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("group \"gdn\" with states"));
    assert_eq!(index.digest(), before);
}
