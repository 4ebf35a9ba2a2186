//! Tests what plans contain and cost in many small worlds: texts made of pieces of each other, holes, hops, kinds, any
//! number of children, and policies with all fields.
//!
//! No rule is worked out here: `tests/model.rs` and `tests/plans.rs` do that. These tests fix the choices between
//! equally good results, and the work that is saved; no rule determines either. A change that finds more, or takes
//! less, changes the numbers.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a test stops at what it does not expect, and its shares are from 0 to 1"
)]

use kvtrie_core::{
    BlockId, Class, Config, Effort, InsertOptions, PlanOptions, RadixIndex, ReusePlan, ReusePolicy,
    Scope, Source,
};

use common::{ids, imported, sequence, span};
use numbers::Numbers;

mod common;
#[path = "common/numbers.rs"]
mod numbers;

impl Numbers {
    /// A number from 0 to `most`.
    fn up_to(&mut self, most: usize) -> usize {
        self.below(u32::try_from(most + 1).unwrap()) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.up_to(all.len() - 1)]
    }

    /// True once in `times` calls, on average.
    fn once_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }
}

/// The features of worlds of one kind.
#[derive(Clone, Copy)]
struct Kind {
    block_sizes: &'static [usize],
    min_runs: &'static [usize],
    words: &'static [u32],
    max_candidates: &'static [usize],
    is_broken: bool,
    /// Whether tokens are tagged, and kinds forbidden.
    has_kinds: bool,
    is_limited: bool,
}

/// All features, without limits on plans.
const KIND: Kind = Kind {
    block_sizes: &[1, 2, 3, 4, 16],
    min_runs: &[8, 9, 12, 16],
    words: &[1, 2, 3, 6, 50],
    max_candidates: &[1, 2, 4, 64],
    is_broken: true,
    has_kinds: true,
    is_limited: false,
};

/// What the plans of some worlds contained and cost.
#[derive(Debug, Default, PartialEq, Eq)]
struct Took {
    looks: u64,
    covered: usize,
    dropped: u64,
    steps: u64,
    gave_up: u64,
    /// A digest of all plans.
    said: u64,
}

impl Took {
    fn note(&mut self, number: usize) {
        let mixed = self.said.rotate_left(7) ^ number as u64;
        self.said = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn note_plan(&mut self, plan: &ReusePlan) {
        for segment in plan.segments() {
            let class = [Class::Exact, Class::Approximate, Class::Compute];
            let class = class.iter().position(|&class| class == segment.class);
            let hops = usize::from(segment.hops);
            let place = [segment.start, segment.end, segment.old_start];
            for number in place.into_iter().chain([class.unwrap(), hops]) {
                self.note(number);
            }
            if segment.class != Class::Compute {
                self.covered += segment.end - segment.start;
            }
        }
        for id in plan.blocks().iter().copied().chain(plan.source_blocks()) {
            self.note(id.0 as usize);
        }
        for run in plan.moved_runs() {
            self.note(usize::from(run.cuts));
            self.note((run.lost_context * 1000.0) as usize);
            self.note((run.new_context * 1000.0) as usize);
        }
        self.dropped += plan.candidates_dropped();
    }
}

struct World {
    kind: Kind,
    numbers: Numbers,
    index: RadixIndex,
    block_size: usize,
    min_run: usize,
    words: u32,
    scale: usize,
    texts: Vec<Vec<u32>>,
    next_id: u32,
}

impl World {
    fn new(kind: Kind, seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let config = Config {
            num_blocks: 4_000,
            block_size: numbers.of(kind.block_sizes),
            moved_runs: true,
            min_run: numbers.of(kind.min_runs),
            max_candidates: numbers.of(kind.max_candidates),
            ..Config::seeded(0)
        };
        Self {
            kind,
            block_size: config.block_size,
            min_run: config.min_run,
            words: numbers.of(kind.words),
            scale: numbers.of(&[15, 30, 60, 150]),
            numbers,
            index: RadixIndex::new(config).unwrap(),
            texts: Vec::new(),
            next_id: 0,
        }
    }

    /// A text of pieces of other texts, often at their positions, and of tokens of its own.
    fn text(&mut self) -> Vec<u32> {
        let mut text: Vec<u32> = Vec::new();
        for piece in 0..=self.numbers.below(4) {
            if self.texts.is_empty() || self.numbers.once_in(3) {
                let count = self.numbers.up_to(self.scale);
                text.extend((0..count).map(|_| self.numbers.below(self.words)));
            } else {
                let other = self.numbers.up_to(self.texts.len() - 1);
                let other = &self.texts[other];
                let stays = piece == 0 && !self.numbers.once_in(3) || self.numbers.once_in(3);
                let from = if stays {
                    text.len().min(other.len())
                } else {
                    self.numbers.up_to(other.len())
                };
                let count = self.numbers.up_to(other.len() - from);
                text.extend(&other[from..from + count]);
            }
            if self.numbers.once_in(4) {
                text.push(1_000 + self.numbers.below(3));
            }
        }
        text.push(self.numbers.below(self.words));
        text.truncate(400);
        text
    }

    fn cache(&mut self) {
        let text = self.text();
        let mut seq = sequence(text.iter().copied());
        let count = u32::try_from(text.len() / self.block_size).unwrap();
        let ids = ids(self.next_id..self.next_id + count);
        self.next_id += count;
        let source = if self.kind.is_broken && self.numbers.once_in(3) {
            imported(self.numbers.up_to(text.len()), self.numbers.of(&[1, 2, 3]))
        } else {
            Source::Computed
        };
        let options = InsertOptions::new(text.len(), source);
        self.index.insert(&mut seq, &ids, options).unwrap();
        let num_tagged = if self.kind.has_kinds {
            self.numbers.below(4)
        } else {
            0
        };
        for _ in 0..num_tagged {
            let start = self.numbers.up_to(text.len() - 1);
            let most = self.numbers.of(&[3, 100]);
            let end = start + 1 + self.numbers.up_to((text.len() - start - 1).min(most));
            let span = span(start, end, self.numbers.of(&["reasoning", "answer"]));
            self.index.tag(&seq, &[span]).unwrap();
        }
        self.texts.push(text);
    }

    fn discard(&mut self) {
        for _ in 0..=self.numbers.below(4) {
            let id = BlockId(self.numbers.below(self.next_id));
            self.index.discard(&[id]).unwrap();
        }
    }

    fn policy(&mut self) -> ReusePolicy {
        let numbers = &mut self.numbers;
        let min_run = self.min_run + numbers.up_to(20);
        let kinds = self.kind.has_kinds && numbers.once_in(2);
        ReusePolicy {
            approximate: !numbers.once_in(8),
            min_run: numbers.once_in(3).then_some(min_run),
            max_hops: numbers.of(&[0, 1, 2, 3]),
            scope: Scope::Namespace,
            shared_prefix: 16,
            max_approximate_share: numbers.of(&[0.3, 0.6, 1.0, 1.0, 1.0, 1.0]),
            recompute_first: numbers.of(&[0, 0, 0, 1, 4]),
            recompute_last: numbers.of(&[0, 0, 0, 1, 4]),
            forbid_kinds: kinds.then(|| "reasoning".into()).into_iter().collect(),
            partial_blocks: !numbers.once_in(4),
            max_cuts: numbers.of(&[None, None, None, Some(0), Some(2)]),
            max_lost_context: numbers.of(&[1.0, 1.0, 1.0, 0.5]),
            max_new_context: numbers.of(&[1.0, 1.0, 1.0, 0.5]),
            ..ReusePolicy::EXACT_ONLY
        }
    }

    fn plan(&mut self, took: &mut Took) {
        let text = self.text();
        let (mut seq, policy) = (sequence(text.iter().copied()), self.policy());
        let options = PlanOptions {
            keep_last: self.numbers.up_to(2),
            ..PlanOptions::default()
        };
        let effort = if self.kind.is_limited {
            let bytes = 64 * u64::from(self.numbers.below(400));
            Effort {
                nodes: u64::from(self.numbers.below(80)),
                bytes: self.numbers.of(&[bytes, u64::MAX]),
            }
        } else {
            Effort::ANY
        };
        let plan = self.index.plan_within(&mut seq, &policy, options, effort);
        let Some(plan) = plan.unwrap() else {
            took.gave_up += 1;
            return;
        };
        took.note_plan(&plan);
        took.steps += self.index.release_steps(&plan);
        self.index.release(&plan).unwrap();
    }
}

fn took(kind: Kind, worlds: u64) -> Took {
    let mut took = Took::default();
    for seed in 0..worlds {
        let mut world = World::new(kind, seed << 32);
        for _ in 0..4 + world.numbers.below(12) {
            match world.numbers.below(10) {
                0..=5 => world.cache(),
                6..=8 if kind.is_broken && world.next_id > 0 => world.discard(),
                _ => (),
            }
            for _ in 0..world.numbers.below(3) {
                world.plan(&mut took);
            }
        }
        took.looks += world.index.stats().search_looks;
    }
    took
}

#[test]
fn exact_worlds() {
    let kind = Kind {
        is_broken: false,
        has_kinds: false,
        ..KIND
    };
    let expected = Took {
        looks: 56_843,
        covered: 261_239,
        dropped: 19_738,
        steps: 9_798,
        gave_up: 0,
        said: 0xb9e8_e6c6_ad2f_8f94,
    };
    assert_eq!(took(kind, 1_000), expected);
}

#[test]
fn worlds_with_holes_and_hops() {
    let kind = Kind {
        has_kinds: false,
        ..KIND
    };
    let expected = Took {
        looks: 247_045,
        covered: 706_535,
        dropped: 86_645,
        steps: 28_518,
        gave_up: 0,
        said: 0xfc03_51d6_3612_6d40,
    };
    assert_eq!(took(kind, 3_000), expected);
}

#[test]
fn worlds_with_holes_hops_and_kinds() {
    let expected = Took {
        looks: 92_319,
        covered: 239_914,
        dropped: 25_184,
        steps: 9_658,
        gave_up: 0,
        said: 0xe5bc_af25_ca7d_efd6,
    };
    assert_eq!(took(KIND, 1_000), expected);
}

#[test]
fn plans_that_may_take_so_much_only() {
    let kind = Kind {
        is_limited: true,
        ..KIND
    };
    let expected = Took {
        looks: 40_266,
        covered: 186_385,
        dropped: 15_735,
        steps: 8_085,
        gave_up: 632,
        said: 0x0193_b6b4_b0de_ab79,
    };
    assert_eq!(took(kind, 1_000), expected);
}

#[test]
fn worlds_of_long_runs() {
    let kind = Kind {
        min_runs: &[24, 32, 48],
        words: &[2, 3, 50],
        ..KIND
    };
    let expected = Took {
        looks: 19_916,
        covered: 184_948,
        dropped: 207,
        steps: 7_100,
        gave_up: 0,
        said: 0x2456_965e_6cd7_0697,
    };
    assert_eq!(took(kind, 1_000), expected);
}

#[test]
fn worlds_of_two_words() {
    let kind = Kind {
        block_sizes: &[3, 4],
        min_runs: &[8],
        words: &[2],
        max_candidates: &[2, 64],
        ..KIND
    };
    let expected = Took {
        looks: 167_783,
        covered: 233_602,
        dropped: 20_890,
        steps: 13_968,
        gave_up: 0,
        said: 0x04c6_49f3_42da_5a8a,
    };
    assert_eq!(took(kind, 1_000), expected);
}
