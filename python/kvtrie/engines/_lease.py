"""The blocks of one running request, from plan to release; see ``docs/engine-loop.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie.engines._watch import UNWATCHED, Planned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtrie._core import ReusePlan, ReusePolicy, TokenSequence
    from kvtrie.engines._store import Store
    from kvtrie.engines._watch import Watched
    from kvtrie.gates import Decision


def most_hops(plan: ReusePlan) -> int:
    """Most hops of the KV of a plan, as ``KVPool.apply`` wants them; 0 where all is exact."""
    return int(plan.segments["hops"].max(initial=0))


class Lease:
    """A plan, and its request in the store's ledger, which has the table, ids and computed range.

    Every block of the table belongs to the index or is held by the lease; after ``close``, which
    works after an exception at any point, none is held. Until then only the ledger changes ``seq``.
    ``headroom`` blocks stay available for others; `OutOfBlocksError` evicts nothing. A plan that
    ``decision`` does not clear is made again under the policy that it names, and judged again;
    ``decision`` is then the one that holds. A plan that lacks the records by which its policy has
    tokens chosen is made again under ``without_records``, and judged by it; without a decision,
    with fronts of runs.
    """

    windows: Final = None

    def __init__(
        self,
        store: Store,
        seq: TokenSequence,
        policy: ReusePolicy,
        *,
        session: str | None = None,
        moved_end: int | None = None,
        headroom: int = 0,
        decision: Decision | None = None,
        without_records: Decision | None = None,
        watch: Watched = UNWATCHED,
    ) -> None:
        self._store = store
        self._watch = watch
        self._seq = seq
        self._is_closed = False

        def planned(policy: ReusePolicy) -> ReusePlan:
            return store.index.plan(seq, policy, keep_last=1, session=session, moved_end=moved_end)

        def judged(policy: ReusePolicy, decision: Decision | None) -> ReusePolicy:
            self.plan = planned(policy)
            while decision is not None and (other := decision.of(self.plan)) is not decision:
                self.plan.release()
                decision, policy = other, other.policy
                self.plan = planned(policy)
            self.decision = decision
            return policy

        with watch.phase("plan", len(seq)):
            policy = judged(policy, decision)
            repair = store.repair
            lacks_records = repair is not None and repair.lacks_records(self.plan, policy)
            if lacks_records:
                self.plan.release()
                if decision is None:
                    policy = judged(policy.replace(repair="fronts"), None)
                elif without_records is None:
                    policy = judged(policy.replace(approximate=False), None)
                else:
                    policy = judged(without_records.policy, without_records)
        fresh = np.empty(0, dtype=np.int32)
        try:
            watch.planned(Planned(seq, self.plan, policy, session, moved_end, decision is None))
            fresh = store.allocate(self.plan.num_new_blocks, headroom)
            table = np.concatenate([self.plan.blocks, fresh])
            moves = self.plan.moves(table)
            with watch.phase("copy", int(moves["num_tokens"].sum())):
                store.pool.apply(moves, hops=most_hops(self.plan), items=self.plan.items)
                if repair is not None:
                    # The tokens that it chooses are computed over their copies.
                    repair.apply(self.plan, policy, seq, table, moves)
                    repair.counts.without_records += lacks_records
            # Copies and later writes run on one stream, in this order.
            self.plan.release_sources()
            store.ledger.begin(self, seq, table, source=self.plan, session=session)
        except BaseException:
            if self in store.ledger:
                # An interrupt after the last call: the ledger has the plan and the blocks.
                fresh = store.ledger.forget(self)
            else:
                self.plan.release()
            store.allocator.free(fresh)
            store.reclaim()
            raise

    @property
    def table(self) -> NDArray[np.int32]:
        return self._store.ledger.blocks(self)

    @property
    def num_held(self) -> int:
        if self._is_closed:
            return 0
        ledger = self._store.ledger
        return len(ledger.blocks(self)) - ledger.new_range(self)[0] // ledger.block_size

    @property
    def is_computed(self) -> bool:
        """Whether all tokens have KV, so that the next one can be picked."""
        return self._store.ledger.final_range(self)[1] == len(self._seq)

    def next_range(self, limit: int) -> tuple[int, int]:
        """The next tokens of a gap, or sampled ones, at most ``limit``."""
        return self.next_ranges(limit)[0]

    def next_ranges(self, limit: int) -> list[tuple[int, int]]:
        """The next tokens of gaps, or sampled ones, at most ``limit`` in all.

        Never empty: without missing tokens, an empty range at the end.
        """
        ranges = []
        for start, end in self._store.ledger.missing(self).tolist():
            ranges.append((start, min(end, start + limit)))
            limit -= ranges[-1][1] - start
            if limit == 0:
                break
        return ranges or [(len(self._seq), len(self._seq))]

    def issue(self, end: int) -> None:
        """Allocate blocks up to ``end``; `OutOfBlocksError` evicts nothing."""
        ledger = self._store.ledger
        wanted = -(-end // ledger.block_size) - len(ledger.blocks(self))
        if wanted > 0:
            fresh = self._store.allocate(wanted, 0)
            try:
                ledger.add_blocks(self, fresh)
            except BaseException:
                self._store.allocator.free(fresh)
                raise
        ledger.schedule(self, end - ledger.lookahead(self)[1])

    def advance(self, end: int) -> None:
        """Record what is computed, and share full blocks."""
        ledger = self._store.ledger
        ledger.confirm(self, end)
        start, end = ledger.new_range(self)
        if end - start >= ledger.block_size:
            with self._watch.phase("insert", end - start):
                done = ledger.commit(self, self._store.index)
            self._store.allocator.free(done.duplicates)
            self._store.allocator.free(done.freed)

    def append(self, ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Append final ids, which have no KV yet."""
        self._store.ledger.append(self, ids)

    def close(self) -> None:
        """Insert what is computed and free the rest, on finish, abort and preemption alike."""
        if self._is_closed:
            return
        self._is_closed = True
        store = self._store
        try:
            start, end = store.ledger.new_range(self)
            with self._watch.phase("insert", end - start):
                done = store.ledger.finish(self, store.index)
        except BaseException:
            # A failed call has inserted nothing: the blocks are still held.
            store.allocator.free(store.ledger.forget(self))
            raise
        else:
            store.allocator.free(done.duplicates)
            store.allocator.free(done.freed)
            store.allocator.free(done.surplus)
        finally:
            store.reclaim()
