//! Transfers between two engines: a manifest of a request, its bytes, and what a receiver plans to load.

use criterion::{Criterion, Throughput};
use kvtrie_benches::{BLOCK_SIZE, Ids, tokens};
use kvtrie_core::{Class, ReusePolicy, TokenSequence};
use kvtrie_transfer::{
    LabelRun, LocalGroup, SentGroup, Table, TransferKey, TransferLimits, TransferManifest,
    TransferOptions, TransferPlan,
};

use crate::setup::{fresh, size};

/// Reasoning that the receiver's prompt lacks: it does not start at a block edge, and its length is not whole blocks.
const REASONING: usize = 5_003;

struct Pair {
    theirs: TokenSequence,
    key: TransferKey,
    manifest: TransferManifest,
}

impl Pair {
    /// A sender of `len` tokens, all of them exact.
    fn new(len: usize) -> Self {
        let (theirs, key) = (
            fresh(tokens(1, len)),
            TransferKey::new(&[7; 32]).expect("a key"),
        );
        let manifest = Self::manifest(&theirs, &key);
        Self {
            theirs,
            key,
            manifest,
        }
    }

    fn manifest(theirs: &TokenSequence, key: &TransferKey) -> TransferManifest {
        let len = theirs.len();
        let group = SentGroup {
            group: 0,
            block_size: BLOCK_SIZE,
            table: Table::Full(&Ids::default().take(len.div_ceil(BLOCK_SIZE))),
        };
        let label = LabelRun {
            start: 0,
            end: len,
            class: Class::Exact,
            hops: 0,
        };
        TransferManifest::new(theirs, &[group], &[label], len, key).expect("a manifest")
    }

    fn plan(&self, mine: &TokenSequence, policy: &ReusePolicy) -> TransferPlan {
        let local = LocalGroup {
            group: 0,
            block_size: None,
            table: Some(Table::Full(
                &Ids::default().take(mine.len().div_ceil(BLOCK_SIZE)),
            )),
        };
        let options = TransferOptions {
            policy,
            ..TransferOptions::default()
        };
        TransferPlan::new(&self.manifest, mine, &[local], &self.key, &options).expect("a plan")
    }
}

/// A request of 100,000 tokens between two engines with blocks of 16.
pub(crate) fn transfer(c: &mut Criterion) {
    let mut group = c.benchmark_group("transfer");
    let len = usize::try_from(size(100_000, 20_000)).expect("a length");
    group.throughput(Throughput::Elements(len as u64));
    let exact = Pair::new(len);
    let raw = exact.manifest.to_bytes().to_vec();
    let approximate = ReusePolicy {
        approximate: true,
        ..ReusePolicy::EXACT_ONLY
    };
    let same = fresh(exact.theirs.tokens().to_vec());
    assert_eq!(exact.plan(&same, &ReusePolicy::EXACT_ONLY).num_exact(), len);

    let edited = Pair::new(len + REASONING);
    let from = len / 2 + 5;
    let theirs = edited.theirs.tokens();
    let stripped = fresh([&theirs[..from], &theirs[from + REASONING..]].concat());
    let plan = edited.plan(&stripped, &approximate);
    assert!(plan.num_exact() + plan.num_approximate() + 2 * BLOCK_SIZE > len);
    let unknown = fresh(tokens(2, len));
    assert_eq!(edited.plan(&unknown, &approximate).compute(), [(0, len)]);

    group.bench_function("manifest of 100,000 tokens", |b| {
        b.iter(|| Pair::manifest(&exact.theirs, &exact.key));
    });
    group.bench_function("bytes read", |b| {
        b.iter(|| TransferManifest::from_bytes(&raw, &TransferLimits::default()));
    });
    group.bench_function("plan, all exact", |b| {
        b.iter(|| exact.plan(&same, &ReusePolicy::EXACT_ONLY));
    });
    group.bench_function("plan, reasoning of 5,003 tokens removed", |b| {
        b.iter(|| edited.plan(&stripped, &approximate));
    });
    group.bench_function("plan, nothing to find", |b| {
        b.iter(|| edited.plan(&unknown, &approximate));
    });
    group.finish();
}
