"""Life and death of plans, and batches whose items go wrong."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

import kvtrie

SPACE = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)


def filled() -> tuple[kvtrie.RadixIndex, kvtrie.TokenSequence]:
    index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    seq = kvtrie.TokenSequence([1, 2, 3, 4, 5], SPACE)
    index.insert(seq, [6, 0], num_computed=4, source=kvtrie.COMPUTED)
    return index, seq


def test_collected_plan_releases_itself_and_warns() -> None:
    index, seq = filled()
    plan = index.plan(seq)
    assert index.stats().pinned == 2
    with pytest.warns(ResourceWarning, match="ReusePlan was collected unreleased"):
        del plan
    assert index.stats().live_plans == index.stats().pinned == 0
    index.check()


def test_collected_plan_of_a_cycle() -> None:
    index, seq = filled()
    gc.disable()  # the collector must not come before the warning is waited for
    try:
        home: list[Any] = [index.plan(seq)]
        home.append(home)
        del home
        with pytest.warns(ResourceWarning):
            gc.collect()
    finally:
        gc.enable()
    assert index.stats().live_plans == 0


def test_collected_plan_leaves_the_exception_on_its_way_alone() -> None:
    index, seq = filled()

    def fail() -> None:
        plan = index.plan(seq)
        assert plan.pinned
        raise KeyError("mine")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(KeyError, match="mine"):
            fail()
        gc.collect()
    assert index.stats().live_plans == 0


def test_warning_as_error_is_unraisable(monkeypatch: pytest.MonkeyPatch) -> None:
    index, seq = filled()
    caught: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", caught.append)
    plan = index.plan(seq)
    del plan
    assert [type(one.exc_value) for one in caught] == [ResourceWarning]
    assert caught[0].object is kvtrie.ReusePlan
    caught.clear()
    assert index.stats().live_plans == 0


def test_plan_outlives_the_index_object() -> None:
    index, seq = filled()
    plan = index.plan(seq)
    del index
    gc.collect()
    assert plan.validate().tolist() == [True, True]
    plan.release()
    with pytest.raises(kvtrie.StaleHandleError):
        plan.release()
    with pytest.raises(kvtrie.StaleHandleError):
        plan.moves([6, 0, 1])


def test_nothing_is_said_at_the_end_of_the_interpreter() -> None:
    code = (
        "import kvtrie\n"
        "space = kvtrie.Namespace(model='m', salt=kvtrie.SHARED)\n"
        "index = kvtrie.RadixIndex(8)\n"
        "plan = index.plan(kvtrie.TokenSequence([1, 2], space))\n"
        "print('end')\n"
    )
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


def test_context_manager_releases_once() -> None:
    index, seq = filled()
    with index.plan(seq) as plan:
        inside = plan.released
    assert (inside, plan.released) == (False, True)
    with index.plan(seq) as plan:
        plan.release()
    with pytest.raises(kvtrie.StaleHandleError), plan:
        pass
    with pytest.raises(KeyError), index.plan(seq) as plan:
        raise KeyError
    assert plan.released
    assert index.stats().live_plans == 0


def test_plan_of_another_index() -> None:
    index, seq = filled()
    other, _ = filled()
    with index.plan(seq) as plan:
        before = other.digest()
        with pytest.raises(ValueError, match="another index"):
            other.insert(seq, [6, 0], num_computed=4, source=plan)
        assert list(other.release_many([plan])) == [0]
        assert not plan.released
        assert other.digest() == before


def test_batch_item_that_is_none_spoils_itself_alone() -> None:
    index, seq = filled()
    found = index.lookup_many([seq, "no", seq], starts=[0, 0, 1.5])  # type: ignore[list-item]
    assert found.num_tokens.tolist() == [4, 0, 0]
    assert found.offsets.tolist() == [0, 2, 2, 2]
    assert {item: type(error) for item, error in found.errors.items()} == {
        1: TypeError,
        2: TypeError,
    }

    policies: list[Any] = [
        kvtrie.EXACT_ONLY,
        kvtrie.ReusePolicy(min_run=8),
        "exact",
        kvtrie.EXACT_ONLY,
    ]
    planned = index.plan_many([seq] * 4, policies)
    assert [plan is None for plan in planned.plans] == [False, True, True, False]
    assert planned.blocks.tolist() == [6, 0, 6, 0]
    assert planned.offsets.tolist() == [0, 2, 2, 2, 4]
    assert planned.num_new_blocks.tolist() == [1, 0, 0, 1]
    assert {item: type(error) for item, error in planned.errors.items()} == {
        1: ValueError,
        2: TypeError,
    }
    assert index.release_many(planned.plans) == {}
    assert {item: type(e) for item, e in index.release_many([*planned.plans, 1]).items()} == {  # type: ignore[list-item]
        0: kvtrie.StaleHandleError,
        3: kvtrie.StaleHandleError,
        4: TypeError,
    }


def test_insert_many_item_that_is_wrong_spoils_itself_alone() -> None:
    index = kvtrie.RadixIndex(num_blocks=8, block_size=2)
    seqs = [kvtrie.TokenSequence([n, n], SPACE) for n in range(6)]
    blocks: list[Any] = [0, -1, 2, "3", 0, 5]
    computed: list[Any] = [2, 2, 3, 2, 2, 2]
    sources: list[Any] = [kvtrie.COMPUTED] * 5 + [None]
    done = index.insert_many(seqs, blocks, list(range(7)), computed, sources=sources)
    assert done.blocks.tolist() == [0]
    assert done.offsets.tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert done.num_exact.tolist() == [2, 0, 0, 0, 0, 0]
    assert {item: type(error) for item, error in done.errors.items()} == {
        1: ValueError,
        2: ValueError,
        3: TypeError,
        4: kvtrie.BlockInUseError,
        5: TypeError,
    }
    index.check()


@pytest.mark.parametrize(
    "offsets", [[0, 2], [0, 1, 1], [1, 1, 2], [0, 2, 1], [0, 1, 3], [0, -1, 2]]
)
def test_insert_many_with_wrong_offsets_does_nothing(offsets: list[int]) -> None:
    index, seq = filled()
    before = index.digest()
    with pytest.raises(ValueError, match="offsets"):
        index.insert_many([seq] * 2, [1, 2], offsets, [2, 2], sources=[kvtrie.COMPUTED] * 2)
    assert index.digest() == before


def test_lists_of_different_lengths_do_nothing() -> None:
    index, seq = filled()
    before = index.digest()
    for call in (
        lambda: index.lookup_many([seq], starts=[0, 0]),
        lambda: index.plan_many([seq], []),
        lambda: index.insert_many([seq], [1], [0, 1], [], sources=[kvtrie.COMPUTED]),
        lambda: index.insert_many([seq], [1], [0, 1], [2], sources=[]),
        lambda: index.insert_many([seq], [1], [0, 1], [2], sources=[kvtrie.COMPUTED], starts=[]),
    ):
        with pytest.raises(ValueError, match="it must have 1, one for each of seqs"):
            call()
    assert index.digest() == before


def test_empty_batches() -> None:
    index, _ = filled()
    found = index.lookup_many([])
    assert (found.num_tokens.tolist(), found.offsets.tolist(), found.errors) == ([], [0], {})
    assert index.plan_many([]).plans == []
    assert index.insert_many([], [], [0], [], sources=[]).duplicate_offsets.tolist() == [0]
    assert index.release_many([]) == {}


def test_batches_that_share_sequences_do_not_wait_for_each_other() -> None:
    index = kvtrie.RadixIndex(num_blocks=1024, block_size=1)
    seqs = [kvtrie.TokenSequence([n] * 40, SPACE) for n in range(8)]
    go = threading.Barrier(4)
    failed: list[object] = []

    def work(order: list[kvtrie.TokenSequence]) -> None:
        go.wait()
        for _ in range(100):
            planned = index.plan_many(order)
            failed.extend(planned.errors.values())
            failed.extend(index.release_many(planned.plans).values())
            index.lookup(order[0])

    orders = [seqs, seqs[::-1], seqs[4:] + seqs[:4] + seqs, [seqs[0], seqs[7]] * 4]
    threads = [threading.Thread(target=work, args=(order,), daemon=True) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []
    assert index.stats().live_plans == 0


def test_long_calls_let_go_of_the_interpreter() -> None:
    index = kvtrie.RadixIndex(num_blocks=200_000, block_size=1)
    seq = kvtrie.TokenSequence(np.arange(200_000), SPACE)
    index.insert(
        seq, np.arange(200_000, dtype=np.int32), num_computed=200_000, source=kvtrie.COMPUTED
    )
    ticks, seen, stop = 0, 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(1e-5):
            ticks += 1

    thread = threading.Thread(target=tick, daemon=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that only a call that lets go lets the other thread run
    try:
        thread.start()
        ticks = 0
        # On a busy machine the other thread may not get a processor during one call.
        for _ in range(1000):
            index.check()
            seen = ticks
            if seen:
                break
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()
    assert seen > 0


def test_a_batch_does_not_keep_its_plans_alive_in_a_cycle() -> None:
    class Holder:
        """Can be watched."""

        batch: kvtrie.PlanBatch

    index, seq = filled()
    holder = Holder()
    holder.batch = index.plan_many([seq])
    holder.batch.errors[7] = RuntimeError(holder)
    assert index.release_many(holder.batch.plans) == {}
    watched = weakref.ref(holder)
    del holder
    gc.collect()
    assert watched() is None
