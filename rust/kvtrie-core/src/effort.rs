//! Limits on the work of one call, and counts of work done. A caller that holds a lock gives a limit.

/// The limit on the cost of one call. A call within it always advances by at least one block and one edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Edges visited.
    pub nodes: u64,
    /// Bytes of token ids compared.
    pub bytes: u64,
}

impl Effort {
    /// No limit.
    pub const ANY: Self = Self {
        nodes: u64::MAX,
        bytes: u64::MAX,
    };

    /// The limit in steps. A step takes about as long as a visit of an edge.
    pub(crate) fn steps(self) -> Steps {
        Steps(self.nodes)
    }
}

#[derive(Debug)]
pub(crate) struct Steps(u64);

impl Steps {
    pub(crate) fn take(&mut self, count: u64) -> Option<()> {
        self.0 = self.0.checked_sub(count)?;
        Some(())
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) nodes_visited: u64,
    pub(crate) bytes_compared: u64,
    pub(crate) search_looks: u64,
    pub(crate) plans_without_scope: u64,
}

impl Work {
    pub(crate) fn add_walk(&mut self, walk: Self) {
        self.nodes_visited += walk.nodes_visited;
        self.bytes_compared += walk.bytes_compared;
    }
}
