//! Reads manifests from untrusted bytes. Everything is checked before it is stored, and every count is checked against
//! its limit and the remaining bytes before memory is reserved for it.

use kvtrie_core::{BlockId, ReusePolicy};

use crate::error::{Refusal, refused};
use crate::transfer::built;
use crate::transfer::digests::DIGEST;
use crate::transfer::limits::TransferLimits;
use crate::transfer::offsets::{
    EXACT, FULL, GroupOffsets, LEAST_WINDOW, LOOKAHEAD, MAGIC, MAX_GROUP, NamespaceOffsets,
    Offsets, RunOffsets, STATE, VERSION, block_ids, first_twice,
};
use crate::transfer::wire::{ByteRange, ByteReader, READ, Read, short};

const LEAST_GROUP: usize = 5;
const LEAST_RUN: usize = 33;

pub(super) fn read(raw: &[u8], limits: &TransferLimits) -> Read<Offsets> {
    // Offsets are stored as `u32`.
    let max_bytes = limits.max_bytes.min(u32::MAX as usize);
    within(raw.len(), max_bytes, "bytes", "max_bytes")?;
    let mut cursor = ByteReader::new(raw);
    let entries = cursor.array("the manifest")?;
    let magic = cursor.text("the name of the format")?;
    if &raw[magic] != MAGIC.as_bytes() {
        return Err(cursor.wrong("these bytes are no transfer manifest"));
    }
    let version = cursor.uint("the version")?;
    if version != VERSION as u64 {
        return Err(refused(
            Refusal::Version,
            READ,
            format!("version {version}; this build reads version {VERSION}"),
        ));
    }
    if entries != 5 {
        return Err(cursor.wrong(format!(
            "the manifest has {entries} entries; it must have 5"
        )));
    }
    let start = cursor.at();
    let namespace = read_namespace(&mut cursor)?;
    let policy = built::read(&mut cursor)?;
    let signed = ByteRange::new(&(start..cursor.at()));
    let num_groups = count(
        &mut cursor,
        "groups",
        limits.max_groups,
        "max_groups",
        LEAST_GROUP,
    )?;
    let mut reading = Reading {
        raw,
        limits,
        offsets: Offsets {
            signed,
            namespace,
            policy,
            groups: Vec::with_capacity(num_groups),
            runs: Vec::new(),
        },
        num_blocks: 0,
    };
    for _ in 0..num_groups {
        reading.group(&mut cursor)?;
    }
    if cursor.left() > 0 {
        return Err(cursor.wrong(format!("{} bytes too many", cursor.left())));
    }
    Ok(reading.offsets)
}

fn read_namespace(cursor: &mut ByteReader<'_>) -> Read<NamespaceOffsets> {
    cursor.array_of(5, "the namespace")?;
    let model = ByteRange::new(&cursor.text("the model")?);
    let kv_dtype = ByteRange::new(&cursor.text("kv_dtype")?);
    let rope = ByteRange::new(&cursor.text("rope")?);
    let adapter = if cursor.nil() {
        None
    } else {
        Some(ByteRange::new(&cursor.text("the adapter")?))
    };
    let salt = if cursor.nil() {
        None
    } else {
        Some(ByteRange::new(&cursor.bin_of(DIGEST, "the salt's digest")?))
    };
    Ok(NamespaceOffsets {
        model,
        kv_dtype,
        rope,
        adapter,
        salt,
    })
}

/// Reads which tokens the layers of a group attend to: nil for all, 0 for a state of them, else a window.
fn read_window(cursor: &mut ByteReader<'_>) -> Read<u32> {
    if cursor.nil() {
        return Ok(FULL);
    }
    let window = cursor.uint("the window")?;
    match u32::try_from(window) {
        Ok(read) if read == STATE || read as usize >= LEAST_WINDOW => Ok(read),
        _ => Err(cursor.wrong(format!(
            "window is {window}; it must be 0, a state, or in [{LEAST_WINDOW}, {}]",
            u32::MAX
        ))),
    }
}

/// Reads the length of an array whose entries take at least `least` bytes each.
fn count(
    cursor: &mut ByteReader<'_>,
    what: &str,
    limit: usize,
    name: &str,
    least: usize,
) -> Read<usize> {
    let count = cursor.array(what)?;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    within(count, limit, what, name)?;
    if count > cursor.left() / least {
        return Err(cursor.wrong(format!(
            "{count} {what} of {least} bytes or more announced, {} bytes are left",
            cursor.left()
        )));
    }
    Ok(count)
}

fn within(value: usize, limit: usize, what: &str, name: &str) -> Read<()> {
    if value <= limit {
        return Ok(());
    }
    Err(refused(
        Refusal::Limits,
        READ,
        format!("{value} {what}; the limit is {limit} ({name})"),
    ))
}

struct Reading<'a> {
    raw: &'a [u8],
    limits: &'a TransferLimits,
    offsets: Offsets,
    num_blocks: usize,
}

impl Reading<'_> {
    fn group(&mut self, cursor: &mut ByteReader<'_>) -> Read<()> {
        cursor.array_of(4, "a group")?;
        let group = cursor.uint("the group's number")?;
        let group = u32::try_from(group)
            .ok()
            .filter(|&group| group <= MAX_GROUP)
            .ok_or_else(|| cursor.wrong(format!("group {group} is not in [0, {MAX_GROUP}]")))?;
        if let Some(last) = self.offsets.groups.last()
            && group <= last.group
        {
            return Err(cursor.wrong(format!(
                "group {group} after group {}; groups ascend",
                last.group
            )));
        }
        let block_size = cursor.uint("block_size")?;
        let block_size = usize::try_from(block_size).unwrap_or(usize::MAX);
        // Block sizes, like positions, are stored as `u32`.
        let limit = self.limits.max_block_size.min(u32::MAX as usize);
        within(block_size, limit, "tokens a block", "max_block_size")?;
        if block_size == 0 {
            return Err(cursor.wrong("block_size is 0"));
        }
        let window = read_window(cursor)?;
        let known = self.offsets.runs.len();
        let left = self.limits.max_runs.saturating_sub(known);
        let num_runs = count(cursor, "runs", left, "what max_runs leaves", LEAST_RUN)?;
        self.offsets.runs.reserve_exact(num_runs);
        self.offsets.groups.push(GroupOffsets {
            group,
            block_size: short(block_size),
            window,
            end: short(known + num_runs),
        });
        let mut before = Before::default();
        for _ in 0..num_runs {
            let run = self.run(cursor, block_size, window, &mut before)?;
            self.offsets.runs.push(run);
        }
        self.unique(cursor, known)
    }

    fn run(
        &mut self,
        cursor: &mut ByteReader<'_>,
        block_size: usize,
        window: u32,
        before: &mut Before,
    ) -> Read<RunOffsets> {
        cursor.array_of(8, "a run")?;
        let fields = cursor.at();
        let start = self.position(cursor, "start")?;
        let num_tokens = self.position(cursor, "num_tokens")?;
        let end = start + num_tokens;
        self.reaches(end)?;
        let flags = cursor.uint("flags")?;
        let hops = cursor.uint("hops")?;
        let most = if flags == u64::from(EXACT) || flags == u64::from(LOOKAHEAD) {
            0
        } else {
            u64::from(ReusePolicy::MAX_HOPS)
        };
        if flags > u64::from(LOOKAHEAD) || hops > most {
            return Err(cursor.wrong(format!("{hops} hops with flags {flags}")));
        }
        if window != FULL && flags != u64::from(EXACT) {
            return Err(cursor.wrong(format!(
                "flags {flags} in a group with a window or states, whose runs are exact"
            )));
        }
        let is_state = window == STATE;
        let is_lookahead = flags == u64::from(LOOKAHEAD);
        let is_whole = num_tokens % block_size == 0;
        let is_aligned = start % block_size == 0
            && if is_state {
                start > 0 && num_tokens == 0
            } else {
                num_tokens > 0
            };
        // Of two states at one position, one would be in vain.
        let is_after = start >= before.end + usize::from(is_state && before.end > 0)
            && !before.lookahead
            && (is_lookahead || !before.partial);
        if !is_aligned || !is_after || is_lookahead && !is_whole {
            return Err(cursor.wrong(format!(
                "a run [{start}, {end}) with flags {flags} in blocks of {block_size} after {}",
                before.end
            )));
        }
        *before = Before {
            end,
            partial: before.partial || !is_whole,
            lookahead: is_lookahead,
        };
        let blocks = if is_state {
            1
        } else {
            num_tokens.div_ceil(block_size)
        };
        self.num_blocks = self.num_blocks.saturating_add(blocks);
        within(
            self.num_blocks,
            self.limits.max_blocks,
            "blocks",
            "max_blocks",
        )?;
        let ids = cursor.bin_of(blocks.saturating_mul(4), "the blocks of a run")?;
        let ids_at = ids.start;
        if let Some(id) =
            block_ids(&self.raw[ids]).find(|id| u64::from(id.0) >= BlockId::MAX_BLOCKS)
        {
            return Err(cursor.wrong(format!(
                "block id {id} is not in [0, {})",
                BlockId::MAX_BLOCKS
            )));
        }
        let of_digests = |count: usize| if is_lookahead { 0 } else { count * DIGEST };
        let prefix = cursor.bin_of(of_digests(1), "the prefix digest of a run")?;
        let digests = cursor.bin_of(
            of_digests(if is_state { 0 } else { blocks }),
            "the block digests of a run",
        )?;
        let fields_end = cursor.at();
        let digest = cursor.bin_of(DIGEST, "the digest of a run")?;
        Ok(RunOffsets {
            start: short(start),
            num_tokens: short(num_tokens),
            ids: short(ids_at),
            prefix: short(prefix.start),
            digests: short(digests.start),
            digest: short(digest.start),
            fields: short(fields),
            hops: u16::try_from(hops).unwrap_or(ReusePolicy::MAX_HOPS),
            flags: u8::try_from(flags).unwrap_or(LOOKAHEAD),
            tail: u8::try_from(digest.start - fields_end).unwrap_or(0),
        })
    }

    fn position(&self, cursor: &mut ByteReader<'_>, what: &str) -> Read<usize> {
        let value = cursor.uint(what)?;
        let value = usize::try_from(value).unwrap_or(usize::MAX);
        self.reaches(value)?;
        Ok(value)
    }

    fn reaches(&self, end: usize) -> Read<()> {
        let limit = self.limits.max_tokens.min(u32::MAX as usize);
        within(end, limit, "tokens", "max_tokens")
    }

    /// Checks that no block occurs twice in the last group, whose first run is `first`.
    fn unique(&self, cursor: &ByteReader<'_>, first: usize) -> Read<()> {
        let runs = self.offsets.runs[first..].iter();
        match first_twice(runs.flat_map(|run| run.ids(self.raw, self.block_size()))) {
            Some(id) => Err(cursor.wrong(format!("block {id} comes twice in its group"))),
            None => Ok(()),
        }
    }

    fn block_size(&self) -> u32 {
        self.offsets
            .groups
            .last()
            .map_or(1, |group| group.block_size)
    }
}

#[derive(Default)]
struct Before {
    end: usize,
    partial: bool,
    lookahead: bool,
}
