"""Turns that are written out of slots which their request has left."""

from __future__ import annotations

import logging
import threading
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import kvtrie
from kvtrie._core import EXACT_ONLY
from kvtrie.integrations import _turns
from kvtrie.integrations._turns import StorePrompt, TurnToWrite, TurnWriter
from kvtrie.store import HostBackend, SpanShape, SpanStore, StoreKey, TenantLimits, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SPACE = kvtrie.Namespace(model="m@1", kv_dtype="float32", salt="a")
LAYOUT = kvtrie.KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=1)
TOKENS = np.arange(100, 142, dtype=np.uint32)
PAGE = 16


class Held:
    """A pool whose pages of 16 slots are 5 and 2, and ten slots of page 7; writing waits."""

    def __init__(self) -> None:
        self.pool = kvtrie.KVPool(LAYOUT, num_blocks=200)
        self.slots = torch.tensor([*range(80, 96), *range(32, 48)])
        self.after = np.arange(112, 122)
        table = np.concatenate([self.slots.numpy(), self.after])
        self.pool.scatter(torch.randn(2, 42, 1, 8), torch.randn(2, 42, 1, 8), table, 0)
        self.expected = rows_of(self.pool, table, 0, 42)
        key = StoreKey(b"a secret of 16 bytes or more")
        self.store = SpanStore(
            HostBackend(1 << 20), key, SPACE, SpanShape.of(LAYOUT), max_bytes=1 << 20
        )
        self.goes = threading.Event()
        self.writer = TurnWriter(
            self.store,
            lambda prompt: kvtrie.TokenSequence(prompt.tokens, SPACE),
            8,
            logging.getLogger("kvtrie.store"),
            block_size=PAGE,
        )
        self.writer.pool = self.pool

    def offer(self, borders: tuple[int, ...]) -> None:
        ends = (*borders, 42)
        ranges = zip((0, *borders), ends, strict=True)
        turn = TurnToWrite(
            StorePrompt(TOKENS, "a", borders, (), None),
            (11, 12),
            tuple((start, end, end - start, None) for start, end in ranges),
            EXACT_ONLY,
            self.slots,
        )
        tail = rows_of(self.pool, self.after, 0, 10)

        def ready() -> None:
            assert self.goes.wait(30)

        self.writer.offer_slots(turn, lambda: tail, 32, ready)

    def written(self, borders: tuple[int, ...]) -> list[bool]:
        """Which runs are there; those that are have the rows of the turn."""
        self.goes.set()
        assert self.writer.wait(30)
        there = []
        for run in self.store.runs(kvtrie.TokenSequence(TOKENS, SPACE), borders):
            into = self.store.shape.empty(run.num_tokens)
            found = self.store.get_ranges(run, [(0, run.num_tokens)], [into])
            there.append(found is not None)
            if found is not None:
                rows = self.expected.part(run.start, run.end)
                assert (into.k == rows.k).all()
                assert (into.v == rows.v).all()
        return there


@pytest.fixture
def held() -> Iterator[Held]:
    one = Held()
    yield one
    one.goes.set()
    one.writer.close()


def overwrite(held: Held, *slots: int) -> None:
    for k, v in zip(held.pool.k, held.pool.v, strict=True):
        assert v is not None
        k[list(slots)] = v[list(slots)] = 7.0


@pytest.mark.parametrize("borders", [(), (10, 20, 30), (16, 32), (33,)], ids=str)
def test_whole_pages_and_a_tail_that_left_at_once(held: Held, borders: tuple[int, ...]) -> None:
    held.offer(borders)
    overwrite(held, *range(112, 128))
    assert held.written(borders) == [True] * (len(borders) + 1)


@pytest.mark.parametrize(("page", "there"), [(11, [False, True, True]), (12, [True, False, True])])
def test_runs_of_a_page_that_was_overwritten_are_not_stored(
    held: Held, page: int, there: list[bool]
) -> None:
    held.offer((16, 32))
    held.writer.overwritten([page, 3])
    overwrite(held, *(range(80, 96) if page == 11 else range(32, 48)))
    assert held.written((16, 32)) == there
    assert held.store.counts()["overwritten"] == 1


@pytest.mark.parametrize("borders", [(), (32,), (20, 36)], ids=str)
def test_nothing_of_a_turn_that_was_given_up_is_read(held: Held, borders: tuple[int, ...]) -> None:
    held.offer(borders)
    held.writer.give_up()
    overwrite(held, *range(200))
    assert held.written(borders) == [False] * (len(borders) + 1)
    counts: dict[str, Any] = held.store.counts()
    assert counts["overwritten"] == len(borders) + 1
    assert "put_failed" not in counts


def short_runs(salt: str, count: int) -> TurnToWrite:
    """A turn in runs of one token."""
    borders = tuple(range(1, count))
    ranges = zip((0, *borders), (*borders, count), strict=True)
    return TurnToWrite(
        StorePrompt(np.arange(count, dtype=np.uint32), salt, borders, (), None),
        tuple(range(count)),
        tuple((start, end, end - start, None) for start, end in ranges),
        EXACT_ONLY,
    )


def test_the_runs_of_a_long_turn_keep_no_other_tenant_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = StoreKey(b"a secret of 16 bytes or more")
    shape = SpanShape.of(LAYOUT)
    store = SpanStore(HostBackend(1 << 22), key, SPACE, shape, max_bytes=1 << 22)
    pool = kvtrie.KVPool(LAYOUT, num_blocks=200)
    order: list[str] = []
    goes, put = threading.Event(), store.put

    def counted(run: Any, *args: Any, **more: Any) -> Any:
        assert goes.wait(30)
        # Another tenant's runs have other names.
        order.append("long" if run.name in named else "short")
        return put(run, *args, **more)

    def sequence(prompt: StorePrompt) -> kvtrie.TokenSequence:
        return kvtrie.TokenSequence(prompt.tokens, SPACE.replace(salt=prompt.salt))

    long, short = short_runs("long", 150), short_runs("short", 40)
    named = {one.name for one in store.runs(sequence(long.prompt), long.prompt.borders)}
    monkeypatch.setattr(store, "put", counted)
    writer = TurnWriter(store, sequence, 2, logging.getLogger("kvtrie.store"))
    writer.pool = pool
    try:
        writer.offer(long, pool, ())
        writer.offer(short, pool, ())
        goes.set()
        assert writer.wait(30)
    finally:
        goes.set()
        writer.close()
    parts = [(name, len(list(some))) for name, some in groupby(order)]
    assert parts == [("long", 32), ("short", 32), ("long", 32), ("short", 8), ("long", 86)]
    assert writer.take_done() == 2
    assert writer.is_idle
    assert "dropped" not in store.counts()


@pytest.mark.parametrize("how", ["no pool", "overwritten"])
def test_a_copy_that_nobody_could_wait_for_is_not_stored(
    held: Held, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    gather = held.pool.gather

    def slow(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and not begun.is_set():
            begun.set()
            assert goes_on.wait(30)
        return gather(*args)

    monkeypatch.setattr(held.pool, "gather", slow)
    held.offer((16, 32))
    held.goes.set()
    assert begun.wait(30)
    changed = held.writer._changed

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as failing:
        failing.setattr(changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            held.writer.overwritten([11])
    if how == "no pool":
        held.writer.pool = None
        for job in held.writer._jobs:
            job.lost.clear()
    overwrite(held, *range(80, 96))
    goes_on.set()
    there = [False, how != "no pool", how != "no pool"]
    assert held.written((16, 32)) == there


def test_a_long_run_is_read_in_parts_and_others_wait_for_their_own_alone(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_turns, "_READ_TOKENS", 10)
    begun, goes_on = threading.Event(), threading.Event()
    gather, sizes = held.pool.gather, []

    def slow(blocks: Any, start: int, end: int) -> Any:
        if threading.current_thread() is not threading.main_thread():
            sizes.append(end - start)
            begun.set()
            assert goes_on.wait(30)
        return gather(blocks, start, end)

    monkeypatch.setattr(held.pool, "gather", slow)
    held.offer(())
    held.goes.set()
    assert begun.wait(30)
    # The first part is of page 11.
    told = threading.Thread(target=lambda: held.writer.overwritten([12]), daemon=True)
    told.start()
    told.join(10)
    assert not told.is_alive()
    overwrite(held, *range(32, 48))
    goes_on.set()
    assert held.written(()) == [False]
    assert sizes == [10]


def test_parts_of_a_long_run_are_one_run(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_turns, "_READ_TOKENS", 10)
    held.offer((3,))
    overwrite(held, *range(112, 128))
    assert held.written((3,)) == [True, True]


def test_a_writer_of_turns_that_has_none_deletes_what_has_outlived_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs were deleted after each 64th turn: never, by an engine that is idle."""
    deleted = threading.Event()

    class Watched(HostBackend):
        def delete(self, name: str) -> None:
            super().delete(name)
            deleted.set()

    now = [1_000.0]
    store = SpanStore(
        Watched(1 << 20),
        StoreKey(b"a secret of 16 bytes or more"),
        SPACE,
        SpanShape.of(LAYOUT),
        max_bytes=1 << 20,
        limits=TenantLimits(lifetime=10),
        clock=lambda: now[0],
    )
    (run,) = store.runs(kvtrie.TokenSequence(TOKENS, SPACE), [])
    assert store.put(run, store.shape.empty(len(TOKENS)))
    monkeypatch.setattr(_turns, "SWEEP_SECONDS", 0.01)
    log = logging.getLogger("kvtrie.store")
    writer = TurnWriter(store, lambda prompt: kvtrie.TokenSequence(prompt.tokens, SPACE), 8, log)
    now[0] += 11
    assert deleted.wait(30)
    writer.close()
    assert store.num_runs == 0
