//! The sessions of stored blocks.

use crate::ids::{Depth, NodeIndex};
use crate::session::{Members, SessionId};
use crate::storage::forest::{Forest, Position};

impl Forest {
    /// Adds a session to the blocks of a path from depth `first` on, and to those above, up to the first that belongs
    /// to it already. All blocks of the path are present.
    pub(crate) fn add_session(&mut self, at: Position, first: Depth, session: SessionId) {
        let (mut node, mut end) = (at.node, at.depth);
        loop {
            let edge = &mut self.nodes[node];
            if edge.is_root() {
                return;
            }
            let (from, parent) = (edge.depth, edge.parent);
            let first = first.clamp(from, end.max(from));
            let sessions = &mut edge.extras_mut().sessions;
            let is_known = from < end && sessions.add(session, from, first, end);
            edge.prune();
            if is_known {
                return;
            }
            (node, end) = (parent, from);
        }
    }

    pub(crate) fn sessions_of_block(&self, node: NodeIndex, place: Depth) -> Members {
        Members::from_slice(self.nodes[node].sessions(place))
    }

    pub(crate) fn restore_sessions(&mut self, node: NodeIndex, place: Depth, members: &Members) {
        if !members.is_empty() {
            let extras = self.nodes[node].extras_mut();
            extras.sessions.set(place, members);
        }
    }
}
