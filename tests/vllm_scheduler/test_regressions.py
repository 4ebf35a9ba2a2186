"""One test for each bug that was found by reading, or by random traffic."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm.prompts import ANSWER, EDITED, QUESTION, REASONING, gapped, joined, words
from tests.vllm_scheduler.worker import BLOCK, continuation
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from kvtrie.integrations.vllm import _lineage

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

UNCHECKED = {"gate": "unchecked", "policy": {"scope": "namespace"}}
in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])


@in_flight
@pytest.mark.parametrize("mode", ["exact", "approximate"])
def test_an_adapter_that_took_over_a_name_reads_nothing_of_the_one_before(
    core: Callable[..., Core], mode: str, in_flight: bool
) -> None:
    # vLLM hashes the adapter's path too; the index knew adapters by name, and had the old one's KV
    # copied as exact.
    vllm = core(connector=UNCHECKED, in_flight=in_flight, enable_lora=True, max_loras=2)
    old, new = (LoRARequest("tuned", number, f"/adapters/{number}") for number in (1, 2))
    vllm.ask(QUESTION + ANSWER, adapter=old)
    said = vllm.ask(QUESTION + ANSWER, mode=mode, adapter=new)
    assert said == continuation(QUESTION + ANSWER, 8, adapter=new)
    assert said != continuation(QUESTION + ANSWER, 8, adapter=old)


def boom(*_: object, **__: object) -> None:
    raise RuntimeError("injected")


@in_flight
@pytest.mark.parametrize(
    "call",
    [
        *("gaps.jump", "gaps.end", "gaps.skip", "gaps.promise", "gaps._count"),
        *("forget_unwritten", "half.requests.preempted", "half.dead.settle"),
        *("_advance", "half.offers.offer"),
    ],
)
def test_a_surprise_within_a_step_ends_no_engine(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, call: str, in_flight: bool
) -> None:
    # These ran unguarded inside of vLLM's schedule().
    vllm = core(connector=UNCHECKED, gaps=True, in_flight=in_flight, max_num_batched_tokens=64)
    parts = [words(40, 60 + number) for number in range(4)]
    vllm.ask(joined(*parts))
    name, plain = vllm.add(gapped(parts)), vllm.add(words(50, 5), mode="exact")
    planner: Any = vllm.connector.planner
    *path, name_of_call = call.split(".")
    monkeypatch.setattr(
        attrgetter(".".join(path))(planner) if path else planner, name_of_call, boom
    )
    vllm.step()
    vllm.preempt(name)
    vllm.drain(limit=200)
    assert len(vllm.answers[name].tokens) == 8
    assert vllm.answers[plain].tokens == continuation(words(50, 5), 8)
    assert vllm.counts["errors"] > 0


def test_a_reset_that_fails_is_reported(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = core(connector=UNCHECKED)
    monkeypatch.setattr(vllm.connector.planner.half, "reset", boom)
    assert not vllm.reset_cache()
    assert vllm.counts["errors"] == 1


@in_flight
@pytest.mark.parametrize("less", [3, 2 * BLOCK])
def test_tokens_that_vllm_counts_on_and_nobody_promised_are_not_skipped(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, less: int, in_flight: bool
) -> None:
    # Where vLLM took another number than was promised (whole blocks, for models that replay),
    # nothing was copied, without an error.
    vllm = core(connector=UNCHECKED, in_flight=in_flight)
    vllm.ask(QUESTION + REASONING + ANSWER)
    counts_on(vllm, monkeypatch, -less)
    copied = vllm.computed_for(EDITED)
    monkeypatch.undo()
    vllm.reset_cache()
    vllm.ask(QUESTION + REASONING + ANSWER)
    assert copied - vllm.computed_for(EDITED) == less
    assert not vllm.counts["errors"]


@in_flight
@pytest.mark.parametrize("change", [-3, 3, BLOCK])
def test_an_exact_request_of_which_vllm_counts_on_other_tokens_than_promised(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, change: int, in_flight: bool
) -> None:
    # Tokens that were not promised are not copied: workers report a failure, and they are computed.
    vllm = core(connector=UNCHECKED, in_flight=in_flight, shadow=False)
    vllm.ask(QUESTION + REASONING + ANSWER)
    counts_on(vllm, monkeypatch, change)
    assert vllm.ask(EDITED, mode="exact") == continuation(EDITED, 8)
    assert vllm.worker.num_failed == vllm.counts["errors"] == (change > 0)


def counts_on(vllm: Core, monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    match = vllm.connector.get_num_new_matched_tokens

    def changed(*given: Any) -> tuple[int, bool]:
        promised, _ = match(*given)
        assert promised is not None
        return promised + change if promised else 0, False

    monkeypatch.setattr(vllm.connector, "get_num_new_matched_tokens", changed)


@pytest.mark.parametrize("mode", ["exact", "approximate"])
def test_blocks_of_a_request_preempted_in_the_step_that_was_to_write_them_are_not_found(
    core: Callable[..., Core], mode: str
) -> None:
    # By priority, vLLM preempts a request that the same step has taken slots for, and cached:
    # others hit unwritten blocks.
    prompt, num_preempted = words(250, 95), 0
    for left in range(11, 16):
        vllm = core(
            connector=UNCHECKED,
            gaps=True,
            blocks=64,
            scheduling_policy="priority",
            max_num_batched_tokens=32,
            max_model_len=400,
        )
        vllm.ask(prompt, max_tokens=1)
        vllm.evict(prompt[: 3 * BLOCK])
        before = vllm.num_preempted
        with vllm.gap_by_gap():
            low = vllm.add(prompt, priority=9, mode=mode)
            vllm.step()
            # It needs a second block in the step that takes the segment after the gap.
            high = vllm.add(words(BLOCK, 77), priority=0)
            vllm.step()
            # Blocks that are left for what these two need next.
            held = vllm.pool.get_new_blocks(max(0, vllm.pool.get_num_free_blocks() - left))
            vllm.step()
            num_preempted += vllm.num_preempted - before
            assert not vllm.shadow.unwritten(), f"{left} blocks were left"
            vllm.pool.free_blocks(held)
            vllm.drain(limit=300)
        assert vllm.answers[low].tokens == continuation(prompt, 8)
        assert vllm.answers[high].tokens == continuation(words(BLOCK, 77), 8)
    assert num_preempted


@pytest.mark.parametrize("after", ["exact", "gone"])
def test_a_chain_through_approximate_blocks_never_returns_to_plain_tokens(
    core: Callable[..., Core], after: str
) -> None:
    # The chain took the plain hash of an exact block that follows approximate ones. When that block
    # was evicted, the request cached approximate KV under it.
    vllm = core(connector=UNCHECKED)
    tokens = words(5 * BLOCK, 3)
    request = Request(
        "joins",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=vllm.core.request_block_hasher,
    )
    plain, own = list(request.block_hashes), [BlockHash(bytes([one]) * 32) for one in range(5)]
    found = [plain[0], own[1], plain[2] if after == "exact" else None, own[3], own[4]]
    blocks = [KVCacheBlock(number) for number in range(5)]
    for block, block_hash in zip(blocks, found, strict=True):
        if block_hash is not None:
            block._block_hash = make_block_hash_with_group_id(block_hash, 0)
    assert _lineage.join(request, blocks) == 1
    assert request.block_hashes[:2] == [plain[0], own[1]]
    assert len(request.block_hashes) == 5
    assert not set(request.block_hashes[1:]) & {*plain, *own[2:]}
