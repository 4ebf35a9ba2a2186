//! Which conversation stored the blocks of an edge, as far as the events of one lane say so.
//!
//! Each block that a lane stores gets the session of its event, or none. So what is said of a block that the lane no
//! longer holds does not matter, and a removal changes nothing here. Sessions are a hint that a promise needs: where they
//! alternate too often to be kept, later blocks have none.

use smallvec::SmallVec;

use crate::runs::Run;

/// The keyed digest of a conversation's id, in halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session(pub(crate) [u32; 2]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SessionRun {
    start: u32,
    end: u32,
    session: Session,
}

/// Ascending runs that do not overlap. Blocks between them have no session.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionRuns(SmallVec<[SessionRun; 1]>);

impl SessionRuns {
    /// The most runs, so that nobody pays for events that name another session for each block.
    const MOST: usize = 32;

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Says which session stored blocks last.
    pub(crate) fn set(&mut self, start: u32, end: u32, session: Option<Session>) {
        if start >= end {
            return;
        }
        // Mostly an edge grows.
        if let (Some(session), Some(last)) = (session, self.0.last_mut())
            && (last.end, last.session) == (start, session)
        {
            last.end = end;
            return;
        }
        let new = session.map(|session| SessionRun {
            start,
            end,
            session,
        });
        let mut runs = Self::default();
        let mut left = new;
        for &run in &self.0 {
            runs.push(run.start, run.end.min(start), run.session);
            if run.end > start
                && let Some(new) = left.take()
            {
                runs.push(new.start, new.end, new.session);
            }
            runs.push(run.start.max(end), run.end, run.session);
        }
        if let Some(new) = left {
            runs.push(new.start, new.end, new.session);
        }
        runs.0.truncate(Self::MOST);
        *self = runs;
    }

    fn push(&mut self, start: u32, end: u32, session: Session) {
        if start >= end {
            return;
        }
        match self.0.last_mut() {
            Some(last) if (last.end, last.session) == (start, session) => last.end = end,
            _ => self.0.push(SessionRun {
                start,
                end,
                session,
            }),
        }
    }

    /// The blocks that a session stored, ascending.
    pub(crate) fn of(&self, session: Session) -> impl Iterator<Item = Run> {
        let runs = self.0.iter().filter(move |run| run.session == session);
        runs.map(|run| (run.start, run.end))
    }

    /// The parts before and from `at` on; the latter count from `at`.
    pub(crate) fn split(&self, at: u32) -> (Self, Self) {
        let (mut before, mut after) = (Self::default(), Self::default());
        for run in &self.0 {
            before.push(run.start, run.end.min(at), run.session);
            let start = run.start.max(at) - at;
            after.push(start, run.end.saturating_sub(at), run.session);
        }
        (before, after)
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        if self.0.spilled() {
            self.0.capacity() * size_of::<SessionRun>()
        } else {
            0
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let ascends = self.0.windows(2).all(|two| two[0].end <= two[1].start);
        let has_blocks = self.0.iter().all(|run| run.start < run.end);
        if ascends && has_blocks && self.0.len() <= Self::MOST {
            Ok(())
        } else {
            Err(format!("sessions {:?}", self.0))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn named(runs: &SessionRuns, number: u32) -> [bool; 12] {
        let mut set = [false; 12];
        for (start, end) in runs.of(Session([number, 0])) {
            set[start as usize..end as usize].fill(true);
        }
        set
    }

    proptest! {
        #[test]
        fn sessions_are_those_that_were_said_last(
            steps in proptest::collection::vec((0_u32..4, 0_u32..12, 0_u32..13), 1..40),
            cut in 0_usize..13,
        ) {
            let (mut runs, mut last) = (SessionRuns::default(), [0; 12]);
            for (number, start, end) in steps {
                runs.set(start, end, (number > 0).then_some(Session([number, 0])));
                for at in start..end.max(start) {
                    last[at as usize] = number;
                }
                runs.check().unwrap();
                for number in 1..4 {
                    prop_assert_eq!(named(&runs, number), last.map(|of| of == number));
                }
            }
            let (before, after) = runs.split(u32::try_from(cut).unwrap());
            for number in 1..4 {
                let all = named(&runs, number);
                let (before, after) = (named(&before, number), named(&after, number));
                for at in 0..12 {
                    prop_assert_eq!(before[at], at < cut && all[at]);
                    prop_assert_eq!(after[at], all.get(at + cut) == Some(&true));
                }
            }
        }
    }

    #[test]
    fn sessions_that_alternate_are_bounded() {
        let mut runs = SessionRuns::default();
        for at in 0..1_000 {
            runs.set(at, at + 1, Some(Session([at % 2, 0])));
            runs.check().unwrap();
        }
        assert_eq!(runs.0.len(), SessionRuns::MOST);
        runs.set(3, 4, None);
        runs.check().unwrap();
        assert_eq!(runs.of(Session([1, 0])).next(), Some((1, 2)));
        assert!(runs.of(Session([1, 0])).all(|run| run != (3, 4)));
    }
}
