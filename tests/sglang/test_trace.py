"""The cache does what SGLang's own does: matches, locks, evictions and sizes, call by call."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from tests.sglang.caches import Pool, Side, key, mine, theirs
from tests.sglang.engine import described

STEPS = int(os.environ.get("KVTRIE_SGLANG_STEPS", "3000"))
NUM_PAGES = 60
SPACES = ((None, None), (None, None), ("lora", None), ("", None), (None, "salt"), ("lora", "salt"))


def inserted(side: Side, ids: list[int], space: tuple[Any, Any]) -> tuple[int, int | None]:
    """How much was evicted to make room, and how much was known; None without room."""
    needed = -(-len(ids) // side.pool.page_size)
    missing = needed - len(side.pool.free)
    evicted = side.evict(missing * side.pool.page_size) if missing > 0 else 0
    return evicted, side.insert(ids, *space) if needed <= len(side.pool.free) else None


def written(rng: Random, page_size: int) -> list[list[int]]:
    """Four texts of twelve pages, two of them with an image in the second one and the third."""
    texts = [[rng.randrange(9) for _ in range(12 * page_size)] for _ in range(4)]
    for number, text in enumerate(texts[:2]):
        image = MultimodalDataItem(modality=Modality.IMAGE, hash=number)
        image.set_pad_value()
        text[page_size : 3 * page_size] = image.padding_sequence(2 * page_size)
    return texts


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_same_calls_have_the_same_answers(page_size: int) -> None:
    rng = Random(page_size)
    pools = [Pool(NUM_PAGES, page_size) for _ in range(2)]
    sides = [
        Side(mine(pools[0], events=True), pools[0]),
        Side(theirs(pools[1], events=True), pools[1]),
    ]
    texts = written(rng, page_size)
    locks: list[list[Any]] = []
    seen = dict.fromkeys(("hits", "images", "evicted", "locked", "other space", "events"), 0)
    for step in range(STEPS):
        base = rng.choice(texts)
        cut = rng.randrange(len(base) + 1)
        ids = base[:cut] + [rng.randrange(9) for _ in range(rng.randrange(3 * page_size))]
        space = rng.choice(SPACES)
        act = rng.random()
        answers: list[Any] = []
        if act < 0.3:
            answers = [inserted(side, ids, space) for side in sides]
            if rng.random() < 0.1:
                texts[rng.randrange(2, 4)] = ids + base[cut:] if len(ids) < 12 * page_size else ids
        elif act < 0.6:
            found = [side.match(ids, *space) for side in sides]
            answers = [one.device_prefix_len for one in found]
            paths = [
                len(side.cache.path_device_indices(one.last_device_node))
                for side, one in zip(sides, found, strict=True)
            ]
            assert paths == answers
            seen["hits"] += answers[0] > 0
            seen["images"] += max(ids[: answers[0]], default=0) >= 1 << 32
            seen["other space"] += answers[0] > 0 and space != (None, None)
            if rng.random() < 0.5 and len(locks) < 4:
                taken = [
                    (side.cache, side.cache.lock(one.last_device_node))
                    for side, one in zip(sides, found, strict=True)
                ]
                locks.append(taken)
                seen["locked"] += answers[0] > 0
        elif act < 0.75 and locks:
            for cache, lock in locks.pop(rng.randrange(len(locks))):
                cache.unlock(lock)
        elif act < 0.85:
            for side in sides:
                side.cache.touch_prefix(key(ids, *space))
        else:
            count = rng.randrange(4 * page_size)
            answers = [side.evict(count) for side in sides]
            seen["evicted"] += answers[0] > 0
        assert not answers or answers[0] == answers[1], step
        sizes = [
            (
                side.cache.evictable_size(),
                side.cache.protected_size(),
                side.cache.total_size(),
                len(side.pool.free) * page_size + side.cache.total_size(),
            )
            for side in sides
        ]
        assert sizes[0] == sizes[1], step
        published = [[*map(described, side.cache.take_events())] for side in sides]
        assert published[0] == published[1], step
        seen["events"] += len(published[0])
        assert sizes[0][3] == NUM_PAGES * page_size, step
    assert min(seen.values()) > STEPS / 100, seen
    for taken in locks:
        for cache, lock in taken:
            cache.unlock(lock)
    cached = sides[0].cache.total_size()
    assert [side.evict(cached) for side in sides] == [cached, cached]
    assert len(pools[0].free) == len(pools[1].free) == NUM_PAGES
    assert not sides[0].cache.counts
