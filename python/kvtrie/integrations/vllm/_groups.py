"""The other groups of KV blocks of a model, next to the group that is indexed.

vLLM keeps one pool of blocks and a table per group. A block of any group is cached under the hash
of all tokens up to its end and the number of its group, so the hash of a block of full attention
names those that other groups keep at the same place. A table of a window does not: blocks before
the window have left it, and are free and cached, if vLLM caches windows there at all
(``prefix_cache_retention_interval``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtrie.integrations.vllm._vllm import (
    MambaSpec,
    SlidingWindowSpec,
    get_block_hash,
    resolve_block_hashes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class OtherGroups:
    """Finds the blocks of all groups but one.

    Args:
        manager: vLLM's cache manager.
        kv_cache_config: The groups of KV blocks.
        group: The group that is indexed.
    """

    def __init__(self, manager: KVCacheManager, kv_cache_config: KVCacheConfig, group: int) -> None:
        groups = kv_cache_config.kv_cache_groups
        self._pool = manager.block_pool
        self._coordinator = manager.coordinator
        self._others = [at for at in range(len(groups)) if at != group]
        self._block_size = groups[group].kv_cache_spec.block_size
        # Groups with a block at each place that the indexed group has one at.
        self._same = [
            at for at in self._others if groups[at].kv_cache_spec.block_size == self._block_size
        ]
        self.num_per_hit = 0
        """The most blocks of windows and states that vLLM needs where a prompt continues."""
        for at in self._others:
            spec = groups[at].kv_cache_spec
            if isinstance(spec, SlidingWindowSpec):
                self.num_per_hit += -(-(spec.sliding_window - 1) // spec.block_size)
            elif isinstance(spec, MambaSpec):
                self.num_per_hit += 1

    def __bool__(self) -> bool:
        return bool(self._others)

    def at(
        self, request: Request, tables: Sequence[Sequence[int]], places: Sequence[int]
    ) -> set[int]:
        """The blocks at places of a request, by their number: those it has, and those it had."""
        hashes = resolve_block_hashes(
            request.block_hashes, self._pool.hash_block_size, self._block_size
        )
        found = set[int]()
        for group in self._same:
            table = tables[group]
            for place in places:
                if place >= len(hashes):
                    break
                blocks = list(self._pool.get_cached_block(hashes[place], [group]) or ())
                if place < len(table):
                    # Another one with the same tokens. A table of states has them elsewhere, too.
                    mine = self._pool.blocks[table[place]]
                    is_same = mine.block_hash and get_block_hash(mine.block_hash) == hashes[place]
                    blocks += [mine] if is_same else []
                found.update(block.block_id for block in blocks)
        return found

    def continuing(self, request: Request, num_blocks: int) -> list[int]:
        """What vLLM needs to continue a prompt after so many blocks, or the deepest before.

        Of full attention, only what is after the first blocks in other groups.
        """
        if not num_blocks:
            return []
        num_tokens = num_blocks * self._block_size
        hashes = request.block_hashes[: num_tokens // self._pool.hash_block_size]
        most = min(num_tokens, len(hashes) * self._pool.hash_block_size)
        tables, _, _ = self._coordinator.find_longest_cache_hit(hashes, most)
        return [
            block.block_id for group in self._others for block in tables[group] if not block.is_null
        ]
