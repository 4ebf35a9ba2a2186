"""Filled indexes that the benchmarks share, and how large they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from workloads.documents import document

import kvtrie

if TYPE_CHECKING:
    import random

    import numpy.typing as npt
    from workloads.documents import Tokens

BLOCK_SIZE = 16
NAMESPACE = kvtrie.Namespace(model="model", salt=kvtrie.SHARED)
QUICK = os.environ.get("KVTRIE_BENCH_SCALE") == "quick"
# Tokens that are cached in each measurement: 10**6 blocks, more than a processor's caches hold.
CACHED = 400_000 if QUICK else 16_000_000
# Seeds of what is cached start at 0, those of new tokens here.
NEW = 1 << 40
# Ids of the pool that no fill uses.
SPARE = 1 << 16


@dataclass(frozen=True)
class Shape:
    """Sequences of one length, inserted `step` tokens at a time.

    At every step `siblings` other blocks are inserted, so that the paths branch there.
    """

    length: int
    step: int
    siblings: int = 0
    cached: int = CACHED
    moved_runs: bool = False

    @property
    def count(self) -> int:
        with_siblings = self.length + self.length // self.step * self.siblings * BLOCK_SIZE
        return max(2, self.cached // with_siblings)

    def __str__(self) -> str:
        if self.siblings:
            children = self.siblings + 1
            return f"{self.length:,} tokens in edges of {self.step} with {children} children each"
        if self.step < self.length:
            return f"{self.length:,} tokens inserted {self.step} at a time"
        return f"{self.length:,} tokens in one edge"


@dataclass
class Forest:
    """An index with the ids of all sequences that were cached in it, one per row.

    Where a benchmark evicts, evictions take the earlier half of the rows, and lookups draw from the
    later half.
    """

    index: kvtrie.RadixIndex
    rows: Tokens
    shape: Shape
    evicted: int = 0

    def blocks(self, row: int) -> npt.NDArray[np.int32]:
        each = self.shape.length // BLOCK_SIZE
        return np.arange(row * each, (row + 1) * each, dtype=np.int32)

    def draw(self, rng: random.Random, state: str) -> int:
        """A row: always the same if warm, else a random one."""
        count = self.shape.count
        return count - 1 if state == "warm" else rng.randrange(count)

    def draw_later(self, rng: random.Random, state: str) -> int:
        """A row of the later half: always the same if warm, else a random one."""
        count = self.shape.count
        return count - 1 if state == "warm" else rng.randrange(count // 2, count)

    def make_room(self, num_blocks: int, rng: random.Random) -> None:
        """Make the next evictions take rows of the earlier half."""
        self.evicted += num_blocks
        if self.evicted > self.shape.count // 2 * (self.shape.length // BLOCK_SIZE):
            self.restock(rng)
            self.evicted = num_blocks

    def restock(self, rng: random.Random) -> None:
        """Insert what was evicted of the earlier half, then touch the later half."""
        earlier, later = range(self.shape.count // 2), range(self.shape.count // 2, len(self.rows))
        for row in rng.sample(earlier, len(earlier)):
            insert(self.index, sequence(self.rows[row]), self.blocks(row))
        for row in rng.sample(later, len(later)):
            self.index.lookup(sequence(self.rows[row]))
        self.evicted = 0


def sequence(ids: Tokens) -> kvtrie.TokenSequence:
    return kvtrie.TokenSequence(ids, NAMESPACE)


def filled(shape: Shape) -> Forest:
    """An index filled as the shape says.

    Row r is backed by the ids from r * (length / block size) on; siblings have ids after those.
    """
    count, length, step = shape.count, shape.length, shape.step
    rows = np.empty((count, length), dtype=np.uint32)
    each = length // BLOCK_SIZE
    num_siblings = count * (length // step) * shape.siblings
    index = kvtrie.RadixIndex(
        count * each + num_siblings + SPARE, BLOCK_SIZE, moved_runs=shape.moved_runs, seed=0
    )
    others = document(NEW - 1, num_siblings * BLOCK_SIZE).reshape(-1, BLOCK_SIZE)
    ids = np.arange(count * each + num_siblings, dtype=np.int32)
    used = count * each
    for row in range(count):
        rows[row] = document(row, length)
        seq = sequence(rows[row, :0])
        for start in range(0, length, step):
            for _ in range(shape.siblings):
                seq.extend(others[used - count * each])
                insert(index, seq, ids[used : used + 1], start)
                seq.truncate(start)
                used += 1
            seq.extend(rows[row, start : start + step])
            first = row * each + start // BLOCK_SIZE
            insert(index, seq, ids[first : row * each + len(seq) // BLOCK_SIZE], start)
    if index.stats().indexed != used:
        msg = f"filled: {index.stats().indexed} of {used} blocks are indexed"
        raise RuntimeError(msg)
    return Forest(index, rows, shape)


def insert(
    index: kvtrie.RadixIndex, seq: kvtrie.TokenSequence, ids: npt.NDArray[np.int32], start: int = 0
) -> kvtrie.InsertResult:
    return index.insert(seq, ids, num_computed=len(seq), start=start, source=kvtrie.COMPUTED)


def shuffle_recency(forest: Forest, rng: random.Random) -> None:
    """Touch all rows in random order: those evicted in sequence are not adjacent in memory."""
    order = list(range(forest.shape.count))
    rng.shuffle(order)
    for row in order:
        forest.index.lookup(sequence(forest.rows[row]))
