//! Tests how many looks searches for moved runs take, and what they find, on texts of several kinds. A rule that only
//! saves work changes no result; these counts fail without it.
//!
//! Looks are counted, so they are equal on every machine. A change that lowers them, or finds more, changes the numbers
//! here.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{BlockId, Class, Config, InsertOptions, RadixIndex, ReusePolicy, Source};

use common::{approximate, ids, imported, planned, sequence};
use numbers::Numbers;

mod common;
#[path = "common/numbers.rs"]
mod numbers;

const BLOCK_SIZE: usize = 16;

impl Numbers {
    fn text(&mut self, len: usize, words: u32) -> Vec<u32> {
        (0..len).map(|_| self.below(words)).collect()
    }

    /// The runs, each with a random token after it.
    fn apart<'a>(&mut self, runs: impl Iterator<Item = &'a Vec<u32>>) -> Vec<u32> {
        runs.flat_map(|run| run.iter().copied().chain([self.below(5_000)]))
            .collect()
    }
}

struct World {
    index: RadixIndex,
    next_id: u32,
    covered: usize,
    dropped: u64,
}

impl World {
    fn new(max_candidates: usize) -> Self {
        let config = Config {
            num_blocks: 100_000,
            block_size: BLOCK_SIZE,
            moved_runs: true,
            max_candidates,
            ..Config::seeded(0)
        };
        Self {
            index: RadixIndex::new(config).unwrap(),
            next_id: 0,
            covered: 0,
            dropped: 0,
        }
    }

    fn cache(&mut self, tokens: &[u32], source: Source<'_>) {
        let count = u32::try_from(tokens.len() / BLOCK_SIZE).unwrap();
        let ids = ids(self.next_id..self.next_id + count);
        self.next_id += count;
        let options = InsertOptions::new(tokens.len(), source);
        let mut seq = sequence(tokens.iter().copied());
        self.index.insert(&mut seq, &ids, options).unwrap();
    }

    fn plan(&mut self, tokens: &[u32], min_run: Option<usize>) {
        let policy = ReusePolicy {
            max_hops: 2,
            min_run,
            ..approximate()
        };
        let mut seq = sequence(tokens.iter().copied());
        let plan = planned(&mut self.index, &mut seq, &policy);
        self.covered += tokens.len() - plan.num_tokens(Class::Compute);
        self.dropped += plan.candidates_dropped();
        self.index.release(&plan).unwrap();
    }

    /// The looks taken, the tokens that need not be computed, and the places not tried.
    fn took(&self) -> (u64, usize, u64) {
        (self.index.stats().search_looks, self.covered, self.dropped)
    }
}

#[test]
fn conversations_whose_reasoning_is_left_out() {
    let (mut world, mut numbers) = (World::new(64), Numbers(1));
    for _ in 0..8 {
        let turns: Vec<_> = (0..6)
            .map(|_| (numbers.text(90, 5_000), numbers.text(70, 5_000)))
            .collect();
        let all: Vec<u32> = turns
            .iter()
            .flat_map(|(said, reasoning)| said.iter().chain(reasoning).copied())
            .collect();
        world.cache(&all, Source::Computed);
        let said: Vec<u32> = turns.into_iter().flat_map(|(said, _)| said).collect();
        world.plan(&said, None);
    }
    assert_eq!(world.took(), (264, 4312, 0));
}

#[test]
fn texts_of_few_words() {
    let cases = [
        (2, 2, (1669, 330, 790)),
        (3, 3, (228, 619, 0)),
        (6, 4, (98, 541, 0)),
    ];
    for (words, seed, took) in cases {
        let (mut world, mut numbers) = (World::new(64), Numbers(seed));
        let texts: Vec<Vec<u32>> = (0..12).map(|_| numbers.text(400, words)).collect();
        for text in &texts {
            world.cache(text, Source::Computed);
        }
        for min_run in [None, Some(20), Some(40)] {
            let mut text = numbers.text(200, words);
            for _ in 0..12 {
                let (of, from, len) = (numbers.below(12), numbers.below(350), numbers.below(50));
                let piece = from as usize..(from + len) as usize;
                text.extend(&texts[of as usize][piece]);
            }
            world.plan(&text, min_run);
        }
        assert_eq!(world.took(), took, "{words} words");
    }
}

#[test]
fn boilerplate_that_goes_on_in_many_ways() {
    let cases = [
        (2, (1376, 1487, 506)),
        (64, (3158, 1506, 264)),
        (200, (4053, 1494, 0)),
    ];
    for (max_candidates, took) in cases {
        let (mut world, mut numbers) = (World::new(max_candidates), Numbers(5));
        let boilerplate = numbers.text(200, 5_000);
        for at in 0..90 {
            let mut text = numbers.text(at % 23, 5_000);
            text.extend(&boilerplate);
            text.extend(numbers.text(60, 2));
            world.cache(&text, Source::Computed);
        }
        for _ in 0..4 {
            let mut text = numbers.text(31, 5_000);
            text.extend(&boilerplate);
            text.extend(numbers.text(100, 2));
            text.extend(&boilerplate[3..150]);
            world.plan(&text, None);
        }
        assert_eq!(world.took(), took, "{max_candidates} candidates");
    }
}

#[test]
fn one_period_and_another() {
    let (mut world, mut numbers) = (World::new(64), Numbers(6));
    let period = |of: u32, len: u32| (0..len).map(move |at| at % of);
    for of in [1, 2, 7, 9, 17] {
        let text: Vec<u32> = period(of, 800).collect();
        world.cache(&text, Source::Computed);
    }
    for of in [1, 2, 7, 9, 17, 18] {
        let mut text = numbers.text(40, 5_000);
        text.extend(period(of, 500));
        world.plan(&text, None);
    }
    assert_eq!(world.took(), (4293, 2954, 154));
}

#[test]
fn runs_that_are_too_short() {
    let (mut world, mut numbers) = (World::new(64), Numbers(7));
    let runs: Vec<Vec<u32>> = (0..40).map(|_| numbers.text(15, 5_000)).collect();
    for _ in 0..3 {
        let text = numbers.apart(runs.iter());
        world.cache(&text, Source::Computed);
    }
    for _ in 0..3 {
        let text = numbers.apart(runs.iter().rev());
        world.plan(&text, None);
    }
    assert_eq!(world.took(), (648, 0, 0));
}

#[test]
fn runs_that_the_policy_finds_too_short() {
    // The runs are long enough for the index. Each is followed once, and its other windows are skipped.
    let (mut world, mut numbers) = (World::new(64), Numbers(9));
    let runs: Vec<Vec<u32>> = (0..4).map(|_| numbers.text(150, 5_000)).collect();
    for _ in 0..2 {
        let text = numbers.apart(runs.iter());
        world.cache(&text, Source::Computed);
    }
    for run in &runs {
        let mut text = numbers.text(20, 5_000);
        text.extend(run);
        text.push(5_001);
        world.plan(&text, Some(200));
    }
    let all: Vec<u32> = runs
        .iter()
        .flat_map(|run| run.iter().copied().chain([5_002]))
        .collect();
    world.plan(&all, Some(200));
    assert_eq!(world.took(), (527, 150, 0));
}

#[test]
fn places_at_edges_with_children() {
    let mut found = Vec::new();
    for (places, children, shared) in [(2, 3, 1), (2, 3, 3), (3, 20, 5)] {
        let (mut world, mut numbers) = (World::new(64), Numbers(10));
        let period = |at: usize| u32::try_from(at % 9).unwrap();
        for residue in 0..9 {
            for _ in 0..places {
                let head = numbers.text(19, 1_000_000);
                for child in 0..children {
                    let until = 32 + shared + child % 2;
                    let mut text = head.clone();
                    text.extend((19..until).map(|at| period(at + residue)));
                    text.extend(numbers.text(48 - until, 1_000_000));
                    world.cache(&text, Source::Computed);
                }
            }
        }
        let text: Vec<u32> = (0..90).map(period).collect();
        world.plan(&text, None);
        world.plan(&text[3..40], None);
        found.push(world.took());
    }
    assert_eq!(found, [(549, 0, 119), (2978, 119, 42), (704, 38, 743)]);
}

#[test]
fn approximate_entries_and_holes_on_the_own_path() {
    let (mut world, mut numbers) = (World::new(64), Numbers(8));
    let texts: Vec<Vec<u32>> = (0..6).map(|_| numbers.text(480, 30)).collect();
    for (text, hops) in texts.iter().zip([0, 1, 2, 3, 0, 1]) {
        world.cache(text, imported(96, hops));
        // The same tokens are further on in another text, with other hops.
        let mut again = numbers.text(23, 30);
        again.extend(&text[100..400]);
        world.cache(&again, imported(96, 1));
        let seq = sequence(text.iter().copied());
        let ranges = [(128, 192), (256, 288), (400, 416)];
        world.index.remove_spans(&seq, &ranges, false).unwrap();
    }
    for text in &texts {
        world.plan(text, None);
        world.plan(&text[..300], Some(64));
        let mut edited = text[..210].to_vec();
        edited.extend(&text[230..]);
        world.plan(&edited, None);
    }
    assert_eq!(world.took(), (406, 7008, 0));
}

#[test]
fn children_of_which_one_goes_on_as_the_prompt_does() {
    let (mut world, mut numbers) = (World::new(64), Numbers(11));
    let prefix = numbers.text(200, 5_000);
    let tails: Vec<Vec<u32>> = (0..12).map(|_| numbers.text(72, 5_000)).collect();
    for tail in &tails {
        let text: Vec<u32> = prefix.iter().chain(tail).copied().collect();
        world.cache(&text, Source::Computed);
    }
    for tail in &tails[..4] {
        let mut text = numbers.text(31, 5_000);
        text.extend(&prefix[50..]);
        text.extend(tail);
        world.plan(&text, None);
        // The run starts in the middle of a block, and no token follows it.
        text.truncate(31 + 150 + 20);
        world.plan(&text, None);
    }
    assert_eq!(world.took(), (304, 1560, 0));
}

#[test]
fn pieces_of_the_own_path_that_are_too_short_are_not_followed_again() {
    let (mut world, mut numbers) = (World::new(64), Numbers(12));
    let text = numbers.text(480, 5_000);
    world.cache(&text, Source::Computed);
    // The branch starts inside a block, which the prompt shares in part.
    let mut branch = text[..330].to_vec();
    branch.extend(numbers.text(70, 5_000));
    world.cache(&branch, Source::Computed);
    let holes: Vec<BlockId> = (1..9).map(|at| BlockId(3 * at)).collect();
    world.index.discard(&holes).unwrap();
    for end in [480, 335, 328] {
        world.plan(&text[..end], Some(64));
        world.plan(&text[..end], None);
    }
    assert_eq!(world.took(), (212, 1043, 0));
}

#[test]
fn places_on_the_own_path_and_next_to_its_holes_are_not_followed_again() {
    let (mut world, mut numbers) = (World::new(64), Numbers(13));
    let text = numbers.text(480, 5_000);
    world.cache(&text, Source::Computed);
    // The branches leave the path, and each continues like it for some tokens of a block.
    for (at, shared) in [(96, 13), (208, 9), (320, 15), (400, 8)] {
        let mut branch = text[..at + shared].to_vec();
        branch.extend(numbers.text(40, 5_000));
        world.cache(&branch, Source::Computed);
    }
    // The path's own blocks are holes there.
    let holes: Vec<BlockId> = [6, 13, 20, 25].map(BlockId).to_vec();
    world.index.discard(&holes).unwrap();
    let mut took = Vec::new();
    for (end, more) in [(480, 0), (330, 0), (215, 30), (402, 30), (105, 200)] {
        let mut prompt = text[..end].to_vec();
        prompt.extend(numbers.text(more, 5_000));
        prompt.extend(&text[120..180]);
        world.plan(&prompt, None);
        took.push(world.took());
    }
    let expected = [
        (18, 520, 0),
        (30, 899, 0),
        (38, 1170, 0),
        (52, 1620, 0),
        (57, 1784, 0),
    ];
    assert_eq!(took, expected);
}
