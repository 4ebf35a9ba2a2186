//! Tests the section of groups besides group 0, resealed after each change.

use super::*;
use crate::groups::Group;
use crate::index::{GroupOffers, GroupOptions};

const NEEDED: u64 = 1 << 63;

/// A group as the section has it, valid or not.
#[derive(Clone)]
struct Raw {
    name: &'static str,
    kind: u8,
    window: usize,
    num_blocks: u64,
    /// Of each id: the id, the block of group 0 at its place, the last use.
    entries: Vec<(u32, u32, u64)>,
    waiting: Vec<u32>,
}

/// The groups of [`grouped`]: a window of two blocks, and states.
fn both() -> [Raw; 2] {
    [
        Raw {
            name: "swa",
            kind: 0,
            window: 5,
            num_blocks: 8,
            entries: vec![(3, 0, 4), (4, 1, 9 | NEEDED)],
            waiting: vec![5, 7],
        },
        Raw {
            name: "gdn",
            kind: 1,
            window: 0,
            num_blocks: 4,
            entries: vec![(1, 1, 9 | NEEDED)],
            waiting: vec![],
        },
    ]
}

/// An index with six blocks of two tokens, the last two approximate. The clock is at 9.
fn grouped() -> RadixIndex {
    let mut index = RadixIndex::new(Config {
        num_blocks: 64,
        block_size: 2,
        groups: vec![Group::window("swa", 5, 8, 2), Group::state("gdn", 4, 2)],
        ..Config::seeded(0)
    })
    .unwrap();
    let mut seq = sequence("x", &(0..12).collect::<Vec<u32>>(), Vec::new());
    let ids: Vec<BlockId> = (0..6).map(BlockId).collect();
    let offers = [
        (1, &[(0, BlockId(3)), (2, BlockId(4))][..]),
        (2, &[(4, BlockId(1))]),
    ];
    let offers = offers.map(|(group, offers)| GroupOffers { group, offers });
    let groups = GroupOptions {
        offers: &offers,
        stops: &[],
    };
    let options = InsertOptions::new(12, imported(8, 1));
    index
        .insert_groups(&mut seq, &ids, options, groups)
        .unwrap();
    *index.parts_mut().clock = 9;
    index
}

fn written(groups: &[Raw]) -> Writer {
    let mut out = Writer::default();
    out.len(groups.len());
    for group in groups {
        out.text(group.name);
        out.u8(group.kind);
        out.len(group.window);
        out.u64(group.num_blocks);
        out.len(group.entries.len());
        for &(id, block, last_use) in &group.entries {
            out.u32(id);
            out.u32(block);
            out.u64(last_use);
        }
        out.len(group.waiting.len());
        out.u32s(&group.waiting);
    }
    out
}

fn snapshot_of(groups: &[Raw]) -> Vec<u8> {
    with_section(&grouped(), "GRPS", &written(groups))
}

fn refused_groups(groups: &[Raw]) -> String {
    refused(&snapshot_of(groups))
}

#[test]
fn groups_come_back_as_they_are_written() {
    let mut index = read_back(&snapshot_of(&both()));
    assert_eq!(index.config().groups, grouped().config().groups);
    let stats = index.group_stats(1).unwrap();
    assert_eq!((stats.indexed, stats.waiting, stats.pinned), (2, 2, 0));
    assert_eq!(index.take_freed_group(1).unwrap(), [5, 7].map(BlockId));
    // The one that a call needed goes last.
    assert_eq!(index.evict_group(1, 8).unwrap(), [3, 4].map(BlockId));
    assert_eq!(index.evict_group(2, 8).unwrap(), [BlockId(1)]);
    read_back(&grouped().snapshot());
}

#[test]
fn the_size_of_groups_is_what_the_docs_say() {
    let mut plain = grouped();
    plain.parts_mut().config.groups.clear();
    *plain.parts_mut().groups = crate::groups::Groups::new(&[], 0);
    let [swa, gdn] = both();
    let names = swa.name.len() + gdn.name.len();
    let (entries, waiting) = (swa.entries.len() + gdn.entries.len(), swa.waiting.len());
    let expected = 20 + 2 * 41 + names + 16 * entries + 4 * waiting;
    let found = snapshot_of(&both()).len() - plain.snapshot().len();
    assert_eq!(found, expected);
}

/// Changes the groups of [`both`].
type Change = fn(&mut [Raw; 2]);

fn changed(change: Change) -> Vec<u8> {
    let mut groups = both();
    change(&mut groups);
    snapshot_of(&groups)
}

#[test]
fn contradictions_of_groups_are_refused() {
    says("0 groups; there must be 1 to 15", &refused_groups(&[]));
    let many = vec![both()[1].clone(); 16];
    says("16 groups; there must be 1 to 15", &refused_groups(&many));
    let cases: [(&str, Change); 21] = [
        ("kind 2 and window 5", |all| {
            all[0].kind = 2;
        }),
        ("kind 0 and window 1", |all| {
            all[0].window = 1;
        }),
        ("kind 1 and window 2", |all| {
            all[1].window = 2;
        }),
        ("has 0 bytes; it must have 1 to 64", |all| {
            all[0].name = "";
        }),
        ("two groups of the name", |all| {
            all[1].name = "swa";
        }),
        ("num_blocks 2147483649", |all| {
            all[1].num_blocks = (1 << 31) + 1;
        }),
        ("which takes 9 blocks of 2; its pool has 8", |all| {
            all[0].window = 18;
        }),
        ("id 8 of a group of 8 blocks", |all| {
            all[0].entries[1].0 = 8;
        }),
        ("id 8 of a group of 8 blocks", |all| {
            all[0].waiting[1] = 8;
        }),
        ("id 1 of a group of 0 blocks", |all| {
            all[1].num_blocks = 0;
        }),
        ("id 3 of a group comes twice", |all| {
            all[0].entries[1].0 = 3;
        }),
        ("id 4 of a group comes twice", |all| {
            all[0].waiting[0] = 4;
        }),
        ("id 5 of a group comes twice", |all| {
            all[0].waiting[1] = 5;
        }),
        ("a use at time 0; the clock is at 9", |all| {
            all[0].entries[0].2 = 0;
        }),
        ("a use at time 0; the clock is at 9", |all| {
            all[0].entries[0].2 = NEEDED;
        }),
        ("a use at time 10; the clock is at 9", |all| {
            all[0].entries[0].2 = NEEDED + 10;
        }),
        ("where there is no block 6", |all| {
            all[0].entries[0].1 = 6;
        }),
        ("where there is no block 4294967295", |all| {
            all[0].entries[0].1 = u32::MAX;
        }),
        ("two ids of a group at block 1", |all| {
            all[0].entries[0].1 = 1;
        }),
        // Blocks 4 and 5 are approximate.
        ("id 3 is where group 0 has no exact block", |all| {
            all[0].entries[0].1 = 4;
        }),
        ("id 1 is where group 0 has no exact block", |all| {
            all[1].entries[0].1 = 5;
        }),
    ];
    for (what, change) in cases {
        says(what, &refused(&changed(change)));
    }
    // One step inside each limit.
    let valid: [Change; 6] = [
        |all| {
            all[0].window = 17;
        },
        |all| {
            all[0].window = 2;
        },
        |all| {
            all[0].entries[1].0 = 6;
        },
        |all| {
            all[1].num_blocks = 1 << 31;
        },
        |all| {
            all[0].entries[0].2 = 1;
        },
        |all| {
            all[0].entries[0].1 = 3;
        },
    ];
    for change in valid {
        read_back(&changed(change));
    }
}

#[test]
fn a_section_of_groups_has_its_length_and_its_version() {
    let whole = written(&both());
    let with = |content: &[u8]| {
        let mut out = Writer::default();
        out.raw(content);
        with_section(&grouped(), "GRPS", &out)
    };
    read_back(&with(whole.bytes()));
    for len in 0..whole.end() {
        refused(&with(&whole.bytes()[..len]));
    }
    let longer = [whole.bytes(), &[0]].concat();
    says("1 bytes too many (section GRPS", &refused(&with(&longer)));
    let mut other = with(whole.bytes());
    other[8] = 3;
    says(" bytes too many", &refused(&sealed(other)));
    let mut other = full().snapshot();
    other[8] = 4;
    says("left (section header", &refused(&sealed(other)));
}

#[test]
fn groups_that_somebody_else_sealed_are_refused_or_in_order() {
    let bytes = snapshot_of(&both());
    let start = bytes.len() - written(&both()).end();
    let restored = restored_if_sealed(&bytes, start);
    // Other names, ids, places and uses are valid.
    assert!(restored > 100, "{restored}");
}
