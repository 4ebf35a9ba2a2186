"""All gaps of a prompt in one step compute what one step for each computes, in a real engine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from tests.vllm.conftest import APPROXIMATE
from tests.vllm.engine import BLOCK
from tests.vllm.inside import SCHEDULER
from tests.vllm.names import parent_of
from tests.vllm.prompts import joined, words
from tests.vllm.test_modes import alone
from tests.vllm.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import Engine
    from tests.vllm.kept import Kept

in_flight = pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
# float32, in batches of other shapes: a sum is rounded by the size of its terms, not by its own,
# so by that of its vector. A number near 0 in a vector of large ones differs most.
ROUNDING = 1e-5


def edited(pieces: list[int], run: int = 40) -> tuple[list[int], list[int]]:
    """Runs that a history has, and a prompt with pieces of these lengths before them."""
    runs = [words(run, 100 + at) for at in range(len(pieces))]
    gaps = [words(count, 200 + at) for at, count in enumerate(pieces)]
    prompt = joined(*(gap + kept for gap, kept in zip(gaps, runs, strict=True)), words(9, 300))
    return joined(*runs), prompt


class Computed(NamedTuple):
    steps: int
    k: torch.Tensor
    v: torch.Tensor
    tokens: list[int]
    logprobs: torch.Tensor


def compute(
    vllm: Engine, history: list[int], prompt: list[int], *, by_rows: bool, poisons: bool = False
) -> Computed:
    """Serve a prompt after its history; ``poisons``: fill the slots of rows with NaN before."""
    vllm.reset()
    vllm.ask(history, max_tokens=1)
    name, steps = vllm.add(prompt, max_tokens=6, logprobs=-1), 0
    schedule = vllm.scheduler.schedule

    def scheduling(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        output = schedule(*args, **kwargs)
        steps += any(one.startswith(name) for one in output.num_scheduled_tokens)
        for new in output.scheduled_new_reqs if poisons else ():
            if "#" in new.req_id:
                poison(vllm, new, output.num_scheduled_tokens[new.req_id])
        return output

    vllm.scheduler.schedule = scheduling
    try:
        with nullcontext() if by_rows else vllm.gap_by_gap():
            while not vllm.answers[name].tokens:
                vllm.step()
            used = steps - (vllm.core.batch_queue is not None)
            request = vllm.request(name).request_id
            table = vllm.scheduler.kv_cache_manager.get_block_ids(request)[0]
            k, v = vllm.kv_pool.gather(table, start=0, end=len(prompt))
            vllm.drain()
    finally:
        vllm.scheduler.schedule = schedule
    answer = vllm.answers[name]
    logprobs = torch.tensor([[at[token] for token in sorted(at)] for at in answer.logprobs])
    assert v is not None
    return Computed(used, k, v, answer.tokens, logprobs)


def poison(vllm: Engine, new: Any, count: int) -> None:
    pool = vllm.kv_pool
    for position in range(new.num_computed_tokens, new.num_computed_tokens + count):
        block, slot = new.block_ids[0][position // BLOCK], position % BLOCK
        for view in (*pool.k, *(one for one in pool.v if one is not None)):
            view[block, slot] = torch.nan


def compare(one: Computed, other: Computed) -> None:
    assert one.tokens == other.tokens
    for mine, its in ((one.k, other.k), (one.v, other.v), (one.logprobs, other.logprobs)):
        size = its.abs().amax(-1, keepdim=True).clamp(min=1)
        # NaN, where a slot was never written, is no such number either.
        assert ((mine - its).abs() / size).max() <= ROUNDING


@in_flight
@pytest.mark.parametrize(
    ("pieces", "run"),
    [
        ([16] * 32, 40),
        ([1] * 60, 20),
        ([200, 200], 60),
        ([3 * at % 37 + 1 for at in range(30)], 25),
    ],
    ids=["32x16", "60x1", "2x200", "ragged"],
)
def test_one_step_computes_what_many_compute(
    engine: Callable[..., Engine], pieces: list[int], run: int, in_flight: bool
) -> None:
    vllm = engine(
        connector=APPROXIMATE,
        gaps=True,
        async_scheduling=in_flight,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_logprobs=-1,
    )
    history, prompt = edited(pieces, run)
    before = vllm.shadow.num_rows
    # With a step in flight, a slot may still be read when the next one is scheduled.
    one = compute(vllm, history, prompt, by_rows=True, poisons=not in_flight)
    num_rows = vllm.shadow.num_rows - before
    # By chance, the one token of a gap is that of the history.
    assert num_rows in range(len(pieces) - 3, len(pieces) + 1)
    assert one.steps == 1
    many = compute(vllm, history, prompt, by_rows=False)
    assert many.steps == num_rows + 1
    compare(one, many)
    assert vllm.counts["errors"] == 0


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 8}, {"max_num_batched_tokens": 64}], ids=["sequences", "tokens"]
)
def test_what_does_not_fit_takes_more_steps(
    engine: Callable[..., Engine], limits: dict[str, int]
) -> None:
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, **limits}
    vllm = engine(connector=APPROXIMATE, gaps=True, max_logprobs=-1, **options)
    history, prompt = edited([16] * 32)
    one = compute(vllm, history, prompt, by_rows=True, poisons=True)
    assert 1 < one.steps < 16
    compare(one, compute(vllm, history, prompt, by_rows=False))


@pytest.mark.parametrize("fronts", [{"recompute_first": 8}, {"recompute_share": 0.2}], ids=str)
def test_tokens_recomputed_inside_moved_runs_share_the_step(
    engine: Callable[..., Engine], fronts: dict[str, Any]
) -> None:
    policy = {"scope": "namespace", **fronts}
    vllm = engine(
        connector={"gate": "unchecked", "policy": policy},
        gaps=True,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_logprobs=-1,
    )
    # Dropped passages leave no gap of their own, only the fronts of what follows them.
    parts = [words(60, 100 + at) for at in range(24)]
    history, prompt = joined(*parts), joined(*parts[::2], words(9, 300))
    one = compute(vllm, history, prompt, by_rows=True, poisons=True)
    assert one.steps == 1
    many = compute(vllm, history, prompt, by_rows=False)
    assert many.steps == 12
    compare(one, many)


@in_flight
def test_a_preemption_amid_rows_changes_nothing(
    engine: Callable[..., Engine], in_flight: bool
) -> None:
    vllm = engine(
        connector=APPROXIMATE,
        gaps=True,
        async_scheduling=in_flight,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
    )
    history, prompt = edited([16] * 32)
    said = []
    for steps in (0, 1, 2, 3):
        vllm.reset()
        vllm.ask(history, max_tokens=1)
        name = vllm.add(prompt, max_tokens=6)
        for _ in range(steps):
            vllm.step()
        if steps:
            vllm.preempt(name)
        vllm.drain()
        vllm.check_idle()
        said.append(vllm.answers[name].tokens)
    assert said[0] == said[1] == said[2] == said[3]
    assert vllm.counts["errors"] == 0


@pytest.mark.long
def test_random_conversations_say_the_same_gap_by_gap(
    engines: Kept, engine: Callable[..., Engine]
) -> None:
    # One request at a time, in engines with the same past, so that each finds the same.
    said: list[list[list[int]]] = []
    for by_rows in (True, False):
        engines.close()
        vllm = engine(
            connector={**APPROXIMATE, "seed": 1},
            gaps=True,
            blocks=60,
            max_model_len=1024,
            max_num_seqs=12,
            max_num_batched_tokens=256,
        )
        traffic, answers = Traffic(5, longest=700), []
        with nullcontext() if by_rows else vllm.gap_by_gap():
            for _ in range(100):
                ask = traffic.next()
                answer = vllm.ask(ask.prompt, max_tokens=ask.max_tokens, mode=ask.mode)
                answers.append(answer.tokens)
                traffic.said(ask, answer.tokens)
        said.append(answers)
        assert bool(vllm.shadow.num_rows) == by_rows
    assert said[0] == said[1]


def test_names_of_rows() -> None:
    assert parent_of("a#b#12") == "a#b"


@pytest.mark.minutes
def test_ranks_say_the_same(llama: Path) -> None:
    options = {"scheduler_cls": SCHEDULER}
    one = alone(llama, APPROXIMATE, v2=False, **options)
    two = alone(llama, APPROXIMATE, v2=False, tensor_parallel_size=2, **options)
    assert one == two
