"""What vLLM may do to a request between two steps, with another step under way or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.prompts import (
    ANSWER,
    EDITED,
    HISTORY,
    PARTS,
    QUESTION,
    REASONING,
    gapped,
    words,
)
from tests.vllm_scheduler.worker import BLOCK, continuation

from kvtrie.integrations.vllm import _gate

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

UNCHECKED = {"gate": "unchecked", "policy": {"scope": "namespace"}}
in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])


@pytest.fixture
def small(core: Callable[..., Core]) -> Callable[..., Core]:
    """A core that has seen the history, and takes a gapped one in several steps."""

    def start(**options: Any) -> Core:
        options = {"connector": UNCHECKED, "gaps": True, "max_num_batched_tokens": 64, **options}
        vllm = core(max_num_seqs=4, **options)
        vllm.ask(HISTORY)
        return vllm

    return start


@in_flight
def test_segments_after_gaps_are_not_computed(small: Callable[..., Core], in_flight: bool) -> None:
    vllm = small(in_flight=in_flight)
    assert vllm.computed_for(gapped(PARTS)) < len(gapped(PARTS)) // 3


@in_flight
def test_the_scheduler_of_vllm_computes_what_follows_a_gap(
    small: Callable[..., Core], in_flight: bool
) -> None:
    vllm = small(in_flight=in_flight, gaps=False)
    prompt = PARTS[0] + words(5, 1) + PARTS[1]
    assert len(prompt) - vllm.computed_for(prompt) in range(
        len(PARTS[0]) - BLOCK, len(PARTS[0]) + 1
    )


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("what", ["abort", "preempt", "reset"])
@in_flight
def test_amid_gaps(small: Callable[..., Core], what: str, steps: int, in_flight: bool) -> None:
    vllm = small(in_flight=in_flight, connector=UNCHECKED | {"role": "kv_producer"})
    name, other = vllm.add(gapped(PARTS), max_tokens=6), vllm.add(gapped(PARTS[1:]), max_tokens=6)
    for _ in range(steps):
        vllm.step()
    if what == "abort":
        vllm.abort([name])
    elif what == "preempt" and name in (one.request_id for one in vllm.scheduler.running):
        vllm.preempt(name)
    elif what == "reset":
        assert vllm.reset_cache()
        assert len(vllm.connector.planner.half.sources) == 0
    vllm.check()
    vllm.drain()
    assert what == "abort" or len(vllm.answers[name].tokens) == 6
    assert len(vllm.answers[other].tokens) == 6
    again = vllm.ask(gapped(PARTS), mode="exact")
    assert again == continuation(gapped(PARTS), 8)


@in_flight
def test_a_pool_with_hardly_a_free_block(core: Callable[..., Core], in_flight: bool) -> None:
    # The edited prompt needs as many blocks as are free without those of its sources, or fewer.
    vllm = core(connector=UNCHECKED, blocks=40, max_model_len=608, in_flight=in_flight)
    for number in range(6):
        vllm.ask(QUESTION + REASONING + ANSWER)
        prompt = QUESTION + ANSWER + words(40, 10 + number)
        assert vllm.ask(prompt, mode="exact") == continuation(prompt, 8)
        assert len(vllm.ask(prompt)) == 8
        assert len(vllm.ask(words(100, 50 + number) + ANSWER)) == 8
        vllm.check()


@in_flight
def test_a_plain_request_hits_nothing_approximate(
    core: Callable[..., Core], in_flight: bool
) -> None:
    vllm = core(connector=UNCHECKED, in_flight=in_flight)
    vllm.ask(QUESTION + REASONING + ANSWER)
    assert vllm.computed_for(EDITED) <= 41
    # Its own exact hit, and the copied rest of the block in which the prompts diverge.
    assert vllm.computed_for(EDITED, mode="exact") == len(EDITED) - len(QUESTION)
    # Requests that may use approximate KV hit it.
    assert vllm.computed_for(EDITED + words(9, 5)) <= 9 + BLOCK


@in_flight
def test_tenants_share_nothing(core: Callable[..., Core], in_flight: bool) -> None:
    vllm = core(connector=UNCHECKED, in_flight=in_flight)
    vllm.ask(QUESTION + REASONING + ANSWER, salt="one")
    edited = QUESTION + ANSWER
    assert vllm.computed_for(edited, salt="two") == len(edited)
    assert vllm.computed_for(edited) == len(edited)
    assert vllm.computed_for(edited, salt="one") == 1


@pytest.mark.parametrize("mode", ["exact", "approximate"])
def test_adapters_share_nothing(core: Callable[..., Core], mode: str) -> None:
    vllm = core(connector=UNCHECKED, enable_lora=True, max_loras=2)
    edited = QUESTION + ANSWER
    vllm.ask(QUESTION + REASONING + ANSWER, adapter="one")
    # Other adapters find none of its KV, in place or moved, and it finds none of theirs.
    for adapter in (None, "two"):
        assert vllm.computed_for(edited, adapter=adapter, mode=mode) == len(edited)
        again = vllm.computed_for(edited, adapter=adapter, mode=mode)
        assert again == len(edited) % BLOCK
    computed = vllm.computed_for(edited, adapter="one", mode=mode)
    assert computed == (1 if mode == "approximate" else len(ANSWER))
    for adapter in (None, "one", "two"):
        said = vllm.ask(edited, adapter=adapter, mode="exact")
        assert said == continuation(edited, 8, adapter=adapter)


def test_a_gate_covers_no_adapter(core: Callable[..., Core], monkeypatch: Any) -> None:
    vllm = core(connector=UNCHECKED, enable_lora=True, max_loras=2)
    monkeypatch.setattr(_gate, "covers", lambda _, adapter: adapter is None)
    vllm.ask(QUESTION + REASONING + ANSWER, adapter="one")
    assert vllm.computed_for(QUESTION + ANSWER, adapter="one") == len(ANSWER)
    assert vllm.counts["requests_uncalibrated"] == 2
    assert vllm.counts["tokens_moved"] == 0


def test_a_block_that_is_not_cached_yet_is_not_taken(core: Callable[..., Core]) -> None:
    # With drafts, vLLM caches a block later than it computes its last token.
    vllm = core(connector=UNCHECKED)
    sources: Any = vllm.connector.planner.half.sources
    offer, num_seen = sources.offer, 0

    def late(seq: Any, block_ids: Any, stretches: Any, **more: Any) -> None:
        nonlocal num_seen
        last = vllm.pool.blocks[block_ids[sum(count for count, _ in stretches) - 1]]
        vllm.pool.evict_blocks({last.block_id})
        offer(seq, block_ids, stretches, **more)
        num_seen = len(sources)

    sources.offer = late
    vllm.ask(words(10 * BLOCK + 3, 1), max_tokens=1)
    sources.offer = offer
    assert vllm.counts["errors"] == 0
    assert num_seen >= 8


def test_whether_a_block_is_approximate_is_one_counter(small: Callable[..., Core]) -> None:
    """It is asked for every request: counters of the whole index would go over all its edges."""

    class Counting:
        def __init__(self, index: Any) -> None:
            self.index = index
            self.asked: list[str] = []

        def __getattr__(self, name: str) -> Any:
            self.asked.append(name)
            return getattr(self.index, name)

    vllm = small()
    sources: Any = vllm.connector.planner.half.sources
    sources._index = counting = Counting(sources.index)
    assert not sources.has_approximate
    vllm.ask(gapped(PARTS))
    counting.asked.clear()
    assert sources.has_approximate == (counting.index.stats().approximate > 0)
    assert counting.asked == ["num_approximate"]
