"""Copies that fail, one at a time: no request ever reads KV that was not copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.vllm.prompts import ANSWER, EDITED, NEXT, QUESTION, REASONING, words
from tests.vllm_scheduler.worker import BLOCK, continuation

from kvtrie.integrations.vllm._failures import Failures
from kvtrie.integrations.vllm._metadata import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

UNCHECKED = {"gate": "unchecked", "policy": {"scope": "namespace"}}

in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])


@pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
@pytest.mark.parametrize("mode", ["exact", "approximate"])
@in_flight
def test_a_copy_that_fails(
    core: Callable[..., Core], gaps: bool, mode: str, in_flight: bool
) -> None:
    # With a step in flight, vLLM took that step's token, which had read unwritten slots, as the
    # answer's first; without one, KvtrieScheduler was busy for ever.
    vllm = core(connector=UNCHECKED, gaps=gaps, in_flight=in_flight, shadow=False)
    vllm.ask(QUESTION + REASONING + ANSWER)
    vllm.worker.fails = lambda _: True
    name, other = vllm.add(EDITED, mode=mode), vllm.add(words(50, 5), mode="exact")
    vllm.drain(limit=100)
    assert vllm.worker.num_failed
    assert vllm.answers[name].tokens == continuation(EDITED, 8)
    assert vllm.answers[other].tokens == continuation(words(50, 5), 8)
    vllm.worker.fails = None
    assert vllm.ask(EDITED, mode="exact") == continuation(EDITED, 8)


@in_flight
def test_who_shares_a_prefix_with_a_copy_that_failed(
    core: Callable[..., Core], in_flight: bool
) -> None:
    vllm = core(
        connector={"gate": None},
        in_flight=in_flight,
        shadow=False,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )
    # The last block of a prompt is copied, and is in the cache before the copy is done.
    vllm.ask(QUESTION + NEXT)
    vllm.worker.fails = lambda _: True
    names = [vllm.add(QUESTION + ANSWER, max_tokens=12) for _ in range(3)]
    for _ in range(3):
        vllm.step()
    vllm.worker.fails = None
    names.append(vllm.add(QUESTION + ANSWER, max_tokens=12))
    vllm.drain(limit=200)
    for name in names:
        assert vllm.answers[name].tokens == continuation(QUESTION + ANSWER, 12)


@in_flight
def test_a_request_that_ends_before_its_copy_is_known_to_have_failed(
    core: Callable[..., Core], in_flight: bool
) -> None:
    vllm = core(
        connector=UNCHECKED, gaps=True, in_flight=in_flight, shadow=False, max_num_batched_tokens=64
    )
    vllm.ask(QUESTION + REASONING + ANSWER)
    for steps in range(1, 6):
        vllm.worker.fails = lambda _: True
        name = vllm.add(EDITED)
        for _ in range(steps):
            vllm.step()
        vllm.abort([name])
        vllm.drain(limit=100)
        vllm.worker.fails = None
        assert vllm.ask(EDITED, mode="exact") == continuation(EDITED, 8)
        vllm.ask(QUESTION + REASONING + ANSWER)


@in_flight
@pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
def test_a_failure_forgets_nothing_that_it_has_not_touched(
    core: Callable[..., Core], gaps: bool, in_flight: bool
) -> None:
    # One failed copy made vLLM and the index forget every block.
    vllm = core(connector=UNCHECKED, gaps=gaps, in_flight=in_flight, shadow=False)
    others = [words(300, 50 + number) for number in range(3)]
    for other in others:
        vllm.ask(other)
    vllm.ask(QUESTION + REASONING + ANSWER)
    known = len(vllm.connector.planner.half.sources)
    vllm.worker.fails = lambda _: True
    name = vllm.add(EDITED)
    vllm.drain(limit=100)
    vllm.worker.fails = None
    assert vllm.worker.num_failed
    assert vllm.answers[name].tokens == continuation(EDITED, 8)
    assert len(vllm.connector.planner.half.sources) >= known
    for other in others:
        assert vllm.computed_for(other, mode="exact") <= BLOCK
        # Moved runs of them, too.
        moved = words(20, 9) + other[40:]
        assert not gaps or vllm.computed_for(moved) <= 20 + BLOCK
    # What the failed copy was to read is there.
    assert vllm.computed_for(QUESTION + REASONING + ANSWER, mode="exact") <= BLOCK
    vllm.check()


def test_what_a_failed_copy_touches() -> None:
    tables = {"reads": [1, 2, 3, 4], "shares": [1, 2, 7], "other": [1, 8, 9]}
    manager: Any = SimpleNamespace(get_block_ids=lambda name: (tables[name],))
    failures = Failures(manager, BLOCK, follows=True)

    def schedule(*loads: Load) -> None:
        output: Any = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(tables, 1))
        failures.scheduled(output, loads)

    def copy(source: int, dest: int, count: int) -> Load:
        fields = [(name, "i8") for name in ("source_slot", "dest_slot", "num_tokens", "delta")]
        return Load(np.array([(source, dest, count, 0)], fields), (dest // BLOCK,))

    # Before any copy, nobody's table matters.
    failures.admitted("other")
    schedule()
    failures.done()
    for name in ("reads", "shares"):
        failures.admitted(name)
    schedule(copy(40 * BLOCK, 2 * BLOCK + 3, 9))
    # The next step copies from what was computed after it, across two blocks.
    schedule(copy(3 * BLOCK + 5, 20 * BLOCK + 12, 8), copy(8 * BLOCK, 30 * BLOCK, BLOCK))
    tables["shares"] = []
    # After block 2 comes 3 in one table and 7 in the other, which has been preempted since.
    assert failures.touched({2}, [[1, 8, 9]]) == {2, 3, 4, 7, 20, 21}
    # A request that continues after the copy of the copy.
    assert failures.touched({2}, [[1, 20, 25]]) == {2, 3, 4, 7, 20, 21, 25}
    assert failures.touched({9}, []) == {9}
    failures.done()
    failures.done()
    assert failures.touched({2}, []) == {2}
