"""The blocks of one running request, from plan to release: the engine loop of the manual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie._core import OutOfBlocksError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtrie._core import ReusePlan, ReusePolicy, TokenSequence
    from kvtrie.engines._store import Store


class Lease:
    """A plan, its block table, and how far the table's KV is computed.

    Every block of the table is the index's (the first ``num_indexed``) or held by the lease; after
    ``close`` none is held. ``num_computed`` never runs ahead of what the model has finished, so an
    exception at any point leaves a lease that closes cleanly.

    Args:
        store: Index, free list and pool.
        seq: The tokens; the lease reads them, its owner extends them.
        policy: What may be reused.
        headroom: Blocks that must stay obtainable for others after this lease took its own.

    Raises:
        OutOfBlocksError: If the blocks cannot be had; nothing was evicted.
    """

    def __init__(
        self, store: Store, seq: TokenSequence, policy: ReusePolicy, *, headroom: int = 0
    ) -> None:
        self._store = store
        self._seq = seq
        self._block_size = store.pool.layout.block_size
        self._is_closed = False
        self.plan: ReusePlan = store.index.plan(seq, policy, keep_last=1)
        try:
            fresh = self._allocate(self.plan.num_new_blocks, headroom)
        except BaseException:
            self.plan.release()
            store.reclaim()
            raise
        self.table: NDArray[np.int32] = np.concatenate([self.plan.blocks, fresh])
        self.num_indexed = len(self.plan.blocks)
        self.num_computed = self.num_indexed * self._block_size
        try:
            store.pool.apply(self.plan.moves(self.table))
            # Copies and later writes run on one stream, in this order.
            self.plan.release_sources()
            self._planned = len(seq)
            self._gaps = [(int(start), int(end)) for start, end in self.plan.gaps]
            self.num_computed = self._gap_start()
        except BaseException:
            self.close()
            raise

    @property
    def num_held(self) -> int:
        """Blocks that are neither free nor the index's."""
        return 0 if self._is_closed else len(self.table) - self.num_indexed

    def next_range(self, limit: int) -> tuple[int, int]:
        """The next tokens to compute, at most ``limit``: of a gap, or what was sampled since."""
        end = self._gaps[0][1] if self._gaps else len(self._seq)
        return self.num_computed, min(end, self.num_computed + limit)

    def make_room(self, end: int) -> None:
        """Bring the blocks for positions up to ``end``.

        Args:
            end: Position behind the last.

        Raises:
            OutOfBlocksError: If they cannot be had; nothing was evicted.
        """
        missing = -(-end // self._block_size) - len(self.table)
        if missing > 0:
            fresh = self._allocate(missing, 0)
            self.table = np.concatenate([self.table, fresh])

    def advance(self, end: int) -> None:
        """Note that the range up to ``end`` is computed, and share the blocks that are full.

        Args:
            end: Position behind the last computed token.
        """
        self.num_computed = end
        if self._gaps and end == self._gaps[0][1]:
            del self._gaps[0]
            self.num_computed = self._gap_start()
        if self.num_computed // self._block_size > self.num_indexed:
            self._insert(is_last=False)

    def close(self) -> None:
        """Insert what is computed and give up the rest: finish, abort and preemption alike."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._insert(is_last=True)
        finally:
            self.plan.release()
            self._store.reclaim()

    def _gap_start(self) -> int:
        """All KV below it is in the table, in place, copied or computed."""
        return self._gaps[0][0] if self._gaps else self._planned

    def _allocate(self, wanted: int, headroom: int) -> NDArray[np.int32]:
        store = self._store
        store.reclaim()
        if headroom:
            available = store.allocator.num_free + store.index.num_evictable
            if available < wanted + headroom:
                msg = f"{wanted} blocks wanted beside {headroom} to spare, {available} available"
                raise OutOfBlocksError(msg)
        return store.allocator.allocate(wanted, evict_from=store.index)

    def _insert(self, *, is_last: bool) -> None:
        store, first = self._store, self.num_indexed
        held = self.table[first:]
        try:
            done = store.index.insert(
                self._seq,
                held,
                num_computed=self.num_computed,
                start=first * self._block_size,
                source=self.plan,
            )
        except BaseException:
            # A call that fails has taken nothing: the blocks are still held.
            if is_last:
                store.allocator.free(held)
            raise
        self.num_indexed = first + len(done.blocks)
        self.table[first : self.num_indexed] = done.blocks
        store.allocator.free(done.duplicates)
        store.allocator.free(done.freed)
        if is_last:
            store.allocator.free(done.surplus)
