//! The order in which dead blocks are evicted.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::ids::{Depth, NodeIndex};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeadRun {
    pub(crate) mark: u64,
    pub(crate) node: NodeIndex,
    pub(crate) from: Depth,
    pub(crate) to: Depth,
}

/// The dead blocks that may be evicted: the oldest mark first, then the deepest block. All blocks of a mark are on one
/// path, so a mark and a depth identify a block.
#[derive(Debug, Default)]
pub(crate) struct DeadOrder {
    runs: BTreeMap<(u64, Reverse<Depth>), (NodeIndex, Depth)>,
}

impl DeadOrder {
    pub(crate) fn first(&self) -> Option<DeadRun> {
        self.runs().next()
    }

    pub(crate) fn runs(&self) -> impl Iterator<Item = DeadRun> {
        self.runs
            .iter()
            .map(|(&(mark, Reverse(to)), &(node, from))| DeadRun {
                mark,
                node,
                from,
                to,
            })
    }

    pub(crate) fn add(&mut self, run: DeadRun) {
        let DeadRun {
            mark,
            node,
            from,
            to,
        } = run;
        self.runs.insert((mark, Reverse(to)), (node, from));
    }

    pub(crate) fn cut(&mut self, mark: u64, from: Depth, to: Depth) -> SmallVec<[DeadRun; 2]> {
        let after = (mark, Reverse(Depth::MAX))..(mark, Reverse(from));
        let mut gone: SmallVec<[DeadRun; 2]> = SmallVec::new();
        for (&(_, Reverse(end)), &(node, start)) in self.runs.range(after).rev() {
            if start >= to {
                break;
            }
            let (from, to) = (start, end);
            gone.push(DeadRun {
                mark,
                node,
                from,
                to,
            });
        }
        for run in &mut gone {
            self.runs.remove(&(mark, Reverse(run.to)));
            if run.to > to {
                self.add(DeadRun { from: to, ..*run });
                run.to = to;
            }
            if run.from < from {
                self.add(DeadRun { to: from, ..*run });
                run.from = from;
            }
        }
        gone
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.runs.len() * size_of::<((u64, Reverse<Depth>), (NodeIndex, Depth))>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_equal_a_set_of_blocks(
            steps in prop::collection::vec((any::<bool>(), 0u64..3, 0u32..20, 1u32..20), 0..40)
        ) {
            let mut order = DeadOrder::default();
            let mut blocks = BTreeSet::new();
            for (adds, mark, from, len) in steps {
                let to = from + len;
                let own: BTreeSet<_> = (from..to).map(|depth| (mark, Reverse(depth))).collect();
                if !adds {
                    let gone = order.cut(mark, from, to);
                    let gone: BTreeSet<_> = gone
                        .iter()
                        .flat_map(|run| (run.from..run.to).map(|depth| (run.mark, Reverse(depth))))
                        .collect();
                    prop_assert_eq!(gone, own.intersection(&blocks).copied().collect());
                    blocks.retain(|block| !own.contains(block));
                } else if own.is_disjoint(&blocks) {
                    order.add(DeadRun { mark, node: 7, from, to });
                    blocks.extend(own);
                }
                let found: Vec<_> = order
                    .runs()
                    .flat_map(|run| (run.from..run.to).rev().map(move |at| (run.mark, Reverse(at))))
                    .collect();
                prop_assert_eq!(found, blocks.iter().copied().collect::<Vec<_>>());
            }
        }
    }
}
