//! Checks every invariant of an index, for tests, fuzzers and engines.

use std::collections::{BTreeMap, BTreeSet};

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::error::{Error, Result};
use crate::eviction::{ARITY, Eviction, eviction_key, last_use_of_leaf};
use crate::ids::{ABSENT, Depth, NodeIndex};
use crate::index::RadixIndex;
use crate::pins::Pins;
use crate::storage::blocks::BlockState;
use crate::storage::forest::Forest;
use crate::storage::node::{Guard, Node};
use crate::tokens::Item;

fn must(condition: bool, what: impl FnOnce() -> String) -> Result<()> {
    if condition {
        Ok(())
    } else {
        Err(Error::broken_invariant("RadixIndex::check", what()))
    }
}

/// What pins should protect: by node, the ends of pinned paths and the pinned runs, with their numbers of pins.
#[derive(Default)]
struct Pinned {
    ends: BTreeMap<NodeIndex, BTreeMap<Depth, u32>>,
    runs: BTreeMap<NodeIndex, BTreeMap<(Depth, Depth), u32>>,
}

#[derive(Default)]
struct Totals {
    nodes: usize,
    hashed: usize,
    indexed: u64,
    holes: u64,
    approximate: u64,
    /// Number of approximate blocks of the tree by the number of their grade.
    grades: BTreeMap<u8, u64>,
    protected: u64,
    dead: u64,
    queued: BTreeMap<(u64, Depth), NodeIndex>,
    /// Number of dead blocks that may be evicted, and of the protected ones among them.
    free: u64,
    loose: u64,
}

impl RadixIndex {
    /// Checks every invariant of the index and reports the first broken one.
    ///
    /// # Errors
    /// [`BrokenInvariant`](crate::ErrorKind::BrokenInvariant) if an invariant is broken, which is a bug in this crate.
    ///
    /// # Complexity
    /// O(tokens held · log blocks + blocks pinned, once per plan).
    pub fn check(&self) -> Result<()> {
        let checker = Checker {
            index: self,
            forest: self.forest(),
            pins: self.pins(),
            eviction: self.eviction(),
        };
        checker.check()
    }
}

struct Checker<'a> {
    index: &'a RadixIndex,
    forest: &'a Forest,
    pins: &'a Pins,
    eviction: &'a Eviction,
}

impl Checker<'_> {
    fn check(&self) -> Result<()> {
        let pins = self.check_leases()?;
        let mut totals = Totals::default();
        for run in self.eviction.dead().order().runs() {
            let blocks = (run.from..run.to).map(|depth| ((run.mark, depth), run.node));
            totals.queued.extend(blocks);
        }
        let (forest, trees) = (self.forest, self.forest.trees());
        for (tree, state) in trees.iter() {
            must(trees.of(&state.namespace) == Some(tree), || {
                format!("tree {tree} is not its namespace's")
            })?;
            must(forest.node(state.root).is_root(), || {
                format!("the root of tree {tree} has a parent")
            })?;
            must(forest.node(state.root).has_children(), || {
                format!("tree {tree} is empty")
            })?;
            let before = totals.dead;
            self.check_tree(tree, state.root, &pins, &mut totals)?;
            let grades = std::mem::take(&mut totals.grades);
            let known: BTreeMap<u8, u64> = state
                .grades
                .iter()
                .map(|(number, _, blocks)| (number, blocks))
                .collect();
            must(grades == known, || {
                format!("tree {tree} has blocks of the grades {grades:?}, not {known:?}")
            })?;
            must(totals.dead - before == state.num_dead, || {
                format!("tree {tree} has {} dead blocks", totals.dead - before)
            })?;
        }
        must(trees.num_by_salt() == trees.len(), || {
            format!(
                "{} namespaces are known by salt, there are {} trees",
                trees.num_by_salt(),
                trees.len()
            )
        })?;
        must(trees.num_by_namespace() == trees.len(), || {
            "a namespace has no tree".into()
        })?;
        must(totals.nodes == forest.num_nodes(), || {
            format!(
                "{} of {} edges are linked",
                totals.nodes,
                forest.num_nodes()
            )
        })?;
        must(forest.num_anchored() == pins.ends.len(), || {
            "an edge has ends of paths that nobody pins".into()
        })?;
        must(forest.num_hashed() == totals.hashed, || {
            "the edge table has strangers".into()
        })?;
        let ids = forest.blocks().known();
        let ids = ids.filter(|(_, place)| matches!(place, BlockState::Indexed { .. }));
        let ids = ids.count();
        let counters = [
            ("indexed", totals.indexed, forest.num_indexed()),
            ("holes", totals.holes, forest.num_holes()),
            ("approximate", totals.approximate, forest.num_approximate()),
            ("protected", totals.protected, forest.num_protected()),
            ("dead", totals.dead, self.eviction.dead().num_blocks()),
            ("loose", totals.loose, self.eviction.dead().num_loose()),
            ("indexed ids", ids as u64, forest.num_indexed()),
        ];
        for (name, counted, known) in counters {
            must(counted == known, || {
                format!("{counted} {name} blocks, the counter says {known}")
            })?;
        }
        let free = totals.queued.len() as u64;
        must(free == totals.free, || {
            format!("{free} dead blocks are queued, {} may go", totals.free)
        })?;
        let mut known = HashMap::with_hasher(FixedState::default());
        let mut leaves = self.eviction.leaves().entries();
        must(
            forest.num_holes() <= self.index.config().num_blocks
                || leaves.all(|(_, node)| !forest.is_cut_off(node, &mut known)),
            || format!("{} holes, and something that could go", forest.num_holes()),
        )?;
        let checked = self.index.moved().check(self.forest);
        must(checked.is_ok(), || checked.err().unwrap_or_default())?;
        let leases = self.pins.leases();
        let is_lease = |lease| leases.iter().any(|(live, _)| live == lease);
        let checked = self.index.groups().check(self.forest, is_lease);
        must(checked.is_ok(), || checked.err().unwrap_or_default())?;
        self.check_order()
    }

    fn check_order(&self) -> Result<()> {
        let leaves = self.eviction.leaves();
        for (at, (time, node)) in leaves.entries().enumerate() {
            must(
                self.forest.node(node).queued() == Some(crate::ids::depth(at)),
                || format!("edge {node} is not where it is queued"),
            )?;
            must(last_use_of_leaf(self.forest, node) == Some(time), || {
                format!("edge {node} is queued under an old use")
            })?;
        }
        let keys: Vec<_> = leaves
            .entries()
            .map(|(_, node)| eviction_key(self.forest, node))
            .collect();
        must(
            (1..keys.len()).all(|at| keys[(at - 1) / ARITY] <= keys[at]),
            || "the order of eviction is no heap".into(),
        )
    }

    fn check_leases(&self) -> Result<Pinned> {
        let mut pins = Pinned::default();
        let mut kept: BTreeMap<u32, u32> = BTreeMap::new();
        for (lease, held) in self.pins.leases().iter() {
            must(
                held.pinned
                    || held.paths.is_empty()
                        && held.sources.is_empty()
                        && held.kept().next().is_none(),
                || format!("lease {lease} pins though it must not"),
            )?;
            let distinct: BTreeSet<u32> = held.paths.iter().map(|path| path.last).collect();
            must(distinct.len() == held.paths.len(), || {
                format!("lease {lease} pins paths to one block: {:?}", held.paths)
            })?;
            for stretch in held.paths.iter().chain(&held.sources) {
                let place = self.forest.place_of(stretch.last);
                must(
                    place.is_some_and(|(_, depth)| stretch.from <= depth),
                    || format!("lease {lease} pins {stretch:?}, which ends at {place:?}"),
                )?;
                let ids = self.forest.path_through(stretch.last, stretch.from);
                must(ids.iter().all(|id| id.0 != ABSENT), || {
                    format!("lease {lease} pins a hole: {ids:?}")
                })?;
            }
            for (node, depth) in held
                .paths
                .iter()
                .filter_map(|path| self.forest.place_of(path.last))
            {
                let ends = pins.ends.entry(node).or_default();
                *ends.entry(depth + 1).or_default() += 1;
            }
            for part in held
                .sources
                .iter()
                .flat_map(|&source| self.forest.parts(source.last, source.from))
            {
                let runs = pins.runs.entry(part.node).or_default();
                *runs.entry((part.to, part.from)).or_default() += 1;
            }
            for id in held.kept() {
                let place = self.forest.blocks().state(id);
                must(
                    matches!(place, BlockState::Condemned | BlockState::CondemnedForGood),
                    || format!("lease {lease} keeps block {id}, which is not condemned"),
                )?;
                *kept.entry(id).or_default() += 1;
            }
        }
        must(
            kept.len() == self.pins.kept().len()
                && kept
                    .iter()
                    .all(|(id, count)| self.pins.kept().get(id) == Some(count)),
            || format!("the leases keep {kept:?}, the table differs"),
        )?;
        let counts = self.pins.pin_counts(self.forest);
        must(
            counts.len() as u64 == self.pins.num_pinned(self.forest),
            || {
                format!(
                    "{} pinned, counted {}",
                    counts.len(),
                    self.pins.num_pinned(self.forest)
                )
            },
        )?;
        self.check_places(&kept, &counts)?;
        Ok(pins)
    }

    /// Checks the block table. `kept` counts the leases that keep each block by id, `counts` the plans that pin it.
    fn check_places(&self, kept: &BTreeMap<u32, u32>, counts: &BTreeMap<u32, u32>) -> Result<()> {
        let (mut condemned, mut quarantined, mut waiting) = (0, 0, BTreeSet::new());
        for (id, place) in self.forest.blocks().known() {
            match place {
                BlockState::Condemned | BlockState::CondemnedForGood => {
                    condemned += 1;
                    must(kept.contains_key(&id), || {
                        format!("block {id} is condemned without a pin")
                    })?;
                }
                BlockState::Waiting => {
                    waiting.insert(id);
                    must(!counts.contains_key(&id), || {
                        format!("block {id} waits with a pin")
                    })?;
                }
                BlockState::Quarantined => {
                    quarantined += 1;
                    must(!counts.contains_key(&id), || {
                        format!("block {id} is in quarantine with a pin")
                    })?;
                }
                BlockState::Indexed { .. } | BlockState::Unknown => {}
            }
        }
        must(
            counts
                .keys()
                .all(|&id| self.forest.blocks().state(id) != BlockState::Unknown),
            || "a block is pinned but not known".into(),
        )?;
        must(
            waiting == self.pins.waiting().iter().copied().collect(),
            || "the waiting blocks differ from the queue".into(),
        )?;
        must(waiting.len() == self.pins.waiting().len(), || {
            "a block waits twice".into()
        })?;
        must(condemned == self.forest.blocks().num_condemned(), || {
            format!(
                "{condemned} condemned, counter {}",
                self.forest.blocks().num_condemned()
            )
        })?;
        must(
            quarantined == self.forest.blocks().num_quarantined(),
            || {
                format!(
                    "{quarantined} quarantined, counter {}",
                    self.forest.blocks().num_quarantined()
                )
            },
        )?;
        Ok(())
    }

    fn check_tree(
        &self,
        tree: u32,
        root: NodeIndex,
        pins: &Pinned,
        totals: &mut Totals,
    ) -> Result<()> {
        let mut open = vec![root];
        while let Some(at) = open.pop() {
            let node = self.forest.node(at);
            totals.nodes += 1;
            must(node.tree == tree, || {
                format!("edge {at} is in the wrong tree")
            })?;
            self.check_edge(at, node, pins, totals)?;
            let children = self.forest.children(at);
            must(self.forest.are_children_sorted(at), || {
                format!("the children of edge {at} are out of order")
            })?;
            let (mut paths, mut sources) = (0, 0);
            for &child in &children {
                let below = self.forest.node(child);
                must(below.parent == at, || {
                    format!("edge {child} is linked badly")
                })?;
                must(below.depth == node.end(), || {
                    format!("edge {child} starts at {}, not {}", below.depth, node.end())
                })?;
                must(below.blocks.len() > 0, || format!("edge {child} is empty"))?;
                self.check_positions(child, node, below)?;
                let first = below.first_block(self.forest.block_size());
                let hashed = self.forest.is_hashed(child);
                must(hashed == (children.len() > 1), || {
                    format!("edge {child} is in the edge table, or is not")
                })?;
                must(first.tokens.first() == Some(&below.first), || {
                    format!("edge {child} does not know its first token")
                })?;
                totals.hashed += usize::from(hashed);
                paths += u32::from(below.guard() == Guard::Path);
                sources += u32::from(below.guard() == Guard::Source);
            }
            open.extend(children);
            must(
                paths == node.protection & !(Node::ANCHORED | Node::SOURCED),
                || format!("edge {at} has {paths} children on pinned paths"),
            )?;
            let known = self.forest.sources_of(at);
            must(sources == known.map_or(0, |known| known.children), || {
                format!("edge {at} has {sources} children with sources")
            })?;
            let runs: Vec<(Depth, Depth, u32)> = pins.runs.get(&at).map_or(Vec::new(), |runs| {
                runs.iter()
                    .map(|(&(to, from), &count)| (to, from, count))
                    .collect()
            });
            must(known.map_or(&[][..], |known| &known.runs) == runs, || {
                format!("edge {at} has the sources {known:?}, not {runs:?}")
            })?;
            let has_sources = sources > 0 || !runs.is_empty();
            must(
                known.is_some() == has_sources
                    && (node.protection & Node::SOURCED != 0) == has_sources,
                || format!("edge {at} does not know of its sources"),
            )?;
        }
        Ok(())
    }

    /// Checks what an edge knows of positions: the shifts at its start and at its items, and that an item that says how
    /// many positions it takes ends where it says, or goes on below.
    fn check_positions(&self, at: NodeIndex, above: &Node, node: &Node) -> Result<()> {
        let block_size = self.forest.block_size();
        let (start, end) = (
            node.depth as usize * block_size,
            node.end() as usize * block_size,
        );
        let items = |node: &'_ Node| {
            node.extras()
                .map_or(Vec::new(), |extras| extras.items.clone())
        };
        let (own, above_own) = (items(node), items(above));
        let shift = above.shift_at(start);
        must(node.shift_at(start) == shift, || {
            format!("edge {at} starts after a shift of {shift}, and does not know it")
        })?;
        let goes_on = above_own
            .last()
            .filter(|last| last.start() + last.num_tokens() > start);
        let begun = own.first().filter(|first| first.start() < start);
        must(
            goes_on.is_none_or(|last| {
                begun.is_some_and(|begun| {
                    (begun.start(), begun.extent()) == (last.start(), last.extent())
                })
            }),
            || format!("edge {at} lacks the rest of an item from above"),
        )?;
        let mut before: Option<&Item> = None;
        for item in &own {
            let shift = match before {
                Some(before) => before.shift_after(),
                None => above.shift_at(item.start().min(start)),
            };
            must(item.shift() == shift, || {
                format!(
                    "an item of edge {at} starts after a shift of {}, not {shift}",
                    item.shift()
                )
            })?;
            let whole_end = item.start() + item.num_tokens();
            must(item.end() == whole_end.min(end), || {
                format!(
                    "an item of edge {at} over [{}, {}) has {} tokens",
                    item.start(),
                    item.end(),
                    item.num_tokens()
                )
            })?;
            before = Some(item);
        }
        Ok(())
    }

    fn check_edge(
        &self,
        at: NodeIndex,
        node: &Node,
        pins: &Pinned,
        totals: &mut Totals,
    ) -> Result<()> {
        let (mut holes, mut approximate) = (0, 0);
        let own: Vec<(Depth, u32)> = pins.ends.get(&at).map_or(Vec::new(), |ends| {
            ends.iter().map(|(&end, &count)| (end, count)).collect()
        });
        let block_size = self.forest.block_size();
        for depth in node.depth..node.end() {
            let payload = node.payload(depth, block_size);
            if !payload.is_present() {
                holes += 1;
                continue;
            }
            if !payload.label.is_exact() {
                approximate += 1;
                *totals.grades.entry(payload.label.grade()).or_default() += 1;
            }
            let place = self.forest.blocks().state(payload.id);
            must(place == BlockState::Indexed { node: at, depth }, || {
                format!(
                    "block {} stands in edge {at} at depth {depth}, its entry says {place:?}",
                    payload.id
                )
            })?;
        }
        must(holes == node.num_holes(), || {
            format!("edge {at} has {holes} holes, not {}", node.num_holes())
        })?;
        must(approximate == node.num_approximate(), || {
            format!("edge {at} has {approximate} approximate blocks")
        })?;
        let anchored = self.forest.anchors_of(at);
        must(own == anchored, || {
            format!("edge {at} has the anchors {anchored:?}, not {own:?}")
        })?;
        must(
            own.is_empty() == (node.protection & Node::ANCHORED == 0),
            || format!("edge {at} does not know of its anchors"),
        )?;
        if !node.has_children() && !node.is_root() {
            let last = node.end() - 1;
            must(node.payload(last, block_size).is_present(), || {
                format!("edge {at} ends in a hole")
            })?;
            must(
                (self.forest.protected_end(at) <= last) == node.queued().is_some(),
                || format!("the leaf {at} is queued although pinned, or the other way round"),
            )?;
        } else {
            must(node.queued().is_none(), || {
                format!("edge {at} is no leaf but queued")
            })?;
        }
        if let Some(extras) = node.extras() {
            let (start, end) = (
                node.depth as usize * self.forest.block_size(),
                node.end() as usize * self.forest.block_size(),
            );
            let runs = extras.tags.runs();
            must(
                runs.iter().all(|run| run.start >= start && run.end <= end),
                || format!("edge {at} has tags outside its tokens"),
            )?;
            for depth in (node.depth..node.end())
                .filter(|&depth| !node.payload(depth, block_size).is_present())
            {
                let tags = self.forest.tags_of_block(at, depth);
                must(tags.is_empty() && node.sessions(depth).is_empty(), || {
                    format!("the hole at depth {depth} of edge {at} has tags or sessions")
                })?;
            }
            let sessions = extras.sessions.runs();
            must(
                sessions
                    .iter()
                    .all(|run| node.depth <= run.from && run.to <= node.end()),
                || format!("edge {at} has sessions outside its blocks"),
            )?;
            must(
                extras
                    .source_uses
                    .as_slice()
                    .iter()
                    .all(|range| node.depth <= range.from && range.to <= node.end()),
                || format!("edge {at} knows uses of blocks that it does not have"),
            )?;
        }
        self.check_dead(at, node, totals)?;
        totals.holes += u64::from(holes);
        totals.indexed += u64::from(node.num_present(node.depth, node.end(), block_size));
        totals.approximate += u64::from(approximate);
        totals.protected +=
            u64::from(node.num_present(node.depth, self.forest.protected_end(at), block_size));
        Ok(())
    }

    fn check_dead(&self, at: NodeIndex, node: &Node, totals: &mut Totals) -> Result<()> {
        let Some(dead) = node.extras().and_then(|extras| extras.dead.as_ref()) else {
            return Ok(());
        };
        must(!dead.marks.is_empty(), || {
            format!("edge {at} knows of no dead blocks")
        })?;
        let (path_end, protected_end) = (self.forest.path_end(at), self.forest.protected_end(at));
        let runs = self
            .forest
            .sources_of(at)
            .map_or(&[][..], |known| &known.runs);
        let mut loose = 0;
        for range in dead.marks.as_slice() {
            must(range.value <= self.eviction.dead().last_mark(), || {
                format!("edge {at} has the mark {}", range.value)
            })?;
            for depth in range.from..range.to {
                let is_inside = (node.depth..node.end()).contains(&depth);
                must(
                    is_inside && node.payload(depth, self.forest.block_size()).is_present(),
                    || format!("edge {at} has marked the absent block at depth {depth}"),
                )?;
                let is_source = runs
                    .iter()
                    .any(|&(to, from, _)| (from..to).contains(&depth));
                let is_free = depth >= path_end && !is_source;
                let queued = totals.queued.get(&(range.value, depth)) == Some(&at);
                must(is_free == queued, || {
                    format!(
                        "the dead block at depth {depth} of edge {at} is queued, or is not: {queued}"
                    )
                })?;
                totals.free += u64::from(is_free);
                loose += u32::from(is_free && depth < protected_end);
            }
        }
        must(loose == dead.loose, || {
            format!(
                "edge {at} has {loose} dead blocks above sources, not {}",
                dead.loose
            )
        })?;
        totals.dead += u64::from(dead.marks.num_depths());
        totals.loose += u64::from(loose);
        Ok(())
    }
}
