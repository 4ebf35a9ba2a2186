"""Eviction of one leaf of 64 tokens among 10⁵ leaves, on average and call by call."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING

import pytest
from forest import NEW, QUICK, Forest, Shape, insert, sequence, shuffle_recency
from workloads.documents import document

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from meter import Meter

    import kvtrie

LENGTH = 64
LEAVES = 1_000 if QUICK else 100_000
CALLS = 64
# Of new tokens; no seed is used twice, or its tokens would be cached.
SEEDS = count(NEW)

pytestmark = pytest.mark.parametrize(
    "forest", [Shape(LENGTH, LENGTH, cached=LEAVES * LENGTH)], ids=["10^5 leaves"], indirect=True
)


def new_leaf() -> kvtrie.TokenSequence:
    return sequence(document(next(SEEDS), LENGTH))


def test_evict(forest: Forest, meter: Meter, rng: random.Random) -> None:
    index, evict = forest.index, forest.index.evict
    shuffle_recency(forest, rng)
    freed: list[npt.NDArray[np.int32]] = []

    def target(wanted: Sequence[int]) -> int:
        freed.extend([evict(num_blocks) for num_blocks in wanted])
        return freed[-1].size

    def refill() -> None:
        while freed:
            assert insert(index, new_leaf(), freed.pop()).duplicates.size == 0

    size = meter(
        f"evict one leaf of {LENGTH} tokens among {LEAVES:,}",
        target,
        lambda: LENGTH // 16,
        calls=CALLS,
        index=index,
        after=refill,
    )
    assert size == LENGTH // 16
    assert index.stats().nodes >= LEAVES - CALLS


# On a shared machine the longest wall times come from others; the thread's own time does not.
@pytest.mark.parametrize(
    "clock",
    ["wall clock", pytest.param("CPU time", marks=pytest.mark.benchmark(timer=time.thread_time))],
)
def test_evict_call_by_call(forest: Forest, clock: str, meter: Meter, rng: random.Random) -> None:
    index, evict = forest.index, forest.index.evict
    shuffle_recency(forest, rng)
    freed: list[npt.NDArray[np.int32]] = []

    def refill() -> None:
        if freed:
            assert insert(index, new_leaf(), freed.pop()).duplicates.size == 0

    def target() -> None:
        freed.append(evict(4))

    meter.single(
        f"evict one leaf of {LENGTH} tokens among {LEAVES:,}, every call timed by {clock}",
        target,
        refill,
        rounds=20_000,
    )
    assert freed[-1].size == LENGTH // 16
