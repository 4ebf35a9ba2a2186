//! Works out the context of moved runs (rule P17 in `docs/design.md`): how much of what a run was computed after also
//! comes before it in the prompt.
//!
//! Each stretch of the prompt whose KV is cached is kept with its path from the root. A run's context is what of these
//! stretches is on the run's own path before its first slot. Two paths share exactly what is above the place where they
//! part, so one position per pair decides it. Paths are only followed up to the path of what is in place, which is the
//! longest in most plans. Each edge followed is a step, and the number of steps and of stretches is bounded.

use std::ops::Range;

use crate::ids::{Depth, NodeIndex};
use crate::plan::reach::Piece;
use crate::policy::ReusePolicy;
use crate::storage::forest::{Forest, Position};

/// The most copied segments before a moved run whose context is worked out.
const MOST_STRETCHES: usize = 512;

/// Room for the stretches of most plans.
const USUAL: usize = 32;

/// The most edges that are followed for the contexts of one plan, and to find whose blocks it moves.
pub(super) const MOST_EDGES: usize = 1 << 14;

/// A run of moved tokens in a plan, and how the context that it was computed in differs from the prompt before it.
///
/// The run's KV was computed after the tokens before `old_start` on its path. Of these, the *kept* ones are the tokens
/// of the prompt before `start` whose KV comes from there, in place or by a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MovedRun {
    /// First token of the prompt.
    pub start: usize,
    /// One past the last token.
    pub end: usize,
    /// Where the source's first token is in its own prompt, in tokens.
    pub old_start: usize,
    /// Number of places before the run at which kept tokens stop being consecutive, in the prompt or in the source. A
    /// change of order is one too. [`MAX_CUTS`](ReusePolicy::MAX_CUTS) if there are as many, or if this was not worked
    /// out.
    pub cuts: u16,
    /// Share of the tokens before the run in its source that are not kept; 1 if this was not worked out.
    pub lost_context: f64,
    /// Share of the tokens before the run in the prompt that are not kept; 1 if this was not worked out.
    pub new_context: f64,
    /// Whether all its blocks are what [`Scope::Conversation`](crate::Scope::Conversation) would have allowed, whatever
    /// the policy's scope is; `false` if this was not worked out.
    pub same_conversation: bool,
}

impl MovedRun {
    /// New place minus old place, in tokens. [`Segment::position_delta`](crate::Segment::position_delta) is in positions.
    #[must_use]
    pub fn delta(&self) -> i64 {
        super::Segment::distance(self.start, self.old_start)
    }

    /// Number of tokens by which the run moves.
    #[must_use]
    pub fn distance(&self) -> usize {
        self.start.abs_diff(self.old_start)
    }

    pub(super) fn is_within(&self, policy: &ReusePolicy) -> bool {
        policy.max_cuts.is_none_or(|most| self.cuts <= most)
            && self.lost_context <= policy.max_lost_context
            && self.new_context <= policy.max_new_context
    }
}

/// A path from the root: the path in place up to `leaves`, then `edges`, from top to bottom.
#[derive(Clone, Debug)]
struct Line {
    /// Where the path leaves the path in place, in tokens; the most if it does not.
    leaves: usize,
    edges: Range<usize>,
}

/// Tokens of the prompt that are cached, and where.
#[derive(Clone, Debug)]
struct Stretch {
    start: usize,
    old_start: usize,
    old_end: usize,
    line: Line,
}

#[derive(Debug)]
pub(super) struct Contexts<'a> {
    forest: &'a Forest,
    /// The last edges of the path in place, from bottom to top, as far as they were needed.
    in_place: Vec<(NodeIndex, Depth)>,
    stretches: Vec<Stretch>,
    edges: Vec<NodeIndex>,
    steps: usize,
    runs: Vec<MovedRun>,
}

impl<'a> Contexts<'a> {
    pub(super) fn new(forest: &'a Forest, in_place: Position) -> Self {
        let edge = forest.node(in_place.node);
        let old_end = in_place.depth as usize * forest.block_size();
        let mut stretches = Vec::with_capacity(USUAL);
        stretches.push(Stretch {
            start: 0,
            old_start: 0,
            old_end,
            line: Line {
                leaves: usize::MAX,
                edges: 0..0,
            },
        });
        Self {
            forest,
            in_place: vec![(in_place.node, edge.depth)],
            stretches,
            edges: Vec::new(),
            steps: 0,
            runs: Vec::with_capacity(USUAL),
        }
    }

    pub(super) fn into_runs(self) -> Vec<MovedRun> {
        self.runs
    }

    pub(super) fn add(&mut self, run: MovedRun) {
        self.runs.push(run);
    }

    /// The context of tokens that are copied to `start..end`, from position `old_start` of an edge on.
    pub(super) fn of(
        &mut self,
        start: usize,
        end: usize,
        node: NodeIndex,
        old_start: usize,
    ) -> MovedRun {
        let mut run = MovedRun {
            start,
            end,
            old_start,
            cuts: ReusePolicy::MAX_CUTS,
            lost_context: 1.0,
            new_context: 1.0,
            same_conversation: false,
        };
        // The first stretch is what is in place.
        if self.stretches.len() > 1 + MOST_STRETCHES || self.steps > MOST_EDGES {
            return run;
        }
        let first = self.edges.len();
        let Some(line) = self.line(node) else {
            return run;
        };
        let (mut kept, mut cuts, mut next) = (0, 0, None);
        for stretch in &self.stretches {
            let common = self.common(&stretch.line, &line, old_start);
            let count = common
                .min(stretch.old_end)
                .saturating_sub(stretch.old_start);
            if count > 0 {
                let at = (stretch.start, stretch.old_start);
                cuts += usize::from(next.is_some_and(|next| next != at));
                next = Some((at.0 + count, at.1 + count));
                kept += count;
            }
        }
        cuts += usize::from(next.is_some_and(|next| next != (start, old_start)));
        self.edges.truncate(first);
        run.cuts = u16::try_from(cuts).unwrap_or(ReusePolicy::MAX_CUTS);
        run.lost_context = without(kept, old_start);
        run.new_context = without(kept, start);
        run
    }

    /// Keeps tokens that are copied to `start`, as context of later runs.
    pub(super) fn keep(&mut self, start: usize, path: &[Piece]) {
        let (Some(first), Some(last)) = (path.first(), path.last()) else {
            return;
        };
        if self.stretches.len() > 1 + MOST_STRETCHES {
            return;
        }
        let old_end = last.end;
        let line = self.line(last.node).unwrap_or(Line {
            leaves: 0,
            edges: 0..0,
        });
        self.stretches.push(Stretch {
            start,
            old_start: first.start,
            old_end,
            line,
        });
    }

    /// The path to an edge; `None` if no step is left.
    fn line(&mut self, mut node: NodeIndex) -> Option<Line> {
        let first = self.edges.len();
        let mut leaves = usize::MAX;
        while !self.is_in_place(node)? {
            self.take_step()?;
            self.edges.push(node);
            let edge = self.forest.node(node);
            leaves = edge.depth as usize * self.forest.block_size();
            node = edge.parent;
        }
        self.edges[first..].reverse();
        Some(Line {
            leaves,
            edges: first..self.edges.len(),
        })
    }

    /// Whether an edge is on the path in place; `None` if no step is left.
    fn is_in_place(&mut self, node: NodeIndex) -> Option<bool> {
        let edge = self.forest.node(node);
        if edge.is_root() {
            return Some(true);
        }
        while let Some(&(top, depth)) = self.in_place.last()
            && depth > edge.depth
        {
            self.take_step()?;
            let parent = self.forest.node(top).parent;
            self.in_place.push((parent, self.forest.node(parent).depth));
        }
        let at = self
            .in_place
            .partition_point(|&(_, depth)| depth > edge.depth);
        let found = self.in_place.get(at);
        Some(found.is_some_and(|&(found, _)| found == node))
    }

    fn take_step(&mut self) -> Option<()> {
        self.steps += 1;
        (self.steps <= MOST_EDGES).then_some(())
    }

    /// The end of what a path has in common with the path of a run before the run's position `until`.
    fn common(&self, path: &Line, run: &Line, until: usize) -> usize {
        if path.edges.is_empty() || run.edges.is_empty() {
            return path.leaves.min(run.leaves).min(until);
        }
        let ours = &self.edges[path.edges.clone()];
        let theirs = &self.edges[run.edges.clone()];
        let most = ours.len().min(theirs.len()) - 1;
        // Edges are equal up to where the paths part.
        if ours[0] != theirs[0] {
            return path.leaves.min(run.leaves);
        }
        let shared = if ours[most] == theirs[most] {
            most
        } else {
            let (mut low, mut high) = (0, most);
            while high - low > 1 {
                let middle = usize::midpoint(low, high);
                if ours[middle] == theirs[middle] {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            low
        };
        let end = self.forest.node(ours[shared]).end() as usize * self.forest.block_size();
        end.min(until)
    }
}

/// The share of `all` tokens that are not among `kept` ones.
#[expect(
    clippy::cast_precision_loss,
    reason = "a share needs no more precision"
)]
fn without(kept: usize, all: usize) -> f64 {
    if all == 0 {
        return 0.0;
    }
    (1.0 - kept as f64 / all as f64).max(0.0)
}
