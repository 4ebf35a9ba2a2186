//! Plans against a model that compares the receiver's tokens with the sender's real ones, one by one.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use super::manifest::MAX_GROUP;
use super::wire::Writer;
use super::*;
use crate::error::{Error, ErrorKind, Refusal, Result};
use crate::ids::BlockId;
use crate::ledger::{Begin, LabelRun, LedgerSource, Present, SequenceLedger};
use crate::namespace::{Namespace, Salt};
use crate::plan::Class;
use crate::policy::ReusePolicy;
use crate::tokens::TokenSequence;
use crate::tree::Imported;

fn key() -> TransferKey {
    TransferKey::new(b"the deployment's key").unwrap()
}

fn sequence(tokens: &[u32]) -> TokenSequence {
    let namespace =
        Arc::new(Namespace::new("m", "auto", "default", None, Salt::Tenant("t".into())).unwrap());
    TokenSequence::new(namespace, tokens.to_vec(), Vec::new()).unwrap()
}

fn ids(count: usize, first: u32) -> Vec<BlockId> {
    (0..u32::try_from(count).unwrap())
        .map(|id| BlockId((id * 7 + first) % 1009))
        .collect()
}

fn refusal(error: &Error) -> Option<Refusal> {
    match error.kind() {
        ErrorKind::TransferRefused(reason) => Some(reason),
        _ => None,
    }
}

/// A sender: its tokens, what it has of them, and one group of blocks.
#[derive(Clone, Debug)]
struct Sender {
    tokens: Vec<u32>,
    labels: Vec<Option<(Class, u16)>>,
    block_size: usize,
}

impl Sender {
    fn runs(&self) -> Vec<LabelRun> {
        let mut runs: Vec<LabelRun> = Vec::new();
        for (at, label) in self.labels.iter().enumerate() {
            let Some((class, hops)) = *label else {
                continue;
            };
            match runs.last_mut() {
                Some(last) if (last.end, last.class, last.hops) == (at, class, hops) => {
                    last.end += 1;
                }
                _ => runs.push(LabelRun {
                    start: at,
                    end: at + 1,
                    class,
                    hops,
                }),
            }
        }
        runs
    }

    fn blocks(&self) -> Vec<BlockId> {
        ids(self.tokens.len().div_ceil(self.block_size), 3)
    }

    fn manifest(&self) -> Result<TransferManifest> {
        let blocks = self.blocks();
        let group = SentGroup {
            group: 0,
            block_size: self.block_size,
            blocks: &blocks,
        };
        let labels = self.runs();
        let end = labels.last().map_or(0, |label| label.end);
        TransferManifest::new(&sequence(&self.tokens), &[group], &labels, end, &key())
    }

    /// The label of the block of a position: that of its worst token, none if it lacks one.
    fn label(&self, at: usize) -> Option<(Class, u16)> {
        let end = self.labels.iter().rposition(Option::is_some)? + 1;
        if at >= end {
            return None;
        }
        let block = at / self.block_size * self.block_size;
        let mut worst = (Class::Exact, 0);
        for label in &self.labels[block..(block + self.block_size).min(end)] {
            if let (Class::Approximate, hops) = (*label)? {
                worst = (Class::Approximate, worst.1.max(hops));
            }
        }
        Some(worst)
    }

    /// Whether the receiver may find the exact token at a position: the same tokens up to the end of its block.
    fn offers(&self, mine: &[u32], at: usize) -> bool {
        let last = self
            .labels
            .iter()
            .rposition(Option::is_some)
            .map_or(0, |at| at + 1);
        let stop = ((at / self.block_size + 1) * self.block_size).min(last);
        let is_same = mine
            .get(..stop)
            .is_some_and(|mine| *mine == self.tokens[..stop]);
        self.label(at) == Some((Class::Exact, 0)) && is_same
    }
}

/// Tokens of a small alphabet: other lists are cut from them.
fn tokens() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0u32..3, 0..90)
}

fn edit(tokens: Vec<u32>) -> impl Strategy<Value = (Vec<u32>, Vec<u32>)> {
    let pieces = prop::collection::vec((0..tokens.len() + 1, 0usize..60, 0u32..4), 0..4);
    (Just(tokens), pieces).prop_map(|(tokens, pieces)| {
        let mut mine = Vec::new();
        for (place, (start, len, noise)) in pieces.into_iter().enumerate() {
            let start = if place == 0 && noise > 0 { 0 } else { start };
            mine.extend(&tokens[start..(start + len).min(tokens.len())]);
            mine.extend(std::iter::repeat_n(7, if noise == 3 { 2 } else { 0 }));
        }
        (tokens, mine)
    })
}

/// Two texts of a few pieces, so that what one has stands in many places of the other.
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

fn labels() -> impl Strategy<Value = Vec<Option<(Class, u16)>>> {
    let label = prop_oneof![
        6 => Just(Some((Class::Exact, 0))),
        1 => (0u16..3).prop_map(|hops| Some((Class::Approximate, hops))),
        1 => Just(None),
    ];
    let parts = prop::collection::vec((label, 1usize..50), 0..6);
    parts.prop_map(|parts| {
        let label = |(label, count)| std::iter::repeat_n(label, count);
        parts.into_iter().flat_map(label).collect()
    })
}

fn policy() -> impl Strategy<Value = ReusePolicy> {
    (any::<bool>(), 8usize..20, 0u16..3, 0usize..3, 0usize..3).prop_map(
        |(approximate, min_run, max_hops, recompute_first, recompute_last)| ReusePolicy {
            approximate,
            min_run: Some(min_run),
            max_hops,
            recompute_first,
            recompute_last,
            ..ReusePolicy::EXACT_ONLY
        },
    )
}

proptest! {
    #[test]
    fn what_is_loaded_is_what_its_label_says(
        ((tokens, mine), labels) in (tokens().prop_flat_map(edit), labels()),
        block_size in 1usize..18, my_size in 1usize..18, policy in policy(),
        (from, until) in (0usize..90, 0usize..90), keep_last in 0usize..4,
    ) {
        let mut labels = labels;
        labels.truncate(tokens.len());
        let sender = Sender { tokens, labels, block_size };
        let manifest = sender.manifest().unwrap();
        let again = TransferManifest::from_bytes(manifest.to_bytes(), &TransferLimits::default()).unwrap();
        prop_assert_eq!(&again, &manifest);
        let (from, until) = (from.min(until).min(mine.len()), from.max(until).min(mine.len()));
        let table = ids(mine.len().div_ceil(my_size) + 1, 11);
        let local = [LocalGroup { group: 0, block_size: Some(my_size), blocks: &table }];
        let options = TransferOptions { cached: from..until, keep_last, policy: &policy };
        let plan = TransferPlan::new(&again, &sequence(&mine), &local, &key(), &options).unwrap();

        let kept = mine.len().saturating_sub(keep_last);
        let mut fate = vec![0; mine.len()];
        for (at, fate) in fate.iter_mut().enumerate() {
            *fate += usize::from((from..until).contains(&at) && at < kept);
        }
        for &(start, end) in plan.compute() {
            fate[start..end].iter_mut().for_each(|fate| *fate += 1);
        }
        let blocks = sender.blocks();
        let mut exact = vec![false; mine.len()];
        for pair in plan.pairs() {
            for at in pair.start..pair.end {
                fate[at] += 1;
                prop_assert!(at < kept && !(from..until).contains(&at));
                let source = usize::try_from(i64::try_from(at).unwrap() - pair.delta).unwrap();
                prop_assert_eq!(pair.remote, blocks[source / block_size]);
                prop_assert_eq!(pair.local, table[at / my_size]);
                prop_assert_eq!(mine[at], sender.tokens[source]);
                let (class, hops) = sender.label(source).unwrap();
                let in_place = pair.delta == 0 && mine[..at] == sender.tokens[..at];
                if pair.class == Class::Exact {
                    prop_assert!(in_place && class == Class::Exact && pair.hops == 0);
                    exact[at] = true;
                } else {
                    prop_assert!(policy.approximate && pair.hops <= policy.max_hops);
                    prop_assert!(pair.hops == hops + 1 || in_place && pair.hops == hops);
                }
            }
        }
        // Each token has one fate, and nothing that could be had exactly is computed or worse.
        prop_assert!(fate.iter().all(|&fate| fate == 1));
        for (at, exact) in exact.into_iter().enumerate() {
            let is_wanted = at < kept && !(from..until).contains(&at);
            let is_offered = at < sender.labels.len() && sender.offers(&mine, at);
            prop_assert_eq!(exact, is_wanted && is_offered, "token {}", at);
        }
    }
}

/// A block of the sender's, as a manifest names it.
#[derive(Clone)]
struct Named {
    range: Range<usize>,
    class: Class,
    hops: u16,
    id: BlockId,
}

/// Where a token of the prompt comes from: its class, its position at the sender's, and its hops.
type Origin = (Class, usize, u16);

/// What a plan should be, token by token.
struct Model<'a> {
    sender: &'a Sender,
    mine: &'a [u32],
    policy: &'a ReusePolicy,
    wanted: Vec<bool>,
}

impl Model<'_> {
    /// The sender's blocks without look-ahead, by the labels of their tokens.
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
        // In place, up to the first block of a run that differs.
        let mut goes_on: Option<(usize, Class, u16)> = None;
        for block in &blocks {
            let Range { start, end } = block.range;
            let is_same = |range: Range<usize>| {
                self.mine.get(range.clone()) == Some(&self.sender.tokens[range])
            };
            let is_next = goes_on == Some((start, block.class, block.hops));
            let begins = start < self.mine.len() && is_same(0..start);
            let follows = self.follows(&blocks, block);
            if (if follows { is_next } else { begins }) && is_same(start..end) {
                goes_on = Some((end, block.class, block.hops));
                let is_allowed = block.class == Class::Exact
                    || approximate && block.hops <= self.policy.max_hops;
                for at in block
                    .range
                    .clone()
                    .filter(|&at| is_allowed && self.wanted[at])
                {
                    origins[at] = Some((block.class, at, block.hops));
                }
            } else {
                goes_on = None;
            }
        }
        if approximate {
            self.moved(&blocks, &mut origins);
        }
        origins
    }

    /// Whether a block goes on with the run of the one before it.
    fn follows(&self, blocks: &[Named], block: &Named) -> bool {
        blocks.iter().any(|before| {
            before.range.end == block.range.start
                && (before.class, before.hops) == (block.class, block.hops)
        })
    }

    fn moved(&self, blocks: &[Named], origins: &mut [Option<Origin>]) {
        let blocks: Vec<&Named> = blocks
            .iter()
            .filter(|block| block.hops < self.policy.max_hops)
            .collect();
        // Each chain of blocks whose tokens the prompt has with one distance: where it begins here, and its blocks.
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
        let mut at = 0;
        while at < free.len() {
            let gap_end = (at..free.len()).find(|&at| !free[at]).unwrap_or(free.len());
            let source =
                |start: usize, chain: &[&Named], at: usize| chain[0].range.start + at - start;
            let block_of = |chain: &[&Named], source: usize| -> Named {
                let holds = |block: &&&Named| block.range.contains(&source);
                (**chain.iter().find(holds).unwrap()).clone()
            };
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
            let Some((_, start, chain, end)) = best else {
                at += 1;
                continue;
            };
            let first = (at + self.policy.recompute_first).min(end);
            for token in first..end.saturating_sub(self.policy.recompute_last).max(first) {
                let here = source(start, chain, token);
                let hops = block_of(chain, here).hops + 1;
                origins[token] = Some((Class::Approximate, here, hops));
            }
            at = end;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6000, ..ProptestConfig::default() })]

    #[test]
    fn plans_equal_the_model(
        ((tokens, mine), labels) in (prop_oneof![tokens().prop_flat_map(edit), pieced()], prop_oneof![labels(), Just(vec![Some((Class::Exact, 0)); 90])]),
        sizes in prop::collection::vec(prop_oneof![1usize..6, 1usize..18], 1..3), my_size in prop::option::of(1usize..18),
        policy in policy(), approximate in prop::bool::weighted(0.7), share in prop_oneof![3 => Just(1.0), 1 => 0.0..1.0f64], forbids in prop::bool::weighted(0.1),
        (from, until) in prop_oneof![Just((0usize, 0usize)), (0usize..90, 0usize..90)], keep_last in 0usize..4, lookahead in 0usize..40,
    ) {
        let policy = ReusePolicy {
            approximate: approximate || policy.approximate,
            max_hops: policy.max_hops.max(u16::from(approximate)),
            max_approximate_share: share,
            forbid_kinds: if forbids { vec!["kind".to_owned()] } else { vec![] },
            ..policy
        };
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
            .map(|((group, sender), blocks)| SentGroup { group: 3 * group, block_size: sender.block_size, blocks })
            .collect();
        let manifest =
            TransferManifest::new(&sequence(&tokens), &groups, &senders[0].runs(), end + lookahead, &key()).unwrap();
        prop_assert_eq!(manifest.num_tokens(), manifest_end(&senders));
        let (from, until) = (from.min(until).min(mine.len()), from.max(until).min(mine.len()));
        let my_sizes: Vec<usize> = sizes.iter().map(|&size| my_size.unwrap_or(size)).collect();
        let mine_tables: Vec<Vec<BlockId>> =
            my_sizes.iter().map(|&size| ids(mine.len().div_ceil(size) + 1, 11)).collect();
        let local: Vec<LocalGroup<'_>> = (0..)
            .zip(&mine_tables)
            .map(|(group, blocks)| LocalGroup { group: 3 * group, block_size: my_size, blocks })
            .collect();
        let options = TransferOptions { cached: from..until, keep_last, policy: &policy };
        let plan = TransferPlan::new(&manifest, &sequence(&mine), &local, &key(), &options).unwrap();

        let kept = mine.len().saturating_sub(keep_last);
        let wanted: Vec<bool> = (0..mine.len()).map(|at| at < kept && !(from..until).contains(&at)).collect();
        let models = |policy: &ReusePolicy| -> Vec<Vec<Option<Origin>>> {
            let of_group = |sender: &Sender| {
                // The share is of what is loaded at last, of all groups.
                let policy = &ReusePolicy { max_approximate_share: 1.0, ..policy.clone() };
                Model { sender, mine: &mine, policy, wanted: wanted.clone() }.origins()
            };
            let mut origins: Vec<_> = senders.iter().map(of_group).collect();
            for at in 0..mine.len() {
                if origins.iter().any(|origins| origins[at].is_none()) {
                    origins.iter_mut().for_each(|origins| origins[at] = None);
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
                prop_assert_eq!(pair.local, mine_tables[group][at / my_size]);
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

/// Up to where some block has KV of all its tokens, or of the first ones of the last.
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

#[test]
fn a_changed_byte_is_refused_wherever_it_stands() {
    let sender = Sender {
        tokens: (0..40).collect(),
        labels: vec![Some((Class::Exact, 0)); 40],
        block_size: 16,
    };
    let raw = sender.manifest().unwrap().to_bytes().to_vec();
    let seq = sequence(&sender.tokens);
    let table = ids(3, 0);
    let local = [LocalGroup {
        group: 0,
        block_size: None,
        blocks: &table,
    }];
    let plan = |raw: &[u8]| {
        let manifest = TransferManifest::from_bytes(raw, &TransferLimits::default())?;
        TransferPlan::new(&manifest, &seq, &local, &key(), &TransferOptions::default())
    };
    assert_eq!(plan(&raw).unwrap().num_exact(), 40);
    for at in 0..raw.len() {
        for flip in [1, 0x80, 0xff] {
            let mut changed = raw.clone();
            changed[at] ^= flip;
            let error = plan(&changed).unwrap_err();
            assert!(refusal(&error).is_some(), "byte {at}: {error}");
        }
        let error = plan(&raw[..at]).unwrap_err();
        assert_eq!(refusal(&error), Some(Refusal::Malformed), "{error}");
    }
}

#[test]
fn a_manifest_of_another_version_is_named_so() {
    let sender = Sender {
        tokens: vec![],
        labels: vec![],
        block_size: 16,
    };
    let mut raw = sender.manifest().unwrap().to_bytes().to_vec();
    let at = 1 + 1 + "kvtrie.manifest".len();
    assert_eq!(raw[at], 1);
    raw[at] = 2;
    let error = TransferManifest::from_bytes(&raw, &TransferLimits::default()).unwrap_err();
    assert_eq!(refusal(&error), Some(Refusal::Version));
}

#[test]
fn limits_are_those_of_the_reader() {
    let sender = Sender {
        tokens: (0..40).collect(),
        labels: vec![Some((Class::Exact, 0)); 40],
        block_size: 16,
    };
    let raw = sender.manifest().unwrap().to_bytes().to_vec();
    let fits = TransferLimits {
        max_bytes: raw.len(),
        max_groups: 1,
        max_runs: 1,
        max_blocks: 3,
        max_tokens: 40,
        max_block_size: 16,
    };
    assert!(TransferManifest::from_bytes(&raw, &fits).is_ok());
    let shrinks: [fn(&mut TransferLimits); 6] = [
        |limits| limits.max_bytes -= 1,
        |limits| limits.max_groups -= 1,
        |limits| limits.max_runs -= 1,
        |limits| limits.max_blocks -= 1,
        |limits| limits.max_tokens -= 1,
        |limits| limits.max_block_size -= 1,
    ];
    for shrink in shrinks {
        let mut limits = fits;
        shrink(&mut limits);
        let error = TransferManifest::from_bytes(&raw, &limits).unwrap_err();
        assert_eq!(
            refusal(&error),
            Some(Refusal::Limits),
            "{limits:?}: {error}"
        );
    }
}

#[test]
fn a_crowded_search_tries_the_nearest_places() {
    // 300 equal blocks: the prompt has them all one token later.
    let sender = Sender {
        tokens: vec![5; 600],
        labels: vec![Some((Class::Exact, 0)); 600],
        block_size: 2,
    };
    let mut mine = vec![9];
    mine.extend([5; 600]);
    let table = ids(301, 0);
    let local = [LocalGroup {
        group: 0,
        block_size: None,
        blocks: &table,
    }];
    let policy = ReusePolicy {
        approximate: true,
        ..ReusePolicy::EXACT_ONLY
    };
    let options = TransferOptions {
        policy: &policy,
        ..TransferOptions::default()
    };
    let manifest = sender.manifest().unwrap();
    let plan = TransferPlan::new(&manifest, &sequence(&mine), &local, &key(), &options).unwrap();
    assert_eq!(plan.compute(), [(0, 1)]);
    assert!(plan.pairs().iter().all(|pair| pair.delta == 1));
}

#[test]
fn forbidden_kinds_leave_nothing_approximate() {
    // The first block is exact, the second approximate, and the prompt has the third one token later.
    let mut labels = vec![Some((Class::Exact, 0)); 48];
    labels[16..32].fill(Some((Class::Approximate, 1)));
    let sender = Sender {
        tokens: (0..48).collect(),
        labels,
        block_size: 16,
    };
    let mut mine: Vec<u32> = (0..32).collect();
    mine.push(99);
    mine.extend(32..48);
    let table = ids(4, 0);
    let local = [LocalGroup {
        group: 0,
        block_size: None,
        blocks: &table,
    }];
    let manifest = sender.manifest().unwrap();
    let plan = |forbid_kinds| {
        let policy = ReusePolicy {
            approximate: true,
            forbid_kinds,
            ..ReusePolicy::EXACT_ONLY
        };
        let options = TransferOptions {
            policy: &policy,
            ..TransferOptions::default()
        };
        TransferPlan::new(&manifest, &sequence(&mine), &local, &key(), &options).unwrap()
    };
    assert_eq!(plan(Vec::new()).compute(), [(32, 33)]);
    let forbidden = plan(vec!["reasoning".to_owned()]);
    assert_eq!(forbidden.compute(), [(16, 49)]);
    assert_eq!(
        (forbidden.num_exact(), forbidden.num_approximate()),
        (16, 0)
    );
}

#[test]
fn manifests_that_nobody_would_write_are_refused() {
    /// A run as it is written, right or wrong.
    #[derive(Clone)]
    struct Run {
        entries: usize,
        numbers: [usize; 4],
        ids: Vec<u32>,
        prefix: usize,
        digests: usize,
        digest: usize,
    }
    #[derive(Clone)]
    struct Group {
        entries: usize,
        group: usize,
        block_size: usize,
        runs: Vec<Run>,
        announced: Option<usize>,
    }
    let run = |start: usize, num_tokens: usize, flags: usize, hops: usize, first: u32| {
        let blocks = u32::try_from(num_tokens.div_ceil(4)).unwrap();
        let sent = if flags == 2 { 0 } else { 1 };
        Run {
            entries: 8,
            numbers: [start, num_tokens, flags, hops],
            ids: (first..first + blocks).collect(),
            prefix: 16 * sent,
            digests: 16 * sent * blocks as usize,
            digest: 16,
        }
    };
    let read = |groups: &[Group], limits: &TransferLimits| {
        let mut out = Writer::default();
        out.array(4);
        out.text("kvtrie.manifest");
        out.uint(1);
        out.array(5);
        for name in ["m", "auto", "default"] {
            out.text(name);
        }
        out.nil();
        out.nil();
        out.array(groups.len());
        for group in groups {
            out.array(group.entries);
            out.uint(group.group);
            out.uint(group.block_size);
            out.array(group.announced.unwrap_or(group.runs.len()));
            for run in &group.runs {
                out.array(run.entries);
                for number in run.numbers {
                    out.uint(number);
                }
                let ids: Vec<u8> = run.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
                out.bin(&ids);
                out.bin(&vec![1; run.prefix]);
                out.bin(&vec![2; run.digests]);
                out.bin(&vec![3; run.digest]);
            }
        }
        TransferManifest::from_bytes(out.bytes(), limits)
    };
    let group = |group: usize, runs: Vec<Run>| Group {
        entries: 3,
        group,
        block_size: 4,
        runs,
        announced: None,
    };
    let of = |runs: Vec<Run>| read(&[group(0, runs)], &TransferLimits::default());
    let most_hops = usize::from(ReusePolicy::MAX_HOPS);

    // What is right, to its limits.
    let good = of(vec![
        run(0, 8, 0, 0, 0),
        run(8, 4, 1, most_hops, 10),
        run(16, 3, 1, 0, 20),
        run(20, 8, 2, 0, 30),
    ])
    .unwrap();
    let runs: Vec<_> = good
        .runs()
        .map(|run| (run.start(), run.end(), run.class(), run.hops()))
        .collect();
    assert_eq!(
        runs,
        [
            (0, 8, Class::Exact, 0),
            (8, 12, Class::Approximate, ReusePolicy::MAX_HOPS),
            (16, 19, Class::Approximate, 0),
            (20, 28, Class::Compute, 0)
        ]
    );
    assert_eq!((good.num_tokens(), good.groups().len()), (19, 1));
    let ids: Vec<u32> = good
        .runs()
        .flat_map(|run| run.blocks().map(|id| id.0))
        .collect();
    assert_eq!(ids, [0, 1, 10, 20, 30, 31]);

    let malformed = |done: Result<TransferManifest>, words: &str| {
        let error = done.unwrap_err();
        assert_eq!(refusal(&error), Some(Refusal::Malformed), "{error}");
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    };
    let wrong = |change: &dyn Fn(&mut Run)| {
        let mut wrong = run(8, 8, 0, 0, 10);
        change(&mut wrong);
        of(vec![run(0, 8, 0, 0, 0), wrong])
    };
    wrong(&|_| {}).unwrap();
    malformed(
        wrong(&|run| run.entries = 7),
        "a run has 7 entries; it must have 8",
    );
    malformed(
        wrong(&|run| run.numbers[0] = 9),
        "a run [9, 17) with flags 0 in blocks of 4 behind 8",
    );
    malformed(wrong(&|run| run.numbers[0] = 4), "a run [4, 12)");
    malformed(wrong(&|run| run.numbers[1] = 0), "a run [8, 8)");
    malformed(wrong(&|run| run.numbers[2] = 3), "0 hops with flags 3");
    malformed(wrong(&|run| run.numbers[3] = 1), "1 hops with flags 0");
    malformed(wrong(&|run| run.ids[1] = 1 << 31), "is not in [0, ");
    malformed(
        wrong(&|run| run.ids[1] = 10),
        "block 10 comes twice in its group",
    );
    malformed(
        wrong(&|run| run.ids[1] = 1),
        "block 1 comes twice in its group",
    );
    malformed(
        wrong(&|run| run.ids.push(12)),
        "the blocks of a run has 12 bytes; it must have 8",
    );
    malformed(
        wrong(&|run| run.prefix = 15),
        "the prefix digest of a run has 15 bytes; it must have 16",
    );
    malformed(
        wrong(&|run| run.digests = 16),
        "the block digests of a run has 16 bytes; it must have 32",
    );
    malformed(
        wrong(&|run| run.digest = 17),
        "the digest of a run has 17 bytes; it must have 16",
    );
    // Look-ahead blocks are whole, have no digests and no hops, and come last; a part of a block comes last but for them.
    let ahead = run(8, 8, 2, 0, 10);
    of(vec![ahead.clone()]).unwrap();
    malformed(of(vec![run(8, 7, 2, 0, 10)]), "a run [8, 15) with flags 2");
    malformed(of(vec![run(8, 8, 2, 1, 10)]), "1 hops with flags 2");
    malformed(
        of(vec![ahead.clone(), run(16, 4, 0, 0, 20)]),
        "a run [16, 20)",
    );
    malformed(
        of(vec![ahead.clone(), run(16, 4, 2, 0, 20)]),
        "a run [16, 20)",
    );
    malformed(
        of(vec![run(0, 7, 0, 0, 0), run(8, 8, 0, 0, 10)]),
        "a run [8, 16)",
    );
    of(vec![run(0, 7, 0, 0, 0), ahead.clone()]).unwrap();
    malformed(
        of(vec![Run {
            prefix: 16,
            ..ahead.clone()
        }]),
        "has 16 bytes; it must have 0",
    );
    malformed(
        of(vec![Run {
            digests: 32,
            ..ahead
        }]),
        "has 32 bytes; it must have 0",
    );

    let limits = TransferLimits::default();
    let some = || vec![run(0, 8, 0, 0, 0)];
    let two =
        |first: usize, second: usize| read(&[group(first, some()), group(second, some())], &limits);
    let most = MAX_GROUP as usize;
    assert_eq!(
        two(0, most).unwrap().groups().collect::<Vec<_>>(),
        [(0, 4), (MAX_GROUP, 4)]
    );
    malformed(two(3, 3), "group 3 behind group 3; groups ascend");
    malformed(two(3, 2), "group 2 behind group 3");
    malformed(two(0, most + 1), "is not in [0, ");
    malformed(two(0, usize::MAX), "is not in [0, ");
    let one = |group| read(&[group], &limits);
    malformed(
        one(Group {
            entries: 4,
            ..group(0, some())
        }),
        "a group has 4 entries; it must have 3",
    );
    malformed(
        one(Group {
            block_size: 0,
            ..group(0, some())
        }),
        "block_size is 0",
    );
    malformed(
        one(Group {
            announced: Some(40),
            ..group(0, some())
        }),
        "40 runs of 33 bytes or more announced",
    );
    malformed(
        one(Group {
            announced: Some(2),
            ..group(0, some())
        }),
        "",
    );
    malformed(
        one(Group {
            announced: Some(0),
            ..group(0, some())
        }),
        "bytes too many",
    );
    // Counts are those of all groups together.
    let refused = |limits: TransferLimits| {
        let error = read(&[group(0, some()), group(1, some())], &limits).unwrap_err();
        assert_eq!(refusal(&error), Some(Refusal::Limits), "{error}");
    };
    let fits = TransferLimits {
        max_groups: 2,
        max_runs: 2,
        max_blocks: 4,
        max_tokens: 8,
        max_block_size: 4,
        ..limits
    };
    read(&[group(0, some()), group(1, some())], &fits).unwrap();
    refused(TransferLimits {
        max_groups: 1,
        ..fits
    });
    refused(TransferLimits {
        max_runs: 1,
        ..fits
    });
    refused(TransferLimits {
        max_blocks: 3,
        ..fits
    });
    refused(TransferLimits {
        max_tokens: 7,
        ..fits
    });
    refused(TransferLimits {
        max_block_size: 3,
        ..fits
    });
}

#[test]
fn what_no_manifest_is_made_of() {
    let seq = sequence(&(0..10).collect::<Vec<_>>());
    let label = |start, end, class| LabelRun {
        start,
        end,
        class,
        hops: 0,
    };
    let exact = [label(0, 10, Class::Exact)];
    let table = ids(4, 0);
    let group = |group, block_size| SentGroup {
        group,
        block_size,
        blocks: &table,
    };
    let made = |groups: &[SentGroup<'_>], labels: &[LabelRun], end| {
        TransferManifest::new(&seq, groups, labels, end, &key())
    };
    let refused = |done: Result<TransferManifest>, words: &str| {
        let error = done.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    };
    made(&[group(0, 4), group(MAX_GROUP, 3)], &exact, 10).unwrap();
    for labels in [
        vec![label(4, 4, Class::Exact)],
        vec![label(4, 3, Class::Exact)],
        vec![label(0, 4, Class::Compute)],
        vec![label(0, 5, Class::Exact), label(4, 8, Class::Exact)],
    ] {
        refused(
            made(&[group(0, 4)], &labels, 10),
            "labels are not empty, ascend",
        );
    }
    let touching = [label(0, 5, Class::Exact), label(5, 8, Class::Approximate)];
    made(&[group(0, 4)], &touching, 10).unwrap();
    refused(
        made(&[group(0, 4)], &[label(0, 11, Class::Exact)], 11),
        "KV of 11 tokens, the sequence has 10",
    );
    refused(
        made(&[group(0, 4)], &exact, 9),
        "lookahead_end is 9; it must be in [10, 4294967295]",
    );
    refused(
        made(&[group(0, 4)], &exact, 1 << 32),
        "lookahead_end is 4294967296",
    );
    refused(
        made(&[group(1, 4), group(1, 4)], &exact, 10),
        "group 1; groups ascend",
    );
    refused(
        made(&[group(MAX_GROUP + 1, 4)], &exact, 10),
        "groups ascend and are in [0, ",
    );
    refused(
        made(&[group(0, 0)], &exact, 10),
        "the block size of group 0 is 0; it must be in [1, 4294967295]",
    );
    refused(
        made(&[group(0, 1 << 32)], &exact, 10),
        "is 4294967296; it must be in [1, ",
    );
    refused(
        made(&[group(0, 4)], &exact, 17),
        "group 0 has 4 blocks, 17 tokens need 5 of 4 tokens",
    );
    made(&[group(0, 4)], &exact, 16).unwrap();
    let with = |last: u32| -> Vec<BlockId> { [0, 5, last, 9].map(BlockId).to_vec() };
    let most = u32::try_from(BlockId::MAX_BLOCKS).unwrap();
    for (last, words) in [
        (most, "blocks has"),
        (5, "block 5 comes twice in the table of group 2"),
        (0, "block 0 comes twice"),
    ] {
        let table = with(last);
        let group = SentGroup {
            group: 2,
            block_size: 4,
            blocks: &table,
        };
        refused(
            TransferManifest::new(&seq, &[group], &exact, 10, &key()),
            words,
        );
    }
    // What no token needs may be anything.
    let table = [0, 5, most - 1, 5].map(BlockId);
    let group = SentGroup {
        group: 2,
        block_size: 4,
        blocks: &table,
    };
    TransferManifest::new(&seq, &[group], &exact, 12, &key()).unwrap();
}

#[test]
fn manifests_of_other_namespaces_are_refused_by_the_field() {
    let namespace = |model: &str, dtype: &str, rope: &str, adapter: Option<&str>, salt: Salt| {
        let adapter = adapter.map(str::to_owned);
        Arc::new(Namespace::new(model, dtype, rope, adapter, salt).unwrap())
    };
    let of = |namespace: &Arc<Namespace>| {
        TokenSequence::new(Arc::clone(namespace), vec![1, 2], vec![]).unwrap()
    };
    let tenant = |salt: &str| Salt::Tenant(salt.into());
    let mine = namespace("m", "auto", "default", None, tenant("t"));
    let table = ids(1, 0);
    let manifest = |namespace: &Arc<Namespace>| {
        let group = SentGroup {
            group: 0,
            block_size: 16,
            blocks: &table,
        };
        TransferManifest::new(&of(namespace), &[group], &[], 0, &key()).unwrap()
    };
    let plan = |theirs: &Arc<Namespace>, mine: &Arc<Namespace>| {
        let local = [LocalGroup {
            group: 0,
            block_size: None,
            blocks: &table,
        }];
        TransferPlan::new(
            &manifest(theirs),
            &of(mine),
            &local,
            &key(),
            &TransferOptions::default(),
        )
    };
    assert_eq!(plan(&mine, &mine).unwrap().compute(), [(0, 2)]);
    let shared = namespace("m", "auto", "default", None, Salt::Shared);
    assert!(plan(&shared, &shared).is_ok());
    let lora = namespace("m", "auto", "default", Some("lora"), tenant("t"));
    let known = manifest(&lora);
    assert_eq!(
        (
            known.model(),
            known.kv_dtype(),
            known.rope(),
            known.adapter(),
            known.is_shared()
        ),
        ("m", "auto", "default", Some("lora"), false)
    );
    let known = manifest(&shared);
    assert_eq!(
        (known.adapter(), known.is_shared(), known.num_tokens()),
        (None, true, 0)
    );
    let long = "m".repeat(80);
    let longer = [long.clone() + "a", long.clone() + "b"];
    let long = longer
        .clone()
        .map(|model| namespace(&model, "auto", "default", None, tenant("t")));
    let cases = [
        (
            &namespace("n", "auto", "default", None, tenant("t")),
            &mine,
            "model is \"n\" in the manifest and \"m\" in the sequence",
        ),
        (
            &namespace("m", "fp8", "default", None, tenant("t")),
            &mine,
            "kv_dtype is \"fp8\"",
        ),
        (
            &namespace("m", "auto", "yarn", None, tenant("t")),
            &mine,
            "rope is \"yarn\"",
        ),
        (
            &lora,
            &mine,
            "the adapter is \"lora\" in the manifest and none in the sequence",
        ),
        (
            &namespace("m", "auto", "default", None, tenant("u")),
            &mine,
            "the salt is one in the manifest and another",
        ),
        (
            &mine,
            &shared,
            "the salt is a tenant's in the manifest and shared in the sequence",
        ),
        (
            &shared,
            &mine,
            "the salt is shared in the manifest and a tenant's in the sequence",
        ),
        (
            &long[0],
            &long[1],
            "... (81 characters) in the sequence; they differ behind character 80",
        ),
    ];
    for (theirs, mine, words) in cases {
        let error = plan(theirs, mine).unwrap_err();
        assert_eq!(refusal(&error), Some(Refusal::Namespace));
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    }
    let error = plan(&lora, &mine).unwrap_err().to_string();
    assert!(!error.contains("differ behind"), "{error}");
}

#[test]
fn what_a_plan_is_asked_wrongly() {
    let sender = Sender {
        tokens: (0..10).collect(),
        labels: vec![Some((Class::Exact, 0)); 10],
        block_size: 4,
    };
    let manifest = sender.manifest().unwrap();
    let table = ids(3, 0);
    let group = |group| LocalGroup {
        group,
        block_size: None,
        blocks: &table,
    };
    let seq = sequence(&sender.tokens);
    let plan = |local: &[LocalGroup<'_>], cached: Range<usize>, policy: &ReusePolicy| {
        let options = TransferOptions {
            cached,
            policy,
            ..TransferOptions::default()
        };
        TransferPlan::new(&manifest, &seq, local, &key(), &options)
    };
    let exact = &ReusePolicy::EXACT_ONLY;
    assert_eq!(plan(&[group(0)], 0..10, exact).unwrap().compute(), []);
    let reversed = Range { start: 5, end: 4 };
    let short = ReusePolicy {
        min_run: Some(7),
        ..ReusePolicy::EXACT_ONLY
    };
    let invalid = [
        (
            plan(&[group(0)], reversed, exact),
            "cached is [5, 4); it must ascend and lie in [0, 10]",
        ),
        (plan(&[group(0)], 0..11, exact), "cached is [0, 11)"),
        (
            plan(&[group(0), group(0)], 0..0, exact),
            "group 0 behind group 0; groups ascend",
        ),
        (
            plan(&[group(1), group(0)], 0..0, exact),
            "group 0 behind group 1; groups ascend",
        ),
        (
            plan(
                &[LocalGroup {
                    block_size: Some(3),
                    ..group(0)
                }],
                0..0,
                exact,
            ),
            "group 0 has 3 blocks, 10 tokens need 4",
        ),
        (plan(&[group(0)], 0..0, &short), "min_run is 7"),
    ];
    for (done, words) in invalid {
        let error = done.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    }
    for local in [vec![], vec![group(1)], vec![group(0), group(1)]] {
        let error = plan(&local, 0..0, exact).unwrap_err();
        assert_eq!(refusal(&error), Some(Refusal::Groups), "{error}");
    }
}

#[test]
fn a_key_is_bound_to_a_context_of_1024_bytes_at_most() {
    let sender = Sender {
        tokens: (0..10).collect(),
        labels: vec![Some((Class::Exact, 0)); 10],
        block_size: 4,
    };
    let bound = |context: &[u8]| key().bound_to(context);
    let manifest = |key: &TransferKey| {
        let blocks = sender.blocks();
        let group = SentGroup {
            group: 0,
            block_size: 4,
            blocks: &blocks,
        };
        TransferManifest::new(&sequence(&sender.tokens), &[group], &sender.runs(), 10, key).unwrap()
    };
    for len in [1_025, 2_000] {
        let error = bound(&vec![1; len]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&format!("has {len} bytes; the limit is 1024")),
            "{error}"
        );
    }
    assert_eq!(manifest(&bound(b"").unwrap()), manifest(&key()));
    let long = manifest(&bound(&[1; 1_024]).unwrap());
    for (other, is_same) in [
        (key(), false),
        (bound(&[1; 1_023]).unwrap(), false),
        (bound(&[1; 1_024]).unwrap(), true),
    ] {
        assert_eq!(long.verify(&other, "test").is_ok(), is_same);
    }
}

#[test]
fn a_live_request_offers_what_it_has() {
    let mut ledger = SequenceLedger::new(4).unwrap();
    let mut seq = sequence(&(0..18).collect::<Vec<_>>());
    let table = ids(6, 0);
    let begin = Begin {
        source: LedgerSource::Imported(Imported {
            exact_until: 9,
            hops: 2,
        }),
        present: Some(Present::AllBut(&[(2, 5), (12, 13), (17, 18)])),
        in_place: None,
    };
    let id = ledger.begin(&mut seq, &table, begin).unwrap();
    let label = |start, end, class, hops| LabelRun {
        start,
        end,
        class,
        hops,
    };
    let offer = Offer::of(&ledger, id, &seq).unwrap();
    let labels = [
        label(0, 2, Class::Exact, 0),
        label(5, 8, Class::Exact, 0),
        label(8, 12, Class::Approximate, 2),
        label(13, 17, Class::Approximate, 2),
    ];
    assert_eq!(
        (offer.block_size, &offer.blocks, &offer.labels[..]),
        (4, &table, &labels[..])
    );
    assert_eq!(offer.lookahead_end, 17);
    let manifest = offer.manifest(&seq, 7, &key()).unwrap();
    assert_eq!(manifest.groups().collect::<Vec<_>>(), [(7, 4)]);
    ledger.schedule(id, 6, 0).unwrap();
    assert_eq!(Offer::of(&ledger, id, &seq).unwrap().lookahead_end, 19);
    let error = Offer::of(&ledger, id, &sequence(&[1])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);

    // All that it has been given, to the end.
    let mut seq = sequence(&(0..8).collect::<Vec<_>>());
    let begin = Begin {
        present: Some(Present::Below(8)),
        ..Begin::default()
    };
    let id = ledger.begin(&mut seq, &table, begin).unwrap();
    assert_eq!(
        Offer::of(&ledger, id, &seq).unwrap().labels,
        [label(0, 8, Class::Exact, 0)]
    );
    let mut seq = sequence(&[]);
    let id = ledger.begin(&mut seq, &table, Begin::default()).unwrap();
    assert_eq!(Offer::of(&ledger, id, &seq).unwrap().labels, []);
}
