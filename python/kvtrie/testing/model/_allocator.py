"""A free list of block ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie import OutOfBlocksError
from kvtrie.testing.model._arguments import Int32, Integers, as_count, as_integers, int32

if TYPE_CHECKING:
    from kvtrie.testing.model._index import ModelIndex


class ModelAllocator:
    """`kvtrie.BlockAllocator`: ids are in `0..num_blocks`; all are free at first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = as_count(num_blocks, "num_blocks", 1)
        self._free = list(range(self.num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int, evict_from: ModelIndex | None = None) -> Int32:
        n = as_count(n, "n")
        available = self.num_free
        if evict_from is not None:
            if evict_from.num_blocks != self.num_blocks:
                message = f"the index has {evict_from.num_blocks} blocks, not {self.num_blocks}"
                raise ValueError(message)
            available += evict_from.num_evictable + evict_from.stats().waiting
        if n > available:
            message = f"allocate: {n} blocks wanted, {available} available"
            raise OutOfBlocksError(message)
        taken, self._free = self._free[:n], self._free[n:]
        if evict_from is not None and len(taken) < n:
            taken += evict_from.evict(n - len(taken)).tolist()
        return int32(taken)

    def free(self, ids: Integers) -> None:
        numbers = as_integers(ids, "ids", self.num_blocks)
        twice = set(numbers) & set(self._free)
        if twice or len(set(numbers)) < len(numbers):
            message = f"free: {sorted(twice) or numbers} are free already, or given twice"
            raise ValueError(message)
        self._free += numbers
