"""A ledger's calls: steps of 1,000 live requests, and requests that begin and finish."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from forest import sequence
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from meter import Meter

    Counters = npt.NDArray[np.int64]
    Step = tuple[Counters, Counters]

REQUESTS = 1_000
LENGTH = 512
BLOCK_SIZE = 16
# One step per round, and the steps before the clock starts.
STEPS = 512
BLOCKS = (LENGTH + STEPS) // BLOCK_SIZE


def running() -> tuple[kvtrie.SequenceLedger, list[str]]:
    ledger = kvtrie.SequenceLedger(BLOCK_SIZE)
    names = [f"request-{number}" for number in range(REQUESTS)]
    for number, name in enumerate(names):
        table = np.arange(number * BLOCKS, (number + 1) * BLOCKS, dtype=np.int32)
        ledger.begin(name, sequence(document(number, LENGTH)), table, num_computed=LENGTH)
    return ledger, names


@pytest.mark.parametrize("kind", ["arrays", "lists"])
def test_step(meter: Meter, kind: str) -> None:
    ledger, names = running()
    one, offsets = np.ones(REQUESTS, dtype=np.int64), np.arange(REQUESTS + 1)
    steps = count()
    draw = np.random.default_rng(3)

    def fresh() -> Step:
        computed = np.full(REQUESTS, LENGTH + next(steps))
        return computed, draw.integers(1 << 17, size=REQUESTS)

    def arrays(made: Sequence[Step]) -> None:
        computed, ids = made[0]
        ledger.step(names, one, computed, ids, offsets)

    listed = (one.tolist(), offsets.tolist())

    def fresh_lists() -> tuple[list[int], list[int]]:
        computed, ids = fresh()
        return computed.tolist(), ids.tolist()

    def lists(made: Sequence[tuple[list[int], list[int]]]) -> None:
        computed, ids = made[0]
        ledger.step(names, listed[0], computed, ids, listed[1])

    work = f"ledger.step of {REQUESTS:,} requests, one token each, from {kind}"
    if kind == "arrays":
        meter(work, arrays, fresh, calls=1, requests=REQUESTS)
    else:
        meter(work, lists, fresh_lists, calls=1, requests=REQUESTS)
    # The token of each step has its KV after the next step.
    end = LENGTH + next(steps) - 1
    assert ledger.final_range(names[0]) == ledger.final_range(names[-1]) == (0, end)


def test_step_with_drafts(meter: Meter) -> None:
    ledger, names = running()
    three, offsets = np.full(REQUESTS, 3), 2 * np.arange(REQUESTS + 1)
    drafts = np.full(REQUESTS, 2)
    steps = count()
    draw = np.random.default_rng(3)

    def fresh() -> Step:
        # One of two drafts is accepted, so the counter goes on by two.
        computed = np.full(REQUESTS, LENGTH + 2 * next(steps))
        return computed, draw.integers(1 << 17, size=2 * REQUESTS)

    def target(made: Sequence[Step]) -> None:
        computed, ids = made[0]
        ledger.step(names, three, computed, ids, offsets, num_drafts=drafts)

    work = f"ledger.step of {REQUESTS:,} requests, two drafts each, from arrays"
    meter(work, target, fresh, calls=1, rounds=200, requests=REQUESTS)
    assert ledger.final_range(names[0]) == (0, LENGTH + 2 * (next(steps) - 1))


@pytest.mark.parametrize("length", [LENGTH, 8_192])
def test_begin_and_finish(meter: Meter, length: int) -> None:
    index = kvtrie.RadixIndex(2 * length // BLOCK_SIZE, BLOCK_SIZE, seed=0)
    ledger = kvtrie.SequenceLedger(BLOCK_SIZE)
    tokens = document(7, length)
    table = np.arange(length // BLOCK_SIZE, dtype=np.int32)
    index.insert(sequence(tokens), table, num_computed=length, source=kvtrie.COMPUTED)

    def target(seqs: Sequence[kvtrie.TokenSequence]) -> npt.NDArray[np.int32]:
        for seq in seqs:
            ledger.begin("a", seq, table, num_computed=length)
            blocks = ledger.finish("a", index).blocks
        return blocks

    blocks = meter(
        f"ledger.begin and finish of {length:,} computed tokens that are cached",
        target,
        lambda: sequence(tokens),
        calls=8,
        tokens=length,
    )
    assert blocks.size == length // BLOCK_SIZE
    assert len(ledger) == 0
