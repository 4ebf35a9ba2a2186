"""Fake KV with labels: the slots of one pool.

A slot holds the label of the KV that a real pool would have there:

* `token`: the id it was computed for, with its item if it is in one; `UNWRITTEN` if nothing was
  written since the block was handed out;
* `position`: the position of its K, which a load moves by its delta;
* `context`: a digest of everything it was computed with, see `chain`;
* `place`: the digest of the tokens up to and including its own, in its current sequence;
* `space`: its namespace;
* `hops`: how many times it was placed under another prefix than the one it was computed under.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

UNWRITTEN = -1
"""The token of a slot that was not written since its block was handed out."""


def chain(ids: Sequence[Hashable], root: int) -> list[int]:
    """The context of each token if computed from scratch: it and all tokens before it.

    Example:
        >>> from tests.truth.labels import chain
        >>> chain([5, 6, 7], 0)[:2] == chain([5, 6, 8], 0)[:2]
        True
        >>> chain([5, 6, 7], 0)[2] == chain([6, 5, 7], 0)[2]
        False
    """
    contexts = []
    for token in ids:
        root = hash((root, token))
        contexts.append(root)
    return contexts


class LabelledPool:
    """The slots of one engine's pool, each with the label of its KV.

    Example:
        >>> from tests.truth.labels import LabelledPool, chain
        >>> pool = LabelledPool(num_blocks=2, block_size=4)
        >>> slots, ids = pool.slots([1, 0]), [7, 8, 9]
        >>> pool.compute(slots, ids, chain(ids, 0), 0, 3)
        0
        >>> pool.token[4:8]
        [7, 8, 9, -1]
    """

    __slots__ = ("block_size", "context", "hops", "place", "position", "space", "token")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        num_slots = num_blocks * block_size
        self.block_size = block_size
        self.token: list[Hashable] = [UNWRITTEN] * num_slots
        self.position = [-1] * num_slots
        self.context = [0] * num_slots
        self.place = [0] * num_slots
        self.space = [0] * num_slots
        self.hops = [0] * num_slots

    def slots(self, blocks: Iterable[int]) -> list[int]:
        size = self.block_size
        return [slot for block in blocks for slot in range(block * size, (block + 1) * size)]

    def clear(self, blocks: Iterable[int]) -> None:
        size = self.block_size
        nothing: list[Hashable] = [UNWRITTEN] * size
        for block in blocks:
            self.token[block * size : (block + 1) * size] = nothing
            self.context[block * size : (block + 1) * size] = [0] * size

    def attended(self, slots: Sequence[int], canon: Sequence[int], root: int) -> tuple[int, int]:
        token, position, context = self.token, self.position, self.context
        if not slots:
            return root, 0
        # Fast path: comparing whole lists is faster, and they are usually exact.
        if list(map(context.__getitem__, slots)) == canon[: len(slots)]:
            return canon[len(slots) - 1], 0
        missing = 0
        state, exact = root, True
        for index, slot in enumerate(slots):
            found = context[slot]
            if token[slot] == UNWRITTEN:
                missing += 1
                state, exact = hash((state, UNWRITTEN, index)), False
            elif exact and found == canon[index] and position[slot] == index:
                state = found
            else:
                state, exact = hash((state, found, token[slot], position[slot])), False
        return state, missing

    def compute(
        self,
        slots: Sequence[int],
        ids: Sequence[Hashable],
        canon: Sequence[int],
        start: int,
        end: int,
        *,
        root: int = 0,
    ) -> int:
        if end <= start:
            return 0
        state, missing = self.attended(slots[:start], canon, root)
        for index in range(start, end):
            slot, token = slots[index], ids[index]
            state = hash((state, token))
            self.token[slot] = token
            self.position[slot] = index
            self.context[slot] = state
            self.place[slot] = canon[index]
            self.space[slot] = root
            self.hops[slot] = 0
        return missing

    def load(
        self, source: LabelledPool, source_slot: int, slot: int, places: Sequence[int], delta: int
    ) -> None:
        end, stop = source_slot + len(places), slot + len(places)
        came_from = source.place[source_slot:end]
        hops = source.hops[source_slot:end]
        if came_from != places:
            hops = [
                count + (old != new)
                for count, old, new in zip(hops, came_from, places, strict=True)
            ]
        positions = source.position[source_slot:end]
        if delta:
            positions = [position + delta for position in positions]
        self.token[slot:stop] = source.token[source_slot:end]
        self.position[slot:stop] = positions
        self.context[slot:stop] = source.context[source_slot:end]
        self.space[slot:stop] = source.space[source_slot:end]
        self.hops[slot:stop] = hops
        self.place[slot:stop] = places
