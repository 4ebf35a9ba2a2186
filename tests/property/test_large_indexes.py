"""Plans and removals on indexes of thousands of tokens; the long runs are separate commands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.property import any_block_removal, sound_plans
from tests.property.sound_plans import UnsoundError, World


@pytest.mark.parametrize("hash_bits", [64, 8, 4, 0])
def test_plans_are_sound_and_cover_all(hash_bits: int) -> None:
    report = sound_plans.run(3_000, first=100 + hash_bits, hash_bits=hash_bits, each=500)
    assert not report.wrong, sound_plans.describe(report, 0.0)
    for what in ("plans, moved runs", "coverage compared"):
        assert report.counts[what] > 100, report.counts


def plan_often(world: World) -> None:
    for _ in range(100):
        world.plan()


@pytest.mark.parametrize("what", ["token", "position", "prefix", "exact", "hops", "present"])
def test_plans_that_are_not_sound_are_noticed(what: str) -> None:
    world = World(1, 64)
    for _ in range(20):
        world.insert()
    table: Any = getattr(world, what)
    if table.dtype == np.bool_:
        table[:] = ~table
    else:
        table += np.ones(1, dtype=table.dtype)
    world.views.clear()
    with pytest.raises(UnsoundError):
        plan_often(world)


def test_any_block_may_leave() -> None:
    counts = any_block_removal.run(20_000, each=2_500)
    assert counts["wrong answers"] == 0, counts
    assert counts["blocks found"] > 100_000, counts
