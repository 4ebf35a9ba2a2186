//! Bytes that claim to be a transfer manifest.
//!
//! The harness uses them as they are, or as changes of a true manifest: a fixed one, or one of groups, labels and a
//! prompt that the input chooses, with windows and states among them. The result is a refusal, or a manifest of the same
//! bytes. Every load of that has the tokens that the sender really had, exact ones after the same tokens, and every
//! group has what it needs where the prompt continues.

use std::ops::Range;
use std::sync::Arc;

use kvtrie_core::{BlockId, Class, GroupKind, Namespace, ReusePolicy, Salt, TokenSequence};
use kvtrie_transfer::{
    BlockPair, LabelRun, LocalGroup, Refusal, SentGroup, Table, TransferError, TransferKey,
    TransferLimits, TransferManifest, TransferOptions, TransferPlan,
};

use crate::bytes::Bytes;

/// The result of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was refused, when it was read or planned with.
    Refused,
    /// It was true.
    Planned,
}

/// Runs one input.
///
/// # Panics
/// When a rule is broken.
pub fn run(data: &[u8]) -> Outcome {
    let key = TransferKey::new(&[7; 32]).expect("a valid key");
    let mut bytes = Bytes::new(data);
    let choice = bytes.below(4);
    let world = if choice == 2 {
        World::drawn(&mut bytes)
    } else {
        World::fixed()
    };
    if choice == 3 {
        return world.receive(data.get(1..).unwrap_or_default(), false, &key);
    }
    let manifest = world.true_manifest(&key);
    let raw = changed(&mut bytes, manifest.to_bytes().to_vec());
    world.receive(&raw, raw == manifest.to_bytes(), &key)
}

/// The ids of a group, at the multiples of its block size.
struct Ids {
    block_size: usize,
    blocks: Vec<BlockId>,
    /// Some of them with their positions.
    at: Vec<(usize, BlockId)>,
}

impl Ids {
    /// `holes` has a bit for each of eight blocks in turn that has no id.
    fn new(
        kind: Option<GroupKind>,
        block_size: usize,
        holes: usize,
        id: impl Fn(usize) -> u32,
    ) -> Self {
        let first = usize::from(kind == Some(GroupKind::State));
        let blocks = (0..LONGEST).map(|at| BlockId(id(at))).collect();
        let is_there = |at: &usize| holes >> (at % 8) & 1 == 0;
        Self {
            block_size,
            blocks,
            at: (first..LONGEST)
                .filter(is_there)
                .map(|at| (at * block_size, BlockId(id(at))))
                .collect(),
        }
    }

    fn table(&self, kind: Option<GroupKind>) -> Table<'_> {
        kind.map_or(Table::Full(&self.blocks), |kind| Table::At(kind, &self.at))
    }

    /// The id of the block of a token, or of the state at a position.
    fn of(&self, position: usize) -> BlockId {
        self.blocks[position / self.block_size]
    }

    /// The same, if it is one of those with positions.
    fn find(&self, position: usize) -> Option<BlockId> {
        let first = position - position % self.block_size;
        let mut at = self.at.iter();
        at.find(|(at, _)| *at == first).map(|(_, id)| *id)
    }

    fn is_one_block(&self, range: Range<usize>) -> bool {
        range.start / self.block_size == (range.end - 1) / self.block_size
    }

    /// The tokens of all blocks that reach into the window before a position.
    fn reached(&self, window: usize, position: usize) -> Range<usize> {
        let first = position.saturating_sub(window - 1);
        first - first % self.block_size..position
    }
}

struct Group {
    number: u32,
    kind: Option<GroupKind>,
    /// What the receiver's layers keep.
    local_kind: Option<GroupKind>,
    theirs: Ids,
    mine: Ids,
}

impl Group {
    fn sent(&self) -> SentGroup<'_> {
        SentGroup {
            group: self.number,
            block_size: self.theirs.block_size,
            table: self.theirs.table(self.kind),
        }
    }

    fn local(&self) -> LocalGroup<'_> {
        LocalGroup {
            group: self.number,
            block_size: Some(self.mine.block_size),
            table: Some(self.mine.table(self.local_kind)),
        }
    }
}

/// The most tokens of a prompt, and blocks of a table.
const LONGEST: usize = 80;

/// What sender and receiver have.
struct World {
    theirs: Vec<u32>,
    mine: Vec<u32>,
    labels: Vec<LabelRun>,
    lookahead_end: usize,
    groups: Vec<Group>,
    cached: Range<usize>,
    keep_last: usize,
}

impl World {
    fn fixed() -> Self {
        let theirs: Vec<u32> = (0..45).map(|token| token % 11).collect();
        let mine = theirs[..9].iter().chain(&theirs[14..]).copied().collect();
        let id = |at: usize| at as u32 * 5 % 83;
        Self {
            theirs,
            mine,
            labels: vec![
                label(0, 20, Class::Exact, 0),
                label(20, 30, Class::Approximate, 1),
                label(36, 45, Class::Exact, 0),
            ],
            lookahead_end: 56,
            groups: vec![Group {
                number: 0,
                kind: None,
                local_kind: None,
                theirs: Ids::new(None, 4, 0, id),
                mine: Ids::new(None, 3, 0, id),
            }],
            cached: 0..0,
            keep_last: 0,
        }
    }

    /// Without choices: one group, all of it exact and sent, of the same prompt.
    fn drawn(bytes: &mut Bytes<'_>) -> Self {
        let groups: Vec<Group> = (0..=bytes.below(3))
            .map(|at| drawn_group(bytes, at))
            .collect();
        let len = 40 - bytes.below(40);
        let theirs: Vec<u32> = (0..len).map(|at| at as u32 % 11).collect();
        let mut labels = Vec::new();
        let mut end = 0;
        while end < len {
            let start = end + bytes.below(4);
            end = len.min(start + len - bytes.below(len));
            if start >= end {
                break;
            }
            labels.push(match bytes.below(3) {
                0 | 1 => label(start, end, Class::Exact, 0),
                _ => label(start, end, Class::Approximate, 1 + bytes.below(2) as u16),
            });
        }
        let (at, cut, added) = (bytes.below(len), bytes.below(9), bytes.below(9));
        let mut mine = theirs.clone();
        mine.splice(at..(at + cut).min(len), (0..added).map(|at| 5 + at as u32));
        let is_kinded = groups
            .iter()
            .any(|group| group.kind.or(group.local_kind).is_some());
        // What is cached ends where a group can have a state.
        let states = groups
            .iter()
            .filter(|group| group.kind == Some(GroupKind::State));
        let unit: usize = states.map(|group| group.mine.block_size).product();
        let end = bytes.below(mine.len() / unit + 1) * unit;
        let start = if is_kinded { 0 } else { bytes.below(end + 1) };
        Self {
            lookahead_end: labels.last().map_or(0, |label| label.end) + bytes.below(9),
            labels,
            keep_last: bytes.below(5),
            cached: start..end,
            groups,
            theirs,
            mine,
        }
    }

    fn is_other(&self) -> bool {
        self.groups
            .iter()
            .any(|group| group.kind != group.local_kind)
    }

    fn is_kinded(&self) -> bool {
        self.groups.iter().any(|group| group.kind.is_some())
    }

    fn true_manifest(&self, key: &TransferKey) -> TransferManifest {
        let groups: Vec<SentGroup<'_>> = self.groups.iter().map(Group::sent).collect();
        let (seq, policy) = (sequence(&self.theirs), policy());
        let end = self.lookahead_end;
        let labels = &self.labels;
        TransferManifest::built_under(Some(&policy), &seq, &groups, labels, end, key)
            .expect("a true manifest")
    }

    /// Reads bytes and plans with what they are.
    fn receive(&self, raw: &[u8], is_true: bool, key: &TransferKey) -> Outcome {
        let manifest = match TransferManifest::from_bytes(raw, &TransferLimits::default()) {
            Ok(manifest) => manifest,
            Err(error) => return refused(&error),
        };
        assert_eq!(manifest.to_bytes(), raw, "other bytes come out");
        let _ = format!("{manifest:?} {:?}", manifest.runs().collect::<Vec<_>>());
        let local: Vec<LocalGroup<'_>> = self.groups.iter().map(Group::local).collect();
        let is_other = self.is_other();
        let policy = policy();
        let options = TransferOptions {
            cached: self.cached.clone(),
            keep_last: self.keep_last,
            policy: &policy,
        };
        match TransferPlan::new(&manifest, &sequence(&self.mine), &local, key, &options) {
            Ok(plan) => {
                assert!(!is_other, "the groups keep something else");
                self.check(&plan, is_true);
                Outcome::Planned
            }
            Err(error) => {
                let expected = is_other.then_some(Refusal::Groups);
                assert!(!is_true || error.refusal() == expected, "{error:?}");
                refused(&error)
            }
        }
    }

    fn check(&self, plan: &TransferPlan, is_true: bool) {
        for pair in plan.pairs() {
            self.check_pair(pair);
        }
        for group in self.groups.iter().filter(|group| group.kind.is_none()) {
            self.check_tokens(plan, group);
        }
        if self.is_kinded() {
            self.check_continued(plan, is_true);
        }
    }

    /// Checks that a pair is of the right block, the same tokens, and no better class than at the sender.
    fn check_pair(&self, pair: &BlockPair) {
        let group = self.groups.iter().find(|group| group.number == pair.group);
        let Group {
            kind, theirs, mine, ..
        } = group.expect("a group of both");
        let source = usize::try_from(pair.start as i64 - pair.delta).expect("a position");
        let end = source + pair.end - pair.start;
        assert_eq!(
            self.mine[pair.start..pair.end],
            self.theirs[source..end],
            "wrong tokens"
        );
        assert_eq!(pair.remote, theirs.of(source), "a wrong block");
        let local = match kind {
            None => Some(mine.of(pair.start)),
            Some(_) => mine.find(pair.start),
        };
        assert_eq!(pair.local, local, "a wrong block of the receiver");
        let is_state = *kind == Some(GroupKind::State);
        assert_eq!(is_state, pair.start == pair.end, "{pair:?}");
        if !is_state {
            assert!(theirs.is_one_block(source..end), "two blocks of the sender");
            assert!(mine.is_one_block(pair.start..pair.end), "two blocks");
        }
        let mut built = if is_state { 0..end } else { source..end };
        if pair.class == Class::Exact {
            assert_eq!((pair.delta, pair.hops), (0, 0), "{pair:?}");
            assert!(built.all(|at| self.is_exact(at)), "exact of other KV");
            assert_eq!(self.mine[..end], self.theirs[..end], "other tokens before");
        } else {
            assert!(!self.is_kinded(), "approximate next to a window or state");
            let hops = |at| self.label(at).expect("computed KV").hops;
            let most = built.map(hops).max().unwrap_or(0) + u16::from(pair.delta != 0);
            assert!((most..=policy().max_hops).contains(&pair.hops), "{pair:?}");
        }
    }

    /// Checks that each token is loaded once, unless it is cached or computed, as the last ones are.
    fn check_tokens(&self, plan: &TransferPlan, group: &Group) {
        for at in 0..self.mine.len() {
            let of_group = |pair: &&BlockPair| pair.group == group.number;
            let pairs = plan.pairs().iter().filter(of_group);
            let loads = pairs.filter(|pair| (pair.start..pair.end).contains(&at));
            let is_computed = plan
                .compute()
                .iter()
                .any(|&(start, end)| (start..end).contains(&at));
            let is_known = is_computed || self.cached.contains(&at);
            assert_eq!(loads.count(), usize::from(!is_known), "token {at}");
            assert!(is_computed || at + self.keep_last < self.mine.len());
        }
    }

    /// Checks that the prompt continues at the deepest position at which all groups can, and that what they need there
    /// of windows and states is loaded, and no more.
    fn check_continued(&self, plan: &TransferPlan, is_true: bool) {
        let len = self.mine.len();
        let end = plan.compute().first().map_or(len, |range| range.0);
        let rest = [(end, len)];
        assert_eq!(plan.compute(), &rest[..usize::from(end < len)]);
        assert_eq!(plan.num_approximate(), 0);
        let until = len.saturating_sub(self.keep_last);
        let deepest = (0..=until).rev().find(|&at| self.continues(at));
        // A manifest that somebody changed may offer less.
        assert!(Some(end) <= deepest, "{end} after {deepest:?}");
        assert!(!is_true || Some(end) == deepest, "{end} before {deepest:?}");
        for group in &self.groups {
            let pairs = plan
                .pairs()
                .iter()
                .filter(|pair| pair.group == group.number);
            let loaded: Vec<usize> = pairs
                .flat_map(|pair| pair.start..pair.end.max(pair.start + 1))
                .collect();
            let needed: Vec<usize> = match group.kind {
                None => continue,
                Some(GroupKind::State) => [end]
                    .into_iter()
                    .filter(|&end| end != 0 && end != self.cached.end)
                    .collect(),
                Some(GroupKind::Window { window }) => {
                    let cached = group.mine.reached(window, self.cached.end);
                    let reached = group.mine.reached(window, end);
                    reached.filter(|at| !cached.contains(at)).collect()
                }
            };
            assert_eq!(loaded, needed, "group {}", group.number);
        }
    }

    /// Whether all groups have what they need at a position, token by token.
    fn continues(&self, end: usize) -> bool {
        let cached = self.cached.end;
        let has = |group: &Group| match group.kind {
            None => (cached.min(end)..end).all(|at| self.is_sent(group, at)),
            Some(GroupKind::State) => {
                let is_there =
                    group.theirs.find(end).is_some() && end.is_multiple_of(group.theirs.block_size);
                end == 0
                    || end == cached
                    || is_there
                        && end.is_multiple_of(group.mine.block_size)
                        && (0..end).all(|at| self.is_exact(at))
                        && self.mine.get(..end) == self.theirs.get(..end)
            }
            Some(GroupKind::Window { window }) => {
                let known = group.mine.reached(window, cached);
                let mut reached = group.mine.reached(window, end);
                reached.all(|at| known.contains(&at) || self.is_sent(group, at))
            }
        };
        // Without a layer that attends to all tokens, there is what is cached alone.
        let is_full = self.groups.iter().any(|group| group.kind.is_none());
        (is_full || end <= cached) && self.groups.iter().all(has)
    }

    /// Whether the sender's exact block of a token is the prompt's.
    fn is_sent(&self, group: &Group, at: usize) -> bool {
        let size = group.theirs.block_size;
        let first = at - at % size;
        let stop = self.labels.last().map_or(0, |label| label.end);
        let stop = stop.min(first + size);
        at < stop
            && (group.kind.is_none() || group.theirs.find(at).is_some())
            && (first..stop).all(|at| self.is_exact(at))
            && self.mine.get(..stop) == self.theirs.get(..stop)
    }

    fn is_exact(&self, at: usize) -> bool {
        self.label(at)
            .is_some_and(|label| label.class == Class::Exact)
    }

    fn label(&self, at: usize) -> Option<&LabelRun> {
        let mut labels = self.labels.iter();
        labels.find(|label| (label.start..label.end).contains(&at))
    }
}

fn label(start: usize, end: usize, class: Class, hops: u16) -> LabelRun {
    LabelRun {
        start,
        end,
        class,
        hops,
    }
}

fn drawn_group(bytes: &mut Bytes<'_>, at: usize) -> Group {
    const SIZES: [usize; 6] = [4, 1, 2, 3, 5, 6];
    let kind = match bytes.below(3) {
        0 => None,
        1 => Some(GroupKind::Window {
            window: 2 + bytes.below(9),
        }),
        _ => Some(GroupKind::State),
    };
    let local_kind = if bytes.one_in(32) { other(kind) } else { kind };
    let mut ids = |id: fn(usize) -> u32| {
        let block_size = SIZES[bytes.below(SIZES.len())];
        Ids::new(kind, block_size, bytes.below(256), id)
    };
    Group {
        number: at as u32 * 3,
        kind,
        local_kind,
        theirs: ids(|at| at as u32 * 5 % 83),
        mine: ids(|at| at as u32 * 7 % 83),
    }
}

/// Another kind of group.
fn other(kind: Option<GroupKind>) -> Option<GroupKind> {
    match kind {
        None => Some(GroupKind::Window { window: 4 }),
        Some(GroupKind::Window { window }) => Some(GroupKind::Window { window: window + 1 }),
        Some(GroupKind::State) => None,
    }
}

/// What the true manifest's approximate KV was built under, and the receiver asks for.
fn policy() -> ReusePolicy {
    ReusePolicy {
        approximate: true,
        min_run: Some(8),
        max_hops: 2,
        ..ReusePolicy::EXACT_ONLY
    }
}

fn refused(error: &TransferError) -> Outcome {
    assert!(error.refusal().is_some(), "{error:?}");
    Outcome::Refused
}

fn sequence(tokens: &[u32]) -> TokenSequence {
    let namespace = Namespace::new("m", "auto", "default", None, Salt::Shared);
    let namespace = Arc::new(namespace.expect("a valid namespace"));
    TokenSequence::new(namespace, tokens.to_vec(), Vec::new()).expect("a valid sequence")
}

/// Bytes with some of them changed, cut out or doubled.
fn changed(bytes: &mut Bytes<'_>, mut raw: Vec<u8>) -> Vec<u8> {
    while !bytes.is_empty() && !raw.is_empty() {
        bytes.disturb(&mut raw);
    }
    raw
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::random_inputs;

    #[test]
    fn the_true_manifest_is_planned_with() {
        assert_eq!(run(&[0]), Outcome::Planned);
        assert_eq!(run(&[2]), Outcome::Planned);
        assert_eq!(run(&[3]), Outcome::Refused);
    }

    #[test]
    fn random_inputs_break_no_rule() {
        for data in random_inputs() {
            run(&data);
        }
    }

    #[test]
    fn random_worlds_break_no_rule() {
        let planned = |mut data: Vec<u8>| {
            data.insert(0, 2);
            run(&data) == Outcome::Planned
        };
        let planned = random_inputs().filter(|data| planned(data.clone())).count();
        assert!(planned > 500, "{planned} plans");
    }
}
