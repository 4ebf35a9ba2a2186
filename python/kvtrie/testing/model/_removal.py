"""Removal of blocks: by eviction, by id, by span, by namespace, all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie import Namespace
from kvtrie.testing.model._arguments import (
    Int32,
    Integers,
    as_count,
    as_flag,
    as_integers,
    as_ranges,
    expect,
    int32,
)
from kvtrie.testing.model._groups import column_of
from kvtrie.testing.model._results import ModelGroupStats, ModelRemoveResult
from kvtrie.testing.model._sequences import AnySequence, Tokens, read
from kvtrie.testing.model._tags import Tags

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtrie.testing.model._store import Key


class Removal(Tags):
    """The calls that return blocks to the caller."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._unknown_discards = 0
        self._resets = 0
        self._drops: dict[Namespace, int] = {}

    def _epoch(self, namespace: Namespace) -> tuple[int, int]:
        return self._resets, self._drops.get(namespace, 0)

    def take_freed(self, *, group: str | None = None) -> Int32:
        if group is not None:
            column = column_of(self._columns, group)
            freed, column.waiting = sorted(column.waiting), set()
            return int32(freed)
        freed, self._waiting = self._waiting, []
        return int32(freed)

    def evict(self, n: int, *, group: str | None = None) -> Int32:
        n = as_count(n, "n")
        if group is not None:
            return self._evict_from(group, n)
        freed, self._waiting = self._waiting[:n], self._waiting[n:]
        while len(freed) < n and (victim := self._next_victim()) is not None:
            freed.append(self._pop(victim))
        self._settle()
        return int32(freed)

    def _evict_from(self, name: str, n: int) -> Int32:
        column = column_of(self._columns, name)
        freed = sorted(column.waiting)[:n]
        column.waiting -= set(freed)
        pinned = self._pinned_of(name)
        while len(freed) < n and (victim := column.next_victim(pinned)) is not None:
            freed.append(column.entries.pop(victim).block)
        return int32(freed)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable())

    def group_stats(self, group: str) -> ModelGroupStats:
        column = column_of(self._columns, group)
        indexed = {entry.block for entry in column.entries.values()}
        pinned = len(indexed & self._pinned_of(group))
        return ModelGroupStats(
            indexed=len(indexed),
            pinned=pinned,
            evictable=len(indexed) - pinned,
            condemned=len(column.condemned),
            waiting=len(column.waiting),
        )

    def discard(self, block_ids: Integers, *, group: str | None = None) -> Int32:
        if group is not None:
            return self._discard_from(group, block_ids)
        wanted = list(dict.fromkeys(as_integers(block_ids, "block_ids", self.num_blocks)))
        where = self._where()
        self._unknown_discards += sum(block not in where for block in wanted)
        return self._forget(where[block] for block in wanted if block in where)

    def _discard_from(self, name: str, block_ids: Integers) -> Int32:
        column = column_of(self._columns, name)
        wanted = dict.fromkeys(as_integers(block_ids, "block_ids", column.group.num_blocks))
        where = {entry.block: key for key, entry in column.entries.items()}
        pinned = self._pinned_of(name)
        gone = [block for block in wanted if block in where]
        for block in gone:
            del column.entries[where[block]]
        column.condemned |= pinned & set(gone)
        return int32(block for block in gone if block not in pinned)

    def quarantine(self, block_ids: Integers) -> int:
        wanted = dict.fromkeys(as_integers(block_ids, "block_ids", self.num_blocks))
        where = self._where()
        self._unknown_discards += sum(block not in where for block in wanted)
        new = wanted.keys() - self._quarantined
        self._quarantined |= new
        self._waiting = [block for block in self._waiting if block not in new]
        self._forget(where[block] for block in wanted if block in where)
        return len(new)

    @property
    def quarantined(self) -> Int32:
        return int32(sorted(self._quarantined))

    def drop(self, namespace: Namespace) -> Int32:
        expect(namespace, Namespace, "namespace")
        self._drops[namespace] = self._drops.get(namespace, 0) + 1
        freed = self._forget(key for key in self._entries if key[0] == namespace)
        return np.sort(freed)

    def reset(self) -> Int32:
        self._resets += 1
        return np.sort(self._forget(self._entries))

    # --- by span ----------------------------------------------------------------------------------

    def _inside(
        self, namespace: Namespace, tokens: Tokens, ranges: list[tuple[int, int]]
    ) -> list[tuple[Key, bool]]:
        """The present blocks wholly inside a range, in path order, and the extended ones.

        A block is extended if a present block below it is not on the path of the sequence.
        """
        size = self.block_size
        path = self._path(namespace, tokens)
        extended = self._above(self._entries.keys() - set(path))
        return [
            (key, key in extended)
            for depth, key in enumerate(path)
            if key in self._entries
            and any(a <= depth * size and (depth + 1) * size <= b for a, b in ranges)
        ]

    def mark_dead(self, seq: AnySequence, ranges: Iterable[tuple[int, int]]) -> int:
        namespace, tokens = read(seq)
        inside = self._inside(namespace, tokens, as_ranges(ranges, len(tokens)))
        entries = [self._entries[key] for key, extended in inside if not extended]
        marked = [entry for entry in entries if entry.mark is None]
        self._marks += bool(marked)
        for entry in marked:
            entry.mark = self._marks
        self._settle()
        return len(marked)

    def remove_spans(
        self, seq: AnySequence, ranges: Iterable[tuple[int, int]], *, force: bool = False
    ) -> ModelRemoveResult:
        namespace, tokens = read(seq)
        inside = self._inside(namespace, tokens, as_ranges(ranges, len(tokens)))
        force = as_flag(force, "force")
        kept = [key for key, extended in inside if extended and not force]
        gone = [key for key, _ in inside if key not in kept]
        blocks = [self._entries[key].block for key in gone]
        kept_blocks = [self._entries[key].block for key in kept]
        freed = self._forget(gone)
        condemned = [block for block in blocks if block in self._condemned]
        return ModelRemoveResult(freed, int32(kept_blocks), int32(condemned))
