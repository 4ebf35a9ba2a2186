"""Full attention and a sliding window: exact mode knows the blocks of both."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm_scheduler.test_exact import (
    ANSWER,
    ASSISTANT,
    CLOSED,
    END,
    EXACT,
    HEAD,
    LOOPING,
    QUESTION,
    SMALL,
    TOOL,
    USER,
    end,
    fill,
    hashes_of,
    message,
    order,
    places_of_others,
    words,
)
from tests.vllm_scheduler.worker import BLOCK, WindowWorker, continuation

from kvtrie.integrations.vllm._retention import HEADS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

WINDOW = WindowWorker.WINDOW
# What vLLM keeps of windows: what a repeated prompt needs, or all.
RETENTION = pytest.mark.parametrize("retention", [0, BLOCK], ids=["sparse", "dense"])


def options(retention: int = BLOCK, **more: Any) -> dict[str, Any]:
    # The shadow follows one group of blocks.
    given: dict[str, Any] = {"worker": WindowWorker, "shadow": False, "blocks": 400}
    return given | {"prefix_cache_retention_interval": retention} | more


@RETENTION
def test_windows_of_dead_reasoning_are_evicted_first(
    core: Callable[..., Core], retention: int
) -> None:
    """Those that had left the request's table stayed in the order of vLLM."""
    vllm = core(connector=EXACT, **options(retention))
    end(vllm, CLOSED)
    alive = len(HEAD) + len(QUESTION) + 1
    first = -(-alive // BLOCK)
    places = places_of_others(vllm, hashes_of(vllm, CLOSED))
    dead = {number for number, place in places.items() if place >= first}
    whole = (len(CLOSED) - 1) // BLOCK
    # vLLM itself keeps windows at the ends of prompts alone, unless it is told to keep more.
    assert len(dead) == (whole - first if retention else -(-(WINDOW - 1) // BLOCK))
    assert vllm.counts["blocks_dead"] == whole - first + len(dead)
    assert dead <= set(order(vllm)[: whole - first + len(dead)])
    # What a prompt without the reasoning needs is not among them.
    following = [*HEAD, *QUESTION, 4, *ANSWER, *message(3, 40, 9), 4]
    fill(vllm, 40, 1)
    computed = vllm.computed_for(following)
    assert computed == len(following) - (alive // BLOCK * BLOCK if retention else 0)
    assert vllm.counts["errors"] == 0
    vllm.check_idle()


@pytest.mark.parametrize("mode", ["exact", "vLLM"])
@RETENTION
def test_a_tool_loop_keeps_its_window_too(
    core: Callable[..., Core], monkeypatch: pytest.MonkeyPatch, retention: int, mode: str
) -> None:
    """Its full attention was kept, and of no use: the window's blocks had left."""
    vllm = core(connector=EXACT, **options(retention, blocks=160, **SMALL))
    if mode == "vLLM":
        monkeypatch.setattr(vllm.connector.planner._retention, "look", lambda: None)
    end(vllm, LOOPING)
    fill(vllm, 800, 1)
    following = [*LOOPING, *message(TOOL, 40, 8), 4]
    found = len(following) - vllm.computed_for(following)
    assert found >= len(LOOPING) - 2 * BLOCK if mode == "exact" else found == 0
    vllm.check_idle()


def test_kept_blocks_are_bounded_in_all_groups(core: Callable[..., Core]) -> None:
    vllm = core(connector=EXACT, **options(blocks=100, **SMALL | {"max_model_len": 1200}))
    passes = vllm.connector.planner._retention._passes
    for seed in range(12):
        tokens = [*HEAD, *message(3, 200, seed), *LOOPING[len(HEAD) + len(QUESTION) :]]
        end(vllm, tokens)
        assert (passes > 0).sum() <= 70
    long = words(60 * BLOCK, 77)
    assert vllm.ask(long) == continuation(long, 8, windows=[WINDOW])
    vllm.check_idle()


@RETENTION
def test_a_system_prompt_that_others_hit_keeps_its_window_as_long(
    core: Callable[..., Core], retention: int
) -> None:
    vllm = core(connector=EXACT, **options(retention))
    passes = vllm.connector.planner._retention._passes
    for seed in range(4):
        end(vllm, [*HEAD, *message(USER, 40, seed), ASSISTANT, *words(60, seed), END])
    num_full = len(HEAD) // BLOCK
    assert num_full < (passes == HEADS).sum() <= num_full + -(-(WINDOW - 1) // BLOCK)


def test_a_loop_that_goes_on_leaves_the_windows_before(core: Callable[..., Core]) -> None:
    """Each of its requests would keep another window, and nothing that needs it comes."""
    vllm = core(connector=EXACT, **options(0))
    passes = vllm.connector.planner._retention._passes
    tokens = LOOPING
    for at in range(6):
        end(vllm, tokens)
        kept = (passes > 0).sum()
        assert kept <= (len(tokens) - 1) // BLOCK + 2 * -(-(WINDOW - 1) // BLOCK)
        tokens = [*tokens, *message(TOOL, 40, at), *LOOPING[len(HEAD) + len(QUESTION) :]]


def traffic(rng: random.Random, count: int) -> list[list[int]]:
    """Conversations of several turns, whose reasoning the template drops: it never comes back."""
    prompts, repeated = [], []
    histories = [list(HEAD)]
    for seed in range(count):
        kept = list(rng.choice(histories))
        asked = [*message(3, rng.randrange(5, 60), seed), 4]
        reasoned = [7, *words(rng.randrange(1, 200), 100 + seed), 8]
        said = [*words(rng.randrange(1, 90), 200 + seed), 11]
        repeated.append([*kept, *asked])
        prompts += [repeated[-1], [*kept, *asked, *reasoned, *said]]
        histories.append([*kept, *asked, *said])
        if rng.random() < 0.5:
            prompts.append(rng.choice(repeated))
    return prompts


@RETENTION
@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
def test_where_there_is_room_all_is_as_without_us(
    core: Callable[..., Core], retention: int, in_flight: bool
) -> None:
    """Answers, and the hit of each request."""
    asked = traffic(random.Random(5), 12)
    given = options(retention, blocks=2000, in_flight=in_flight)
    served = []
    for mine in (core(connector=EXACT, **given), None):
        vllm = core(**given) if mine is None else mine
        said, computed = [], []
        for prompt in asked:
            before = vllm.worker.num_computed
            said.append(vllm.ask(prompt, max_tokens=3))
            computed.append(vllm.worker.num_computed - before)
        assert said == [continuation(prompt, 3, windows=[WINDOW]) for prompt in asked]
        assert mine is None or mine.counts["errors"] == 0
        served.append(computed)
    assert served[0] == served[1]


def test_in_a_small_pool_answers_are_those_without_a_cache(core: Callable[..., Core]) -> None:
    vllm = core(
        connector=EXACT, **options(blocks=100, max_num_batched_tokens=64, max_model_len=1200)
    )
    rng = random.Random(11)
    names = {vllm.add(prompt, max_tokens=3): prompt for prompt in traffic(rng, 10)}
    vllm.drain()
    for name, prompt in names.items():
        assert vllm.answers[name].tokens == continuation(prompt, 3, windows=[WINDOW])
    assert vllm.counts["errors"] == 0
    vllm.check_idle()
