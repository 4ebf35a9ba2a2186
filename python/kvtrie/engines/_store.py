"""The owners of a pool's blocks, and their counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtrie._core import OutOfBlocksError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtrie._core import BlockAllocator, RadixIndex, SequenceLedger
    from kvtrie.engines._repair import Repair
    from kvtrie.engines._windows import Windows
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
    """Index, free list, pool and ledger, and what repairs plans, if policies may ask for it.

    With ``windows``, these are of layers with full attention, and the ledger is not used.
    """

    index: RadixIndex
    allocator: BlockAllocator
    pool: KVPool
    ledger: SequenceLedger
    repair: Repair | None = None
    windows: Windows | None = None

    def reclaim(self) -> None:
        self.allocator.free(self.index.take_freed())
        if self.windows is not None:
            self.windows.reclaim()

    def allocate(self, wanted: int, headroom: int) -> NDArray[np.int32]:
        """Allocate blocks, evicting others.

        Raises:
            OutOfBlocksError: There are too few, or less than ``headroom`` would stay available;
                nothing was evicted.
        """
        self.reclaim()
        if headroom:
            available = self.allocator.num_free + self.index.num_evictable
            if available < wanted + headroom:
                msg = f"{wanted} blocks wanted and {headroom} to spare, {available} available"
                raise OutOfBlocksError(msg)
        fresh = self.allocator.allocate(wanted, evict_from=self.index)
        if self.repair is not None:
            self.repair.forget(fresh)
        return fresh
