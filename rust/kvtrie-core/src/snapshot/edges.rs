//! The section of trees: namespaces, and edges with all their data.

use std::sync::Arc;

use smallvec::SmallVec;

use super::bytes::{Reader, Writer};
use super::checks::{new_id, read_time};
use crate::error::{Error, Result};
use crate::grade::{Grade, Grades};
use crate::ids::{ABSENT, Depth, NO_NODE, NodeIndex};
use crate::index::{PartsMut, RadixIndex};
use crate::namespace::{Namespace, Salt};
use crate::ranges::{Range, Ranges};
use crate::session::{Members, SessionId, SessionRun, Sessions};
use crate::span::{TagRun, Tags};
use crate::storage::extras::{Dead, Extras, InnerUses};
use crate::storage::node::Node;
use crate::storage::payload::Label;
use crate::tokens::Item;

/// Flags of the optional parts of an edge.
const LABELS: u8 = 1;
const ITEMS: u8 = 1 << 1;
const TAGS: u8 = 1 << 2;
const USES: u8 = 1 << 3;
const SOURCES: u8 = 1 << 4;
const DEAD: u8 = 1 << 5;
const SESSIONS: u8 = 1 << 6;
/// Each item also has the number of positions that it takes or 0, and if it takes some, its number of tokens.
const POSITIONS: u8 = 1 << 7;

/// The fewest bytes of a run of sessions.
const SESSION_RUN: usize = 9 + SessionId::BYTES;

/// The fewest bytes of an edge without its blocks.
const EDGE: usize = 17;
/// The fewest bytes of a tree without its edges: three one-letter fields, two flags and two counts.
const TREE: usize = 3 * 9 + 2 + 1 + 8;
/// The most edges that are read with shortened hashes. Children collide then, so finding one is O(edges).
const MOST_CUT: usize = 1 << 14;
const WHOLE_HASH: u32 = 32;

/// The nodes of a tree: parents first, children in the order of their records.
fn nodes_of(index: &RadixIndex, root: NodeIndex) -> Vec<NodeIndex> {
    let mut nodes = vec![root];
    let mut at = 0;
    while let Some(&node) = nodes.get(at) {
        nodes.extend(index.forest().children(node));
        at += 1;
    }
    nodes
}

/// For each node index, the node's number in a snapshot, which is its index once restored.
pub(super) fn numbers(index: &RadixIndex) -> Vec<u32> {
    let mut numbers = Vec::new();
    let all = index.forest().trees().iter();
    let all = all.flat_map(|(_, tree)| nodes_of(index, tree.root));
    for (number, node) in (0..).zip(all) {
        let node = node as usize;
        if numbers.len() <= node {
            numbers.resize(node + 1, NO_NODE);
        }
        numbers[node] = number;
    }
    numbers
}

pub(super) fn write(index: &RadixIndex, out: &mut Writer) {
    let vacant = index.forest().trees().vacant();
    out.len(index.forest().trees().len() + vacant.len());
    out.len(vacant.len());
    out.u32s(vacant);
    let mut numbers = Vec::new();
    for (_, tree) in index.forest().trees().iter() {
        write_namespace(&tree.namespace, out);
        write_grades(&tree.grades, out);
        let nodes = nodes_of(index, tree.root);
        for (number, &node) in (0_u32..).zip(&nodes) {
            let node = node as usize;
            if numbers.len() <= node {
                numbers.resize(node + 1, 0);
            }
            numbers[node] = number;
        }
        out.len(nodes.len() - 1);
        for &node in &nodes[1..] {
            let node = index.forest().node(node);
            out.u32(numbers[node.parent as usize]);
            write_edge(node, index.config().block_size, out);
        }
    }
}

fn write_namespace(namespace: &Namespace, out: &mut Writer) {
    out.text(namespace.model());
    out.text(namespace.kv_dtype());
    out.text(namespace.rope());
    out.u8(namespace.adapter().is_some().into());
    if let Some(adapter) = namespace.adapter() {
        out.text(adapter);
    }
    match namespace.salt() {
        Salt::Shared => out.u8(0),
        Salt::Tenant(salt) => {
            out.u8(1);
            out.text(salt);
        }
    }
}

fn read_namespace(from: &mut Reader<'_>) -> Result<Namespace> {
    let (model, kv_dtype, rope) = (from.text()?, from.text()?, from.text()?);
    let has_adapter = from.u8()?;
    let adapter = match has_adapter {
        0 => None,
        1 => Some(from.text()?),
        _ => return Err(from.wrong("a namespace has an adapter or has none")),
    };
    let salt = match from.u8()? {
        0 => Salt::Shared,
        1 => Salt::Tenant(from.text()?),
        _ => return Err(from.wrong("a salt is shared or a tenant's")),
    };
    Namespace::new(model, kv_dtype, rope, adapter, salt).map_err(Error::snapshot)
}

/// Added to the number of a grade with later bounds; numbers are below it.
const LATER_BOUNDS: u8 = 0x80;

/// Writes the grades that have a number of their own.
fn write_grades(grades: &Grades, out: &mut Writer) {
    let own = grades.iter().filter(|&(number, ..)| number > 0);
    out.u8(u8::try_from(own.clone().count()).unwrap_or(u8::MAX));
    for (number, grade, _) in own {
        let (mark, numbers) = if grade.has_later_bounds() {
            (LATER_BOUNDS, Grade::NUMBERS)
        } else {
            (0, Grade::FIRST_NUMBERS)
        };
        out.u8(number | mark);
        for bound in grade.to_numbers().take(numbers) {
            out.u64(bound);
        }
    }
}

fn read_grades(index: &mut RadixIndex, from: &mut Reader<'_>, tree: u32) -> Result<()> {
    for _ in 0..from.u8()? {
        let marked = from.u8()?;
        let (number, is_marked) = (marked & !LATER_BOUNDS, marked & LATER_BOUNDS != 0);
        let mut numbers = [0; Grade::NUMBERS];
        let told = if is_marked {
            Grade::NUMBERS
        } else {
            Grade::FIRST_NUMBERS
        };
        for bound in &mut numbers[..told] {
            *bound = from.u64()?;
        }
        let grade = Grade::from_numbers(&numbers);
        from.must(grade.has_later_bounds() == is_marked, || {
            format!("grade {number} says that it has later bounds, and has none")
        })?;
        let grades = index.parts_mut().forest.trees_mut().grades_mut(tree);
        let is_new = grades.restore(number, grade);
        from.must(is_new, || {
            format!("grade {number} is out of order, or is named twice")
        })?;
    }
    Ok(())
}

fn write_edge(node: &Node, block_size: usize, out: &mut Writer) {
    out.u32(node.blocks.num_blocks());
    let none = Extras::default();
    let extras = node.extras().unwrap_or(&none);
    let mut has = 0;
    for (bit, is_there) in [
        (LABELS, extras.num_approximate > 0),
        (ITEMS, !extras.items.is_empty()),
        (TAGS, !extras.tags.runs().is_empty()),
        (USES, !extras.uses.pairs().is_empty()),
        (SOURCES, !extras.source_uses.is_empty()),
        (DEAD, extras.dead.is_some()),
        (SESSIONS, !extras.sessions.is_empty()),
        (POSITIONS, takes_positions(extras)),
    ] {
        has |= if is_there { bit } else { 0 };
    }
    out.u8(has);
    out.u64(node.whole_use());
    out.u32s(node.blocks.tokens(block_size));
    out.u32s(node.blocks.ids(block_size));
    if has & LABELS != 0 {
        for label in &extras.labels {
            out.u16(label.bits());
        }
    }
    if has & ITEMS != 0 {
        out.len(extras.items.len());
        for item in &extras.items {
            out.len(item.start());
            out.len(item.end());
            out.u8(u8::try_from(item.digest().len()).unwrap_or(u8::MAX));
            out.raw(item.digest());
            if has & POSITIONS != 0 {
                out.len(item.positions().unwrap_or(0));
                if item.positions().is_some() {
                    out.len(item.num_tokens());
                }
            }
        }
    }
    if has & TAGS != 0 {
        out.len(extras.tags.runs().len());
        for run in extras.tags.runs() {
            out.len(run.start);
            out.len(run.end);
            out.u64(run.mask);
        }
    }
    if has & USES != 0 {
        out.len(extras.uses.pairs().len());
        for &(end, time) in extras.uses.pairs() {
            out.u32(end);
            out.u64(time);
        }
    }
    if has & SOURCES != 0 {
        write_ranges(&extras.source_uses, out);
    }
    if let Some(dead) = &extras.dead {
        write_ranges(&dead.marks, out);
    }
    if has & SESSIONS != 0 {
        write_sessions(&extras.sessions, out);
    }
}

fn takes_positions(extras: &Extras) -> bool {
    let mut items = extras.items.iter();
    items.any(|item| item.positions().is_some())
}

/// Whether a grade of some tree has later bounds.
pub(super) fn has_later_bounds(index: &RadixIndex) -> bool {
    let mut trees = index.forest().trees().iter();
    trees.any(|(_, tree)| {
        let mut grades = tree.grades.iter();
        grades.any(|(_, grade, _)| grade.has_later_bounds())
    })
}

/// Whether an item of some edge says how many positions it takes.
pub(super) fn has_positions(index: &RadixIndex) -> bool {
    let mut nodes = index.forest().nodes();
    nodes.any(|node| node.extras().is_some_and(takes_positions))
}

fn write_sessions(sessions: &Sessions, out: &mut Writer) {
    out.len(sessions.runs().len());
    for run in sessions.runs() {
        out.u32(run.from);
        out.u32(run.to);
        out.u8(u8::try_from(run.members.len()).unwrap_or(u8::MAX));
        for session in &run.members {
            out.raw(session.digest());
        }
    }
}

fn write_ranges(ranges: &Ranges, out: &mut Writer) {
    let ranges = ranges.as_slice();
    out.len(ranges.len());
    for range in ranges {
        out.u32(range.from);
        out.u32(range.to);
        out.u64(range.value);
    }
}

pub(super) fn read(index: &mut RadixIndex, from: &mut Reader<'_>) -> Result<()> {
    let places = from.size()?;
    let num_vacant = from.count(4)?;
    let vacant = from.u32s(num_vacant)?;
    let trees = places.checked_sub(num_vacant);
    let trees = trees.filter(|&trees| trees <= from.left() / TREE && places < NO_NODE as usize);
    from.must(trees.is_some(), || {
        format!("{places} trees announced, {num_vacant} of them vacant")
    })?;
    let mut is_vacant = vec![false; places];
    for &place in &vacant {
        if let Some(mark) = is_vacant.get_mut(place as usize) {
            *mark = true;
        }
    }
    let has_room = index
        .parts_mut()
        .forest
        .trees_mut()
        .make_room(places, vacant);
    from.must(
        has_room,
        || "a place without a tree is named twice, or is none",
    )?;
    for (place, is_vacant) in (0..).zip(is_vacant) {
        if !is_vacant {
            read_tree(index, from, place)?;
        }
    }
    let PartsMut {
        forest, eviction, ..
    } = index.parts_mut();
    for node in (0..).take(forest.num_nodes()) {
        eviction.dead_mut().requeue(forest, node);
        if !forest.node(node).has_children() && !forest.node(node).is_root() {
            eviction.requeue(forest, node);
        }
    }
    Ok(())
}

fn read_tree(index: &mut RadixIndex, from: &mut Reader<'_>, tree: u32) -> Result<()> {
    let namespace = Arc::new(read_namespace(from)?);
    let (root, is_new) = index.parts_mut().forest.restore_tree(tree, &namespace);
    from.must(is_new, || "a namespace comes twice")?;
    read_grades(index, from, tree)?;
    let block = size_of::<u32>() * (index.config().block_size + 1);
    let count = from.count(EDGE + block)?;
    let all = index.forest().num_nodes() + count;
    // A position in the eviction order has 31 bits.
    from.must(all < 1 << 31, || format!("{all} edges"))?;
    let is_cut = index.config().hash_bits < WHOLE_HASH;
    from.must(!is_cut || all <= MOST_CUT, || {
        format!("{all} edges under hashes cut short, a testing aid; the limit is {MOST_CUT}")
    })?;
    for number in 1..=crate::ids::depth(count) {
        let parent = from.u32()?;
        from.must(parent < number, || {
            format!("edge {number} hangs below edge {parent}")
        })?;
        read_edge(index, from, tree, root + parent)?;
    }
    let all_used = index.forest().trees()[tree].grades.are_all_used();
    from.must(all_used, || "a grade without a block")?;
    Ok(())
}

fn read_edge(
    index: &mut RadixIndex,
    from: &mut Reader<'_>,
    tree: u32,
    parent: NodeIndex,
) -> Result<()> {
    let block_size = index.config().block_size;
    let depth = index.forest().node(parent).end();
    let blocks = from.u32()?;
    let end = depth.checked_add(blocks).filter(|&end| end < ABSENT);
    let Some(end) = end.filter(|&end| end > depth) else {
        return Err(from.wrong(format_args!("an edge of {blocks} blocks at depth {depth}")));
    };
    let has = from.u8()?;
    from.must(has & (ITEMS | POSITIONS) != POSITIONS, || {
        format!("an edge has {has:#x}, positions without items")
    })?;
    let time = read_time(index, from)?;
    let count = (blocks as usize).saturating_mul(block_size);
    let tokens = from.u32s(count)?;
    let ids = from.u32s(blocks as usize)?;
    let mut extras = Extras::default();
    if has & LABELS != 0 {
        extras.labels = read_labels(index, from, tree, &ids)?;
    }
    if has & ITEMS != 0 {
        extras.items = read_items(index, from, parent, end, has & POSITIONS != 0)?;
    }
    let above = index.forest().node(parent);
    extras.shift = above.shift_at(depth as usize * block_size);
    if has & TAGS != 0 {
        extras.tags = read_tags(index, from, &ids, depth)?;
    }
    if has & USES != 0 {
        extras.uses = read_uses(index, from, (depth, end), time)?;
    }
    if has & SOURCES != 0 {
        extras.source_uses = read_ranges(from, &ids, depth, index.clock())?;
    }
    if has & DEAD != 0 {
        let marks = read_ranges(from, &ids, depth, index.eviction().dead().last_mark())?;
        let count = u64::from(marks.num_depths());
        let parts = index.parts_mut();
        parts.eviction.dead_mut().restore(parts.forest, tree, count);
        extras.dead = Some(Box::new(Dead { marks, loose: 0 }));
    }
    if has & SESSIONS != 0 {
        extras.sessions = read_sessions(from, &ids, depth)?;
    }
    if has & TAGS != 0 {
        index.parts_mut().tagging.restore_tags();
    }
    let node = Node::of_parts(
        (tree, parent, depth),
        &tokens,
        &ids,
        time,
        extras,
        block_size,
    );
    let node = index.parts_mut().forest.restore_node(node);
    for (place, &id) in (depth..).zip(&ids) {
        if id != ABSENT {
            new_id(index, from, id)?;
            index.parts_mut().forest.restore_block(id, node, place);
        }
    }
    let forest = index.parts_mut().forest;
    let first = forest.node(node).first_block(block_size);
    let twin = forest.child(parent, first).is_some_and(|twin| {
        let twin = forest.node(twin).first_block(block_size);
        twin.common(first) == block_size
    });
    from.must(!twin, || "two edges begin alike at one place")?;
    forest.link(node);
    Ok(())
}

fn read_labels(
    index: &RadixIndex,
    from: &mut Reader<'_>,
    tree: u32,
    ids: &[u32],
) -> Result<Vec<Label>> {
    let grades = &index.forest().trees()[tree].grades;
    let left = from.left();
    from.must(ids.len() <= left / 2, || {
        format!("{} labels announced, {left} bytes left", ids.len())
    })?;
    let mut labels = Vec::with_capacity(ids.len());
    for &id in ids {
        let bits = from.u16()?;
        let label = Label::from_bits(bits)
            .filter(|&label| id != ABSENT || label == Label::EXACT)
            .filter(|&label| grades.knows(label));
        labels
            .push(label.ok_or_else(|| from.wrong(format_args!("label {bits:#x} of block {id}")))?);
    }
    let any = labels.iter().any(|label| !label.is_exact());
    from.must(any, || "labels of exact blocks alone")?;
    Ok(labels)
}

/// Reads the items of an edge that ends at depth `end`. An item that starts before the edge must also be its parent's
/// last item, up to the parent's end.
fn read_items(
    index: &RadixIndex,
    from: &mut Reader<'_>,
    parent: NodeIndex,
    end: Depth,
    have_positions: bool,
) -> Result<Vec<Item>> {
    let above = index.forest().node(parent);
    let start = above.end() as usize * index.config().block_size;
    let end = end as usize * index.config().block_size;
    let count = from.count(18)?;
    let mut items: Vec<Item> = Vec::with_capacity(count);
    for _ in 0..count {
        let (first, last, len) = (from.size()?, from.size()?, from.u8()?);
        let digest = from.raw(len.into())?;
        let mut item = Item::new(first, last, digest).map_err(Error::snapshot)?;
        if have_positions {
            let positions = from.size()?;
            if positions > 0 {
                item = item
                    .taking(positions, from.size()?)
                    .map_err(Error::snapshot)?;
            }
        }
        let after = items.last().map_or(0, Item::end);
        from.must(first >= after && last > start && last <= end, || {
            format!("an item over the tokens [{first}, {last}) of an edge over [{start}, {end})")
        })?;
        if first < start {
            let begun = above.extras().and_then(|extras| extras.items.last());
            let goes_on = begun.is_some_and(|begun| {
                (begun.start(), begun.end()) == (first, start)
                    && (begun.digest(), begun.extent()) == (digest, item.extent())
            });
            from.must(goes_on, || {
                format!("an item from {first} on does not begin above the edge at {start}")
            })?;
        }
        let before = items
            .last()
            .map_or(above.shift_at(first.min(start)), |last| {
                Item::shift_at(std::slice::from_ref(last), first, 0)
            });
        items.push(item.shifted(before));
    }
    from.must(count > 0, || "an empty list of items")?;
    let any = items.iter().any(|item| item.positions().is_some());
    from.must(any == have_positions, || "positions of no item")?;
    Ok(items)
}

fn read_tags(index: &RadixIndex, from: &mut Reader<'_>, ids: &[u32], depth: Depth) -> Result<Tags> {
    let block_size = index.config().block_size;
    let start = depth as usize * block_size;
    let end = start + ids.len() * block_size;
    let count = from.count(24)?;
    let mut runs = Vec::with_capacity(count);
    for _ in 0..count {
        let run = TagRun {
            start: from.size()?,
            end: from.size()?,
            mask: from.u64()?,
        };
        let known = run.mask.checked_shr(crate::ids::depth(index.kinds().len()));
        from.must(
            known.unwrap_or(0) == 0 && run.start >= start && run.end <= end,
            || {
                format!(
                    "tags {:#x} on the tokens [{}, {}) of an edge over [{start}, {end})",
                    run.mask, run.start, run.end
                )
            },
        )?;
        runs.push(run);
    }
    let tags = Tags::from_runs(runs).filter(|tags| !tags.runs().is_empty());
    let tags = tags.ok_or_else(|| from.wrong("tags that are out of order, empty or not joined"))?;
    for (place, _) in (0..).zip(ids).filter(|&(_, &id)| id == ABSENT) {
        let hole = start + place * block_size;
        from.must(tags.union(hole, hole + block_size) == 0, || {
            format!("the hole at position {hole} has tags")
        })?;
    }
    Ok(tags)
}

fn read_uses(
    index: &RadixIndex,
    from: &mut Reader<'_>,
    (start, end): (Depth, Depth),
    whole: u64,
) -> Result<InnerUses> {
    let count = from.count(12)?;
    let mut pairs: SmallVec<[(Depth, u64); 2]> = SmallVec::with_capacity(count);
    for _ in 0..count {
        let (at, time) = (from.u32()?, read_time(index, from)?);
        from.must(at > start && at < end && time > whole, || {
            format!("a use at time {time} ends at depth {at} of an edge over [{start}, {end}), used at {whole}")
        })?;
        pairs.push((at, time));
    }
    let uses = InnerUses::from_pairs(pairs).filter(|uses| !uses.pairs().is_empty());
    uses.ok_or_else(|| from.wrong("uses that are out of order, or none"))
}

/// Reads last uses or dead marks, none above `most`.
fn read_ranges(from: &mut Reader<'_>, ids: &[u32], start: Depth, most: u64) -> Result<Ranges> {
    let count = from.count(16)?;
    let mut ranges = Vec::with_capacity(count);
    for _ in 0..count {
        let range = Range {
            from: from.u32()?,
            to: from.u32()?,
            value: from.u64()?,
        };
        from.must(range.value <= most, || {
            format!("a use or a mark {}; the last one is {most}", range.value)
        })?;
        ranges.push(range);
    }
    let ranges = Ranges::from_vec(ranges).filter(|ranges| !ranges.is_empty());
    let ranges = ranges.ok_or_else(|| from.wrong("ranges that are out of order, or none"))?;
    for range in ranges.as_slice() {
        let at = |depth: Depth| depth.checked_sub(start).map(|at| at as usize);
        let blocks = at(range.from).zip(at(range.to));
        let blocks = blocks.and_then(|(first, end)| ids.get(first..end));
        from.must(
            blocks.is_some_and(|blocks| !blocks.contains(&ABSENT)),
            || {
                format!(
                    "a range over the depths [{}, {}) of {} blocks from {start} on",
                    range.from,
                    range.to,
                    ids.len()
                )
            },
        )?;
    }
    Ok(ranges)
}

fn read_sessions(from: &mut Reader<'_>, ids: &[u32], start: Depth) -> Result<Sessions> {
    let count = from.count(SESSION_RUN)?;
    let mut runs = Vec::with_capacity(count);
    for _ in 0..count {
        let (first, end, len) = (from.u32()?, from.u32()?, from.u8()?);
        let at = |depth: Depth| depth.checked_sub(start).map(|at| at as usize);
        let blocks = at(first).zip(at(end));
        let blocks = blocks.and_then(|(first, end)| ids.get(first..end));
        from.must(
            blocks.is_some_and(|blocks| !blocks.contains(&ABSENT)),
            || {
                format!(
                    "sessions of the depths [{first}, {end}) of {} blocks from {start} on",
                    ids.len()
                )
            },
        )?;
        let mut members = Members::new();
        for _ in 0..len {
            let mut digest = [0; SessionId::BYTES];
            digest.copy_from_slice(from.raw(SessionId::BYTES)?);
            members.push(SessionId::from_digest(digest));
        }
        runs.push(SessionRun {
            from: first,
            to: end,
            members,
        });
    }
    let sessions = Sessions::from_runs(runs).filter(|sessions| !sessions.is_empty());
    sessions.ok_or_else(|| {
        from.wrong("runs of sessions that are out of order, empty, repeated or too many")
    })
}
