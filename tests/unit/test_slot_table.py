"""A table of slots: ids that are taken and given back, and the slots of each."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import kvtrie


def table(num_blocks: int, size: int) -> tuple[kvtrie.SlotTable, Any]:
    memory = np.full(num_blocks * size, -1, np.int64)
    return kvtrie.SlotTable(num_blocks, size, memory), memory


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_any_order_of_calls_does_what_lists_do(size: int, dtype: Any) -> None:
    slots, memory = table(50, size)
    stack, held = list(range(49, -1, -1)), dict[int, list[int]]()
    rng = Random(size)
    for _ in range(300):
        if rng.random() < 0.5:
            count, start = rng.randrange(min(9, len(stack) + 1)), rng.randrange(3)
            pages = rng.sample(range(1000), count)
            given = [page * size + at for page in pages for at in range(size)]
            before = [7] * start
            values = np.array([*before, *given, 9], dtype)
            ids = slots.take(count, values, start).tolist()
            assert ids == [stack.pop() for _ in range(count)]
            held |= {one: [page] for one, page in zip(ids, pages, strict=True)}
        else:
            ids = rng.sample(sorted(held), rng.randrange(min(9, len(held) + 1)))
            pages = [held.pop(one)[0] for one in reversed(ids)]
            assert slots.give_back(np.array(ids, np.int32)).tolist() == pages
            stack += ids
        assert slots.free_ids.tolist() == stack
        assert slots.num_free == len(stack)
        rows = memory.reshape(50, size)
        assert all((rows[one] // size == page).all() for one, [page] in held.items())


def test_a_table_without_memory_has_ids_alone() -> None:
    slots: Any = kvtrie.SlotTable(3, 2)
    assert slots.take(2).tolist() == [0, 1]
    assert slots.give_back([1]).tolist() == [0]
    assert repr(slots) == "SlotTable(num_blocks=3, block_size=2, num_free=2)"
    assert (slots.num_blocks, slots.block_size) == (3, 2)
    with pytest.raises(
        TypeError, match=r"SlotTable\.take: slots is of type 'ndarray'; it must be N"
    ):
        slots.take(1, np.zeros(2, np.int64))
    assert slots.num_free == 2


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([0, 1, 5], r"ids\[2\] is 5, which is free already"),
        ([0, 1, 0], r"ids\[2\] is 0, which is free already"),
        ([0, 8], r"ids\[1\] is 8; it must be in \[0, 8\)"),
    ],
)
def test_ids_that_are_free_are_not_taken_back(ids: list[int], says: str) -> None:
    slots, _ = table(8, 2)
    slots.take(3, np.arange(6))
    before = slots.free_ids.tolist()
    with pytest.raises(ValueError, match=f"SlotTable.give_back: {says}"):
        slots.give_back(ids)
    assert slots.free_ids.tolist() == before
    assert slots.give_back([0, 1, 2]).tolist() == [2, 1, 0]


def test_what_cannot_be_taken_changes_nothing() -> None:
    slots, memory = table(4, 2)
    given = np.arange(20)
    with pytest.raises(kvtrie.OutOfBlocksError, match=r"take: count is 5; 4 ids are free"):
        slots.take(5, given)
    for count, start in ((4, 13), (4, 99), (2**60, 0), (1, 2**63 - 1)):
        with pytest.raises(ValueError, match=r"SlotTable\.take: slots has 20 elements; "):
            slots.take(count, given, start)
    bad: Any
    for bad in (given[::2], given.astype(np.float64), [1, 2], given.reshape(4, 5)):
        with pytest.raises(TypeError, match=r"SlotTable\.take: slots is of type "):
            slots.take(1, bad)
    for count, start in ((-1, 0), (1, -1)):
        with pytest.raises(ValueError, match=r"SlotTable\.take: (count|start) is -1; "):
            slots.take(count, given, start)
    assert slots.free_ids.tolist() == [3, 2, 1, 0]
    assert memory.tolist() == [-1] * 8


def test_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SlotTable: memory has 7 elements; it must have 4 \* 2"):
        kvtrie.SlotTable(4, 2, np.zeros(7, np.int64))
    frozen = np.zeros(8, np.int64)
    frozen.flags.writeable = False
    bad: Any
    for bad in (np.zeros(8, np.int32), np.zeros((4, 2), np.int64), frozen, [0] * 8):
        with pytest.raises(TypeError, match="SlotTable: memory is of type "):
            kvtrie.SlotTable(4, 2, bad)
    with pytest.raises(ValueError, match="SlotTable: num_blocks is 0; "):
        kvtrie.SlotTable(0, 2)
    with pytest.raises(ValueError, match="SlotTable: block_size is 5000; "):
        kvtrie.SlotTable(4, 5000)
