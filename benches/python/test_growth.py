"""The same lookup with 10⁴ to 10⁷ cached tokens: its cost must not grow with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from forest import QUICK, Forest, Shape, filled, sequence
from meter import calls_for, counted

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt
    from meter import Meter

    import kvtrie

LENGTH = 1_024
SIZES = (10_000, 100_000, 1_000_000, 1_000_000 if QUICK else 10_000_000)


@pytest.mark.parametrize(
    "forest",
    [Shape(LENGTH, LENGTH, cached=cached) for cached in SIZES],
    ids=[f"with {cached:,} cached tokens" for cached in SIZES],
    indirect=True,
)
@pytest.mark.parametrize("state", ["warm", "cold"])
def test_growth(forest: Forest, state: str, meter: Meter, rng: random.Random) -> None:
    lookup = forest.index.lookup

    def target(seqs: Sequence[kvtrie.TokenSequence]) -> npt.NDArray[np.int32]:
        for seq in seqs:
            found = lookup(seq).blocks
        return found

    found = meter(
        f"lookup of {LENGTH:,} tokens with {forest.shape.cached:,} cached, {state}",
        target,
        lambda: sequence(forest.rows[forest.draw(rng, state)]),
        calls=calls_for(LENGTH),
        index=forest.index,
        tokens=LENGTH,
        cached=forest.shape.cached,
        state=state,
    )
    assert found.size == LENGTH // 16


def test_growth_leaves_the_work_alone() -> None:
    """Nodes visited and bytes compared are the same in a small and in a large index."""
    small, large = (
        filled(Shape(LENGTH, LENGTH, cached=cached)) for cached in (SIZES[0], SIZES[-1])
    )

    def work(forest: Forest) -> dict[str, float]:
        seqs = [sequence(forest.rows[row]) for row in range(small.shape.count)]
        return counted(forest.index, lambda: [forest.index.lookup(seq) for seq in seqs], len(seqs))

    expected = work(small)
    assert expected["bytes_compared"] > 0
    assert work(large) == expected
