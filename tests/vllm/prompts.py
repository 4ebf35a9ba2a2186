"""Prompts of random tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def words(count: int, seed: int) -> list[int]:
    """Random ids, none of which is special to a model."""
    return random.Random(seed).choices(range(3, 500), k=count)


def joined(*parts: list[int]) -> list[int]:
    return [token for part in parts for token in part]


def gapped(parts: Iterable[list[int]]) -> list[int]:
    return joined(*(words(3 + at, 90 + at) + part for at, part in enumerate(parts)))


# A turn, and the next one, without the reasoning.
QUESTION, REASONING, ANSWER, NEXT = words(200, 1), words(160, 2), words(150, 3), words(40, 4)
EDITED = QUESTION + ANSWER + NEXT

# A text, of which `gapped(PARTS)` has the parts with gaps before them.
PARTS = [words(70, 60 + number) for number in range(5)]
HISTORY = joined(*PARTS)
