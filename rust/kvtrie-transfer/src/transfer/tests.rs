//! Compares plans with the sender's tokens.

use std::sync::Arc;

use kvtrie_core::{
    BlockId, Class, Error, ErrorKind, Imported, Namespace, ReusePolicy, Salt, TokenSequence,
};
use proptest::prelude::*;

use super::*;
use crate::error::{Refusal, TransferError};
use crate::ledger::{Begin, LabelRun, LedgerSource, SequenceLedger};

mod context;
mod kinds;
mod manifest;
mod model;
mod moved;
mod policy;
mod refusals;

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

/// The group 0 as the sender has it.
fn sent(block_size: usize, blocks: &[BlockId]) -> SentGroup<'_> {
    SentGroup {
        group: 0,
        block_size,
        table: Table::Full(blocks),
    }
}

/// The receiver's table of group 0, in blocks of the sender's size.
fn local(blocks: &[BlockId]) -> [LocalGroup<'_>; 1] {
    [LocalGroup {
        group: 0,
        block_size: None,
        table: Some(Table::Full(blocks)),
    }]
}

/// A label of tokens whose KV has no hops.
fn label(start: usize, end: usize, class: Class) -> LabelRun {
    LabelRun {
        start,
        end,
        class,
        hops: 0,
    }
}

fn approximate_label(start: usize, end: usize, hops: u16) -> LabelRun {
    LabelRun {
        hops,
        ..label(start, end, Class::Approximate)
    }
}

fn approximate() -> ReusePolicy {
    ReusePolicy {
        approximate: true,
        ..ReusePolicy::EXACT_ONLY
    }
}

fn options(policy: &ReusePolicy) -> TransferOptions<'_> {
    TransferOptions {
        policy,
        ..TransferOptions::default()
    }
}

#[derive(Clone, Debug)]
struct Sender {
    tokens: Vec<u32>,
    labels: Vec<Option<(Class, u16)>>,
    block_size: usize,
}

impl Sender {
    /// A sender that has exact KV of all tokens.
    fn exact(tokens: Vec<u32>, block_size: usize) -> Self {
        Self {
            labels: vec![Some((Class::Exact, 0)); tokens.len()],
            tokens,
            block_size,
        }
    }

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

    fn manifest(&self) -> Result<TransferManifest, Error> {
        let blocks = self.blocks();
        let group = sent(self.block_size, &blocks);
        let labels = self.runs();
        let end = labels.last().map_or(0, |label| label.end);
        TransferManifest::new(&sequence(&self.tokens), &[group], &labels, end, &key())
    }

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

    /// Whether the receiver may load the exact token at a position: all tokens are equal up to the end of its block.
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
    let share = prop_oneof![2 => Just(0.0), 1 => 0.0f64..=1.0];
    (
        any::<bool>(),
        8usize..20,
        0u16..3,
        0usize..3,
        0usize..3,
        share,
    )
        .prop_map(
            |(approximate, min_run, max_hops, recompute_first, recompute_last, recompute_share)| {
                ReusePolicy {
                    approximate,
                    min_run: Some(min_run),
                    max_hops,
                    recompute_first,
                    recompute_last,
                    recompute_share,
                    ..ReusePolicy::EXACT_ONLY
                }
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
        let local = [LocalGroup { group: 0, block_size: Some(my_size), table: Some(Table::Full(&table)) }];
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
                prop_assert_eq!(pair.local, Some(table[at / my_size]));
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
        prop_assert!(fate.iter().all(|&fate| fate == 1));
        for (at, exact) in exact.into_iter().enumerate() {
            let is_wanted = at < kept && !(from..until).contains(&at);
            let is_offered = at < sender.labels.len() && sender.offers(&mine, at);
            prop_assert_eq!(exact, is_wanted && is_offered, "token {}", at);
        }
    }
}

#[test]
fn a_changed_byte_is_refused_at_any_place() {
    let sender = Sender::exact((0..40).collect(), 16);
    let raw = sender.manifest().unwrap().to_bytes().to_vec();
    let seq = sequence(&sender.tokens);
    let table = ids(3, 0);
    let local = local(&table);
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
            assert!(error.refusal().is_some(), "byte {at}: {error}");
        }
        let error = plan(&raw[..at]).unwrap_err();
        assert_eq!(error.refusal(), Some(Refusal::Malformed), "{error}");
    }
}

#[test]
fn a_manifest_of_another_version_is_named_so() {
    let sender = Sender::exact(vec![], 16);
    let mut raw = sender.manifest().unwrap().to_bytes().to_vec();
    let at = 1 + 1 + "kvtrie.manifest".len();
    assert_eq!(raw[at], 3);
    for other in [1, 2, 4] {
        raw[at] = other;
        let error = TransferManifest::from_bytes(&raw, &TransferLimits::default()).unwrap_err();
        assert_eq!(error.refusal(), Some(Refusal::Version));
    }
}

#[test]
fn limits_are_those_of_the_reader() {
    let sender = Sender::exact((0..40).collect(), 16);
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
            error.refusal(),
            Some(Refusal::Limits),
            "{limits:?}: {error}"
        );
    }
}

#[test]
fn a_crowded_search_tries_the_nearest_places() {
    // 300 equal blocks, which the prompt has one token later.
    let sender = Sender::exact(vec![5; 600], 2);
    let mut mine = vec![9];
    mine.extend([5; 600]);
    let table = ids(301, 0);
    let local = local(&table);
    let policy = approximate();
    let options = options(&policy);
    let manifest = sender.manifest().unwrap();
    let plan = TransferPlan::new(&manifest, &sequence(&mine), &local, &key(), &options).unwrap();
    assert_eq!(plan.compute(), [(0, 1)]);
    assert!(plan.pairs().iter().all(|pair| pair.delta == 1));
}

#[test]
fn forbidden_kinds_leave_nothing_approximate() {
    // The first block is exact, the second approximate. The prompt has the third block one token later.
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
    let local = local(&table);
    let manifest = sender.manifest().unwrap();
    let plan = |forbid_kinds| {
        let policy = ReusePolicy {
            forbid_kinds,
            ..ReusePolicy::LAXEST
        };
        let options = options(&policy);
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
fn a_key_is_bound_to_a_context_of_1024_bytes_at_most() {
    let sender = Sender::exact((0..10).collect(), 4);
    let bound = |context: &[u8]| key().bound_to(context);
    let manifest = |key: &TransferKey| {
        let blocks = sender.blocks();
        let group = sent(4, &blocks);
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
        source: LedgerSource::Imported(Imported::new(9, 2)),
        missing: Some(&[(2, 5), (12, 13), (17, 18)]),
        num_computed: 0,
        in_place: None,
        session: None,
    };
    let id = ledger.begin(&mut seq, &table, begin).unwrap();
    let offer = Offer::of(&ledger, id, &seq).unwrap();
    let labels = [
        label(0, 2, Class::Exact),
        label(5, 8, Class::Exact),
        approximate_label(8, 12, 2),
        approximate_label(13, 17, 2),
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

    let mut seq = sequence(&(0..8).collect::<Vec<_>>());
    let begin = Begin {
        num_computed: 8,
        ..Begin::default()
    };
    let id = ledger.begin(&mut seq, &table, begin).unwrap();
    assert_eq!(
        Offer::of(&ledger, id, &seq).unwrap().labels,
        [label(0, 8, Class::Exact)]
    );
    let mut seq = sequence(&[]);
    let id = ledger.begin(&mut seq, &table, Begin::default()).unwrap();
    assert_eq!(Offer::of(&ledger, id, &seq).unwrap().labels, []);
}

#[test]
fn a_pair_is_as_long_as_both_blocks_allow() {
    // The labels give two runs of blocks of four tokens, but one run of blocks of eight.
    let labels = [label(0, 4, Class::Exact), approximate_label(4, 8, 1)];
    let (seq, table) = (sequence(&(0..8).collect::<Vec<_>>()), ids(2, 0));
    let sent = [(0, 4), (1, 8)].map(|(group, block_size)| SentGroup {
        group,
        block_size,
        table: Table::Full(&table),
    });
    let manifest = TransferManifest::new(&seq, &sent, &labels, 8, &key()).unwrap();
    let local = [0, 1].map(|group| LocalGroup {
        group,
        block_size: None,
        table: Some(Table::Full(&table)),
    });
    let policy = ReusePolicy::LAXEST;
    let plan = TransferPlan::new(&manifest, &seq, &local, &key(), &options(&policy)).unwrap();
    let pairs: Vec<_> = plan
        .pairs()
        .iter()
        .map(|pair| (pair.group, pair.start, pair.end, pair.class))
        .collect();
    assert_eq!(
        pairs,
        [
            (0, 0, 4, Class::Exact),
            (0, 4, 8, Class::Approximate),
            (1, 0, 8, Class::Approximate)
        ]
    );
}
