"""Reads the trees of a snapshot: each edge with tokens, blocks, labels, uses, tags and holders.

The index itself lists no edges, and a snapshot has all of them. Give `read_snapshot` bytes that
`RadixIndex.restore` has accepted: restoring checks every count and position, and this reader only
cuts them into pieces. It reads versions 3, 5, 7 and 9 of the format in
``rust/kvtrie-core/src/snapshot`` and refuses others, which have groups. 100,000 edges take about a
second.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from kvtrie._core import SHARED, Namespace, SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_Row = TypeVar("_Row")

MAGIC: Final = b"KVTRIE\x1a\n"
"""The first bytes of a snapshot."""
ABSENT: Final = (1 << 32) - 1
"""In place of a block's id: the block is a hole."""

_VERSIONS: Final = (3, 5, 7, 9)
"""Without groups; in 5 and 9 some items say how many positions they take, in 7 and 9 some grades
have later bounds."""
_HEADER: Final = 24
_SECTION: Final = struct.Struct("<4sQ")
# The bounds of a grade, and those that are there if its number is marked.
_BOUNDS: Final = 112
_LATER_BOUNDS: Final = 8
_MARK: Final = 0x80
_SESSION: Final = 16
_LABELS, _ITEMS, _TAGS, _USES, _SOURCES, _DEAD, _SESSIONS, _POSITIONS = (
    1 << bit for bit in range(8)
)


class SnapshotItem(NamedTuple):
    """Tokens of a path that represent something else, such as an image."""

    start: int
    end: int
    digest: bytes
    positions: int = 0
    """How many positions the whole item takes; 0 if each of its tokens takes one."""
    num_tokens: int = 0
    """Tokens of the whole item, or 0 like ``positions``."""


class DepthRange(NamedTuple):
    """A number for the blocks at some depths."""

    start: int
    end: int
    value: int


class TagRange(NamedTuple):
    """The kinds of some tokens; bit i is kind i."""

    start: int
    end: int
    kinds: int


class HolderRange(NamedTuple):
    """Digests of the sessions that the blocks at some depths belong to, the first one first."""

    start: int
    end: int
    sessions: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotEdge:
    """One edge: blocks in a row without a branch.

    Depths count blocks from the root; positions count tokens.

    Attributes:
        parent: The number of the edge above; -1 at the root of a namespace.
        space: The number of its namespace.
        depth: Its first block.
        tokens: Its token ids. Inside an item they are ids that stand for it in the index.
        blocks: Block ids; `ABSENT` is a hole.
        labels: Per block: 0 if it is exact, else bit 15, the grade in 7 bits and the hops in 8;
            None if all are exact.
        last_use: Per block, the time of its last use on the index's clock.
        items: Items that overlap the edge.
        tags: Ascending ranges of positions with their kinds.
        dead: Depths that are marked dead, with the number of the mark.
        holders: Ascending ranges of depths with their sessions.
    """

    parent: int
    space: int
    depth: int
    tokens: NDArray[np.uint32]
    blocks: NDArray[np.uint32]
    labels: NDArray[np.uint16] | None
    last_use: NDArray[np.uint64]
    items: tuple[SnapshotItem, ...] = ()
    tags: tuple[TagRange, ...] = ()
    dead: tuple[DepthRange, ...] = ()
    holders: tuple[HolderRange, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotTrees:
    """What a snapshot holds, edge by edge.

    Attributes:
        block_size: Tokens per block.
        num_blocks: Blocks of the pool.
        clock: The index's clock; a block's age is this minus its last use.
        kinds: Names of kinds by bit.
        spaces: The namespaces.
        edges: All edges, an edge after the one above it.
    """

    block_size: int
    num_blocks: int
    clock: int
    kinds: tuple[str, ...]
    spaces: list[Namespace] = field(default_factory=list)
    edges: list[SnapshotEdge] = field(default_factory=list)


class _Cursor:
    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at

    def raw(self, size: int) -> bytes:
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        self.at += form.size
        return form.unpack_from(self.data, self.at - form.size)

    def number(self, form: struct.Struct) -> int:
        return self.unpack(form)[0]

    def text(self) -> str:
        return self.raw(self.number(_U64)).decode()

    def array(self, kind: str, count: int) -> NDArray[Any]:
        found: NDArray[Any] = np.frombuffer(self.data, kind, count, self.at)
        self.at += found.nbytes
        return found


_U8, _U32, _U64 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")
_EDGE: Final = struct.Struct("<IIBQ")
_ITEM: Final = struct.Struct("<QQB")
_TAG: Final = struct.Struct("<QQQ")
_USE: Final = struct.Struct("<IQ")
_RANGE: Final = struct.Struct("<IIQ")
_HELD: Final = struct.Struct("<IIB")


def read_snapshot(blob: bytes) -> SnapshotTrees:
    """Read the trees of a snapshot.

    Args:
        blob: Bytes that `RadixIndex.restore` accepts.

    Raises:
        SnapshotError: They are no snapshot, or one of another version.
    """
    if blob[: len(MAGIC)] != MAGIC:
        msg = "these bytes are no snapshot of an index"
        raise SnapshotError(msg)
    version = int.from_bytes(blob[8:12], "little")
    if version not in _VERSIONS:
        msg = f"version {version}; the inspector reads versions 3, 5, 7 and 9, without groups"
        raise SnapshotError(msg)
    sections, at, whole = {}, _HEADER, memoryview(blob)
    while at < len(blob):
        name, size = _SECTION.unpack_from(blob, at)
        at += _SECTION.size
        sections[name] = _Cursor(whole[at : at + size])
        at += size
    config = sections[b"CONF"]
    num_blocks, block_size = config.number(_U64), config.number(_U64)
    clock = sections[b"COUN"].number(_U64)
    names = sections[b"KIND"]
    kinds = tuple(names.text() for _ in range(names.number(_U64)))
    trees = SnapshotTrees(block_size, num_blocks, clock, kinds)
    cursor = sections[b"TREE"]
    places, vacant = cursor.number(_U64), cursor.number(_U64)
    cursor.at += 4 * vacant
    for _ in range(places - vacant):
        _read_tree(cursor, trees)
    return trees


def _read_tree(cursor: _Cursor, trees: SnapshotTrees) -> None:
    space, first = len(trees.spaces), len(trees.edges)
    trees.spaces.append(_namespace(cursor))
    for _ in range(cursor.number(_U8)):
        is_marked = cursor.number(_U8) & _MARK
        cursor.at += _BOUNDS + (_LATER_BOUNDS if is_marked else 0)
    # The latest use of a path that ends in an edge, and of one that ends below it.
    latest: list[int] = []
    count = cursor.number(_U64)
    for _ in range(count):
        parent, blocks, has, time = cursor.unpack(_EDGE)
        above = trees.edges[first + parent - 1] if parent else None
        edge, use = _read_edge(
            cursor,
            (blocks, has, time),
            size=trees.block_size,
            parent=first + parent - 1 if above else -1,
            space=space,
            depth=above.depth + len(above.blocks) if above else 0,
        )
        trees.edges.append(edge)
        latest.append(use)
    # A use is stored at the deepest edge and counts for all blocks above it.
    for number in range(count - 1, -1, -1):
        parent = trees.edges[first + number].parent
        if parent < 0:
            continue
        above, use = trees.edges[parent], latest[number]
        np.maximum(above.last_use, np.uint64(use), out=above.last_use)
        latest[parent - first] = max(latest[parent - first], use)


def _namespace(cursor: _Cursor) -> Namespace:
    model, kv_dtype, rope = cursor.text(), cursor.text(), cursor.text()
    adapter = cursor.text() if cursor.number(_U8) else None
    salt = cursor.text() if cursor.number(_U8) else SHARED
    return Namespace(model=model, kv_dtype=kv_dtype, rope=rope, adapter=adapter, salt=salt)


def _read_edge(
    cursor: _Cursor,
    head: tuple[int, int, int],
    *,
    size: int,
    parent: int,
    space: int,
    depth: int,
) -> tuple[SnapshotEdge, int]:
    """The edge, and the latest use of a path that ends in it."""
    count, has, latest = head
    tokens, blocks = cursor.array("<u4", count * size), cursor.array("<u4", count)
    last_use = np.full(count, latest, np.uint64)
    labels = cursor.array("<u2", count) if has & _LABELS else None
    read_item = _item_with_positions if has & _POSITIONS else _item
    items = _each(cursor, read_item) if has & _ITEMS else ()
    tags = _each(cursor, _tag) if has & _TAGS else ()
    for end, time in _each(cursor, _use) if has & _USES else ():
        np.maximum(last_use[: end - depth], np.uint64(time), out=last_use[: end - depth])
        latest = max(latest, time)
    for start, end, time in _each(cursor, _range) if has & _SOURCES else ():
        part = last_use[start - depth : end - depth]
        np.maximum(part, np.uint64(time), out=part)
    edge = SnapshotEdge(
        parent=parent,
        space=space,
        depth=depth,
        tokens=tokens,
        blocks=blocks,
        labels=labels,
        last_use=last_use,
        items=items,
        tags=tags,
        dead=_each(cursor, _range) if has & _DEAD else (),
        holders=_each(cursor, _holders) if has & _SESSIONS else (),
    )
    return edge, latest


def _each(cursor: _Cursor, read: Callable[[_Cursor], _Row]) -> tuple[_Row, ...]:
    return tuple(read(cursor) for _ in range(cursor.number(_U64)))


def _item(cursor: _Cursor) -> SnapshotItem:
    start, end, size = cursor.unpack(_ITEM)
    return SnapshotItem(start, end, cursor.raw(size))


def _item_with_positions(cursor: _Cursor) -> SnapshotItem:
    item, positions = _item(cursor), cursor.number(_U64)
    return item._replace(positions=positions, num_tokens=cursor.number(_U64)) if positions else item


def _tag(cursor: _Cursor) -> TagRange:
    return TagRange(*cursor.unpack(_TAG))


def _use(cursor: _Cursor) -> tuple[int, ...]:
    return cursor.unpack(_USE)


def _range(cursor: _Cursor) -> DepthRange:
    return DepthRange(*cursor.unpack(_RANGE))


def _holders(cursor: _Cursor) -> HolderRange:
    start, end, count = cursor.unpack(_HELD)
    return HolderRange(start, end, tuple(cursor.raw(_SESSION) for _ in range(count)))
