//! Blocks that leave the index while pinned. Their leases keep them by id and still pin the remaining blocks.

use foldhash::quality::FixedState;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use smallvec::SmallVec;

use crate::effort::Steps;
use crate::eviction::Eviction;
use crate::ids::{Depth, NodeIndex};
use crate::pins::Pins;
use crate::pins::guards::{anchor, pin_stretch, unanchor, unpin_stretches};
use crate::pins::lease::Stretch;
use crate::storage::forest::{Forest, Position, SourceRun};

#[derive(Debug, Default)]
pub(crate) struct Leaving {
    /// Depths of the leaving blocks, by node, ascending and disjoint.
    parts: HashMap<NodeIndex, Vec<(Depth, Depth)>, FixedState>,
    /// For each tree, the depths between which all of its leaving blocks are.
    within: HashMap<u32, (Depth, Depth), FixedState>,
}

impl Leaving {
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    pub(crate) fn add(&mut self, tree: u32, node: NodeIndex, from: Depth, to: Depth) {
        let within = self.within.entry(tree).or_insert((from, to));
        *within = (within.0.min(from), within.1.max(to));
        let parts = self.parts.entry(node).or_default();
        match parts.last_mut() {
            Some(last) if last.1 == from => last.1 = to,
            _ => parts.push((from, to)),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Cut {
    whole: Stretch,
    is_source: bool,
    parts: Vec<SourceRun>,
}

pub(crate) type Cuts = Vec<(u32, Vec<Cut>)>;

impl Pins {
    /// Finds the pinned stretches that contain leaving blocks; returns `None` if too few steps are left. Takes one step
    /// per stretch. In the trees of leaving blocks, it also takes one per edge of a stretch, up from its end to the
    /// first leaving block, and one per block found.
    pub(crate) fn find_cuts(
        &self,
        forest: &Forest,
        leaving: &Leaving,
        steps: &mut Steps,
    ) -> Option<Cuts> {
        let mut cuts = Cuts::new();
        for (lease, held) in self.leases.iter() {
            let paths = held.paths.iter().map(|&path| (path, false));
            let sources = held.sources.iter().map(|&source| (source, true));
            let mut own = Vec::new();
            for (stretch, is_source) in paths.chain(sources) {
                steps.take(1)?;
                let Some((node, last)) = forest.place_of(stretch.last) else {
                    continue;
                };
                let Some(&(from, to)) = leaving.within.get(&forest.node(node).tree) else {
                    continue;
                };
                if stretch.from >= to || last < from {
                    continue;
                }
                let mut parts = Vec::new();
                for part in forest.parts(stretch.last, stretch.from) {
                    steps.take(1)?;
                    let gone = leaving.parts.get(&part.node);
                    for &(start, end) in gone.into_iter().flatten().rev() {
                        let (from, to) = (start.max(part.from), end.min(part.to));
                        if from < to {
                            steps.take(u64::from(to - from))?;
                            parts.push(SourceRun { from, to, ..part });
                        }
                    }
                    if part.from <= from {
                        break;
                    }
                }
                if !parts.is_empty() {
                    own.push(Cut {
                        whole: stretch,
                        is_source,
                        parts,
                    });
                }
            }
            if !own.is_empty() {
                cuts.push((lease, own));
            }
        }
        Some(cuts)
    }

    /// Cuts the blocks out of their leases, before they leave. The leases keep them by id and still pin the remaining
    /// blocks.
    pub(crate) fn cut_out(&mut self, forest: &mut Forest, eviction: &mut Eviction, cuts: Cuts) {
        for (lease, cuts) in cuts {
            let key = |is_source, stretch: &Stretch| (is_source, stretch.last, stretch.from);
            let mut wholes: Vec<_> = cuts
                .iter()
                .map(|cut| key(cut.is_source, &cut.whole))
                .collect();
            wholes.sort_unstable();
            let stays =
                |is_source, known: &Stretch| wholes.binary_search(&key(is_source, known)).is_err();
            let held = &mut self.leases[lease];
            held.paths.retain(|known| stays(false, known));
            held.sources.retain(|known| stays(true, known));
            let ends = held.paths.iter().enumerate();
            let mut ends: HashMap<u32, usize, FixedState> =
                ends.map(|(at, path)| (path.last, at)).collect();
            for cut in &cuts {
                self.cut_stretch((forest, eviction), lease, cut, &mut ends);
            }
        }
    }

    fn cut_stretch(
        &mut self,
        (forest, eviction): (&mut Forest, &mut Eviction),
        lease: u32,
        cut: &Cut,
        ends: &mut HashMap<u32, usize, FixedState>,
    ) {
        let (whole, block_size) = (cut.whole, forest.block_size());
        let mut rest: SmallVec<[Stretch; 2]> = SmallVec::new();
        let mut last = Some(whole.last);
        let mut end = forest.place_of(whole.last).map_or(0, |at| at.1 + 1);
        let mut gone = Vec::new();
        for run in &cut.parts {
            let edge = forest.node(run.node);
            gone.extend(edge.ids(run.from, run.to, block_size).map(|id| id.0));
            if let Some(last) = last
                && run.to < end
            {
                let from = run.to;
                rest.push(Stretch { last, from });
            }
            end = run.from;
            last = (run.from > whole.from).then(|| {
                let above = forest.normal(Position::at(run.node, run.from));
                forest.node(above.node).id(above.depth - 1, block_size)
            });
        }
        if let Some(last) = last {
            let from = whole.from;
            rest.push(Stretch { last, from });
        }
        // The remaining parts are pinned before the whole is unpinned, so they never lose their protection.
        if cut.is_source {
            self.leases[lease].sources.extend(rest.iter().copied());
            for &part in &rest {
                pin_stretch(forest, eviction, part);
            }
            unpin_stretches(forest, eviction, &[whole]);
        } else {
            for part in rest {
                let paths = &mut self.leases[lease].paths;
                match ends.entry(part.last) {
                    Entry::Occupied(known) => {
                        let known = &mut paths[*known.get()];
                        known.from = known.from.min(part.from);
                    }
                    Entry::Vacant(new) => {
                        new.insert(paths.len());
                        paths.push(part);
                        anchor(forest, eviction, part.last);
                    }
                }
            }
            unanchor(forest, eviction, whole.last);
        }
        for id in gone {
            if self.leases[lease].keep(id, cut.is_source) {
                *self.kept.entry(id).or_default() += 1;
            }
        }
    }

    /// Makes the leases keep all blocks of a tree by id instead of by stretches. The tree is removed afterwards.
    pub(crate) fn keep_all_of(&mut self, forest: &Forest, tree: u32) {
        let is_there = |stretch: &Stretch| {
            let place = forest.place_of(stretch.last);
            place.is_some_and(|(node, _)| forest.node(node).tree == tree)
        };
        let mut stretches = Vec::new();
        for (lease, held) in self.leases.iter() {
            let paths = held.paths.iter().map(|&path| (path, false));
            let sources = held.sources.iter().map(|&source| (source, true));
            let there = paths.chain(sources).filter(|(at, _)| is_there(at));
            stretches.extend(there.map(|(at, is_source)| (lease, at, is_source)));
        }
        for (lease, stretch, is_source) in stretches {
            let ids = forest.path_through(stretch.last, stretch.from);
            let held = &mut self.leases[lease];
            let own = if is_source {
                &mut held.sources
            } else {
                &mut held.paths
            };
            own.retain(|known| *known != stretch);
            for id in ids {
                if held.keep(id.0, is_source) {
                    *self.kept.entry(id.0).or_default() += 1;
                }
            }
        }
    }
}
