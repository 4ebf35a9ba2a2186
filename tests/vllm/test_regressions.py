"""One test for each bug that was found by reading, on vLLM's scheduler with steps in flight."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from tests.vllm.pipeline import SIZE, Pipeline
from vllm.lora.request import LoRARequest

APPROXIMATE = {"gate": "unchecked", "chat_format": None}


def words(count: int, seed: int) -> list[int]:
    """Random ids."""
    return Random(seed).choices(range(3, 400), k=count)


QUESTION, THOUGHT, ANSWER, NEXT = words(110, 1), words(80, 2), words(75, 3), words(20, 4)


def test_an_adapter_that_took_over_a_name_reads_nothing_of_the_one_before() -> None:
    # vLLM hashes the adapter's path too, so it hits nothing; the index knew adapters by name, and
    # had the old one's KV copied as exact.
    p = Pipeline(connector=APPROXIMATE)
    p.ask("old", QUESTION + ANSWER, lora_request=LoRARequest("tuned", 1, "/adapters/one"))
    for mode in ("exact", "approximate"):
        new = LoRARequest("tuned", 2, "/adapters/two")
        said = p.ask(f"new, {mode}", QUESTION + ANSWER, mode=mode, lora_request=new)
        assert said == p.truth(p.requests[f"new, {mode}"])


def gapped(parts: list[list[int]]) -> list[int]:
    """Parts with a stub of another length before each."""
    stubs = [words(7 + number, 90 + number) for number in range(len(parts))]
    return [token for stub, part in zip(stubs, parts, strict=True) for token in (*stub, *part)]


def boom(*_: object, **__: object) -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("call", ["jump", "gap_end", "preempted", "_settle"])
def test_a_surprise_within_a_step_ends_no_engine(call: str) -> None:
    # These ran unguarded inside of vLLM's schedule().
    p = Pipeline(gaps=True, connector=APPROXIMATE, max_num_batched_tokens=64)
    parts = [words(40, 60 + number) for number in range(4)]
    p.ask("parts", [token for part in parts for token in part])
    p.add("gapped", gapped(parts))
    plain = p.add("plain", words(50, 5), mode="exact")
    counts = Counter[str]()
    p.planner._counts.add = lambda name, count=1: counts.update({name: count})
    setattr(p.planner, call, boom)
    if call == "preempted":
        p.step()
        p.tell_all()
        p.scheduler._preempt_request(p.scheduler.running.pop(), 0.0)
    p.drain()
    assert list(plain.output_token_ids) == p.truth(plain)
    assert counts["errors"] > 0


def test_a_reset_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Pipeline(connector=APPROXIMATE)
    monkeypatch.setattr(p.planner, "reset", boom)
    assert not p.scheduler.reset_prefix_cache(reset_connector=True)


def test_tokens_that_vllm_counts_on_and_nobody_promised_are_not_passed_over() -> None:
    # Where vLLM took another number than was promised, nothing was copied, and nobody told.
    p = Pipeline(connector=APPROXIMATE, depth=1)
    p.ask("before", QUESTION + THOUGHT + ANSWER)
    match = p.scheduler.connector.get_num_new_matched_tokens
    for more in (-16, -3):
        # As the scheduler does for models that replay: whole blocks are taken, the rest is not.
        p.scheduler.connector.get_num_new_matched_tokens = lambda *given, more=more: (
            match(*given)[0] + more,
            False,
        )
        said = p.ask(f"less {more}", QUESTION + ANSWER, mode="exact")
        assert said == p.truth(p.requests[f"less {more}"])
        p.scheduler.reset_prefix_cache()
        p.ask(f"again {more}", QUESTION + THOUGHT + ANSWER)


@pytest.mark.parametrize("mode", ["exact", "approximate"])
def test_blocks_of_a_request_preempted_in_the_step_that_was_to_write_them_are_not_found(
    mode: str,
) -> None:
    # By priority, vLLM preempts a request that the same step has taken slots for, and cached. With
    # an island among them, others hit blocks that nobody had written.
    prompt, num_preempted = words(250, 95), 0
    for left in range(11, 16):
        p = Pipeline(
            gaps=True,
            depth=1,
            connector=APPROXIMATE,
            scheduling_policy="priority",
            max_num_batched_tokens=32,
            max_model_len=400,
        )
        p.ask("before", prompt, max_tokens=1)
        first = p.requests["before"].block_hashes[:3]
        p.pool.evict_blocks({p.pool.get_cached_block(one, [0])[0].block_id for one in first})
        low = p.add("low", prompt, priority=9, mode=mode)
        p.step()
        # It needs a second block in the step that takes the island.
        high = p.add("high", words(SIZE, 77), priority=0)
        p.step()
        # Whatever else holds blocks: so many are left for what these two need next.
        held = p.pool.get_new_blocks(max(0, p.pool.get_num_free_blocks() - left))
        p.step()
        num_preempted += low.num_preemptions
        assert not p.unwritten(), f"{left} blocks were left"
        p.pool.free_blocks(held)
        p.drain()
        for request in (low, high):
            said = list(request.output_token_ids)
            assert said == p.truth(request, len(said))
    assert num_preempted


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "in-flight"])
@pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
def test_behind_a_copy_that_failed_nothing_wrong_is_said(gaps: bool, depth: int) -> None:
    # With a step in flight vLLM took that step's token, which had read what nobody wrote, as the
    # answer's first; and without any, KvtrieScheduler was busy for ever.
    p = Pipeline(gaps=gaps, depth=depth, connector=APPROXIMATE)
    p.ask("before", QUESTION + THOUGHT + ANSWER)
    p.fails = True
    failed = p.add("failed", QUESTION + ANSWER, mode="exact")
    other = p.add("other", words(50, 5), mode="exact")
    p.drain()
    p.fails = False
    again = p.add("again", QUESTION + ANSWER, mode="exact")
    p.drain()
    for request in (other, again):
        assert list(request.output_token_ids) == p.truth(request)
    assert list(failed.output_token_ids) == p.truth(failed)
    assert p.pool.get_num_free_blocks() == p.pool.num_gpu_blocks - 1
