//! Groups with windows and states: what is sent of them, and where a receiver continues.

use kvtrie_core::{Group, GroupKind};

use super::*;

const WINDOW: GroupKind = GroupKind::Window { window: 5 };

fn at(kind: GroupKind, ids: &[(usize, BlockId)]) -> [SentGroup<'_>; 2] {
    static TABLE: [BlockId; 4] = [BlockId(0), BlockId(1), BlockId(2), BlockId(3)];
    [
        sent(4, &TABLE),
        SentGroup {
            group: 1,
            block_size: 4,
            table: Table::At(kind, ids),
        },
    ]
}

fn ids_at(positions: &[usize]) -> Vec<(usize, BlockId)> {
    positions.iter().copied().zip((9..).map(BlockId)).collect()
}

/// A manifest of 14 tokens, of which `labels` have KV.
fn made(
    kind: GroupKind,
    ids: &[(usize, BlockId)],
    labels: &[LabelRun],
) -> Result<TransferManifest, Error> {
    let seq = sequence(&(0..14).collect::<Vec<_>>());
    TransferManifest::new(&seq, &at(kind, ids), labels, 14, &key())
}

/// The ranges and ids of the runs of group 1.
fn runs(kind: GroupKind, positions: &[usize], labels: &[LabelRun]) -> Vec<(usize, usize, u32)> {
    let manifest = made(kind, &ids_at(positions), labels).unwrap();
    assert_eq!(manifest.kinds().collect::<Vec<_>>(), [None, Some(kind)]);
    let runs = manifest.runs().filter(|run| run.group() == 1);
    runs.map(|run| (run.start(), run.end(), run.blocks().next().unwrap().0))
        .collect()
}

#[test]
fn only_exact_blocks_and_states_are_sent() {
    let exact = [label(0, 14, Class::Exact)];
    assert_eq!(
        runs(WINDOW, &[0, 8, 12, 16], &exact),
        [(0, 4, 9), (8, 14, 10)]
    );
    assert_eq!(
        runs(GroupKind::State, &[4, 8, 12, 16], &exact),
        [(4, 4, 9), (8, 8, 10), (12, 12, 11)]
    );
    let later = [label(0, 6, Class::Exact), approximate_label(6, 14, 1)];
    assert_eq!(runs(WINDOW, &[0, 4, 8], &later), [(0, 4, 9)]);
    assert_eq!(runs(GroupKind::State, &[4, 8], &later), [(4, 4, 9)]);
    // A window's block after a gap is exact, a state is of all tokens before it.
    let gap = [label(0, 6, Class::Exact), label(8, 14, Class::Exact)];
    assert_eq!(runs(WINDOW, &[4, 8, 12], &gap), [(8, 14, 10)]);
    assert_eq!(runs(GroupKind::State, &[4, 12], &gap), [(4, 4, 9)]);
}

#[test]
fn tables_that_no_manifest_is_made_of() {
    let exact = [label(0, 14, Class::Exact)];
    let most = u32::try_from(BlockId::MAX_BLOCKS).unwrap();
    let two = |first, second| [(4, BlockId(first)), (8, BlockId(second))];
    let window = |window| GroupKind::Window { window };
    made(window(u32::MAX as usize), &[], &exact).unwrap();
    for (kind, ids, words) in [
        (
            window(1),
            vec![],
            "the window of group 1 is 1; it must be in [2, 4294967295]",
        ),
        (window(1 << 32), vec![], "is 4294967296"),
        (
            WINDOW,
            ids_at(&[2]),
            "group 1 has an id at position 2; it must be a multiple of 4",
        ),
        (
            WINDOW,
            ids_at(&[8, 4]),
            "position 4 after 8; positions must ascend",
        ),
        (WINDOW, ids_at(&[8, 8]), "position 8 after 8"),
        (WINDOW, ids_at(&[1 << 32]), "at position 4294967296"),
        (GroupKind::State, ids_at(&[0]), "a multiple of 4 in [4, "),
        (
            WINDOW,
            two(3, 3).to_vec(),
            "block 3 comes twice in the table of group 1",
        ),
        (WINDOW, two(3, most).to_vec(), "blocks has 2147483648"),
    ] {
        let error = made(kind, &ids, &exact).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(words), "{error}: not {words:?}");
    }
}

/// What a receiver of 15 tokens, of which 14 are the sender's, loads: the end of the exact tokens, and the pairs of group
/// 1.
fn loaded(
    kind: GroupKind,
    positions: &[usize],
    cached: usize,
    keep_last: usize,
) -> (usize, Vec<(usize, usize)>) {
    let manifest = made(kind, &ids_at(positions), &[label(0, 14, Class::Exact)]).unwrap();
    let seq = sequence(&(0..15).collect::<Vec<_>>());
    let local = [
        LocalGroup {
            group: 0,
            block_size: None,
            table: None,
        },
        LocalGroup {
            group: 1,
            block_size: None,
            table: Some(Table::At(kind, &[(8, BlockId(7))])),
        },
    ];
    let options = TransferOptions {
        cached: 0..cached,
        keep_last,
        ..TransferOptions::default()
    };
    let plan = TransferPlan::new(&manifest, &seq, &local, &key(), &options).unwrap();
    let of = |group| plan.pairs().iter().filter(move |pair| pair.group == group);
    for pair in of(1) {
        let known = (pair.start / 4 == 2).then_some(BlockId(7));
        assert_eq!(pair.local, known, "{pair:?}");
    }
    let end = plan.compute().first().map_or(15, |range| range.0);
    let until = 15 - keep_last;
    let own: usize = of(0).map(|pair| pair.end - pair.start).sum();
    assert_eq!(plan.num_exact(), own);
    assert_eq!(own, end.saturating_sub(cached.min(until)));
    (end, of(1).map(|pair| (pair.start, pair.end)).collect())
}

#[test]
fn a_window_is_loaded_where_all_its_blocks_are_there() {
    let of = |positions: &[usize], cached, keep_last| loaded(WINDOW, positions, cached, keep_last);
    // The window before 14 is [10, 14).
    assert_eq!(of(&[8, 12], 0, 0), (14, vec![(8, 12), (12, 14)]));
    assert_eq!(of(&[8, 12], 0, 2), (13, vec![(8, 12), (12, 13)]));
    assert_eq!(of(&[8], 0, 0), (12, vec![(8, 12)]));
    assert_eq!(of(&[12], 0, 0), (0, vec![]));
    assert_eq!(of(&[0, 8, 12], 0, 0), (14, vec![(8, 12), (12, 14)]));
    assert_eq!(of(&[0, 12], 0, 0), (4, vec![(0, 4)]));
    // What is cached has its window up to its end.
    assert_eq!(of(&[12], 12, 0), (14, vec![(12, 14)]));
    assert_eq!(of(&[12], 8, 0), (8, vec![]));
    assert_eq!(of(&[], 8, 0), (8, vec![]));
    assert_eq!(of(&[8, 12], 8, 0), (14, vec![(8, 12), (12, 14)]));
    assert_eq!(of(&[8, 12], 10, 0), (14, vec![(10, 12), (12, 14)]));
    // Tokens at the end are computed, and before the window of what is cached nothing is there.
    assert_eq!(of(&[], 12, 5), (0, vec![]));
    assert_eq!(of(&[4], 12, 3), (12, vec![]));
    assert_eq!(of(&[4], 12, 4), (11, vec![(4, 8)]));
}

#[test]
fn a_state_is_loaded_at_its_position() {
    let of = |positions: &[usize], cached, last| loaded(GroupKind::State, positions, cached, last);
    assert_eq!(of(&[4, 12], 0, 0), (12, vec![(12, 12)]));
    assert_eq!(of(&[4, 12], 0, 4), (4, vec![(4, 4)]));
    assert_eq!(of(&[4], 0, 12), (0, vec![]));
    assert_eq!(of(&[4], 8, 0), (8, vec![]));
    assert_eq!(of(&[4, 12], 8, 0), (12, vec![(12, 12)]));
    assert_eq!(of(&[4, 12], 12, 0), (12, vec![]));
    assert_eq!(of(&[4, 12], 12, 4), (4, vec![(4, 4)]));
    assert_eq!(of(&[], 0, 0), (0, vec![]));
}

#[test]
fn a_plan_next_to_windows_is_exact_and_caches_from_the_start() {
    let manifest = made(WINDOW, &ids_at(&[8]), &[label(0, 14, Class::Exact)]).unwrap();
    let seq = sequence(&(0..15).collect::<Vec<_>>());
    let with = |kind: Option<GroupKind>, cached, policy: &ReusePolicy| {
        let table = kind.map(|kind| Table::At(kind, &[]));
        let local = [0, 1].map(|group| LocalGroup {
            group,
            block_size: None,
            table: table.filter(|_| group == 1),
        });
        let options = TransferOptions {
            cached,
            policy,
            ..TransferOptions::default()
        };
        TransferPlan::new(&manifest, &seq, &local, &key(), &options)
    };
    let plan = with(Some(WINDOW), 0..0, &ReusePolicy::LAXEST).unwrap();
    assert_eq!((plan.num_exact(), plan.num_approximate()), (12, 0));
    let error = with(Some(WINDOW), 4..8, &ReusePolicy::EXACT_ONLY).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("cached is [4, 8); next to groups with windows"),
        "{error}"
    );
    for (kind, shown) in [
        (None, "the receiver has [0, 1]"),
        (Some(GroupKind::State), "the receiver has [0, 1 (states)]"),
        (
            Some(GroupKind::Window { window: 6 }),
            "the receiver has [0, 1 (a window of 6)]",
        ),
    ] {
        let error = with(kind, 0..0, &ReusePolicy::EXACT_ONLY).unwrap_err();
        assert_eq!(error.refusal(), Some(Refusal::Groups), "{error}");
        let theirs = "the manifest has the groups [0, 1 (a window of 5)]";
        assert!(error.to_string().contains(theirs), "{error}");
        assert!(error.to_string().contains(shown), "{error}");
    }
}

/// Nothing of a group's head can be changed, not even that of a group without runs.
#[test]
fn the_digest_of_a_run_covers_all_groups() {
    let exact = [label(0, 14, Class::Exact)];
    let raw = made(WINDOW, &[], &exact).unwrap().to_bytes().to_vec();
    // [1, 4, 5, []]: the last group.
    assert!(raw.ends_with(&[0x94, 1, 4, 5, 0x90]));
    let seq = sequence(&(0..14).collect::<Vec<_>>());
    let refusal = |raw: &[u8]| {
        let manifest = TransferManifest::from_bytes(raw, &TransferLimits::default()).unwrap();
        let local = [LocalGroup {
            group: 0,
            block_size: None,
            table: None,
        }];
        let options = TransferOptions::default();
        let plan = TransferPlan::new(&manifest, &seq, &local, &key(), &options);
        plan.unwrap_err().refusal()
    };
    assert_eq!(refusal(&raw), Some(Refusal::Groups));
    let last = raw.len() - 5;
    for changed in [
        [0x94, 2, 4, 5, 0x90],
        [0x94, 1, 8, 5, 0x90],
        [0x94, 1, 4, 6, 0x90],
        [0x94, 1, 4, 0, 0x90],
        [0x94, 1, 4, 0xc0, 0x90],
    ] {
        assert_eq!(
            refusal(&[&raw[..last], &changed[..]].concat()),
            Some(Refusal::Digest)
        );
    }
    // Without it, there is one group.
    let groups = raw.iter().position(|&byte| byte == 0x92).unwrap();
    let mut less = raw[..last].to_vec();
    less[groups] = 0x91;
    assert_eq!(refusal(&less), Some(Refusal::Digest));
}

#[test]
fn a_live_request_offers_what_it_has_of_groups() {
    let groups = vec![Group::window("swa", 5, 8, 4), Group::state("gdn", 8, 4)];
    let mut ledger = SequenceLedger::with_groups(4, groups).unwrap();
    let mut seq = sequence(&(0..14).collect::<Vec<_>>());
    let begin = Begin {
        num_computed: 13,
        ..Begin::default()
    };
    let id = ledger.begin(&mut seq, &ids(4, 0), begin).unwrap();
    ledger
        .hold(id, 1, &[(8, BlockId(1)), (12, BlockId(2))])
        .unwrap();
    ledger.hold(id, 2, &[(12, BlockId(5))]).unwrap();
    let offer = Offer::of(&ledger, id, &seq).unwrap();
    let offered = |kind, ids: &[(usize, BlockId)]| OfferedGroup {
        kind,
        ids: ids.to_vec(),
    };
    assert_eq!(
        offer.groups,
        [
            offered(WINDOW, &[(8, BlockId(1)), (12, BlockId(2))]),
            offered(GroupKind::State, &[(12, BlockId(5))])
        ]
    );
    let manifest = offer.manifest(&seq, 3, &key()).unwrap();
    assert_eq!(
        manifest.groups().collect::<Vec<_>>(),
        [(3, 4), (4, 4), (5, 4)]
    );
    let runs: Vec<_> = manifest
        .runs()
        .map(|run| (run.group(), run.start(), run.end()))
        .collect();
    assert_eq!(runs, [(3, 0, 13), (4, 8, 13), (5, 12, 12)]);
    assert_eq!(manifest.num_tokens(), 13);
}
