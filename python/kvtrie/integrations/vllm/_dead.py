"""Thoughts whose turn is over: vLLM takes their blocks first when it needs some.

A chat template deletes thoughts of earlier turns, so nobody asks for their KV again; but vLLM
caches it like any other, and evicts it after the prompts and answers that were used longer ago.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtrie.tags import TurnPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvtrie._core import TokenSequence
    from kvtrie.integrations.vllm._sources import Sources
    from kvtrie.integrations.vllm._stats import Counts
    from kvtrie.integrations.vllm._tags import Reading

# A block that is still in use after so many looks belongs to somebody else as well.
_MAX_LOOKS: Final = 8


class DeadThinking:
    """Puts blocks of dead thoughts to the head of vLLM's free queue.

    A block keeps its hash until vLLM hands it out, so whoever asks for the thought before that
    still finds it. Blocks that other conversations go on from, and blocks in use, stay where they
    are.

    Args:
        pool: vLLM's block pool.
        sources: What is known of its blocks.
        block_size: Tokens of a block.
        counts: Where to count.
    """

    def __init__(self, pool: BlockPool, sources: Sources, block_size: int, counts: Counts) -> None:
        self._pool = pool
        self._sources = sources
        self._block_size = block_size
        self._counts = counts
        self._policy = TurnPolicy()
        # vLLM frees a request's blocks after it has told of its end: they wait here for that.
        self._waiting: dict[int, tuple[KVCacheBlock, bytes, int]] = {}

    def close(self, seq: TokenSequence, reading: Reading, block_ids: Sequence[int]) -> None:
        """A request has ended, and maybe its turn.

        Args:
            seq: Its tokens.
            reading: What they are; it has been told of the end.
            block_ids: Its blocks, the one of position 0 first.
        """
        ranges = self._policy.decide(reading.stream).evict_first
        if not ranges:
            return
        gone, kept = self._sources.remove(seq, ranges)
        numbers = set(gone)
        for start, end in ranges:
            first = -(-start // self._block_size)
            numbers.update(block_ids[first : max(first, end // self._block_size)])
        for block in self._sources.blocks(sorted(numbers.difference(kept))):
            if block.block_hash is not None and not block.is_null:
                self._waiting[block.block_id] = (block, block.block_hash, 0)

    def settle(self) -> None:
        """Offer what vLLM has freed meanwhile."""
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
        # The last of a thought goes first: what is left of it is then a prefix that can be found.
        queue.prepend_n(ready[::-1])
        if ready:
            self._counts.add("blocks_dead", len(ready))
