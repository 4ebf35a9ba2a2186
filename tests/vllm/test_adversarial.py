"""Situations in which wrong KV could be read unnoticed: every engine here has a shadow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.vllm.conftest import APPROXIMATE, EXACT
from tests.vllm.engine import BLOCK
from tests.vllm.prompts import (
    ANSWER,
    EDITED,
    HISTORY,
    NEXT,
    PARTS,
    QUESTION,
    REASONING,
    gapped,
    words,
)
from tests.vllm.reference import Reference
from vllm.v1.core.kv_cache_utils import get_block_hash

from kvtrie.integrations.vllm import _ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import Engine


def test_a_pool_with_hardly_a_free_block(engine: Callable[..., Engine]) -> None:
    # The edited prompt needs 13 blocks next to the 17 of its sources, in a pool of 20 and 24.
    vllm = engine(connector=APPROXIMATE, blocks=21, max_model_len=608)
    for number in range(6):
        vllm.ask(QUESTION + REASONING + ANSWER)
        assert vllm.ask(EDITED).finished
        assert vllm.ask(words(100, 50 + number) + ANSWER).finished
        vllm.check()


def test_sources_are_reused_by_others_of_the_same_step(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE, blocks=40, max_model_len=1024)
    vllm.ask(QUESTION + REASONING + ANSWER)
    names = [vllm.add(EDITED), vllm.add(words(400, 51)), vllm.add(words(200, 52) + ANSWER)]
    vllm.drain()
    assert all(vllm.answers[name].finished for name in names)


@pytest.mark.parametrize("gaps", [False, True], ids=["scheduler-of-vllm", "gaps"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_chunks_of_a_small_budget(
    engine: Callable[..., Engine], gaps: bool, in_flight: bool
) -> None:
    vllm = engine(
        connector=APPROXIMATE,
        gaps=gaps,
        async_scheduling=in_flight,
        max_num_batched_tokens=48,
        max_num_seqs=4,
    )
    vllm.ask(HISTORY)
    prompt = gapped(PARTS)
    whole = len(prompt)
    computed = vllm.computed_for(prompt)
    if gaps:
        assert computed < whole // 3
    names = [
        vllm.add(prompt + words(9, 70)),
        vllm.add(prompt + words(50, 71)),
        vllm.add(words(300, 72)),
    ]
    for _ in range(3):
        vllm.step()
    vllm.check()
    names.append(vllm.add(gapped(PARTS[::-1])))
    vllm.drain()
    assert all(vllm.answers[name].finished for name in names)


@pytest.mark.parametrize("steps", range(1, 7))
def test_aborted_amid_gaps(engine: Callable[..., Engine], steps: int) -> None:
    vllm = engine(
        connector=APPROXIMATE,
        gaps=True,
        async_scheduling=True,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )
    vllm.ask(HISTORY)
    name, other = vllm.add(gapped(PARTS)), vllm.add(gapped(PARTS[1:]))
    for _ in range(steps):
        vllm.step()
    vllm.abort([name])
    vllm.check()
    vllm.drain()
    vllm.check_idle()
    assert vllm.answers[other].finished
    again = vllm.ask(gapped(PARTS), mode="exact")
    assert again.finished


@pytest.mark.parametrize("steps", range(1, 6))
def test_preempted_amid_gaps(engine: Callable[..., Engine], steps: int) -> None:
    vllm = engine(connector=APPROXIMATE, gaps=True, max_num_batched_tokens=64, max_num_seqs=4)
    vllm.ask(HISTORY)
    name = vllm.add(gapped(PARTS), max_tokens=20)
    for _ in range(steps):
        vllm.step()
    vllm.preempt(name)
    vllm.check()
    assert vllm.pool.get_num_free_blocks() == vllm.pool.num_gpu_blocks - 1
    vllm.drain()
    assert len(vllm.answers[name].tokens) == 20


def test_the_prefix_cache_is_reset_amid_gaps(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE, gaps=True, max_num_batched_tokens=64, max_num_seqs=4)
    vllm.ask(HISTORY)
    with vllm.gap_by_gap():
        name = vllm.add(gapped(PARTS))
        vllm.step()
        vllm.step()
    assert vllm.connector.planner.half.requests.pending
    assert vllm.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert len(vllm.connector.planner.half.sources) == 0
    vllm.drain()
    assert vllm.answers[name].finished


@pytest.mark.parametrize("connector", [APPROXIMATE, EXACT], ids=["approximate", "exact"])
def test_prompts_that_part_in_their_last_block(
    engine: Callable[..., Engine], llama: Path, connector: dict[str, object]
) -> None:
    vllm = engine(connector=connector)
    reference = Reference(llama)
    prompt = words(3 * BLOCK + 20, 80)
    for end in (1, 5, 19, 20, 21, 52, 53):
        other = prompt[: len(prompt) - end] + words(end, 81 + end)
        for asked in (prompt, other):
            answer = vllm.ask(asked, mode="exact")
            assert reference.gap(asked, answer.tokens) < 1e-3


def test_tenants_share_nothing(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER, salt="one")
    assert vllm.computed_for(EDITED, salt="two") == len(EDITED)
    assert vllm.computed_for(EDITED) == len(EDITED)
    assert vllm.computed_for(EDITED, salt="one") <= len(NEXT) + 1


def test_prompt_logprobs_read_no_cache_and_spoil_none(
    engine: Callable[..., Engine], llama: Path
) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)
    assert vllm.computed_for(EDITED, prompt_logprobs=1) == len(EDITED)
    answer = vllm.ask(EDITED, mode="exact")
    assert answer.num_cached >= len(EDITED) // BLOCK * BLOCK - BLOCK
    assert Reference(llama).gap(EDITED, answer.tokens) < 1e-3


def test_several_answers_to_one_prompt(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)
    name = vllm.add(EDITED, n=3, temperature=0.7, seed=1)
    vllm.drain()
    assert vllm.answers[name].finished


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("where", ["planning", "copying"])
@pytest.mark.parametrize("mode", ["exact", "approximate"])
def test_a_copy_that_fails_is_computed(
    engine: Callable[..., Engine],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    mode: str,
    in_flight: bool,
) -> None:
    vllm = engine(connector=APPROXIMATE, async_scheduling=in_flight)
    prompt = QUESTION + ANSWER if mode == "exact" else EDITED
    vllm.ask(QUESTION + REASONING + ANSWER)

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    if where == "planning":
        monkeypatch.setattr(_ranges, "moves", fail)
    else:
        monkeypatch.setattr(vllm.kv_pool, "apply", fail)
    vllm.shadow.expect_failures()
    answer = vllm.ask(prompt, mode=mode)
    monkeypatch.undo()
    vllm.shadow.expect_failures(expected=False)
    assert len(answer.tokens) == 8
    assert Reference(llama).gap(prompt, answer.tokens) < 1e-3
    assert vllm.counts["copies_failed"] > 0


@pytest.mark.parametrize("call", ["plan", "offer"])
def test_a_surprise_is_counted_and_vllm_goes_on(
    engine: Callable[..., Engine], llama: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    vllm = engine(connector=APPROXIMATE)
    vllm.ask(QUESTION + REASONING + ANSWER)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(vllm.connector.planner.half.sources, call, fail)
    answer = vllm.ask(EDITED)
    monkeypatch.undo()
    if call == "plan":
        assert Reference(llama).gap(EDITED, answer.tokens) < 1e-3
    assert len(answer.tokens) == 8
    assert vllm.counts["errors"] > 0
    assert vllm.ask(EDITED).finished


def test_what_a_request_may_not_say_is_refused_and_counted(engine: Callable[..., Engine]) -> None:
    vllm = engine(connector=APPROXIMATE)
    assert vllm.ask(EDITED, mode="approx").finished
    assert vllm.counts["requests_refused"] == 1


@pytest.mark.parametrize(
    "prompts", [[QUESTION + REASONING + ANSWER, EDITED, EDITED + words(90, 5)]]
)
def test_every_cached_block_holds_what_the_model_computes(
    engine: Callable[..., Engine], llama: Path, prompts: list[list[int]]
) -> None:
    # The slow audit: the bytes themselves, not the shadow's records.
    vllm = engine(connector=APPROXIMATE)
    reference = Reference(llama)
    for prompt in prompts:
        for mode in ("approximate", "exact"):
            vllm.ask(prompt, mode=mode)
    num_seen = 0
    for prompt in prompts:
        k, v = reference.kv(prompt)
        for number, wanted in enumerate(vllm.plain_hashes(prompt)):
            for block in vllm.pool.blocks:
                if block.block_hash is None or get_block_hash(block.block_hash) != wanted:
                    continue
                num_seen += 1
                mine_k, mine_v = vllm.kv(block.block_id)
                assert mine_v is not None
                where = slice(number * BLOCK, (number + 1) * BLOCK)
                assert (mine_k - k[:, where]).abs().max() < 1e-3
                assert (mine_v - v[:, where]).abs().max() < 1e-3
    assert num_seen > 20


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("batched", [64, 4096])
def test_exact_blocks_after_a_hole(
    engine: Callable[..., Engine], llama: Path, in_flight: bool, batched: int
) -> None:
    vllm = engine(
        connector=APPROXIMATE, gaps=True, async_scheduling=in_flight, max_num_batched_tokens=batched
    )
    prompt = words(250, 95)
    vllm.ask(prompt, mode="exact")
    vllm.evict(prompt[: 3 * BLOCK])
    before = vllm.num_computed
    answer = vllm.ask(prompt, mode="exact", max_tokens=5)
    assert vllm.num_computed - before < 3 * BLOCK + 2 * BLOCK
    assert Reference(llama).gap(prompt, answer.tokens) < 1e-3
