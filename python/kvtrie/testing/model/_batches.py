"""Arguments of the calls that take many sequences."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtrie.testing.model._sequences import AnySequence

T = TypeVar("T")


def each_of(what: str, values: Sequence[T] | None, count: int, default: T) -> list[T]:
    """One value per item: `values`, or `default` for each."""
    if values is None:
        return [default] * count
    if len(values) != count:
        message = f"{what} has {len(values)} values for {count} sequences"
        raise ValueError(message)
    return list(values)


def slices(offsets: list[int], count: int, total: int) -> list[slice]:
    """The part of a flat array that belongs to each item."""
    if len(offsets) != count + 1 or offsets != sorted(offsets) or offsets[0] != 0:
        message = f"offsets {offsets} do not ascend from 0 by {count} steps"
        raise ValueError(message)
    if offsets[-1] != total:
        message = f"offsets end at {offsets[-1]}, not at the {total} blocks"
        raise ValueError(message)
    return [slice(*pair) for pair in itertools.pairwise(offsets)]


def num_sequences(seqs: Sequence[AnySequence]) -> int:
    """The number of sequences; refuses what is not a list."""
    if not isinstance(seqs, list | tuple):
        message = f"seqs is a {type(seqs).__name__}, not a list of sequences"
        raise TypeError(message)
    return len(seqs)
