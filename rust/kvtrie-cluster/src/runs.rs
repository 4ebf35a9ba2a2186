//! Which blocks of an edge one lane holds, if not all: ascending runs with holes between them.

use smallvec::SmallVec;

/// Half-open, in blocks from the start of the edge.
pub(crate) type Run = (u32, u32);

/// Ascending runs that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Runs(SmallVec<[Run; 1]>);

impl Runs {
    pub(crate) fn of(start: u32, end: u32) -> Self {
        let mut runs = Self::default();
        runs.add(start, end);
        runs
    }

    pub(crate) fn as_slice(&self) -> &[Run] {
        &self.0
    }

    /// The runs that have blocks of `start..end`.
    pub(crate) fn within(&self, start: u32, end: u32) -> &[Run] {
        let first = self.first_after(start);
        let last = self.0.partition_point(|run| run.0 < end);
        &self.0[first..last.max(first)]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn is_all(&self, len: u32) -> bool {
        *self.0.as_slice() == [(0, len)]
    }

    /// One past the last block.
    pub(crate) fn end(&self) -> u32 {
        self.0.last().map_or(0, |run| run.1)
    }

    /// Number of blocks from the start of the edge to the first hole.
    pub(crate) fn at_front(&self) -> u32 {
        match self.0.first() {
            Some(&(0, end)) => end,
            _ => 0,
        }
    }

    /// The first run that ends after `at`, by number.
    fn first_after(&self, at: u32) -> usize {
        self.0.partition_point(|run| run.1 <= at)
    }

    pub(crate) fn has(&self, at: u32) -> bool {
        self.0
            .get(self.first_after(at))
            .is_some_and(|run| run.0 <= at)
    }

    pub(crate) fn add(&mut self, start: u32, end: u32) {
        if start >= end {
            return;
        }
        // Runs that touch the new one are part of it.
        let first = self.0.partition_point(|run| run.1 < start);
        let last = self.0.partition_point(|run| run.0 <= end);
        if first == last {
            self.0.insert(first, (start, end));
            return;
        }
        let merged = (start.min(self.0[first].0), end.max(self.0[last - 1].1));
        self.0[first] = merged;
        self.0.drain(first + 1..last);
    }

    pub(crate) fn remove(&mut self, start: u32, end: u32) {
        if start >= end {
            return;
        }
        let first = self.first_after(start);
        let last = self.0.partition_point(|run| run.0 < end);
        if first >= last {
            return;
        }
        let before = (self.0[first].0, start);
        let after = (end, self.0[last - 1].1);
        self.0.drain(first..last);
        if after.0 < after.1 {
            self.0.insert(first, after);
        }
        if before.0 < before.1 {
            self.0.insert(first, before);
        }
    }

    /// The parts before and from `at` on; the latter count from `at`.
    pub(crate) fn split(&self, at: u32) -> (Self, Self) {
        let (mut before, mut after) = (Self::default(), Self::default());
        for &(start, end) in &self.0 {
            before.add(start, end.min(at));
            after.add(start.max(at).saturating_sub(at), end.saturating_sub(at));
        }
        (before, after)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        if self.0.spilled() {
            self.0.capacity() * size_of::<Run>()
        } else {
            0
        }
    }

    pub(crate) fn check(&self, len: u32) -> Result<(), String> {
        let ascends = self.0.windows(2).all(|two| two[0].1 < two[1].0);
        let inside = self.0.iter().all(|run| run.0 < run.1 && run.1 <= len);
        if ascends && inside {
            Ok(())
        } else {
            Err(format!("runs {:?} of {len} blocks", self.0))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_are_a_set_of_blocks(
            steps in proptest::collection::vec((any::<bool>(), 0_u32..12, 0_u32..13), 1..40),
            cut in 0_u32..13,
        ) {
            let (mut runs, mut set) = (Runs::default(), [false; 12]);
            for (adds, start, end) in steps {
                if adds {
                    runs.add(start, end);
                } else {
                    runs.remove(start, end);
                }
                for at in start..end.max(start) {
                    set[at as usize] = adds;
                }
                runs.check(12).unwrap();
                for at in 0..12 {
                    prop_assert_eq!(runs.has(at), set[at as usize]);
                }
                let front = set.iter().take_while(|&&held| held).count();
                prop_assert_eq!(runs.at_front() as usize, front);
                prop_assert_eq!(runs.is_all(12), front == 12);
                let within = runs.within(start, end).iter();
                let found: usize = within
                    .map(|run| (run.0.max(start)..run.1.min(end)).len())
                    .sum();
                let wanted = (start..end).filter(|&at| set[at as usize]).count();
                prop_assert_eq!(found, wanted);
                let end = set.iter().rposition(|&held| held).map_or(0, |last| last + 1);
                prop_assert_eq!(runs.end() as usize, end);
            }
            let (before, after) = runs.split(cut);
            for at in 0..12 {
                prop_assert_eq!(before.has(at), at < cut && set[at as usize]);
                prop_assert_eq!(after.has(at), at + cut < 12 && set[(at + cut) as usize]);
            }
        }
    }
}
