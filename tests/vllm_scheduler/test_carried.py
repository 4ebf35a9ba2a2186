"""Full attention and a sliding window: moved runs take their windows along."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm_scheduler.test_exact import (
    ANSWER,
    CLOSED,
    FORMAT,
    HEAD,
    LOOPING,
    QUESTION,
    REASONING,
    end,
    group_of_others,
    hashes_of,
    message,
    places_of_others,
    words,
)
from tests.vllm_scheduler.test_groups import WINDOW, options, traffic
from tests.vllm_scheduler.worker import BLOCK, Image, WindowWorker, continuation, kv_of_groups
from vllm.v1.core.kv_cache_utils import get_group_id

from kvtrie.integrations.vllm._version import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm_scheduler.core import Core

MOVING: dict[str, Any] = {
    "gate": "unchecked",
    "chat_format": FORMAT,
    "policy": {"scope": "namespace"},
}
BEGIN = [*HEAD, *QUESTION, 4]
SHORT = [*words(42, 3), 11]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def moving(core: Callable[..., Core], request: pytest.FixtureRequest) -> Core:
    return core(connector=MOVING, **options(in_flight=request.param))


def edited(answer: list[int]) -> tuple[list[int], list[int]]:
    """A turn, and the next prompt, from which the template has dropped the reasoning."""
    return (
        [*BEGIN, *REASONING, *answer],
        [*BEGIN, *answer, *message(3, 40, 9), 4],
    )


def moved_answer(old: list[int], new: list[int], end_of_run: int, count: int) -> list[int]:
    """What follows a prompt whose tokens after `BEGIN` were computed after the reasoning."""
    known = {}
    for window, kv in kv_of_groups(old, WINDOW).items():
        after = kv[len(BEGIN) + len(REASONING) :]
        known[window] = [*kv[: len(BEGIN)], *after][:end_of_run]
    return continuation(new, count, windows=[WINDOW], known=known)


@pytest.mark.parametrize("answer", [ANSWER, SHORT], ids=["beyond a window", "within a window"])
def test_a_moved_run_takes_its_window_along(moving: Core, answer: list[int]) -> None:
    """Of a short run, the window reaches to before it."""
    old, new = edited(answer)
    end(moving, old)
    before, carried = moving.worker.num_computed, moving.worker.num_carried
    said = moving.ask(new, max_tokens=4)
    reused = len(new) + 3 - (moving.worker.num_computed - before)
    # The whole blocks of the turn, whose last token was never computed.
    assert reused == (len(old) - 1) // BLOCK * BLOCK - len(REASONING)
    assert moving.counts["tokens_moved"] == reused - len(BEGIN) > 0
    carried = moving.worker.num_carried - carried
    least = min(WINDOW - 1, reused - len(BEGIN) // BLOCK * BLOCK)
    assert least <= carried <= least + BLOCK
    assert said == moved_answer(old, new, reused, 4) != continuation(new, 4, windows=[WINDOW])
    assert moving.counts["tokens_without_window"] == moving.counts["errors"] == 0
    moving.check_idle()


def test_no_plain_request_finds_what_was_moved(moving: Core) -> None:
    old, new = edited(ANSWER)
    end(moving, old)
    approximate = moving.ask(new, max_tokens=4)
    longer = [*new, *words(30, 5)]
    assert moving.ask(longer, max_tokens=4, mode="exact") == continuation(
        longer, 4, windows=[WINDOW]
    )
    # Its own conversation does: nothing of the prompt's whole blocks is computed again.
    following = [*new, *approximate, *message(3, 20, 6), 4]
    computed = moving.computed_for(following)
    assert computed <= len(following) - len(new) + BLOCK
    assert moving.counts["errors"] == 0
    moving.check_idle()


def forget_windows(core: Core, numbers: set[int]) -> None:
    core.pool.evict_blocks(numbers)


def test_without_its_window_a_run_is_computed(moving: Core) -> None:
    old, new = edited(ANSWER)
    end(moving, old)
    group = group_of_others(moving)
    forget_windows(
        moving,
        {
            block.block_id
            for block in moving.pool.blocks
            if block.block_hash is not None and get_group_id(block.block_hash) == group
        },
    )
    assert moving.ask(new, max_tokens=4) == continuation(new, 4, windows=[WINDOW])
    assert moving.counts["tokens_moved"] == 0
    assert moving.counts["tokens_without_window"] > len(ANSWER) // 2
    assert moving.counts["errors"] == 0
    moving.check_idle()


def test_a_run_ends_where_its_window_does(moving: Core) -> None:
    """Only the last block's window has left: what is before it is moved."""
    old, new = edited(ANSWER)
    end(moving, old)
    places = places_of_others(moving, hashes_of(moving, old))
    last = max(places.values())
    forget_windows(moving, {number for number, place in places.items() if place == last})
    before = moving.worker.num_computed
    said = moving.ask(new, max_tokens=4)
    reused = len(new) + 3 - (moving.worker.num_computed - before)
    assert reused == last * BLOCK - len(REASONING)
    assert said == moved_answer(old, new, reused, 4)
    assert moving.counts["tokens_without_window"] == BLOCK
    moving.check_idle()


def test_windows_that_are_not_written_yet_are_not_copied(moving: Core) -> None:
    """vLLM gives a block its hash before the step that writes it."""
    old, new = edited(ANSWER)
    end(moving, old)
    places = places_of_others(moving, hashes_of(moving, old))
    forget_windows(moving, set(places))
    # In one step: the first computes the windows that the second would copy.
    names = [moving.add(old, max_tokens=1), moving.add(new, max_tokens=4)]
    moving.drain()
    said = moving.answers[names[1]].tokens
    assert said == continuation(new, 4, windows=[WINDOW])
    assert moving.counts["errors"] == 0
    moving.check_idle()


@pytest.mark.parametrize("in_flight", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [140, 600], ids=["small", "large"])
def test_all_that_is_read_is_of_the_requests_tokens(
    core: Callable[..., Core], blocks: int, in_flight: bool
) -> None:
    """Mixed traffic with preemption; the worker looks at each slot that is read."""
    given = options(
        blocks=blocks, in_flight=in_flight, max_model_len=1200, max_num_batched_tokens=256
    )
    vllm = core(connector=MOVING, **given)
    rng = random.Random(blocks)
    names: dict[str, list[int]] = {}
    for prompt in traffic(rng, 24):
        if len(prompt) > 1150:
            continue
        mode = rng.choice([None, None, "exact"])
        name = vllm.add(prompt, max_tokens=rng.randrange(1, 6), mode=mode)
        if mode == "exact":
            names[name] = prompt
        for _ in range(rng.randrange(12)):
            if vllm.is_busy:
                vllm.step()
    vllm.drain()
    for name, prompt in names.items():
        said = vllm.answers[name].tokens
        assert said == continuation(prompt, len(said), windows=[WINDOW])
    assert vllm.counts["errors"] == vllm.counts["copies_failed"] == 0
    assert vllm.counts["tokens_moved"] > 0
    vllm.check_idle()


def test_images_are_served_as_without_us(moving: Core) -> None:
    """Their placeholders are equal for different images, so no copy may come from them."""
    old, new = edited(ANSWER)
    end(moving, old)
    images = [Image(len(BEGIN) + 2, len(BEGIN) + 20, "cat")]
    said = moving.ask(new, max_tokens=4, images=images)
    assert said == continuation(new, 4, windows=[WINDOW], images=images)
    assert moving.counts["requests_unsupported"] == 1
    assert moving.counts["tokens_moved"] == moving.counts["errors"] == 0
    moving.check_idle()


def test_a_copy_that_fails_ends_the_engine(core: Callable[..., Core]) -> None:
    """The window before the failed blocks has left the request, so nothing computes them again."""
    vllm = core(connector=MOVING, **options())
    half = vllm.connector
    half._not_copied.add(3)
    with pytest.raises(RuntimeError, match="1 blocks were not copied, and vLLM computes none"):
        half.get_block_ids_with_load_errors()


@pytest.mark.parametrize(
    ("connector", "more", "said"),
    [
        ({}, {"prefix_cache_retention_interval": 0}, "set --prefix-cache-retention-interval 16"),
        ({}, {"gaps": True}, "reuse after gaps needs one group .*: omit --scheduler-cls"),
        ({"shadow": True}, {}, 'set "mode": "exact", which works with these models'),
        ({"gate": None}, {}, 'set "mode": "exact", which works with these models'),
        ({}, {"scheduling_policy": "priority"}, "remove --scheduling-policy priority"),
    ],
    ids=["sparse windows", "gaps", "shadow", "no gate", "priority"],
)
def test_what_needs_one_group_is_refused(
    core: Callable[..., Core], connector: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        core(connector=MOVING | connector, **options() | more)


def test_the_window_of_the_worker_is_checked() -> None:
    """What the other tests rely on: a window that lacks a token gives another answer."""
    assert continuation(LOOPING, 2, windows=[WINDOW]) != continuation(LOOPING, 2, windows=[47])
    assert continuation(CLOSED, 2, windows=[WINDOW]) != continuation(CLOSED, 2)
    assert WindowWorker.WINDOW == WINDOW
