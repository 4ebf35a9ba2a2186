"""A sequence of 102,400 tokens that grows by 16 at a time and remembers its place in the index."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from forest import NEW, Forest, Shape, insert, sequence
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from meter import Meter
    from workloads.documents import Tokens

LENGTH = 102_400
# How often it grows in a round before it is truncated.
GROWTHS = 64

pytestmark = pytest.mark.parametrize(
    "forest", [Shape(LENGTH, LENGTH)], ids=["102,400 tokens"], indirect=True
)


def tail(seed: int) -> list[Tokens]:
    return [ids.copy() for ids in document(NEW + seed, 16 * GROWTHS).reshape(GROWTHS, 16)]


def spare_ids(index: kvtrie.RadixIndex) -> npt.NDArray[np.int32]:
    return np.arange(index.num_blocks - GROWTHS, index.num_blocks, dtype=np.int32)


def test_extend(forest: Forest, meter: Meter) -> None:
    seq = sequence(forest.rows[0])

    def target(tails: Sequence[Tokens]) -> int:
        for ids in tails:
            seq.extend(ids)
        return len(seq)

    length = meter(
        "grow a sequence of 102,400 tokens by 16 (no index)",
        target,
        cycle(tail(0)).__next__,
        calls=GROWTHS,
        after=lambda: seq.truncate(LENGTH),
    )
    assert length == LENGTH + 16 * GROWTHS


def test_lookup(forest: Forest, meter: Meter) -> None:
    index, ids = forest.index, spare_ids(forest.index)
    other = sequence(np.concatenate([forest.rows[0], *tail(1)]))
    insert(index, other, np.concatenate([forest.blocks(0), ids]))
    seq, lookup = sequence(forest.rows[0]), index.lookup
    assert lookup(seq).num_tokens == LENGTH

    def target(tails: Sequence[Tokens]) -> npt.NDArray[np.int32]:
        start = LENGTH
        for grown in tails:
            seq.extend(grown)
            found = lookup(seq, start=start).blocks
            start += 16
        return found

    def cut_back() -> None:
        seq.truncate(LENGTH)
        lookup(seq)

    found = meter(
        "grow by 16 at 102,400 tokens and look up with start=",
        target,
        cycle(tail(1)).__next__,
        calls=GROWTHS,
        index=index,
        after=cut_back,
    )
    assert found.tolist() == [ids[-1]]
    index.discard(ids)


def test_insert(forest: Forest, meter: Meter) -> None:
    index, ids = forest.index, spare_ids(forest.index)
    seq, insert_blocks = sequence(forest.rows[1]), index.insert
    assert index.lookup(seq).num_tokens == LENGTH
    offers = list(ids.reshape(GROWTHS, 1))

    def target(tails: Sequence[Tokens]) -> npt.NDArray[np.int32]:
        start = LENGTH
        for grown, offer in zip(tails, offers, strict=True):
            seq.extend(grown)
            end = start + 16
            taken = insert_blocks(
                seq, offer, num_computed=end, start=start, source=kvtrie.COMPUTED
            ).blocks
            start = end
        return taken

    def cut_back() -> None:
        index.discard(ids)
        seq.truncate(LENGTH)
        index.lookup(seq)

    taken = meter(
        "grow by 16 at 102,400 tokens and insert one block with start=",
        target,
        cycle(tail(2)).__next__,
        calls=GROWTHS,
        index=index,
        after=cut_back,
    )
    assert taken.tolist() == [ids[-1]]
