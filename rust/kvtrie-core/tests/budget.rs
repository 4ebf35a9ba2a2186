//! Tests the budget of a search for moved runs (P16), on prompts that are made to exhaust it.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at what it does not expect"
)]

use kvtrie_core::{Class, Config, Effort, PlanOptions, RadixIndex, ReusePlan};

use common::{approximate, planned, put, sequence};

mod common;

const BLOCK_SIZE: usize = 16;
const PERIOD: usize = 9;
const PLACES: usize = 64;
const CHILDREN: usize = 64;

/// Number of tokens that earn a look, and the most looks that covered tokens earn in addition to one each.
const TOKENS_PER_EARNED: usize = 10;
const MOST: u64 = 1 << 14;

/// The most looks of the last window and its last place: all places of the window, a choice among children, twice as
/// many children as are compared, and a run of some blocks.
const LAST_PLACE: u64 = 64 + 24 + 2 * 65 + 8;

/// Number of looks that are allowed before anything is found.
fn first(len: usize) -> u64 {
    (256 + len as u64 / 8).min(512)
}

fn period(at: usize) -> u32 {
    u32::try_from(at % PERIOD).unwrap()
}

/// Source of tokens that occur nowhere else.
#[derive(Default)]
struct Unused(u32);

impl Unused {
    fn take(&mut self, count: usize) -> impl Iterator<Item = u32> + use<> {
        let first = 1000 + self.0;
        self.0 += u32::try_from(count).unwrap();
        first..1000 + self.0
    }
}

struct Fan {
    index: RadixIndex,
    unused: Unused,
    next_id: u32,
}

impl Fan {
    /// Caches every window of a text with a period of nine tokens at 64 places. Each place has 13 tokens of the text,
    /// which end with an edge. It has 64 children, which continue with `shared` or one more of the text's tokens.
    fn new(shared: usize) -> Self {
        let mut fan = Self {
            index: RadixIndex::new(Config {
                num_blocks: 200_000,
                block_size: BLOCK_SIZE,
                moved_runs: true,
                ..Config::seeded(0)
            })
            .unwrap(),
            unused: Unused::default(),
            next_id: 0,
        };
        for residue in 0..PERIOD {
            for _ in 0..PLACES {
                let head: Vec<u32> = fan.unused.take(19).collect();
                for child in 0..CHILDREN {
                    let until = 32 + shared + child % 2;
                    let mut text = head.clone();
                    text.extend((19..until).map(|at| period(at + residue)));
                    text.extend(fan.unused.take(3 * BLOCK_SIZE - until));
                    fan.cache(text);
                }
            }
        }
        fan
    }

    fn cache(&mut self, text: Vec<u32>) {
        let count = u32::try_from(text.len() / BLOCK_SIZE).unwrap();
        let blocks = self.next_id..self.next_id + count;
        self.next_id = blocks.end;
        put(&mut self.index, &mut sequence(text), blocks);
    }

    /// Plans a prompt; returns the plan and the looks that it took.
    fn plan(&mut self, text: Vec<u32>) -> (ReusePlan, u64) {
        let before = self.index.stats().search_looks;
        let plan = planned(&mut self.index, &mut sequence(text), &approximate());
        self.index.release(&plan).unwrap();
        (plan, self.index.stats().search_looks - before)
    }
}

fn repeated(len: usize) -> Vec<u32> {
    (0..len).map(period).collect()
}

#[test]
fn a_prompt_whose_windows_lead_nowhere_is_searched_no_longer_than_its_length_allows() {
    let mut fan = Fan::new(1);
    for len in [1_000, 8_000, 17_000, 100_000] {
        let (plan, looks) = fan.plan(repeated(len));
        assert_eq!(plan.num_tokens(Class::Compute), len);
        let allowed = first(len) + (len / TOKENS_PER_EARNED) as u64;
        assert!(
            looks <= allowed + LAST_PLACE,
            "{looks} looks for {len} tokens"
        );
        assert!(plan.candidates_dropped() > 0);
    }
}

#[test]
fn a_prompt_of_many_short_runs_is_searched_no_longer_than_they_earn() {
    // As before, but with runs of just min_run tokens, so that each could be chosen among 64 places with 64 children
    // each.
    let mut fan = Fan::new(3);
    for len in [1_000, 8_000, 100_000] {
        let (plan, looks) = fan.plan(repeated(len));
        let covered = plan.num_tokens(Class::Approximate) as u64;
        assert!(covered > 0);
        let allowed = first(len) + (len / TOKENS_PER_EARNED) as u64 + covered + MOST;
        assert!(
            looks <= allowed + LAST_PLACE,
            "{looks} looks for {len} tokens"
        );
    }
}

#[test]
fn each_token_that_is_covered_earns_32_looks_and_one() {
    let mut fan = Fan::new(1);
    let text: Vec<u32> = fan.unused.take(96).collect();
    fan.cache(text.clone());
    let (_, without) = fan.plan(repeated(2_000));
    let (plan, looks) = fan.plan([&[0], &text[..], &repeated(1_903)].concat());
    assert_eq!(plan.num_tokens(Class::Approximate), 96);
    let earned = looks - without;
    let expected = 96 * (32 + 1);
    assert!(
        earned.abs_diff(expected) <= LAST_PLACE,
        "{earned} looks are not {expected}"
    );
}

#[test]
fn a_run_after_windows_that_lead_nowhere_is_found_from_its_first_token_on() {
    let mut fan = Fan::new(1);
    let text: Vec<u32> = fan.unused.take(6_400).collect();
    fan.cache(text.clone());
    let mut prompt = repeated(4_000);
    prompt.extend(&text);
    prompt.push(0);
    let (plan, _) = fan.plan(prompt);
    assert!(plan.candidates_dropped() > 0);
    let moved: Vec<_> = plan
        .segments()
        .iter()
        .filter(|segment| segment.class == Class::Approximate)
        .collect();
    assert_eq!(moved.len(), 1);
    assert_eq!((moved[0].start, moved[0].end), (4_000, 10_400));
}

#[test]
fn a_search_that_takes_too_long_gives_up_without_having_planned() {
    let mut fan = Fan::new(3);
    let policy = approximate();
    let mut within = |text: Vec<u32>, effort| {
        let before = fan.index.digest();
        let options = PlanOptions::default();
        let mut seq = sequence(text);
        let plan = fan.index.plan_within(&mut seq, &policy, options, effort);
        let plan = plan.unwrap();
        if let Some(plan) = &plan {
            fan.index.release(plan).unwrap();
        } else {
            assert_eq!(fan.index.digest(), before);
        }
        plan.is_some()
    };
    let brief = Effort {
        nodes: 256,
        bytes: 1 << 20,
    };
    // A plan gives up by the work that it does, not by the prompt's length.
    assert!(!within(repeated(1_000), brief));
    assert!(within(repeated(1_000), Effort::ANY));
    // It does not give up for windows of a long prompt that is cached nowhere.
    assert!(within((0..10_000).map(|at| 1 << 30 | at).collect(), brief));
    assert!(!within((0..40_000).map(|at| 1 << 30 | at).collect(), brief));
}

#[test]
fn a_long_run_found_at_once_is_compared_within_a_brief_effort() {
    let mut fan = Fan::new(1);
    let text: Vec<u32> = fan.unused.take(40_000).collect();
    fan.cache(text.clone());
    let mut seq = sequence([&[0], &text[..], &[0]].concat());
    let brief = Effort {
        nodes: 256,
        bytes: 1 << 20,
    };
    let options = PlanOptions::default();
    let plan = fan
        .index
        .plan_within(&mut seq, &approximate(), options, brief);
    let plan = plan.unwrap().expect("one run, compared as memory");
    assert_eq!(plan.num_tokens(Class::Approximate), 40_000);
}
