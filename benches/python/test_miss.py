"""Lookup of a sequence that differs from a cached one at its first token, or in its last block."""

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

# No generated id is that large.
STRANGER = 1 << 20


@pytest.mark.parametrize(
    "forest", [Shape(length, length) for length in (512, 8_192, 102_400)], ids=str, indirect=True
)
@pytest.mark.parametrize("state", ["warm", "cold"])
@pytest.mark.parametrize(("where", "position"), [("token 0", 0), ("the last token", -1)])
def test_miss(
    forest: Forest, where: str, position: int, state: str, meter: Meter, rng: random.Random
) -> None:
    lookup, length = forest.index.lookup, forest.shape.length
    expected = 0 if position == 0 else length - 16

    def fresh() -> kvtrie.TokenSequence:
        ids = forest.rows[forest.draw(rng, state)].copy()
        ids[position] = STRANGER
        return sequence(ids)

    def target(seqs: Sequence[kvtrie.TokenSequence]) -> kvtrie.Match:
        for seq in seqs:
            match = lookup(seq)
            _blocks = match.blocks
        return match

    assert lookup(fresh()).num_tokens == expected
    match = meter(
        f"lookup, {forest.shape}, miss at {where}, {state}",
        target,
        fresh,
        # A miss at token 0 is so fast that the clock itself would be a good part of one call. It
        # reads the first tokens of the input only.
        calls=max(16, calls_for(length)) if position == 0 else calls_for(length),
        index=forest.index,
        tokens=length,
        state=state,
    )
    assert match.num_tokens == expected
