//! Tests what manifests, plans and their constructors refuse, one step on either side of each limit.

use std::ops::Range;
use std::sync::Arc;

use super::super::offsets::MAX_GROUP;
use super::super::wire::ByteWriter;
use super::*;

/// A run as it is encoded, valid or not.
#[derive(Clone)]
struct Run {
    entries: usize,
    /// The first token, the number of tokens, the flags and the hops.
    numbers: [usize; 4],
    ids: Vec<u32>,
    /// Number of bytes of the digests: of the prefix, of the blocks, of the run.
    prefix: usize,
    blocks: usize,
    digest: usize,
}

#[derive(Clone)]
struct Group {
    entries: usize,
    number: usize,
    block_size: usize,
    /// The window as it is encoded; nil if none.
    window: Option<usize>,
    runs: Vec<Run>,
    /// The number of runs that is encoded.
    announced: usize,
}

/// Makes one part of a value wrong.
type Change<'a, T> = &'a dyn Fn(&mut T);

/// A valid run of blocks of four tokens, whose ids start at `first`.
fn run(start: usize, num_tokens: usize, flags: usize, hops: usize, first: u32) -> Run {
    let blocks = num_tokens.div_ceil(4);
    let digests = usize::from(flags != 2);
    Run {
        entries: 8,
        numbers: [start, num_tokens, flags, hops],
        ids: (first..first + u32::try_from(blocks).unwrap()).collect(),
        prefix: 16 * digests,
        blocks: 16 * digests * blocks,
        digest: 16,
    }
}

fn group(number: usize, runs: Vec<Run>) -> Group {
    Group {
        entries: 4,
        number,
        block_size: 4,
        window: None,
        announced: runs.len(),
        runs,
    }
}

/// Encodes groups and reads the bytes.
fn read(groups: &[Group], limits: &TransferLimits) -> Result<TransferManifest, TransferError> {
    let mut out = ByteWriter::default();
    out.array(5);
    out.text("kvtrie.manifest");
    out.uint(3);
    out.array(5);
    for name in ["m", "auto", "default"] {
        out.text(name);
    }
    // The adapter, the salt and the policy.
    out.nil();
    out.nil();
    out.nil();
    out.array(groups.len());
    for group in groups {
        out.array(group.entries);
        out.uint(group.number);
        out.uint(group.block_size);
        out.optional(group.window);
        out.array(group.announced);
        for run in &group.runs {
            out.array(run.entries);
            for number in run.numbers {
                out.uint(number);
            }
            let ids: Vec<u8> = run.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            out.bin(&ids);
            out.bin(&vec![1; run.prefix]);
            out.bin(&vec![2; run.blocks]);
            out.bin(&vec![3; run.digest]);
        }
    }
    TransferManifest::from_bytes(out.bytes(), limits)
}

fn read_runs(runs: Vec<Run>) -> Result<TransferManifest, TransferError> {
    read(&[group(0, runs)], &TransferLimits::default())
}

fn assert_malformed(done: Result<TransferManifest, TransferError>, words: &str) {
    let error = done.unwrap_err();
    assert_eq!(error.refusal(), Some(Refusal::Malformed), "{error}");
    assert!(error.to_string().contains(words), "{error}: not {words:?}");
}

fn assert_invalid<T: std::fmt::Debug, E: Into<TransferError> + std::fmt::Debug>(
    done: Result<T, E>,
    words: &str,
) {
    let TransferError::Argument(error) = done.unwrap_err().into() else {
        panic!("a refusal, not {words:?}");
    };
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.to_string().contains(words), "{error}: not {words:?}");
}

#[test]
fn runs_are_read_to_their_limits() {
    let most_hops = usize::from(ReusePolicy::MAX_HOPS);
    let manifest = read_runs(vec![
        run(0, 8, 0, 0, 0),
        run(8, 4, 1, most_hops, 10),
        run(16, 3, 1, 0, 20),
        run(20, 8, 2, 0, 30),
    ]);
    let manifest = manifest.unwrap();
    let runs: Vec<_> = manifest
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
    assert_eq!((manifest.num_tokens(), manifest.groups().len()), (19, 1));
    let ids = manifest.runs().flat_map(|run| run.blocks().map(|id| id.0));
    assert_eq!(ids.collect::<Vec<_>>(), [0, 1, 10, 20, 30, 31]);
    let hops = vec![run(8, 4, 1, most_hops + 1, 10)];
    assert_malformed(read_runs(hops), "hops with flags 1");
}

#[test]
fn runs_that_nobody_would_write() {
    let wrong = |change: Change<'_, Run>| {
        let mut wrong = run(8, 8, 0, 0, 10);
        change(&mut wrong);
        read_runs(vec![run(0, 8, 0, 0, 0), wrong])
    };
    wrong(&|_| {}).unwrap();
    let cases: [(Change<'_, Run>, &str); 13] = [
        (
            &|run| run.entries = 7,
            "a run has 7 entries; it must have 8",
        ),
        (
            &|run| run.numbers[0] = 9,
            "a run [9, 17) with flags 0 in blocks of 4 after 8",
        ),
        (&|run| run.numbers[0] = 4, "a run [4, 12)"),
        (&|run| run.numbers[1] = 0, "a run [8, 8)"),
        (&|run| run.numbers[2] = 3, "0 hops with flags 3"),
        (&|run| run.numbers[3] = 1, "1 hops with flags 0"),
        (&|run| run.ids[1] = 1 << 31, "is not in [0, "),
        (&|run| run.ids[1] = 10, "block 10 comes twice in its group"),
        (&|run| run.ids[1] = 1, "block 1 comes twice in its group"),
        (
            &|run| run.ids.push(12),
            "the blocks of a run has 12 bytes; it must have 8",
        ),
        (
            &|run| run.prefix = 15,
            "the prefix digest of a run has 15 bytes; it must have 16",
        ),
        (
            &|run| run.blocks = 16,
            "the block digests of a run has 16 bytes; it must have 32",
        ),
        (
            &|run| run.digest = 17,
            "the digest of a run has 17 bytes; it must have 16",
        ),
    ];
    for (change, words) in cases {
        assert_malformed(wrong(change), words);
    }
    // Look-ahead blocks are whole, have neither digests nor hops, and come last. Only they may follow a partial block.
    let ahead = || run(8, 8, 2, 0, 10);
    read_runs(vec![ahead()]).unwrap();
    read_runs(vec![run(0, 7, 0, 0, 0), ahead()]).unwrap();
    let with_prefix = Run {
        prefix: 16,
        ..ahead()
    };
    let with_blocks = Run {
        blocks: 32,
        ..ahead()
    };
    for (runs, words) in [
        (vec![run(8, 7, 2, 0, 10)], "a run [8, 15) with flags 2"),
        (vec![run(8, 8, 2, 1, 10)], "1 hops with flags 2"),
        (vec![ahead(), run(16, 4, 0, 0, 20)], "a run [16, 20)"),
        (vec![ahead(), run(16, 4, 2, 0, 20)], "a run [16, 20)"),
        (
            vec![run(0, 7, 0, 0, 0), run(8, 8, 0, 0, 10)],
            "a run [8, 16)",
        ),
        (vec![with_prefix], "has 16 bytes; it must have 0"),
        (vec![with_blocks], "has 32 bytes; it must have 0"),
    ] {
        assert_malformed(read_runs(runs), words);
    }
}

#[test]
fn groups_that_nobody_would_write() {
    let limits = TransferLimits::default();
    let some = || vec![run(0, 8, 0, 0, 0)];
    let two = |first, second| read(&[group(first, some()), group(second, some())], &limits);
    let most = MAX_GROUP as usize;
    let groups = two(0, most).unwrap();
    assert_eq!(
        groups.groups().collect::<Vec<_>>(),
        [(0, 4), (MAX_GROUP, 4)]
    );
    assert_malformed(two(3, 3), "group 3 after group 3; groups ascend");
    assert_malformed(two(3, 2), "group 2 after group 3");
    assert_malformed(two(0, most + 1), "is not in [0, ");
    assert_malformed(two(0, usize::MAX), "is not in [0, ");
    let wrong = |change: Change<'_, Group>| {
        let mut wrong = group(0, some());
        change(&mut wrong);
        read(&[wrong], &limits)
    };
    let cases: [(Change<'_, Group>, &str); 5] = [
        (
            &|group| group.entries = 3,
            "a group has 3 entries; it must have 4",
        ),
        (&|group| group.block_size = 0, "block_size is 0"),
        (
            &|group| group.announced = 40,
            "40 runs of 33 bytes or more announced",
        ),
        (
            &|group| group.announced = 2,
            "a run takes 1 bytes, 0 are left",
        ),
        (&|group| group.announced = 0, "bytes too many"),
    ];
    for (change, words) in cases {
        assert_malformed(wrong(change), words);
    }
}

#[test]
fn limits_are_on_all_groups_together() {
    let groups = [0, 1].map(|number| group(number, vec![run(0, 8, 0, 0, 0)]));
    let fits = TransferLimits {
        max_groups: 2,
        max_runs: 2,
        max_blocks: 4,
        max_tokens: 8,
        max_block_size: 4,
        ..TransferLimits::default()
    };
    read(&groups, &fits).unwrap();
    let shrinks: [Change<'_, TransferLimits>; 5] = [
        &|limits| limits.max_groups = 1,
        &|limits| limits.max_runs = 1,
        &|limits| limits.max_blocks = 3,
        &|limits| limits.max_tokens = 7,
        &|limits| limits.max_block_size = 3,
    ];
    for shrink in shrinks {
        let mut limits = fits;
        shrink(&mut limits);
        let error = read(&groups, &limits).unwrap_err();
        assert_eq!(error.refusal(), Some(Refusal::Limits), "{error}");
    }
}

/// A manifest of ten tokens in groups, given as (number, tokens per block), with one common table.
pub(super) fn made(
    groups: &[(u32, usize)],
    table: &[BlockId],
    labels: &[LabelRun],
    lookahead_end: usize,
) -> Result<TransferManifest, Error> {
    let seq = sequence(&(0..10).collect::<Vec<_>>());
    let groups: Vec<SentGroup<'_>> = groups
        .iter()
        .map(|&(group, block_size)| SentGroup {
            group,
            block_size,
            table: Table::Full(table),
        })
        .collect();
    TransferManifest::new(&seq, &groups, labels, lookahead_end, &key())
}

#[test]
fn labels_that_no_manifest_is_made_of() {
    let table = ids(4, 0);
    let made = |labels: &[LabelRun], end| made(&[(0, 4)], &table, labels, end);
    let exact = [label(0, 10, Class::Exact)];
    for labels in [
        vec![label(4, 4, Class::Exact)],
        vec![label(4, 3, Class::Exact)],
        vec![label(0, 4, Class::Compute)],
        vec![label(0, 5, Class::Exact), label(4, 8, Class::Exact)],
    ] {
        assert_invalid(made(&labels, 10), "labels are not empty, ascend");
    }
    made(
        &[label(0, 5, Class::Exact), label(5, 8, Class::Approximate)],
        10,
    )
    .unwrap();
    let long = [label(0, 11, Class::Exact)];
    assert_invalid(made(&long, 11), "KV of 11 tokens, the sequence has 10");
    assert_invalid(
        made(&exact, 9),
        "lookahead_end is 9; it must be in [10, 4294967295]",
    );
    assert_invalid(made(&exact, 1 << 32), "lookahead_end is 4294967296");
    assert_invalid(
        made(&exact, 17),
        "group 0 has 4 blocks, 17 tokens need 5 of 4 tokens",
    );
    made(&exact, 16).unwrap();
}

#[test]
fn groups_that_no_manifest_is_made_of() {
    let exact = [label(0, 10, Class::Exact)];
    let table = ids(4, 0);
    let of = |groups: &[(u32, usize)]| made(groups, &table, &exact, 10);
    of(&[(0, 4), (MAX_GROUP, 3)]).unwrap();
    assert_invalid(of(&[(1, 4), (1, 4)]), "group 1; groups ascend");
    assert_invalid(of(&[(2, 4), (1, 4)]), "group 1; groups ascend");
    assert_invalid(of(&[(MAX_GROUP + 1, 4)]), "groups ascend and are in [0, ");
    let words = "the block size of group 0 is 0; it must be in [1, 4294967295]";
    assert_invalid(of(&[(0, 0)]), words);
    assert_invalid(of(&[(0, 1 << 32)]), "is 4294967296; it must be in [1, ");
    let most = u32::try_from(BlockId::MAX_BLOCKS).unwrap();
    for (last, words) in [
        (most, "blocks has"),
        (5, "block 5 comes twice in the table of group 2"),
        (0, "block 0 comes twice"),
    ] {
        let table = [0, 5, last, 9].map(BlockId);
        assert_invalid(made(&[(2, 4)], &table, &exact, 10), words);
    }
    // Entries that no token needs are not checked.
    let table = [0, 5, most - 1, 5].map(BlockId);
    made(&[(2, 4)], &table, &exact, 12).unwrap();
}

/// A namespace, given as (model, element type, rope, adapter, salt).
fn namespace(
    (model, kv_dtype, rope): (&str, &str, &str),
    adapter: Option<&str>,
    salt: &str,
) -> Arc<Namespace> {
    let salt = match salt {
        "" => Salt::Shared,
        salt => Salt::Tenant(salt.into()),
    };
    let adapter = adapter.map(str::to_owned);
    Arc::new(Namespace::new(model, kv_dtype, rope, adapter, salt).unwrap())
}

/// A manifest of one namespace, without blocks.
fn manifest_of(namespace: &Arc<Namespace>) -> TransferManifest {
    let seq = TokenSequence::new(Arc::clone(namespace), vec![1, 2], vec![]).unwrap();
    TransferManifest::new(&seq, &[sent(16, &[])], &[], 0, &key()).unwrap()
}

#[test]
fn a_manifest_says_whose_it_is() {
    let lora = manifest_of(&namespace(("m", "fp8", "yarn"), Some("lora"), "t"));
    assert_eq!(
        (lora.model(), lora.kv_dtype(), lora.rope()),
        ("m", "fp8", "yarn")
    );
    assert_eq!((lora.adapter(), lora.is_shared()), (Some("lora"), false));
    let shared = manifest_of(&namespace(("m", "fp8", "yarn"), None, ""));
    assert_eq!((shared.adapter(), shared.is_shared()), (None, true));
    assert_ne!(lora, shared);
}

#[test]
fn manifests_of_other_namespaces_are_refused_by_the_field() {
    let plan = |theirs: &Arc<Namespace>, mine: &Arc<Namespace>| {
        let seq = TokenSequence::new(Arc::clone(mine), vec![1, 2], vec![]).unwrap();
        let local = local(&[BlockId(3)]);
        let options = TransferOptions::default();
        TransferPlan::new(&manifest_of(theirs), &seq, &local, &key(), &options)
    };
    let usual = ("m", "auto", "default");
    let (mine, shared) = (namespace(usual, None, "t"), namespace(usual, None, ""));
    let lora = namespace(usual, Some("lora"), "t");
    assert_eq!(plan(&mine, &mine).unwrap().compute(), [(0, 2)]);
    assert!(plan(&shared, &shared).is_ok());
    let long = ["a", "b"].map(|end| {
        let model = "m".repeat(80) + end;
        namespace((&model, "auto", "default"), None, "t")
    });
    let cases = [
        (
            &namespace(("n", "auto", "default"), None, "t"),
            &mine,
            "model is \"n\" in the manifest and \"m\" in the sequence",
        ),
        (
            &namespace(("m", "fp8", "default"), None, "t"),
            &mine,
            "kv_dtype is \"fp8\"",
        ),
        (
            &namespace(("m", "auto", "yarn"), None, "t"),
            &mine,
            "rope is \"yarn\"",
        ),
        (
            &lora,
            &mine,
            "the adapter is \"lora\" in the manifest and none in the sequence",
        ),
        (
            &namespace(usual, None, "u"),
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
            "... (81 characters) in the sequence; they differ after character 80",
        ),
    ];
    for (theirs, mine, words) in cases {
        let error = plan(theirs, mine).unwrap_err();
        assert_eq!(error.refusal(), Some(Refusal::Namespace));
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    }
    let error = plan(&lora, &mine).unwrap_err().to_string();
    assert!(!error.contains("differ after"), "{error}");
}

#[test]
fn what_a_plan_is_asked_wrongly() {
    let sender = Sender::exact((0..10).collect(), 4);
    let manifest = sender.manifest().unwrap();
    let table = ids(3, 0);
    let [first] = local(&table);
    let group = |group| LocalGroup { group, ..first };
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
            "group 0 after group 0; groups ascend",
        ),
        (
            plan(&[group(1), group(0)], 0..0, exact),
            "group 0 after group 1; groups ascend",
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
        assert_invalid(done, words);
    }
    for local in [vec![], vec![group(1)], vec![group(0), group(1)]] {
        let error = plan(&local, 0..0, exact).unwrap_err();
        assert_eq!(error.refusal(), Some(Refusal::Groups), "{error}");
    }
}
