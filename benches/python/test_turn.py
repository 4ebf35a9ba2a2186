"""A turn of a chat: the history is cached, 256 new tokens follow it."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from forest import NAMESPACE, NEW, Forest, Shape, sequence
from meter import calls_for
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import numpy.typing as npt
    from meter import Meter
    from workloads.documents import Tokens

NUM_NEW = 256
# Of new tokens; no seed is used twice, or its tokens would be cached.
SEEDS = count(NEW)


@pytest.mark.parametrize(
    "forest", [Shape(length, length) for length in (512, 8_192, 102_400)], ids=str, indirect=True
)
@pytest.mark.parametrize("state", ["warm", "cold"])
@pytest.mark.parametrize("source", ["sequence", "array"])
def test_turn(forest: Forest, state: str, source: str, meter: Meter, rng: random.Random) -> None:
    index, length = forest.index, forest.shape.length
    lookup, make_plan, evict, insert = index.lookup, index.plan, index.evict, index.insert
    calls = calls_for(length)
    taken: list[npt.NDArray[np.int32]] = []

    def prompt() -> Tokens:
        history = forest.rows[forest.draw_later(rng, state)]
        return np.concatenate([history, document(next(SEEDS), NUM_NEW)])

    def turns(seqs: Sequence[kvtrie.TokenSequence]) -> kvtrie.Match:
        for seq in seqs:
            match = lookup(seq)
            plan = make_plan(seq)
            in_place = plan.blocks
            fresh = evict(plan.num_new_blocks)
            done = insert(seq, fresh, num_computed=len(seq), start=in_place.size * 16, source=plan)
            taken.append(done.blocks)
            plan.release()
        return match

    def turns_from_arrays(arrays: Sequence[Tokens]) -> kvtrie.Match:
        for ids in arrays:
            match = turns((kvtrie.TokenSequence(ids, NAMESPACE),))
        return match

    def forget() -> None:
        """Drop the new blocks, so that every turn finds the same history."""
        while taken:
            blocks = taken.pop()
            assert index.discard(blocks).size == NUM_NEW // 16
        forest.make_room(calls * NUM_NEW // 16, rng)

    forest.restock(rng)
    forget()
    first = prompt()
    assert turns([sequence(first)]).num_tokens == length
    assert index.lookup(sequence(first)).num_tokens == length + NUM_NEW
    assert index.stats().pinned == 0
    forget()

    num_blocks = (length + NUM_NEW) // 16
    name = f"chat turn, {length:,} tokens cached and {NUM_NEW} new, {state}"
    if source == "sequence":
        match = meter(
            name,
            turns,
            lambda: sequence(prompt()),
            calls=calls,
            index=index,
            after=forget,
            source=source,
            state=state,
            blocks=num_blocks,
        )
    else:
        match = meter(
            f"{name}, from a uint32 array",
            turns_from_arrays,
            prompt,
            calls=calls,
            after=forget,
            source=source,
            state=state,
            blocks=num_blocks,
        )
    assert match.num_tokens == length
