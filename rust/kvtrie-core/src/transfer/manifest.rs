//! Manifests: runs of blocks with their positions, digests and labels.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Refusal, Result};
use crate::ids::BlockId;
use crate::ledger::LabelRun;
use crate::namespace::{Namespace, Salt};
use crate::plan::Class;
use crate::tokens::TokenSequence;
use crate::transfer::digests::{DIGEST, Digest, TransferKey};
use crate::transfer::limits::TransferLimits;
use crate::transfer::reader;
use crate::transfer::wire::{Part, Writer};

pub(super) const MAGIC: &str = "kvtrie.manifest";
pub(super) const VERSION: usize = 1;
pub(super) const MAX_GROUP: u32 = i32::MAX.cast_unsigned();

pub(super) const EXACT: u8 = 0;
pub(super) const APPROXIMATE: u8 = 1;
pub(super) const LOOKAHEAD: u8 = 2;

const WRITE: &str = "TransferManifest";

/// What a sender offers of one request: runs of blocks with their positions, digests and labels.
///
/// It consists of its own bytes ([`to_bytes`](Self::to_bytes)) and the offsets of their parts. Do not trust its content
/// before [`TransferPlan::new`] has checked the digests of its runs with the deployment's key.
///
/// [`TransferPlan::new`]: crate::TransferPlan::new
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use kvtrie_core::*;
/// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
/// let seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5], vec![])?;
/// let key = TransferKey::new(&[7; 32])?;
/// let table = [SentGroup { group: 0, block_size: 2, blocks: &[BlockId(8), BlockId(3), BlockId(5)] }];
/// let label = LabelRun { start: 0, end: 5, class: Class::Exact, hops: 0 };
/// let manifest = TransferManifest::new(&seq, &table, &[label], 5, &key)?;
/// let again = TransferManifest::from_bytes(manifest.to_bytes(), &TransferLimits::default())?;
/// assert_eq!(again, manifest);
/// let run = again.runs().next().unwrap();
/// assert_eq!((run.start(), run.num_tokens(), run.blocks().count()), (0, 5, 3));
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct TransferManifest {
    raw: Vec<u8>,
    head: Head,
}

/// The offsets of the parts of a manifest in its bytes.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) namespace: NamespaceHead,
    pub(super) groups: Vec<GroupHead>,
    /// The runs of all groups, one group after the other.
    pub(super) runs: Vec<RunHead>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct NamespaceHead {
    /// All of it, as it is hashed with every run.
    pub(super) whole: Part,
    pub(super) model: Part,
    pub(super) kv_dtype: Part,
    pub(super) rope: Part,
    pub(super) adapter: Option<Part>,
    pub(super) salt: Option<Part>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct GroupHead {
    pub(super) group: u32,
    pub(super) block_size: u32,
    /// One past its last run.
    pub(super) end: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RunHead {
    pub(super) start: u32,
    pub(super) num_tokens: u32,
    pub(super) ids: u32,
    pub(super) prefix: u32,
    pub(super) digests: u32,
    pub(super) digest: u32,
    /// Start of the fields that the run's digest covers.
    pub(super) fields: u32,
    pub(super) hops: u16,
    pub(super) flags: u8,
    /// Bytes between these fields and the digest.
    pub(super) tail: u8,
}

impl RunHead {
    fn num_blocks(&self, block_size: u32) -> usize {
        self.num_tokens.div_ceil(block_size) as usize
    }

    pub(super) fn ids<'a>(
        &self,
        raw: &'a [u8],
        block_size: u32,
    ) -> impl ExactSizeIterator<Item = BlockId> + Clone + use<'a> {
        let at = self.ids as usize;
        ids(&raw[at..at + 4 * self.num_blocks(block_size)])
    }
}

pub(super) fn ids(raw: &[u8]) -> impl ExactSizeIterator<Item = BlockId> + Clone + use<'_> {
    let (ids, _) = raw.as_chunks();
    ids.iter().map(|id| BlockId(u32::from_le_bytes(*id)))
}

/// The blocks of one group that a sender has, in the order of their tokens.
#[derive(Clone, Copy, Debug)]
pub struct SentGroup<'a> {
    /// The engine's number for layers that share a block table.
    pub group: u32,
    /// Tokens per block.
    pub block_size: usize,
    /// The block table, from position 0.
    pub blocks: &'a [BlockId],
}

/// The blocks of a group as runs: (first, end, flags, hops).
type Runs = Vec<(usize, usize, u8, u16)>;

impl TransferManifest {
    /// The manifest of a sender's sequence.
    ///
    /// A block is sent if all its tokens have KV. The last block is also sent if only its first tokens do, up to the
    /// end of the last label. A block is exact if all its tokens are, and has the highest of their hops.
    /// `lookahead_end` is the end of the issued positions: the blocks after those of the last label, up to there, are
    /// named as look-ahead.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) unless the labels ascend, are disjoint, not empty and
    /// within the sequence, `lookahead_end` is not before the last, groups ascend, block sizes are not 0, and each
    /// group has blocks for all positions, each id once; or if a position is 2³² or more.
    ///
    /// # Complexity
    /// O(tokens + runs · items): tokens are hashed once per group, and once more if a run starts after position 0.
    pub fn new(
        seq: &TokenSequence,
        groups: &[SentGroup<'_>],
        labels: &[LabelRun],
        lookahead_end: usize,
        key: &TransferKey,
    ) -> Result<Self> {
        let end = check(seq, groups, labels, lookahead_end)?;
        let runs: Vec<Runs> = groups
            .iter()
            .map(|group| runs_of(group.block_size, labels, end, lookahead_end))
            .collect();
        let starts = starts_of(groups, &runs);
        let prefixes = key.prefixes(seq.view(), &starts);

        let blocks: usize = groups.iter().map(|group| group.blocks.len()).sum();
        let mut out = Writer::with_capacity(256 + (4 + DIGEST) * blocks);
        out.array(4);
        out.text(MAGIC);
        out.uint(VERSION);
        let whole = out.bytes().len();
        write_namespace(&mut out, seq.namespace(), key);
        let common = out.bytes()[whole..].to_vec();
        out.array(groups.len());
        for (group, runs) in groups.iter().zip(&runs) {
            out.array(3);
            out.uint(group.group as usize);
            out.uint(group.block_size);
            out.array(runs.len());
            let hasher = key.runs(&standing_in(&common, group.group, group.block_size));
            for &(first, last, flags, hops) in runs {
                let start = first * group.block_size;
                let stop = if flags == LOOKAHEAD {
                    last * group.block_size
                } else {
                    (last * group.block_size).min(end)
                };
                out.array(8);
                let fields = out.bytes().len();
                out.uint(start);
                out.uint(stop - start);
                out.uint(flags.into());
                out.uint(hops.into());
                let ids = &group.blocks[first..last];
                out.bin_of(4 * ids.len(), ids.iter().map(|id| id.0.to_le_bytes()));
                if flags == LOOKAHEAD {
                    out.bin(&[]);
                    out.bin(&[]);
                } else {
                    // `starts` contains the start of every run.
                    let prefix = starts.binary_search(&start).map(|at| prefixes[at]);
                    out.bin(&prefix.unwrap_or_default());
                    let digests = (first..last).map(|block| {
                        let from = block * group.block_size;
                        key.block(seq.view().slice(from, (from + group.block_size).min(stop)))
                    });
                    out.bin_of(DIGEST * ids.len(), digests);
                }
                let digest = hasher.digest(&out.bytes()[fields..]);
                out.bin(&digest);
            }
        }
        let raw = out.into_bytes();
        let head = reader::read(&raw, &TransferLimits::NONE).map_err(|error| {
            Error::invalid(format!(
                "{WRITE}: the manifest would not be readable: {error}"
            ))
        })?;
        Ok(Self { raw, head })
    }

    /// Reads a manifest.
    ///
    /// The content is not trusted: only its digests, checked later, prove who wrote it.
    ///
    /// # Errors
    /// [`TransferRefused`](crate::ErrorKind::TransferRefused), [`Malformed`](Refusal::Malformed),
    /// [`Version`](Refusal::Version) or [`Limits`](Refusal::Limits).
    ///
    /// # Complexity
    /// O(bytes + blocks · log blocks), and memory of three times the bytes.
    pub fn from_bytes(raw: &[u8], limits: &TransferLimits) -> Result<Self> {
        let head = reader::read(raw, limits)?;
        Ok(Self {
            raw: raw.to_vec(),
            head,
        })
    }

    /// The manifest as bytes. Two manifests are equal if and only if their bytes are.
    #[must_use]
    pub fn to_bytes(&self) -> &[u8] {
        &self.raw
    }

    /// Model and revision.
    #[must_use]
    pub fn model(&self) -> &str {
        self.head.namespace.model.text(&self.raw)
    }

    /// Element type and scales of the KV.
    #[must_use]
    pub fn kv_dtype(&self) -> &str {
        self.head.namespace.kv_dtype.text(&self.raw)
    }

    /// How positions rotate K.
    #[must_use]
    pub fn rope(&self) -> &str {
        self.head.namespace.rope.text(&self.raw)
    }

    /// Content id of the adapter, if there is one.
    #[must_use]
    pub fn adapter(&self) -> Option<&str> {
        let adapter = self.head.namespace.adapter?;
        Some(adapter.text(&self.raw))
    }

    /// Whether the KV is shared with everybody. A manifest has no salt of a tenant, only its digest.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.head.namespace.salt.is_none()
    }

    /// The groups, ascending, with their tokens per block.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = (u32, usize)> {
        let groups = self.head.groups.iter();
        groups.map(|group| (group.group, group.block_size as usize))
    }

    /// The runs of all groups, by group and position.
    pub fn runs(&self) -> impl Iterator<Item = BlockRun<'_>> {
        (0..self.head.groups.len()).flat_map(|at| self.runs_of(at))
    }

    /// The highest end of a run with KV.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        let computed = self.runs().filter(|run| !run.is_lookahead());
        computed.map(|run| run.end()).max().unwrap_or(0)
    }

    pub(super) fn runs_of(&self, at: usize) -> impl ExactSizeIterator<Item = BlockRun<'_>> + Clone {
        let groups = &self.head.groups;
        let first = at.checked_sub(1).map_or(0, |before| groups[before].end);
        let group = groups[at];
        let runs = &self.head.runs[first as usize..group.end as usize];
        runs.iter().map(move |head| BlockRun {
            raw: &self.raw,
            group,
            head,
        })
    }

    /// Checks with the key that no run was written or changed without it.
    pub(super) fn verify(&self, key: &TransferKey, call: &str) -> Result<()> {
        let common = self.head.namespace.whole.of(&self.raw);
        for (at, (group, block_size)) in self.groups().enumerate() {
            // Nothing to check, and the context of a group may be long.
            if self.runs_of(at).len() == 0 {
                continue;
            }
            let hasher = key.runs(&standing_in(common, group, block_size));
            for run in self.runs_of(at) {
                // The canary of the target `transfer`: the digest is not checked.
                let is_believed = cfg!(feature = "canary");
                if !is_believed && !hasher.verifies(run.fields(), run.digest()) {
                    return Err(Error::refused(
                        Refusal::Digest,
                        format!(
                            "{call}: the digest of the run [{}, {}) of group {group} is wrong: another key, or a changed manifest",
                            run.start(),
                            run.end()
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that the blocks belong to this namespace.
    pub(super) fn is_of(&self, namespace: &Namespace, key: &TransferKey, call: &str) -> Result<()> {
        let refused = |field: &str, mine: &str, theirs: &str, more: &str| {
            Err(Error::refused(
                Refusal::Namespace,
                format!(
                    "{call}: {field} is {theirs} in the manifest and {mine} in the sequence{more}"
                ),
            ))
        };
        let differs = |field: &str, mine: &str, theirs: &str| refused(field, mine, theirs, "");
        let fields = [
            ("model", Some(namespace.model()), Some(self.model())),
            (
                "kv_dtype",
                Some(namespace.kv_dtype()),
                Some(self.kv_dtype()),
            ),
            ("rope", Some(namespace.rope()), Some(self.rope())),
            ("the adapter", namespace.adapter(), self.adapter()),
        ];
        for (field, mine, theirs) in fields {
            if mine != theirs {
                let (a, b) = (mine.unwrap_or_default(), theirs.unwrap_or_default());
                let alike = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
                let common = alike.count();
                let more = if common < Shown::MOST {
                    String::new()
                } else {
                    format!("; they differ behind character {common}")
                };
                let (mine, theirs) = (Shown(mine).to_string(), Shown(theirs).to_string());
                return refused(field, &mine, &theirs, &more);
            }
        }
        let salt = self.head.namespace.salt.map(|salt| salt.of(&self.raw));
        match (namespace.salt(), salt) {
            (Salt::Shared, None) => Ok(()),
            (Salt::Tenant(mine), Some(theirs)) if key.salt(mine) == *theirs => Ok(()),
            (Salt::Tenant(_), Some(_)) => differs("the salt", "another", "one"),
            (Salt::Shared, Some(_)) => differs("the salt", "shared", "a tenant's"),
            (Salt::Tenant(_), None) => differs("the salt", "a tenant's", "shared"),
        }
    }
}

impl PartialEq for TransferManifest {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for TransferManifest {}

impl fmt::Debug for TransferManifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferManifest")
            .field("model", &format_args!("{}", Shown(Some(self.model()))))
            .field("groups", &self.head.groups.len())
            .field("runs", &self.head.runs.len())
            .field("num_tokens", &self.num_tokens())
            .finish_non_exhaustive()
    }
}

/// A name in a message, shortened: the writer of the manifest chose it, and it may have 60 MiB.
struct Shown<'a>(Option<&'a str>);

impl Shown<'_> {
    const MOST: usize = 80;
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(name) = self.0 else {
            return f.write_str("none");
        };
        match name.char_indices().nth(Self::MOST) {
            None => write!(f, "{name:?}"),
            Some((end, _)) => write!(
                f,
                "{:?}... ({} characters)",
                &name[..end],
                name.chars().count()
            ),
        }
    }
}

/// Consecutive blocks of one label in a manifest.
#[derive(Clone, Copy)]
pub struct BlockRun<'a> {
    raw: &'a [u8],
    group: GroupHead,
    head: &'a RunHead,
}

impl<'a> BlockRun<'a> {
    /// The group that its blocks belong to.
    #[must_use]
    pub fn group(&self) -> u32 {
        self.group.group
    }

    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.group.block_size as usize
    }

    /// Position of the first token, a multiple of the block size.
    #[must_use]
    pub fn start(&self) -> usize {
        self.head.start as usize
    }

    /// Number of tokens. The last block has fewer than `block_size` if this is not a multiple of it.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.head.num_tokens as usize
    }

    /// One past the position of the last token.
    #[must_use]
    pub fn end(&self) -> usize {
        self.start() + self.num_tokens()
    }

    /// The label of its KV; [`Class::Compute`] for look-ahead blocks, which hold nothing final.
    #[must_use]
    pub fn class(&self) -> Class {
        match self.head.flags {
            EXACT => Class::Exact,
            APPROXIMATE => Class::Approximate,
            _ => Class::Compute,
        }
    }

    /// How often its KV was placed elsewhere.
    #[must_use]
    pub fn hops(&self) -> u16 {
        self.head.hops
    }

    /// Whether its blocks hold only positions issued ahead of the final tokens.
    #[must_use]
    pub fn is_lookahead(&self) -> bool {
        self.head.flags == LOOKAHEAD
    }

    /// The ids, in the order of their tokens.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + Clone + use<'a> {
        self.head.ids(self.raw, self.group.block_size)
    }

    pub(super) fn block(&self, at: usize) -> BlockId {
        let from = self.head.ids as usize + 4 * at;
        let id = self.raw[from..].first_chunk().copied();
        BlockId(u32::from_le_bytes(id.unwrap_or_default()))
    }

    /// The digest of the tokens before it.
    pub(super) fn prefix(&self) -> &'a [u8] {
        let at = self.head.prefix as usize;
        &self.raw[at..at + DIGEST]
    }

    pub(super) fn digests(&self) -> &'a [Digest] {
        let at = self.head.digests as usize;
        let count = if self.is_lookahead() {
            0
        } else {
            self.head.num_blocks(self.group.block_size)
        };
        self.raw[at..at + DIGEST * count].as_chunks().0
    }

    /// The bytes that its digest covers.
    fn fields(&self) -> &'a [u8] {
        let end = self.head.digest as usize - usize::from(self.head.tail);
        &self.raw[self.head.fields as usize..end]
    }

    fn digest(&self) -> &'a [u8] {
        let at = self.head.digest as usize;
        &self.raw[at..at + DIGEST]
    }
}

impl fmt::Debug for BlockRun<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockRun")
            .field("group", &self.group())
            .field("start", &self.start())
            .field("num_tokens", &self.num_tokens())
            .field("blocks", &self.blocks().map(|id| id.0).collect::<Vec<_>>())
            .field("class", &self.class())
            .field("hops", &self.hops())
            .finish_non_exhaustive()
    }
}

/// The context hashed before every run of a group.
fn standing_in(namespace: &[u8], group: u32, block_size: usize) -> Vec<u8> {
    let mut common = Writer::default();
    common.uint(VERSION);
    let mut common = common.into_bytes();
    common.extend_from_slice(namespace);
    let mut numbers = Writer::default();
    numbers.uint(group as usize);
    numbers.uint(block_size);
    common.extend_from_slice(numbers.bytes());
    common
}

fn write_namespace(out: &mut Writer, namespace: &Namespace, key: &TransferKey) {
    out.array(5);
    out.text(namespace.model());
    out.text(namespace.kv_dtype());
    out.text(namespace.rope());
    match namespace.adapter() {
        Some(adapter) => out.text(adapter),
        None => out.nil(),
    }
    match namespace.salt() {
        Salt::Tenant(salt) => out.bin(&key.salt(salt)),
        Salt::Shared => out.nil(),
    }
}

/// Checks the arguments. Returns the end of the last label.
fn check(
    seq: &TokenSequence,
    groups: &[SentGroup<'_>],
    labels: &[LabelRun],
    lookahead_end: usize,
) -> Result<usize> {
    let mut end = 0;
    for label in labels {
        if label.start < end || label.start >= label.end || label.class == Class::Compute {
            return Err(Error::invalid(format!(
                "{WRITE}: labels has [{}, {}) ({}) after {end}; labels are not empty, ascend, are disjoint, and are of computed KV",
                label.start, label.end, label.class
            )));
        }
        end = label.end;
    }
    if end > seq.len() {
        return Err(Error::invalid(format!(
            "{WRITE}: KV of {end} tokens, the sequence has {}",
            seq.len()
        )));
    }
    if lookahead_end < end || lookahead_end > u32::MAX as usize {
        return Err(Error::invalid(format!(
            "{WRITE}: lookahead_end is {lookahead_end}; it must be in [{end}, {}]",
            u32::MAX
        )));
    }
    let mut before = None;
    for group in groups {
        if group.group > MAX_GROUP || before.is_some_and(|before| before >= group.group) {
            return Err(Error::invalid(format!(
                "{WRITE}: group {}; groups ascend and are in [0, {MAX_GROUP}]",
                group.group
            )));
        }
        before = Some(group.group);
        check_table(
            WRITE,
            group.group,
            group.block_size,
            group.blocks,
            lookahead_end,
        )?;
    }
    Ok(end)
}

/// Checks that a block table has blocks for `num_tokens` tokens, each id once.
pub(super) fn check_table(
    call: &str,
    group: u32,
    block_size: usize,
    blocks: &[BlockId],
    num_tokens: usize,
) -> Result<()> {
    if block_size == 0 || block_size > u32::MAX as usize {
        return Err(Error::invalid(format!(
            "{call}: the block size of group {group} is {block_size}; it must be in [1, {}]",
            u32::MAX
        )));
    }
    let needed = num_tokens.div_ceil(block_size);
    let Some(used) = blocks.get(..needed) else {
        return Err(Error::invalid(format!(
            "{call}: group {group} has {} blocks, {num_tokens} tokens need {needed} of {block_size} tokens",
            blocks.len()
        )));
    };
    if let Some(id) = used
        .iter()
        .find(|id| u64::from(id.0) >= BlockId::MAX_BLOCKS)
    {
        return Err(Error::invalid(format!(
            "{call}: blocks has {id}; it must be in [0, {})",
            BlockId::MAX_BLOCKS
        )));
    }
    match reader::first_twice(used.iter().copied()) {
        Some(id) => Err(Error::invalid(format!(
            "{call}: block {id} comes twice in the table of group {group}"
        ))),
        None => Ok(()),
    }
}

/// The runs for blocks of one size and labels that end at `end`.
fn runs_of(block_size: usize, labels: &[LabelRun], end: usize, lookahead_end: usize) -> Runs {
    let mut runs: Runs = Vec::new();
    let mut first = 0;
    let mut block = 0;
    while block * block_size < end {
        let range = block * block_size..((block + 1) * block_size).min(end);
        while labels
            .get(first)
            .is_some_and(|label| label.end <= range.start)
        {
            first += 1;
        }
        let Some(label) = labels.get(first) else {
            break;
        };
        if label.start > range.start {
            // The next block that can be complete.
            block = label.start.div_ceil(block_size);
            continue;
        }
        // All blocks within the label; `end` may be inside the last one.
        let whole = if label.end >= end {
            end.div_ceil(block_size)
        } else {
            label.end / block_size
        };
        let (until, flags, hops) = if whole > block {
            let flags = u8::from(label.class == Class::Approximate);
            (whole, flags, if flags == EXACT { 0 } else { label.hops })
        } else if let Some((flags, hops)) = mixed(&labels[first..], &range) {
            (block + 1, flags, hops)
        } else {
            block += 1;
            continue;
        };
        match runs.last_mut() {
            Some((_, last, had_flags, had_hops))
                if (*last, *had_flags, *had_hops) == (block, flags, hops) =>
            {
                *last = until;
            }
            _ => runs.push((block, until, flags, hops)),
        }
        block = until;
    }
    let (held, issued) = (end.div_ceil(block_size), lookahead_end.div_ceil(block_size));
    if held < issued {
        runs.push((held, issued, LOOKAHEAD, 0));
    }
    runs
}

/// The label of a block that several labels cover; `None` if a token has none.
fn mixed(labels: &[LabelRun], range: &Range<usize>) -> Option<(u8, u16)> {
    let (mut at, mut flags, mut hops) = (range.start, EXACT, 0);
    for label in labels {
        if at >= range.end {
            break;
        }
        if label.start > at {
            return None;
        }
        if label.class == Class::Approximate {
            flags = APPROXIMATE;
            hops = hops.max(label.hops);
        }
        at = label.end;
    }
    (at >= range.end).then_some((flags, hops))
}

/// The starts of runs that are not look-ahead, ascending.
fn starts_of(groups: &[SentGroup<'_>], runs: &[Runs]) -> Vec<usize> {
    let mut starts: Vec<usize> = groups
        .iter()
        .zip(runs)
        .flat_map(|(group, runs)| {
            let computed = runs.iter().filter(|run| run.2 != LOOKAHEAD);
            computed.map(|run| run.0 * group.block_size)
        })
        .collect();
    starts.sort_unstable();
    starts.dedup();
    starts
}
