"""A scheduler step of 256 requests of 512 tokens: batch calls beside a loop of single calls."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from forest import NEW, Forest, Shape, sequence
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from meter import Meter

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
def cached(forest: Forest, rng: random.Random) -> Callable[[], Step]:
    """Makes steps whose requests are cached as they are, drawn from all."""
    return lambda: [sequence(forest.rows[forest.draw(rng, "cold")]) for _ in range(REQUESTS)]


@pytest.fixture
def half_cached(forest: Forest, rng: random.Random) -> Callable[[], Step]:
    """Makes steps whose requests go on with new tokens behind what is cached."""

    def request() -> kvtrie.TokenSequence:
        old = forest.rows[forest.draw_later(rng, "cold"), :CACHED]
        return sequence(np.concatenate([old, document(next(SEEDS), LENGTH - CACHED)]))

    return lambda: [request() for _ in range(REQUESTS)]


def test_lookup_many(forest: Forest, cached: Callable[[], Step], meter: Meter) -> None:
    lookup_many = forest.index.lookup_many

    def target(steps: Sequence[Step]) -> npt.NDArray[np.int32]:
        batch = lookup_many(steps[0])
        _offsets = batch.offsets
        return batch.blocks

    blocks = meter(
        f"lookup_many of {REQUESTS} cached requests of {LENGTH} tokens",
        target,
        cached,
        calls=1,
        index=forest.index,
        requests=REQUESTS,
    )
    assert blocks.size == REQUESTS * LENGTH // 16


def test_lookup_in_a_loop(forest: Forest, cached: Callable[[], Step], meter: Meter) -> None:
    lookup = forest.index.lookup

    def target(steps: Sequence[Step]) -> int:
        return sum(lookup(seq).blocks.size for seq in steps[0])

    num_blocks = meter(
        f"loop of lookup over {REQUESTS} cached requests of {LENGTH} tokens",
        target,
        cached,
        calls=1,
        index=forest.index,
        requests=REQUESTS,
    )
    assert num_blocks == REQUESTS * LENGTH // 16


def test_plan_many_and_release_many(
    forest: Forest, cached: Callable[[], Step], meter: Meter
) -> None:
    plan_many, release_many = forest.index.plan_many, forest.index.release_many

    def target(steps: Sequence[Step]) -> npt.NDArray[np.int32]:
        batch = plan_many(steps[0])
        blocks = batch.blocks
        assert not release_many(batch.plans)
        return blocks

    blocks = meter(
        f"plan_many and release_many of {REQUESTS} cached requests of {LENGTH} tokens",
        target,
        cached,
        calls=1,
        index=forest.index,
        requests=REQUESTS,
    )
    # The last token of each is left to compute.
    assert blocks.size == REQUESTS * (LENGTH // 16 - 1)
    assert forest.index.stats().pinned == 0


def test_insert_many(
    forest: Forest, half_cached: Callable[[], Step], meter: Meter, rng: random.Random
) -> None:
    index, insert_many = forest.index, forest.index.insert_many
    taken: list[npt.NDArray[np.int32]] = []
    num_computed, starts = [LENGTH] * REQUESTS, [CACHED] * REQUESTS
    offsets = np.arange(REQUESTS + 1) * NUM_NEW
    sources = [kvtrie.COMPUTED] * REQUESTS

    def fresh() -> tuple[Step, npt.NDArray[np.int32]]:
        return half_cached(), index.evict(REQUESTS * NUM_NEW)

    def target(steps: Sequence[tuple[Step, npt.NDArray[np.int32]]]) -> int:
        seqs, ids = steps[0]
        done = insert_many(seqs, ids, offsets, num_computed, sources=sources, starts=starts)
        taken.append(done.blocks)
        return len(done.errors)

    def forget() -> None:
        while taken:
            assert index.discard(taken.pop()).size == REQUESTS * NUM_NEW
        forest.make_room(REQUESTS * NUM_NEW, rng)

    forest.restock(rng)
    forget()
    errors = meter(
        f"insert_many of {REQUESTS} requests, {LENGTH - CACHED} tokens new to each",
        target,
        fresh,
        calls=1,
        index=index,
        after=forget,
        requests=REQUESTS,
    )
    assert errors == 0


def test_step_of_batches(
    forest: Forest, half_cached: Callable[[], Step], meter: Meter, rng: random.Random
) -> None:
    index = forest.index
    taken: list[npt.NDArray[np.int32]] = []

    def target(steps: Sequence[Step]) -> int:
        seqs = steps[0]
        found = index.lookup_many(seqs).num_tokens
        batch = index.plan_many(seqs)
        plans, num_new = batch.plans, batch.num_new_blocks
        offsets = np.zeros(len(seqs) + 1, dtype=np.int64)
        np.cumsum(num_new, out=offsets[1:])
        done = index.insert_many(
            seqs,
            index.evict(int(offsets[-1])),
            offsets,
            [len(seq) for seq in seqs],
            sources=[plan or kvtrie.COMPUTED for plan in plans],
            starts=(np.diff(batch.offsets) * 16).tolist(),
        )
        taken.append(done.blocks)
        assert not index.release_many(plans)
        return int(found.sum())

    def forget() -> None:
        while taken:
            assert index.discard(taken.pop()).size == REQUESTS * NUM_NEW
        forest.make_room(REQUESTS * NUM_NEW, rng)

    forest.restock(rng)
    forget()
    num_tokens = meter(
        f"step of {REQUESTS} requests of {LENGTH} tokens, {CACHED} cached, by batch calls",
        target,
        half_cached,
        calls=1,
        index=index,
        after=forget,
        requests=REQUESTS,
    )
    assert num_tokens == REQUESTS * CACHED


def test_step_in_a_loop(
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
        f"step of {REQUESTS} requests of {LENGTH} tokens, {CACHED} cached, by single calls",
        target,
        half_cached,
        calls=1,
        index=index,
        after=forget,
        requests=REQUESTS,
    )
    assert num_tokens == REQUESTS * CACHED
