"""How workers learn of requests that continue at another position, and what they do then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.prompts import ANSWER, EDITED, QUESTION, REASONING, gapped, words
from tests.vllm.reference import Reference
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import Request

from kvtrie.integrations.vllm._runners import send_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import Engine

NAMES = ["first", "second", "third"]


def a_step() -> tuple[SchedulerOutput, dict[str, Request]]:
    """Three requests that go on, each with a block or none more."""
    requests = {}
    for at, name in enumerate(NAMES):
        made = Request(name, list(range(100 + at)), SamplingParams(max_tokens=4), None)
        made.append_output_token_ids([7] * at)
        made.num_computed_tokens = 30 + at
        requests[name] = made
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(NAMES),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([1],), None, ([3],)],
        num_computed_tokens=[30, 31, 32],
        num_output_tokens=[0, 1, 2],
    )
    return output, requests


TABLES = SimpleNamespace(get_block_ids=lambda name: ([10, 11, NAMES.index(name)],))


def test_a_request_is_sent_whole_to_a_runner_that_counts_itself() -> None:
    output, requests = a_step()
    manager: Any = TABLES
    send_whole(output, {"second": requests["second"]}, manager, counts_itself=True)
    cached = output.scheduled_cached_reqs
    assert cached.req_ids == ["first", "third"]
    assert cached.new_block_ids == [([1],), ([3],)]
    assert cached.num_computed_tokens == [30, 32]
    assert cached.num_output_tokens == [0, 2]
    assert cached._req_id_to_num_output_tokens == {"first": 0, "third": 2}
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == ("second", 31)
    assert new.block_ids == ([10, 11, 1],)
    assert new.prompt_token_ids == list(range(101))
    assert new.prefill_token_ids == [*range(101), 7]
    assert new.sampling_params is requests["second"].sampling_params


def test_a_request_is_resumed_for_a_runner_that_asks_the_scheduler() -> None:
    output, requests = a_step()
    manager: Any = TABLES
    send_whole(output, {"third": requests["third"]}, manager, counts_itself=False)
    cached = output.scheduled_cached_reqs
    assert not output.scheduled_new_reqs
    assert cached.resumed_req_ids == {"third"}
    assert cached.req_ids == NAMES
    assert cached.new_block_ids == [([1],), None, ([10, 11, 2],)]
    assert cached.all_token_ids == {"third": [*range(102), 7, 7]}


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_others_that_read_a_copy_that_fails(
    engine: Callable[..., Engine], llama: Path, monkeypatch: pytest.MonkeyPatch, in_flight: bool
) -> None:
    # Blocks under the lineage of what is copied are known to others as soon as vLLM has given them
    # to a request: before the step that fills them, and while the next one is in flight.
    vllm = engine(connector=APPROXIMATE, async_scheduling=in_flight, max_num_batched_tokens=256)
    assert (vllm.core.batch_queue is not None) == in_flight
    vllm.ask(QUESTION + REASONING + ANSWER)

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(vllm.kv_pool, "apply", fail)
    vllm.shadow.expect_failures()
    prompts = [QUESTION + ANSWER, QUESTION + ANSWER + words(9, 44), EDITED, EDITED + words(90, 45)]
    names = [vllm.add(prompt, mode="exact") for prompt in prompts[:2]]
    vllm.step()
    names += [vllm.add(prompt, mode="exact") for prompt in prompts[2:]]
    vllm.drain()
    monkeypatch.undo()
    vllm.shadow.expect_failures(expected=False)
    assert vllm.counts["copies_failed"] > 0
    reference = Reference(llama)
    for prompt, name in zip(prompts, names, strict=True):
        assert len(vllm.answers[name].tokens) == 8
        assert reference.gap(prompt, vllm.answers[name].tokens) < 1e-3


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_a_copy_after_a_gap_that_fails(
    engine: Callable[..., Engine], llama: Path, monkeypatch: pytest.MonkeyPatch, in_flight: bool
) -> None:
    vllm = engine(
        connector=APPROXIMATE, gaps=True, async_scheduling=in_flight, max_num_batched_tokens=64
    )
    parts = [words(70, 60 + number) for number in range(5)]
    vllm.ask([token for part in parts for token in part])

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(vllm.kv_pool, "apply", fail)
    vllm.shadow.expect_failures()
    prompt = gapped(parts)
    answer = vllm.ask(prompt, max_tokens=5)
    monkeypatch.undo()
    vllm.shadow.expect_failures(expected=False)
    assert vllm.counts["copies_failed"] > 0
    assert Reference(llama).gap(prompt, answer.tokens) < 1e-3
