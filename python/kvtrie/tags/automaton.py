"""Finds delimiters in a stream of token ids, with one table look-up per token.

An Aho-Corasick automaton with all transitions precomputed. No pattern may contain a pattern of
another delimiter, so at most one ends at a token, and the first to end wins. No token belongs to
two delimiters.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

Spelling = tuple[int, ...]

# A byte per id; vocabularies are smaller.
_MOST_IDS: Final = 1 << 20


def contains(whole: Sequence[int], part: Sequence[int]) -> bool:
    """Whether `part` is contiguous in `whole`."""
    width = len(part)
    return any(tuple(whole[at : at + width]) == tuple(part) for at in range(len(whole) - width + 1))


class Automaton:
    """The compiled delimiters of a format, from the possible id sequences of each."""

    __slots__ = ("_begins", "_first", "_table", "outputs", "widths")

    def __init__(self, spellings: Mapping[str, Sequence[Spelling]]) -> None:
        patterns: list[tuple[str, Spelling]] = []
        for name, given in spellings.items():
            kept: list[Spelling] = []
            for spelling in sorted(set(given), key=len):
                if not spelling:
                    msg = f"Automaton: delimiter {name!r} has an empty spelling"
                    raise ValueError(msg)
                # The shorter one ends first, so a longer spelling that contains it is redundant.
                if not any(contains(spelling, shorter) for shorter in kept):
                    kept.append(spelling)
            patterns += [(name, spelling) for spelling in kept]
        for name, spelling in patterns:
            for other, inner in patterns:
                if name != other and contains(spelling, inner):
                    msg = (
                        f"Automaton: delimiter {name!r} is {list(spelling)}, which contains "
                        f"{other!r}, {list(inner)}: it would never be found"
                    )
                    raise ValueError(msg)

        children: list[dict[int, int]] = [{}]
        ends: dict[int, int] = {}
        for index, (_, spelling) in enumerate(patterns):
            node = 0
            for token in spelling:
                if token not in children[node]:
                    children[node][token] = len(children)
                    children.append({})
                node = children[node][token]
            ends[node] = index
        # Breadth first: a node's fallback is shorter, so its table is complete when needed.
        table: list[dict[int, int]] = [dict(children[0])] + [{} for _ in children[1:]]
        queue = deque((child, 0) for child in children[0].values())
        while queue:
            node, fallback = queue.popleft()
            table[node] = table[fallback] | children[node]
            queue.extend(
                (child, table[fallback].get(token, 0)) for token, child in children[node].items()
            )
        self._table = table
        self.outputs: dict[int, str] = {node: patterns[index][0] for node, index in ends.items()}
        """The delimiter that ends at a node, by node."""
        self.widths: dict[int, int] = {
            node: len(patterns[index][1]) for node, index in ends.items()
        }
        """The length of that delimiter in tokens, by node."""
        self._first: npt.NDArray[np.int64] = np.array(sorted(table[0]), dtype=np.int64)
        # Whether a delimiter begins with an id, by id, up to one with which none does.
        self._begins: npt.NDArray[np.bool_] | None = None
        if max(table[0], default=0) < _MOST_IDS:
            self._begins = np.zeros(max(table[0], default=0) + 2, np.bool_)
            self._begins[self._first] = True

    def step(self, node: int, token: int) -> int:
        """The node after one more token; 0 is the start, with nothing matched."""
        return self._table[node].get(token, 0)

    def candidates(self, tokens: list[int] | npt.NDArray[np.int64]) -> list[int]:
        """Positions of tokens with which a delimiter begins, ascending."""
        if isinstance(tokens, list):
            begin = self._table[0]
            if begin.keys().isdisjoint(tokens):
                return []
            return [at for at, token in enumerate(tokens) if token in begin]
        if self._begins is None:
            mask = np.isin(tokens, self._first)
        else:
            # All ids after the last one of the table are as that one.
            mask = self._begins.take(tokens, mode="clip")
        found: list[int] = mask.nonzero()[0].tolist()
        return found
