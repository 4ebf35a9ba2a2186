"""A scheduler step of 256 requests of 512 tokens."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from forest import NEW, Forest, Shape, sequence
from workloads.documents import document

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from meter import Meter

    import kvtrie

    Step = list[kvtrie.TokenSequence]

LENGTH = 512
REQUESTS = 256
# Of a request in the steps that insert, this much is cached and the rest new.
CACHED = 256
NUM_NEW = (LENGTH - CACHED) // 16
# Of new tokens; no seed comes twice, or its tokens would be cached.
SEEDS = count(NEW)

pytestmark = pytest.mark.parametrize("forest", [Shape(LENGTH, LENGTH)], ids=str, indirect=True)


@pytest.fixture
def half_cached(forest: Forest, rng: random.Random) -> Callable[[], Step]:
    def request() -> kvtrie.TokenSequence:
        old = forest.rows[forest.draw_later(rng, "cold"), :CACHED]
        return sequence(np.concatenate([old, document(next(SEEDS), LENGTH - CACHED)]))

    return lambda: [request() for _ in range(REQUESTS)]


def test_step(
    forest: Forest, half_cached: Callable[[], Step], meter: Meter, rng: random.Random
) -> None:
    index = forest.index
    taken: list[npt.NDArray[np.int32]] = []

    def target(steps: Sequence[Step]) -> int:
        num_tokens = 0
        for seq in steps[0]:
            num_tokens += index.lookup(seq).num_tokens
            plan = index.plan(seq)
            start = plan.blocks.size * 16
            ids = index.evict(plan.num_new_blocks)
            done = index.insert(seq, ids, num_computed=len(seq), start=start, source=plan)
            taken.append(done.blocks)
            plan.release()
        return num_tokens

    def forget() -> None:
        while taken:
            assert index.discard(taken.pop()).size == NUM_NEW
        forest.make_room(REQUESTS * NUM_NEW, rng)

    forest.restock(rng)
    forget()
    num_tokens = meter(
        f"step of {REQUESTS} requests of {LENGTH} tokens, {CACHED} cached",
        target,
        half_cached,
        calls=1,
        index=index,
        after=forget,
        requests=REQUESTS,
    )
    assert num_tokens == REQUESTS * CACHED
