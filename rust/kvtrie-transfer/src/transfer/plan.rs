//! Plans which tokens of a manifest a receiver loads, and which it computes.

use std::collections::BTreeMap;
use std::ops::Range;

use kvtrie_core::{Class, GroupKind, Repair, ReusePolicy, TokenSequence};

use crate::error::{Refusal, TransferError, invalid, refused};
use crate::transfer::built::LEAST_RUN;
use crate::transfer::context;
use crate::transfer::continued::{self, Further};
use crate::transfer::digests::{Digest, Tokens, TransferKey};
use crate::transfer::manifest::{BlockRun, TransferManifest};
use crate::transfer::moved::MoveSearch;
use crate::transfer::own;
use crate::transfer::pairs::{BlockPair, Piece, cut, gaps, pair_up};
use crate::transfer::tables::{Table, check_block_size};
use crate::transfer::writer::first_with_positions;

const CALL: &str = "TransferPlan::new";

/// A receiver's group of blocks for a prompt.
#[derive(Clone, Copy, Debug)]
pub struct LocalGroup<'a> {
    /// The number of the group.
    pub group: u32,
    /// Tokens per block. `None` means as in the manifest.
    pub block_size: Option<usize>,
    /// The ids. `None` means that layers that attend to all tokens have no table yet; then the plan's pairs name no
    /// local block. Where a [`Table::At`] has no id, they name none either.
    pub table: Option<Table<'a>>,
}

impl LocalGroup<'_> {
    fn kind(&self) -> Option<GroupKind> {
        self.table.and_then(|table| table.kind())
    }
}

/// Options of a transfer plan.
#[derive(Clone, Debug)]
pub struct TransferOptions<'a> {
    /// Tokens whose KV the receiver already has. Next to windows or states it starts at 0, and the receiver has what
    /// each of these groups needs to continue at its end, as a plan of an index has.
    pub cached: Range<usize>,
    /// Tokens at the end of the prompt that are always computed.
    pub keep_last: usize,
    /// What may be loaded.
    pub policy: &'a ReusePolicy,
}

impl Default for TransferOptions<'_> {
    fn default() -> Self {
        static EXACT_ONLY: ReusePolicy = ReusePolicy::EXACT_ONLY;
        Self {
            cached: 0..0,
            keep_last: 0,
            policy: &EXACT_ONLY,
        }
    }
}

/// Which tokens to load from a manifest, and which to compute.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use kvtrie_core::*;
/// # use kvtrie_transfer::*;
/// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
/// let key = TransferKey::new(&[7; 32])?;
/// let theirs = TokenSequence::new(ns.clone(), vec![1, 2, 3, 4, 5], vec![])?;
/// let blocks = Table::Full(&[BlockId(8), BlockId(3), BlockId(5)]);
/// let table = [SentGroup { group: 0, block_size: 2, table: blocks }];
/// let label = LabelRun { start: 0, end: 5, class: Class::Exact, hops: 0 };
/// let manifest = TransferManifest::new(&theirs, &table, &[label], 5, &key)?;
///
/// let mine = TokenSequence::new(ns, vec![1, 2, 3, 9, 5], vec![])?;
/// let blocks = Table::Full(&[BlockId(0), BlockId(1)]);
/// let table = [LocalGroup { group: 0, block_size: Some(4), table: Some(blocks) }];
/// let plan = TransferPlan::new(&manifest, &mine, &table, &key, &TransferOptions::default())?;
/// assert_eq!((plan.pairs()[0].remote, plan.pairs()[0].end), (BlockId(8), 2));
/// assert_eq!(plan.compute(), [(2, 5)]);
/// # Ok::<(), TransferError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TransferPlan {
    len: usize,
    pairs: Vec<BlockPair>,
    compute: Vec<(usize, usize)>,
    first_approximate: Option<usize>,
    hops: u16,
    policy: ReusePolicy,
    num_exact: usize,
    num_approximate: usize,
}

impl TransferPlan {
    /// Plans what to load.
    ///
    /// Every group is planned on its own; only tokens that all groups have are loaded. A token is
    ///
    /// - exact, if its run is exact, and the tokens before the run and those of its blocks up to here equal the
    ///   prompt's;
    /// - approximate with the run's hops, if the same holds for an approximate run;
    /// - approximate with one more hop, if it is in consecutive blocks whose tokens the prompt has elsewhere: at least
    ///   [`min_run`](ReusePolicy::min_run) tokens (16) at one distance, from left to right. The limits of the policy on
    ///   the context of such runs are applied to what is loaded or cached of the sender's tokens before them. With such
    ///   a limit and more than one group, there are none of these, nor if an item of the prompt says how many positions
    ///   it takes.
    ///
    /// Approximate tokens are loaded only if the policy allows them and that many hops, forbids no kinds (a manifest
    /// has none), and its [`max_approximate_share`](ReusePolicy::max_approximate_share) is not exceeded. Those that the
    /// sender has as approximate must have been built under a [policy](TransferManifest::policy) that is at least as
    /// strict.
    /// `partial_blocks` has no effect.
    ///
    /// Next to groups with windows or states, only exact tokens are loaded, whatever the policy: those before the
    /// deepest position at which all groups can continue (rule G2), each window's blocks that reach into its window
    /// there, and each state there.
    ///
    /// # Errors
    /// - [`TransferRefused`](crate::TransferError::Refused): [`Digest`](Refusal::Digest), then
    ///   [`Namespace`](Refusal::Namespace), then [`Groups`](Refusal::Groups).
    /// - [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument): a policy beyond its limits, a cached range
    ///   beyond the prompt, or after position 0 next to windows or states, or that ends where a group can have no
    ///   state, a prompt of 2³² tokens or more, groups that do not ascend, or a table that is too short for the prompt
    ///   or has an id twice.
    ///
    /// # Complexity
    /// O(tokens) per group and O(runs · items), and O(runs · log runs) per group with windows or states. If the policy
    /// allows approximate KV, also O(u · (64 + `block_size`)) for the `u` uncovered tokens of each group.
    pub fn new(
        manifest: &TransferManifest,
        seq: &TokenSequence,
        local: &[LocalGroup<'_>],
        key: &TransferKey,
        options: &TransferOptions<'_>,
    ) -> Result<Self, TransferError> {
        let policy = options.policy;
        policy.check(LEAST_RUN, CALL)?;
        let len = seq.len();
        let is_continued = local.iter().any(|group| group.kind().is_some());
        let cached = checked_cached(&options.cached, len, is_continued)?;
        manifest.verify(key, CALL)?;
        manifest.is_of(seq.namespace(), key, CALL)?;
        check_groups(manifest, local)?;
        let mut tables = Vec::with_capacity(local.len());
        for (group, (_, theirs)) in local.iter().zip(manifest.groups()) {
            let block_size = group.block_size.unwrap_or(theirs);
            match group.table {
                Some(table) => table.check(CALL, group.group, block_size, len)?,
                None => check_block_size(CALL, group.group, block_size)?,
            }
            if group.kind() == Some(GroupKind::State) && !cached.end.is_multiple_of(block_size) {
                return Err(invalid!(
                    CALL,
                    "cached is [0, {}); group {} has states at multiples of {block_size} alone",
                    cached.end,
                    group.group
                )
                .into());
            }
            tables.push((block_size, group.table));
        }
        let until = len.saturating_sub(options.keep_last);
        let planning = Planning {
            manifest,
            seq,
            key,
            prefixes: own::prefixes(manifest, seq, key),
            wanted: wanted(&cached, until),
            cached: cached.clone(),
        };
        let exact_only = ReusePolicy::EXACT_ONLY;
        let mut pieces = planning.pieces(if is_continued { &exact_only } else { policy });
        #[expect(
            clippy::cast_precision_loss,
            reason = "a share needs no more precision"
        )]
        let is_too_much =
            num_approximate(&pieces) as f64 / len as f64 > policy.max_approximate_share;
        if is_too_much {
            pieces = planning.pieces(&exact_only);
        }
        let mut cached = cached;
        if is_continued {
            let end = planning.continue_at(&tables, until, &mut pieces);
            cached.end = cached.end.min(end);
        }
        let mut pairs = Vec::new();
        for (at, (pieces, (block_size, table))) in pieces.iter().zip(tables).enumerate() {
            let runs: Vec<BlockRun<'_>> = manifest.runs_of(at).collect();
            pair_up(pieces, &runs, block_size, table, &mut pairs);
        }
        let approximate = |pair: &&BlockPair| pair.class == Class::Approximate;
        let num_approximate = num_approximate(&pieces);
        let of_all_tokens = manifest.kinds().position(|kind| kind.is_none());
        let loaded_ranges = of_all_tokens.map(|at| &pieces[at]);
        let loaded: usize = loaded_ranges.map_or(0, |pieces| {
            pieces.iter().map(|piece| piece.end - piece.start).sum()
        });
        Ok(Self {
            len,
            compute: compute(len, &cached, until, loaded_ranges),
            first_approximate: pairs
                .iter()
                .filter(approximate)
                .map(|pair| pair.start)
                .min(),
            hops: pairs.iter().map(|pair| pair.hops).max().unwrap_or(0),
            policy: planning.kept_policy(policy, &pieces),
            num_exact: loaded - num_approximate,
            num_approximate,
            pairs,
        })
    }

    /// The pairs to load, by group and position.
    #[must_use]
    pub fn pairs(&self) -> &[BlockPair] {
        &self.pairs
    }

    /// The ranges to compute: tokens neither cached nor loaded, and the last `keep_last` tokens.
    #[must_use]
    pub fn compute(&self) -> &[(usize, usize)] {
        &self.compute
    }

    /// Position of the first approximate token that is loaded, if there is one.
    #[must_use]
    pub fn first_approximate(&self) -> Option<usize> {
        self.first_approximate
    }

    /// The most hops of the loaded KV.
    #[must_use]
    pub fn hops(&self) -> u16 {
        self.hops
    }

    /// The policy that the loaded approximate KV is built under: the one that the plan was asked for, unless its share
    /// was to be of tokens that somebody chooses, and a moved run is loaded. Then it says [`Repair::Fronts`], which is
    /// what a transfer takes, and no share if some of the loaded KV was approximate at the sender.
    #[must_use]
    pub fn policy(&self) -> &ReusePolicy {
        &self.policy
    }

    /// Number of tokens of the prompt.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the prompt has no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of tokens that are loaded and exact in every group. Next to windows and states, those that the other groups
    /// load.
    #[must_use]
    pub fn num_exact(&self) -> usize {
        self.num_exact
    }

    /// Number of tokens that are loaded and approximate in some group.
    #[must_use]
    pub fn num_approximate(&self) -> usize {
        self.num_approximate
    }
}

fn wanted(cached: &Range<usize>, until: usize) -> Vec<Range<usize>> {
    let around = if cached.is_empty() {
        [0..until, until..until]
    } else {
        [0..cached.start.min(until), cached.end.min(until)..until]
    };
    around
        .into_iter()
        .filter(|range| !range.is_empty())
        .collect()
}

/// What is cached, as [0, 0) if nothing is, wherever it would begin.
fn checked_cached(
    cached: &Range<usize>,
    len: usize,
    is_continued: bool,
) -> Result<Range<usize>, TransferError> {
    let Range { start, end } = *cached;
    if start > end || end > len {
        return Err(invalid!(
            CALL,
            "cached is [{start}, {end}); it must ascend and lie in [0, {len}], the sequence"
        )
        .into());
    }
    if len > u32::MAX as usize {
        return Err(invalid!(
            CALL,
            "the sequence has {len} tokens; the limit is {}",
            u32::MAX
        )
        .into());
    }
    if start == end {
        return Ok(0..0);
    }
    if is_continued && start > 0 {
        return Err(invalid!(
            CALL,
            "cached is [{start}, {end}); next to groups with windows or states it must start at 0"
        )
        .into());
    }
    Ok(start..end)
}

struct Planning<'a> {
    manifest: &'a TransferManifest,
    seq: &'a TokenSequence,
    key: &'a TransferKey,
    prefixes: BTreeMap<usize, Digest>,
    /// The ranges that may be loaded: ascending, disjoint, not empty.
    wanted: Vec<Range<usize>>,
    cached: Range<usize>,
}

impl Planning<'_> {
    /// The pieces of each group whose layers attend to all tokens; none of the others.
    fn pieces(&self, policy: &ReusePolicy) -> Vec<Vec<Piece>> {
        let is_full: Vec<bool> = self.manifest.kinds().map(|kind| kind.is_none()).collect();
        let pieces = |(at, &is_full): (usize, &bool)| {
            if is_full {
                self.group(at, policy)
            } else {
                Vec::new()
            }
        };
        let mut groups: Vec<Vec<Piece>> = is_full.iter().enumerate().map(pieces).collect();
        if groups.len() > 1 {
            let mut common = self.wanted.clone();
            for (pieces, _) in groups.iter().zip(&is_full).filter(|(_, is_full)| **is_full) {
                common = common_ranges(&common, pieces);
            }
            for pieces in &mut groups {
                *pieces = cut(pieces, &common);
            }
        }
        groups
    }

    /// Cuts exact pieces where all groups can continue, adds what windows and states need there, and returns the
    /// position.
    fn continue_at(
        &self,
        tables: &[(usize, Option<Table<'_>>)],
        until: usize,
        pieces: &mut [Vec<Piece>],
    ) -> usize {
        let (prompt, cached) = (Tokens::of(self.seq), self.cached.end);
        let further = |(at, kind): (usize, Option<GroupKind>)| {
            let runs: Vec<BlockRun<'_>> = self.manifest.runs_of(at).collect();
            let (size, prefixes, key) = (tables[at].0, &self.prefixes, self.key);
            let found = Further::new(kind?, size, &runs, prompt, prefixes, key, cached);
            Some((at, found))
        };
        let groups: Vec<(usize, Further)> = self
            .manifest
            .kinds()
            .enumerate()
            .filter_map(further)
            .collect();
        let full = self.manifest.kinds().position(|kind| kind.is_none());
        let loaded = full.map_or(&[][..], |at| &pieces[at]);
        let end = exact_end(loaded, cached.min(until));
        let end = continued::at_most(&groups, end);
        for pieces in &mut *pieces {
            *pieces = cut(pieces, std::slice::from_ref(&(0..end)));
        }
        for (at, group) in &groups {
            pieces[*at] = group.loaded(end);
        }
        end
    }

    fn group(&self, at: usize, policy: &ReusePolicy) -> Vec<Piece> {
        let policy = &ReusePolicy {
            approximate: policy.approximate && policy.forbid_kinds.is_empty(),
            ..policy.clone()
        };
        let runs: Vec<BlockRun<'_>> = self.manifest.runs_of(at).collect();
        let prompt = Tokens::of(self.seq);
        let is_strict = self.manifest.is_strict_enough_for(policy);
        let (prefixes, key) = (&self.prefixes, self.key);
        let own = own::in_place(&runs, prompt, prefixes, key, policy, is_strict);
        let mut pieces = cut(&own, &self.wanted);
        // What other groups lack is not kept, and known only after the search.
        let is_judged = context::is_limited(policy);
        // A manifest does not say how far its positions are shifted.
        let is_movable = first_with_positions(self.seq).is_none();
        if policy.approximate && is_movable && !(is_judged && self.manifest.groups().len() > 1) {
            let uncovered: Vec<Range<usize>> = self
                .wanted
                .iter()
                .flat_map(|range| gaps(range.clone(), &pieces))
                .collect();
            if !uncovered.is_empty() {
                let mut search = MoveSearch::new(&runs, prompt, key, policy, is_strict);
                let kept = if is_judged {
                    self.kept_in_place(&own, &pieces)
                } else {
                    Vec::new()
                };
                pieces.extend(search.cover(&uncovered, &kept, policy));
                pieces.sort_unstable_by_key(|piece| piece.start);
            }
        }
        pieces
    }

    /// The prompt's tokens whose KV is the sender's at the same position: what is loaded of it, and what is cached if
    /// the sender has it as exact.
    fn kept_in_place(&self, own: &[Piece], loaded: &[Piece]) -> Vec<Range<usize>> {
        let cached = cut(own, std::slice::from_ref(&self.cached));
        let cached = cached.iter().filter(|piece| piece.class == Class::Exact);
        let mut kept: Vec<Range<usize>> = cached
            .chain(loaded)
            .map(|piece| piece.start..piece.end)
            .collect();
        kept.sort_unstable_by_key(|range| range.start);
        kept
    }

    /// What of a policy holds for the pieces that are loaded under it (rule P19).
    fn kept_policy(&self, policy: &ReusePolicy, groups: &[Vec<Piece>]) -> ReusePolicy {
        let mut kept = policy.clone();
        if policy.repair == Repair::Fronts || policy.recompute_share <= 0.0 {
            return kept;
        }
        let (mut is_moved, mut is_sent_on) = (false, false);
        for (at, pieces) in groups.iter().enumerate() {
            let runs: Vec<BlockRun<'_>> = self.manifest.runs_of(at).collect();
            for piece in pieces {
                let run = &runs[piece.run];
                is_moved |= piece.hops > run.hops();
                is_sent_on |= run.class() == Class::Approximate;
            }
        }
        if is_moved {
            kept.repair = Repair::Fronts;
            if is_sent_on {
                // The sender's share was chosen, that of the moved runs was not: no share of one kind is of both.
                kept.recompute_share = 0.0;
            }
        }
        kept
    }
}

fn check_groups(
    manifest: &TransferManifest,
    local: &[LocalGroup<'_>],
) -> Result<(), TransferError> {
    if let Some(pair) = local.windows(2).find(|pair| pair[0].group >= pair[1].group) {
        return Err(invalid!(
            CALL,
            "group {} after group {}; groups ascend",
            pair[1].group,
            pair[0].group
        )
        .into());
    }
    let mine = local.iter().map(|group| (group.group, group.kind()));
    let theirs = manifest.heads().map(|(group, _, kind)| (group, kind));
    if mine.clone().eq(theirs.clone()) {
        return Ok(());
    }
    Err(refused(
        Refusal::Groups,
        CALL,
        format!(
            "the manifest has the groups {}, the receiver has {}",
            shown(theirs),
            shown(mine)
        ),
    ))
}

/// Groups with their kinds. The list is cut, because the manifest's writer may have made it long.
fn shown(groups: impl ExactSizeIterator<Item = (u32, Option<GroupKind>)>) -> String {
    const MOST: usize = 64;
    let more = groups.len().saturating_sub(MOST);
    let named = groups.take(MOST).map(|(group, kind)| match kind {
        None => group.to_string(),
        Some(GroupKind::State) => format!("{group} (states)"),
        Some(GroupKind::Window { window }) => format!("{group} (a window of {window})"),
    });
    let named = named.collect::<Vec<_>>().join(", ");
    if more > 0 {
        return format!("[{named}, and {more} more]");
    }
    format!("[{named}]")
}

fn num_approximate(groups: &[Vec<Piece>]) -> usize {
    let approximate = |piece: &&Piece| piece.class == Class::Approximate;
    let mut ranges: Vec<(usize, usize)> = groups
        .iter()
        .flatten()
        .filter(approximate)
        .map(|piece| (piece.start, piece.end))
        .collect();
    ranges.sort_unstable();
    let (mut count, mut at) = (0, 0);
    for (start, end) in ranges {
        let start = start.max(at);
        count += end.saturating_sub(start);
        at = at.max(end);
    }
    count
}

/// The end of the pieces without a gap from position 0 on, of which the first tokens are cached.
fn exact_end(pieces: &[Piece], cached: usize) -> usize {
    let reached = |end: usize, piece: &Piece| {
        if piece.start <= end {
            end.max(piece.end)
        } else {
            end
        }
    };
    pieces.iter().fold(cached, reached)
}

fn common_ranges(ranges: &[Range<usize>], pieces: &[Piece]) -> Vec<Range<usize>> {
    let inside = cut(pieces, ranges);
    let mut found: Vec<Range<usize>> = Vec::with_capacity(inside.len());
    for piece in inside {
        match found.last_mut() {
            Some(last) if last.end == piece.start => last.end = piece.end,
            _ => found.push(piece.start..piece.end),
        }
    }
    found
}

fn compute(
    len: usize,
    cached: &Range<usize>,
    until: usize,
    loaded: Option<&Vec<Piece>>,
) -> Vec<(usize, usize)> {
    let mut known: Vec<(usize, usize)> = loaded
        .into_iter()
        .flatten()
        .map(|piece| (piece.start, piece.end))
        .collect();
    known.push((cached.start.min(until), cached.end.min(until)));
    known.retain(|(start, end)| start < end);
    known.sort_unstable();
    let (mut found, mut at) = (Vec::new(), 0);
    for (start, end) in known {
        if at < start {
            found.push((at, start));
        }
        at = at.max(end);
    }
    if at < len {
        found.push((at, len));
    }
    found
}
