"""Dead reasoning: vLLM evicts the blocks of finished turns' reasoning first.

Without this it would evict older prompts and answers before them. Where nothing moves, what follows
the reasoning is dead with it (``and_after``): the next prompt has these tokens after others.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvtrie.integrations.vllm._vllm import get_block_hash
from kvtrie.tags import TurnPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvtrie._core import TokenSequence
    from kvtrie.integrations.vllm._sources import Sources
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.integrations.vllm._tags import Reading

# A block in use after this many checks is shared with other requests.
_MAX_LOOKS: Final = 8
# Half a megabyte.
_MAX_RECENT: Final = 4096


class DeadReasoning:
    """Moves blocks of dead reasoning to the head of vLLM's free queue.

    A block keeps its hash and can be found until vLLM hands it out. Blocks in use and blocks that
    other conversations continue from stay where they are.
    """

    def __init__(
        self,
        pool: BlockPool,
        sources: Sources,
        block_size: int,
        counts: Counts,
        *,
        and_after: bool = False,
    ) -> None:
        self._pool = pool
        self._sources = sources
        self._block_size = block_size
        self._counts = counts
        self._and_after = and_after
        self._policy = TurnPolicy()
        # vLLM frees a request's blocks after it has reported its end: they wait here until then.
        self._waiting: dict[int, tuple[KVCacheBlock, bytes, int]] = {}
        self._recent: OrderedDict[bytes, None] = OrderedDict()

    def close(
        self,
        seq: TokenSequence,
        reading: Reading,
        block_ids: Sequence[int],
        others: Callable[[Sequence[int]], Iterable[int]] | None = None,
    ) -> list[int]:
        """Find what is dead; ``others``: the blocks of other groups at numbers of blocks."""
        ranges = self._policy.decide(reading.stream).evict_first
        if ranges and self._and_after:
            ranges = ((ranges[0][0], len(seq)),)
        return self.drop(seq, ranges, block_ids, others)

    def drop(
        self,
        seq: TokenSequence,
        ranges: Sequence[tuple[int, int]],
        block_ids: Sequence[int],
        others: Callable[[Sequence[int]], Iterable[int]] | None = None,
    ) -> list[int]:
        """Let the blocks wholly inside ranges of a sequence be evicted first; returns their ids."""
        if not ranges:
            return []
        gone, needed = self._sources.remove(seq, ranges)
        numbers, kept = set(gone), set(needed)
        for start, end in ranges:
            first = -(-start // self._block_size)
            inside = range(first, min(end // self._block_size, len(block_ids)))
            numbers.update(block_ids[at] for at in inside)
            if others is not None:
                numbers.update(others([at for at in inside if block_ids[at] not in kept]))
        dead = sorted(numbers.difference(kept))
        for block in self._sources.blocks(dead):
            if block.block_hash is not None and not block.is_null:
                self._waiting[block.block_id] = (block, block.block_hash, 0)
        return dead

    def settle(self) -> None:
        """Move what vLLM has freed meanwhile."""
        if not self._waiting:
            return
        ready = []
        for number, (block, known, looks) in list(self._waiting.items()):
            if block.block_hash == known and block.ref_cnt > 0 and looks < _MAX_LOOKS:
                self._waiting[number] = (block, known, looks + 1)
                continue
            del self._waiting[number]
            if block.block_hash == known and block.ref_cnt == 0:
                ready.append(block)
        queue = self._pool.free_block_queue
        for block in ready:
            queue.remove(block)
        # The last block of a span is taken first, so that the rest remains a findable prefix.
        queue.prepend_n(ready[::-1])
        if ready:
            self._counts.add("blocks_dead", len(ready))
        for block in ready:
            if block.block_hash is not None:
                self._recent[get_block_hash(block.block_hash)] = None
        while len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)

    def was_dead(self, block_hash: bytes) -> bool:
        """Whether the block with vLLM's hash is one of the latest that were evicted first."""
        return block_hash in self._recent
