//! Writes manifests: chooses which blocks are sent, and in which runs.

use std::ops::Range;

use kvtrie_core::{BlockId, Class, Item, Namespace, Result, ReusePolicy, Salt, TokenSequence};

use crate::error::invalid;
use crate::ledger::LabelRun;
use crate::transfer::built;
use crate::transfer::digests::{DIGEST, Tokens, TransferKey};
use crate::transfer::offsets::{
    APPROXIMATE, EXACT, LOOKAHEAD, MAGIC, MAX_GROUP, VERSION, first_twice,
};
use crate::transfer::wire::ByteWriter;

/// The blocks that a sender has in one group, in the order of their tokens.
#[derive(Clone, Copy, Debug)]
pub struct SentGroup<'a> {
    /// The group: the engine's number for layers that share a block table.
    pub group: u32,
    /// Tokens per block.
    pub block_size: usize,
    /// The block table, from position 0.
    pub blocks: &'a [BlockId],
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

/// The blocks of a group as runs: (first, end, flags, hops).
type Runs = Vec<(usize, usize, u8, u16)>;

pub(super) fn write(call: &'static str, sent: Sent<'_>, key: &TransferKey) -> Result<Vec<u8>> {
    let end = check(call, sent)?;
    let Sent {
        seq,
        groups,
        labels,
        lookahead_end,
        policy,
    } = sent;
    let runs: Vec<Runs> = groups
        .iter()
        .map(|group| runs_of(group.block_size, labels, end, lookahead_end))
        .collect();
    let prompt = Tokens::of(seq);
    let starts = starts_of(groups, &runs);
    let prefixes = key.prefixes(prompt, &starts);

    let blocks: usize = groups.iter().map(|group| group.blocks.len()).sum();
    let mut out = ByteWriter::with_capacity(256 + (4 + DIGEST) * blocks);
    out.array(5);
    out.text(MAGIC);
    out.uint(VERSION);
    let start = out.bytes().len();
    write_namespace(&mut out, seq.namespace(), key);
    let is_approximate = runs.iter().flatten().any(|run| run.2 == APPROXIMATE);
    built::write(&mut out, policy.filter(|_| is_approximate));
    let signed = out.bytes()[start..].to_vec();
    out.array(groups.len());
    for (group, runs) in groups.iter().zip(&runs) {
        out.array(3);
        out.uint(group.group as usize);
        out.uint(group.block_size);
        out.array(runs.len());
        let hasher = key.runs(&signed, group.group, group.block_size);
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
                let prefix = starts.binary_search(&start).map(|at| prefixes[at]);
                out.bin(&prefix.unwrap_or_default());
                let digests = (first..last).map(|block| {
                    let from = block * group.block_size;
                    key.block(prompt.slice(from, (from + group.block_size).min(stop)))
                });
                out.bin_of(DIGEST * ids.len(), digests);
            }
            let digest = hasher.digest(&out.bytes()[fields..]);
            out.bin(&digest);
        }
    }
    Ok(out.into_bytes())
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
        check_table(
            call,
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
    call: &'static str,
    group: u32,
    block_size: usize,
    blocks: &[BlockId],
    num_tokens: usize,
) -> Result<()> {
    check_block_size(call, group, block_size)?;
    let needed = num_tokens.div_ceil(block_size);
    let Some(used) = blocks.get(..needed) else {
        return Err(invalid!(
            call,
            "group {group} has {} blocks, {num_tokens} tokens need {needed} of {block_size} tokens",
            blocks.len()
        ));
    };
    if let Some(id) = used
        .iter()
        .find(|id| u64::from(id.0) >= BlockId::MAX_BLOCKS)
    {
        return Err(invalid!(
            call,
            "blocks has {id}; it must be in [0, {})",
            BlockId::MAX_BLOCKS
        ));
    }
    match first_twice(used.iter().copied()) {
        Some(id) => Err(invalid!(
            call,
            "block {id} comes twice in the table of group {group}"
        )),
        None => Ok(()),
    }
}

pub(super) fn check_block_size(call: &'static str, group: u32, block_size: usize) -> Result<()> {
    if block_size == 0 || block_size > u32::MAX as usize {
        return Err(invalid!(
            call,
            "the block size of group {group} is {block_size}; it must be in [1, {}]",
            u32::MAX
        ));
    }
    Ok(())
}

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
