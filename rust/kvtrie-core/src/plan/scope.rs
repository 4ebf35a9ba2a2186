//! Which cached blocks the moved runs of a plan may come from (rule P18), and whether those of a wider plan come from
//! the same conversation (rule P17).
//!
//! A block is in scope if it belongs to the plan's session, or if it is on a cached path that begins with the prompt's
//! first blocks. The latter holds for an edge as a whole. Whether it does is found by following the edge's path
//! upwards, once per edge and plan, at one look per step.

use std::cell::{Cell, OnceCell, RefCell};

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::effort::Effort;
use crate::ids::{Depth, NodeIndex, depth};
use crate::policy::{ReusePolicy, Scope};
use crate::session::SessionId;
use crate::storage::forest::{Forest, Position};
use crate::storage::node::Node;
use crate::tokens::TokenSequence;

#[derive(Debug)]
pub(crate) struct InScope<'a> {
    forest: &'a Forest,
    seq: &'a TokenSequence,
    session: Option<SessionId>,
    /// Number of blocks that paths must share with the prompt.
    shared: Depth,
    /// The end of these blocks, if they are cached.
    shared_end: OnceCell<Option<Position>>,
    known: RefCell<HashMap<NodeIndex, bool, FixedState>>,
    looks: Cell<u64>,
    /// The most looks. Where none is left, no path is found to begin as the prompt does.
    most_looks: u64,
}

impl<'a> InScope<'a> {
    /// The scope of a plan; `None` if moved runs may come from the whole namespace. Exact plans, which are the most, do
    /// not pay for the room that it takes.
    #[inline(never)]
    pub(crate) fn of_policy(
        forest: &'a Forest,
        seq: &'a TokenSequence,
        session: Option<SessionId>,
        policy: &ReusePolicy,
        seed: u64,
    ) -> Option<Box<Self>> {
        (policy.scope == Scope::Conversation).then(|| {
            let any = u64::MAX;
            Box::new(Self::of_conversation(
                forest, seq, session, policy, seed, any,
            ))
        })
    }

    /// The blocks of the plan's conversation, whatever the policy's scope is.
    pub(super) fn of_conversation(
        forest: &'a Forest,
        seq: &'a TokenSequence,
        session: Option<SessionId>,
        policy: &ReusePolicy,
        seed: u64,
        most_looks: u64,
    ) -> Self {
        Self {
            forest,
            seq,
            session,
            shared: Depth::try_from(policy.shared_prefix).unwrap_or(Depth::MAX),
            shared_end: OnceCell::new(),
            known: RefCell::new(HashMap::with_hasher(FixedState::with_seed(seed))),
            looks: Cell::new(0),
            most_looks,
        }
    }

    /// Whether there is neither a session nor a cached path that begins as the prompt does: no block is in scope then.
    pub(crate) fn is_empty(&self) -> bool {
        self.session.is_none() && self.shared_end().is_none()
    }

    /// Looks since the last call.
    pub(super) fn take_looks(&self) -> u64 {
        self.looks.take()
    }

    /// The first position in `at..limit` of an edge whose block is out of scope, or `limit`.
    pub(super) fn end(&self, node: NodeIndex, at: usize, limit: usize) -> usize {
        let block_size = self.forest.block_size();
        if at >= limit {
            return limit;
        }
        let (from, to) = (depth(at / block_size), depth(limit.div_ceil(block_size)));
        let member_until = self.members(node).map_or(from, |(session, sessions)| {
            sessions.member_until(session, from, to)
        });
        if member_until == to || self.shares_prefix(node) {
            return limit;
        }
        (member_until as usize * block_size).clamp(at, limit)
    }

    /// The first position from `limit` on such that every block of an edge from there to `at` is in scope.
    pub(super) fn start(&self, node: NodeIndex, at: usize, limit: usize) -> usize {
        let block_size = self.forest.block_size();
        if at <= limit {
            return limit;
        }
        let (from, to) = (depth(limit / block_size), depth(at.div_ceil(block_size)));
        let member_from = self.members(node).map_or(to, |(session, sessions)| {
            sessions.member_from(session, from, to)
        });
        if member_from == from || self.shares_prefix(node) {
            return limit;
        }
        (member_from as usize * block_size).clamp(limit, at)
    }

    pub(super) fn has(&self, node: NodeIndex, place: Depth) -> bool {
        let is_member = self
            .session
            .is_some_and(|session| self.forest.node(node).sessions(place).contains(&session));
        is_member || self.shares_prefix(node)
    }

    fn members(&self, node: NodeIndex) -> Option<(SessionId, &'a crate::session::Sessions)> {
        let extras = self.forest.node(node).extras()?;
        Some((self.session?, &extras.sessions))
    }

    /// The end of the prompt's first blocks, if a cached path begins with them.
    fn shared_end(&self) -> Option<Position> {
        *self.shared_end.get_or_init(|| {
            if self.shared as usize > self.seq.len() / self.forest.block_size() {
                return None;
            }
            let root = self.forest.root(self.seq.namespace())?;
            let whole = |_: &Node, _, to| to;
            let tokens = self.seq.view();
            let walked =
                self.forest
                    .walk(tokens, root, self.shared, Effort::ANY, whole, |_, _, _| ());
            (walked.at.depth == self.shared).then_some(walked.at)
        })
    }

    /// Whether an edge is on a path that begins with the prompt's first blocks.
    fn shares_prefix(&self, node: NodeIndex) -> bool {
        let Some(shared_end) = self.shared_end() else {
            return false;
        };
        let mut known = self.known.borrow_mut();
        if known.is_empty() {
            // The edges of the first blocks themselves.
            let edges = self.forest.edges_to(shared_end, 0);
            known.extend(edges.into_iter().map(|(node, ..)| (node, true)));
        }
        let (mut at, mut passed) = (node, Vec::new());
        let left = self.most_looks.saturating_sub(self.looks.get());
        let is_shared = loop {
            if let Some(&is_shared) = known.get(&at) {
                break is_shared;
            }
            passed.push(at);
            let edge = self.forest.node(at);
            // An edge that begins before the end of the shared blocks is one of them, or on another path.
            if edge.is_root() || edge.depth < self.shared || passed.len() as u64 > left {
                break false;
            }
            at = edge.parent;
        };
        self.looks.set(self.looks.get() + passed.len() as u64);
        known.extend(passed.into_iter().map(|node| (node, is_shared)));
        is_shared
    }
}
