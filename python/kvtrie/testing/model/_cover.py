"""The cover: the cached runs that build the KV of tokens that are not in place.

A prompt token and a cached slot are a *pair* if they hold the same token and the policy allows that
slot there. A *match* is a chain of pairs, (i, slot), (i + 1, next slot on one path), that cannot be
extended on either side and is at least `min_run` long. Parents are unique, so the last pair
identifies a match. One recurrence finds all matches:

    length(i, slot) = length(i - 1, slot before) + 1, or 0 if (i, slot) is not a pair
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtrie.testing.model._grades import LAXEST, Grade
from kvtrie.testing.model._sequences import Tokens, common

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie.testing.model._store import Entry

Grid: TypeAlias = npt.NDArray[np.int64]
NOWHERE = -1


@dataclass(frozen=True)
class Allowed:
    """What a policy allows besides exact KV of the same whole prefix.

    `moved` is KV under another prefix or at another position, `forbidden` a bit set of kinds.
    """

    approximate: bool
    moved: bool
    max_hops: int
    forbidden: int
    grade: Grade = LAXEST

    def in_place(self, entry: Entry) -> bool:
        free = not any(tags & self.forbidden for tags in entry.tags)
        return self.approximate and entry.hops <= self.max_hops and free and self.strict(entry)

    def strict(self, entry: Entry) -> bool:
        """Whether an entry is exact or built under a policy that is strict enough."""
        return entry.exact or entry.grade.is_at_least_as_strict_as(self.grade)


class Source(NamedTuple):
    """A present slot: its entry, the offset in it, and its position on its path."""

    entry: Entry
    offset: int
    position: int


@dataclass(frozen=True)
class Piece:
    """Prompt tokens from `start` that are copied from consecutive slots of one path.

    If `same_prefix`, that path is the prompt up to here: such a copy is as exact as its source, and
    adds no hop.
    """

    start: int
    sources: list[Source]
    same_prefix: bool


class Slots:
    """All present slots of a namespace in sequence, compared with a prompt."""

    def __init__(
        self,
        prompt: Tokens,
        entries: dict[Tokens, Entry],
        size: int,
        allowed: Allowed,
        *,
        by_position: bool,
    ) -> None:
        codes = {token: code for code, token in enumerate(dict.fromkeys(prompt))}
        self.prompt = np.array([codes[token] for token in prompt], dtype=np.int64)
        self.sources: list[Source] = []
        token: list[int] = []
        before: list[int] = []
        shared: list[bool] = []
        last: dict[Tokens, int] = {}
        # Parents come first: the slot before the first of a block is the last of its parent, or
        # none if that is a hole.
        for path in sorted(entries, key=len):
            start, own = len(path) - size, path[-size:]
            same = common(own, prompt[start:]) if path[:start] == prompt[:start] else 0
            for offset in range(size):
                at = len(self.sources)
                self.sources.append(Source(entries[path], offset, start + offset))
                token.append(codes.get(own[offset], NOWHERE))
                before.append(at - 1 if offset else last.get(path[:start], NOWHERE))
                shared.append(offset < same)
            last[path] = len(self.sources) - 1
        self.before = np.array(before, dtype=np.int64)
        self.position = self._column(position for *_, position in self.sources)
        self.rank = (
            self.position
            if by_position
            else self._column(entry.block * size + offset for entry, offset, _ in self.sources)
        )
        self.hops = self._column(entry.hops for entry, *_ in self.sources)
        exact = self._column(entry.exact for entry, *_ in self.sources) != 0
        forbidden = self._column(
            entry.tags[offset] & allowed.forbidden != 0 for entry, offset, _ in self.sources
        )
        # One row per prompt token, one column per slot.
        rows = np.arange(len(prompt))[:, np.newaxis]
        self.same_prefix = np.array(shared, dtype=np.bool_) & (self.position == rows)
        few_hops = self.hops + ~self.same_prefix <= allowed.max_hops
        near = self.same_prefix | allowed.moved
        strict = np.array([allowed.strict(source.entry) for source in self.sources], np.bool_)
        approximate = allowed.approximate & few_hops & (forbidden == 0) & near & strict
        usable = (self.same_prefix & exact) | approximate
        self.lengths = self._lengths((np.array(token) == self.prompt[:, np.newaxis]) & usable)

    @staticmethod
    def _column(values: Iterable[int]) -> Grid:
        return np.fromiter(values, dtype=np.int64)

    def _lengths(self, pairs: npt.NDArray[np.bool_]) -> Grid:
        """The length of the chain that ends in each pair; 0 without a pair."""
        count, width = pairs.shape
        lengths = np.zeros((count + 1, width + 1), dtype=np.int64)
        for i in range(count):
            lengths[i + 1, :width] = np.where(pairs[i], lengths[i, self.before] + 1, 0)
        return lengths[1:, :width]

    def best(self, start: int, min_run: int) -> Piece | None:
        """The match that contains `start` and reaches furthest, from `start` on."""
        ends = np.arange(start + 1, len(self.prompt) + 1)
        needed = np.maximum(ends - start, min_run)
        longest = self.lengths[start:].max(axis=1, initial=0)
        reached = ends[longest >= needed]
        if not len(reached):
            return None
        end = int(reached[-1])
        last = np.flatnonzero(self.lengths[end - 1] >= max(end - start, min_run))
        # Of siblings that continue one source, keep the one with fewer hops, then the lower id.
        last = last[np.lexsort((self.rank[last], self.hops[last]))]
        parts = self._back(last, end - start)
        firsts = np.unique(parts[:, 0], return_index=True)[1]
        last, parts = last[firsts], parts[firsts]
        # Ties: the lowest maximum of hops, the smaller move, then slot by slot the lower one.
        same = self.same_prefix[end - 1, last]
        hops = (self.hops[parts] + ~same[:, np.newaxis]).max(axis=1)
        way = np.abs(end - 1 - self.position[last])
        order = np.lexsort((*self.rank[parts].T[::-1], way, hops))
        winner = int(order[0])
        sources = [self.sources[column] for column in parts[winner]]
        return Piece(start, sources, bool(same[winner]))

    def _back(self, last: Grid, count: int) -> Grid:
        """One row per slot: the `count` slots of its path that end there."""
        parts = np.empty((len(last), count), dtype=np.int64)
        for i in reversed(range(count)):
            parts[:, i] = last
            last = self.before[last]
        return parts


def cover(slots: Slots, start: int, min_run: int) -> list[Piece]:
    """Cover a prompt from left to right; overlapping matches may give pieces below `min_run`."""
    pieces = []
    while start < len(slots.prompt):
        piece = slots.best(start, min_run)
        if piece is not None:
            pieces.append(piece)
        start += 1 if piece is None else len(piece.sources)
    return pieces
