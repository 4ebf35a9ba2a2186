//! Writes manifests: chooses which blocks are sent, and in which runs.

use std::ops::Range;

use kvtrie_core::{
    BlockId, Class, GroupKind, Item, Namespace, Result, ReusePolicy, Salt, TokenSequence,
};

use crate::error::invalid;
use crate::ledger::LabelRun;
use crate::transfer::built;
use crate::transfer::digests::{DIGEST, Tokens, TransferKey};
use crate::transfer::offsets::{APPROXIMATE, EXACT, LOOKAHEAD, MAGIC, MAX_GROUP, VERSION};
use crate::transfer::tables::{Table, heads, write_head};
use crate::transfer::wire::ByteWriter;

/// What a sender has in one group.
#[derive(Clone, Copy, Debug)]
pub struct SentGroup<'a> {
    /// The group: the engine's number for layers that share a block table.
    pub group: u32,
    /// Tokens per block.
    pub block_size: usize,
    /// The ids of its blocks or states.
    pub table: Table<'a>,
}

#[derive(Clone, Copy)]
pub(super) struct Sent<'a> {
    pub(super) seq: &'a TokenSequence,
    pub(super) groups: &'a [SentGroup<'a>],
    pub(super) labels: &'a [LabelRun],
    pub(super) lookahead_end: usize,
    /// The policy that the approximate KV was built under, if it is known.
    pub(super) policy: Option<&'a ReusePolicy>,
}

/// Entries of a group's table that are one run.
struct Run {
    start: usize,
    end: usize,
    flags: u8,
    hops: u16,
    /// The places of its ids in the table.
    ids: Range<usize>,
}

pub(super) fn write(call: &'static str, sent: Sent<'_>, key: &TransferKey) -> Result<Vec<u8>> {
    let end = check(call, sent)?;
    let Sent {
        seq,
        groups,
        labels,
        lookahead_end,
        policy,
    } = sent;
    let runs_of = |group: &SentGroup<'_>| match group.table {
        Table::Full(_) => runs_from_0(group.block_size, labels, end, lookahead_end),
        Table::At(kind, ids) => runs_at(kind, group.block_size, ids, labels, end),
    };
    let runs: Vec<Vec<Run>> = groups.iter().map(runs_of).collect();
    let prompt = Tokens::of(seq);
    let starts = starts_of(&runs);
    let prefixes = key.prefixes(prompt, &starts);

    let blocks: usize = runs.iter().flatten().map(|run| run.ids.len()).sum();
    let mut out = ByteWriter::with_capacity(256 + (4 + DIGEST) * blocks);
    out.array(5);
    out.text(MAGIC);
    out.uint(VERSION);
    let start = out.bytes().len();
    write_namespace(&mut out, seq.namespace(), key);
    let is_approximate = runs.iter().flatten().any(|run| run.flags == APPROXIMATE);
    built::write(&mut out, policy.filter(|_| is_approximate));
    let head = |group: &SentGroup<'_>| (group.group, group.block_size, group.table.kind());
    let heads = heads(groups.iter().map(head));
    let hasher = key.runs(&out.bytes()[start..], heads.bytes());
    out.array(groups.len());
    for (group, runs) in groups.iter().zip(&runs) {
        out.array(4);
        write_head(&mut out, head(group));
        out.array(runs.len());
        let hasher = hasher.of_group(group.group);
        for run in runs {
            out.array(8);
            let fields = out.bytes().len();
            out.uint(run.start);
            out.uint(run.end - run.start);
            out.uint(run.flags.into());
            out.uint(run.hops.into());
            write_ids(&mut out, group.table, &run.ids);
            if run.flags == LOOKAHEAD {
                out.bin(&[]);
                out.bin(&[]);
            } else {
                let prefix = starts.binary_search(&run.start).map(|at| prefixes[at]);
                out.bin(&prefix.unwrap_or_default());
                let firsts = (run.start..run.end).step_by(group.block_size);
                let count = firsts.len();
                let digests = firsts.map(|from| {
                    key.block(prompt.slice(from, (from + group.block_size).min(run.end)))
                });
                out.bin_of(DIGEST * count, digests);
            }
            let digest = hasher.digest(&out.bytes()[fields..]);
            out.bin(&digest);
        }
    }
    Ok(out.into_bytes())
}

fn write_ids(out: &mut ByteWriter, table: Table<'_>, ids: &Range<usize>) {
    let len = 4 * ids.len();
    match table {
        Table::Full(blocks) => {
            out.bin_of(len, blocks[ids.clone()].iter().map(|id| id.0.to_le_bytes()));
        }
        Table::At(_, all) => {
            let all = all[ids.clone()].iter();
            out.bin_of(len, all.map(|(_, id)| id.0.to_le_bytes()));
        }
    }
}

fn write_namespace(out: &mut ByteWriter, namespace: &Namespace, key: &TransferKey) {
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

/// The first item that says how many positions it takes.
pub(super) fn first_with_positions(seq: &TokenSequence) -> Option<&Item> {
    seq.items().iter().find(|item| item.positions().is_some())
}

fn check(call: &'static str, sent: Sent<'_>) -> Result<usize> {
    let Sent {
        seq,
        groups,
        labels,
        lookahead_end,
        policy,
    } = sent;
    if let Some(policy) = policy {
        if !policy.approximate {
            return Err(invalid!(
                call,
                "the policy has approximate = false; nothing approximate is built under it"
            ));
        }
        policy.check(built::LEAST_RUN, call)?;
    }
    if let Some(item) = first_with_positions(seq) {
        return Err(invalid!(
            call,
            "the item at [{}, {}) says that it takes {} positions; a manifest does not carry these",
            item.start(),
            item.end(),
            item.positions().unwrap_or_default()
        ));
    }
    let mut end = 0;
    for label in labels {
        if label.start < end || label.start >= label.end || label.class == Class::Compute {
            return Err(invalid!(
                call,
                "labels has [{}, {}) ({}) after {end}; labels are not empty, ascend, are disjoint, and are of computed KV",
                label.start,
                label.end,
                label.class
            ));
        }
        end = label.end;
    }
    if end > seq.len() {
        return Err(invalid!(
            call,
            "KV of {end} tokens, the sequence has {}",
            seq.len()
        ));
    }
    if lookahead_end < end || lookahead_end > u32::MAX as usize {
        return Err(invalid!(
            call,
            "lookahead_end is {lookahead_end}; it must be in [{end}, {}]",
            u32::MAX
        ));
    }
    let mut before = None;
    for group in groups {
        if group.group > MAX_GROUP || before.is_some_and(|before| before >= group.group) {
            return Err(invalid!(
                call,
                "group {}; groups ascend and are in [0, {MAX_GROUP}]",
                group.group
            ));
        }
        before = Some(group.group);
        group
            .table
            .check(call, group.group, group.block_size, lookahead_end)?;
    }
    Ok(end)
}

/// The runs of a table from position 0.
fn runs_from_0(
    block_size: usize,
    labels: &[LabelRun],
    end: usize,
    lookahead_end: usize,
) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let run = |first: usize, until: usize, flags: u8, hops: u16| Run {
        start: first * block_size,
        end: if flags == LOOKAHEAD {
            until * block_size
        } else {
            (until * block_size).min(end)
        },
        flags,
        hops,
        ids: first..until,
    };
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
            // The next block that can have all its KV.
            block = label.start.div_ceil(block_size);
            continue;
        }
        // The end of the blocks within the label. The last block may end at `end`, inside the block.
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
            Some(last) if (last.ids.end, last.flags, last.hops) == (block, flags, hops) => {
                *last = run(last.ids.start, until, flags, hops);
            }
            _ => runs.push(run(block, until, flags, hops)),
        }
        block = until;
    }
    let (held, issued) = (end.div_ceil(block_size), lookahead_end.div_ceil(block_size));
    if held < issued {
        runs.push(run(held, issued, LOOKAHEAD, 0));
    }
    runs
}

/// The runs of ids at positions: those of exact KV. A block is sent as in a table from position 0, a state if all tokens
/// before it are exact.
fn runs_at(
    kind: GroupKind,
    block_size: usize,
    ids: &[(usize, BlockId)],
    labels: &[LabelRun],
    end: usize,
) -> Vec<Run> {
    let mut exact: Vec<Range<usize>> = Vec::new();
    for label in labels.iter().filter(|label| label.class == Class::Exact) {
        match exact.last_mut() {
            Some(last) if last.end == label.start => last.end = label.end,
            _ => exact.push(label.start..label.end),
        }
    }
    let mut runs: Vec<Run> = Vec::new();
    for (at, &(position, _)) in ids.iter().enumerate() {
        let (from, until) = match kind {
            GroupKind::State => (0, position),
            GroupKind::Window { .. } => (position, (position + block_size).min(end)),
        };
        let range = exact.partition_point(|range| range.end <= from);
        let is_exact = exact
            .get(range)
            .is_some_and(|range| range.start <= from && until <= range.end);
        if from >= until || !is_exact {
            continue;
        }
        match runs.last_mut() {
            // Each state is a run.
            Some(last) if kind != GroupKind::State && last.end == position => {
                last.end = until;
                last.ids.end = at + 1;
            }
            _ => runs.push(Run {
                start: position,
                end: until,
                flags: EXACT,
                hops: 0,
                ids: at..at + 1,
            }),
        }
    }
    runs
}

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

fn starts_of(runs: &[Vec<Run>]) -> Vec<usize> {
    let computed = runs.iter().flatten().filter(|run| run.flags != LOOKAHEAD);
    let mut starts: Vec<usize> = computed.map(|run| run.start).collect();
    starts.sort_unstable();
    starts.dedup();
    starts
}
