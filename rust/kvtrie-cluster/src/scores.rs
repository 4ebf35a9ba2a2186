//! Asks the tree: the exact prefix of every lane in one walk, and runs of the prompt that are elsewhere.

use smallvec::SmallVec;

use crate::events::Tier;
use crate::fingerprints::Fingerprints;
use crate::keys::{Digest, Keys, plus};
use crate::lanes::{Lane, Lanes, bits};
use crate::promises::{Beginnings, Promises};
use crate::tree::{Edge, EdgeIndex, NONE, Slot, Tree};

/// What each lane holds of a prompt from its first block on.
#[derive(Debug)]
pub(crate) struct Front {
    /// Number of blocks.
    pub(crate) blocks: Vec<u32>,
    /// The slowest tier among the fastest copies of these blocks.
    pub(crate) tiers: Vec<Tier>,
}

/// Number of blocks at the front of an edge that are those of the prompt. The first is.
fn common(tree: &Tree, edge: &Edge, digests: &[Digest]) -> u32 {
    let most = u32::try_from(digests.len()).map_or(edge.len(), |len| len.min(edge.len()));
    let is = |at: u32| tree.digest(edge.slot(at)) == digests[at as usize];
    // A digest covers everything before it, so one comparison is enough where the edge is the prompt's.
    if is(most - 1) {
        return most;
    }
    let (mut equal, mut differs) = (1, most - 1);
    while equal < differs {
        let middle = equal.midpoint(differs);
        if is(middle) {
            equal = middle + 1;
        } else {
            differs = middle;
        }
    }
    equal
}

/// Walks down the path of the prompt once. Each lane leaves at its first hole.
pub(crate) fn front(tree: &Tree, asked: &Lanes, num_lanes: usize, digests: &[Digest]) -> Front {
    let mut front = Front {
        blocks: vec![0; num_lanes],
        tiers: vec![Tier::Device; num_lanes],
    };
    let mut alive: SmallVec<[u64; 8]> = SmallVec::from_slice(asked.words());
    let mut at = 0;
    while at < digests.len() && alive.iter().any(|&word| word != 0) {
        let Some(edge) = tree.head(digests[at]) else {
            break;
        };
        let edge = tree.edge(edge);
        let found = common(tree, edge, &digests[at..]);
        let before = u32::try_from(at).unwrap_or(NONE);
        for (number, word) in (0..).zip(&mut alive) {
            let full = edge.full().word(number as usize);
            for lane in bits(number, *word & !full) {
                let held = edge.at_front(lane).min(found);
                front.blocks[lane as usize] = before + held;
            }
            *word &= full;
        }
        for (lane, tier, first) in edge.slow_before(found) {
            // A lane that left earlier has fewer blocks than there are before this edge.
            let is_alive = alive
                .get((lane / u64::BITS) as usize)
                .is_some_and(|word| word >> (lane % u64::BITS) & 1 == 1);
            let held = if is_alive {
                found
            } else {
                front.blocks[lane as usize].saturating_sub(before)
            };
            if first < held {
                let slowest = &mut front.tiers[lane as usize];
                *slowest = tier.max(*slowest);
            }
        }
        at += found as usize;
        if found < edge.len() {
            break;
        }
    }
    let end = u32::try_from(at).unwrap_or(NONE);
    for (number, &word) in (0..).zip(&alive) {
        for lane in bits(number, word) {
            front.blocks[lane as usize] = end;
        }
    }
    front
}

/// Consecutive blocks of one edge that are the prompt's tokens from `token` on.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    edge: EdgeIndex,
    start: u32,
    end: u32,
    token: usize,
}

/// Where a chain of stretches ends: its last block, one past its last token, and its number.
#[derive(Clone, Copy, Debug)]
struct End {
    slot: Slot,
    token: usize,
    chain: usize,
}

/// Tokens of the prompt that a lane holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Piece {
    pub(crate) lane: Lane,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// Where moved runs are looked for.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a> {
    pub(crate) keys: &'a Keys,
    pub(crate) tree: &'a Tree,
    pub(crate) fingerprints: &'a Fingerprints,
    pub(crate) live: &'a Lanes,
}

/// The windows of a prompt.
#[derive(Clone, Copy)]
pub(crate) struct Windows<'a> {
    /// Their fingerprints, by the position of their first token.
    pub(crate) fingerprints: &'a [u64],
    /// What tells them from those of other namespaces.
    pub(crate) apart: u64,
    pub(crate) block_size: usize,
}

impl Windows<'_> {
    /// Whether the tokens from `token` on are those of a block.
    fn is_at(&self, places: &Places<'_>, token: usize, edge: &Edge, at: u32) -> bool {
        let window = self.fingerprints.get(token);
        window.is_some_and(|&window| {
            plus(window, self.apart) == places.tree.fingerprint(places.keys, edge, at)
        })
    }
}

type Chain = SmallVec<[Stretch; 1]>;

/// Consecutive blocks of the tree that are the prompt's tokens.
///
/// Blocks are found by the list of fingerprints. Of two consecutive blocks one is listed, so a block next to a listed
/// one that is not listed itself is compared with the prompt.
fn chains(places: Places<'_>, windows: Windows<'_>) -> Vec<Chain> {
    let Places {
        tree, fingerprints, ..
    } = places;
    let block_size = windows.block_size;
    let mut chains: Vec<Chain> = Vec::new();
    // By position modulo the block size: where chains end that may go on.
    let mut ends: Vec<SmallVec<[End; 2]>> = vec![SmallVec::new(); block_size];
    for token in fingerprints.possible(windows.fingerprints, windows.apart) {
        let ends = &mut ends[token % block_size];
        ends.retain(|end| end.token >= token);
        let num_before = ends.len();
        for slot in fingerprints.find(plus(windows.fingerprints[token], windows.apart)) {
            let (index, at) = tree.at(slot);
            let edge = tree.edge(index);
            let before = tree.before(slot);
            let mut found = Stretch {
                edge: index,
                start: at,
                end: at + 1,
                token,
            };
            if at + 1 < edge.len()
                && !fingerprints.lists_at(edge, at + 1)
                && windows.is_at(&places, token + block_size, edge, at + 1)
            {
                found.end += 1;
            }
            let end = End {
                slot: edge.slot(found.end - 1),
                token: token + (found.end - at) as usize * block_size,
                chain: chains.len(),
            };
            // Of two blocks after the same one, the first continues its chain.
            let goes_on = |end: &&mut End| (end.slot, end.token) == (before, token);
            if let Some(known) = ends[..num_before].iter_mut().find(goes_on) {
                let stretches = &mut chains[known.chain];
                match stretches.last_mut() {
                    Some(last) if last.edge == index && last.end == at => last.end = found.end,
                    _ => stretches.push(found),
                }
                *known = End {
                    chain: known.chain,
                    ..end
                };
                continue;
            }
            let mut stretches = SmallVec::new();
            if before != NONE {
                let (above, last) = tree.at(before);
                let first = token.checked_sub(block_size);
                if let Some(first) = first
                    && windows.is_at(&places, first, tree.edge(above), last)
                {
                    if above == index {
                        (found.start, found.token) = (last, first);
                    } else {
                        stretches.push(Stretch {
                            edge: above,
                            start: last,
                            end: last + 1,
                            token: first,
                        });
                    }
                }
            }
            stretches.push(found);
            chains.push(stretches);
            ends.push(end);
        }
    }
    chains
}

/// The runs of at least `run_blocks` whole blocks that lanes hold anywhere in the namespace, and what is promised of
/// them.
pub(crate) fn runs(
    places: Places<'_>,
    windows: Windows<'_>,
    run_blocks: usize,
    mut promises: Option<Promises<'_>>,
) -> [Vec<Piece>; 2] {
    let Places { tree, live, .. } = places;
    let block_size = windows.block_size;
    let mut held = HeldRuns::of_at_least(run_blocks * block_size);
    let mut in_scope = HeldRuns::of_at_least(1);
    for chain in &chains(places, windows) {
        let blocks: u32 = chain
            .iter()
            .map(|stretch| stretch.end - stretch.start)
            .sum();
        if (blocks as usize) < run_blocks {
            continue;
        }
        let mut known = Beginnings::new();
        for stretch in chain {
            let edge = tree.edge(stretch.edge);
            let tokens = |at: u32| stretch.token + (at - stretch.start) as usize * block_size;
            let mut add = |lane: Lane, start: u32, end: u32| {
                held.add(lane, tokens(start), tokens(end));
                if let Some(promises) = &mut promises {
                    let of = (stretch.edge, edge);
                    let runs = promises.in_scope(lane, of, (start, end), &mut known);
                    for &(start, end) in runs.as_slice() {
                        in_scope.add(lane, tokens(start), tokens(end));
                    }
                }
            };
            for lane in edge.full().iter().filter(|&lane| live.has(lane)) {
                add(lane, stretch.start, stretch.end);
            }
            for part in edge.parts().iter().filter(|part| live.has(part.key)) {
                for &(start, end) in part.runs.as_slice() {
                    let (start, end) = (start.max(stretch.start), end.min(stretch.end));
                    if start < end {
                        add(part.key, start, end);
                    }
                }
            }
        }
        held.end();
        in_scope.end();
    }
    let promised = promises.map_or_else(Vec::new, |promises| {
        let pieces = in_scope.pieces.into_iter();
        pieces
            .filter_map(|piece| promises.promised(piece))
            .collect()
    });
    [held.pieces, promised]
}

/// Joins what a lane holds of one chain, across edges.
struct HeldRuns {
    open: Vec<Piece>,
    pieces: Vec<Piece>,
    least: usize,
}

impl HeldRuns {
    fn of_at_least(least: usize) -> Self {
        Self {
            open: Vec::new(),
            pieces: Vec::new(),
            least,
        }
    }

    fn add(&mut self, lane: Lane, start: usize, end: usize) {
        match self.open.binary_search_by_key(&lane, |piece| piece.lane) {
            Ok(at) if self.open[at].end == start => self.open[at].end = end,
            Ok(at) => {
                let ended = std::mem::replace(&mut self.open[at], Piece { lane, start, end });
                self.keep(ended);
            }
            Err(at) => self.open.insert(at, Piece { lane, start, end }),
        }
    }

    fn keep(&mut self, piece: Piece) {
        if piece.end - piece.start >= self.least {
            self.pieces.push(piece);
        }
    }

    fn end(&mut self) {
        for piece in std::mem::take(&mut self.open) {
            self.keep(piece);
        }
    }
}
