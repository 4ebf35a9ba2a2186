"""Lease: the engine loop over plans with any number of gaps, as later milestones will make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtrie._core import OutOfBlocksError
from kvtrie.engines._lease import Lease
from kvtrie.engines._store import Store

BLOCK = 4


class FakePlan:
    """Two blocks in place, then copied and computed pieces in turn."""

    def __init__(self, gaps: list[tuple[int, int]], length: int) -> None:
        self.blocks = np.array([7, 8], dtype=np.int32)
        self.num_new_blocks = -(-length // BLOCK) - 2
        self.gaps = np.array(gaps, dtype=np.int64).reshape(-1, 2)
        self.calls: list[str] = []

    def moves(self, table: np.ndarray) -> str:
        return f"moves of {table.tolist()}"

    def release_sources(self) -> None:
        self.calls.append("release_sources")

    def release(self) -> None:
        self.calls.append("release")


class FakeStore:
    """Stands for index, free list and pool at once, and writes down what it is asked."""

    def __init__(self, plan: FakePlan, num_free: int = 20) -> None:
        self.made_plan = plan
        self.free_ids = list(range(20, 20 + num_free))
        self.inserted: list[tuple[list[int], int, int]] = []
        self.copied: list[str] = []
        self.layout = SimpleNamespace(block_size=BLOCK)

    def plan(self, _seq: Any, _policy: Any, *, keep_last: int) -> FakePlan:
        assert keep_last == 1
        return self.made_plan

    def insert(self, _seq: Any, held: Any, *, num_computed: int, start: int, source: Any) -> Any:
        assert source is self.made_plan
        self.inserted.append((held.tolist(), num_computed, start))
        taken = num_computed // BLOCK - start // BLOCK
        none = np.array([], dtype=np.int32)
        return SimpleNamespace(
            blocks=held[:taken], duplicates=none, freed=none, surplus=held[taken:]
        )

    def allocate(self, count: int, evict_from: Any) -> Any:
        assert evict_from is self
        if count > len(self.free_ids):
            raise OutOfBlocksError(f"{count} wanted, {len(self.free_ids)} available")
        taken, self.free_ids = self.free_ids[:count], self.free_ids[count:]
        return np.array(taken, dtype=np.int32)

    def free(self, ids: Any) -> None:
        self.free_ids.extend(ids.tolist())

    def take_freed(self) -> Any:
        return np.array([], dtype=np.int32)

    def apply(self, moves: str) -> None:
        self.copied.append(moves)

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    num_evictable = 0

    def as_store(self) -> Store:
        me: Any = self
        return Store(index=me, allocator=me, pool=me)


def ranges(lease: Lease, limit: int) -> list[tuple[int, int]]:
    """What is computed until the prompt is done."""
    found: list[tuple[int, int]] = []
    while True:
        start, end = lease.next_range(limit)
        if start == end:
            return found
        lease.make_room(end)
        lease.advance(end)
        found.append((start, end))


@pytest.mark.parametrize(
    ("gaps", "limit", "want"),
    [
        ([(21, 22)], 100, [(21, 22)]),
        ([(8, 22)], 100, [(8, 22)]),
        ([(10, 13), (17, 22)], 100, [(10, 13), (17, 22)]),
        ([(10, 13), (17, 22)], 2, [(10, 12), (12, 13), (17, 19), (19, 21), (21, 22)]),
        ([(9, 10), (11, 12), (13, 14), (21, 22)], 1, [(9, 10), (11, 12), (13, 14), (21, 22)]),
    ],
)
def test_gaps_are_computed_left_to_right(
    gaps: list[tuple[int, int]], limit: int, want: list[tuple[int, int]]
) -> None:
    store = FakeStore(FakePlan(gaps, 22))
    seq: Any = list(range(22))
    lease = Lease(store.as_store(), seq, policy=None)  # type: ignore[arg-type] # a stand-in takes none
    assert lease.table.tolist() == [7, 8, 20, 21, 22, 23]
    assert store.copied == ["moves of [7, 8, 20, 21, 22, 23]"]
    assert store.made_plan.calls == ["release_sources"]
    # What lies before the first gap is in place or copied.
    assert lease.num_computed == gaps[0][0]
    assert ranges(lease, limit) == want
    assert lease.num_computed == 22
    assert lease.num_indexed == 5
    assert lease.num_held == 1


def test_only_what_is_computed_is_inserted() -> None:
    store = FakeStore(FakePlan([(10, 13), (17, 22)], 22))
    seq: Any = list(range(22))
    lease = Lease(store.as_store(), seq, policy=None)  # type: ignore[arg-type] # a stand-in takes none
    lease.advance(13)
    # Behind 13, the copied piece up to 17 counts: four whole blocks.
    assert (lease.num_computed, store.inserted) == (17, [([20, 21, 22, 23], 17, 8)])
    lease.advance(19)
    assert len(store.inserted) == 1
    lease.close()
    assert store.inserted[1:] == [([22, 23], 19, 16)]
    assert sorted(store.free_ids) == list(range(22, 40))
    assert store.made_plan.calls == ["release_sources", "release"]
    lease.close()
    assert len(store.inserted) == 2


def test_decode_brings_a_block_when_the_last_is_full() -> None:
    store = FakeStore(FakePlan([(21, 22)], 22))
    seq: Any = list(range(22))
    lease = Lease(store.as_store(), seq, policy=None)  # type: ignore[arg-type] # a stand-in takes none
    lease.advance(22)
    lengths = []
    for _ in range(6):
        seq.append(0)
        assert lease.next_range(1) == (len(seq) - 1, len(seq))
        lease.make_room(len(seq))
        lengths.append(len(lease.table))
        lease.advance(len(seq))
    assert lengths == [6, 6, 7, 7, 7, 7]
    assert lease.num_indexed == 7


def test_headroom_is_kept_and_nothing_is_taken_without() -> None:
    plan = FakePlan([(8, 22)], 22)
    store = FakeStore(plan, num_free=5)
    seq: Any = list(range(22))
    with pytest.raises(OutOfBlocksError, match="4 blocks wanted beside 2 to spare, 5 available"):
        Lease(store.as_store(), seq, policy=None, headroom=2)  # type: ignore[arg-type]
    assert plan.calls == ["release"]
    assert store.num_free == 5
    Lease(store.as_store(), seq, policy=None, headroom=1)  # type: ignore[arg-type]


def test_failed_copy_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FakePlan([(10, 22)], 22)
    store = FakeStore(plan)

    def fail(_moves: str) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(store, "apply", fail)
    seq: Any = list(range(22))
    with pytest.raises(RuntimeError, match="injected"):
        Lease(store.as_store(), seq, policy=None)  # type: ignore[arg-type] # a stand-in takes none
    # The copied tokens do not count as computed.
    assert store.inserted == [([20, 21, 22, 23], 8, 8)]
    assert store.num_free == 20
    assert plan.calls == ["release"]
