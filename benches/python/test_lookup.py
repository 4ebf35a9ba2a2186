"""Lookup of a whole cached sequence, with its block ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from forest import NAMESPACE, Forest, Shape, sequence
from meter import calls_for

import kvtrie

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import numpy.typing as npt
    from meter import Meter
    from workloads.documents import Tokens

SHAPES = [
    Shape(512, 512),
    Shape(8_192, 8_192),
    Shape(102_400, 102_400),
    Shape(102_400, 512),
    Shape(102_400, 512, siblings=3),
]

both_states = pytest.mark.parametrize("state", ["warm", "cold"])
all_shapes = pytest.mark.parametrize("forest", SHAPES, ids=str, indirect=True)


def assert_found(forest: Forest, row: int) -> None:
    match = forest.index.lookup(sequence(forest.rows[row]))
    assert match.num_tokens == forest.shape.length
    np.testing.assert_array_equal(match.blocks, forest.blocks(row))


@all_shapes
@both_states
def test_lookup_from_a_ready_sequence(
    forest: Forest, state: str, meter: Meter, rng: random.Random
) -> None:
    lookup, length = forest.index.lookup, forest.shape.length
    assert_found(forest, forest.draw(rng, state))

    def target(seqs: Sequence[kvtrie.TokenSequence]) -> npt.NDArray[np.int32]:
        for seq in seqs:
            found = lookup(seq).blocks
        return found

    found = meter(
        f"lookup, {forest.shape}, {state}",
        target,
        lambda: sequence(forest.rows[forest.draw(rng, state)]),
        calls=calls_for(length),
        index=forest.index,
        tokens=length,
        source="sequence",
        state=state,
    )
    assert found.size == length // 16


@all_shapes
@both_states
def test_lookup_from_a_numpy_array(
    forest: Forest, state: str, meter: Meter, rng: random.Random
) -> None:
    lookup, length = forest.index.lookup, forest.shape.length
    assert_found(forest, forest.draw(rng, state))

    def target(arrays: Sequence[Tokens]) -> npt.NDArray[np.int32]:
        for ids in arrays:
            found = lookup(kvtrie.TokenSequence(ids, NAMESPACE)).blocks
        return found

    found = meter(
        f"lookup, {forest.shape}, {state}, from a uint32 array",
        target,
        lambda: np.copy(forest.rows[forest.draw(rng, state)]),
        calls=calls_for(length),
        tokens=length,
        source="array",
        state=state,
    )
    assert found.size == length // 16


@pytest.mark.parametrize("forest", SHAPES[:3], ids=str, indirect=True)
@both_states
def test_lookup_from_a_list(forest: Forest, state: str, meter: Meter, rng: random.Random) -> None:
    lookup, length = forest.index.lookup, forest.shape.length
    assert_found(forest, forest.draw(rng, state))

    def fresh() -> list[int]:
        ids: list[int] = forest.rows[forest.draw(rng, state)].tolist()
        return ids

    def target(lists: Sequence[list[int]]) -> npt.NDArray[np.int32]:
        for ids in lists:
            found = lookup(kvtrie.TokenSequence(ids, NAMESPACE)).blocks
        return found

    found = meter(
        f"lookup, {forest.shape}, {state}, from a list",
        target,
        fresh,
        # A pointer and an int object per token.
        calls=calls_for(length, 40),
        rounds=200,
        tokens=length,
        source="list",
        state=state,
    )
    assert found.size == length // 16
