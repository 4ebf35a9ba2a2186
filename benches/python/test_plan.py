"""A plan and its release: of a fresh prompt, and alone after a lookup of the same sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from forest import Forest, Shape, sequence
from meter import calls_for

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from meter import Meter

    import kvtrie

pytestmark = [
    pytest.mark.parametrize(
        "forest",
        [Shape(512, 512), Shape(32_768, 32_768), Shape(102_400, 512, siblings=3)],
        ids=str,
        indirect=True,
    ),
    pytest.mark.parametrize("state", ["warm", "cold"]),
]


def assert_planned(forest: Forest, row: int) -> None:
    with forest.index.plan(sequence(forest.rows[row])) as plan:
        # The last token is left to compute, so that the last block is copied.
        assert plan.blocks.tolist() == forest.blocks(row)[:-1].tolist()
        assert plan.num_exact == forest.shape.length - 1
    assert forest.index.stats().pinned == 0


def test_plan_and_release(forest: Forest, state: str, meter: Meter, rng: random.Random) -> None:
    make_plan, length = forest.index.plan, forest.shape.length
    assert_planned(forest, forest.draw(rng, state))

    def target(seqs: Sequence[kvtrie.TokenSequence]) -> int:
        for seq in seqs:
            plan = make_plan(seq)
            blocks = plan.blocks
            plan.release()
        return blocks.size

    used = meter(
        f"plan and release, {forest.shape}, {state}",
        target,
        lambda: sequence(forest.rows[forest.draw(rng, state)]),
        calls=calls_for(length),
        index=forest.index,
        tokens=length,
        state=state,
    )
    assert used == length // 16 - 1


def test_pin_and_release(forest: Forest, state: str, meter: Meter, rng: random.Random) -> None:
    make_plan, length = forest.index.plan, forest.shape.length
    assert_planned(forest, forest.draw(rng, state))

    def looked_up() -> kvtrie.TokenSequence:
        seq = sequence(forest.rows[forest.draw(rng, state)])
        forest.index.lookup(seq)
        return seq

    def target(seqs: Sequence[kvtrie.TokenSequence]) -> kvtrie.ReusePlan:
        for seq in seqs:
            plan = make_plan(seq)
            plan.release()
        return plan

    plan = meter(
        f"plan and release of what was just looked up, {forest.shape}, {state}",
        target,
        looked_up,
        # The sequences are not read again, so their length does not matter.
        calls=max(16, calls_for(length)),
        index=forest.index,
        tokens=length,
        state=state,
    )
    assert plan.num_exact == length - 1
