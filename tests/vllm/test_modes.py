"""Modes of vLLM that the connector supports, each in a real engine."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm import runner
from tests.vllm.inside import SCHEDULER

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import Engine

RNG = random.Random(3)
APPROXIMATE = {"gate": "unchecked", "policy": {"scope": "namespace"}}


def ids(count: int) -> list[int]:
    return [RNG.randrange(3, 500) for _ in range(count)]


HEAD, REASONING, ANSWER, MORE = ids(200), ids(160), ids(150), ids(40)
EDITED = HEAD + ANSWER + MORE


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def alone(
    model: Path, settings: dict[str, Any] | None, *, v2: bool = runner.RUNS_V2, **options: Any
) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.vllm.alone"),
            *(str(model), json.dumps(settings), json.dumps(options)),
        ],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "KVTRIE_VLLM_V2": str(int(v2)),
            "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
            "TRITON_INTERPRET": str(int(v2)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"said"'))
    said: dict[str, Any] = json.loads(line)
    return said


@pytest.mark.minutes
@pytest.mark.parametrize(
    "options",
    [{"speculative_config": DRAFTS}, {"tensor_parallel_size": 2}],
    ids=["ngrams", "tensor-parallel"],
)
def test_drafts_and_ranks_change_nothing(llama: Path, options: dict[str, Any]) -> None:
    plain, exact, moving = (alone(llama, one, **options) for one in (None, {}, APPROXIMATE))
    assert plain["said"] == exact["said"]
    assert plain["last"] == exact["last"]
    # KV of drafts in rejected slots is not reused.
    assert moving["cached"] > 300 > plain["cached"]


@pytest.mark.minutes
@pytest.mark.parametrize("gaps", [False, True], ids=["vllm", "kvtrie"])
@pytest.mark.parametrize("more", [{}, {"speculative_config": DRAFTS}], ids=["plain", "ngrams"])
def test_both_model_runners_say_the_same(llama: Path, more: dict[str, Any], gaps: bool) -> None:
    options = more | {"max_num_batched_tokens": 128, "scheduler_cls": SCHEDULER if gaps else None}
    options = {name: one for name, one in options.items() if one is not None}
    one, two = (alone(llama, APPROXIMATE, v2=v2, **options) for v2 in (False, True))
    assert one == two


def test_reset_forgets_all(engine: Callable[..., Engine]) -> None:
    e = engine(connector=APPROXIMATE)
    e.ask(HEAD + REASONING + ANSWER)
    assert len(e.connector.planner.half.sources) > 0
    # vLLM resets the pool, and the pool notifies its watchers: the connector needs no call.
    assert e.llm.reset_prefix_cache()
    assert len(e.connector.planner.half.sources) == 0
    assert e.ask(EDITED).num_cached == 0


@pytest.mark.parametrize("gaps", [False, True], ids=["vllm", "kvtrie"])
def test_reset_under_running_requests(engine: Callable[..., Engine], gaps: bool) -> None:
    e = engine(connector=APPROXIMATE, gaps=gaps, max_num_batched_tokens=64)
    segments = [ids(100) for _ in range(4)]
    e.ask([one for segment in segments for one in segment])
    prompt = segments[0] + ids(70) + segments[2] + ids(70) + segments[3] + ids(5)
    name = e.add(prompt, max_tokens=4)
    e.step()
    e.step()
    assert e.is_busy
    assert e.llm.llm_engine.engine_core.reset_prefix_cache(reset_running_requests=True)
    e.drain()
    plain = engine(connector={"gate": None}).ask(prompt, max_tokens=4)
    assert e.answers[name].tokens == plain.tokens


def test_abort_at_every_step_gives_back_all(engine: Callable[..., Engine]) -> None:
    e = engine(connector=APPROXIMATE, gaps=True, max_num_batched_tokens=64)
    segments = [ids(100) for _ in range(4)]
    e.ask([one for segment in segments for one in segment])
    for steps in range(8):
        prompt = segments[0] + ids(70) + segments[2] + ids(70) + segments[3] + ids(5)
        name = e.add(prompt, max_tokens=4)
        for _ in range(steps):
            e.step()
        e.abort([name])
        e.drain()
        e.check_idle()


@pytest.mark.long
def test_preemption_changes_nothing(engine: Callable[..., Engine]) -> None:
    prompts = [ids(100) for _ in range(5)]
    said: list[Any] = []
    for connector in (None, {}, APPROXIMATE):
        # Five requests that grow to 260 tokens each do not fit into 24 blocks of 32.
        e = engine(connector=connector, blocks=25, max_model_len=512)
        names = [e.add(prompt, max_tokens=160) for prompt in prompts]
        e.drain()
        said.append([e.answers[name].tokens for name in names])
    assert said[0] == said[1] == said[2]


def test_sleep_forgets_all(engine: Callable[..., Engine]) -> None:
    e = engine(connector=APPROXIMATE)
    e.ask(HEAD + REASONING + ANSWER)
    # vLLM's reset before it releases the memory; the CPU backend keeps its memory.
    e.core.pause_scheduler(mode="abort", clear_cache=True)
    assert len(e.connector.planner.half.sources) == 0
    e.core.resume_scheduler()
    assert e.ask(EDITED).num_cached == 0
