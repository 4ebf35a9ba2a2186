"""Models with other layers next to full attention: exact mode orders blocks and copies nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.vllm import models
from tests.vllm.test_startup import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.vllm.engine import Engine
    from tests.vllm.kept import Kept

USER, ASSISTANT, SYSTEM, THINK, STOP = range(3, 8)
EXACT: dict[str, Any] = {
    "mode": "exact",
    "chat_format": {
        "system": SYSTEM,
        "user": USER,
        "assistant": ASSISTANT,
        "reasoning": [THINK, STOP],
    },
}
OPTIONS: dict[str, Any] = {"shadow": False, "blocks": 160, "max_model_len": 1024}


MODELS: dict[str, Callable[[Path], Path]] = {
    "sliding-window": models.gemma,
    "convolution": models.lfm,
    "mamba-2": models.granite,
    "gated-delta-net": models.qwen_next,
}
# What vLLM's CPU build needs. Its Mamba 2 returns no states but the last of a step, which prefix
# caching wants at the end of each block: here a step ends there.
NEEDS: dict[str, dict[str, Any]] = {
    "mamba-2": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "gated-delta-net": {"dtype": "bfloat16"},
}


class Hybrid(NamedTuple):
    model: Path
    options: dict[str, Any]


@pytest.fixture(scope="module", params=MODELS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    model = MODELS[request.param](tmp_path_factory.mktemp("models") / request.param)
    return Hybrid(model, OPTIONS | NEEDS.get(request.param, {}))


def conversations(count: int) -> list[list[int]]:
    """Prompts of several turns; the template drops the reasoning of all but the last turn."""
    rng = random.Random(7)
    head = [SYSTEM, *rng.choices(range(16, 500), k=120)]
    prompts = []
    for _ in range(count):
        kept = list(head)
        for _ in range(3):
            asked = [USER, *rng.choices(range(16, 500), k=30), ASSISTANT]
            reasoned = [THINK, *rng.choices(range(16, 500), k=200), STOP]
            said = rng.choices(range(16, 500), k=40)
            prompts.append([*kept, *asked])
            prompts.append([*kept, *asked, *reasoned, *said])
            kept += [*asked, *said]
    return prompts


def serve(engine: Engine) -> list[list[int]]:
    said = []
    for at, prompt in enumerate(conversations(4)):
        # The model stops by itself after any token: the turn is closed.
        stops = {"stop_token_ids": list(range(512)), "ignore_eos": False} if at % 2 else {}
        said.append(engine.ask(prompt, max_tokens=6, **stops).tokens)
    return said


def test_outputs_are_vllms_and_dead_reasoning_leaves_first(
    engine: Callable[..., Engine], hybrid: Hybrid
) -> None:
    alone = serve(engine(hybrid.model, **hybrid.options))
    mine = engine(hybrid.model, connector=EXACT, **hybrid.options)
    assert serve(mine) == alone
    counts = mine.counts
    assert counts["blocks_dead"] > 5
    assert counts["tokens_exact"] == counts["tokens_moved"] == counts["errors"] == 0
    planner = mine.connector.planner
    assert not planner.copies
    assert not planner.half.requests.live
    assert mine.pool.get_num_free_blocks() == mine.pool.num_gpu_blocks - 1


def test_moving_is_refused_by_name(engines: Kept, hybrid: Hybrid) -> None:
    said = refused(engines, hybrid.model, connector={"gate": "unchecked"}, **hybrid.options)
    assert 'set "mode": "exact", which works with these models' in said
