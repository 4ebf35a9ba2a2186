"""The blocks of vLLM's pool that kvtrie knows: weak references, validated before use."""

from __future__ import annotations

from itertools import compress, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from kvtrie._core import COMPUTED, BlockInUseError, RadixIndex
from kvtrie.integrations._served import LEAST_RUN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvtrie._core import (
        ComputedSource,
        Imported,
        ReusePlan,
        ReusePolicy,
        Span,
        TokenSequence,
    )
    from kvtrie.integrations._filled_plan import FilledPlan

# A number of blocks, and the source of their KV.
Stretch = tuple[int, "ComputedSource | Imported"]

_BLOCK_ID: Final = attrgetter("block_id")

# Each round forgets all stale blocks that it met; another round finds more only after these.
_MAX_ROUNDS: Final = 4


class Sources:
    """An index over blocks that vLLM owns and has cached.

    A block is known with the hash that vLLM cached it under. It may be copied from while the pool
    has not handed it out again, which vLLM reports (``unpin_blocks(on_reuse=)``), and while it
    still has that hash. The caller that copies pins. ``policy`` is the widest of any plan.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, policy: ReusePolicy, *, seed: int | None = None
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._index = RadixIndex(
            num_blocks=pool.num_gpu_blocks,
            block_size=block_size,
            min_run=policy.min_run or LEAST_RUN,
            moved_runs=policy.approximate,
            seed=seed,
        )
        self._hashes: dict[int, bytes] = {}
        # Blocks that the pool has handed out again, which it says while it allocates, and ids that
        # the index is to lose. Both are settled before anything is read.
        self._reused: list[KVCacheBlock] = []
        self._gone: list[int] = []
        self.num_stale = 0
        self.num_changes = 0

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; their ids are below it."""
        found: int = self._pool.num_gpu_blocks
        return found

    def __len__(self) -> int:
        self._settle()
        return len(self._hashes)

    @property
    def index(self) -> RadixIndex:
        """The index, without the blocks that the pool has handed out."""
        if self._reused or self._gone:
            self._settle()
        return self._index

    @property
    def has_approximate(self) -> bool:
        return self.index.num_approximate > 0

    def offer(
        self,
        seq: TokenSequence,
        block_ids: Sequence[int],
        stretches: Sequence[Stretch],
        *,
        spans: Iterable[Span] = (),
        session: str | None = None,
    ) -> None:
        """Index the blocks that hold KV of a sequence, up to the first that vLLM has not cached.

        ``block_ids`` is vLLM's table from position 0; ``stretches`` covers the written blocks.
        """
        ids = block_ids[: sum([count for count, _ in stretches])]
        # Blocks that the index already has need no work.
        known = self.index.lookup(seq, touch=False).blocks.tolist()
        start = _num_equal(known, ids) if known else 0
        records, hashes = self._pool.blocks, self._hashes
        found: dict[int, bytes] = {}
        replaced = []
        for number in ids[start:]:
            block = records[number]
            block_hash = block.block_hash
            if not block_hash or block.is_null:
                break
            found[number] = block_hash
            if hashes.get(number, block_hash) != block_hash:
                # The index has it elsewhere.
                replaced.append(number)
        if replaced:
            self.forget(replaced)
        end, first = start + len(found), 0
        if session is not None and start and not found:
            # All are known, perhaps from other conversations.
            self._take(seq, [], found, start, COMPUTED, session)
        for count, source in stretches if found else ():
            last = min(first + count, end)
            if start < last:
                self._take(seq, ids[start:last], found, start, source, session)
                start = last
            first += count
        spans = list(spans)
        if spans:
            self.num_changes += 1
            self.index.tag(seq, spans)

    def _take(
        self,
        seq: TokenSequence,
        ids: Sequence[int],
        found: Mapping[int, bytes],
        start: int,
        source: ComputedSource | Imported,
        session: str | None,
    ) -> None:
        """Insert blocks that follow each other in a sequence; ``found`` has their hashes."""
        hashes = self._hashes
        self.num_changes += 1
        try:
            done = self.index.insert(
                seq,
                np.array(ids, np.int32),
                num_computed=(start + len(ids)) * self._block_size,
                start=start * self._block_size,
                source=source,
                session=session,
            )
        except BlockInUseError:
            if not seq.items:
                raise
            # vLLM's hash of a block has an image's identifier and place, and not its length. So it
            # may share a block that the index has of an image of another length.
            return
        for number in done.freed.tolist():
            hashes.pop(number, None)
        backing = done.blocks.tolist()
        if backing != ids:
            ids = [number for number, now in zip(ids, backing, strict=False) if number == now]
        if len(ids) == len(found):
            hashes.update(found)
        else:
            hashes.update({number: found[number] for number in ids})
        blocks = self.blocks(ids)
        # Take and return a reference at once: the pool then reports when it hands the block out.
        self._pool.touch(blocks)
        self._pool.unpin_blocks(blocks, on_reuse=self._reused.append)

    def plan(
        self,
        seq: TokenSequence,
        policy: ReusePolicy,
        session: str | None = None,
        moved_end: int | None = None,
    ) -> ReusePlan | None:
        """A plan whose blocks may all be read now; None if blocks keep leaving."""
        for _ in range(_MAX_ROUNDS):
            plan = self.index.plan(
                seq, policy, keep_last=1, pin=False, session=session, moved_end=moved_end
            )
            if not plan.num_exact and not plan.num_approximate:
                # It uses no block.
                return plan
            stale = [number for number in used_by(plan) if self.is_stale(number)]
            if not stale:
                return plan
            plan.release()
            self.num_stale += len(stale)
            self.forget(stale)
        return None

    def has_all(self, numbers: Iterable[int]) -> bool:
        """Whether all these blocks may be read now."""
        self._settle()
        return not any(self.is_stale(number) for number in numbers)

    def forget(self, numbers: Iterable[int]) -> None:
        """Index these blocks no more."""
        ids = list(numbers)
        self._gone += compress(ids, map(self._hashes.pop, ids, repeat(None)))

    def reset(self) -> None:
        self._index.reset()
        self._hashes.clear()
        self._reused.clear()
        self._gone.clear()

    def remove(
        self, seq: TokenSequence, ranges: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[int]]:
        """Forget the blocks wholly inside ranges of a sequence.

        Returns:
            The ids of forgotten blocks, and of blocks that other sequences continue from.
        """
        done = self.index.remove_spans(seq, ranges)
        gone = [*done.freed.tolist(), *done.condemned.tolist()]
        for number in (*gone, *self.index.take_freed().tolist()):
            self._hashes.pop(number, None)
        return gone, done.kept.tolist()

    def blocks(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        records = self._pool.blocks
        return [records[number] for number in block_ids]

    def hash_of(self, number: int) -> bytes | None:
        """The hash that vLLM cached a known block under; None for others."""
        self._settle()
        return self._hashes.get(number)

    def is_stale(self, number: int) -> bool:
        known = self._hashes.get(number)
        return known is None or known != self._pool.blocks[number].block_hash

    def _settle(self) -> None:
        if self._reused:
            self.forget(map(_BLOCK_ID, self._reused))
            self._reused.clear()
        if not self._gone:
            return
        gone, self._gone = self._gone, []
        self._index.discard(gone)
        # Blocks below may have left too; a waiting id is not indexed again.
        for number in self._index.take_freed().tolist():
            self._hashes.pop(number, None)


def used_by(plan: ReusePlan | FilledPlan) -> list[int]:
    """The blocks that a plan uses in place or copies from, each once, those of the prefix first."""
    return list(dict.fromkeys([*plan.blocks.tolist(), *plan.source_blocks.tolist()]))


def _num_equal(ones: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    num = min(len(ones), len(others))
    if ones[:num] == others[:num]:
        return num
    return next((at for at in range(num) if ones[at] != others[at]), num)
