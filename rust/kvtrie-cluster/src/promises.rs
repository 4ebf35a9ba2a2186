//! What of the moved runs that a search finds is promised: that a worker's own plan reuses as much.
//!
//! A worker whose policy is known plans by rules that an index can follow in part. It is promised only what follows from
//! what is known: that the run is exact KV in the worker's device, that each of its blocks is in the policy's scope (rule
//! P18), by the session of its event or because its path begins as the prompt does, and that no limit of the policy can
//! refuse it. Everything else is possible.
//!
//! A plan takes runs from left to right, and computes what is left of one if that is shorter than `min_run` (rule P5). So
//! it reuses every token of a run that has at least `min_run` tokens from there on, whatever else it finds. The last
//! `min_run` - 1 tokens of a run are not promised, as another run, which may be too short to be seen here, can leave them.

use kvtrie_core::{Error, ErrorKind, Result, ReusePolicy, Scope};
use smallvec::SmallVec;

use crate::keys::Digest;
use crate::lanes::Lane;
use crate::runs::{Run, Runs};
use crate::scores::Piece;
use crate::sessions::Session;
use crate::tree::{Edge, EdgeIndex, Tree};

/// The most edges that one search visits to see where paths begin. A plan has the same limit.
pub(crate) const MOST_VISITED: usize = 16_384;

/// How a worker plans, as far as its moved runs can be promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promise {
    min_run: usize,
    /// Blocks that make two paths one conversation; none if the whole namespace is in scope.
    shared_prefix: Option<usize>,
}

impl Promise {
    /// None if no moved run is promised under this policy.
    pub(crate) fn of(policy: &ReusePolicy, call: &'static str) -> Result<Option<Self>> {
        // Who has these limits refuses or computes parts that depend on more than an index knows.
        let is_bounded = policy.max_hops == 0
            || policy.max_approximate_share < 1.0
            || policy.recompute_first > 0
            || policy.recompute_last > 0
            || policy.recompute_share > 0.0
            || !policy.forbid_kinds.is_empty()
            || policy.max_cuts.is_some()
            || policy.max_lost_context < 1.0
            || policy.max_new_context < 1.0;
        if !policy.approximate || is_bounded {
            return Ok(None);
        }
        let Some(min_run) = policy.min_run else {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                call,
                "the policy has no min_run, so that of the worker's own index counts, which is not known here; name it",
            ));
        };
        Ok(Some(Self {
            min_run,
            shared_prefix: (policy.scope == Scope::Conversation).then_some(policy.shared_prefix),
        }))
    }
}

/// What a search may promise.
#[derive(Debug)]
pub(crate) struct Promises<'a> {
    pub(crate) tree: &'a Tree,
    /// By lane; those of no worker, and of approximate blocks, have none.
    pub(crate) of: &'a [Option<Promise>],
    pub(crate) session: Option<Session>,
    /// All whole blocks of the prompt.
    pub(crate) digests: &'a [Digest],
    /// One past the last token that a moved run may supply.
    pub(crate) end: usize,
    pub(crate) visits_left: usize,
}

/// For numbers of blocks, whether the path of a chain begins with so many of the prompt's.
pub(crate) type Beginnings = SmallVec<[(usize, bool); 1]>;

impl Promises<'_> {
    /// Of blocks of an edge that a lane holds, those in its device and in scope. `known` is kept along a path.
    pub(crate) fn in_scope(
        &mut self,
        lane: Lane,
        edge: (EdgeIndex, &Edge),
        run: Run,
        known: &mut Beginnings,
    ) -> Runs {
        let Some(promise) = self.of.get(lane as usize).copied().flatten() else {
            return Runs::default();
        };
        let (start, end) = run;
        // From there on all are.
        let all = match promise.shared_prefix {
            None => start,
            Some(blocks) => self.begins(edge, end, blocks, known).clamp(start, end),
        };
        let mut runs = self.tree.in_device(edge.0, lane, (all, end), None);
        if let Some(session) = self.session {
            let own = self
                .tree
                .in_device(edge.0, lane, (start, all), Some(session));
            for &(start, end) in own.as_slice() {
                runs.add(start, end);
            }
        }
        runs
    }

    /// From which block of an edge on, before `end`, paths begin with so many blocks of the prompt, or `end`.
    fn begins(
        &mut self,
        (index, edge): (EdgeIndex, &Edge),
        end: u32,
        blocks: usize,
        known: &mut Beginnings,
    ) -> u32 {
        let last = blocks.saturating_sub(1);
        let (Some(&digest), Ok(depth)) = (self.digests.get(last), u32::try_from(last)) else {
            return end;
        };
        let first = depth.saturating_sub(edge.depth());
        if first >= end {
            return end;
        }
        let begins = if let Some(known) = known.iter().find(|known| known.0 == blocks) {
            known.1
        } else {
            let (slot, visited) = self.tree.on_path(index, depth, self.visits_left);
            self.visits_left -= visited;
            let begins = slot.is_some_and(|slot| self.tree.digest(slot) == digest);
            known.push((blocks, begins));
            begins
        };
        if begins { first } else { end }
    }

    /// What is promised of a run in scope.
    pub(crate) fn promised(&self, piece: Piece) -> Option<Piece> {
        let promise = self.of.get(piece.lane as usize).copied().flatten()?;
        let end = piece.end.min(self.end);
        let is_run = end.saturating_sub(piece.start) >= promise.min_run.max(1);
        is_run.then(|| Piece {
            end: end + 1 - promise.min_run.max(1),
            ..piece
        })
    }
}
