"""The connector's memory is bounded, however long a server runs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.vllm_scheduler.test_carried import MOVING
from tests.vllm_scheduler.test_groups import options
from tests.vllm_scheduler.worker import VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.vllm_scheduler.core import Core

BLOCKS = 64
THINK, STOP, USER, ASSISTANT = 1, 2, 3, 4
FORMAT = {"user": USER, "assistant": ASSISTANT, "reasoning": [THINK, STOP]}


class Crowd:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._rng = random.Random(5)
        self._number = 0

    def _add(self) -> str:
        self._number += 1
        rng = self._rng
        words = rng.choices(range(5, VOCAB), k=rng.choice((3, 20, 40)))
        return self._core.add(
            [USER, *words, ASSISTANT, THINK, *words[:20], STOP, *words[-9:]],
            max_tokens=rng.choice((1, 1, 2)),
            mode=rng.choice((None, "exact", "approximate", "neither")),
            salt=f"tenant-{self._number}",
        )

    def serve(self, count: int) -> None:
        for _ in range(count // 4):
            asked = [self._add() for _ in range(4)]
            if self._rng.random() < 0.1:
                self._core.abort(asked[:1])
            self._core.drain(limit=100)


def sizes(thing: object, where: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if hasattr(thing, "cache_info"):
        yield where, thing.cache_info().currsize
    elif isinstance(thing, dict):
        yield where, len(thing)
        for value in thing.values():
            yield from sizes(value, f"{where}[]", seen)
    elif isinstance(thing, (list, set, tuple)):
        yield where, len(thing)
        for value in thing:
            yield from sizes(value, f"{where}[]", seen)
    elif type(thing).__module__.startswith("kvtrie."):
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        for name in names:
            yield from sizes(getattr(thing, name, None), f"{where}.{name}", seen)


def held(core: Core) -> dict[str, int]:
    total: dict[str, int] = {}
    for where, count in sizes(core.connector, "connector", set()):
        total[where] = total.get(where, 0) + count
    stats = core.connector.planner.half.sources.index.stats()
    total["namespaces"], total["nodes"] = stats.namespaces, stats.nodes
    total["kilobytes"] = stats.bytes >> 10
    return total


def test_ten_thousand_tenants(core: Callable[..., Core]) -> None:
    vllm = core(
        connector={"gate": "unchecked", "policy": {"scope": "namespace"}, "chat_format": FORMAT},
        # The shadow keeps all requests.
        shadow=False,
        blocks=BLOCKS,
        max_model_len=256,
        max_num_seqs=4,
    )
    crowd = Crowd(vllm)
    crowd.serve(2_000)
    # What the settings and the chat format hold is constant.
    before = held(vllm)
    crowd.serve(8_000)
    after = held(vllm)
    assert len(vllm.connector.planner.half.sources) > BLOCKS // 2
    assert "connector._planner.half.requests.live" in after
    grown = {
        name: (before.get(name, 0), count)
        for name, count in after.items()
        if count > before.get(name, 0) + BLOCKS
    }
    assert not grown
    assert len(vllm.pool._reuse_watchers) <= BLOCKS
    # Tenants whose namespace is ready, and no more.
    assert after["connector._planner.half.space_of"] <= 1024
    assert vllm.counts["requests_refused"] > 1_000
    assert not vllm.counts["errors"]


@pytest.mark.parametrize("connector", [MOVING, {"mode": "exact"}], ids=["moving", "exact"])
def test_requests_next_to_windows_leave_no_readers_of_copies(
    core: Callable[..., Core], connector: dict[str, Any]
) -> None:
    """Their names were remembered for steps that nobody told."""
    vllm = core(connector=connector, **options())
    for number in range(10):
        vllm.ask(list(range(5 + number, 50 + number)), max_tokens=2)
    # A step in flight may have readers.
    found = dict(sizes(vllm.connector.planner.half.failures, "failures", set()))
    assert "failures._readers" in found
    assert max(found.values()) <= 1
