"""Finds slots whose content differs from what the engine assumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.truth.labels import UNWRITTEN, LabelledPool

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

EXACT, APPROXIMATE = 0, 1
"""The classes, numbered as in a plan's segments."""


def wrong_slots(
    pool: LabelledPool,
    slots: Sequence[int],
    ids: Sequence[Hashable],
    canon: Sequence[int],
    classes: Sequence[int],
    hops: Sequence[int] | None = None,
    *,
    root: int = 0,
    start: int = 0,
) -> list[tuple[int, str]]:
    """The positions whose slot has a wrong label, with the error.

    A label is wrong if the slot is unwritten, if it has the KV of another token, namespace or
    position, if it is called exact (class 0) but was computed with another context, if it has more
    hops than claimed, or if it was placed under another prefix.
    """
    end = len(classes)
    held = slots[start:end]
    token, position, context = pool.token, pool.position, pool.context
    # Fast path: comparing whole lists is faster, and they are usually right.
    if (
        list(map(token.__getitem__, held)) == ids[start:end]
        and list(map(context.__getitem__, held)) == canon[start:end]
        and list(map(position.__getitem__, held)) == list(range(start, end))
        and not any(map(pool.hops.__getitem__, held))
    ):
        return []
    wrong = []
    for index in range(start, end):
        slot = slots[index]
        if token[slot] == UNWRITTEN:
            wrong.append((index, "unwritten"))
        elif token[slot] != ids[index]:
            wrong.append((index, "token"))
        elif pool.space[slot] != root:
            wrong.append((index, "namespace"))
        elif position[slot] != index:
            wrong.append((index, "position"))
        elif classes[index] == EXACT and context[slot] != canon[index]:
            wrong.append((index, "context"))
        elif hops is not None and pool.hops[slot] > hops[index]:
            wrong.append((index, "hops"))
        elif pool.place[slot] != canon[index]:
            wrong.append((index, "place"))
    return wrong


def is_loaded_right(
    pool: LabelledPool,
    slot: int,
    ids: Sequence[Hashable],
    canon: Sequence[int],
    start: int,
    *,
    exact: bool,
    hops: int,
    root: int = 0,
) -> bool:
    end = slot + len(ids)
    return (
        pool.token[slot:end] == list(ids)
        and pool.space[slot:end] == [root] * len(ids)
        and pool.position[slot:end] == list(range(start, start + len(ids)))
        and (not exact or pool.context[slot:end] == list(canon))
        and max(pool.hops[slot:end], default=0) <= hops
    )
