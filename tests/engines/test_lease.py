"""Lease: the engine loop over plans with any number of gaps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvtrie
from kvtrie import OutOfBlocksError, ReusePolicy
from kvtrie.engines._lease import Lease
from kvtrie.engines._store import Store

BLOCK = 4
SPACE = kvtrie.Namespace(model="m", salt="lease")
# Two whole blocks in place; after them two runs of a cached text of 12 tokens, with gaps around.
HEAD = list(range(8))
RUN = list(range(100, 112))
NEW = list(range(200, 220))


class Pool:
    def __init__(self) -> None:
        self.copied: list[int] = []
        self.layout = SimpleNamespace(block_size=BLOCK)

    def apply(self, moves: Any, *, hops: int | None = None, items: Any = ()) -> None:
        del hops, items
        self.copied.append(int(moves["num_tokens"].sum()))


def make(num_blocks: int = 40) -> Store:
    store = Store(
        index=kvtrie.RadixIndex(num_blocks, BLOCK, min_run=8),
        allocator=kvtrie.BlockAllocator(num_blocks),
        pool=Pool(),  # type: ignore[arg-type] # a stand-in
        ledger=kvtrie.SequenceLedger(BLOCK),
    )
    for text in (HEAD, RUN):
        table = store.allocator.allocate(len(text) // BLOCK)
        store.index.insert(
            kvtrie.TokenSequence(text, SPACE), table, num_computed=len(text), source=kvtrie.COMPUTED
        )
    return store


def sequence(*parts: list[int]) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence([token for part in parts for token in part], SPACE)


def ranges(lease: Lease, limit: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while True:
        start, end = lease.next_range(limit)
        if start == end:
            return found
        lease.issue(end)
        lease.advance(end)
        found.append((start, end))


def check_empty(store: Store, lease: Lease) -> None:
    assert len(store.ledger) == 0
    assert lease.num_held == 0
    stats = store.index.stats()
    assert store.allocator.num_free + stats.indexed == store.allocator.num_blocks


@pytest.mark.parametrize(
    ("parts", "limit", "want"),
    [
        ([HEAD, NEW[:3]], 100, [(8, 11)]),
        ([NEW[:3]], 100, [(0, 3)]),
        ([HEAD, NEW[:3], RUN, NEW[3:5]], 100, [(8, 11), (23, 25)]),
        ([HEAD, NEW[:3], RUN, NEW[3:6]], 2, [(8, 10), (10, 11), (23, 25), (25, 26)]),
        ([NEW[:1], RUN, NEW[1:2], RUN, NEW[2:3]], 1, [(0, 1), (13, 14), (26, 27)]),
        # The last token is computed, whatever is cached.
        ([HEAD, NEW[:1], RUN], 100, [(8, 9), (20, 21)]),
    ],
)
def test_gaps_are_computed_left_to_right(
    parts: list[list[int]], limit: int, want: list[tuple[int, int]]
) -> None:
    store = make()
    seq = sequence(*parts)
    lease = Lease(store, seq, ReusePolicy(scope="namespace"))
    assert ranges(lease, limit) == want
    assert lease.is_computed
    # Whole computed blocks are the index's.
    assert lease.num_held == len(lease.table) - len(seq) // BLOCK
    lease.close()
    check_empty(store, lease)


def test_only_what_is_computed_is_inserted() -> None:
    store = make()
    seq = sequence(HEAD, NEW[:3], RUN, NEW[3:10])
    lease = Lease(store, seq, ReusePolicy(scope="namespace"))
    assert store.pool.copied == [12]  # type: ignore[attr-defined] # a stand-in
    assert lease.num_held == 6
    lease.issue(11)
    lease.advance(11)
    # After 11, the copied run up to 23 counts: three more whole blocks.
    assert store.ledger.new_range(lease) == (20, 23)
    assert lease.num_held == 3
    lease.issue(27)
    assert lease.num_held == 3
    lease.advance(25)
    assert store.ledger.new_range(lease) == (24, 25)
    lease.close()
    assert store.index.stats().indexed == 5 + 4
    check_empty(store, lease)
    lease.close()
    assert lease.plan.released


def test_decode_brings_a_block_when_the_last_is_full() -> None:
    store = make()
    seq = sequence(HEAD, NEW[:14])
    lease = Lease(store, seq, ReusePolicy(scope="namespace"))
    assert ranges(lease, 100) == [(8, 22)]
    lengths = []
    for _ in range(6):
        lease.append([0])
        assert not lease.is_computed
        assert lease.next_range(1) == (len(seq) - 1, len(seq))
        lease.issue(len(seq))
        lengths.append(len(lease.table))
        lease.advance(len(seq))
    assert lengths == [6, 6, 7, 7, 7, 7]
    assert store.ledger.new_range(lease) == (28, 28)
    lease.close()
    check_empty(store, lease)


def test_sequence_belongs_to_the_ledger_until_the_lease_is_closed() -> None:
    store = make()
    seq = sequence(NEW[:5])
    lease = Lease(store, seq, ReusePolicy(scope="namespace"))
    with pytest.raises(ValueError, match="a request of a SequenceLedger has this sequence"):
        seq.extend([1])
    lease.close()
    seq.extend([1])


def test_headroom_is_kept_and_nothing_is_taken_without() -> None:
    store = make(num_blocks=9)
    seq = sequence(NEW[:14])
    others = store.index.plan(sequence(RUN, [0]), kvtrie.EXACT_ONLY)
    # 4 free, and 2 that only the head has; the run is pinned.
    with pytest.raises(OutOfBlocksError, match="4 blocks wanted and 3 to spare, 6 available"):
        Lease(store, seq, kvtrie.EXACT_ONLY, headroom=3)
    assert store.allocator.num_free == 4
    assert len(store.ledger) == 0
    lease = Lease(store, seq, kvtrie.EXACT_ONLY, headroom=2)
    lease.close()
    others.release()
    check_empty(store, lease)


def test_failed_copy_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    free = store.allocator.num_free

    def fail(_moves: object, **_options: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(store.pool, "apply", fail)
    seq = sequence(HEAD, NEW[:3], RUN, NEW[3:5])
    with pytest.raises(RuntimeError, match="injected"):
        Lease(store, seq, ReusePolicy(scope="namespace"))
    # The copied tokens do not count as computed.
    assert store.allocator.num_free == free
    assert store.index.lookup(seq).num_tokens == len(HEAD)
    seq.extend([1])


def test_failed_insert_gives_everything_back() -> None:
    store = make()
    free = store.allocator.num_free
    lease = Lease(store, sequence(HEAD, NEW[:9]), ReusePolicy(scope="namespace"))
    lease.issue(17)
    lease.plan.release()
    with pytest.raises(kvtrie.StaleHandleError):
        lease.advance(17)
    lease.close()
    assert store.allocator.num_free == free
    check_empty(store, lease)
    assert np.array_equal(store.index.take_freed(), [])
