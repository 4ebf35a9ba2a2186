"""Prefix reuse over pool sizes: least recently used, offline optimum, pool without limits.

A request needs all its blocks at once, so a pool has at least the blocks of the longest. It uses
what it finds, evicts for the rest, and leaves its blocks as the most recently used ones, the first
block of the sequence last to go. A block is in every request that has a block below it. From this
follow the two shortcuts here, which give what a simulation block by block gives:

* Least recently used keeps the P most recently used blocks. So a block is found iff fewer than P
  others were used since, and one pass counts these *distances* for all P. Blocks of a prompt with
  the same last use are neighbours, so they are counted as one run: O(log requests) each.
* The optimum evicts the block whose next use is furthest, the deepest first. Of the blocks to be
  used next by one request it is enough to know how many are cached, so a pass takes O(log requests)
  per run of blocks with the same next use.

The optimum is one of blocks found. A use is a request that has the block in its prompt or in its
reply; without replies no policy finds more blocks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvtrie.replay.trace import Ids, Trace


@dataclass(frozen=True, slots=True)
class Runs:
    """Neighbouring blocks of requests with one last use, for `lru`.

    Attributes:
        request: Index of the request of each run.
        newer: Blocks used more recently than the first of the run.
        length: Its blocks.
    """

    request: NDArray[np.int64]
    newer: NDArray[np.int64]
    length: NDArray[np.int64]


def runs(trace: Trace) -> Runs:
    """What `lru` and `unlimited` count from, in one pass over the trace."""
    last = np.full(trace.num_ids, -1, dtype=np.int64)
    used = _Sums(len(trace.requests))
    found: list[tuple[int, int, int]] = []
    for now, request in enumerate(trace.requests):
        for before, length in _runs(last[request.prompt]):
            if before >= 0:
                found.append((now, used.after(before), length))
        for before, length in _runs(last[request.cached]):
            if before >= 0:
                used.add(before, -length)
        used.add(now, len(request.cached))
        last[request.cached] = now
    table = np.array(found, dtype=np.int64).reshape(-1, 3)
    return Runs(table[:, 0], table[:, 1], table[:, 2])


def lru(trace: Trace, counted: Runs, num_blocks: int) -> int:
    """Tokens found with prefix reuse in a pool that evicts the least recently used block."""
    kept = np.clip(num_blocks - counted.newer, 0, counted.length)
    hits = np.zeros(len(trace.requests), dtype=np.int64)
    np.add.at(hits, counted.request, kept)
    return _tokens(trace, hits)


def unlimited(trace: Trace, counted: Runs) -> int:
    """Tokens found with prefix reuse if nothing is ever evicted."""
    return lru(trace, counted, np.iinfo(np.int64).max)


def next_uses(trace: Trace) -> Sequence[Sequence[tuple[int, int]]]:
    """For each request, runs of its blocks with the same next use: (request, blocks)."""
    upcoming = np.full(trace.num_ids, -1, dtype=np.int64)
    found: list[Sequence[tuple[int, int]]] = []
    for now in range(len(trace.requests) - 1, -1, -1):
        ids = trace.requests[now].cached
        found.append([run for run in _runs(upcoming[ids]) if run[0] >= 0])
        upcoming[ids] = now
    return found[::-1]


def optimum(trace: Trace, uses: Sequence[Sequence[tuple[int, int]]], num_blocks: int) -> int:
    """Tokens found with prefix reuse in a pool that evicts what is used last in the future."""
    waiting = np.zeros(len(trace.requests), dtype=np.int64).tolist()
    furthest: list[int] = []
    hits = np.zeros(len(trace.requests), dtype=np.int64)
    cached = 0
    for now, request in enumerate(trace.requests):
        hits[now] = waiting[now]
        cached -= waiting[now]
        waiting[now] = 0
        surplus = cached + len(request.cached) - num_blocks
        while surplus > 0:
            last = -furthest[0]
            gone = min(surplus, waiting[last])
            waiting[last] -= gone
            cached -= gone
            surplus -= gone
            if not waiting[last]:
                heapq.heappop(furthest)
        for later, length in uses[now]:
            if not waiting[later]:
                heapq.heappush(furthest, -later)
            waiting[later] += length
            cached += length
    return _tokens(trace, hits)


def _tokens(trace: Trace, hits: NDArray[np.int64]) -> int:
    findable = [one.findable(trace.block_size) for one in trace.requests]
    return int(np.minimum(hits, np.array(findable, dtype=np.int64)).sum()) * trace.block_size


def _runs(values: Ids | NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Equal neighbours: (value, length)."""
    if not len(values):
        return
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    starts = [0, *edges.tolist(), len(values)]
    for start, end in pairwise(starts):
        yield int(values[start]), end - start


class _Sums:
    """Numbers by index, and the sum of those after one (a Fenwick tree)."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self._total = 0

    def add(self, index: int, number: int) -> None:
        self._total += number
        at = index + 1
        while at < len(self._tree):
            self._tree[at] += number
            at += at & -at

    def after(self, index: int) -> int:
        at = index + 1
        until = 0
        while at:
            until += self._tree[at]
            at &= at - 1
        return self._total - until
