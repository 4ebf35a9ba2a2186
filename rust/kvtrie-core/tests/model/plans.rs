//! Plans without a tree: finds every run on every diagonal of every cached path, and chooses by the rules.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use kvtrie_core::{Class, MovedRun, Repair, ReusePolicy, Scope};

use crate::grades::Grade;
use crate::naive::{Entry, Lease, Naive};

/// A segment with the blocks that it is copied from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) old_start: usize,
    pub(crate) class: Class,
    pub(crate) hops: u16,
    pub(crate) kinds: u64,
    pub(crate) blocks: Vec<u32>,
    pub(crate) in_place: bool,
}

pub(crate) struct Ask<'a> {
    pub(crate) namespace: usize,
    pub(crate) tokens: &'a [u32],
    pub(crate) keep_last: usize,
    pub(crate) policy: &'a ReusePolicy,
    /// The kinds that the policy forbids.
    pub(crate) forbidden: u64,
    pub(crate) min_run: usize,
    pub(crate) moved_runs: bool,
    pub(crate) session: Option<u8>,
    pub(crate) moved_end: Option<usize>,
}

impl Ask<'_> {
    fn grade(&self) -> Grade {
        Grade::of(self.policy, self.forbidden)
    }
}

/// A token of the prompt, and a place where it is cached.
#[derive(Clone, Debug)]
struct Pair {
    source: usize,
    slot: usize,
    block: u32,
    class: Class,
    hops: u16,
    kinds: u64,
}

/// The most copied segments before a moved run whose context is worked out.
const MOST_SEGMENTS: usize = 512;

/// Pairs of consecutive tokens on one cached path.
#[derive(Clone, Debug)]
struct Run {
    /// The prompt's position of the first.
    start: usize,
    pairs: Vec<Pair>,
    /// Whether the path begins with the prompt up to here.
    is_own: bool,
    /// The blocks of the path.
    path: Vec<Option<u32>>,
}

impl Run {
    fn end(&self) -> usize {
        self.start + self.pairs.len()
    }

    /// The pairs from a token on.
    fn tail(&self, at: usize) -> &[Pair] {
        &self.pairs[at - self.start..]
    }
}

#[derive(Default)]
struct Cover {
    segments: Vec<Planned>,
    moved_runs: Vec<MovedRun>,
    without_scope: u64,
}

impl Naive {
    /// The present blocks of a path, by depth.
    fn path(&self, namespace: usize, tokens: &[u32]) -> Vec<Option<&Entry>> {
        let blocks = 0..tokens.len() / self.block_size;
        let entry = |block| self.entries.get(&self.prefix(namespace, tokens, block));
        blocks.map(entry).collect()
    }

    pub(crate) fn plan(&mut self, ask: &Ask<'_>, pinned: bool) -> Lease {
        let Cover {
            mut segments,
            mut moved_runs,
            without_scope,
        } = self.segments(ask, ask.policy.approximate);
        self.plans_without_scope += without_scope;
        let of_class = |segments: &[Planned], class| -> usize {
            let of_class = segments.iter().filter(|segment| segment.class == class);
            of_class.map(|segment| segment.end - segment.start).sum()
        };
        #[expect(clippy::cast_precision_loss, reason = "some tokens")]
        let share = of_class(&segments, Class::Approximate) as f64 / ask.tokens.len().max(1) as f64;
        if share > ask.policy.max_approximate_share {
            (segments, moved_runs) = (self.segments(ask, false).segments, Vec::new());
        }
        self.clock += 1;
        let used: BTreeSet<u32> = segments
            .iter()
            .flat_map(|segment| segment.blocks.clone())
            .collect();
        for entry in self.entries.values_mut() {
            if used.contains(&entry.id) {
                (entry.last_use, entry.mark) = (self.clock, None);
            }
        }
        let blocks = |in_place: bool| {
            let these = segments
                .iter()
                .filter(move |segment| segment.in_place == in_place);
            these.flat_map(|segment| segment.blocks.clone())
        };
        let first = segments
            .iter()
            .find(|segment| segment.class == Class::Approximate);
        Lease {
            namespace: ask.namespace,
            tokens: ask.tokens.to_vec(),
            pinned,
            over: false,
            held: blocks(true).filter(|_| pinned).collect(),
            sources: blocks(false).filter(|_| pinned).collect(),
            first_approximate: first.map_or(usize::MAX, |segment| segment.start),
            grade: ask.policy.approximate.then_some(ask.grade()),
            blocks: blocks(true).collect(),
            awaits: ask.policy.repair != Repair::Fronts
                && ask.policy.recompute_share > 0.0
                && segments.iter().any(Planned::is_moved),
            used: false,
            chosen: false,
            segments,
            moved_runs,
            gone: BTreeSet::new(),
        }
    }

    /// Computes tokens that a plan would copy approximately; returns whether it is allowed (P20).
    pub(crate) fn recompute(&mut self, key: usize, ranges: &[(usize, usize)]) -> bool {
        let block_size = self.block_size;
        let lease = self.leases.get_mut(&key).unwrap();
        let ascend = ranges.iter().all(|range| range.0 <= range.1)
            && ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0)
            && ranges
                .last()
                .is_none_or(|range| range.1 <= lease.tokens.len());
        let tokens: BTreeSet<usize> = ranges.iter().flat_map(|&(start, end)| start..end).collect();
        let moved = |token: &usize| {
            let holds = |segment: &&Planned| (segment.start..segment.end).contains(token);
            lease
                .segments
                .iter()
                .find(holds)
                .is_some_and(Planned::is_moved)
        };
        if lease.used || lease.chosen || !ascend || !tokens.iter().all(moved) {
            return false;
        }
        let mut segments = Vec::new();
        for segment in &lease.segments {
            if !segment.is_moved() {
                if segment.class == Class::Compute {
                    compute_until(&mut segments, segment.end);
                } else {
                    segments.push(segment.clone());
                }
                continue;
            }
            for token in (segment.start..segment.end).filter(|token| !tokens.contains(token)) {
                let source = segment.old_start + token - segment.start;
                let block = segment.blocks[source / block_size - segment.old_start / block_size];
                match segments.last_mut() {
                    Some(last)
                        if last.end == token
                            && last.start >= segment.start
                            && last.class == segment.class =>
                    {
                        last.end += 1;
                        if last.blocks.last() != Some(&block) {
                            last.blocks.push(block);
                        }
                    }
                    _ => {
                        compute_until(&mut segments, token);
                        segments.push(Planned {
                            start: token,
                            end: token + 1,
                            old_start: source,
                            blocks: vec![block],
                            ..segment.clone()
                        });
                    }
                }
            }
            compute_until(&mut segments, segment.end);
        }
        let first = segments
            .iter()
            .find(|segment| segment.class == Class::Approximate);
        lease.first_approximate = first.map_or(usize::MAX, |segment| segment.start);
        lease.segments = segments;
        lease.chosen = true;
        true
    }

    fn segments(&self, ask: &Ask<'_>, approximate: bool) -> Cover {
        let block_size = self.block_size;
        let len = ask.tokens.len().saturating_sub(ask.keep_last);
        let own = self.path(ask.namespace, &ask.tokens[..len]);
        let exact = own
            .iter()
            .take_while(|entry| entry.is_some_and(|entry| entry.exact))
            .count();
        let may_be_in_place = |entry: &Entry| {
            let kinds = entry.tags.iter().fold(0, |all, tags| all | tags);
            entry.exact
                || approximate
                    && entry.hops <= ask.policy.max_hops
                    && kinds & ask.forbidden == 0
                    && entry.grade.is_at_least_as_strict_as(&ask.grade())
        };
        let in_place = own
            .iter()
            .take_while(|entry| entry.is_some_and(may_be_in_place))
            .count();
        let mut segments: Vec<Planned> = Vec::new();
        for (block, entry) in own[..in_place].iter().flatten().enumerate() {
            let class = if entry.exact {
                Class::Exact
            } else {
                Class::Approximate
            };
            let kinds = entry.tags.iter().fold(0, |all, tags| all | tags);
            let start = block * block_size;
            match segments.last_mut() {
                Some(last) if (last.class, last.hops) == (class, entry.hops) && block != exact => {
                    last.end += block_size;
                    last.kinds |= kinds;
                    last.blocks.push(entry.id);
                }
                _ => segments.push(Planned {
                    start,
                    end: start + block_size,
                    old_start: start,
                    class,
                    hops: entry.hops,
                    kinds,
                    blocks: vec![entry.id],
                    in_place: true,
                }),
            }
        }
        let mut at = in_place * block_size;
        if ask.policy.partial_blocks
            && let Some((entry, shared)) = self.sibling(ask, at, len)
        {
            let kinds = entry.tags[..shared].iter().fold(0, |all, tags| all | tags);
            segments.push(Planned {
                start: at,
                end: at + shared,
                old_start: at,
                class: Class::Exact,
                hops: 0,
                kinds,
                blocks: vec![entry.id],
                in_place: false,
            });
            at += shared;
        }
        let mut cover = Cover {
            segments,
            ..Cover::default()
        };
        if approximate && at < len && self.is_without_scope(ask, at) {
            cover.without_scope = 1;
        }
        if approximate || ask.policy.partial_blocks {
            let last = in_place.checked_sub(1).and_then(|block| own[block]);
            let last = last.map(|entry| (in_place * block_size - 1, entry.id));
            self.cover(ask, approximate, (at, last), len, &mut cover);
        }
        compute_until(&mut cover.segments, ask.tokens.len());
        cover
    }

    /// The exact block whose path equals the prompt's up to `at` and which shares most tokens from there on.
    fn sibling(&self, ask: &Ask<'_>, at: usize, len: usize) -> Option<(&Entry, usize)> {
        let wanted = &ask.tokens[at..len.min(at + self.block_size)];
        let shared = |tokens: &[u32]| {
            let pairs = tokens[at..].iter().zip(wanted);
            pairs.take_while(|(a, b)| a == b).count()
        };
        self.entries
            .iter()
            .filter(|((namespace, tokens), entry)| {
                *namespace == ask.namespace
                    && entry.exact
                    && tokens.len() == at + self.block_size
                    && tokens[..at] == ask.tokens[..at]
            })
            .map(|((_, tokens), entry)| (tokens, entry, shared(tokens)))
            .filter(|&(_, _, shared)| shared > 0)
            .max_by_key(|&(tokens, _, shared)| (shared, Reverse(tokens)))
            .map(|(_, entry, shared)| (entry, shared))
    }

    fn cover(
        &self,
        ask: &Ask<'_>,
        approximate: bool,
        (from, mut previous): (usize, Option<(usize, u32)>),
        len: usize,
        cover: &mut Cover,
    ) {
        let runs = self.runs(ask, approximate, len);
        let (mut at, mut pieces) = (from, Vec::new());
        let before = cover.segments.clone();
        while at < len {
            let holders = runs.iter().filter(|run| {
                let is_long = run.is_own || run.end() >= at + ask.min_run;
                run.start <= at && at < run.end() && is_long
            });
            let best = holders.min_by_key(|run| {
                let tail = run.tail(at);
                let is_in_order = run.is_own
                    || previous.is_none_or(|(position, block)| {
                        tail[0].source > position
                            && run.path[position / self.block_size] == Some(block)
                    });
                (
                    Reverse(is_in_order),
                    Reverse(run.end()),
                    tail.iter().map(|pair| pair.hops).max(),
                    run.start.abs_diff(run.pairs[0].source),
                    tail[0].slot,
                    // Of siblings in which one source continues, fewer hops win, then the lower slot.
                    tail.last().map(|pair| (pair.hops, pair.slot)),
                )
            });
            let Some(run) = best else {
                at += 1;
                continue;
            };
            let tail = run.tail(at);
            let is_allowed = run.is_own || self.may_move(ask, run, at, cover);
            if is_allowed {
                piece(
                    ask,
                    at,
                    tail,
                    ask.policy.recompute_first,
                    &mut cover.segments,
                );
                pieces.push((at, tail));
            }
            at += tail.len();
            previous = tail.last().map(|pair| (pair.source, pair.block));
        }
        // Contexts are those before the share is computed.
        let first = front(ask.policy, &pieces);
        cover.segments = before;
        for (at, pairs) in pieces {
            piece(ask, at, pairs, first, &mut cover.segments);
        }
    }

    /// Whether the policy allows the context of a moved run from a token on, which is then one of the cover's.
    fn may_move(&self, ask: &Ask<'_>, run: &Run, at: usize, cover: &mut Cover) -> bool {
        let (first, last) = (ask.policy.recompute_first, ask.policy.recompute_last);
        let Some(pair) = run.tail(at).get(first) else {
            return false;
        };
        let (start, end) = (at + first, run.end().saturating_sub(last));
        if start >= end {
            return false;
        }
        let mut moved = self.context(&cover.segments, (start, end, pair.source), &run.path);
        let mut pairs = run.pairs[start - run.start..end - run.start].iter();
        moved.same_conversation = pairs.all(|pair| {
            let mut entries = self.entries.iter();
            let found = entries.find(|(_, entry)| entry.id == pair.block);
            found.is_some_and(|((_, tokens), entry)| self.is_of_conversation(ask, tokens, entry))
        });
        let is_allowed = ask.policy.max_cuts.is_none_or(|most| moved.cuts <= most)
            && moved.lost_context <= ask.policy.max_lost_context
            && moved.new_context <= ask.policy.max_new_context;
        cover.moved_runs.extend(is_allowed.then_some(moved));
        is_allowed
    }

    /// The context of a run, token by token: of the prompt's tokens in `segments`, those that come from the run's path.
    #[expect(clippy::cast_precision_loss, reason = "some tokens")]
    fn context(
        &self,
        segments: &[Planned],
        (start, end, old_start): (usize, usize, usize),
        path: &[Option<u32>],
    ) -> MovedRun {
        let cached = segments.iter().filter(|part| !part.blocks.is_empty());
        let num_copied = cached.clone().filter(|part| !part.in_place).count();
        if num_copied > MOST_SEGMENTS {
            return MovedRun {
                start,
                end,
                old_start,
                cuts: ReusePolicy::MAX_CUTS,
                lost_context: 1.0,
                new_context: 1.0,
                same_conversation: false,
            };
        }
        let tokens = cached.flat_map(|part| {
            let first = part.old_start / self.block_size;
            (part.start..part.end).map(move |at| {
                let source = part.old_start + at - part.start;
                (at, source, part.blocks[source / self.block_size - first])
            })
        });
        let mut kept: Vec<(usize, usize)> = tokens
            .filter(|&(_, source, block)| {
                source < old_start && path[source / self.block_size] == Some(block)
            })
            .map(|(at, source, _)| (at, source))
            .collect();
        let count = kept.len();
        if count > 0 {
            kept.push((start, old_start));
        }
        let cuts = kept
            .windows(2)
            .filter(|pair| pair[1] != (pair[0].0 + 1, pair[0].1 + 1))
            .count();
        let without = |all: usize| match all {
            0 => 0.0,
            _ => (1.0 - count as f64 / all as f64).max(0.0),
        };
        MovedRun {
            start,
            end,
            old_start,
            cuts: u16::try_from(cuts).unwrap(),
            lost_context: without(old_start),
            new_context: without(start),
            same_conversation: false,
        }
    }

    /// All runs of at least `min_run` tokens, on every diagonal of every path.
    fn runs(&self, ask: &Ask<'_>, approximate: bool, len: usize) -> Vec<Run> {
        let mut runs = Vec::new();
        for (namespace, tokens) in self.entries.keys() {
            let is_longest = !self.entries.keys().any(|(space, other)| {
                space == namespace && other.len() > tokens.len() && other.starts_with(tokens)
            });
            if *namespace != ask.namespace || !is_longest {
                continue;
            }
            let path = self.path(*namespace, tokens);
            let blocks: Vec<_> = path.iter().map(|entry| Some((*entry)?.id)).collect();
            let alike = tokens
                .iter()
                .zip(ask.tokens)
                .take_while(|(a, b)| a == b)
                .count();
            for diagonal in 0..tokens.len() + len {
                // On this diagonal, the prompt's token i is compared with the path's token i + tokens.len() - diagonal.
                let mut run: Option<Run> = None;
                let first = diagonal.saturating_sub(tokens.len());
                for at in first..len.min(diagonal) {
                    let source = at + tokens.len() - diagonal;
                    let is_own = at == source && source < alike;
                    let pair = (tokens[source] == ask.tokens[at])
                        .then(|| path[source / self.block_size])
                        .flatten()
                        .filter(|entry| {
                            let moves = ask.moved_end.is_none_or(|end| at < end);
                            let block = &tokens[..(source / self.block_size + 1) * self.block_size];
                            is_own || moves && self.is_in_scope(ask, block, entry)
                        })
                        .and_then(|entry| self.pair(ask, approximate, entry, source, is_own));
                    match (pair, &mut run) {
                        (Some(pair), Some(run)) => run.pairs.push(pair),
                        (Some(pair), None) => {
                            run = Some(Run {
                                start: at,
                                pairs: vec![pair],
                                is_own,
                                path: blocks.clone(),
                            });
                        }
                        (None, _) => runs.extend(run.take()),
                    }
                }
                runs.extend(run);
            }
        }
        runs.retain(|run: &Run| run.pairs.len() >= ask.min_run);
        runs
    }

    /// The tokens of the prompt's first blocks, if a cached path begins with them.
    fn shared_prefix<'a>(&self, ask: &Ask<'a>) -> Option<&'a [u32]> {
        let len = ask.policy.shared_prefix.checked_mul(self.block_size)?;
        let shared = ask.tokens.get(..len)?;
        let mut paths = self.entries.keys();
        let is_cached = paths
            .any(|(namespace, tokens)| *namespace == ask.namespace && tokens.starts_with(shared));
        is_cached.then_some(shared)
    }

    /// Whether moved runs may come from the block whose path has these tokens (P18).
    fn is_in_scope(&self, ask: &Ask<'_>, block: &[u32], entry: &Entry) -> bool {
        ask.policy.scope == Scope::Namespace || self.is_of_conversation(ask, block, entry)
    }

    /// Whether the block whose path has these tokens belongs to the plan's conversation, whatever the scope is.
    fn is_of_conversation(&self, ask: &Ask<'_>, block: &[u32], entry: &Entry) -> bool {
        let shares = |shared: &[u32]| block.starts_with(shared) || shared.starts_with(block);
        ask.session
            .is_some_and(|session| entry.sessions.contains(&session))
            || self.shared_prefix(ask).is_some_and(shares)
    }

    /// Whether moved runs are looked for from `at` on, and nothing is in scope.
    fn is_without_scope(&self, ask: &Ask<'_>, at: usize) -> bool {
        let is_cached = self.entries.keys().any(|prefix| prefix.0 == ask.namespace);
        ask.moved_runs
            && ask.policy.max_hops > 0
            && ask.moved_end.is_none_or(|end| at < end)
            && is_cached
            && ask.policy.scope == Scope::Conversation
            && ask.session.is_none()
            && self.shared_prefix(ask).is_none()
    }

    fn pair(
        &self,
        ask: &Ask<'_>,
        approximate: bool,
        entry: &Entry,
        source: usize,
        is_own: bool,
    ) -> Option<Pair> {
        let offset = source % self.block_size;
        let (class, hops) = match (is_own, entry.exact) {
            (true, true) => (Class::Exact, 0),
            (true, false) => (Class::Approximate, entry.hops),
            (false, _) => (Class::Approximate, entry.hops + 1),
        };
        let is_allowed = approximate
            && hops <= ask.policy.max_hops
            && entry.tags[offset] & ask.forbidden == 0
            && (entry.exact || entry.grade.is_at_least_as_strict_as(&ask.grade()))
            && (is_own || ask.moved_runs);
        (class == Class::Exact || is_allowed).then(|| Pair {
            source,
            slot: entry.id as usize * self.block_size + offset,
            block: entry.id,
            class,
            hops,
            kinds: entry.tags[offset],
        })
    }

    pub(crate) fn validate(&self, key: Option<usize>, lease: &Lease) -> Vec<bool> {
        let live = key.and_then(|key| self.leases.get(&key));
        let gone = &live.unwrap_or(lease).gone;
        let is_pinned = |segment: &Planned| {
            live.is_some_and(|live| {
                let sources = !live.sources.is_empty();
                live.pinned && (segment.in_place || sources)
            })
        };
        let stayed = |segment: &Planned| segment.blocks.iter().all(|id| !gone.contains(id));
        lease
            .segments
            .iter()
            .map(|segment| segment.class == Class::Compute || is_pinned(segment) || stayed(segment))
            .collect()
    }
}

impl Planned {
    fn is_moved(&self) -> bool {
        self.class == Class::Approximate && !self.in_place
    }
}

/// The tokens that are computed at the start of each piece: the least number with which the share is reached (P7).
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "some tokens"
)]
fn front(policy: &ReusePolicy, pieces: &[(usize, &[Pair])]) -> usize {
    let approximate = |pair: &&Pair| pair.class == Class::Approximate;
    let lens = pieces
        .iter()
        .map(|(_, pairs)| pairs.iter().filter(approximate).count());
    let computed = |first: usize| lens.clone().map(|len| len.min(first)).sum::<usize>();
    let all = computed(usize::MAX);
    let wanted = (policy.recompute_share * all as f64).ceil() as usize;
    let first = match policy.repair {
        Repair::Fronts => (0..=all).find(|&first| computed(first) >= wanted),
        _ => None,
    };
    first.unwrap_or(0).max(policy.recompute_first)
}

fn piece(ask: &Ask<'_>, start: usize, pairs: &[Pair], first: usize, segments: &mut Vec<Planned>) {
    let approximate: Vec<usize> = (0..pairs.len())
        .filter(|&at| pairs[at].class == Class::Approximate)
        .collect();
    let last = ask.policy.recompute_last;
    let left_out = |at: usize| {
        approximate
            .iter()
            .position(|&other| other == at)
            .is_some_and(|place| place < first || place + last >= approximate.len())
    };
    let mut goes_on = false;
    for (at, pair) in pairs.iter().enumerate() {
        if left_out(at) {
            goes_on = false;
            continue;
        }
        let token = start + at;
        match segments.last_mut() {
            Some(piece) if goes_on && (piece.class, piece.hops) == (pair.class, pair.hops) => {
                piece.end += 1;
                piece.kinds |= pair.kinds;
                if piece.blocks.last() != Some(&pair.block) {
                    piece.blocks.push(pair.block);
                }
            }
            _ => {
                compute_until(segments, token);
                segments.push(Planned {
                    start: token,
                    end: token + 1,
                    old_start: pair.source,
                    class: pair.class,
                    hops: pair.hops,
                    kinds: pair.kinds,
                    blocks: vec![pair.block],
                    in_place: false,
                });
            }
        }
        goes_on = true;
    }
}

fn compute_until(segments: &mut Vec<Planned>, end: usize) {
    let start = segments.last().map_or(0, |segment| segment.end);
    if let Some(last) = segments
        .last_mut()
        .filter(|last| last.class == Class::Compute)
    {
        last.end = end;
    } else if start < end {
        segments.push(Planned {
            start,
            end,
            old_start: start,
            class: Class::Compute,
            hops: 0,
            kinds: 0,
            blocks: Vec::new(),
            in_place: false,
        });
    }
}
