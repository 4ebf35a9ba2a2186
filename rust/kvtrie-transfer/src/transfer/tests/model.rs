//! Compares plans with the rules for each token: from which of several places it must be loaded.

use std::cmp::Reverse;
use std::ops::Range;

use proptest::prelude::*;

use super::*;

/// Two texts of a few pieces, so that many places of one equal parts of the other.
fn pieced() -> impl Strategy<Value = (Vec<u32>, Vec<u32>)> {
    let piece = prop::collection::vec(0u32..3, 2..13);
    let order = || prop::collection::vec(0usize..4, 1..11);
    (prop::collection::vec(piece, 4), order(), order(), 0usize..5).prop_map(
        |(pieces, theirs, mine, noise)| {
            let text = |order: &[usize]| -> Vec<u32> {
                order.iter().flat_map(|&at| pieces[at].clone()).collect()
            };
            let mut mine: Vec<u32> = std::iter::repeat_n(7, noise).chain(text(&mine)).collect();
            mine.truncate(90);
            let mut theirs = text(&theirs);
            theirs.truncate(90);
            (theirs, mine)
        },
    )
}

/// Limits on the context of moved runs.
fn limits() -> impl Strategy<Value = (Option<u16>, f64, f64)> {
    let share = || prop_oneof![1 => Just(1.0), 2 => 0.0..1.0f64];
    (prop::option::of(0u16..3), share(), share())
}

/// A block of the sender, as in a manifest.
#[derive(Clone)]
struct Named {
    range: Range<usize>,
    class: Class,
    hops: u16,
    id: BlockId,
}

/// The origin of a token of the prompt: its class, its position in the sender's sequence, and its hops.
type Origin = (Class, usize, u16);

/// The rules for a plan, token by token.
struct Model<'a> {
    sender: &'a Sender,
    mine: &'a [u32],
    policy: &'a ReusePolicy,
    /// Whether the policy bounds nothing, so that approximate blocks may be loaded.
    takes_any: bool,
    wanted: Vec<bool>,
    /// The tokens that the receiver has, and whether it has one group.
    cached: Range<usize>,
    is_alone: bool,
}

impl Model<'_> {
    /// The sender's blocks without look-ahead, with the labels of their tokens.
    fn blocks(&self) -> Vec<Named> {
        let end = self.sender.runs().last().map_or(0, |run| run.end);
        let (size, ids) = (self.sender.block_size, self.sender.blocks());
        let named = |(at, &id): (usize, &BlockId)| {
            let (class, hops) = self.sender.label(at * size)?;
            let range = at * size..((at + 1) * size).min(end);
            Some(Named {
                range,
                class,
                hops,
                id,
            })
        };
        ids.iter().enumerate().filter_map(named).collect()
    }

    fn origins(&self) -> Vec<Option<Origin>> {
        let share = |origins: &[Option<Origin>]| {
            let approximate = |origin: &&Option<Origin>| {
                origin.is_some_and(|origin| origin.0 == Class::Approximate)
            };
            #[expect(clippy::cast_precision_loss, reason = "some tokens")]
            let share = origins.iter().filter(approximate).count() as f64 / origins.len() as f64;
            share
        };
        let approximate = self.policy.approximate && self.policy.forbid_kinds.is_empty();
        let origins = self.with(approximate);
        if share(&origins) > self.policy.max_approximate_share {
            return self.with(false);
        }
        origins
    }

    fn with(&self, approximate: bool) -> Vec<Option<Origin>> {
        let blocks = self.blocks();
        let mut origins = vec![None; self.mine.len()];
        let mut kept: Vec<Option<usize>> = vec![None; self.mine.len()];
        // Blocks in place, up to the first block of each run that differs.
        let mut goes_on: Option<(usize, Class, u16)> = None;
        for block in &blocks {
            let Range { start, end } = block.range;
            let is_same = |range: Range<usize>| {
                self.mine.get(range.clone()) == Some(&self.sender.tokens[range])
            };
            let is_next = goes_on == Some((start, block.class, block.hops));
            let begins = start < self.mine.len() && is_same(0..start);
            let follows = follows(&blocks, block);
            if (if follows { is_next } else { begins }) && is_same(start..end) {
                goes_on = Some((end, block.class, block.hops));
                let is_allowed = block.class == Class::Exact
                    || self.takes_any && block.hops <= self.policy.max_hops;
                for at in block
                    .range
                    .clone()
                    .filter(|&at| is_allowed && self.wanted[at])
                {
                    origins[at] = Some((block.class, at, block.hops));
                    kept[at] = Some(at);
                }
                let is_exact = block.class == Class::Exact;
                for at in block
                    .range
                    .clone()
                    .filter(|at| is_exact && self.cached.contains(at))
                {
                    kept[at] = Some(at);
                }
            } else {
                goes_on = None;
            }
        }
        let policy = self.policy;
        let is_limited = policy.max_cuts.is_some()
            || policy.max_lost_context < 1.0
            || policy.max_new_context < 1.0;
        if approximate && (self.is_alone || !is_limited) {
            self.moved(&blocks, &mut origins, kept);
        }
        origins
    }

    /// Whether the policy allows a run, of whose context these are the sender's positions.
    fn allows(&self, kept: &[Option<usize>], start: usize, source: usize) -> bool {
        let before = kept[..start].iter().enumerate();
        let mut pairs: Vec<(usize, usize)> = before
            .filter_map(|(at, &kept)| Some((at, kept.filter(|&kept| kept < source)?)))
            .collect();
        let num = pairs.len();
        pairs.push((start, source));
        let is_cut =
            |pair: &&[(usize, usize)]| (pair[0].0 + 1, pair[0].1 + 1) != (pair[1].0, pair[1].1);
        let cuts = pairs.windows(2).filter(is_cut).count();
        #[expect(clippy::cast_precision_loss, reason = "some tokens")]
        let without = |all: usize| {
            if all == 0 {
                0.0
            } else {
                (1.0 - num as f64 / all as f64).max(0.0)
            }
        };
        let policy = self.policy;
        policy.max_cuts.is_none_or(|most| cuts <= most.into())
            && without(source) <= policy.max_lost_context
            && without(start) <= policy.max_new_context
    }

    /// How many tokens at the start of runs of these lengths are computed.
    fn front(&self, lens: &[usize]) -> usize {
        let computed = |first: usize| -> usize { lens.iter().map(|&len| len.min(first)).sum() };
        let all = computed(usize::MAX);
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_sign_loss,
            clippy::cast_possible_truncation,
            reason = "some tokens"
        )]
        let wanted = (self.policy.recompute_share * all as f64).ceil() as usize;
        let front = (0..=all).find(|&first| computed(first) >= wanted);
        front.unwrap_or(0).max(self.policy.recompute_first)
    }

    fn moved(
        &self,
        blocks: &[Named],
        origins: &mut [Option<Origin>],
        mut kept: Vec<Option<usize>>,
    ) {
        let blocks: Vec<&Named> = blocks
            .iter()
            .filter(|block| block.class == Class::Exact || self.takes_any)
            .filter(|block| block.hops < self.policy.max_hops)
            .collect();
        // For each chain of blocks whose tokens the prompt has at one distance, its start in the prompt and its blocks.
        let mut chains: Vec<(usize, &[&Named])> = Vec::new();
        for first in 0..blocks.len() {
            for start in 0..self.mine.len() {
                let is_here = |block: &Named, at: usize| {
                    self.mine.get(at..at + block.range.len())
                        == Some(&self.sender.tokens[block.range.clone()])
                };
                let size = self.sender.block_size;
                let goes_back = first > 0
                    && blocks[first - 1].range.end == blocks[first].range.start
                    && start >= size
                    && is_here(blocks[first - 1], start - size);
                let (mut end, mut at) = (first, start);
                while end < blocks.len()
                    && (end == first || blocks[end - 1].range.end == blocks[end].range.start)
                    && is_here(blocks[end], at)
                {
                    at += blocks[end].range.len();
                    end += 1;
                }
                if !goes_back && at - start >= self.policy.min_run.unwrap_or(16) {
                    chains.push((start, &blocks[first..end]));
                }
            }
        }
        let free: Vec<bool> = (0..origins.len())
            .map(|at| self.wanted[at] && origins[at].is_none())
            .collect();
        let source = |start: usize, chain: &[&Named], at: usize| chain[0].range.start + at - start;
        let block_of = |chain: &[&Named], source: usize| -> Named {
            let holds = |block: &&&Named| block.range.contains(&source);
            (**chain.iter().find(holds).unwrap()).clone()
        };
        let (mut at, mut pieces) = (0, Vec::new());
        while at < free.len() {
            let gap_end = (at..free.len()).find(|&at| !free[at]).unwrap_or(free.len());
            let best = chains
                .iter()
                .filter(|(start, chain)| {
                    let end = start + chain.last().unwrap().range.end - chain[0].range.start;
                    *start <= at && at < end.min(gap_end)
                })
                .map(|&(start, chain)| {
                    let end = start + chain.last().unwrap().range.end - chain[0].range.start;
                    let end = end.min(gap_end);
                    let hops = (at..end).map(|at| block_of(chain, source(start, chain, at)).hops);
                    let here = source(start, chain, at);
                    let block = block_of(chain, here);
                    let slot =
                        block.id.0 as usize * self.sender.block_size + here - block.range.start;
                    let rank = (Reverse(end), hops.max(), here.abs_diff(at), slot);
                    (rank, start, chain, end)
                })
                .min_by_key(|found| found.0);
            let is_long = |end: usize| end - at >= self.policy.min_run.unwrap_or(16);
            let Some((_, start, chain, end)) = best.filter(|best| is_long(best.3)) else {
                at += 1;
                continue;
            };
            pieces.push((at, end, start, chain));
            at = end;
        }
        pieces.retain(|&(at, end, start, chain)| {
            let first = at + self.policy.recompute_first;
            let until = end.saturating_sub(self.policy.recompute_last);
            let is_allowed =
                first < until && self.allows(&kept, first, source(start, chain, first));
            for token in (first..until).filter(|_| is_allowed) {
                kept[token] = Some(source(start, chain, token));
            }
            is_allowed
        });
        let lens: Vec<usize> = pieces.iter().map(|piece| piece.1 - piece.0).collect();
        let front = self.front(&lens);
        for (at, end, start, chain) in pieces {
            let first = (at + front).min(end);
            let until = end.saturating_sub(self.policy.recompute_last).max(first);
            for (token, origin) in (first..until).zip(&mut origins[first..until]) {
                let here = source(start, chain, token);
                let hops = block_of(chain, here).hops + 1;
                *origin = Some((Class::Approximate, here, hops));
            }
        }
    }
}

/// Whether a block continues the run of the one before it.
fn follows(blocks: &[Named], block: &Named) -> bool {
    blocks.iter().any(|before| {
        before.range.end == block.range.start
            && (before.class, before.hops) == (block.class, block.hops)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6000, ..ProptestConfig::default() })]

    #[test]
    fn plans_equal_the_model(
        ((tokens, mine), labels) in (prop_oneof![tokens().prop_flat_map(edit), pieced()], prop_oneof![labels(), Just(vec![Some((Class::Exact, 0)); 90])]),
        sizes in prop::collection::vec(prop_oneof![1usize..6, 1usize..18], 1..3), my_size in prop::option::of(1usize..18),
        policy in policy(), approximate in prop::bool::weighted(0.7), share in prop_oneof![3 => Just(1.0), 1 => 0.0..1.0f64], forbids in prop::bool::weighted(0.1),
        (from, until) in prop_oneof![Just((0usize, 0usize)), (0usize..90, 0usize..90)], keep_last in 0usize..4, lookahead in 0usize..40,
        built in 0..4, limits in prop::option::weighted(0.3, limits()),
    ) {
        let policy = ReusePolicy {
            approximate: approximate || policy.approximate,
            max_hops: policy.max_hops.max(u16::from(approximate)),
            max_approximate_share: share,
            forbid_kinds: if forbids { vec!["kind".to_owned()] } else { vec![] },
            ..policy
        };
        let bounds_nothing = approximate && !forbids && share >= 1.0 && keep_last < 3;
        let mut policy = if bounds_nothing { ReusePolicy::LAXEST } else { policy };
        if let Some(limits) = limits {
            (policy.max_cuts, policy.max_lost_context, policy.max_new_context) = limits;
        }
        // Approximate KV whose policy is not known counts as built under the laxest.
        let same = ReusePolicy { approximate: true, ..policy.clone() };
        let built = match built {
            0 => None,
            1 => Some(same),
            2 => Some(ReusePolicy { recompute_first: same.recompute_first + 1, ..same }),
            _ => Some(ReusePolicy { recompute_first: 0, min_run: None, ..same }),
        };
        let lax = ReusePolicy::LAXEST;
        let is_strict = built.as_ref().unwrap_or(&lax).is_at_least_as_strict_as(&policy);
        let takes_any = policy.approximate && !forbids && is_strict;
        let mut labels = labels;
        labels.truncate(tokens.len());
        let senders: Vec<Sender> = sizes
            .iter()
            .map(|&block_size| Sender { tokens: tokens.clone(), labels: labels.clone(), block_size })
            .collect();
        let end = senders[0].runs().last().map_or(0, |run| run.end);
        let tables: Vec<Vec<BlockId>> = senders
            .iter()
            .map(|sender| ids((end + lookahead).max(tokens.len()).div_ceil(sender.block_size), 3))
            .collect();
        let groups: Vec<SentGroup<'_>> = (0..)
            .zip(&senders)
            .zip(&tables)
            .map(|((group, sender), blocks)| SentGroup { group: 3 * group, block_size: sender.block_size, table: Table::Full(blocks) })
            .collect();
        let (seq, runs) = (sequence(&tokens), senders[0].runs());
        let manifest =
            TransferManifest::built_under(built.as_ref(), &seq, &groups, &runs, end + lookahead, &key()).unwrap();
        prop_assert_eq!(manifest.num_tokens(), manifest_end(&senders));
        let (from, until) = (from.min(until).min(mine.len()), from.max(until).min(mine.len()));
        let my_sizes: Vec<usize> = sizes.iter().map(|&size| my_size.unwrap_or(size)).collect();
        let mine_tables: Vec<Vec<BlockId>> =
            my_sizes.iter().map(|&size| ids(mine.len().div_ceil(size) + 1, 11)).collect();
        let local: Vec<LocalGroup<'_>> = (0..)
            .zip(&mine_tables)
            .map(|(group, blocks)| LocalGroup { group: 3 * group, block_size: my_size, table: Some(Table::Full(blocks)) })
            .collect();
        let options = TransferOptions { cached: from..until, keep_last, policy: &policy };
        let plan = TransferPlan::new(&manifest, &sequence(&mine), &local, &key(), &options).unwrap();
        let before: Vec<LocalGroup<'_>> =
            local.iter().map(|&group| LocalGroup { table: None, ..group }).collect();
        let without = TransferPlan::new(&manifest, &sequence(&mine), &before, &key(), &options).unwrap();
        let unnamed: Vec<BlockPair> =
            plan.pairs().iter().map(|&pair| BlockPair { local: None, ..pair }).collect();
        prop_assert_eq!(without.pairs(), unnamed);
        prop_assert_eq!(without.compute(), plan.compute());

        let kept = mine.len().saturating_sub(keep_last);
        let wanted: Vec<bool> = (0..mine.len()).map(|at| at < kept && !(from..until).contains(&at)).collect();
        let models = |policy: &ReusePolicy| -> Vec<Vec<Option<Origin>>> {
            let of_group = |sender: &Sender| {
                // The share counts what is finally loaded in all groups.
                let policy = &ReusePolicy { max_approximate_share: 1.0, ..policy.clone() };
                Model { sender, mine: &mine, policy, takes_any: takes_any && policy.approximate, wanted: wanted.clone(), cached: from..until, is_alone: senders.len() == 1 }.origins()
            };
            let mut origins: Vec<_> = senders.iter().map(of_group).collect();
            for at in 0..mine.len() {
                if origins.iter().any(|origins| origins[at].is_none()) {
                    for origins in &mut origins {
                        origins[at] = None;
                    }
                }
            }
            origins
        };
        let approximate = |origins: &[Vec<Option<Origin>>]| {
            let is_approximate = |at: &usize| {
                origins.iter().any(|origins| origins[*at].is_some_and(|origin| origin.0 == Class::Approximate))
            };
            (0..mine.len()).filter(is_approximate).collect::<Vec<usize>>()
        };
        let mut expected = models(&policy);
        #[expect(clippy::cast_precision_loss, reason = "some tokens")]
        if approximate(&expected).len() as f64 / mine.len() as f64 > share {
            expected = models(&ReusePolicy::EXACT_ONLY);
        }
        let mut found: Vec<Vec<Option<Origin>>> = vec![vec![None; mine.len()]; sizes.len()];
        for pair in plan.pairs() {
            let group = pair.group as usize / 3;
            let (size, my_size) = (sizes[group], my_sizes[group]);
            prop_assert!(pair.start < pair.end && (pair.end - 1) / my_size == pair.start / my_size);
            for at in pair.start..pair.end {
                let source = usize::try_from(i64::try_from(at).unwrap() - pair.delta).unwrap();
                prop_assert_eq!(pair.remote, tables[group][source / size]);
                prop_assert_eq!(pair.local, Some(mine_tables[group][at / my_size]));
                prop_assert!(found[group][at].is_none());
                found[group][at] = Some((pair.class, source, pair.hops));
            }
        }
        prop_assert_eq!(&found, &expected);
        let loaded = expected.first().map_or(0, |origins| origins.iter().flatten().count());
        let approximate = approximate(&expected);
        prop_assert_eq!(plan.num_approximate(), approximate.len());
        prop_assert_eq!(plan.num_exact(), loaded - approximate.len());
        prop_assert_eq!(plan.first_approximate(), approximate.first().copied());
        let hops = expected.iter().flatten().flatten().map(|origin| origin.2).max();
        prop_assert_eq!((plan.hops(), plan.len(), plan.is_empty()), (hops.unwrap_or(0), mine.len(), mine.is_empty()));
        let is_computed = |at: usize| expected[0][at].is_none() && !(at < kept && (from..until).contains(&at));
        let computed: Vec<usize> = plan.compute().iter().flat_map(|&(start, end)| start..end).collect();
        prop_assert_eq!(computed, (0..mine.len()).filter(|&at| is_computed(at)).collect::<Vec<_>>());
        prop_assert!(plan.compute().windows(2).all(|pair| pair[0].1 < pair[1].0));
    }
}

/// The highest end of a complete block, or of the KV in the last block.
fn manifest_end(senders: &[Sender]) -> usize {
    let last = |sender: &Sender| {
        let end = sender
            .labels
            .iter()
            .rposition(Option::is_some)
            .map_or(0, |at| at + 1);
        let size = sender.block_size;
        let block = (0..end.div_ceil(size))
            .rev()
            .find(|&at| sender.label(at * size).is_some());
        block.map_or(0, |block| ((block + 1) * size).min(end))
    };
    senders.iter().map(last).max().unwrap_or(0)
}
