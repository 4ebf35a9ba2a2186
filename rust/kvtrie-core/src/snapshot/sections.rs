//! The sections of a snapshot, except the trees.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::RestoreLimits;
use super::bytes::{Reader, Writer};
use super::checks::new_id;
use super::edges;
use crate::config::{Config, check_pool_id};
use crate::effort::Work;
use crate::error::{Error, Result};
use crate::ids::{NO_NODE, NodeHandle};
use crate::index::RadixIndex;
use crate::moved::Windows;
use crate::span::{Kinds, MAX_KINDS};
use crate::storage::blocks::BlockState;
use crate::storage::forest::Forest;
use crate::storage::gone::{MOST, Note};

pub(super) struct Section {
    pub(super) name: &'static str,
    pub(super) write: fn(&RadixIndex, &mut Writer),
    pub(super) read: fn(&mut RadixIndex, &mut Reader<'_>) -> Result<()>,
}

/// All sections, in order. The configuration makes the index into which the others are read.
pub(super) const SECTIONS: [Section; 8] = [
    Section {
        name: "CONF",
        write: write_config,
        read: |_, _| Ok(()),
    },
    Section {
        name: "COUN",
        write: write_counters,
        read: read_counters,
    },
    Section {
        name: "KIND",
        write: write_kinds,
        read: read_kinds,
    },
    Section {
        name: "TREE",
        write: edges::write,
        read: edges::read,
    },
    Section {
        name: "WAIT",
        write: write_waiting,
        read: read_waiting,
    },
    Section {
        name: "QUAR",
        write: write_quarantined,
        read: read_quarantined,
    },
    Section {
        name: "WIND",
        write: write_windows,
        read: read_windows,
    },
    Section {
        name: "GONE",
        write: write_gone,
        read: read_gone,
    },
];

/// The highest clock or counter that is accepted. No index reaches it, and additions do not overflow.
const MAX_COUNT: u64 = 1 << 62;

fn write_config(index: &RadixIndex, out: &mut Writer) {
    let config = index.config();
    out.u64(config.num_blocks);
    out.len(config.block_size);
    out.u64(config.seed);
    out.u32(config.hash_bits);
    out.u8(u8::from(config.moved_runs) | u8::from(config.item_positions) << 1);
    out.len(config.min_run);
    out.len(config.max_candidates);
    out.len(config.pool_id.len());
    out.raw(&config.pool_id);
}

pub(super) fn read_config(from: &mut Reader<'_>, limits: RestoreLimits) -> Result<Config> {
    let num_blocks = from.u64()?;
    from.must(num_blocks <= limits.num_blocks, || {
        format!(
            "a pool of {num_blocks} blocks; the limit of this call is {}",
            limits.num_blocks
        )
    })?;
    let (block_size, seed, hash_bits) = (from.size()?, from.u64()?, from.u32()?);
    let flags = from.u8()?;
    from.must(flags <= 3, || format!("flags {flags}; at most 3 is known"))?;
    let config = Config {
        num_blocks,
        block_size,
        seed,
        hash_bits,
        moved_runs: flags & 1 != 0,
        item_positions: flags & 2 != 0,
        min_run: from.size()?,
        max_candidates: from.size()?,
        pool_id: {
            let len = from.count(1)?;
            from.raw(len)?.to_vec()
        },
        groups: Vec::new(),
    };
    check_pool_id(&config.pool_id, "RadixIndex::restore_within")
        .map_err(|error| from.wrong(format_args!("CONF: {}", error.message())))?;
    from.finish()?;
    Ok(config)
}

pub(super) fn begin(config: Config) -> Result<RadixIndex> {
    let hash_bits = config.hash_bits;
    let mut index = RadixIndex::new(config).map_err(Error::snapshot)?;
    // Whoever wrote the bytes knows the seed and could choose tokens by it. Where results do not depend on the seed,
    // another one is used.
    let secret = RandomState::new().build_hasher().finish();
    let block_size = index.config().block_size;
    *index.parts_mut().forest = Forest::new(block_size, secret, hash_bits);
    Ok(index)
}

fn write_counters(index: &RadixIndex, out: &mut Writer) {
    out.u64(index.clock());
    out.u64(index.eviction().dead().last_mark());
    out.u64(index.unknown_discards());
    out.u64(index.work().nodes_visited);
    out.u64(index.work().bytes_compared);
}

fn read_counters(index: &mut RadixIndex, from: &mut Reader<'_>) -> Result<()> {
    let mut counter = || {
        let count = from.u64()?;
        // The canary of the fuzz target `restore`: a clock that overflows.
        from.must(count <= MAX_COUNT || cfg!(feature = "canary"), || {
            format!("{count} is no count of anything")
        })?;
        Ok(count)
    };
    let parts = index.parts_mut();
    *parts.clock = counter()?;
    parts.eviction.dead_mut().restore_last_mark(counter()?);
    *parts.unknown_discards = counter()?;
    *parts.work = Work {
        nodes_visited: counter()?,
        bytes_compared: counter()?,
        ..Work::default()
    };
    Ok(())
}

fn write_kinds(index: &RadixIndex, out: &mut Writer) {
    out.len(index.kinds().len());
    for kind in index.kinds() {
        out.text(kind);
    }
}

fn read_kinds(index: &mut RadixIndex, from: &mut Reader<'_>) -> Result<()> {
    let count = from.count(9)?;
    from.must(count <= MAX_KINDS, || {
        format!("{count} kinds; an index has at most {MAX_KINDS}")
    })?;
    let names = (0..count)
        .map(|_| from.text())
        .collect::<Result<Vec<String>>>()?;
    let kinds = Kinds::from_names(names).ok_or_else(|| {
        from.wrong("the kinds do not begin with those that are built in, or repeat")
    })?;
    index.parts_mut().tagging.restore_kinds(kinds);
    Ok(())
}

fn write_waiting(index: &RadixIndex, out: &mut Writer) {
    let condemned = index.forest().blocks().known();
    let condemned = condemned.filter(|(_, place)| *place == BlockState::Condemned);
    let all: Vec<u32> = index
        .pins()
        .waiting()
        .iter()
        .copied()
        .chain(condemned.map(|(id, _)| id))
        .collect();
    out.len(all.len());
    out.u32s(&all);
}

fn read_waiting(index: &mut RadixIndex, from: &mut Reader<'_>) -> Result<()> {
    let count = from.count(4)?;
    for id in from.u32s(count)? {
        new_id(index, from, id)?;
        let parts = index.parts_mut();
        parts.pins.wait(parts.forest, &[id]);
    }
    Ok(())
}

fn write_quarantined(index: &RadixIndex, out: &mut Writer) {
    let all: Vec<u32> = index.quarantined().map(|id| id.0).collect();
    out.len(all.len());
    out.u32s(&all);
}

fn read_quarantined(index: &mut RadixIndex, from: &mut Reader<'_>) -> Result<()> {
    let count = from.count(4)?;
    for id in from.u32s(count)? {
        new_id(index, from, id)?;
        index.parts_mut().forest.blocks_mut().quarantine(id);
    }
    Ok(())
}

fn write_windows(index: &RadixIndex, out: &mut Writer) {
    // Blocks with windows are cached, so each has a tree.
    let tree_of = |id| index.forest().tree_of_block(id).unwrap_or(u32::MAX);
    for names in index
        .moved()
        .windows()
        .into_iter()
        .flat_map(|windows| windows.order(tree_of))
    {
        out.len(names.len());
        out.u32s(&names);
    }
}

fn read_windows(index: &mut RadixIndex, from: &mut Reader<'_>) -> Result<()> {
    let num_tables = index.moved().windows().map_or(0, Windows::num_tables);
    let mut order = Vec::with_capacity(num_tables);
    for _ in 0..num_tables {
        let count = from.count(4)?;
        order.push(from.u32s(count)?);
    }
    let parts = index.parts_mut();
    let filled = parts.moved.restore(parts.forest, &order);
    filled.map_err(|what| from.wrong(what))
}

/// Writes recent departures, without those after nodes that no longer exist.
fn write_gone(index: &RadixIndex, out: &mut Writer) {
    let numbers = edges::numbers(index);
    let mut kept: Vec<(u32, Note)> = Vec::new();
    for note in index.gone().iter() {
        let handle = NodeHandle {
            index: note.node,
            generation: note.generation,
        };
        if note.node == NO_NODE {
            kept.push((NO_NODE, note));
        } else if index.forest().knows(handle)
            && let Some(&number) = numbers.get(note.node as usize)
            && number != NO_NODE
        {
            kept.push((number, note));
        }
    }
    out.len(kept.len());
    for (number, note) in kept {
        out.u32(number);
        out.u32(note.depth);
        out.u64(note.digest());
    }
}

fn read_gone(index: &mut RadixIndex, from: &mut Reader<'_>) -> Result<()> {
    let count = from.count(16)?;
    from.must(count <= MOST, || {
        format!("{count} departures; an index remembers {MOST}")
    })?;
    for _ in 0..count {
        let (number, depth, digest) = (from.u32()?, from.u32()?, from.u64()?);
        let before = if number == NO_NODE {
            None
        } else {
            from.must((number as usize) < index.forest().num_nodes(), || {
                format!("there is no edge {number}")
            })?;
            Some(index.forest().handle(number))
        };
        index.parts_mut().gone.add(Note::new(before, depth, digest));
    }
    Ok(())
}
