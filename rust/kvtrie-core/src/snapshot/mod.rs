//! Writes an index as bytes and restores it: versioned, bounded, checked. `docs/snapshots.md` has the sizes.
//!
//! A snapshot contains everything except plans. Pins are dropped, and condemned blocks wait, ascending, after those
//! that waited already. The restored index gives the same results for all later calls, and has the digest of an index
//! whose plans were all released at that moment. Only values that depend on the memory layout may differ: `bytes`,
//! `nodes` and `nodes_visited` in [`Stats`](crate::Stats), and the [`Effort`](crate::Effort) after which a call stops.
//! Plans of the old index, and what sequences remember of it, are not valid for the new one.
//!
//! The checksum detects damage. It is not a signature: whoever can write the file decides what blocks are said to hold.
//!
//! # Format, versions 3 to 10
//!
//! Little-endian numbers. A header of 24 bytes: `KVTRIE\x1a\n`, the version (4), a checksum of all other bytes (CRC-32,
//! 4), the total length (8). Then sections, each once and in this order; a section is its name (4), its length (8) and
//! its content:
//!
//! | section | content |
//! |---|---|
//! | `CONF` | the configuration, the name of the pool last |
//! | `COUN` | clock, last dead mark, unknown discards, nodes visited, bytes compared |
//! | `KIND` | names of the kinds |
//! | `TREE` | indices of the trees; for each its namespace, its grades with their numbers, and its edges with all their data, parents first |
//! | `WAIT` | waiting blocks, oldest release first |
//! | `QUAR` | quarantined blocks, ascending |
//! | `WIND` | windows whose order matters, oldest first, for each table of windows |
//! | `GONE` | recent departures, oldest first |
//! | `GRPS` | in even versions alone: the groups besides group 0; of each its ids, with the block of group 0 at their place and their last use, and those that wait |
//!
//! Version 3 is written of an index without such groups, and version 4 of one with them. Both are two more if an item
//! says how many positions it takes, and four more if a grade has bounds that version 3 did not have.
//!
//! A reader refuses unknown sections, so a writer that adds anything must increase the version.
//!
//! # Hostile bytes
//!
//! Every count is checked against the remaining bytes before memory is reserved for it. Restoring takes memory of a
//! small multiple of the size, plus up to 12 bytes per block of the pool if the ids in use are spread over it, plus the
//! initial tables of windows. [`RestoreLimits::num_blocks`] bounds the pool. At the end, [`RadixIndex::check`] checks
//! the whole index.

mod bytes;
mod checks;
mod edges;
mod groups;
mod sections;
#[cfg(test)]
mod tests;

use std::fmt;

use crate::config::{Config, check_pool_id};
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::index::RadixIndex;

use bytes::{Reader, Writer};
use groups::GROUPS;
use sections::{SECTIONS, Section};

const MAGIC: [u8; 8] = *b"KVTRIE\x1a\n";
const VERSION: u32 = 3;
/// What the version is more by with the section `GRPS`, of an index with groups besides group 0.
const GROUPS_MORE: u32 = 1;
/// What the version is more by if an item says how many positions it takes.
const POSITIONS_MORE: u32 = 2;
/// What the version is more by if a grade has later bounds.
const BOUNDS_MORE: u32 = 4;
const CHECKSUM: std::ops::Range<usize> = 12..16;
const HEADER: usize = 24;
const WHOLE: &str = "header";

/// What became of the pool whose blocks a snapshot names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoredPool<'a> {
    /// The pool of this name still exists, and its blocks hold what they held when the snapshot was made.
    Kept(&'a [u8]),
    /// The KV is lost, and a new pool with this name replaces the old one. Under the old name, an older snapshot would
    /// be accepted.
    Lost(&'a [u8]),
}

/// Limits on what a snapshot may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreLimits {
    /// The largest pool for which an index is restored, in blocks.
    pub num_blocks: u64,
}

impl Default for RestoreLimits {
    fn default() -> Self {
        Self {
            num_blocks: 1 << 24,
        }
    }
}

impl RadixIndex {
    /// Writes the index as bytes, for [`restore`](Self::restore): everything except plans. Blocks that only plans kept
    /// wait for [`take_freed`](Self::take_freed).
    ///
    /// The bytes contain the prompts and salts of all tenants and the seed: keep them as secret as these.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use kvtrie_core::*;
    /// let ns = Arc::new(Namespace::new("m", "bfloat16", "default", None, Salt::Shared)?);
    /// let mut index = RadixIndex::new(Config { num_blocks: 8, block_size: 2, ..Config::seeded(0) })?;
    /// let mut seq = TokenSequence::new(ns, vec![1, 2, 3, 4], vec![])?;
    /// index.insert(&mut seq, &[BlockId(6), BlockId(0)], InsertOptions::new(4, Source::Computed))?;
    /// let mut again = RadixIndex::restore(&index.snapshot(), RestoredPool::Kept(&[0; 16]))?;
    /// assert_eq!(again.digest(), index.digest());
    /// assert_eq!(again.evict(1), index.evict(1));
    /// # Ok::<(), kvtrie_core::Error>(())
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.raw(&MAGIC);
        let contents = Contents::of(self);
        out.u32(contents.version());
        out.u32(0);
        out.u64(0);
        for section in sections(contents.has_groups) {
            out.raw(section.name.as_bytes());
            let length = out.end();
            out.u64(0);
            (section.write)(self, &mut out);
            let written = out.end() - length - size_of::<u64>();
            out.patch(length, (written as u64).to_le_bytes());
        }
        out.patch(CHECKSUM.end, (out.end() as u64).to_le_bytes());
        out.patch(CHECKSUM.start, checksum(out.bytes()).to_le_bytes());
        out.into_bytes()
    }

    /// Restores the index on which [`snapshot`](Self::snapshot) was called, without its plans, for a pool of at most
    /// 2²⁴ blocks. If the pool's KV is lost, the index is empty and has the same configuration, except the name of the
    /// pool.
    ///
    /// # Errors
    /// - [`Snapshot`](crate::ErrorKind::Snapshot) if the bytes are not a snapshot, are damaged, are of another version,
    ///   contradict themselves, exceed a limit, or name another pool than the one that is kept.
    /// - [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the name of the pool does not have 1 to 64 bytes.
    pub fn restore(bytes: &[u8], pool: RestoredPool<'_>) -> Result<Self> {
        Self::restore_within(bytes, pool, RestoreLimits::default())
            .map_err(|error| error.in_call("RadixIndex::restore"))
    }

    /// As [`restore`](Self::restore), within the given limits.
    ///
    /// # Errors
    /// As [`restore`](Self::restore).
    pub fn restore_within(
        bytes: &[u8],
        pool: RestoredPool<'_>,
        limits: RestoreLimits,
    ) -> Result<Self> {
        let (RestoredPool::Kept(pool_id) | RestoredPool::Lost(pool_id)) = pool;
        check_pool_id(pool_id, "RadixIndex::restore_within")?;
        let (told, config, contents) = read(bytes, limits)?;
        if let RestoredPool::Kept(id) = pool
            && config.pool_id != id
        {
            return Err(Error::snapshot(format_args!(
                "the snapshot speaks of the pool {}, not of {}; its block ids mean nothing there",
                Hex(&config.pool_id),
                Hex(id)
            )));
        }
        let mut index = sections::begin(config)?;
        for (section, mut content) in sections(told.has_groups).skip(1).zip(contents) {
            (section.read)(&mut index, &mut content)?;
            content.finish()?;
        }
        let found = Contents::of(&index);
        if found != told {
            return Err(Error::snapshot(format_args!(
                "what is in it makes it version {}, not {}",
                found.version(),
                told.version()
            )));
        }
        index.check().map_err(Error::snapshot)?;
        match pool {
            RestoredPool::Kept(_) => Ok(index),
            RestoredPool::Lost(new) => Self::new(Config {
                pool_id: new.to_vec(),
                ..index.config().clone()
            }),
        }
    }

    /// Reads the name of the pool from a snapshot, without restoring it.
    ///
    /// # Errors
    /// [`Snapshot`](crate::ErrorKind::Snapshot) if the bytes are not a snapshot, are damaged, or are of another
    /// version.
    ///
    /// # Complexity
    /// O(bytes), for their checksum.
    pub fn pool_of_snapshot(bytes: &[u8]) -> Result<Vec<u8>> {
        let limits = RestoreLimits {
            num_blocks: BlockId::MAX_BLOCKS,
        };
        let (_, config, _) =
            read(bytes, limits).map_err(|error| error.in_call("RadixIndex::pool_of_snapshot"))?;
        Ok(config.pool_id)
    }
}

/// What the version of a snapshot says of its contents.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Contents {
    has_groups: bool,
    has_positions: bool,
    has_later_bounds: bool,
}

impl Contents {
    fn of(index: &RadixIndex) -> Self {
        Self {
            has_groups: !index.groups().is_empty(),
            has_positions: edges::has_positions(index),
            has_later_bounds: edges::has_later_bounds(index),
        }
    }

    fn version(self) -> u32 {
        VERSION
            + GROUPS_MORE * u32::from(self.has_groups)
            + POSITIONS_MORE * u32::from(self.has_positions)
            + BOUNDS_MORE * u32::from(self.has_later_bounds)
    }

    fn of_version(version: u32) -> Option<Self> {
        let more = version.checked_sub(VERSION)?;
        let contents = Self {
            has_groups: more & GROUPS_MORE != 0,
            has_positions: more & POSITIONS_MORE != 0,
            has_later_bounds: more & BOUNDS_MORE != 0,
        };
        (contents.version() == version).then_some(contents)
    }
}

/// Reads the header and the configuration. Returns what the version says, and the sections after the first.
fn read(bytes: &[u8], limits: RestoreLimits) -> Result<(Contents, Config, Vec<Reader<'_>>)> {
    let mut header = Reader::new(bytes, WHOLE);
    let magic = header.raw(MAGIC.len().min(bytes.len()))?;
    if magic != MAGIC {
        return Err(Error::snapshot("these bytes are no snapshot of an index"));
    }
    let version = header.u32()?;
    let Some(told) = Contents::of_version(version) else {
        return Err(header.wrong(format_args!(
            "version {version}; this build reads versions {VERSION} to {}",
            VERSION + GROUPS_MORE + POSITIONS_MORE + BOUNDS_MORE
        )));
    };
    let (sum, length) = (header.u32()?, header.u64()?);
    header.must(length == bytes.len() as u64, || {
        format!("{length} bytes announced, {} there", bytes.len())
    })?;
    header.must(sum == checksum(bytes), || "the checksum does not fit")?;

    let mut rest = Reader::new(&bytes[HEADER..], WHOLE);
    let mut contents = Vec::with_capacity(SECTIONS.len() + 1);
    for section in sections(told.has_groups) {
        let name = rest.raw(section.name.len())?;
        rest.must(name == section.name.as_bytes(), || {
            format!("section {} is missing", section.name)
        })?;
        let length = rest.count(1)?;
        contents.push(Reader::new(rest.raw(length)?, section.name));
    }
    rest.finish()?;

    let mut config = contents.remove(0);
    let config = sections::read_config(&mut config, limits)?;
    Ok((told, config, contents))
}

/// The sections of an index, in order.
fn sections(has_groups: bool) -> impl Iterator<Item = &'static Section> {
    static ALL: [Section; 8] = SECTIONS;
    static LAST: Section = GROUPS;
    ALL.iter().chain(has_groups.then_some(&LAST))
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The checksum of all bytes except itself.
fn checksum(bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(&bytes[..CHECKSUM.start.min(bytes.len())]);
    sum.update(bytes.get(CHECKSUM.end..).unwrap_or_default());
    sum.finalize()
}
