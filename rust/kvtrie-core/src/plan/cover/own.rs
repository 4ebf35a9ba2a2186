//! Finds the runs of the prompt's own prefix, without a search: on its path, and in blocks that share their first tokens
//! with the prompt. It costs a walk along the path, and under a policy with forbidden kinds a look for each such block.

use crate::ids::NodeIndex;
use crate::plan::cover::Cover;
use crate::plan::reach::Pieces;
use crate::plan::search::Candidate;
use crate::plan::usable::Kinship;
use crate::storage::forest::Position;

impl Cover<'_> {
    /// Whether a place that is as far from the root as the prompt's token is of the prompt's own prefix. The search leaves
    /// such places out.
    pub(super) fn is_own(&self, place: &Candidate<'_>) -> bool {
        let (forest, end) = (self.follower.forest, self.own.end);
        let block_size = forest.block_size();
        let edges = self.own_edges.get_or_init(|| forest.edges_to(end, 0));
        let is_on = |depth: usize, node: NodeIndex| {
            let at = edges.partition_point(|&(_, _, to)| to as usize <= depth);
            edges.get(at).is_some_and(|&(own, ..)| own == node)
        };
        let depth = place.last / block_size;
        if is_on(depth, place.node) {
            return true;
        }
        let edge = forest.node(place.node);
        let first = match edge.depth.checked_sub(1) {
            // The path leaves an edge inside.
            _ if end.node == place.node => end.depth,
            None => 0,
            Some(above) if is_on(above as usize, edge.parent) => edge.depth,
            Some(_) => return false,
        };
        let from = first as usize * block_size;
        let prompt = self.follower.prompt;
        if depth != first as usize || place.last > prompt.tokens.len() {
            return false;
        }
        let cached = edge.view(block_size).slice(from, place.last);
        prompt.slice(from, place.last).common(cached) == place.last - from
    }

    /// Finds the runs of the prompt's own prefix after the token `at`.
    pub(super) fn find_own(&mut self, at: usize) {
        let block_size = self.follower.forest.block_size();
        let (in_place, end) = (self.own.in_place, self.own.end);
        // The path in place may continue into the block in which the prompt leaves it.
        let mut from = in_place.depth as usize * block_size;
        self.add_own(in_place.node, from, 0, at);
        for (node, first, to) in self.follower.forest.edges_to(end, in_place.depth) {
            let parent = self.follower.forest.node(node).parent;
            while from < to as usize * block_size {
                // A sibling may share more usable tokens of the edge's first block.
                let is_first = first > in_place.depth && from == first as usize * block_size;
                let reached = self.add_own(if is_first { parent } else { node }, from, from, at);
                from = if reached > from {
                    reached
                } else {
                    self.follower
                        .usable
                        .skip(Kinship::Own, self.follower.forest.node(node), from)
                };
            }
        }
        if end.depth > in_place.depth {
            let from = end.depth as usize * block_size;
            self.add_own(end.node, from, from, at);
        }
        if self.follower.usable.splits_blocks() {
            self.find_own_inside_blocks(at);
            let later = self.own_later.make_contiguous();
            later.sort_by_key(|run| run.start);
        }
    }

    /// Finds the runs of the own prefix that begin inside a block, after a token of a forbidden kind: where edges begin
    /// on the own path, and where the prompt leaves it, several blocks may share their first tokens with the prompt.
    fn find_own_inside_blocks(&mut self, at: usize) {
        let (forest, usable) = (self.follower.forest, self.follower.usable);
        let block_size = forest.block_size();
        let (in_place, end) = (self.own.in_place, self.own.end);
        let mut forks = Vec::new();
        for (node, first, _) in forest.edges_to(end, in_place.depth) {
            let edge = forest.node(node);
            let from = first as usize * block_size;
            let until = from + block_size;
            if edge.depth == first && usable.end(Kinship::Own, edge, from, until) < until {
                forks.push(Position::at(edge.parent, first));
            }
        }
        forks.push(end);
        for fork in forks {
            let from = fork.depth as usize * block_size;
            for (node, shared) in self.blocks_at(fork) {
                if self.budget.is_spent(at, 0) {
                    self.skipped += 1;
                    return;
                }
                self.budget.spend(1);
                let edge = forest.node(node);
                let until = from + shared;
                let mut next = usable.end(Kinship::Own, edge, from, until);
                while next < until {
                    next = usable.skip(Kinship::Own, edge, next);
                    if shared < block_size && next + self.min_run > until {
                        break;
                    }
                    self.add_own(node, next, next, at);
                    next = usable.end(Kinship::Own, edge, next, until);
                }
            }
        }
    }

    /// The blocks at a place of the own path that share all or more than `min_run` of their first tokens with the
    /// prompt, with the number of these tokens. Exact ones, which may be used whole, are left out where there are several.
    fn blocks_at(&mut self, fork: Position) -> Vec<(NodeIndex, usize)> {
        let follower = &self.follower;
        let (forest, block_size) = (follower.forest, follower.forest.block_size());
        let from = fork.depth as usize * block_size;
        let tokens = follower.prompt.tokens.len();
        let wanted = follower
            .prompt
            .slice(from.min(tokens), tokens.min(from + block_size));
        let only = match follower.path {
            Some(path) => Some(path.edge_at(fork.depth).map(|(node, _)| node)),
            None => (fork.depth < forest.node(fork.node).end()).then_some(Some(fork.node)),
        };
        let has_room =
            |&(_, shared): &(NodeIndex, usize)| shared == block_size || shared > self.min_run;
        if let Some(only) = only {
            let shared = |node: NodeIndex| {
                let block = forest.node(node).view(block_size);
                wanted.common(block.slice(from, from + block_size))
            };
            let only = only.map(|node| (node, shared(node)));
            return only.filter(has_room).into_iter().collect();
        }
        let mut children = forest
            .most_similar_children(fork.node, false, wanted)
            .take_while(has_room);
        let found = children.by_ref().take(follower.max_children).collect();
        self.skipped += u64::from(children.next().is_some());
        found
    }

    /// Adds the run of the own path from position `from` of an edge, if it reaches beyond the token `at`. Its tokens
    /// begin at `start`; those before `from` count for its length but are not copied. Returns the end of the run.
    fn add_own(&mut self, node: NodeIndex, from: usize, start: usize, at: usize) -> usize {
        let mut path = Pieces::new();
        let done = self
            .follower
            .down(Kinship::Own, node, from, from, || 0, &mut path);
        self.skipped += done.skipped;
        let end = done.end;
        if end > at && end - start >= self.min_run {
            self.add(from, Kinship::Own, path, at);
        }
        end
    }
}
