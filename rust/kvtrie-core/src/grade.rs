//! Grades: how strict the policy was that approximate KV was built under (rule P19).
//!
//! A grade has one number per field of a policy that decides how approximate KV may be built. A greater number is
//! stricter, and 0 bounds nothing. So grades are ordered in part: one is at least as strict as another if each of its
//! numbers is. A bound is added by a line at the end of [`BOUNDS`] and of [`bounds`].

use crate::policy::{Repair, ReusePolicy, Scope};
use crate::storage::payload::Label;

/// The fields that bound a number.
const BOUNDS: [&str; 14] = [
    "min_run",
    "max_hops",
    "max_approximate_share",
    "recompute_first",
    "recompute_last",
    "max_cuts",
    "max_lost_context",
    "max_new_context",
    "scope",
    // One for each `Repair`: shares that are chosen in different ways are not comparable.
    "recompute_share",
    "recompute_share",
    "recompute_share",
    "recompute_share",
    "recompute_share",
];

/// The bounds that all snapshots have. Those after them are written if one is not 0.
const FIRST_BOUNDS: usize = 13;

/// The fields that are sets. More members are stricter.
const SETS: [&str; 1] = ["forbid_kinds"];

fn bounds(policy: &ReusePolicy) -> [u64; BOUNDS.len()] {
    let share_by = |repair| {
        if policy.repair == repair {
            policy.recompute_share.abs().to_bits()
        } else {
            0
        }
    };
    [
        at_least(policy.min_run.unwrap_or(0)),
        u64::from(ReusePolicy::MAX_HOPS.saturating_sub(policy.max_hops)),
        share_at_most(policy.max_approximate_share),
        at_least(policy.recompute_first),
        at_least(policy.recompute_last),
        policy.max_cuts.map_or(0, |most| u64::MAX - u64::from(most)),
        share_at_most(policy.max_lost_context),
        share_at_most(policy.max_new_context),
        match policy.scope {
            Scope::Conversation => at_least(policy.shared_prefix),
            Scope::Namespace => 0,
        },
        share_by(Repair::Fronts),
        share_by(Repair::Ngrams),
        share_by(Repair::Probe),
        share_by(Repair::Question),
        share_by(Repair::Adaptive),
    ]
}

fn at_least(number: usize) -> u64 {
    number as u64
}

/// Shares are not negative, so their bits are in the order of their values.
fn share_at_most(share: f64) -> u64 {
    1f64.to_bits().saturating_sub(share.abs().to_bits())
}

/// How strict the policy was that approximate KV was built under.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Grade {
    bounds: [u64; BOUNDS.len()],
    sets: [u64; SETS.len()],
}

impl Grade {
    /// The grade of a policy that bounds nothing, and of KV whose policy is not known.
    pub(crate) const LAXEST: Self = Self {
        bounds: [0; BOUNDS.len()],
        sets: [0; SETS.len()],
    };
    /// The grade of exact KV.
    pub(crate) const STRICTEST: Self = Self {
        bounds: [u64::MAX; BOUNDS.len()],
        sets: [u64::MAX; SETS.len()],
    };
    pub(crate) const NUMBERS: usize = BOUNDS.len() + SETS.len();
    pub(crate) const FIRST_NUMBERS: usize = FIRST_BOUNDS + SETS.len();

    /// The grade of a policy that forbids these kinds.
    pub(crate) fn of(policy: &ReusePolicy, forbidden: u64) -> Self {
        if !policy.approximate {
            return Self::STRICTEST;
        }
        Self {
            bounds: bounds(policy),
            sets: [forbidden],
        }
    }

    pub(crate) fn is_at_least_as_strict_as(&self, other: &Self) -> bool {
        let (mut bounds, mut sets) = (
            self.bounds.iter().zip(&other.bounds),
            self.sets.iter().zip(&other.sets),
        );
        bounds.all(|(own, other)| own >= other) && sets.all(|(own, other)| own & other == *other)
    }

    /// The strictest grade that both are at least as strict as.
    pub(crate) fn meet(&self, other: &Self) -> Self {
        Self {
            bounds: std::array::from_fn(|at| self.bounds[at].min(other.bounds[at])),
            sets: std::array::from_fn(|at| self.sets[at] & other.sets[at]),
        }
    }

    /// The names of the fields in which this grade is laxer than another.
    pub(crate) fn laxer_in(&self, other: &Self) -> Vec<&'static str> {
        let bounds = (0..BOUNDS.len())
            .filter(|&at| self.bounds[at] < other.bounds[at])
            .map(|at| BOUNDS[at]);
        let sets = (0..SETS.len())
            .filter(|&at| self.sets[at] & other.sets[at] != other.sets[at])
            .map(|at| SETS[at]);
        let mut names: Vec<_> = bounds.chain(sets).collect();
        names.dedup();
        names
    }

    /// Whether a bound is not 0 that grades did not have from the start.
    pub(crate) fn has_later_bounds(&self) -> bool {
        self.bounds[FIRST_BOUNDS..].iter().any(|&bound| bound != 0)
    }

    /// All numbers; the [`Self::FIRST_NUMBERS`] first ones are all if there are no later bounds.
    pub(crate) fn to_numbers(self) -> impl Iterator<Item = u64> {
        let [first, later] = [0..FIRST_BOUNDS, FIRST_BOUNDS..BOUNDS.len()]
            .map(|part| part.map(move |at| self.bounds[at]));
        first.chain(self.sets).chain(later)
    }

    pub(crate) fn from_numbers(numbers: &[u64; Self::NUMBERS]) -> Self {
        let later = |at| if at < FIRST_BOUNDS { 0 } else { SETS.len() };
        Self {
            bounds: std::array::from_fn(|at| numbers[at + later(at)]),
            sets: std::array::from_fn(|at| numbers[FIRST_BOUNDS + at]),
        }
    }
}

impl ReusePolicy {
    /// Whether this policy is at least as strict as another about approximate KV: whether every plan may use what was
    /// built under this policy if `other` allows it (rule P19). Two policies may each be stricter in one field; then
    /// neither is. A policy without `approximate` is at least as strict as any. `partial_blocks` is about exact KV and
    /// is not compared. A `min_run` of `None` bounds nothing.
    ///
    /// # Examples
    /// ```
    /// # use kvtrie_core::ReusePolicy;
    /// let rotated = ReusePolicy { approximate: true, ..ReusePolicy::EXACT_ONLY };
    /// let first32 = ReusePolicy { recompute_first: 32, ..rotated.clone() };
    /// assert!(first32.is_at_least_as_strict_as(&rotated) && !rotated.is_at_least_as_strict_as(&first32));
    /// ```
    #[must_use]
    pub fn is_at_least_as_strict_as(&self, other: &Self) -> bool {
        // Names of kinds are compared here; an index compares the kinds that it knows.
        let forbids = |kind| self.forbid_kinds.contains(kind);
        !self.approximate
            || Grade::of(self, 0).is_at_least_as_strict_as(&Grade::of(other, 0))
                && other.forbid_kinds.iter().all(forbids)
    }
}

/// The grades of a tree's approximate blocks, by number. Number 0 is [`Grade::LAXEST`]; up to 127 others have a number
/// while a block has them.
#[derive(Debug, Default)]
pub(crate) struct Grades {
    others: Vec<Counted>,
    num_laxest: u64,
}

#[derive(Clone, Copy, Debug)]
struct Counted {
    grade: Grade,
    blocks: u64,
}

impl Grades {
    const LAXEST: u8 = 0;

    /// The grade of a number that some block has.
    pub(crate) fn get(&self, number: u8) -> Grade {
        let at = usize::from(number).checked_sub(1);
        let known = at.and_then(|at| self.others.get(at));
        known.map_or(Grade::LAXEST, |known| known.grade)
    }

    /// The number for a block that is about to be counted. If all numbers have blocks, it is that of the laxest grade,
    /// which is never wrong. O(grades).
    pub(crate) fn number(&mut self, grade: Grade) -> u8 {
        if grade == Grade::LAXEST {
            return Self::LAXEST;
        }
        let same = |known: &Counted| known.blocks > 0 && known.grade == grade;
        let is_free = |known: &Counted| known.blocks == 0;
        let known = self.others.iter().position(same);
        let at = known.or_else(|| self.others.iter().position(is_free));
        let at = at.unwrap_or(self.others.len());
        if at == usize::from(Label::MAX_GRADE) {
            return Self::LAXEST;
        }
        let new = Counted { grade, blocks: 0 };
        match self.others.get_mut(at) {
            Some(free) if free.blocks == 0 => *free = new,
            Some(_) => {}
            None => self.others.push(new),
        }
        u8::try_from(at + 1).unwrap_or(Self::LAXEST)
    }

    pub(crate) fn add(&mut self, label: Label) {
        if let Some(count) = self.count_mut(label) {
            *count += 1;
        }
    }

    pub(crate) fn remove(&mut self, label: Label) {
        if let Some(count) = self.count_mut(label) {
            *count -= 1;
        }
    }

    fn count_mut(&mut self, label: Label) -> Option<&mut u64> {
        if label.is_exact() {
            return None;
        }
        match usize::from(label.grade()).checked_sub(1) {
            None => Some(&mut self.num_laxest),
            Some(at) => self.others.get_mut(at).map(|known| &mut known.blocks),
        }
    }

    /// The numbers of the grades that are at least as strict as `asked`, as a bit set. O(grades).
    pub(crate) fn usable(&self, asked: &Grade) -> u128 {
        let others = self.others.iter().enumerate();
        let strict = others.filter(|(_, known)| known.grade.is_at_least_as_strict_as(asked));
        let laxest = Grade::LAXEST.is_at_least_as_strict_as(asked);
        strict.fold(u128::from(laxest), |set, (at, _)| set | 1 << (at + 1))
    }

    /// The meet of the grades of a bit set; [`Grade::STRICTEST`] if it is empty.
    pub(crate) fn meet(&self, numbers: u128) -> Grade {
        let all = 0..=Label::MAX_GRADE;
        let named = all.filter(|number| numbers >> number & 1 == 1);
        named.fold(Grade::STRICTEST, |met, number| met.meet(&self.get(number)))
    }

    /// The grades with their numbers and counts of blocks, ascending. Those without a block are not listed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u8, Grade, u64)> + Clone {
        let others = (1..).zip(&self.others);
        let others = others.map(|(number, known)| (number, known.grade, known.blocks));
        let all = std::iter::once((Self::LAXEST, Grade::LAXEST, self.num_laxest)).chain(others);
        all.filter(|&(_, _, blocks)| blocks > 0)
    }

    /// Restores a grade whose blocks are counted afterwards. Returns whether the number can be and the grade is new.
    pub(crate) fn restore(&mut self, number: u8, grade: Grade) -> bool {
        let is_new = grade != Grade::LAXEST && self.others.iter().all(|known| known.grade != grade);
        let at = usize::from(number);
        if !is_new || number > Label::MAX_GRADE || at <= self.others.len() {
            return false;
        }
        // Numbers that are free have the laxest grade and no block.
        let grade_of_free = Grade::LAXEST;
        self.others.resize(
            at - 1,
            Counted {
                grade: grade_of_free,
                blocks: 0,
            },
        );
        self.others.push(Counted { grade, blocks: 0 });
        true
    }

    /// Whether each grade that was restored has a block.
    pub(crate) fn are_all_used(&self) -> bool {
        let used = |known: &Counted| known.blocks > 0 || known.grade == Grade::LAXEST;
        self.others.iter().all(used)
    }

    /// Whether a label that was read names a grade.
    pub(crate) fn knows(&self, label: Label) -> bool {
        let at = usize::from(label.grade());
        at == 0
            || self
                .others
                .get(at - 1)
                .is_some_and(|known| known.grade != Grade::LAXEST)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.others.capacity() * size_of::<Counted>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn grade(first: usize) -> Grade {
        let policy = ReusePolicy {
            recompute_first: first,
            ..ReusePolicy::LAXEST
        };
        Grade::of(&policy, 0)
    }

    fn any_grade() -> impl Strategy<Value = Grade> {
        let numbers = prop::collection::vec(0u64..4, Grade::NUMBERS);
        numbers.prop_map(|numbers| Grade::from_numbers(&numbers.try_into().unwrap()))
    }

    proptest! {
        #[test]
        fn grades_are_a_lattice(a in any_grade(), b in any_grade(), c in any_grade()) {
            let (reaches, met) = (Grade::is_at_least_as_strict_as, a.meet(&b));
            prop_assert!(reaches(&a, &a) && reaches(&a, &met) && reaches(&b, &met));
            prop_assert_eq!(reaches(&a, &b), met == b);
            prop_assert_eq!(reaches(&a, &b) && reaches(&b, &a), a == b);
            prop_assert!(!(reaches(&a, &b) && reaches(&b, &c)) || reaches(&a, &c));
            prop_assert_eq!(reaches(&a, &c) && reaches(&b, &c), reaches(&met, &c));
            prop_assert!(reaches(&a, &Grade::LAXEST) && reaches(&Grade::STRICTEST, &a));
            prop_assert_eq!(a.laxer_in(&b).is_empty(), reaches(&a, &b));
        }

        #[test]
        fn numbers_are_counted_and_used_again(steps in prop::collection::vec((0usize..150, any::<bool>()), 0..400)) {
            let mut grades = Grades::default();
            let mut held: Vec<(Grade, Label)> = Vec::new();
            for (first, adds) in steps {
                if adds {
                    let number = grades.number(grade(first));
                    let label = Label::approximate(0, number);
                    grades.add(label);
                    held.push((grade(first), label));
                } else if !held.is_empty() {
                    grades.remove(held.swap_remove(first % held.len()).1);
                }
                for (grade, label) in &held {
                    let known = grades.get(label.grade());
                    prop_assert!(known == *grade || known == Grade::LAXEST);
                }
                let count: u64 = grades.iter().map(|(_, _, blocks)| blocks).sum();
                prop_assert_eq!(count, held.len() as u64);
            }
        }
    }

    #[test]
    fn a_policy_that_bounds_nothing_has_the_laxest_grade() {
        assert_eq!(Grade::of(&ReusePolicy::LAXEST, 0), Grade::LAXEST);
        assert_eq!(Grade::of(&ReusePolicy::EXACT_ONLY, 0), Grade::STRICTEST);
    }

    #[test]
    fn the_128th_grade_has_no_number_until_another_has_no_block() {
        let mut grades = Grades::default();
        for first in 1..=127 {
            let number = grades.number(grade(first));
            assert_eq!(usize::from(number), first);
            grades.add(Label::approximate(1, number));
        }
        assert_eq!(
            (grades.number(grade(128)), grades.number(grade(127))),
            (0, 127)
        );
        grades.remove(Label::approximate(1, 5));
        assert_eq!(grades.number(grade(128)), 5);
        assert_eq!(grades.usable(&grade(127)), 1 << 127 | 1 << 5);
    }
}
