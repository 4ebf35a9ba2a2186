"""Plans that are collected or released, and calls that detach from the interpreter."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
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
        assert not plan.released
        assert other.digest() == before


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
    sys.setswitchinterval(1000)  # so that the other thread runs only if the call detaches
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
