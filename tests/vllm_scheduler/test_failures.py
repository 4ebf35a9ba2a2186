"""Copies that fail, one at a time: no request ever reads KV that was not copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.vllm.prompts import ANSWER, EDITED, NEXT, QUESTION, REASONING, words
from tests.vllm_scheduler.worker import continuation

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
