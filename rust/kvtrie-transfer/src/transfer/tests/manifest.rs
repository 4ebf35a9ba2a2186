//! Tests the parts of a manifest, what its digests cover, and that it has only one form.

use kvtrie_core::Item;

use super::refusals::made;
use super::*;

/// The start, end, class and ids of each run.
fn runs(manifest: &TransferManifest) -> Vec<(usize, usize, Class, Vec<BlockId>)> {
    let run = |run: BlockRun<'_>| (run.start(), run.end(), run.class(), run.blocks().collect());
    manifest.runs().map(run).collect()
}

#[test]
fn look_ahead_is_whole_blocks_after_those_of_the_last_label() {
    let table = ids(5, 0);
    let labels = [label(0, 10, Class::Exact)];
    let held = (0, 10, Class::Exact, table[..3].to_vec());
    for lookahead_end in [10, 12] {
        let manifest = made(&[(0, 4)], &table, &labels, lookahead_end).unwrap();
        assert_eq!(runs(&manifest), std::slice::from_ref(&held));
    }
    for (lookahead_end, end) in [(13, 16), (16, 16), (17, 20)] {
        let manifest = made(&[(0, 4)], &table, &labels, lookahead_end).unwrap();
        let ahead = (12, end, Class::Compute, table[3..end / 4].to_vec());
        assert_eq!(runs(&manifest), [held.clone(), ahead]);
        assert_eq!(manifest.num_tokens(), 10);
    }
}

#[test]
fn positions_and_block_sizes_reach_to_the_last_u32() {
    let most = u32::MAX as usize;
    let table = ids(1, 0);
    let exact = [label(0, 10, Class::Exact)];
    let manifest = made(&[(0, most)], &table, &exact, most).unwrap();
    assert_eq!(manifest.groups().collect::<Vec<_>>(), [(0, most)]);
    assert_eq!(runs(&manifest), [(0, 10, Class::Exact, table.clone())]);
    let ahead = made(&[(0, most)], &table, &[], most).unwrap();
    assert_eq!(runs(&ahead), [(0, most, Class::Compute, table)]);
}

#[test]
fn consecutive_blocks_of_one_label_are_one_run() {
    use Class::{Approximate, Exact};
    let table = ids(3, 0);
    for labels in [
        vec![label(0, 4, Exact), label(4, 10, Exact)],
        vec![label(0, 5, Exact), label(5, 10, Exact)],
        // The second block is approximate because one of its tokens is.
        vec![
            label(0, 6, Approximate),
            label(6, 8, Exact),
            label(8, 10, Approximate),
        ],
    ] {
        let class = labels[0].class;
        let manifest = made(&[(0, 4)], &table, &labels, 10).unwrap();
        assert_eq!(runs(&manifest), [(0, 10, class, table.clone())]);
    }
    let labels = [label(0, 4, Exact), label(4, 10, Approximate)];
    let manifest = made(&[(0, 4)], &table, &labels, 10).unwrap();
    assert_eq!(manifest.runs().count(), 2);
}

#[test]
fn a_table_of_one_block_again_and_again_is_refused() {
    let exact = [label(0, 10, Class::Exact)];
    let error = made(&[(0, 4)], &[BlockId(7); 3], &exact, 10).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("block 7 comes twice"), "{error}");
}

#[test]
fn a_table_may_end_before_the_sequence() {
    let mut ledger = SequenceLedger::new(4).unwrap();
    let mut seq = sequence(&(0..10).collect::<Vec<_>>());
    let begin = Begin {
        num_computed: 4,
        ..Begin::default()
    };
    let id = ledger.begin(&mut seq, &ids(2, 0), begin).unwrap();
    let offer = Offer::of(&ledger, id, &seq).unwrap();
    assert_eq!(offer.labels, [label(0, 4, Class::Exact)]);
    assert_eq!((offer.blocks.len(), offer.lookahead_end), (2, 4));
    assert_eq!(offer.manifest(&seq, 0, &key()).unwrap().num_tokens(), 4);
}

/// Longer encodings of one value.
type Longer = &'static [&'static [u8]];

#[test]
fn a_value_in_a_longer_form_is_refused() {
    let exact = [label(0, 10, Class::Exact)];
    let raw = made(&[(0, 4)], &ids(3, 0), &exact, 10).unwrap();
    let raw = raw.to_bytes();
    // Offsets of the version, of the namespace's array and first text, and of the salt's digest.
    let cases: [(usize, &[u8], Longer); 4] = [
        (17, &[3], &[&[0xcc, 3], &[0xcd, 0, 3], &[0xce, 0, 0, 0, 3]]),
        (18, &[0x95], &[&[0xdc, 0, 5], &[0xdd, 0, 0, 0, 5]]),
        (
            19,
            &[0xa1],
            &[&[0xd9, 1], &[0xda, 0, 1], &[0xdb, 0, 0, 0, 1]],
        ),
        (35, &[0xc4, 16], &[&[0xc5, 0, 16], &[0xc6, 0, 0, 0, 16]]),
    ];
    for (at, short, longs) in cases {
        assert!(raw[at..].starts_with(short), "{at}");
        for long in longs {
            let changed = [&raw[..at], *long, &raw[at + short.len()..]].concat();
            let done = TransferManifest::from_bytes(&changed, &TransferLimits::default());
            let error = done.unwrap_err();
            assert_eq!(error.refusal(), Some(Refusal::Malformed), "{long:?}");
            assert!(
                error.to_string().contains("is not in its shortest form"),
                "{long:?}: {error}"
            );
        }
    }
}

/// A manifest does not say how far positions are shifted, so it is of no sequence whose items say what they take, and
/// nothing of it moves into one.
#[test]
fn items_that_say_their_positions_are_not_sent_and_nothing_moves_between_them() {
    let namespace = || Arc::clone(sequence(&[]).namespace());
    let with = |tokens: Vec<u32>, start: usize, takes: Option<usize>| {
        let item = Item::new(start, start + 4, b"a").unwrap();
        let item = takes.map_or(Ok(item.clone()), |takes| item.taking(takes, 4));
        TokenSequence::new(namespace(), tokens, vec![item.unwrap()]).unwrap()
    };
    let text: Vec<u32> = (0..32).collect();
    let (table, exact) = (ids(8, 0), [label(0, 32, Class::Exact)]);
    let sent = [sent(4, &table)];
    let refused = TransferManifest::new(&with(text.clone(), 4, Some(2)), &sent, &exact, 32, &key());
    let refused = refused.unwrap_err();
    assert!(
        refused.message().contains("[4, 8) says that it takes 2"),
        "{refused}"
    );
    let manifest = TransferManifest::new(&with(text.clone(), 4, None), &sent, &exact, 32, &key());
    let manifest = manifest.unwrap();
    let options = TransferOptions {
        policy: &approximate(),
        ..TransferOptions::default()
    };
    let local = local(&table);
    let plan = |mine: &TokenSequence| {
        TransferPlan::new(&manifest, mine, &local, &key(), &options).unwrap()
    };
    // The text after the item is at another place in these prompts; in the last one, the item is another one.
    let moved = [vec![50; 4], text[8..].to_vec()].concat();
    assert_eq!(plan(&with(moved.clone(), 0, None)).compute(), [(0, 4)]);
    assert_eq!(plan(&with(moved, 0, Some(2))).compute(), [(0, 28)]);
    assert_eq!(plan(&with(text.clone(), 4, Some(2))).compute(), [(4, 32)]);
    assert_eq!(plan(&with(text, 4, None)).compute(), []);
}

#[test]
fn the_digest_before_an_item_does_not_depend_on_it() {
    let with = |digest: &[u8]| {
        let namespace = Arc::clone(sequence(&[]).namespace());
        let items = vec![Item::new(8, 11, digest).unwrap()];
        TokenSequence::new(namespace, vec![1; 12], items).unwrap()
    };
    let table = ids(3, 0);
    let exact = [label(0, 12, Class::Exact)];
    let sent = [sent(4, &table)];
    let manifest = TransferManifest::new(&with(b"a"), &sent, &exact, 12, &key()).unwrap();
    let local = local(&table);
    let options = TransferOptions::default();
    for (mine, computed) in [
        (with(b"a"), &[][..]),
        (with(b"b"), &[(8, 12)]),
        (sequence(&[1; 12]), &[(8, 12)]),
    ] {
        let plan = TransferPlan::new(&manifest, &mine, &local, &key(), &options).unwrap();
        assert_eq!(plan.compute(), computed);
    }
}
