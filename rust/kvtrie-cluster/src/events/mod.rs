//! Reads the KV events of `vLLM` and `SGLang` from the bytes that they publish.
//!
//! A batch is an array `[ts, events, dp_rank]`. An event is a map with `type`, or in older versions an array that
//! begins with its name. Unknown fields are skipped. A batch is read as a whole before anything of it is applied, and
//! what is read holds digests in place of tokens, salts and extra keys.

mod cursor;

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::{EventError, EventRefusal};
use crate::events::cursor::{EventCursor, EventForm, LensOfIds, RawHash, Read};
use crate::keys::{Contents, Keys};
use crate::sessions::Session;

/// Where a worker stores a block, fastest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Tier {
    /// The accelerator's memory.
    #[default]
    Device,
    /// The memory of the host.
    Host,
    /// A local disk or storage.
    Disk,
    /// Anything else.
    External,
}

impl Tier {
    /// Number of tiers.
    pub const COUNT: usize = 4;
    /// All tiers, fastest first.
    pub const ALL: [Self; Self::COUNT] = [Self::Device, Self::Host, Self::Disk, Self::External];

    fn of(medium: Option<&str>) -> Self {
        match medium {
            None | Some("GPU") => Self::Device,
            Some("CPU" | "CPU_PINNED") => Self::Host,
            Some("DISK" | "STORAGE") => Self::Disk,
            Some(_) => Self::External,
        }
    }
}

/// Why one event of a batch is left out. The others of the batch are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Refused {
    /// A group of a sliding window or of chunks: its events do not say at which positions the blocks are.
    SlidingWindow,
    /// A group of state-space layers, likewise.
    StateSpace,
    /// A group of another kind, or a second group of full attention.
    OtherGroup,
    /// Blocks whose hash covers tokens after them.
    Lookahead,
    /// A block that another machine holds.
    Remote,
    /// An event of an unknown type.
    UnknownType,
}

impl Refused {
    /// Number of reasons.
    pub const COUNT: usize = 6;
    /// All reasons.
    pub const ALL: [Self; Self::COUNT] = [
        Self::SlidingWindow,
        Self::StateSpace,
        Self::OtherGroup,
        Self::Lookahead,
        Self::Remote,
        Self::UnknownType,
    ];

    /// The reason in one word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SlidingWindow => "sliding_window",
            Self::StateSpace => "state_space",
            Self::OtherGroup => "other_group",
            Self::Lookahead => "lookahead",
            Self::Remote => "remote",
            Self::UnknownType => "unknown_type",
        }
    }

    fn of_kind(kind: &str) -> Option<Self> {
        match kind {
            "full_attention" | "mla_attention" | "sink_full_attention" => None,
            kind if kind.contains("sliding") || kind.contains("chunked") => {
                Some(Self::SlidingWindow)
            }
            kind if kind.contains("mamba") || kind.contains("state") || kind.contains("linear") => {
                Some(Self::StateSpace)
            }
            _ => Some(Self::OtherGroup),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct EventBlock {
    /// The engine's hash, spread under the key.
    pub(crate) hash: u64,
    pub(crate) contents: Contents,
}

#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) parent: Option<u64>,
    /// Of a first block: what replaces the worker's own adapter and salt.
    pub(crate) adapter: Option<Box<str>>,
    pub(crate) salt: Option<u128>,
    pub(crate) blocks: Range<usize>,
    pub(crate) tier: Tier,
    pub(crate) group: Option<u64>,
    pub(crate) session: Option<Session>,
    pub(crate) is_approximate: bool,
}

#[derive(Debug)]
pub(crate) enum Event {
    Stored(Stored),
    Removed {
        hashes: Range<usize>,
        tier: Tier,
        group: Option<u64>,
    },
    Cleared,
    Refused(Refused),
}

/// One batch of events, read and not yet applied. It holds no token and no salt.
#[derive(Debug, Default)]
pub struct EventBatch {
    pub(crate) rank: Option<u64>,
    pub(crate) events: SmallVec<[Event; 1]>,
    pub(crate) blocks: Vec<EventBlock>,
    pub(crate) removed: Vec<u64>,
    pub(crate) keys: u64,
}

impl EventBatch {
    /// Number of events, those that are left out among them.
    #[must_use]
    pub fn num_events(&self) -> usize {
        self.events.len()
    }

    /// Number of blocks that it stores.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }
}

/// The blocks that an event names, given before their tokens are read.
#[derive(Clone, Copy, Debug)]
pub struct BlocksAhead<'a>(&'a [u64]);

impl BlocksAhead<'_> {
    /// Most blocks of an event that are given: what they need stays in a processor's nearest cache until it is asked for.
    pub const MOST: usize = 64;

    pub(crate) fn hashes(&self) -> impl Iterator<Item = u64> {
        self.0.iter().copied()
    }
}

/// Reads batches for one index. It needs no lock, so several threads read at once.
#[derive(Clone, Debug)]
pub struct EventReader {
    pub(crate) keys: Arc<Keys>,
    pub(crate) block_size: usize,
    pub(crate) max_bytes: usize,
    pub(crate) moved_runs: bool,
}

/// Bytes of a conversation's id. One of another length names no conversation.
pub(crate) const SESSION_BYTES: RangeInclusive<usize> = 1..=256;

/// Names of the fields in the array form, by position.
const STORED: [&str; 12] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
];
const REMOVED: [&str; 4] = ["block_hashes", "medium", "group_idx", "locality"];

/// What was read of one event.
#[derive(Default)]
#[expect(clippy::struct_excessive_bools, reason = "fields of an event")]
struct Fields<'a> {
    /// Number of blocks of the events before.
    first: usize,
    name: Option<&'a str>,
    has_hashes: bool,
    parent: Option<u64>,
    block_size: Option<u64>,
    lora_id: Option<u64>,
    lora_name: Option<&'a str>,
    cache_salt: Option<&'a str>,
    medium: Option<&'a str>,
    group: Option<u64>,
    kind: Option<&'a str>,
    session: Option<&'a str>,
    has_window: bool,
    has_lookahead: bool,
    is_remote: bool,
    is_approximate: bool,
}

/// What is reused from event to event.
#[derive(Default)]
struct Scratch {
    hashes: SmallVec<[u64; 16]>,
    /// The tokens of one block that are beyond 32 bits, with their places in it.
    wide: Vec<(usize, u64)>,
    /// Number of token ids of the event.
    num_tokens: usize,
    /// The bytes of each block's extra keys; empty ranges where there are none.
    extra: Vec<Range<usize>>,
    kept: Vec<u8>,
}

impl EventReader {
    /// Reads one batch.
    ///
    /// # Errors
    /// An [`EventError`] that says at which byte the batch is wrong, or which limit it exceeds.
    pub fn read(&self, raw: &[u8]) -> Result<EventBatch, EventError> {
        self.read_ahead(raw, &mut |_| ())
    }

    /// The same, and tells `ahead` of the blocks of each event as soon as they are known: mostly before their tokens are
    /// read, which takes as long as memory does.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_ahead(
        &self,
        raw: &[u8],
        ahead: &mut dyn FnMut(BlocksAhead<'_>),
    ) -> Result<EventBatch, EventError> {
        if raw.len() > self.max_bytes {
            return Err(EventError::new(
                EventRefusal::Limit,
                format!(
                    "the batch has {} bytes; the limit is {}",
                    raw.len(),
                    self.max_bytes
                ),
            ));
        }
        let mut cursor = EventCursor::new(raw);
        let mut batch = EventBatch {
            keys: self.keys.check(),
            ..EventBatch::default()
        };
        let mut scratch = Scratch::default();
        let entries = cursor.array("the batch")?;
        if entries < 2 {
            return Err(cursor.wrong(format!(
                "the batch has {entries} entries; it must have 2 or more"
            )));
        }
        cursor.skip()?;
        let count = cursor.array("the events")?;
        for _ in 0..count {
            self.event(raw, &mut cursor, &mut batch, &mut scratch, ahead)?;
        }
        for at in 2..entries {
            if at == 2 {
                batch.rank = cursor.optional_uint("the data-parallel rank")?;
            } else {
                cursor.skip()?;
            }
        }
        if cursor.left() > 0 {
            return Err(cursor.wrong(format!("{} bytes too many", cursor.left())));
        }
        Ok(batch)
    }

    /// Reads one event, and appends it to those of the batch.
    fn event<'a>(
        &self,
        raw: &'a [u8],
        cursor: &mut EventCursor<'a>,
        batch: &mut EventBatch,
        scratch: &mut Scratch,
        ahead: &mut dyn FnMut(BlocksAhead<'_>),
    ) -> Read<()> {
        scratch.hashes.clear();
        scratch.num_tokens = 0;
        scratch.extra.clear();
        let fields = self.fields(cursor, batch, scratch, ahead)?;
        let Some(name) = fields.name else {
            return Err(cursor.wrong("the event has no type"));
        };
        let is_stored = matches!(name, "BlockStored" | "ApproximateBlockStored");
        if is_stored && !fields.is_remote {
            return self.stored(raw, cursor, &fields, batch, scratch);
        }
        batch.blocks.truncate(fields.first);
        let event = match name {
            _ if fields.is_remote => Event::Refused(Refused::Remote),
            "BlockRemoved" => {
                if !fields.has_hashes {
                    return Err(cursor.wrong("BlockRemoved has no block_hashes"));
                }
                let first = batch.removed.len();
                batch.removed.extend_from_slice(&scratch.hashes);
                Event::Removed {
                    hashes: first..batch.removed.len(),
                    tier: Tier::of(fields.medium),
                    group: fields.group,
                }
            }
            "AllBlocksCleared" => Event::Cleared,
            _ => Event::Refused(Refused::UnknownType),
        };
        batch.events.push(event);
        Ok(())
    }

    fn fields<'a>(
        &self,
        cursor: &mut EventCursor<'a>,
        batch: &mut EventBatch,
        scratch: &mut Scratch,
        ahead: &mut dyn FnMut(BlocksAhead<'_>),
    ) -> Read<Fields<'a>> {
        let mut fields = Fields {
            first: batch.blocks.len(),
            ..Fields::default()
        };
        match cursor.fields("an event")? {
            EventForm::Map(entries) => {
                for _ in 0..entries {
                    let name = cursor.name()?;
                    self.field(name, &mut fields, cursor, batch, scratch, ahead)?;
                }
            }
            EventForm::Array(entries) => {
                if entries == 0 {
                    return Err(cursor.wrong("the event is empty"));
                }
                self.field(b"type", &mut fields, cursor, batch, scratch, ahead)?;
                let names: &[&str] = match fields.name {
                    Some("BlockStored") => &STORED,
                    Some("BlockRemoved") => &REMOVED,
                    _ => &[],
                };
                for at in 0..entries - 1 {
                    let name = names.get(at).copied().unwrap_or_default();
                    self.field(name.as_bytes(), &mut fields, cursor, batch, scratch, ahead)?;
                }
            }
        }
        Ok(fields)
    }

    fn field<'a>(
        &self,
        name: &[u8],
        fields: &mut Fields<'a>,
        cursor: &mut EventCursor<'a>,
        batch: &mut EventBatch,
        scratch: &mut Scratch,
        ahead: &mut dyn FnMut(BlocksAhead<'_>),
    ) -> Read<()> {
        match name {
            b"type" => fields.name = Some(cursor.text("type")?),
            b"block_hashes" => {
                let count = cursor.array("block_hashes")?;
                scratch.hashes.clear();
                scratch.hashes.reserve(count);
                for _ in 0..count {
                    let hash = cursor.hash("a block hash")?;
                    scratch.hashes.push(self.hash(hash));
                }
                fields.has_hashes = true;
                ahead(BlocksAhead(&scratch.hashes[..count.min(BlocksAhead::MOST)]));
            }
            b"parent_block_hash" => {
                fields.parent = None;
                if !cursor.nil() {
                    let hash = cursor.hash("parent_block_hash")?;
                    fields.parent = Some(self.hash(hash));
                }
            }
            b"token_ids" => {
                batch.blocks.truncate(fields.first);
                self.tokens(cursor, &mut batch.blocks, scratch)?;
            }
            b"block_size" => fields.block_size = Some(cursor.uint("block_size")?),
            b"lora_id" => fields.lora_id = cursor.optional_uint("lora_id")?,
            b"lora_name" => fields.lora_name = cursor.optional_text("lora_name")?,
            b"cache_salt" => fields.cache_salt = cursor.optional_text("cache_salt")?,
            b"medium" => fields.medium = cursor.optional_text("medium")?,
            b"group_idx" => fields.group = cursor.optional_uint("group_idx")?,
            b"kv_cache_spec_kind" => fields.kind = cursor.optional_text("kv_cache_spec_kind")?,
            b"kv_cache_spec_sliding_window" => {
                fields.has_window = cursor
                    .optional_uint("kv_cache_spec_sliding_window")?
                    .is_some();
            }
            b"locality" => fields.is_remote = cursor.optional_text("locality")? == Some("REMOTE"),
            b"session_id" => {
                fields.session = cursor.text_if()?;
                if fields.session.is_none() {
                    cursor.skip()?;
                }
            }
            b"class" => {
                let class = cursor.optional_text("class")?;
                fields.is_approximate |= class.is_some_and(|class| class != "exact");
            }
            b"classes" | b"lookahead_token_ids" if cursor.nil() => (),
            b"classes" => {
                cursor.skip()?;
                fields.is_approximate = true;
            }
            b"lookahead_token_ids" => {
                cursor.skip()?;
                fields.has_lookahead = true;
            }
            b"extra_keys" => {
                scratch.extra.clear();
                if !cursor.nil() {
                    let count = cursor.array("extra_keys")?;
                    for _ in 0..count {
                        let at = cursor.at();
                        let keys = if cursor.nil() { at..at } else { cursor.skip()? };
                        scratch.extra.push(keys);
                    }
                }
            }
            _ => {
                if std::str::from_utf8(name).is_err() {
                    return Err(cursor.wrong("a field's name is not UTF-8"));
                }
                cursor.skip()?;
            }
        }
        Ok(())
    }

    /// Reads the token ids of an event, and appends its blocks, as yet without their hashes.
    fn tokens(
        &self,
        cursor: &mut EventCursor<'_>,
        blocks: &mut Vec<EventBlock>,
        scratch: &mut Scratch,
    ) -> Read<()> {
        scratch.num_tokens = cursor.array("token_ids")?;
        let (whole, rest) = (
            scratch.num_tokens / self.block_size,
            scratch.num_tokens % self.block_size,
        );
        blocks.reserve(whole);
        let mut lens = LensOfIds::new(cursor.at(), scratch.num_tokens);
        for _ in 0..whole {
            scratch.wide.clear();
            let sums = cursor.block(self.block_size, &self.keys, &mut lens, &mut scratch.wide)?;
            let mut contents = sums.contents();
            if !scratch.wide.is_empty() {
                contents = self.keys.with_wide(contents, &scratch.wide);
            }
            blocks.push(EventBlock { hash: 0, contents });
        }
        cursor.rest(rest)
    }

    fn hash(&self, hash: RawHash<'_>) -> u64 {
        match hash {
            RawHash::Int(number) => self.keys.spread(number),
            RawHash::Bytes(bytes) => self.keys.engine_hash(bytes),
        }
    }

    /// Appends an event that stores blocks.
    fn stored(
        &self,
        raw: &[u8],
        cursor: &EventCursor<'_>,
        fields: &Fields<'_>,
        batch: &mut EventBatch,
        scratch: &mut Scratch,
    ) -> Read<()> {
        let refused = match fields.kind {
            Some(kind) => Refused::of_kind(kind),
            None => None,
        };
        let windowed = fields.has_window.then_some(Refused::SlidingWindow);
        let ahead = fields.has_lookahead.then_some(Refused::Lookahead);
        if let Some(refused) = refused.or(windowed).or(ahead) {
            batch.blocks.truncate(fields.first);
            batch.events.push(Event::Refused(refused));
            return Ok(());
        }
        if !fields.has_hashes {
            return Err(cursor.wrong("BlockStored has no block_hashes"));
        }
        let (count, size) = (scratch.hashes.len(), self.block_size);
        if let Some(theirs) = fields.block_size
            && theirs != size as u64
        {
            return Err(EventError::new(
                EventRefusal::BlockSize,
                format!("blocks of {theirs} tokens; those of the index have {size}"),
            ));
        }
        if scratch.num_tokens != count * size {
            return Err(cursor.wrong(format!(
                "{} token ids for {count} blocks of {size}",
                scratch.num_tokens
            )));
        }
        if !scratch.extra.is_empty() && scratch.extra.len() != count {
            return Err(cursor.wrong(format!(
                "extra_keys of {} blocks for {count} blocks",
                scratch.extra.len()
            )));
        }
        let mut salt = fields.cache_salt.filter(|salt| !salt.is_empty());
        let blocks = &mut batch.blocks[fields.first..];
        for (block, &hash) in blocks.iter_mut().zip(&scratch.hashes) {
            block.hash = hash;
        }
        for (at, extra) in scratch.extra.iter().enumerate() {
            if extra.is_empty() {
                continue;
            }
            scratch.kept.clear();
            let is_first = at == 0 && fields.parent.is_none();
            let extra = &raw[extra.clone()];
            let found = kept_keys(extra, fields.lora_name, is_first, &mut scratch.kept)?;
            salt = salt.or(found);
            if !scratch.kept.is_empty() {
                let contents = &mut blocks[at].contents;
                *contents = self.keys.with_extra(*contents, &scratch.kept);
            }
        }
        let adapter = match (fields.lora_name, fields.lora_id) {
            (Some(name), _) => Some(name.into()),
            (None, Some(id)) => Some(id.to_string().into()),
            (None, None) => None,
        };
        batch.events.push(Event::Stored(Stored {
            parent: fields.parent,
            adapter,
            salt: salt.map(|salt| self.keys.salt(salt.as_bytes())),
            blocks: fields.first..batch.blocks.len(),
            tier: Tier::of(fields.medium),
            group: fields.group,
            session: fields
                .session
                .filter(|id| SESSION_BYTES.contains(&id.len()))
                .map(|id| self.keys.session(id)),
            is_approximate: fields.is_approximate || fields.name == Some("ApproximateBlockStored"),
        }));
        Ok(())
    }
}

/// Sorts one block's extra keys. They have no tags: the adapter's name comes first if there is an adapter, and the only
/// text after it is the salt, which the first block of a sequence alone has. All others are appended to `kept`.
fn kept_keys<'a>(
    raw: &'a [u8],
    adapter: Option<&str>,
    is_first: bool,
    kept: &mut Vec<u8>,
) -> Read<Option<&'a str>> {
    let mut cursor = EventCursor::new(raw);
    let count = cursor.array("a block's extra keys")?;
    let mut salt = None;
    for at in 0..count {
        let start = cursor.at();
        if let Some(text) = cursor.text_if()? {
            if at == 0 && adapter == Some(text) {
                continue;
            }
            if is_first && salt.is_none() {
                salt = Some(text);
                continue;
            }
        } else {
            cursor.skip()?;
        }
        kept.extend_from_slice(&raw[start..cursor.at()]);
    }
    Ok(salt)
}
