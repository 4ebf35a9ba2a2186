"""Insert of new tokens into a full index, in which every insert needs an eviction first."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest
from forest import NEW, Forest, Shape, insert, sequence, shuffle_recency
from meter import calls_for
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from meter import Meter

    Offer = tuple[kvtrie.TokenSequence, npt.NDArray[np.int32]]

# Of new tokens; no seed is used twice, or its tokens would be cached.
SEEDS = count(NEW)

pytestmark = pytest.mark.parametrize(
    "forest",
    [
        *(Shape(length, length) for length in (1_024, 8_192, 102_400)),
        Shape(8_192, 8_192, moved_runs=True),
    ],
    ids=lambda shape: f"{shape}, moved_runs={shape.moved_runs}",
    indirect=True,
)


@pytest.fixture
def fresh(forest: Forest, rng: random.Random) -> Callable[[], kvtrie.TokenSequence]:
    shuffle_recency(forest, rng)
    return lambda: sequence(document(next(SEEDS), forest.shape.length))


def assert_inserted(forest: Forest, seq: kvtrie.TokenSequence) -> None:
    """One insert with its eviction: the index stays as full as it was."""
    index, length = forest.index, forest.shape.length
    indexed = index.stats().indexed
    assert index.lookup(seq).num_tokens == 0
    freed = index.evict(length // 16)
    done = insert(index, seq, freed)
    assert done.blocks.tolist() == freed.tolist()
    assert (done.duplicates.size, done.surplus.size, done.num_exact) == (0, 0, length)
    assert index.lookup(seq).num_tokens == length
    assert index.stats().indexed == indexed


def test_insert_alone(
    forest: Forest, fresh: Callable[[], kvtrie.TokenSequence], meter: Meter
) -> None:
    index, length = forest.index, forest.shape.length
    insert_blocks = index.insert
    assert_inserted(forest, fresh())

    def target(offers: Sequence[Offer]) -> npt.NDArray[np.int32]:
        for seq, ids in offers:
            taken = insert_blocks(seq, ids, num_computed=length, source=kvtrie.COMPUTED).blocks
        return taken

    taken = meter(
        f"insert, {forest.shape}, moved_runs={forest.shape.moved_runs}",
        target,
        lambda: (fresh(), index.evict(length // 16)),
        calls=calls_for(length),
        index=index,
        tokens=length,
        moved_runs=forest.shape.moved_runs,
    )
    assert taken.size == length // 16


def test_insert_with_eviction(
    forest: Forest, fresh: Callable[[], kvtrie.TokenSequence], meter: Meter
) -> None:
    index, length = forest.index, forest.shape.length
    insert_blocks, evict, num_blocks = index.insert, index.evict, length // 16
    assert_inserted(forest, fresh())

    def target(seqs: Sequence[kvtrie.TokenSequence]) -> npt.NDArray[np.int32]:
        for seq in seqs:
            taken = insert_blocks(
                seq, evict(num_blocks), num_computed=length, source=kvtrie.COMPUTED
            ).blocks
        return taken

    taken = meter(
        f"evict and insert, {forest.shape}, moved_runs={forest.shape.moved_runs}",
        target,
        fresh,
        calls=calls_for(length),
        index=index,
        tokens=length,
        moved_runs=forest.shape.moved_runs,
    )
    assert taken.size == num_blocks
