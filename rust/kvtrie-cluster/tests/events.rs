//! What events say, and which are refused.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Event, Value, batch, cleared, ints, removed, stored};
use kvtrie_cluster::{
    BlocksAhead, EventRefusal, FindOptions, IndexerConfig, KvIndexer, OverlapScores, Refused,
    Stream, Tier, WorkerId,
};
use kvtrie_core::{Item, Namespace, Salt, TokenSequence};

fn space(adapter: Option<&str>, salt: Option<&str>) -> Arc<Namespace> {
    let salt = salt.map_or(Salt::Shared, |salt| Salt::Tenant(salt.to_owned()));
    let adapter = adapter.map(str::to_owned);
    Arc::new(Namespace::new("m", "auto", "default", adapter, salt).unwrap())
}

fn new_index() -> (KvIndexer, WorkerId) {
    let mut index = KvIndexer::new(IndexerConfig::new(common::SIZE), &[1; 16]).unwrap();
    let worker = index.add_worker(space(None, None)).unwrap();
    (index, worker)
}

fn apply(index: &mut KvIndexer, worker: WorkerId, stream: Stream, events: &[Event]) {
    let read = index.reader().read(&batch(events, true, None)).unwrap();
    index.apply(worker, stream, &read).unwrap();
    index.check().unwrap();
}

fn ask(index: &KvIndexer, space: Arc<Namespace>, tokens: &[u32]) -> OverlapScores {
    let seq = TokenSequence::new(space, tokens.to_vec(), Vec::new()).unwrap();
    let prompt = index.prompt(&seq, true);
    let options = FindOptions {
        keep_last: 0,
        moved: true,
        ..FindOptions::default()
    };
    index.find(&prompt, options).unwrap()
}

fn exact(index: &KvIndexer, tokens: &[u32]) -> u32 {
    ask(index, space(None, None), tokens).exact[0]
}

fn with(mut event: Event, name: &'static str, value: Value) -> Event {
    event.retain(|field| field.0 != name);
    event.push((name, value));
    event
}

#[test]
fn scores_are_certain_for_the_time_that_was_said() {
    let (mut index, worker) = new_index();
    let other = index.add_worker(space(None, None)).unwrap();
    let uncertain = |index: &KvIndexer| ask(index, space(None, None), &[1, 2, 3, 4]).uncertain;
    index.set_certain_for(worker, Some(Duration::ZERO)).unwrap();
    assert_eq!(uncertain(&index), [true, false]);
    index.set_certain_for(worker, Some(Duration::MAX)).unwrap();
    assert_eq!(uncertain(&index), [false, false]);
    index
        .set_certain_for(worker, Some(Duration::from_secs(1 << 20)))
        .unwrap();
    index.set_uncertain(worker, true).unwrap();
    assert_eq!(uncertain(&index), [true, false]);
    index.set_uncertain(worker, false).unwrap();
    assert_eq!(uncertain(&index), [false, false]);
    index.set_certain_for(worker, Some(Duration::ZERO)).unwrap();
    index.set_certain_for(worker, None).unwrap();
    assert_eq!(uncertain(&index), [false, false]);
    index.remove_worker(other).unwrap();
    assert!(index.set_certain_for(other, None).is_err());
}

#[test]
fn both_forms_and_all_kinds_of_hashes_say_the_same() {
    for as_maps in [true, false] {
        for bytes in [true, false] {
            let hash = |number: u64| {
                if bytes {
                    Value::Bytes(vec![u8::try_from(number).unwrap(); 32])
                } else {
                    Value::Int(number)
                }
            };
            let (mut index, worker) = new_index();
            let mut first = stored(&[], None, &[1, 2, 70_000, 4], "GPU");
            first[1].1 = Value::List(vec![hash(7), hash(8)]);
            let mut second = stored(&[], None, &[5, u32::MAX], "GPU");
            second[1].1 = Value::List(vec![hash(9)]);
            second[2].1 = hash(8);
            let raw = batch(&[first, second], as_maps, Some(3));
            let read = index.reader().read(&raw).unwrap();
            assert_eq!((read.num_events(), read.num_blocks()), (2, 3));
            index.apply(worker, Stream::Engine, &read).unwrap();
            let prompt = [1, 2, 70_000, 4, 5, u32::MAX];
            assert_eq!(exact(&index, &prompt), 6);
            let mut gone = removed(&[], "GPU");
            gone[1].1 = Value::List(vec![hash(8)]);
            let read = index
                .reader()
                .read(&batch(&[gone], as_maps, Some(3)))
                .unwrap();
            index.apply(worker, Stream::Engine, &read).unwrap();
            assert_eq!(exact(&index, &prompt), 2);
            let read = index
                .reader()
                .read(&batch(&[cleared()], as_maps, None))
                .unwrap();
            assert!(index.apply(worker, Stream::Engine, &read).unwrap().cleared);
            assert_eq!(exact(&index, &prompt), 0);
        }
    }
}

#[test]
fn blocks_are_told_of_before_their_tokens_are_read() {
    let (mut index, worker) = new_index();
    let tokens: Vec<u32> = (0..200).collect();
    let hashes: Vec<u64> = (1_000..1_100).collect();
    let first = stored(&hashes, None, &tokens, "GPU");
    // One token is no id, which is found after the hashes.
    let mut wrong = stored(&[7], None, &[1, 2], "GPU");
    wrong[3].1 = Value::List(vec![Value::Int(1), Value::Nil]);
    let tell = |index: &KvIndexer, worker, event: &Event| {
        let (mut events, mut lines) = (0, 0);
        let raw = batch(std::slice::from_ref(event), true, None);
        let read = index.reader().read_ahead(&raw, &mut |blocks| {
            events += 1;
            index.lines(worker, blocks, |_| lines += 1);
        });
        (read, events, lines)
    };
    let (read, events, lines) = tell(&index, worker, &first);
    // Nothing is held yet, so there is nothing to fetch.
    assert_eq!((events, lines), (1, 0));
    index.apply(worker, Stream::Engine, &read.unwrap()).unwrap();
    let before = index.digest(worker).unwrap();
    let (_, events, lines) = tell(&index, worker, &first);
    let most = BlocksAhead::MOST;
    assert!(events == 1 && (most..=8 * most).contains(&lines), "{lines}");
    let (read, events, lines) = tell(&index, worker, &wrong);
    assert!(read.is_err() && events == 1 && (1..=8).contains(&lines));
    assert_eq!(index.digest(worker).unwrap(), before);
    index.remove_worker(worker).unwrap();
    assert_eq!(tell(&index, worker, &first).2, 0);
}

#[test]
fn negative_hashes_are_hashes() {
    // SGLang publishes signed 64-bit integers: -2 here.
    let (mut index, worker) = new_index();
    let mut raw = batch(&[stored(&[0x55], None, &[1, 2], "GPU")], true, None);
    let at = raw.iter().position(|&byte| byte == 0x55).unwrap();
    raw[at] = 0xfe;
    let read = index.reader().read(&raw).unwrap();
    index.apply(worker, Stream::Engine, &read).unwrap();
    apply(
        &mut index,
        worker,
        Stream::Engine,
        &[removed(&[u64::MAX - 1], "GPU")],
    );
    assert_eq!(index.worker_stats(worker).unwrap().removed, 1);
}

#[test]
fn unknown_fields_are_skipped_however_deep_they_are() {
    let (mut index, worker) = new_index();
    let mut deep = Value::Nil;
    for _ in 0..50 {
        deep = Value::List(vec![deep, Value::Int(1)]);
    }
    let event = with(stored(&[7], None, &[1, 2], "GPU"), "later", deep);
    apply(&mut index, worker, Stream::Engine, &[event]);
    assert_eq!(exact(&index, &[1, 2]), 2);
    // A million arrays, one in the other, are more than any stack has room for.
    let mut raw = vec![0x92];
    raw.extend(vec![0x91; 1_000_000]);
    raw.extend([0xc0, 0x90]);
    assert_eq!(index.reader().read(&raw).unwrap().num_events(), 0);
}

#[test]
fn adapters_and_salts_are_namespaces() {
    let (mut index, worker) = new_index();
    let keys = |keys: &[&'static str]| {
        Value::List(vec![Value::List(
            keys.iter().map(|&key| Value::Text(key)).collect(),
        )])
    };
    let plain = stored(&[1], None, &[1, 2], "GPU");
    // The adapter's name comes first, then the salt; both may look alike.
    let salted = with(
        stored(&[2], None, &[1, 2], "GPU"),
        "extra_keys",
        keys(&["x"]),
    );
    let adapted = with(
        stored(&[3], None, &[1, 2], "GPU"),
        "lora_name",
        Value::Text("x"),
    );
    let adapted = with(adapted, "extra_keys", keys(&["x"]));
    let both = with(
        stored(&[4], None, &[1, 2], "GPU"),
        "lora_name",
        Value::Text("x"),
    );
    let both = with(both, "extra_keys", keys(&["x", "x"]));
    let of_sglang = with(
        stored(&[5], None, &[1, 2], "GPU"),
        "cache_salt",
        Value::Text("y"),
    );
    let cases = [
        (plain, None, None),
        (salted, None, Some("x")),
        (adapted, Some("x"), None),
        (both, Some("x"), Some("x")),
        (of_sglang, None, Some("y")),
    ];
    for (at, case) in cases.iter().enumerate() {
        apply(
            &mut index,
            worker,
            Stream::Engine,
            std::slice::from_ref(&case.0),
        );
        for (other, &(_, adapter, salt)) in cases.iter().enumerate() {
            let scores = ask(&index, space(adapter, salt), &[1, 2]);
            assert_eq!(scores.exact[0] > 0, other <= at, "{at} {other}");
        }
    }
    let removals: Vec<u64> = (1..6).collect();
    apply(
        &mut index,
        worker,
        Stream::Engine,
        &[removed(&removals, "GPU")],
    );
    assert_eq!(index.stats().blocks, 0);
}

#[test]
fn salted_blocks_after_the_first_are_of_the_same_tenant() {
    let (mut index, worker) = new_index();
    let first = stored(&[1, 2], None, &[1, 2, 3, 4], "GPU");
    let keys = Value::List(vec![Value::List(vec![Value::Text("a")]), Value::Nil]);
    let first = with(first, "extra_keys", keys);
    let second = stored(&[3], Some(2), &[5, 6], "GPU");
    apply(&mut index, worker, Stream::Engine, &[first, second]);
    let prompt = [1, 2, 3, 4, 5, 6];
    assert_eq!(ask(&index, space(None, Some("a")), &prompt).exact, [6]);
    for other in [None, Some("b")] {
        let scores = ask(&index, space(None, other), &prompt);
        assert_eq!((scores.exact[0], scores.moved[0]), (0, 0));
    }
}

#[test]
fn images_are_never_plain_tokens() {
    let (mut index, worker) = new_index();
    let image = Value::List(vec![Value::Text("digest"), Value::Int(0)]);
    let keys = Value::List(vec![Value::List(vec![image])]);
    let event = with(stored(&[1], None, &[1, 2], "GPU"), "extra_keys", keys);
    apply(
        &mut index,
        worker,
        Stream::Engine,
        &[event, stored(&[2], None, &[3, 4], "GPU")],
    );
    assert_eq!(exact(&index, &[1, 2]), 0);
    let items = vec![Item::new(2, 4, b"digest").unwrap()];
    let seq = TokenSequence::new(space(None, None), vec![3, 4, 1, 2], items).unwrap();
    let prompt = index.prompt(&seq, true);
    assert_eq!(
        index.find(&prompt, FindOptions::default()).unwrap().exact,
        [2]
    );
}

#[test]
fn media_are_tiers() {
    let media = [
        ("GPU", Tier::Device),
        ("CPU", Tier::Host),
        ("CPU_PINNED", Tier::Host),
        ("DISK", Tier::Disk),
        ("STORAGE", Tier::Disk),
        ("EXTERNAL", Tier::External),
        ("a later one", Tier::External),
    ];
    for (medium, tier) in media {
        let (mut index, worker) = new_index();
        let events = [
            stored(&[1], None, &[1, 2], "GPU"),
            stored(&[2], Some(1), &[3, 4], medium),
        ];
        apply(&mut index, worker, Stream::Engine, &events);
        let scores = ask(&index, space(None, None), &[1, 2, 3, 4]);
        assert_eq!((scores.exact[0], scores.tier[0]), (4, tier), "{medium}");
        assert_eq!(
            ask(&index, space(None, None), &[1, 2, 9, 9]).tier,
            [Tier::Device]
        );
        // A copy in the device is the faster one.
        apply(
            &mut index,
            worker,
            Stream::Engine,
            &[stored(&[2], Some(1), &[3, 4], "GPU")],
        );
        assert_eq!(
            ask(&index, space(None, None), &[1, 2, 3, 4]).tier,
            [Tier::Device]
        );
        apply(&mut index, worker, Stream::Engine, &[removed(&[2], "GPU")]);
        assert_eq!(ask(&index, space(None, None), &[1, 2, 3, 4]).tier, [tier]);
    }
}

#[test]
fn two_copies_and_one_removal_leave_one() {
    let (mut index, worker) = new_index();
    let event = stored(&[1], None, &[1, 2], "GPU");
    apply(&mut index, worker, Stream::Engine, &[event.clone(), event]);
    apply(
        &mut index,
        worker,
        Stream::Engine,
        &[removed(&[1], "CPU"), removed(&[1], "GPU")],
    );
    assert_eq!(exact(&index, &[1, 2]), 2);
    assert_eq!(index.worker_stats(worker).unwrap().unknown_removals, 1);
    apply(&mut index, worker, Stream::Engine, &[removed(&[1], "GPU")]);
    assert_eq!(exact(&index, &[1, 2]), 0);
}

#[test]
fn descendants_outlive_a_removal_and_match_again() {
    let (mut index, worker) = new_index();
    let prompt = [1, 2, 3, 4, 5, 6];
    apply(
        &mut index,
        worker,
        Stream::Engine,
        &[stored(&[1, 2, 3], None, &prompt, "GPU")],
    );
    apply(&mut index, worker, Stream::Engine, &[removed(&[2], "GPU")]);
    assert_eq!(exact(&index, &prompt), 2);
    apply(
        &mut index,
        worker,
        Stream::Engine,
        &[stored(&[2], Some(1), &[3, 4], "GPU")],
    );
    assert_eq!(exact(&index, &prompt), 6);
}

#[test]
fn a_block_waits_for_its_parent_and_can_leave_before() {
    let (mut index, worker) = new_index();
    let prompt = [1, 2, 3, 4, 5, 6];
    let late = [
        stored(&[3], Some(2), &[5, 6], "GPU"),
        stored(&[2], Some(1), &[3, 4], "GPU"),
    ];
    apply(&mut index, worker, Stream::Engine, &late);
    assert_eq!(exact(&index, &prompt), 0);
    assert_eq!(index.worker_stats(worker).unwrap().parked, 2);
    apply(&mut index, worker, Stream::Engine, &[removed(&[3], "GPU")]);
    apply(
        &mut index,
        worker,
        Stream::Engine,
        &[stored(&[1], None, &[1, 2], "GPU")],
    );
    assert_eq!(exact(&index, &prompt), 4);
    assert_eq!(index.worker_stats(worker).unwrap().parked, 0);
}

/// The event of kvtrie's connector for vLLM, whose class is in `classes`, and the short form.
fn approximate(hash: u64, parent: Option<u64>, tokens: &[u32]) -> [Event; 2] {
    let classes = Value::List(vec![Value::Text("moved")]);
    let mut long = with(stored(&[hash], parent, tokens, "GPU"), "classes", classes);
    long[0].1 = Value::Text("ApproximateBlockStored");
    let long = with(with(long, "hops", ints([1])), "position", Value::Int(0));
    let short = stored(&[hash], parent, tokens, "GPU");
    [long, with(short, "class", Value::Text("approximate"))]
}

#[test]
fn approximate_blocks_are_moved_runs_and_never_exact() {
    let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    for form in 0..2 {
        for stream in [Stream::Engine, Stream::Approximate] {
            let (mut index, worker) = new_index();
            apply(
                &mut index,
                worker,
                Stream::Engine,
                &[stored(&[1], None, &[1, 2], "GPU")],
            );
            let second = approximate(20, Some(1), &[3, 4])[form].clone();
            let third = approximate(21, Some(20), &[5, 6])[form].clone();
            apply(&mut index, worker, stream, &[second, third]);
            let scores = ask(&index, space(None, None), &prompt);
            assert_eq!((scores.exact[0], scores.possible[0]), (2, 4));
            // An exact block after an approximate one is not exact either.
            apply(
                &mut index,
                worker,
                Stream::Engine,
                &[stored(&[22], Some(21), &[7, 8], "GPU")],
            );
            assert_eq!(exact(&index, &prompt), 2);
            apply(&mut index, worker, stream, &[removed(&[21], "GPU")]);
            assert_eq!(ask(&index, space(None, None), &prompt).possible, [0]);
            assert_eq!(exact(&index, &prompt), 2);
            apply(&mut index, worker, Stream::Approximate, &[cleared()]);
            assert_eq!(exact(&index, &prompt), 2);
        }
    }
}

#[test]
fn moved_runs_are_found_at_any_alignment_and_counted_once() {
    let (mut index, worker) = new_index();
    let other = index.add_worker(space(None, None)).unwrap();
    let text: Vec<u32> = (100..120).collect();
    let hashes: Vec<u64> = (1..11).collect();
    for each in [worker, other] {
        apply(
            &mut index,
            each,
            Stream::Engine,
            &[stored(&hashes, None, &text, "GPU")],
        );
    }
    apply(
        &mut index,
        other,
        Stream::Engine,
        &[removed(&[4, 6, 8], "GPU")],
    );
    // Its own beginning, a new token, then the rest of the text from its third token on, twice.
    let mut prompt = vec![100, 101, 102, 103, 9];
    prompt.extend(102..120);
    prompt.extend(102..120);
    let scores = ask(&index, space(None, None), &prompt);
    // The first repeat of 102 to 119, and the second. The other has no run of two blocks but 102..106 and 116..120.
    assert_eq!(scores.exact, [4, 4]);
    assert_eq!(scores.possible, [36, 16]);
    let short = [9, 102, 103, 9];
    assert_eq!(ask(&index, space(None, None), &short).possible, [0, 0]);
}

#[test]
fn groups_without_positions_are_refused_by_name() {
    let kinds = [
        ("sliding_window", Refused::SlidingWindow),
        ("sliding_window_mla", Refused::SlidingWindow),
        ("chunked_local_attention", Refused::SlidingWindow),
        ("mamba", Refused::StateSpace),
        ("cross_attention", Refused::OtherGroup),
    ];
    for (kind, refused) in kinds {
        let (mut index, worker) = new_index();
        let event = with(
            stored(&[1], None, &[1, 2], "GPU"),
            "group_idx",
            Value::Int(1),
        );
        let event = with(event, "kv_cache_spec_kind", Value::Text(kind));
        let full = with(
            stored(&[1], None, &[1, 2], "GPU"),
            "group_idx",
            Value::Int(0),
        );
        let full = with(full, "kv_cache_spec_kind", Value::Text("full_attention"));
        apply(&mut index, worker, Stream::Engine, &[event, full]);
        let stats = index.worker_stats(worker).unwrap();
        assert_eq!(stats.refused[refused as usize], 1, "{kind}");
        // The engine finds what all groups hold, so what this one holds is not promised.
        let scores = ask(&index, space(None, None), &[1, 2]);
        assert_eq!((scores.exact[0], scores.uncertain[0]), (2, true));
        // The other group's removal has the same hash.
        let gone = with(removed(&[1], "GPU"), "group_idx", Value::Int(1));
        apply(&mut index, worker, Stream::Engine, &[gone]);
        assert_eq!(exact(&index, &[1, 2]), 2);
    }
    let others = [
        (
            "kv_cache_spec_sliding_window",
            Value::Int(1_024),
            Refused::SlidingWindow,
        ),
        (
            "lookahead_token_ids",
            Value::List(vec![ints([9])]),
            Refused::Lookahead,
        ),
        ("locality", Value::Text("REMOTE"), Refused::Remote),
        ("type", Value::Text("BlockPinned"), Refused::UnknownType),
    ];
    for (name, value, refused) in others {
        let (mut index, worker) = new_index();
        let event = with(stored(&[1], None, &[1, 2], "GPU"), name, value);
        apply(&mut index, worker, Stream::Engine, &[event]);
        assert_eq!(
            index.worker_stats(worker).unwrap().refused[refused as usize],
            1
        );
        let scores = ask(&index, space(None, None), &[1, 2]);
        let may_hold_less = matches!(refused, Refused::SlidingWindow | Refused::UnknownType);
        assert_eq!(
            (scores.exact[0], scores.uncertain[0]),
            (0, may_hold_less),
            "{}",
            refused.as_str()
        );
    }
}

/// Token ids are read into blocks at once, before the rest of the event says whether they count.
#[test]
fn blocks_of_a_batch_are_those_that_it_stores() {
    let ids = |tokens: [u64; 4]| ("token_ids", ints(tokens));
    let first = stored(&[1, 2], None, &[1, 2, 3, 4], "GPU");
    // The ids come before the hashes, and once more: the last ones count, as of any field.
    let mut last = vec![ids([9; 4]), ("token_ids", ints([8]))];
    last.extend(stored(&[3, 4], Some(2), &[0; 4], "GPU"));
    last.push(ids([5, 6, 7, 8]));
    for (name, value) in [
        ("kv_cache_spec_kind", Value::Text("mamba")),
        ("lookahead_token_ids", Value::List(vec![ints([9])])),
        ("locality", Value::Text("REMOTE")),
        ("type", Value::Text("BlockPinned")),
        ("type", Value::Text("AllBlocksCleared")),
        ("type", Value::Text("BlockRemoved")),
    ] {
        let mut other = with(stored(&[7, 8], None, &[9; 4], "GPU"), name, value.clone());
        other.insert(0, ids([6; 4]));
        let (mut index, worker) = new_index();
        let raw = batch(&[other, first.clone(), last.clone()], true, None);
        let read = index.reader().read(&raw).unwrap();
        assert_eq!((read.num_events(), read.num_blocks()), (3, 4), "{value:?}");
        index.apply(worker, Stream::Engine, &read).unwrap();
        index.check().unwrap();
        assert_eq!(exact(&index, &[1, 2, 3, 4, 5, 6, 7, 8]), 8, "{value:?}");
        assert_eq!(index.worker_stats(worker).unwrap().entries, 4);
    }
}

/// `SGLang` writes pad values of up to 63 bits in the place of images. Such a batch could not be read.
#[test]
fn blocks_with_ids_beyond_32_bits_match_no_tokens() {
    const WIDE: u64 = (1 << 62) + 3;
    let with_image = |ids: [u64; 4]| {
        let mut events = vec![stored(&[1], None, &[1, 2], "GPU")];
        events.push(with(
            stored(&[2, 3], Some(1), &[0; 4], "GPU"),
            "token_ids",
            ints(ids),
        ));
        let (mut index, worker) = new_index();
        apply(&mut index, worker, Stream::Engine, &events);
        (index, worker)
    };
    let (mut index, worker) = with_image([7, WIDE, WIDE + 1, 4]);
    let low = [1, 2, 7, 3, 4, 4];
    assert_eq!(exact(&index, &low), 2);
    assert_eq!(index.worker_stats(worker).unwrap().entries, 3);
    apply(
        &mut index,
        worker,
        Stream::Engine,
        &[removed(&[2, 3], "GPU")],
    );
    assert_eq!(index.worker_stats(worker).unwrap().entries, 1);
    // Every bit of an id counts, and its place.
    let digest = |ids| {
        let (index, worker) = with_image(ids);
        index.digest(worker).unwrap()
    };
    let same = digest([WIDE, 3, 3, 3]);
    assert_eq!(same, digest([WIDE, 3, 3, 3]));
    for other in [
        [3, WIDE, 3, 3],
        [3, 3, 3, 3],
        [WIDE + (1 << 40), 3, 3, 3],
        [WIDE, 3, WIDE, 3],
    ] {
        assert_ne!(same, digest(other), "{other:?}");
    }
}

#[test]
fn what_cannot_be_read_is_refused_as_a_whole() {
    let (mut index, worker) = new_index();
    let good = stored(&[1], None, &[1, 2], "GPU");
    let bad = |event: Event| batch(&[good.clone(), event], true, None);
    let short = with(good.clone(), "token_ids", ints([1]));
    let long_size = with(good.clone(), "block_size", Value::Int(1 << 60));
    let no_type: Event = good.iter().skip(1).cloned().collect();
    let no_hashes: Event = vec![("type", Value::Text("BlockStored"))];
    let keys = with(
        good.clone(),
        "extra_keys",
        Value::List(vec![Value::Nil, Value::Nil]),
    );
    let token = Value::List(vec![Value::Int(1), Value::Text("b")]);
    let token = with(good.clone(), "token_ids", token);
    let text = with(good.clone(), "token_ids", Value::Text("ab"));
    let malformed = EventRefusal::Malformed;
    let cases = [
        (bad(short), malformed, "1 token ids for 1 blocks of 2"),
        (
            bad(long_size),
            EventRefusal::BlockSize,
            "1152921504606846976",
        ),
        (bad(no_type), malformed, "no type"),
        (bad(no_hashes), malformed, "no block_hashes"),
        (bad(keys), malformed, "extra_keys of 2 blocks for 1"),
        (bad(token), malformed, "a token id is encoded as FixStr"),
        (bad(text), malformed, "token_ids is encoded as FixStr"),
        (Vec::new(), malformed, "takes 1 bytes, 0 are left"),
        (vec![0x91, 0x01], malformed, "1 entries"),
        (
            vec![0x92, 0x01, 0xdd, 0xff, 0xff, 0xff, 0xff],
            malformed,
            "4294967295 elements",
        ),
        (vec![0x92, 0x01, 0x90, 0xc0], malformed, "1 bytes too many"),
        (vec![0x92, 0xc1, 0x90], malformed, "Reserved"),
    ];
    for (raw, refusal, message) in cases {
        let error = index.reader().read(&raw).unwrap_err();
        assert_eq!(error.refusal(), refusal, "{error}");
        assert!(error.to_string().contains(message), "{error}");
    }
    // Every proper beginning of a batch is refused, and none is applied.
    let raw = batch(&[good], true, Some(0));
    for end in 0..raw.len() {
        assert!(index.reader().read(&raw[..end]).is_err(), "{end}");
    }
    assert_eq!(index.stats().entries, 0);
    let read = index.reader().read(&raw).unwrap();
    index.apply(worker, Stream::Engine, &read).unwrap();
    let of_rank = |rank| batch(&[cleared()], true, Some(rank));
    let read = index.reader().read(&of_rank(1)).unwrap();
    let error = index.apply(worker, Stream::Engine, &read).unwrap_err();
    assert_eq!(error.refusal(), EventRefusal::Rank);
    assert_eq!(exact(&index, &[1, 2]), 2);
    let other = KvIndexer::new(IndexerConfig::new(common::SIZE), &[2; 16]).unwrap();
    let read = other.reader().read(&of_rank(0)).unwrap();
    let error = index.apply(worker, Stream::Engine, &read).unwrap_err();
    assert_eq!(error.refusal(), EventRefusal::Key);
    index.remove_worker(worker).unwrap();
    let read = index.reader().read(&raw).unwrap();
    let error = index.apply(worker, Stream::Engine, &read).unwrap_err();
    assert_eq!(error.refusal(), EventRefusal::Worker);
}

#[test]
fn a_digest_is_of_all_that_a_worker_holds() {
    let digest = |space: Arc<Namespace>, key: u8, steps: &[(Stream, Event)]| {
        let mut index = KvIndexer::new(IndexerConfig::new(common::SIZE), &[key; 16]).unwrap();
        let other = index.add_worker(Arc::clone(&space)).unwrap();
        let worker = index.add_worker(space).unwrap();
        let text = stored(&[5], None, &[8, 8], "GPU");
        apply(&mut index, other, Stream::Engine, &[text]);
        for (stream, event) in steps {
            apply(&mut index, worker, *stream, std::slice::from_ref(event));
        }
        index.digest(worker).unwrap()
    };
    let engine = |event: Event| (Stream::Engine, event);
    let plain = |steps: &[(Stream, Event)]| digest(space(None, None), 1, steps);
    let both = || engine(stored(&[1, 2], None, &[1, 2, 3, 4], "GPU"));
    let first = || engine(stored(&[1], None, &[1, 2], "GPU"));
    let second = |tier| engine(stored(&[2], Some(1), &[3, 4], tier));
    let all = [
        plain(&[]),
        plain(&[first()]),
        plain(&[both()]),
        plain(&[both(), second("GPU")]),
        plain(&[both(), second("CPU")]),
        plain(&[both(), engine(removed(&[1], "GPU"))]),
        plain(&[engine(stored(&[1, 3], None, &[1, 2, 3, 4], "GPU"))]),
        plain(&[engine(stored(&[1, 2], None, &[1, 2, 3, 5], "GPU"))]),
        // Parked, of two parents.
        plain(&[second("GPU")]),
        plain(&[engine(stored(&[2], Some(7), &[3, 4], "GPU"))]),
        plain(&[first(), (Stream::Approximate, second("GPU").1)]),
        digest(space(None, None), 2, &[both()]),
        digest(space(Some("a"), None), 1, &[both()]),
        digest(space(Some("a"), None), 1, &[]),
    ];
    for (at, one) in all.iter().enumerate() {
        assert!(!all[at + 1..].contains(one), "{at}");
    }
    assert_eq!(plain(&[both()]), plain(&[second("GPU"), first()]));
    let more = [second("CPU"), both(), engine(removed(&[2], "CPU"))];
    assert_eq!(plain(&[both()]), plain(&more));
    let again = [both(), engine(cleared())];
    assert_eq!(plain(&[]), plain(&again));
}

#[test]
fn a_key_check_is_that_of_the_key_and_the_block_size() {
    let check = |key: u8, size| {
        let index = KvIndexer::new(IndexerConfig::new(size), &[key; 16]).unwrap();
        index.key_check()
    };
    assert_eq!(check(1, 2), check(1, 2));
    assert_ne!(check(1, 2), check(2, 2));
    assert_ne!(check(1, 2), check(1, 4));
}
