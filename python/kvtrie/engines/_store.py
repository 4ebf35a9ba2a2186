"""The owners of a pool's blocks, and who has how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtrie._core import BlockAllocator, RadixIndex, SequenceLedger
    from kvtrie.pool import KVPool


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Who has the blocks of a pool; free, held, indexed and condemned are ``total``.

    Attributes:
        free: In the free list.
        held: In the tables of running requests and not shared.
        indexed: Owned by the index, reusable.
        condemned: Left the index while pinned; pinned still, or not collected yet.
        waiting: Those of the condemned that are not pinned any more.
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
        """Blocks that nobody has: 0, or there is a bug."""
        return self.total - self.free - self.held - self.indexed - self.condemned


@dataclass(frozen=True, slots=True)
class Store:
    """The owners of a pool's blocks: who finds, hands out and fills them, and knows how far."""

    index: RadixIndex
    allocator: BlockAllocator
    pool: KVPool
    ledger: SequenceLedger

    def reclaim(self) -> None:
        """Give the free list what the index let go of meanwhile."""
        self.allocator.free(self.index.take_freed())
