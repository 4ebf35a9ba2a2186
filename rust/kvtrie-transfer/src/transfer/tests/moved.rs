//! Tests moved runs where a block is at many places, and where two places are equally near.

use std::ops::Range;

use super::*;

/// A manifest of tokens that all have exact KV.
fn all_exact(tokens: &[u32], block_size: usize, blocks: &[BlockId]) -> TransferManifest {
    let (group, end) = (sent(block_size, blocks), tokens.len());
    let label = label(0, end, Class::Exact);
    TransferManifest::new(&sequence(tokens), &[group], &[label], end, &key()).unwrap()
}

/// Which tokens may be loaded, and the length of the shortest moved run.
struct Asked {
    cached: Range<usize>,
    keep_last: usize,
    min_run: usize,
}

impl Asked {
    fn runs_of(min_run: usize) -> Self {
        Self {
            cached: 0..0,
            keep_last: 0,
            min_run,
        }
    }
}

/// For each token of the prompt, the sender's position from which it is loaded.
fn sources(manifest: &TransferManifest, mine: &[u32], asked: &Asked) -> Vec<Option<usize>> {
    let policy = ReusePolicy {
        min_run: Some(asked.min_run),
        ..approximate()
    };
    let options = TransferOptions {
        cached: asked.cached.clone(),
        keep_last: asked.keep_last,
        policy: &policy,
    };
    let table = ids(mine.len(), 0);
    let local = local(&table).map(|group| LocalGroup {
        block_size: Some(16),
        ..group
    });
    let plan = TransferPlan::new(manifest, &sequence(mine), &local, &key(), &options).unwrap();
    let mut sources = vec![None; mine.len()];
    for pair in plan.pairs() {
        for (at, source) in (pair.start..pair.end).zip(&mut sources[pair.start..pair.end]) {
            *source = usize::try_from(i64::try_from(at).unwrap() - pair.delta).ok();
        }
    }
    sources
}

/// Returns `count` tokens that no sender has.
fn noise(count: usize) -> Vec<u32> {
    vec![999; count]
}

/// A text of blocks of four equal tokens; each name is the token of a block.
fn blocks_of_four(names: &[u32]) -> Vec<u32> {
    names.iter().flat_map(|&name| [name; 4]).collect()
}

fn from(start: usize, count: usize) -> Vec<Option<usize>> {
    (start..start + count).map(Some).collect()
}

/// A block at 130 places, and the first of the blocks that follow it in pairs, each at one place only.
const CROWD: u32 = 1;
const AFTER: u32 = 100;
const SECOND: u32 = 300;

/// A manifest of a block at one place, then the crowd, then `more`.
fn crowd(more: &[u32]) -> TransferManifest {
    let mut names = vec![50];
    names.extend((0..130).flat_map(|place| [CROWD, AFTER + place, SECOND + place]));
    names.extend(more);
    let tokens = blocks_of_four(&names);
    all_exact(&tokens, 4, &ids(names.len(), 3))
}

#[test]
fn of_a_block_in_many_places_the_64_nearest_are_tried() {
    let manifest = crowd(&[]);
    let places: Vec<usize> = (0..130).map(|place| 4 + 12 * place).collect();
    // The windows are before all places, at one, next to it, between two, and after all.
    for window in [0, 500, 501, 504, 1100] {
        let mut nearest = places.clone();
        // A stable sort: at equal distance, the earlier place comes first.
        nearest.sort_by_key(|place| place.abs_diff(window));
        for ((after, second), place) in (AFTER..).zip(SECOND..).zip(&places) {
            let mut mine = noise(window);
            mine.extend(blocks_of_four(&[CROWD, after, second]));
            let found = sources(&manifest, &mine, &Asked::runs_of(8));
            // The blocks after it are at one place, so they are always found.
            let mut expected = vec![None; window];
            expected.extend(if nearest[..64].contains(place) {
                from(*place, 4)
            } else {
                vec![None; 4]
            });
            expected.extend(from(place + 4, 8));
            assert_eq!(found, expected, "{place} for {window}");
        }
    }
}

#[test]
fn a_token_is_found_through_windows_that_hold_it() {
    // Far from the prompt, a block of the crowd is between blocks that are found.
    let (before, after, second) = (60, 61, 62);
    let manifest = crowd(&[70, 71, before, 72, before, CROWD, after, second]);
    let far = 4 * (1 + 3 * 130 + 4);
    let mut mine = noise(5);
    mine.extend(blocks_of_four(&[before, CROWD, after, second]));
    let asked = Asked::runs_of(8);
    let mut whole = vec![None; 5];
    whole.extend(from(far, 16));
    assert_eq!(sources(&manifest, &mine, &asked), whole);
    // The block before it is not to be loaded, or belongs to another run.
    let cached = Asked {
        cached: 0..9,
        ..asked
    };
    let mut expected = vec![None; 13];
    expected.extend(from(far + 8, 8));
    assert_eq!(sources(&manifest, &mine, &cached), expected);
    let mut mine = noise(5);
    mine.extend(blocks_of_four(&[70, 71, before, CROWD, after, second]));
    let mut expected = vec![None; 5];
    expected.extend(from(far - 16, 12));
    expected.extend([None; 4]);
    expected.extend(from(far + 8, 8));
    assert_eq!(sources(&manifest, &mine, &Asked::runs_of(8)), expected);
}

#[test]
fn a_part_of_a_block_that_is_no_run_alone_is_found_through_the_block_before_it() {
    let mut tokens: Vec<u32> = (0..130)
        .flat_map(|place| blocks_of_four(&[CROWD, 2, AFTER + place]))
        .collect();
    let last = tokens.len();
    let end = [&blocks_of_four(&[CROWD, 2])[..], &[3, 3]].concat();
    tokens.extend(&end);
    let manifest = all_exact(&tokens, 4, &ids(3 * 130 + 3, 3));
    for (window, is_near) in [(5, false), (1500, true)] {
        let mut mine = noise(window);
        mine.extend(&end);
        let mut expected = vec![None; window];
        expected.extend(if is_near {
            from(last, 10)
        } else {
            vec![None; 10]
        });
        assert_eq!(sources(&manifest, &mine, &Asked::runs_of(10)), expected);
    }
}

#[test]
fn of_two_places_as_near_the_lowest_slot_is_taken() {
    // The text repeats every 40 tokens. The prompt has it shifted by 20 tokens, in either direction.
    let tokens: Vec<u32> = (0..112).map(|at| at % 40).collect();
    let mine: Vec<u32> = (20..120).map(|at| at % 40).collect();
    let asked = Asked {
        cached: 0..60,
        keep_last: 20,
        min_run: 16,
    };
    for (before, after, source) in [(3, 4, 40), (4, 3, 80)] {
        let table = [10, 11, before, 13, 14, after, 16].map(BlockId);
        let found = sources(&all_exact(&tokens, 16, &table), &mine, &asked);
        assert_eq!(found[60..80], from(source, 20));
    }
    // Both places are in one block, and the lower slot wins.
    let tokens: Vec<u32> = (0..64).map(|at| at % 4).collect();
    let mine: Vec<u32> = (2..68).map(|at| at % 4).collect();
    let asked = Asked {
        cached: 0..20,
        keep_last: 6,
        min_run: 16,
    };
    let table = [5, 0, 7, 8].map(BlockId);
    let found = sources(&all_exact(&tokens, 16, &table), &mine, &asked);
    assert_eq!(found[20..60], from(18, 40));
}

/// Such tokens were moved as a run, in a plan that said that no run is shorter than its `min_run`.
#[test]
fn what_other_runs_leave_of_a_run_is_moved_if_it_is_long_enough() {
    let tokens = blocks_of_four(&[1, 2, 3, 4, 10, 4, 5, 6, 7]);
    let manifest = all_exact(&tokens, 4, &ids(9, 3));
    let mut mine = noise(1);
    mine.extend(blocks_of_four(&[1, 2, 3, 4, 5, 6, 7]));
    for (min_run, rest) in [(8, 12), (12, 12), (13, 0)] {
        let mut expected = vec![None];
        expected.extend(from(0, 16));
        expected.extend(from(24, rest));
        expected.resize(mine.len(), None);
        let found = sources(&manifest, &mine, &Asked::runs_of(min_run));
        assert_eq!(found, expected, "{min_run}");
    }
}

#[test]
fn what_the_sender_lacks_in_place_is_moved_before_what_it_has() {
    // The third block equals the first, which has no KV.
    let tokens: Vec<u32> = (0..32).chain(0..16).collect();
    let mut labels = vec![Some((Class::Exact, 0)); 48];
    labels[..16].fill(None);
    let sender = Sender {
        tokens,
        labels,
        block_size: 16,
    };
    let mine: Vec<u32> = (0..32).collect();
    let found = sources(&sender.manifest().unwrap(), &mine, &Asked::runs_of(16));
    assert_eq!(found, [from(32, 16), from(16, 16)].concat());
}
