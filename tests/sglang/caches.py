"""The cache and SGLang's own, without an engine: pools that count, and requests that hold pages."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvtrie.integrations.sglang.cache import KvtrieCache

if TYPE_CHECKING:
    from collections.abc import Sequence


class Pool:
    """Slots by page; page 0 is never given out. A page that is freed twice is an error."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.device = "cpu"
        self.page_size = page_size
        self.size = num_pages * page_size
        self.free = list(range(1, num_pages + 1))

    def alloc(self, num_pages: int) -> torch.Tensor:
        pages = torch.tensor([self.free.pop() for _ in range(num_pages)], dtype=torch.int64)
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        assert start_pos % self.page_size == 0
        pages = slots[:: self.page_size] // self.page_size
        whole = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        assert torch.equal(whole, slots)
        assert not set(pages.tolist()) & set(self.free)
        self.free += pages.tolist()


def params(pool: Pool, events: bool = False) -> CacheInitParams:
    return CacheInitParams(
        enable_kv_cache_events=events,
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=pool,
        page_size=pool.page_size,
    )


def mine(pool: Pool, events: bool = False) -> KvtrieCache:
    return KvtrieCache(params(pool, events), pool.size // pool.page_size, "model")


def theirs(pool: Pool, events: bool = False) -> RadixCache:
    return RadixCache(params(pool, events))


def key(ids: Sequence[int], extra: str | None = None, salt: str | None = None) -> RadixKey:
    return RadixKey(array("q", ids), extra, cache_salt=salt)


class Side:
    """A cache with its pool."""

    def __init__(self, cache: Any, pool: Pool) -> None:
        self.cache, self.pool = cache, pool

    def match(self, *args: Any) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=key(*args)))

    def insert(self, ids: Sequence[int], *space: Any) -> int:
        """Insert one page after another, as whole leaves are what SGLang's own cache evicts."""
        size = self.pool.page_size
        known = 0
        for end in range(size, len(ids) // size * size + 1, size):
            found = self.match(ids[:end], *space)
            if found.device_prefix_len >= end:
                known = end
                continue
            slots = torch.cat(
                [self.cache.path_device_indices(found.last_device_node), self.pool.alloc(1)]
            )
            done = self.cache.insert(InsertParams(key=key(ids[:end], *space), value=slots))
            assert done.prefix_len == end - size
        return known

    def evict(self, num_tokens: int) -> int:
        done: int = self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted
        return done
