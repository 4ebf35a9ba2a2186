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
    from collections.abc import Callable, Iterable

    from kvtrie.testing.model._store import Entry

Grid: TypeAlias = npt.NDArray[np.int64]
NOWHERE = -1


@dataclass(frozen=True)
class Allowed:
    """What a policy allows besides exact KV of the same whole prefix.

    `moved` is KV under another prefix or at another position, `forbidden` a bit set of kinds.
    Moved KV supplies only tokens before `moved_end`, from the blocks `in_scope`.
    """

    approximate: bool
    moved: bool
    max_hops: int
    forbidden: int
    moved_end: int
    in_scope: Callable[[Tokens, Entry], bool]
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
        scope: list[bool] = []
        last: dict[Tokens, int] = {}
        self.paths: dict[int, Tokens] = {}
        """The whole path of each entry, by its `id`."""
        self.first: dict[int, int] = {}
        """The first column of each entry."""
        # Parents come first: the slot before the first of a block is the last of its parent, or
        # none if that is a hole.
        for path in sorted(entries, key=len):
            start, own = len(path) - size, path[-size:]
            self.paths[id(entries[path])] = path
            self.first[id(entries[path])] = len(self.sources)
            same = common(own, prompt[start:]) if path[:start] == prompt[:start] else 0
            in_scope = allowed.in_scope(path, entries[path])
            for offset in range(size):
                at = len(self.sources)
                self.sources.append(Source(entries[path], offset, start + offset))
                token.append(codes.get(own[offset], NOWHERE))
                before.append(at - 1 if offset else last.get(path[:start], NOWHERE))
                shared.append(offset < same)
                scope.append(in_scope)
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
        moved = allowed.moved & np.array(scope, dtype=np.bool_) & (rows < allowed.moved_end)
        near = self.same_prefix | moved
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

    def after(self, previous: Source | None) -> npt.NDArray[np.bool_]:
        """The slots that follow `previous` on a path that has both; all of them if it is None."""
        if previous is None:
            return np.ones(len(self.sources), dtype=np.bool_)
        path = self.paths[id(previous.entry)]
        below = [
            self.paths[id(entry)][: len(path)] == path
            for entry, offset, _ in self.sources
            if offset == 0
        ]
        size = len(self.sources) // max(1, len(below))
        return np.repeat(np.array(below, dtype=np.bool_), size) & (
            self.position > previous.position
        )

    def best(self, start: int, min_run: int, previous: Source | None) -> Piece | None:
        """The match that a piece is taken from at `start`, from there on.

        It contains `start`. It has at least `min_run` tokens from there on, unless it is of the
        same prefix. Of several, one in order is taken, then the one that reaches furthest.
        """
        goes_on = self.same_prefix[start] | self.after(previous)
        found: dict[bool, tuple[int, npt.NDArray[np.int64]]] = {}
        for end in range(start + 1, len(self.prompt) + 1):
            count, lengths = end - start, self.lengths[end - 1]
            if count > 1:
                goes_on = np.append(goes_on, False)[self.before]  # The last one is for NOWHERE.
            if not (lengths >= count).any():
                break
            holds = lengths >= max(count, min_run)
            if count < min_run:
                holds &= self.same_prefix[end - 1]
            for in_order in (True, False):
                last = np.flatnonzero(holds & goes_on if in_order else holds)
                if len(last):
                    found[in_order] = end, last
        if not found:
            return None
        end, last = found.get(True) or found[False]
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


def cover(slots: Slots, start: int, min_run: int, previous: Source | None) -> list[Piece]:
    """Cover a prompt from left to right; `previous` is the last slot in place."""
    pieces = []
    while start < len(slots.prompt):
        piece = slots.best(start, min_run, previous)
        if piece is not None:
            pieces.append(piece)
            previous = piece.sources[-1]
        start += 1 if piece is None else len(piece.sources)
    return pieces
