"""The owners of a pool's blocks, and their counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie._core import BlockAllocator, RadixIndex, SequenceLedger
    from kvtrie.engines._repair import Repair
    from kvtrie.pool.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Owners of the blocks of a pool. Free, held, indexed and condemned add up to ``total``.

    Attributes:
        free: In the free list.
        held: In the tables of running requests and not shared.
        indexed: Owned by the index, reusable.
        condemned: Left the index while pinned.
        waiting: Condemned blocks that are no longer pinned.
        total: Blocks of the pool.
    """

    free: int
    held: int
    indexed: int
    condemned: int
    waiting: int
    total: int

    @property
    def lost(self) -> int:
        """Blocks without an owner: 0, or there is a bug."""
        return self.total - self.free - self.held - self.indexed - self.condemned


@dataclass(frozen=True, slots=True)
class Store:
    """Index, free list, pool and ledger, and what repairs plans, if policies may ask for it."""

    index: RadixIndex
    allocator: BlockAllocator
    pool: KVPool
    ledger: SequenceLedger
    repair: Repair | None = None

    def reclaim(self) -> None:
        self.allocator.free(self.index.take_freed())
