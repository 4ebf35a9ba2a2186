//! Sessions: which conversations a cached block belongs to (rule P18).
//!
//! An id is stored as a digest of 16 bytes, so that a block costs the same whatever its clients call themselves, and
//! snapshots contain no ids. A block belongs to [`MOST`] sessions at most. An edge stores runs of blocks with equal
//! sessions, 32 bytes each, and 128 more where there are several sessions.

use smallvec::SmallVec;

use crate::error::{Result, invalid};
use crate::ids::Depth;

/// The most sessions that one block belongs to.
pub(crate) const MOST: usize = 8;

/// The longest id of a session, in bytes.
const MAX_BYTES: usize = 256;

/// The id of a conversation, within one namespace. It is kept as a digest of 128 bits.
///
/// # Examples
/// ```
/// use kvtrie_core::SessionId;
/// assert_eq!(SessionId::new("chat-7")?, SessionId::new("chat-7")?);
/// assert!(SessionId::new("").is_err());
/// # Ok::<(), kvtrie_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId([u8; Self::BYTES]);

impl SessionId {
    pub(crate) const BYTES: usize = 16;

    /// The session with this id.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the id does not have 1 to 256 bytes.
    pub fn new(id: &str) -> Result<Self> {
        if !(1..=MAX_BYTES).contains(&id.len()) {
            return Err(invalid!(
                "SessionId::new",
                "session has {} bytes; it must have 1 to {MAX_BYTES}",
                id.len()
            ));
        }
        let mut digest = [0; Self::BYTES];
        let hash = blake2b_simd::Params::new()
            .hash_length(Self::BYTES)
            .hash(id.as_bytes());
        digest.copy_from_slice(hash.as_bytes());
        Ok(Self(digest))
    }

    pub(crate) fn from_digest(digest: [u8; Self::BYTES]) -> Self {
        Self(digest)
    }

    pub(crate) fn digest(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

/// The sessions of a block, the one that came first at the front.
pub(crate) type Members = SmallVec<[SessionId; 1]>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SessionRun {
    pub(crate) from: Depth,
    pub(crate) to: Depth,
    pub(crate) members: Members,
}

/// The sessions of an edge's blocks: ascending, disjoint runs. Blocks between them belong to none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sessions(Vec<SessionRun>);

impl Sessions {
    pub(crate) fn runs(&self) -> &[SessionRun] {
        &self.0
    }

    /// Returns `None` if the runs are not ascending, joined, and of 1 to [`MOST`] different sessions each.
    pub(crate) fn from_runs(runs: Vec<SessionRun>) -> Option<Self> {
        let each = runs.iter().all(|run| {
            let mut distinct: Vec<&SessionId> = run.members.iter().collect();
            distinct.sort_unstable();
            distinct.dedup();
            let count = run.members.len();
            run.from < run.to && (1..=MOST).contains(&count) && distinct.len() == count
        });
        let all = runs.windows(2).all(|pair| {
            let (a, b) = (&pair[0], &pair[1]);
            a.to < b.from || a.to == b.from && a.members != b.members
        });
        (each && all).then_some(Self(runs))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sessions of a block.
    pub(crate) fn of(&self, depth: Depth) -> &[SessionId] {
        let at = self.0.partition_point(|run| run.to <= depth);
        let run = self.0.get(at).filter(|run| run.from <= depth);
        run.map_or(&[], |run| &run.members)
    }

    /// The first depth in `from..to` whose block does not belong to the session, or `to`.
    pub(crate) fn member_until(&self, session: SessionId, from: Depth, to: Depth) -> Depth {
        let first = self.0.partition_point(|run| run.to <= from);
        let mut at = from;
        for run in &self.0[first..] {
            if at >= to || run.from > at || !run.members.contains(&session) {
                break;
            }
            at = run.to;
        }
        at.min(to)
    }

    /// The lowest depth in `from..=to` such that all blocks from it to `to` belong to the session.
    pub(crate) fn member_from(&self, session: SessionId, from: Depth, to: Depth) -> Depth {
        let end = self.0.partition_point(|run| run.from < to);
        let mut at = to;
        for run in self.0[..end].iter().rev() {
            if at <= from || run.to < at || !run.members.contains(&session) {
                break;
            }
            at = run.from;
        }
        at.max(from)
    }

    /// Adds a session to the blocks `first..to`, and to those of `from..first` up to the last that has it already.
    /// Returns whether there is one.
    pub(crate) fn add(&mut self, session: SessionId, from: Depth, first: Depth, to: Depth) -> bool {
        let before = self.0.partition_point(|run| run.from < first);
        let known = self.0[..before]
            .iter()
            .rev()
            .take_while(|run| run.to > from && from < first)
            .find(|run| run.members.contains(&session));
        let lowest = known.map_or(from, |run| run.to.min(first).max(from));
        let is_known = known.is_some();
        if self.member_until(session, lowest, to) < to {
            self.rewrite(lowest, to, |members| {
                let mut members = Members::from_slice(members);
                if !members.contains(&session) {
                    if members.len() == MOST {
                        members.remove(0);
                    }
                    members.push(session);
                }
                members
            });
        }
        is_known
    }

    pub(crate) fn set(&mut self, depth: Depth, members: &[SessionId]) {
        self.rewrite(depth, depth + 1, |_| Members::from_slice(members));
    }

    pub(crate) fn clear(&mut self, from: Depth, to: Depth) {
        if !self.0.is_empty() {
            self.rewrite(from, to, |_| Members::new());
        }
    }

    /// Splits off the runs before a depth.
    pub(crate) fn split_front(&mut self, at: Depth) -> Self {
        let first = self.0.partition_point(|run| run.to <= at);
        let mut front: Vec<SessionRun> = self.0.drain(..first).collect();
        if let Some(run) = self.0.first_mut().filter(|run| run.from < at) {
            let cut = SessionRun {
                to: at,
                ..run.clone()
            };
            front.push(cut);
            run.from = at;
        }
        Self(front)
    }

    fn rewrite(&mut self, from: Depth, to: Depth, change: impl Fn(&[SessionId]) -> Members) {
        if from >= to {
            return;
        }
        // The neighbours on both sides are included, so that touching runs of equal sessions become one.
        let first = self.0.partition_point(|run| run.to < from);
        let last = first + self.0[first..].partition_point(|run| run.from <= to);
        let mut out: Vec<SessionRun> = Vec::with_capacity(last - first + 2);
        let mut push = |from: Depth, to: Depth, members: Members| {
            if from < to && !members.is_empty() {
                match out.last_mut() {
                    Some(run) if run.to == from && run.members == members => run.to = to,
                    _ => out.push(SessionRun { from, to, members }),
                }
            }
        };
        let mut at = from;
        for run in &self.0[first..last] {
            let (start, end) = (run.from.clamp(from, to), run.to.clamp(from, to));
            push(run.from, run.to.min(from), run.members.clone());
            if start < end {
                push(at, start, change(&[]));
                push(start, end, change(&run.members));
                at = end;
            }
            if run.to > to {
                push(at, to, change(&[]));
                at = to;
                push(run.from.max(to), run.to, run.members.clone());
            }
        }
        push(at, to, change(&[]));
        self.0.splice(first..last, out);
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        let spilled = self.0.iter().filter(|run| run.members.spilled());
        let members: usize = spilled.map(|run| run.members.capacity()).sum();
        self.0.capacity() * size_of::<SessionRun>() + members * size_of::<SessionId>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: Depth = 20;

    fn session(number: u8) -> SessionId {
        SessionId::from_digest([number; SessionId::BYTES])
    }

    fn joined(runs: &Sessions, from: Depth) -> bool {
        let from_first = runs.runs().first().is_none_or(|run| run.from >= from);
        from_first && Sessions::from_runs(runs.0.clone()).is_some()
    }

    proptest! {
        #[test]
        fn runs_equal_one_list_per_block(
            steps in prop::collection::vec((0u8..8, 0u8..11, 0..=END, 0..=END, 0..=END), 1..60), cut in 0..=END
        ) {
            let mut runs = Sessions::default();
            let mut lists: Vec<Vec<SessionId>> = vec![Vec::new(); END as usize];
            for (kind, number, a, b, c) in steps {
                let mut at = [a, b, c];
                at.sort_unstable();
                let [from, first, to] = at;
                if kind == 0 {
                    runs.clear(from, to);
                    lists[from as usize..to as usize].fill(Vec::new());
                } else {
                    let session = session(number);
                    let found = runs.add(session, from, first, to);
                    let known = (from..first).rev().find(|&at| lists[at as usize].contains(&session));
                    prop_assert_eq!(found, known.is_some());
                    for at in known.map_or(from, |at| at + 1)..to {
                        let list = &mut lists[at as usize];
                        if !list.contains(&session) {
                            list.push(session);
                            let over = list.len().saturating_sub(MOST);
                            list.drain(..over);
                        }
                    }
                }
                prop_assert!(joined(&runs, 0));
                for at in 0..END {
                    prop_assert_eq!(runs.of(at), &lists[at as usize]);
                }
                let session = session(number);
                let is_in = |at: Depth| lists[at as usize].contains(&session);
                prop_assert_eq!(runs.member_until(session, from, to), (from..to).find(|&at| !is_in(at)).unwrap_or(to));
                prop_assert_eq!(runs.member_from(session, from, to), (from..to).rev().find(|&at| !is_in(at)).map_or(from, |at| at + 1));
            }
            let front = runs.split_front(cut);
            prop_assert!(joined(&front, 0) && joined(&runs, cut));
            for at in 0..END {
                prop_assert_eq!(if at < cut { front.of(at) } else { runs.of(at) }, &lists[at as usize]);
            }
        }
    }

    #[test]
    fn an_id_has_1_to_256_bytes() {
        for length in [1, 256] {
            assert!(SessionId::new(&"s".repeat(length)).is_ok());
        }
        for length in [0, 257] {
            let error = SessionId::new(&"s".repeat(length))
                .err()
                .map(|error| error.to_string());
            let error = error.unwrap_or_default();
            assert!(
                error.contains(&format!(
                    "session has {length} bytes; it must have 1 to 256"
                )),
                "{error}"
            );
        }
    }

    #[test]
    fn a_run_takes_32_bytes_and_its_further_sessions_128() {
        assert_eq!(size_of::<SessionRun>(), 32);
        let mut runs = Sessions::default();
        for number in 0..100 {
            runs.add(session(number), 0, 0, END);
        }
        assert_eq!(runs.runs().len(), 1);
        assert_eq!(runs.of(3).len(), MOST);
        assert!(runs.heap_bytes() <= 4 * 32 + 128);
    }
}
