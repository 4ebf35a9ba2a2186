"""Exact mode in a real engine: the model says what it says in vLLM alone.

``KVTRIE_VLLM_CONVERSATIONS=200`` compares as many conversations.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

from tests.vllm.test_hybrid import EXACT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import Engine

USER, ASSISTANT, SYSTEM, THINK, STOP = range(3, 8)
COUNT = int(os.environ.get("KVTRIE_VLLM_CONVERSATIONS", "12"))
OPTIONS: dict[str, Any] = {"blocks": 60, "max_model_len": 1024, "shadow": False}


def converse(engine: Engine, count: int) -> list[list[int]]:
    """Conversations of two to four turns, four at a time, in a pool that holds few of them.

    The template drops the reasoning of earlier turns. What the model says becomes the history.
    """
    rng = random.Random(11)
    heads = [[SYSTEM, *rng.choices(range(16, 500), k=90)] for _ in range(2)]
    said: list[list[int]] = []
    for first in range(0, count, 4):
        group = range(first, min(first + 4, count))
        kept = {at: list(rng.choice(heads)) for at in group}
        turns = {at: rng.randrange(2, 5) for at in group}
        for turn in range(4):
            names = {}
            for at in (one for one in group if turn < turns[one]):
                question = [USER, *rng.choices(range(16, 500), k=rng.randrange(10, 50)), ASSISTANT]
                kept[at] += question
                reasoned = [THINK, *rng.choices(range(16, 500), k=rng.randrange(20, 90)), STOP]
                # Any token ends every other reply, so its turn is closed.
                stops = {"stop_token_ids": list(range(512)), "ignore_eos": False}
                more: dict[str, Any] = stops if rng.random() < 0.5 else {}
                names[at] = engine.add([*kept[at], *reasoned], max_tokens=12, **more)
            engine.drain()
            for at, name in names.items():
                said.append(engine.answers[name].tokens)
                kept[at] += said[-1]
    return said


def test_quantised_kv_is_vllms(engine: Callable[..., Engine]) -> None:
    """It was refused, although nothing of it is read: its blocks are ordered, and not copied."""
    options = {**OPTIONS, "kv_cache_dtype": "fp8_e5m2", "dtype": "bfloat16"}
    alone = converse(engine(**options), 4)
    mine = engine(connector=EXACT, **options)
    assert converse(mine, 4) == alone
    assert mine.counts["blocks_dead"] > 0
    assert mine.counts["tokens_exact"] == mine.counts["tokens_moved"] == 0
    assert mine.counts["errors"] == 0
    mine.check_idle()


def test_outputs_are_vllms(engine: Callable[..., Engine]) -> None:
    alone = converse(engine(**OPTIONS), COUNT)
    mine = engine(connector=EXACT, **OPTIONS)
    said = converse(mine, COUNT)
    different = sum(ours != theirs for ours, theirs in zip(said, alone, strict=True))
    assert different == 0, f"{different} of {len(alone)} replies differ"
    counts = mine.counts
    assert counts["tokens_exact"] > 0
    assert counts["blocks_dead"] > 0
    assert counts["tokens_moved"] == counts["errors"] == 0
    mine.check_idle()
