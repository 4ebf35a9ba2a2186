//! Manifests: the runs of blocks that a sender offers.

use std::fmt;

use kvtrie_core::{BlockId, Class, Error, GroupKind, Namespace, ReusePolicy, Salt, TokenSequence};

use crate::error::{Refusal, TransferError, invalid, refused};
use crate::ledger::LabelRun;
use crate::transfer::digests::{DIGEST, Digest, TransferKey};
use crate::transfer::limits::TransferLimits;
use crate::transfer::offsets::{APPROXIMATE, EXACT, GroupOffsets, LOOKAHEAD, Offsets, RunOffsets};
use crate::transfer::reader;
use crate::transfer::tables::heads;
use crate::transfer::wire::Read;
use crate::transfer::writer::{self, Sent, SentGroup};

/// What a sender offers of one request: runs of blocks with their positions, digests and labels.
///
/// The content is not verified before [`TransferPlan::new`](crate::TransferPlan::new) has checked its digests with the
/// key. Do not trust it earlier.
///
/// # Examples
/// ```
/// # use std::sync::Arc;
/// # use kvtrie_core::*;
/// # use kvtrie_transfer::*;
/// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
/// let seq = TokenSequence::new(ns, vec![1, 2, 3, 4, 5], vec![])?;
/// let key = TransferKey::new(&[7; 32])?;
/// let blocks = Table::Full(&[BlockId(8), BlockId(3), BlockId(5)]);
/// let table = [SentGroup { group: 0, block_size: 2, table: blocks }];
/// let label = LabelRun { start: 0, end: 5, class: Class::Exact, hops: 0 };
/// let manifest = TransferManifest::new(&seq, &table, &[label], 5, &key)?;
/// let again = TransferManifest::from_bytes(manifest.to_bytes(), &TransferLimits::default())?;
/// assert_eq!(again, manifest);
/// # Ok::<(), TransferError>(())
/// ```
#[derive(Clone)]
pub struct TransferManifest {
    raw: Vec<u8>,
    offsets: Offsets,
}

impl TransferManifest {
    /// Writes the manifest of a sender's sequence.
    ///
    /// A block is sent if all its tokens have KV. The last block is also sent if only its first tokens have KV, up to
    /// the end of the last label. A block is exact if all its tokens are, and has the highest of their hops. Blocks
    /// after the last label, up to `lookahead_end`, are named as look-ahead.
    ///
    /// Of a group with a [`Table::At`](crate::Table::At), a block is sent if its tokens are exact, and a state if all
    /// tokens before it are. There is no look-ahead of such a group.
    ///
    /// # Errors
    /// [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) unless the labels ascend, are disjoint, not empty
    /// and within the sequence, `lookahead_end` is not before the last, groups ascend, block sizes are not 0, and each
    /// group has blocks for all positions, each id once; or if a position is 2³² or more. In a
    /// [`Table::At`](crate::Table::At), positions are multiples of the block size and ascend, and those of states are
    /// not 0.
    ///
    /// # Complexity
    /// O(tokens + runs · items) per group.
    pub fn new(
        seq: &TokenSequence,
        groups: &[SentGroup<'_>],
        labels: &[LabelRun],
        lookahead_end: usize,
        key: &TransferKey,
    ) -> Result<Self, Error> {
        Self::built_under(None, seq, groups, labels, lookahead_end, key)
    }

    /// As [`new`](Self::new), with the policy that the approximate KV was built under. Without one, only receivers
    /// whose policy bounds nothing load it.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`InvalidArgument`](kvtrie_core::ErrorKind::InvalidArgument) if the policy allows no
    /// approximate KV or is beyond its limits.
    pub fn built_under(
        policy: Option<&ReusePolicy>,
        seq: &TokenSequence,
        groups: &[SentGroup<'_>],
        labels: &[LabelRun],
        lookahead_end: usize,
        key: &TransferKey,
    ) -> Result<Self, Error> {
        let sent = Sent {
            seq,
            groups,
            labels,
            lookahead_end,
            policy,
        };
        Self::written("TransferManifest::new", sent, key)
    }

    pub(super) fn written(
        call: &'static str,
        sent: Sent<'_>,
        key: &TransferKey,
    ) -> Result<Self, Error> {
        let raw = writer::write(call, sent, key)?;
        let offsets = reader::read(&raw, &TransferLimits::NONE).map_err(|error| {
            invalid!(
                call,
                "the manifest would not be readable: {}",
                error.message()
            )
        })?;
        Ok(Self { raw, offsets })
    }

    /// Reads a manifest from untrusted bytes.
    ///
    /// # Errors
    /// [`Malformed`](Refusal::Malformed), [`Version`](Refusal::Version) or [`Limits`](Refusal::Limits).
    ///
    /// # Complexity
    /// O(bytes + blocks · log blocks), and memory of three times the bytes.
    pub fn from_bytes(raw: &[u8], limits: &TransferLimits) -> Result<Self, TransferError> {
        let offsets = reader::read(raw, limits)?;
        Ok(Self {
            raw: raw.to_vec(),
            offsets,
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
        self.offsets.namespace.model.text(&self.raw)
    }

    /// Element type and scales of the KV.
    #[must_use]
    pub fn kv_dtype(&self) -> &str {
        self.offsets.namespace.kv_dtype.text(&self.raw)
    }

    /// How K is rotated by position.
    #[must_use]
    pub fn rope(&self) -> &str {
        self.offsets.namespace.rope.text(&self.raw)
    }

    /// Content id of the adapter, if there is one.
    #[must_use]
    pub fn adapter(&self) -> Option<&str> {
        let adapter = self.offsets.namespace.adapter?;
        Some(adapter.text(&self.raw))
    }

    /// Whether the KV is shared with everybody. A manifest contains no tenant's salt, only its digest.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.offsets.namespace.salt.is_none()
    }

    /// The policy that the approximate KV was built under, without the kinds that it forbids. `None` if it is not known
    /// or nothing is approximate.
    #[must_use]
    pub fn policy(&self) -> Option<&ReusePolicy> {
        self.offsets.policy.as_ref()
    }

    /// Whether approximate KV may be loaded under a policy that allows such KV and forbids no kinds (rule P19).
    pub(super) fn is_strict_enough_for(&self, policy: &ReusePolicy) -> bool {
        match self.policy() {
            Some(built) => built.is_at_least_as_strict_as(policy),
            None => ReusePolicy::LAXEST.is_at_least_as_strict_as(policy),
        }
    }

    /// The groups with their block sizes, ascending by group.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = (u32, usize)> {
        let groups = self.offsets.groups.iter();
        groups.map(|group| (group.group, group.block_size as usize))
    }

    /// Number, block size and kind of each group.
    pub(super) fn heads(
        &self,
    ) -> impl ExactSizeIterator<Item = (u32, usize, Option<GroupKind>)> + Clone {
        let groups = self.offsets.groups.iter();
        groups.map(|group| (group.group, group.block_size as usize, group.kind()))
    }

    /// What the groups' layers keep of the tokens before a position, in the order of [`groups`](Self::groups). `None`:
    /// KV of all of them.
    pub fn kinds(&self) -> impl ExactSizeIterator<Item = Option<GroupKind>> {
        self.offsets.groups.iter().map(|group| group.kind())
    }

    /// The runs of all groups, by group and position.
    pub fn runs(&self) -> impl Iterator<Item = BlockRun<'_>> {
        (0..self.offsets.groups.len()).flat_map(|at| self.runs_of(at))
    }

    /// The highest end of a run with KV, in tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        let computed = self.runs().filter(|run| !run.is_lookahead());
        computed.map(|run| run.end()).max().unwrap_or(0)
    }

    pub(super) fn runs_of(&self, at: usize) -> impl ExactSizeIterator<Item = BlockRun<'_>> + Clone {
        let groups = &self.offsets.groups;
        let first = at.checked_sub(1).map_or(0, |before| groups[before].end);
        let group = groups[at];
        let runs = &self.offsets.runs[first as usize..group.end as usize];
        runs.iter().map(move |offsets| BlockRun {
            raw: &self.raw,
            group,
            offsets,
        })
    }

    pub(super) fn verify(&self, key: &TransferKey, call: &'static str) -> Read<()> {
        if self.offsets.runs.is_empty() {
            return Ok(());
        }
        let heads = heads(self.heads());
        let hasher = key.runs(self.offsets.signed.of(&self.raw), heads.bytes());
        for (at, (group, _)) in self.groups().enumerate() {
            let hasher = hasher.of_group(group);
            for run in self.runs_of(at) {
                // The canary of the fuzz target `transfer`: the digest is not checked.
                let is_believed = cfg!(feature = "canary");
                if !is_believed && !hasher.verifies(run.fields(), run.digest()) {
                    return Err(refused(
                        Refusal::Digest,
                        call,
                        format!(
                            "the digest of the run [{}, {}) of group {group} is wrong: another key, or a changed manifest",
                            run.start(),
                            run.end()
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    pub(super) fn is_of(
        &self,
        namespace: &Namespace,
        key: &TransferKey,
        call: &'static str,
    ) -> Read<()> {
        let refused = |field: &str, mine: &str, theirs: &str, more: &str| {
            Err(refused(
                Refusal::Namespace,
                call,
                format!("{field} is {theirs} in the manifest and {mine} in the sequence{more}"),
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
                    format!("; they differ after character {common}")
                };
                let (mine, theirs) = (Shown(mine).to_string(), Shown(theirs).to_string());
                return refused(field, &mine, &theirs, &more);
            }
        }
        let salt = self.offsets.namespace.salt.map(|salt| salt.of(&self.raw));
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
            .field("groups", &self.offsets.groups.len())
            .field("runs", &self.offsets.runs.len())
            .field("num_tokens", &self.num_tokens())
            .finish_non_exhaustive()
    }
}

/// A name in a message. It is shortened, because the manifest's writer chose it.
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
    group: GroupOffsets,
    offsets: &'a RunOffsets,
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
        self.offsets.start as usize
    }

    /// Number of tokens. The last block may have fewer than `block_size`. 0 for a state, which is of the `start` tokens
    /// before it.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.offsets.num_tokens as usize
    }

    /// One past the position of the last token.
    #[must_use]
    pub fn end(&self) -> usize {
        self.start() + self.num_tokens()
    }

    /// The label of its KV; [`Class::Compute`] for look-ahead.
    #[must_use]
    pub fn class(&self) -> Class {
        match self.offsets.flags {
            EXACT => Class::Exact,
            APPROXIMATE => Class::Approximate,
            _ => Class::Compute,
        }
    }

    /// Hops of its KV.
    #[must_use]
    pub fn hops(&self) -> u16 {
        self.offsets.hops
    }

    /// Whether its blocks are look-ahead, which hold nothing final.
    #[must_use]
    pub fn is_lookahead(&self) -> bool {
        self.offsets.flags == LOOKAHEAD
    }

    /// The ids, in the order of their tokens.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + Clone + use<'a> {
        self.offsets.ids(self.raw, self.group.block_size)
    }

    pub(super) fn block(&self, at: usize) -> BlockId {
        let from = self.offsets.ids as usize + 4 * at;
        let id = self.raw[from..].first_chunk().copied();
        BlockId(u32::from_le_bytes(id.unwrap_or_default()))
    }

    pub(super) fn prefix(&self) -> &'a [u8] {
        let at = self.offsets.prefix as usize;
        &self.raw[at..at + DIGEST]
    }

    pub(super) fn digests(&self) -> &'a [Digest] {
        let at = self.offsets.digests as usize;
        let count = if self.is_lookahead() || self.num_tokens() == 0 {
            0
        } else {
            self.offsets.num_blocks(self.group.block_size)
        };
        self.raw[at..at + DIGEST * count].as_chunks().0
    }

    fn fields(&self) -> &'a [u8] {
        let end = self.offsets.digest as usize - usize::from(self.offsets.tail);
        &self.raw[self.offsets.fields as usize..end]
    }

    fn digest(&self) -> &'a [u8] {
        let at = self.offsets.digest as usize;
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
