"""The slots of a match: an engine's table, read by the index."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def match(size: int, *, tokens: int | None = None, start: int = 0) -> kvtrie.Match:
    """Blocks 5, 0 and 7, in this order, or some of them."""
    index = kvtrie.RadixIndex(8, size, moved_runs=False)
    seq = kvtrie.TokenSequence(range(3 * size), SPACE)
    index.insert(seq, [5, 0, 7], num_computed=3 * size, source=kvtrie.COMPUTED)
    return index.lookup(kvtrie.TokenSequence(range(tokens or 3 * size), SPACE), start=start)


def table(size: int, rows: int = 8) -> Any:
    slots = 100 * np.arange(rows)[:, None] + np.arange(size)
    return slots if size > 1 else slots[:, 0].copy()


@pytest.mark.parametrize("size", [1, 4, 16])
def test_slots_are_those_of_the_blocks_in_order(size: int) -> None:
    expected = [100 * block + offset for block in (5, 0, 7) for offset in range(size)]
    assert match(size).slots(table(size)).tolist() == expected
    assert match(size, tokens=2 * size).slots(table(size)).tolist() == expected[: 2 * size]
    assert match(size, start=size).slots(table(size)).tolist() == expected[size:]
    out = np.full(3 * size, -1)
    assert match(size).slots(table(size), out) is out
    assert out.tolist() == expected


def found(blocks: list[int], size: int) -> kvtrie.Match:
    """A match of these blocks."""
    index = kvtrie.RadixIndex(2000, size, moved_runs=False)
    seq = kvtrie.TokenSequence(range(len(blocks) * size), SPACE)
    index.insert(seq, blocks, num_computed=len(seq), source=kvtrie.COMPUTED)
    return index.lookup(seq)


# Consecutive ids are copied at once, and looked at in chunks of 16.
BLOCKS = {
    "one": [7],
    "a chunk": list(range(3, 259)),
    "more than a chunk": list(range(3, 260)),
    "all": list(range(2000)),
    "the last": list(range(1000, 2000)),
    "descending": list(range(600, 0, -1)),
    "two": [*range(700), *range(1000, 1500)],
    "ends elsewhere": [*range(512), 700],
    "the second chunk apart": [*range(256), *range(300, 500)],
    "two of a chunk swapped": [*range(300), 301, 300, *range(302, 900)],
    "first and last as in a run": [5, 7, 6, 8],
    "every second": list(range(0, 800, 2)),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", BLOCKS)
def test_slots_of_any_blocks_are_copied(name: str, size: int) -> None:
    blocks = BLOCKS[name]
    rows = table(size, 2000)
    slots = found(blocks, size).slots(rows)
    assert slots.tolist() == rows[blocks].ravel().tolist()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_match_has_the_ids_in_order_and_says_whether_they_are_consecutive(name: str) -> None:
    blocks = BLOCKS[name]
    match = found(blocks, 2)
    assert match.blocks.tolist() == blocks
    assert match.blocks.dtype == np.int32
    is_run = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    assert match.consecutive_from == (blocks[0] if is_run else None)


def test_no_match_has_no_slots() -> None:
    index = kvtrie.RadixIndex(8, 4, moved_runs=False)
    found = index.lookup(kvtrie.TokenSequence(range(8), SPACE))
    assert found.consecutive_from is None
    assert found.slots(table(4)).tolist() == []
    assert found.slots(table(4, rows=0)).dtype == np.int64


def test_a_part_of_a_buffer_is_written() -> None:
    buffer = np.zeros(20, np.int64)
    match(4).slots(table(4), buffer[4:16])
    assert buffer[:4].tolist() == buffer[16:].tolist() == [0, 0, 0, 0]
    assert buffer[4] == 500


@pytest.mark.parametrize(
    "bad",
    [
        [1, 2, 3],
        table(4).astype(np.int32),
        table(4)[:, ::2],
        table(4).T,
        table(4)[None],
        np.int64(3),
        None,
    ],
    ids=lambda one: type(one).__name__,
)
def test_another_table_is_a_type_error(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"slots: table is of type .*; it must be a contiguous"):
        match(4).slots(bad)


def test_a_table_without_a_block_is_a_value_error() -> None:
    out = np.zeros(12, np.int64)
    with pytest.raises(ValueError, match="table has 7 rows, and block 7 is among the blocks"):
        match(4).slots(table(4, rows=7), out)
    assert not out.any()


@pytest.mark.parametrize("length", [0, 11, 13])
def test_a_buffer_of_another_length_is_a_value_error(length: int) -> None:
    out = np.zeros(length, np.int64)
    with pytest.raises(ValueError, match=f"out has {length} elements; the match has 12 tokens"):
        match(4).slots(table(4), out)
    assert not out.any()


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(12, np.int32),
        np.zeros((3, 4), np.int64),
        np.zeros(24, np.int64)[::2],
        [0] * 12,
    ],
    ids=["int32", "two", "strided", "list"],
)
def test_another_buffer_is_a_type_error(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"slots: out is of type .*; it must be a contiguous"):
        match(4).slots(table(4), bad)


def test_a_buffer_that_is_the_table_or_cannot_be_written_is_a_type_error() -> None:
    slots = np.arange(8)
    with pytest.raises(TypeError, match="nobody else borrows"):
        match(1).slots(slots, slots[:3])
    slots = np.zeros(3, np.int64)
    slots.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        match(1).slots(np.arange(8), slots)
