//! Tests hostile manifests: they give typed errors, take at most four times their bytes, and never load a wrong token.
//!
//! There is one test only, because the counter counts the bytes of the whole process. `KVTRIE_HOSTILE` sets the number
//! of manifests (20,000).

#![expect(clippy::unwrap_used, reason = "helpers of a test")]

use std::alloc::System;
use std::sync::Arc;

use kvtrie_core::{BlockId, Class, GroupKind, Namespace, ReusePolicy, Salt, TokenSequence};
use kvtrie_transfer::{
    LabelRun, LocalGroup, Refusal, SentGroup, Table, TransferError, TransferKey, TransferLimits,
    TransferManifest, TransferOptions, TransferPlan,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Number of bytes of a message, in addition to those of the manifest.
const MESSAGE: usize = 1024;

/// The number, tokens per block and kind of a group.
type Head = (u32, usize, Option<GroupKind>);

const GROUPS: &[Head] = &[(0, 4, None), (7, 6, None)];
/// The window reaches into two blocks before a position.
const KINDS: &[Head] = &[
    (0, 4, None),
    (3, 4, Some(GroupKind::Window { window: 6 })),
    (7, 4, Some(GroupKind::State)),
];

/// A deterministic generator of choices.
struct Choices(u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 ^ self.0 >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit.max(1) as u64).unwrap()
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap()
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.byte()).collect()
    }

    /// A number at a limit of the encoding or of the format.
    fn edge(&mut self) -> u64 {
        let edges = [
            0,
            1,
            4,
            6,
            8,
            127,
            128,
            255,
            256,
            65_535,
            65_536,
            (1 << 26) + 1,
            (1 << 31) - 1,
            1 << 31,
            (1 << 32) - 1,
            1 << 32,
            u64::MAX - 3,
            u64::MAX,
        ];
        edges[self.below(edges.len())]
    }

    /// Such a number once in `times` calls, otherwise the usual one.
    fn edge_or(&mut self, times: usize, usual: u64) -> u64 {
        if self.below(times) == 0 {
            self.edge()
        } else {
            usual
        }
    }
}

fn uint(out: &mut Vec<u8>, number: u64) {
    let bytes = number.to_be_bytes();
    match number {
        0..128 => out.push(bytes[7]),
        128..256 => out.extend([0xcc, bytes[7]]),
        256..65_536 => out.extend([0xcd, bytes[6], bytes[7]]),
        65_536..0x1_0000_0000 => {
            out.push(0xce);
            out.extend(&bytes[4..]);
        }
        _ => {
            out.push(0xcf);
            out.extend(bytes);
        }
    }
}

fn array(out: &mut Vec<u8>, len: usize) {
    match u16::try_from(len) {
        Ok(len @ 0..16) => out.push(0x90 | u8::try_from(len).unwrap()),
        Ok(len) => {
            out.push(0xdc);
            out.extend(len.to_be_bytes());
        }
        Err(_) => {
            out.push(0xdd);
            out.extend(u32::try_from(len).unwrap().to_be_bytes());
        }
    }
}

fn bin(out: &mut Vec<u8>, bytes: &[u8]) {
    if let Ok(len) = u8::try_from(bytes.len()) {
        out.extend([0xc4, len]);
    } else {
        out.push(0xc5);
        out.extend(u16::try_from(bytes.len()).unwrap().to_be_bytes());
    }
    out.extend(bytes);
}

fn label(start: usize, end: usize, class: Class, hops: u16) -> LabelRun {
    LabelRun {
        start,
        end,
        class,
        hops,
    }
}

/// What sender and receiver share.
struct World {
    tokens: Vec<u32>,
    groups: &'static [Head],
    /// The ids of each group by their positions.
    tables: Vec<Vec<(usize, BlockId)>>,
    blocks: Vec<Vec<BlockId>>,
    manifest: TransferManifest,
    key: TransferKey,
    policy: ReusePolicy,
}

impl World {
    fn new(groups: &'static [Head]) -> Self {
        let tokens: Vec<u32> = (0..61).map(|token| token % 13).collect();
        let table = |&(_, size, kind): &Head| -> Vec<(usize, BlockId)> {
            let first = usize::from(kind == Some(GroupKind::State));
            let ids = (0..20).map(|id| BlockId(id * 3 + u32::try_from(size).unwrap()));
            (first..).map(|at| at * size).zip(ids).collect()
        };
        let tables: Vec<Vec<(usize, BlockId)>> = groups.iter().map(table).collect();
        let blocks: Vec<Vec<BlockId>> = tables
            .iter()
            .map(|table| table.iter().map(|&(_, id)| id).collect())
            .collect();
        let sent: Vec<SentGroup<'_>> = groups
            .iter()
            .zip(tables.iter().zip(&blocks))
            .map(|(&(group, block_size, kind), (at, blocks))| SentGroup {
                group,
                block_size,
                table: kind.map_or(Table::Full(blocks), |kind| Table::At(kind, at)),
            })
            .collect();
        let labels = [
            label(0, 24, Class::Exact, 0),
            label(30, 48, Class::Approximate, 1),
            label(48, 61, Class::Exact, 0),
        ];
        let key = TransferKey::new(&[7; 32]).unwrap();
        let policy = ReusePolicy {
            approximate: true,
            min_run: Some(8),
            max_hops: 2,
            ..ReusePolicy::EXACT_ONLY
        };
        let seq = sequence(&tokens);
        let manifest =
            TransferManifest::built_under(Some(&policy), &seq, &sent, &labels, 70, &key).unwrap();
        Self {
            tokens,
            groups,
            tables,
            blocks,
            manifest,
            key,
            policy,
        }
    }

    /// Reads bytes, measures the memory, and plans. Returns the reason of a refusal.
    fn receive(&self, raw: &[u8]) -> Option<Refusal> {
        let region = Region::new(ALLOCATOR);
        let read = TransferManifest::from_bytes(raw, &TransferLimits::default());
        let change = region.change();
        let taken = change.bytes_allocated
            + usize::try_from(change.bytes_reallocated.max(0)).unwrap_or_default();
        assert!(
            taken <= 4 * raw.len() + MESSAGE,
            "{taken} bytes for {} of input",
            raw.len()
        );
        let planned = read.and_then(|manifest| {
            assert_eq!(manifest.to_bytes(), raw);
            let (mine, local) = self.local();
            let options = TransferOptions {
                policy: &self.policy,
                ..TransferOptions::default()
            };
            TransferPlan::new(&manifest, &sequence(&mine), &local, &self.key, &options)
        });
        match planned {
            Ok(plan) => {
                self.check(&plan);
                None
            }
            Err(TransferError::Refused { refusal, .. }) => Some(refusal),
            Err(TransferError::Argument(error)) => panic!("{:?}: {error}", error.kind()),
        }
    }

    fn local(&self) -> (Vec<u32>, Vec<LocalGroup<'_>>) {
        let ids = self.tables.iter().zip(&self.blocks);
        let local = self
            .groups
            .iter()
            .zip(ids)
            .map(|(&(group, size, kind), (at, blocks))| LocalGroup {
                group,
                block_size: Some(if self.is_kinded() { size } else { 5 }),
                table: Some(kind.map_or(Table::Full(blocks), |kind| Table::At(kind, at))),
            });
        (self.tokens.clone(), local.collect())
    }

    /// Checks that the plan loads the right tokens, whoever wrote the manifest.
    fn check(&self, plan: &TransferPlan) {
        for pair in plan.pairs() {
            let place = self.groups.iter().position(|group| group.0 == pair.group);
            let (_, size, kind) = self.groups[place.unwrap()];
            let blocks = &self.blocks[place.unwrap()];
            if kind == Some(GroupKind::State) {
                assert_eq!((pair.start, pair.delta), (pair.end, 0));
                assert_eq!(pair.remote, blocks[pair.start / size - 1]);
                continue;
            }
            for position in pair.start..pair.end {
                let source =
                    usize::try_from(i64::try_from(position).unwrap() - pair.delta).unwrap();
                assert_eq!(self.tokens[position], self.tokens[source]);
                assert_eq!(pair.remote, blocks[source / size]);
            }
        }
        if self.is_kinded() {
            self.check_continued(plan);
        }
    }

    fn is_kinded(&self) -> bool {
        self.groups.iter().any(|group| group.2.is_some())
    }

    /// Checks that each group has what it needs where the prompt continues.
    fn check_continued(&self, plan: &TransferPlan) {
        let end = plan.num_exact();
        assert_eq!(plan.num_approximate(), 0);
        assert_eq!(plan.compute().first().map_or(61, |range| range.0), end);
        for &(number, size, kind) in self.groups {
            let of_group = plan.pairs().iter().filter(|pair| pair.group == number);
            let mut found: Vec<(usize, usize)> =
                of_group.map(|pair| (pair.start, pair.end)).collect();
            let first = match kind {
                None => 0,
                Some(GroupKind::State) if end == 0 => end,
                Some(GroupKind::State) => {
                    assert_eq!(found, [(end, end)]);
                    continue;
                }
                Some(GroupKind::Window { window }) => end.saturating_sub(window - 1) / size * size,
            };
            found.insert(0, (first, first));
            assert!(
                found.windows(2).all(|pair| pair[0].1 == pair[1].0),
                "{found:?}"
            );
            assert_eq!(found.last().map(|pair| pair.1), Some(end));
        }
    }
}

fn sequence(tokens: &[u32]) -> TokenSequence {
    let namespace = Namespace::new("m", "auto", "default", None, Salt::Tenant("t".into())).unwrap();
    TokenSequence::new(Arc::new(namespace), tokens.to_vec(), Vec::new()).unwrap()
}

/// The valid bytes with some changes.
fn mutated(world: &World, choices: &mut Choices) -> Vec<u8> {
    let mut raw = world.manifest.to_bytes().to_vec();
    for _ in 0..=choices.below(3) {
        let at = choices.below(raw.len());
        match choices.below(8) {
            0 => raw.truncate(at),
            1 | 2 => {
                if let Some(byte) = raw.get_mut(at) {
                    *byte ^= 1 << choices.below(8);
                }
            }
            3 => {
                let end = (at + choices.below(90)).min(raw.len());
                raw.drain(at..end);
            }
            4 => {
                let end = (at + choices.below(90)).min(raw.len());
                let piece = raw[at..end].to_vec();
                raw.splice(at..at, piece);
            }
            5 => {
                // This count is too large.
                let marker = [0xdd, 0xc6, 0xdb, 0xdf, 0xce][choices.below(5)];
                let huge = [marker, 0xff, choices.byte(), 0xff, choices.byte()];
                let end = (at + choices.below(6)).min(raw.len());
                raw.splice(at..end, huge);
            }
            6 => {
                let mut number = Vec::new();
                uint(&mut number, choices.edge());
                let end = (at + 1).min(raw.len());
                raw.splice(at..end, number);
            }
            _ => {
                if let Some(byte) = raw.get_mut(at) {
                    *byte = choices.byte();
                }
            }
        }
    }
    raw
}

/// Values of the right types with any numbers: overlapping ranges, forged digests, repeated ids.
fn forged(choices: &mut Choices) -> Vec<u8> {
    let mut raw = Vec::new();
    array(&mut raw, 5);
    raw.push(0xaf);
    raw.extend(b"kvtrie.manifest");
    uint(&mut raw, choices.edge_or(30, 3));
    array(&mut raw, 5);
    for name in ["m", "auto", "default"] {
        raw.push(0xa0 | u8::try_from(name.len()).unwrap());
        raw.extend(name.as_bytes());
    }
    raw.push(0xc0);
    if choices.below(2) == 0 {
        raw.push(0xc0);
    } else {
        bin(&mut raw, &choices.bytes(16));
    }
    forge_policy(&mut raw, choices);
    let groups = choices.below(4);
    array(&mut raw, groups);
    for group in 0..groups {
        array(&mut raw, 4);
        let number = [0, 7, 9, 11][group];
        uint(&mut raw, choices.edge_or(20, number));
        let size = if choices.below(30) == 0 {
            choices.edge()
        } else {
            1 + choices.next() % 9
        };
        uint(&mut raw, size);
        let kind = choices.below(4);
        match kind {
            0 | 1 => raw.push(0xc0),
            2 => uint(&mut raw, choices.edge_or(3, 5)),
            _ => uint(&mut raw, choices.edge_or(20, 0)),
        }
        let runs = choices.below(5);
        array(&mut raw, runs);
        let mut start = 0;
        for _ in 0..runs {
            let is_state = kind == 3 && choices.below(20) > 0;
            let blocks = if is_state {
                1
            } else {
                1 + choices.below(4) as u64
            };
            let flags = if kind < 2 || choices.below(20) == 0 {
                [0, 0, 1, 2][choices.below(4)]
            } else {
                0
            };
            let tokens = if is_state {
                0
            } else {
                size.saturating_mul(blocks)
                    .saturating_sub(choices.next() % 2)
            };
            array(&mut raw, 8);
            uint(&mut raw, choices.edge_or(12, start));
            uint(&mut raw, choices.edge_or(30, tokens));
            uint(&mut raw, choices.edge_or(30, flags));
            uint(&mut raw, choices.edge_or(30, flags % 2));
            let count = usize::try_from(blocks).unwrap();
            let ids: Vec<u8> = (0..count)
                .flat_map(|_| {
                    let id = choices.next() % 500;
                    u32::try_from(id).unwrap().to_le_bytes()
                })
                .collect();
            bin(&mut raw, &ids);
            let digests = if flags == 2 { 0 } else { 16 };
            bin(&mut raw, &choices.bytes(digests));
            let of_blocks = if is_state { 0 } else { digests * count };
            bin(&mut raw, &choices.bytes(of_blocks));
            bin(&mut raw, &choices.bytes(16));
            start += size.saturating_mul(blocks + choices.next() % 2) % (1 << 20);
        }
    }
    raw
}

/// No policy, or fields of the right types with any numbers.
fn forge_policy(raw: &mut Vec<u8>, choices: &mut Choices) {
    if choices.below(2) == 0 {
        return raw.push(0xc0);
    }
    array(raw, 11);
    for field in 0..11 {
        match field {
            0 | 5 | 8 if choices.below(2) == 0 => raw.push(0xc0),
            2 | 6 | 7 | 9 => {
                let wrong = choices.below(40) == 0;
                let shares = if wrong {
                    [-0.0, 1.5, f64::NAN]
                } else {
                    [0.0, 0.5, 1.0]
                };
                let share = shares[choices.below(3)];
                raw.push(0xcb);
                raw.extend(f64::to_be_bytes(share));
            }
            10 => raw.extend(b"\xa6fronts"),
            _ => uint(raw, choices.edge_or(30, 9)),
        }
    }
}

/// Arrays in arrays, or groups and runs that announce more than follows.
fn nested(choices: &mut Choices) -> Vec<u8> {
    let mut raw = vec![0x95, 0xaf];
    raw.extend(b"kvtrie.manifest");
    raw.extend([
        3, 0x95, 0xa1, b'm', 0xa1, b'm', 0xa1, b'm', 0xc0, 0xc0, 0xc0,
    ]);
    raw.truncate([0, 1, 18, raw.len()][choices.below(4)]);
    let marker = [0x91, 0x93, 0x98, 0x9f, 0xdc, 0xdd, 0x81, 0xc1][choices.below(8)];
    let len = choices.below(3000);
    raw.extend(std::iter::repeat_n(marker, len));
    raw
}

/// The manifests have as many runs as possible, of one token each, or one run of many unordered blocks.
fn large_ones_take_less_than_four_times_their_size(key: &TransferKey) {
    let tokens = vec![1; 60_000];
    let seq = sequence(&tokens);
    let shuffled: Vec<BlockId> = (0..60_000).map(|id| BlockId(id * 7_919 % 60_013)).collect();
    let alternating: Vec<LabelRun> = (0..60_000)
        .map(|at| {
            let hops = u16::try_from(at % 2).unwrap();
            label(at, at + 1, Class::Approximate, hops)
        })
        .collect();
    let one = label(0, 60_000, Class::Exact, 0);
    for labels in [&alternating[..], &[one]] {
        let group = SentGroup {
            group: 0,
            block_size: 1,
            table: Table::Full(&shuffled),
        };
        let manifest = TransferManifest::new(&seq, &[group], labels, 60_000, key).unwrap();
        let raw = manifest.to_bytes();
        let region = Region::new(ALLOCATOR);
        let again = TransferManifest::from_bytes(raw, &TransferLimits::default()).unwrap();
        let change = region.change();
        assert!(change.bytes_allocated < 4 * raw.len(), "{change:?}");
        assert_eq!(again, manifest);
    }
}

/// The names are as long as the bytes allow, of characters that take most room in quotes. There is no run whose digest
/// could be wrong.
fn long_names_are_cut_where_they_are_shown(world: &World) {
    const LEN: usize = 3 << 20;
    for (field, name) in ["model", "kv_dtype", "rope", "the adapter"]
        .iter()
        .enumerate()
    {
        for groups in [0, 64] {
            let mut raw = vec![0x95, 0xaf];
            raw.extend(b"kvtrie.manifest");
            raw.extend([3, 0x95]);
            for (at, own) in ["m", "auto", "default", ""].iter().enumerate() {
                if at == field {
                    raw.push(0xdb);
                    raw.extend(u32::try_from(LEN).unwrap().to_be_bytes());
                    raw.extend(std::iter::repeat_n(1, LEN));
                } else if own.is_empty() {
                    raw.push(0xc0);
                } else {
                    raw.push(0xa0 | u8::try_from(own.len()).unwrap());
                    raw.extend(own.as_bytes());
                }
            }
            raw.extend([0xc0, 0xc0]);
            array(&mut raw, groups);
            for group in 0..groups {
                array(&mut raw, 4);
                uint(&mut raw, group as u64);
                raw.extend([4, 0xc0, 0x90]);
            }
            let manifest = TransferManifest::from_bytes(&raw, &TransferLimits::default()).unwrap();
            let (mine, local) = world.local();
            let seq = sequence(&mine);
            let region = Region::new(ALLOCATOR);
            let error = TransferPlan::new(
                &manifest,
                &seq,
                &local,
                &world.key,
                &TransferOptions::default(),
            )
            .unwrap_err();
            let shown = [error.to_string(), format!("{manifest:?}")];
            let taken = region.change().bytes_allocated;
            assert_eq!(error.refusal(), Some(Refusal::Namespace));
            assert!(shown[0].contains(&format!("{name} is \"")), "{error}");
            assert!(
                shown[0].contains("\\u{1}\"... (3145728 characters) in"),
                "{error}"
            );
            assert_eq!(shown[0].matches("\\u{1}").count(), 80, "{error}");
            assert!(shown.iter().all(|text| text.len() < MESSAGE), "{shown:?}");
            assert!(taken < 8 * MESSAGE, "{taken} bytes for a refusal");
        }
    }
}

#[test]
fn no_bytes_are_believed_or_cost_more_than_four_times_their_size() {
    let asked = std::env::var("KVTRIE_HOSTILE").ok();
    let count = asked.map_or(20_000, |count| count.parse().unwrap());
    let kinded = World::new(KINDS);
    assert_eq!(kinded.receive(kinded.manifest.to_bytes()), None);
    let world = World::new(GROUPS);
    assert_eq!(
        world.receive(kinded.manifest.to_bytes()),
        Some(Refusal::Groups)
    );
    assert_eq!(world.receive(world.manifest.to_bytes()), None);
    let other = World {
        key: TransferKey::new(&[8; 32]).unwrap(),
        ..World::new(GROUPS)
    };
    assert_eq!(
        other.receive(world.manifest.to_bytes()),
        Some(Refusal::Digest)
    );
    large_ones_take_less_than_four_times_their_size(&world.key);
    long_names_are_cut_where_they_are_shown(&world);
    let mut choices = Choices(1);
    let mut met: Vec<(Option<Refusal>, usize)> = Vec::new();
    for _ in 0..count {
        let world = [&world, &kinded][choices.below(2)];
        let raw = match choices.below(10) {
            0..5 => mutated(world, &mut choices),
            5..8 => forged(&mut choices),
            8 => nested(&mut choices),
            _ => {
                let len = choices.below(200);
                choices.bytes(len)
            }
        };
        let reason = world.receive(&raw);
        match met.iter_mut().find(|met| met.0 == reason) {
            Some(met) => met.1 += 1,
            None => met.push((reason, 1)),
        }
    }
    for reason in [
        Refusal::Malformed,
        Refusal::Version,
        Refusal::Limits,
        Refusal::Digest,
    ] {
        assert!(met.iter().any(|met| met.0 == Some(reason)), "{met:?}");
    }
    if count > 20_000 {
        let mut message = format!("{count} hostile manifests:");
        for (reason, times) in met {
            let name = reason.map_or("true", Refusal::as_str);
            message.extend([" ", name, " ", &times.to_string()]);
        }
        std::io::Write::write_all(&mut std::io::stderr(), message.as_bytes()).unwrap();
    }
}
