"""Which cached blocks vLLM keeps longer, in exact mode: the order of its free queue.

vLLM evicts the block that has been free longest. Where agents take turns and their histories do not
fit together, that is always the one that is needed next. So some blocks get passes: when such a
block comes near the head of the queue, it goes back to the tail, and has one pass less. vLLM then
evicts, in this order,

1. dead reasoning and what follows it in its turn (`DeadReasoning`): at once;
2. blocks without passes, the longest free first, as in vLLM: ended turns, and what found no room;
3. conversations inside a tool loop, which come back within seconds: the blocks of one get passes as
   far as there is room, its first ones first, and keep them until its turn ends;
4. what other requests have begun with too, by a hit on it: system prompt and tools, which get twice
   as many passes, again with each request that begins so.

Room for the third is `LOOPS` of the pool, for the third and the fourth together `KEPT`. The rest is
vLLM's. So some agents find everything and the others nothing, rather than none anything. Where
requests say which conversation they belong to, one that leaves its old path takes the passes from
what only that path has; and what it shares with another one inside a tool loop stays when its turn
ends, without which the rest of that path would be of no use.

Where a model has other groups of blocks, windows and states, vLLM continues a prompt only where all
of them have what it needs. So what they have at the deepest such place goes with the blocks that
are kept, and what they have elsewhere does not.

Nothing is pinned. All these blocks are in the queue and free, and no request waits for room that it
had without this. A conversation that never comes back is gone after `PASSES` laps of the rest, a
system prompt that nobody has any more after `HEADS`.

The cost: a step that has used up the blocks looked at so far looks from the head on until it has
found twice as many without passes as a step can take. A block without a pass is looked at about
once per allocation, a block with passes once per lap.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray
    from vllm.v1.core.block_pool import BlockPool

    from kvtrie.integrations.vllm._stats import Counts

PASSES: Final = 32
"""Laps that a block of a conversation inside a tool loop stays longer, at most."""
HEADS: Final = 2 * PASSES
"""Laps that a block of a system prompt stays longer, at most."""
LOOPS: Final = 0.6
"""Part of the pool for conversations inside tool loops."""
KEPT: Final = 0.7
"""Part of the pool for these and what requests begin with."""

MAX_SESSIONS: Final = 1024
"""Conversations inside tool loops whose blocks are known by their id."""


class Retention:
    """Gives blocks of vLLM's free queue another pass.

    Args:
        pool: vLLM's pool.
        per_step: The most blocks that one step takes.
        counts: Where passes are counted.
    """

    def __init__(self, pool: BlockPool, per_step: int, counts: Counts) -> None:
        self._pool = pool
        self._counts = counts
        self._passes = np.zeros(pool.num_gpu_blocks, np.int8)
        # The block before each one that is kept, in the path of a conversation with an id. Without
        # an id nobody says that a path was left: it would hold its beginning for all its passes.
        self._before = np.full(pool.num_gpu_blocks, -1, np.int32)
        # Blocks that no step has looked at are left in a small pool too.
        self._per_step = min(per_step, pool.num_gpu_blocks // 8)
        # The blocks with passes of each conversation, the latest one last.
        self._kept: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        # Blocks at the head of the queue that have no pass left, by the last look.
        self._num_clear = 0.0

    def keep(
        self,
        block_ids: Sequence[int],
        num_shared: int,
        *,
        loops: bool,
        session: str | None = None,
        others: Collection[int] = (),
        per_place: int = 1,
        spare: int = 0,
    ) -> int:
        """Give passes to a request's blocks, as far as there is room, and take old ones.

        Args:
            block_ids: Its table.
            num_shared: Blocks at its begin that others have begun with too.
            loops: Whether it is inside a tool loop.
            session: The id of its conversation.
            others: The blocks of other groups at the same places, which lose their passes.
            per_place: Blocks that are kept with each of its table, itself included.
            spare: Further blocks that will be kept.

        Returns:
            How many blocks of its table, from the first on, have passes. `keep_with` gives some to
            the blocks of other groups that are kept with these.
        """
        ids, passes = np.array(block_ids, np.int32), self._passes
        before = self._kept.pop(session, None) if session is not None else None
        # A helper with a prompt of its own may have the same id.
        if before is not None and np.array_equal(before[num_shared:][:1], ids[num_shared:][:1]):
            passes[before[num_shared:]] = 0
        had = passes[ids]
        passes[ids] = 0
        passes[list(others)] = 0
        had[self._num_needed(ids) if self._kept else 0 :] = 0
        free = len(passes) * KEPT - np.count_nonzero(passes) - np.count_nonzero(had) - spare
        # How many blocks without passes the first ones have.
        fresh = np.cumsum(had == 0)
        shared = min(num_shared, int(np.searchsorted(fresh, free / per_place, "right")))
        room = (free - len(passes) * (KEPT - LOOPS)) / per_place
        num_kept = int(np.searchsorted(fresh, room, "right")) if loops else 0
        kept = ids[: max(shared, num_kept)]
        passes[kept] = PASSES
        passes[ids[:shared]] = HEADS
        passes[ids] = np.maximum(passes[ids], had)
        self._before[kept] = -1
        if loops and session is not None:
            self._before[kept[1:]] = kept[:-1]
            self._kept[session] = kept
            if len(self._kept) > MAX_SESSIONS:
                self._kept.popitem(last=False)
        return len(kept)

    def _num_needed(self, ids: NDArray[np.int32]) -> int:
        """How many blocks of a table, from the first on, begin paths of others that are kept."""
        # The last one is for blocks of which nothing is known.
        is_before = np.zeros(len(self._passes) + 1, bool)
        is_before[self._before[np.flatnonzero(self._passes)]] = True
        found = np.flatnonzero(is_before[ids])
        return int(found[-1]) + 1 if len(found) else 0

    def keep_with(
        self, block_ids: Collection[int], session: str | None = None, *, passes: int = PASSES
    ) -> None:
        """Give passes to what is of use with the blocks that `keep` has just kept."""
        ids = np.array(sorted(block_ids), np.int32)
        self._passes[ids] = passes
        self._before[ids] = -1
        if session is not None and session in self._kept:
            self._kept[session] = np.concatenate([self._kept[session], ids])

    def forget(self, block_ids: Sequence[int]) -> None:
        self._passes[np.asarray(block_ids, np.int64)] = 0

    def took(self, num_blocks: float) -> None:
        """VLLM has taken about so many blocks from the queue."""
        self._num_clear -= num_blocks

    def look(self) -> None:
        """Send blocks with passes from the head of the queue to its tail, if a step may take them.

        Their order stays: the last block of a request is evicted before those it continues.
        """
        if self._num_clear >= self._per_step:
            return
        queue, passes = self._pool.free_block_queue, self._passes
        again = []
        num_clear, block = 0, queue.fake_free_list_head.next_free_block
        for _ in range(queue.num_free_blocks):
            if num_clear >= 2 * self._per_step or block is None:
                break
            if passes[block.block_id] and block.block_hash is not None:
                passes[block.block_id] -= 1
                again.append(block)
            else:
                num_clear += 1
            block = block.next_free_block
        # Where few are left without a pass, looking at every step would use passes up for nothing.
        self._num_clear = max(num_clear, 1.5 * self._per_step)
        for one in again:
            queue.remove(one)
        queue.append_n(again)
        if again:
            self._counts.add("blocks_kept", len(again))
