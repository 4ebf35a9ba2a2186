"""Off the caller's path: queues that drop, stores that are slow, and what an estimate says."""

from __future__ import annotations

import threading
from inspect import signature
from typing import Any
from unittest.mock import ANY

import pytest
from tests.store.kit import SECONDS, SHAPE, make_store, read, rows, run_of, same

import kvtrie
from kvtrie.store import Estimate, HostBackend, SpanRows, SpanWriter, TenantLimits, writing
from kvtrie.store.threads import Crew, Shares


class Gated(HostBackend):
    """Puts wait until the gate is open."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.gate = threading.Event()
        self.gate.set()

    def put(self, name: str, value: bytearray) -> None:
        assert self.gate.wait(SECONDS)
        super().put(name, value)


def test_a_writer_drops_what_has_no_room_and_never_waits() -> None:
    backend = Gated(1 << 20)
    store = make_store(backend)
    writer = SpanWriter(store, max_waiting=2)
    backend.gate.clear()
    runs = [run_of(store, list(range(at, at + 20))) for at in range(0, 200, 20)]
    done: list[int] = []
    started = threading.Event()

    def reading(number: int) -> SpanRows:
        started.set()
        return rows(20, number)

    def offer(number: int) -> bool:
        return writer.offer(runs[number], lambda: reading(number), lambda: done.append(number))

    taken = [offer(0)]
    assert started.wait(SECONDS)
    taken += [offer(number) for number in range(1, 10)]
    assert taken == [True] * 3 + [False] * 7
    assert store.counts()["dropped"] == 7
    backend.gate.set()
    assert writer.close(SECONDS)
    assert done == [0, 1, 2]
    assert not writer.offer(runs[5], lambda: reading(5))
    for number in range(3):
        found = read(store, runs[number], (0, 20))
        assert found is not None
        assert same(found, rows(20, number))


def test_a_writer_bounds_the_bytes_that_wait() -> None:
    backend = Gated(1 << 20)
    store = make_store(backend)
    backend.gate.clear()
    writer = SpanWriter(store, max_bytes=SHAPE.num_bytes(20))
    runs = [run_of(store, list(range(at, at + 20))) for at in (0, 100)]
    assert [writer.offer(run, lambda: rows(20)) for run in runs] == [True, False]
    backend.gate.set()
    assert writer.wait(SECONDS)
    assert writer.offer(runs[1], lambda: rows(20))
    assert writer.close(SECONDS)


def test_a_writer_takes_the_labels_of_the_store_and_refuses_others_at_once() -> None:
    """Of a misspelt one the caller would hear in a log at most, and the run would be lost."""
    store = make_store()
    writer = SpanWriter(store)
    run = run_of(store, list(range(20)))
    misspelt: dict[str, Any] = {"exact_untl": 0}
    with pytest.raises(TypeError, match="exact_untl"):
        writer.offer(run, lambda: rows(20), **misspelt)
    policy = kvtrie.ReusePolicy(scope="namespace")
    assert writer.offer(run, lambda: rows(20), exact_until=8, hops=1, policy=policy)
    assert writer.close(SECONDS)
    found = store.get_ranges(run, [(0, 20)], [store.shape.empty(20)])
    assert found is not None
    assert (found[0].exact_until, found[0].hops, found[0].policy) == (8, 1, policy)
    labels = set(signature(SpanWriter.offer).parameters) - {"self", "run", "read", "done"}
    assert labels == set(signature(store.put).parameters) - {"run", "slots"}


def test_rows_that_cannot_be_read_are_counted_and_blocks_are_let_go() -> None:
    store = make_store()
    writer = SpanWriter(store)
    done: list[bool] = []

    def broken() -> SpanRows:
        raise RuntimeError

    run = run_of(store, list(range(20)))
    assert writer.offer(run, broken, lambda: done.append(True))
    assert writer.offer(run, lambda: rows(20))
    assert writer.close(SECONDS)
    assert (done, store.counts()["put_failed"], store.exists([run])) == ([True], 1, [True])


def test_a_crew_may_be_closed_twice_and_its_threads_end_when_they_can() -> None:
    gate, before = threading.Event(), set(threading.enumerate())
    failures: list[Exception] = []
    crew = Crew("crew", threads=3, max_waiting=1, failed=failures.append)
    mine = set(threading.enumerate()) - before

    def waiting() -> None:
        assert gate.wait(SECONDS)

    assert crew.offer(waiting)
    assert not crew.close(0.0)
    assert not crew.offer(lambda: None)
    gate.set()
    assert crew.close(SECONDS)
    assert crew.close(0.0)
    assert crew.wait(0.0)
    for thread in mine:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert failures == []


def test_work_that_a_crew_takes_while_it_closes_is_done() -> None:
    """A run that was taken and never tried kept its blocks pinned."""
    for _ in range(100):
        crew = Crew("crew", threads=1, max_waiting=1_000, failed=lambda _: None)
        taken, done = [0], [0]
        started = threading.Event()

        def work(done: list[int] = done) -> None:
            done[0] += 1

        def offering(
            crew: Crew = crew, taken: list[int] = taken, started: threading.Event = started
        ) -> None:
            while crew.offer(work):
                taken[0] += 1
                started.set()

        thread = threading.Thread(target=offering)
        thread.start()
        assert started.wait(SECONDS)
        assert crew.close(SECONDS)
        thread.join(SECONDS)
        assert crew.wait(SECONDS)
        assert done == taken


def test_a_writer_that_has_nothing_to_write_deletes_what_has_outlived_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs were deleted after each 256th that was written: never, by an engine that is idle."""

    class Watched(HostBackend):
        def delete(self, name: str) -> None:
            super().delete(name)
            deleted.release()

    deleted = threading.Semaphore(0)
    now = [1_000.0]
    monkeypatch.setattr(writing, "SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(writing, "_SWEPT_AT_ONCE", 2)
    limits = TenantLimits(lifetime=10)
    store = make_store(Watched(1 << 20), limits=limits, clock=lambda: now[0])
    runs = [run_of(store, list(range(at, at + 20))) for at in range(0, 100, 20)]
    for run in runs:
        assert store.put(run, rows(20))
    writer = SpanWriter(store)
    now[0] += 11
    for _ in runs:
        assert deleted.acquire(timeout=SECONDS)
    assert writer.close(SECONDS)
    assert (store.num_runs, store.counts()["expired"]) == (0, 5)


def test_between_two_parts_of_a_chore_work_goes_first() -> None:
    before = set(threading.enumerate())
    done: list[str] = []
    goes, began, over = (threading.Event() for _ in range(3))

    def chore() -> bool:
        began.set()
        assert goes.wait(SECONDS)
        done.append("chore")
        if len(done) == 6:
            over.set()
        return not over.is_set()

    crew = Crew("crew", threads=1, max_waiting=9, failed=print, chore=chore, chore_every=0.01)
    (mine,) = set(threading.enumerate()) - before
    assert began.wait(SECONDS)
    assert all(crew.offer(lambda: done.append("work")) for _ in range(2))
    goes.set()
    assert over.wait(SECONDS)
    assert crew.close(SECONDS)
    mine.join(SECONDS)
    assert not mine.is_alive()
    assert done[:6] == ["chore", "work", "chore", "work", "chore", "chore"]


@pytest.mark.parametrize(
    ("seconds", "choice", "why"), [(0.001, "load", "faster"), (10.0, "recompute", "slower")]
)
def test_an_estimate_compares_what_was_measured(seconds: float, choice: str, why: str) -> None:
    estimate = Estimate()
    assert estimate.choose(num_tokens=100, num_bytes=1 << 20).why == "unknown"
    estimate.loaded(num_bytes=1 << 20, seconds=seconds)
    assert estimate.choose(num_tokens=100, num_bytes=1 << 20).why == "unknown"
    estimate.computed(num_tokens=1_000, seconds=1.0)
    found = estimate.choose(num_tokens=100, num_bytes=1 << 20)
    assert (found.choice, found.why) == (choice, why)
    assert found.load_seconds == pytest.approx(seconds)
    assert found.compute_seconds == pytest.approx(0.1)


def test_a_load_takes_a_time_of_its_own_and_a_time_per_byte() -> None:
    estimate = Estimate(prefill_tokens_per_s=1_000)
    for num_bytes in (1_000, 5_000, 20_000, 100_000):
        estimate.loaded(num_bytes=num_bytes, seconds=0.05 + num_bytes / 1e6)
    assert estimate.load_seconds(50_000) == pytest.approx(0.1)
    assert estimate.choose(num_tokens=20, num_bytes=1_000).why == "slower"
    assert estimate.choose(num_tokens=200, num_bytes=10_000).why == "faster"


def test_a_slow_link_is_tried_again_now_and_then() -> None:
    estimate = Estimate(prefill_tokens_per_s=1e6, probe_every=8)
    estimate.loaded(num_bytes=1_000, seconds=9.0)
    whys = [estimate.choose(num_tokens=1, num_bytes=1_000).why for _ in range(16)]
    assert whys.count("probe") == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"probe_every": 0},
        {"prefill_tokens_per_s": 0.0},
        {"prefill_tokens_per_s": float("nan")},
        {"prefill_tokens_per_s": float("inf")},
    ],
)
def test_an_estimate_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Estimate"):
        Estimate(**wrong)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_measurement_that_is_none_changes_no_estimate(seconds: float) -> None:
    estimate = Estimate()
    with pytest.raises(ValueError, match=r"Estimate\.loaded"):
        estimate.loaded(num_bytes=1, seconds=seconds)
    with pytest.raises(ValueError, match=r"Estimate\.computed"):
        estimate.computed(num_tokens=1, seconds=seconds)
    assert estimate.choose(num_tokens=1, num_bytes=1).why == "unknown"


def taken(shares: Shares, owner: str, most: int = 1_000) -> int:
    return next(count for count in range(most) if not shares.take(owner))


def test_an_owner_takes_no_more_than_it_leaves() -> None:
    shares = Shares(64)
    assert [taken(shares, owner) for owner in "abcdefgh"] == [32, 16, 8, 4, 2, 1, 1, 0]
    shares.give("a")
    assert taken(shares, "h") == 1
    assert not shares.take("a")
    assert taken(Shares(1), "a") == 1
    some = Shares(100)
    assert not some.take("a", 51)
    assert some.take("a", 50)
    assert not some.take("b", 26)
    assert some.take("b", 25)
    some.give("a", 50)
    some.give("b", 25)
    assert some.take("a", 50)


def test_nobody_waits_for_all_that_another_one_has_offered() -> None:
    crew = Crew("crew", threads=1, max_waiting=64, failed=print, is_shared=True)
    goes, began, done = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        began.set()
        assert goes.wait(SECONDS)

    assert crew.offer(first, "hostile")
    assert began.wait(SECONDS)
    offered = [crew.offer(lambda: done.append("hostile"), "hostile") for _ in range(64)]
    assert sum(offered) == 32
    assert all(crew.offer(lambda: done.append("other"), "other") for _ in range(2))
    goes.set()
    assert crew.close(SECONDS)
    assert done[:4] == ["hostile", "other", "hostile", "other"]
    assert len(done) == 34


def test_a_sweep_that_raises_is_no_run_that_was_not_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(HostBackend):
        def delete(self, name: str) -> None:
            raise RuntimeError(name)

    now = [1_000.0]
    limits = TenantLimits(lifetime=10)
    store = make_store(Broken(1 << 20), limits=limits, clock=lambda: now[0])
    assert store.put(run_of(store, list(range(20))), rows(20))
    now[0] += 11
    assert not writing.sweep_some(store)
    assert store.counts() == {"stored": 1, "stored_bytes": ANY, "sweep_failed": 1}
    assert "old runs were not deleted" in caplog.text
