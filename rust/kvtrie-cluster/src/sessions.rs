//! Which conversation stored the blocks of an edge, as far as the events of one lane say so.
//!
//! Each block that a lane stores gets the session of its event, or none. So what is said of a block that the lane no
//! longer holds does not matter, and a removal changes nothing here. Sessions are a hint that a promise needs: where they
//! alternate too often to be kept, later blocks have none.

use smallvec::SmallVec;

use crate::lanes::Lane;
use crate::runs::Run;
use crate::tree::{EdgeIndex, make_room};

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
struct SessionRuns(SmallVec<[SessionRun; 1]>);

impl SessionRuns {
    /// The most runs, so that nobody pays for events that name another session for each block.
    const MOST: usize = 32;

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Says which session stored blocks last.
    fn set(&mut self, start: u32, end: u32, session: Option<Session>) {
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
    fn of(&self, session: Session) -> impl Iterator<Item = Run> {
        let runs = self.0.iter().filter(move |run| run.session == session);
        runs.map(|run| (run.start, run.end))
    }

    /// The parts before and from `at` on; the latter count from `at`.
    fn split(&self, at: u32) -> (Self, Self) {
        let (mut before, mut after) = (Self::default(), Self::default());
        for run in &self.0 {
            before.push(run.start, run.end.min(at), run.session);
            let start = run.start.max(at) - at;
            after.push(start, run.end.saturating_sub(at), run.session);
        }
        (before, after)
    }

    fn heap_bytes(&self) -> usize {
        if self.0.spilled() {
            self.0.capacity() * size_of::<SessionRun>()
        } else {
            0
        }
    }

    fn check(&self) -> Result<(), String> {
        let ascends = self.0.windows(2).all(|two| two[0].end <= two[1].start);
        let has_blocks = self.0.iter().all(|run| run.start < run.end);
        if ascends && has_blocks && self.0.len() <= Self::MOST {
            Ok(())
        } else {
            Err(format!("sessions {:?}", self.0))
        }
    }
}

#[derive(Debug)]
struct Part {
    lane: Lane,
    runs: SessionRuns,
}

/// The sessions of all edges, by edge and lane. They are next to the edges and not in them, because a search reads two
/// lines of a cache for each edge of its path, and needs no session there.
#[derive(Debug, Default)]
pub(crate) struct EdgeSessions(Vec<Vec<Part>>);

impl EdgeSessions {
    fn parts(&self, edge: EdgeIndex) -> &[Part] {
        self.0.get(edge as usize).map_or(&[], Vec::as_slice)
    }

    fn parts_mut(&mut self, edge: EdgeIndex) -> &mut Vec<Part> {
        let at = edge as usize;
        let len = self.0.len();
        if len <= at {
            make_room(&mut self.0, at + 1 - len);
            self.0.resize_with(at + 1, Vec::new);
        }
        &mut self.0[at]
    }

    fn find(parts: &[Part], lane: Lane) -> Result<usize, usize> {
        parts.binary_search_by_key(&lane, |part| part.lane)
    }

    /// Says in which session a lane stored blocks of an edge last, if that is known.
    pub(crate) fn set(
        &mut self,
        edge: EdgeIndex,
        lane: Lane,
        (start, end): Run,
        session: Option<Session>,
    ) {
        if session.is_none() && self.parts(edge).is_empty() {
            return;
        }
        let parts = self.parts_mut(edge);
        let at = match Self::find(parts, lane) {
            Ok(at) => at,
            Err(_) if session.is_none() => return,
            Err(at) => {
                let runs = SessionRuns::default();
                if parts.capacity() == 0 {
                    // Mostly an edge is one worker's.
                    parts.reserve_exact(1);
                }
                parts.insert(at, Part { lane, runs });
                at
            }
        };
        parts[at].runs.set(start, end, session);
        if parts[at].runs.is_empty() {
            parts.remove(at);
        }
    }

    /// The blocks of an edge that a lane stored in a session, ascending.
    pub(crate) fn of(
        &self,
        edge: EdgeIndex,
        lane: Lane,
        session: Session,
    ) -> impl Iterator<Item = Run> {
        let parts = self.parts(edge);
        let found = Self::find(parts, lane).ok().into_iter();
        found.flat_map(move |at| parts[at].runs.of(session))
    }

    /// Gives the sessions of an edge to another one, which has none.
    pub(crate) fn rename(&mut self, edge: EdgeIndex, new: EdgeIndex) {
        if !self.parts(edge).is_empty() {
            *self.parts_mut(new) = std::mem::take(self.parts_mut(edge));
        }
    }

    /// Gives those of the blocks of an edge from `at` on to another one, which has none.
    pub(crate) fn cut(&mut self, edge: EdgeIndex, at: u32, lower: EdgeIndex) {
        if self.parts(edge).is_empty() {
            return;
        }
        let mut below = Vec::with_capacity(self.parts(edge).len());
        for part in self.parts_mut(edge) {
            let (before, runs) = part.runs.split(at);
            part.runs = before;
            let lane = part.lane;
            below.push(Part { lane, runs });
        }
        *self.parts_mut(lower) = below;
    }

    pub(crate) fn remove(&mut self, edge: EdgeIndex, lane: Lane) {
        self.retain(edge, |other| other != lane);
    }

    /// Forgets what other lanes said of an edge, and those that say nothing.
    pub(crate) fn retain(&mut self, edge: EdgeIndex, keeps: impl Fn(Lane) -> bool) {
        if self.parts(edge).is_empty() {
            return;
        }
        let parts = self.parts_mut(edge);
        parts.retain(|part| !part.runs.is_empty() && keeps(part.lane));
        if parts.is_empty() {
            *parts = Vec::new();
        }
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let edges = self.0.iter().map(|parts| {
            let runs: usize = parts.iter().map(|part| part.runs.heap_bytes()).sum();
            parts.capacity() * size_of::<Part>() + runs
        });
        edges.sum::<usize>() + self.0.capacity() * size_of::<Vec<Part>>()
    }

    /// Checks what is known of an edge, and that each lane `holds` some of it.
    pub(crate) fn check(
        &self,
        edge: EdgeIndex,
        holds: impl Fn(Lane) -> bool,
    ) -> Result<(), String> {
        let parts = self.parts(edge);
        let ascend = parts.windows(2).all(|two| two[0].lane < two[1].lane);
        let mut all = parts.iter();
        if !ascend || !all.all(|part| holds(part.lane) && !part.runs.is_empty()) {
            return Err(format!("edge {edge}: sessions of others: {parts:?}"));
        }
        parts.iter().try_for_each(|part| part.runs.check())
    }

    /// Checks that edges that are not there have none.
    pub(crate) fn check_none(&self, is_there: impl Fn(usize) -> bool) -> Result<(), String> {
        match self
            .0
            .iter()
            .enumerate()
            .find(|(at, parts)| !parts.is_empty() && !is_there(*at))
        {
            Some((at, _)) => Err(format!("edge {at} is gone, and has sessions")),
            None => Ok(()),
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
