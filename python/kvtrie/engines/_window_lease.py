"""The blocks of one running request where layers with a window have a pool of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtrie.engines._watch import UNWATCHED, Planned
from kvtrie.engines._windows import GROUP, WindowTable, blocks_of_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie._core import ReusePolicy, TokenSequence
    from kvtrie.engines._store import Store
    from kvtrie.engines._watch import Watched
    from kvtrie.engines._windows import Windows
    from kvtrie.gates import Decision


class WindowLease:
    """An exact plan, and the tables of both kinds of layers, as `Lease` without a ledger.

    A plan here is exact and copies nothing, and no claim runs ahead of the ids, so one number says
    what is computed. The index gets all of it when the request ends.

    Raises:
        OutOfBlocksError: A pool has too few blocks; nothing was evicted.
    """

    def __init__(
        self,
        store: Store,
        windows: Windows,
        seq: TokenSequence,
        policy: ReusePolicy,
        *,
        session: str | None = None,
        moved_end: int | None = None,
        headroom: int = 0,
        decision: Decision | None = None,
        watch: Watched = UNWATCHED,
    ) -> None:
        self._store = store
        self._watch = watch
        self._seq = seq
        self._session = session
        self._is_closed = False
        self.decision = decision
        with watch.phase("plan", len(seq)):
            self.plan = store.index.plan(
                seq, policy, keep_last=1, session=session, moved_end=moved_end
            )
        try:
            watch.planned(Planned(seq, self.plan, policy, session, moved_end, decision is None))
            self.windows = WindowTable(windows, self.plan, supersedes=session is not None)
            most = blocks_of_window(windows.window, windows.block_size)
            store.reclaim()
            windows.check_room(most - len(self.plan.group(GROUP)[1]))
            fresh = store.allocate(self.plan.num_new_blocks, headroom)
        except BaseException:
            self.plan.release()
            store.reclaim()
            raise
        self._computed = self.plan.num_exact
        self._num_in_place = len(self.plan.blocks)
        self._table = np.concatenate([self.plan.blocks, fresh])

    @property
    def table(self) -> NDArray[np.int32]:
        return self._table

    @property
    def num_held(self) -> int:
        return 0 if self._is_closed else len(self._table) - self._num_in_place

    @property
    def is_computed(self) -> bool:
        """Whether all tokens have KV, so that the next one can be picked."""
        return self._computed == len(self._seq)

    def next_ranges(self, limit: int) -> list[tuple[int, int]]:
        """The next tokens to compute, at most ``limit``, as one range; see `Lease.next_ranges`."""
        return [(self._computed, min(len(self._seq), self._computed + limit))]

    def issue(self, end: int) -> None:
        """Get blocks of both pools for a pass to ``end``; `OutOfBlocksError` evicts nothing."""
        wanted = -(-end // self._store.index.block_size) - len(self._table)
        if wanted > 0:
            self._table = np.concatenate([self._table, self._store.allocate(wanted, 0)])
        self.windows.issue(end)

    def advance(self, end: int) -> None:
        """Record what is computed."""
        self._computed = end

    def append(self, ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Append final ids, which have no KV yet."""
        self._seq.extend(ids)

    def close(self) -> None:
        """Insert what is computed and free the rest, on finish, abort and preemption alike."""
        if self._is_closed:
            return
        self._is_closed = True
        store = self._store
        held = self._table[self._num_in_place :]
        offers = self.windows.offers(self._computed)
        try:
            with self._watch.phase("insert", self._computed - self.plan.num_exact):
                done = store.index.insert(
                    self._seq,
                    held,
                    start=self.plan.num_exact,
                    num_computed=self._computed,
                    source=self.plan,
                    session=self._session,
                    groups={GROUP: offers},
                )
        except BaseException:
            # A failed call has inserted nothing: the blocks are still held.
            store.allocator.free(held)
            self.windows.close()
            raise
        else:
            for ids in (done.duplicates, done.freed, done.surplus):
                store.allocator.free(ids)
            own = done.groups[GROUP]
            refused = {*own.duplicates.tolist(), *own.surplus.tolist()}
            self.windows.close({id_ for _, id_ in offers} - refused)
        finally:
            self.plan.release()
            store.reclaim()
